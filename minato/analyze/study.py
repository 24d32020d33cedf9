"""The measurements: samples, files, and loaders. Each runs in a fork of the keeper.

``run`` answers one request with messages: ``at`` names the sample that begins, and the result comes
again and again while it grows. So a run that is cut off leaves what it has found.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import statistics
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset

from ..dataset_calls import fetches_batches
from ..iterators import window
from ..iterators.across_iterators import memo_of
from ..loader import DataLoader
from ..options import Options
from ..patch import _torch as patched
from ..workers import library_threads
from . import codecs, orders
from .stages import (
    FULL,
    LOCK,
    NONE,
    Call,
    Clocks,
    copy_value,
    hash_value,
    record_opened_paths,
    seed_generators,
    size_of,
)

Send = Callable[[dict[str, Any]], None]
clock = time.monotonic

#: samples without which a measurement says nothing
FEW = 16
#: clocks that add more to a sample are taken off
CLOCKS_ADD = 0.10
#: samples whose results are compared for two seeds
PROBED = 6
#: samples that are timed at most, batches that are planned at most
TIMED, PLANNED = 4000, 4096
#: bytes of results that a replay may hold
REPLAYED = 1 << 28
CHUNK = 1 << 18


def run(request: dict[str, Any], loader: Any, send: Send) -> None:
    """One request, in a process of its own."""
    if request.get("cores"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: request["cores"]])
    library_threads.limit(True)
    _forget_helpers()
    measure = {
        "work": work, "contend": contend, "storage": storage, "rate": rate, "codecs": codecs.measure,
        "orders": orders.measure,
    }[request["do"]]  # fmt: skip
    try:
        measure(request, loader, send)
    except Exception as error:
        text = traceback.format_exc(limit=-3)
        send({"kind": "failed", "error": f"{type(error).__name__}: {error}", "trace": text})


def _forget_helpers() -> None:
    """multiprocessing's resource tracker belongs to the program; its connection is closed here."""
    from multiprocessing import resource_tracker

    tracker: Any = vars(resource_tracker)["_resource_tracker"]
    tracker._fd = tracker._pid = None


# ---- which samples -------------------------------------------------------------------------


def is_iterable(loader: Any) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def sampler_batches(loader: Any) -> list[Any]:
    """Batches of indices (single ones where the loader makes no batches) of one epoch, as its
    sampler gives them. The program's own generators are not those of this process."""
    source = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    end, found = clock() + 2.0, []
    for batch in source:
        found.append(batch)
        if len(found) >= PLANNED or clock() > end:
            break
    return found


def indices(loader: Any) -> list[Any]:
    """Single samples, each once, in the order of the sampler."""
    found: dict[Any, None] = {}
    for batch in sampler_batches(loader):
        found.update(dict.fromkeys(batch if isinstance(batch, (list, tuple)) else [batch]))
    return list(found)


def sample_makers(loader: Any, skip: int = 0) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """Without end: an index and what makes that sample; the same sample comes again when all
    have been made. An iterable dataset gives the next sample at each call."""
    dataset = loader.dataset
    if is_iterable(loader):
        source = iter(dataset)
        for number in itertools.count():
            def next_sample() -> Any:
                nonlocal source
                try:
                    return next(source)
                except StopIteration:
                    source = iter(dataset)
                    return next(source)

            yield number, next_sample
    make = sample_maker(dataset)
    for index in itertools.islice(itertools.cycle(indices(loader)), skip, None):
        yield index, partial(make, index)


def sample_maker(dataset: Any) -> Callable[[Any], Any]:
    """What makes one sample by its index."""
    if fetches_batches(dataset):
        return lambda index: dataset.__getitems__([index])[0]
    made: Callable[[Any], Any] = dataset.__getitem__
    return made


# ---- the work of a sample ------------------------------------------------------------------


class _SampleTimer:
    """Samples timed without and with clocks, by turns, each pair of the same sample and seed."""

    def __init__(self, loader: Any, send: Send, level: int) -> None:
        self.loader, self.send, self.level = loader, send, level
        self.clocks = Clocks()
        self.costs: list[tuple[float, float]] = []  # without clocks: wall and CPU seconds
        self.indices: list[Any] = []
        self.pairs = 0
        self.plain = self.clocked = self.clocked_cpu = 0.0
        self.first: list[float] = []
        self.failed: list[str] = []
        self.failures = 0
        self.merged = False

    def run(self, seconds: float, plainly: bool = True, skip: int = 0) -> None:
        end = clock() + seconds
        source = sample_makers(self.loader, skip)
        again = is_iterable(self.loader)
        for number, (index, make) in enumerate(source):
            if number > 2 and (clock() > end or number > TIMED):
                return
            self.send({"kind": "at", "index": str(index)})
            try:
                if number < 2:  # what a first sample sets up is apart
                    began = time.perf_counter()
                    seed_generators(number)
                    make()
                    self.first.append(time.perf_counter() - began)
                    if number == 1:
                        self.clocks.set(self.loader.dataset, self.level)
                    continue
                for clocked in (number % 2 == 0, number % 2 == 1) if plainly else (True,):
                    if again and plainly and clocked != (number % 4 < 2):
                        continue  # each sample of an iterable dataset is made once
                    seed_generators(number)
                    self._one(index, make, clocked)
                self.pairs += 1
            except Exception as error:
                self._note_failure(index, error)
                if self.failures >= 64 and not self.costs:
                    return
            if self.pairs == 2 * FEW and plainly:
                self._limit_clocks()
            if plainly:
                self.tell()

    def _one(self, index: Any, make: Callable[[], Any], clocked: bool) -> None:
        if clocked:
            _, wall, cpu = self.clocks.sample(make)
            self.clocked += wall
            self.clocked_cpu += cpu
        else:
            began = self.clocks.now()
            make()
            ended = self.clocks.now()
            cost = ended[0] - began[0], ended[1] - began[1]
            self.costs.append(cost)
            self.indices.append(index)
            self.plain += cost[0]

    def _limit_clocks(self) -> None:
        if self.level > NONE and self.clocked > (1 + CLOCKS_ADD) * self.plain:
            self.level, self.merged = self.level - 1, True
            self.clocks.set(self.loader.dataset, self.level)
            self.pairs, self.plain, self.clocked = 0, 0.0, 0.0

    def _note_failure(self, index: Any, error: Exception) -> None:
        self.failures += 1
        if len(self.failed) < 3:
            self.failed.append(f"sample {index}: {type(error).__name__}: {error}")

    def stages(self) -> list[dict[str, Any]]:
        """Seconds of a sample, scaled to what it takes without clocks."""
        count = max(1, self.pairs)
        scale = self.plain / self.clocked if self.clocked and self.plain else 1.0
        if is_iterable(self.loader) and self.costs and self.clocked:
            scale = 1.0
            count = max(1, self.pairs - len(self.costs))
        elif self.failures and self.plain:  # the stages that ran before a failure count, and its sample does not
            took = sum(stage.wall for stage in self.clocks.stages.values()) * scale
            scale *= min(1.0, self.plain / max(took, 1e-9))
        found = [
            {
                "label": stage.label, "kind": stage.kind, "reads": stage.reads(),
                "seconds": stage.wall / count * scale, "cpu": stage.cpu / count * scale,
                "calls": stage.calls / count, "inside": sorted(stage.inside),
            }
            for stage in self.clocks.stages.values()
        ]  # fmt: skip
        return sorted(found, key=lambda stage: -stage["seconds"])

    def tell(self) -> None:
        if getattr(self, "told", 0.0) + 1.0 < clock():
            self.told = clock()
            self.send(self.result())

    def result(self) -> dict[str, Any]:
        return {
            "kind": "work", "costs": [(round(w, 7), round(c, 7)) for w, c in self.costs],
            "indices": [str(i) for i in self.indices], "first": self.first, "merged": self.merged,
            "stages": self.stages(), "failed": self.failed, "failures": self.failures,
        }  # fmt: skip


def work(request: dict[str, Any], loader: Any, send: Send) -> None:
    files = record_opened_paths()
    timed = _SampleTimer(loader, send, FULL)
    usage = Usage()
    timed.run(request["seconds"] * 0.75)
    result = {**timed.result(), "usage": usage.summary()}
    send(result)
    timed.clocks.remove()
    end = clock() + request["seconds"] * 0.2
    result["files"] = list(dict.fromkeys(_regular_files(files)))[:5000]
    result["bytes"] = _bytes_of_samples(loader)
    if not is_iterable(loader):
        with contextlib.suppress(Exception):
            result["cache"] = _cacheable_part(loader, end)
    send(result)
    with contextlib.suppress(Exception):
        result["collate"] = _collate_seconds(loader, end)
    with contextlib.suppress(Exception):
        result["gil"] = _gil_use(loader, min(1.0, request["seconds"] * 0.05))
    send(result)


def _regular_files(paths: list[str]) -> Iterator[str]:
    for path in paths:
        full = os.path.abspath(path)
        if not full.startswith(("/proc/", "/sys/", "/dev/", sys.prefix)) and os.path.isfile(full):
            yield full


def _bytes_of_samples(loader: Any) -> float:
    sizes = []
    for _index, make in itertools.islice(sample_makers(loader), 3):
        with contextlib.suppress(Exception):
            sizes.append(size_of(make()))
    return statistics.fmean(sizes) if sizes else 0.0


def _collate_seconds(loader: Any, end: float) -> float | None:
    """Seconds of collate_fn for each sample."""
    if loader.batch_size is None and loader.batch_sampler is None:
        return None
    made: list[Any] = []
    for _index, make in itertools.islice(sample_makers(loader), min(loader.batch_size or FEW, 64)):
        if clock() > end:
            break
        made.append(make())
    if not made:
        return None
    loader.collate_fn(list(made))
    began = clock()
    loader.collate_fn(list(made))
    return (clock() - began) / len(made)


def _cacheable_part(loader: Any, end: float) -> dict[str, Any] | None:
    """What of a sample is the same for two seeds: all of it, or its first stages."""
    clocks = Clocks()
    clocks.set(loader.dataset, FULL)
    clocks.probe = True
    same, whole = 1 << 30, True
    sizes: list[int] = []
    saves: list[list[Call]] = []
    for _index, make in itertools.islice(sample_makers(loader), PROBED):
        if clock() > end and sizes:
            break
        seen = []
        for seed in (1, 2):
            seed_generators(seed)
            clocks.calls = []
            made, _, _ = clocks.sample(make)
            seen.append((hash_value(made), size_of(made), list(clocks.calls)))
        (one, size, calls), (two, _, again) = seen
        whole = whole and one is not None and one == two
        common = 0
        for n, (a, b) in enumerate(zip(calls, again), 1):
            if (a.label, a.digest) != (b.label, b.digest):
                break
            if a.digest is not None and a.size:  # else it says nothing of what it has done
                common = n
        same = min(same, common)
        sizes.append(size)
        saves.append(calls)
    if not sizes:
        return None
    if whole:
        return {"whole": True, "bytes": statistics.fmean(sizes), "share": 1.0, "calls": 0, "after": ""}
    if not same:
        return None
    share = _saved_share(loader, clocks, [calls[:same] for calls in saves])
    needed = statistics.fmean(calls[same - 1].size for calls in saves)
    after = saves[0][same - 1].label
    return {"whole": False, "bytes": needed, "share": share, "calls": same, "after": after}


def _saved_share(loader: Any, clocks: Clocks, held: list[list[Call]]) -> float:
    """Share of a sample's time that is saved where the results of its first calls are there."""
    clocks.probe = False
    whole = left = 0.0
    for (_index, make), calls in zip(sample_makers(loader), held):
        seed_generators(1)
        began, _ = clocks.now()
        make()
        whole += clocks.now()[0] - began
        seed_generators(1)
        clocks.replay = [(call.label, call.result) for call in calls]
        left += clocks.sample(make)[1]
        clocks.replay = None
    return max(0.0, 1 - left / whole)


def _gil_use(loader: Any, seconds: float) -> str | None:
    """Whether a sample holds the interpreter's lock: how often another thread comes to run."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    beats, stop = [0], threading.Event()

    def beat() -> None:
        while not stop.is_set():
            time.sleep(0.0005)
            beats[0] += 1

    heart = threading.Thread(target=beat, daemon=True)
    heart.start()
    began = clock()
    time.sleep(seconds / 4)
    idle = beats[0] / (clock() - began)
    beats[0], began = 0, clock()
    for _index, make in sample_makers(loader):
        make()
        if clock() - began > seconds:
            break
    during = beats[0] / (clock() - began)
    stop.set()
    heart.join()
    share = during / idle if idle else 1.0
    return "holds it" if share < 0.25 else "lets go" if share > 0.7 else "mixed"


# ---- several workers at once ---------------------------------------------------------------


def contend(request: dict[str, Any], loader: Any, send: Send) -> None:
    """The same samples by one process, by several at once, and by as many threads: what workers
    wait for each other for takes longer then."""
    seconds, count = request["seconds"], request["processes"]
    usage = Usage()
    one = _run_processes(loader, 1, 0.25 * seconds)
    several = _run_processes(loader, count, 0.35 * seconds)
    result = {"kind": "contend", "processes": count, "one": one, "several": several, "threads": None,
              "locks": _lock_paths(loader, _is_shared_lock), "usage": usage.summary()}  # fmt: skip
    send(result)
    if not is_iterable(loader):
        alone, threads = _compare_threads(loader, count, 0.3 * seconds)
        if alone and threads:
            locks = _lock_paths(loader, lambda part: isinstance(part, THREAD_LOCKS))
            send({**result, "threads": {"alone": alone, "several": threads, "locks": locks}})


#: Locks of one process: each worker process has its own.
THREAD_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore)


def _is_shared_lock(part: Any) -> bool:
    from multiprocessing import synchronize

    return isinstance(part, synchronize.SemLock)


def _lock_paths(loader: Any, is_lock: Callable[[Any], bool]) -> list[str]:
    """Paths of at most three locks that a dataset holds."""
    return [path for path, _part in itertools.islice(_find_locks(loader, is_lock), 3)]


def _compare_threads(
    loader: Any, count: int, seconds: float
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Samples by one thread and by several, by turns: what other programs do changes meanwhile."""
    order, make = indices(loader), sample_maker(loader.dataset)
    end, whole = clock() + seconds, []
    for number in range(4):
        if number and clock() > end:  # samples take so long that one pair has to do
            break
        pair = [_run_threads(order, make, n, seconds / 8) for n in (1, count)]
        whole += [[run for run in pair if run is not None]] if None not in pair else []
    if not whole:
        return None, None
    found = []
    for runs in zip(*whole):
        samples = sum(run["samples"] for run in runs)
        total = sum(run["samples"] * run["seconds"] for run in runs)
        found.append({"samples": samples, "seconds": total / samples})
    return found[0], found[1]


def _run_threads(
    order: list[Any], make: Callable[[Any], Any], count: int, seconds: float
) -> dict[str, Any] | None:
    """Samples by threads, and seconds of each of them. A thread that waits for another wakes up now
    and then to look, so the time in which it had no core is not apart, and there are no clocks
    inside. A process of its own, which a dataset that is not made for threads may end. The sampler
    has run before: it would be a part of the time, and threads would share it."""

    def make_all() -> dict[str, Any]:
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
        return {"samples": samples, "seconds": count * (clock() - began) / samples}

    results = _in_forks([make_all])
    return results[0] if results else None


def _find_locks(loader: Any, is_lock: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    from .keeper import walk_objects

    for path, part in walk_objects(loader):
        if is_lock(part):
            yield path, part


def _in_forks(functions: list[Callable[[], dict[str, Any]]]) -> list[dict[str, Any]]:
    """What functions return, each in a process of its own, at the same time. One that fails has
    no result."""
    children = []
    for function in functions:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                told = function()
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
            found.append(json.loads(text))
    return found


def _run_processes(loader: Any, count: int, seconds: float) -> dict[str, Any]:
    def time_samples(number: int) -> dict[str, Any]:
        timed = _SampleTimer(loader, lambda _message: None, FULL)
        for _path, lock in _find_locks(loader, _is_shared_lock):
            lock.acquire = timed.clocks.wrap(lock.acquire, "wait for a lock", LOCK)
        timed.run(seconds, plainly=False, skip=number * 37)
        return {"samples": timed.pairs, "seconds": timed.clocked, "cpu": timed.clocked_cpu,
                "stages": timed.stages()}  # fmt: skip

    found = _in_forks([partial(time_samples, number) for number in range(count)])
    samples = sum(one["samples"] for one in found)
    stages: dict[str, dict[str, Any]] = {}
    for one in found:
        for stage in one["stages"]:
            into = stages.setdefault(stage["label"], {**stage, "seconds": 0.0, "cpu": 0.0})
            for name in ("seconds", "cpu"):
                into[name] += stage[name] * one["samples"] / max(1, samples)
    means = {name: sum(one[name] for one in found) / max(1, samples) for name in ("seconds", "cpu")}
    return {"samples": samples, **means, "stages": list(stages.values())}


# ---- storage -------------------------------------------------------------------------------


def storage(request: dict[str, Any], loader: Any, send: Send) -> None:
    """Reads alone, of the files that samples opened: 1 to 32 at a time."""
    paths = [path for path in request["files"] if os.access(path, os.R_OK)]
    sizes = [os.path.getsize(path) for path in paths]
    result: dict[str, Any] = {
        "kind": "storage", "files": len(paths), "bytes": sum(sizes), "rates": [],
        "median": statistics.median(sizes) if sizes else 0,
    }  # fmt: skip
    counts = [1, 4, 16, 32]
    cold = _drop_pages(paths[: max(8, len(paths) // 8)])
    result["cold"] = cold
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
        result["rates"].append({
            "in_flight": flight, "files_per_s": len(done) / took, "bytes_per_s": sum(done) / took,
            "files": len(done),
        })  # fmt: skip
        send(result)


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


# ---- loaders -------------------------------------------------------------------------------


class _Batches:
    """A batch sampler: the same batches again and again, in epochs of ``length`` batches. An epoch
    ends earlier where ``cut`` is set. Without a length there is one epoch, which has no end."""

    def __init__(self, batches: list[Any], length: int = 0) -> None:
        self.batches = itertools.cycle(batches)
        self.length = length
        self.cut = False
        self.over = False  # the epoch has no more batches; those that are on their way are left

    def __iter__(self) -> Iterator[Any]:
        self.cut = self.over = False
        for number in itertools.count(1):
            yield next(self.batches)
            if self.cut or number == self.length:
                break
        self.over = True


def resize_batches(batches: list[Any], size: int | None) -> list[list[Any]]:
    """Batches of another size, of the same samples in the same order."""
    lists = [batch if isinstance(batch, (list, tuple)) else [batch] for batch in batches]
    if size is None:
        return [list(batch) for batch in lists]
    flat = list(itertools.chain.from_iterable(lists))
    return [flat[n : n + size] for n in range(0, len(flat), size)]


def choose_batches(
    batches: list[list[Any]], costs: dict[str, float], most: int, part: float
) -> list[list[Any]]:
    """At most ``most`` consecutive batches of samples with known costs, whose mean cost is nearest to the
    mean of all such batches. part: the share of these batches that is passed over first."""
    known = [batch for batch in batches if all(str(index) in costs for index in batch)]
    if len(known) <= most:
        return known
    sums = [0.0, *itertools.accumulate(sum(costs[str(index)] for index in batch) for batch in known)]
    mean, least = sums[-1] / len(known), max(1, 2 * most // 3)
    begin, size = min(
        (
            (begin, size) for size in range(most, least - 1, -1)
            for begin in range(int(part * (len(known) - size)), len(known) - size + 1)
        ),
        key=lambda some: abs((sums[some[0] + some[1]] - sums[some[0]]) / some[1] - mean),
    )  # fmt: skip
    return known[begin : begin + size]


def look_ahead_as(loader: Any, made: Any, costs: dict[str, float]) -> None:
    """Minato's loader looks as far ahead as it would with the program's sampler. costs: the seconds of
    samples that it has learnt in an earlier epoch."""
    if window.may_look_ahead(loader):
        window.may_look_ahead = lambda loader: True  # this process has no other loader
    known = {int(index): seconds for index, seconds in costs.items() if index.isdecimal()}
    wall = [int(seconds * 1e9) for seconds in known.values()]
    memo_of(made).load_costs(array("q", known).tobytes(), array("q", wall).tobytes())


def rebuild(loader: Any, request: dict[str, Any]) -> Any:
    """The program's loader with another class or number of workers, over samples that are the
    same for each."""
    workers, length = request["workers"], request.get("length", 0)
    given: dict[str, Any] = {
        "num_workers": workers, "collate_fn": loader.collate_fn,
        "worker_init_fn": loader.worker_init_fn, "in_order": getattr(loader, "in_order", True),
    }  # fmt: skip
    if workers:
        given["multiprocessing_context"] = "fork"
        given["persistent_workers"] = request.get("persistent", bool(loader.persistent_workers))
        if loader.prefetch_factor is not None:
            given["prefetch_factor"] = loader.prefetch_factor
    if is_iterable(loader):
        given["batch_size"] = loader.batch_size
    elif loader.batch_sampler is None:
        given.update(batch_size=None, sampler=_Batches(sampler_batches(loader), length))
    else:
        batches = resize_batches(sampler_batches(loader), request.get("batch"))
        if request.get("most"):
            batches = choose_batches(batches, request["costs"], request["most"], request["part"])
            length = len(batches)
        skip = request.get("skip", 0) % len(batches)
        given["batch_sampler"] = _Batches(batches[skip:] + batches[:skip], length)
    dataset = loader.dataset
    if request.get("same"):
        dataset = SameSample(next(sample_makers(loader))[1]())
        given["in_order"] = True
    if request.get("cached"):
        dataset = ReplayDataset(dataset, request["cached"], batches)
        length = min(length, len(dataset.batches)) if request.get("most") else length
        given["batch_sampler"] = _Batches(dataset.batches, length)
    if request.get("codec"):
        given["batch_sampler"] = _Batches(codecs.replace_files(dataset, batches, request["codec"]), length)
    if request.get("order"):
        orders.reorder(dataset, *request["order"])
    own = isinstance(loader, DataLoader) or patched.active
    kind = request["loader"]
    if kind == "own":
        kind = "minato" if own else "torch"
    while patched.active:
        patched.release()
    if kind == "torch":
        return torch.utils.data.DataLoader(dataset, **given)
    if own:
        options = {k: v for k, v in vars(Options.of(loader)).items() if k != "pending_state"}
        options.update(device=None, on_error="raise", autoscale=None, prefetch_next_epoch=False)
        given.update(options)
    else:
        given.pop("in_order")
    if request.get("worker_type"):
        given["worker_type"] = request["worker_type"]
    if request.get("same") and given.get("worker_type") == "native":
        given["worker_type"] = None  # its dataset has no native pipeline
    if given.get("worker_type") in ("native", "thread"):
        given.pop("multiprocessing_context", None)
    made = DataLoader(dataset, **given)
    if request.get("most"):
        look_ahead_as(loader, made, request["costs"] if request["learnt"] else {})
    return made


class SameSample:
    """A dataset of one sample: what is left is the price of handing it over."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample

    def __getitem__(self, _index: Any) -> Any:
        return self.sample

    def __len__(self) -> int:
        return 1 << 40


class ReplayDataset:
    """A dataset of which some samples, or the first stages of some, are made once and handed out
    again: the steady state of a cache."""

    def __init__(self, dataset: Any, calls: int, batches: list[list[Any]]) -> None:
        self.dataset, self.calls = dataset, calls if calls > 0 else 0
        self.clocks = Clocks()
        self.held: dict[Any, Any] = {}
        if self.calls:
            self.clocks.set(dataset, FULL)
            self.clocks.probe = True
        self.batches: list[list[Any]] = []
        size, end = 0, clock() + 4.0
        for batch in batches:
            for index in batch:
                if index not in self.held:
                    seed_generators(1)
                    self.held[index] = self._hold(index)
                    size += size_of(self.held[index])
            self.batches.append(batch)
            if size > REPLAYED or clock() > end:
                break
        self.clocks.probe = False

    def _hold(self, index: Any) -> Any:
        if not self.calls:
            return self.dataset[index]
        self.clocks.calls = []
        self.clocks.sample(lambda: self.dataset[index])
        return [(call.label, call.result) for call in self.clocks.calls[: self.calls]]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        if not self.calls:
            return copy_value(self.held[index])
        self.clocks.thread = threading.get_ident()
        self.clocks.replay = list(self.held[index])
        made, _, _ = self.clocks.sample(lambda: self.dataset[index])
        self.clocks.replay = None
        return made


class _Pace:
    """How fast a loader delivers once its workers have started: the time of a batch in the middle of
    an epoch, and what the end of an epoch costs until the first batches of the next one are there."""

    def __init__(self, workers: int, length: int, ahead: int) -> None:
        self.round = max(1, workers)  # batches that arrive together
        #: first batches of an epoch that belong to its beginning
        self.firsts = min(self.round, length or self.round)
        #: batches until the loader is in its stride: a slow sample delays up to ``ahead`` later ones
        self.stride = self.firsts + (min(ahead, max(0, length // 2 - self.firsts)) if length else ahead)
        self.number = 0  # batches of this epoch
        self.batches = self.samples = self.ends = self.middle = 0
        self.seconds = self.inside = self.between = self.again = 0.0
        self.beginning = False  # an epoch has begun, and its first batches are not all there
        self.partial: list[float] = []

    def begin(self) -> None:
        """An epoch has ended, and the next one begins."""
        self.number, self.beginning, self.partial = 0, True, []

    def add(self, took: float, samples: int, inside: float, over: bool) -> None:
        """A batch, and the step on it. inside: seconds in which the loader was waited for. over: the
        epoch has no more batches to begin."""
        self.number += 1
        self.batches, self.samples = self.batches + 1, self.samples + samples
        self.seconds, self.inside = self.seconds + took, self.inside + inside
        if self.beginning:
            self.again += inside if self.number == 1 else 0.0
            if self.number == self.firsts:
                self.beginning, self.ends = False, self.ends + 1
        elif not over and self.number > self.stride:
            self.partial.append(took)
            if len(self.partial) == self.round:
                self.middle, self.between = self.middle + self.round, self.between + sum(self.partial)
                self.partial = []

    def even(self) -> bool:
        """Whether this moment is not within batches that arrive together."""
        return not self.beginning and self.batches >= 2 and self.number % self.round == 0

    def batch(self) -> float:
        """Seconds of a batch in the middle of an epoch."""
        if self.middle and (self.ends or self.beginning):
            return self.between / self.middle
        return self.seconds / max(1, self.batches)

    def end(self) -> float | None:
        """Seconds that the end of an epoch costs; None where none was seen."""
        if not self.ends or self.beginning:
            return None
        return max(0.0, self.seconds - self.batches * self.batch()) / self.ends


#: share of a measurement after which an epoch is ended, so that the end is measured, too
UNTIL_CUT = 0.6


def rate(request: dict[str, Any], loader: Any, send: Send) -> None:
    """Samples a second that a loader delivers, to a step that takes ``step`` seconds a batch and
    computes on ``step_cores`` of the cores. Epochs end as those of the program do, after ``length``
    batches. One is ended early where it is longer than the measurement."""
    made = rebuild(loader, request)
    if request.get("most"):
        return send(_whole_epochs(made, request))
    workers, step, seconds = request["workers"], request.get("step", 0.0), request["seconds"]
    batches = next((b for b in (made.batch_sampler, made.sampler) if isinstance(b, _Batches)), None)
    length = request.get("length", 0) if batches is not None else 0
    ahead = workers * (made.prefetch_factor or 2)
    pace = _Pace(workers, length, ahead)
    began = clock()
    iterator = iter(made)
    first: float | None = None
    usage: Usage | None = None
    warm, since, told = 0, 0.0, began
    sized = request.get("batch") or getattr(made, "batch_size", None)

    def result() -> dict[str, Any]:
        usual, ends = pace.batch(), pace.ends
        return {
            "kind": "rate", "loader": request["loader"], "workers": workers, "first": first,
            "batches": pace.batches, "samples": pace.samples, "seconds": pace.seconds, "waited": pace.inside,
            "rate": pace.samples / pace.batches / usual if usual > 0 else None,
            "end": pace.end(), "again": pace.again / ends if ends else None,
            "usage": usage.summary(pace.samples) if usage is not None else None,
        }  # fmt: skip

    while True:
        asked = clock()
        try:
            batch = next(iterator)
        except StopIteration:
            if batches is not None:
                pace.begin()
            begun = clock()
            iterator = iter(made)
            batch = next(iterator)
        else:
            begun = asked
        now = clock()
        inside, over = now - begun, batches is not None and batches.over
        first = now - began if first is None else first
        if step:
            consume(step, request.get("step_cores", 0.0))
            now = clock()
        if usage is None:
            pace.number += 1
            warm += 1
            if warm >= pace.stride or warm >= pace.round and now - began > first + 0.3 * seconds:
                pace.beginning = False
                since, usage = clock(), Usage()
            continue
        pace.add(now - asked, sized or _count_rows(batch), inside, over)
        spent = now - since
        if spent > seconds and pace.even() and (pace.ends or not over) or spent > 1.5 * seconds:
            break
        if batches is not None and length and not (pace.ends or pace.beginning):
            batches.cut = batches.cut or (
                spent > UNTIL_CUT * seconds and (ahead + pace.round) * pace.batch() < seconds
            )
        if now - told > 1.0:
            told = now
            send(result())
    send(result())


def _whole_epochs(made: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Samples a second from the start of an epoch to the end of one. So samples that were made ahead
    count where they were made."""
    batches: _Batches = made.batch_sampler
    length, samples, count, seconds = batches.length, 0, 0, 0.0
    first: float | None = None
    if made.persistent_workers:  # they have started
        batches.length = min(length, request["workers"])
        for _ in made:
            pass
        batches.length = length
    usage = Usage()
    while seconds < 0.5 * request["seconds"]:
        began = clock()
        for batch in made:
            first = clock() - began if first is None else first
            samples, count = samples + _count_rows(batch), count + 1
            consume(request.get("step", 0.0), request.get("step_cores", 0.0))
        seconds += clock() - began
    return {
        "kind": "rate", "loader": request["loader"], "workers": request["workers"], "first": first,
        "batches": count, "samples": samples, "seconds": seconds, "rate": samples / seconds,
        "epoch": length, "end": None, "again": None, "usage": usage.summary(samples),
    }  # fmt: skip


def _count_rows(batch: Any) -> int:
    from .watch import measure_batch

    return measure_batch(batch, [])[1] or 1


_LOAD = bytes(1 << 16)


def consume(seconds: float, cores: float) -> None:
    """In place of a step: it waits, or computes without the interpreter's lock."""
    end = clock() + seconds
    if cores < 0.5:
        time.sleep(seconds)
        return
    others = [threading.Thread(target=_compute, args=(end,)) for _ in range(round(cores) - 1)]
    for thread in others:
        thread.start()
    _compute(end)
    for thread in others:
        thread.join()


def _compute(end: float) -> None:
    while clock() < end:
        hashlib.sha256(_LOAD).digest()


# ---- who uses the cores --------------------------------------------------------------------


class Usage:
    """CPU seconds from now on: of this process group, and of all others on the same cores."""

    def __init__(self) -> None:
        self.began, self.busy, self.own = clock(), _busy_seconds(), _own_seconds()

    def summary(self, samples: int = 0) -> dict[str, float]:
        took = max(clock() - self.began, 1e-6)
        cores = len(os.sched_getaffinity(0))
        own = max(0.0, _own_seconds() - self.own)
        others = max(0.0, _busy_seconds() - self.busy - own)
        return {
            "cores": own / took, "others": others / took / cores,
            "cpu_per_sample": own / samples if samples else 0.0,
        }  # fmt: skip


_TICK = os.sysconf("SC_CLK_TCK")


def _busy_seconds() -> float:
    """CPU seconds of the cores that this process may use."""
    usable, total = os.sched_getaffinity(0), 0
    with open("/proc/stat") as file:
        for line in file:
            name, *numbers = line.split()
            if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in usable:
                user, nice, system, _idle, _wait, irq, soft = map(int, numbers[:7])
                total += user + nice + system + irq + soft
    return total / _TICK


def _own_seconds() -> float:
    """CPU seconds of the processes of this group, and of those that have ended."""
    group, total = os.getpgid(0), 0
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat") as file:
                    parts = file.read().rpartition(")")[2].split()
                if int(parts[2]) == group:
                    total += sum(map(int, parts[11:15]))
    return total / _TICK
