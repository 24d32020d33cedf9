"""Scratch folders of the cache's benchmarks, and what interrupted or killed ones have left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from minato.cache.cache import _sweep, folder

PREFIX = "minato-benchmark-"
MEMORY = "/dev/shm"


@contextlib.contextmanager
def scratch(place: str | None = None) -> Iterator[Path]:
    """A folder that goes at the end, named after this process."""
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", dir=place) as path:
        yield Path(path)


def places() -> set[str]:
    """Where scratch folders are made."""
    return {MEMORY, "/var/tmp", tempfile.gettempdir(), os.environ.get("CACHE_DIRECTORY", "/var/tmp")}


def remove_left() -> None:
    """Removes scratch folders of processes that ended, and caches in memory that no process uses
    (except those that a program asked to keep)."""
    for place in places():
        for path in Path(place).glob(f"{PREFIX}*"):
            pid = path.name[len(PREFIX) :].partition("-")[0]
            if pid.isdigit() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(path, ignore_errors=True)
    if os.path.isdir(folder()):
        _sweep(folder(), "")


@contextlib.contextmanager
def cleaned() -> Iterator[None]:
    """Within, SIGTERM ends the benchmark as SIGINT does. Nothing is left before and after it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    remove_left()
    try:
        yield
    finally:
        remove_left()


def turns(repeats: int, until: float | None) -> Iterator[int]:
    """Numbers of repeats: at least one, and none that begins after `until` (of time.monotonic())."""
    for turn in range(repeats):
        if turn and until is not None and time.monotonic() > until:
            return
        yield turn
