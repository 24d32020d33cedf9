"""The cost of a 3D U-Net training sample on one core: NumPy and SciPy against minato.ops.

    python benchmarks/operators.py [--data FOLDER] [--repeats 7] [--samples 24]

Volumes are made once: real KiTS19 label files with painted intensities if there are any
(MINATO_KITS19, else ../shared/data/kits19), else phantoms; with --data they are kept for the
next run. The process is bound to one core and the files are in the page cache. All
contenders take turns within a repeat, on the same cases. The table shows medians over repeats
of the mean per sample, in wall and CPU time (on a busy machine use the latter), and the
lowest and highest repeat.

Bounds for comparison: copying only the crop from files that stay mapped (every page touched
before) into warm memory, one scan of the label volume (the largest value of an array in memory),
and one copy of the sample.
"""
from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from minato import ops

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from unet3d import anatomy, nifti, preprocess, transforms  # noqa: E402
from unet3d.data import Case, VolumeDataset  # noqa: E402


@dataclasses.dataclass
class Contender:
    """A way to make sample i; `read` gives the bytes read so far, where known."""

    name: str
    make: Callable[[int], object]
    read: Callable[[], int] | None = None
    wall_ms: list[float] = dataclasses.field(default_factory=list)
    cpu_ms: list[float] = dataclasses.field(default_factory=list)
    bytes_read: int = 0
    samples: int = 0

    def turn(self, indices: list[int]) -> None:
        before = self.read() if self.read else 0
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        for index in indices:
            self.make(index)
        self.cpu_ms.append((time.thread_time_ns() - cpu) / 1e6 / len(indices))
        self.wall_ms.append((time.perf_counter_ns() - wall) / 1e6 / len(indices))
        self.bytes_read += self.read() - before if self.read else 0
        self.samples += len(indices)

    def row(self, per_sample: float) -> str:
        wall, cpu = statistics.median(self.wall_ms), statistics.median(self.cpu_ms)
        spread = f"{min(self.cpu_ms):6.2f} to {max(self.cpu_ms):7.2f}"
        read = f"{self.bytes_read / self.samples / 1e6:8.1f}" if self.read else f"{per_sample:8.1f}"
        return f"{self.name:44s} {wall:8.2f} {cpu:8.2f}   {spread} {read}"


def volumes(labels: Path, count: int):
    """Yield (name, image in HU, label, spacing): real labels if there are any."""
    found = sorted(labels.glob("case_*/segmentation.nii.gz"))
    for number, path in enumerate(found[:count]):
        label, spacing = nifti.read_label(path)
        yield path.parent.name, anatomy.paint(label, spacing, np.random.default_rng(number)), \
            label, spacing
    for number in range(0 if found else count):
        rng = np.random.default_rng(number)
        patient = anatomy.draw_patient(rng)
        label = anatomy.draw_labels(patient)
        yield f"case_{number:05d}", anatomy.paint(label, patient.spacing, rng), label, \
            patient.spacing


def prepare(folder: Path, labels: Path, count: int) -> list[Case]:
    """Make the volumes in `folder` unless they are there."""
    done = folder / "complete"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name, image, label, spacing in volumes(labels, count):
            image, label = preprocess.prepare(image.astype(np.float32), label, spacing)
            np.save(folder / f"{name}_x.npy", image)
            np.save(folder / f"{name}_y.npy", label)
            print(f"made {name}: {label.shape[1:]}", file=sys.stderr)
        done.touch()
    cases = []
    for image_path in sorted(folder.glob("*_x.npy")):
        label_path = image_path.with_name(image_path.name.replace("_x", "_y"))
        cases.append(Case(image_path.name[:-6], image_path, label_path,
                          image_path.stat().st_size + label_path.stat().st_size))
    return cases


def warm(cases: list[Case]) -> None:
    for case in cases:
        for path in (case.image, case.label):
            path.read_bytes()


def native(name: str, cases: list[Case], pipeline: ops.Pipeline) -> Contender:
    dataset = ops.VolumeDataset(cases, pipeline, repeat=1 << 20)
    return Contender(name, dataset.__getitem__, lambda: pipeline.stats()["bytes_read"])


def contenders(cases: list[Case], patch: tuple[int, int, int]) -> list[Contender]:
    reference = VolumeDataset(cases, transforms.train_transforms(patch), seed=0, repeat=1 << 20)

    read = 0

    def seen_anew(index: int) -> object:
        nonlocal read
        fresh = ops.VolumeDataset([cases[index % len(cases)]], ops.unet3d_training(patch))
        fresh.set_epoch(index)
        sample = fresh[0]
        read += fresh.pipeline.stats()["bytes_read"]
        return sample

    return [
        Contender("NumPy and SciPy", lambda i: tuple(map(torch.from_numpy, reference[i][:2]))),
        native("minato.ops", cases, ops.unet3d_training(patch)),
        Contender("minato.ops, nothing kept (first epoch)", seen_anew, lambda: read),
        native("  crop only", cases, ops.Pipeline([ops.ReadNpy(), ops.RandCrop(patch)])),
        native("  foreground crop, label scanned each time", cases, ops.Pipeline(
            [ops.ReadNpy(), ops.RandBalancedCrop(patch, 1.0, keep_boxes=False)])),
        native("  crop, noise in every sample", cases, ops.Pipeline(
            [ops.ReadNpy(), ops.RandCrop(patch), ops.RandGaussianNoise(1.0)])),
    ]


def bounds(cases: list[Case], patch: tuple[int, int, int]) -> list[Contender]:
    image, label = np.ones((1, *patch), np.float32), np.ones((1, *patch), np.uint8)
    source = image.copy(), label.copy()
    scanned = [np.load(case.label) for case in cases]
    mapped = [[np.load(path, mmap_mode="r") for path in (case.image, case.label)]
              for case in cases]
    for volume in (volume for both in mapped for volume in both):
        volume.max()  # so that no page is mapped during the measurement
    rng = np.random.default_rng(0)

    def copy_crop(index: int) -> None:
        volumes = mapped[index % len(mapped)]
        start = [rng.integers(0, n - p + 1) for n, p in zip(volumes[0].shape[1:], patch)]
        window = tuple(slice(s, s + p) for s, p in zip(start, patch))
        for volume, out in zip(volumes, (image, label)):
            np.copyto(out, volume[(slice(None), *window)])

    def copy_sample(index: int) -> None:
        np.copyto(image, source[0])
        np.copyto(label, source[1])

    return [Contender("bound: just the crop, mapped, warm memory", copy_crop),
            Contender("bound: one scan of the label",
                      lambda i: scanned[i % len(scanned)].max()),
            Contender("bound: one copy of the sample", copy_sample)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder to keep the volumes in")
    parser.add_argument("--labels", type=Path, default=Path(
        os.environ.get("MINATO_KITS19") or ROOT / "../shared/data/kits19"))
    parser.add_argument("--cases", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--samples", type=int, default=24, help="of each contender a repeat")
    parser.add_argument("--patch", type=int, nargs=3, default=(128, 128, 128))
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as scratch:
        cases = prepare(args.data or Path(scratch), args.labels, args.cases)
        report(cases, tuple(args.patch), args.repeats, args.samples)


def report(cases: list[Case], patch: tuple[int, int, int], repeats: int, samples: int) -> None:
    warm(cases)
    runners = contenders(cases, patch) + bounds(cases, patch)
    for runner in runners:
        runner.make(0)
    for repeat in range(repeats):
        indices = list(range(repeat * samples, (repeat + 1) * samples))
        for runner in runners:
            runner.turn(indices)
    needed = int(np.prod(patch)) * 5 / 1e6
    whole = sum(case.nbytes for case in cases) / len(cases) / 1e6
    total = repeats * samples
    print(f"{len(cases)} cases of {whole:.0f} MB on average, {total} samples each, patch "
          f"{'x'.join(map(str, patch))} ({needed:.1f} MB), instruction set "
          f"{ops.Pipeline([]).stats()['instruction_set']}")
    print(f"{'ms a sample':44s} {'wall':>8s} {'CPU':>8s}   {'CPU, lowest, highest':>17s} {'MB read':>8s}")
    for number, runner in enumerate(runners):
        print(runner.row(whole if number == 0 else whole / 5 if "scan of" in runner.name else needed))


if __name__ == "__main__":
    main()
