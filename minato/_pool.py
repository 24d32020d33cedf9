"""One set of workers as the loading process sees it: start, watch, stop."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

from . import _core, _zygote
from ._job import Job, Memory, ThreadsBefore
from ._limits import explained

if TYPE_CHECKING:
    from ._core import _WorkerEntry

log = logging.getLogger("minato")

#: worker states of csrc/load/mn_message.h that mean a process may be there
_ALIVE = (1, 2, 3)
#: how long a shutdown waits for the zygote, which itself is bounded (see _zygote.py)
STOP_SECONDS = 0.8
#: how long it waits for what it had to kill
KILL_SECONDS = 5.0


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
        """Process id; waits for a worker that is just being started."""
        deadline = time.monotonic() + 60
        while True:
            entry = self._entry()
            if entry["pid"] or entry["state"] not in _ALIVE or time.monotonic() > deadline:
                self._last = entry
                return entry["pid"] or None
            time.sleep(0.001)

    ident = pid

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable once the process has ended, for
        ``multiprocessing.connection.wait()``. It is opened when it is first asked for; raises
        OSError for a process that has ended by then."""
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
            self._pool.engine.retire_worker(self._number)
            self._pool.engine.kill_worker(self._number, number)

    def terminate(self) -> None:
        """Ends the worker; it is not replaced, others take its work."""
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


class Pool:
    """The engine, the zygote and its workers. Belongs to one iterator."""

    kind = "process"

    def __init__(
        self,
        *,
        context: Any,
        workers: int,
        max_retries: int,
        respawn: bool,
        memory_limit: int,
        one_thread: bool,
        options: dict[str, Any],
        job: dict[str, Any],
    ) -> None:
        with explained():
            self.engine = _core.Engine(workers, max_retries, respawn, memory_limit, **options)
        self.stopped = False
        self._entries: list[_WorkerEntry] | None = None
        self._owner = os.getpid()
        self._pidfd = -1
        method = context.get_start_method()
        with explained():
            reader, self._commands = multiprocessing.Pipe(duplex=False)
        os.set_blocking(self._commands.fileno(), False)
        full_job = Job(threads=ThreadsBefore(one_thread), memory=Memory(self.engine), **job)
        inherited = self._commands if method == "fork" else None
        self.zygote = context.Process(
            target=_zygote.main,
            args=(full_job, reader, inherited, method),
            name="minato-zygote",
            daemon=True,
        )
        try:
            with explained():
                self._start_zygote(method)
                self._pidfd = os.pidfd_open(self.zygote.pid)
                self.engine.start(self._pidfd, self._commands.fileno())
        except BaseException:
            self.stop()
            raise
        finally:
            reader.close()
        self.handles = [WorkerHandle(self, w) for w in range(workers)]

    def _start_zygote(self, method: str) -> None:
        try:
            self.zygote.start()
        except (TypeError, AttributeError, pickle.PicklingError):
            warnings.warn(
                "Got pickle error when attempting to start a worker Process. This might be "
                "because the worker Process arguments are not picklable. Python 3.14+ changed "
                "the multiprocessing start method in non-Mac POSIX platforms to 'forkserver', "
                "which requires the worker Process arguments to be picklable. You can also "
                "try multiprocessing.set_start_method('fork').",
                stacklevel=2,
            )
            raise

    def mine(self) -> bool:
        """Whether this process made it, and not one of which that is a parent."""
        return not self.stopped and self._owner == os.getpid()

    def worker_entry(self, number: int) -> _WorkerEntry | None:
        if self._owner != os.getpid():
            return None
        entries = self._entries if self._entries is not None else self.engine.workers()
        return entries[number]

    def stop(self) -> None:
        """Ends workers and zygote within about a second and frees the memory."""
        if self.stopped or self._owner != os.getpid():
            return
        self.stopped = True
        self.engine.stop()
        try:
            os.write(self._commands.fileno(), b"!")
        except OSError:
            pass
        if self.zygote.pid is not None:  # else it never came to be
            self.zygote.join(STOP_SECONDS)
            if self.zygote.exitcode != 0:
                self._kill_all()  # it hangs, or died before it could end its workers
        self._entries = entries = self.engine.workers()
        for entry in entries:
            entry["state"] = 0
        self.engine.close()
        self._commands.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
        try:
            self.zygote.close()
        except ValueError:
            pass  # somebody else has reaped it: nothing is left to free but its sentinel

    def _kill_all(self) -> None:
        """The zygote failed: no worker may write on once the memory is given back."""
        deadline = time.monotonic() + KILL_SECONDS
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        else:
            self.zygote.kill()
        self.zygote.join(KILL_SECONDS)
        left = set(range(self.engine.segment.workers))
        while left and time.monotonic() < deadline:
            left = {number for number in left if self._may_live(number)}
            time.sleep(0.001)

    def _may_live(self, number: int) -> bool:
        """Kills a worker. Whether it may still have been there."""
        try:
            return self.engine.kill_worker(number, signal.SIGKILL)
        except OSError:  # no descriptor is left to find that out by
            return True


def start_method_context(loader: Any) -> Any:
    """The loader's multiprocessing context, as torch chooses it."""
    context = loader.multiprocessing_context
    return torch.multiprocessing if context is None else context
