"""The life of threads that are workers, whatever they run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from minato.workers.threads import ThreadPool


class Engine:
    """Records its calls; its stop word is an event."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.stopped = threading.Event()

    def start(self, pidfd: int, commands: int) -> None:
        self.told.append(("start", pidfd, commands))

    def workers(self) -> list[dict[str, int]]:
        return [{"state": 3, "pid": os.getpid(), "status": 0} for _ in range(2)]

    def end_worker(self, number: int, finished: bool) -> None:
        self.told.append(("end", number, finished))

    def stop(self, dismiss: bool = False) -> None:
        self.told.append("dismiss" if dismiss else "stop")
        self.stopped.set()

    def close(self) -> None:
        self.told.append("close")


def pool_of(engine: Engine, works: list[Callable[[], None]], workers: int = 2) -> ThreadPool:
    return ThreadPool(engine, workers, works)  # type: ignore[arg-type]


def test_memory_is_freed_after_last_thread() -> None:
    engine, ended = Engine(), []

    def work() -> None:
        engine.stopped.wait()
        ended.append(list(engine.told))

    pool = pool_of(engine, [work, work])
    pool.start()
    assert pool.mine() and pool.started and pool.starter() is None and not pool.starts_workers()
    pool.stop()
    pool.stop()
    assert engine.told == [("start", -1, -1), "stop", "close"]
    assert ended == 2 * [[("start", -1, -1), "stop"]] and not pool.mine()
    entry = pool.worker_entry(1)
    assert entry is not None and entry["state"] == 0


def test_pool_thread_blocks_signals_and_has_name() -> None:
    seen: list[Any] = []

    def work() -> None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        seen.append((threading.current_thread().name, signal.SIGINT in blocked))

    pool = pool_of(Engine(), [work], workers=1)
    pool.start()
    pool.stop()
    assert seen == [("minato-thread-0", True)]


def test_failed_work_counts_as_ended() -> None:
    engine, told = Engine(), threading.excepthook

    def work() -> None:
        raise ValueError("of a thread")

    threading.excepthook = lambda args: None
    try:
        pool = pool_of(engine, [work])
        pool.start()
        pool.stop()
    finally:
        threading.excepthook = told
    assert engine.told[-1] == "close"


def test_a_handle_asks_for_its_worker_to_end() -> None:
    engine = Engine()
    pool = pool_of(engine, [engine.stopped.wait, engine.stopped.wait])  # type: ignore[list-item]
    pool.start()
    first, second = pool.handles
    assert first.name == "minato-thread-0" and first.pid == os.getpid()
    second.terminate()
    assert engine.told[-1] == ("end", 1, False)
    pool.stop()


def test_at_exit_threads_end_and_memory_stays() -> None:
    engine = Engine()
    pool = pool_of(engine, [engine.stopped.wait])  # type: ignore[list-item]
    pool.start()
    pool.dismiss(time.monotonic() + 10)
    assert engine.told[-1] == "dismiss" and "close" not in engine.told
