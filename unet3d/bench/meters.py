"""What is measured in an epoch: one clock, waiting times, counts and hashes.

The clock runs from just before the epoch's ``iter()`` to the end of its last step. Waiting
is the time inside ``next()``. The first batch's wait, ``iter()`` included, is the start-up
and kept apart from the statistics per step.
"""
from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

import numpy as np
import torch

MASK = (1 << 64) - 1


def _digest(*parts: bytes) -> int:
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(part)
    return int.from_bytes(state.digest(), "little")


class DeliveryHash:
    """Order-independent hashes of what was delivered: sums modulo 2^64.

    `indices` covers the sample numbers; `content`, if asked for, numbers and bytes. A sum
    (not an exclusive or) so that a sample delivered twice does not cancel out.
    """

    def __init__(self, with_content: bool, state: dict | None = None) -> None:
        self.with_content = with_content
        self.indices = int(state["indices"], 16) if state else 0
        self.content = int(state["content"], 16) if state and with_content else 0

    def add(self, image: torch.Tensor, label: torch.Tensor, index: Sequence[int]) -> None:
        """Add a batch: image and label [n, ...], n sample numbers."""
        for row, number in enumerate(index):
            self.add_sample(number, image[row], label[row])

    def add_sample(self, number: int, *parts: torch.Tensor) -> None:
        """Add one sample: its number and its tensors, of any shapes."""
        name = number.to_bytes(8, "little")
        self.indices = (self.indices + _digest(name)) & MASK
        if self.with_content:
            data = [t.contiguous().cpu().numpy().data.cast("B") for t in parts if t.numel()]
            self.content = (self.content + _digest(name, *data)) & MASK

    def merge(self, state: dict) -> None:
        """Add another rank's state."""
        self.indices = (self.indices + int(state["indices"], 16)) & MASK
        if self.with_content:
            self.content = (self.content + int(state["content"], 16)) & MASK

    def state(self) -> dict[str, str | None]:
        """Plain data, as 16 hex digits each."""
        return {"indices": f"{self.indices:016x}",
                "content": f"{self.content:016x}" if self.with_content else None}


class EpochClock:
    """Times one epoch's waits. Seconds throughout."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.waits: list[float] = []
        self._mark = self.began

    def fetch(self, iterator):
        """``next(iterator)``, timed; None at the end, which is not counted as a wait."""
        batch = next(iterator, None)
        now = time.perf_counter()
        if batch is not None:
            self.waits.append(now - self._mark)
        return batch

    def step_done(self) -> None:
        """The step that used the last batch has ended."""
        self._mark = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """From just before ``iter()`` to the end of the last step."""
        return self._mark - self.began


def wait_summary(waits_per_rank: Sequence[Sequence[float]]) -> dict[str, float]:
    """Statistics of the waits, start-up apart; over all ranks' steps.

    wait_s is one rank's whole waiting time (mean over ranks) with the start-up.
    """
    first = [waits[0] for waits in waits_per_rank if waits]
    later = [w for waits in waits_per_rank for w in waits[1:]] or [0.0]
    p50, p99 = np.percentile(later, [50, 99])
    total = sum(sum(waits) for waits in waits_per_rank) / max(1, len(waits_per_rank))
    return {"startup_s": max(first, default=0.0), "wait_s": total,
            "wait_mean_s": float(np.mean(later)), "wait_p50_s": float(p50),
            "wait_p99_s": float(p99), "wait_max_s": float(np.max(later))}
