"""memoize: a function whose values are made once per machine."""

from __future__ import annotations

import _random
import contextlib
import ctypes
import functools
import hashlib
import inspect
import itertools
import logging
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .._not_linux import CORE
from . import files as _files
from . import depends, values
from .keys import canonical

if CORE:
    from .._core import Seeder
    from ..seeding.generator_states import plan_all
    from ..seeding.order_generators import numpy_words
    from ..worker_info import is_worker_thread
if TYPE_CHECKING:
    from .._cache import Store

log = logging.getLogger("minato")

#: results of Store.put()
NO_ROOM = 1
TOO_LARGE = 2

_local = threading.local()

#: warnings that are logged once, as bits
READ, LARGE, FULL, DRAWS, MANY, CHANGES, UPDATES, UNSEEN = 1, 2, 4, 8, 16, 32, 64, 128
#: which of them were logged for each memoized function, by its number. Shared with forks, so that
#: not every worker logs them.
_told = mmap.mmap(-1, 1 << 16)
_numbers = itertools.count()
#: of the beginnings and ends of makers of this process
_makings = itertools.count()


#: of a process that neither looks for values nor keeps them: from which generators they draw
_draws: set[str] | None = None


@contextlib.contextmanager
def made_each_time() -> Iterator[set[str]]:
    """Memoized functions run each time in this process, with the random numbers that they would
    have drawn for the cache. Yields where they have drawn any."""
    global _draws
    _draws = set()
    try:
        yield _draws
    finally:
        _draws = None


@contextlib.contextmanager
def seeded(digest: bytes, generators: dict[str, Any], tell: Callable[[str], None]) -> Iterator[None]:
    """Within, the global generators begin where the key says; after it they are what they were. So a value does not
    depend on what was drawn before. A sample draws the same numbers whether its value was made or found.

    generators: others, by name. tell: called with the name of one that was drawn from.

    Worker threads leave the generators alone: they belong to the program and to all its threads."""
    if is_worker_thread():
        yield
        return
    pythons: Any = random._inst  # type: ignore[attr-defined]
    numpys: Any = np.random.mtrand._rand  # type: ignore[attr-defined]
    bits = numpys._bit_generator
    words = numpy_words()
    put_back: list[Callable[[], object]] = [
        _copy_of(pythons, _random.Random), partial(setattr, pythons, "gauss_next", pythons.gauss_next),
        _copy_of(numpys, type(numpys)),
        partial(ctypes.memmove, bits.ctypes.state_address, words, len(words)) if words
        else partial(setattr, bits, "state", bits.state),
        partial(torch.default_generator.set_state, torch.default_generator.get_state()),
    ]  # fmt: skip
    try:
        _seeder(bits).seed(int.from_bytes(digest[:8], "little"), 0, 0)
        number = next(_makings)
        before = depends.generator_states(generators)
        yield
        after = depends.generator_states(generators)
        if next(_makings) == number + 1:  # no other thread has seeded them
            for name, state in after.items():
                if state != before[name]:
                    tell(name)
    finally:
        if numpys._bit_generator is not bits:  # the maker has replaced them
            del put_back[2]
        with bits.lock:
            for each in put_back:
                each()


@functools.lru_cache(maxsize=1)
def _seeder(_bits: Any) -> Seeder:
    """Of the global generators; NumPy's may get other bits."""
    return Seeder(plan_all())


def _copy_of(generator: Any, base: type) -> Callable[[], object]:
    """Copies the memory of a generator's object. Returns what puts it back. To ask random and NumPy for their
    states takes 10 and 70 us."""
    begin = object.__basicsize__
    memory = Seeder._peek(generator)[begin : base.__basicsize__]
    return partial(ctypes.memmove, id(generator) + begin, memory, len(memory))


@contextlib.contextmanager
def making() -> Iterator[bool]:
    """Within, this thread makes a value; yields whether it makes another one already. Such a thread
    waits for no other: two of them could wait for each other."""
    depth = getattr(_local, "depth", 0)
    _local.depth = depth + 1
    try:
        yield depth > 0
    finally:
        _local.depth = depth


def _needs_key(function: Any, names: list[str]) -> str | None:
    if names and names[0] in ("self", "cls"):
        what = f"{names[0]!r} and of the other arguments"
    elif function.__closure__:
        what = f"the arguments and of {', '.join(function.__code__.co_freevars)}"
    else:
        return None
    return f"@cache.memoize(key=lambda {', '.join(names)}: (...)): what of {what} the value depends on"


#: combinations of types of arguments for which a function's code is remembered
KINDS_MOST = 64
#: share of the time of the function that its process may spend to find what the function changes itself
LOOK_SHARE = 0.05


class _Code:
    """What a memoized function's values depend on besides key and files, for arguments of some types.

    before: the tokens of another one, from before a call. Those that the call has changed are in `changed`.
    """

    def __init__(self, memoized: Memoized, args: tuple[Any, ...], before: depends.Tokens | None = None) -> None:
        try:
            with _files.not_noted():
                self._depends = depends.of_call(
                    memoized.made_of(), args, memoized._is_method, memoized._own, before
                )
                self.digest = self._depends.digest()
            if before is None and memoized.cache.directory is not None and self._depends.uncompared is not None:
                memoized._tell(UNSEEN, "minato.Cache cannot compare what %s depends on: it uses %s. Change version= "
                               "whenever that object changes what the function returns.",
                               memoized.name, self._depends.uncompared)  # fmt: skip
            self.generators = self._depends.generators
            self.whole = self._depends.whole
        except depends.Unknown as unknown:
            raise TypeError(
                f"memoize() cannot compare what {memoized.name} depends on: it uses {unknown}. Give "
                "memoize() a version=, and change it whenever that object changes what the function "
                "returns; or pass the function plain values and name them in key="
            ) from None
        self.tokens, self.changed = self._depends.tokens, self._depends.changed
        self._is_due = False

    def begin_epoch(self) -> None:
        """Objects that can change without being replaced are compared once an epoch, and before a value is made."""
        self._is_due = self._depends.may_have_changed()

    def holds(self, now: bool = False) -> bool:
        return not (self._depends.may_have_changed() if now else self._is_due) and self._depends.unchanged()


class Memoized:
    """Implements one memoized function."""

    def __init__(
        self, cache: Any, function: Any, key: Callable[..., Any] | None,
        files: Callable[..., Any] | None, check: str, version: Any, code: bytes | None = None,
    ) -> None:  # fmt: skip
        """code: the digest of what the values depend on besides key and files, where that is known."""
        if key is not None and not callable(key):
            raise TypeError(f"memoize(key=) must be a function of the arguments, got {key!r}")
        self.cache = cache
        self.function = function
        self.name = f"{function.__module__}.{function.__qualname__}"
        signature = inspect.signature(function)
        names = list(signature.parameters)
        if "part" in names:
            raise TypeError(
                f"{self.name} has a parameter named part, which memoize() adds to the functions that "
                "it wraps: give it another name"
            )
        line = _needs_key(function, names) if key is None else None
        if line is not None:
            raise TypeError(f"memoize() needs a key= for {function.__qualname__}. Write {line}")
        if version is None and cache.directory is not None:
            raise TypeError(
                f"memoize() needs a version= for {function.__qualname__}, whose values outlive the "
                f"program in {cache.directory}. Write version=1; change it whenever the values change "
                "for a reason that minato cannot detect, such as a model that the function uses"
            )
        self._signature = signature
        self._key_name = f"the key of {function.__qualname__}"
        self._positional = len(names) if all(
            p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            for p in signature.parameters.values()
        ) else -1  # fmt: skip
        self._key = key
        self._paths = files
        self._files = _files.Files(check)
        self._version = version
        self._is_method = bool(names) and names[0] in ("self", "cls")
        self._code = code
        self._own: depends.Tokens = {}  # what the function changes itself; see depends.Depends
        self._made, self._looked = 0.0, 0.0  # seconds of the last call, and of the last look for what it changes
        self._codes: dict[tuple[type, ...], _Code] = {}
        self._number = int.from_bytes(_digest(self.name.encode())[:8], "little")
        self._slot = next(_numbers) % len(_told)
        _told[self._slot] = 0
        self.tells = True  # warnings are logged
        self.evicts = True  # a value may take the place of others, where jobs share the cache

    # ---- keys ----------------------------------------------------------------------------

    def made_of(self) -> tuple[Any, ...]:
        """What the values depend on besides their arguments."""
        return self.function, self._key, self._paths, self._version

    def code(self, args: tuple[Any, ...]) -> bytes:
        """The digest of what the values depend on besides key and files, as it is now."""
        return self._code if self._code is not None else self._now(args).digest

    def _now(self, args: tuple[Any, ...]) -> _Code:
        types = tuple(one if isinstance(one, type) else type(one) for one in args)
        found = self._codes.get(types)
        if found is None or not found.holds():
            if len(self._codes) >= KINDS_MOST:
                self._codes.clear()
            found = self._codes[types] = _Code(self, args)
        return found

    def unfollowed(self) -> set[str]:
        """Why the source of the whole program counts, once this process has called it."""
        return {code.whole for code in self._codes.values() if code.whole is not None}

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Returns what the value depends on besides files."""
        given = self._given(args, kwargs)
        if self._files.is_new_epoch(given):
            for found in self._codes.values():
                found.begin_epoch()
        return self.code(self._with_code(args, kwargs)) + given

    def _with_code(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """With a key= all arguments may have code of the program's."""
        return (*args, *kwargs.values()) if self._key is not None else args[:1]

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        if self._key is not None:
            return canonical(self._key(*args, **kwargs), self._key_name)
        if kwargs or len(args) != self._positional:
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args = tuple(bound.arguments.values())
        return canonical(args, f"the tuple of arguments of {self.function.__qualname__}")

    def key_words(self, calls: Iterable[tuple[Any, ...]]) -> Iterator[int]:
        """The first eight bytes of the digests of the values for these arguments. Much faster than
        key(), as the function is looked at once."""
        assert self._key is not None
        code: bytes | None = None
        for args in calls:
            code = self.code(args) if code is None else code
            key = code + canonical(self._key(*args))
            yield int.from_bytes(_digest(key)[:8], sys.byteorder)

    # ---- calls ---------------------------------------------------------------------------

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], part: Any) -> Any:
        store = self.cache._attached()
        if store is None:
            value = self.function(*args, **kwargs)
            return values.part_of(value, part)
        key = self.key(args, kwargs)
        paths = () if self._paths is None else _files.paths_of(self._paths(*args, **kwargs))
        digest = _digest(key, paths, self._files.stamps(paths))
        if _draws is not None:
            with seeded(digest, self._generators(args), self._note_draws):
                value = self.function(*args, **kwargs)
            return values.part_of(value, part)
        try:
            found, value = self._look(store, digest, True, part, paths)
        except (OSError, RuntimeError, MemoryError) as error:
            self.cache._turn_off(error)
            return self.call(args, kwargs, part)
        if found:
            return value
        return self._miss(store, key, paths, args, kwargs, part)

    def _look(
        self, store: Store, digest: bytes, count: bool, part: Any, paths: tuple[str, ...] = ()
    ) -> tuple[bool, Any]:
        entry = store.find(digest, count)
        if entry is None:
            return False, None
        try:
            description, _, opened = (entry.describe() or b"").partition(b"\n")
            if not description or (opened and not self._files.still(opened)):
                return False, None
            _files.pass_on(paths, opened)
            if part is None:
                return values.read(entry, description)
            return values.read_part(entry, description, part, self.name)
        except OSError as error:
            self._tell(READ, "minato.Cache could not read a value of %s from %s (%s). Such values are "
                       "made again.", self.name, self.cache.directory, error)  # fmt: skip
            return False, None

    def _miss(
        self, store: Store, key: bytes, paths: tuple[str, ...], args: tuple[Any, ...],
        kwargs: dict[str, Any], part: Any,
    ) -> Any:  # fmt: skip
        code: _Code | None = None
        if self._code is None and self._looked <= LOOK_SHARE * self._made:
            code, key = self._looked_at(self._with_code(args, kwargs), key)
        before = self._files.fresh(paths)
        digest = _digest(key, paths, before)
        with making() as already:
            claimed = store.claim(digest, not already, self._number)
            try:
                found, value = self._look(store, digest, False, part, paths)
                if found:
                    return value
                start = time.perf_counter_ns()
                state = depends.states_of(args)
                with _files.noted() as opened, seeded(digest, self._generators(args), self._tell_of_draws):
                    made = [self.function(*args, **kwargs)]
                opened.lasts = opened.lasts or depends.states_of(args) != state
                self._made = (time.perf_counter_ns() - start) * 1e-9
                opened.lasts |= code is not None and self._changes_itself(code, self._with_code(args, kwargs))
                for path in paths:
                    opened.note(path, os.O_RDONLY)
                made_ns = time.perf_counter_ns() - start
                return self._keep(store, digest, made, made_ns, paths, before, opened, part)
            finally:
                if claimed:
                    store.release(digest, claimed)

    def _looked_at(self, args: tuple[Any, ...], key: bytes) -> tuple[_Code, bytes]:
        """What a value that is made now depends on, and its key: the program may have changed a list, say, since
        the epoch began."""
        begun = time.perf_counter()
        self._now(args).begin_epoch()
        code = self._now(args)
        self._looked = time.perf_counter() - begun
        return code, code.digest + key[len(code.digest) :]

    def _changes_itself(self, code: _Code, args: tuple[Any, ...]) -> bool:
        """Whether the call has changed what its code depends on, such as a list in which it notes calls.
        Later values do not depend on that: their keys would never come again."""
        found = {} if code.holds(now=True) else _Code(self, args, code.tokens).changed
        if found:
            self._own |= found
            self._codes.clear()
            self._tell(CHANGES, "%s changes an object that it uses, such as a list or a counter. The cache ignores "
                       "these changes: values must not depend on them.", self.name)  # fmt: skip
        return bool(found)

    def _keep(
        self, store: Store, digest: bytes, made: list[Any], made_ns: int, paths: tuple[str, ...],
        before: tuple[Any, ...], opened: _files.Opened, part: Any,
    ) -> Any:  # fmt: skip
        """Stores a value that was made, and returns what a hit would. made: the value alone, which
        no variable holds besides: see values.copy()."""
        encoded = values.encode(made[0], self.name)
        if part is not None:
            values.check_part(encoded.description, self.name)
        same = not paths or (_files.settled(before) and self._files.fresh(paths) == before)
        try:
            told = b"" if self._files.check == "never" else opened.told(paths)
        except _files.TooMany:
            told = None
            self._tell(MANY, "minato.Cache does not store further values of %s: it keeps what it has read of more "
                       "than %d files, and minato cannot tell which of them a value is made from. Name "
                       "them with files= (of a dataset: cache_files(i)).", self.name, _files.LASTING_MOST)
        except _files.Changes as changes:
            told = None
            self._tell(UPDATES, "minato.Cache does not store values of %s that come from %s, which it changes while "
                       "it makes them. Open the file for reading only, or write in another function.",
                       self.name, str(changes))
        if same and told is not None:
            description = encoded.description + (b"\n" + told if told else b"")
            try:
                result = store.put(digest, made_ns, description, encoded.parts, self._number, self.evicts)
                if result == TOO_LARGE:
                    self._warn_of_large(store, encoded)
                elif result == NO_ROOM and self.cache.directory is not None:
                    self._tell(FULL, "minato.Cache has no room in %s for further values of %s: it, or "
                               "the disk, is full. They are made each time.",
                               self.cache.directory, self.name)  # fmt: skip
            except (OSError, RuntimeError, MemoryError) as error:
                self.cache._turn_off(error)
        return values.part_of(values.copy(encoded), part)

    def _warn_of_large(self, store: Store, encoded: Any) -> None:
        size = sum(memoryview(one).nbytes for one in encoded.parts)
        self._tell(
            LARGE,
            "minato.Cache does not store values of %s of %d bytes: one entry may have %d, a 16th of the "
            "cache, at most 1 GiB. They are made each time. A larger cache takes them, or a function "
            "that returns less at once.", self.name, size, store.stats()["largest"],
        )  # fmt: skip

    def _generators(self, args: tuple[Any, ...]) -> dict[str, Any]:
        """Generators that the function may draw from, besides the global ones."""
        found = depends.generators_of(args[0]) if args else {}
        for code in self._codes.values():
            found |= code.generators
        return found

    def _tell_of_draws(self, generator: str) -> None:
        self._tell(
            DRAWS, "%s draws random numbers from %s, and the cache keeps what it returned the first time: "
            "later epochs get the same numbers. Draw them outside of the part that is cached.",
            self.name, generator,
        )  # fmt: skip

    def _note_draws(self, generator: str) -> None:
        if _draws is not None:
            _draws.add(f"{generator} in {self.name}, which a cache keeps")

    def _tell(self, what: int, text: str, *values: Any) -> None:
        """A warning in the log, once of each kind for this process and its forks."""
        if self.tells and not _told[self._slot] & what:
            _told[self._slot] |= what
            log.warning(text, *values)


def _digest(
    key: bytes, paths: tuple[str, ...] = (), stamps: tuple[_files.Stamp, ...] = ()
) -> bytes:
    """Digests a key, and what the files look like that the value is made from. The first half is of the
    key alone, so a trainer knows it without a look at files."""
    half = hashlib.blake2b(key, digest_size=16).digest()
    if not paths:
        return half
    stamped = key + canonical(paths) + canonical(stamps)
    return half[:8] + hashlib.blake2b(stamped, digest_size=16).digest()[8:]


def wrap(memoized: Memoized) -> Any:
    """The function that takes the place of the memoized one."""

    @functools.wraps(memoized.function)
    def call(*args: Any, part: Any = None, **kwargs: Any) -> Any:
        return memoized.call(args, kwargs, part)

    call.__minato_memoized__ = memoized  # type: ignore[attr-defined]
    return call
