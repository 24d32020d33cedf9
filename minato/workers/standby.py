"""The standby: parent of the zygote, and asleep until the zygote dies.

Parents and children::

    trainer ---> standby ---> zygote ---> workers
                    |                        |
                    +------- adopts <--------+   once the zygote has died

The trainer starts the standby, which forks the zygote and sleeps.  When the zygote dies, the system
makes its workers children of the standby (``PR_SET_CHILD_SUBREAPER``).  The standby forks another
zygote, which forks and replaces workers from then on.  Running workers do not notice.

A worker's death is reported once, by its parent: the zygote reports workers that it has forked, the
standby those that it has adopted.  The zygote does everything else, also for adopted workers: it
changes their entries, replaces them and ends them.  Each parent reaps its own children, and only
after the table no longer names them.  So a process id in the table is never another process's.

If a process is killed:

- The zygote, before it has recorded a worker that it has just forked: the entry is STARTING and has
  no process id.  The standby takes the entry back by exchanging the word in which the worker would
  claim it.  A worker that comes too late exits, and the next zygote forks another.
- The zygote, between a worker's death and its report: the dead worker is a child of the standby,
  which reports it.
- The zygote, after the report or while it reaps: the entry is EXITED, SWEPT or WANTED, and the next
  zygote continues from there.
- The standby: the zygote goes on alone.  Workers that the standby had adopted have no parent here
  any more.  The zygote sees their end by a pidfd of each, without the exit status.
- Both: the trainer starts another standby when ``next()`` has to wait (``Pool.restart``).  Workers
  go on, and the new zygote watches them by pidfds.

A standby costs each iterator one more fork at its start, and the pages that standby and zygote no
longer share.  docs/how-it-works.md has figures.
"""

from __future__ import annotations

import contextlib
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
from .zygote import EXITED, FORKED, LOOK_SECONDS, SWEPT, Adopted, Zygote, drain, wake_pipe

#: how often the standby checks whether the trainer has handled a death
ACK_SECONDS = 0.01
#: time for the zygote to exit once the trainer is gone; then it is killed (it may be stopped)
ORPHANED_SECONDS = 2.0
#: SOON_MOST zygotes in a row that each die within SOON_SECONDS are an error
SOON_SECONDS, SOON_MOST = 1.0, 10


class Standby:
    def __init__(self, zygote: Zygote) -> None:
        self.zygote = zygote  # the state that each zygote starts with
        self.segment = zygote.segment
        self.pid = 0  # of the present zygote
        self.pidfd = -1  # of the present zygote
        self.told = False  # the present zygote was asked to exit
        self.begun = False  # a zygote was forked
        self.adopted: dict[int, Adopted] = {}  # by process id
        self.foreign: list[Adopted] = []  # workers in the table that are not children

    def run(self) -> None:
        """Watches and replaces the zygote. Returns when the loader or the trainer ends."""
        torch.multiprocessing._set_thread_name("minato_standby")
        self._listen()
        self._adopt()  # workers of an earlier standby and its zygote
        soon = 0
        while True:
            begun = time.monotonic()
            try:
                self._begin()
            except OSError:
                if self.begun:
                    raise
                return self.zygote.run()  # no process can be forked, so this one is the zygote
            self.begun = True
            how = self._await_end()
            if how == 0 or self.zygote.terminated or not self.segment.trainer_lives():
                return self._end_all()
            soon = soon + 1 if time.monotonic() - begun < SOON_SECONDS else 0
            if how > 0:  # the zygote has printed and noted an exception
                os._exit(1)
            if soon == SOON_MOST:
                raise RuntimeError(
                    f"the process that starts workers was killed {SOON_MOST} times in a row, each "
                    f"within a second (signal {-how}). Find out what kills it, for example a memory "
                    "limit or the cluster manager"
                )

    def _listen(self) -> None:
        self.wake_read, self.wake_write = wake_pipe()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.trainer = self.zygote.trainer_ends()
        self.poller = select.poll()
        for fd in (self.wake_read, *self.trainer):
            self.poller.register(fd, select.POLLIN)

    # ---- the zygote ------------------------------------------------------------------

    def _begin(self) -> None:
        """Forks a zygote. The zygote never returns from here."""
        # blocked until the zygote has its own handlers
        held = {signal.SIGTERM, *self.zygote.job.handled}
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, held)
        self.told = self.zygote.terminated
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
            signal.set_wakeup_fd(-1)
            for fd in (self.wake_read, self.wake_write, *self.trainer[1:]):
                os.close(fd)
            torch.multiprocessing._set_thread_name("minato_zygote")
            self.zygote.take_over(standby, [*self.adopted.values(), *self.foreign])
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
        os.kill(self.pid, number)
        os.kill(self.pid, signal.SIGCONT)  # a stopped process would not get the signal

    def _await_end(self) -> int:
        """Sleeps until the zygote ends. Returns its exit code, or minus the signal."""
        until: float | None = None  # the time to kill a zygote that does not exit by itself
        while True:
            waiting, how = self._look()
            if how is not None:
                return how
            if self.zygote.terminated and not self.told:
                self.told = True
                self._signal_zygote(signal.SIGTERM)
            asleep = self.pidfd >= 0 and not self.adopted
            patience = ACK_SECONDS if waiting else None if asleep else LOOK_SECONDS
            if until is not None:
                left = max(0.0, until - time.monotonic())
                patience = left if patience is None else min(left, patience)
                if left == 0:
                    until, patience = None, None
                    self._signal_zygote(signal.SIGKILL)
            ready = dict(self.poller.poll(None if patience is None else 1000 * patience))
            if self.wake_read in ready:
                drain(self.wake_read)
            if not ready.keys().isdisjoint(self.trainer):
                until = time.monotonic() + ORPHANED_SECONDS
                self._signal_zygote(signal.SIGTERM)
                for fd in self.trainer:
                    if fd in ready:
                        self.poller.unregister(fd)

    # ---- children --------------------------------------------------------------------

    def _look(self) -> tuple[bool, int | None]:
        """Reports dead adopted workers, and reaps those that the table no longer names. Returns
        whether some are to be reaped later, and the zygote's exit status if it has ended."""
        waiting = False
        for pid, worker in list(self.adopted.items()):
            status = _ended(pid)
            if status is not None and not worker.reported:
                self.segment.exited(worker.number, status)
                worker.reported = True
            if status is not None and self.segment.state(worker.number) in (EXITED, SWEPT):
                waiting = True
            elif status is not None:
                os.waitpid(pid, 0)
                del self.adopted[pid]
        how = _ended(self.pid)
        if how is not None:
            self.segment.set_zygote(0)
            if how != 0:
                self._adopt()
            if self.pidfd >= 0:
                self.poller.unregister(self.pidfd)
                os.close(self.pidfd)
            os.waitpid(self.pid, 0)
            return False, how
        self._reap_strangers()
        return waiting, None

    def _adopt(self) -> None:
        """Records the workers of a dead zygote, living and dead."""
        self.foreign = []
        for number in range(self.segment.workers):
            pid = self.segment.adopt(number)
            if pid is None or pid in self.adopted:
                continue
            if pid != 0 and _is_child(pid):
                worker = self.adopted[pid] = Adopted(number, pid, self.segment, os.getpid())
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
            if info is None or info.si_pid in self.adopted or _ended(self.pid) is not None:
                return
            os.waitpid(info.si_pid, 0)

    def _end_all(self) -> None:
        """Kills the workers that a killed zygote has left, and reaps all children. Called at the
        end, when the table does not matter any more."""
        for pid in self.adopted:
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _ended(pid: int) -> int | None:
    """Exit code of a child, or minus the signal, if it has died. Does not reap it."""
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def _note(job: Job, error: BaseException, pid: int | None = None) -> None:
    """Notes for the trainer the exception that ends this process, or the process with this id."""
    if job.notes is not None:
        job.notes.ends(error, pid)


def main(job: Job, commands: Connection, unused: Connection | None, method: str) -> None:
    """Target of the process that the trainer starts."""
    try:
        zygote = _begin(job, commands, unused, method)
        _core.adopt_orphans()  # if the system refuses it, zygotes see deaths of workers by pidfds
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
    library_threads.limit(job.one_thread)
    torch.multiprocessing._set_thread_name("minato_zygote")
    zygote = Zygote(job, commands, method)
    if job.seed_per_sample and zygote.start == FORKED:
        generator_states.probe_globals()
    gc.freeze()  # so that collections in workers do not write to the pages they share with it
    zygote.take_signals()
    return zygote
