"""What workers write for the program to read: why one has ended, and where one is.

Also what samples build with the dataset's generators (``seeding/held.py``).
A file in memory that all processes of a loader have open. A worker that an exception ends (one
that no sample catches: ``sys.exit()``, an exception below BaseException) appends what it was; and
at a signal a worker appends the stack of its main thread, also where C code holds the GIL.
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

from .seeding.held import Held

#: of the program to a worker, which writes its stack then. Real-time signals have no other use
#: that is known, and the last of them least.
STACK_SIGNAL = signal.SIGRTMAX - 3
#: bytes of the file, after which nothing more is written
MOST = 1 << 20
#: characters of what one worker says
MOST_OF_ONE = 4_000
#: how long a worker has to write its stack: at once, unless the system holds it up
STACK_SECONDS = 0.5
#: frames of a stack that are shown
FRAMES = 12


class Notes:
    """In the program, and in each of its loader's processes."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("minato-notes")
        fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_APPEND)
        _open.add(self)

    def __getstate__(self) -> Any:
        return DupFd(self.fd)

    def __setstate__(self, dup: Any) -> None:
        self.fd = dup.detach()

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """In the program, once the workers have ended. close: gone from os as Python ends."""
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

    def makes_trials(self) -> bool:
        """Whether this process is the first of the workers to ask (``seeding/held.py``)."""
        self._append({"tries": os.getpid()})
        first: int = [said["tries"] for said in self._said() if "tries" in said][-1]
        return first == os.getpid()

    def found_held(self, held: Held) -> None:
        """What samples have built with the dataset's generators."""
        self._append({"held": held})

    def _append(self, said: dict[str, Any]) -> None:
        if os.fstat(self.fd).st_size < MOST:
            os.write(self.fd, json.dumps(said).encode() + b"\n")

    def show_stack_at_signal(self) -> None:
        """From now on, unless the program has another use for the signal."""
        if signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL:
            faulthandler.register(STACK_SIGNAL, file=self.fd, all_threads=False, chain=False)

    # ---- in the program --------------------------------------------------------------

    def said_by(self, pid: int) -> str:
        """With what exception a process has ended, or nothing."""
        return next((str(said["text"]) for said in self._said() if said.get("pid") == pid), "")

    def held(self) -> Held | None:
        """What a worker has told of the dataset's generators, last."""
        for said in self._said():
            if "held" in said:
                kinds, builds = said["held"]
                return Held(tuple(kinds), {int(place): built for place, built in builds.items()})
        return None

    def _said(self) -> Iterator[dict[str, Any]]:
        """What workers have appended, the latest first."""
        lines = os.pread(self.fd, MOST, 0).splitlines() if self.fd >= 0 else []
        for line in reversed(lines):
            if line.startswith(b"{"):
                with contextlib.suppress(ValueError):
                    yield json.loads(line)

    def stack_of(self, pid: int, send: Callable[[int], object]) -> str:
        """Where the main thread of a worker is, the latest call first; empty where it does not
        say. send: sends it a signal."""
        if self.fd < 0 or not _catches(pid, STACK_SIGNAL):
            return ""
        begin = os.fstat(self.fd).st_size
        if begin >= MOST:
            return ""
        send(STACK_SIGNAL)
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


def said_by(pid: int) -> str:
    """With what exception a worker of any loader of this process has ended, or nothing."""
    return next(filter(None, (notes.said_by(pid) for notes in list(_open))), "")


def of_the_program(lines: list[str]) -> str:
    """The lines of a stack, the latest call first, without those that lead to all samples."""
    ours = os.path.join(os.path.dirname(__file__), "workers", "")
    own = list(itertools.takewhile(lambda line: ours not in line, lines))
    return "\n".join((own or lines)[:FRAMES])


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise."""
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            caught = next(line for line in status if line.startswith(b"SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
