"""The life of a worker process: torch's preparations, then tasks until the loader stops."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import _utils
from torch.utils.data.dataloader import _DatasetKind

from .. import worker_info
from ..errors import not_loaded
from . import library_threads, open_files, signals
from .job import Job
from .runner import Runner, serve, worker_of


def seed_of_all(base_seed: int, starts: int) -> int:
    """The loader's seed, from which torch derives the workers' seeds. The replacement of a worker
    gets another seed, so its random streams do not start over. starts: workers of this number so
    far."""
    if starts <= 1:
        return base_seed
    return int(np.random.SeedSequence((base_seed % 2**64, starts)).generate_state(1, np.uint64)[0] >> 2)


def seed_torch(seed: int) -> None:
    """``torch.manual_seed()``. Seeds only the CPU's generator if this process can use no accelerator.
    Even for kinds that this build of torch lacks, torch formats the stack for a later error
    message. That takes some milliseconds."""
    cuda: Any = torch.cuda
    module = torch.get_device_module()  # of the accelerator that this build has, or torch.cpu
    if module is torch.cpu or (module is cuda and cuda._is_in_bad_fork()):
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def prepare(job: Job, number: int) -> None:
    """The environment that torch gives a worker, in torch's order."""
    handling: Any = _utils.signal_handling  # torch exports it from its extension
    handling._set_worker_signal_handlers()
    signals.leave_to_trainer(job.memory.segment.trainer_pid)  # torch's ends a worker
    torch.multiprocessing._set_thread_name("pt_data_worker")
    library_threads.limit(job.one_thread)
    if job.notes is not None:
        job.notes.show_stack_at_signal()
        os.register_at_fork(after_in_child=job.notes.close)  # processes of samples need none
    base_seed = seed_of_all(job.base_seed, job.memory.segment.starts(number))
    seed = base_seed + number
    random.seed(seed)
    seed_torch(seed)
    np.random.seed(_utils.worker._generate_state(base_seed, number))
    iterable = job.dataset_kind == _DatasetKind.Iterable
    kind = worker_info.watched if iterable else _utils.worker.WorkerInfo
    _utils.worker._worker_info = kind(
        id=number, num_workers=job.num_workers, seed=seed, dataset=job.dataset
    )


def die_before_starter() -> None:
    """Makes the system kill a worker, not the zygote, when memory runs out: other workers can make
    its samples. A worker counts as larger by a tenth of the machine's memory. Does nothing if the
    system refuses."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/oom_score_adj", "r+") as file:
            most = min(int(file.read()) + 100, 1000)
            file.seek(0)
            file.write(str(most))


@contextlib.contextmanager
def may_start_processes() -> Iterator[None]:
    """Inside the block, this process may start others, though it is a daemon. multiprocessing
    forbids that because a killed daemon leaves its children behind. But zygote and workers exit
    when the process that started them is gone."""
    me: Any = multiprocessing.current_process()
    daemon, me._config["daemon"] = me._config.get("daemon"), False
    try:
        yield
    finally:
        me._config["daemon"] = daemon


def allow_processes() -> None:
    """From now on a sample may start and end processes (of a pool, say). The worker still says that
    it is a daemon: else libraries that ask would start a process for each core."""
    me: Any = multiprocessing.current_process()
    me._config["daemon"] = False
    me.__class__ = type(type(me).__name__, (type(me),), {"daemon": True, "__slots__": ()})


def release_signals(job: Job) -> None:
    """Prepares signals for a worker."""
    signals.released(job.blocked, job.memory.segment.trainer_pid, job.handled, job.forked)


def load(job: Job) -> Exception | None:
    """Imports the program and loads the dataset, as torch's workers do before anything else.
    Returns an error for the trainer, or None."""
    library_threads.limit(job.one_thread)
    np.random.seed()  # the other generators differ from the zygote's, too
    try:
        job.load()
    except (Exception, SystemExit) as error:
        return not_loaded(os.getpid(), error)
    finally:
        release_signals(job)  # whatever handlers the program has installed
    return None


def main(job: Job, number: int) -> Runner:
    """The life of worker `number`; returns its runner when the loader stops or is gone."""
    segment = job.memory.segment
    failure = load(job) if job.pickled is not None else None
    job.settle()
    open_files.open_again(job.files)
    segment.dontfork()
    prepare(job, number)
    runner = Runner(job, number, failure)
    worker = worker_of(job, number, runner)
    worker.ready(*runner.init_states)
    while not serve(worker, runner):
        if not segment.trainer_lives():
            with contextlib.suppress(OSError):
                os.kill(os.getppid(), signal.SIGCONT)  # a stopped zygote would never end
            break
    return runner


def run(job: Job, number: int, starts: int) -> None:
    """Target of a worker's process object. starts: number of processes of this worker so far."""
    if not job.memory.segment.claim(number, starts, os.getpid()):
        return  # the zygote died as it forked this process, and another is forked in its place
    allow_processes()
    release_signals(job)
    *parents, first = job.identity
    vars(multiprocessing.current_process())["_identity"] = (*parents, first + number)
    die_before_starter()
    runner = None
    try:
        runner = main(job, number)
    except KeyboardInterrupt:
        pass  # the trainer raises its own
    except BaseException as error:
        if job.notes is not None:
            job.notes.ends(error)
        raise
    job.memory.segment.leaving(number)
    if runner is not None:
        runner.drop_iterator()  # has as long as the exit functions
