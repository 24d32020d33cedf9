"""The rate of a loader: the program's own, or with another class, other workers, a cache, a codec."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from ..iterators import planner
from ..iterators.loader_memo import memo_of
from ..loader import DataLoader
from ..options import Options
from ..patch import _torch as patched
from . import codecs, orders
from .records import Rate, RateRequest, Request, Sampler
from .stages import FULL, Clocks, Stopwatch, copy_value, seed_generators, size_of
from .work import (
    Usage, as_worker, clock, is_iterable, native_photos, sample_makers, sampler_batches,
)  # fmt: skip

#: bytes of results that a replay may hold
REPLAYED = 1 << 28
#: share of a measurement after which an epoch is ended, so that the end is measured, too
UNTIL_CUT = 0.6
_LOAD = bytes(1 << 16)


def rate(given: Request, loader: Any) -> Rate:
    """Samples a second that a loader delivers, to a step that takes ``step`` seconds a batch and
    computes on ``step_cores`` of the cores. Epochs end as those of the program do, after ``length``
    batches. One is ended early where it is longer than the measurement."""
    request = given.rate
    assert request is not None
    made = rebuild(loader, request)
    if request.most:
        return _whole_epochs(made, request)
    workers, step, seconds = request.workers, request.step, request.seconds
    batches = _order_of(made)
    length = request.length if batches is not None else 0
    ahead = workers * (made.prefetch_factor or 2)
    pace = _Pace(workers, length, ahead)
    began = clock()
    iterator = iter(made)
    first: float | None = None  # seconds until the first batch
    usage: Usage | None = None
    warm, since = 0, 0.0

    while True:
        asked = clock()
        try:
            next(iterator)
        except StopIteration:
            if batches is not None:
                pace.begin()
            iterator = iter(made)
            next(iterator)
        now = clock()
        rows = batches.sizes.popleft() if batches is not None else made.batch_size or 1
        inside, over = now - asked, batches is not None and batches.over
        first = now - began if first is None else first
        if step:
            consume(step, request.step_cores)
            now = clock()
        if usage is None:
            pace.number += 1
            warm += 1
            if warm >= pace.stride or warm >= pace.round and now - began > first + 0.3 * seconds:
                pace.beginning = False
                since, usage = clock(), Usage()
            continue
        pace.add(now - asked, rows, inside, over)
        spent = now - since
        if spent > seconds and pace.even() and (pace.ends or not over) or spent > 1.5 * seconds:
            break
        if batches is not None and length and not (pace.ends or pace.beginning):
            batches.cut = batches.cut or (
                spent > UNTIL_CUT * seconds and (ahead + pace.round) * pace.batch() < seconds
            )
    usual, ends = pace.batch(), pace.ends
    return Rate(
        request.loader, workers, pace.samples / pace.batches / usual if usual > 0 else 0.0, pace.end(),
        pace.again / ends if ends else None, pace.batches, pace.samples, usage=usage.summary(pace.samples),
    )  # fmt: skip


def _whole_epochs(made: Any, request: RateRequest) -> Rate:
    """Samples a second from the start of an epoch to the end of one. So samples that were made ahead
    count where they were made."""
    batches = _order_of(made)
    assert batches is not None
    length, samples, count, seconds = batches.length, 0, 0, 0.0
    if made.persistent_workers:  # they have started
        batches.length = min(length, request.workers)
        for _ in made:
            pass
        batches.length = length
    usage = Usage()
    while seconds < 0.5 * request.seconds:
        began = clock()
        for _ in made:
            samples, count = samples + batches.sizes.popleft(), count + 1
            consume(request.step, request.step_cores)
        seconds += clock() - began
    return Rate(
        request.loader, request.workers, samples / seconds, batches=count, samples=samples, epoch=length,
        usage=usage.summary(samples),
    )  # fmt: skip


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
        self.seconds = self.between = self.again = 0.0
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
        self.seconds += took
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


def sampler(request: Request, loader: Any) -> Sampler | None:
    """What the program's own sampler takes for the index of a sample. Where the time ends before an epoch
    does, the rest of the epoch is taken to go on as it did."""
    batched = loader.batch_sampler is not None
    drawn = loader.batch_sampler if batched else loader.sampler
    named = loader.sampler if type(drawn) is torch.utils.data.BatchSampler else drawn
    now, end = Stopwatch().now, clock() + request.seconds
    counts, times = [0], [now()[0]]
    for given in drawn:
        counts.append(counts[-1] + (len(given) if batched else 1))
        times.append(now()[0])
        if clock() > end:
            break
    else:
        times[-1] = now()[0]
    samples, seconds = float(counts[-1]), times[-1] - times[0]
    if not samples:
        return None
    with contextlib.suppress(Exception):
        if (more := len(drawn) - len(counts) + 1) > 0 and len(counts) > 2:
            seconds += more * (times[-1] - times[1]) / (len(counts) - 2)
            samples += more * (samples - counts[1]) / (len(counts) - 2)
    code = getattr(getattr(type(named), "__iter__", None), "__code__", None)
    place = (code.co_filename, code.co_firstlineno) if code else None
    return Sampler(type(named).__qualname__, seconds / samples, place)


def rebuild(loader: Any, request: RateRequest) -> Any:
    """The program's loader with another class or number of workers, over samples that are the
    same for each."""
    workers, length = request.workers, request.length
    given: dict[str, Any] = {
        "num_workers": workers, "collate_fn": loader.collate_fn,
        "worker_init_fn": loader.worker_init_fn, "in_order": getattr(loader, "in_order", True),
    }  # fmt: skip
    if workers:
        given["multiprocessing_context"] = "fork"
        given["persistent_workers"] = bool(request.persistent or loader.persistent_workers)
        if loader.prefetch_factor is not None:
            given["prefetch_factor"] = loader.prefetch_factor
    batched = loader.batch_sampler is not None
    batches: list[list[Any]] = []
    if is_iterable(loader):
        given["batch_size"] = request.batch or loader.batch_size if batched else None
    else:
        batches = sampler_batches(loader)
        if batched and request.batch:  # the same samples in the same order
            flat = [index for batch in batches for index in batch]
            batches = [flat[n : n + request.batch] for n in range(0, len(flat), request.batch)]
        if request.most:
            batches = choose_batches(batches, request.costs, request.most, request.part)
            length = len(batches)
        skip = request.skip % len(batches)
        batches = batches[skip:] + batches[:skip]
    dataset = loader.dataset
    if request.same:
        with as_worker(loader):
            dataset = SameSample(next(sample_makers(loader))[1]())
        given["in_order"] = True
    if request.cached:
        with as_worker(loader):
            dataset = ReplayDataset(dataset, request.cached, batches)
        batches = dataset.batches
        length = min(length, len(batches)) if request.most else length
    if request.codec:
        with as_worker(loader):
            batches = codecs.replace_files(dataset, batches, request.codec)
    if request.photos:
        dataset = native_photos(loader)
    if batches:
        order = _Batches(batches, length, batched)
        given.update({"batch_sampler": order} if batched else {"batch_size": None, "sampler": order})
    if request.open:
        Clocks().keep_open(dataset)
    if request.order:
        orders.reorder(dataset, *request.order)
    own = isinstance(loader, DataLoader) or patched.active
    kind = request.loader
    if kind == "own":
        kind = "minato" if own else "torch"
    while patched.active:
        patched.release()
    if kind == "torch":
        return torch.utils.data.DataLoader(dataset, **given)
    if own:
        options = {k: v for k, v in vars(Options.of(loader)).items() if k != "pending_state"}
        options.update(device=None, on_error="raise", autoscale=None, prefetch_next_epoch=False)
        if dataset is not loader.dataset:  # a dataset of the study has no parts that could be cached
            options.update(cache=None, cache_format=None, cache_reorder=False)
        given.update(options)
    else:
        given.pop("in_order")
    if request.worker_type:
        given["worker_type"] = request.worker_type
    if request.same and given.get("worker_type") == "native":
        given["worker_type"] = None  # its dataset has no native pipeline
    if given.get("worker_type") in ("native", "thread") or request.photos:
        given.pop("multiprocessing_context", None)
    made = DataLoader(dataset, **given)
    if request.most:
        if planner.may_look_ahead(loader):  # then the study's own sampler may be read ahead, too
            planner.may_look_ahead = lambda loader: True  # this process has no other loader
        # what it would have learnt in an earlier epoch
        costs = request.costs if request.learnt else {}
        known = {int(index): seconds for index, seconds in costs.items() if index.isdecimal()}
        wall = [int(seconds * 1e9) for seconds in known.values()]
        memo_of(made).load_costs(array("q", known).tobytes(), array("q", wall).tobytes())
    return made


def _order_of(made: Any) -> _Batches | None:
    """What gives a study's loader its indices; None where the dataset is iterable."""
    return next((b for b in (made.batch_sampler, made.sampler) if isinstance(b, _Batches)), None)


class _Batches:
    """A batch sampler, or a sampler where the loader makes no batches: the same batches again and
    again, in epochs of ``length`` batches. Without a length there is one epoch, which has no end.
    ``rate()`` sets ``cut`` to end an epoch earlier, and reads the other attributes."""

    def __init__(self, batches: list[list[Any]], length: int = 0, batched: bool = True) -> None:
        self.batches = itertools.cycle(batches)
        self.length, self.batched = length, batched
        self.cut = False
        self.over = False  # the epoch has no more batches; those that are on their way are left
        self.sizes: deque[int] = deque()  # samples of the batches that are on their way

    def __iter__(self) -> Iterator[Any]:
        self.cut = self.over = False
        self.sizes.clear()
        for number in itertools.count(1):
            batch = next(self.batches)
            self.sizes.append(len(batch))
            yield batch if self.batched else batch[0]
            if self.cut or number == self.length:
                break
        self.over = True


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
        self.held: dict[str, Any] = {}  # by index, which may be a tensor
        if self.calls:
            dataset[batches[0][0]]  # a first sample imports decoders, which get clocks, too
            self.clocks.set(dataset, FULL)
            self.clocks.probe = True
        self.batches: list[list[Any]] = []
        size, end = 0, clock() + 4.0
        for batch in batches:
            for index in batch:
                if str(index) not in self.held:
                    seed_generators(1)
                    self.held[str(index)] = self._hold(index)
                    size += size_of(self.held[str(index)])
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
            return copy_value(self.held[str(index)])
        self.clocks.thread = threading.get_ident()
        self.clocks.replay = list(self.held[str(index)])
        made, _, _ = self.clocks.sample(lambda: self.dataset[index])
        self.clocks.replay = None
        return made


def consume(seconds: float, cores: float) -> None:
    """In place of a step: it waits, or computes without the interpreter's lock. Where it has no core it
    takes longer, as the program's step does."""
    if cores < 0.5:
        time.sleep(seconds)
        return
    others = [threading.Thread(target=_compute, args=(seconds,)) for _ in range(round(cores) - 1)]
    for thread in others:
        thread.start()
    _compute(seconds)
    for thread in others:
        thread.join()


def _compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        hashlib.sha256(_LOAD).digest()
