"""``worker_type="thread"``: Python threads of the loading process as workers.

They run the same loop as worker processes (``runner.py``) on the same run queues. They write to the
same rows, so the batches are the same. But they share the dataset with each other and with the
program. Nothing is pickled or copied, and each worker has its own data only in a
``threading.local``. So these workers do not touch what belongs to the whole process: the generators
of ``random``, NumPy and torch, signal handlers, thread pools of libraries.
"""

from __future__ import annotations

import contextvars
import functools
import signal
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data.dataloader import _DatasetKind

from .. import _core, worker_info
from .._notes import Notes
from ..option_values import option
from ..seeding.find_generators import find_of, find_shared, make_seeder_of_thread, own_seeds
from . import grace, library_threads
from .job import Job, Memory
from .runner import Runner, serve, worker_of
from .thread_pool import ThreadPool


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


def warn_of_generators(dataset: Any, collate_fn: Any) -> bool:
    """Warns if samples may draw from generators that threads share. Returns whether it warned."""
    found = find_of(dataset, collate_fn)
    if found.hooks:
        return False
    shared = find_shared(dataset, collate_fn)
    if found.generators and not shared:  # each thread has its own
        return False
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
        stacklevel=2,
    )
    return True


class _Runner(Runner):
    """The runner of a worker thread."""

    has_copy = False

    def _begin(self, number: int) -> None:
        job, roots = self.job, (self.job.dataset, self.job.collate_fn)
        before = None
        if job.worker_init_fn is not None:
            before = own_seeds(*roots) if job.seed_per_sample else None
            self._init(number)
        if job.seed_per_sample:
            self.seeder = make_seeder_of_thread(*roots, before=before)


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
    patience = grace.LEAVE  # a sample may take forever

    def __init__(
        self,
        *,
        workers: int,
        memory_limit: int,
        options: dict[str, Any],
        job: dict[str, Any],
        runner: Callable[[Job, int], Runner] = _Runner,
    ) -> None:
        engine = _core.Engine(workers, 0, False, memory_limit, **options)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._notes = Notes()
        shared = Job(
            memory=Memory(engine.segment, engine.fd),
            one_thread=True,
            blocked=frozenset(),
            notes=self._notes,
            **job,
        )

        one_thread, modes = library_threads.limit_of_threads(), Modes()

        def work_of(number: int) -> Callable[[], None]:
            work = functools.partial(_work, shared, number, blocked, one_thread, runner)
            return functools.partial(modes.run, work)

        super().__init__(engine, workers, [work_of(n) for n in range(engine.segment.workers)])

    def _begin(self) -> None:
        worker_info.begin()

    def _end(self) -> None:
        worker_info.end()
        self._notes.close()
