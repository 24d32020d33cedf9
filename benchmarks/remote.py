"""``remote=``: how fast are actors on Ray, and what does a sample cost to receive?

    python benchmarks/remote.py [--nodes 0 1 2 4] [--quick] [--json FILE]

Each row of the first table is a cluster on this machine: a head and some more nodes, with one actor
each, after all have begun. "bound" is actors / seconds of a sample. Samples sleep, so that this
machine's cores stand for many; in "uneven" one in 16 sleeps ten times as long. "computing" ones keep a core busy. "local" has as
many worker processes as there are actors. "ray data" and "torch" make the same samples.

The second table has the CPU time of the trainer and of Ray's daemons (raylet, GCS) for each sample that
comes from another node, less that of an idle cluster. remote= pays if making a sample takes ten times
as long as both together.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import common
import numpy as np
import psutil
import ray
import torch
from ray.cluster_utils import Cluster
from torch.utils.data import Dataset

import minato

SECONDS = 0.02
NODE = {"num_cpus": 1, "object_store_memory": 300 << 20}


class Sleeping(Dataset):
    def __init__(
        self, count: int, size: int = 64, seconds: float = SECONDS, how: str = "sleeping"
    ) -> None:
        self.count, self.size, self.seconds, self.how = count, size, seconds, how

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        if self.how == "computing":
            end = time.thread_time() + self.seconds
            while time.thread_time() < end:
                pass
        else:
            time.sleep(self.seconds * (10 if self.how == "uneven" and index % 16 == 5 else 1))
        made = np.full(self.size, index % 256, np.uint8)
        made[:4] = np.array([os.getpid()], np.int32).view(np.uint8)
        return made


@contextlib.contextmanager
def cluster(nodes: int, folder: str) -> Iterator[None]:
    """A head with an actor, and as many other nodes. folder: for Ray's files."""
    os.environ["TMPDIR"], tempfile.tempdir = folder, folder
    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        for _ in range(nodes):
            made.add_node(**NODE)
        ray.init(address=made.address, log_to_driver=False, logging_level="error")
        yield
    finally:
        ray.shutdown()
        made.shutdown()


def rate(loader: Any, count: int, workers: int, epochs: int = 2) -> float:
    """Samples a second, of the best epoch after those in which workers start."""
    known, best = set[int](), 0.0
    while len(known) < min(workers, len(loader)):  # a worker may make no sample of few batches
        for batch in loader:
            known.update(batch[:, :4].contiguous().view(torch.int32).flatten().tolist())
    for _ in range(epochs):
        began = time.perf_counter()
        seen = sum(len(batch) for batch in loader)
        assert seen == count, (seen, count)
        best = max(best, count / (time.perf_counter() - began))
    return best


def ray_data(data: Sleeping) -> float:
    """The same samples by Ray Data; from the second epoch on."""
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    made = ray.data.range(len(data), override_num_blocks=max(2, len(data) // 8)).map(
        lambda row: {"x": data[row["id"]]}
    )
    best = 0.0
    for _ in range(2):
        began = time.perf_counter()
        seen = sum(len(b["x"]) for b in made.iter_batches(batch_size=16, batch_format="numpy"))
        assert seen == len(data)
        best = max(best, len(data) / (time.perf_counter() - began))
    return best


def rates(nodes: int, count: int, others: bool) -> dict[str, Any]:
    actors, row = nodes + 1, {"nodes": nodes, "bound": (nodes + 1) / SECONDS}
    options: dict[str, Any] = {"batch_size": 16, "persistent_workers": True, "shuffle": True}
    even, remote = Sleeping(count), minato.remote.Ray(actors=actors)
    for how in ("sleeping", "uneven", "computing"):
        data = Sleeping(count, how=how)
        row[how] = rate(minato.DataLoader(data, remote=remote, **options), count, actors)
        row[f"{how} local"] = rate(minato.DataLoader(data, num_workers=actors, **options), count, actors)
    if others:
        row["torch"] = rate(torch.utils.data.DataLoader(even, num_workers=actors, **options), count, actors)
        with contextlib.suppress(ImportError):
            row["ray data"] = ray_data(even)
    return row


def daemons() -> float:
    """CPU seconds of the cluster's daemons so far."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name() in ("raylet", "gcs_server"):
                times = process.cpu_times()
                total += times.user + times.system
    return total


def costs(size: int, count: int, chunk: int) -> dict[str, Any]:
    """CPU milliseconds a sample, of samples from another node than the trainer's."""
    here = ray.get_runtime_context().get_node_id()
    (there, *_) = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeID"] != here]
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(there, soft=False)
    remote = minato.remote.Ray(actors=1, chunk=chunk, options={"scheduling_strategy": affinity})
    data = Sleeping(count, size, 0.0)
    loader = minato.DataLoader(data, batch_size=chunk, remote=remote, persistent_workers=True)
    list(loader)
    idle_began, idle = time.perf_counter(), daemons()
    time.sleep(2)
    idle = (daemons() - idle) / (time.perf_counter() - idle_began)
    began, trainer, others = time.perf_counter(), time.process_time(), daemons()
    list(loader)
    seconds = time.perf_counter() - began
    trainer, others = time.process_time() - trainer, daemons() - others - idle * seconds
    each = {"trainer ms": 1e3 * trainer / count, "daemons ms": 1e3 * others / count}
    return {"bytes": size, "chunk": chunk, **each}


def table(rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    print("  ".join(f"{name:>13}" for name in names))
    for row in rows:
        print("  ".join(f"{row.get(name, float('nan')):13.4g}" for name in names), flush=True)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--nodes", type=int, nargs="*", default=None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", default=None)
    asked = parser.parse_args()
    nodes = asked.nodes if asked.nodes is not None else [1] if asked.quick else [0, 1, 2, 4]
    count = 64 if asked.quick else 640
    result: dict[str, Any] = {"rates": [], "costs": []}
    for n in nodes:
        with tempfile.TemporaryDirectory(prefix="mr-", dir="/tmp") as folder, cluster(n, folder):
            result["rates"].append(rates(n, count, others=n == max(nodes)))
            if n == max(nodes) and n > 0:
                sizes = [(150_000, 8), (150_000, 64), (10_000_000, 4)]
                times = 4 if asked.quick else 40
                result["costs"] = [costs(size, times * chunk, chunk) for size, chunk in sizes]
    print("samples a second")
    table(result["rates"])
    if result["costs"]:
        print("\nCPU of a sample")
        table(result["costs"])
    common.save(asked.json, result)


if __name__ == "__main__":
    main()
