"""IPython, which is what runs a notebook's cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import printed

CELLS = """
from IPython.core.interactiveshell import InteractiveShell
from tests.test_habits import SETUP, Stuck, ended, interrupt_when_waiting
from minato import DataLoader

data = Stuck()
shell = InteractiveShell.instance()
shell.history_manager.enabled = False
shell.push({"loader": DataLoader(data, 4, num_workers=2), "before_next": interrupt_when_waiting})
assert shell.run_cell(SETUP).success
assert isinstance(shell.run_cell("train()").error_in_exec, KeyboardInterrupt)
data.let_go()
print(ended(), shell.user_ns["seen"])
assert shell.run_cell("before_next = None").success
assert shell.run_cell("train()").success
print(ended(), shell.user_ns["seen"])
"""


def test_an_interrupted_cell_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("IPython", exc_type=ImportError)
    lines = printed(CELLS, IPYTHONDIR=str(tmp_path)).splitlines()
    lines = [line for line in lines if line.startswith(("True", "False"))]
    assert lines == ["True 2", "True 10"]
