"""The examples run as written, with the data that they make themselves."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked import LIMIT_S, ROOT, Done, Job, run

pytestmark = pytest.mark.limit(LIMIT_S + 20)

EXAMPLES = ROOT / "examples"

#: output of the examples that only need to be started
WORDS = {
    "image_folder": r"epoch 2: loss [\d.]+\n23.png cannot be read: sample \d+ was taken instead",
    "photos": r"epoch 2: loss [\d.]+\nvalidation: \(3, 64, 64\)",
    "audio": r"(\(8, 129, 32\) windows begin at [\d.]+ to [\d.]+ s\n){5}",
    "volumes": r"\(2, 1, 32, 32, 32\)[^\n]+\nepoch 1 was made by native workers",
    "text": r"epoch 1: \d+ tokens, \d+% of padding",
    "video": r"(\(8, 48, 64, 3\) of videos \[[^\n]+\]\n){6}",
    "lightning_fit": "the same weights with and without the interruption: True",
    "accelerate_fit": r"loads with minato\.loader\n(.*\n)+epoch 2",
    "cache": r"first job, epoch 1: 40 samples[^\n]+\n(.*\n)*40 files decoded, 120 found\n"
             r"40 files decoded by the loader, 40 found",
    "webdataset_shards": "40 samples, each once: True",
    "remote": "64 samples from 2 actors; as from local workers: True",
}
#: module that an example needs, where the tests may be without it
NEEDS = {"video": "av", "lightning_fit": "lightning", "accelerate_fit": "accelerate",
         "webdataset_shards": "webdataset", "remote": "ray"}  # fmt: skip
#: these have separate tests
OTHERS = {"ddp.py", "resume.py", "c_operator"}


@pytest.fixture(scope="module")
def done(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Done]:
    """The examples whose tests are run."""
    of_run = {item.name for item in request.session.items}
    names = [n for n in WORDS if f"test_example_runs[{n}]" in of_run and (
        n not in NEEDS or importlib.util.find_spec(NEEDS[n]) is not None)]  # fmt: skip
    jobs = [Job(str(EXAMPLES / f"{name}.py")) for name in names]
    return dict(zip(names, run(jobs, tmp_path_factory.mktemp("examples"))))


@pytest.mark.parametrize("name", WORDS)
def test_example_runs(name: str, done: dict[str, Done]) -> None:
    if name not in done:
        pytest.importorskip(NEEDS[name], exc_type=ImportError)
    ended = done[name]
    assert ended.status == 0, ended.errors
    assert re.search(WORDS[name], ended.outputs[0]), ended.outputs[0]
    assert "Traceback" not in ended.errors, ended.errors


def test_all_examples_are_tested() -> None:
    there = {path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__"}
    assert there == {f"{name}.py" for name in WORDS} | OTHERS


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def test_two_processes(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         str(EXAMPLES / "ddp.py")],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("32 samples a rank, each sample once: True") == 2, ended.stdout


def test_an_operator_in_c(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    folder = shutil.copytree(EXAMPLES / "c_operator", tmp_path / "c_operator")
    for command in (["setup.py", "-q", "build_ext", "--inplace"], ["use.py"]):
        ended = subprocess.run([sys.executable, *command], cwd=folder, env=environment(),
                               capture_output=True, text=True, timeout=100)  # fmt: skip
        assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("(2, 1, 16, 16, 16) nothing is left between 0 and 0.5") == 2


def resume(checkpoint: Path, stop_after: int | None) -> tuple[list[str], str]:
    """Lines of batches, and the last line; Ctrl-C goes to the whole group, as from a terminal."""
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "resume.py"), str(checkpoint)], env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    if stop_after is not None:
        lines = [process.stdout.readline() for _ in range(stop_after)]
        os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=100)
    lines += rest.splitlines(keepends=True)
    assert process.returncode == (stop_after is not None), lines
    return [line.strip() for line in lines[:-1]], lines[-1]


def test_resume_example_continues_after_ctrl_c(tmp_path: Path) -> None:
    whole, end = resume(tmp_path / "whole", None)
    first, told = resume(tmp_path / "part", 5)
    assert "stopped; run it again" in told and len(first) < len(whole)
    assert (tmp_path / "part").exists()
    rest, end_of_rest = resume(tmp_path / "part", None)
    assert (first + rest, end_of_rest) == (whole, end)
    assert os.listdir(tmp_path) == []
