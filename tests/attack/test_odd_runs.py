"""Rare conditions: clocks that jump, stopped programs, few system resources, huge samples or
samples of very many parts, very many workers, loaders in loaders."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from .support import SECONDS, environment, run_script, start_script

ROOT = Path(__file__).resolve().parents[2]
#: tests that take minutes or gigabytes run with MINATO_STRESS_SECONDS=30
LONG = SECONDS >= 30


def passes(text: str, *arguments: str) -> str:
    done = run_script(text, *arguments)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


# ---- time -------------------------------------------------------------------------------

#: Only the extension's monotonic clock is ahead, by the number of seconds in the file.
#: The system's own sleeps do not change, because they take a duration.
JUMPING_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *ahead;

__attribute__((constructor)) static void
begin(void)
{
    int fd = open(getenv("AHEAD"), O_RDONLY | O_CLOEXEC);
    void *at = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
    ahead = at == MAP_FAILED ? NULL : at;
    close(fd);
}

int
clock_gettime(clockid_t clock, struct timespec *t)
{
    Dl_info who;
    int rc = (int)syscall(SYS_clock_gettime, clock, t);
    if (clock == CLOCK_MONOTONIC && ahead != NULL
        && dladdr(__builtin_return_address(0), &who) != 0
        && strstr(who.dli_fname, "minato/_core") != NULL) {
        t->tv_sec += *ahead;
    }
    return rc;
}
"""

JUMPS = """
import mmap, os, signal, struct, sys, threading, minato
from attack.datasets import Slow

with open(os.environ["AHEAD"], "r+b") as file:
    ahead = mmap.mmap(file.fileno(), 8)
hours, over = 0, threading.Event()
def jump():
    global hours
    while not over.wait(0.02):
        hours += 7
        ahead[:] = struct.pack("q", 3600 * hours)

jumps = threading.Thread(target=jump)
jumps.start()
try:
    loader = minato.DataLoader(
        Slow(200, 0.002), 4, num_workers=2, timeout=60, persistent_workers=True, scheduling=sys.argv[1]
    )
    for epoch in range(4):
        iterator, got = iter(loader), []
        for batch in iterator:
            got += batch.tolist()
            if epoch == 2 and len(got) == 80 and loader.scheduling == "balanced":
                os.kill(iterator._workers[0].pid, signal.SIGKILL)
        assert got == list(range(200)), epoch
finally:
    over.set()
    jumps.join()
print(hours > 7, loader.stats()["deaths"])
"""


@pytest.mark.parametrize("scheduling, deaths", [("balanced", 1), ("static", 0)])
def test_a_clock_that_jumps_by_hours(tmp_path: Path, scheduling: str, deaths: int) -> None:
    """No process is taken for dead or late, and a death is still seen."""
    source, library, ahead = tmp_path / "clock.c", tmp_path / "clock.so", tmp_path / "ahead"
    source.write_text(JUMPING_CLOCK)
    ahead.write_bytes(bytes(8))
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True, timeout=60
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", JUMPS, scheduling],
        env={**environment(), "LD_PRELOAD": str(library), "AHEAD": str(ahead)},
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["True", str(deaths)]


def test_settable_clocks_are_not_read() -> None:
    """All clocks are monotonic: setting the system's date has no effect. The three exceptions
    compare or write the time of a file's last change, which is of the system's clock."""
    settable = ("CLOCK_REALTIME", "gettimeofday", "pthread_cond_timedwait", "sem_timedwait",
                "time.time(", "time.time_ns(", "datetime.now")  # fmt: skip
    files = [*(ROOT / "csrc").rglob("*.[ch]"), *(ROOT / "minato").rglob("*.py")]
    assert len(files) > 100
    files.remove(ROOT / "minato/cache/files.py")
    files.remove(ROOT / "minato/analyze/work.py")
    files.remove(ROOT / "csrc/cache/mn_cache_file.c")
    found = [(str(path), name) for path in files for name in settable if name in path.read_text()]
    assert found == []


STANDS_STILL = """
import sys, minato
from attack.datasets import Slow
loader = minato.DataLoader(
    Slow(48, 0.2), 12, num_workers=2, timeout=8, persistent_workers=True, scheduling=sys.argv[1]
)
for epoch in range(2):
    print("begun", flush=True)
    assert [int(i) for batch in loader for i in batch] == list(range(48))
print("deaths", loader.stats()["deaths"])
"""

if LONG:

    @pytest.mark.parametrize("scheduling", ["balanced", "static"])
    def test_a_program_that_stands_still(scheduling: str) -> None:
        """With all of its processes, for longer than its timeout. It is stopped in the middle of a
        batch with samples still to be made when it continues: a finished batch would be received
        before the time is checked."""
        child = start_script(STANDS_STILL, scheduling)
        assert child.stdout is not None
        for _ in range(2):
            assert child.stdout.readline() == "begun\n"
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(0.7)
            os.killpg(child.pid, signal.SIGSTOP)
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(10)
            os.killpg(child.pid, signal.SIGCONT)
        out, err = child.communicate(timeout=60)
        assert (child.returncode, out) == (0, "deaths 0\n"), err[-3000:]


# ---- little of something ------------------------------------------------------------------

SIXTY_FOUR = """
import os, resource, sys, minato
from attack.datasets import Counting, Images, Noisy, keep_list
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
if __name__ == "__main__":
    KINDS = {
        "rows": (Images(40), {}),
        "envelopes": (Noisy(40), {"collate_fn": keep_list}),
        "static": (Noisy(40), {"scheduling": "static"}),
        "iterable": (Counting(40), {}),
        "threads": (Noisy(40), {"worker_type": "thread"}),
    }
    def descriptors():
        return len(os.listdir("/proc/self/fd"))
    before = descriptors()
    for name, (data, options) in KINDS.items():
        loader = minato.DataLoader(data, 4, num_workers=8, persistent_workers=True, **options)
        kept = [list(loader), list(loader)]
        assert sum(map(len, kept)) >= 20, name
        most = descriptors() - before
        loader._iterator = kept = None
        print(name, most, descriptors() - before)
"""


def test_sixty_four_descriptors_are_enough() -> None:
    """For eight workers, with every batch kept. There are fewer than workers, and none stays."""
    for line in passes(SIXTY_FOUR).splitlines():
        _, most, left = line.split()
        assert int(most) < 8 and left == "0", line


SMALL_SHM = """
import torch, minato
from attack.datasets import keep_list
class Parts:
    # More tensors than rows have fields: torch's collate makes the batch, of 128 MiB
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return [torch.full((1 << 14,), float(index)) for _ in range(512)]
class Large:
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return torch.full((8 << 20,), float(index))
for kind in "process", "thread":
    for batch in minato.DataLoader(Parts(), 4, num_workers=2, worker_type=kind):
        assert len(batch) == 512 and batch[0].shape == (4, 1 << 14)
    for data, options in (Large(), {}), (Large(), {"collate_fn": keep_list}):
        kept = list(minato.DataLoader(data, 4, num_workers=2, worker_type=kind, **options))
        assert [float(x[0]) for batch in kept for x in batch] == list(range(12))
print("whole")
"""


def test_dev_shm_of_64_megabytes() -> None:
    """In its own mount namespace."""
    unshare = shutil.which("unshare")
    mounted = "mount -t tmpfs -o size=64m none /dev/shm"
    tried = unshare and subprocess.run(
        [unshare, "-rm", "sh", "-c", mounted], capture_output=True, timeout=60
    )
    if not tried or tried.returncode != 0:
        pytest.skip("nothing can be mounted here")
    done = subprocess.run(
        [str(unshare), "-rm", "sh", "-c", mounted + ' && exec "$@"', "sh",
         sys.executable, "-W", "ignore", "-c", SMALL_SHM],
        env=environment(), capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr[-3000:]


# ---- much of something ----------------------------------------------------------------------

TINY = """
import sys, torch, minato
COUNT, SIZE = 100_000, int(sys.argv[1]) or None
class Tiny:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return list(torch.arange(index, index + COUNT)[:, None])
for number, batch in enumerate(minato.DataLoader(Tiny(), SIZE, num_workers=1)):
    first = torch.stack([field.reshape(-1)[0] for field in batch])
    assert torch.equal(first, torch.arange(number, number + COUNT))
print("whole")
"""


# torch's own collate takes some ten seconds for a batch of these
@pytest.mark.parametrize("batch_size", [0, 2] if LONG else [0])
def test_a_sample_of_a_hundred_thousand_tensors(batch_size: int) -> None:
    assert passes(TINY, str(batch_size)) == "whole\n"


HUGE = """
import sys, torch, minato
class Huge:
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return torch.full((1 << 28,), float(index)), index
options = {"memory_limit": "256MiB"} if sys.argv[1] == "limited" else {}
for batch, index in minato.DataLoader(Huge(), num_workers=1, prefetch_factor=1, **options):
    assert batch.shape == (1, 1 << 28) and bool((batch == index).all())
print("whole")
"""

THOUSAND = """
import os, time, minato
class Sleeps:
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        time.sleep(1.0)
        return index
before = len(os.listdir("/proc/self/fd"))
loader = minato.DataLoader(Sleeps(), 16, num_workers=1000, persistent_workers=True)
worked, begin = 0, time.monotonic()
while worked < 1000 and time.monotonic() < begin + 400:  # they start one after another
    assert [int(i) for batch in loader for i in batch] == list(range(4000))
    entries = loader._iterator._engine.workers()
    worked = sum(entry["tasks"] > 0 for entry in entries)
print(len(entries), worked, loader.stats()["deaths"], len(os.listdir("/proc/self/fd")) - before)
"""

if LONG:

    @pytest.mark.limit(300)
    @pytest.mark.parametrize("memory", ["as it is", "limited"])
    def test_samples_of_a_gigabyte(memory: str) -> None:
        if psutil.virtual_memory().available < 8 << 30:
            pytest.skip("8 GiB of memory are needed")
        child = start_script(HUGE, memory)
        out, err = child.communicate(timeout=280)
        assert (child.returncode, out) == (0, "whole\n"), err[-3000:]

    @pytest.mark.limit(600)
    def test_a_thousand_sleeping_workers() -> None:
        """All of them work, and their descriptors do not accumulate."""
        if psutil.virtual_memory().available < 14 << 30:
            pytest.skip("14 GiB of memory are needed")
        child = start_script(THOUSAND)
        out, err = child.communicate(timeout=580)
        assert child.returncode == 0, err[-3000:]
        entries, worked, deaths, descriptors = map(int, out.split())
        assert (entries, worked, deaths) == (1000, 1000, 0) and descriptors < 12


# ---- threads, and loaders in loaders --------------------------------------------------------

OPENMP = """
import os, signal, threading, torch, minato
torch.set_num_threads(4)
def work(index):
    return torch.full((200_000,), float(index)).exp().log().sum() / 200_000
class Works:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return work(index % 8)
over = threading.Event()
def busy():
    while not over.wait(0.001):
        work(1)
threads = [threading.Thread(target=busy) for _ in range(3)]
for thread in threads:
    thread.start()
work(2)
loader = minato.DataLoader(Works(), 4, num_workers=2, max_retries=10)
for epoch in range(3):
    iterator, got = iter(loader), []
    for batch in iterator:
        got += batch.round().int().tolist()
        if len(got) == 24:
            os.kill(iterator._workers[0].pid, signal.SIGKILL)
    assert got == [i % 8 for i in range(64)], got
over.set()
for thread in threads:
    thread.join()
print("whole")
"""


def test_a_program_with_threads_and_openmp_forks() -> None:
    """Its thread pool does not exist in a fork, and its threads may hold any lock at that time."""
    assert passes(OPENMP) == "whole\n"


NESTED = """
import torch, minato
class Inner:
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return 10 * index
class Outer:
    def __init__(self, loader, **options):
        self.loader, self.options = loader, options
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return sum(int(x.sum()) for x in self.loader(Inner(), 2, **self.options)) + index
whole = [150 + i for i in range(8)]
for options in {}, {"num_workers": 2, "worker_type": "thread"}:
    for scheduling in "balanced", "static":
        outer = minato.DataLoader(
            Outer(minato.DataLoader, **options), num_workers=2, scheduling=scheduling
        )
        assert [int(x) for x in outer] == whole, (options, scheduling)
outer = minato.DataLoader(
    Outer(minato.DataLoader, num_workers=1), num_workers=2, worker_type="thread"
)
assert [int(x) for x in outer] == whole
outer = minato.DataLoader(Outer(minato.DataLoader, num_workers=1), num_workers=1)
assert [int(x) for x in outer] == whole
print("whole")
"""


def test_loaders_in_workers() -> None:
    """Of any kind. torch's workers cannot have loaders with workers."""
    assert passes(NESTED) == "whole\n"
