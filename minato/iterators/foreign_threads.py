"""Detects workers that wait forever for threads of the program, which a fork does not have.

A library may start a thread pool in the program (polars, an executor) and give it work in a forked
worker. The pool's threads do not exist there. The only visible sign is that all workers sleep in
their first sample. One warning then names the threads.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from contextlib import suppress

from .._core import WORKER_READY, Engine

#: all workers must have been in their first sample for this many seconds
SECONDS = 5.0
#: and must have used no CPU during a period of this many seconds
LOOK = 1.0
#: how many threads the warning names
NAMED = 6
#: names of threads that a fork does not need: minato's and torch's
_HARMLESS = ("minato", "pt_", "cuda")


class FirstSamples:
    """Watches one iterator's workers until one of them has made a sample."""

    def __init__(self, forked: bool) -> None:
        self.watching = forked
        self._looked = time.monotonic()
        self._used: list[bytes] | None = None  # CPU time of each process at the last look

    def part(self, seconds: float) -> float:
        """Shortens a wait (below 0: unlimited) so that it ends at the next look."""
        if not self.watching:
            return seconds
        return min(seconds, LOOK) if seconds >= 0 else LOOK

    def look(self, engine: Engine) -> None:
        """Warns if all workers sleep in their first sample."""
        now = time.monotonic()
        if not self.watching or now < self._looked + LOOK:
            return
        self._looked, before, self._used = now, self._used, None
        entries = [entry for entry in engine.workers() if entry["state"] == WORKER_READY]
        if any(entry["rows"] for entry in entries):
            self.watching = False
            return
        late = time.monotonic_ns() - int(1e9 * SECONDS)
        if not entries or any(e["running"] is None or e["since_ns"] > late for e in entries):
            return
        with suppress(OSError):  # a worker has ended, or there is no /proc
            self._used = [_sleeps(entry["pid"]) for entry in entries]
        if self._used is None or b"" in self._used or self._used != before:
            return
        self.watching = False
        names = foreign_threads()
        if names:
            _warn(len(entries), names)


def _sleeps(pid: int) -> bytes:
    """CPU time of a process that waits for another thread; empty if it does not wait."""
    with open(f"/proc/{pid}/stat", "rb") as stat, open(f"/proc/{pid}/wchan", "rb") as wchan:
        fields, waits_in = stat.read().rpartition(b")")[2].split(), wchan.read()
    if fields[0] != b"S" or b"futex" not in waits_in:  # or the system hides it
        return b""
    return b" ".join(fields[11:13])


def foreign_threads() -> list[str]:
    """Names of this process's threads, without those that workers do not need."""
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    names = set()
    with open("/proc/self/comm") as file:
        unnamed = file.read()
    for number in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{number}/comm") as file:
            comm = file.read()
            name = python.get(int(number), "" if comm == unnamed else comm.strip())
            me = int(number) in (os.getpid(), threading.get_native_id())
            if name and not me and not name.startswith(_HARMLESS):
                names.add(name)
    return sorted(names)


def _warn(workers: int, names: list[str]) -> None:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    who = f"All {workers} workers have" if workers > 1 else "The worker has"
    warnings.warn(
        f"{who} been asleep in the first sample for {SECONDS:.0f} seconds. Workers are forks of "
        f"this program and do not have its threads: {', '.join(names[:NAMED])}{more}. If the "
        "dataset uses a library or an executor that started these threads in the program, it "
        "may wait for them forever. Give the loader multiprocessing_context='forkserver', or "
        "use the library only in workers. With timeout=0 the loader waits forever; timeout=60 raises "
        "an error after 60 seconds. This warning is shown once.",
        stacklevel=4,
    )
