"""A control group's memory limit, where batches are kept: what torch's loader survives."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 600 << 20

#: 14 batches of 16 MiB are kept; with torch's loader the peak is 520 to 540 MiB
SCRIPT = """
import sys
import numpy as np
import minato

class Large:
    def __len__(self):
        return 60
    def __getitem__(self, index):
        return np.full(2 << 20, index, np.float32)

loader = minato.DataLoader(Large(), batch_size=2, num_workers=2, scheduling=sys.argv[1])
kept = []
for _ in range(2):
    for number, batch in enumerate(loader):
        assert batch[:, ::4096].sum() == 512 * (4 * number + 1)
        if len(kept) < 14:
            kept.append(batch)
assert [int(batch[0, 0]) for batch in kept] == list(range(0, 28, 2))
"""


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
    for version, name in ((1, "memory.limit_in_bytes"), (2, "memory.max")):
        own = _own(version)
        try:
            if own is not None and made is None:
                made = own / f"minato-test-{os.getpid()}"
                made.mkdir()
                (made / name).write_text(str(LIMIT))
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
        except OSError:  # what ended is still being counted out
            time.sleep(0.05)


@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_kept_batches_in_a_small_group(group: Path, scheduling: str) -> None:
    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, scheduling], cwd=ROOT, preexec_fn=enter,
        capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
