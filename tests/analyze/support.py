"""Programs under ``minato analyze``, each in a process of its own."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import signal
import struct
import sys
import tempfile
import textwrap
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "MINATO_TEST_TOKEN"

#: a program with 24 samples that sleep
SLEEPS = """
import time, torch
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.tensor(index)

def main(epochs=3, **options):
    for _ in range(epochs):
        for batch in DataLoader(Samples(), 4, **options):
            time.sleep(0.001)
"""


def environment(**more: str) -> dict[str, str]:
    """This one, with the package to import and a token that finds the processes again."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, TOKEN: uuid.uuid4().hex, **more}


def program(folder: Path, text: str, name: str = "train.py") -> Path:
    file = folder / name
    file.write_text(textwrap.dedent(text))
    return file


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "minato", "analyze", *map(str, arguments)]


def benchmark(name: str) -> Any:
    """A prepared program, as a module."""
    file = ROOT / "benchmarks" / "analyze" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Compose:
    """A chain of transforms, as torchvision's."""

    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def deny_namespaces() -> None:
    """From now on this process, and what it starts, may enter no namespace, as in a container."""
    number = {"x86_64": 272, "aarch64": 97}[platform.machine()]  # unshare
    rules = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0


def analyzed(
    folder: Path, *arguments: str | Path, before: Callable[[], None] | None = None, **env: str
) -> Done:
    """Runs ``minato analyze`` in a folder: in a fork, which has imported torch already. before: what is
    called there first."""
    from minato.analyze import command as analyze

    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                os.chdir(folder)
                os.environ.update(environment(**env))
                if before is not None:
                    before()
                for number, file in ((1, out), (2, errors)):
                    os.dup2(file.fileno(), number)
                sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))
                status = analyze.run([str(each) for each in arguments])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = _ended(pid, 110)
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read())
        return Done(status, *texts)


def _ended(pid: int, seconds: float) -> int:
    """The exit status of a child."""
    end = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(pid, signal.SIGINT)
            os.waitpid(pid, 0)
            raise TimeoutError(f"minato analyze took more than {seconds} s")
        time.sleep(0.01)


def study(folder: Path, text: str, *options: str, before: Callable[[], None] | None = None) -> tuple[Done, Any]:
    """A program's run, and its report.json; whatever else the machine does."""
    file = program(folder, text)
    done = analyzed(folder, "--anyway", "--budget", "4s", *options, "--", sys.executable, file, before=before)
    found = folder / "report" / "report.json"
    return done, json.loads(found.read_text()) if found.exists() else None


def with_token(token: str) -> list[int]:
    """Processes that have inherited it."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                environ = Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue
            if f"{TOKEN}={token}".encode() in environ:
                found.append(int(name))
    return found


def gone(token: str, seconds: float = 60.0) -> list[int]:
    """Those that are still there after a while."""
    end = time.monotonic() + seconds
    while (left := with_token(token)) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def in_a_fork(function: Any) -> Any:
    """What a function returns in a process of its own, which it may change as it likes."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with os.fdopen(write, "w") as out:
            json.dump(function(), out)
            out.flush()
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as source:
        found = json.load(source)
    os.waitpid(pid, 0)
    return found
