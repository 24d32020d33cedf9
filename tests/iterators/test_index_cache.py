"""Workers keep the indices of a batch that they have unpickled, and never for another."""

from __future__ import annotations

from typing import Any, Iterator

import numpy as np
import pytest
import torch

import minato


class Drawn(torch.utils.data.Sampler):
    """Indices that are no plain ints travel pickled; other ones in each epoch."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rng = np.random.default_rng(0)
        self.last: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        drawn = self.rng.permutation(1000)[: self.size]
        self.last = drawn.tolist()
        return iter(drawn)


class Same(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: Any) -> int:
        return int(index)


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("leaves", [False, True])
def test_cached_indices_belong_to_their_epoch(size: int, leaves: bool) -> None:
    """Blocks lie where those of the last epoch did, and batches have the same numbers."""
    sampler = Drawn(size)
    loader = minato.DataLoader(
        Same(), batch_size=4, sampler=sampler, num_workers=2, persistent_workers=True
    )
    for _epoch in range(12):
        found = []
        for batch in loader:
            found += batch.tolist()
            if leaves:
                break
        assert found == sampler.last[: len(found)] and len(found) == (4 if leaves else size)
