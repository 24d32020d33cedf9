"""Loaders alone on 3D U-Net volumes: torch, DALI and minato, one specification, two workers.

    python benchmarks/volumes.py [--data FOLDER] [--labels FOLDER] [--repeats 3] [--json FILE]
        [--add] [--quick]

Six cases are made from real KiTS19 label files with painted intensities (MINATO_KITS19, else
../shared/data/kits19; phantoms if there are none) and kept in --data. Every loader delivers
the same samples of an epoch in batches of two patches of 128^3, with crop, flips, brightness and
noise after unet3d's specification, to a caller that does nothing with them. The files are in the
page cache. Each contender runs in a fresh process. A warm-up epoch checks counts, shapes, dtypes
and bytes (loaders with the same random numbers must deliver the same bytes). Then come the
timed epochs, from before iter() to the last batch, as many and as long for every contender.
Contenders take turns within a repeat, each time starting with another; ratios are within the same
repeat. `--add` continues from the repeats in --json's file.

"boxes kept" remembers the bounding boxes of labels seen before, as DALI's object cache does;
"boxes sought" searches for them in every foreground sample.

"read" counts bytes of voxels that were copied or scanned, "touched" all of the 4096-byte pages
that contain them. minato's operators, which map files, count both. If they run in worker processes,
whose counts are out of reach, some samples are made again in the main process. For others, the
bytes are counted at their read calls. DALI also maps its files, so its bytes are computed from the
files' sizes: the label, and the image's crop. "by calls" is the number of bytes that read calls of
the process tree returned (rchar), for comparison.

Memory is the proportional set size of the process tree with all of its shared memory, at its
maximum during the warm-up epoch and after each timed one: "MiB" without and "MiB files" with mapped
files alone. Those are page cache, programs and libraries; the kernel reclaims them when it needs
memory.

Bounds: copying only the crop from files that stay mapped, and one scan of the label, on
one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from operators import ROOT, bounds, prepare, warm

import minato
from minato import ops
from unet3d import loaders, sampling, transforms
from unet3d.bench.meters import DeliveryHash
from unet3d.data import Case, VolumeDataset

BATCH = 2
MANY = 1 << 12  # samples that a dataset must be able to name
LOOK = 48  # samples between two memory samples


@dataclasses.dataclass(frozen=True)
class Contender:
    """How samples are made: `make(job)` returns a loader of [image, label, index] batches.

    `samples`: loaders of the same kind deliver the same bytes; None: the loader's own bytes.
    `against`: the DALI contender to compare with.
    """

    make: Callable[["Job"], Iterable[Any]]
    samples: str | None
    against: str = "dali"


@dataclasses.dataclass(frozen=True)
class Job:
    """The request to a child."""

    cases: list[list[str]]
    patch: list[int]
    workers: int
    epoch: int  # samples
    epochs: int  # timed ones
    seed: int
    contender: str

    def opened(self) -> list[Case]:
        return [Case(name, Path(image), Path(label), os.stat(image).st_size
                     + os.stat(label).st_size) for name, image, label in self.cases]

    def sampler(self) -> Any:
        """torch's own sampler, over the first `epoch` samples of any dataset."""
        return sampling.epoch_sampler(range(self.epoch), self.seed)


def reference(job: Job) -> VolumeDataset:
    return VolumeDataset(job.opened(), transforms.train_transforms(job.patch), job.seed, MANY)


def native(job: Job, keep: bool) -> ops.VolumeDataset:
    pipeline = ops.Pipeline([
        ops.ReadNpy(), ops.RandBalancedCrop(job.patch, keep_boxes=keep), ops.RandFlip(),
        ops.Cast(), ops.RandScaleIntensity(), ops.RandGaussianNoise()])
    dataset = ops.VolumeDataset(job.opened(), pipeline, seed=job.seed, repeat=MANY,
                                with_index=True)
    if keep:
        dataset.warm()
    return dataset


def by_torch(dataset: Any, job: Job, cls: type = torch.utils.data.DataLoader,
             **more: Any) -> Iterable[Any]:
    return cls(dataset, batch_size=BATCH, sampler=job.sampler(), num_workers=job.workers,
               persistent_workers=True, **more)


def by_dali(name: str) -> Callable[[Job], Iterable[Any]]:
    return lambda job: loaders.build(name, reference(job), batch_size=BATCH,
                                     sampler=job.sampler(), workers=job.workers)


def by_minato(kind: str, keep: bool) -> Callable[[Job], Iterable[Any]]:
    return lambda job: by_torch(native(job, keep), job, minato.DataLoader, worker_type=kind)


CONTENDERS = {
    "torch, NumPy and SciPy": Contender(
        lambda job: by_torch(reference(job), job), "reference"),
    "torch, the same out of order": Contender(
        lambda job: by_torch(reference(job), job, in_order=False), "reference"),
    "dali": Contender(by_dali("dali"), None),
    "dali, boxes kept": Contender(by_dali("dali-cached"), None,
                                  against="dali, boxes kept"),
}
for _keep, _what in ((False, "boxes sought"), (True, "boxes kept")):
    _with = {"samples": "native", "against": "dali, boxes kept" if _keep else "dali"}
    CONTENDERS |= {
        f"torch, native dataset, {_what}": Contender(
            lambda job, keep=_keep: by_torch(native(job, keep), job), **_with),
        f"minato processes, {_what}": Contender(by_minato("process", _keep), **_with),
        f"minato native, {_what}": Contender(by_minato("native", _keep), **_with),
    }
BASE = "torch, NumPy and SciPy"


# ---- in the child ----------------------------------------------------------------------


def tree_sum(file: str, field: str) -> int:
    """The sum, over this process and its children, of a number in a file below /proc/PID."""
    total = 0
    for process in common.tree(os.getpid()):
        try:
            text = Path(f"/proc/{process.pid}/{file}").read_text()
        except OSError:
            continue  # it ended in the meantime
        total += int(text.split(f"{field}:")[1].split()[0])
    return total


def read_bytes() -> int:
    """Bytes that read calls of this process and its children have returned so far."""
    return tree_sum("io", "rchar")


def memory() -> dict[str, int]:
    """Bytes of this process tree: mapped files, and the rest."""
    files = tree_sum("smaps_rollup", "Pss_File") * 1024
    return {"files": files, "else": common.memory_bytes(os.getpid())["total"] - files}


def more_memory(most: dict[str, int]) -> None:
    most |= {key: max(size, most.get(key, 0)) for key, size in memory().items()}


def epoch_of(loader: Any, number: int) -> Iterable[Any]:
    """Sets the epoch everywhere, and starts it."""
    told = [loader.dataset, getattr(loader, "sampler", None) or loader.options.sampler]
    for part in told:
        part.set_epoch(number)
    return iter(loader)


def check_epoch(job: Job, loader: Any, most: dict[str, int]) -> dict[str, Any]:
    """An untimed epoch: the delivered data. Raises errors of check_delivery."""
    counted, indices, kinds = DeliveryHash(True), [], set()
    for image, label, index in epoch_of(loader, 1):
        numbers = index.tolist()
        counted.add(image, label, numbers)
        indices += numbers
        kinds |= {str([list(t.shape[1:]), str(t.dtype)]) for t in (image, label)}
        if len(indices) % LOOK == 0:
            more_memory(most)
    sampling.check_delivery(range(job.epoch), indices, BATCH, False, 1)
    return {"fields": sorted(kinds), **counted.state()}


def counts(dataset: Any) -> tuple[int, int]:
    """Bytes that minato's operators have read and touched in this process."""
    pipeline = getattr(dataset, "pipeline", None)
    found = pipeline.stats() if pipeline is not None else {}
    return found.get("bytes_read", 0), found.get("bytes_touched", 0)


def time_epoch(job: Job, loader: Any, number: int) -> dict[str, float]:
    """Milliseconds and bytes per sample of one epoch."""
    before, cpu, calls = counts(loader.dataset), common.cpu_seconds(), read_bytes()
    begin, samples = time.perf_counter(), 0
    for batch in epoch_of(loader, number):
        samples += len(batch[2])
    wall = time.perf_counter() - begin
    if samples != job.epoch:
        raise AssertionError(f"{samples} samples delivered, {job.epoch} expected")
    cpu, calls = common.cpu_seconds() - cpu, read_bytes() - calls
    read, touched = (a - b for a, b in zip(counts(loader.dataset), before))
    return {"ms": wall * 1e3 / samples, "cpu_ms": cpu * 1e3 / samples, "calls": calls / samples,
            "read": read / samples, "touched": touched / samples}


def count_again(dataset: Any, samples: int) -> dict[str, float]:
    """Bytes per sample that worker processes have counted, which only they know."""
    before = counts(dataset)
    for index in range(samples):
        dataset[index]
    read, touched = ((a - b) / samples for a, b in zip(counts(dataset), before))
    return {"read": read, "touched": touched}


def child(request: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    job, most = Job(**request), dict[str, int]()
    loader = CONTENDERS[job.contender].make(job)
    found = check_epoch(job, loader, most)
    epochs = []
    for number in range(job.epochs):
        epochs.append(time_epoch(job, loader, 2 + number))
        more_memory(most)
    if isinstance(loader.dataset, ops.VolumeDataset) and not any(e["read"] for e in epochs):
        again = count_again(loader.dataset, min(LOOK, job.epoch))
        epochs = [epoch | again for epoch in epochs]
    return {"check": found, "epochs": epochs, "memory": most}


# ---- in the parent ---------------------------------------------------------------------


def tiny_cases(folder: Path) -> list[Case]:
    """Two small cases for a smoke run."""
    rng = np.random.default_rng(0)
    for number in range(2):
        label = np.zeros((1, 40, 44, 48), np.uint8)
        label[:, 5:20, 8:30, 10:30] = 1
        label[:, 9:14, 12:20, 12:20] = 2
        np.save(folder / f"case_{number}_x.npy", rng.normal(0, 1, label.shape).astype("f4"))
        np.save(folder / f"case_{number}_y.npy", label)
    (folder / "complete").touch()
    return prepare(folder, folder, 2)


def check(results: dict[str, dict[str, Any]]) -> None:
    """All deliver the same kinds of fields, and the same bytes for the same samples."""
    if len({str(result["check"]["fields"]) for result in results.values()}) != 1:
        raise AssertionError(f"shapes or dtypes differ: "
                             f"{ {n: r['check']['fields'] for n, r in results.items()} }")
    hashes: dict[str, dict[str, list[str]]] = {}
    for name, result in results.items():
        kind = CONTENDERS[name].samples
        if kind is not None:
            hashes.setdefault(kind, {}).setdefault(result["check"]["content"], []).append(name)
    for kind, found in hashes.items():
        if len(found) > 1:
            raise AssertionError(f"bytes of the {kind} samples differ: {found}")


def time_bounds(cases: list[Case], patch: tuple[int, ...], samples: int) -> dict[str, float]:
    """ms per sample of the two bounds, on this core."""
    found = {}
    for bound in bounds(cases, patch)[:2]:
        for index in range(2):
            bound.make(index)
        bound.turn(list(range(samples)))
        found[bound.name.removeprefix("bound: ")] = bound.wall_ms[0]
    return found


def measure(args: argparse.Namespace, cases: list[Case]) -> dict[str, Any]:
    result: dict[str, Any] = {"machine": common.machine(), "runs": [], "skipped": {}}
    if args.add and Path(args.json).exists():
        result = json.loads(Path(args.json).read_text())
    names = [name for name in CONTENDERS if not args.only or name in args.only]
    for name in list(names):
        why = loaders.unavailable("dali") if name.startswith("dali") else None
        if why is not None:
            result["skipped"][name] = why
            names.remove(name)
    warm(cases)
    quiet = common.Quiet(args.quiet, args.quiet_minutes)
    files = [[case.name, str(case.image), str(case.label)] for case in cases]
    for number in range(len(result["runs"]), len(result["runs"]) + args.repeats):
        turn = {"loaders": {}, "bounds": time_bounds(cases, args.patch, args.samples)}
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            job = Job(files, list(args.patch), args.workers, args.samples, args.epochs, number,
                      name)
            request = dataclasses.asdict(job)
            turn["loaders"][name] = quiet.run(lambda r=request: common.run_child(__file__, r))
        check(turn["loaders"])
        result["runs"].append(turn)
    sizes = [(case.image.stat().st_size, case.label.stat().st_size) for case in cases]
    others = [r["others"] for turn in result["runs"] for r in turn["loaders"].values()]
    result |= {"quiet": {"others_median": common.median(others), "others_most": max(others)},
               "patch": list(args.patch), "workers": args.workers,
               "mean_image": statistics.mean(image for image, _ in sizes),
               "mean_label": statistics.mean(label for _, label in sizes),
               "cases": {case.name: list(np.load(case.label, mmap_mode="r").shape[1:])
                         for case in cases}}
    return result


def per_repeat(result: dict[str, Any], name: str, what: str) -> list[float]:
    """For each repeat, the mean over its timed epochs."""
    return [statistics.mean(epoch[what] for epoch in turn["loaders"][name]["epochs"])
            for turn in result["runs"] if name in turn["loaders"]]


def row(result: dict[str, Any], name: str, needed: float) -> list[str]:
    wall = per_repeat(result, name, "ms")
    cells = [name, f"{common.median(wall):.2f}", f"{min(wall):.2f}-{max(wall):.2f}",
             f"{common.median(per_repeat(result, name, 'cpu_ms')):.2f}"]
    for other in (BASE, CONTENDERS[name].against):
        theirs = per_repeat(result, other, "ms") if other != name and all(
            other in turn["loaders"] for turn in result["runs"]) else []
        cells.append(f"{common.ratios(wall, theirs):.1f}" if len(theirs) == len(wall) else "-")
    read, touched, calls = (common.median(per_repeat(result, name, what))
                            for what in ("read", "touched", "calls"))
    how = "counted"
    if name.startswith("dali"):
        read, how = result["mean_label"] + needed * 4 / 5, "sizes"
    elif not read:
        read, how = calls, "calls"
    cells += [f"{n / 1e6:.1f} {n / needed:.2f}" if n else "-" for n in (read, touched)]
    most = [turn["loaders"][name]["memory"] for turn in result["runs"] if name in turn["loaders"]]
    return [*cells, how, f"{calls / 1e6:.1f}",
            *(f"{max(m[what] for m in most) / common.MiB:.0f}" for what in ("else", "files"))]


def report(result: dict[str, Any]) -> None:
    needed = float(np.prod(result["patch"])) * 5
    whole = (result["mean_image"] + result["mean_label"]) / 1e6
    print(f"# {common.describe(result['machine'])}")
    print(f"# {common.describe(result['quiet'])}; {len(result['runs'])} repeats")
    print(f"# {len(result['cases'])} cases of {whole:.0f} MB on average, patch "
          f"{'x'.join(map(str, result['patch']))} ({needed / 1e6:.1f} MB needed a sample), "
          f"{result['workers']} workers")
    head = ["ms a sample", "median", "min-max", "CPU", "x torch", "x DALI", "MB read, x needed",
            "MB touched, x needed", "by", "by calls", "MiB", "MiB files"]
    names = [name for name in CONTENDERS if name in result["runs"][0]["loaders"]]
    print(common.table(head, [row(result, name, needed) for name in names]))
    for name in result["runs"][0]["bounds"]:
        values = [turn["bounds"][name] for turn in result["runs"]]
        print(f"bound, one core: {name}: {common.median(values):.2f} ms")
    for name, why in result["skipped"].items():
        print(f"left out: {name}: {why}")
    print("each epoch's samples were counted; equal bytes: "
          + ", ".join(sorted({c.samples for n, c in CONTENDERS.items()
                              if c.samples and n in names})))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder to keep the volumes in")
    parser.add_argument("--labels", type=Path, default=Path(
        os.environ.get("MINATO_KITS19") or ROOT / "../shared/data/kits19"))
    parser.add_argument("--cases", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2, help="timed ones of a process")
    parser.add_argument("--samples", type=int, default=240, help="of an epoch")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--patch", type=int, nargs=3, default=(128, 128, 128))
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, metavar="NAME",
                        help="; ".join(CONTENDERS))
    parser.add_argument("--add", action="store_true", help="go on from --json's repeats")
    common.add_options(parser)
    args = parser.parse_args()
    if args.add and not args.json:
        parser.error("--add needs --json")
    if args.quick:
        args.repeats, args.epochs, args.samples = 1, 1, 6
        args.patch = (32, 32, 32)
    return args


def main() -> int:
    if (request := common.child_request()) is not None:
        common.answer(child(request))
        return 0
    args = arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        if args.quick:
            cases = tiny_cases(Path(scratch))
        else:
            cases = prepare(args.data or Path(scratch), args.labels, args.cases)
        result = measure(args, cases)
    report(result)
    common.save(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
