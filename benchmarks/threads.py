"""``worker_type="thread"``: when are threads as fast as processes, and when not?

    python benchmarks/threads.py [--only NAME ...] [--workers N] [--quick] [--json FILE]

Workloads:

decode    a sample is decompressed by zlib, which releases the GIL, and becomes a tensor
wait      a sample waits as for storage, and then NumPy computes on it
python    a sample is made by a loop in Python, which holds the GIL if there is one

Each loader runs the epochs of a persistent iterator in a fresh process; the first epoch is not
counted. Each round starts with another loader. "bound" is the rate of the workers
if nothing else took time: as many samples at once as there are workers, and of those
that compute no more than there are cores (for "python" in threads with a GIL: one). All loaders
must deliver the same bytes. "from nothing" is the time to the first batch, including the start of
the workers.

torchdata.nodes and SPDL, whose threads make whole batches, in order, are in the table if they
are installed: pip install spdl-core, and pip install --no-deps torchdata.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import common
import numpy as np
import torch
from torch.utils.data import BatchSampler, Dataset, SequentialSampler

import minato

BATCH = 8
SIDE = 224
WAIT_SECONDS = 0.004


class Samples(Dataset):
    """Of one workload, none like another."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError


class Decode(Samples):
    """The work of an image decoder: some hundred kilobytes from a compressed string."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        rng = np.random.default_rng(0)
        texture = rng.integers(0, 16, (8, 3 * SIDE * SIDE), np.uint8)
        self.files = [zlib.compress(part.tobytes(), 1) for part in texture]

    def __getitem__(self, index: int) -> Any:
        raw = bytearray(zlib.decompress(self.files[index % len(self.files)]))
        raw[:8] = index.to_bytes(8, "little")
        return torch.frombuffer(raw, dtype=torch.uint8).view(3, SIDE, SIDE), index


class Wait(Samples):
    def __getitem__(self, index: int) -> Any:
        time.sleep(WAIT_SECONDS)
        values = np.arange(index, index + 3 * 64 * 64, dtype=np.float32)
        return np.sqrt(values).reshape(3, 64, 64), index


class Python(Samples):
    def __getitem__(self, index: int) -> Any:
        number = index
        for _ in range(20_000):
            number = (number * 1103515245 + 12345) & 0x7FFFFFFF
        return torch.tensor([number]), index


#: the dataset, samples per epoch (few with --quick), whether they compute, and hold the GIL
WORKLOADS: dict[str, tuple[type[Samples], int, int, bool, bool]] = {
    "decode": (Decode, 1600, 64, True, False),
    "wait": (Wait, 800, 64, False, False),
    "python": (Python, 800, 64, True, True),
}


# ---- loaders ---------------------------------------------------------------------------------


def classes(module: Any, **options: Any) -> Callable[[Dataset, int], Iterable[Any]]:
    def make(dataset: Dataset, workers: int) -> Iterable[Any]:
        return module.DataLoader(
            dataset, batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0, **options
        )

    return make


class _Fetch:
    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __call__(self, indices: list[int]) -> Any:
        return torch.utils.data.default_collate([self.dataset[i] for i in indices])


def _batches(dataset: Any) -> BatchSampler:
    return BatchSampler(SequentialSampler(dataset), BATCH, False)


def nodes(dataset: Dataset, workers: int) -> Iterable[Any]:
    from torchdata import nodes as made

    source = made.SamplerWrapper(_batches(dataset))
    mapper = made.ParallelMapper(source, _Fetch(dataset), num_workers=workers, method="thread")
    return made.Loader(made.Prefetcher(mapper, prefetch_factor=2 * workers))


class Spdl:
    def __init__(self, dataset: Dataset, workers: int) -> None:
        self.dataset, self.workers = dataset, workers

    def __iter__(self) -> Iterator[Any]:
        return common.spdl_batches(_batches(self.dataset), _Fetch(self.dataset), self.workers)


LOADERS: dict[str, Callable[[Dataset, int], Iterable[Any]]] = {
    "minato, threads": classes(minato, worker_type="thread", seed_per_sample=False),
    "minato, processes": classes(minato, worker_type="process", seed_per_sample=False),
    "torch, processes": classes(torch.utils.data),
    "torch, none": lambda dataset, workers: classes(torch.utils.data)(dataset, 0),
    "torchdata.nodes, threads": nodes,
    "spdl, threads": Spdl,
}
PEERS = {"torchdata.nodes, threads": "torchdata.nodes", "spdl, threads": "spdl.pipeline"}


def installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def names() -> list[str]:
    return [name for name in LOADERS if name not in PEERS or installed(PEERS[name])]


# ---- one loader, in a separate process ---------------------------------------------------------


def child(request: dict[str, Any]) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    kind, many, few, _computes, _holds = WORKLOADS[request["workload"]]
    dataset = kind(few if request["quick"] else many)
    dataset[0]
    begin, cpu = time.perf_counter(), time.thread_time()
    for index in range(16):
        dataset[index]
    alone = (time.perf_counter() - begin) / 16
    computing = (time.thread_time() - cpu) / 16

    begin = time.perf_counter()
    loader = LOADERS[request["loader"]](dataset, request["workers"])
    digest, first = hashlib.sha256(), 0.0
    for batch in loader:
        first = first or time.perf_counter() - begin
        for part in batch:
            digest.update(part.numpy().tobytes())
    rates, used = [], []
    for _ in range(1 if request["quick"] else 3):
        begin, cpu = time.perf_counter(), common.cpu_seconds()
        samples = sum(len(batch[1]) for batch in loader)
        if samples != len(dataset):
            raise SystemExit(f"{request['loader']}: {samples} of {len(dataset)} samples")
        rates.append(len(dataset) / (time.perf_counter() - begin))
        used.append((common.cpu_seconds() - cpu) / len(dataset))
    return {
        "rate": common.median(rates), "cpu": common.median(used), "first": first, "alone": alone,
        "computing": computing, "digest": digest.hexdigest(),
    }  # fmt: skip


def bound(workload: str, loader: str, workers: int, cores: int, run: dict[str, Any]) -> float:
    """Samples a second of this number of workers and nothing else."""
    _kind, _many, _few, computes, holds = WORKLOADS[workload]
    at_once = 1 if loader == "torch, none" else workers
    if computes:
        at_once = min(at_once, cores)
        with_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
        if holds and with_gil and "threads" in loader:
            at_once = 1
        return at_once / run["alone"]
    return min(at_once / run["alone"], cores / max(run["computing"], 1e-9))


# ---- all of them -------------------------------------------------------------------------------


def measure(workload: str, args: argparse.Namespace, cores: int) -> dict[str, Any]:
    every = names()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in every}
    for round_ in range(1 if args.quick else args.rounds):
        turn = round_ % len(every)
        for name in every[turn:] + every[:turn]:
            request = {"workload": workload, "loader": name, "workers": args.workers,
                       "quick": args.quick}  # fmt: skip
            runs[name].append(common.run_child(__file__, request))
    digests = {run["digest"] for found in runs.values() for run in found}
    if len(digests) != 1:
        raise SystemExit(f"{workload}: the loaders delivered other samples than each other")
    # The same samples alone: the fastest run is the least disturbed.
    best = min((run for found in runs.values() for run in found), key=lambda run: run["alone"])
    bounds = {name: bound(workload, name, args.workers, cores, best) for name in every}
    return {"runs": runs, "bounds": bounds, "alone": best["alone"], "same": True}


def report(result: dict[str, Any]) -> None:
    print(f"# {common.describe(result['machine'])}, {result['workers']} workers, batches of {BATCH}")
    for workload, found in result["workloads"].items():
        text = (WORKLOADS[workload][0].__doc__ or "").strip()
        print(f"\n{workload}: {found['alone'] * 1e6:.0f} us a sample alone. {text}".rstrip())
        rows = []
        for name, runs in found["runs"].items():
            rates = [run["rate"] for run in runs]
            rows.append([
                name, f"{common.median(rates):.0f}", common.between(rates, form=".0f"),
                f"{found['bounds'][name]:.0f}",
                common.number(common.median(run["cpu"] for run in runs) * 1e6),
                common.number(common.median(run["first"] for run in runs) * 1e3),
            ])  # fmt: skip
        head = ["loader", "samples/s", "of all rounds", "bound", "CPU us a sample", "from nothing, ms"]
        print(common.table(head, rows))
    print("\nAll loaders have delivered the same bytes.")
    for name in LOADERS:
        if name not in names():
            print(f"left out, is not installed: {name}")


def main() -> int:
    request = common.child_request()
    if request is not None:
        common.answer(child(request))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--quick", action="store_true", help="seconds; no good numbers")
    parser.add_argument("--json", metavar="FILE", help="also write every number here")
    args = parser.parse_args()
    machine = common.machine()
    result = {
        "machine": machine,
        "workers": args.workers,
        "workloads": {name: measure(name, args, machine["cores"]) for name in args.only},
    }
    report(result)
    common.save(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
