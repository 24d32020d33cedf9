"""The standby: parent of the zygote, and asleep until the zygote dies.

The trainer starts a zygote, which forks the workers.  When they have run for ALONE_SECONDS, this
zygote becomes a standby.  It forks another zygote and keeps its workers::

    at first                        later

    trainer ---> zygote             trainer ---> standby ---> zygote
                    |                               |            |
                    +---> workers                   +--> workers +---> workers that are new

So an epoch that is over sooner pays for one process, and not for two.  When the second zygote dies,
the system makes its workers children of the standby (``PR_SET_CHILD_SUBREAPER``).  The standby
forks the next zygote.  Running workers do not notice.

Each parent reports the deaths of its own children, ends them when the loader stops, and reaps them
after the table no longer names them.  So a process id in the table is never another process's.  The
zygote does everything else, also for the standby's workers: it changes their entries and replaces
them.

If a process is killed:

- The first zygote, while it is alone: the trainer starts another when ``next()`` has to wait
  (``Pool.restart``).  Workers go on, and the new zygote watches them by a pidfd of each, without the
  exit status.
- The zygote, before it has recorded a worker that it has just forked: the entry is STARTING and has
  no process id.  The standby takes the entry back by exchanging the word in which the worker would
  claim it.  A worker that comes too late exits, and the next zygote forks another.
- The zygote, between a worker's death and its report: the dead worker is a child of the standby,
  which reports it.
- The zygote, after the report or while it reaps: the entry is EXITED, SWEPT or WANTED, and the next
  zygote continues from there.
- The standby: the zygote goes on alone.  The standby's workers have no parent here any more, and
  the zygote watches them by pidfds.
- Both: as the first zygote.

docs/how-it-works.md says what a standby costs.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import time
import traceback
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import Any

import torch

from .. import _core
from ..seeding import generator_states
from . import library_threads, signals
from .job import Job
from .zygote import CHECK_SECONDS, EXITED, FORKED, SWEPT, Adopted, Child, Zygote, drain, ended

#: how long the first zygote has no standby; torch's epochs without any work take a tenth of that
ALONE_SECONDS = 1.0
#: how often the standby checks whether the trainer has handled a death
ACK_SECONDS = 0.01
#: time for the zygote to exit once the trainer is gone; then it is killed (it may be stopped)
ORPHANED_SECONDS = 2.0
#: SOON_MOST zygotes in a row that each die within SOON_SECONDS are an error
SOON_SECONDS, SOON_MOST = 1.0, 10


class Standby:
    def __init__(self, zygote: Zygote) -> None:
        self.zygote = zygote  # of this process, later the state that each zygote starts with
        self.segment = zygote.segment
        self.pid = 0  # of the present zygote; 0: this process is the zygote, or there is none
        self.pidfd = -1  # of the present zygote
        self.own: dict[int, Child] = {}  # workers that are children of this process, by process id
        self.foreign: list[Adopted] = []  # workers in the table that are not children

    def run(self) -> None:
        """Starts and watches workers, at first as a zygote. Returns when the loader or the trainer
        ends."""
        self._adopt()  # workers of a dead zygote
        self.zygote.take_over(0, self.foreign)
        if self.zygote.run(0.0 if self.foreign else ALONE_SECONDS):
            return
        self._become_standby()
        soon = 0
        while True:
            begun = time.monotonic()
            try:
                self._fork_zygote()
            except OSError:  # no process can be forked, so this one is the zygote
                self.zygote.children = self._workers()
                self.zygote.run()
                return
            status = self._await_zygote_end()
            if status is None or status == 0 or self.zygote.is_over():
                self._end_workers()
                return
            soon = soon + 1 if time.monotonic() - begun < SOON_SECONDS else 0
            if status > 0:  # the zygote has printed and noted an exception
                os._exit(1)
            if soon == SOON_MOST:
                raise RuntimeError(
                    f"the process that starts workers was killed {SOON_MOST} times in a row, each "
                    f"within a second (signal {-status}). Find out what kills it, for example a memory "
                    "limit or the cluster manager"
                )

    def _become_standby(self) -> None:
        """Makes this process, which was the zygote, the standby."""
        torch.multiprocessing._set_thread_name("minato_standby")
        _core.adopt_orphans()  # if the system refuses it, zygotes see deaths of workers by pidfds
        self.foreign = []
        for child in self.zygote.children.values():
            if isinstance(child, Adopted):
                child.reap()  # the zygote opens its own pidfd
                self.foreign.append(Adopted(child.number, child.pid, self.segment, 0))
            else:
                self.own[child.pid] = child
        self.poller = select.poll()
        for fd in (self.zygote.wake_read, *self.zygote.trainer):
            self.poller.register(fd, select.POLLIN)

    # ---- the zygote ------------------------------------------------------------------

    def _fork_zygote(self) -> None:
        """Forks a zygote. The zygote never returns from here."""
        # blocked until the zygote has its own handlers
        held = {signal.SIGTERM, *self.zygote.job.handled}
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, held)
        standby, pid = os.getpid(), -1
        vars(util)["_flush_std_streams"]()
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if pid != 0:
            self.pid = pid
            try:
                self.pidfd = os.pidfd_open(pid)
                self.poller.register(self.pidfd, select.POLLIN)
            except OSError:  # no descriptor is left
                self.pidfd = -1
            return
        code = 1
        try:
            self.zygote.close_ends()
            torch.multiprocessing._set_thread_name("minato_zygote")
            left = [Adopted(w.number, w.pid, self.segment, standby) for w in self.own.values()]
            self.zygote.take_over(standby, left + self.foreign)
            self.zygote.take_signals()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            self.zygote.run()
            code = 0
        except BaseException as error:
            traceback.print_exc()
            _note(self.zygote.job, error)
            _note(self.zygote.job, error, standby)  # the standby ends, too
        finally:
            vars(util)["_flush_std_streams"]()
            os._exit(code)

    def _signal_zygote(self, number: int) -> None:
        """Signals the zygote. The standby has not reaped it, so the id is still the zygote's."""
        if self.pid != 0:
            os.kill(self.pid, number)
            os.kill(self.pid, signal.SIGCONT)  # a stopped process would not get the signal

    def _await_zygote_end(self) -> int | None:
        """Sleeps until the zygote ends. Returns its exit code, or minus the signal. None: the
        loader or the trainer ends first."""
        while not self.zygote.is_over():
            waiting, status = self._check_children()
            if status is not None:
                return status
            self._sleep(ACK_SECONDS if waiting else CHECK_SECONDS)
        return None

    def _sleep(self, seconds: float) -> None:
        ready = dict(self.poller.poll(1000 * seconds))
        if self.zygote.wake_read in ready:
            drain(self.zygote.wake_read)
        for fd in self.zygote.trainer:
            if fd in ready:
                self.zygote.orphaned = True
                self.poller.unregister(fd)

    def _end_workers(self) -> None:
        """Ends the workers that are children of this process. A living zygote ends the others at
        the same time."""
        while True:
            if self.zygote.orphaned or self.zygote.terminated:
                self._signal_zygote(signal.SIGTERM)
            self.zygote.children = self._workers()
            self.zygote.end()
            if self.pid == 0:
                return
            self.own.clear()
            self._await_last_zygote()

    def _await_last_zygote(self) -> None:
        """Waits for a zygote that ends its workers. If it is killed, they are children of this
        process."""
        until: float | None = None  # the time to kill it
        while self._check_children()[1] is None:
            if until is None and (self.zygote.orphaned or self.zygote.terminated):
                self._signal_zygote(signal.SIGTERM)
                until = time.monotonic() + ORPHANED_SECONDS
            elif until is not None and time.monotonic() >= until:
                self._signal_zygote(signal.SIGKILL)
            self._sleep(CHECK_SECONDS)

    # ---- children --------------------------------------------------------------------

    def _workers(self) -> dict[int, Child]:
        """The workers that this process ends, by number."""
        left = self.foreign if self.pid == 0 else []  # else the zygote's
        return {worker.number: worker for worker in (*self.own.values(), *left)}

    def _check_children(self) -> tuple[bool, int | None]:
        """Reports dead workers of this process, and reaps those that the table no longer names.
        Returns whether some are to be reaped later, and the zygote's exit status if it has ended.
        """
        waiting = False
        for pid, worker in list(self.own.items()):
            status = worker.ended()
            if status is not None and not worker.reported:
                self.segment.exited(worker.number, status)
                worker.reported = True
            if status is not None and self.segment.state(worker.number) in (EXITED, SWEPT):
                waiting = True
            elif status is not None:
                worker.reap()
                del self.own[pid]
        status = ended(self.pid)
        if status is not None:
            self.segment.set_zygote(0)
            if status != 0:
                self._adopt()
            if self.pidfd >= 0:
                self.poller.unregister(self.pidfd)
                os.close(self.pidfd)
            os.waitpid(self.pid, 0)
            self.pid = 0
            return False, status
        self._reap_strangers()
        return waiting, None

    def _adopt(self) -> None:
        """Records the workers of a dead zygote, living and dead."""
        self.foreign = []
        for number in range(self.segment.workers):
            pid = self.segment.adopt(number)
            if pid is None or pid in self.own:
                continue
            if pid != 0 and _is_child(pid):
                worker = self.own[pid] = Child(number, pid)
                worker.reported = self.segment.state(number) in (EXITED, SWEPT)
            else:
                self.foreign.append(Adopted(number, pid, self.segment, 0))

    def _reap_strangers(self) -> None:
        """Reaps children that are neither zygote nor worker: descendants of a worker whose parent
        has ended. Workers become children only when their zygote has died, and then _adopt() runs
        first."""
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if info is None or info.si_pid in self.own or ended(self.pid) is not None:
                return
            os.waitpid(info.si_pid, 0)


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _note(job: Job, error: BaseException, pid: int | None = None) -> None:
    """Notes for the trainer the exception that ends this process, or the process with this id."""
    if job.notes is not None:
        job.notes.ends(error, pid)


def main(job: Job, commands: Connection, unused: Connection | None, method: str) -> None:
    """Target of the process that the trainer starts."""
    try:
        zygote = _begin(job, commands, unused, method)
        Standby(zygote).run()
    except BaseException as error:
        _note(job, error)
        raise
    if zygote.terminated:
        os._exit(0)  # as by a signal, so without exit functions


def _begin(job: Job, commands: Connection, unused: Connection | None, method: str) -> Zygote:
    signals.released(job.blocked, job.memory.segment.trainer_pid, job.handled)
    if unused is not None:
        unused.close()  # the loader's end, inherited by a fork
    library_threads.limit(job.one_thread, known=job.forked)
    torch.multiprocessing._set_thread_name("minato_zygote")
    zygote = Zygote(job, commands, method)
    if job.seed_per_sample and zygote.start == FORKED and not job.forked:
        generator_states.probe_globals()
    gc.freeze()  # so that collections in workers do not write to the pages they share with it
    zygote.take_signals()
    return zygote
