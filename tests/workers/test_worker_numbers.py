"""autoscale in a running loader: what the worker scheduler remembers, counts and ignores."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import minato

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

DEADLINE_S = 60


class Sleeping(torch.utils.data.Dataset):
    def __init__(self, n: int, seconds: float) -> None:
        self.n, self.seconds = n, seconds

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return index


def active(loader: Any) -> int:
    scheduler = loader.stats()["scheduler"]
    return scheduler["active"] if scheduler is not None else 0


def decisions(loader: Any) -> list[dict[str, Any]]:
    scheduler = loader.stats()["scheduler"]
    return scheduler["decisions"] if scheduler is not None else []


def grown(loader: Any, number: int) -> int:
    """The number of workers after an epoch in which they became this many."""
    it = iter(loader)
    settle(loader, lambda: it._engine.move_to(number), number)
    list(it)
    return active(loader)


def test_next_iterator_starts_with_found_number() -> None:
    """Also without persistent workers: otherwise short epochs would each start at num_workers."""
    loader = minato.DataLoader(Sleeping(80, 0.02), 4, num_workers=1, autoscale=(1, 6))
    found = grown(loader, 4)
    it = iter(loader)
    assert active(loader) >= found > 1
    assert sum(w["state"] != "none" for w in loader.stats()["workers"]) >= found
    assert sorted(i for b in it for i in b.tolist()) == list(range(80))


def test_other_bounds_start_at_num_workers() -> None:
    loader = minato.DataLoader(Sleeping(80, 0.02), 4, num_workers=1, autoscale=(1, 6))
    assert grown(loader, 4) > 1
    loader.autoscale = (1, 5)
    it = iter(loader)
    assert active(loader) == 1
    del it


@pytest.mark.parametrize("saved", [b"", b"x" * 7])
def test_saved_scheduler_format_is_checked(saved: bytes) -> None:
    with pytest.raises(ValueError, match="saved_scheduler is not a value that scheduler"):
        minato._core.Engine(
            1, 1, True, 0, window=2, min_workers=1, max_workers=4, saved_scheduler=saved
        )


def test_saved_number_is_brought_into_range() -> None:
    engine = minato._core.Engine(2, 1, True, 0, window=2, min_workers=1, max_workers=4)
    found = engine.scheduler()
    assert found is not None and found["active"] == 2
    for number, expected in ((0, 1), (3, 3), (9, 4)):
        saved = number.to_bytes(4, "little") + found["saved"][4:]
        other = minato._core.Engine(
            2, 1, True, 0, window=2, min_workers=1, max_workers=4, saved_scheduler=saved
        )
        told = other.scheduler()
        assert told is not None and told["active"] == expected
        other.close()
    engine.close()


def settle(loader: Any, move: Any, expected: int) -> None:
    """Workers that are not starting yet cannot exit, so the move is tried again."""
    deadline = time.monotonic() + DEADLINE_S
    while active(loader) != expected:
        assert time.monotonic() < deadline, loader.stats()
        move()
        time.sleep(0.005)
    move()
    assert active(loader) == expected


def test_the_number_moves_between_low_and_high() -> None:
    loader = minato.DataLoader(Sleeping(64, 0.001), 4, num_workers=3, autoscale=(2, 4))
    it = iter(loader)
    engine = it._engine
    for asked, expected in ((1, 2), (9, 4), (-3, 2), (3, 3)):
        settle(loader, lambda asked=asked: engine.move_to(asked), expected)
    told = loader.stats()["scheduler"]
    assert (told["low"], told["high"]) == (2, 4)
    assert sorted(i for b in it for i in b.tolist()) == list(range(64))


def test_number_may_fall_below_num_workers() -> None:
    loader = minato.DataLoader(Sleeping(8, 0), 4, num_workers=2, autoscale=[1, 2])
    it = iter(loader)
    settle(loader, lambda: it._engine.move_to(0), 1)
    del it


def test_pause_of_trainer_keeps_workers() -> None:
    """A trainer that validates between two epochs, or saves a model within one."""
    loader = minato.DataLoader(
        Sleeping(64, 0.001), 4, num_workers=4, autoscale=(1, 8), persistent_workers=True
    )
    for _ in loader:
        pass
    before = active(loader)
    time.sleep(3)
    assert active(loader) == before
    it = iter(loader)
    next(it)
    time.sleep(3)
    assert active(loader) == before
    assert not [d for d in decisions(loader) if d["to"] < d["from"]]
    del it


def test_one_long_wait_adds_workers() -> None:
    """The trainer asks once and waits: that is seen before it is given its batch."""
    loader = minato.DataLoader(Sleeping(64, 0.2), 64, num_workers=1, autoscale=(1, 3))
    it = iter(loader)
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(next(it)))
    thread.start()
    deadline = time.monotonic() + DEADLINE_S
    while active(loader) == 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    grown_while_waiting = not got and active(loader) > 1
    thread.join()
    assert grown_while_waiting
    assert decisions(loader)[0]["occupancy"] == 0
    del it


# ---- decisions and their reasons -------------------------------------------------------


class Burning(Sleeping):
    """Samples that compute."""

    def __getitem__(self, index: int) -> int:
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        return index


def epochs_until(loader: Any, true: Callable[[list[dict[str, Any]]], bool], pause: float = 0) -> Any:
    """Epochs, with a consumer that takes so long for a batch, until the decisions are such."""
    deadline = time.monotonic() + DEADLINE_S
    while not true(decisions(loader)):
        for _ in loader:
            time.sleep(pause)
            if true(decisions(loader)):
                break
        assert time.monotonic() < deadline, decisions(loader)
    return decisions(loader)


def says(words: str) -> Callable[[list[dict[str, Any]]], bool]:
    return lambda log: any(words in d["why"] for d in log)


def test_waiting_samples_get_more_workers_than_cores() -> None:
    loader = minato.DataLoader(Sleeping(400, 0.02), 4, num_workers=1, autoscale=(1, 12),
                               persistent_workers=True)  # fmt: skip
    cores = minato._core.machine()["cpus"]
    log = epochs_until(loader, lambda log: active(loader) > min(cores, 8))
    grown = [d for d in log if d["to"] > d["from"]]
    assert all(d["occupancy"] <= 0.25 for d in grown)
    assert any("spend their time waiting" in d["why"] and d["wait"] > 0.5 for d in grown)


def test_a_slow_consumer_gets_fewer_workers() -> None:
    loader = minato.DataLoader(Sleeping(4000, 0.0005), 4, num_workers=4, autoscale=(1, 8),
                               persistent_workers=True)  # fmt: skip
    log = epochs_until(loader, says("fewer workers suffice"), pause=0.02)
    shrunk = [d for d in log if "suffice" in d["why"]]
    assert all(d["to"] < d["from"] and d["occupancy"] >= 0.9 for d in shrunk)
    assert active(loader) < 4
    deadline = time.monotonic() + DEADLINE_S
    while sum(w["state"] == "ready" for w in loader.stats()["workers"]) > active(loader):
        assert time.monotonic() < deadline, loader.stats()["workers"]
        time.sleep(0.01)


@pytest.fixture
def one_core() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def test_computing_samples_get_no_more_workers_than_cores(one_core: None) -> None:
    """However many the machine has: this process may use one."""
    assert minato._core.machine()["cpus"] == 1
    loader = minato.DataLoader(Burning(400, 0.004), 4, num_workers=1, autoscale=(1, 8),
                               persistent_workers=True)  # fmt: skip
    log = epochs_until(loader, says("the cores are busy"))
    busy = [d for d in log if "the cores are busy" in d["why"]]
    assert all(d["to"] == d["from"] and d["occupancy"] <= 0.25 for d in busy)
    assert active(loader) <= 2


def test_decisions_are_ordered_and_consistent() -> None:
    loader = minato.DataLoader(Sleeping(400, 0.01), 4, num_workers=1, autoscale=(1, 6),
                               straggler_threshold=None, persistent_workers=True)  # fmt: skip
    log = epochs_until(loader, says("autoscale allows"))
    assert [d["at"] for d in log] == sorted(d["at"] for d in log)
    assert log[0]["from"] == 1 and log[-1]["to"] == active(loader)
    for before, after in zip(log, log[1:]):
        assert before["to"] == after["from"]
    for d in log:
        assert 0 <= d["occupancy"] <= 1 and 0 <= d["wait"] <= 1 and d["rate"] >= 0
        assert 1 <= d["to"] <= 6
