"""Runs programs as if started separately, in processes forked from one that has imported
torch: importing it takes longer than most of the programs.

``run(jobs)`` is for tests with many programs, ``Programs`` for tests with one each or with some that
run at the same time. The code below them runs in the process that forks.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import io
import json
import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import types
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: time limits for all jobs of a run, and for one of them, on a busy machine
LIMIT_S, JOB_S = 280, 120


@dataclasses.dataclass
class Job:
    """A script, or blocks of a text, which are run one after the other in one module."""

    file: str
    #: (line of the first, code)
    blocks: list[tuple[int, str]] | None = None


@dataclasses.dataclass
class Done:
    """The result of a job. outputs: what each block has printed, a script's in one."""

    status: int
    outputs: list[str]
    errors: str


def run(jobs: list[Job], folder: Path) -> list[Done]:
    """Runs each in its own folder below an empty one."""
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


#: environment variable of a program and all its descendants, by which leftovers are found
TOKEN = "MINATO_TEST_TOKEN"
NO_TOKEN = 32 * "0"
#: length of a number that the process that forks sends
NUMBER = 12


@dataclasses.dataclass
class Started:
    """A program of Programs: a script, or a text as for ``python -c``."""

    program: str
    arguments: list[str]
    environment: dict[str, str]
    cwd: str
    given: str
    out: str
    err: str
    is_text: bool = False
    #: a pipe for its process id and later its exit status, if other programs may run next to it
    ends: str = ""


class Running:
    """A program that runs next to its test, with pipes, to be used like a ``subprocess.Popen``."""

    returncode: int | None = None
    _said = "", ""

    def __init__(self, programs: Programs, job: Started) -> None:
        for name in (job.given, job.out, job.err, job.ends):
            os.mkfifo(name)
        self._ends = open(os.open(job.ends, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)
        programs._start(job)
        self.pid = self._next(None)
        self.stdin, self.stdout, self.stderr = open(job.given, "w"), open(job.out), open(job.err)

    def _next(self, timeout: float | None) -> int:
        if not select.select([self._ends], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a program", timeout or 0)
        return int(self._ends.read(NUMBER))

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = self._next(timeout)
            self._ends.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, text: str = "", timeout: float | None = None) -> tuple[str, str]:
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended, or has been closed
            self.stdin.write(text)
            self.stdin.close()
        if not self.stdout.closed:
            with self.stdout, self.stderr:
                self._said = self.stdout.read(), self.stderr.read()
        self.wait(timeout)
        return self._said

    def to_end(self, timeout: float) -> subprocess.CompletedProcess[str]:
        said = self.communicate(timeout=timeout)
        return subprocess.CompletedProcess("", self.wait(), *said)


class Programs:
    """Runs scripts one by one, or next to each other. (housekeeping.py knows the process by its command
    line.)"""

    def __init__(self, path: str) -> None:
        """path: where they import from."""
        self._path = path
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), "serve"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, TOKEN: NO_TOKEN},
        )  # fmt: skip
        assert self._process.stdin is not None
        atexit.register(self._process.stdin.close)

    def start(self, script: Path, token: str, out: Path, err: Path) -> None:
        """In the script's folder, with this process's environment; output goes to files."""
        environment = {**os.environ, "PYTHONPATH": self._path, TOKEN: token}
        names = os.devnull, str(out), str(err)
        self._start(Started(str(script), [], environment, str(script.parent), *names))

    def _start(self, job: Started) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dataclasses.astuple(job)) + "\n")
        self._process.stdin.flush()

    def run(
        self, text: str, *arguments: str, given: str = "", cwd: Path = ROOT, timeout: float = 110,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Runs a text as ``python -c`` does, in a process group of its own, with a text as input and in this
        process's environment with other variables."""
        with tempfile.TemporaryDirectory() as folder:
            names = [os.path.join(folder, name) for name in ("in", "out", "err")]
            Path(names[0]).write_text(given)
            token = uuid.uuid4().hex
            whole = {**os.environ, "PYTHONPATH": self._path, **environment, TOKEN: token}
            self._start(Started(text, list(arguments), whole, str(cwd), *names, is_text=True))
            try:
                status = self.wait(timeout)
            except TimeoutError:
                while self._kill(token):
                    continue
                errors = Path(names[2]).read_text() if os.path.exists(names[2]) else ""
                raise AssertionError(f"the program hangs: {errors}") from None
            done = [Path(name).read_text() for name in names[1:]]
        return subprocess.CompletedProcess([text, *arguments], status, *done)

    def open(
        self, program: str, *arguments: str, environment: dict[str, str], is_text: bool = False
    ) -> Running:
        """Starts a script, or a text as for ``python -c``, and does not wait for its end."""
        with tempfile.TemporaryDirectory() as folder:
            names = [os.path.join(folder, name) for name in ("in", "out", "err", "ends")]
            whole = {**environment, TOKEN: uuid.uuid4().hex}
            job = Started(program, list(arguments), whole, os.getcwd(), *names[:3], is_text, names[3])
            return Running(self, job)

    def _kill(self, token: str) -> bool:
        """Kills the program; returns whether it may still be there. One that has just been forked has no
        token yet."""
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if f"{TOKEN}={token}".encode() in Path(f"/proc/{name}/environ").read_bytes():
                    os.kill(int(name), signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            self.wait(0.1)
            return False
        return True

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status; TimeoutError where it does not end."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            raise TimeoutError
        return int(self._process.stdout.readline())


# ---- in the process that forks ---------------------------------------------------------------


def _redirect(descriptor: int, name: str) -> None:
    how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if descriptor else os.O_RDONLY
    to = os.open(name, how, 0o600)
    os.dup2(to, descriptor)
    os.close(to)


def _run_blocks(file: str, blocks: list[tuple[int, str]], base: str) -> None:
    """As a program: its definitions can be pickled by name, and tracebacks name its lines."""
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
    """The rest of this process is the job; it ends like any Python program."""
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


def _serve() -> Started | None:
    """Forks for each job. Returns there with the job, and here at the end."""
    import torch.utils.data  # noqa: F401

    gc.collect()
    gc.freeze()
    ends: dict[int, int] = {}  # pipes, by process id

    def send(pipe: int, number: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # the test has been given up
            os.write(pipe, b"%*d" % (NUMBER, number))

    def tell(*_: Any) -> None:
        for pid in list(ends):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                send(ends[pid], os.waitstatus_to_exitcode(status))
                os.close(ends.pop(pid))

    signal.signal(signal.SIGCHLD, tell)
    for line in sys.stdin:
        job = Started(*json.loads(line))
        pipe = os.open(job.ends, os.O_WRONLY) if job.ends else -1
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # until ends has it
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            for other in {*ends.values(), pipe} - {-1}:
                os.close(other)
            return job
        if job.ends:
            send(pipe, pid)
            ends[pid] = pipe
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        if not job.ends:
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    return None


def _become(job: Started) -> None:
    """As if Python had been started with the program in this environment."""
    os.setpgrp()  # a signal to its process group reaches no other program
    c = ctypes.CDLL(None)
    c.getenv.restype = ctypes.c_void_p
    # /proc shows this memory as the environment, whatever is set later.
    ctypes.memmove(c.getenv(TOKEN.encode()), job.environment[TOKEN].encode(), len(NO_TOKEN))
    os.environ.clear()
    os.environ.update(job.environment)
    multiprocessing.current_process().authkey = os.urandom(32)  # as each interpreter draws it
    os.chdir(job.cwd)
    _redirect(0, job.given)
    sys.stdin = open(0, closefd=False)  # it has not read the input of this process
    _redirect(1, job.out)
    _redirect(2, job.err)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    if job.is_text:
        sys.argv[:] = ["-c", *job.arguments]
        sys.path[0] = ""
        exec(compile(job.program, "<string>", "exec"), vars(module))
        return
    sys.argv[:] = [job.program, *job.arguments]
    sys.path[0] = os.path.dirname(job.program)
    module.__file__ = job.program
    exec(compile(Path(job.program).read_text(), job.program, "exec"), vars(module))


if __name__ == "__main__":
    if sys.argv[1:] != ["serve"]:
        _main(json.load(sys.stdin), sys.argv[1])
    elif (job := _serve()) is not None:
        _become(job)
