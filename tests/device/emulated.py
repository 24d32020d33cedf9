"""The kernels of ``csrc/cuda`` without a device: compiled for the CPU."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from minato.device.provider import Finisher, Job

ROOT = Path(__file__).resolve().parents[2]
BODY = b"code that no device could read"
#: with a head as fatbinary has it: magic, version, bytes of head and body
IMAGE = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(BODY)) + BODY


def build(folder: Path, broken: dict[str, tuple[str, str]] | None = None) -> Path:
    """The emulated driver, as a library in this folder; broken: text of sources, by file of
    csrc, and its replacement."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    csrc = ROOT / "csrc"
    for name, (text, other) in (broken or {}).items():
        if csrc == ROOT / "csrc":
            csrc = Path(shutil.copytree(ROOT / "csrc", folder / "csrc"))
        source = (csrc / name).read_text()
        assert source.count(text) == 1, f"{name} has no such text: {text}"
        (csrc / name).write_text(source.replace(text, other))
    library = folder / "libemulated.so"
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Wextra",
         "-Werror", "-fvisibility=default", f"-I{csrc}", f"-I{ROOT / 'minato' / 'include'}",
         str(ROOT / "tests" / "device" / "c" / "emulated_cuda.cpp"), "-o", str(library)],
        check=True,
    )  # fmt: skip
    return library


class Emulated:
    """A driver with one device, and the kernels it has loaded."""

    def __init__(self, library: Path) -> None:
        self.library = str(library)
        self.raw = ctypes.CDLL(self.library)
        self.fails("")
        self.finisher = Finisher(self.library, 0, IMAGE)

    def fails(self, name: str, code: int = 2) -> None:
        """Makes this driver function fail or work from now on; "": none fails."""
        self.raw.emulated_fails(name.encode(), code)

    def counts(self) -> dict[str, int]:
        """Of this thread, and of all."""
        found = (ctypes.c_int * 4)()
        self.raw.emulated_counts(found)
        return dict(zip(("contexts", "loads", "launches", "blocks"), found))

    def finished(
        self,
        which: int,
        volumes: np.ndarray,
        after: np.dtype,  # type: ignore[type-arg]
        recipes: np.ndarray,
        steps: int,
    ) -> np.ndarray:
        """Volumes of a batch, [n, c, d, h, w], after the steps of their recipes."""
        from minato.ops.operators import DTYPES

        target = np.full(volumes.shape, 0xA5, np.uint8).astype(after)
        dtypes = (DTYPES[volumes.dtype.name], DTYPES[np.dtype(after).name])
        places = (volumes.ctypes.data, target.ctypes.data, recipes.ctypes.data)
        self.finisher.run(0, Job(which, dtypes, volumes.shape, *places, steps))
        return target


def environment_without(program: str, folder: Path) -> dict[str, str]:
    """With a PATH on which all programs but this one are found."""
    folder.mkdir()
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for file in Path(place).iterdir() if Path(place).is_dir() else ():
            link = folder / file.name
            link.unlink(missing_ok=True)
            if file.name != program:
                link.symlink_to(file)
    return {**os.environ, "PATH": str(folder)}
