"""Readers of foreign data on unexpected inputs: .npy headers, JPEG files, envelopes and costs
in C; samples of all kinds, states, and pipelines of native operators in Python.

Every target in C is built with gcc and its sanitizers and runs mutated seeds; those in Python run
on random bytes. MINATO_FUZZ_SECONDS sets how long these run. For the same time, a clang that has
libFuzzer, and atheris, run with coverage guidance.
"""

from __future__ import annotations

import importlib.util
import io
import os
import random
import shutil
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib import cbook
from PIL import Image
from contract.support import search_path

from minato.ops.jpeg import find_library

from . import mn_fuzz_python

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
SECONDS = float(os.environ.get("MINATO_FUZZ_SECONDS") or 0)
SEED = int(os.environ.get("MINATO_TEST_SEED") or 1)
ROUNDS, PYTHON_ROUNDS = 20_000, 200
FLAGS = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-pthread",
         "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", f"-I{CSRC}",
         # functions that no target calls are left out, and what those would need
         "-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections",
         f"-I{CSRC.parent / 'minato/include'}"]  # fmt: skip


#: of headers, and of the shapes in them
HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': ("
WORDS = ["{", "}", "'descr'", "'<f4'", "'|u1'", "'fortran_order'", "False", "True", "'shape'", ":", '"', "\\", "[",
         "'descr': '<f4', ", "'fortran_order': False, ", "'shape': (1, 2, 3, 4), ", HEADER]  # fmt: skip
SHAPE = ["1", "2", "07", "99999999999999999999", "9223372036854775807", "4294967296", "L", "-1", ",", ",", ", ", " ",
         "(", ")", "'", "\n", "), }"]  # fmt: skip


def npy() -> list[bytes]:
    found = []
    for array in (np.zeros((1, 2, 3, 4), np.float32), np.ones((2, 1, 1, 1), np.uint8),
                  np.zeros((3, 2), np.int16), np.zeros((1, 2, 2, 2), ">f8")):  # fmt: skip
        for version in ((1, 0), (2, 0), (3, 0)):
            file = io.BytesIO()
            np.lib.format.write_array(file, array, version)
            found.append(struct.pack("<Q", len(file.getvalue())) + file.getvalue())
    rng = random.Random(SEED)
    for number in range(400):
        begin, words, end = (HEADER, SHAPE, "), }") if number % 2 else ("", WORDS + SHAPE, "")
        text = (begin + "".join(rng.choices(words, k=rng.randrange(14))) + end).encode()
        head = b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text
        found.append(struct.pack("<Q", len(head) + 96) + head)  # 24 voxels of four bytes
    return found


def envelope() -> list[bytes]:
    found = []
    for size, parts in ((36, []), (160, [(96, 10), (106, 40)]), (8192, [(96, 10), (4096, 4096)])):
        at = 24 + 16 * len(parts)
        head = struct.pack("<QQQ", len(parts), at, 12)
        head += b"".join(struct.pack("<QQ", *part) for part in parts) + b"\x80\x05" * 6
        found.append(head + bytes(size - len(head)))
    return found


def costs() -> list[bytes]:
    pairs = [(0, 5), (8, 10**9), (3, -1), (9, 7), (-1, 2**62), (1, 10**15)]
    return [b"".join(struct.pack("<qq", *pair) for pair in pairs * k) for k in (1, 3)]


def jpeg() -> list[bytes]:
    """Small photos, from one in the public domain that matplotlib carries."""
    with cbook.get_sample_data("grace_hopper.jpg") as file:
        photo = Image.open(file).convert("RGB").resize((90, 70))
    found = []
    for number, options in enumerate([
        {"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}, {"progressive": True},
        {"restart_marker_blocks": 3}, {"keep_rgb": True}, {"exif": b"Exif\0\0MM\0*"},
    ]):  # fmt: skip
        file = io.BytesIO()
        photo.save(file, "JPEG", quality=60, **options)
        found.append(struct.pack("<Q", number * 12345) + file.getvalue())
    return found


LIBRARY = find_library()
#: of the targets
ENVIRONMENT = os.environ | ({} if LIBRARY is None else {"MN_FUZZ_JPEG": LIBRARY.path})
ENGINE = ("base", "os", "sync", "memory", "schedule", "workers", "engine")
#: initial inputs, and the sources of csrc that the target needs
TARGETS: dict[str, tuple[Callable[[], list[bytes]], tuple[str, ...]]] = {
    "npy": (npy, ()),
    "jpeg": (jpeg, ("ops/mn_jpeg.c", "ops/mn_kernels.c")),
    "envelope": (envelope, tuple(f"{part}/*.c" for part in ENGINE)),
    "costs": (costs, ("schedule/policy_locality.c",)),
}


def build(folder: Path, name: str, compiler: str, *more: str) -> Path:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    if name == "jpeg" and "MN_FUZZ_JPEG" not in ENVIRONMENT:
        pytest.skip("there is no libjpeg-turbo")
    parts = TARGETS[name][1]
    sources = [str(path) for part in parts for path in sorted(CSRC.glob(part))]
    program = folder / f"{name}-{compiler}"
    done = subprocess.run(
        [compiler, *FLAGS, *more, str(HERE / f"mn_fuzz_{name}.c"), *sources, "-lm", "-ldl",
         "-o", str(program)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "san" in done.stderr and "cannot find" in done.stderr:
        pytest.skip(f"{compiler} has no sanitizers here")
    if "clang_rt.fuzzer" in done.stderr:
        pytest.skip("clang is not installed with libFuzzer")
    assert done.returncode == 0, done.stderr
    return program


def seeds(folder: Path, name: str) -> list[str]:
    kept = folder / "seeds"
    kept.mkdir()
    for number, content in enumerate(TARGETS[name][0]()):
        (kept / f"{number:03}").write_bytes(content)
    return sorted(map(str, kept.iterdir()))


@pytest.mark.parametrize("name", TARGETS)
def test_changed_inputs(name: str, tmp_path: Path) -> None:
    program = build(tmp_path, name, "gcc", "-fsanitize=address,undefined",
                    str(HERE / "mn_fuzz_main.c"))  # fmt: skip
    done = subprocess.run(
        [str(program), str(SEED), str(ROUNDS), *seeds(tmp_path, name)],
        env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"MINATO_TEST_SEED={SEED}\n{done.stderr[-5000:]}"


@pytest.mark.limit(SECONDS * 2 + 120)
@pytest.mark.parametrize("name", mn_fuzz_python.TARGETS)
def test_random_bytes(name: str) -> None:
    rng, rounds, end = random.Random(SEED), 0, time.monotonic() + SECONDS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while rounds < PYTHON_ROUNDS or time.monotonic() < end:
            data = rng.randbytes(rng.randrange(120))
            rounds += 1
            try:
                mn_fuzz_python.TARGETS[name](data)
            except Exception as error:
                raise AssertionError(f"{name}: {data!r}") from error


if SECONDS:

    @pytest.mark.limit(SECONDS * 2 + 120)
    @pytest.mark.parametrize("name", mn_fuzz_python.TARGETS)
    def test_bytes_that_cover_more(name: str) -> None:
        if importlib.util.find_spec("atheris") is None:
            pytest.skip("atheris is not installed")
        found = HERE.parents[1] / "build" / "fuzz" / name
        found.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [sys.executable, mn_fuzz_python.__file__, name, f"-max_total_time={SECONDS:g}",
             f"-seed={SEED}", "-max_len=200", "-timeout=300", "-rss_limit_mb=0",
             f"-artifact_prefix={found.parent}/{name}-", str(found)],
            env={**os.environ, "PYTHONPATH": search_path()},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]

    @pytest.mark.limit(SECONDS * 2 + 120)
    @pytest.mark.parametrize("name", TARGETS)
    def test_inputs_that_cover_more(name: str, tmp_path: Path) -> None:
        program = build(tmp_path, name, "clang", "-fsanitize=fuzzer,address,undefined")
        seeds(tmp_path, name)
        found = HERE.parents[1] / "build" / "fuzz" / name  # kept for the next time
        found.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [str(program), f"-max_total_time={SECONDS:g}", f"-seed={SEED}", "-max_len=8192",
             f"-artifact_prefix={found.parent}/{name}-", str(found), str(tmp_path / "seeds")],
            env=ENVIRONMENT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-5000:]
