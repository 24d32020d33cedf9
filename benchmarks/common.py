"""Helpers of the benchmarks: process trees, fresh processes, statistics, tables.

CPU time of a tree is the kernel's count for every living process of it (its process
clock, nanoseconds) plus that of their waited-for children (clock ticks of 10 ms).
Memory of a tree is the sum of the proportional set sizes of private memory and files, so
that a page that several processes map counts once, plus all of the shared memory that some
process of the tree maps or holds a descriptor of: a batch in transit may be mapped by no
process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import psutil

MiB = 1 << 20
#: interval in seconds at which the memory of a tree is sampled
SAMPLE_SECONDS = 0.04
#: a child process that takes longer, in seconds, counts as hung
CHILD_SECONDS = 1200


def tree(root: int) -> list[psutil.Process]:
    """The process and all its living descendants."""
    try:
        top = psutil.Process(root)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def process_clock(pid: int) -> float:
    """CPU seconds, user and system, of all threads of another process."""
    return time.clock_gettime((~pid << 3) | 2)


def cpu_seconds(root: int | None = None) -> float:
    """CPU seconds of a tree so far, including dead and waited-for processes."""
    total = 0.0
    for process in tree(root or os.getpid()):
        try:
            waited = process.cpu_times()
            total += process_clock(process.pid)
            total += waited.children_user + waited.children_system
        except (psutil.NoSuchProcess, OSError):
            pass  # it ended in the meantime: its parent counts it
    return total


def _unshared_bytes(pid: int) -> int:
    """Proportional set size of a process without shared memory."""
    sizes = {}
    with open(f"/proc/{pid}/smaps_rollup") as file:
        for text in file:
            key, _, value = text.partition(":")
            if key.startswith("Pss"):
                sizes[key] = int(value.split()[0]) * 1024
    return sizes["Pss"] - sizes.get("Pss_Shmem", 0)


def _shared_paths(pid: int) -> Iterator[str]:
    """Paths below /proc of the shared memory that a process maps or has open."""
    with open(f"/proc/{pid}/maps") as file:
        for text in file:
            if "/dev/shm/" in text or "/memfd:" in text:
                yield f"/proc/{pid}/map_files/{text.split()[0]}"
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        try:
            if os.readlink(path).startswith(("/dev/shm/", "/memfd:")):
                yield path
        except OSError:
            pass  # closed in the meantime


def memory_bytes(root: int) -> dict[str, int]:
    """Memory of a tree: ``private`` (and files), ``shared``, and their sum as ``total``."""
    private, shared = 0, {}
    for process in tree(root):
        try:
            private += _unshared_bytes(process.pid)
            for path in _shared_paths(process.pid):
                try:
                    facts = os.stat(path)
                    shared[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
                except OSError:
                    pass  # gone in the meantime
        except (OSError, KeyError):
            pass  # it ended in the meantime
    total = private + sum(shared.values())
    return {"private": private, "shared": total - private, "total": total}


def load_average() -> float:
    return os.getloadavg()[0]


class Quiet:
    """Measures while other programs leave the machine alone, as well as possible.

    The use by others during a measurement is what the whole machine spent, including stolen
    time, less what this process and its ended children did. If others took more than ``share``
    of the machine, the measurement is repeated. Once ``minutes`` are used up
    in all, the best of its attempts counts. The shares are kept for the report.
    """

    def __init__(self, share: float, minutes: float) -> None:
        self.share = share
        self.deadline = time.monotonic() + minutes * 60
        self.shares: list[float] = []
        self.repeated = 0

    def run(self, measurement: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The measurement's result, with the others' share as ``others``."""
        best: dict[str, Any] = {}
        least = math.inf
        while least > self.share:
            late = not self._wait()
            result, others = self._watch(measurement)
            if others < least:
                best, least = result, others
            if late:
                break
            self.repeated += least > self.share
        self.shares.append(least)
        best["others"] = round(least, 3)
        return best

    def _wait(self) -> bool:
        """Waits until little runs; False if there is no time left for that."""
        while self.share < 1 and time.monotonic() < self.deadline:
            if psutil.cpu_percent(interval=2.0) / 100 <= self.share:
                break
        return self.share >= 1 or time.monotonic() < self.deadline

    def _watch(self, measurement: Callable[[], Any]) -> tuple[Any, float]:
        busy, own, begin = machine_seconds(), ended_seconds(), time.monotonic()
        result = measurement()
        seconds = (time.monotonic() - begin) * (os.cpu_count() or 1)
        others = machine_seconds() - busy - (ended_seconds() - own)
        return result, max(0.0, others / seconds)

    def report(self) -> dict[str, Any]:
        return {
            "others_median": round(median(self.shares), 3),
            "others_most": round(max(self.shares), 3),
            "repeated": self.repeated,
        }


def machine_seconds() -> float:
    """CPU seconds that the machine has spent, including those stolen by its host."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def ended_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark."""
    parser.add_argument("--json", metavar="FILE", help="also write every number here")
    parser.add_argument("--quick", action="store_true", help="seconds; no good numbers")
    parser.add_argument(
        "--quiet",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="measure again what others disturbed by using more than this share of the "
        "machine, 0 to 1; the default measures once, whatever else runs",
    )
    parser.add_argument(
        "--quiet-minutes", type=float, default=30.0, help="but no longer than this in all"
    )


def machine() -> dict[str, Any]:
    """The machine and versions of the measurement."""
    import torch

    model = platform.processor()
    with open("/proc/cpuinfo") as file:
        model = next((t.split(":", 1)[1].strip() for t in file if "model name" in t), model)
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(load_average(), 2),
    }


# ---- fresh processes -------------------------------------------------------------------


def child_command(script: str, request: dict[str, Any]) -> list[str]:
    return [sys.executable, script, "--child", json.dumps(request)]


def child_request() -> dict[str, Any] | None:
    """A child's request, or None in the process that a user started."""
    return json.loads(sys.argv[2]) if sys.argv[1:2] == ["--child"] else None


def start_child(script: str, request: dict[str, Any]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        child_command(script, request), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def answer(value: Any) -> None:
    """Sends a child's answer: the last line it prints."""
    print(json.dumps(value), flush=True)


def finish_child(child: subprocess.Popen[str]) -> Any:
    """The answer of a child, after its end; RuntimeError if it failed."""
    try:
        text, _ = child.communicate(timeout=CHILD_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        raise RuntimeError(f"no answer in {CHILD_SECONDS} s: {child.args}") from None
    if child.returncode != 0:
        raise RuntimeError(f"exit status {child.returncode}: {child.args}\n{text}")
    return json.loads(text.strip().splitlines()[-1])


def run_child(script: str, request: dict[str, Any]) -> Any:
    """The answer of a fresh process that runs a script with a request."""
    return finish_child(start_child(script, request))


def run_watched(script: str, request: dict[str, Any]) -> tuple[Any, dict[str, float]]:
    """Like run_child, with the tree's memory sampled from outside.

    The child prints a line when it is ready and then waits for one. Also returns,
    in MiB: ``before`` (the child alone, ready), ``peak`` (the maximum of the tree) and
    ``shared``, its part of the peak.
    """
    child = start_child(script, request)
    assert child.stdin is not None and child.stdout is not None
    child.stdout.readline()
    before = most = memory_bytes(child.pid)
    child.stdin.write("go\n")
    child.stdin.flush()
    while child.poll() is None:
        most = max(most, memory_bytes(child.pid), key=lambda sizes: sizes["total"])
        time.sleep(SAMPLE_SECONDS)
    sizes = {"before": before["total"], "peak": most["total"], "shared": most["shared"]}
    return finish_child(child), {key: size / MiB for key, size in sizes.items()}


def ready() -> None:
    """A watched child's pause before it starts."""
    print("ready", flush=True)
    sys.stdin.readline()


# ---- statistics, tables ----------------------------------------------------------------


def spdl_batches(
    indices: Iterable[list[int]], fetch: Callable[[list[int]], Any], workers: int
) -> Iterator[Any]:
    """SPDL: a number of threads fetch whole batches, in order."""
    from spdl.pipeline import PipelineBuilder

    builder = PipelineBuilder().add_source(indices)
    builder = builder.pipe(fetch, concurrency=workers, output_order="input")
    pipeline = builder.add_sink(2 * workers).build(num_threads=workers)
    with pipeline.auto_stop():
        yield from pipeline


def kept_by_monai(make: Callable[[int], Any]) -> Any:
    """A function as a transform whose results MONAI's datasets keep: of others they keep nothing,
    because these might be random."""
    from monai.transforms import Transform

    class Made(Transform):  # type: ignore[misc,unused-ignore]
        def __call__(self, index: int) -> Any:
            return make(index)

    return Made()


def median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def between(values: Sequence[float], scale: float = 1.0, form: str = "") -> str:
    """The least and the greatest, as ``least..greatest``."""
    ends = (min(values) * scale, max(values) * scale)
    return "..".join(format(end, form) if form else number(end) for end in ends)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the ratios theirs/ours of the same repeat."""
    return statistics.median(t / o for o, t in zip(ours, theirs, strict=True))


def number(value: float | None, digits: int = 3) -> str:
    """A number with this many significant digits, never in powers of ten."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:.{max(0, digits - whole)}f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns of text; the first aligned left, the others right."""
    every = [list(head), *[list(row) for row in rows]]
    widths = [max(len(row[c]) for row in every) for c in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if c == 0 else cell.rjust(width)
            for c, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in every
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def describe(facts: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def save(path: str | None, value: Any) -> None:
    if path is not None:
        with open(path, "w") as file:
            json.dump(value, file, indent=1)
            file.write("\n")
