"""The verdict names the cause, and its advice helps, in programs that run for seconds.

Samples sleep, and what is compared differs by several times, or is an order or a count. They need a
machine with idle cores, so that `make test` leaves them out (tests/slow.py).
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import minato

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:DataLoader worker"),
]


class Sleeps(torch.utils.data.Dataset[Any]):
    """Samples of a given cost in seconds, some of which cost more."""

    def __init__(self, size: int, seconds: float, slow: Any = (), floats: int = 0) -> None:
        self.size, self.seconds, self.floats = size, seconds, floats
        self.slow: dict[int, float] = dict(slow)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.slow.get(index, self.seconds))
        return torch.zeros(self.floats) if self.floats else index


def run(loader: Any, step: float | Callable[[int], float], epochs: int = 1) -> dict[str, Any]:
    """The statistics after some epochs, in which a step takes some seconds."""
    for _ in range(epochs):
        for number, _batch in enumerate(loader):
            time.sleep(step(number) if callable(step) else step)
    stats: dict[str, Any] = loader.stats()
    return stats


def falls(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether the waits do, a start of new workers left out."""
    return bool(waits(after) < 0.6 * waits(before))


#: what a busy machine makes longer
BEGINNING = ("start of the workers", "first batch")


def waits(stats: dict[str, Any]) -> float:
    start = [c["seconds"] for c in stats["causes"] if c["name"] in BEGINNING]
    return float(stats["wait"]["total"]) - sum(start)


def cause(stats: dict[str, Any], passed: tuple[str, ...] = BEGINNING) -> tuple[str, str]:
    """(name, advice) of the costliest but those; the verdict has the words of the very first."""
    seconds = [c["seconds"] for c in stats["causes"]]
    assert seconds == sorted(seconds, reverse=True)
    assert stats["causes"][0]["advice"] in stats["verdict"]
    first = next(c for c in stats["causes"] if c["name"] not in passed)
    return first["name"], first["advice"]


def workers_in(advice: str) -> int:
    found = re.search(r"num_workers=(\d+)", advice)
    assert found is not None, advice
    return int(found[1])


class SetsUp(Sleeps):
    """The first sample of each worker loads something."""

    ready = False

    def __getitem__(self, index: int) -> Any:
        if not self.ready:
            time.sleep(0.5)
            self.ready = True
        return super().__getitem__(index)


class Locked(Sleeps):
    def __init__(self, locks: int) -> None:
        super().__init__(120, 0.01)
        self.locks = [multiprocessing.get_context("fork").Lock() for _ in range(locks)]

    def __getitem__(self, index: int) -> Any:
        info = minato.get_worker_info()
        assert info is not None
        with self.locks[info.id % len(self.locks)]:
            return super().__getitem__(index)


def slow_start(_worker: int) -> None:
    time.sleep(0.5)


def slow_collate(batch: list[int]) -> torch.Tensor:
    time.sleep(0.03)
    return torch.tensor(batch)


def every(batches: int, seconds: float) -> Callable[[int], float]:
    """Steps in bursts: one in each number of batches takes time."""
    return lambda number: seconds if number % batches == batches - 1 else 0.0


PERSISTENT = {"persistent_workers": True}
READY_ADVICE = 'in_order=False with batching="ready"'


class Case(NamedTuple):
    """A program, what the verdict says of it, and what the advice makes of the program."""

    data: Sleeps
    options: dict[str, Any]
    step: float | Callable[[int], float]
    cause: str
    words: str  # of the advice or the verdict
    better: Callable[[str], dict[str, Any]] | None = None  # than the options, by the advice
    epochs: int = 1
    passed: tuple[str, ...] = BEGINNING


CASES = [
    Case(Sleeps(24, 0.025), {"batch_size": 8, **PERSISTENT}, 0.15, "first batches of later epochs",
         "prefetch_next_epoch=True", lambda _: {"prefetch_next_epoch": True}, epochs=5),
    Case(Sleeps(32, 0.002, {0: 0.5}), {}, 0.001, "slow sample in the first batch", READY_ADVICE),
    Case(Sleeps(64, 0.002, {20: 0.6}), {}, 0.01, "slow sample", READY_ADVICE),
    Case(SetsUp(48, 0.002), {}, 0.001, "first batch",
         "persistent_workers=True sets it up once and not in each epoch.", passed=BEGINNING[:1]),
    Case(Sleeps(16, 0.001), {"worker_init_fn": slow_start}, 0.001, "start of the workers",
         "persistent_workers=True", epochs=3, passed=()),
    Case(Sleeps(64, 0.02), {"num_workers": 0}, 0.05, "no workers", "of the program's time",
         lambda advice: {"num_workers": workers_in(advice)}),
    Case(Sleeps(128, 0.02), PERSISTENT, 0.02, "too few workers", "autoscale",
         lambda advice: {"num_workers": workers_in(advice)}),
    Case(Sleeps(128, 0.02), {"scheduling": "static", **PERSISTENT}, 0.02, "too few workers",
         "num_workers=", lambda advice: {"num_workers": workers_in(advice)}),
    Case(Sleeps(160, 0.01), {"batch_size": 1, "prefetch_factor": 1, **PERSISTENT}, every(16, 0.25),
         "short prefetch window", "prefetch_factor=",
         lambda advice: {"prefetch_factor": 2 * int(advice.split("prefetch_factor=")[1].split()[0])}),
    Case(Locked(1), {"num_workers": 4, **PERSISTENT}, 0.02, "shared lock", "of its own",
         lambda _: {"dataset": Locked(4)}),
    Case(Sleeps(72, 0.1, floats=1 << 18), {"num_workers": 4, "memory_limit": "6MiB", **PERSISTENT},
         every(6, 0.8), "memory limit", "Raise memory_limit", lambda _: {"memory_limit": "512MiB"}),
    Case(Sleeps(80, 0.0), {"num_workers": 4, "collate_fn": slow_collate, **PERSISTENT}, 0.0,
         "too few workers", "most of the work is collate_fn", epochs=4),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.cause)
def test_cause_is_named_and_advice_helps(case: Case) -> None:
    options = {"dataset": case.data, "batch_size": 4, "num_workers": 2, **case.options}
    before = run(minato.DataLoader(**options), case.step, case.epochs)
    name, advice = cause(before, case.passed)
    assert name == case.cause and case.words in advice + before["verdict"]
    if case.better is not None:
        after = minato.DataLoader(**{**options, **case.better(advice)})
        assert falls(before, run(after, case.step, case.epochs))


def test_told_epochs_are_not_advised_to_begin_early() -> None:
    data = Sleeps(16, 0.05)
    sampler = torch.utils.data.DistributedSampler(data, 1, 0)  # type: ignore[var-annotated, arg-type]
    loader = minato.DataLoader(data, 4, sampler=sampler, num_workers=2, persistent_workers=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert len(list(loader)) == 4
    [advice] = [one["advice"] for one in loader.stats()["causes"] if "later epochs" in one["name"]]
    assert "prefetch_next_epoch" not in advice


def test_deaths_and_skipped_samples_leave_the_rest() -> None:
    once = multiprocessing.get_context("fork").Value("i", 0)

    class Fragile(Sleeps):
        def __getitem__(self, index: int) -> Any:
            if index == 9:
                with once.get_lock():
                    once.value += 1
                    dies = once.value == 1
                if dies:
                    os.kill(os.getpid(), signal.SIGKILL)
            if index == 40:
                raise ValueError("40.jpg is corrupt")
            return super().__getitem__(index)

    loader: Any = minato.DataLoader(
        Fragile(96, 0.02), 4, num_workers=2, persistent_workers=True, on_error="skip"
    )
    with pytest.warns(UserWarning, match=r"1 sample of this epoch failed"):
        stats = run(loader, 0.02)
    said = stats["verdict"]
    assert said.startswith("The trainer waits") and "num_workers=" in said
    assert "1 worker(s) died; their samples were made again" in said
    assert "1 skipped; the latest is index 40 (ValueError: 40.jpg is corrupt)." in said
