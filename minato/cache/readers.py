"""Reads one dataset through a cache: a reader for each kind of dataset, and which form of a sample a cache
keeps. (``volumes.py`` has the reader of ops.VolumeDataset.)"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .._not_linux import CORE
from ..dataset_calls import attribute, offered
from ..text import sized
from . import values
from .cache import Cache
from .depends import Depends, Found, Unknown, of_methods, surroundings, version
from .memoize import Memoized, _digest

if CORE:
    from .. import _cache

log = logging.getLogger("minato")

PROTOCOL = ("read", "decode", "augment")

#: what the encoded and the decoded values of a dataset depend on
MadeOf = tuple[Found, Found]
#: of values that depend on their key alone
NOTHING_ELSE = Found(b"", "", {})
#: samples that are made to estimate what all of them take
MEASURED = 4


def _sizes(reader: Reader) -> dict[str, int | None]:
    return reader.measure()


class Reader:
    """One dataset, read through the cache; each kind of dataset has its own class.

    Attributes:
        count: samples of the dataset, 0: not known
    """

    def __init__(self, dataset: Any, cache: Cache, form: str | None, made_of: MadeOf) -> None:
        if cache.directory is not None and attribute(dataset, "cache_version") is None:
            raise TypeError(
                f"{type(dataset).__name__} needs an attribute cache_version, because its samples outlive the "
                f"program in {cache.directory}. Write cache_version = 1; change it whenever they change "
                "for a reason that minato cannot detect"
            )
        self.dataset = dataset
        self.cache = cache
        self._made_of = made_of
        try:
            self.count = len(dataset)
        except (TypeError, NotImplementedError):
            self.count = 0
        forms = self.forms_of(dataset)
        self._form = form if len(forms) > 1 else forms[0]
        self._all_memoized: list[Memoized] = []
        self._memo_of_sizes = self.memoized(
            _sizes, "len", lambda _self: self.count, code=made_of[0].digest + made_of[1].digest
        )
        self._memo_of_sizes.tells = False  # what it calls is told by name

    @classmethod
    def forms_of(cls, dataset: Any) -> tuple[str, ...]:
        """Returns the forms in which its samples can be kept."""
        return "decoded", "encoded"

    @classmethod
    def identity(cls, dataset: Any) -> MadeOf:
        """Returns what its values depend on besides their keys and files."""
        return NOTHING_ELSE, NOTHING_ELSE

    def memoized(
        self, function: Any, name: str, key: Callable[..., Any], files: Any = None, code: bytes = b""
    ) -> Memoized:
        """A function whose values are kept; name: of the dataset's method, for messages. code: what its
        values depend on besides key and files."""
        of_user = attribute(self.dataset, "cache_version")
        code = type(self).__name__.encode() + name.encode() + surroundings() + code
        memoized = Memoized(self.cache, function, key, files, "epoch", of_user, code)
        memoized.name = f"{type(self.dataset).__qualname__}.{name}()"
        self._all_memoized.append(memoized)
        return memoized

    def evict_nothing(self) -> None:
        """From now on no value takes the place of another one."""
        for memoized in self._all_memoized:
            memoized.evicts = False

    # ---- which form ----------------------------------------------------------------------

    def sizes(self, make: bool) -> dict[str, int | None] | None:
        """Bytes that all samples take in each form, as the first process that asked has measured;
        None: no process has."""
        store, memo = self.cache._attached(), self._memo_of_sizes
        if store is None:
            return None
        digest = _digest(key := memo.key((self,), {}))
        found, value = memo._look(store, digest, False, None)
        if not found and make:
            value = memo._miss(store, key, (), (self,), {}, None)
        return value  # type: ignore[no-any-return]

    def measure(self) -> dict[str, int | None]:
        """An estimate from a few samples. Samples that cannot be made count for nothing."""
        sizes: list[tuple[int | None, int | None]] = []
        for index in spread(self.count):
            with contextlib.suppress(Exception):
                sizes.append(self.sizes_of(index))
        found = estimate(sizes, self.count)
        store = self.cache._attached()
        if store is not None and sizes:
            _tell(type(self.dataset).__name__, found, store.stats())
        return found

    def sizes_of(self, index: int) -> tuple[int | None, int | None]:
        """Returns the bytes of a sample, encoded and decoded; None: a cache cannot store it."""
        raise NotImplementedError

    def form(self, make: bool = True) -> str | None:
        """"decoded" if all samples fit so, else "encoded"; None: not decided yet."""
        if self._form is None:
            store = self.cache._attached()
            sizes = self.sizes(make)
            if store is None or sizes is None:
                return "decoded" if store is None else None
            decided = decide(sizes, store.stats())
            self._form = decided
        return self._form

    def key_words(self) -> Iterator[int]:
        """The first eight bytes of the digest of each sample's value, found without reading anything;
        the form is decided."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError


def decide(sizes: dict[str, int | None], stats: dict[str, int]) -> str:
    """The form in which a cache keeps samples of these sizes."""
    decoded, encoded = sizes["decoded"], sizes["encoded"]
    if encoded is None or decoded is None:
        return "encoded" if encoded is not None else "decoded"
    largest: Any = sizes["largest"]
    count: Any = sizes["values"]
    fits = has_room(stats, count, decoded / max(1, count)) and largest <= stats["largest"]
    return "decoded" if fits or decoded <= encoded else "encoded"


def _tell(name: str, sizes: dict[str, int | None], stats: dict[str, int]) -> None:
    form = decide(sizes, stats)
    decoded, encoded = sizes["decoded"], sizes["encoded"]
    if decoded is None or encoded is None:
        return
    level = logging.INFO if form == "decoded" else logging.WARNING
    log.log(
        level, "minato.Cache keeps the samples of %s %s: all of them take about %s decoded and %s "
        "encoded, and the cache has %s. Set cache_format= on the loader to choose.", name, form, sized(decoded),
        sized(encoded), sized(stats["bytes"]),
    )  # fmt: skip


def size_of(value: Any) -> int | None:
    """Bytes of a value in a cache; None: it cannot be stored."""
    try:
        encoded = values.encode(value, "it")
    except TypeError:
        return None
    return len(encoded.description) + sum(memoryview(part).nbytes for part in encoded.parts)


def spread(count: int) -> list[int]:
    """A few indices, far from each other."""
    return sorted({n * (count - 1) // (MEASURED - 1) for n in range(MEASURED)}) if count else []


def estimate(sizes: list[tuple[int | None, int | None]], count: int) -> dict[str, int | None]:
    """Bytes of all samples, of (encoded, decoded) of some; of the largest decoded one; and how many
    values they are."""

    def total(which: int) -> int | None:
        known = [pair[which] for pair in sizes]
        if not known or None in known:
            return None
        return sum(filter(None, known)) * count // len(known)

    largest = max((pair[1] or 0 for pair in sizes), default=0)
    return {"encoded": total(0), "decoded": total(1), "largest": largest, "values": count}


# ---- how many values a cache has room for: they lie whole in parts of its file ---------------

#: values are taken to be larger than their mean, because some are
SPARE = 1.05

MiB = 1 << 20


def holds(parts: tuple[int, int], each: float) -> int:
    """How many values of `each` bytes fit into a cache of such parts: their number, and the bytes of each."""
    number, size = parts
    return number * int(size // each)


def parts_in(stats: dict[str, int]) -> tuple[int, int]:
    """Of a cache with these ``Store.stats()``."""
    return stats["parts"], stats["bytes"] // stats["parts"]


def has_room(stats: dict[str, int], count: float, each: float) -> bool:
    """Whether a cache keeps `count` values of `each` bytes on average."""
    return holds(parts_in(stats), SPARE * each) >= count


def size_for(count: float, each: float) -> float:
    """Bytes of a cache that keeps `count` values of `each` bytes on average: a number that ``sized()``
    prints exactly. (A cache that is slightly larger may keep fewer.)"""
    each *= SPARE
    size = max(count * each, MiB)
    while True:
        unit: int = 1024 ** int(math.log(size, 1024))
        tenths = math.ceil(10 * size / unit)
        size = tenths * unit / 10
        parts = _cache.parts(int(size))
        if each > _cache.PART_MAX or holds(parts, each) >= count:
            return size
        size = max((tenths + 0.5) * unit / 10, size * each / parts[1])


# ---- what a value depends on ---------------------------------------------------------------


def identity(dataset: Any, methods: tuple[str, ...]) -> Found:
    """Returns what these methods of a dataset depend on besides the index: their code, and where
    the dataset has no ``cache_key(i)`` the attributes that they use."""
    name, keyed = type(dataset).__name__, offered(dataset, "cache_key") is not None
    more = ("cache_key",) * keyed + ("cache_files",) * (offered(dataset, "cache_files") is not None)
    try:
        return of_methods(dataset, methods + more, attribute(dataset, "cache_version"), keyed)
    except Unknown as unknown:
        raise TypeError(
            f"cache= cannot compare what {' and '.join(methods)} of {name} depend on: they use {unknown}. "
            f"Give {name} a method cache_key(self, i) that returns what sample i is made from, such as "
            f"(self.paths[i], self.spacing); or, if it is not an attribute, an attribute cache_version, and "
            "change it whenever that object changes what they return"
        ) from None


# ---- datasets of the protocol ----------------------------------------------------------------


def _raw(dataset: Any, index: Any) -> Any:
    return dataset.read(index)


def _decoded(dataset: Any, index: Any) -> Any:
    return dataset.decode(dataset.read(index), index)


class Parts(Reader):
    """A dataset with read, decode and augment."""

    def __init__(self, dataset: Any, cache: Cache, form: str | None, made_of: MadeOf) -> None:
        super().__init__(dataset, cache, form, made_of)
        own = offered(dataset, "cache_key")
        files = offered(dataset, "cache_files")

        def key(_dataset: Any, index: Any) -> Any:
            return index if own is None else own(index)

        def paths(_dataset: Any, index: Any) -> Any:
            assert files is not None
            return files(index)

        of_files = None if files is None else paths
        self._raw = self.memoized(_raw, "read", key, of_files, b"r" + made_of[0].digest)
        self._decoded = self.memoized(_decoded, "decode", key, of_files, b"d" + made_of[1].digest)

    @classmethod
    def identity(cls, dataset: Any) -> MadeOf:
        return identity(dataset, PROTOCOL[:1]), identity(dataset, PROTOCOL[:2])

    def sizes_of(self, index: int) -> tuple[int | None, int | None]:
        raw = self.dataset.read(index)
        encoded = size_of(raw)  # before decode(), which may change it
        return encoded, size_of(self.dataset.decode(raw, index))

    def key_words(self) -> Iterator[int]:
        memoized = self._raw if self.form() == "encoded" else self._decoded
        return memoized.key_words((self.dataset, index) for index in range(self.count))

    def __getitem__(self, index: Any) -> Any:
        dataset = self.dataset
        if self.form() == "encoded":
            value = dataset.decode(self._raw.call((dataset, index), {}, None), index)
        else:
            value = self._decoded.call((dataset, index), {}, None)
        return dataset.augment(value, index)


# ---- torchvision's ImageFolder and DatasetFolder: the transforms run every time ---------------


def _module() -> Any:
    """torchvision's, if the program has imported it."""
    return sys.modules.get("torchvision.datasets.folder")


def is_folder(dataset: Any) -> bool:
    """Whether a dataset makes its samples as torchvision's DatasetFolder does, from more than paths."""
    kind = getattr(_module(), "DatasetFolder", None)
    if kind is None or not isinstance(dataset, kind) or dataset.loader is str:
        return False
    return type(dataset).__getitem__ is kind.__getitem__


def _bytes(dataset: Any, path: str) -> bytes:
    return Path(path).read_bytes()


def _loaded(dataset: Any, path: str) -> Any:
    return dataset.loader(path)


class Folder(Reader):
    """A DatasetFolder: ``loader(path)`` is the deterministic part."""

    def __init__(self, dataset: Any, cache: Cache, form: str | None, made_of: MadeOf) -> None:
        super().__init__(dataset, cache, form, made_of)
        path = lambda _dataset, path: path  # noqa: E731
        self._raw = self.memoized(_bytes, "loader", path, path, b"bytes")
        self._decoded = self.memoized(_loaded, "loader", path, path, made_of[1].digest)

    @classmethod
    def forms_of(cls, dataset: Any) -> tuple[str, ...]:
        # A loader of the program's takes a path; torchvision's own is a function of the bytes.
        by_pil = dataset.loader is _module().default_loader and _backend() == "PIL"
        return ("decoded", "encoded") if by_pil else ("decoded",)

    @classmethod
    def identity(cls, dataset: Any) -> MadeOf:
        depends = Depends(attribute(dataset, "cache_version") is not None)
        pil = getattr(sys.modules.get("PIL.ImageFile"), "LOAD_TRUNCATED_IMAGES", False)
        try:
            depends.add("loader", dataset.loader)
            depends.add("set up", (attribute(dataset, "cache_version"), _backend(), version("PIL"), pil))
            digest = depends.digest()
        except Unknown as unknown:
            raise TypeError(
                f"cache= cannot compare the loader of {type(dataset).__name__}: it uses {unknown}. Give the "
                "dataset an attribute cache_version, and change it whenever that object changes what "
                "the loader returns"
            ) from None
        return NOTHING_ELSE, Found(digest, "loader", depends.parts, depends.uncompared)

    def sizes_of(self, index: int) -> tuple[int | None, int | None]:
        path, _target = self.dataset.samples[index]
        return os.path.getsize(path), size_of(self.dataset.loader(path))

    def key_words(self) -> Iterator[int]:
        memoized = self._raw if self.form() == "encoded" else self._decoded
        return memoized.key_words((self.dataset, path) for path, _target in self.dataset.samples)

    def __getitem__(self, index: Any) -> Any:
        dataset = self.dataset
        path, target = dataset.samples[index]
        if self.form() == "encoded":
            from PIL import Image

            raw = self._raw.call((dataset, path), {}, None)
            sample = Image.open(io.BytesIO(raw)).convert("RGB")
        else:
            sample = self._decoded.call((dataset, path), {}, None)
        if dataset.transform is not None:
            sample = dataset.transform(sample)
        if dataset.target_transform is not None:
            target = dataset.target_transform(target)
        return sample, target


def _backend() -> str:
    torchvision = sys.modules.get("torchvision")
    return str(getattr(torchvision, "get_image_backend", lambda: "PIL")())
