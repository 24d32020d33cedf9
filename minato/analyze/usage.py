"""Who uses the cores while something is measured."""

from __future__ import annotations

import contextlib
import os
import time

clock = time.monotonic
_TICK = os.sysconf("SC_CLK_TCK")


class Usage:
    """CPU seconds from now on: of this process group, and of all others on the same cores."""

    def __init__(self) -> None:
        self.began, self.busy, self.own = clock(), _busy_seconds(), _own_seconds()

    def summary(self, samples: int = 0) -> dict[str, float]:
        took = max(clock() - self.began, 1e-6)
        cores = len(os.sched_getaffinity(0))
        own = max(0.0, _own_seconds() - self.own)
        others = max(0.0, _busy_seconds() - self.busy - own)
        return {
            "cores": own / took, "others": others / took / cores,
            "cpu_per_sample": own / samples if samples else 0.0,
        }  # fmt: skip


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
    """CPU seconds of the processes of this group, and of those that have ended."""
    group, total = os.getpgid(0), 0
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat") as file:
                    parts = file.read().rpartition(")")[2].split()
                if int(parts[2]) == group:
                    total += sum(map(int, parts[11:15]))
    return total / _TICK
