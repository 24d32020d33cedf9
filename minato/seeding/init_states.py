"""A ``worker_init_fn`` that seeds the global generators from a number of its own.

With torch's loader such a function gives the same random numbers in each run, whatever the
loader's seed is. Where minato seeds each sample it has no effect, and who wrote it is told so.
A function that goes by ``torch.initial_seed()``, as torch's documentation shows, leaves each
worker in another state in each run, and one that goes by the seed of all workers of an epoch
leaves them in one; so one state after two seeds of the loader's proves a number of its own.
Workers leave hashes of the states that it has left in
their entries of the shared memory.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable
from typing import Any

from .order_generators import all_global

#: in this order in a worker's entry; what each is for its users
ROLES = {"python": "random", "numpy": "numpy.random", "torch": "torch"}

#: states remembered in all
MOST = 4096

#: (role, hash of a state) -> the loader's seed of the workers that were first seen in it
_seen: dict[tuple[str, int], int] = {}
_told = False

UNCHANGED: tuple[int, ...] = (0, 0, 0)


def left_by(before: dict[str, bytes]) -> tuple[int, ...]:
    """Hashes of the states that have changed since; 0 of those that have not."""
    now = all_global()
    return tuple(_hash(now[r]) if r in now and now[r] != before.get(r) else 0 for r in ROLES)


def _hash(state: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") or 1


def look(workers: Iterable[Any], base_seed: int) -> list[str]:
    """Generators that workers' entries say are seeded from a number of the function's own.
    base_seed: what these workers were made with, which a later epoch's need not be."""
    if len(_seen) > MOST:
        _seen.clear()
    found = set()
    for entry in workers:
        for role, state in zip(ROLES, entry["init_states"]):
            if state and _seen.setdefault((role, state), base_seed) != base_seed:
                found.add(ROLES[role])
    return sorted(found)


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
