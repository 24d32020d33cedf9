"""``batching="ready"``: batches from whichever samples are ready first.

Each sample is planned alone, as a batch of one row; what is done is marked with the policy
(csrc/schedule/policy_ready.h), which forms batches: slow samples with their natural share, none
further than ``DISPLACEMENT`` batches from where the sampler had it, all full to the end.
Rows are then gathered into one batch by one copy.  A sample that is known to be slow starts
before batches that it may be part of are formed, and is marked when they are.
"""

from __future__ import annotations

import contextlib
import copy
import heapq
import sys
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from .. import _core
from ..errors import Failure
from ..seeding.here import COLLATE, SeededHere
from ..transport import received
from ..transport.layouts import Layout, is_default_collate
from ..transport.shape import Shape
from ..workers.job import fetches_batches
from ..workers.process import ERROR, OBJECTS, ROWS
from .balanced import WHOLE, BalancedIterator
from .collating import CollatesHere
from .failures import Told, no_room, note, refused
from .form import Form
from .locality import Groups, groups_of
from .planner import Batch, Hints, Making, Planner
from .position import Position
from .prefetcher import AtATime, Prefetcher
from .receiver import LOST, Completions, lost
from .supervisor import Supervisor
from .window import Window

#: batches that a sample may move at most. Every one costs memory for samples that wait; a
#: slow sample of sixteen times a batch's time still fits.
DISPLACEMENT = 16
#: samples drawn ahead of the window: as many as can be planned, if slow ones ask for that
LOOK_AHEAD_SAMPLES = 128, 4000


@dataclass
class Sample:
    """One that is ready: a row that is still out, an object, or a failure."""

    number: int
    index: Any
    block: int | None = None
    objects: list[Any] = field(default_factory=list)
    sample: Any = None
    failure: Failure | None = None


class Forming:
    """The policy of one epoch, and what it and the engine were told."""

    def __init__(self, size: int, first: int) -> None:
        self.policy = _core.PolicyReady(size, DISPLACEMENT)
        self.first = first  # sequence of the epoch's first sample
        self._told_end = False
        self._horizon = -1  # as the engine knows it

    def tell(self, planner: Planner) -> None:
        """Of what was planned since."""
        if planner.draw.exhausted and not self._told_end:
            self._told_end = True
            self.policy.end(planner.sequence - self.first)
        horizon = self.first + self.policy.horizon
        if horizon != self._horizon:
            self._horizon = horizon
            planner.engine.set_horizon(horizon)


class SamplePlanner(Planner):
    """Plans samples instead of batches, and tells the policy which there are."""

    def __init__(
        self,
        loader: Any,
        position: Position,
        form: Form,
        window: Window,
        hints: Hints,
        groups: Groups | None,
        making: Making,
    ) -> None:
        received = ()  # those are batches, and no samples
        super().__init__(loader, position, form, window, received, hints, groups, making)
        self._batches: Any = loader.batch_sampler
        self.size: int = self._batches.batch_size
        self.forming = Forming(self.size, self.sequence)

    def begin(self, indices: Iterator[Any], goes_on: bool) -> None:
        self.forming = Forming(self.size, self.sequence)
        super().begin(self._singles(), goes_on)

    def _singles(self) -> Iterator[list[Any]]:
        if not self._batches.drop_last:
            yield from ([index] for index in self._batches.sampler)
            return
        indices = iter(self._batches.sampler)
        while len(batch := list(islice(indices, self.size))) == self.size:
            yield from ([index] for index in batch)

    def how_many(self) -> int:
        count = len(self._batches.sampler)
        return count // self.size * self.size if self._batches.drop_last else count

    def fill(self, starved: bool = False) -> None:
        super().fill(starved)
        self.forming.tell(self)


class CollatesSeeded(CollatesHere):
    """A collate_fn draws here from what it would find in a worker, by the batch's number; the
    program's own generators are put back. (There is no stream of a worker's that
    seed_per_sample=False could leave it.)"""

    def __init__(self, loader: Any, position: Position, shape: Shape) -> None:
        super().__init__(loader, position, shape)
        self.formed = 0  # batches of the epoch
        self._here: SeededHere | None = None
        self._rehearsed = False  # a batch was collated here

    def begin(self, formed: int) -> None:
        """An epoch, of which some were formed before this process began. set_epoch() may
        have made generators."""
        self.formed = formed
        self._here, self._rehearsed = None, False

    @contextlib.contextmanager
    def as_worker(self, number: int) -> Iterator[None]:
        if self._here is None:
            self._here = SeededHere(self.dataset, self.collate_fn, hooks=False)
        position = self.position
        with super().as_worker(number), self._here.undisturbed():
            self._here.seeder.seed(position.seed, position.epoch, self.formed - 1, COLLATE)
            yield

    def collated(self, samples: list[Any], worker: int) -> Any:
        """A first batch is collated again where that has made a generator; of copies, because a
        collate_fn may take samples apart, and no worker has them any more."""
        copies = None
        if not self._rehearsed and not isinstance(self.collate_fn, types.FunctionType):
            with contextlib.suppress(Exception):  # what cannot be copied is collated once
                copies = copy.deepcopy(samples)
        self._rehearsed = True
        data = super().collated(samples, worker)
        renewed = self._here is not None and self._here.seeder.renew()
        return super().collated(copies, worker) if renewed and copies is not None else data


class ReadyReceiver:
    """Forms batches of the samples that are done."""

    engine: _core.Engine

    def __init__(
        self, completions: Completions, planner: SamplePlanner, collates: CollatesSeeded
    ) -> None:
        self.completions = completions
        self.planner = planner
        self.collates = collates
        self.shape = collates.shape
        self._costs = planner.position.memo.costs
        self._done: dict[int, Sample] = {}  # by place in the policy's count
        self._before: list[tuple[int, bool]] = []  # done before they may be marked: a heap

    def receive(self, wait: bool = True) -> tuple[list[Sample], Any] | None:
        """([Sample], data) of the next batch; None at the end, without wait also where it is
        not formed yet."""
        slow_ns = self._costs.summary()["slow_ns"] or sys.maxsize
        planner = self.planner
        while (places := self._form_batch()) is None:
            got = self.completions.next(wait)
            if got is None:
                return None
            self._mark(*got, slow_ns)
            if len(planner.planned) <= planner.enough:
                planner.fill()
        if not places:
            return None
        samples = [self._done.pop(p) for p in places]
        self.collates.formed += 1
        return samples, self._batch_of(samples)

    def more(self) -> bool:
        """Of the next epoch nothing is planned."""
        return True

    def named(self, what: list[Sample]) -> str:
        """For an error: which batch that is."""
        return note(what[0].number, [done.index for done in what])

    def clear(self) -> None:
        """What was received of an epoch that is left is dropped."""
        for done in self._done.values():
            self._free(done)
        self._done.clear()
        self._before.clear()

    def _form_batch(self) -> list[int] | None:
        """The policy's next batch, once it knows of every sample that it may know of."""
        policy = self.planner.forming.policy
        horizon = policy.horizon
        while self._before and self._before[0][0] < horizon:
            policy.mark(*heapq.heappop(self._before))
        return policy.form()

    def _mark(self, sequence: int, block: int, slow_ns: int) -> None:
        """Reads what came of one sample, for the policy; it is slow from slow_ns on."""
        batch = self.planner.planned.pop(sequence)
        done = Sample(batch.number, batch.indices[0], block or None)
        wall_ns = 0
        if block == 0:
            done.failure = refused(self.engine, sequence, f"sample {done.index!r}")
            self.engine.taken(sequence, block)
        else:
            trace = self.completions.supervisor.trace
            if trace is not None:
                trace.block(batch.indices, block)
            wall_ns = self.engine.reports(block)[0][1]
            self._read(batch, block, done)
            self.engine.detach(sequence)
            if done.block is None:
                self.engine.retire(block)
        place = sequence - self.planner.forming.first
        self._done[place] = done
        heapq.heappush(self._before, (place, wall_ns > slow_ns))

    def _read(self, batch: Batch, block: int, done: Sample) -> None:
        engine = self.engine
        if engine.poll(block) == LOST:
            done.failure, done.block = lost(engine, batch, block), None
            return
        if engine.form(block)[0] != ROWS:
            done.block = None
        for worker, row0, nrows, data, buffers in engine.envelopes(block):
            if data is None:
                done.failure, done.block = no_room(), None
                return
            try:
                entries = received.rows(worker, row0, nrows, data, buffers)
            except Exception as error:
                done.failure, done.block = Told(error), None
                return
            for row, what, obj in entries:
                if what == OBJECTS:
                    done.objects = obj
                    continue
                done.block = None
                if what == ERROR:
                    obj.note = note(batch.number, batch.indices, row)
                    done.failure = obj
                else:
                    done.sample = obj

    def _batch_of(self, samples: list[Sample]) -> Any:
        """The batch, or a Failure; the samples' blocks are free again."""
        try:
            failed = next((d.failure for d in samples if d.failure is not None), None)
            if failed is not None:
                return failed
            layout = self.shape.layout
            if layout is not None and all(d.block is not None for d in samples):
                self.shape.note(True)
                return self._gathered(samples, layout)
            place = samples[0].number, [done.index for done in samples]
            every = [self._sample_of(d) for d in samples]
            mixed = layout if any(d.block is not None for d in samples) else None
            return self.collates.batch(place, every, 0, mixed)
        finally:
            for done in samples:
                self._free(done)

    def _gathered(self, samples: list[Sample], layout: Layout) -> Any:
        blocks = [d.block for d in samples if d.block is not None]
        block = self.engine.gather(blocks, layout.core)
        try:
            return self.engine.decode(block, layout.core, [d.objects for d in samples])
        finally:
            self.engine.retire(block)

    def _sample_of(self, done: Sample) -> Any:
        layout = self.shape.layout
        if done.block is None or layout is None:
            return done.sample
        return self.engine.row(done.block, layout.core, 0, done.objects)

    def _free(self, done: Sample) -> None:
        if done.block is not None:
            self.engine.retire(done.block)
            done.block = None


class Displacement:
    """How far samples moved from where the sampler had them."""

    def __init__(self, planner: SamplePlanner, queue: deque[list[Any]]) -> None:
        self.planner = planner
        self.queue = queue

    def __call__(self) -> dict[str, float]:
        """In batches."""
        policy = self.planner.forming.policy
        formed = self.planner.position.progress.count
        formed += sum(len(samples) for samples, _ in self.queue if samples)
        return {"max": policy.displaced_max, "mean": policy.displaced_sum / max(1, formed)}


class ReadyIterator(BalancedIterator):
    """Ready-first batches of a map-style dataset."""

    _unit = "sample"
    _planner: SamplePlanner
    _receiver: ReadyReceiver  # type: ignore[assignment]  # which plans and counts samples

    def _shape_of(self, loader: Any) -> Shape:
        plain = is_default_collate(loader.collate_fn) and not fetches_batches(loader.dataset)
        return self._position.memo.shape if plain else WHOLE

    def _make_parts(
        self, loader: Any, supervisor: Supervisor, shape: Shape, queue: deque[list[Any]]
    ) -> None:
        position, size = self._position, loader.batch_sampler.batch_size
        hints, form = Hints(loader, position.memo), Form(shape, in_parts=True)
        costs, known = position.memo.costs, hints.given is not None
        window = Window(loader, self._options, costs, known, LOOK_AHEAD_SAMPLES, scale=size)
        self._planner = planner = SamplePlanner(
            loader,
            position,
            form,
            window,
            hints,
            groups_of(loader),
            Making(self._options.seeds, self._offer is not None, self._splits, size),
        )
        collates = CollatesSeeded(loader, position, shape)
        self._receiver = ReadyReceiver(Completions(supervisor, planner), planner, collates)
        at_a_time = AtATime(None, window)
        self._prefetcher = Prefetcher(supervisor, self._receiver, queue, at_a_time)
        supervisor.served.displacement = Displacement(planner, queue)
        supervisor.served.batch_size = 1

    def _unit_rows(self) -> int:
        return self._planner.size

    def _blocks_out(self) -> int:
        """All samples that may wait for those of the batch that is the last for them."""
        planner = self._planner
        return (DISPLACEMENT + 1) * planner.size + planner.window.size()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._receiver.collates.begin(0)
        super()._reset(loader, first_iter)
        self._receiver.collates.formed = self._progress.count // self._planner.size

    def _next_data(self) -> Any:
        got = self._prefetcher.next()
        if got is None:
            self._progress.finished = True
            self._end_epoch()
            raise StopIteration
        samples, data = got
        self._planner.fill()
        progress, position = self._progress, self._position
        for done in samples:
            progress.delivered(done.number)
        supervisor = self._supervisor
        if supervisor is not None and supervisor.trace is not None:
            supervisor.trace.formed(position.epoch, [d.index for d in samples])
        if isinstance(data, Failure):
            position.errors += 1
            data.reraise()
        return data
