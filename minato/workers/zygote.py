"""The process that forks workers, reports their deaths and reaps them.

It is a process of the loader's own multiprocessing context, made at ``iter()`` and gone
with the iterator.  Under fork it has the dataset, exactly as old as torch's workers would have
it.  Under spawn and forkserver it imports torch, NumPy and minato, and nothing of the program's:
each worker imports that, and loads the dataset, by itself.  It alone can reap: it reports (pid,
status), waits until the loader has taken the dead worker's tasks back, and reaps then, so a pid
names the dead worker until nobody needs it.  Its parent, the standby (standby.py), replaces it.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import select
import signal
import threading
import time
import warnings
from dataclasses import dataclass
from multiprocessing import util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from .._system_refusals import NOT_STARTED
from . import grace, signals
from .job import Job
from .process import may_start_processes
from .process import run as run_worker

WANTED, EXITED, SWEPT, LEAVING = 1, 4, 5, 6  # of csrc/workers/mn_records.h
UNKNOWN_START, FORKED, THREADS = 0, 1, 2  # enum mn_start there

#: from Python 3.13 on it is an exit function, and not the end of _bootstrap(), that does what
#: multiprocessing registered for a process's end: to write what its queues hold, say
ENDS_AT_EXIT = "_exit_function" not in vars(BaseProcess)["_bootstrap"].__code__.co_names

#: how often a death that the loader has not looked at yet is asked about again
ACK_SECONDS = 0.01
#: how often children are looked at whose end no signal has told: a sanitizer holds signals back,
#: and a library may have taken the handler
LOOK_SECONDS = 1.0
#: in place of an exit code that is not known
UNKNOWN = 255
#: how long a replacement that the system refuses is tried again before the loader hears of it
REFUSED_SECONDS = 10.0


def _parent(pid: int) -> list[int]:
    """A descriptor of the process with this id, if that is the parent and lives."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return []
    if os.getppid() != pid:  # a fork server's child; or the id is of another name space
        os.close(fd)
        return []
    return [fd]


def wake_pipe() -> tuple[int, int]:
    """A pipe that signals write to, so that they end a wait."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read, write


def drain(read: int) -> None:
    try:
        os.read(read, 4096)
    except BlockingIOError:
        pass


class _Child:
    """A worker process, forked here or started by the start method."""

    def __init__(self, number: int, pid: int, process: Any = None) -> None:
        self.number = number
        self.pid = pid
        self.process = process  # keeps its resources until it is reaped
        self.reported = False

    def signal(self, number: int) -> None:
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def ended(self) -> int | None:
        """Exit code, or minus the signal, once it is dead; leaves it to be reaped."""
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def reap(self) -> None:
        os.waitpid(self.pid, 0)


class Adopted(_Child):
    """A worker that a zygote before this one has left. ``parent`` (the standby, or 0) reports its
    death; if that process is gone, a pidfd shows the death, without the exit status."""

    def __init__(self, number: int, pid: int, segment: Any, parent: int) -> None:
        super().__init__(number, pid)
        self.segment = segment
        self.parent = parent
        self._pidfd: int | None = None

    def _was_reported(self) -> bool:
        return self.segment.state(self.number) in (EXITED, SWEPT)

    def signal(self, number: int) -> None:
        """A worker ignores SIGTERM from a zygote that is not its parent, unless its program has a
        handler; SIGKILL follows."""
        if self.pid != 0 and not self._was_reported():
            super().signal(number)

    def ended(self) -> int | None:
        self.reported |= self._was_reported()
        if not self.reported and (os.getppid() == self.parent or not self._is_gone()):
            return None
        return UNKNOWN

    def _is_gone(self) -> bool:
        if self._pidfd is None:
            if self.pid == 0:
                return True
            try:
                self._pidfd = os.pidfd_open(self.pid)
            except ProcessLookupError:
                return True
            except OSError:  # no descriptor is left: the next look may find one
                return False
        gone = select.poll()
        gone.register(self._pidfd, select.POLLIN)
        return bool(gone.poll(0))

    def reap(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)


class _Stillborn(_Child):
    """A worker that the system refused to make: the loader hears of it as of a death."""

    def __init__(self, number: int, error: OSError) -> None:
        super().__init__(number, 0)
        self.status = NOT_STARTED + (error.errno or 0)

    def signal(self, number: int) -> None:
        """There is nobody to tell; process 0 would be all of the group."""

    def ended(self) -> int:
        return self.status

    def reap(self) -> None:
        """There is nothing left of it."""


def runs_threads() -> bool:
    """Whether there are threads that a fork of this process would not have, and whatever belongs
    to them would hang there: packages may start some when they are imported, or with the
    interpreter. Those of OpenBLAS, which NumPy brings along, end when the process forks."""
    if threading.active_count() > 1:
        return True
    tasks = "/proc/self/task"
    if not os.path.exists(tasks) or len(os.listdir(tasks)) == 1:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Python 3.12 on, of just that
        pid = os.fork()
        if pid == 0:
            os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir(tasks)) > 1


@dataclass
class _Later:
    """A replacement that is to be forked at this time: the system would not make another process
    just now, or several in a row have died before they finished anything."""

    again: float
    since: float  # when it was due
    pause: float = 0.02


class Zygote:
    def __init__(self, job: Job, commands: Connection, method: str) -> None:
        self.job = job
        self.segment = job.memory.segment
        self.commands = commands
        self.method = method
        self.children: dict[int, _Child] = {}
        self.lived: set[int] = set()  # numbers of workers that there have been
        self.later: dict[int, _Later] = {}  # their replacements, by number
        self.terminated = False  # SIGTERM has come
        self.standby = 0  # process id of the parent, if that adopts workers
        self.start = THREADS if method != "fork" and runs_threads() else FORKED
        if self.start == FORKED:
            job.memory.settle()
            if job.pickled is not None:
                job.pickled.load_apart()
        self.segment.set_start(self.start)  # under fork it was known before

    def take_over(self, standby: int, left: list[Adopted]) -> None:
        """Takes workers that zygotes before this one have left. In a fork of the standby, before
        run()."""
        self.standby = standby
        self.children = {worker.number: worker for worker in left}
        self.lived.update(self.children)

    # ---- starting --------------------------------------------------------------------

    def start_wanted(self) -> None:
        for number in range(self.segment.workers):
            if self.terminated:
                return
            later = self.later.get(number)
            waits = later is not None and time.monotonic() < later.again
            if self.segment.state(number) != WANTED or waits or number in self.children:
                continue  # or a worker that lives has damaged its entry
            self.segment.starting(number)
            try:
                forked = self.start == FORKED
                child = self._fork(number) if forked else self._start(number)
                self.segment.claim(number, self.segment.starts(number), child.pid)
                self.lived.add(number)
            except OSError as error:
                if number in self.lived and self._put_off(number):
                    self.segment.not_started(number)
                    continue
                child = _Stillborn(number, error)
            self.children[number] = child
            self.later.pop(number, None)

    def _put_off(self, number: int) -> bool:
        """Whether a replacement is to be tried again: limits that others have reached, too,
        are often gone a moment later."""
        now = time.monotonic()
        later = self.later.setdefault(number, _Later(now, now))
        later.again = now + later.pause
        later.pause = min(2 * later.pause, 1.0)
        return now < later.since + REFUSED_SECONDS

    def _patience(self, pending: bool) -> float:
        """Milliseconds until something is to be looked at that nobody reports."""
        now = time.monotonic()
        times = [max(0.0, later.again - now) for later in self.later.values()]
        return 1000 * min([ACK_SECONDS if pending else LOOK_SECONDS, *times])

    def _process(self, number: int, context: Any) -> Any:
        return context.Process(
            target=run_worker,
            args=(self.job, number, self.segment.starts(number)),
            name=f"minato-worker-{number}",
            daemon=True,
        )

    def _fork(self, number: int) -> _Child:
        process = self._process(number, multiprocessing.get_context("fork"))
        vars(util)["_flush_std_streams"]()
        # A worker ended right away must die of it, not run the zygote's handler: held back
        # until the child has none.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if pid == 0:
            code = 1
            try:
                self._in_child()
                if ENDS_AT_EXIT and self.method == "fork":  # as multiprocessing itself forks
                    atexit._clear()
                    atexit.register(vars(util)["_exit_function"])
                # multiprocessing's own preparation of a process: finalizers, stdio, name
                code = process._bootstrap()
            finally:
                if ENDS_AT_EXIT or self.method != "fork":  # as an interpreter that ends
                    atexit._run_exitfuncs()
                os._exit(code)
        return _Child(number, pid)

    def _in_child(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signals.leave_to_trainer(self.segment.trainer_pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self.commands.close()
        os.close(self.wake_read)
        os.close(self.wake_write)
        for fd in self.trainer[1:]:
            os.close(fd)

    def _start(self, number: int) -> _Child:
        # spawn for forkserver, too: the zygote can only reap children of its own
        process = self._process(number, multiprocessing.get_context("spawn"))
        with may_start_processes(), signals.ignored():
            process.start()
        # multiprocessing reaps the dead among its children whenever it starts another
        vars(multiprocessing.process)["_children"].discard(process)
        return _Child(number, process.pid, process)

    # ---- watching --------------------------------------------------------------------

    def run(self) -> None:
        self.segment.set_zygote(os.getpid())
        try:
            self._watch()
        finally:
            if self.standby != 0 and os.getppid() == self.standby:
                os.kill(self.standby, signal.SIGCONT)  # a stopped standby would never end

    def _watch(self) -> None:
        try:
            self._listen()
        except OSError as error:
            for number in range(self.segment.workers):
                self.segment.exited(number, _Stillborn(number, error).status)
            return
        self.start_wanted()
        while not self.segment.stopped() and not self.terminated:
            pending = self._report()
            ready = dict(self.poller.poll(self._patience(pending)))
            if not ready.keys().isdisjoint(self.trainer):
                self._end(0.0, 0.0)
                return
            if self.commands.fileno() in ready:
                try:
                    told = os.read(self.commands.fileno(), 4096)
                except BlockingIOError:
                    told = b"!"
                if not told:  # the loader let go of it in the middle of its own start
                    self._end(0.0, grace.TERM)
                    return
            if self.wake_read in ready:
                drain(self.wake_read)
            self.start_wanted()
        if not self.terminated:
            self._end(grace.LEAVE, grace.TERM, grace.FINISH)
        else:
            self._end(0.0, grace.TERMINATED)

    def take_signals(self) -> None:
        """In the standby, and in each zygote before it runs: SIGTERM, and signals that the program
        has handlers for, count only if the trainer or the parent sends them."""
        signal.signal(signal.SIGTERM, self.terminate)
        signals.leave_to_trainer(self.segment.trainer_pid, {signal.SIGTERM, *self.job.handled})

    def trainer_ends(self) -> list[int]:
        """Descriptors that become readable when the trainer ends."""
        return [self.segment.lifeline, *_parent(self.segment.trainer_pid)]

    def _listen(self) -> None:
        self.wake_read, self.wake_write = wake_pipe()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.trainer = self.trainer_ends()
        self.poller = select.poll()
        for fd in (self.wake_read, self.commands.fileno(), *self.trainer):
            self.poller.register(fd, select.POLLIN)

    def terminate(self, _number: int, _frame: Any) -> None:
        """multiprocessing ends its daemons so when the interpreter exits. Only noted: it may come
        when a worker has been forked and is not among the children yet. The descriptor of
        wake-ups ends a wait."""
        self.terminated = True

    def _report(self) -> bool:
        """Reports the dead; reaps those the loader has dealt with. True if some wait."""
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
                self.later[child.number] = _Later(due, due)
            elif pause_ms == 0:
                self.start_wanted()
        return pending

    # ---- ending ----------------------------------------------------------------------

    def _press(self, term: float, leaving: bool) -> bool:
        """SIGTERM, and after so many seconds SIGKILL. leaving: also for those that have done their
        last task. True if all have ended."""
        for number, seconds in ((signal.SIGTERM, term), (signal.SIGKILL, 0.0)):
            for child in self.children.values():
                if leaving or self.segment.state(child.number) != LEAVING:
                    child.signal(number)
            if self._await_children(seconds):
                return True
        return False

    def _await_children(self, seconds: float, terminated: float = grace.TERMINATED) -> bool:
        """Reaps the children that end within so many seconds, and once SIGTERM has come within no
        more than ``terminated``. True if none are left."""
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

    def _end(self, leave: float, term: float, finish: float = 0.0) -> None:
        """Seconds for workers to leave by themselves, then to obey SIGTERM, and for those that
        leave to finish."""
        begun = time.monotonic()
        if self._await_children(leave):
            return
        if finish > 0:
            if self._press(term, False) or self._await_children(begun + finish - time.monotonic()):
                return
        if not self._press(term, True):
            self._await_children(grace.KILLED, grace.KILLED)
