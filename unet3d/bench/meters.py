"""Measurements of an epoch: one clock, waiting times, counts and hashes.

The clock runs from just before the epoch's ``iter()`` to the end of its last step. Waiting
is the time inside ``next()``. The first batch's wait, including ``iter()``, is the start-up
and is kept apart from the statistics per step.
"""
from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

MASK = (1 << 64) - 1
SCHEDULED = Path("/proc/thread-self/schedstat")  # ns on a core, ns waiting for one, times


def _digest(*parts: bytes) -> int:
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(part)
    return int.from_bytes(state.digest(), "little")


class DeliveryHash:
    """Order-independent hashes of the delivered samples: sums modulo 2^64.

    `indices` covers the sample numbers; `content`, optionally, numbers and bytes. A sum
    (not an exclusive or), so that a sample delivered twice does not cancel out.
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
        """Records that the step with the last batch has ended."""
        self._mark = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """From just before ``iter()`` to the end of the last step."""
        return self._mark - self.began


def copy_notes(told: dict[str, Any]) -> str:
    """From a loader's ``stats()["device"]``: how batches were copied, and the work done there."""
    ways = [f"{nbytes / 1e6:.0f} MB {way}" for way, nbytes in told["through"].items() if nbytes]
    done = ", ".join(told.get("operators") or ())
    host = told.get("operators_why")
    kept = told.get("resident")
    return "; ".join([", ".join(ways) or "nothing copied",
                      *([f"{kept / 1e9:.1f} GB stay on the device"] if kept else []),
                      f"operators on the device: {done}" if done else
                      "operators on the host" + (f": {host}" if host else "")])


class DeviceCopies:
    """Moves batches to the training device on the training thread's stream, and times that.

    Batches that the loader has already moved are left; the figures are then the loader's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies: list[tuple[torch.cuda.Event, torch.cuda.Event, int]] = []

    def move(self, *parts: torch.Tensor) -> list[torch.Tensor]:
        """The tensors on the device; the host does not wait for it."""
        nbytes = sum(part.nbytes for part in parts if part.device.type != self.device.type)
        if not nbytes:
            return list(parts)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        moved = [part.to(self.device, non_blocking=True) for part in parts]
        end.record()
        self._copies.append((begin, end, nbytes))
        return moved

    def summary(self, loader: object) -> dict[str, Any]:
        """copy_mb_s: rate of the copies to the device; copy_overlap: the share of their time during
        which training continued; copy_notes: the loader's other information. None: nothing was
        copied, or the loader that copies gives no figures."""
        if self._copies:
            self._copies[-1][1].synchronize()
            seconds = sum(begin.elapsed_time(end) for begin, end, _ in self._copies) / 1e3
            rate = sum(nbytes for *_, nbytes in self._copies) / seconds / 1e6
            # The copies run on the training stream, before the steps: no overlap.
            return {"copy_mb_s": rate, "copy_overlap": 0.0, "copy_notes": None}
        stats = getattr(loader, "stats", None)
        own = (stats() or {}).get("device") if callable(stats) else None
        if own is None:
            return dict.fromkeys(("copy_mb_s", "copy_overlap", "copy_notes"))
        rate = own["bandwidth"]
        return {"copy_mb_s": rate / 1e6 if rate else None, "copy_overlap": own["overlap"],
                "copy_notes": copy_notes(own)}


def without_core() -> float:
    """Seconds that this thread could have run, but had no core; 0 if that is not counted."""
    try:
        return int(SCHEDULED.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


class PythonWork:
    """Pure Python of `seconds` per step in the calling thread, as a trainer that holds the GIL.

    The seconds are of the thread's CPU time, so the work is the same whatever else runs. The
    additional time was spent waiting: for a core, which Linux counts, or for the GIL, which
    other threads of the process held, that is, the loader's.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._wall = self._working = 0.0

    def step(self) -> None:
        """Does the work of a step."""
        if not self.seconds:
            return
        began, start, queued = time.perf_counter(), time.thread_time(), without_core()
        while (now := time.thread_time()) < start + self.seconds:
            sum(range(1000))
        self._working += now - start + without_core() - queued
        self._wall += time.perf_counter() - began

    @property
    def denied(self) -> float | None:
        """The share of the work's time that was spent waiting for the GIL, and for a core if the
        system does not count that; None: there was no work."""
        return max(0.0, 1 - self._working / self._wall) if self._wall else None


def wait_summary(waits_per_rank: Sequence[Sequence[float]]) -> dict[str, float]:
    """Statistics of the waits, start-up apart; over all ranks' steps.

    wait_s is one rank's total waiting time (mean over ranks) including the start-up.
    """
    first = [waits[0] for waits in waits_per_rank if waits]
    later = [w for waits in waits_per_rank for w in waits[1:]] or [0.0]
    p50, p99 = np.percentile(later, [50, 99])
    total = sum(sum(waits) for waits in waits_per_rank) / max(1, len(waits_per_rank))
    return {"startup_s": max(first, default=0.0), "wait_s": total,
            "wait_mean_s": float(np.mean(later)), "wait_p50_s": float(p50),
            "wait_p99_s": float(p99), "wait_max_s": float(np.max(later))}
