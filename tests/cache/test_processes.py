"""One cache for workers, ranks and jobs: each value is made once, whichever process needs it first."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from control_groups import group, set_limit  # noqa: F401
from forked import Running

from .support import OWN_MOUNTS, Memory, ran, start

PROGRAM = Path(__file__).with_name("program.py")
SAMPLES = 60

pytestmark = pytest.mark.limit(300)


def ready(process: Running) -> None:
    assert process.stdout.readline() == "ready\n", process.communicate()[1]


def begin(process: Running) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def told(process: Running) -> dict[str, Any]:
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    found: dict[str, Any] = json.loads(line)
    assert found["seen"]
    return found


def ended(process: Running) -> None:
    out, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors, errors


def made(folder: Path) -> list[int]:
    return sorted(map(int, (folder / "made").read_text().split()))


@pytest.mark.parametrize("kind, method", [
    ("torch", "fork"), ("torch", "spawn"), ("torch", "none"), ("minato", "fork"), ("minato", "spawn"),
    ("minato", "thread"),
])  # fmt: skip
def test_workers_make_each_value_once(kind: str, method: str, tmp_path: Path, memory: Memory) -> None:
    job = start(PROGRAM, str(tmp_path), kind, method, "2", **memory.environment)
    ready(job)
    for epoch in range(2):
        begin(job)
        stats = told(job)
        assert stats["off"] is None and stats["unfollowed"] == []
        assert (stats["hits"], stats["misses"]) == (epoch * SAMPLES, SAMPLES)
    ended(job)
    assert made(tmp_path) == list(range(SAMPLES))
    assert memory.files() == []


def test_separate_jobs_make_each_value_once(tmp_path: Path, memory: Memory) -> None:
    jobs = [start(PROGRAM, str(tmp_path), kind, "fork", "1", **memory.environment) for kind in ("torch", "minato")]
    for job in jobs:
        ready(job)
    for job in jobs:  # both at the same time
        begin(job)
    stats = [told(job) for job in jobs]
    assert max(one["jobs"] for one in stats) == 2 and stats[0]["off"] is None
    for job in jobs:
        ended(job)
    assert made(tmp_path) == list(range(SAMPLES))
    assert memory.files() == []


RANKS = """
import os, sys, torch
import torch.multiprocessing as mp
sys.path.insert(0, sys.argv[1])
sys.argv = ["program.py", sys.argv[2]]
import program
def rank(n):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1234", RANK=str(n))
    data = program.Data(program.Path(sys.argv[1]) if len(sys.argv) == 2 else None)
    sampler = torch.utils.data.DistributedSampler(data, 2, n, shuffle=False)
    print(len([i for i in torch.utils.data.DataLoader(data, 5, sampler=sampler, num_workers=1)]),
          program.CACHE.stats()["jobs"], flush=True)
if __name__ == "__main__":
    for _ in range(2):
        mp.start_processes(rank, nprocs=2, start_method="fork")
"""


def test_ranks_are_one_job(tmp_path: Path, memory: Memory) -> None:
    done = ran(tmp_path, RANKS, str(PROGRAM.parent), str(tmp_path), **memory.environment)
    assert done.returncode == 0, done.stderr
    assert made(tmp_path) == list(range(SAMPLES))
    assert memory.files() == []


# ---- deaths ------------------------------------------------------------------------------------


def no_more(pids: list[int]) -> None:
    end = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_worker_dying_in_maker_is_taken_over(tmp_path: Path, memory: Memory) -> None:
    (tmp_path / "die").touch()
    job = start(PROGRAM, str(tmp_path), "minato", "fork", "1", **memory.environment)
    ready(job)
    begin(job)
    assert told(job)["stored"] == SAMPLES
    ended(job)
    assert made(tmp_path) == list(range(SAMPLES))
    assert memory.files() == []


@pytest.mark.parametrize("kind", ["torch", "minato"])
def test_workers_of_a_killed_trainer_leave_nothing(kind: str, tmp_path: Path, memory: Memory) -> None:
    job = start(PROGRAM, str(tmp_path), kind, "fork", "1", **memory.environment)
    ready(job)
    begin(job)
    while not (tmp_path / "made").exists():
        time.sleep(0.005)
    below = [child.pid for child in psutil.Process(job.pid).children(recursive=True)]
    assert below
    job.kill()
    job.communicate()
    no_more(below)
    assert memory.files() == []


def test_file_of_killed_processes_serves_next_job(tmp_path: Path, memory: Memory) -> None:
    job = start(PROGRAM, str(tmp_path), "torch", "none", "2", **memory.environment)
    ready(job)
    begin(job)
    told(job)
    job.kill()
    job.communicate()
    assert len(memory.files()) == 1
    other = start(PROGRAM, str(tmp_path), "torch", "none", "1", **memory.environment)
    ready(other)
    begin(other)
    assert told(other)["hits"] == SAMPLES
    ended(other)
    assert made(tmp_path) == list(range(SAMPLES))
    assert memory.files() == []


LEFT = """
import os, sys
import minato
minato.cache.cache.MEMORY = os.environ["TEST_MEMORY"]
cache = minato.Cache("1MiB", keep=sys.argv[1] == "kept")
cache._name = sys.argv[1]
@cache.memoize()
def make(n):
    return n
make(1)
print(os.listdir(minato.cache.cache.folder()).__len__(), flush=True)
if sys.argv[1] != "last":
    os.kill(os.getpid(), 9)
"""


def test_next_cache_removes_orphaned_file(tmp_path: Path, memory: Memory) -> None:
    done = [ran(tmp_path, LEFT, name, **memory.environment) for name in ("killed", "kept", "last")]
    assert [int(one.stdout) for one in done] == [1, 1, 2]
    assert [name.rpartition("-")[2] for name in memory.files()] == ["kept"]


FORK = """
import os, sys, time
import minato
minato.cache.cache.MEMORY = os.environ["TEST_MEMORY"]
cache = minato.Cache("4MiB")
@cache.memoize()
def make(n):
    return n * 2
assert make(1) == 2
if len(sys.argv) > 1 and sys.argv[1] == "closed":
    os.closerange(3, 200)
    assert make(1) == 2 and make(2) == 4 and make(2) == 4, "after all descriptors were closed"
    assert cache.stats()["stored"] == 2 and cache.stats()["processes"] == 1
    sys.exit()
child = os.fork()
if child:
    print(child, flush=True)
    os.kill(os.getpid(), 9)
sys.stdin.readline()
assert make(1) == 2 and make(3) == 6
assert cache.stats()["hits"] == 1 and cache.stats()["processes"] == 1, cache.stats()
"""


def test_a_fork_outlives_its_parent(tmp_path: Path, memory: Memory) -> None:
    script = tmp_path / "fork.py"
    script.write_text(FORK)
    job = start(script, **memory.environment)
    child = int(job.stdout.readline())
    assert job.wait() == -signal.SIGKILL
    job.stdin.write("\n")
    job.stdin.close()
    assert job.stderr.read() == ""  # until the child ends
    no_more([child])
    assert memory.files() == []


def test_a_program_that_closes_all_descriptors_goes_on(tmp_path: Path, memory: Memory) -> None:
    script = tmp_path / "fork.py"
    script.write_text(FORK)
    job = start(script, "closed", **memory.environment)
    ended(job)
    assert memory.files() == []


REMOVED = """
import json, os, sys
import numpy as np, torch
import minato
minato.cache.cache.MEMORY = os.environ["TEST_MEMORY"]
cache = minato.Cache("16MiB")
class Data(torch.utils.data.Dataset):
    @cache.memoize(key=lambda self, i: i)
    def load(self, i):
        with open(sys.argv[1], "ab", 0) as file:
            file.write(b"x")
        return np.full(20000, i, np.int32)
    def __len__(self):
        return 24
    def __getitem__(self, i):
        return self.load(i)
if __name__ == "__main__":
    Loader = minato.DataLoader if sys.argv[2] == "minato" else torch.utils.data.DataLoader
    loader = Loader(Data(), 6, num_workers=2, multiprocessing_context=sys.argv[3],
                    persistent_workers=sys.argv[4] == "persistent")
    folder = minato.cache.cache.folder()
    for epoch in range(3):
        for batch in loader:
            assert (batch[:, 0] == batch[:, -1]).all()
        if epoch == 0:
            [name] = os.listdir(folder)
            os.unlink(os.path.join(folder, name))
            os.rmdir(folder)  # so does a logout under systemd, with RemoveIPC
    print(os.path.getsize(sys.argv[1]), cache.stats()["removed"] is not None, os.path.exists(folder))
"""


@pytest.mark.parametrize("kind, method, workers", [
    ("minato", "fork", "new"), ("minato", "spawn", "new"), ("minato", "fork", "persistent"),
    ("torch", "fork", "new"), ("torch", "spawn", "new"), ("torch", "forkserver", "new"),
])  # fmt: skip
def test_workers_that_begin_after_a_removal_find_the_values(
    kind: str, method: str, workers: str, tmp_path: Path, memory: Memory
) -> None:
    done = ran(tmp_path, REMOVED, str(tmp_path / "made"), kind, method, workers, **memory.environment)
    assert done.stdout == "24 True False\n", done.stderr
    assert memory.files() == []


JOBS = """
import os, sys
import minato
minato.cache.cache.MEMORY = os.environ["TEST_MEMORY"]
cache = minato.Cache("1MiB")
@cache.memoize
def make(n):
    return n
make(1)
print("ready", flush=True)
sys.stdin.readline()
print(cache.stats()["jobs"], flush=True)
sys.stdin.readline()
"""
PORT, STEP = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize("first, second, jobs", [
    (PORT, PORT, 2), (STEP, STEP, 2), ({**PORT, "RANK": "0"}, {**PORT, "RANK": "0"}, 2),
    ({**STEP, "SLURM_PROCID": "0"}, {**STEP, "SLURM_PROCID": "0"}, 2),
    ({**PORT, "RANK": "0"}, {**PORT, "RANK": "1"}, 1),
    ({**STEP, "SLURM_PROCID": "0"}, {**STEP, "SLURM_PROCID": "1"}, 1), ({}, {}, 2),
], ids=["port", "step", "ranks 0", "tasks 0", "ranks", "tasks", "alone"])  # fmt: skip
def test_programs_are_one_job_if_their_ranks_differ(
    first: dict[str, str], second: dict[str, str], jobs: int, tmp_path: Path, memory: Memory
) -> None:
    script = tmp_path / "jobs.py"
    script.write_text(JOBS)
    running = [start(script, **memory.environment, **one) for one in (first, second)]
    for one in running:
        ready(one)
    begin(running[0])
    assert int(running[0].stdout.readline()) == jobs
    for one in running:
        one.communicate("\n\n", timeout=100)
        assert one.returncode == 0
    assert memory.files() == []


# ---- no room -----------------------------------------------------------------------------------

#: mounts a /dev/shm of its own and runs a program there
SMALL = f"""{OWN_MOUNTS}
call(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=" + sys.argv[1].encode()))
import warnings
import numpy as np
import minato
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    cache = minato.Cache(sys.argv[2])
    count = [0]
    @cache.memoize(key=lambda n: n)
    def make(n):
        count[0] += 1
        return np.full(100_000, n % 251, np.uint8)
    free = os.statvfs("/dev/shm").f_bavail
    for again in range(2):
        for n in range(500):  # more than 40 MiB hold
            assert (make(n) == n % 251).all()
    stats = cache.stats()
    left = os.statvfs("/dev/shm")
    print(stats["off"], count[0], stats.get("stored"), left.f_bavail / left.f_blocks)
    print(*[w.message for w in caught])
"""


@pytest.mark.parametrize("size, asked, off", [
    ("64M", "1GiB", True), ("64M", "40MiB", False), ("24M", "16MiB", False), ("100k", "1MiB", True),
])  # fmt: skip
def test_a_small_file_system_ends_no_job(size: str, asked: str, off: bool, tmp_path: Path) -> None:
    done = ran(tmp_path, SMALL, size, asked)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    if off:
        assert "cannot hold a cache" in first and "--shm-size" in first
        assert "minato.Cache is off" in second
        return
    told_off, count, stored, left = first.split()
    assert told_off == "None" and 100 < int(stored) < 500 and int(count) == 1000 - int(stored)
    assert float(left) > 0.05 and second == ""  # some is left to others


#: likewise, for one value
LESS = f"""{OWN_MOUNTS}
call(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=400M"))
import minato
cache = minato.Cache("1GiB")
@cache.memoize
def make(n):
    return n
make(1), make(1)
print(cache.stats()["hits"])
"""


def test_size_that_memory_does_not_hold_is_logged(tmp_path: Path) -> None:
    done = ran(tmp_path, LESS)
    assert done.stdout == "1\n", done.stderr
    assert "has 300.0 MiB, not the 1.0 GiB" in done.stderr and "/dev/shm has 400.0 MiB" in done.stderr


#: fills a cache, then takes memory while it asks for values
TAKES = """
import os, sys
(open(sys.argv[1], "w")).write(str(os.getpid()))
import numpy as np
import minato
minato.cache.cache.MEMORY = os.environ["TEST_MEMORY"]
cache = minato.Cache("900MiB")
@cache.memoize(key=lambda n: n)
def make(n):
    return np.full(1 << 20, n % 251, np.uint8)
for n in range(900):
    make(n)
filled, held = cache.stats()["used_bytes"] >> 20, []
while len(held) < filled // 8:
    held.append(np.ones(8 << 20, np.uint8))
    make(len(held))
print(filled, cache.stats()["used_bytes"] >> 20, cache.stats()["returned"])
"""


def test_cache_makes_way_for_memory_that_its_job_takes(
    tmp_path: Path, memory: Memory, group: Path
) -> None:
    set_limit(group, 900 << 20)
    done = ran(tmp_path, TAKES, str(group / "cgroup.procs"), **memory.environment)
    assert done.returncode == 0, done.stderr
    filled, left, returned = map(int, done.stdout.split())
    assert filled > 200 and left < filled // 4 and returned > 8
