"""Programs of other environments, launchers and libraries, and what threads wait for."""

from __future__ import annotations

import importlib.util
import shlex
import site
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .support import SLEEPS, analyzed, program, study

pytestmark = pytest.mark.limit(240)


# ---- another environment ---------------------------------------------------------------------


def python_without_minato(folder: Path) -> Path:
    """The interpreter of an environment that has what this one has, but for minato."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [packages] = (folder / "lib").glob("python*/site-packages")
    for path in map(Path, dict.fromkeys([*sys.path, *site.getsitepackages()])):
        if path.name not in ("site-packages", "dist-packages"):
            continue
        for part in path.iterdir():
            mine = "minato" in part.name or part.suffix == ".pth"
            if not mine and not (packages / part.name).exists():
                (packages / part.name).symlink_to(part)
    return folder / "bin" / "python"


#: As conda's: sets variables, and runs a script of its own with the program's output in a pipe.
CONDA = """#!/bin/bash
test "$1 $2" = "run -n" || exit 90
name=$3; shift 3
export CONDA_PREFIX={folder}/$name CONDA_DEFAULT_ENV=$name PATH={folder}/$name/bin:$PATH
script=$(mktemp {folder}/script-XXXX)
printf '%q ' "$@" > "$script"
bash "$script" | cat
status=${{PIPESTATUS[0]}}
rm "$script"
exit $status
"""


def run_by_conda(folder: Path, text: str) -> Any:
    python_without_minato(folder / "train")
    conda = folder / "conda"
    conda.write_text(CONDA.format(folder=shlex.quote(str(folder))))
    conda.chmod(0o755)
    program(folder, text)
    return analyzed(
        folder, "--anyway", "--budget", "3s", "--", conda, "run", "-n", "train", "python", "train.py",
        PYTHONPATH="",
    )  # fmt: skip


def test_an_environment_without_minato_is_studied(tmp_path: Path) -> None:
    done = run_by_conda(tmp_path, SLEEPS + """
import importlib.util, os, sys
print(importlib.util.find_spec("minato"), os.environ["CONDA_DEFAULT_ENV"], sys.prefix)
main()
sys.exit(3)
""")  # fmt: skip
    assert done.returncode == 3, done.stderr
    first, limit, *rest = done.stdout.splitlines()
    assert first == f"None train {tmp_path / 'train'}"
    assert limit.startswith("Limit: ") and any("samples/s without a step" in line for line in rest)


OTHER = """
import sys
class Other:
    @staticmethod
    def find_spec(name, *_):
        if name == "minato":
            raise ImportError("built for 3.99")
sys.meta_path.insert(0, Other)
"""


def test_package_that_does_not_fit_is_named(tmp_path: Path) -> None:
    """As one that was built for another version of Python."""
    done, found = study(tmp_path, OTHER + SLEEPS + "main()")
    assert done.returncode == 0 and found["watched"]["batches"] == 18
    assert "no minato, and this one does not fit it (ImportError: built for 3.99)" in done.stdout


def test_accelerates_launcher_is_followed(tmp_path: Path) -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.importorskip("accelerate", exc_type=ImportError)
    program(tmp_path, SLEEPS + """
import accelerate
loader = accelerate.Accelerator(cpu=True).prepare(DataLoader(Samples(), 4, shuffle=True))
for _ in range(8):
    for batch in loader:
        time.sleep(0.001)
""")  # fmt: skip
    done = analyzed(
        tmp_path, "--anyway", "--budget", "3s", "--", sys.executable, "-m",
        "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1",
        "--mixed_precision", "no", "--dynamo_backend", "no", "train.py",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("Limit: ")
    assert "note: only" not in done.stdout and "other loaders" not in done.stdout
