"""What the tests of the cache share: datasets that count, and programs that run at the same time."""

from __future__ import annotations

import os
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest
from attack.support import run_file
from contract.support import programs
from forked import Running

import minato

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(f"/dev/shm/minato-{os.getuid()}")


def files(folder: Path = FOLDER) -> list[str]:
    """Cache files that are there."""
    return sorted(os.listdir(folder)) if folder.exists() else []


#: the begin of a program that mounts what no other process sees; exit status 77: it may not
OWN_MOUNTS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(result):
    if result != 0:
        print("cannot mount", os.strerror(ctypes.get_errno()))
        sys.exit(77)
call(libc.unshare(0x00020000))
call(libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None))
"""


class Memory:
    """A place in /dev/shm for one test's programs, which set minato's by the environment."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"minato-test-{os.getpid()}-", dir="/dev/shm"))
        self.environment = {"TEST_MEMORY": str(self.path)}

    def files(self) -> list[str]:
        return files(self.path / FOLDER.name)


def new_cache(size: int | str = "8MiB", **options: Any) -> minato.Cache:
    """A cache that shares its file with no other."""
    cache = minato.Cache(size, **options)
    cache._name = uuid.uuid4().hex
    return cache


class Calls:
    """How often something was called, over all processes: a byte in a file each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def note(self, text: str = "x") -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.write(fd, (text + "\n").encode())
        os.close(fd)

    def all(self) -> list[str]:
        return self.path.read_text().split()


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "SLURM_"))}
    return {**kept, "PYTHONPATH": path, **more}


def ran(folder: Path, text: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs a program of a file of its own to its end. Where it may not mount a file system, the test is
    skipped."""
    script = folder / "program.py"
    script.write_text(text)
    done = run_file(script, *arguments, **more)
    if done.returncode == 77 and OWN_MOUNTS in text:
        pytest.skip("this process may not mount a file system")
    return done


def start(program: Path, *arguments: str, **more: str) -> Running:
    return programs().open(str(program), *arguments, environment=environment(**more))
