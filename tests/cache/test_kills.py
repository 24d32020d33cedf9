"""Some random kills; `python tests/cache/kills.py` makes five hundred."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .support import Memory, environment


@pytest.mark.limit(300)
@pytest.mark.parametrize("place", ["memory", "directory"])
def test_killed_processes_cost_no_sample_and_no_byte(
    place: str, memory: Memory, tmp_path: Path
) -> None:
    kills = str(int(10 + 10 * float(os.environ.get("MINATO_STRESS_SECONDS") or 0)))
    seed = os.environ.get("MINATO_TEST_SEED", "1")
    more = ["--directory", str(tmp_path / "kept")] if place == "directory" else []
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("kills.py")), "--kills", kills, "--seed", seed,
         *more],
        env=environment(**memory.environment), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"seed {seed}" in done.stdout and "'worker'" in done.stdout
