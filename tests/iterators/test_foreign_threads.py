"""Workers that wait for threads of the program, which a fork does not have."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import minato
from minato.iterators import supervisor as foreign_threads


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_threads, "SECONDS", 0.2)
    monkeypatch.setattr(foreign_threads, "LOOK", 0.1)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, thread_name_prefix="decoder") as executor:
        executor.submit(int).result()  # its thread is started, and idle
        yield executor


class Waiting:
    """Its samples are made by a thread that is not in a fork."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self.executor = executor

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.executor.submit(int, index).result()


@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_threads_missing_in_a_fork_are_named(
    executor: ThreadPoolExecutor, scheduling: str
) -> None:
    loader = minato.DataLoader(Waiting(executor), num_workers=2, multiprocessing_context="fork",
                               scheduling=scheduling, timeout=60)  # fmt: skip
    with warnings.catch_warnings(), pytest.raises(UserWarning) as caught:
        warnings.filterwarnings("error", "All 2 workers")  # which ends the wait
        list(loader)
    assert "decoder_0" in str(caught.value) and "'forkserver'" in str(caught.value)


class Slow:
    def __init__(self, work: Any) -> None:
        self.work = work

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        self.work()
        return index


def compute() -> None:
    end = time.process_time() + 0.6
    while time.process_time() < end:
        pass


@pytest.mark.parametrize("work", [compute, lambda: time.sleep(0.6)], ids=["computes", "sleeps"])
def test_slow_first_samples_do_not_warn(executor: ThreadPoolExecutor, work: Any) -> None:
    loader = minato.DataLoader(Slow(work), num_workers=2, multiprocessing_context="fork")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [int(batch) for batch in loader] == [0, 1]


def test_names_are_of_threads_a_fork_would_miss(executor: ThreadPoolExecutor) -> None:
    own = threading.Thread(target=threading.Event().wait, args=(5,), name="minato-something")
    own.daemon = True
    own.start()
    names = foreign_threads.foreign_threads()
    assert "decoder_0" in names
    assert not {"MainThread", "minato-something"}.intersection(names)
