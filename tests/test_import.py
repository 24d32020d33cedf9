"""What ``import minato`` gives, and what it leaves for later."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import minato

LATE = """
import sys, minato
late = ("minato.ops", "minato.integrations", "minato.integrations.accelerate", "minato.integrations.ray")
assert not set(late) & set(sys.modules)
assert {"ops", "integrations", "DataLoader"} <= set(dir(minato))
assert minato.ops.Pipeline and minato.integrations.accelerate.install
assert minato.integrations.ray.install and set(late) <= set(sys.modules)
"""


def test_submodules_are_imported_when_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", [minato, minato.integrations], ids=["minato", "integrations"])
def test_unknown_names_raise_attribute_error(module: object) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018


@pytest.mark.parametrize("problem", [
    "raise ImportError('libcublas.so.12: cannot open shared object file')",
    "import a_module_that_torch_needs",
])
def test_error_of_broken_torch_is_not_hidden(problem: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(problem)
    for command in (["-c", "import minato"], ["-m", "minato", "info"]):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60,
                              env={**os.environ, "PYTHONPATH": str(tmp_path)})
        assert done.returncode == 1
        assert problem in done.stderr and "not installed" not in done.stderr
