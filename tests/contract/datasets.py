"""Datasets of the tests: small, picklable, one behaviour each."""

from __future__ import annotations

import os
import random
import select
import signal
import sys
from typing import Any, Callable, Iterator

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

GATE_S = 90.0  # longest a sample waits for a gate; beyond it the test has failed


class Gate:
    """An event for forked processes that a killed waiter cannot break.

    multiprocessing's Event counts its waiters and fails once one of them was killed.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()

    def set(self) -> None:
        os.write(self._writer, b"x")

    def wait(self, seconds: float = GATE_S) -> bool:
        return bool(select.select([self._reader], [], [], seconds)[0])

    def __del__(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


class Numbers(Dataset):
    """Sample i is the integer i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index


class Listed(Dataset):
    """Samples from a list."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Images(Dataset):
    """An image filled with its index, and a label: {"image": float32, "label": int}."""

    def __init__(self, length: int, side: int = 64) -> None:
        self.length, self.side = length, side

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = torch.full((3, self.side, self.side), float(index))
        return {"image": image, "label": index}


class Draws(Dataset):
    """float64 (5,): the index and one draw from each global generator and torch.randn."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(
            [index, random.random(), np.random.rand(), torch.rand(()).item(),
             torch.randn((), dtype=torch.float64).item()],
            dtype=torch.float64,
        )


class OwnGenerator(Numbers):
    """Draws from a NumPy generator that the dataset holds."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.rng = np.random.default_rng(7)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.rng.random()], dtype=torch.float64)


class SeedHook(Numbers):
    """Draws from a generator that only ``seed_sample`` can reach."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.seed: int | None = None

    def seed_sample(self, seed: int) -> None:
        self.seed = seed

    def __getitem__(self, index: int) -> torch.Tensor:
        assert self.seed is not None
        return torch.tensor([index, self.seed % (1 << 31)])


class Failing(Dataset):
    """Sample i is i; at the indices of ``bad`` the given function is called first."""

    def __init__(self, length: int, bad: set[int], fail: Callable[[int], Any]) -> None:
        self.length, self.bad, self.fail = length, bad, fail

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            self.fail(index)
        return index


class Blocking(Dataset):
    """Sample i is i; at ``at`` it sets ``entered`` and waits for ``gate``."""

    def __init__(self, length: int, at: set[int], entered: Any, gate: Any) -> None:
        self.length, self.at, self.entered, self.gate = length, at, entered, gate

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index in self.at:
            self.entered.set()
            self.gate.wait(GATE_S)
        return index


class Environment(Dataset):
    """A worker's view of its own process, as a plain dict."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        info = get_worker_info()
        return {
            "index": index,
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
            "info": None if info is None else (info.id, info.num_workers, info.seed),
            "dataset": info is not None and info.dataset is self,
            "method": getattr(info, "worker_method", None),
            "daemon": __import__("multiprocessing").current_process().daemon,
        }


class Sharded(IterableDataset):
    """range(length) split over the workers by stride."""

    def __init__(self, length: int, sized: bool = False) -> None:
        self.length = length
        if sized:
            self.__class__ = SizedSharded

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.length, step))


class SizedSharded(Sharded):
    """The same with a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


class Uneven(IterableDataset):
    """Worker w yields (w, 0), (w, 1), ... as many as ``counts[w]`` says."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        for number in range(self.counts[worker]):
            yield torch.tensor([worker, number])


class Replicated(IterableDataset):
    """Every worker yields all samples: the mistake that torch's documentation warns about."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class Shared(Dataset):
    """Counts its samples in a Value under a Lock and names them in a Queue."""

    def __init__(self, length: int, context: Any) -> None:
        self.length = length
        self.count = context.Value("i", 0)
        self.lock = context.Lock()
        self.queue = context.Queue()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        with self.lock:
            self.count.value += 1
        self.queue.put(index)
        return index

    def collate(self, samples: list[int]) -> tuple[bool, list[int]]:
        """Whether this dataset is the worker's own, and the samples."""
        info = get_worker_info()
        return info is not None and info.dataset is self, samples


def exit_now(_: int) -> None:
    os._exit(3)


def kill_now(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault_now(_: int) -> None:
    # The default action at once, so that nothing prints a report first.
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def leave_now(_: int) -> None:
    sys.exit(5)


class DieOnce:
    """Kills the worker the first time it is called, counting the calls."""

    def __init__(self, context: Any, deadly: int = 1) -> None:
        self.calls = context.Value("i", 0)
        self.deadly = deadly

    def __call__(self, index: int) -> None:
        with self.calls.get_lock():
            self.calls.value += 1
            die = self.calls.value <= self.deadly
        if die:
            os.kill(os.getpid(), signal.SIGKILL)


def as_is(samples: Any) -> Any:
    """A collate_fn that changes nothing."""
    return samples
