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
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from .. import _core
from ..errors import Failure
from ..seeding.here import COLLATE, SeededHere
from ..transport import messages
from ..workers.process import ERROR, OBJECTS, ROWS, SAMPLES
from .balanced import BalancedIterator
from .base import _Batch, _no_room, _note, _refused

#: batches that a sample may move at most. Every one costs memory for samples that wait; a
#: slow sample of sixteen times a batch's time still fits.
DISPLACEMENT = 16
#: samples drawn ahead of the window: as many as can be planned, if slow ones ask for that
LOOK_AHEAD_SAMPLES = 128, 4000


@dataclass
class _Done:
    """A sample that is ready: a row that is still out, an object, or a failure."""

    number: int
    index: Any
    block: int | None = None
    objects: list = field(default_factory=list)
    sample: Any = None
    failure: Failure | None = None


class ReadyIterator(BalancedIterator):
    """Ready-first batches of a map-style dataset."""

    _unit = "sample"
    _ahead_bounds = LOOK_AHEAD_SAMPLES

    def __init__(self, loader: Any) -> None:
        batches = loader.batch_sampler
        self._size, self._drop_tail = batches.batch_size, batches.drop_last
        self._unit_rows = self._size
        self._sampler = batches.sampler
        self._done: dict[int, _Done] = {}  # by place in the policy's count
        self._before: list[tuple[int, bool]] = []  # done before they may be marked: a heap
        self._sequence = self._first = self._formed = 0
        self._here: SeededHere | None = None
        self._rehearsed = False  # a batch was collated here
        super().__init__(loader)

    def _window(self) -> int:
        return super()._window() * self._size

    def _blocks_out(self) -> int:
        """All samples that may wait for those of the batch that is the last for them."""
        return (DISPLACEMENT + 1) * self._size + self._window()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        for done in self._done.values():
            self._free(done)
        self._done.clear()
        self._before.clear()
        self._policy = _core.PolicyReady(self._size, DISPLACEMENT)
        self._first = self._sequence
        self._singles = self._single_indices()
        self._told_end = False
        self._horizon = -1  # as the engine knows it
        self._here, self._rehearsed = None, False  # set_epoch() may have made generators
        super()._reset(loader, first_iter)
        self._formed = self._progress.count // self._size

    # ---- sending: samples instead of batches -------------------------------------------

    def _single_indices(self) -> Iterator[list]:
        if not self._drop_tail:
            yield from ([index] for index in self._sampler)
            return
        indices = iter(self._sampler)
        while len(batch := list(islice(indices, self._size))) == self._size:
            yield from ([index] for index in batch)

    def _how_many(self) -> int:
        count = len(self._sampler)
        return count // self._size * self._size if self._drop_tail else count

    def _next_index(self) -> list:
        return next(self._singles)

    def _set_form(self) -> None:
        layout = None if self._shape.whole else self._shape.layout
        if layout is not None:
            super()._set_form()
        elif self._form != SAMPLES:
            self._form = SAMPLES
            self._engine.set_form(SAMPLES, None, 0)

    def _drawn_ahead(self) -> int:
        return len(self._planned)  # what is in hand are batches, not samples

    def _is_whole(self, index: Any) -> bool:
        return False

    def _fill(self, dry: bool = False) -> None:
        super()._fill(dry)
        if self._exhausted and not self._told_end:
            self._told_end = True
            self._policy.end(self._sequence - self._first)
        horizon = self._first + self._policy.horizon
        if horizon != self._horizon:
            self._horizon = horizon
            self._engine.set_horizon(horizon)

    # ---- receiving ---------------------------------------------------------------------

    def _next_data(self) -> Any:
        got = self._received()
        if got is None:
            self._progress.finished = True
            self._end_epoch()
            raise StopIteration
        samples, data = got
        self._fill()
        for done in samples:
            self._progress.delivered(done.number)
        if self._trace is not None:
            self._trace.formed(self._epoch, [d.index for d in samples])
        if isinstance(data, Failure):
            self._errors += 1
            data.reraise()
        return data

    def _receive(self, wait: bool = True) -> Any:
        """([_Done], data) of the next batch; None at the end, without wait also where it is
        not formed yet."""
        slow_ns = self._memo.costs.summary()["slow_ns"] or sys.maxsize
        while (places := self._form_batch()) is None:
            got = self._await_next(wait)
            if got is None:
                return None
            self._mark(*got, slow_ns)
            if len(self._planned) <= self._enough:
                self._fill()
        if not places:
            return None
        samples = [self._done.pop(p) for p in places]
        self._formed += 1
        return samples, self._batch_of(samples)

    def _more(self) -> bool:
        return True  # of the next epoch nothing is planned

    @staticmethod
    def _named(what: Any) -> str:
        return _note(_batch_with(what))

    def _form_batch(self) -> list[int] | None:
        """The policy's next batch, once it knows of every sample that it may know of."""
        horizon = self._policy.horizon
        while self._before and self._before[0][0] < horizon:
            self._policy.mark(*heapq.heappop(self._before))
        return self._policy.form()

    def _mark(self, sequence: int, block: int, slow_ns: int) -> None:
        """Reads what came of one sample, for the policy; it is slow from slow_ns on."""
        batch = self._planned.pop(sequence)
        done = _Done(batch.number, batch.indices[0], block or None)
        wall_ns = 0
        if block == 0:
            done.failure = _refused(self._engine, sequence, f"sample {done.index!r}")
            self._engine.taken(sequence, block)
        else:
            if self._trace is not None:
                self._trace.block(batch.indices, block)
            wall_ns = self._engine.reports(block)[0][1]
            self._read(batch, block, done)
            self._engine.detach(sequence)
            if done.block is None:
                self._engine.retire(block)
        place = sequence - self._first
        self._done[place] = done
        heapq.heappush(self._before, (place, wall_ns > slow_ns))

    def _read(self, batch: _Batch, block: int, done: _Done) -> None:
        engine = self._engine
        if engine.poll(block) == 2:
            done.failure, done.block = self._lost(batch, block), None
            return
        if engine.form(block)[0] != ROWS:
            done.block = None
        for _worker, _row0, _nrows, data, buffers in engine.envelopes(block):
            if data is None:
                done.failure, done.block = _no_room(), None
                return
            for row, what, obj in messages.loads(data, buffers or []):
                if what == OBJECTS:
                    done.objects = obj
                    continue
                done.block = None
                if what == ERROR:
                    obj.note = _note(batch, row)
                    done.failure = obj
                else:
                    done.sample = obj

    def _batch_of(self, samples: list[_Done]) -> Any:
        """The batch, or a Failure; the samples' blocks are free again."""
        try:
            failed = next((d.failure for d in samples if d.failure is not None), None)
            if failed is not None:
                return failed
            layout = self._shape.layout
            if layout is not None and all(d.block is not None for d in samples):
                self._shape.note(True)
                return self._gathered(samples, layout)
            batch = _batch_with(samples)
            every = [self._sample_of(d) for d in samples]
            mixed = layout if any(d.block is not None for d in samples) else None
            return self._collate(batch, every, 0, mixed)
        finally:
            for done in samples:
                self._free(done)

    @contextlib.contextmanager
    def _as_worker(self, number: int) -> Iterator[None]:
        """Seeded by the batch's number, as in a worker: what a collate_fn draws here are the
        program's own generators, which are put back. (There is no stream of a worker's that
        seed_per_sample=False could leave it.)"""
        if self._here is None:
            self._here = SeededHere(self._dataset, self._collate_fn, hooks=False)
        seed = self._base_seed & (2**64 - 1)
        with super()._as_worker(number), self._here.undisturbed():
            self._here.seeder.seed(seed, self._epoch, self._formed - 1, COLLATE)
            yield

    def _collated(self, samples: list[Any], worker: int) -> Any:
        """A first batch is collated again where that has made a generator; of copies, because a
        collate_fn may take samples apart, and no worker has them any more."""
        copies = None
        if not self._rehearsed and not isinstance(self._collate_fn, types.FunctionType):
            with contextlib.suppress(Exception):  # what cannot be copied is collated once
                copies = copy.deepcopy(samples)
        self._rehearsed = True
        data = super()._collated(samples, worker)
        renewed = self._here is not None and self._here.seeder.renew()
        return super()._collated(copies, worker) if renewed and copies is not None else data

    def _gathered(self, samples: list[_Done], layout: Any) -> Any:
        blocks = [d.block for d in samples if d.block is not None]
        block = self._engine.gather(blocks, layout.core)
        try:
            return self._engine.decode(block, layout.core, [d.objects for d in samples])
        finally:
            self._engine.retire(block)

    def _sample_of(self, done: _Done) -> Any:
        layout = self._shape.layout
        if done.block is None or layout is None:
            return done.sample
        return self._engine.row(done.block, layout.core, 0, done.objects)

    def displacement(self) -> dict[str, float]:
        """How far samples moved from where the sampler had them, in batches."""
        policy = self._policy
        formed = self._progress.count + sum(len(done) for done, _ in self._in_hand if done)
        return {"max": policy.displaced_max, "mean": policy.displaced_sum / max(1, formed)}

    def _free(self, done: _Done) -> None:
        if done.block is not None:
            self._engine.retire(done.block)
            done.block = None


def _batch_with(samples: list[_Done]) -> _Batch:
    return _Batch(samples[0].number, [done.index for done in samples], False)
