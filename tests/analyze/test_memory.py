"""Datasets that fill most of the memory, in a group of processes with a small limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from control_groups import group, set_limit  # noqa: F401

from minato import _core
from minato.analyze import command, keeper

from .support import ROOT, environment
from .support import command as line

pytestmark = pytest.mark.limit(240)

LIMIT = 1500 << 20
PROGRAM = ROOT / "benchmarks" / "analyze" / "memory.py"


def test_copy_ends_when_a_quarter_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was available when the copy was made."""
    analysis = command.Analysis(Namespace(pause=False), [])
    for free in (1000, 300, 249):
        assert not analysis.unstudied
        monkeypatch.setattr(_core, "machine", lambda free=free: {"memory_available": free << 20})
        analysis._look_at_memory()
    analysis.listener.close()
    assert "261 MB of memory were left" in analysis.unstudied


def test_control_groups_count_as_memory(group: Path) -> None:
    """A container's limit, not the machine's memory, is what a study may take a quarter of."""
    set_limit(group, LIMIT)
    text = "from minato import _core; print(_core.machine()['memory_available'])"
    done = inside(group, [sys.executable, "-c", text])
    assert int(done.stdout) <= LIMIT < _core.machine()['memory_available']


def inside(group: Path, whole: list[str], folder: Path = ROOT) -> Any:
    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    return subprocess.run(whole, cwd=folder, preexec_fn=enter, env=environment(), text=True,
                          capture_output=True, timeout=200)  # fmt: skip


def kills(group: Path) -> int:
    for name in ("memory.events", "memory.oom_control"):
        if (group / name).exists():
            words = dict(row.split() for row in (group / name).read_text().splitlines())
            return int(words["oom_kill"])
    return 0


@pytest.mark.parametrize("program, option, studied", [
    ([], [], True),
    (["--objects", "--touch"], [], False),
    (["--objects"], ["--pause"], True),
])  # fmt: skip
def test_large_dataset_keeper_dies_before_program(
    program: list[str], option: list[str], studied: bool, group: Path, tmp_path: Path
) -> None:
    """The program ends as without a watch. Where it copies the pages that it shares, the copy of
    it gives way; --pause studies before that."""
    set_limit(group, LIMIT)
    whole = line("--anyway", "--budget", "5s", *option, "--", sys.executable, PROGRAM, "60", *program)
    done = inside(group, whole, tmp_path)
    assert done.returncode == 0, done.stderr
    assert kills(group) == 0, done.stdout
    [said] = [text for text in done.stdout.splitlines() if "checksum" in text]
    texts = int(said.split()[0])
    assert texts * 1000 > 0.35 * LIMIT
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    assert found["loader"]["samples"] == texts and found["watched"]["steps"] >= 20
    if studied:
        assert found["work"]["costs"] and found["rates"], done.stdout
    else:
        assert found["work"] is None and "its copy was ended" in done.stdout
