"""Profilers' signals arrive a thousand times a second, in the trainer and in all its children.

Each interrupts the current system call; the only effect may be the profile.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

import minato

from .datasets import Counting, Noisy, Ragged, Wordy, keep_list
from .support import copied, kill, same

PERIOD_S = 0.001
#: of all processes, since the storm began
ticks = torch.multiprocessing.get_context("fork").Value("q", 0)


def note(*_: Any) -> None:
    ticks.get_obj().value += 1  # without its lock, which the code that it interrupts may have


def profiled(worker: int) -> None:
    """A worker_init_fn as in profilers. A fork inherits the handler, but not the timer."""
    signal.signal(signal.SIGPROF, note)
    signal.setitimer(signal.ITIMER_PROF, PERIOD_S, PERIOD_S)


class Storm(threading.Thread):
    """Sends the signal to this process and its descendants, also while they wait and their CPU
    time does not advance, which a timer would measure."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        self.sent = 0
        self.others = set(psutil.Process().children(recursive=True))  # which it would end

    def run(self) -> None:
        me = psutil.Process()
        while not self.over.wait(PERIOD_S):
            if self.sent % 20 == 0:
                pids = [p.pid for p in {me, *me.children(recursive=True)} - self.others]
            for pid in pids:
                kill(pid, signal.SIGPROF)
            self.sent += 1


@contextlib.contextmanager
def storm() -> Iterator[None]:
    signal.signal(signal.SIGPROF, note)  # stays, for a signal that arrives after the storm
    ticks.get_obj().value = 0
    thread = Storm()
    signal.setitimer(signal.ITIMER_PROF, PERIOD_S, PERIOD_S)
    thread.start()
    try:
        yield
    finally:
        thread.over.set()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
    assert ticks.get_obj().value > 0 and thread.sent > 0


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rows": (lambda: Noisy(60), {"shuffle": True, "persistent_workers": True}),
    "envelopes": (lambda: Wordy(60), {"memory_limit": "3MiB"}),
    "batches": (lambda: Ragged(60), {"collate_fn": keep_list}),
    "static": (lambda: Noisy(60), {"scheduling": "static"}),
    "iterable": (lambda: Counting(60, 0.001), {}),
    "threads": (lambda: Squares(60), {"worker_type": "thread"}),
}


class Squares(torch.utils.data.Dataset):
    """Needs no generators: threads share those."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((30_000,), float(index * index))


def batches(kind: str, **more: Any) -> list[Any]:
    dataset, options = KINDS[kind]
    torch.manual_seed(11)
    loader = minato.DataLoader(dataset(), batch_size=4, num_workers=2, **options, **more)
    return [copied(batch) for _ in range(2) for batch in loader]


@pytest.mark.filterwarnings("ignore:worker_type='thread'. threads share")
@pytest.mark.parametrize("kind", KINDS)
def test_profiled_loader_gives_the_same_batches(kind: str) -> None:
    threads = kind == "threads"  # which get no signals
    expected = batches(kind, worker_init_fn=None if threads else nothing)
    with storm():
        got = batches(kind, worker_init_fn=None if threads else profiled)
    assert same(got, expected)


def nothing(worker: int) -> None:
    """A worker_init_fn."""
