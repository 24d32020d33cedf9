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
from typing import Any

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


# ---- each case, and its advice -----------------------------------------------------------------


def test_waits_at_epoch_starts_advise_prefetch_next_epoch() -> None:
    def loader(**options: Any) -> Any:
        data = Sleeps(24, 0.025)
        return minato.DataLoader(data, 8, num_workers=2, persistent_workers=True, **options)

    before = run(loader(), 0.15, epochs=5)
    name, advice = cause(before)
    assert name == "first batches of later epochs" and "prefetch_next_epoch=True" in advice
    assert "prefetch_factor" not in before["verdict"]
    assert falls(before, run(loader(prefetch_next_epoch=True), 0.15, epochs=5))


def test_slow_first_sample_advises_ready_batches() -> None:
    def loader(**options: Any) -> Any:
        return minato.DataLoader(Sleeps(32, 0.002, {0: 0.5}), 4, num_workers=2, **options)

    name, advice = cause(run(loader(), 0.001))
    assert name == "slow sample in the first batch"
    assert 'in_order=False with batching="ready"' in advice
    assert 0 not in next(iter(loader(in_order=False, batching="ready")))


class SetsUp(Sleeps):
    """The first sample of each worker loads something."""

    ready = False

    def __getitem__(self, index: int) -> Any:
        if not self.ready:
            time.sleep(0.5)
            self.ready = True
        return super().__getitem__(index)


def test_slow_first_use_is_not_blamed_on_a_sample() -> None:
    before = run(minato.DataLoader(SetsUp(48, 0.002), 4, num_workers=2), 0.001)
    name, advice = cause(before, BEGINNING[:1])
    assert name == "first batch" and "the first sample of each worker sets something up" in before["verdict"]
    assert "alone takes" not in before["verdict"] and "ready" not in advice
    assert advice == "persistent_workers=True sets it up once and not in each epoch."


def test_slow_sample_within_an_epoch_advises_ready_batches() -> None:
    def loader(**options: Any) -> Any:
        return minato.DataLoader(Sleeps(64, 0.002, {20: 0.6}), 4, num_workers=2, **options)

    before = run(loader(), 0.01)
    name, advice = cause(before)
    assert name == "slow sample" and "sample 20 alone takes 0.6 s" in before["verdict"]
    assert 'in_order=False with batching="ready"' in advice
    batches = [batch.tolist() for batch in loader(in_order=False, batching="ready")]
    assert 20 not in batches[5]


def test_start_of_workers_advises_persistent_workers() -> None:
    started = multiprocessing.get_context("fork").Value("i", 0)

    def slow_start(_worker: int) -> None:
        time.sleep(0.5)
        with started.get_lock():
            started.value += 1

    def loader(**options: Any) -> Any:
        started.value = 0
        return minato.DataLoader(
            Sleeps(16, 0.001), 4, num_workers=2, worker_init_fn=slow_start, **options
        )

    name, advice = cause(run(loader(), 0.001, epochs=3), ())
    assert name == "start of the workers" and "persistent_workers=True" in advice
    assert started.value == 6
    run(loader(persistent_workers=True), 0.001, epochs=3)
    assert started.value == 2


def test_loading_without_workers_advises_a_number() -> None:
    def loader(workers: int) -> Any:
        return minato.DataLoader(Sleeps(64, 0.02), 4, num_workers=workers)

    before = run(loader(0), 0.05)
    name, advice = cause(before)
    assert name == "no workers" and "of the program's time" in advice
    workers = workers_in(advice)
    assert 2 <= workers <= 4
    assert falls(before, run(loader(workers), 0.05))


@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_too_few_workers_advise_a_number(scheduling: str) -> None:
    def loader(workers: int) -> Any:
        return minato.DataLoader(
            Sleeps(128, 0.02), 4, num_workers=workers, persistent_workers=True,
            scheduling=scheduling,
        )  # fmt: skip

    before = run(loader(2), 0.02)
    name, advice = cause(before)
    assert name == "too few workers" and ("autoscale" in advice) == (scheduling == "balanced")
    assert "iterable" not in advice
    workers = workers_in(advice)
    assert 3 <= workers <= 8
    assert falls(before, run(loader(workers), 0.02))


def test_told_epochs_are_not_advised_to_begin_early() -> None:
    data = Sleeps(16, 0.05)
    sampler = torch.utils.data.DistributedSampler(data, 1, 0)  # type: ignore[var-annotated, arg-type]
    loader = minato.DataLoader(data, 4, sampler=sampler, num_workers=2, persistent_workers=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert len(list(loader)) == 4
    [advice] = [one["advice"] for one in loader.stats()["causes"] if "later epochs" in one["name"]]
    assert "calls set_epoch()" in advice and "prefetch_next_epoch" not in advice


def test_bursts_advise_a_larger_prefetch_factor() -> None:
    def loader(factor: int) -> Any:
        data = Sleeps(160, 0.01)
        return minato.DataLoader(
            data, 1, num_workers=2, persistent_workers=True, prefetch_factor=factor
        )

    def bursts(number: int) -> float:
        return 0.25 if number % 16 == 15 else 0.0

    before = run(loader(1), bursts)
    name, advice = cause(before)
    found = re.search(r"prefetch_factor=(\d+)", advice)
    assert name == "short prefetch window" and found is not None
    assert falls(before, run(loader(2 * int(found[1])), bursts))


def test_shared_lock_is_told_from_too_few_workers() -> None:
    context = multiprocessing.get_context("fork")

    class Locked(Sleeps):
        def __init__(self, locks: int) -> None:
            super().__init__(120, 0.01)
            self.locks = [context.Lock() for _ in range(locks)]

        def __getitem__(self, index: int) -> Any:
            info = minato.get_worker_info()
            assert info is not None
            with self.locks[info.id % len(self.locks)]:
                return super().__getitem__(index)

    def loader(locks: int) -> Any:
        return minato.DataLoader(Locked(locks), 4, num_workers=4, persistent_workers=True)

    before = run(loader(1), 0.02)
    name, advice = cause(before)
    assert name == "shared lock" and "of its own" in advice and "num_workers" not in advice
    assert falls(before, run(loader(4), 0.02))


def test_memory_limit_is_named_and_raised() -> None:
    def loader(limit: str) -> Any:
        data = Sleeps(72, 0.1, floats=1 << 18)
        return minato.DataLoader(
            data, 4, num_workers=4, persistent_workers=True, memory_limit=limit
        )

    def bursts(number: int) -> float:
        return 0.8 if number % 6 == 5 else 0.0

    before = run(loader("6MiB"), bursts)
    name, advice = cause(before)
    assert name == "memory limit" and "Raise memory_limit" in advice
    assert falls(before, run(loader("512MiB"), bursts))


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


def test_facts_for_the_verdict() -> None:
    """The memory limit, a slow collate_fn and a slow sample are named for what they are."""

    class Large(Sleeps):
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(1 << 20)

    def told(loader: Any, words: str) -> None:
        """In the end: a first batch that took long is the cause until it is outweighed."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for _ in loader:
                pass
            if words in loader.stats()["verdict"]:
                return
        raise AssertionError(loader.stats()["verdict"])

    options: dict[str, Any] = {"num_workers": 4, "persistent_workers": True}
    told(
        minato.DataLoader(Large(48, 0.0), 4, memory_limit="48MiB", **options),
        "memory_limit holds them back",
    )

    def collate(batch: list) -> Any:
        time.sleep(0.03)
        return torch.tensor(batch)

    told(
        minato.DataLoader(Sleeps(80, 0.0), 4, collate_fn=collate, **options),
        "most of the work is collate_fn",
    )


def test_a_trainer_that_waits_for_sleeping_samples() -> None:
    loader = minato.DataLoader(Sleeps(30, 0.02), 1, num_workers=1, persistent_workers=True)
    for _ in range(2):
        for _ in loader:
            pass
    stats = loader.stats()
    assert stats["wait"]["share"] > 0.5
    assert stats["verdict"].startswith("The trainer waits")
    worker = stats["workers"][0]
    assert worker["cpu"] < 0.5 * worker["busy"]
