"""The README fits its reader: short, its program runs, its links lead somewhere, and the page on options
has all of them."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from contract.support import programs

import minato

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
OPTIONS = (ROOT / "docs" / "options.md").read_text()


def program() -> str:
    [text] = [t for t in re.findall(r"```python\n(.*?)```", TEXT, re.S) if "__main__" in t]
    # one epoch of its sleeps takes seconds, and has nothing to do with whether it runs
    assert text.count("0.2 if") == text.count("else 0.005") == 1
    return text.replace("0.2 if", "0.0 if").replace("else 0.005", "else 0.0")




def test_readme_program_runs_in_file_and_prompt(tmp_path: Path) -> None:
    file = tmp_path / "first.py"
    file.write_text(program())
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    more = {**os.environ, "PYTHONPATH": path}
    for done in (
        programs().open(str(file), environment=more).to_end(120),
        subprocess.run([sys.executable, "-W", "ignore", "-i"], input=program() + "\n",
                       capture_output=True, text=True, env=more, timeout=120),
    ):  # fmt: skip
        assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
        shown = re.findall(r"epoch \d: \d+\.\d s", done.stdout)
        assert [line[:7] for line in shown] == ["epoch 0", "epoch 1"]


def test_the_table_has_every_option_with_its_default() -> None:
    """Of minato's own, in docs/options.md."""
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", OPTIONS, re.M))
    own, torchs = (inspect.signature(cls.__init__).parameters for cls in (
        minato.DataLoader, torch.utils.data.DataLoader))
    assert {name: ast.literal_eval(text) for name, text in rows.items()} == {
        name: found.default for name, found in own.items() if name not in torchs}


def test_readme_is_short_and_starts_with_the_essentials() -> None:
    lines = TEXT.splitlines()
    assert len(lines) <= 150
    screen = "\n".join(lines[:40])
    for essential in ("+from minato import DataLoader", "pip install", ".svg", "times bound",
                      "does not help", "What changes", "Status"):  # fmt: skip
        assert essential in screen, essential


def test_links_of_the_readme_lead_somewhere() -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", TEXT)
    assert len(targets) > 15
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_commands_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)`", TEXT):
        assert re.search(rf"^{target}:", makefile, re.M), target
    for command in re.findall(r"`minato (\w+)[^`]*`", TEXT):
        assert f'"{command}"' in (ROOT / "minato" / "__main__.py").read_text(), command
    for program in re.findall(r"python (\S+\.py)", TEXT):
        assert (ROOT / program).exists(), program
