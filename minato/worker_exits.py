"""Notes that workers write for the program: why a worker has ended, and where one is running.

All processes of a loader share one file in memory. A worker that ends with an exception that no
sample catches (``sys.exit()``, a BaseException) appends a description of it. On a signal, a worker
appends the stack of its main thread, even if C code holds the GIL. On LATE_SIGNAL it dies then: a call
that a signal ends early must not become a result.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import itertools
import json
import os
import signal
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.reduction import DupFd
from typing import Any

from ._core import LATE_SIGNAL

#: signal from the program that makes a worker write its stack. It is a real-time signal near the
#: end of the range, for which no other use is known
STACK_SIGNAL = signal.SIGRTMAX - 3
#: size limit of the file in bytes; nothing is written past it
MOST = 1 << 20
#: characters of one worker's description
MOST_OF_ONE = 4_000
#: how long to wait for a worker's stack; it is immediate unless the system stalls the worker
STACK_SECONDS = 0.5
#: frames of a stack that are shown
FRAMES = 12


class Notes:
    """The shared file, in the program and in each process of its loader."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("minato-notes")
        fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_APPEND)
        _open.add(self)

    def __getstate__(self) -> Any:
        return DupFd(self.fd)

    def __setstate__(self, dup: Any) -> None:
        self.fd = dup.detach()

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Closes the file, after the workers have ended. close: os.close may be gone at exit."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            close(fd)

    def __del__(self) -> None:
        self.close()

    # ---- in a worker -----------------------------------------------------------------

    def ends(self, error: BaseException, pid: int | None = None) -> None:
        """The process, or the one with this id, ends with this exception."""
        with contextlib.suppress(Exception):  # a text of the user's own may fail
            what = "".join(traceback.format_exception_only(type(error), error)).strip()
            frames = traceback.extract_tb(error.__traceback__)
            where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
            text = f"{what[:MOST_OF_ONE]}{where}"
            self._append({"pid": pid or os.getpid(), "text": text})

    def ends_late(self, pid: int, text: str) -> None:
        """The program ends the worker, whose sample took too long."""
        self._append({"pid": pid, "text": text[:MOST_OF_ONE]})

    def moves(self, attribute: str) -> None:
        """An attribute of the dataset, or of an object in it, changes with the samples."""
        self._append({"moves": attribute})

    def _append(self, record: dict[str, str | int]) -> None:
        if os.fstat(self.fd).st_size < MOST:
            os.write(self.fd, json.dumps(record).encode() + b"\n")

    def show_stack_at_signal(self) -> None:
        """Installs the handlers, unless the program uses the signals itself."""
        for number, dies in (STACK_SIGNAL, False), (LATE_SIGNAL, True):
            if signal.getsignal(number) is signal.SIG_DFL:
                faulthandler.register(number, file=self.fd, all_threads=False, chain=dies)

    # ---- in the program --------------------------------------------------------------

    def exit_cause(self, pid: int) -> str:
        """The exception that ended a process, or an empty text."""
        return next((str(record["text"]) for record in self._records() if record.get("pid") == pid), "")

    def moving(self) -> str:
        """The name of such an attribute; empty if there is none."""
        return next((str(record["moves"]) for record in self._records() if "moves" in record), "")

    def _records(self) -> Iterator[dict[str, str | int]]:
        """The records of the workers, the latest first."""
        lines = os.pread(self.fd, MOST, 0).splitlines() if self.fd >= 0 else []
        for line in reversed(lines):
            if line.startswith(b"{"):
                with contextlib.suppress(ValueError):
                    yield json.loads(line)

    def stack_of(self, pid: int, send: Callable[[int], object], number: int = STACK_SIGNAL) -> str:
        """The stack of a worker's main thread, innermost call first; empty if the worker does not
        answer. send: sends the signal to it; number: of the signal."""
        if self.fd < 0 or not _catches(pid, number):
            return ""
        begin = os.fstat(self.fd).st_size
        if begin >= MOST:
            return ""
        send(number)
        deadline, size = time.monotonic() + STACK_SECONDS, begin
        while time.monotonic() < deadline:
            time.sleep(0.01)
            now = os.fstat(self.fd).st_size
            if now == size > begin:
                break
            size = now
        lines = os.pread(self.fd, MOST, begin).decode(errors="replace").splitlines()
        return of_the_program([line for line in lines if line.startswith("  File ")])


_open: weakref.WeakSet[Notes] = weakref.WeakSet()


def exit_cause(pid: int) -> str:
    """The exception that ended a worker of any loader of this process, or an empty text."""
    return next(filter(None, (notes.exit_cause(pid) for notes in list(_open))), "")


def of_the_program(lines: list[str]) -> str:
    """The lines of a stack, innermost call first, up to minato's own calls."""
    ours = os.path.join(os.path.dirname(__file__), "workers", "")
    escaped = ours.encode("ascii", "backslashreplace").decode()  # as faulthandler writes it
    own = list(itertools.takewhile(lambda line: ours not in line and escaped not in line, lines))
    return "\n".join((own or lines)[:FRAMES])


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal that would otherwise kill it."""
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            caught = next(line for line in status if line.startswith(b"SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
