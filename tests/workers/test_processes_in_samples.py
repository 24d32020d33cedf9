"""Processes that a sample starts, and loaders in processes that may start none."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

import minato
from minato.workers.process_pool import start_method_context

FORK = multiprocessing.get_context("fork")


def square(number: int) -> int:
    return number * number


def by_pool(index: int) -> int:
    with FORK.Pool(2) as pool:
        return sum(pool.map(square, range(index)))


def by_executor(index: int) -> int:
    with ProcessPoolExecutor(2, mp_context=FORK) as pool:
        return sum(pool.map(square, range(index)))


def by_process(index: int) -> int:
    queue = FORK.SimpleQueue()
    process = FORK.Process(target=lambda: queue.put(sum(map(square, range(index)))))
    process.start()
    found: int = queue.get()
    process.join()
    return found


class Pooled:
    def __init__(self, work: Any) -> None:
        self.work = work

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, bool]:
        return self.work(index), multiprocessing.current_process().daemon


@pytest.mark.parametrize("work", [by_pool, by_executor, by_process])
@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_sample_may_start_processes(work: Any, scheduling: str) -> None:
    loader = minato.DataLoader(Pooled(work), batch_size=2, num_workers=1, scheduling=scheduling,
                               multiprocessing_context="fork")  # fmt: skip
    sums, daemons = zip(*loader)
    assert torch.cat(sums).tolist() == [0, 0, 1, 5]
    assert torch.cat(daemons).all()  # which keeps joblib, for one, from starting more


def test_worker_of_a_server_may_start_processes() -> None:
    loader = minato.DataLoader(Pooled(by_pool), num_workers=1, multiprocessing_context="forkserver")
    assert [int(total) for total, _ in loader] == [0, 0, 1, 5]


def load(method: str) -> list[int]:
    assert multiprocessing.current_process().daemon
    loader = minato.DataLoader(range(4), num_workers=2, multiprocessing_context=method)
    return [int(batch) for batch in loader]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_daemon_may_load_with_workers(method: str) -> None:
    with FORK.Pool(1) as pool:
        assert pool.apply_async(load, (method,)).get(60) == [0, 1, 2, 3]


def test_default_start_method_of_joblib_is_replaced_by_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's workers cannot start by it, and it pickles what a fork would have."""
    loader = minato.DataLoader(torch.arange(4), num_workers=1)
    monkeypatch.setattr(torch.multiprocessing, "get_start_method", lambda: "loky")
    assert start_method_context(loader) is FORK
    given = minato.DataLoader(torch.arange(4), num_workers=1, multiprocessing_context="spawn")
    assert start_method_context(given).get_start_method() == "spawn"
