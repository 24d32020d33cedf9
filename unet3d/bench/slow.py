"""Which samples are slow with any loader: their cost in one process, one after the other.

A sample counts as slow if it costs more than `TIMES` the median of its epoch. If
costs barely vary, none is slow; the share depends on the workload and is not a fixed percentile.
"""
from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

TIMES = 2.0
FIRST, PATIENCE_S = 32, 60.0  # samples after which a longer time than this is announced


@dataclasses.dataclass(frozen=True)
class Profile:
    """Seconds of each sample of `epoch`, by index, made in one process from a warm cache."""

    epoch: int
    costs: list[float]

    @property
    def slow(self) -> set[int]:
        """Indices of the slow samples."""
        limit = TIMES * statistics.median(self.costs)
        return {index for index, cost in enumerate(self.costs) if cost > limit}

    def work_s(self, indices: Sequence[int]) -> float:
        """Seconds of work in these samples."""
        return sum(self.costs[index] for index in indices)

    def shares(self, batches: Sequence[Sequence[int]]) -> list[float]:
        """The share of slow samples in each batch, 0 to 1."""
        slow = self.slow
        return [sum(index in slow for index in batch) / len(batch) for batch in batches]

    def as_json(self) -> dict[str, Any]:
        """Plain data for the records."""
        return {"epoch": self.epoch, "samples": len(self.costs), "slow": sorted(self.slow),
                "work_s": sum(self.costs), "median_s": statistics.median(self.costs),
                "max_s": max(self.costs)}


def profile(dataset: Dataset, epoch: int) -> Profile:
    """Make every sample of `epoch` once, here. The data should be in the page cache."""
    dataset.set_epoch(epoch)
    costs = []
    dataset[0]  # imports and first allocations do not belong to the sample
    for index in range(len(dataset)):
        if index == FIRST and (rest := sum(costs) / FIRST * (len(dataset) - FIRST)) > PATIENCE_S:
            print(f"making all {len(dataset)} samples once, to know their cost: about "
                  f"{rest / 60:.0f} minutes", file=sys.stderr, flush=True)
        began = time.perf_counter()
        dataset[index]
        costs.append(time.perf_counter() - began)
    return Profile(epoch, costs)
