"""Worker processes, on the side of the loading process: start, watch, stop."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import select
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from typing import TYPE_CHECKING, Any

import torch

from .. import _core
from .._core import LATE_SIGNAL
from .._system import explained
from ..errors import program_level
from ..seeding import generator_states
from ..worker_exits import STACK_SIGNAL, Notes
from . import library_threads, signals, zygote as zygotes
from .job import Job, Memory, find_open_files, without_main
from .zygote import FORKED, LEAVING, UNKNOWN_START, may_start_processes

if TYPE_CHECKING:
    from .._core import Engine, _WorkerEntry

log = logging.getLogger("minato")

#: states of workers in which a process may be there
_ALIVE = (_core.WORKER_WANTED, _core.WORKER_STARTING, _core.WORKER_READY)
#: what Python gives as the exit code of a process whose fork server ended before it
FORK_SERVER_DIED = 255
#: RESTARTS_MOST zygotes in a row that each die within SOON_SECONDS are an error
SOON_SECONDS, RESTARTS_MOST = 1.0, 10
#: How long WorkerHandle.pid waits for a worker that is starting. A start takes that long if a
#: dataset is large, or if a main module imports a lot on a busy machine.
PID_SECONDS = 60.0


def _identities(zygote: Any, workers: int) -> tuple[int, ...]:
    """The identity of worker 0; the others follow. Programs number workers by the first number of
    their identity. So workers get numbers of the trainer's children: the zygote's number, which no
    program sees, and those that follow it."""
    counter: Any = vars(multiprocessing.process)["_process_counter"]
    for _ in range(workers - 1):
        next(counter)
    first: tuple[int, ...] = zygote._identity
    return first


def _begin(zygote: Any) -> None:
    """A fork server that was killed refuses connections until the system has ended it. Only then does
    multiprocessing start another."""
    until = time.monotonic() + 5
    while True:
        try:
            zygote.start()
            return
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def _limit_join(zygote: Any, pool: Pool) -> None:
    """Limits how long the interpreter's exit waits for a zygote. After SIGTERM multiprocessing
    would wait forever for one that is stopped or frozen (control group freezer, hung file system).
    The new join() holds no reference to the zygote or its pool, so neither is in a reference cycle."""
    me = weakref.ref(pool)

    def join(timeout: float | None = None) -> None:
        of = me()
        if of is not None:
            of.join_zygote(timeout)

    zygote.join = join


class WorkerHandle:
    """A worker process, with the interface of ``multiprocessing.Process``."""

    daemon = True

    def __init__(self, pool: Any, number: int) -> None:
        self._pool = pool
        self._number = number
        self._last: Any = None
        self._sentinel: tuple[int, int] | None = None  # descriptor, and of which process
        self.name = f"minato-worker-{number}"

    def _entry(self) -> _WorkerEntry | dict[str, Any]:
        entry = self._pool.worker_entry(self._number)
        return entry if entry is not None else self._last or {"state": 0, "pid": 0, "status": 0}

    @property
    def pid(self) -> int | None:
        """Process id; None if there is no process. Waits for a worker that is being started,
        because torch's workers have an id at once. It waits at most a minute, and only while the
        process that starts workers is there."""
        deadline = time.monotonic() + PID_SECONDS
        while True:
            entry = self._entry()
            coming = entry["state"] in _ALIVE and self._pool.starts_workers()
            if entry["pid"] or not coming or time.monotonic() > deadline:
                self._last = entry
                return entry["pid"] or None
            time.sleep(0.001)

    ident = pid

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable once the process has ended, for
        ``multiprocessing.connection.wait()``. Opened at the first use; raises OSError if the
        process has ended by then."""
        pid = self.pid or 0
        if self._sentinel is None or self._sentinel[1] != pid:
            self.close()
            self._sentinel = os.pidfd_open(pid), pid
        return self._sentinel[0]

    def is_alive(self) -> bool:
        return self._entry()["state"] in _ALIVE and not self._pool.stopped

    @property
    def exitcode(self) -> int | None:
        return None if self.is_alive() else self._entry()["status"]

    def join(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (deadline is None or time.monotonic() < deadline):
            time.sleep(0.002)

    def _signal(self, number: int) -> None:
        if self.pid and self.is_alive():
            self._pool.ended_by_program.add(self.pid)
            self._pool.engine.kill_worker(self._number, number, True)

    def terminate(self) -> None:
        """Ends the worker. It is not replaced; other workers take its tasks."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Frees the sentinel, which is all that the handle owns."""
        sentinel, self._sentinel = self._sentinel, None
        if sentinel is not None:
            os.close(sentinel[0])

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "started" if self.is_alive() else "stopped"
        return f"<WorkerHandle name={self.name!r} pid={self._entry()['pid']} {state} daemon>"


@dataclass
class Unseen:
    """Counts deaths of workers that the engine does not watch."""

    deaths: int = 0
    retries: int = 0  # calls that another worker got after a death
    latest: str = ""  # the latest death, in words, and what follows from it

    def added_to(self, health: Any) -> Any:
        """The engine's health with these in its counts."""
        deaths, retries = health["deaths"] + self.deaths, health["retries"] + self.retries
        return {**health, "deaths": deaths, "retries": retries}


class Executor:
    """The workers of one iterator, processes or threads (``threads.py``), with their engine. It
    belongs to the process that made it.

    Tasks reach all kinds of workers in the same way. The engine *submits* a task to a run queue in
    the shared mapping. The worker *completes* it by writing DONE to the task's word. A worker is
    *lost* when its entry says so, or when the engine sees that its process has ended. The engine
    then takes its tasks back (csrc/workers/mn_crew.h). An executor only *starts* and *stops*
    workers.
    """

    kind: str  #: for ``stats()``

    def __init__(self, engine: Engine, workers: int) -> None:
        self.engine = engine
        self.started = self.stopped = False
        self.handles: list[WorkerHandle] = []  # of the first workers
        self.unseen = Unseen()
        self._workers = workers
        self._owner = os.getpid()
        self._entries: list[_WorkerEntry] | None = None  # the last ones

    def start(self) -> None:
        """Starts the workers; to be called once. After an exception ``stop()`` cleans up. A
        KeyboardInterrupt comes before or after."""
        raise NotImplementedError

    def stop(self) -> None:
        """Ends the workers and frees the memory. Does nothing the second time."""
        raise NotImplementedError

    def mine(self) -> bool:
        """Whether this process has to stop it: a fork of the one that made it has not."""
        return not self.stopped and self._owner == os.getpid()

    def starts_workers(self) -> bool:
        """Whether a process that starts wanted workers is there. Threads all exist from the start."""
        return False

    def starter(self) -> int | None:
        """Id of the process that starts workers; None: the loading process itself."""
        return None

    def restart(self) -> bool:
        """Replaces a lost process that starts workers; running workers go on. Returns False if
        that would not help."""
        return False

    def stack_of(self, number: int) -> str:
        """The stack of a worker's main thread, the latest call first; empty if it is unknown."""
        raise NotImplementedError

    def moving(self) -> str:
        """The name of an attribute of the workers' datasets that changes with samples; empty if there
        is none, or if they share one dataset."""
        return ""

    def worker_entry(self, number: int) -> _WorkerEntry | None:
        """The engine's entry of a worker, or after the end its last one; None in a fork."""
        if self._owner != os.getpid():
            return None
        entries = self._entries if self._entries is not None else self.engine.workers()
        return entries[number]

    def _keep_entries(self) -> None:
        entries = self.engine.workers()
        for entry in entries:
            entry["state"] = 0
        self._entries = entries


class Pool(Executor):
    """The engine, the zygote and its workers."""

    kind = "process"

    def __init__(
        self,
        engine: Engine,
        workers: int,
        job: Job,
        context: Any,
    ) -> None:
        super().__init__(engine, workers)
        self.restarts = self._soon = 0  # zygotes started again; of these, in a row, soon
        self._begun_at = 0.0  # when the present zygote was started
        self.base_seed = job.base_seed
        self._pidfd = -1
        self._mapping = -1  # the mapping's descriptor, if another zygote does not inherit it
        # Numbers, not objects: the pool may be garbage in a reference cycle (of an exception's
        # traceback, say). A Connection in it could be finalized, and closed, before the pool.
        self._commands = -1  # the zygote reads its commands from the other end of this pipe
        self.zygote: Any = None
        self._context = context
        self._method = context.get_start_method()
        self.forks = self._method == "fork"
        self.ended_by_program: set[int] = set()  # ids of workers, by terminate() or kill()
        self._shared: list[Any] = []  # with workers, on an accelerator
        self.notes = job.notes = Notes()
        self._job: Job | None = job
        self._pickle()

    def _pickle(self) -> None:
        """Pickles the job for processes that inherit nothing."""
        assert self._job is not None
        if not self.forks:
            # Not in _start(): these processes live on, and would inherit the signals that are
            # blocked there. And a new fork server starts while this process pickles.
            resource_tracker.ensure_running()
            if self._method == "forkserver":
                forkserver.ensure_running()
            with _warned(self._method), explained():
                self._job.pickle()

    def start(self) -> None:
        """Starts the zygote, which starts the workers."""
        with signals.Held() as held, explained():
            self._start(held)
            self.handles += [WorkerHandle(self, w) for w in range(self._workers)]

    def restart(self) -> bool:
        """Starts another zygote in place of one that was killed.

        The job is pickled or forked again. The new zygote takes over the workers, which go on.
        Returns False and does nothing if the first zygote has never begun, if an error ended the
        last one, or after too many restarts. After an exception ``stop()`` cleans up.
        """
        begun = self.engine.segment.start != UNKNOWN_START or self.restarts > 0
        if time.monotonic() - self._begun_at > SOON_SECONDS:
            self._soon = 0
        if not self.mine() or not begun or self._soon == RESTARTS_MOST:
            return False
        self._await_zygote(zygotes.KILL)  # it has ended, but with forkserver its status comes later
        code = self.zygote.exitcode or 0
        killed = code < 0 or (code == FORK_SERVER_DIED and self._method == "forkserver")
        if not killed or self.notes.exit_cause(self.zygote.pid):
            return False
        self.restarts, self._soon = self.restarts + 1, self._soon + 1
        self._pickle()
        with signals.Held() as held, explained():
            self._start(held)
        return True

    def _start(self, held: signals.Held) -> None:
        first, self.started, job, segment = not self.started, True, self._job, self.engine.segment
        assert job is not None
        job.blocked, job.handled = frozenset(held.blocked), signals.handled()
        job.forked = self.forks
        segment.set_start(FORKED if job.forked else UNKNOWN_START)
        self._begun_at = time.monotonic()
        if job.forked:
            library_threads.end_openmp_threads()
            if job.seed_per_sample:
                generator_states.probe_globals()
        if first and job.forked:
            job.files = find_open_files()
        elif first:
            self._mapping = os.dup(self.engine.fd)
        else:
            job.memory = Memory(segment, self._mapping)
        reader, writer = multiprocessing.Pipe(duplex=False)
        if first:
            self._commands = os.dup(writer.fileno())
        else:  # the engine writes to the descriptor of this number
            os.dup2(writer.fileno(), self._commands, inheritable=False)
        writer.close()
        try:
            os.set_blocking(self._commands, False)
            inherited = self._commands if job.forked else None
            zygote = self._context.Process(
                target=zygotes.main,
                args=(job, reader, inherited, self._method),
                name=signals.Deaf("minato-zygote"),
                daemon=True,
            )
            job.identity = job.identity or _identities(zygote, job.num_workers)
            with _warned(self._method), may_start_processes(), without_main(signals.Deaf):
                _begin(zygote)
            zygote.name = "minato-zygote"  # a plain str, for code that pickles or copies it
            if not first:
                self._close_zygote()
            self.zygote = zygote
            _limit_join(zygote, self)
            pidfd = os.pidfd_open(zygote.pid)
            if first:
                self._pidfd = pidfd
            else:  # the engine looks at the descriptor of this number
                os.dup2(pidfd, self._pidfd, inheritable=False)
                os.close(pidfd)
            self.engine.start(self._pidfd, self._commands)
        finally:
            reader.close()
            if job.pickled is not None:
                self._shared += job.pickled.shared
                job.pickled.close()

    def starts_workers(self) -> bool:
        """Whether the zygote, which starts wanted workers, is there."""
        return self.mine() and not self.engine.health()["zygote_lost"]

    def starter(self) -> int | None:
        """Process id of the zygote, also if it has died or not begun."""
        return self.zygote.pid if self.zygote is not None else None

    def stack_of(self, number: int, by: int = STACK_SIGNAL) -> str:
        entry = self.worker_entry(number)
        if entry is None or not entry["pid"]:
            return ""
        with contextlib.suppress(OSError):
            return self.notes.stack_of(entry["pid"], lambda by: self._lives(number, by), by)
        return ""

    def end_late(self, number: int, batch: int, row: int) -> str | None:
        """Kills the worker that makes this row; returns its last stack. None if none does."""
        if not self.engine.end_late(number, batch, row, False):
            return None
        stack = self.stack_of(number, LATE_SIGNAL)
        self.engine.end_late(number, batch, row, True)  # in case it has not died of that signal
        return stack

    def moving(self) -> str:
        return self.notes.moving()

    def stop(self) -> None:
        """Ends workers and zygote within the times that zygote.py lists, and frees the memory. Each step is
        done even if earlier ones failed. A KeyboardInterrupt comes after the last step; Ctrl-C ends
        the wait for exit functions of workers."""
        if self.stopped or self._owner != os.getpid():
            return
        with signals.Held() as held, contextlib.ExitStack() as last_first:
            self.stopped = True
            self._job = None
            last_first.callback(self._shared.clear)
            last_first.callback(self.notes.close)
            for fd in self._commands, self._pidfd, self._mapping:
                if fd >= 0:
                    last_first.callback(os.close, fd)
            last_first.callback(self.engine.close)
            last_first.callback(self._keep_entries)
            if self.zygote is not None:  # else it was never made
                last_first.callback(self._close_zygote)
                last_first.callback(self._end_zygote, held)
            self.engine.stop()

    def _end_zygote(self, held: signals.Held) -> None:
        try:
            self._wake()
            self._await_zygote(zygotes.STOP)
            until = time.monotonic() + zygotes.FINISH
            while self._leaving() and not held.interrupted and time.monotonic() < until:
                self._await_zygote(0.05)
        finally:
            if self.zygote.exitcode != 0:
                self._kill_all()  # the zygote hangs, or died before it could end its workers

    def _leaving(self) -> bool:
        """Whether the zygote waits for workers that have finished their last task."""
        leaving = [n for n, e in enumerate(self.engine.workers()) if e["state"] == LEAVING]
        return self.zygote.exitcode is None and any(self._lives(n, 0) for n in leaving)

    def join_zygote(self, timeout: float | None = None) -> None:
        """Waits for the zygote's end, at most timeout seconds. None, at the interpreter's exit: at
        most zygotes.KILL, then kills it."""
        join = multiprocessing.process.BaseProcess.join
        try:
            join(self.zygote, zygotes.KILL if timeout is None else timeout)
            stays = timeout is None and self.zygote.exitcode is None
        except ValueError:  # another thread has waited for it and closed it
            return
        if stays:
            self._kill_all()

    def _await_zygote(self, seconds: float) -> None:
        """Waits for the zygote's end. Its join() would wait until a pipe closes, which processes
        started by a worker may hold open. With forkserver, the server writes to that pipe a moment
        after the end."""
        if self._pidfd < 0 or self._method == "forkserver":
            self.zygote.join(seconds)
        else:
            ended = select.poll()
            ended.register(self._pidfd, select.POLLIN)
            ended.poll(1000 * seconds)

    def signal_zygote(self, number: int) -> None:
        """Sends a signal to the zygote, by its pidfd."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def _wake(self) -> None:
        with contextlib.suppress(OSError), signals.no_broken_pipe():
            os.write(self._commands, b"!")

    def _close_zygote(self) -> None:
        try:
            self.zygote.close()
        except ValueError:
            # Either other code has reaped it, and only its sentinel is left to free. Or the system
            # does not end it, and then the interpreter's exit must not wait for it.
            vars(multiprocessing.process)["_children"].discard(self.zygote)

    def _kill_all(self) -> None:
        """Kills zygote and workers after the zygote failed: no worker may write to the memory after
        it is given back."""
        if self._pidfd >= 0:
            self.signal_zygote(signal.SIGKILL)
        else:
            self.zygote.kill()
        self._await_zygote(zygotes.KILL)
        # counted from now, so that workers have this time even if the zygote did not end
        deadline = time.monotonic() + zygotes.KILL
        left = set(range(self.engine.segment.workers))
        while left and time.monotonic() < deadline:
            left = {number for number in left if self._lives(number, signal.SIGKILL)}
            time.sleep(0.001)

    def _lives(self, number: int, signal_number: int) -> bool:
        """Signals a worker. Returns whether it may still have been there."""
        try:
            return self.engine.kill_worker(number, signal_number)
        except OSError:  # no descriptor is left to find that out
            return True


@contextlib.contextmanager
def _warned(method: str) -> Iterator[None]:
    """Gives torch's warning if a dataset cannot be pickled inside the block. torch's text has one
    cause, the default of Python 3.14; without that default, the text names the start method."""
    by_default = sys.version_info >= (3, 14) and method == "forkserver"
    try:
        yield
    except (TypeError, AttributeError, pickle.PicklingError):
        warnings.warn(
            "Got pickle error when attempting to start a worker Process. This might be "
            "because the worker Process arguments are not picklable. "
            + (
                "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
                "to 'forkserver', which requires the worker Process arguments to be picklable. You "
                "can also try multiprocessing.set_start_method('fork')."
                if by_default
                else f"The program has chosen the start method {method!r} (by "
                "multiprocessing_context= or multiprocessing.set_start_method()), which pickles "
                "them for each worker. Make them picklable, or try "
                "multiprocessing_context='fork', which needs no pickle."
            ),
            stacklevel=program_level(),
        )
        raise


def start_method_context(loader: Any) -> Any:
    """The loader's multiprocessing context, as torch chooses it. In a worker of joblib, the default
    is joblib's own start method, by which torch's workers cannot start: fork replaces it."""
    context = loader.multiprocessing_context
    if context is None and torch.multiprocessing.get_start_method() == "loky":
        context = torch.multiprocessing.get_context("fork")
    return torch.multiprocessing if context is None else context
