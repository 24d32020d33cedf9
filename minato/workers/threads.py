"""Workers that are threads of the loading process: how they start and end, and Python's.

Threads cannot be killed. So a running task is never given to another worker, and its memory stays
until the task is done. ``native.py`` contains the code of threads in C.

``worker_type="thread"``: Python threads run the same loop as worker processes (``runner.py``) on the
same run queues. They write to the
same rows, so the batches are the same. But they share the dataset with each other and with the
program. Nothing is pickled or copied, and each worker has its own data only in a
``threading.local``. So these workers do not touch what belongs to the whole process: the generators
of ``random``, NumPy and torch, signal handlers, thread pools of libraries.
"""

from __future__ import annotations

import atexit
import contextvars
import functools
import os
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.dataloader import _DatasetKind

from .. import worker_exits, worker_info
from ..errors import program_level
from ..option_values import option
from ..seeding.find_generators import GrowingInThread, OwnSeeds, find_of, find_shared
from ..worker_exits import Notes
from . import library_threads, signals
from .job import Job
from .process_pool import Executor, WorkerHandle
from .runner import Runner, serve, worker_of
from .zygote import LEAVE

if TYPE_CHECKING:
    from .._core import Engine

#: the interpreter, at its exit, waits this many seconds for threads in the middle of a sample
EXIT = 2.0


class ThreadHandle(WorkerHandle):
    """A worker thread, with the interface of ``multiprocessing.Process``."""

    def __init__(self, pool: ThreadPool, number: int) -> None:
        super().__init__(pool, number)
        self.name = f"minato-{pool.kind}-{number}"

    @property
    def pid(self) -> int:
        """Process id of the loading process, also before the thread has started."""
        owner: int = self._pool._owner
        return owner

    ident = pid

    @property
    def sentinel(self) -> int:
        raise AttributeError("a worker thread has no sentinel; use join()")

    def terminate(self) -> None:
        """Ends the worker after its current sample. Other workers take its tasks."""
        if self.is_alive():
            self._pool.engine.end_worker(self._number, False)

    kill = terminate


def _run(work: Callable[[], None], ended: threading.Event) -> None:
    """Runs work, then sets ended: the thread no longer uses the mapping."""
    try:
        work()
    finally:
        ended.set()


class ThreadPool(Executor):
    """The engine and its threads."""

    kind = "thread"
    #: seconds for which ``stop()`` waits for running samples; None: until they are done
    patience: float | None = None

    def __init__(self, engine: Engine, workers: int, works: Sequence[Callable[[], None]]) -> None:
        """works: the function of each entry in the engine's table. workers: how many start."""
        super().__init__(engine, workers)
        self._threads: dict[threading.Thread, threading.Event] = {}
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
        with signals.Held():
            self.started = True
            self._begin()
            self.engine.start(-1, -1)
            start_quietly(self._threads)
            self.handles += [ThreadHandle(self, w) for w in range(self._workers)]
            _pools.add(self)

    def stack_of(self, number: int) -> str:
        """The stack of a worker's thread, the latest call first; empty for a thread in C."""
        thread = list(self._threads)[number]
        frame = sys._current_frames().get(thread.ident or 0)
        if frame is None:
            return ""
        lines = traceback.format_stack(frame)[::-1]
        return worker_exits.of_the_program([line.splitlines()[0] for line in lines])

    def stop(self) -> None:
        """Ends each worker after its current sample, and frees the memory."""
        if not self.mine():
            return
        self.stopped = True
        self._keep_entries()
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
            if self._owner == os.getpid() and self.patience is not None:
                self._wait(deadline)
            return
        self.stopped = True
        for thread, ended in self._threads.items():
            while thread.ident is not None and not ended.wait(0.02):
                self.engine.stop(True)
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
    deadline = time.monotonic() + EXIT
    for pool in list(_pools):
        pool.dismiss(deadline)


def why_not(loader: Any) -> str | None:
    """The reason why threads cannot serve this loader, and what to do about it; None: they can."""
    if loader.num_workers == 0:
        return "num_workers is 0. Set it to the number of threads"
    if loader._dataset_kind != _DatasetKind.Map:
        return (
            "its dataset is iterable: threads would share the one object that each worker goes "
            "through by itself. Use worker_type='process'"
        )
    if option(loader, "scheduling") == "static":
        return (
            "scheduling='static' needs the random streams of processes. Use "
            "scheduling='balanced'"
        )
    if loader.multiprocessing_context is not None:
        return "multiprocessing_context asks for processes. Leave one of the two out"
    remote = option(loader, "remote") is not None
    if (retries := option(loader, "max_retries")) > 1 and not remote:
        return (
            f"max_retries={retries} has no effect: a thread cannot be killed, and its samples are "
            "not tried again. Leave it out"
        )
    if (seconds := option(loader, "sample_timeout")) is not None:
        return f"sample_timeout={seconds} has no effect: a thread cannot be killed. Leave it out"
    seeds = option(loader, "seed_per_sample") and not remote
    if seeds and not find_of(loader.dataset, loader.collate_fn).hooks:
        return (
            "seed_per_sample=True needs a dataset with seed_sample(seed): threads share the "
            "generators of random, NumPy and torch, which cannot be seeded for each"
        )
    reason: str | None = loader._why_torch()
    return reason if reason is None else f"{reason}. Use worker_type='process'"


def warn_of_generators(dataset: Any, collate_fn: Any) -> None:
    """Warns if samples may draw from generators that threads share."""
    found = find_of(dataset, collate_fn)
    if found.hooks:
        return
    shared = find_shared(dataset, collate_fn)
    if found.generators and not shared:  # each thread has its own
        return
    own = ""
    if shared:
        names = ", ".join(sorted({type(g).__name__ for g in shared}))
        own = f", and with each other those that the dataset holds ({names})"
    warnings.warn(
        "worker_type='thread': threads share the generators of random, NumPy and torch with the "
        f"program{own}, so these are not seeded for each sample, and samples draw different numbers "
        "in each run. Give the dataset a seed_sample(seed) that puts a generator into a "
        "threading.local, and draw from that. If samples draw nothing, set seed_per_sample=False. "
        "This warning is shown once.",
        stacklevel=program_level(),
    )


class _Runner(Runner):
    """The runner of a worker thread."""

    has_copy = False

    def _make_seeder(self, before: OwnSeeds | None) -> Any:
        return GrowingInThread(self.job.dataset, self.job.collate_fn, before=before).seeder


class Modes:
    """State of the thread that made the loader, which a forked worker inherits and a thread does
    not: torch's modes and context variables."""

    def __init__(self) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        self._context = contextvars.copy_context()  # holds the state of NumPy's errstate()

    def run(self, work: Callable[[], None]) -> None:
        """Runs the function with this state."""
        self._context.copy().run(self._in_torchs, work)

    def _in_torchs(self, work: Callable[[], None]) -> None:
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad):
            work()


def _work(
    job: Job,
    number: int,
    blocked: set[int | signal.Signals],
    one_thread: Callable[[], None],
    make: Callable[[Job, int], Runner],
) -> None:
    """The life of a worker's thread. blocked: signals blocked in the thread that made the loader.
    one_thread: limits the threads that libraries start for the calling thread. make: makes the
    runner."""
    # Programs that a dataset starts inherit the mask, so it must not be that of the start.
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    segment = job.memory.segment
    if not segment.await_wanted(number):
        return
    try:
        one_thread()
        worker_info.be_worker(
            id=number,
            num_workers=job.num_workers,
            seed=job.base_seed + number,
            dataset=job.dataset,
        )
        runner = make(job, number)
        worker = worker_of(job, number, runner, thread=True)
        worker.ready()
        serve(worker, runner)
    except BaseException as error:
        if segment.over():
            return  # the loader has stopped, and no code reads the error
        if job.notes is not None:
            job.notes.ends(error)
        segment.exited(number, 1)  # its current task is lost, and the loader raises an error
        raise


class PythonPool(ThreadPool):
    """The engine and its Python threads."""

    kind = "thread"
    patience = LEAVE  # a sample may take forever

    def __init__(
        self,
        engine: Engine,
        workers: int,
        job: Job,
        runner: Callable[[Job, int], Runner] = _Runner,
    ) -> None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._notes = job.notes = Notes()
        one_thread, modes = library_threads.limit_of_threads(), Modes()

        def work_of(number: int) -> Callable[[], None]:
            work = functools.partial(_work, job, number, blocked, one_thread, runner)
            return functools.partial(modes.run, work)

        super().__init__(engine, workers, [work_of(n) for n in range(engine.segment.workers)])

    def _begin(self) -> None:
        worker_info.begin()

    def _end(self) -> None:
        worker_info.end()
        self._notes.close()
