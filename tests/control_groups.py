"""A group of processes with a memory limit, for tests."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

#: by the version of control groups
LIMIT_FILES = {1: "memory.limit_in_bytes", 2: "memory.max"}


def _own(version: int) -> Path | None:
    """This process's group, where that has a memory controller."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _number, controllers, path = line.split(":", 2)
        if version == 1 and "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory" + path)
        if version == 2 and not controllers:
            return Path("/sys/fs/cgroup" + path)
    return None


@pytest.fixture
def group() -> Iterator[Path]:
    """A group below this process's with the limit, or a skip."""
    made = None
    for version, name in LIMIT_FILES.items():
        own = _own(version)
        try:
            if own is not None and made is None:
                made = own / f"minato-test-{os.getpid()}"
                made.mkdir()
                (made / name).write_text(str(600 << 20))
        except OSError:
            if made is not None and made.exists():
                made.rmdir()
            made = None
    if made is None:
        pytest.skip("no control group with a memory limit can be made here")
    yield made
    for _ in range(200):
        try:
            made.rmdir()
            return
        except OSError:  # ended processes are still being accounted
            time.sleep(0.05)


def set_limit(group: Path, limit: int) -> None:
    for name in LIMIT_FILES.values():
        if (group / name).exists():
            (group / name).write_text(str(limit))
