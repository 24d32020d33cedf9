"""The common parts of the workloads: seeded datasets, batches, and the table of files."""
from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from unet3d.data import mix
from unet3d.nifti import DataError
from unet3d.parallel import available_cores

NAMES = ("detection", "speech")
INDEX_NAME = "index.json"

#: a collated batch: "index" int64 [n] always; the workload defines the rest
Batch = dict[str, Any]


class SeededDataset(Dataset):
    """A map-style dataset whose draws depend on (seed, epoch, index) alone.

    Every loader therefore makes the same bytes, however it seeds, and a comparison measures the
    same work. The epoch's number is shared with workers that live across epochs.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the samples that are made next."""
        self._epoch[0] = epoch

    def generator(self, index: int) -> np.random.Generator:
        """The generator of one sample of this epoch."""
        return np.random.default_rng(mix(self.seed, int(self._epoch[0]), index))

    def file(self, index: int) -> Path:
        """The file from which sample `index` is made."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Job:
    """A workload, ready to be loaded and consumed.

    `parts` gives the tensors of one row of a batch without its padding, so that a sample's
    bytes do not depend on its neighbours. `step` makes a training step for a device: a
    function of a batch that returns the loss. `batch_size` is the workload's default.
    """

    dataset: SeededDataset
    batch_size: int
    collate: Callable[[list], Batch]
    parts: Callable[[Batch, int], Sequence[torch.Tensor]]
    step: Callable[[torch.device], Callable[[Batch], float]]


def module(name: str) -> Any:
    """The module of a workload: add_arguments(parser) and open_job(args) -> Job.

    Raises DataError if a package that it needs is missing.
    """
    try:
        return importlib.import_module(f"unet3d.bench.workloads.{name}")
    except ImportError as error:
        package = {"PIL": "pillow"}.get(error.name or "", error.name)
        raise DataError(f"the {name} workload needs {error.name}: pip install {package}"
                        ) from error


def write_index(folder: Path, settings: dict[str, Any], items: list[dict[str, Any]]) -> None:
    """Records that `folder` is complete, and its contents."""
    text = json.dumps({"settings": settings, "items": items}, indent=0)
    (folder / INDEX_NAME).write_text(text + "\n")


def made_already(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether `folder` was made with these settings. Raises DataError if with others."""
    path = folder / INDEX_NAME
    if not path.exists():
        return False
    found = json.loads(path.read_text())["settings"]
    if found != settings:
        raise DataError(f"{path}: made with {found}, now asked for {settings}; use another "
                        "folder")
    return True


def read_index(folder: Path, kind: str, real: str) -> list[dict[str, Any]]:
    """The items of a folder made for workload `kind`; `real` describes the other folders that it
    takes. Raises DataError."""
    try:
        found = json.loads((folder / INDEX_NAME).read_text())
        if found["settings"]["kind"] == kind:
            return found["items"]
        problem = f"holds data for {found['settings']['kind']}"
    except FileNotFoundError:
        problem = "holds no data"
    except (ValueError, KeyError, TypeError) as error:
        problem = f"{INDEX_NAME} cannot be read: {error!r}"
    raise DataError(f"{folder}: {problem}; run `python -m unet3d.bench.workloads.{kind} --out "
                    f"{folder}` first, or name a folder of {real}")


def choose(items: list[dict[str, Any]], count: int | None, seed: int) -> list[dict[str, Any]]:
    """`count` of the items, drawn with the seed and in their order; None: all."""
    if count is None or count >= len(items):
        return items
    drawn = np.random.default_rng(mix(seed, len(items))).choice(len(items), count, replace=False)
    return [items[place] for place in sorted(drawn.tolist())]


class Files(NamedTuple):
    """Holds what a workload's command writes."""

    workload: str
    items: str
    scale: str  # the quantity that the option scales
    least_scale: float


def write_files(
    argv: list[str] | None,
    doc: str | None,
    what: Files,
    generate: Callable[[Path, int, int, float, int], object],
) -> int:
    """The command of a workload: ``generate(out, count, seed, scale, workers)``. Returns the exit
    status."""
    parser = argparse.ArgumentParser(prog=f"unet3d.bench.workloads.{what.workload}",
                                     description=doc,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(f"--{what.items}", dest="count", type=positive, default=200)
    parser.add_argument("--scale", type=float, default=1.0, help=what.scale)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=available_cores())
    args = parser.parse_args(argv)
    if not what.least_scale <= args.scale <= 4.0:
        parser.error(f"--scale must lie between {what.least_scale} and 4")
    try:
        generate(args.out, args.count, args.seed, args.scale, args.workers)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.count} {what.items} in {args.out}")
    return 0


def positive(text: str) -> int:
    """An argument that is a count."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def seconds(text: str) -> float:
    """An argument that is a duration or a factor of one."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be a number and not negative")
    return value
