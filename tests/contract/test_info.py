"""``python -m minato info``: reports what was built and found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .support import HOME, Kind, search_path


def _minato(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "minato", *arguments], cwd=HOME, text=True, timeout=100,
        capture_output=True, env={**os.environ, "PYTHONPATH": search_path()},
    )


@pytest.fixture(autouse=True)
def once(own: Kind) -> None:
    """The command knows no loader kinds; one of them is enough."""
    if own.name != "minato":
        pytest.skip("the same for every kind of loader")


def test_info_prints_versions() -> None:
    import torch

    import minato

    done = _minato("info")
    assert (done.returncode, done.stderr) == (0, "")
    assert minato.__version__ in done.stdout
    assert torch.__version__ in done.stdout
    assert len(done.stdout.splitlines()) > 3


def test_unknown_command() -> None:
    done = _minato("frobnicate")
    assert done.returncode != 0
    assert "info" in done.stderr and "Traceback" not in done.stderr


def test_installed_command_names_commands() -> None:
    command = Path(sys.executable).with_name("minato")
    if not command.exists():
        pytest.skip("not installed; the module is tested above")
    done = subprocess.run([command, "--help"], text=True, timeout=100, capture_output=True)
    assert done.returncode == 0 and "info" in done.stdout
