"""The data of an experiment, made when a row first needs it."""
from __future__ import annotations

import copy
import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from unet3d import data, phantom, preprocess
from unet3d.bench.gpu.plan import Size
from unet3d.bench.workloads import base
from unet3d.parallel import available_cores, each

SEED = 0


def _make_volume(number: int, out: Path, scale: float, settings: preprocess.Settings
                 ) -> tuple[str, dict[str, Any]]:
    name = f"case_{number:05d}"
    image, labels, spacing = phantom.draw_case(number, SEED, scale)
    made = preprocess.prepare(image.astype(np.float32), labels, spacing, settings)
    return name, {"source": [], "files": preprocess.save_case(name, out, *made)}


def volumes(folder: Path, size: Size) -> Path:
    """Preprocessed phantoms below `folder`, made unless they exist, without NIfTI files."""
    out, making = folder / "volumes", folder / "making"
    if preprocess.read_manifest(out) is None:
        shutil.rmtree(making, ignore_errors=True)  # of a killed call
        making.mkdir(parents=True)
        settings = preprocess.Settings(min_shape=(size.min_shape,) * 3)
        make = functools.partial(_make_volume, out=making, scale=size.scale, settings=settings)
        cases = dict(each(make, range(size.cases), available_cores(), "phantoms"))
        preprocess.write_manifest(making, {"settings": settings.as_json(), "cases": cases})
        os.replace(making, out)  # atomically
    return out


def copies(source: Path, folder: Path, count: int) -> Path:
    """`count` copies of the cases of `source` as separate files, below `folder`."""
    out, making = folder / "copies", folder / "copying"
    if out.exists():
        return out
    manifest = preprocess.read_manifest(source)
    assert manifest is not None
    many = copy.deepcopy(manifest) | {"cases": {}}
    making.mkdir(exist_ok=True)
    for number in range(count):
        for name, entry in manifest["cases"].items():
            twin = f"case_{len(many['cases']):05d}"
            files = {f"{twin}{file.removeprefix(name)}": about
                     for file, about in entry["files"].items()}
            for file, its in zip(entry["files"], files, strict=True):
                shutil.copyfile(source / file, making / its)
            many["cases"][twin] = {**entry, "files": files}
    (making / preprocess.MANIFEST).write_text(json.dumps(many, indent=1) + "\n")
    os.replace(making, out)
    return out


def files(folder: Path) -> list[Path]:
    """The files of all cases of a preprocessed folder."""
    return [path for case in data.list_cases(folder) for path in (case.image, case.label)]


def nbytes(folder: Path) -> int:
    """The bytes of all cases of a preprocessed folder."""
    return sum(case.nbytes for case in data.list_cases(folder))


def samples(workload: str, folder: Path, size: Size) -> Path:
    """The data of another workload below `folder`. Raises DataError if a package is
    missing."""
    module, out = base.module(workload), folder / workload
    count = size.utterances if workload == "speech" else size.images
    module.generate(out, count, SEED, workers=available_cores())
    return out
