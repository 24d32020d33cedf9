"""Workers that wait for ever for threads of the program, which a fork does not have.

A library that has started a thread pool in the program (polars, an executor) may hand it work in a
forked worker, where no thread of the pool is. Nothing can be seen of that but workers that all sleep
in their first sample. That is told once, with the names of the threads.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from contextlib import suppress

from .._core import Engine

#: seconds for which all workers have been in their first sample
SECONDS = 5.0
#: and in the last of which they have used no CPU
LOOK = 1.0
#: threads that are named
NAMED = 6
#: of a worker's entry that may be at work
_READY = 3
#: threads that a fork does not miss: minato's own, and torch's
_HARMLESS = ("minato", "pt_", "cuda")


class FirstSamples:
    """Of one iterator's workers, until one of them has made a sample."""

    def __init__(self, forked: bool) -> None:
        self.watching = forked
        self._looked = time.monotonic()
        self._used: list[bytes] | None = None  # what each process was at the last look

    def part(self, seconds: float) -> float:
        """How long a wait of so many seconds (below 0: without end) may be until the next look."""
        if not self.watching:
            return seconds
        return min(seconds, LOOK) if seconds >= 0 else LOOK

    def look(self, engine: Engine) -> None:
        """Warns where all workers sleep in their first sample."""
        now = time.monotonic()
        if not self.watching or now < self._looked + LOOK:
            return
        self._looked, before, self._used = now, self._used, None
        entries = [entry for entry in engine.workers() if entry["state"] == _READY]
        if any(entry["rows"] for entry in entries):
            self.watching = False
            return
        late = time.monotonic_ns() - int(1e9 * SECONDS)
        if not entries or any(e["running"] is None or e["since_ns"] > late for e in entries):
            return
        with suppress(OSError):  # one has ended, or there is no /proc
            self._used = [_sleeps(entry["pid"]) for entry in entries]
        if self._used is None or b"" in self._used or self._used != before:
            return
        self.watching = False
        names = foreign_threads()
        if names:
            _warn(len(entries), names)


def _sleeps(pid: int) -> bytes:
    """What a process has used of the CPU, where it waits for another thread; else nothing."""
    with open(f"/proc/{pid}/stat", "rb") as stat, open(f"/proc/{pid}/wchan", "rb") as wchan:
        fields, waits_in = stat.read().rpartition(b")")[2].split(), wchan.read()
    if fields[0] != b"S" or b"futex" not in waits_in:  # or the system does not say
        return b""
    return b" ".join(fields[11:13])


def foreign_threads() -> list[str]:
    """Names of this process's threads, without those that workers do not miss."""
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
        f"this program, and its threads are not there: {', '.join(names[:NAMED])}{more}. If the "
        "dataset uses a library or an executor that has started these threads in the program, it "
        "may wait for them for ever. Give the loader multiprocessing_context='forkserver', or "
        "use the library in workers only. This is told once.",
        stacklevel=4,
    )
