"""Make a KiTS19-like data set: NIfTI cases with drawn labels and painted images.

    python -m unet3d.phantom --out data/phantom --cases 12 --scale 0.4
    python -m unet3d.phantom --out data/painted --labels /path/to/kits19

The second form paints images over real label files ``case_*/segmentation.nii.gz``,
which are copied unchanged.
"""
from __future__ import annotations

import argparse
import functools
import json
import shutil
import sys
from pathlib import Path

import numpy as np

from unet3d import anatomy, nifti
from unet3d.parallel import available_cores, each

FORMAT = 1  # raised when the same seed would give other volumes


def case_generator(seed: int, number: int) -> np.random.Generator:
    """The generator of case `number`: independent of all other cases."""
    return np.random.default_rng([seed, number])


def draw_case(number: int, seed: int, scale: float
              ) -> tuple[np.ndarray, np.ndarray, tuple[float, float, float]]:
    """(image int16 in HU, labels uint8, spacing) of case `number`; volumes are [z, y, x]."""
    rng = case_generator(seed, number)
    patient = anatomy.draw_patient(rng, scale)
    labels = anatomy.draw_labels(patient)
    return anatomy.paint(labels, patient.spacing, rng, scale), labels, patient.spacing


def make_case(number: int, out: Path, seed: int, scale: float) -> str:
    """Write case `number` below `out` unless it is there. Returns its name."""
    folder = out / f"case_{number:05d}"
    image_path, label_path = folder / nifti.IMAGE_NAME, folder / nifti.LABEL_NAME
    if not (image_path.exists() and label_path.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        image, labels, spacing = draw_case(number, seed, scale)
        nifti.write(label_path, labels, spacing)
        nifti.write(image_path, image, spacing)
    return folder.name


def paint_case(source: Path, out: Path, seed: int) -> str:
    """Paint an image over the real label file in `source`. Returns the case's name."""
    folder = out / source.name
    image_path, label_path = folder / nifti.IMAGE_NAME, folder / nifti.LABEL_NAME
    if not (image_path.exists() and label_path.exists()):
        labels, spacing = nifti.read_label(source / nifti.LABEL_NAME)
        folder.mkdir(parents=True, exist_ok=True)
        digits = source.name.removeprefix("case_")
        if not digits.isdigit():
            raise nifti.DataError(f"{source}: expected a folder named case_NNNNN")
        image = anatomy.paint(labels, spacing, case_generator(seed, int(digits)))
        with nifti.replacing(label_path) as temporary:
            shutil.copyfile(source / nifti.LABEL_NAME, temporary)
        nifti.write(image_path, image, spacing)
    return folder.name


def _check_settings(out: Path, settings: dict) -> None:
    """Refuse to mix cases made with different settings in one folder."""
    record = out / "phantom.json"
    if record.exists():
        found = json.loads(record.read_text())
        if found != settings:
            raise nifti.DataError(f"{record}: made with {found}, now asked for {settings}; "
                                  "use another folder")
    else:
        out.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(settings, indent=1) + "\n")


def generate(out: Path, cases: int, seed: int = 0, scale: float = 1.0,
             workers: int = 1) -> list[str]:
    """Write cases 0 to `cases` - 1; cases already there are kept."""
    _check_settings(out, {"format": FORMAT, "seed": seed, "scale": scale})
    work = functools.partial(make_case, out=out, seed=seed, scale=scale)
    return sorted(each(work, range(cases), workers, "phantoms"))


def paint_labels(source: Path, out: Path, seed: int = 0, workers: int = 1,
                 cases: int | None = None) -> list[str]:
    """Paint images over the first `cases` real label files below `source`."""
    found = nifti.find_cases(source, nifti.LABEL_NAME)[:cases]
    _check_settings(out, {"format": FORMAT, "seed": seed, "labels": str(source)})
    work = functools.partial(paint_case, out=out, seed=seed)
    return sorted(each(work, found, workers, "painting"))


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(prog="unet3d.phantom", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--cases", type=int,
                        help="number of cases (default: 210, or all label files)")
    parser.add_argument("--scale", type=float, default=1.0,
                        help="size of patient and field of view, 1 = real (default 1)")
    parser.add_argument("--labels", type=Path, help="paint over real KiTS19 label files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=available_cores())
    args = parser.parse_args(argv)
    if not 0.05 <= args.scale <= 1.0:
        parser.error("--scale must lie between 0.05 and 1")
    if args.cases is not None and args.cases < 1:
        parser.error("--cases must be at least 1")
    if args.labels is not None and args.scale != 1.0:
        parser.error("--scale shrinks drawn patients; it cannot be used with --labels")
    try:
        if args.labels is not None:
            names = paint_labels(args.labels, args.out, args.seed, args.workers, args.cases)
        else:
            names = generate(args.out, args.cases or 210, args.seed, args.scale,
                             args.workers)
    except nifti.DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(names)} cases in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
