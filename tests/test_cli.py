"""The command line: ``minato``, ``python -m minato``, with torch and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import minato
from minato.__main__ import COMMANDS, main
from minato.commands import info as _info

ROOT = Path(__file__).resolve().parents[1]

#: a sitecustomize.py that hides torch
NO_TORCH = "import sys\nsys.modules['torch'] = None\n"


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("command", ["info", "top"])
def test_closed_output_pipe_exits_without_error(command: str) -> None:
    """Like ``minato top PID | head -1``."""
    reads, writes = os.pipe()
    os.close(reads)
    loader = minato.DataLoader(torch.arange(8), num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    rest = [str(os.getpid()), "--interval", "0.01"] if command == "top" else []
    try:
        done = subprocess.run(
            [sys.executable, "-m", "minato", command, *rest], cwd=ROOT, stdout=writes,
            stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=120,
        )  # fmt: skip
    finally:
        os.close(writes)
    assert done.returncode == 1 and "Traceback" not in done.stderr


@pytest.fixture
def without_torch(tmp_path: Path) -> str:
    (tmp_path / "sitecustomize.py").write_text(NO_TORCH)
    return str(tmp_path)


def test_info_lists_versions_and_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    page = capsys.readouterr().out
    for text in (minato.__version__, torch.__version__, minato._core.compiler, "/dev/shm"):
        assert text in page
    assert "unknown" not in page and "Error" not in page


def test_info_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"versions", "build", "methods", "machine"}
    assert found["build"]["engine"] == "built"
    usable = minato._core.machine()["cpus"]
    assert found["machine"]["CPUs"].startswith(f"{usable} usable")


def test_info_shows_how_generators_are_seeded() -> None:
    from minato.seeding.generator_states import plan_all, ways

    for name, way in ways(plan_all()).items():
        assert f"{name} {_info.WAYS[way]}" in _info.methods()["generators are seeded"]


def test_info_shows_how_tensors_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _info.methods()["tensors are made by"] == "DLPack C exchange"
    from minato.transport import torch_bridge as _torch_bridge

    monkeypatch.setattr(_torch_bridge, "bind", lambda: False)
    assert "frombuffer" in _info.methods()["tensors are made by"]


def test_one_missing_fact_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "statvfs", broken)
    found = _info.machine()
    assert found["/dev/shm"] == "unknown (FileNotFoundError: /dev/shm)"
    assert "usable" in found["CPUs"]


def test_info_distinguishes_broken_and_missing_extension(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str) -> None:
        raise ImportError("made for another torch")

    assert _info._built("_nothing", "absent") == "absent"
    monkeypatch.setattr(_info, "extension", refuse)
    assert _info._built("_torch", "absent") == "built, but does not load: made for another torch"


def test_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frobnicate"]) == 2
    error = capsys.readouterr().err
    assert "frobnicate" in error and all(name in error for name in COMMANDS)


def test_no_command_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    error = capsys.readouterr().err
    assert "usage: minato" in error and all(name in error for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"minato {minato.__version__}\n"


def test_module_runs() -> None:
    done = run("-m", "minato", "info", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["versions"]["minato"] == minato.__version__


def test_info_without_torch(without_torch: str) -> None:
    done = run("minato_command.py", "info", "--json", PYTHONPATH=without_torch)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "pip install torch" in found["versions"]["torch"]
    assert found["build"]["engine"] == "built" and "usable" in found["machine"]["CPUs"]


@pytest.mark.parametrize("command", [["minato_command.py"], ["-m", "minato", "info"]])
def test_without_torch_a_sentence_and_no_traceback(
    command: list[str], without_torch: str
) -> None:
    done = run(*command, PYTHONPATH=without_torch)
    assert done.returncode == 1
    assert "minato needs PyTorch" in done.stderr and "pip install torch" in done.stderr
    assert "Traceback" not in done.stderr
