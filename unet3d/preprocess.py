"""Turn NIfTI cases into the .npy volumes that training reads, once.

    python -m unet3d.preprocess --source data/kits19 --out data/npy
    python -m unet3d.preprocess --out data/npy --verify

Per case, after the MLPerf Training 3D U-Net reference: resample to 1.6 x 1.2 x 1.2 mm
(image trilinear with aligned corners, label nearest), clip to [-79, 304] HU, subtract
101.0, divide by 76.9, pad with edge values to at least 128^3, write ``case_NNNNN_x.npy``
(float32 [1, z, y, x]) and ``case_NNNNN_y.npy`` (uint8 [1, z, y, x]). Files appear whole
or not at all; a second run does only what is missing. ``checksums.json`` lists the
SHA-256 of every file, and each case's shape, mean, deviation and voxels by class. The end of a run
prints the medians of all cases, as the reference does, and the sizes and shares of the classes.
"""
from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from unet3d import nifti, spec
from unet3d.nifti import DataError
from unet3d.parallel import available_cores, each

MANIFEST = "checksums.json"
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that determine the bytes of the output."""

    spacing: tuple[float, float, float] = spec.TARGET_SPACING
    min_shape: tuple[int, int, int] = spec.MIN_SHAPE

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "spacing": list(self.spacing),
                "min_shape": list(self.min_shape)}


def resampled_shape(shape: Sequence[int], spacing: Sequence[float],
                    target: Sequence[float]) -> list[int]:
    """int(spacing/target * size) for each axis. Raises DataError if one would vanish."""
    ratio = np.array(spacing) / np.array(target)
    size: list[int] = (ratio * np.array(shape)).astype(int).tolist()
    if min(size) < 1:
        raise DataError(f"shape {tuple(shape)} at spacing {tuple(spacing)} mm resamples to {size}")
    return size


def resample(image: np.ndarray, label: np.ndarray, spacing: tuple[float, float, float],
             target: tuple[float, float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Resample [z, y, x] volumes to `target` mm; new size is int(spacing/target * size).

    Image trilinear with aligned corners, label nearest. Volumes with the target
    spacing are returned unchanged. Raises DataError if an axis would vanish.
    """
    if tuple(spacing) == tuple(target):
        return image, label
    size = resampled_shape(image.shape, spacing, target)
    moving = torch.from_numpy(np.ascontiguousarray(image))[None, None]
    image = interpolate(moving, size=size, mode="trilinear", align_corners=True)
    classes = torch.from_numpy(np.ascontiguousarray(label))[None, None]
    label = interpolate(classes, size=size, mode="nearest")
    return image[0, 0].numpy(), label[0, 0].numpy()


def normalise(image: np.ndarray) -> np.ndarray:
    """Clip float32 HU to the specified window, then shift and scale. Same shape."""
    low, high = (np.float32(v) for v in spec.CLIP_HU)
    clipped = np.clip(image, low, high)
    clipped -= np.float32(spec.MEAN_HU)
    clipped /= np.float32(spec.STD_HU)
    return clipped


def pad(volume: np.ndarray, min_shape: tuple[int, int, int]) -> np.ndarray:
    """Pad [z, y, x] with edge values to at least `min_shape`, floor half first."""
    missing = [max(0, want - have) for want, have in zip(min_shape, volume.shape)]
    if not any(missing):
        return volume
    return np.pad(volume, [(m // 2, m - m // 2) for m in missing], mode="edge")


def prepare(image: np.ndarray, label: np.ndarray, spacing: tuple[float, float, float],
            settings: Settings = Settings()) -> tuple[np.ndarray, np.ndarray]:
    """All steps for one case: [z, y, x] in, [1, z, y, x] float32 and uint8 out."""
    image, label = resample(image, label, spacing, settings.spacing)
    image = pad(normalise(image), settings.min_shape)
    label = pad(label, settings.min_shape)
    return (np.ascontiguousarray(image[None], np.float32),
            np.ascontiguousarray(label[None], np.uint8))


def prepared_shape(shape: Sequence[int], spacing: Sequence[float], settings: Settings
                   ) -> tuple[int, int, int]:
    """The shape (z, y, x) of a case after all steps. Raises DataError."""
    size = list(shape) if tuple(spacing) == tuple(settings.spacing) else resampled_shape(
        shape, spacing, settings.spacing)
    depth, height, width = (max(have, want) for have, want in zip(size, settings.min_shape))
    return depth, height, width


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    state = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 22):
            state.update(block)
    return state.hexdigest()


def _save(path: Path, array: np.ndarray) -> dict[str, Any]:
    """Write `array` as .npy atomically and durably; returns its manifest entry."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        with open(temporary, "wb") as stream:
            np.save(stream, array, allow_pickle=False)
            stream.flush()
            os.fsync(stream.fileno())
        entry = {"sha256": sha256(temporary), "bytes": temporary.stat().st_size,
                 "shape": list(array.shape)}
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return entry


def _stamp(case: Path) -> list[list[int]]:
    """Size and modification time of a case's two source files."""
    found = []
    for name in (nifti.IMAGE_NAME, nifti.LABEL_NAME):
        try:
            status = (case / name).stat()
        except OSError as error:
            raise DataError(f"{case / name}: {error.strerror}") from error
        found.append([status.st_size, status.st_mtime_ns])
    return found


def load_case(case: Path, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Read and prepare one case: [1, z, y, x], float32 and uint8. Raises DataError."""
    image, spacing = nifti.read_image(case / nifti.IMAGE_NAME)
    label, _ = nifti.read_label(case / nifti.LABEL_NAME)
    if image.shape != label.shape:
        raise DataError(f"{case}: image shape {image.shape} and label shape "
                        f"{label.shape} differ")
    try:
        return prepare(image, label, spacing, settings)
    except DataError as error:
        raise DataError(f"{case}: {error}") from error


def process_case(case: Path, out: Path, settings: Settings) -> tuple[str, dict[str, Any]]:
    """Prepare and save one case. Returns (name, manifest entries). Raises DataError."""
    stamp = _stamp(case)
    image, label = load_case(case, settings)
    return case.name, {"source": stamp, "files": save_case(case.name, out, image, label),
                       "statistics": statistics_of(image, label)}


def statistics_of(image: np.ndarray, label: np.ndarray) -> dict[str, Any]:
    """Statistics of a prepared case: `shape` (z, y, x), `mean` and `std` of the image, rounded to
    two digits as in the reference, and `voxels` of each class."""
    return {"shape": list(image.shape[1:]),
            "mean": round(float(image.mean()), 2), "std": round(float(image.std()), 2),
            "voxels": np.bincount(label.ravel(), minlength=spec.CLASSES).tolist()}


def save_case(name: str, out: Path, image: np.ndarray, label: np.ndarray
              ) -> dict[str, dict[str, Any]]:
    """Save a prepared case. Returns its files for the manifest."""
    return {f"{name}_x.npy": _save(out / f"{name}_x.npy", image),
            f"{name}_y.npy": _save(out / f"{name}_y.npy", label)}


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a preprocessed folder, None if absent. Raises DataError."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if manifest["settings"]["format"] != FORMAT:
            raise DataError(f"{path}: format {manifest['settings']['format']}, "
                            f"this program reads {FORMAT}")
        manifest["cases"].items()
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not a manifest of this program: {error!r}") from error
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, atomically."""
    temporary = folder / f".tmp-{os.getpid()}-{MANIFEST}"
    manifest["cases"] = dict(sorted(manifest["cases"].items()))
    temporary.write_text(json.dumps(manifest, indent=1) + "\n")
    os.replace(temporary, folder / MANIFEST)


def _is_done(case: Path, out: Path, manifest: dict[str, Any]) -> bool:
    """Whether `case` was made from exactly these source files and is complete."""
    entry = manifest["cases"].get(case.name)
    if entry is None or entry["source"] != _stamp(case):
        return False
    return all((out / name).is_file() and (out / name).stat().st_size == file["bytes"]
               for name, file in entry["files"].items())


def labelled_cases(source: Path) -> list[Path]:
    """The cases of `source` that have labels; prints how many have none. Raises DataError."""
    cases = nifti.find_cases(source, nifti.IMAGE_NAME)
    unlabelled = [case.name for case in cases if nifti.is_unlabelled(case)]
    if unlabelled:
        print(f"{len(unlabelled)} cases without labels are skipped ({unlabelled[0]} to "
              f"{unlabelled[-1]}): KiTS19 has labels for its first "
              f"{spec.KITS19_CASES}",
              file=sys.stderr)
    return [case for case in cases if case.name not in unlabelled]


def preprocess(source: Path, out: Path, settings: Settings = Settings(),
               workers: int = 1) -> tuple[int, int]:
    """Prepare all labelled cases of `source` into `out`. Returns (made, kept). Raises
    DataError."""
    cases = labelled_cases(source)
    out.mkdir(parents=True, exist_ok=True)
    manifest = read_manifest(out) or {"settings": settings.as_json(), "cases": {}}
    if manifest["settings"] != settings.as_json():
        raise DataError(f"{out / MANIFEST}: made with {manifest['settings']}, now asked "
                        f"for {settings.as_json()}; use another folder")
    for leftover in out.glob(".tmp-*"):  # of a killed run
        leftover.unlink()
    missing = [case for case in cases if not _is_done(case, out, manifest)]
    work = functools.partial(process_case, out=out, settings=settings)
    for name, entry in each(work, missing, workers, "preprocess"):
        manifest["cases"][name] = entry
        write_manifest(out, manifest)
    return len(missing), len(cases) - len(missing)


def _damage(item: tuple[Path, dict[str, Any]]) -> str | None:
    path, entry = item
    if not path.is_file():
        return f"{path}: missing"
    if path.stat().st_size != entry["bytes"]:
        return f"{path}: {path.stat().st_size} bytes, expected {entry['bytes']}"
    if sha256(path) != entry["sha256"]:
        return f"{path}: content differs from its checksum"
    return None


def verify(folder: Path, workers: int = 1) -> list[str]:
    """Check every file of a preprocessed folder. Returns the faults, one per line.

    Raises DataError if the folder holds no manifest.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise DataError(f"{folder / MANIFEST}: missing; was this folder preprocessed?")
    items = [(folder / name, entry) for case in manifest["cases"].values()
             for name, entry in case["files"].items()]
    wrong = [line for line in each(_damage, items, workers, "verify") if line]
    listed = {path.name for path, _ in items}
    wrong += [f"{path}: not in {MANIFEST}" for path in sorted(folder.glob("*.npy"))
              if path.name not in listed]
    return sorted(wrong)


def read_checksums(path: Path) -> dict[str, str]:
    """MD5 sums by file name, from the reference's checksum.json. Raises
    DataError."""
    try:
        sums = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as checksums: {error}") from error
    if not isinstance(sums, dict) or not all(
            isinstance(value, str) and len(value) == 32 for value in sums.values()):
        raise DataError(f"{path}: not the reference's checksums, an object of MD5 sums by file "
                        "name")
    return sums


def _other_sum(item: tuple[Path, str]) -> str | None:
    path, expected = item
    if not path.is_file():
        return f"{path}: missing"
    with open(path, "rb") as stream:
        found = hashlib.file_digest(stream, "md5") if hasattr(hashlib, "file_digest") \
            else hashlib.md5(stream.read())
    return None if found.hexdigest() == expected else f"{path}: differs from the reference's"


def verify_reference(folder: Path, checksums: Path, workers: int = 1) -> list[str]:
    """Check the files of a preprocessed folder against the reference's sums. Returns
    the faults, one per line. Raises DataError."""
    sums = read_checksums(checksums)
    wrong = [line for line in each(_other_sum, [(folder / name, sums[name]) for name in sums],
                                   workers, "verify") if line]
    wrong += [f"{path}: not in {checksums}" for path in folder.glob("*.npy")
              if path.name not in sums]
    return sorted(wrong)


def _statistics(item: tuple[Path, str, dict[str, Any]]) -> dict[str, Any]:
    """A case's statistics: from its manifest entry, or from its files if that is older."""
    folder, name, entry = item
    if "statistics" in entry:
        return entry["statistics"]
    try:
        return statistics_of(*(np.load(folder / f"{name}_{kind}.npy", mmap_mode="r",
                                       allow_pickle=False) for kind in "xy"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: case {name} cannot be read: {error}") from error


def describe(folder: Path) -> str:
    """Statistics of a preprocessed folder in lines: the reference's medians, sizes, classes. Raises
    DataError."""
    manifest = read_manifest(folder)
    if manifest is None or not manifest["cases"]:
        raise DataError(f"{folder}: holds no preprocessed cases")
    found = [_statistics((folder, name, entry)) for name, entry in manifest["cases"].items()]
    mean, std, *shape = np.median([[case["mean"], case["std"], *case["shape"]]
                                   for case in found], axis=0)
    depth, height, width = shape
    nbytes = [sum(file["bytes"] for file in entry["files"].values())
              for entry in manifest["cases"].values()]
    sizes = (("smallest", np.min), ("median", np.median), ("mean", np.mean), ("largest", np.max),
             ("all", np.sum))
    lines = [f"median of {len(found)} cases: mean value {mean:.2f}, std {std:.2f}, d {depth:g}, "
             f"h {height:g}, w {width:g}",
             "MB a case: " + ", ".join(f"{name} {of(nbytes) / 1e6:.1f}" for name, of in sizes)]
    voxels = np.array([case["voxels"] for case in found])
    for value, name in ((1, "kidney"), (2, "tumour")):
        some = voxels[voxels[:, value] > 0, value]
        text = f"{name}: in {some.size} of {len(found)} cases"
        if some.size:
            text += (f", {some.min()} to {some.max()} voxels there, "
                     f"{some.sum() / voxels.sum():.3%} of all voxels")
        lines.append(text)
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(prog="unet3d.preprocess", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="folder of case_*/imaging.nii.gz")
    parser.add_argument("--out", type=Path, required=True, help="folder of .npy files")
    parser.add_argument("--verify", action="store_true", help="check the files of --out")
    parser.add_argument("--reference-checksums", type=Path, metavar="JSON",
                        help="with --verify: the reference's checksum.json (MD5 by file name), "
                        "to be checked instead of the folder's own")
    parser.add_argument("--spacing", type=float, nargs=3, default=spec.TARGET_SPACING,
                        metavar="MM", help="target spacing z y x (default 1.6 1.2 1.2)")
    parser.add_argument("--min-shape", type=int, nargs=3, default=spec.MIN_SHAPE,
                        metavar="N", help="pad to at least this (default 128 128 128)")
    parser.add_argument("--workers", type=int, default=available_cores())
    args = parser.parse_args(argv)
    if (args.source is None) == (not args.verify):
        parser.error("give either --source or --verify")
    if args.reference_checksums is not None and not args.verify:
        parser.error("--reference-checksums goes with --verify")
    if min(args.spacing) <= 0 or min(args.min_shape) < 1:
        parser.error("--spacing and --min-shape must be positive")
    try:
        if args.verify:
            wrong = (verify(args.out, args.workers) if args.reference_checksums is None else
                     verify_reference(args.out, args.reference_checksums, args.workers))
            print("\n".join(wrong) if wrong else f"{args.out}: all files are intact")
            return 1 if wrong else 0
        settings = Settings(tuple(args.spacing), tuple(args.min_shape))
        made, kept = preprocess(args.source, args.out, settings, args.workers)
        print(f"{made} cases made, {kept} already there, in {args.out}")
        print(describe(args.out))
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
