"""Several jobs on one data set with slow storage: `python benchmarks/cache_order.py`.

Storage is emulated: reading a sample takes its bytes' time of one bandwidth that all processes share (a
token bucket in a file), and there is no page cache. All jobs start at once, with an empty cache of a fifth
of the data set, and each loads all epochs with two workers.

torch: each job reads everything. reorder: minato with cache_reorder=True. Seneca: its published rule (FAST
2026), written anew: a sample that is not cached is replaced by a cached one that the job has not had in
this epoch; a cached sample that as many hits as there are jobs have used makes room for another one, which
is chosen at random and read in the background. Orders are drawn for each job. Repeats take turns.

reads: of all jobs together, in data sets for each epoch. makespan: until the last job ends; the ratio to
torch's is the median over repeats. Each job checks that every sample comes once an epoch, with its bytes.

--uneven: jobs with cache_reorder=True that begin at different times or have different speeds, because a step
follows each batch. Here reads are those between two ends of epochs of the first job, while all jobs run, in
data sets for each of its epochs; and what a simulation of the rule gives.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import mmap
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from cache_scratch import MEMORY, cleaned, scratch, turns
from common import machine, median, table

import minato

BYTES = 96 << 10
PARTS, EACH = 16, 8  # of the cache, and samples in each
CACHED = PARTS * EACH
SAMPLES = 5 * CACHED
SIDES = ("torch", "Seneca", "cache_reorder")


class Storage:
    """Reads of all processes share one bandwidth; counts them."""

    def __init__(self, folder: Path, rate: float) -> None:
        self.path, self.rate = folder / "storage", rate

    def read(self, index: int) -> np.ndarray[Any, Any]:
        with open(self.path, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            state = np.frombuffer(file.read(16), np.float64)
            until = max(state[0], time.monotonic()) + BYTES / self.rate
            file.seek(0)
            file.write(np.array([until, state[1] + 1]).tobytes())
        time.sleep(max(0.0, until - time.monotonic()))
        return np.full(BYTES, index % 251, np.uint8)

    def reads(self) -> int:
        return int(np.frombuffer(self.path.read_bytes(), np.float64)[1])


class Data(torch.utils.data.Dataset[Any]):
    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def __len__(self) -> int:
        return SAMPLES

    def cache_key(self, i: int) -> int:
        return i

    def read(self, i: int) -> np.ndarray[Any, Any]:
        return self.storage.read(i)

    def decode(self, raw: Any, i: int) -> Any:
        return raw

    def augment(self, value: Any, i: int) -> Any:
        return i, value

    def __getitem__(self, i: int) -> Any:
        return self.augment(self.decode(self.read(i), i), i)


# ---- Seneca's rule -----------------------------------------------------------------------------


class Shared:
    """Cached samples and how often each was used, in a file that all processes map."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.path, self.jobs = folder / "shared", jobs
        self.bytes = 8 * (2 * SAMPLES + CACHED) + CACHED * BYTES
        self.process = 0

    def open(self) -> None:
        if self.process == os.getpid():
            return
        self.process = os.getpid()
        self.file = open(self.path, "r+b")
        self.held = threading.Lock()
        everything = np.frombuffer(mmap.mmap(self.file.fileno(), self.bytes), np.uint8)
        numbers = everything[: 8 * (2 * SAMPLES + CACHED)].view(np.int64)
        self.place = numbers[:SAMPLES]  # 1 + where a sample is; 0: nowhere
        self.used = numbers[SAMPLES : 2 * SAMPLES]
        self.owner = numbers[2 * SAMPLES :]  # 1 + the sample of a place; 0: free, -1: to be filled
        self.data = everything[8 * (2 * SAMPLES + CACHED) :].reshape(CACHED, BYTES)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        self.open()
        with self.held:
            fcntl.flock(self.file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self.file, fcntl.LOCK_UN)


class Substituted(torch.utils.data.Sampler[Any]):
    """An epoch in which a cached sample takes the place of one that is not, each once."""

    def __init__(self, shared: Shared, batch: int, seed: int) -> None:
        self.shared, self.batch, self.chance = shared, batch, random.Random(seed)

    def __len__(self) -> int:
        return SAMPLES // self.batch

    def __iter__(self) -> Iterator[Any]:
        order = self.chance.sample(range(SAMPLES), SAMPLES)
        seen: set[int] = set()
        for _ in range(len(self)):
            wanted = [index for index in order if index not in seen][: self.batch]
            with self.shared.lock():
                cached = set(np.flatnonzero(self.shared.place).tolist())
            others = list(cached - seen - set(wanted))
            self.chance.shuffle(others)
            batch = [i if i in cached or not others else others.pop() for i in wanted]
            seen.update(batch)
            yield batch


class ThroughShared(Data):
    def __init__(self, storage: Storage, shared: Shared) -> None:
        super().__init__(storage)
        self.shared = shared

    def read(self, i: int) -> np.ndarray[Any, Any]:
        shared = self.shared
        with shared.lock():
            place = int(shared.place[i]) - 1
            if place >= 0:
                value: np.ndarray[Any, Any] = shared.data[place].copy()
                shared.used[i] += 1
                if shared.used[i] >= shared.jobs:
                    shared.place[i], shared.owner[place] = 0, -1
                    threading.Thread(target=self.refill, args=(place,)).start()
                return value
        value = super().read(i)
        with shared.lock():
            free = np.flatnonzero(shared.owner == 0)
            if len(free) and not shared.place[i]:
                self.put(i, int(free[0]), value)
        return value

    def refill(self, place: int) -> None:
        shared = self.shared
        with shared.lock():
            index = int(random.choice(np.flatnonzero(shared.place == 0)))
        value = super().read(index)
        with shared.lock():
            if shared.place[index]:
                shared.owner[place] = 0
            else:
                self.put(index, place, value)

    def put(self, index: int, place: int, value: Any) -> None:
        shared = self.shared
        shared.data[place] = value
        shared.place[index], shared.used[index], shared.owner[place] = place + 1, 0, index + 1


# ---- a job -------------------------------------------------------------------------------------


def cache_bytes() -> int:
    """So that a fifth of the samples fits."""
    entry = BYTES + 64 + 64 + 256
    return PARTS * (-(-EACH * entry // 4096) * 4096)


def job(side: str, folder: Path, number: int, jobs: int, epochs: int, rate: float, step: float) -> None:
    torch.manual_seed(number)
    storage = Storage(folder, rate)
    loader: Any
    options: Any = {"num_workers": 2, "persistent_workers": True}
    if side == "cache_reorder":
        loader = minato.DataLoader(Data(storage), 8, shuffle=True, cache=cache_bytes(),
                                   cache_format="decoded", cache_reorder=True, **options)  # fmt: skip
    elif side == "torch":
        loader = torch.utils.data.DataLoader(Data(storage), 8, shuffle=True, **options)
    else:
        shared = Shared(folder, jobs)
        sampler = Substituted(shared, 8, number)
        loader = torch.utils.data.DataLoader(
            ThroughShared(storage, shared), batch_sampler=sampler, **options
        )
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(epochs):
        seen: list[int] = []
        for indices, values in loader:
            assert (values[:, 0] == indices % 251).all()
            seen += indices.tolist()
            time.sleep(step)
        assert sorted(seen) == list(range(SAMPLES)), "a sample was lost or doubled"
        print(storage.reads(), flush=True)
    sys.stdin.readline()


@contextlib.contextmanager
def started(side: str, folder: Path, epochs: list[int], rate: float,
            steps: list[float]) -> Iterator[list[subprocess.Popen[str]]]:  # fmt: skip
    """Jobs that are ready to begin, each with its epochs; at the end they have all ended."""
    jobs = len(epochs)
    (folder / "storage").write_bytes(bytes(16))
    with open(folder / "shared", "wb") as file:
        file.truncate(Shared(folder, jobs).bytes)
    command = [sys.executable, __file__, "--job", side, "--folder", str(folder), "--rate", str(rate),
               "--jobs", str(jobs)]  # fmt: skip
    running = [
        subprocess.Popen([*command, "--number", str(n), "--epochs", str(epochs[n]), "--step",
                          str(steps[n])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                         env={**os.environ, "OMP_NUM_THREADS": "1"})
        for n in range(jobs)
    ]  # fmt: skip
    try:
        for one in running:
            assert one.stdout is not None and one.stdout.readline() == "ready\n"
        yield running
        for one in running:
            one.communicate("\n", timeout=300)
            assert one.returncode == 0
    finally:
        for one in running:
            one.kill()
            one.wait()


def begin(one: subprocess.Popen[str]) -> None:
    assert one.stdin is not None
    one.stdin.write("\n")
    one.stdin.flush()


def reads_of(one: subprocess.Popen[str], epochs: int) -> list[int]:
    """Reads of all jobs up to the end of each of one's epochs."""
    assert one.stdout is not None
    return [int(one.stdout.readline()) for _ in range(epochs)]


def run(side: str, jobs: int, epochs: int, rate: float) -> dict[str, float]:
    with scratch(MEMORY) as folder:
        with started(side, folder, [epochs] * jobs, rate, [0.0] * jobs) as running:
            begins = time.monotonic()
            for one in running:
                begin(one)
            reads = [reads_of(one, epochs) for one in running]
            took = time.monotonic() - begins
        total = Storage(folder, rate).reads() / SAMPLES
        first = max(counts[0] for counts in reads) / SAMPLES
        return {"makespan": took, "reads": total / epochs,
                "steady": (total - first) / max(1, epochs - 1)}  # fmt: skip


def compare(jobs: list[int], epochs: int, rate: float, repeats: int,
            until: float | None = None) -> list[dict[str, Any]]:  # fmt: skip
    results: list[dict[str, Any]] = [
        {"jobs": n, "side": side, **run(side, n, epochs, rate)}
        for _ in turns(repeats, until) for n in jobs for side in SIDES
    ]  # fmt: skip
    return results


class Uneven(NamedTuple):
    """Jobs: when each begins and how long its epoch takes at least, in epochs of storage."""

    begins: list[float]
    takes: list[float]
    simulated: float


#: 4 jobs a quarter of an epoch apart; 8 that begin at random; 3 of which each is half as fast as the last
UNEVEN = {
    "4 jobs, staggered": Uneven([0, 0.25, 0.5, 0.75], [0.0] * 4, 0.91),
    "8 jobs, random starts": Uneven([0, 0.1, 0.24, 0.31, 0.47, 0.66, 0.79, 0.92], [0.0] * 8, 1.03),
    "3 jobs, speeds 1, 1/2, 1/4": Uneven([0, 0, 0], [1.2, 2.4, 4.8], 0.80),
}
WARM = 2  # epochs of the first job before its reads count


def uneven(name: str, epochs: int, rate: float) -> float:
    """Data sets that all jobs read for each epoch of the first."""
    begins, takes, _ = UNEVEN[name]
    epoch_s = SAMPLES * BYTES / rate
    each = [max(1, round(epochs * takes[0] / own)) if own else epochs for own in takes]
    steps = [own * epoch_s / (SAMPLES / 8) for own in takes]
    with scratch(MEMORY) as folder:
        with started("cache_reorder", folder, each, rate, steps) as running:
            start = time.monotonic()
            for one, after in zip(running, begins):
                time.sleep(max(0.0, start + after * epoch_s - time.monotonic()))
                begin(one)
            reads = reads_of(running[0], epochs)
            for one, count in zip(running[1:], each[1:]):
                reads_of(one, count)
        return (reads[-1] - reads[WARM - 1]) / SAMPLES / (epochs - WARM)


def show_uneven(results: dict[str, list[float]]) -> None:
    rows = [
        [name, f"{median(reads):.2f}", f"{min(reads):.2f} .. {max(reads):.2f}",
         f"{UNEVEN[name].simulated:.2f}"]
        for name, reads in results.items()
    ]  # fmt: skip
    print(table(["", "reads", "least .. greatest", "simulated"], rows))


def show(results: list[dict[str, Any]]) -> None:
    rows = []
    for n in sorted({result["jobs"] for result in results}):
        torchs = [r["makespan"] for r in results if r["jobs"] == n and r["side"] == "torch"]
        for side in SIDES:
            own = [r for r in results if r["jobs"] == n and r["side"] == side]
            spans = [r["makespan"] for r in own]
            ratios = [span / other for span, other in zip(spans, torchs)]
            rows.append([
                str(n), side, f"{median([r['reads'] for r in own]):.2f}",
                f"{median([r['steady'] for r in own]):.2f}",
                f"{median(spans):.1f} ({min(spans):.1f} to {max(spans):.1f})",
                f"{median(ratios):.2f}",
            ])  # fmt: skip
    print(table(["jobs", "side", "reads", "after the first epoch", "makespan, s", "of torch's"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rate", type=float, default=32 << 20, help="bytes a second of storage")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--uneven", action="store_true", help="jobs of different starts and speeds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--job", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--step", type=float, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.job:
        job(a.job, a.folder, a.number, a.jobs[0], a.epochs, a.rate, a.step)
        return
    if a.uneven:
        show_uneven({name: [uneven(name, a.epochs, a.rate) for _ in range(a.repeats)]
                     for name in UNEVEN})  # fmt: skip
        return
    results = compare(a.jobs, a.epochs, a.rate, a.repeats)
    if a.json:
        print(json.dumps({"machine": machine(), "results": results}))
    else:
        print(machine())
        show(results)


if __name__ == "__main__":
    with contextlib.nullcontext() if "--job" in sys.argv else cleaned():
        main()
