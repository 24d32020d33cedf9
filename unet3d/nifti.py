"""NIfTI volumes in and out, with errors that name the file.

nibabel is imported only by functions that read or write a file; training does not need it.
"""
from __future__ import annotations

import contextlib
import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.spec import CLASSES, KITS19_CASES

IMAGE_NAME = "imaging.nii.gz"
LABEL_NAME = "segmentation.nii.gz"


class DataError(ValueError):
    """An input file that cannot be used; the message names it and says why."""


def is_unlabelled(case: Path) -> bool:
    """Whether this is one of KiTS19's test cases, which are downloaded with the others, but
    whose labels were never published."""
    _, _, number = case.name.partition("_")
    return (number.isdigit() and int(number) >= KITS19_CASES
            and not (case / LABEL_NAME).exists())


def find_cases(folder: Path, required: str) -> list[Path]:
    """Return the ``case_*`` folders below `folder` that hold `required`, sorted.

    Raises DataError if `folder` is missing or holds no case.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    cases = sorted(path for path in folder.glob("case_*") if path.is_dir())
    if not cases:
        raise DataError(f"{folder}: holds no case_* folder")
    for case in cases:
        if not (case / required).is_file():
            hint = ""
            if required == IMAGE_NAME and (case / LABEL_NAME).is_file():
                hint = (f" (labels only: `python -m unet3d.phantom --labels {folder} --out PAINTED` "
                        "paints images)")
            raise DataError(f"{case / required}: missing{hint}")
    return cases


def _nibabel() -> Any:
    try:
        import nibabel
    except ImportError as error:
        raise DataError("NIfTI files need nibabel: pip install nibabel") from error
    return nibabel


def _read(path: Path, dtype: type) -> tuple[np.ndarray, tuple[float, float, float]]:
    nibabel = _nibabel()
    try:
        image = nibabel.load(path)
        array = np.asanyarray(image.dataobj)
    except (OSError, EOFError, ValueError, gzip.BadGzipFile, zlib.error,
            nibabel.filebasedimages.ImageFileError) as error:
        raise DataError(f"{path}: cannot be read as NIfTI: {error}") from error
    if array.ndim != 3 or 0 in array.shape:
        raise DataError(f"{path}: expected a 3-D volume, found shape {array.shape}")
    spacing = tuple(float(s) for s in image.header["pixdim"][1:4])
    if not all(np.isfinite(s) and s > 0 for s in spacing):
        raise DataError(f"{path}: voxel spacing {spacing} is not positive and finite")
    if array.dtype.kind not in "iuf":
        raise DataError(f"{path}: cannot use values of type {array.dtype}")
    return (array.astype(dtype, copy=False) if dtype is not None else array), spacing


def read_shape(path: Path) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """(shape [z, y, x], spacing in mm) from a file's header. Raises DataError."""
    nibabel = _nibabel()
    try:
        header = nibabel.load(path).header
    except (OSError, EOFError, ValueError, gzip.BadGzipFile, zlib.error,
            nibabel.filebasedimages.ImageFileError) as error:
        raise DataError(f"{path}: cannot be read as NIfTI: {error}") from error
    return header.get_data_shape(), tuple(float(s) for s in header["pixdim"][1:4])


def read_image(path: Path) -> tuple[np.ndarray, tuple[float, float, float]]:
    """Return (float32 volume [z, y, x] in HU, spacing in mm). Raises DataError."""
    array, spacing = _read(path, np.float32)
    if not np.isfinite(array).all():
        raise DataError(f"{path}: holds values that are not finite")
    return array, spacing


def read_label(path: Path) -> tuple[np.ndarray, tuple[float, float, float]]:
    """Return (uint8 volume [z, y, x] of 0, 1, 2; spacing in mm). Raises DataError.

    Checked before the cast, so that 257 or 1.5 cannot become a valid class.
    """
    array, spacing = _read(path, None)
    label = array.astype(np.uint8)
    if label.max() >= CLASSES or (array.dtype != np.uint8 and (label != array).any()):
        raise DataError(f"{path}: labels must be 0, 1 or 2 "
                        f"(found {array.min()} to {array.max()})")
    return label, spacing


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name of a temporary file, which is renamed to `path` at the end, atomically."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write(path: Path, array: np.ndarray, spacing: tuple[float, float, float]) -> None:
    """Write `array` [z, y, x] as compressed NIfTI, atomically, laid out as KiTS19 is."""
    dz, dy, dx = spacing
    affine = np.array([[0, 0, -dx, 0], [0, -dy, 0, 0], [-dz, 0, 0, 0], [0, 0, 0, 1]],
                      dtype=np.float64)
    image = _nibabel().Nifti1Image(array, affine)
    image.header.set_zooms(spacing)
    image.header.set_xyzt_units("mm")
    with replacing(path) as temporary, open(temporary, "wb") as raw:
        # No name and no time in the gzip header: equal volumes give equal files.
        with gzip.GzipFile("", "wb", compresslevel=1, fileobj=raw, mtime=0) as stream:
            stream.write(image.to_bytes())
