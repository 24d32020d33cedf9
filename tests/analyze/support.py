"""Programs under ``minato analyze``, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
import uuid
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


def analyzed(
    folder: Path, *arguments: str | Path, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``minato analyze`` in a folder."""
    return subprocess.run(
        command(*arguments), cwd=folder, env=environment(**env), capture_output=True, text=True,
        timeout=110,
    )  # fmt: skip


def study(folder: Path, text: str, *options: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """A program's run, and its report.json; whatever else the machine does."""
    file = program(folder, text)
    done = analyzed(folder, "--anyway", "--budget", "4s", *options, "--", sys.executable, file)
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
