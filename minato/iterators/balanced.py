"""Balanced scheduling: samples go to whichever worker is free, batches come in order.

First what is drawn from the sampler and planned ahead (and the next epoch, begun while this
one ends), then what becomes of a batch that is done: rows, envelopes, or a collate here.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..errors import Failure, WorkerLost, describe_death
from ..seeding import init_states
from ..state import Progress, sampler_of, sampler_of_torch
from ..transport import messages
from ..transport.layouts import Layout, NoLayout, alike, collates_more, is_default_collate
from ..workers.job import fetches_batches, offered
from ..workers.native import NativePool, integers, offer_of
from ..workers.pool import Pool
from ..workers.process import BATCH, ERROR, FAILED, OBJECTS, PART, ROWS, SAMPLES
from .base import _Batch, _MinatoIterator, _no_room, _note, _refused, _Told
from .locality import Groups, key_of
from .memo import Shape, memo_of

#: batches drawn ahead of the steady window from samplers where that changes nothing; what
#: may start is decided by costs and memory. As far as the slowest samples ask for, in bounds.
LOOK_AHEAD_BATCHES = 128, 512
#: indices drawn ahead in all: at 0.1 us each they are drawn between two batches
LOOK_AHEAD_INDICES = 1 << 17
#: how often it is decided how far; up to which batch many are drawn at a time, and else how many
LOOK_AGAIN_BATCHES, BULK_NS, FEW = 64, 1_000_000, 32

#: small batches received at a time, and what they may hold of memory together
AT_A_TIME, AT_A_TIME_BYTES = 8, 1 << 20

#: a shape for loaders whose batches are always made whole by one worker
_WHOLE = Shape()
_WHOLE.whole = True


def _draws_at_its_end(loader: Any) -> bool:
    """A RandomSampler draws from its generator once more when it ends, and its end must not
    be met ahead: torch's loader would not be there yet."""
    sampler = sampler_of(loader)
    return type(sampler) is torch.utils.data.RandomSampler and sampler.generator is not None


def _short_tail(loader: Any) -> int:
    """1 where the sampler's end is met with the last batch, because that is not full; 0 where
    only asking for one more meets it."""
    batches = loader.batch_sampler
    if type(batches) is not torch.utils.data.BatchSampler or batches.drop_last:
        return 0
    sampler: Any = batches.sampler
    return int(len(sampler) % batches.batch_size != 0)


def _may_look_ahead(loader: Any) -> bool:
    """Whether drawing indices early changes nothing: torch's own samplers only."""
    sampler, own = sampler_of(loader), sampler_of_torch(loader)
    if type(sampler) is torch.utils.data.RandomSampler and sampler.generator is not None:
        # It draws again in the middle of an epoch: an early break would leave the caller's
        # generator elsewhere than torch does.
        own = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return own


@dataclass
class _EpochAhead:
    """The next epoch, of which some batches are planned while the present one ends."""

    progress: Progress
    first: int  # its first sequence
    ends: int  # batches of the present epoch


class BalancedIterator(_MinatoIterator):
    """Map-style datasets: samples go to whichever worker is free, order stays."""

    _ahead_bounds = LOOK_AHEAD_BATCHES
    _native = False
    _unit_rows = 0  # samples that would be a batch, where they are planned one by one

    def __init__(self, loader: Any) -> None:
        self._seeds = loader.seed_per_sample is not False
        self._seeds_unasked = loader.seed_per_sample is None
        self._shape = memo_of(loader).shape if self._rows_possible(loader) else _WHOLE
        if self._unit == "batch" and collates_more():
            self._shape.doubt()
        self._splits = loader._auto_collation and not fetches_batches(loader.dataset)
        self._cost_hint: Any = offered(loader.dataset, "cost_hint")
        self._far = _may_look_ahead(loader)
        key = key_of(loader.dataset) if loader._auto_collation else None
        self._groups = Groups(key) if key is not None else None
        self._begun: tuple[Any, bytes] | None = None  # indices planned last, and their groups
        self._reach, self._bulk = 0, 1  # how far it is looked ahead, and in what steps
        self._enough = sys.maxsize  # with more planned, none are drawn
        self._looked = -LOOK_AGAIN_BATCHES  # when that was decided last, by sequence
        self._batch_size = loader.batch_size or 1 if self._unit == "batch" else 1
        self._draws_late = self._far and _draws_at_its_end(loader)
        batches = self._draws_late and self._unit == "batch"
        self._short_tail = _short_tail(loader) if batches else 0
        self._planned: dict[int, _Batch] = {}  # by sequence
        self._sequence = 0
        self._costs_known = False
        self._early: _EpochAhead | None = None
        # of the sampler's generators, before its end was met ahead of torch's window
        self._unended: dict[str, bytes] | None = None
        self._kept_back: deque[tuple[_Batch, Any]] = deque()
        super().__init__(loader)

    @property
    def _send_idx(self) -> int:  # type: ignore[override]  # torch's counters, as far as read
        return self._progress.count + self._drawn_ahead()

    @property
    def _rcvd_idx(self) -> int:  # type: ignore[override]
        return self._progress.count

    @property
    def _tasks_outstanding(self) -> int:  # type: ignore[override]
        return self._drawn_ahead()

    def _drawn_ahead(self) -> int:
        """What was drawn and not handed out; its window is torch's."""
        return len(self._planned) + len(self._in_hand)

    @staticmethod
    def _rows_possible(loader: Any) -> bool:
        return (
            loader._auto_collation
            and is_default_collate(loader.collate_fn)
            and not fetches_batches(loader.dataset)
        )

    def _engine_options(self) -> dict[str, Any]:
        straggler = self._straggler_threshold
        seconds = 0.0 if straggler == "auto" else float(straggler or 0)
        return dict(
            window=self._window(),
            in_order=self._in_order,
            costs=self._memo.costs,
            min_workers=self._least_workers,
            max_workers=self._most_workers,
            straggler_seconds=-1.0 if straggler is None else seconds,
            blocks=self._blocks_out(),
            keep=self._memo.kept_scheduler(self._bounds()),
            keeps=not self._native,
            unit_rows=self._unit_rows,
        )

    def _blocks_out(self) -> int:
        """Blocks that are out at once, as far as those are many."""
        return 0

    def _make_pool(self, loader: Any) -> Pool | NativePool:
        offer = offer_of(loader)
        self._native = offer is not None
        if offer is None:
            return super()._make_pool(loader)
        self._splits = False
        self._shape = offer.shape
        return NativePool(
            offer=offer,
            workers=self._num_workers,
            memory_limit=loader._memory_limit_bytes(),
            options=self._engine_options(),
            dataset=self._dataset,
            collate_fn=self._collate_fn,
        )

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            early, self._early = self._early, None
            if early is not None and self._adopt(early, loader):
                return
            self._kept_back.clear()
            self._drop_in_hand()
            self._engine.plan_clear()
            self._planned.clear()
        self._ahead = bool(loader.prefetch_next_epoch)
        self._unended = None
        self._drawn: Any = None
        self._exhausted = False
        self._number = 0
        self._position = 0
        self._form: Any = None
        self._posted: dict[int, int] = getattr(self, "_posted", {})
        self._beginning = True
        with self._epoch_begins(loader, first_iter):
            _BaseDataLoaderIter._reset(self, loader, first_iter)
            self._fill()
        self._beginning = False
        if self._ahead:
            self._fill()

    # ---- the next epoch, begun early ---------------------------------------------------

    def _begin_next(self) -> None:
        """The sampler is exhausted: draws the next epoch's first window while this ends."""
        self._epoch += 1
        progress = self._new_progress(None)
        progress.early = True
        progress.generators = self._sources.capture()
        self._early = _EpochAhead(progress, self._sequence, self._number)
        self._sampler_iter = iter(self._index_sampler)
        self._number = self._position = 0
        self._exhausted = False

    def _adopt(self, early: _EpochAhead, loader: Any) -> bool:
        """Makes the epoch that was begun early the present one; False when it is stale:
        the last was left in the middle, or set_epoch or load_state_dict was called since."""
        told = early.progress.user_epoch != self._memo.user_epoch
        if self._left(early) > 0 or told or self._memo.resume is not None:
            self._undo(early)
            return False
        self._num_yielded = 0
        self._IterableDataset_len_called = loader._IterableDataset_len_called
        early.progress.early = False
        self._unended = None
        self._progress = self._memo.progress = early.progress
        if self._exhausted:
            self._begin_next()  # all of a short epoch was planned in time
        self._fill()
        return True

    def _left(self, early: _EpochAhead) -> int:
        """Batches of the present epoch not handed out yet."""
        return early.ends - self._progress.count

    def _undo(self, early: _EpochAhead) -> None:
        """Puts the sampler's generators where torch's loader would have them now."""
        states = early.progress.generators
        if self._unended is not None and self._left(early) >= self._window() + self._short_tail:
            states = self._unended  # that would not have met the sampler's end yet
        self._sources.set_own(states or {})

    @property
    def _planning(self) -> Progress:
        """Of the epoch that batches are drawn for."""
        return self._progress if self._early is None else self._early.progress

    # ---- sending ---------------------------------------------------------------------

    def _fill(self, dry: bool = False) -> None:
        """Draws from the sampler up to torch's window, further where that is harmless.
        dry: by another window, because workers idle behind a slow sample."""
        self._set_form()
        window = most = self._window()
        self._enough = sys.maxsize
        if self._far and dry:
            most = self._drawn_ahead() + window
        elif self._far and self._delivered_any():
            most = max(self._look_ahead(), 2 * window)
            self._enough = max(most - self._bulk, window)
            if self._drawn_ahead() > self._enough:
                return
        last = self._how_many() - self._short_tail if self._draws_late else sys.maxsize
        while self._drawn_ahead() < most and not self._exhausted:
            if self._number >= last:
                if self._drawn_ahead() >= window:
                    if not self._ahead or self._early is not None:
                        self._engine.plan_end()  # as good as all are known
                        self._enough = window - 1
                        return
                    if self._unended is None:
                        self._unended = self._sources.capture(everything=False)
            if self._drawn is None:
                try:
                    self._drawn = (self._next_index(),)
                except StopIteration:
                    if self._ahead and self._beginning:
                        return  # what comes next draws from the program's generators
                    self._exhausted = True
                    self._planning.check_end(self._number)
                    if not self._ahead or self._early is not None:
                        self._engine.plan_end()
                        return
                    self._begin_next()
                    continue
            if self._planning.has(self._number):
                self._pass_over(self._drawn[0])  # delivered before this process began
            elif not self._plan(self._drawn[0]):
                return
            self._drawn = None

    def _look_ahead(self) -> int:
        """Batches from which a slow sample may have to start now, to be ready in time or not
        to end the epoch: three times the batches that go by while one is made. Looked at
        once for many batches.

        How many are drawn at a time follows from how long one takes: each visit to the
        engine wakes sleeping workers, which for small batches costs more than they do, and
        comes to cold caches where steps are long."""
        if self._sequence - self._looked >= LOOK_AGAIN_BATCHES:
            self._looked = self._sequence
            costs, (least, most) = self._memo.costs.summary(), self._ahead_bounds
            batch = costs["mean_ns"] * self._batch_size / self._num_workers
            slow = 3 * costs["p995_ns"] / batch if batch > 0 else 0
            most = min(most, LOOK_AHEAD_INDICES // self._batch_size)
            self._reach = int(min(max(slow, least), most))
            half = self._reach // 2
            self._bulk = min(FEW, half) if batch > BULK_NS else half
        return self._reach

    def _window(self) -> int:
        """Torch's prefetch window for the workers there are, in what is planned."""
        workers = self._num_workers
        if self._most_workers > workers and self._pool is not None:
            scheduler = self._engine.scheduler()
            workers = max(workers, scheduler["active"] if scheduler else 0)
        return self._prefetch_factor * workers

    def _how_many(self) -> int:
        """What the sampler gives in an epoch, in what is planned."""
        return len(self._index_sampler)

    def _delivered_any(self) -> bool:
        """Whether anything is known of costs: before that nothing beyond the window is cut
        into tasks, because the cut follows costs."""
        if not self._costs_known:
            summary = self._memo.costs.summary()
            self._costs_known = summary["samples"] > 0 or self._cost_hint is not None
        return self._costs_known

    def _set_form(self) -> None:
        layout = None if self._shape.whole else self._shape.layout
        form = (self._shape.whole, layout)
        if form != self._form:
            self._form = form
            self._at_a_time = self._how_many_at_a_time(layout)
            kind = BATCH if self._shape.whole else SAMPLES if layout is None else ROWS
            if layout is None:
                self._engine.set_form(kind, None, 0)
            else:
                if id(layout) not in self._posted:
                    self._posted[id(layout)] = self._engine.post(layout.pickled)
                self._engine.set_form(kind, layout.core, self._posted[id(layout)])

    def _how_many_at_a_time(self, layout: Layout | None) -> int:
        """Few enough that workers find work while the caller has those in hand."""
        traced = self._trace is not None  # each wait is told with its batch
        if layout is None or self._unit != "batch" or not self._in_order or traced:
            return 1
        size = layout.core.row_bytes * self._batch_size
        return max(1, min(AT_A_TIME, self._window() // 2, AT_A_TIME_BYTES // max(1, size)))

    def _hint(self, index: Any) -> None:
        """The user's guess of what samples cost, until they were seen."""
        for i in index if isinstance(index, (list, tuple)) else [index]:
            if type(i) is int and 0 <= i < self._memo.size:
                self._memo.costs.hint(i, max(0, int(self._cost_hint(i) * 1e9)))

    def _plan(self, index: Any) -> bool:
        if self._cost_hint is not None and self._epoch == 0:
            self._hint(index)
        sent = integers(index) if self._native else index
        whole = self._is_whole(sent)
        rows = len(sent) if not whole else 1
        taken = self._engine.plan(
            sent,
            pickle.dumps,
            self._sequence,
            self._number,
            self._epoch,
            self._position,
            self._base_seed & (2**64 - 1),
            rows,
            self._seeds,
            whole,
            self._planning.user_epoch,
            self._splits and type(index) is list and len(index) > 1,
            self._begins(index),
        )
        if taken:
            self._planned[self._sequence] = _Batch(self._number, index, whole, self._sequence)
            self._sequence += 1
            self._pass_over(index)
        return taken

    def _begins(self, index: Any) -> bytes | None:
        """Where groups of the batch begin, by the dataset's word."""
        if self._groups is None or type(index) not in (list, tuple):
            return None
        if self._begun is None or self._begun[0] is not index:  # not where it is planned again
            try:
                self._begun = index, self._groups.begins(index)
            except BaseException:  # it would come again at each call
                self._drawn, self._exhausted = None, True
                self._engine.plan_end()
                raise
        return self._begun[1]

    def _is_whole(self, index: Any) -> bool:
        """Whether one worker fetches and collates the batch."""
        return self._shape.whole or type(index) not in (list, tuple) or not index

    def _pass_over(self, index: Any) -> None:
        self._number += 1
        sized = self._auto_collation and hasattr(index, "__len__")
        self._position += len(index) if sized else 1

    # ---- receiving -------------------------------------------------------------------

    def _next_data(self) -> Any:
        if not self._planned and not self._exhausted:
            self._fill()
        if self._at_end():
            self._progress.finished = True
            if self._early is not None:
                self._memo.progress = self._early.progress
            self._end_epoch()
            raise StopIteration
        batch, data = self._received()
        if self._drawn_ahead() <= self._enough:
            self._fill()
        self._progress.delivered(batch.number)
        if self._in_hand and self._pinner is None and not self._progress.beyond:
            enough = -1 if self._exhausted else self._enough
            self._grants(self._drawn_ahead() - enough - 1, self._progress)
        if isinstance(data, Failure):
            self._errors += 1
            data.reraise()
        return data

    def _end_epoch(self) -> None:
        """Workers leave, unless they are kept; and what they know of worker_init_fn is told."""
        looks = self._seeds_unasked and self._worker_init_fn is not None and self._living()
        workers = self._engine.workers() if looks else []
        made_with = self._pool.base_seed if isinstance(self._pool, Pool) else 0
        if not self._persistent_workers:
            self._shutdown_workers()
        init_states.tell(init_states.look(workers, made_with))

    def _at_end(self) -> bool:
        if self._early is not None:
            return self._left(self._early) == 0
        return not self._drawn_ahead() and not self._kept_back

    def _receive(self, wait: bool = True) -> Any:
        """The next batch to hand over: (_Batch, data); without wait None unless it is done.
        Out of order one of the next epoch may be done first: it is kept back."""
        if self._kept_back and self._of_this_epoch(self._kept_back[0][0]):
            return self._kept_back.popleft()
        while (got := self._await_next(wait)) is not None:
            sequence, block = got
            batch = self._planned.pop(sequence)
            data = self._data_of(sequence, batch, block)
            if self._of_this_epoch(batch):
                if self._at_a_time > 1 and self._pinner is None:
                    batch.indices = None  # to free them later, with cold caches, takes longer
                return batch, data
            self._kept_back.append((batch, data))
        return None

    def _data_of(self, sequence: int, batch: _Batch, block: int) -> Any:
        """The data of a batch, or a Failure. The engine goes on to the next."""
        if block == 0:
            data = _refused(self._engine, sequence, f"batch {batch.number}")
            self._engine.taken(sequence, block)
            return data
        if self._trace is not None:
            self._trace.block(batch.indices, block)
        data = self._take_rows(sequence, block)
        if data is None:
            try:
                data = self._take(batch, block)
            finally:
                self._engine.taken(sequence, block)
        return data

    def _of_this_epoch(self, batch: _Batch) -> bool:
        return self._early is None or batch.sequence < self._early.first

    def _more(self) -> bool:
        if self._early is not None:
            return self._left(self._early) > len(self._in_hand)
        return bool(self._planned) and not self._kept_back

    @staticmethod
    def _named(what: Any) -> str:
        return _note(what)

    def _await_next(self, wait: bool = True) -> tuple[int, int] | None:
        if not self._living() and threading.current_thread() is threading.main_thread():
            raise RuntimeError("the loader was shut down")  # its engine may not say so at exit
        deadline = time.monotonic() + self._timeout if self._timeout > 0 else None
        while True:
            timeout = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
            got = self._engine.next(timeout if wait else 0.0)
            if got is True:
                self._fill(dry=True)
                continue
            if got:
                return got
            if not wait:
                return None
            if got is None:
                raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
            self._check_health(lambda: False)

    def _take_rows(self, sequence: int, block: int) -> Any:
        """The batch, taken, if it is nothing but rows; None: see _take()."""
        layout = self._shape.layout
        data = self._engine.take(sequence, block, layout.core) if layout is not None else None
        if data is not None:
            self._shape.note(True)
        return data

    def _take(self, batch: _Batch, block: int) -> Any:
        """The data of a batch that is more than rows, or a Failure."""
        engine = self._engine
        if engine.poll(block) == 2:
            return self._lost(batch, block)
        kind, layout_at = engine.form(block)
        if kind == BATCH or kind == PART:
            status, data, *more = self._whole(block)
            if status == FAILED:
                data.note = _note(batch, more[0] if more else None)
            elif more:
                self._shape.seen(more[0] >= 0)
            return data
        return self._take_mixed(batch, block, self._shape.layout if layout_at else None)

    def _take_mixed(self, batch: _Batch, block: int, layout: Layout | None) -> Any:
        """Rows of which some travelled in envelopes."""
        engine, rows = self._engine, len(batch.indices)
        samples: dict[int, Any] = {}
        objects: dict[int, list] = {}
        worker = 0
        for worker, row0, _nrows, data, buffers in engine.envelopes(block):
            if data is None:
                return _no_room()
            for row, what, obj in messages.loads(data, buffers or []):
                if what == ERROR:
                    obj.note = _note(batch, row)
                    return obj  # the first in the order of rows, as torch has it
                (objects if what == OBJECTS else samples)[row] = obj
        if layout is not None and not samples and len(objects) == rows:
            self._shape.note(True)
            return engine.decode(block, layout.core, [objects[r] for r in range(rows)])
        every = [
            samples[r]
            if layout is None or r in samples
            else engine.row(block, layout.core, r, objects.get(r))
            for r in range(rows)
        ]
        return self._collate(batch, every, worker, layout)

    def _collate(
        self, batch: _Batch, samples: list[Any], worker: int, layout: Layout | None
    ) -> Any:
        """The batch of samples that did not travel as rows, or a Failure in torch's words."""
        try:
            data = self._collated(samples, worker)
        except Exception as error:
            failure = Failure.of(error, f"in DataLoader worker process {worker}")
            failure.note = _note(batch, None)
            return failure
        if layout is not None:
            self._shape.note(False)
        return data

    def _collated(self, samples: list[Any], worker: int) -> Any:
        """Samples that are alike prove a layout, and are placed as rows by it; what torch
        makes of any others depends on its being in a worker."""
        shape = self._shape
        if not shape.whole and alike(samples):
            if shape.layout is None:
                try:
                    proof = self._collate_fn(samples)
                    shape.layout = Layout.prove(samples[0], proof, len(samples))
                except NoLayout:
                    shape.whole = True
            if shape.layout is not None:
                data = self._placed(samples, shape.layout)
                if data is not None:
                    return data
        with self._as_worker(worker):
            return self._collate_fn(samples)

    def _placed(self, samples: list[Any], layout: Layout) -> Any:
        """The batch in memory of minato's own, or None when a sample does not fit."""
        objects: list[list] = [[] for _ in samples]
        block = self._engine.place(samples, layout.core, objects)
        if block is None:
            return None
        try:
            return self._engine.decode(block, layout.core, objects)
        finally:
            self._engine.retire(block)

    @contextlib.contextmanager
    def _as_worker(self, number: int):
        """torch's collate goes another way where get_worker_info() says it is in a worker."""
        module = _utils.worker
        before = module._worker_info
        module._worker_info = module.WorkerInfo(
            id=number,
            num_workers=self._num_workers,
            seed=self._base_seed + number,
            dataset=self._dataset,
        )
        try:
            yield
        finally:
            module._worker_info = before

    def _lost(self, batch: _Batch, block: int) -> Failure:
        lost = self._engine.lost(block)
        assert lost is not None
        _worker, pid, status, row0, nrows = lost
        index = batch.indices
        if self._engine.form(block)[0] != BATCH:
            index = list(index[row0 : row0 + nrows])
        if type(index) is list and len(index) == 1:
            index = index[0]
        return _Told(
            WorkerLost(
                f"{describe_death(pid, status).rstrip()} It was loading sample index {index!r} "
                f"of batch {batch.number}, and so was every worker that tried before it.",
                pid,
                index,
                status,
            )
        )
