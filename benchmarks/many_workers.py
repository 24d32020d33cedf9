"""Many waiting workers: the trainer's cost per sample, and how near the bound loading comes.

    python benchmarks/many_workers.py [--workers 32 128 256] [--repeats 3] [--json FILE] [--quick]

Samples sleep; with more workers they sleep longer, so that all workers together always make
1,280 a second. The first epoch starts the workers and is not counted. The second is compared with
the sum of all sleeps divided by the workers. CPU time is the trainer's own, with all its threads.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from typing import Any

import common
import torch
from torch.utils.data import Dataset

import minato

LOADERS = {"torch": torch.utils.data.DataLoader, "minato": minato.DataLoader}
RATE = 1280
BATCH = 16


class Sleeps(Dataset):
    def __init__(self, samples: int, seconds: float) -> None:
        self.samples, self.seconds = samples, seconds

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return torch.full((64,), float(index)), index


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """One loader with this number of workers, in a separate process."""
    workers = request["workers"]
    dataset = Sleeps(workers * request["samples"], workers / RATE)
    loader = LOADERS[request["loader"]](
        dataset, BATCH, num_workers=workers, persistent_workers=True
    )
    indices: list[int] = []
    for _ in range(2):
        indices.clear()
        iterator = iter(loader)  # workers start here, or get a new epoch
        begin, cpu = time.perf_counter(), time.process_time()
        for _values, found in iterator:
            indices += found.tolist()
        wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    bound = request["samples"] * dataset.seconds
    return {"wall": wall / bound, "cpu_us": cpu / len(indices) * 1e6,
            "complete": indices == list(range(len(dataset)))}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_options(parser)
    parser.add_argument("--workers", type=int, nargs="+", default=[32, 128, 256])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    samples = 64
    if arguments.quick:
        arguments.workers, arguments.repeats, samples = [4], 1, 8
    quiet = common.Quiet(arguments.quiet, arguments.quiet_minutes)
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    rows, complete = [], True
    for workers in arguments.workers:
        found = runs[str(workers)] = {name: [] for name in LOADERS}
        for repeat in range(arguments.repeats):
            for name in list(LOADERS)[:: 1 if repeat % 2 == 0 else -1]:
                request = {"loader": name, "workers": workers, "samples": samples}
                found[name].append(quiet.run(lambda r=request: common.run_child(__file__, r)))
        for name, results in found.items():
            walls, cpus = ([r[key] for r in results] for key in ("wall", "cpu_us"))
            complete &= all(r["complete"] for r in results)
            rows.append([
                f"{name}, {workers} workers", f"{common.median(walls):.3f}",
                common.between(walls, form=".3f"), f"{common.median(cpus):.0f}",
                common.between(cpus, form=".0f"),
            ])  # fmt: skip
    print(common.describe(common.machine()))
    print(f"others' share of the machine: {quiet.report()}")
    print("time of an epoch over the bound (sum of all sleeps / workers; 1.000 would be perfect),")
    print("and CPU time of the trainer a sample, us:")
    print(common.table(["loader", "time / bound", "range", "trainer, us", "range"], rows))
    print("all samples delivered, in order" if complete else "SAMPLES DIFFER")
    common.save(arguments.json, {"machine": common.machine(), "runs": runs})
    return 0 if complete else 1


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    asked = common.child_request()
    if asked is None:
        sys.exit(main())
    common.answer(measure(asked))
