"""The end of the interpreter while loaders live: quick, quiet, nothing left behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from .support import Kind, all_gone, run_script, selected

HEAD = """
import os, signal, sys, threading, warnings
import torch
from contract.datasets import Images, Numbers

made = make(Images(400), batch_size=2, num_workers=2)
"""

BODIES = {
    "mid_epoch": "iterator = iter(made); next(iterator)",
    "nothing_taken": "iterator = iter(made)",
    "in_a_loop": "for batch in made:\n    break",
    "persistent": (
        "made = make(Images(400), batch_size=2, num_workers=2, persistent_workers=True)\n"
        "for batch in made:\n    break\nkept = batch"
    ),
    "sys_exit": "for batch in made:\n    sys.exit(0)",
    "finished": "kept = list(made)[-3:]",
    "cycle": (
        "class Holder: pass\nholder = Holder(); holder.me = holder\n"
        "holder.iterator = iter(made); holder.batch = next(holder.iterator)"
    ),
    "pinned": (
        "warnings.simplefilter('ignore')\n"
        "made = make(Images(400), batch_size=2, num_workers=2, pin_memory=True,\n"
        "            persistent_workers=True)\n"
        "for batch in made:\n    break"
    ),
    "several": (
        "iterator = iter(made); kept = [next(iterator), next(iterator)]\n"
        "other = make(Images(400), batch_size=2, num_workers=1, persistent_workers=True)\n"
        "for batch in other:\n    break\n"
        "third = iter(make(Numbers(9), num_workers=1)); iterator.me = iterator"
    ),
    "thread": (
        "def consume():\n"
        "    for batch in made:\n        seen.set()\n"
        "seen = threading.Event()\n"
        "threading.Thread(target=consume, daemon=True).start()\n"
        "seen.wait(90)"
    ),
}


# Starting an interpreter with torch takes seconds: the other loaders run a choice.
CASES = [
    pytest.param(Kind(loader), name, id=f"{loader}-{name}")
    for loader in selected() for name in BODIES
    if loader == "minato" or name in ("mid_epoch", "several")
]


@pytest.mark.parametrize("loader, name", CASES, indirect=["loader"])
def test_exit_is_clean(loader: Kind, name: str, tmp_path: Path) -> None:
    outcome = run_script(loader, HEAD + BODIES[name], tmp_path)
    assert outcome.stderr == ""
    assert outcome.returncode == 0
    assert outcome.left == []


def test_uncaught_error_in_the_loop(loader: Kind, tmp_path: Path) -> None:
    body = HEAD + "for batch in made:\n    raise LookupError('consumer')"
    outcome = run_script(loader, body, tmp_path)
    assert outcome.returncode == 1
    lines = outcome.stderr.splitlines()
    assert lines[0].startswith("Traceback") and lines[-1] == "LookupError: consumer"
    assert outcome.stderr.count("Traceback") == 1
    assert outcome.left == []


@pytest.mark.parametrize("how", ["os._exit(7)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_workers_end_with_a_parent_that_dies(loader, how: str, tmp_path: Path) -> None:
    if not loader.expects("workers_end_with_a_killed_parent"):
        pytest.skip("its workers look for their parent now and then, and may stay")
    body = HEAD + f"iterator = iter(made)\nnext(iterator)\n{how}"
    outcome = run_script(loader, body, tmp_path)
    assert outcome.returncode == (7 if "_exit" in how else -signal.SIGKILL)
    assert outcome.left == []


def test_parent_dies_while_a_sample_is_under_way(own: Kind, tmp_path: Path) -> None:
    # torch's worker looks for its parent only between samples.
    body = """
import os, signal, time
from contract.datasets import Numbers
from contract.support import wait_for

class Slow(Numbers):
    def __getitem__(self, index):
        if index:
            time.sleep(30)
        return index

iterator = iter(make(Slow(9), num_workers=2))
next(iterator)
# A program that dies while a worker is being forked leaves workers to their samples. Once all are
# there, and the process that forks them sleeps, none is.
assert all(worker.pid for worker in iterator._workers)
stat = f"/proc/{iterator._pool.zygote.pid}/stat"
assert wait_for(lambda: open(stat).read().rpartition(")")[2].split()[0] == "S")
os.kill(os.getpid(), signal.SIGKILL)
"""
    outcome = run_script(own, body, tmp_path)
    assert outcome.returncode == -signal.SIGKILL
    assert outcome.left == []


def test_interrupt_from_the_terminal(loader: Kind, tmp_path: Path) -> None:
    # Ctrl-C reaches the whole process group; only the program may print anything.
    body = HEAD + """
os.setpgrp()
try:
    for number, batch in enumerate(made):
        if number == 3:
            os.killpg(os.getpgrp(), signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""
    outcome = run_script(loader, body, tmp_path)
    assert outcome.stdout == "interrupted\n"
    assert outcome.returncode == 0
    if not loader.is_torch:  # torch's workers may print a KeyboardInterrupt, too
        assert outcome.stderr == ""
    assert outcome.left == []


def test_spawned_workers_under_main_guard(loader: Kind, tmp_path: Path) -> None:
    body = """
import torch
from contract.datasets import Images

if __name__ == "__main__":
    made = make(Images(50), batch_size=2, num_workers=1,
                multiprocessing_context="spawn")
    iterator = iter(made)
    print(next(iterator)["label"].tolist())
"""
    outcome = run_script(loader, body, tmp_path)
    assert (outcome.returncode, outcome.stdout) == (0, "[0, 1]\n")
    assert outcome.stderr == ""
    assert outcome.left == []


def test_forked_trainers(loader: Kind, tmp_path: Path) -> None:
    # A process that has used a loader forks; parent and child both continue loading.
    body = HEAD + """
import warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded")  # Python 3.12 and later
iterator = iter(made)
kept = [next(iterator) for _ in range(5)]
batch = kept[0]
pid = os.fork()
if pid == 0:
    del kept  # the child's copies; the parent's stay as they are
total = sum(b["label"].sum().item() for b in make(Images(20), num_workers=1))
assert total == 190, total
assert batch["image"][1].unique().tolist() == [1.0]
if pid == 0:
    sys.stdout.flush()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert len(list(iterator)) == 195
assert [b["image"][1].unique().item() for b in kept] == [1, 3, 5, 7, 9]
print("both")
"""
    outcome = run_script(loader, body, tmp_path)
    assert outcome.stdout == "both\n", outcome.stderr
    assert (outcome.returncode, outcome.stderr, outcome.left) == (0, "", [])


LEAVES = """
import subprocess
print(os.environ["MINATO_TEST_TOKEN"])
process = subprocess.Popen(["sleep", "1000"])
pid = os.fork()
if pid == 0:
    signal.pause()
print(process.pid, pid)
"""


def test_processes_left_by_script_are_noticed(tmp_path: Path) -> None:
    """By processes that it started and processes that it forked; both are ended."""
    outcome = run_script(Kind("minato"), "import os, signal, sys" + LEAVES, tmp_path, grace=0.1)
    token, *pids = outcome.stdout.split()
    assert sorted(map(int, pids)) == sorted(outcome.left) and int(token, 16)
    assert all_gone(outcome.left)


def test_a_script_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="script hangs"):
        run_script(Kind("minato"), "import signal\nsignal.pause()", tmp_path, timeout=0.5)
    assert run_script(Kind("minato"), "print('next')", tmp_path).stdout == "next\n"
