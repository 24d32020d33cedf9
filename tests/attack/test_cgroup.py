"""A control group's memory limit with retained batches: cases that torch's loader survives."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_groups import group, set_limit  # noqa: F401

from minato._system import MACHINE_SAYS, MAYBE, OomKills

from .support import SECONDS

ROOT = Path(__file__).resolve().parents[2]
LIMIT, GROWS_LIMIT, RANKS_LIMIT = 600 << 20, 1200 << 20, 2600 << 20

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

#: each worker takes 100 MiB: there is memory for a few of the 32 that would help
GROWS = """
import time
import torch
import minato

class Heavy:
    held = None
    def __len__(self):
        return 400
    def __getitem__(self, index):
        if self.held is None:
            self.held = torch.ones(100 << 18)
        time.sleep(0.02)
        return index

loader = minato.DataLoader(
    Heavy(), batch_size=4, num_workers=2, autoscale=(1, 32), persistent_workers=True
)
refused, end = [], time.monotonic() + 90
while not refused and time.monotonic() < end:
    assert sum(len(batch) for batch in loader) == 400
    decisions = loader.stats()["scheduler"]["decisions"]
    refused = [d["to"] for d in decisions if "there is no memory" in d["why"]]
print(*refused[:1] or [f"memory was never the reason: {decisions}"])
"""


#: sample 37 takes all memory there is: once, and then each time
EATS = """
import multiprocessing
import minato

class Eats:
    def __init__(self):
        self.left = multiprocessing.Value("i", 0)
    def __len__(self):
        return 64
    def __getitem__(self, index):
        with self.left.get_lock():
            eats = index == 37 and self.left.value > 0
            self.left.value -= eats
        if eats:
            with open("/proc/self/oom_score_adj", "w") as score:
                score.write("1000")  # the loader's own process is spared
            size = 4 << 20
            held = [b"x" * size for _ in range(10_000)]
        return index

data = Eats()
loader = minato.DataLoader(data, 4, num_workers=2, persistent_workers=True, max_retries=1)
data.left.value = 1
assert [int(i) for batch in loader for i in batch] == list(range(64))
assert loader.stats()["deaths"] == 1
data.left.value = 1000
iterator, got, told = iter(loader), [], ""
while True:
    try:
        got += next(iterator).tolist()
    except StopIteration:
        break
    except minato.WorkerLost as error:
        told = str(error)
assert got == [i for i in range(64) if i // 4 != 9], got
print(told)
"""


#: Eight forks of one warm process, each a rank as torchrun starts it. All wait before taking a
#: batch until each has made as many ahead as it may. That is 2 GiB if each took all available
#: memory, and their 32 processes need another 0.7 GiB.
RANKS = """
import os, sys, time, traceback
import torch, minato
from torch.utils.data.distributed import DistributedSampler

class Large:
    def __len__(self):
        return 8 * 64
    def __getitem__(self, index):
        return torch.full((1 << 19,), index)

with open(sys.argv[1] + "/cgroup.procs", "w") as group:
    group.write(str(os.getpid()))
os.environ.update(WORLD_SIZE="8", LOCAL_WORLD_SIZE="8")
torch.set_num_threads(1)

def rank(number):
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number))
    sampler = DistributedSampler(Large(), 8, number, shuffle=True, seed=3)
    loader = minato.DataLoader(
        Large(), 4, sampler=sampler, num_workers=2, prefetch_factor=16, persistent_workers=True
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        iterator, before = iter(loader), -1
        while before < (now := iterator._engine.memory()["used"]) or now == 0:
            before = now
            time.sleep(0.5)
        seen = []
        for batch in iterator:
            assert bool((batch == batch[:, :1]).all())
            seen += batch[:, 0].tolist()
        assert seen == list(sampler), epoch
        told = " ".join(map(str, [number, epoch, loader.stats()["deaths"], *seen]))
        os.write(1, told.encode() + b"\\n")  # whole lines, of eight processes

ranks = []
for number in range(8):
    ranks.append(os.fork())
    if ranks[-1] == 0:
        try:
            rank(number)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
sys.exit(any([os.waitpid(pid, 0)[1] for pid in ranks]))
"""


def _run_inside(group: Path, *arguments: str) -> str:
    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(
        [sys.executable, "-c", *arguments], cwd=ROOT, preexec_fn=enter,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_retained_batches_in_small_cgroup(group: Path, scheduling: str) -> None:
    _run_inside(group, SCRIPT, scheduling)


def test_eight_ranks_under_one_limit(group: Path) -> None:
    """Each takes its share of the memory, and together they deliver each epoch exactly."""
    set_limit(group, RANKS_LIMIT)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RANKS, str(group)], cwd=ROOT,
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    lines = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(lines) == 16
    for epoch in range(2):
        found = [line for line in lines if line[1] == epoch]
        assert sorted(line[0] for line in found) == list(range(8))
        assert [line[2] for line in found] == [0] * 8  # no rank was killed
        assert sorted(i for line in found for i in line[3:]) == list(range(512))


def test_number_of_workers_fits_memory(group: Path) -> None:
    set_limit(group, GROWS_LIMIT)
    workers = _run_inside(group, GROWS).strip()
    assert workers.isdecimal(), workers
    assert 2 < int(workers) < 12


def _counts(root: Path, group: int | None, machine: int) -> None:
    """Makes files as in a container with cgroup version 2, whose group has the host's path."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "sys/fs/cgroup").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text("0::/host/path\n")
    (root / "proc/vmstat").write_text(f"nr_free 1\noom_kill {machine}\n")
    if group is not None:
        text = f"oom 9\noom_kill {group}\noom_group_kill 0\n"
        (root / "sys/fs/cgroup/memory.events").write_text(text)


def test_oom_kill_is_named_in_death_message(tmp_path: Path) -> None:
    """Only for the killed worker, on every call, and not for workers that are killed later."""
    _counts(tmp_path, 2, 5)
    kills = OomKills(str(tmp_path))
    assert kills.oom_note(10) == MAYBE
    _counts(tmp_path, 3, 6)
    assert kills.oom_note(10) == MAYBE
    for _ in range(2):
        assert "has reached its memory limit" in kills.oom_note(11)
        assert "sys/fs/cgroup/memory.events counts it" in kills.oom_note(11)
    assert kills.oom_note(12) == MAYBE
    _counts(tmp_path, 3, 7)
    assert kills.oom_note(13) == MACHINE_SAYS


def test_death_without_oom_counter_is_a_guess(tmp_path: Path) -> None:
    kills = OomKills(str(tmp_path))
    assert kills.oom_note(1) == MAYBE
    _counts(tmp_path, None, 7)
    assert kills.oom_note(2) == MAYBE  # all kills may have been earlier ones
    version_1 = tmp_path / "sys/fs/cgroup/memory/jobs/7"
    version_1.mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:cpu:/\n4:hugetlb,memory:/jobs/7\n0::/\n")
    for count in (1, 2):
        (version_1 / "memory.oom_control").write_text(f"under_oom 0\noom_kill {count}\n")
        told = kills.oom_note(count + 2)
    assert "jobs/7/memory.oom_control counts it" in told


if SECONDS >= 30:  # make stress: a group that runs out of memory is slow for a while

    def test_oom_killed_worker_is_replaced_and_named(group: Path) -> None:
        """The worker is replaced; after repeated kills the error names sample, signal and cause."""
        told = _run_inside(group, EATS)
        assert "killed by signal: Killed" in told
        assert "Its control group has reached its memory limit" in told
        # cheap neighbours are one task by then
        assert re.search(r"sample index (37|\[[\d, ]*37[\d, ]*\]) of batch 9", told), told
