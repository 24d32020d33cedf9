"""What the README says can be tried: its program runs, and it has all options."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

import minato

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()


def program() -> str:
    [text] = [t for t in re.findall(r"```python\n(.*?)```", TEXT, re.S) if "__main__" in t]
    # one epoch of its sleeps takes seconds, and has nothing to do with whether it runs
    assert text.count("0.2 if") == text.count("else 0.005") == 1
    return text.replace("0.2 if", "0.0 if").replace("else 0.005", "else 0.0")


def run(*arguments: str, text: str) -> list[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments], input=text, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    return re.findall(r"epoch \d: \d+\.\d s", done.stdout)


def test_the_program_runs_from_a_file_and_at_the_prompt(tmp_path: Path) -> None:
    file = tmp_path / "first.py"
    file.write_text(program())
    for shown in (run(str(file), text=""), run("-i", text=program() + "\n")):
        assert [line[:7] for line in shown] == ["epoch 0", "epoch 1"]


def test_the_table_has_every_option_with_its_default() -> None:
    """Of minato's own; in the rows of the section on options."""
    section = TEXT[TEXT.index("## Options") : TEXT.index("## Measured")]
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section, re.M))
    own, torchs = (inspect.signature(cls.__init__).parameters for cls in (
        minato.DataLoader, torch.utils.data.DataLoader))
    assert {name: ast.literal_eval(text) for name, text in rows.items()} == {
        name: found.default for name, found in own.items() if name not in torchs}
