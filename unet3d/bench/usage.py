"""CPU time, memory and GPU use of this process and all its descendants, over time; and how much
of the cores other programs had meanwhile."""
from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch

from unet3d.parallel import available_cores

PROC = Path("/proc")
MEMORY_EVERY = 4  # memory is read at every 4th sample: a page-table walk per process


#: share of the usable cores that other programs may have before a program says so
CROWDED = 0.1

#: (start time, CPU seconds, CPU seconds of the children that it has waited for)
Times = tuple[int, float, float]


def usable_cpu_seconds() -> float | None:
    """CPU seconds that all programs have spent on the cores that this process may use, stolen
    ones included; None if the system does not say."""
    found = 0
    try:
        usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        for line in (PROC / "stat").read_text().splitlines():
            name, *fields = line.split()
            if name in usable:
                user, nice, system, _idle, _wait, irq, soft, steal = map(int, fields[:8])
                found += user + nice + system + irq + soft + steal
    except (AttributeError, OSError, ValueError):
        return None
    return found / os.sysconf("SC_CLK_TCK")


class Others:
    """Watches from its construction on what other programs have of the usable cores.

    Own time is that of this process, and of the children that it has waited for.
    """

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> tuple[float | None, float, float]:
        return usable_cpu_seconds(), sum(os.times()[:4]), time.perf_counter()

    def share(self) -> float | None:
        """Their share of the usable cores until now, 0 to 1; None if unknown."""
        (busy, own, clock), (busy_now, own_now, clock_now) = self._before, self._now()
        if busy is None or busy_now is None or clock_now <= clock:
            return None
        others = busy_now - busy - (own_now - own)
        return max(0.0, others) / (clock_now - clock) / available_cores()


def _linux_tree(root: int) -> dict[int, Times]:
    """The times of a process and its descendants by pid, from /proc."""
    ticks = os.sysconf("SC_CLK_TCK")
    table: dict[int, tuple[int, int, float, float]] = {}
    for name in os.listdir(PROC):
        if name.isdigit():
            try:
                text = (PROC / name / "stat").read_text()
            except OSError:
                continue  # it ended between listing and reading
            fields = text[text.rindex(")") + 2:].split()
            own, waited = (sum(map(int, fields[at:at + 2])) / ticks for at in (11, 13))
            table[int(name)] = (int(fields[1]), int(fields[19]), own, waited)
    tree, fresh = {root}, {root}
    while fresh:
        fresh = {pid for pid, row in table.items() if row[0] in fresh} - tree
        tree |= fresh
    return {pid: table[pid][1:] for pid in tree if pid in table}


def _psutil_tree(root: int) -> dict[int, Times]:
    import psutil

    tree = {}
    try:
        own = psutil.Process(root)
        processes = [own, *own.children(recursive=True)]
    except psutil.NoSuchProcess:
        return tree
    for process in processes:
        try:
            times = process.cpu_times()
            tree[process.pid] = (int(process.create_time()), times.user + times.system,
                                 getattr(times, "children_user", 0.0)
                                 + getattr(times, "children_system", 0.0))
        except psutil.NoSuchProcess:
            continue
    return tree


def process_tree(root: int | None = None) -> dict[int, Times]:
    """The times of the tree of a process, by default this one, by pid; empty if unknown."""
    root = root or os.getpid()
    if (PROC / "self/stat").exists():
        return _linux_tree(root)
    try:
        return _psutil_tree(root)
    except ImportError:
        return {}


def tree_memory(pids: list[int]) -> int | None:
    """Bytes of memory held by processes, shared pages counted once (PSS)."""
    total = 0
    for pid in pids:
        try:
            text = (PROC / str(pid) / "smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            return None
        for line in text.splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total or None


def gpu_percent() -> float | None:
    """Utilisation of the current GPU as the driver reports it; None if unknown."""
    if not torch.cuda.is_available():
        return None
    try:
        return float(torch.cuda.utilization())
    except Exception:  # no nvidia-ml-py, no permission, or an error class of its own
        return None


def usage_of_all(ranks: list[list[dict]]) -> list[dict]:
    """Returns what all ranks of this machine used together over time, from the `samples` of each
    (taken at about the same times): the sum of CPU and memory, the mean of their GPUs, and the
    share of the usable cores that other programs had."""
    def total(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    rows = []
    for parts in zip(*ranks):
        row = {"t": parts[0]["t"]} | {name: total([part[name] for part in parts])
                                      for name in ("cpu", "memory_mb", "gpu")}
        if row["gpu"] is not None:
            row["gpu"] /= sum(part["gpu"] is not None for part in parts)
        row["others"] = others_share(parts[0]["busy"], row["cpu"])
        rows.append(row)
    return rows


def others_share(busy: float | None, own: float) -> float | None:
    """The share of the usable cores that others had, from the share in use and our own."""
    return None if busy is None else max(0.0, busy - own)


def busy_remark(share: float | None) -> str:
    """A remark for a time during which other programs had this share; empty if it was small."""
    if share is None or share <= CROWDED:
        return ""
    return f"; other programs had {share:.0%} of the usable cores"


class UsageSampler:
    """Samples usage in a thread between `start` and `stop`. As a context it starts, and ends the
    thread if an error comes before `stop`.

    Afterwards `samples` holds one dict per interval: t (seconds since `start`), cpu (the
    tree's share of all available cores, 0 to 1), busy (the share that any program had, or None),
    memory_mb (PSS, or None), gpu (percent).
    """

    def __init__(self, interval_s: float = 0.5) -> None:
        self.interval_s = interval_s
        self.samples: list[dict] = []

    def __enter__(self) -> UsageSampler:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._done.set()
        self._thread.join()

    def start(self) -> None:
        """Starts; the counters are at zero."""
        self.samples = []
        self._seen: dict[tuple[int, int], float] = {}
        self._base: dict[tuple[int, int], float] = {}
        self._family_base = 0.0
        self._update()
        self._base = dict(self._seen)  # CPU time spent before the start
        self._family_base = self._family
        self._busy_base = self._last_busy = usable_cpu_seconds()
        self._began = self._last = time.perf_counter()
        self._last_cpu = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
        self._thread.start()

    def stop(self) -> dict:
        """Ends and summarises: cpu_seconds, cpu and busy (mean shares), memory_mb (peak), gpu."""
        self.__exit__()
        self._sample(memory=True)
        self._join_short()
        elapsed = self._last - self._began
        memory = [s["memory_mb"] for s in self.samples if s["memory_mb"] is not None]
        gpu = [s["gpu"] for s in self.samples if s["gpu"] is not None]
        return {"cpu_seconds": self._last_cpu,
                "cpu": self._last_cpu / elapsed / available_cores() if elapsed else 0.0,
                "busy": self._share(self._busy_base, self._last_busy, elapsed),
                "memory_mb": max(memory, default=None),
                "gpu": sum(gpu) / len(gpu) if gpu else None}

    def _join_short(self) -> None:
        """A last interval of few clock ticks is imprecise, so it is merged into the one before."""
        if len(self.samples) < 2:
            return
        begin = self.samples[-3]["t"] if len(self.samples) > 2 else 0.0
        before, last = self.samples[-2:]
        if last["t"] - before["t"] < self.interval_s / 2:
            span, tail = before["t"] - begin, last["t"] - before["t"]
            held = [s["memory_mb"] for s in (before, last) if s["memory_mb"] is not None]
            last["memory_mb"] = max(held, default=None)
            for name in ("cpu", "busy"):
                if before[name] is not None and last[name] is not None:
                    last[name] = (before[name] * span + last[name] * tail) / (span + tail)
            del self.samples[-2]

    @staticmethod
    def _share(before: float | None, after: float | None, span: float) -> float | None:
        if before is None or after is None or span <= 0:
            return None
        return (after - before) / span / available_cores()

    def _update(self) -> list[int]:
        tree = process_tree()
        self._family = sum(own + waited for _, own, waited in tree.values())
        for pid, (began, seconds, _) in tree.items():
            self._seen[pid, began] = seconds  # one that exits keeps its last value
        return list(tree)

    def _cpu_seconds(self) -> float:
        """CPU seconds of the tree since the start. Two counts, of which each may miss some: the
        first what a process spent between its last sample and its exit, the second what a process
        spent for which its parent has not waited."""
        seen = sum(self._seen.values()) - sum(self._base.values())
        return max(seen, self._family - self._family_base, self._last_cpu)

    def _sample(self, memory: bool) -> None:
        pids, busy = self._update(), usable_cpu_seconds()
        now = time.perf_counter()
        cpu = self._cpu_seconds()
        span = now - self._last
        held = tree_memory(pids) if memory else None
        if span > 0:
            self.samples.append({
                "t": now - self._began,
                "cpu": (cpu - self._last_cpu) / span / available_cores(),
                "busy": self._share(self._last_busy, busy, span),
                "memory_mb": held / 1e6 if held else None, "gpu": gpu_percent()})
        self._last, self._last_cpu, self._last_busy = now, cpu, busy

    def _run(self) -> None:
        number = 0
        while not self._done.wait(self.interval_s):
            number += 1
            self._sample(memory=number % MEMORY_EVERY == 1)
