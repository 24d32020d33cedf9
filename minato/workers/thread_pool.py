"""Starts and ends workers that are threads of the loading process.

``native.py`` and ``python_threads.py`` contain the code that the workers run. Threads cannot be killed. So a
running task is never given to another worker, and its memory stays until the task is done.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from .. import _notes
from . import grace, signals
from .process_pool import WorkerHandle

if TYPE_CHECKING:
    from .._core import Engine, _WorkerEntry


class ThreadHandle(WorkerHandle):
    """A worker thread, with the interface of ``multiprocessing.Process``."""

    def __init__(self, pool: ThreadPool, number: int) -> None:
        super().__init__(pool, number)
        self.name = f"minato-{pool.kind}-{number}"

    @property
    def pid(self) -> int:
        """Process id of the loading process, also before the thread has started."""
        owner: int = self._pool.owner
        return owner

    ident = pid

    @property
    def sentinel(self) -> int:
        raise AttributeError("a worker thread has no sentinel; use join()")

    def terminate(self) -> None:
        """Ends the worker after its current sample. Other workers take its tasks."""
        if self.is_alive():
            self._pool.engine.end_worker(self._number)

    kill = terminate


def _run(work: Callable[[], None], ended: threading.Event) -> None:
    """Runs work, then sets ended: the thread no longer uses the mapping."""
    try:
        work()
    finally:
        ended.set()


class ThreadPool:
    """The engine and its threads: an ``Executor``. Belongs to one iterator."""

    kind = "thread"
    #: seconds for which ``stop()`` waits for running samples; None: until they are done
    patience: float | None = None

    def __init__(self, engine: Engine, workers: int, works: Sequence[Callable[[], None]]) -> None:
        """works: the function of each entry in the engine's table. workers: how many start."""
        self.engine = engine
        self.started = self.stopped = False
        self.owner = os.getpid()
        self._entries: list[_WorkerEntry] | None = None
        self._threads: dict[threading.Thread, threading.Event] = {}
        self.handles: list[WorkerHandle] = []
        self._workers = workers
        for number, work in enumerate(works):
            ended = threading.Event()
            thread = threading.Thread(
                target=_run,
                args=(work, ended),
                name=f"minato-{self.kind}-{number}",
                daemon=True,  # or the interpreter would wait before it calls stop_all
            )
            self._threads[thread] = ended

    def start(self) -> None:
        """Starts the threads. After an exception ``stop()`` cleans up. A KeyboardInterrupt comes
        before or after."""
        with signals.Held():
            self.started = True
            self._begin()
            self.engine.start(-1, -1)
            start_quietly(self._threads)
            self.handles += [ThreadHandle(self, w) for w in range(self._workers)]
            _pools.add(self)

    def mine(self) -> bool:
        """Whether this process made the pool: a fork of it did not."""
        return not self.stopped and self.owner == os.getpid()

    def starts_workers(self) -> bool:
        """False: all threads exist from the start."""
        return False

    def starter(self) -> int | None:
        """None: no process starts workers."""
        return None

    def restart(self) -> bool:
        """False: no process starts workers."""
        return False

    def stack_of(self, number: int) -> str:
        """The stack of a worker's thread, the latest call first; empty for a thread in C."""
        thread = list(self._threads)[number]
        frame = sys._current_frames().get(thread.ident or 0)
        if frame is None:
            return ""
        lines = traceback.format_stack(frame)[::-1]
        return _notes.of_the_program([line.splitlines()[0] for line in lines])

    def moving(self) -> str:
        """Empty: threads share their dataset, and what it has grown by."""
        return ""

    def worker_entry(self, number: int) -> _WorkerEntry | None:
        """The engine's entry of a worker, or after the end its last one; None in a fork."""
        if self.owner != os.getpid():
            return None
        entries = self._entries if self._entries is not None else self.engine.workers()
        return entries[number]

    def stop(self) -> None:
        """Ends each worker after its current sample, and frees the memory."""
        if not self.mine():
            return
        self.stopped = True
        self._entries = entries = self.engine.workers()
        for entry in entries:
            entry["state"] = 0
        self.engine.stop()
        # A collection of garbage may run this in a worker thread, which cannot wait for itself.
        itself = threading.current_thread() in self._threads
        if not itself and (self.patience is None or self._wait(time.monotonic() + self.patience)):
            self._close()
        else:
            name, daemon = f"minato-{self.kind}-close", self.patience is not None
            threading.Thread(target=self._close, name=name, daemon=daemon).start()

    def _wait(self, deadline: float) -> bool:
        """Waits for all threads. Returns whether they ended before the deadline."""
        return all(
            ended.wait(max(0.0, deadline - time.monotonic()))
            for thread, ended in self._threads.items()
            if thread.ident is not None
        )

    def _close(self) -> None:
        interrupt = None
        for thread, ended in self._threads.items():
            while thread.ident is not None and not ended.is_set():
                try:
                    ended.wait()  # an interrupted join() may take a running thread for ended
                    thread.join()
                except KeyboardInterrupt as error:  # memory must outlive the threads that write it
                    interrupt = error
        if self.started:
            self._end()
        self.engine.close()
        if interrupt is not None:
            raise interrupt

    def _begin(self) -> None:
        """Called before the threads start."""

    def _end(self) -> None:
        """Called after all threads have ended."""

    def dismiss(self, deadline: float) -> None:
        """At exit: ends the threads, but not the loader. A daemon thread that waits for a batch
        raises no error and ends with the interpreter. deadline: for threads that may take forever,
        also after stop()."""
        if not self.mine():
            if self.owner == os.getpid() and self.patience is not None:
                self._wait(deadline)
            return
        self.stopped = True
        for thread, ended in self._threads.items():
            while thread.ident is not None and not ended.wait(0.02):
                self.engine.dismiss()
                if self.patience is not None and time.monotonic() >= deadline:
                    break


def start_quietly(threads: Iterable[threading.Thread]) -> None:
    """Starts threads with all signals blocked, so that the program's own threads get them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        for thread in threads:
            thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_pools: weakref.WeakSet[ThreadPool] = weakref.WeakSet()


@atexit.register
def stop_all() -> None:
    """Ends the threads of all pools before the interpreter frees its memory."""
    deadline = time.monotonic() + grace.EXIT
    for pool in list(_pools):
        pool.dismiss(deadline)
