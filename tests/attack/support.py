"""Helpers of the attack tests: deadlines, comparison, processes, scripts."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import psutil
import torch
from contract.support import programs, search_path
from forked import Running

#: how long stress bodies run; the default keeps the folder under three minutes
SECONDS = float(os.environ.get("MINATO_STRESS_SECONDS") or 1)
SEED = int(os.environ.get("MINATO_TEST_SEED", 0))
#: where a wait that should end at once is given up
PATIENCE = 90.0


def wait_for(condition: Callable[[], Any], what: str = "", seconds: float = PATIENCE) -> Any:
    """Waits for a condition; fails after a generous deadline."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"waited {seconds} s for {what or condition}"
        time.sleep(0.005)


def in_child(function: Callable[[], Any]) -> int:
    """Exit code of a forked child that runs the function: its result, or 0, or 99 if it
    raises. A child that hangs is killed."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            signal.alarm(0)
            code = function() or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    try:
        wait_for(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def same(a: Any, b: Any) -> bool:
    """Whether two batches are equal bit for bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def copied(batch: Any) -> Any:
    """A copy that shares nothing with the loader."""
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    if isinstance(batch, dict):
        return {k: copied(v) for k, v in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(copied, batch))
    return batch


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """Living children and their children, zombies not counted."""
    try:
        found = psutil.Process(pid or os.getpid()).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [p for p in found if alive(p.pid)]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(pid: int | None, number: int = signal.SIGKILL) -> None:
    if pid:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def zygote_of(iterator: Any) -> int:
    """Process id of what forks its workers; 0: none has begun."""
    zygote = iterator._pool.zygote
    return zygote.pid if zygote is not None and iterator._engine.segment.start else 0


def kill_zygote(iterator: Any) -> int:
    """Kills what forks its workers, once it has begun. Returns its process id."""
    zygote: int = wait_for(lambda: zygote_of(iterator), "a zygote")
    kill(zygote)
    return zygote


def workers_of(iterator: Any) -> list[int]:
    """Process ids of an iterator's workers."""
    return [worker.pid for worker in iterator._workers]


def worker_entries(iterator: Any) -> list[dict]:
    return iterator._engine.workers()


def kill_ready(iterator: Any, rng: Any) -> bool:
    """Kills one of the workers that have finished something; returns whether there was one."""
    ready = [w for w in worker_entries(iterator) if w["state"] == 3 and w["tasks"]]
    if ready:
        kill(rng.choice(ready)["pid"])
    return bool(ready)


class Killer(threading.Thread):
    """Kills workers of an iterator at random instants, but never one that has not finished
    anything: after several such deaths in a row, the engine would pause."""

    def __init__(self, iterator: Any, rng: Any, pause: float = 0.02) -> None:
        super().__init__(daemon=True)
        self.iterator, self.rng, self.pause = iterator, rng, pause
        self.kills = 0
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(self.rng.random() * 2 * self.pause):
            try:
                self.kills += kill_ready(self.iterator, self.rng)
            except RuntimeError:
                return  # the iterator has ended

    def __enter__(self) -> Killer:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop.set()
        self.join()


class Stopper(threading.Thread):
    """Stops random workers for moments."""

    def __init__(self, iterator: Any, rng: Any) -> None:
        super().__init__(daemon=True)
        self.iterator, self.rng = iterator, rng
        self.stops = 0
        self.end = threading.Event()

    def run(self) -> None:
        pids = workers_of(self.iterator)
        while not self.end.is_set():
            chosen = self.rng.sample(pids, self.rng.randrange(len(pids) + 1))
            for pid in chosen:
                kill(pid, signal.SIGSTOP)
            self.end.wait(self.rng.random() * 0.03)
            for pid in chosen:
                kill(pid, signal.SIGCONT)
            self.stops += len(chosen)
            self.end.wait(self.rng.random() * 0.03)

    def __enter__(self) -> Stopper:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.end.set()
        self.join()


def resources() -> dict[str, int]:
    """The resources that this process holds now."""
    gc.collect()
    me = psutil.Process()
    return {
        "fds": me.num_fds(),
        "threads": me.num_threads(),
        "processes": len(descendants()),
        "shm": sum(n.startswith(f"torch_{me.pid}_") for n in os.listdir("/dev/shm")),
    }


def held() -> set[tuple[str, object]]:
    """Everything that this process holds now, one by one, and its number of threads."""
    gc.collect()
    things: set[tuple[str, object]] = {("process", process.pid) for process in descendants()}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            things.add(("descriptor", f"{fd}: {os.readlink(f'/proc/self/fd/{fd}')}"))
    mine = f"torch_{os.getpid()}_"
    things.update(("shm", name) for name in os.listdir("/dev/shm") if name.startswith(mine))
    return things | {("thread", n) for n in range(psutil.Process().num_threads())}


def expect_returned(before: set[tuple[str, object]]) -> None:
    """Fails if this process goes on holding something new. Threads of multiprocessing close their
    pipes a little later. What an earlier test held may be closed meanwhile, and hides no leak."""
    end = time.monotonic() + PATIENCE
    while new := held() - before:
        assert time.monotonic() < end, f"left: {sorted(map(str, new))}"
        time.sleep(0.005)


#: put at the start of an interpreter's program
A_THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"


QUIET = "import sys, warnings; sys.warnoptions.append('ignore'); warnings.simplefilter('ignore')\n"
#: what makes a file, the first argument, the main module, which other processes can import
AS_MAIN = "del sys.argv[0]; __file__ = sys.argv[0]; exec(compile(open(__file__).read(), __file__, 'exec'))"


def run_script(text: str, *arguments: str, **more: str) -> subprocess.CompletedProcess:
    """Runs a program with this folder's package importable, and without warnings: in a fork of a
    process that has imported torch."""
    return programs().run(QUIET + text, *arguments, **environment(), **more)


def run_file(file: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess:
    """Runs the program of a file in the same way."""
    return run_script(AS_MAIN, str(file), *arguments, **more)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1"}


def start_script(text: str, *arguments: str) -> Running:
    """Starts such a program and does not wait for its end."""
    return programs().open(QUIET + text, *arguments, environment=environment(), is_text=True)


def epochs(seconds: float, enough: Callable[[], bool] = lambda: True) -> Iterator[int]:
    """Numbers until time is up; at least two, and until enough was seen."""
    begin, n = time.monotonic(), 0
    while n < 2 or time.monotonic() < begin + seconds or not enough():
        assert time.monotonic() < begin + seconds + 4 * PATIENCE, f"not enough in {n} epochs"
        yield n
        n += 1
