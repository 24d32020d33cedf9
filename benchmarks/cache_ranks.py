"""Memory of four ranks that each need all of a data set, for `python benchmarks/cache.py ranks`.

Four processes train by DistributedDataParallel (gloo, on the CPU), each with torch's loader and a worker.
memoize: the values of one minato.Cache. MONAI: its CacheDataset in each rank. a list in each rank: what
programs do by hand, where MONAI is not installed. A rank says when it is ready to load; what the memory
of all processes grows by from then on, at its most, is what the data costs. Worker processes are part of
that, so the data set must not be small. Large blocks go back to the system when they are freed
(MALLOC_MMAP_THRESHOLD_), so that free memory in a worker's heap counts on no side. All sides must deliver
the same samples to the same ranks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import select
import socket
import subprocess
import sys
import time
import zlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cache_scratch import turns
from common import kept_by_monai, median, memory_bytes, table, tree

import minato

MiB = 1 << 20
RANKS = 4
SAMPLES, SAMPLES_QUICK = 1536, 32
EPOCHS = 2
#: seconds between two looks at the memory of all processes
LOOK_SECONDS = 0.1
LIMIT_SECONDS = 300
MONAI = "MONAI CacheDataset"
LISTS = "a list in each rank"


def content(i: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(np.random.default_rng(i).bytes(MiB), np.uint8).copy())


class Listed(torch.utils.data.Dataset[Any]):
    """All values in the memory of this rank."""

    def __init__(self, count: int) -> None:
        self.values = [content(i) for i in range(count)]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: int) -> Any:
        return self.values[i], i


class Memoized(torch.utils.data.Dataset[Any]):
    """The values of one cache."""

    def __init__(self, count: int) -> None:
        self.count = count
        cache = minato.Cache(max(2 * count, 128) * MiB)
        self.load = cache.memoize(key=lambda i: i)(content)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        return self.load(i), i


class Monai(torch.utils.data.Dataset[Any]):
    """The values that MONAI keeps in this rank."""

    def __init__(self, count: int) -> None:
        from monai.data import CacheDataset

        made = kept_by_monai(content)
        self.kept = CacheDataset(list(range(count)), made, num_workers=1, progress=False)

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, i: int) -> Any:
        return self.kept[i], i


DATASETS: dict[str, Any] = {"memoize": Memoized, LISTS: Listed, MONAI: Monai}


def be_a_rank(side: str, count: int) -> None:
    """Trains for some epochs when a line comes; prints a checksum of its samples."""
    torch.set_num_threads(1)
    if side == MONAI:
        import monai.data  # noqa: F401  (what it takes is no data)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    print("ready", flush=True)
    sys.stdin.readline()
    data = DATASETS[side](count)
    sampler = torch.utils.data.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, 4, sampler=sampler, num_workers=1)
    check = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for values, indices in loader:
            model(values[:, :8].float()).sum().backward()
            for value, index in zip(values.numpy(), indices.tolist()):
                check = (check + zlib.crc32(value, index)) & 0xFFFFFFFF
    dist.barrier()
    print(check, flush=True)
    sys.stdin.readline()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def pids() -> list[int]:
    """Of this process and all below it."""
    return sorted(process.pid for process in tree(os.getpid()))


def most_memory(ranks: list[subprocess.Popen[str]]) -> tuple[int, list[str]]:
    """The most that all processes together took until each rank has printed a line; the lines.

    A look counts if no process came or went meanwhile. Pages that a process shares with a fork count
    for half in each of the two, so a process looked at before it forks and its fork would count one
    and a half times."""
    files = [rank.stdout for rank in ranks if rank.stdout is not None]
    lines: dict[Any, str] = {}
    most, end = 0, time.monotonic() + LIMIT_SECONDS
    while len(lines) < len(files):
        processes = pids()
        found = memory_bytes(os.getpid())["total"]
        most = max(most, found) if pids() == processes else most
        waiting = [file for file in files if file not in lines]
        for file in select.select(waiting, [], [], LOOK_SECONDS)[0]:
            lines[file] = file.readline()
            if not lines[file]:
                raise SystemExit("a rank failed")
        if time.monotonic() > end:
            raise SystemExit(f"the ranks took more than {LIMIT_SECONDS} s")
    return most, [lines[file].strip() for file in files]


def run(side: str, count: int) -> dict[str, Any]:
    """MiB that memory grew by at the most, and each rank's checksum."""
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
           "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1",
           "MALLOC_MMAP_THRESHOLD_": "131072"}  # fmt: skip
    command = [sys.executable, __file__, "--side", side, "--samples", str(count)]
    ranks = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                         env={**env, "RANK": str(rank)})
        for rank in range(RANKS)
    ]  # fmt: skip

    def go() -> None:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()

    try:
        _, told = most_memory(ranks)
        if told != ["ready"] * RANKS:
            raise SystemExit(f"{side}: the ranks say {told}")
        before = memory_bytes(os.getpid())["total"]  # all ranks wait for a line
        start = time.perf_counter()
        go()
        most, checks = most_memory(ranks)
        seconds = time.perf_counter() - start
        go()
        for rank in ranks:
            rank.communicate(timeout=100)
        return {"mib": (most - before) / MiB, "before_mib": before / MiB, "seconds": seconds,
                "checks": checks}  # fmt: skip
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def ranks(options: argparse.Namespace) -> dict[str, Any]:
    count = SAMPLES_QUICK if options.quick else SAMPLES
    sides = ["memoize", MONAI if importlib.util.find_spec("monai") else LISTS]
    runs: dict[str, list[Any]] = {side: [] for side in sides}
    for turn in turns(options.repeats, options.until):
        for side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
            runs[side].append(run(side, count))
    if len({tuple(one["checks"]) for each in runs.values() for one in each}) != 1:
        raise SystemExit("the sides delivered different samples")
    return {"ranks": RANKS, "mib": count, "runs": runs}


def show_ranks(result: dict[str, Any]) -> None:
    runs = result["runs"]
    other = MONAI if MONAI in runs else LISTS
    rows = []
    for side, each in runs.items():
        grown = [one["mib"] for one in each]
        ratio = median(a / b["mib"] for a, b in zip(grown, runs[other]))
        rows.append([side, f"{median(grown):.0f}", f"{min(grown):.0f} .. {max(grown):.0f}",
                     f"{ratio:.2f}", f"{median(one['seconds'] for one in each):.1f}"])  # fmt: skip
    print(f"\n{result['ranks']} ranks, a data set of {result['mib']} MiB")
    head = ["", "memory, MiB more", "least .. greatest", f"of {other}", "s"]
    print(table(head, rows))
    if MONAI not in runs:
        print("MONAI is not installed: pip install --no-deps monai")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", required=True)
    parser.add_argument("--samples", type=int, required=True)
    given = parser.parse_args()
    be_a_rank(given.side, given.samples)
