"""Some random kills; `python tests/cache/kills.py` makes five hundred."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .support import Memory, environment


@pytest.mark.limit(300)
def test_killed_processes_cost_no_sample_and_no_byte(memory: Memory) -> None:
    kills = str(int(10 + 10 * float(os.environ.get("MINATO_STRESS_SECONDS") or 0)))
    seed = os.environ.get("MINATO_TEST_SEED", "1")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("kills.py")), "--kills", kills, "--seed", seed],
        env=environment(**memory.environment), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"seed {seed}" in done.stdout and "'worker'" in done.stdout
