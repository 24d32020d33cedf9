"""The base seed of an epoch, from which the seeds of torch's workers and of minato's samples are
made.

torch draws one in the constructor of its iterators, and persistent workers keep it for all epochs.
This module draws the base seed that torch does not draw: that of an epoch whose state was loaded by
an iterator that already existed.
"""

from __future__ import annotations

from typing import Any

import torch

#: torch's attribute of an iterator, which its position stores
BASE_SEED: Any = property(
    lambda iterator: iterator._position.base_seed,
    lambda iterator, seed: setattr(iterator._position, "base_seed", seed),
)


#: torch's seeds from here on are the system's, which gives 64 bits; a new torch.Generator has 2**45.9
SYSTEMS_SEEDS = 1 << 48


def seed_of(loader: Any) -> int:
    """The initial seed of the generator that base seeds are drawn from."""
    return int((loader.generator or torch.default_generator).initial_seed())


def draw(loader: Any) -> int:
    """Draws from the loader's own generator, or else from torch's global one, as torch does."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
