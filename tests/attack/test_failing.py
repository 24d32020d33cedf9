"""Every allocation and every call of the system or of Python's interface fails once.

Short runs take a sample of the call sites, drawn by MINATO_TEST_SEED; `make stress` takes
all of them, and several calls of each. failing.py runs them and defines what is expected.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from .support import SECONDS, SEED, environment

HERE = Path(__file__).resolve().parent
LONG = SECONDS >= 30
#: calls per site; one in this many of a program's sites
OF_EACH, EVERY = (3, 1) if LONG else (1, 20)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    if platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("tables of other machines are not known here")
    built = tmp_path_factory.mktemp("failing") / "failing.so"
    done = subprocess.run(
        ["gcc", "-std=c11", "-O1", "-Wall", "-Wextra", "-fPIC", "-shared", "-o", str(built),
         "-isystem", sysconfig.get_path("include"), str(HERE / "failing.c")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return built


@pytest.mark.limit(7200 if LONG else 300)
def test_every_call_fails_once(library: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "failing.py"), str(library), str(tmp_path),
         str(OF_EACH), str(EVERY), str(SEED)],
        capture_output=True, text=True, check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["findings"] == [], "\n\n".join("\n".join(each) for each in told["findings"])
    assert told["sites"] > 200 and told["tries"] > 10, told
    # where a call comes in another order, or not at all, nothing fails
    assert told["fired"] > told["tries"] * 3 // 4, told
