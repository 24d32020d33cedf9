"""The files that the Makefile's targets run exist, and match their names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import skips

ROOT = Path(__file__).resolve().parents[1]
TESTS = "".join(path.read_text() for path in (ROOT / "tests").rglob("*") if path.suffix in (
    ".py", ".h", ".c"))


def outside_make() -> dict[str, str]:
    """This environment, for a make that says nothing of one by which these tests are run."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return {name: value for name, value in own.items() if name != "MFLAGS"}


def commands(target: str) -> str:
    """The commands of a target, without running them."""
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    done = subprocess.run(
        ["make", "-n", target, "SEED=7"], cwd=ROOT, env=outside_make(),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.replace("\\\n", " ")


@pytest.mark.parametrize("target", ["test", "train", "gpu", "bench", "stress", "soak", "sanitize",
                                     "installed", "torches", "aarch64", "nightly"])  # fmt: skip
def test_files_run_by_targets_exist(target: str) -> None:
    text = commands(target)
    named = set(re.findall(r"(?:tests|benchmarks)/[\w./]+", text))
    assert [name for name in named if not (ROOT / name).exists()] == []
    modules = re.findall(r"-m (unet3d[.\w]+)", text)
    assert all((ROOT / (name.replace(".", "/") + end)).exists() for name in modules
               for end in (["/__main__.py"] if name == "unet3d.bench.gpu" else [".py"]))
    told = set(re.findall(r"(MINATO_(?!WERROR|SANITIZE)\w+)=", text))
    assert [name for name in told if name not in TESTS] == []


def test_nightly_runs_cover_skipped_tests() -> None:
    text = commands("nightly")
    assert "MINATO_TEST_MUTANTS=1" in text and "MINATO_TEST_SEED=7" in text
    fuzz = re.search(r"MINATO_FUZZ_SECONDS=(\d+) .*--hypothesis-seed=7 .*differential", text)
    assert fuzz is not None and int(fuzz[1]) >= 120
    assert re.search(r"benchmarks/resume.py .*--seed 7\b", text)
    exits = re.search(r"MINATO_STRESS_SECONDS=(\d+) .*tests/attack", text)
    assert exits is not None and int(exits[1]) >= 30
    assert re.search(r"MINATO_STRESS_SECONDS=120 .*test_soak", text)
    assert "MINATO_TEST_LOADERS=torch " in text
    assert "-m unet3d.bench.compare" in commands("train") and "--step-ms" in commands("train")


def test_gpu_comparison_has_a_budget() -> None:
    assert re.search(r"-m unet3d.bench.gpu --budget 12m$", commands("gpu"), re.M)


def test_a_wheel_holds_nothing_of_an_earlier_build() -> None:
    """Setuptools would include everything in build/, whatever put it there."""
    before_the_wheel, _, _ = commands("wheels").partition(" --wheel ")
    assert re.search(r"^rm -rf .*\bbuild\b", before_the_wheel, re.M)


def test_make_test_includes_common_libraries(tmp_path: Path) -> None:
    """If they are not available, that is printed, and the run continues."""
    assert "fits" in commands("test")
    makefile = (ROOT / "Makefile").read_text()
    names = {name: re.findall(r"^%s \?= ((?:.*\\\n)*.*)" % name, makefile, re.M)[0]
             for name in ("MOST_USED", "LIBRARIES")}  # fmt: skip
    used = re.findall(r"([\w-]+)==", names["MOST_USED"])
    assert len(used) == 5 and set(used) <= set(names["LIBRARIES"].split())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(
        f'#!/bin/sh\ntest "$1 $2" != "-m pip" && exec "{sys.executable}" "$@"\n'
    )
    (tmp_path / "bin" / "python").chmod(0o755)
    (tmp_path / ".ready").touch()
    done = subprocess.run(
        ["make", "-o", "build", "fits", f"VENV={tmp_path}", f"MOST_USED_VENV={tmp_path / 'used'}",
         f"PYTHON={sys.executable}"],
        cwd=ROOT, env=outside_make(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("left out, do not install: lightning")


def test_libraries_of_optional_tests_are_installed() -> None:
    """In a separate environment, since some need other versions than the tests do."""
    text = commands("nightly")
    assert ".venv-libraries/bin/python -m pytest -q -rs tests/integrations" in text
    installed = {name.split("[")[0].lower() for name in re.findall(r"[\w\[\]-]+", text)}
    packages = {
        "composer": "mosaicml", "prometheus_client": "prometheus-client", "ignite": "pytorch-ignite", "streaming": "mosaicml-streaming",
    }  # fmt: skip
    missing = {packages.get(name, name.lower()) for name in skips.LIBRARIES.split("|")}
    assert missing - installed == set()
    named = re.findall(
        r"importorskip\(\s*\"(\w+)", "".join(p.read_text() for p in (
            ROOT / "tests" / "integrations").glob("*.py")))
    assert set(named) <= {*skips.LIBRARIES.split("|"), "webdataset"}


def test_ci_runs_in_folder_called_minato(tmp_path: Path) -> None:
    """It removes the folder, and ends with make's last line and exit code."""
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    temporary, clone = tmp_path / "temporary", tmp_path / "größer als"
    temporary.mkdir()
    shutil.copytree(ROOT / ".ci", clone / ".ci")
    (clone / "Makefile").write_text("test:\n\t@pwd; echo $$CI; cat here; exit 3\n")
    (clone / "here").write_text("1 failed\n")
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", "-C", str(clone)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "--no-gpg-sign", "-m", "All"]):
        subprocess.run([*git, *command], check=True)
    done = subprocess.run(
        [clone / ".ci" / "run"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        env={**outside_make(), "TMPDIR": str(temporary)}, cwd=tmp_path,
    )  # fmt: skip
    where, *rest = done.stdout.splitlines()
    assert done.returncode == 2 and rest == ["true", "1 failed"], done.stderr
    assert Path(where).name == "minato" and Path(where).parents[1] == temporary
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("target", ["test", "fits", "wheels", "installed", "docs", "pinned"])
def test_no_command_depends_on_the_folders_name(target: str) -> None:
    """A script's first line cannot name an interpreter in a folder whose name has spaces."""
    text = commands(target)
    assert not re.search(r"bin/(?!python\b)\w", text)
    bare = re.search(rf"(?<![\"'/\w]){re.escape(str(ROOT))}", text)
    assert bare is None, "an absolute path without quotation marks"
