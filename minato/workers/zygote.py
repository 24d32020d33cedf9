"""The zygote: the process that forks workers, reports their deaths and reaps them. And its forks: the
life of a worker process.

The zygote is a process of the loader's own multiprocessing context, which starts at ``iter()`` and
ends with the iterator.  Under fork it inherits the dataset in the state that torch's workers would
inherit. Under spawn and forkserver it imports torch, NumPy and minato, and nothing of the program.
Each worker imports the program and loads the dataset by itself.

Only the zygote can reap its workers.  It reports (pid, status), waits until the loader has taken
the dead worker's tasks back, and only then reaps.  So the process id names the dead worker as long
as the loader needs it.

If the zygote is killed, its workers go on.  The loader starts another zygote when ``next()`` has to
wait (``Pool.restart``), which goes on from what the table of workers says:

- A living worker: the new zygote watches it by a pidfd, without the exit status.
- A worker that had just been forked, and was not recorded: its entry is STARTING and has no process
  id.  The new zygote takes the entry back by exchanging the word in which the worker would claim
  it.  A worker that comes too late exits, and another is forked.
- A dead worker, before or after its report: its entry is READY, EXITED, SWEPT or WANTED, and the new
  zygote continues from there.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import random
import select
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch.utils.data import _utils
from torch.utils.data.dataloader import _DatasetKind

from .. import _core, worker_info
from .._system import NOT_STARTED
from ..errors import UNKNOWN, not_loaded
from ..seeding import generator_states
from . import library_threads, signals
from .job import Job, open_again
from .runner import Runner, serve, worker_of

WANTED, EXITED, SWEPT, LEAVING = (
    _core.WORKER_WANTED, _core.WORKER_EXITED, _core.WORKER_SWEPT, _core.WORKER_LEAVING,
)  # fmt: skip
UNKNOWN_START, FORKED, THREADS = _core.START_UNKNOWN, _core.START_FORKED, _core.START_THREADS

#: from Python 3.13 on an exit function, and not the end of _bootstrap(), runs what multiprocessing
#: has registered for the end of a process. This flushes queues, say
ENDS_AT_EXIT = "_exit_function" not in vars(BaseProcess)["_bootstrap"].__code__.co_names

#: how often the zygote checks whether the loader has handled a death
ACK_SECONDS = 0.01
#: how often children are checked without a signal: a sanitizer delays signals, and a library may
#: have replaced the handler
CHECK_SECONDS = 1.0
#: how long the zygote retries a refused replacement before it reports that to the loader
REFUSED_SECONDS = 10.0

# How long each process waits for others during a shutdown, in seconds.
#
# The zygote waits LEAVE and then TERM for workers in the middle of a sample, then kills them. The
# trainer waits STOP for the zygote, which is longer than both together, then kills what is left. So a
# shutdown takes about a second at most, with two exceptions. The system may be slow to end a killed
# process. And a worker that has made its last sample may take FINISH to end its process. In this
# time it runs exit functions and flushes queues and files. Threads cannot be killed: after LEAVE the
# trainer goes on without waiting.

#: the zygote waits for workers to exit by themselves after the loader's request
LEAVE = 0.35
#: then the zygote waits for workers to obey SIGTERM
TERM = 0.15
#: then the zygote waits for the end of the workers that it has killed
KILLED = 1.0
#: limit on each of LEAVE, TERM and FINISH once the zygote has got SIGTERM: multiprocessing sends
#: it when the interpreter exits
TERMINATED = 0.05
#: the trainer waits for the zygote to do all of this
STOP = 0.8
#: the zygote waits for workers at the end of their process; torch waits as long for each
FINISH = 5.0
#: the trainer waits for the end of the processes that it has killed
KILL = 5.0


def _parent(pid: int) -> list[int]:
    """A pidfd of the process with this id, if it is the living parent; else nothing."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return []
    if os.getppid() != pid:  # a fork server's child, or an id of another PID namespace
        os.close(fd)
        return []
    return [fd]


def wake_pipe() -> tuple[int, int]:
    """A pipe that signals write to, so that a signal ends a wait."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read, write


def drain(read: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(read, 4096)


class Child:
    """A worker process, forked here or started by the start method."""

    def __init__(self, number: int, pid: int, process: Any = None) -> None:
        self.number = number
        self.pid = pid
        self.process = process  # holds resources of the child until it is reaped
        self.reported = False

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def ended(self) -> int | None:
        """Exit code, or minus the signal, once it is dead. Does not reap it."""
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def reap(self) -> None:
        os.waitpid(self.pid, 0)


class Adopted(Child):
    """A worker of a dead zygote, or one that the system refused to fork, whose pid is 0. A pidfd shows
    its death, without the exit status."""

    def __init__(self, number: int, pid: int, segment: Any) -> None:
        super().__init__(number, pid)
        self.segment = segment
        self._pidfd: int | None = None

    def _was_reported(self) -> bool:
        return self.segment.state(self.number) in (EXITED, SWEPT)

    def signal(self, number: int) -> None:
        """Signals a worker that has no parent any more. It ignores SIGTERM from a process that is
        not its parent, unless the program has a handler; SIGKILL follows. (A signal to pid 0 would go
        to the whole group.)"""
        if self.pid != 0 and not self._was_reported():
            super().signal(number)

    def ended(self) -> int | None:
        self.reported |= self._was_reported()
        return UNKNOWN if self.reported or self._is_gone() else None

    def _is_gone(self) -> bool:
        if self._pidfd is None:
            if self.pid == 0:
                return True
            try:
                self._pidfd = os.pidfd_open(self.pid)
            except ProcessLookupError:
                return True
            except OSError:  # no descriptor is free: the next check may get one
                return False
        gone = select.poll()
        gone.register(self._pidfd, select.POLLIN)
        return bool(gone.poll(0))

    def reap(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)


def runs_threads() -> bool:
    """Whether this process has threads that a fork would lack, so that code that needs them would
    hang there. Packages may start threads when they are imported, or with the interpreter. The
    threads of NumPy's OpenBLAS end when the process forks."""
    if threading.active_count() > 1:
        return True
    tasks = "/proc/self/task"
    if not os.path.exists(tasks) or len(os.listdir(tasks)) == 1:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 and later warn of forks next to threads
        pid = os.fork()
        if pid == 0:
            os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir(tasks)) > 1


@dataclass
class _DelayedStart:
    """A replacement that is to be forked later. The system has refused another process, or several
    workers in a row died before they finished a sample."""

    again: float  # time of the next attempt
    since: float  # time when it was due
    pause: float = 0.02


class Zygote:
    def __init__(self, job: Job, commands: Connection, method: str) -> None:
        self.job = job
        self.segment = job.memory.segment
        self.commands = commands
        self.method = method
        #: by number; at first the workers of a dead zygote
        self.children: dict[int, Child] = {
            number: Adopted(number, pid, self.segment)
            for number in range(self.segment.workers)
            if (pid := self.segment.adopt(number)) is not None
        }
        self.started = set(self.children)  # numbers of workers that were started
        self.delayed: dict[int, _DelayedStart] = {}  # delayed replacements, by number
        self.terminated = False  # SIGTERM has come
        self.orphaned = False  # the trainer is gone
        self.start = THREADS if method != "fork" and runs_threads() else FORKED
        if self.start == FORKED:
            job.memory.settle()
            if job.pickled is not None:
                job.pickled.load_apart()
        self.segment.set_start(self.start)  # under fork the trainer has set it already

    # ---- starting --------------------------------------------------------------------

    def start_wanted(self) -> None:
        for number in range(self.segment.workers):
            if self.terminated:
                return
            delayed = self.delayed.get(number)
            waits = delayed is not None and time.monotonic() < delayed.again
            if self.segment.state(number) != WANTED or waits or number in self.children:
                continue  # a WANTED entry with a child: a living worker has damaged it
            self.segment.starting(number)
            try:
                forked = self.start == FORKED
                child = self._fork(number) if forked else self._start(number)
                self.segment.claim(number, self.segment.starts(number), child.pid)
                self.started.add(number)
            except OSError as error:
                if number in self.started and self._delay_start(number):
                    self.segment.not_started(number)
                    continue
                child = self._refused(number, error)
            self.children[number] = child
            self.delayed.pop(number, None)

    def _refused(self, number: int, error: OSError) -> Child:
        """Reports to the loader, like a death, that the system has refused to fork a worker."""
        self.segment.exited(number, NOT_STARTED + (error.errno or 0))
        return Adopted(number, 0, self.segment)

    def _delay_start(self, number: int) -> bool:
        """Delays a replacement. Returns False after REFUSED_SECONDS: a limit that is shared with
        other processes is often free again a moment later."""
        now = time.monotonic()
        delayed = self.delayed.setdefault(number, _DelayedStart(now, now))
        delayed.again = now + delayed.pause
        delayed.pause = min(2 * delayed.pause, 1.0)
        return now < delayed.since + REFUSED_SECONDS

    def _poll_timeout(self, pending: bool) -> float:
        """Milliseconds until the next check that no event triggers."""
        now = time.monotonic()
        left = [max(0.0, delayed.again - now) for delayed in self.delayed.values()]
        return 1000 * min([ACK_SECONDS if pending else CHECK_SECONDS, *left])

    def _process(self, number: int, context: Any) -> Any:
        process = context.Process(
            target=run_worker,
            args=(self.job, number, self.segment.starts(number)),
            name=f"minato-worker-{number}",
            daemon=True,
        )
        # the default for processes that the worker starts, as in torch's workers
        process._start_method = self.method
        return process

    def _fork(self, number: int) -> Child:
        process = self._process(number, multiprocessing.get_context("fork"))
        vars(util)["_flush_std_streams"]()
        # SIGTERM must end a new worker and not run the zygote's handler: it is blocked until the
        # child has reset the handler.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid = -1
        # a function that the program has registered for forks may hang here
        _core.die_with_parent(True)
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                _core.die_with_parent(False)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if pid == 0:
            code = 1
            try:
                self._in_child()
                if ENDS_AT_EXIT and self.method == "fork":  # as multiprocessing does
                    atexit._clear()
                    atexit.register(vars(util)["_exit_function"])
                # multiprocessing's preparation of a process: finalizers, stdio, name
                code = process._bootstrap()
            finally:
                if ENDS_AT_EXIT or self.method == "spawn":  # as multiprocessing's own processes
                    atexit._run_exitfuncs()
                os._exit(code)
        return Child(number, pid)

    def _in_child(self) -> None:
        signal.set_wakeup_fd(-1)
        for fd in (self.wake_read, self.wake_write, *self.trainer[1:]):
            os.close(fd)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signals.leave_to_trainer(self.segment.trainer_pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self.commands.close()

    def _start(self, number: int) -> Child:
        # spawn for forkserver, too: the zygote can only reap its own children
        process = self._process(number, multiprocessing.get_context("spawn"))
        with may_start_processes(), signals.ignored():
            process.start()
        # multiprocessing reaps its dead children whenever it starts another
        vars(multiprocessing.process)["_children"].discard(process)
        return Child(number, process.pid, process)

    # ---- watching --------------------------------------------------------------------

    def run(self) -> None:
        """Starts and watches the workers, and ends them with the loader or the trainer."""
        self._watch()
        self._end_workers()

    def _is_over(self) -> bool:
        return self.orphaned or self.terminated or self.segment.stopped()

    def _watch(self) -> None:
        """Returns when the loader or the trainer has ended."""
        try:
            poller = self._listen()
        except OSError as error:
            for number in {*range(self.segment.workers)} - self.children.keys():
                self._refused(number, error)
            return
        self.start_wanted()
        while not self._is_over():
            ready = dict(poller.poll(self._poll_timeout(self._report())))
            self.orphaned = not ready.keys().isdisjoint(self.trainer)
            if self.commands.fileno() in ready:
                try:
                    told = os.read(self.commands.fileno(), 4096)
                except BlockingIOError:
                    told = b"!"
                if not told:  # the loader closed the pipe in the middle of its own start
                    return
            if self.wake_read in ready:
                drain(self.wake_read)
            if not self.orphaned:
                self.start_wanted()

    def _listen(self) -> select.poll:
        self.wake_read, self.wake_write = wake_pipe()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # readable when the trainer ends
        self.trainer = [self.segment.lifeline, *_parent(self.segment.trainer_pid)]
        poller = select.poll()
        for fd in (self.wake_read, self.commands.fileno(), *self.trainer):
            poller.register(fd, select.POLLIN)
        return poller

    def terminate(self, _number: int, _frame: Any) -> None:
        """Handler of SIGTERM, by which multiprocessing ends its daemons when the interpreter exits.
        It only sets a flag: a forked worker may not be among the children yet. The pipe of
        wake-ups ends a wait."""
        self.terminated = True

    def _report(self) -> bool:
        """Reports dead workers, and reaps those that the loader has handled. Returns whether some
        are left to reap."""
        pending = False
        for child in list(self.children.values()):
            if not child.reported:
                status = child.ended()
                if status is None:
                    continue
                if not child.reported:
                    self.segment.exited(child.number, status)
                    child.reported = True
            pause_ms = self.segment.reap(child.number)
            if pause_ms is None:
                pending = True
                continue
            child.reap()
            del self.children[child.number]
            if pause_ms > 0:
                due = time.monotonic() + pause_ms / 1000
                self.delayed[child.number] = _DelayedStart(due, due)
            elif pause_ms == 0:
                self.start_wanted()
        return pending

    # ---- ending ----------------------------------------------------------------------

    def _signal_children(self, term: float, leaving: bool) -> bool:
        """Sends SIGTERM, and after term seconds SIGKILL. leaving: also to workers that have done
        their last task. Returns whether all have ended."""
        for number, seconds in ((signal.SIGTERM, term), (signal.SIGKILL, 0.0)):
            for child in self.children.values():
                if leaving or self.segment.state(child.number) != LEAVING:
                    child.signal(number)
            if self._await_children(seconds):
                return True
        return False

    def _await_children(self, seconds: float, terminated: float = TERMINATED) -> bool:
        """Reaps the children that end within this many seconds, or within ``terminated`` seconds
        once SIGTERM has come. Returns whether none are left."""
        begun = time.monotonic()
        woken = select.poll()
        woken.register(self.wake_read, select.POLLIN)
        while True:
            for child in list(self.children.values()):
                status = child.ended()
                if status is not None:
                    if not child.reported:
                        self.segment.exited(child.number, status)
                    child.reap()
                    del self.children[child.number]
            if not self.children:
                return True
            most = min(seconds, terminated) if self.terminated else seconds
            left = begun + most - time.monotonic()
            if left <= 0:
                return False
            woken.poll(1000 * min(left, 0.02))
            drain(self.wake_read)

    def _end_workers(self) -> None:
        if not self.children:
            return
        if self.orphaned:
            self._end(0.0, 0.0)
        elif self.segment.stopped() and not self.terminated:
            self._end(LEAVE, TERM, FINISH)
        else:
            self._end(0.0, TERM)

    def _end(self, leave: float, term: float, finish: float = 0.0) -> None:
        """Ends the workers. leave: seconds to exit by themselves; term: then to obey SIGTERM;
        finish: for the exit functions of workers that have done their last task."""
        begun = time.monotonic()
        if self._await_children(leave):
            return
        if finish > 0:
            if self._signal_children(term, False):
                return
            if self._await_children(begun + finish - time.monotonic()):
                return
        if not self._signal_children(term, True):
            self._await_children(KILLED, KILLED)


def main(job: Job, commands: Connection, unused: int | None, method: str) -> None:
    """Target of the process that the trainer starts."""
    try:
        signals.released(job)
        if unused is not None:
            os.close(unused)  # the loader's end, inherited by a fork
        library_threads.limit(job.one_thread, known=job.forked)
        torch.multiprocessing._set_thread_name("minato_zygote")
        zygote = Zygote(job, commands, method)
        if job.seed_per_sample and zygote.start == FORKED and not job.forked:
            generator_states.probe_globals()
        gc.freeze()  # so that collections in workers do not write to the pages they share with it
        # Signals have an effect only if the trainer or the parent sends them.
        signal.signal(signal.SIGTERM, zygote.terminate)
        signals.leave_to_trainer(zygote.segment.trainer_pid, {signal.SIGTERM, *job.handled})
        zygote.run()
    except BaseException as error:
        if job.notes is not None:
            job.notes.ends(error)
        raise
    if zygote.terminated:
        os._exit(0)  # as by a signal, so without exit functions


# ---- a worker -----------------------------------------------------------------------------


def seed_worker(base_seed: int, starts: int, number: int) -> int:
    """Seeds a worker's process as torch does, from the loader's seed. Returns the worker's seed. The
    replacement of a worker gets another one, so its random streams do not start over. starts: workers
    of this number so far."""
    if starts > 1:
        sequence = np.random.SeedSequence((base_seed % 2**64, starts))
        base_seed = int(sequence.generate_state(1, np.uint64)[0] >> 2)
    random.seed(base_seed + number)
    seed_torch(base_seed + number)
    np.random.seed(_utils.worker._generate_state(base_seed, number))
    return base_seed + number


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


def _prepare(job: Job, number: int) -> None:
    """The environment that torch gives a worker, in torch's order."""
    handling: Any = _utils.signal_handling  # torch exports it from its extension
    handling._set_worker_signal_handlers()
    signals.leave_to_trainer(job.memory.segment.trainer_pid)  # torch's ends a worker
    torch.multiprocessing._set_thread_name("pt_data_worker")
    library_threads.limit(job.one_thread)
    if job.notes is not None:
        job.notes.show_stack_at_signal()
        os.register_at_fork(after_in_child=job.notes.close)  # processes of samples need none
    seed = seed_worker(job.base_seed, job.memory.segment.starts(number), number)
    iterable = job.dataset_kind == _DatasetKind.Iterable
    kind = worker_info.watched if iterable else _utils.worker.WorkerInfo
    _utils.worker._worker_info = kind(
        id=number, num_workers=job.num_workers, seed=seed, dataset=job.dataset
    )


def _die_before_zygote() -> None:
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


def _allow_processes() -> None:
    """From now on a sample may start and end processes (of a pool, say). The worker still says that
    it is a daemon: else libraries that ask would start a process for each core."""
    me: Any = multiprocessing.current_process()
    me._config["daemon"] = False
    me.__class__ = type(type(me).__name__, (type(me),), {"daemon": True, "__slots__": ()})


def _load(job: Job) -> Exception | None:
    """Imports the program and loads the dataset, as torch's workers do before anything else.
    Returns an error for the trainer, or None."""
    library_threads.limit(job.one_thread)
    np.random.seed()  # the other generators differ from the zygote's, too
    try:
        job.load()
    except (Exception, SystemExit) as error:
        return not_loaded(os.getpid(), error)
    finally:
        signals.released(job, is_worker=True)  # whatever handlers the program has installed
    return None


def _work(job: Job, number: int) -> Runner:
    """The life of worker `number`; returns its runner when the loader stops or is gone."""
    segment = job.memory.segment
    failure = _load(job) if job.pickled is not None else None
    job.settle()
    open_again(job.files)
    segment.dontfork()
    _prepare(job, number)
    runner = Runner(job, number, failure)
    worker = worker_of(job, number, runner)
    worker.ready(*runner.init_states)
    while not serve(worker, runner):
        if not segment.trainer_lives():
            with contextlib.suppress(OSError):
                os.kill(os.getppid(), signal.SIGCONT)  # a stopped zygote would never end
            break
    return runner


def run_worker(job: Job, number: int, starts: int) -> None:
    """Target of a worker's process object. starts: number of processes of this worker so far."""
    if not job.memory.segment.claim(number, starts, os.getpid()):
        return  # the zygote died as it forked this process, and another is forked in its place
    _allow_processes()
    signals.released(job, is_worker=True)
    *parents, first = job.identity
    vars(multiprocessing.current_process())["_identity"] = (*parents, first + number)
    _die_before_zygote()
    runner = None
    try:
        runner = _work(job, number)
    except KeyboardInterrupt:
        pass  # the trainer raises its own
    except BaseException as error:
        if job.notes is not None:
            job.notes.ends(error)
        raise
    job.memory.segment.leaving(number)
    if runner is not None:
        runner.drop_iterator()  # has as long as the exit functions
