"""If the system refuses something, the loader says so, and nothing is left behind.

If minato's workers cannot run at all, torch's serve the loader.
"""

from __future__ import annotations

import os
import platform

import pytest

import minato._core

from .support import run_script

#: one interpreter with a fork for each case; prints the case, the error and leftovers
SCRIPT = """
import ctypes, gc, logging, os, resource, struct, sys, threading, warnings
import minato.iterators.static_and_iterable, minato.iterators.iterator, minato.seeding.find_generators
import multiprocessing.popen_fork
from attack.datasets import Noisy
from attack.support import descendants, wait_for

def forbid(number, with_errno):
    # A seccomp filter of three steps: this call fails, all others pass.
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, 0x50000 | with_errno),
             (6, 0, 0, 0x7FFF0000)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    held = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(held))
    call = ctypes.CDLL(None, use_errno=True).prctl
    if call(38, 1, 0, 0, 0) != 0 or call(22, 2, program, 0, 0) != 0:
        print("cannot be forbidden"); os._exit(0)

def limit(what, count):
    resource.setrlimit(what, (count, resource.getrlimit(what)[1]))

def address_space():
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[0]) * resource.getpagesize()

def processes(count):
    # root is exempt; of somebody who has no other process
    os.setresgid(61234, 61234, 61234)
    os.setresuid(61234, 61234, 61234)
    limit(resource.RLIMIT_NPROC, count)

def second_refused():
    import minato.workers.zygote as zygote
    fork = zygote.Zygote._fork
    def once(self, number):
        if number == 1:
            raise BlockingIOError(11, "no")
        return fork(self, number)
    zygote.Zygote._fork = once

REFUSALS = {
    "memfd": lambda: forbid(MEMFD, 1),
    "pidfd": lambda: forbid(434, 38),
    "file size": lambda: limit(resource.RLIMIT_FSIZE, 100_000),
    "small files": lambda: limit(resource.RLIMIT_FSIZE, 16 << 20),
    "first process": lambda: processes(1),
    "first thread": lambda: processes(2),
    "second worker": second_refused,
    "descriptors": lambda: limit(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) + 3),
    # room for Python's own small allocations
    "address space": lambda: limit(resource.RLIMIT_AS, address_space() + (3 << 20)),
}

def child(refuse, scheduling):
    refuse()
    delay = 0.1 if case == "second worker" else 0.001  # until it is reported
    before = len(os.listdir("/proc/self/fd"))
    warnings.simplefilter("error")
    log = logging.getLogger("minato")
    log.addHandler(logging.StreamHandler(sys.stdout))
    log.handlers[0].setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    try:
        loader = minato.DataLoader(Noisy(8, 3, delay), num_workers=2, scheduling=scheduling)
        if case in ("memfd", "pidfd"):
            list(loader)
        print(len(list(loader)), "batches")
    except Exception as error:
        print(type(error).__name__, getattr(error, "errno", 0) or 0, error)
    error = loader = None
    gc.collect()
    wait_for(lambda: not descendants(), "processes to end")
    # threads of torch's queues close their pipes a little later
    wait_for(lambda: not [t for t in threading.enumerate() if "Queue" in t.name], "queues to end")
    print("left", len(os.listdir("/proc/self/fd")) - before, flush=True)

case, scheduling = sys.argv[1:]
child(REFUSALS[case], scheduling)
"""

CALLS = {"x86_64": 319, "aarch64": 279}  # memfd_create
LIMIT = "limit on processes and threads is reached: raise it"


@pytest.mark.parametrize("case, kind, number, text", [
    ("file size", "OSError", 27, "(`ulimit -f`)"),
    ("first process", "BlockingIOError", 11, LIMIT),
    ("first thread", "BlockingIOError", 11, LIMIT),
    ("descriptors", "OSError", 24, "raise the limit (`ulimit -n`)"),
    ("address space", "MemoryError", 0, "`ulimit -v`"),
    ("second worker", "UserWarning", 0, "The remaining workers take over its samples"),
])  # fmt: skip
def test_refused_resource_is_named(case: str, kind: str, number: int, text: str) -> None:
    done = run_limited(case)
    first, left = done[0], done[-1]
    assert first.split()[:2] == [kind, str(number)] and text in first
    # multiprocessing itself forgets its first pipe when there is no room for the second,
    # and both when there is no process
    forgotten = {"descriptors": ["left 0", "left 2"], "first process": ["left 4"]}
    assert left in forgotten.get(case, ["left 0"])


@pytest.mark.parametrize("case, name", [("memfd", "memfd_create"), ("pidfd", "pidfd_open")])
def test_torch_serves_if_system_calls_are_refused(case: str, name: str) -> None:
    """With one line for the log, however many iterators there are."""
    told, batches, left = run_limited(case)
    assert told.startswith("WARNING minato.DataLoader uses torch's own workers: ")
    assert f"the system call {name} is refused here" in told
    assert (batches, left) == ("8 batches", "left 0")


def test_limit_on_file_size_makes_shared_memory_small() -> None:
    assert run_limited("small files") == ["8 batches", "left 0"]


def test_static_scheduling_needs_every_worker() -> None:
    done = run_limited("second worker", "static")
    assert done[0].startswith("WorkerLost 0 A DataLoader worker could not be started: ")
    assert LIMIT in done[0] and done[-1] == "left 0"


def run_limited(case: str, scheduling: str = "balanced") -> list[str]:
    call = CALLS.get(platform.machine())
    if case == "memfd" and call is None:
        pytest.skip("its number is not known here")
    done = run_script(f"MEMFD = {call}\n{SCRIPT}", case, scheduling)
    if "cannot be forbidden" in done.stdout:
        pytest.skip("no seccomp filters here")
    if case.startswith("first") and "PermissionError" in done.stderr:
        pytest.skip("not as root, who alone can become somebody without processes")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout.splitlines()


# ---- address space ------------------------------------------------------------------------

MAPPED = """
import os, resource, sys, minato._core
used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGESIZE")
limit = used + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
engine = minato._core.Engine(8, 0, False, 1 << 40)
print(os.fstat(engine.fd).st_size)
"""


@pytest.mark.parametrize("left", [1 << 30, 8 << 30])
def test_a_mapping_takes_a_quarter_of_address_space(left: int) -> None:
    done = run_script(MAPPED, str(left))
    assert done.returncode == 0, done.stderr[-3000:]
    assert left // 8 < int(done.stdout) <= left // 4


@pytest.mark.parametrize("limit", [2 << 30, 8 << 30])
def test_a_mapping_follows_memory_limit(limit: int) -> None:
    engine = minato._core.Engine(2, 0, False, limit)
    assert 4 * limit <= os.fstat(engine.fd).st_size < 6 * limit
    engine.close()


FEW_GIB = """
import resource, sys, torch, minato
from attack.datasets import Images
limit = int(sys.argv[1]) << 30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
expected = [x for x in torch.utils.data.DataLoader(Images(64), 8)]
loaders = [minato.DataLoader(Images(64), 8, num_workers=int(sys.argv[2]), persistent_workers=True)
           for _ in range(2)]  # of training and validation, say
for _ in range(2):
    for loader in loaders:
        for got, batch in zip(loader, expected, strict=True):
            assert all(map(torch.equal, got, batch))
print("whole")
"""


@pytest.mark.parametrize("gib, workers", [(4, 8), (8, 2), (12, 8)])
def test_loader_works_with_small_address_space(gib: int, workers: int) -> None:
    done = run_script(FEW_GIB, str(gib), str(workers))
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr[-3000:]


LIMITS_ITSELF = """
import resource, torch, minato
class Limited:
    def __len__(self):
        return 16
    def __getitem__(self, index):
        resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
        return torch.full((1 << 20,), float(index))
for batch in minato.DataLoader(Limited(), 4, num_workers=2, memory_limit="1GiB"):
    assert batch.shape == (4, 1 << 20)
print("whole")
"""


def test_a_worker_may_limit_its_address_space() -> None:
    done = run_script(LIMITS_ITSELF)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr[-3000:]


# ---- memory that runs out -----------------------------------------------------------------

SCORES = """
import os, minato
class Score:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return [int(open(f"/proc/{of}/oom_score_adj").read()) for of in ("self", os.getppid())]
[batch] = minato.DataLoader(Score(), 2, num_workers=1, collate_fn=list)
print(int(open("/proc/self/oom_score_adj").read()), *batch[0])
"""


def test_workers_are_oom_killed_before_trainer() -> None:
    done = run_script(SCORES)
    assert done.returncode == 0, done.stderr[-3000:]
    trainer, worker, zygote = map(int, done.stdout.split())
    assert trainer == zygote < worker or trainer == 1000
