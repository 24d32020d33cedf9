"""csrc/ops under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, and built for
another processor, in an emulator.

`make stress` and `make sanitize` set MINATO_STRESS_SECONDS for longer runs; a failure
prints the seed that repeats it.
"""
from __future__ import annotations

import os
import platform
import shutil
import subprocess

import pytest

from .conftest import ROOT, STRESS

DRIVER = ROOT / "tests" / "ops" / "c" / "mn_ops_drive.c"
FLAGS = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-pthread",
         "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]


def build(folder, kind: str, *compilers: str) -> str:
    compiler = next(filter(None, map(shutil.which, compilers or ("gcc", "cc", "clang"))), None)
    if compiler is None:
        pytest.skip(f"{compilers[0]} is not installed" if compilers else "no C compiler")
    target = folder / f"drive_{len(os.listdir(folder))}"
    sources = sorted(str(path) for path in (ROOT / "csrc" / "ops").glob("*.c"))
    command = [compiler, *FLAGS, kind, f"-I{ROOT / 'csrc'}",
               f"-I{ROOT / 'minato/include'}", str(DRIVER), *sources, "-lm", "-o", str(target)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip(f"this compiler has no {kind}")
    assert built.returncode == 0, built.stderr
    return str(target)


def plain_layout() -> list[str]:
    """ThreadSanitizer of older compilers needs an address space without randomness."""
    prefix = ["setarch", platform.machine(), "-R"]
    try:
        works = subprocess.run([*prefix, "true"], capture_output=True, timeout=60).returncode == 0
    except OSError:
        works = False
    return prefix if works else []


def drive(program: str, mode: str, folder, *emulator: str) -> str:
    """The program's output."""
    seed = os.environ["MINATO_TEST_SEED"]  # tests/conftest.py sees to that
    prefix = emulator or plain_layout()
    command = [*prefix, program, mode, seed, str(STRESS), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=STRESS * 3 + 300,
                          env={**os.environ, "ASAN_OPTIONS": "allocator_may_return_null=1"})
    assert done.returncode == 0, f"MINATO_TEST_SEED={seed}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    return build(tmp_path_factory.mktemp("asan"), "-fsanitize=address,undefined")


@pytest.fixture(scope="module")
def thread(tmp_path_factory):
    return build(tmp_path_factory.mktemp("tsan"), "-fsanitize=thread")


@pytest.mark.parametrize("mode", ["random", "kernels", "threads", "mapped"])
def test_fuzz_asan(address, mode, tmp_path):
    drive(address, mode, tmp_path)


@pytest.mark.parametrize("mode", ["threads", "mapped"])
def test_threads_tsan(thread, mode, tmp_path):
    drive(thread, mode, tmp_path)


def test_another_processor_makes_the_same_bytes(address, tmp_path):
    """Each of its instruction sets, and it and this one."""
    program = build(tmp_path, "-static", "aarch64-linux-gnu-gcc")
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None:
        pytest.skip("qemu-aarch64 is not installed")
    told = drive(program, "kernels", tmp_path, emulator)
    assert told.split()[0] == drive(address, "kernels", tmp_path).split()[0]
    assert told.split(" of ")[1].startswith("2 sets, the best neon")
    drive(program, "random", tmp_path, emulator)
