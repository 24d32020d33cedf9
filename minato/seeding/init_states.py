"""Detects a ``worker_init_fn`` that seeds the global generators from its own number.

With torch's loader, such a function gives the same random numbers in each run, whatever the
loader's seed is. If minato seeds each sample, it has no effect, and a warning says so, unless the program has set a
seed: then minato's numbers are the same in each run, too.
A function that uses ``torch.initial_seed()``, as in torch's documentation, leaves each
worker in another state in each run. One that uses the common seed of all workers of an epoch
leaves them in one state. So the same state after two seeds of the loader proves that the function
uses its own number. Before there is a second seed, the state of a seed that programs write down
(``WRITTEN``) proves it, too. Workers store hashes of the resulting states in
their entries of the shared memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import warnings
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import numpy as np
import torch

from ..errors import program_level
from .order_generators import all_global, get_state, legacy_state

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

UNCHANGED: tuple[int, ...] = (0, 0, 0)

#: role -> a state with this seed
_SEEDED: dict[str, Callable[[int], bytes | None]] = {
    "python": lambda seed: get_state(random.Random(seed)),
    "numpy": lambda seed: legacy_state(np.random.RandomState(seed)),
    "torch": lambda seed: get_state(torch.Generator().manual_seed(seed)),
}
#: role -> hash of a state -> the seed among WRITTEN that gives it; made when first needed
_written: dict[str, dict[int, int]] = {}

#: what to hand to left_by()
now = all_global


def left_by(before: dict[str, bytes]) -> tuple[int, ...]:
    """Hashes of the states that have changed since; 0 for the others."""
    after = now()
    return tuple(0 if after.get(role) == before.get(role) else _hash(after.get(role)) for role in ROLES)


def _hash(state: bytes | None) -> int:
    """0 for a generator that the program has replaced, which is not checked."""
    if state is None:
        return 0
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") or 1


def look(workers: Iterable[Any], base_seed: int) -> list[str]:
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


def warn_of(generators: list[str]) -> None:
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
