"""Answers one request with a measurement, in a fork of the keeper.

Measurements send messages: ``at`` names the sample that begins, and the result comes again and again
while it grows. So a run that is cut off leaves what it has found.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from ..workers import library_threads
from . import codecs, orders
from .loaders import rate, sampler
from .records import Contention, Reads, StageTimes, Storage, Threads, Together, parse
from .stages import FULL, LOCK
from .work import (
    SampleTimer,
    Send,
    Usage,
    as_worker,
    clock,
    indices,
    is_iterable,
    sample_maker,
    work,
)

def run(request: dict[str, Any], loader: Any, send: Send) -> None:
    """One request, in a process of its own."""
    if request.get("cores"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: request["cores"]])
    library_threads.limit(True)
    _forget_helpers()
    measure = {
        "work": work, "contend": contend, "storage": storage, "rate": rate, "sampler": sampler,
        "codecs": codecs.measure, "orders": orders.measure,
    }[request["do"]]  # fmt: skip
    makes_samples = request["do"] not in ("rate", "storage", "sampler")
    try:
        with as_worker(loader) if makes_samples else contextlib.nullcontext():
            measure(request, loader, send)
    except Exception as error:
        text = traceback.format_exc(limit=-3)
        send({"kind": "failed", "error": f"{type(error).__name__}: {error}", "trace": text})


def _forget_helpers() -> None:
    """multiprocessing's resource tracker belongs to the program; its connection is closed here."""
    from multiprocessing import resource_tracker

    tracker: Any = vars(resource_tracker)["_resource_tracker"]
    tracker._fd = tracker._pid = None


CHUNK = 1 << 18


def storage(request: dict[str, Any], loader: Any, send: Send) -> None:
    """Reads alone, of the files that samples opened: 1 to 32 at a time."""
    paths = [path for path in request["files"] if os.access(path, os.R_OK)]
    sizes = [os.path.getsize(path) for path in paths]
    counts = [1, 4, 16, 32]
    cold = _drop_pages(paths[: max(8, len(paths) // 8)])
    result = Storage(len(paths), sum(sizes), statistics.median(sizes) if sizes else 0.0, cold)
    for number, flight in enumerate(counts):
        end = clock() + request["seconds"] / len(counts)
        mine = paths[number :: len(counts)] or paths
        if cold:
            _drop_pages(mine)

        def read(path: str, end: float = end) -> int | None:
            with contextlib.suppress(OSError):  # a file may go, or fail, at any time
                if clock() < end:
                    return _read(path)
            return None

        began = clock()
        with ThreadPoolExecutor(flight) as pool:
            source = mine if cold else itertools.islice(itertools.cycle(mine), 20_000)
            done = [size for size in pool.map(read, source) if size is not None]
        took = max(clock() - began, 1e-6)
        result.rates.append(Reads(flight, len(done) / took, sum(done) / took, len(done)))
        send(asdict(result))


def _read(path: str) -> int:
    """Bytes of a file: all of it, or some of one that is too large."""
    with open(path, "rb", buffering=0) as file:
        size = 0
        while size < 64 * CHUNK and (part := file.read(CHUNK)):
            size += len(part)
        return size


def _drop_pages(paths: list[str]) -> bool:
    """Drops the files' pages; whether the system has done so for most."""
    gone = 0
    for path in paths:
        with contextlib.suppress(OSError):
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
                try:
                    os.preadv(number, [bytearray(1)], 0, os.RWF_NOWAIT)
                except BlockingIOError:
                    gone += 1
            finally:
                os.close(number)
    return gone > len(paths) / 2


#: Locks of one process: each worker process has its own.
THREAD_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore)


def contend(request: dict[str, Any], loader: Any, send: Send) -> None:
    """The same samples by one process, by several at once, and by as many threads: what workers
    wait for each other for takes longer then."""
    seconds, count = request["seconds"], request["processes"]
    usage = Usage()
    one = _run_processes(loader, 1, 0.25 * seconds)
    several = _run_processes(loader, count, 0.35 * seconds)
    locks = _lock_paths(loader, _is_shared_lock)
    result = Contention(count, one, several, locks=locks, usage=usage.summary())
    send(asdict(result))
    if not is_iterable(loader):
        result.threads = _compare_threads(loader, count, 0.3 * seconds)
        send(asdict(result))


def _run_processes(loader: Any, count: int, seconds: float) -> Together:
    def time_samples(number: int) -> Together:
        timed = SampleTimer(loader, lambda _message: None, FULL)
        for _path, lock in _find_locks(loader, _is_shared_lock):
            lock.acquire = timed.clocks.wrap(lock.acquire, "wait for a lock", LOCK)
        timed.run(seconds, plainly=False, skip=number * 37)
        return Together(timed.pairs, timed.clocked, timed.clocked_cpu, timed.stages())

    found = _in_forks([partial(time_samples, number) for number in range(count)])
    if len(found) < count:
        raise RuntimeError(f"of {count} processes that made samples at once, {count - len(found)} died")
    samples, stages = sum(one.samples for one in found), dict[str, StageTimes]()
    for one in found:
        for stage in one.stages:
            into = stages.setdefault(stage.label, replace(stage, seconds=0.0, cpu=0.0))
            into.seconds += stage.seconds * one.samples / max(1, samples)
            into.cpu += stage.cpu * one.samples / max(1, samples)
    seconds, cpu = (sum(each) / max(1, samples) for each in zip(*((one.seconds, one.cpu) for one in found)))
    return Together(samples, seconds, cpu, list(stages.values()))


def _compare_threads(loader: Any, count: int, seconds: float) -> Threads | None:
    """Samples by one thread and by several, by turns: what other programs do changes meanwhile."""
    order, make = indices(loader), sample_maker(loader.dataset)
    end, whole = clock() + seconds, []
    for number in range(4):
        if number and clock() > end:  # samples take so long that one pair has to do
            break
        pair = [_run_threads(order, make, n, seconds / 8) for n in (1, count)]
        whole += [[run for run in pair if run is not None]] if None not in pair else []
    if not whole:
        return None
    found = []
    for runs in zip(*whole):
        samples = sum(run.samples for run in runs)
        found.append(Together(samples, sum(run.samples * run.seconds for run in runs) / samples))
    return Threads(found[0], found[1], _lock_paths(loader, lambda part: isinstance(part, THREAD_LOCKS)))


def _run_threads(order: list[Any], make: Callable[[Any], Any], count: int, seconds: float) -> Together | None:
    """Samples by threads, and seconds of each of them. A thread that waits for another wakes up now
    and then to look, so the time in which it had no core is not apart, and there are no clocks
    inside. A process of its own, which a dataset that is not made for threads may end. The sampler
    has run before: it would be a part of the time, and threads would share it."""

    def make_all() -> Together:
        began = clock()

        def make_some(skip: int) -> int:
            for made, index in enumerate(itertools.islice(itertools.cycle(order), skip, None), 1):
                with contextlib.suppress(Exception):  # the work phase has told of it
                    make(index)
                if clock() - began > seconds:
                    return made
            return 0  # there are no samples

        with ThreadPoolExecutor(count) as pool:
            samples = sum(pool.map(make_some, [37 * n for n in range(count)]))
        return Together(samples, count * (clock() - began) / samples)

    results = _in_forks([make_all])
    return results[0] if results else None


def _lock_paths(loader: Any, is_lock: Callable[[Any], bool]) -> list[str]:
    """Paths of at most three locks that a dataset holds."""
    return [path for path, _part in itertools.islice(_find_locks(loader, is_lock), 3)]


def _find_locks(loader: Any, is_lock: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    from .keeper import walk_objects

    for path, part in walk_objects(loader):
        if is_lock(part):
            yield path, part


def _is_shared_lock(part: Any) -> bool:
    from multiprocessing import synchronize

    return isinstance(part, synchronize.SemLock)


def _in_forks(functions: list[Callable[[], Together]]) -> list[Together]:
    """What functions return, each in a process of its own, at the same time. One that fails has
    no result."""
    children = []
    for function in functions:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                told = asdict(function())
                with os.fdopen(write, "w") as out:
                    json.dump(told, out)
                status = 0
            finally:
                os._exit(status)
        os.close(write)
        children.append((pid, read))
    found = []
    for pid, read in children:
        with os.fdopen(read) as source:
            text = source.read()
        os.waitpid(pid, 0)
        if text:
            found.append(parse(Together, json.loads(text)))
    return found
