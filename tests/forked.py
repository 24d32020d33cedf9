"""Runs programs as if each were started by itself, in processes forked from one that has imported
torch: to import it costs more than most of them do.

``run(jobs)`` is for the tests; below it is what runs in that process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: for all jobs of a run, and for one of them, on a machine that has much else to do
LIMIT_S, JOB_S = 280, 120


@dataclasses.dataclass
class Job:
    """A script, or blocks of a text, which are run one after the other in one module."""

    file: str
    #: (line of the first, code)
    blocks: list[tuple[int, str]] | None = None


@dataclasses.dataclass
class Done:
    """What came of it. outputs: what each block has printed, a script's in one."""

    status: int
    outputs: list[str]
    errors: str


def run(jobs: list[Job], folder: Path) -> list[Done]:
    """Each in a folder of its own below one that is empty."""
    for number in range(len(jobs)):
        (folder / str(number)).mkdir()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    given = json.dumps([dataclasses.asdict(job) for job in jobs])
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), str(folder)], input=given, text=True,
        capture_output=True, timeout=LIMIT_S, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    statuses = json.loads(done.stdout)
    found = []
    for number, status in enumerate(statuses):
        place = folder / f"{number}"
        outputs = [part.read_text() for part in sorted(place.parent.glob(f"{number}.out.*"))]
        found.append(Done(status, outputs, place.with_suffix(".err").read_text()))
    return found


# ---- in the process that forks ---------------------------------------------------------------


def _redirect(descriptor: int, name: str) -> None:
    to = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(to, descriptor)
    os.close(to)


def _run_blocks(file: str, blocks: list[tuple[int, str]], base: str) -> None:
    """As a program: what it defines can be pickled by name, and tracebacks name its lines."""
    module = types.ModuleType("__main__")
    module.__file__ = file
    sys.modules["__main__"] = module
    for number, (line, code) in enumerate(blocks):
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * (line - 1) + code, file, "exec"), vars(module))
        finally:
            Path(f"{base}.out.{number:03}").write_text(printed.getvalue())


def _be(job: dict[str, Any], base: str) -> None:
    """The rest of this process is the job; it ends as any program of Python's does."""
    os.chdir(base)
    _redirect(0, os.devnull)
    _redirect(2, f"{base}.err")
    faulthandler.register(signal.SIGALRM, chain=True)  # one that hangs says where, and ends
    signal.alarm(JOB_S)
    if job["blocks"] is not None:
        _redirect(1, os.devnull)
        _run_blocks(job["file"], job["blocks"], base)
    else:
        _redirect(1, f"{base}.out.0")
        sys.argv[:] = [job["file"]]
        sys.path[0] = os.path.dirname(job["file"])
        runpy.run_path(job["file"], run_name="__main__")


def _main(jobs: list[dict[str, Any]], folder: str) -> None:
    import torch.utils.data  # noqa: F401  # once for all

    gc.collect()
    gc.freeze()  # each job's end would look at all of torch's objects again
    statuses = []
    for number, job in enumerate(jobs):
        pid = os.fork()
        if pid == 0:
            _be(job, f"{folder}/{number}")
            return
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(json.dumps(statuses))


if __name__ == "__main__":
    _main(json.load(sys.stdin), sys.argv[1])
