"""``autoscale``: does the number of workers reach a useful value, and stay there?

    python benchmarks/workers.py [--only NAME ...] [--quick] [--json FILE]

Three jobs, each with the decision log of ``stats()``:

waiting   samples that sleep, from 2 workers with autoscale=(1, 32): the third epoch's rate
          compared with the best of fixed numbers of workers
computing samples that compute, from 2 workers with autoscale=(1, 32), compared with fixed numbers:
          more workers than cores are useless
consumer  samples that sleep, 16 workers, and a consumer that needs two: the number falls
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

MOST = 32


class Sleeping(Dataset):
    def __init__(self, count: int, seconds: float) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return index


class Computing(Sleeping):
    def __getitem__(self, index: int) -> int:
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            sum(range(1000))
        return index


def make(dataset: Dataset, workers: int, most: int | None = None) -> Any:
    return minato.DataLoader(
        dataset, batch_size=8, num_workers=workers, autoscale=most and (1, most), shuffle=True,
        persistent_workers=True, multiprocessing_context="fork",
    )  # fmt: skip


def epoch(loader: Any, step: float = 0.0) -> float:
    """Samples a second."""
    begin, count = time.monotonic(), 0
    for batch in loader:
        count += len(batch)
        if step:
            time.sleep(step)
    return count / (time.monotonic() - begin)


def log(loader: Any, begin: float) -> list[dict[str, Any]]:
    decisions = loader.stats()["scheduler"]["decisions"]
    return [{**d, "at": d["at"] - begin} for d in decisions]


def against_fixed(dataset: Dataset, fixed: tuple[int, ...]) -> dict[str, Any]:
    rates = {}
    for workers in fixed:
        loader = make(dataset, workers)
        epoch(loader)
        rates[workers] = epoch(loader)
        del loader
    begin = time.monotonic()
    loader = make(dataset, 2, MOST)
    grown = [epoch(loader) for _ in range(3)]
    best = max(rates.values())
    return {
        "fixed": rates,
        "rates": grown,
        "share_of_best": grown[-1] / best,
        "workers": loader.stats()["scheduler"]["active"],
        "log": log(loader, begin),
    }


def waiting(quick: bool) -> dict[str, Any]:
    return against_fixed(Sleeping(400 if quick else 4000, 0.03), (8,) if quick else (16, 32))


def computing(quick: bool) -> dict[str, Any]:
    return against_fixed(Computing(200 if quick else 1000, 0.01), (2,) if quick else (2, 4))


def consumer(quick: bool) -> dict[str, Any]:
    begin = time.monotonic()
    loader = make(Sleeping(320 if quick else 3200, 0.02), 16, MOST)
    step = 8 * 0.02 / 2  # two workers need this long for a batch of eight
    rates = [epoch(loader, step)]
    return {
        "fixed": {},
        "rates": rates,
        "share_of_best": rates[0] / (8 / step),
        "workers": loader.stats()["scheduler"]["active"],
        "log": log(loader, begin),
    }


JOBS = {"waiting": waiting, "computing": computing, "consumer": consumer}


def report(result: dict[str, Any]) -> None:
    print(f"# {common.describe(result['machine'])}")
    for name, job in result["jobs"].items():
        print(f"\n{name}: ends with {job['workers']} workers")
        for workers, rate in job["fixed"].items():
            print(f"  {workers:2} workers, fixed: {rate:.0f} samples/s")
        rates = ", ".join(f"{rate:.0f}" for rate in job["rates"])
        print(f"  epochs: {rates} samples/s; the last is {job['share_of_best']:.1%} of the best")
        for d in job["log"]:
            print(
                f"  {d['at']:6.2f} s {d['from']:3} -> {d['to']:2} occupancy {d['occupancy']:.2f} "
                f"cpu {d['cpu']:.2f} waiting {d['wait']:.2f} {d['rate']:7.1f}/s: {d['why']}"
            )


def main() -> int:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS), metavar="NAME")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    result = {
        "machine": common.machine(),
        "jobs": {name: JOBS[name](args.quick) for name in args.only},
    }
    report(result)
    common.save(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
