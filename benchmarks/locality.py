"""Datasets that keep the last opened file: does a loader open it once, or in every worker?

    python benchmarks/locality.py [--only NAME ...] [--repeats 3] [--json FILE] [--quick]
        [--quiet SHARE]

Groups of samples share an opened file or a part of one (a row group, a video, a shard), and
samples record whether they had to open it. In the rows that start with "sleeping", opening and
making a sample are sleeps. The others read real files (locality_data.py), and are left out if their
library is not installed: pip install pyarrow h5py av datasets. In the rows "declared" the
dataset says which samples belong together (locality_key). Loaders get the same order, take
turns, each repeat starting with another, and keep their workers for three epochs. The delivered
data is compared byte by byte.

The table shows samples a second of the first epoch, start of workers included, and of the later
epochs: the median, the least and the greatest. The bound is each group opened once, all
samples made, divided by the workers. For real files it is the time of one otherwise idle process,
divided by the cores. "opened" is how often a group was opened in an epoch, divided by the number of
groups. It does not depend on other load, except when tasks are moved because a worker is held up.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from balance import in_turn
from locality_data import (
    AllShuffled,
    Decoded,
    Grouped,
    GroupsShuffled,
    Hdf5,
    HuggingFace,
    InOrder,
    Parquet,
    Patches,
    Sleeping,
    Videos,
)

import minato

WORKERS = 4
EPOCHS = 3
LONG_SHORT = [64, 16, 32, 128, 16, 64, 16, 48]


@dataclass
class Case:
    make: Callable[[Path, bool], Grouped]  # (folder, quick)
    batch: int = 32
    sampler: Callable[[Grouped], GroupsShuffled] = GroupsShuffled
    needs: str | None = None
    declared: bool = False


def sleeping(count: int, size: int, open_ms: float, each_ms: float, **more: Any) -> Any:
    return lambda folder, quick: Sleeping(
        [size] * (count // (8 if quick else 1)), open_ms / 1e3, each_ms / 1e3, **more
    )


def rows(count: int, size: int, keeps: int = 1) -> Any:
    return lambda folder, quick: Parquet(folder, [size] * (count // (4 if quick else 1)), keeps)


PAIRS = functools.partial(GroupsShuffled, mixed=2)

#: Each of them also declared, unless there is nothing to declare.
MEASURED = {
    "sleeping, row groups of 32, in order": Case(sleeping(64, 32, 100, 1), 32, InOrder),
    "sleeping, row groups of 32": Case(sleeping(64, 32, 100, 1)),
    "sleeping, videos of 8": Case(sleeping(128, 8, 50, 2)),
    "sleeping, long and short": Case(sleeping(128, 8, 50, 2, varied=True)),
    "sleeping, row groups of 128": Case(sleeping(48, 128, 200, 0.5)),
    "sleeping, two kept": Case(sleeping(64, 32, 100, 1, keeps=2), 32, PAIRS),
    "parquet, 256 rows": Case(rows(48, 256), 64, needs="pyarrow"),
    "parquet, 1024 rows": Case(rows(24, 1024), 64, needs="pyarrow"),
    "parquet, 16 to 128 rows": Case(
        lambda folder, quick: Parquet(folder, LONG_SHORT * (4 if quick else 16)), 64,
        needs="pyarrow"),
    "parquet, two kept": Case(rows(48, 256, keeps=2), 64, PAIRS, "pyarrow"),
    "hdf5, chunks of 32": Case(
        lambda folder, quick: Hdf5(folder, 16 if quick else 48), 32, needs="h5py"),
    "video, 48 frames": Case(
        lambda folder, quick: Videos(folder, [48] * (6 if quick else 16)), 16, needs="av"),
    "video, 12 to 80 frames": Case(
        lambda folder, quick: Videos(folder, [12, 80, 24, 48] * (2 if quick else 5)), 16,
        needs="av"),
    "patches, 8 of a volume": Case(
        lambda folder, quick: Patches(folder, 12 if quick else 32, 8), 4),
}  # fmt: skip
NOT_DECLARED = {
    "sleeping, all kept": Case(sleeping(2048, 1, 10, 0, keeps=2048), 32, AllShuffled),
    "sleeping, no groups": Case(sleeping(512, 1, 0, 8), 32, AllShuffled),
    "jpeg, all kept": Case(
        lambda folder, quick: Decoded(folder, 128 if quick else 512), 32, AllShuffled, "PIL"),
    "hugging face": Case(
        lambda folder, quick: HuggingFace(folder, [256] * (4 if quick else 24)), 64,
        needs="datasets"),
}  # fmt: skip
CASES: dict[str, Case] = {}
for _name, _case in MEASURED.items():
    CASES[_name] = _case
    CASES[f"{_name}, declared"] = Case(_case.make, _case.batch, _case.sampler, _case.needs, True)
CASES.update(NOT_DECLARED)

LOADERS: dict[str, tuple[type, dict[str, Any]]] = {
    "torch": (torch.utils.data.DataLoader, {}),
    "minato": (minato.DataLoader, {}),
    "minato, ready first": (minato.DataLoader, {"batching": "ready", "in_order": False}),
}


def make(case: Case, folder: Path, quick: bool) -> Grouped:
    dataset = case.make(folder, quick)
    if case.declared:
        dataset.locality_key = dataset.group_of  # type: ignore[attr-defined]
    return dataset


def alone(call: Callable[[], float]) -> float:
    """Its result in a separate process. Workers would inherit decoders that this process has used,
    with their threads, and hang in them."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=lambda: there.send(call()))
    process.start()
    there.close()
    found = here.recv()  # EOFError if it has failed
    process.join()
    return found


def bound_of(case: Case, folder: Path, quick: bool) -> float:
    """Seconds of an epoch in which each group is opened once, divided by the workers; makes the
    files."""
    dataset = make(case, folder, quick)
    if isinstance(dataset, Sleeping):
        return dataset.seconds() / WORKERS
    order = list(case.sampler(dataset))
    begin = time.perf_counter()
    for index in order:
        dataset[index]
    return (time.perf_counter() - begin) / min(WORKERS, len(os.sched_getaffinity(0)))


class Delivered:
    """The result of an epoch: its order, and a checksum for each index."""

    def __init__(self) -> None:
        self.indices: list[int] = []
        self.sums: list[int] = []
        self.opened = 0

    def add(self, batch: Any) -> None:
        index, opened, data = batch
        self.indices += index.tolist()
        self.opened += int(opened.sum())
        words = data.contiguous().flatten(1).view(torch.uint8).view(torch.int32)
        weights = torch.arange(1, words.shape[1] + 1)
        self.sums += (words.long() * weights).sum(1).tolist()

    def check(self, case: Case, dataset: Grouped, epoch: int, in_order: bool) -> str:
        """Checks that each sample came once, in order if promised; returns a digest."""
        sampler = case.sampler(dataset)
        sampler.epoch = epoch
        want, got = list(sampler), self.indices
        if (got if in_order else sorted(got)) != (want if in_order else sorted(want)):
            raise AssertionError("samples lost, repeated or out of order")
        pairs = sorted(zip(self.indices, self.sums, strict=True))
        return hashlib.sha256(np.array(pairs, np.int64).tobytes()).hexdigest()


def time_epochs(case: Case, folder: Path, quick: bool, cls: type, options: dict) -> dict:
    dataset = make(case, folder, quick)
    loader = cls(dataset, batch_size=case.batch, sampler=case.sampler(dataset),
                 num_workers=WORKERS, persistent_workers=True, multiprocessing_context="fork",
                 **options)  # fmt: skip
    walls, opened, digests = [], [], []
    for epoch in range(EPOCHS):
        found = Delivered()
        begin = time.perf_counter()
        for batch in loader:
            found.add(batch)
        walls.append(time.perf_counter() - begin)
        opened.append(found.opened)
        digests.append(found.check(case, dataset, epoch, options.get("in_order", True)))
    del loader
    return {"rates": [len(dataset) / wall for wall in walls], "opened": opened,
            "groups": dataset.groups, "samples": len(dataset), "digests": digests}  # fmt: skip


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    quiet = common.Quiet(args.quiet, args.quiet_minutes)
    runs: dict[str, Any] = {}
    bounds: dict[str, float] = {}
    missing = sorted({c.needs for c in CASES.values()
                      if c.needs and importlib.util.find_spec(c.needs) is None})  # fmt: skip
    for repeat in range(args.repeats):
        for name in args.only:
            case = CASES[name]
            if case.needs in missing:
                continue
            if name not in bounds:
                seconds = alone(functools.partial(bound_of, case, folder, args.quick))
                bounds[name] = len(make(case, folder, args.quick)) / max(seconds, 1e-9)
                runs[name] = {loader: [] for loader in LOADERS}
            for loader in in_turn(LOADERS, repeat):
                once = functools.partial(time_epochs, case, folder, args.quick, *LOADERS[loader])
                run = quiet.run(once)
                runs[name][loader].append(run)
                times = " ".join(f"{n / run['groups']:.2f}" for n in run["opened"])
                print(f"{name}, {loader}: opened {times}", file=sys.stderr, flush=True)
            every = [run for cells in runs[name].values() for run in cells]
            if len({digest for run in every for digest in run["digests"]}) != 1:
                raise AssertionError(f"{name}: loaders deliver different samples")
    return {"machine": common.machine(), "quiet": quiet.report(), "runs": runs,
            "bounds": bounds, "missing": missing}  # fmt: skip


def part_of(key: str, runs: list[dict[str, Any]], first: bool) -> list[Any]:
    part = slice(0, 1) if first else slice(1, None)
    return [value for run in runs for value in run[key][part]]


def rate_cell(runs: list[dict[str, Any]], torchs: list[dict[str, Any]], first: bool) -> str:
    mine, theirs = part_of("rates", runs, first), part_of("rates", torchs, first)
    times = "" if runs is torchs else f" ({common.median(mine) / common.median(theirs):.2f} x)"
    return f"{common.median(mine):.0f}{times} {common.between(mine, form='.0f')}"


def opened_cell(runs: list[dict[str, Any]], first: bool) -> str:
    each = [n / runs[0]["groups"] for n in part_of("opened", runs, first)]
    return f"{common.median(each):.2f} {common.between(each, form='.2f')}"


def report(result: dict[str, Any]) -> None:
    print(f"# {common.describe(result['machine'])}")
    print(f"# {common.describe(result['quiet'])}")
    if result["missing"]:
        print(f"# not installed: {', '.join(result['missing'])}")
    for first, title in ((True, "first epoch"), (False, "epochs after it")):
        speeds, opened = [], []
        for name, cells in result["runs"].items():
            limit = f"{result['bounds'][name]:.0f}"
            if "all kept" in name and not first:
                limit = "-"  # nothing is left to be made
            speeds.append([name, limit,
                           *(rate_cell(r, cells["torch"], first) for r in cells.values())])
            opened.append([name, *(opened_cell(r, first) for r in cells.values())])  # fmt: skip
        print(f"\n{title}: samples a second (x torch) least..greatest")
        print(common.table(["", "bound", *LOADERS], speeds))
        print(f"\n{title}: opened, times a group")
        print(common.table(["", *LOADERS], opened))


def main() -> int:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME",
                        help=", ".join(CASES))  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3)
    common.add_options(parser)
    args = parser.parse_args()
    if args.quick:
        args.repeats = 1
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, Path(folder))
    report(result)
    common.save(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
