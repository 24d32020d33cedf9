"""Epochs of sleeping samples, compared with the work bound: do workers idle behind slow samples?

    python benchmarks/balance.py [--only NAME ...] [--repeats 3] [--brief] [--json FILE]
        [--quick] [--quiet SHARE]

A sample's cost is drawn once for its index, or in the rows "anew" for its index and
epoch, where past costs say nothing about future ones. Every loader gets the same
costs in the same order, the same dataset and the same worker_init_fn. Loaders take turns; each
repeat has other costs and starts with another loader. The bound of an epoch
is (sum of costs) / workers. A sleep lasts a little longer than asked. The difference is
measured in the same run, for the same costs and number of sleepers, in processes that do
nothing else. The second bound includes it; ratios to it are in brackets.

Loaders keep their workers. "epoch 1" is the first epoch, once compared with the bound plus the
mean start time of its workers, and once with that start included. "least" is the time of
workers that never idle, with that order and unknown costs. "later" is the median
of the epochs after it. Tables show medians over repeats and, below, the least and the
greatest. Also shown: the time to the first batch, and the waiting time of a training step
that takes as long as a batch costs to make (in its second epoch: the share of waiting
in the whole, and the 99th percentile of the share in one step).
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import heapq
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import common
import numpy as np
import torch
from torch.utils.data import Dataset, RandomSampler

import minato

MOST_WORKERS = 16
#: costs, by quantile, at which the excess of sleeps is measured; and for how long
SLEEPS, SLEEPING_S = 6, 1.0
PR_SET_TIMERSLACK = 29
#: when each worker was ready, by time.monotonic()
_ready = multiprocessing.RawArray("d", MOST_WORKERS)
#: the current epoch, from 0, which workers read
_epoch = multiprocessing.RawValue("i", 0)
EPOCHS = 3

Costs = Callable[[np.random.Generator, int], np.ndarray]


def mixed(share: float, slow: float, fast: float) -> Costs:
    """Exactly this share of samples is slow, at random places."""

    def make(rng: np.random.Generator, count: int) -> np.ndarray:
        costs = np.full(count, fast)
        costs[: round(share * count)] = slow
        return rng.permutation(costs)

    return make


#: name: (costs in seconds, samples, batch size, workers)
WORKLOADS: dict[str, tuple[Costs, int, int, int]] = {
    "80/20, batch 24": (mixed(0.2, 0.030, 0.005), 2880, 24, 12),
    "80/20, batch 4": (mixed(0.2, 0.030, 0.005), 1440, 4, 12),
    "1% of 500 ms": (mixed(0.01, 0.5, 0.005), 1600, 8, 8),
    "log-normal": (lambda rng, n: 0.02 * np.exp(rng.normal(0, 0.4, n)), 400, 2, 4),
    "constant": (lambda rng, n: np.full(n, 0.005), 1600, 8, 8),
    "40/60": (mixed(0.4, 0.040, 0.004), 400, 2, 8),
    "80/20 anew, batch 4": (mixed(0.2, 0.030, 0.005), 1440, 4, 12),
}
QUICK_SHARE = 8

MINE, TORCH = minato.DataLoader, torch.utils.data.DataLoader
#: name: (class, options)
LOADERS: dict[str, tuple[type, dict[str, Any]]] = {
    "torch, in order": (TORCH, {}),
    "torch, out of order": (TORCH, {"in_order": False}),
    "minato, in order": (MINE, {}),
    "minato, as they complete": (MINE, {"in_order": False}),
    "minato, ready first": (MINE, {"in_order": False, "batching": "ready"}),
}
#: loaders for the waiting table: those, and one that starts the next epoch early
STEPPED = {**LOADERS, "minato, next epoch early": (MINE, {"prefetch_next_epoch": True})}
TORCH_FIRST = "torch, in order"


class Sleeping(Dataset):
    """Sample i sleeps costs[epoch][i] seconds and returns i."""

    def __init__(self, costs: np.ndarray) -> None:
        self.costs = costs.tolist()

    def __len__(self) -> int:
        return len(self.costs[0])

    def __getitem__(self, index: int) -> int:
        time.sleep(self.costs[_epoch.value][index])
        return index


def exact_sleep() -> None:
    """Sets the timer slack: the system wakes this process without the default delay of 50 us."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def begin_worker(worker: int) -> None:
    """The worker_init_fn of all loaders."""
    exact_sleep()
    _ready[worker] = time.monotonic()


def _sleeper(costs: list[float], first: int, results: Any) -> None:
    exact_sleep()
    late: list[list[float]] = [[] for _ in costs]
    end, n = time.monotonic() + SLEEPING_S, first
    while time.monotonic() < end or not all(late):
        cost = costs[n % len(costs)]
        begin = time.monotonic()
        time.sleep(cost)
        late[n % len(costs)].append(time.monotonic() - begin - cost)
        n += 1
    results.put(late)


def sleeping(costs: np.ndarray, workers: int) -> tuple[np.ndarray, np.ndarray]:
    """(some of the costs, mean excess in seconds of a sleep of each) with this number of
    processes that sleep at the same time."""
    some = np.unique(np.quantile(costs, np.linspace(0, 1, SLEEPS), method="nearest"))
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    sleepers = [
        context.Process(target=_sleeper, args=(some.tolist(), k, results))
        for k in range(workers)
    ]
    for process in sleepers:
        process.start()
    late = [results.get() for _ in sleepers]
    for process in sleepers:
        process.join()
    means = [np.mean(np.concatenate([one[k] for one in late])) for k in range(len(some))]
    return some, np.array(means)


class Job:
    """A workload with its costs drawn, [epochs, samples]."""

    def __init__(self, name: str, seed: int, quick: bool) -> None:
        make, count, self.batch, self.workers = WORKLOADS[name]
        self.seed = seed
        self.count = count // QUICK_SHARE if quick else count
        self.anew = " anew" in name
        draws = [np.random.default_rng([seed, epoch if self.anew else 0])
                 for epoch in range(EPOCHS)]
        self.costs = np.stack([make(rng, self.count) for rng in draws])
        self.bounds = self.costs.sum(axis=1) / self.workers

    @functools.cached_property
    def slept_bounds(self) -> np.ndarray:
        """The bounds with the measured lengths of the sleeps."""
        some, late = sleeping(self.costs, self.workers)
        slept = self.costs + np.interp(self.costs, some, late)
        return slept.sum(axis=1) / self.workers

    def order(self) -> np.ndarray:
        """The indices of the first epoch."""
        generator = torch.Generator().manual_seed(self.seed)
        return np.array(list(RandomSampler(range(self.count), generator=generator)))

    def can_take(self, options: dict[str, Any]) -> bool:
        """Not if samples of two epochs run at once and costs depend on the epoch."""
        return not (self.anew and options.get("prefetch_next_epoch"))

    def loader(self, cls: type, options: dict[str, Any]) -> Any:
        dataset = Sleeping(self.costs)
        order = RandomSampler(dataset, generator=torch.Generator().manual_seed(self.seed))
        return cls(
            dataset,
            batch_size=self.batch,
            sampler=order,
            num_workers=self.workers,
            persistent_workers=True,
            worker_init_fn=begin_worker,
            multiprocessing_context="fork",
            **options,
        )

    def start_delay(self, begin: float, wall: float) -> float:
        """Mean seconds until a worker was ready; the whole epoch for one that never was."""
        delays = [t - begin if t else wall for t in _ready[: self.workers]]
        return float(np.mean([min(delay, wall) for delay in delays]))


def run_epoch(loader: Any, number: int, step: float = 0.0) -> dict[str, Any]:
    """Runs an epoch, with a step of some seconds after each batch."""
    batches, waits = [], []
    _epoch.value = number
    begin = asked = time.monotonic()
    for batch in loader:
        waits.append(time.monotonic() - asked)
        batches.append(batch)
        if step:
            time.sleep(step)
        asked = time.monotonic()
    end = time.monotonic()
    return {
        "begin": begin,
        "wall": end - begin,
        "first": waits[0],
        "waits": waits,
        "indices": torch.cat(batches).tolist(),
    }


def check(job: Job, epochs: list[dict[str, Any]], in_order: bool) -> None:
    """Checks that each sample came once, and in the sampler's order if that is promised."""
    order = RandomSampler(range(job.count), generator=torch.Generator().manual_seed(job.seed))
    for epoch in epochs:
        expected, got = list(order), epoch.pop("indices")
        if (got if in_order else sorted(got)) != (expected if in_order else sorted(expected)):
            raise AssertionError("samples lost, repeated or out of order")


def time_epochs(job: Job, cls: type, options: dict[str, Any]) -> dict[str, Any]:
    _ready[:] = [0.0] * MOST_WORKERS
    loader = job.loader(cls, options)
    runs = [run_epoch(loader, 0)]
    delay = job.start_delay(runs[0]["begin"], runs[0]["wall"])
    runs += [run_epoch(loader, number) for number in range(1, EPOCHS)]
    check(job, runs, options.get("in_order", True))
    del loader
    costs = job.costs[0][job.order()]
    walls = np.array([run["wall"] for run in runs])
    bounds, slepts = job.bounds, job.slept_bounds
    bound, slept = bounds[0], slepts[0]
    return {
        "epoch1": walls[0] / (bound + delay),
        "epoch1_slept": walls[0] / (slept + delay),
        "epoch1_start": walls[0] / bound,
        "epoch1_start_slept": walls[0] / slept,
        "epoch1_least": makespan(costs, job.workers) / bound,
        "later": (walls[1:] / bounds[1:]).tolist(),
        "later_slept": (walls[1:] / slepts[1:]).tolist(),
        "later_least": makespan(sorted(costs, reverse=True), job.workers) / bound,
        "samples": job.count,
        "walls": walls.tolist(),
        "bound": float(bound),
        "bounds": bounds.tolist(),
        "slept_bound": float(slept),
        "start_delay": delay,
        "first": runs[0]["first"],
        "first_bound": makespan(sorted(costs[: job.batch], reverse=True), job.workers),
        "later_firsts": [run["first"] for run in runs[1:]],
    }


def makespan(costs: Iterable[float], workers: int) -> float:
    """Seconds for these samples on a number of workers, each started by the next free one."""
    free = [0.0] * workers
    for cost in costs:
        heapq.heapreplace(free, free[0] + float(cost))
    return max(free)


def time_waits(job: Job, cls: type, options: dict[str, Any]) -> dict[str, Any]:
    """The waiting time in the second epoch, with a step as long as a batch costs to make."""
    step = float(job.bounds[1]) * job.batch / job.count
    loader = job.loader(cls, options)
    runs = [run_epoch(loader, number, step) for number in range(2)]
    check(job, runs, options.get("in_order", True))
    del loader
    waits = np.array(runs[1]["waits"])
    shares = waits / (waits + step)
    return {
        "step": step,
        "mean": float(waits.sum() / runs[1]["wall"]),
        "mean_after_first": float(waits[1:].sum() / (runs[1]["wall"] - waits[0] - step)),
        "p99": float(np.quantile(shares[1:], 0.99)),
        "most": float(waits[1:].max()),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, Any] = {w: {n: [] for n in LOADERS} for w in args.only}
    waits: dict[str, Any] = {w: {n: [] for n in STEPPED} for w in args.only}
    quiet = common.Quiet(args.quiet, args.quiet_minutes)
    for repeat in range(args.repeats):
        for workload in args.only:
            job = Job(workload, repeat, args.quick)
            for name in in_turn(LOADERS, repeat):
                once = functools.partial(time_epochs, job, *LOADERS[name])
                runs[workload][name].append(quiet.run(once))
            for name in in_turn(STEPPED, repeat) if args.waits else ():
                cls, options = STEPPED[name]
                if job.can_take(options):
                    once = functools.partial(time_waits, job, cls, options)
                    waits[workload][name].append(quiet.run(once))
    return {
        "machine": common.machine(),
        "quiet": quiet.report(),
        "epochs": runs,
        "waits": waits if args.waits else {},
    }


def in_turn(names: Iterable[str], repeat: int) -> list[str]:
    """The names; each repeat starts with another."""
    every = list(names)
    first = repeat % len(every)
    return every[first:] + every[:first]


def values(runs: list[dict[str, Any]], what: str) -> list[float]:
    """The values of all repeats; of a list of epochs, all of these."""
    return [v for run in runs for v in np.atleast_1d(run[what]).tolist()]


def over(runs: list[dict[str, Any]], what: str) -> float:
    """The median over repeats; of a list of epochs, over these as well."""
    return common.median(values(runs, what))


def epoch_rows(result: dict[str, Any], what: str) -> list[list[str]]:
    least = what.partition("_")[0] + "_least"
    rows = []
    for workload, cells in result["epochs"].items():
        rows.append([workload, f"{over(cells[TORCH_FIRST], least):.3f}", *[
            f"{over(cells[name], what):.3f} ({over(cells[name], what + '_slept'):.3f})"
            for name in LOADERS]])  # fmt: skip
        rows.append(["", "", *[
            common.between(values(cells[name], what), form=".3f") for name in LOADERS]])
    return rows


def first_rows(result: dict[str, Any]) -> list[list[str]]:
    rows = []
    for workload, cells in result["epochs"].items():
        bound = over(cells[TORCH_FIRST], "first_bound")
        row = [workload, f"{bound * 1e3:.0f}"]
        for name in LOADERS:
            first, delay = over(cells[name], "first"), over(cells[name], "start_delay")
            row.append(f"{first * 1e3:.0f} ({first / (bound + delay):.2f})")
        rows.append(row)
    return rows


def wait_rows(result: dict[str, Any]) -> list[list[str]]:
    rows = []
    for workload, cells in result["waits"].items():
        row = [workload, f"{over(cells['torch, in order'], 'step') * 1e3:.1f}"]
        below = ["", ""]
        for name in STEPPED:
            if not cells[name]:
                row.append("-")
                below.append("")
                continue
            mean, after, tail = (
                over(cells[name], w) for w in ("mean", "mean_after_first", "p99")
            )
            row.append(f"{mean:.1%} {after:.1%} {tail:.1%}")
            below.append(common.between(values(cells[name], "mean"), form=".1%"))
        rows += [row, below]
    return rows


def report(result: dict[str, Any]) -> None:
    print(f"# {common.describe(result['machine'])}")
    print(f"# {common.describe(result['quiet'])}")
    for workload, cells in result["epochs"].items():
        some, slept = over(cells[TORCH_FIRST], "bound"), over(cells[TORCH_FIRST], "slept_bound")
        print(f"# {workload}: bound {some:.3f} s, as sleeps last {slept:.3f} s "
              f"({slept / some:.3f})")
    names = ["least", *LOADERS]
    print("\nepoch 1, wall time / (bound + mean start of workers)")
    print(common.table(["", *names], epoch_rows(result, "epoch1")))
    print("\nepoch 1 with the start of workers, wall time / bound")
    print(common.table(["", *names], epoch_rows(result, "epoch1_start")))
    print("\nlater epochs, wall time / bound")
    print(common.table(["", *names], epoch_rows(result, "later")))
    names = list(LOADERS)
    print(
        "\nfirst batch, ms (and over the bound: its samples spread over all workers, plus "
        "mean start)"
    )
    print(common.table(["", "bound", *names], first_rows(result)))
    if result["waits"]:
        print("\nshare of time that a step waits: mean, mean after the first batch, p99")
        print(common.table(["", "step_ms", *STEPPED], wait_rows(result)))


def brief(result: dict[str, Any]) -> None:
    """A line for each loader: its later epochs and the bound."""
    print(f"# {common.describe(result['machine'])}")
    print(f"# {common.describe(result['quiet'])}")
    for workload, cells in result["epochs"].items():
        _, _, batch, workers = WORKLOADS[workload]
        count = cells[TORCH_FIRST][0]["samples"]
        print(f"{workload}: {count} samples, batches of {batch}, {workers} workers")
        bound = over(cells[TORCH_FIRST], "bound")
        rows = [["no loader can be faster", f"{bound:.2f} s", "", "1.00"]]
        for name in LOADERS:
            walls = [wall for run in cells[name] for wall in run["walls"][1:]]
            ratio = over(cells[name], "later")
            rows.append([name, f"{common.median(walls):.2f} s", common.between(walls, form=".2f"),
                         f"{ratio:.2f}"])  # fmt: skip
        print(common.table(["", "epoch", "range", "times bound"], rows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME",
        help=", ".join(WORKLOADS).replace("%", "%%"),
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-waits", dest="waits", action="store_false")
    parser.add_argument("--brief", action="store_true", help="only epochs after the first")
    common.add_options(parser)
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.only = 1, args.only[:2]
    return args


def main() -> int:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    args = arguments()
    if args.brief:
        args.waits = False
    result = measure(args)
    (brief if args.brief else report)(result)
    common.save(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
