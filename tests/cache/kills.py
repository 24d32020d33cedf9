"""Jobs on one cache whose workers and trainers are killed at random: python tests/cache/kills.py.

Two jobs, one under torch's loader and one under minato's, load one data set through a cache that holds
a part of it. Again and again one of their processes is killed, or stopped for a while. A killed trainer is
started again. One whose worker was killed begins its next epoch. Every sample that is delivered is
compared with what it must be, every epoch that ends must have had each sample once, and at the end every
checksum is right and nothing is left in memory.

    --kills N         how many (500)
    --seed N          of what is killed when; printed
    --directory PATH  where the cache is kept, and then removed; by default it is in memory

The folder in memory is its own, so other caches of this user are left alone.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from typing import Any

import numpy as np
import psutil
import torch

import minato
from minato import _cache
from minato.cache import cache as cache_module
from minato.cache.cache import folder

SAMPLES = 150
WRONG = 3  # exit status: a sample was wrong, lost or doubled
DIRECTORY: str | None = None


def content(i: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(i).integers(0, 256, 2000 + i * 313, np.uint8)


class Data(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        # holds about 55 % of the data set
        cache = minato.Cache("2MiB", directory=DIRECTORY)

        @cache.memoize(key=lambda i: i, version=1)
        def load(i: int) -> np.ndarray[Any, Any]:
            return content(i)

        self.load = load

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> int:
        if not np.array_equal(self.load(i), content(i)):
            return -1 - i
        return i


def be_a_job(kind: str, epochs: int | None) -> int:
    """Loads epochs while workers may be killed, or, with None, two that must succeed. Returns the exit
    status."""
    multiprocessing.current_process().authkey = os.urandom(32)  # a job of its own
    faulthandler.register(signal.SIGUSR2, file=sys.__stdout__, all_threads=True)
    loader = minato.DataLoader if kind == "minato" else torch.utils.data.DataLoader
    batches = loader(Data(), 10, shuffle=True, num_workers=2)
    for _ in range(epochs or 2):
        try:
            seen = sorted(int(i) for batch in batches for i in batch)
        except (RuntimeError, OSError):  # a worker was killed
            if epochs is None:
                raise
            continue
        if seen != list(range(SAMPLES)):
            print("wrong:", seen, flush=True)
            return WRONG
    return 0


def start(kind: str, epochs: int | None = None) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.setpgrp()
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (it would warn of each killed worker)
        os.dup2(sys.stderr.fileno(), 2)
        status = 1
        try:
            status = be_a_job(kind, epochs)
            multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        finally:
            os._exit(status)
    return pid


def end_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def reap(kept: dict[int, str]) -> list[tuple[int, int]]:
    """Those of the jobs that have ended, with their statuses; orphans are reaped, too."""
    ended = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        if pid in kept:
            ended.append((pid, os.waitstatus_to_exitcode(status)))


def strike(rng: random.Random, jobs: dict[int, str]) -> str:
    """Kills or stops a process. Returns what was done."""
    below = [p for p in psutil.Process().children(recursive=True) if p.pid not in jobs]
    if rng.random() < 0.15 or not below:
        victim = psutil.Process(rng.choice(list(jobs)))
    else:
        victim = rng.choice(below)
    if rng.random() < 0.2:
        victim.send_signal(signal.SIGSTOP)
        time.sleep(rng.random() * 0.1)
        victim.send_signal(signal.SIGCONT)
        return "stopped"
    victim.send_signal(signal.SIGKILL)
    return "trainer" if victim.pid in jobs else "worker"


def run(kills: int, seed: int) -> dict[str, int]:
    """Raises AssertionError where anything is wrong; counts what was done."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans become children of this process
    rng = random.Random(seed)
    done: dict[str, int] = {"worker": 0, "trainer": 0, "stopped": 0, "jobs": 0}
    jobs: dict[int, str] = {}
    groups: dict[int, str] = {}  # the kind of job, by process group
    while done["worker"] + done["trainer"] < kills:
        for kind in ("torch", "minato"):
            if kind not in jobs.values():
                pid = start(kind, 10**6)
                jobs[pid] = groups[pid] = kind
                done["jobs"] += 1
        time.sleep(rng.random() * 0.15)
        try:
            done[strike(rng, jobs)] += 1
        except psutil.NoSuchProcess:
            pass
        for pid, status in reap(jobs):
            del jobs[pid]
            assert status != WRONG, "a sample was wrong, lost or doubled"
    for pid in jobs:
        os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 90
    while psutil.Process().children(recursive=True):
        reap({})
        if time.monotonic() > end:
            end_stuck(groups)
        time.sleep(0.05)
    check()
    for kind in ("torch", "minato"):  # whatever is left serves whole epochs, and is then removed
        assert end_of(start(kind)) == 0
    while psutil.Process().children(recursive=True):
        reap({})
        time.sleep(0.02)
    if DIRECTORY is None:
        assert not os.path.exists(folder()), os.listdir(folder())
    else:
        check()
        shutil.rmtree(folder(DIRECTORY))
    return done


def end_stuck(groups: dict[int, str]) -> None:
    """Kills torch's workers that outlive their trainer: one that was forked just before the trainer's
    death takes its new parent for the trainer. No worker of minato's may be left."""
    for process in psutil.Process().children(recursive=True):
        if groups.get(os.getpgid(process.pid)) != "torch":
            process.send_signal(signal.SIGUSR2)  # says where it is
            time.sleep(1)
            raise AssertionError(f"{process} does not end")
        process.kill()


def check() -> None:
    """Compares the checksums of what the killed jobs have left, if anything."""
    where = folder(DIRECTORY)
    for name in os.listdir(where) if os.path.exists(where) else ():
        store = _cache.Store(where, name, _cache.BYTES_MIN, 0, False, 0, DIRECTORY is not None)
        store.attach()
        checked, damaged = store.verify()
        print(f"left: {checked} values, {damaged} damaged", flush=True)
        assert damaged == 0 and store.stats()["damaged"] == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.randrange(10**9))
    parser.add_argument("--directory")
    options = parser.parse_args()
    DIRECTORY = options.directory
    print(f"seed {options.seed}", flush=True)
    start_s = time.monotonic()
    own = os.environ.get("TEST_MEMORY")
    cache_module.MEMORY = own or tempfile.mkdtemp(prefix="minato-kills-", dir=cache_module.MEMORY)
    try:
        print(run(options.kills, options.seed), f"{time.monotonic() - start_s:.0f} s", flush=True)
    finally:
        if own is None:
            shutil.rmtree(cache_module.MEMORY, ignore_errors=True)
