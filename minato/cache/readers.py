"""Reads one dataset through a cache: the base class of the readers of each kind of dataset, and which form
of a sample a cache keeps."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from ..dataset_calls import attribute
from ..text import sized
from . import values
from .cache import Cache
from .depends import Found, surroundings
from .memoize import Memoized, _digest
from .room import has_room

log = logging.getLogger("minato")

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
        version = attribute(self.dataset, "cache_version")
        code = type(self).__name__.encode() + name.encode() + surroundings() + code
        memoized = Memoized(self.cache, function, key, files, "epoch", version, code)
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
            value = memo._miss(store, digest, key, (), (self,), {}, None)
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
