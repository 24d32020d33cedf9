"""Implements DataLoader(cache=): what is kept of a dataset's samples, and how workers read it.

A dataset divides a sample by three methods. ``read(i)`` returns what lies in storage, ``decode(raw, i)`` is the
deterministic rest, and ``augment(value, i)`` is random and runs every time. Its ``__getitem__(i)`` returns
``augment(decode(read(i), i), i)``, so a loader without cache makes the same samples.

The trainer makes a Through, which travels to workers. There it puts readers in the place of the datasets whose
samples it knows, inside Subset and ConcatDataset, too. The program's own dataset objects stay as they are.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from ..dataset_calls import attribute, fetches_batches, offered, parts_of
from ..ops import VolumeDataset
from .cache import REMOVED, Cache, DataSet, _data_set
from .depends import attributes_of, generators_of
from .memoize import seeded
from .order import Following, Keys, share_of
from .readers import (
    PROTOCOL, Folder, MadeOf, Parts, Reader, _decoded, has_room, is_folder, size_for, spread,
)  # fmt: skip
from .volumes import Volumes

if TYPE_CHECKING:
    from .._cache import Store

log = logging.getLogger("minato")

HELP = (
    "cache= needs a dataset that says which part of a sample is deterministic, and {name} {lacks}. "
    "Give it three methods: read(self, i) returns what lies in storage, decode(self, raw, i) is the "
    "deterministic rest, augment(self, value, i) is the random part; and let __getitem__(self, i) "
    "return self.augment(self.decode(self.read(i), i), i). (minato.ops.VolumeDataset and torchvision's "
    "ImageFolder and DatasetFolder need none of it.) Or leave out cache= and put "
    "@cache.memoize(key=...), of a minato.Cache, on the method that makes the deterministic part."
)

#: of a folder with loader=str, such as minato.ops.ImageFolder
PATHS = (
    "cache= keeps what the loader of a folder makes of a file, and that of {name} makes only paths: the transform "
    "reads the file and decodes the part that a sample shows. Leave out cache=; the system keeps the files in memory. "
    "To keep whole photos, use torchvision's ImageFolder with its own loader, and its transforms."
)


# ---- what the trainer decides ----------------------------------------------------------------


def _kind(dataset: Any) -> type[Reader] | None:
    """The class that reads a dataset, or None: minato does not know which part is deterministic."""
    if all(offered(dataset, name) is not None for name in PROTOCOL):
        return Parts
    if isinstance(dataset, VolumeDataset) and type(dataset).__getitem__ is VolumeDataset.__getitem__:
        return Volumes
    return Folder if is_folder(dataset) else None


def leaves(dataset: Any) -> list[Any]:
    """The datasets inside Subset and ConcatDataset, in their order."""
    return parts_of(dataset)[0]


def readable(dataset: Any) -> bool:
    """Whether a loader could read the dataset through a cache."""
    return all(_kind(leaf) is not None for leaf in leaves(dataset))


def check(dataset: Any, form: str | None) -> None:
    """Raises TypeError for a dataset that no Reader knows, ValueError for a form it has not."""
    for leaf in leaves(dataset):
        kind, name = _kind(leaf), type(leaf).__name__
        if kind is None:
            if attribute(leaf, "loader") is str:
                raise TypeError(PATHS.format(name=name))
            there = [name for name in PROTOCOL if offered(leaf, name) is not None]
            lacks = "does not say it"
            if there:
                missing = [name for name in PROTOCOL if name not in there]
                lacks = f"has {' and '.join(there)}, but no {' and no '.join(missing)}"
            raise TypeError(HELP.format(name=name, lacks=lacks))
        if kind is Parts and not _composes(leaf):
            raise TypeError(
                f"cache= calls augment(decode(read(i), i), i) in place of {name}.__getitem__(i), which "
                "does something else. Let __getitem__(self, i) return "
                "self.augment(self.decode(self.read(i), i), i), and nothing more."
            )
        if kind is Parts and fetches_batches(leaf):
            raise TypeError(
                f"cache= makes samples one by one, and {name} has __getitems__, which makes whole "
                "batches. Leave out one of the two."
            )
        forms = kind.forms_of(leaf)
        if form is not None and form not in forms:
            raise ValueError(
                f"cache_format={form!r} is not possible for {name}: the cache keeps its samples {forms[0]}. "
                "Leave it out."
            )
        if form is None and len(forms) > 1 and not hasattr(type(leaf), "__len__"):
            raise TypeError(
                f"{name} has no __len__, so minato cannot estimate whether its decoded samples fit "
                "into the cache. Give the loader cache_format='decoded' or cache_format='encoded'."
            )


def _composes(dataset: Any) -> bool:
    """Whether ``__getitem__(i)`` returns ``augment(decode(read(i), i), i)``. It is called on a stand-in of
    the dataset, whose three methods only note their arguments."""
    calls: list[tuple[Any, ...]] = []
    marks = [object(), object(), object()]

    def noted(number: int) -> Callable[..., Any]:
        def method(*args: Any) -> Any:
            calls.append(args)
            return marks[number]

        return method

    names = {**attributes_of(dataset), **{name: noted(n) for n, name in enumerate(PROTOCOL)}}
    try:
        cls = type(dataset)
        if not hasattr(dataset, "__dict__"):  # only slots
            cls = type(cls.__name__, (cls,), {})
        stand_in = object.__new__(cls)
        for name, value in names.items():
            object.__setattr__(stand_in, name, value)
        for index in spread(len(dataset) if hasattr(cls, "__len__") else 1):
            calls.clear()
            if stand_in[index] is not marks[2]:
                return False
            if calls != [(index,), (marks[0], index), (marks[1], index)]:
                return False
    except Exception:
        return False
    return True


def draws_of(dataset: Any, indices: list[int]) -> set[str]:
    """From which generators ``read`` and ``decode`` draw for these samples."""
    drawn: set[str] = set()
    find = parts_of(dataset)[1]
    for index in indices:
        number, inner = find(index)
        leaf = leaves(dataset)[number]
        if _kind(leaf) is Parts:
            name = f"read or decode of {type(leaf).__name__}, which a cache keeps"
            with seeded(bytes(16), generators_of(leaf), lambda one: drawn.add(f"{one} in {name}")):
                _decoded(leaf, inner)
    return drawn


def _key_words(dataset: Any) -> Iterator[int]:
    """Yields the keys of all samples of a dataset with readers, in their order."""
    if type(dataset) is ConcatDataset:
        for part in dataset.datasets:
            yield from _key_words(part)
    elif type(dataset) is Subset:
        words = list(_key_words(dataset.dataset))
        yield from (words[index] for index in dataset.indices)
    else:
        yield from dataset.key_words()


def made_of_all(found: list[Any]) -> list[MadeOf]:
    """What the values of leaves() depend on, as they are now."""
    return [cast("type[Reader]", _kind(leaf)).identity(leaf) for leaf in found]


class Through:
    """How workers read a dataset through a cache."""

    def __init__(self, cache: Cache, form: str | None, made_of: list[MadeOf], evicts: bool) -> None:
        self.cache = cache
        self.form = form
        self._made_of = made_of  # of each of leaves()
        self._evicts = evicts

    def over(self, dataset: Any, looks: bool = False) -> Any:
        """The dataset with readers in place of what it is made of. looks: it may have changed in this process."""
        made_of = made_of_all(leaves(dataset)) if looks else self._made_of
        return self._over(dataset, iter(made_of))

    def _over(self, dataset: Any, made_of: Iterator[MadeOf]) -> Any:
        kind_of_outer = type(dataset)
        if kind_of_outer is Subset or kind_of_outer is ConcatDataset:
            outer: Any = copy.copy(dataset)
            if kind_of_outer is Subset:
                outer.dataset = self._over(dataset.dataset, made_of)
            else:
                outer.datasets = [self._over(part, made_of) for part in dataset.datasets]
            return outer
        kind = _kind(dataset)
        assert kind is not None
        reader = kind(dataset, self.cache, self.form, next(made_of))
        if not self._evicts:
            reader.evict_nothing()
        return reader


class CacheOfLoader:
    """The cache of one loader, as its trainer sees it."""

    def __init__(self, given: Cache | int | str) -> None:
        self.given = given
        self.cache = given if isinstance(given, Cache) else Cache(given)
        self._made_of: list[MadeOf] = []
        self._over: Any = None  # the dataset, with readers
        self._readers: list[Reader] = []  # in it
        self._keys: Keys | None = None
        self._keys_made_of: list[MadeOf] = []
        self._before: dict[str, int] | None = None
        self._sizes_before = 0
        self._has_told = False

    def through(self, dataset: Any, form: str | None, evicts: bool) -> Through:
        """For the workers of an iterator that begins. evicts: values may take the place of others, while
        another job is attached. Opens the cache in this process, so that what
        workers of one epoch have made is there for those of the next."""
        found = leaves(dataset)
        made_of = made_of_all(found)
        if self.cache._name is None:
            data_set = _data_set_of(found[0])
            self.cache._of(data_set._replace(label=f"{data_set.label}, by {made_of[0][1].counted}"))
        self._tell_of_changes(made_of)
        through = Through(self.cache, form, made_of, evicts)
        self._over = through.over(dataset)
        self._readers = leaves(self._over)
        if made_of != self._keys_made_of:
            self._keys, self._keys_made_of = None, made_of
        store = self.cache._attached()
        if self._before is None and store is not None:
            self._sizes_before = self._known_sizes()
            self._before = store.stats()
        return through

    def keys(self) -> Keys | None:
        """The keys of all samples of the loader's dataset; None: their form is not decided yet."""
        if any(reader.form(make=False) is None for reader in self._readers):
            return None
        if self._keys is None:
            words = np.fromiter(_key_words(self._over), np.uint64)
            self._keys = Keys(words)
        return self._keys

    def follow(self, indices: np.ndarray) -> Following | None:
        """Follows the cache during an epoch of these indices. None unless another job is attached: a job that
        is alone reads no less with swaps."""
        store = self.cache._attached()
        stats = store.stats() if store is not None else {"jobs": 0}
        if store is None or stats["jobs"] < 2:
            return None
        keys = self.keys()
        if keys is None or int(indices.max()) >= len(keys.words):
            return None
        return Following(store, keys, indices, share_of(stats))

    def _tell_of_changes(self, made_of: list[MadeOf]) -> None:
        """Says once what cannot be compared, and what has changed since the last epoch, as values are then made
        again."""
        uncompared = [found.uncompared for pair in made_of for found in pair if found.uncompared is not None]
        if uncompared and self.cache.directory is not None and not self._made_of:
            log.warning(
                "minato.Cache cannot compare what the samples depend on: they use %s. Change cache_version whenever "
                "that object changes them.", uncompared[0],
            )  # fmt: skip
        for before, now in zip(self._made_of, made_of):
            changed = [name for name, part in now[1].parts.items() if before[1].parts.get(name) != part]
            if changed and not self._has_told:
                self._has_told = True
                log.warning(
                    "minato.Cache makes samples again, because what they depend on has changed since the last "
                    "epoch: %s. If samples do not depend on it, give the dataset a method cache_key(self, i).",
                    ", ".join(changed[:3]),
                )  # fmt: skip
        self._made_of = made_of

    def _known_sizes(self) -> int:
        return sum(reader.sizes(False) is not None for reader in self._readers)

    def stats(self) -> dict[str, Any]:
        """For ``DataLoader.stats()``; see docs/api.md."""
        store = self.cache._attached()
        if store is None:
            return {**NOTHING, "off": self.cache._off}
        now, before = store.stats(), self._before or {}
        since = {name: now[name] - before.get(name, 0) for name in _SINCE}
        # What was measured lies in the cache, too, and is no sample.
        since["stored"] -= self._known_sizes() - self._sizes_before
        return {**NOTHING, **since, **self._more(store, now, since),
                "saved": (now["saved_ns"] - before.get("saved_ns", 0)) / 1e9,
                "made": (now["made_ns"] - before.get("made_ns", 0)) / 1e9,
                "used": now["used_bytes"], "bytes": now["bytes"],
                "removed": REMOVED[now["removed"]],
                "processes": now["processes"], "jobs": now["jobs"]}  # fmt: skip

    def _more(self, store: Store, now: dict[str, int], since: dict[str, int]) -> dict[str, Any]:
        """Which form, and what more memory would bring."""
        forms = {reader.form(make=False) for reader in self._readers}
        sizes = [reader.sizes(False) for reader in self._readers]
        told: dict[str, Any] = {"form": forms.pop() if len(forms) == 1 else None}
        told["counted"] = "; ".join(dict.fromkeys(made_of[1].counted for made_of in self._made_of))
        for form in ("decoded", "encoded"):
            known = [one[form] for one in sizes if one is not None and one[form] is not None]
            told[form] = sum(filter(None, known)) if len(known) == len(sizes) else None
        need = told[told["form"]] if told["form"] is not None else None
        if need is not None:
            count = sum(one["values"] or 0 for one in sizes if one is not None)
            each, made = need / max(1, count), now["made_ns"] / 1e9 / max(1, now["misses"])
            fits = not need or has_room(now, count, each)
            told["lacking"] = lacking = 0 if fits else int(size_for(count, each)) - now["bytes"]
            told["would_save"] = lacking / need * count * made if lacking else 0.0
        return told


#: counts since the loader's first iterator
_SINCE = ("hits", "misses", "stored", "refused", "hit_bytes", "stored_bytes")
NOTHING: dict[str, Any] = {
    **dict.fromkeys(_SINCE, 0), "saved": 0.0, "made": 0.0, "used": 0, "bytes": 0, "processes": 0,
    "jobs": 0, "form": None, "decoded": None, "encoded": None, "lacking": None, "would_save": None,
    "off": None, "removed": None, "counted": None,
}  # fmt: skip


def _data_set_of(leaf: Any) -> DataSet:
    """Identifies it by the program's class, as memoize() does by the function; of a dataset of a
    library, by the folder that its files lie in."""
    function = getattr(type(leaf), PROTOCOL[0], None)
    if function is not None:
        return _data_set(inspect.unwrap(function))
    root = attribute(leaf, "root") or os.path.dirname(leaf.cases[0][0])
    place = os.path.realpath(os.fspath(root))
    digest = hashlib.blake2b(place.encode(), digest_size=8).hexdigest()
    return DataSet(digest, f"files in {place}")
