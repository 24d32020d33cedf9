"""A /proc of another PID namespace, as in some sandboxes, and no /proc; and trainers whose
exit only a pipe reports."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .support import alive, descendants, environment, kill, start_script, wait_for

#: runs a program in each of them: its first argument, as $0, is the program
NO_PROC = 'mount -t tmpfs none /proc && exec "$0" "$@"'
APART = {
    "another /proc": ["unshare", "-rpf"],
    "no /proc": ["unshare", "-rm", "sh", "-c", NO_PROC],
}


def apart(where: str, *command: str, **options: Any) -> subprocess.Popen[str]:
    """Starts a program there, or skips."""
    if shutil.which("unshare") is None:
        pytest.skip("no name space can be made here")
    tried = subprocess.run([*APART[where], "true"], capture_output=True, timeout=60, check=False)
    if tried.returncode != 0:
        pytest.skip("no name space can be made here")
    return subprocess.Popen(
        [*APART[where], *command], env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


EPOCHS = """
import os, signal, sys, time, minato, torch
class Kills:
    # sample 21 of the second epoch kills its worker, once
    def __init__(self):
        self.left = torch.zeros(1, dtype=torch.int64).share_memory_()
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 21 and self.left[0] == 1:
            self.left[0] = 0
            os.kill(os.getpid(), signal.SIGKILL)
        return index
if __name__ == "__main__":
    data = Kills()
    loader = minato.DataLoader(data, 4, num_workers=2, persistent_workers=True,
                               multiprocessing_context=sys.argv[1])
    for epoch in range(3):
        data.left[0] = epoch == 1
        assert torch.cat(list(loader)).tolist() == list(range(64))
        time.sleep(1.2 * (epoch == 0))  # workers look after a second for their trainer
    print(loader.stats()["deaths"])
"""


@pytest.mark.parametrize(
    "where, method", [("another /proc", "fork"), ("another /proc", "spawn"), ("no /proc", "fork")]
)
def test_a_dead_worker_is_replaced_without_proc(where: str, method: str, tmp_path: Path) -> None:
    """Idle workers stay."""
    script = tmp_path / "epochs.py"
    script.write_text(EPOCHS)
    process = apart(where, sys.executable, "-W", "ignore", str(script), method)
    out, err = process.communicate(timeout=90)
    assert (process.returncode, out) == (0, "1\n"), err[-3000:]


KILLED = """
import os, signal, subprocess, sys
trainer = subprocess.Popen([sys.executable, "-W", "ignore", "-c", sys.argv[1]],
                           stdout=subprocess.PIPE, text=True)
assert trainer.stdout.readline() == "ready\\n"
trainer.kill()
assert trainer.stdout.read() == ""  # until nobody has the other end
print("gone")
"""
WORKING = """
import minato
from attack.datasets import Slow
iterator = iter(minato.DataLoader(Slow(10**6, 0.01), num_workers=2))
next(iterator)
print("ready", flush=True)
for _ in iterator:
    pass
"""


@pytest.mark.parametrize("where", APART)
def test_a_killed_trainer_takes_workers_along_without_proc(where: str) -> None:
    process = apart(where, sys.executable, "-c", KILLED, WORKING)
    out, err = process.communicate(timeout=90)
    assert (process.returncode, out) == (0, "gone\n"), err[-3000:]


OUTLIVED = """
import os, sys, minato
from attack.datasets import Slow
if __name__ == "__main__":
    loaders = [minato.DataLoader(Slow(4, 0.0), num_workers=1, persistent_workers=True)
               for _ in range(2)]
    for loader in loaders:
        list(loader)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # as long as the test
        os._exit(0)
    pools = [loader._iterator._pool for loader in loaders]
    print(child, *(p.zygote.pid for p in pools), *(p.handles[0].pid for p in pools), flush=True)
    sys.stdin.read()
"""


def test_workers_exit_while_trainer_fork_lives() -> None:
    """The second loader's workers are forked while the first has its pipe open, too. Stopped zygotes
    leave it to the workers to see the end."""
    process = start_script(OUTLIVED)
    child, *family = [int(pid) for pid in process.stdout.readline().split()]
    try:
        assert len(family) == 4 and {child, *family} <= {p.pid for p in descendants(process.pid)}
        for pid in family[:2]:
            kill(pid, signal.SIGSTOP)
        kill(child, signal.SIGSTOP)  # or it would end with the pipe that it reads from
        kill(process.pid)
        wait_for(lambda: not any(map(alive, family[4:])), "workers to end")
        assert alive(child)
    finally:
        for pid in (process.pid, child, *family):
            kill(pid)
        process.communicate()
