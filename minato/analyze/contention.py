"""Samples by several processes and threads at once: what workers wait for each other for."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from .records import Contention, StageTimes, Threads, Together, parse
from .samples import Send, clock, indices, is_iterable, sample_maker
from .stages import FULL, LOCK
from .usage import Usage
from .work import SampleTimer

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
