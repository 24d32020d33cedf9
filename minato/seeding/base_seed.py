"""The base seed of an epoch, of which torch's workers' seeds and minato's own of samples are made.

torch draws one in the constructor of its iterators, which persistent workers keep for all epochs.
Here is the one that torch does not draw: that of an epoch whose state was taken up by an iterator
that lives already.
"""

from __future__ import annotations

from typing import Any

import torch

#: torch's attribute of an iterator, which its position keeps
BASE_SEED: Any = property(
    lambda iterator: iterator._position.base_seed,
    lambda iterator, seed: setattr(iterator._position, "base_seed", seed),
)


def draw(loader: Any) -> int:
    """From the loader's own generator, or else torch's global one, as torch does."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
