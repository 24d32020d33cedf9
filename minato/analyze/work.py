"""Samples: which of them a measurement makes, what they cost, and what of them could be cached."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import synchronize
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker

from .._system import stat_fields
from ..dataset_calls import fetches_batches
from .records import (
    At, Cacheable, Contention, Reads, Request, StageTimes, Storage, Threads, Together, Used, Work,
)  # fmt: skip
from .stages import (
    FULL, LOCK, OPEN, OPENS, Call, Clocks, Stopwatch, hash_value, record_opened_paths, seed_generators,
    size_of, walk_objects,
)  # fmt: skip
from .watch import fork

#: what a measurement calls with each record of what it has found
Send = Callable[[Any], None]
clock = time.monotonic
#: batches that are planned at most
PLANNED = 4096


@contextlib.contextmanager
def as_worker(loader: Any) -> Iterator[None]:
    """Inside the block this process is the only worker of a loader that has workers: samples may need
    what its worker_init_fn sets up. Forks inherit that."""
    if not loader.num_workers:
        yield
        return
    vars(worker)["_worker_info"] = worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=loader.dataset)
    try:
        if loader.worker_init_fn is not None:
            loader.worker_init_fn(0)
        yield
    finally:
        vars(worker)["_worker_info"] = None


def is_iterable(loader: Any) -> bool:
    return isinstance(loader.dataset, IterableDataset)


@functools.lru_cache(1)
def sampler_batches(loader: Any) -> list[list[Any]]:
    """Batches of indices of one epoch, as its sampler gives them; of one index each where the loader
    makes no batches. The program's own generators are not those of this process. A sampler may be
    slow, so it runs once in a process."""
    batched = loader.batch_sampler is not None
    end, found = clock() + 1.0, []
    for given in loader.batch_sampler if batched else loader.sampler:
        found.append(list(given) if batched else [given])
        if len(found) >= PLANNED or clock() > end:
            break
    return found


def indices(loader: Any) -> list[Any]:
    """Single samples, each once, in the order of the sampler."""
    found: dict[str, Any] = {}
    for batch in sampler_batches(loader):
        for index in batch:
            found.setdefault(str(index), index)
    return list(found.values())


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


_TICK = os.sysconf("SC_CLK_TCK")


class Usage:
    """CPU seconds from now on: of this process and those it belongs with, and of all others on the
    same cores."""

    def __init__(self) -> None:
        self.began, self.busy, self.own = clock(), _busy_seconds(), _own_seconds()

    def summary(self, samples: int = 0) -> Used:
        """Of this process and its own; and for each sample."""
        took = max(clock() - self.began, 1e-6)
        cores = len(os.sched_getaffinity(0))
        own = max(0.0, _own_seconds() - self.own)
        others = max(0.0, _busy_seconds() - self.busy - own)
        return Used(own / took, others / took / cores, own / samples if samples else 0.0)


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
    """CPU seconds of this process and of all below it, and of those of them that have ended."""
    total = 0
    for pid in tree(os.getpid()):
        with contextlib.suppress(OSError):  # it has ended
            total += sum(map(int, stat_fields(pid)[11:15]))
    return total / _TICK


def tree(pid: int) -> list[int]:
    """A process and those below it. Keepers are none of them."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{each}/task"):
                with open(f"/proc/{each}/task/{task}/children") as file:
                    found += map(int, file.read().split())
    return found


#: samples without which a measurement says nothing
FEW = 16
#: share of the work phase in which samples are timed
TIMING = 0.75
#: clocks that add more to a sample are taken off
CLOCKS_ADD = 0.10
#: samples whose results are compared for two seeds
PROBED = 6
#: samples that are timed at most, and where several ways to make them are compared
TIMED, IN_TURNS = 4000, 400
#: what is below is no file of a dataset
NO_FILES = ("/proc/", "/sys/", "/dev/", sys.prefix)


def work(send: Send, request: Request, loader: Any) -> Work:
    files, started = record_opened_paths(), time.time()
    timed = SampleTimer(loader, send, FULL)
    usage = Usage()
    timed.run(request.seconds * TIMING)
    result = timed.work
    result.stages, result.usage = timed.stages(), usage.summary()
    result.costs = [(round(wall, 7), round(cpu, 7)) for wall, cpu in result.costs]
    timed.clocks.remove()
    end = clock() + request.seconds * 0.2
    paths = (path for path in map(os.path.abspath, files) if not path.startswith(NO_FILES) and os.path.isfile(path))
    result.files = list(dict.fromkeys(paths))[:5000]
    # the program has written these from its loop, when the keeper was forked, to the study
    ticks = int(stat_fields(os.getppid())[19])
    since = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / _TICK
    for path in result.files:
        with contextlib.suppress(OSError):
            result.new += [path] * (since <= os.stat(path).st_mtime < started)
    if any(stage.kind == OPEN and stage.again > 0.5 for stage in result.stages):
        result.kept_open = _kept_open_seconds(loader, clock() + 0.05 * request.seconds)
    result.photos = _photos_seconds(loader, clock() + 0.05 * request.seconds)
    try:
        result.cache, result.no_cache = _cacheable_part(loader, end)
    except Exception as error:
        result.no_cache = f"a sample failed ({type(error).__name__})"
    with contextlib.suppress(Exception):
        result.collate = _collate_seconds(loader, end)
    with contextlib.suppress(Exception):
        result.gil = _gil_use(loader, min(1.0, request.seconds * 0.05))
    return result


class SampleTimer:
    """Samples timed without and with clocks, by turns, each pair of the same sample and seed."""

    def __init__(self, loader: Any, send: Send, level: int) -> None:
        self.loader, self.send, self.level = loader, send, level
        self.clocks = Clocks()
        self.work = Work()  # what samples cost without clocks, and what failed
        self.clocked: list[tuple[float, float]] = []  # wall and CPU seconds of samples with clocks
        self.since = 0  # costs before the clocks of this level were set

    def run(self, seconds: float, plainly: bool = True, skip: int = 0) -> None:
        end, found, once = clock() + seconds, self.work, is_iterable(self.loader)
        for number, (index, make) in enumerate(sample_makers(self.loader, skip)):
            if number > 2 and (clock() > end or number > TIMED):
                return
            self.send(At(str(index)))
            try:
                if number < 2:  # what a first sample sets up is apart
                    seed_generators(number)
                    make()
                    if number == 1:
                        self.clocks.set(self.loader.dataset, self.level)
                    continue
                for clocked in (number % 2 == 0, number % 2 == 1) if plainly else (True,):
                    if once and plainly and clocked != (number % 4 < 2):
                        continue  # each sample of an iterable dataset is made once
                    seed_generators(number)
                    if clocked:
                        self.clocked.append(self.clocks.sample(make)[1:])
                    else:
                        found.costs.append(self.clocks.time(make)[1:])
                        found.indices.append(str(index))
            except Exception as error:
                found.failures += 1
                if len(found.failed) < 3:
                    found.failed.append(f"sample {index}: {type(error).__name__}: {error}")
                if found.failures >= 64 and not found.costs:
                    return
            if len(self.clocked) == 2 * FEW and plainly and self.level > OPENS:
                with_clocks, without = _mean_seconds(self.clocked), _mean_seconds(found.costs[self.since :])
                if with_clocks > (1 + CLOCKS_ADD) * without:
                    self.level, found.merged = self.level - 1, True
                    self.clocks.set(self.loader.dataset, self.level)
                    self.clocked, self.since = [], len(found.costs)

    def stages(self) -> list[StageTimes]:
        """Seconds of a sample, scaled to what it takes without clocks."""
        count = max(1, len(self.clocked))
        plain, clocked = (sum(wall for wall, _ in each) for each in (self.work.costs[self.since :], self.clocked))
        scale = plain / clocked if clocked and plain else 1.0
        if is_iterable(self.loader):
            scale = 1.0  # samples without clocks were others
        elif self.work.failures and plain:  # the stages that ran before a failure count, and its sample does not
            took = sum(stage.seconds for stage in self.clocks.stages.values()) * scale
            scale *= min(1.0, plain / max(took, 1e-9))
        opened, each = self.clocks.opened, scale / count
        found = [
            replace(
                stage, seconds=stage.seconds * each, cpu=stage.cpu * each, whole=stage.whole * each,
                calls=stage.calls / count, again=1 - len(opened.get(stage.label, ())) / max(1, stage.calls),
            ) for stage in self.clocks.stages.values()
        ]  # fmt: skip
        return sorted(found, key=lambda stage: -stage.seconds)


def time_in_turns(
    source: Iterable[tuple[Any, Callable[[], Any]]], setups: Sequence[Callable[[], None]], end: float
) -> tuple[list[list[tuple[float, float]]], list[str]]:
    """Wall and CPU seconds of samples after each of the setups, by turns, with the same numbers at random;
    and the error that ended each. What a first sample sets up is left out."""
    watch = Stopwatch()
    took, errors = [list[tuple[float, float]]() for _ in setups], [""] * len(setups)
    for number, (_index, make) in enumerate(source):
        if (clock() > end and number >= 5) or number > IN_TURNS:
            break
        for which in range(len(setups))[:: 1 if number % 2 else -1]:
            if errors[which]:
                continue
            setups[which]()
            seed_generators(number)
            try:
                cost = watch.time(make)[1:]
            except Exception as error:
                errors[which] = f"{type(error).__name__}: {error}".partition("\n")[0]
                continue
            took[which] += [cost] if number else []
    return took, errors


def _seconds_of(source: Iterable[tuple[Any, Callable[[], Any]]], end: float, skip: int = 0) -> float | None:
    """Seconds of a sample without the first ones; None where one fails."""
    [took], [error] = time_in_turns(source, [lambda: None], end)
    return _mean_seconds(took[skip:]) if took[skip:] and not error else None


def _kept_open_seconds(loader: Any, end: float) -> float | None:
    """What opens also reads what later calls find again, so its own time is less than it costs."""
    clocks = Clocks()
    clocks.keep_open(loader.dataset)
    seconds = _seconds_of(itertools.islice(sample_makers(loader), 4 * FEW), end, 3)  # the first ones open
    clocks.remove()
    return seconds


def _mean_seconds(costs: list[tuple[float, float]]) -> float:
    return sum(wall for wall, _ in costs) / max(1, len(costs))


def _collate_seconds(loader: Any, end: float) -> float | None:
    """Seconds of collate_fn for each sample."""
    if loader.batch_sampler is None:
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


def native_photos(loader: Any) -> Any:
    """The loader's dataset with its photos decoded by minato.ops; None if that is not known to be the same."""
    try:
        from ..ops.images import native_images

        return native_images(loader.dataset)
    except (ImportError, ValueError):
        return None


def _photos_seconds(loader: Any, end: float) -> float | None:
    dataset = native_photos(loader)
    if dataset is None:
        return None
    return _seconds_of(((index, partial(dataset.__getitem__, index)) for index in indices(loader)), end)


def _cacheable_part(loader: Any, end: float) -> tuple[Cacheable | None, str]:
    """What of a sample is the same for two seeds, all of it or its first stages; or None, and why there
    is nothing that a cache could keep."""
    if is_iterable(loader):
        return None, "samples of an iterable dataset have no index by which to find them"
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
        return None, "there was no time to look for one"
    if whole:
        return Cacheable(True, statistics.fmean(sizes), 1.0), ""
    if not same:
        return None, "the first stage of a sample is random, or its results cannot be compared"
    clocks.probe = False
    full = left = 0.0  # seconds of samples, all of them and where the results of the first calls are there
    for (_index, make), calls in zip(sample_makers(loader), saves):
        seed_generators(1)
        full += clocks.time(make)[1]
        seed_generators(1)
        clocks.replay = [(call.label, call.result) for call in calls[:same]]
        left += clocks.sample(make)[1]
        clocks.replay = None
    needed = statistics.fmean(calls[same - 1].size for calls in saves)
    return Cacheable(False, needed, max(0.0, 1 - left / full), same, saves[0][same - 1].label), ""


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


# ---- reads alone, and samples by several processes and threads at once -----------------------

#: bytes of a file that are read at most
READ_MOST = 1 << 24


def storage(request: Request, _loader: Any) -> Storage:
    """Reads alone, of the files that samples opened: 1 to 32 at a time."""
    paths = [path for path in request.files if os.access(path, os.R_OK)]
    sizes = [os.path.getsize(path) for path in paths]
    counts = 1, 4, 16, 32
    cold = _drop_pages(paths[: max(8, len(paths) // 8)])
    result = Storage(len(paths), sum(sizes), statistics.median(sizes) if sizes else 0.0, cold)
    for number, flight in enumerate(counts):
        end = clock() + request.seconds / len(counts)
        mine = paths[number :: len(counts)] or paths
        if cold:
            _drop_pages(mine)

        def read(path: str, end: float = end) -> int | None:
            """Bytes of a file: all of it, or some of one that is too large."""
            if clock() >= end:
                return None
            with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:  # it may go at any time
                return len(file.read(min(READ_MOST, os.fstat(file.fileno()).st_size)) or b"")
            return None

        began = clock()
        with ThreadPoolExecutor(flight) as pool:
            source = mine if cold else itertools.islice(itertools.cycle(mine), 20_000)
            done = [size for size in pool.map(read, source) if size is not None]
        took = max(clock() - began, 1e-6)
        result.rates.append(Reads(flight, len(done) / took, sum(done) / took, len(done)))
    return result


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


def contend(request: Request, loader: Any) -> Contention:
    """The same samples by one process, by several at once, and by as many threads: what workers
    wait for each other for takes longer then."""
    seconds, count = request.seconds, request.processes
    usage = Usage()
    one = _run_processes(loader, 1, 0.25 * seconds)
    several = _run_processes(loader, count, 0.35 * seconds)
    locks = list(_find_locks(loader, synchronize.SemLock))[:3]
    result = Contention(count, one, several, locks=locks, usage=usage.summary())
    if not is_iterable(loader):
        result.threads = _compare_threads(loader, count, 0.3 * seconds)
    return result


def _run_processes(loader: Any, count: int, seconds: float) -> Together:
    def time_samples(number: int) -> Together:
        timed = SampleTimer(loader, lambda _message: None, FULL)
        for lock in _find_locks(loader, synchronize.SemLock).values():
            lock.acquire = timed.clocks.wrap(lock.acquire, "wait for a lock", LOCK)
        timed.run(seconds, plainly=False, skip=number * 37)
        wall, cpu = map(sum, zip(*timed.clocked)) if timed.clocked else (0.0, 0.0)
        return Together(len(timed.clocked), wall, cpu, timed.stages())

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
    """Samples by one thread and by several, by turns: what other programs do changes meanwhile.

    A thread that waits for another wakes up now and then to look, so the time in which it had no core
    is not apart, and there are no clocks inside. Each is in a process of its own, which a dataset that
    is not made for threads may end. The sampler has run before: it would be a part of the time, and
    threads would share it."""
    order, make = indices(loader), sample_maker(loader.dataset)

    def make_all(threads: int) -> Together:
        began = clock()

        def make_some(skip: int) -> int:
            for made, index in enumerate(itertools.islice(itertools.cycle(order), skip, None), 1):
                with contextlib.suppress(Exception):  # the work phase has told of it
                    make(index)
                if clock() - began > seconds / 8:
                    return made
            return 0  # there are no samples

        with ThreadPoolExecutor(threads) as pool:
            samples = sum(pool.map(make_some, [37 * n for n in range(threads)]))
        return Together(samples, threads * (clock() - began) / samples)

    end, pairs = clock() + seconds, list[list[Together]]()
    while len(pairs) < 4 and (not pairs or clock() <= end):  # one, where samples take so long
        pairs.append([run for n in (1, count) for run in _in_forks([partial(make_all, n)])])
    found = []
    for runs in zip(*(pair for pair in pairs if len(pair) == 2)):
        samples = sum(run.samples for run in runs)
        found.append(Together(samples, sum(run.samples * run.seconds for run in runs) / samples))
    if not found:
        return None
    return Threads(found[0], found[1], list(_find_locks(loader, THREAD_LOCKS))[:3])


def _find_locks(loader: Any, kinds: Any) -> dict[str, Any]:
    """Locks of these classes that a dataset holds, by their paths."""
    return {path: part for path, part in walk_objects(loader) if isinstance(part, kinds)}


def _in_forks(functions: list[Callable[[], Together]]) -> list[Together]:
    """What functions return, each in a process of its own, at the same time. One that fails has
    no result."""
    def tell(function: Callable[[], Together], write: int) -> None:
        with os.fdopen(write, "wb") as out:
            pickle.dump(function(), out)

    children = []
    for function in functions:
        read, write = os.pipe()
        children.append((fork(partial(tell, function, write)), read))
        os.close(write)
    found: list[Together] = []
    for pid, read in children:
        with os.fdopen(read, "rb") as source:
            told = source.read()
        os.waitpid(pid, 0)
        found += [pickle.loads(told)] if told else []
    return found
