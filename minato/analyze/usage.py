"""Who uses the cores while something is measured."""

from __future__ import annotations

import contextlib
import os
import time

from .records import Used

clock = time.monotonic
_TICK = os.sysconf("SC_CLK_TCK")


class Usage:
    """CPU seconds from now on: of this process and those it belongs with, and of all others on the
    same cores."""

    def __init__(self) -> None:
        self.began, self.busy, self.own = clock(), _busy_seconds(), _own_seconds()

    def summary(self, samples: int = 0) -> Used:
        """Of this process and its own; per each of so many samples."""
        took = max(clock() - self.began, 1e-6)
        cores = len(os.sched_getaffinity(0))
        own = max(0.0, _own_seconds() - self.own)
        others = max(0.0, _busy_seconds() - self.busy - own)
        return Used(own / took, others / took / cores, own / samples if samples else 0.0)


def _busy_seconds() -> float:
    """CPU seconds of the cores that this process may use."""
    usable, total = os.sched_getaffinity(0), 0
    with open("/proc/stat") as file:
        for line in file:
            name, *numbers = line.split()
            if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in usable:
                user, nice, system, _idle, _wait, irq, soft = map(int, numbers[:7])
                total += user + nice + system + irq + soft
    return total / _TICK


def _own_seconds() -> float:
    """CPU seconds of this process's group and of all processes below it, and of those of them that
    have ended. torchrun starts each rank in a group of its own."""
    group, me = os.getpgid(0), os.getpid()
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    own = {me}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat") as file:
                    parts = file.read().rpartition(")")[2].split()
                pid = int(name)
                parents[pid], used[pid] = int(parts[1]), sum(map(int, parts[11:15]))
                if int(parts[2]) == group:
                    own.add(pid)
    for pid in list(parents):  # up to the first that is known
        above = [pid]
        while above[-1] not in own and above[-1] in parents:
            above.append(parents[above[-1]])
        if above[-1] in own:
            own.update(above)
    return sum(used.get(pid, 0) for pid in own) / _TICK
