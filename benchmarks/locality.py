"""Datasets that keep what they opened last: does a loader open it once, or in every worker?

    python benchmarks/locality.py [--only NAME ...] [--repeats 3] [--json FILE] [--quick]
        [--quiet SHARE]

Groups of samples share something that is opened for them (a row group, a video, a shard), and
samples tell whether they had to open it. Opening and making a sample are sleeps; the rows
"parquet" and "hdf5" are real files of random numbers, made for the run where pyarrow and h5py
are installed (pip install pyarrow h5py). Loaders get the same order, take turns, each repeat
beginning with another, and keep their workers for three epochs. Shown are samples a second of
the first epoch, start of workers included, and of the ones after it, the least and the
greatest, beside the bound: each group opened once, all samples made, over the workers. In the
real rows one process that does nothing else says how long that takes. "opened" is how often
a group was opened in the last epoch, over the number of groups.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from balance import in_turn
from torch.utils.data import Dataset, Sampler

import minato

WORKERS = 4
EPOCHS = 3


class Sleeping(Dataset):
    """Groups of which the worker keeps the last: (index, whether it was opened for this)."""

    def __init__(self, sizes: list[int], open_s: float, each_s: float, varied: bool = False):
        self.of = np.repeat(np.arange(len(sizes)), sizes)
        rng = np.random.default_rng(0)
        scale = rng.lognormal(0.0, 0.8, len(sizes)) if varied else np.ones(len(sizes))
        self.open_s, self.each_s = open_s * scale, each_s
        self.kept: set[int] = set()

    def __len__(self) -> int:
        return len(self.of)

    def bound(self) -> float:
        return float(self.open_s.sum() + len(self.of) * self.each_s) / WORKERS

    def groups(self) -> int:
        return len(self.open_s)

    def opens(self, group: int) -> bool:
        opened = group not in self.kept
        if opened:
            time.sleep(self.open_s[group])
            self.kept = {group}
        return opened

    def __getitem__(self, index: int) -> torch.Tensor:
        opened = self.opens(int(self.of[index]))
        time.sleep(self.each_s)
        return torch.tensor([index, opened])


class Keeping(Sleeping):
    """Keeps whatever it has made."""

    def opens(self, group: int) -> bool:
        opened = group not in self.kept
        if opened:
            time.sleep(self.open_s[group])
            self.kept.add(group)
        return opened

    def bound(self) -> float:
        """Of an epoch in which all is kept: nothing is left to do but to hand over."""
        return 0.0


class Declared(Sleeping):
    def locality_key(self, index: int) -> int:
        return int(self.of[index])


class Parquet(Dataset):
    """Rows of a file that is decoded a row group at a time."""

    def __init__(self, folder: Path, quick: bool) -> None:
        import pyarrow
        import pyarrow.parquet

        self.path, self.size = folder / "rows.parquet", 256
        rows = 16 * self.size if quick else 96 * self.size
        rng = np.random.default_rng(0)
        columns = {f"c{k}": rng.normal(size=rows) for k in range(48)}
        pyarrow.parquet.write_table(
            pyarrow.table(columns), self.path, row_group_size=self.size, compression="zstd"
        )
        self.rows, self.file, self.at = rows, None, -1

    def __len__(self) -> int:
        return self.rows

    def groups(self) -> int:
        return self.rows // self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.file is None:
            import pyarrow.parquet

            self.file = pyarrow.parquet.ParquetFile(self.path)
        group = index // self.size
        opened = group != self.at
        if opened:
            table = self.file.read_row_group(group, use_threads=False)
            self.block = np.stack([table[k].to_numpy() for k in table.column_names], axis=1)
            self.at = group
        row = self.block[index % self.size]
        return torch.tensor([index, opened, float(row.sum())], dtype=torch.float64)


class Hdf5(Dataset):
    """Images in compressed chunks, of which the library keeps one."""

    def __init__(self, folder: Path, quick: bool) -> None:
        import h5py

        self.path, self.size = folder / "images.h5", 32
        self.count = 8 * self.size if quick else 64 * self.size
        rng = np.random.default_rng(0)
        images = rng.integers(0, 64, (self.count, 64, 64, 3), dtype=np.uint8)
        with h5py.File(self.path, "w") as file:
            file.create_dataset("x", data=images, chunks=(self.size, 64, 64, 3),
                                compression="gzip")  # fmt: skip
        self.file: Any = None
        self.at = -1

    def __len__(self) -> int:
        return self.count

    def groups(self) -> int:
        return self.count // self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.file is None:
            import h5py

            self.file = h5py.File(self.path, "r", rdcc_nbytes=self.size * 64 * 64 * 3)
        opened, self.at = index // self.size != self.at, index // self.size
        image = self.file["x"][index]
        return torch.tensor([index, opened, int(image.sum())], dtype=torch.float64)


class GroupsShuffled(Sampler):
    """Groups in another order each epoch, their samples in order."""

    def __init__(self, dataset: Any) -> None:
        of = getattr(dataset, "of", None)
        self.of = of if of is not None else np.arange(len(dataset)) // dataset.size
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.of)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        for group in torch.randperm(int(self.of[-1]) + 1, generator=generator).tolist():
            yield from np.flatnonzero(self.of == group).tolist()


def sleeping(cls: type, count: int, size: int, open_ms: float, each_ms: float, **more: Any) -> Any:
    return lambda folder, quick: cls(
        [size] * (count // (8 if quick else 1)), open_ms / 1e3, each_ms / 1e3, **more
    )


@dataclass
class Case:
    make: Any  # (folder, quick) -> dataset
    batch: int = 32
    sampler: Any = None
    needs: str | None = None


CASES = {
    "row groups of 32": Case(sleeping(Sleeping, 64, 32, 100, 1)),
    "row groups of 32, shuffled": Case(sleeping(Sleeping, 64, 32, 100, 1), 32, GroupsShuffled),
    "videos of 8": Case(sleeping(Sleeping, 128, 8, 50, 2)),
    "videos of 8, long and short": Case(sleeping(Sleeping, 128, 8, 50, 2, varied=True)),
    "row groups of 128": Case(sleeping(Sleeping, 48, 128, 200, 0.5)),
    "row groups of 128, shuffled": Case(
        sleeping(Sleeping, 48, 128, 200, 0.5), 32, GroupsShuffled
    ),
    "row groups of 128, declared": Case(
        sleeping(Declared, 48, 128, 200, 0.5), 32, GroupsShuffled
    ),
    "everything kept": Case(sleeping(Keeping, 2048, 1, 10, 0)),
    "no locality": Case(sleeping(Sleeping, 512, 1, 0, 8)),
    "parquet": Case(Parquet, 64, GroupsShuffled, "pyarrow"),
    "hdf5": Case(Hdf5, 32, GroupsShuffled, "h5py"),
}

LOADERS: dict[str, tuple[type, dict[str, Any]]] = {
    "torch": (torch.utils.data.DataLoader, {}),
    "minato": (minato.DataLoader, {}),
    "minato, ready first": (minato.DataLoader, {"batching": "ready", "in_order": False}),
}


def bound_of(dataset: Any, case: Case) -> float:
    """Seconds of an epoch in which each group is opened once, over the workers."""
    if hasattr(dataset, "bound"):
        return dataset.bound()
    order = list(case.sampler(dataset) if case.sampler else range(len(dataset)))
    begin = time.perf_counter()
    for index in order:
        dataset[index]
    return (time.perf_counter() - begin) / min(WORKERS, torch.get_num_threads() or 1, 2)


def time_epochs(case: Case, folder: Path, quick: bool, cls: type, options: dict) -> dict:
    dataset = case.make(folder, quick)
    sampler = case.sampler(dataset) if case.sampler else None
    loader = cls(dataset, batch_size=case.batch, sampler=sampler, num_workers=WORKERS,
                 persistent_workers=True, multiprocessing_context="fork", **options)  # fmt: skip
    walls, opened = [], []
    for epoch in range(EPOCHS):
        begin = time.perf_counter()
        batches = list(loader)
        walls.append(time.perf_counter() - begin)
        rows = torch.cat(batches)
        opened.append(int(rows[:, 1].sum()))
        check(case, dataset, epoch, rows[:, 0].tolist(), options.get("in_order", True))
    del loader
    return {"rates": [len(dataset) / wall for wall in walls], "opened": opened,
            "groups": dataset.groups(), "samples": len(dataset)}  # fmt: skip


def check(case: Case, dataset: Any, epoch: int, got: list, in_order: bool) -> None:
    """Exactly once, and in the sampler's order where that is promised."""
    want = list(range(len(dataset)))
    if case.sampler is not None:
        sampler = case.sampler(dataset)
        sampler.epoch = epoch
        want = list(sampler)
    got = [int(index) for index in got]
    if (got if in_order else sorted(got)) != (want if in_order else sorted(want)):
        raise AssertionError("samples lost, repeated or out of order")


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    quiet = common.Quiet(args.quiet, args.quiet_minutes)
    runs: dict[str, Any] = {}
    bounds: dict[str, float] = {}
    for repeat in range(args.repeats):
        for name in args.only:
            case = CASES[name]
            if case.needs is not None:
                try:
                    __import__(case.needs)
                except ImportError:
                    continue
            if name not in bounds:
                dataset = case.make(folder, args.quick)
                bounds[name] = len(dataset) / max(bound_of(dataset, case), 1e-9)
                runs[name] = {loader: [] for loader in LOADERS}
            for loader in in_turn(LOADERS, repeat):
                once = functools.partial(time_epochs, case, folder, args.quick, *LOADERS[loader])
                runs[name][loader].append(quiet.run(once))
    return {"machine": common.machine(), "quiet": quiet.report(), "runs": runs,
            "bounds": bounds}  # fmt: skip


def cell(runs: list[dict[str, Any]], torchs: list[dict[str, Any]], first: bool) -> str:
    part = slice(0, 1) if first else slice(1, None)
    mine = [rate for run in runs for rate in run["rates"][part]]
    theirs = [rate for run in torchs for rate in run["rates"][part]]
    times = "" if runs is torchs else f" ({common.median(mine) / common.median(theirs):.2f} x)"
    return f"{common.median(mine):.0f}{times} {common.between(mine, form='.0f')}"


def report(result: dict[str, Any]) -> None:
    print(f"# {common.describe(result['machine'])}")
    print(f"# {common.describe(result['quiet'])}")
    for first, title in ((True, "first epoch"), (False, "epochs after it")):
        rows = []
        for name, cells in result["runs"].items():
            bound = result["bounds"][name]
            limit = f"{bound:.0f}" if bound < 1e6 else "-"
            opened = [f"{r[-1]['opened'][-1] / r[-1]['groups']:.2f}" for r in cells.values()]
            rows.append([name, limit, *(cell(r, cells["torch"], first) for r in cells.values()),
                         " ".join(opened)])  # fmt: skip
        print(f"\n{title}, samples a second (x torch) least..greatest")
        print(common.table(["", "bound", *LOADERS, "opened"], rows))


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
