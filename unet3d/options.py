"""The options of a loader under comparison, and its error if it is not available."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Sampler


class LoaderUnavailable(RuntimeError):
    """The loader's package is not installed; the message says how to get it."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a loader. `sampler` yields the indices of one epoch on this rank."""

    batch_size: int
    sampler: Sampler[int]
    workers: int
    drop_last: bool = False
    pin_memory: bool = False
    generator: torch.Generator | None = None
    device: torch.device = torch.device("cpu")
    timeout_s: float = 0.0  # the longest wait for a batch; 0 waits forever
    collate_fn: Callable[[list], Any] | None = None  # None: torch's default
    cache: str | None = None  # bytes of minato's cache of volumes, such as "4GiB"
    persistent: bool = True  # keep workers across epochs
    dali_mmap: bool = True  # DALI maps the files; otherwise it reads them whole
    dali_batches: int = 1  # number that DALI makes at once, to be delivered one by one
    dali_depth: int = 2  # number of those that DALI prepares ahead: its default, torch's per worker

    def torch_arguments(self) -> dict[str, Any]:
        """The same, as arguments of torch.utils.data.DataLoader."""
        return {"batch_size": self.batch_size, "sampler": self.sampler,
                "num_workers": self.workers, "drop_last": self.drop_last,
                "pin_memory": self.pin_memory, "generator": self.generator,
                "collate_fn": self.collate_fn,
                "persistent_workers": self.persistent and self.workers > 0,
                "timeout": self.timeout_s if self.workers else 0.0}
