"""A ``worker_init_fn`` that seeds the global generators from a number of its own.

With torch's loader such a function gives the same random numbers in each run, whatever the
loader's seed is. Where minato seeds each sample it has no effect, and who wrote it is told so.
A function that goes by ``torch.initial_seed()``, as torch's documentation shows, leaves each
worker in another state in each run, and one that goes by the seed of all workers of an epoch
leaves them in one; so one state after two seeds of the loader's proves a number of its own, and so
does, before there is a second seed, the state of a seed that programs write down (``WRITTEN``).
Workers leave hashes of the states that it has left in
their entries of the shared memory.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import numpy as np
import torch

#: in this order in a worker's entry; what each is for its users
ROLES = {"python": "random", "numpy": "numpy.random", "torch": "torch"}

#: states remembered in all
MOST = 4096

#: seeds that programs write down, or add a worker's number to. 2**31 is the first word of NumPy's
#: state in every worker of torch's, which some take for a seed.
WRITTEN = (*range(1024), 1234, 1337, *range(2000, 2050), 12345, *range(2**31, 2**31 + 64))

#: (role, hash of a state) -> the loader's seed of the workers that were first seen in it
_seen: dict[tuple[str, int], int] = {}
_told = False

UNCHANGED: tuple[int, ...] = (0, 0, 0)


def _of_python(generator: random.Random) -> bytes:
    _version, words, gauss = generator.getstate()
    return np.array(words, np.uint32).tobytes() + repr(gauss).encode()


def _of_numpy(generator: np.random.RandomState) -> bytes:
    state: Any = generator.get_state(legacy=True)
    if state[0] != "MT19937":  # exchanged by the program: its own business
        return b""
    words: bytes = state[1].tobytes()
    return words + repr(state[2:]).encode()


def _of_torch(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


#: role -> a state with this seed
_SEEDED: dict[str, Callable[[int], bytes]] = {
    "python": lambda seed: _of_python(random.Random(seed)),
    "numpy": lambda seed: _of_numpy(np.random.RandomState(seed)),
    "torch": lambda seed: _of_torch(torch.Generator().manual_seed(seed)),
}
#: role -> hash of a state -> the seed among WRITTEN that gives it; made when first needed
_written: dict[str, dict[int, int]] = {}


def now() -> dict[str, bytes]:
    """States of the global generators, by role."""
    numpys: Any = np.random.mtrand._rand  # type: ignore[attr-defined]
    pythons: random.Random = random._inst  # type: ignore[attr-defined]
    return {
        "python": _of_python(pythons),
        "numpy": _of_numpy(numpys),
        "torch": _of_torch(torch.default_generator),
    }


def left_by(before: dict[str, bytes]) -> tuple[int, ...]:
    """Hashes of the states that have changed since; 0 of those that have not."""
    after = now()
    return tuple(_hash(after[r]) if after[r] and after[r] != before[r] else 0 for r in ROLES)


def _hash(state: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") or 1


def look(workers: Iterable[Any], base_seed: int) -> list[str]:
    """Generators that workers' entries say are seeded from a number of the function's own.
    base_seed: what these workers were made with, which a later epoch's need not be."""
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


def tell(generators: list[str]) -> None:
    """Warns of them, once."""
    global _told
    if _told or not generators:
        return
    _told = True
    warnings.warn(
        f"worker_init_fn seeds {' and '.join(generators)} from a number of its own, which with "
        "torch's loader gives the same random numbers in each run. minato seeds each sample "
        "anew from the loader's seed, so that this has no effect. Fix that seed by "
        "torch.manual_seed() before the loader is iterated, or have workers' own streams by "
        "seed_per_sample=False or scheduling='static'.",
        stacklevel=4,
    )
