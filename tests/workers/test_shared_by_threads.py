"""Loaders and iterators that several threads of the program use at once."""

from __future__ import annotations

import collections
import functools
import queue
import sys
import sysconfig
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attack import support

import minato
from minato.transport.layouts import Layout

PATIENCE = 60.0
wait_for = functools.partial(support.wait_for, seconds=PATIENCE)


class Numbers(torch.utils.data.Dataset):
    """Samples of a large row, which is delivered without a copy, and of values without rows."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"wide": torch.full((9000,), float(index)), "index": index,
                "more": [str(index), np.full(3, index)]}  # fmt: skip


def check(batch: Any) -> list[int]:
    """Checks that the batch is whole; returns its indices."""
    indices = batch["index"].tolist()
    for k, index in enumerate(indices):
        assert (batch["wide"][k] == index).all() and (batch["more"][1][k] == index).all()
        assert batch["more"][0][k] == str(index)
    return indices


def loader_of(length: int, **options: Any) -> minato.DataLoader:
    options = {"batch_size": 4, "num_workers": 2, "worker_type": "thread", **options}
    return minato.DataLoader(Numbers(length), seed_per_sample=False, **options)


def at_once(*works: Callable[[], None]) -> None:
    """Runs each in a thread, and raises what one of them has."""
    failed: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    if failed:
        raise failed[0]


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="Python has a GIL")
def test_the_gil_stays_off() -> None:
    """Nothing that minato loads for a loader switches it on; tests are run without PYTHON_GIL."""
    list(loader_of(4))
    assert not sys._is_gil_enabled()  # type: ignore[attr-defined]


def test_layout_found_by_another_thread_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two iterators look for it at the same time. The first to find it continues with its own."""
    known, prove = threading.Event(), Layout.prove
    second = threading.Event()

    def prove_in_turn(*args: Any) -> Any:
        layout = prove(*args)
        if threading.current_thread() is not threading.main_thread():
            second.set()
            assert known.wait(PATIENCE)
        return layout

    monkeypatch.setattr(Layout, "prove", staticmethod(prove_in_turn))
    loader = loader_of(64)
    other = threading.Thread(target=lambda: [check(batch) for batch in loader])
    other.start()
    assert second.wait(PATIENCE)
    iterator = iter(loader)
    got = [check(next(iterator)) for _ in range(4)]
    known.set()
    other.join(PATIENCE)
    got += [check(batch) for batch in iterator]
    assert sum(got, []) == list(range(64))


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_an_iterator_for_each_thread(kind: str) -> None:
    loader = loader_of(60, worker_type=kind)

    def use() -> None:
        for _ in range(2):
            assert sum((check(batch) for batch in loader), []) == list(range(60))

    at_once(*[use] * (4 if kind == "thread" else 2))


def test_an_iterator_for_all_threads() -> None:
    """Each batch is one thread's. Where the epoch ends, the others find the iterator ended."""
    for _ in range(5):
        iterator = iter(loader_of(400))
        got: collections.Counter[int] = collections.Counter()
        lock = threading.Lock()

        def use() -> None:
            while True:
                try:
                    indices = check(next(iterator))
                except StopIteration:
                    return
                except RuntimeError as error:
                    assert "closed" in str(error)
                    return
                with lock:
                    got.update(indices)

        at_once(*[use] * 4)
        assert got == collections.Counter(range(400))


def test_batches_released_by_other_threads() -> None:
    """Any thread may return the memory of delivered batches."""
    loader = loader_of(1000, batch_size=16, memory_limit=64 << 20)
    given: queue.Queue[Any] = queue.Queue(4)

    def deliver() -> None:
        for _ in range(2):
            for batch in loader:
                given.put(batch)
        for _ in range(3):
            given.put(None)

    def use() -> None:
        kept: collections.deque[Any] = collections.deque(maxlen=3)
        while (batch := given.get()) is not None:
            check(batch)
            kept.append(batch)

    at_once(deliver, use, use, use)


def test_stats_of_a_loader_that_runs() -> None:
    loader, ended = loader_of(200), threading.Event()

    def iterate() -> None:
        for batch in loader:
            check(batch)
        ended.set()

    def look() -> None:
        while not ended.wait(0.002):
            assert loader.stats() is not None and repr(loader)

    at_once(iterate, look, look)


def test_samples_that_change_while_they_are_written() -> None:
    """They fit their rows at any moment, and a row has their content at some moment."""
    box: dict[str, Any] = {"a": 0, "list": [0, 0.5], "inner": {"b": 0}}
    ended = threading.Event()

    class Shared(Numbers):
        def __getitem__(self, index: int) -> Any:
            return box

    loader = minato.DataLoader(
        Shared(2000), batch_size=8, num_workers=3, worker_type="thread", seed_per_sample=False
    )

    def iterate() -> None:
        for batch in loader:
            assert set(batch) == set(box) and (batch["list"][1] >= 0.5).all()
        ended.set()

    def change() -> None:
        n = 0
        while not ended.is_set():
            n += 1
            box["a"], box["list"][0], box["inner"] = n, n, {"b": n}
            box["list"] = [n, n + 0.5]

    at_once(iterate, change)
