"""Finds what makes the samples of two runs differ, or be the same, although each sample is seeded.

- *History*: what lets a sample depend on those that its worker has made before. Seeding cannot reach
  it: a buffer of earlier samples, a counter, a list that is shuffled in place, an iterator, more
  generators in one container than are seeded. torch gives each worker the same samples in each run;
  balanced workers get others, so two runs differ.
- *A worker_init_fn that seeds the global generators from its own number.* With torch's loader, such
  a function gives the same random numbers in each run, whatever the loader's seed is. If minato
  seeds each sample, it has no effect, and a warning says so, unless the program has set a seed: then
  minato's numbers are the same in each run, too. A function that uses ``torch.initial_seed()``, as
  in torch's documentation, leaves each worker in another state in each run. One that uses the common
  seed of all workers of an epoch leaves them in one state. So the same state after two seeds of the
  loader proves that the function uses its own number. Before there is a second seed, the state of a
  seed that programs write down (``WRITTEN``) proves it, too. Workers store hashes of the resulting
  states in their entries of the shared memory.
"""

from __future__ import annotations

import contextlib
import dis
import hashlib
import random
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import numpy as np
import torch

from ..errors import program_level
from .order_generators import all_global, get_state, legacy_state

# ---- history ------------------------------------------------------------------------------

#: of an object or a module, by name
Attributes = dict[str, Any]

#: methods that are called for a sample
_ENTRIES = ("__getitem__", "__getitems__", "__call__", "forward")
_ITERATORS = (types.GeneratorType, *(type(iter(kind())) for kind in (list, tuple, dict, set)))


class History:
    """Watches attributes. places: those of an object, with its class. crowds: containers with more
    generators than are seeded. length: of the dataset; a container with one
    generator for each sample is harmless while workers live for one epoch. tell: is called once, with
    a name. Dicts are left out: most are caches."""

    def __init__(
        self,
        places: list[tuple[Attributes, type]],
        crowds: list[Any],
        length: float,
        tell: Callable[[str], None],
    ) -> None:
        self._places, self._crowds, self._length = places, crowds, length
        self._tell: Callable[[str], None] | None = tell
        self._before, self._moved = self._now(), set[tuple[int, str]]()
        for attributes, owner in self._places:
            for name, value in attributes.items():
                if _is_iterator(value) and _uses(owner, name)[0]:
                    self._told(name)
        self.epoch(first=True)

    def epoch(self, first: bool = False) -> None:
        """Another epoch of this worker begins."""
        for crowd in self._crowds:
            size = len(crowd) if isinstance(crowd, (list, tuple, dict, set, deque)) else 0
            if not first or size < self._length:
                self._told(self._name_of(crowd))

    def _name_of(self, crowd: Any) -> str:
        names = (name for attributes, _ in self._places for name, value in attributes.items()
                 if value is crowd)
        return next(names, f"{type(crowd).__name__} of generators")

    def _told(self, name: str) -> None:
        if self._tell is not None:
            self._tell(name)
            self._tell = None

    def _now(self) -> dict[tuple[int, str], Any]:
        """What moves with samples: numbers, lengths, and the identities of a list and its first
        elements."""
        return {
            (place, name): value if type(value) in (int, float) else (len(value), _elements(value))
            for place, (attributes, _) in enumerate(self._places)
            for name, value in attributes.items()
            if type(value) in (int, float, list, set, deque)
        }

    def look(self) -> None:
        """Tells of an attribute that has moved twice. What moves once may be built at first use."""
        before, self._before = self._before, self._now()
        for key, now in self._before.items():
            if self._tell is not None and self._has_moved(key, before.get(key, now), now):
                if key in self._moved:
                    self._told(key[1])
                self._moved.add(key)

    def _has_moved(self, key: tuple[int, str], before: Any, now: Any) -> bool:
        if type(now) is not type(before):
            return False
        if type(now) in (int, float):
            loads, sums = _uses(self._places[key[0]][1], key[1]) if now != before else (0, 0)
            return loads > sums > 0
        grows = bool(now[0] > before[0])
        shuffled = now[0] == before[0] and sorted(now[1]) == sorted(before[1]) != [] and now != before
        return grows or shuffled


def _elements(value: Any) -> list[int]:
    """The identities of the elements of a list that is short enough to compare."""
    return [id(value), *map(id, value)] if type(value) is list and len(value) <= 10_000 else []


def _is_iterator(value: Any) -> bool:
    return type(value) in _ITERATORS or type(value).__module__ == "itertools"


def _uses(cls: type, attribute: str) -> tuple[int, int]:
    """How often the code of a sample reads an attribute, and how often it only adds to it."""
    methods = {name: f for base in reversed(cls.__mro__) for name, f in vars(base).items()
               if type(f) is types.FunctionType}
    reached = [name for name in _ENTRIES if name in methods]
    loads = sums = 0
    for name in reached:
        code = methods[name].__code__
        reached += [n for n in code.co_names if n in methods and n not in reached]
        steps = [s for s in dis.get_instructions(code) if s.opname not in ("SWAP", "COPY", "ROT_TWO")]
        for last, step in zip([*steps[:1], *steps], steps, strict=False):
            if step.argval == attribute:
                loads += step.opname in ("LOAD_ATTR", "LOAD_METHOD")
                sums += step.opname == "STORE_ATTR" and last.opname.startswith(("BINARY", "INPLACE"))
    return loads, sums


# ---- worker_init_fn ------------------------------------------------------------------------

#: in this order in a worker's entry; with the name for users
ROLES = {"python": "random", "numpy": "numpy.random", "torch": "torch"}

#: limit on remembered states
MOST = 4096

#: seeds that programs write down, or add a worker's number to. 2**31 is the first word of NumPy's
#: state in every worker of torch's, which some programs take for a seed.
WRITTEN = (*range(1024), 1234, 1337, *range(2000, 2050), 12345, *range(2**31, 2**31 + 64))

#: (role, hash of a state) -> the loader's seed of the workers in which it was first seen
_seen: dict[tuple[str, int], int] = {}
_told = False

#: the result of init_states(), if nothing has changed
UNCHANGED: tuple[int, ...] = (0, 0, 0)

#: role -> a state with this seed
_SEEDED: dict[str, Callable[[int], bytes | None]] = {
    "python": lambda seed: get_state(random.Random(seed)),
    "numpy": lambda seed: legacy_state(np.random.RandomState(seed)),
    "torch": lambda seed: get_state(torch.Generator().manual_seed(seed)),
}
#: role -> hash of a state -> the seed among WRITTEN that gives it; made when first needed
_written: dict[str, dict[int, int]] = {}


def init_states(before: dict[str, bytes]) -> tuple[int, ...]:
    """Hashes of the states of the global generators that have changed since all_global() returned
    these; 0 for the others."""
    after = all_global()
    return tuple(0 if after.get(role) == before.get(role) else _hash(after.get(role)) for role in ROLES)


def _hash(state: bytes | None) -> int:
    """0 for a generator that the program has replaced, which is not checked."""
    if state is None:
        return 0
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") or 1


def seeded_by_number(workers: Iterable[Any], base_seed: int) -> list[str]:
    """Generators that, by the workers' entries, were seeded from the function's own number.
    base_seed: the one of these workers' start, which later epochs need not have."""
    if len(_seen) > MOST:
        _seen.clear()
    found = set()
    for role, state in chain.from_iterable(zip(ROLES, entry["init_states"]) for entry in workers):
        if state and (role, state) not in _seen and _is_written(role, state):
            found.add(ROLES[role])
        if state and _seen.setdefault((role, state), base_seed) != base_seed:
            found.add(ROLES[role])
    return sorted(found)


def _is_written(role: str, state: int) -> bool:
    if role not in _written:
        _written[role] = {_hash(_SEEDED[role](seed)): seed for seed in WRITTEN}
    return state in _written[role]


def warn_of_own_number(generators: list[str]) -> None:
    """Warns about them, once. Samples may draw nothing, so this does not raise."""
    global _told
    if _told or not generators:
        return
    _told = True
    with contextlib.suppress(UserWarning):
        warnings.warn(
            f"worker_init_fn seeds {' and '.join(generators)} from its own number. With "
            "torch's loader that gives the same random numbers in each run. minato seeds each sample "
            "from the loader's seed, so it has no effect here. For reproducible runs, call "
            "torch.manual_seed() before iterating over the loader, or use workers' own streams with "
            "seed_per_sample=False or scheduling='static'.",
            stacklevel=program_level(),
        )
