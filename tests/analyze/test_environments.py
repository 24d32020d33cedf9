"""Programs of other environments, launchers and libraries, and what threads wait for."""

from __future__ import annotations

import importlib.util
import shlex
import site
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Sampler

from minato.analyze import facts, records, work

from .support import SLEEPS, analyzed, benchmark, program, study

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
    """The program fails after its batches, which is reported."""
    done = run_by_conda(tmp_path, SLEEPS + """
import importlib.util, os, sys
print(importlib.util.find_spec("minato"), os.environ["CONDA_DEFAULT_ENV"], sys.prefix)
main()
raise LookupError("mine")
""")  # fmt: skip
    assert done.returncode == 1 and "LookupError: mine" in done.stderr
    assert "the program ended with status 1" in done.stdout
    first, limit, *rest = done.stdout.splitlines()
    assert first == f"None train {tmp_path / 'train'}"
    assert limit.startswith("Limit: ") and any("loaders alone" in line for line in rest)


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
    assert "cannot be used there (ImportError: built for 3.99)" in done.stdout


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


# ---- loaders that do not call torch's __init__ -------------------------------------------------

#: As torchdata's, in what a watch can notice: all is its own but the type.
STATEFUL = """
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter
class StatefulDataLoader(DataLoader):
    def __init__(self, dataset, batch_size=1, num_workers=0):
        inner = DataLoader(dataset, batch_size, num_workers=num_workers)
        vars(self).update(vars(inner))
        vars(self).pop("in_order", None)
    def __iter__(self):
        self.iterator = self._get_iterator()
        return self.iterator
    def _get_iterator(self):
        return StatefulIterator(self)
    def state_dict(self):
        return {"given": self.iterator.given}
class StatefulIterator(_SingleProcessDataLoaderIter):
    given = 0
    def __next__(self):
        self.given += 1
        return super().__next__()
"""


@pytest.mark.parametrize("kind", ["alike", "torchdata"])
def test_stateful_loader_is_studied_at_its_line(kind: str, tmp_path: Path) -> None:
    """Its constructor's line is known, though it calls no other constructor."""
    given = STATEFUL
    if kind == "torchdata":
        pytest.importorskip("torchdata.stateful_dataloader", exc_type=ImportError)
        given = "from torchdata.stateful_dataloader import StatefulDataLoader\n"
    file = program(tmp_path, SLEEPS + given + """
loader = StatefulDataLoader(Samples(), batch_size=4)
for _ in range(8):
    for batch in loader:
        time.sleep(0.001)
    state = loader.state_dict()
assert state
""")  # fmt: skip
    line = file.read_text().splitlines().index("loader = StatefulDataLoader(Samples(), batch_size=4)") + 1
    done, found = study(tmp_path, file.read_text())
    assert done.returncode == 0, done.stderr
    assert found["place"] == [str(file), line, "<module>"]
    assert found["loader"]["class"].endswith("StatefulDataLoader")
    assert found["watched"]["steps"] >= 20 and found["work"]["costs"] and found["rates"]
    kinds = {(rate["loader"], rate["workers"]) for rate in found["rates"]}
    assert {("torch", 0), ("torch", 1)} <= kinds


# ---- threads ------------------------------------------------------------------------------------

THREADS = """
import threading, time, torch
from minato import DataLoader
from torch.utils.data import Dataset

class Samples(Dataset):
    def __init__(self):
        self.tables = threading.Lock()
    def __len__(self):
        return 256
    def __getitem__(self, index):
        {sample}
        return torch.tensor(index)

for _ in range(2):
    for batch in DataLoader(Samples(), 4, num_workers=2, worker_type="thread"):
        pass
"""


def test_threads_that_share_a_lock_are_named(tmp_path: Path) -> None:
    sample = "with self.tables: time.sleep(0.01)"
    done, found = study(tmp_path, THREADS.format(sample=sample), "--budget", "12s")
    assert found["limit"]["kind"] == "lock", done.stdout
    assert "dataset.tables" in found["limit"]["line"] and "2 processes" in found["limit"]["line"]
    rates = {(rate["loader"], rate["workers"]) for rate in found["rates"]}
    assert ("minato", 2) in rates  # its own loader runs in the study, with threads
    [change] = [one for one in found["helps"] if "worker_type" in one["paste"]]
    assert change["paste"] == 'worker_type="process"' and change["gain"] > 1.2
    made = facts.Facts(records.parse(records.Report, found)).at_once()
    assert made is not None and made["processes"] > 1.4 * made["threads"]


def test_a_sample_that_threads_cannot_make_is_left_out(tmp_path: Path) -> None:
    """It ends the process, and what processes have measured stays."""
    sample = "threading.current_thread() is threading.main_thread() or os._exit(9)"
    text = THREADS.replace('worker_type="thread"', "").replace("import threading", "import os, threading")
    done, found = study(tmp_path, text.format(sample=sample))
    assert done.returncode == 0, done.stderr
    assert found["contend"]["threads"] is None and found["contend"]["several"]["samples"]


class InOneThread(Sampler[int]):
    """A sampler with state that threads must not share."""

    def __iter__(self) -> Iterator[int]:
        assert threading.current_thread() is threading.main_thread()
        return iter(range(8))

    def __len__(self) -> int:
        return 8


def test_threads_of_a_study_share_no_sampler() -> None:
    loader: DataLoader[int] = DataLoader(list(range(8)), 2, sampler=InOneThread())  # type: ignore[arg-type]
    found = work._compare_threads(loader, 2, 0.01)
    assert found is not None and found.several.samples >= 2


# ---- a step that the program does not wait for -------------------------------------------------


def test_ceiling_of_a_queued_step_is_found(tmp_path: Path) -> None:
    queued = benchmark("queued")
    text = Path(queued.__file__).read_text()
    done, found = study(tmp_path, text)
    assert done.returncode == 0, done.stderr
    assert found["watched"]["by"] == "events on the device"
    assert found["watched"]["asked"] == pytest.approx(queued.BATCH / queued.STEP, rel=0.1)
    assert found["watched"]["wait"] > 0.1
