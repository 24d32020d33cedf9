"""From the sampler to the engine: draws indices and plans batches ahead.

How far ahead: torch's prefetch window, and further where that is harmless. With
``prefetch_next_epoch=True`` the first batches of the next epoch are planned while the current one
ends.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from .._core import SEEDED_BY_INDEX, Engine
from .._records import Epoch, Loss
from ..dataset_calls import fetches_batches
from ..epoch_progress import Progress
from ..errors import LATE
from ..options import Options
from ..sampler_indices import as_given, numbered, numbered_alone
from ..seeding.order_generators import sampler_of, sampler_of_torch
from ..transport.layouts import EngineTransport
from ..workers.fetch_or_skip import BY_INDEX, RAISE, REPLACE, Ahead, FatalIndex, Spares
from ..workers.native import integers
from .dataset_hints import CostHints, groups_of
from .failure_limits import lost_sample
from .loader_memo import Memo
from .position import Position, SamplerChanges


# ---- the prefetch window -------------------------------------------------------------------

#: least and most batches drawn ahead, with those of the window, for samplers where it changes nothing.
#: The slowest samples determine the number; costs and memory determine what starts.
LOOK_AHEAD_BATCHES = 128, 512
#: limit on indices drawn ahead: at 0.1 us each, they fit between two batches
LOOK_AHEAD_INDICES = 1 << 17
#: batches between two decisions; below this time per batch, half of the reach is drawn at once, and
#: otherwise this many batches
LOOK_AGAIN_BATCHES, BULK_NS, FEW = 64, 1_000_000, 32
#: batches in flight per worker: a larger prefetch_factor would overflow the engine's counters
MOST_PER_WORKER = 1 << 16


def per_worker(loader: Any) -> int:
    """The loader's prefetch_factor, limited to what the engine can count."""
    factor: int = loader.prefetch_factor
    return min(factor, MOST_PER_WORKER)


def _is_fixed(order: Any) -> bool:
    """Whether no program can change it while it is read."""
    return type(order) in (int, str, range) or (
        type(order) is tuple and all(map(_is_fixed, order))
    )


def may_look_ahead(loader: Any) -> bool:
    """Whether drawing indices early changes nothing: for torch's own samplers, and for an order
    that cannot change, which a list can."""
    sampler, own = sampler_of(loader), sampler_of_torch(loader)
    if type(loader.batch_sampler) not in (type(None), torch.utils.data.BatchSampler):
        return _is_fixed(loader.batch_sampler)
    if type(sampler) is torch.utils.data.SubsetRandomSampler:
        return _is_fixed(sampler.indices)  # it looks them up one by one
    if type(sampler) is torch.utils.data.RandomSampler and sampler.generator is not None:
        # It may draw again in the middle of an epoch. If the program then leaves the epoch early,
        # its generator would not be where torch leaves it.
        source: Any = sampler.data_source
        own = own and not sampler.replacement and sampler.num_samples == len(source)
    return own or _is_fixed(sampler)


class Window:
    """The prefetch window. Counts in batches of batch_size samples."""

    def __init__(
        self,
        loader: Any,
        options: Options,
        memo: Memo,
        engine: Engine,
        *,
        hinted: bool,
        batch_size: int,
    ) -> None:
        self.far = may_look_ahead(loader) and not memo.shared_buffers
        self.batch_size = batch_size
        self.bulk = 1  # batches drawn at a time beyond the window
        self.quick = False  # a batch is made before a whole look-ahead is planned
        self._costs = memo.costs
        self._costs_known = hinted
        self._per_worker = per_worker(loader)
        self._workers: int = loader.num_workers
        moves = options.bounds(self._workers)[2] > self._workers
        self._engine = engine if moves else None  # None: the number of workers does not change
        self._reach = 0
        self._looked = -LOOK_AGAIN_BATCHES  # sequence number of the last decision

    def size(self) -> int:
        """torch's prefetch window for the current number of workers."""
        workers = self._workers
        if self._engine is not None:
            scheduler = self._engine.scheduler()
            workers = max(workers, scheduler["active"] if scheduler else 0)
        return self._per_worker * workers

    def knows_costs(self) -> bool:
        """Whether any costs are known. Before that, no tasks are planned beyond the window, because
        the size of tasks depends on costs."""
        if not self._costs_known:
            self._costs_known = self._costs.summary()["samples"] > 0
        return self._costs_known

    def reach(self, sequence: int) -> int:
        """How many batches to plan ahead: three times the batches that pass while the slowest
        sample is made. Then a slow sample starts in time and does not delay the end of the epoch.
        Decided once for many batches.

        The time per batch determines how many are drawn at once. Each call of the engine wakes
        sleeping workers. This costs more than drawing if batches are small, and runs on cold caches
        if steps are long."""
        if sequence - self._looked >= LOOK_AGAIN_BATCHES:
            self._looked = sequence
            costs, (least, most) = self._costs.summary(), LOOK_AHEAD_BATCHES
            batch = costs["mean_ns"] * self.batch_size / self._workers
            slow = 3 * costs["p995_ns"] / batch if batch > 0 else 0
            most = min(most, LOOK_AHEAD_INDICES // self.batch_size)
            self._reach = int(min(max(slow, least), most))
            half = self._reach // 2
            self.bulk = min(FEW, half) if batch > BULK_NS else half
            self.quick = 0 < batch <= BULK_NS
        return self._reach


# ---- the next epoch ------------------------------------------------------------------------


@dataclass
class EpochAhead:
    """Describes the next epoch while the current one ends; some of its batches are planned."""

    progress: Progress
    ends: int  # number of batches in the current epoch
    failed: bool = False  # abandoned; it starts anew in its turn


class SamplerEnd:
    """The end of a RandomSampler that draws from its generator once more when it ends. That end
    must not be reached ahead, because torch's loader would not have reached it."""

    def __init__(self, loader: Any, far: bool) -> None:
        """far: the sampler is read beyond torch's prefetch window."""
        self._sampler = sampler_of(loader)
        random = type(self._sampler) is torch.utils.data.RandomSampler
        self.draws = far and random and self._sampler.generator is not None
        #: 1 if the last batch reaches the end, because it is not full; 0 if only asking for one
        #: more batch reaches it
        self.short = 0
        self._batches = loader.batch_sampler
        plain = type(self._batches) is torch.utils.data.BatchSampler
        self._fills = self.draws and plain and not self._batches.drop_last

    def epoch_begins(self) -> None:
        """Updates the batch count. A dataset that grows or shrinks later changes nothing."""
        if self._fills:
            self.short = int(len(self._sampler) % self._batches.batch_size != 0)


class _Early(Iterator[Any]):
    """The indices of an epoch that starts early. Its sampler is asked only when the first index is
    needed. Its attributes may change while it is drawn from."""

    def __init__(
        self, changes: SamplerChanges, progress: Progress, begin: Callable[[], Iterator[Any]]
    ) -> None:
        self._changes, self._progress, self._begin = changes, progress, begin
        self._indices: Iterator[Any] | None = None
        changes.note()

    def __next__(self) -> Any:
        begins = self._indices is None
        if not begins and self._progress.early:
            self._changes.check()
        try:
            if self._indices is None:
                self._indices = self._begin()
            return next(self._indices)
        finally:
            if self._progress.early:
                self._changes.note(begins)


class NextEpoch:
    """Whether the next epoch starts early, and how that is undone."""

    early: EpochAhead | None = None
    wanted = False  # prefetch_next_epoch
    # states of the sampler's generators, before its end was reached ahead of torch's window
    _before_end: dict[str, bytes] | None = None

    def __init__(self, loader: Any, position: Position, window: Window) -> None:
        self.end = SamplerEnd(loader, window.far)
        self.changes = SamplerChanges(position)
        self._position = position
        self._window = window

    def epoch_begins(self, wanted: bool) -> None:
        """An epoch starts. wanted: the next one is to start while it ends."""
        self.wanted, self._before_end = wanted, None

    @property
    def due(self) -> bool:
        """Whether the next epoch starts when the sampler ends."""
        return self.wanted and self.early is None

    def note_end(self) -> None:
        """The sampler is about to end, perhaps earlier than in torch's loader."""
        if self._before_end is None:
            self._before_end = self._position.sources.capture(everything=False)

    def give_up(self, early: EpochAhead) -> None:
        """Abandons the early epoch after an error, without affecting the current epoch."""
        early.failed = True
        self._position.sources.set_own(early.progress.generators or {})
        self.changes.note()

    def left(self, early: EpochAhead) -> int:
        """Batches of the current epoch that are not delivered yet."""
        return early.ends - self._position.progress.count

    def adopt(self) -> bool:
        """Makes the early epoch the current one. False if there is none, it has failed, or it is
        stale: the last epoch was left in the middle, or the program called load_state_dict, or
        set_epoch of the loader or a sampler, since."""
        early, self.early = self.early, None
        if early is None:
            return False
        memo = self._position.memo
        set_since = early.progress.user_epoch != memo.user_epoch or self.changes.seen()
        if early.failed or self.left(early) > 0 or set_since or memo.resume is not None:
            self._undo(early)
            self.changes.forget()
            return False
        self._before_end = None
        self.changes.forget()
        self._position.adopt(early.progress)
        return True

    def _undo(self, early: EpochAhead) -> None:
        """Sets the sampler's generators to their states in torch's loader at this point, except
        those that the program has set or drawn from since."""
        states, far = early.progress.generators, self._window.size() + self.end.short
        if self._before_end is not None and self.left(early) >= far:
            states = self._before_end  # torch's loader would not have reached the end yet
        sources, noted = self._position.sources, self.changes.states
        now = sources.capture(everything=False)
        drawn = {role for role in now if now[role] == noted.get(role)}
        resume = self._position.memo.resume
        if resume is not None and not resume["begun"]:
            drawn -= set(resume["generators"])  # load_state_dict() has set them
        sources.set_own({r: state for r, state in (states or {}).items() if r in drawn})


# ---- planning ------------------------------------------------------------------------------


@dataclass(slots=True)
class Batch:
    """A batch that was drawn and is not delivered yet."""

    number: int
    indices: Any
    progress: Progress  # of its epoch
    sequence: int = -1  # the engine's number for it
    position: int = 0  # of its first sample in the sampler's order
    sent: Any = None  # the indices as workers get them, including the spares at the end
    spares: int = 0
    hints: bytes | None = None  # of what its samples cost, a float32 each


def _length_of(index: Any) -> int:
    """Number of a batch's indices; 1 if it has no length."""
    try:
        return len(index)
    except Exception:
        return 1


class Draw:
    """A sampler's indices in one epoch, drawn one at a time."""

    def __init__(self, indices: Iterator[Any], sized: bool, first: int) -> None:
        self._indices = indices
        self._sized = sized  # an index is a list of sample indices
        self.drawn: tuple[Any] | None = None  # the current index, until it is passed over
        #: hints of its samples, and where groups begin; None: the dataset was not asked yet
        self.told: tuple[bytes | None, bytes | None] | None = None
        self.number = 0  # of the next index
        self.position = first  # of its first sample in the sampler's order
        self.within = 0  # how many of its samples need no planning any more
        self.exhausted = False
        self._over = False  # the sampler has raised StopIteration

    def index(self) -> Any:
        """The current index, until it is passed over. Raises StopIteration."""
        if self.drawn is None:
            if self._over:
                raise StopIteration
            try:
                self.drawn = (next(self._indices),)  # stored at once: no interrupt loses it
            except StopIteration:
                self._over = True
                raise
            self.drawn = (as_given(self.drawn[0]),)
        return self.drawn[0]

    def behind(self) -> int:
        """Position of the first sample after this index."""
        assert self.drawn is not None
        return self.position + (_length_of(self.drawn[0]) if self._sized else 1)

    def pass_over(self) -> None:
        """Advances: the index was planned, or delivered before this process started."""
        end = self.behind()
        # A KeyboardInterrupt cannot be raised between these assignments.
        self.drawn, self.told, self.number, self.position, self.within = (
            None, None, self.number + 1, end, 0)  # fmt: skip

    def end(self) -> None:
        """Stops drawing."""
        self.drawn, self.exhausted = None, True


class Planner:
    """Draws from the sampler and plans batches in the engine."""

    draw: Draw
    _epoch: Epoch | None  # the epoch being drawn, once its first index is known
    _progress: Progress  # of that epoch
    _last: int  # this many indices can be drawn without reaching the sampler's end
    _ahead: Ahead  # the indices, where failed samples are replaced

    def __init__(
        self,
        engine: Engine,
        loader: Any,
        position: Position,
        transport: EngineTransport,
        options: Options,
        *,
        batch_size: int,
        native: bool = False,
        splits: bool = False,
    ) -> None:
        """native: workers make batches in C, from lists of int. splits: a batch with a collate_fn may be
        split over several workers."""
        memo, ranks = position.memo, position.ranks.for_seeds()
        hints = CostHints(
            loader.dataset, loader.collate_fn, memo, ranks=ranks, seeds=options.seeds
        )
        self.engine = engine
        self.planned: dict[int, Batch] = {}  # by sequence
        #: [Batch, data or Pinning or Raised] of received batches, in order of delivery
        self.received: deque[list[Any]] = deque()
        self.sequence = 0  # of the next planned batch
        self.refill_at = sys.maxsize  # no more are drawn while more than this are planned
        self.transport = transport
        self.window = Window(
            loader, options, memo, engine, hinted=hints.given, batch_size=batch_size
        )
        self.position = position
        self.next_epoch = NextEpoch(loader, position, self.window)
        self._groups = groups_of(loader)
        self._sampler = loader._index_sampler
        self.batched = bool(loader._auto_collation)  # an index is a list of sample indices
        self._options, self._native, self._splits = options, native, splits
        self._spares = Spares(self.batched) if options.on_error == REPLACE else None
        self._hints = hints
        self.together = fetches_batches(loader.dataset)  # one call makes a batch's samples
        self._in_begin = False  # begin() is running
        self.must_plan_again = False  # all planned batches must be planned again, see plan_again()

    # ---- an epoch ------------------------------------------------------------------------

    def begin(
        self, indices: Iterator[Any], *, goes_on: bool, start: Callable[[], object] | None = None
    ) -> None:
        """Starts an epoch and plans its first window. goes_on: the next epoch starts while this one
        ends. start: starts the workers, after the first index is drawn. The sampler may tell the
        dataset its epoch at that point, and workers get copies of the dataset."""
        self.next_epoch.epoch_begins(goes_on)
        self._open(indices)
        if start is not None or self._progress.chosen is not None:
            with contextlib.suppress(StopIteration):
                self.draw.index()
        if start is not None:
            start()
        self._in_begin = True
        self.fill()
        self._in_begin = False

    def go_on(self) -> None:
        """After begin(), once the program's generators are restored: if the whole epoch was
        planned, starts the next one."""
        if self.next_epoch.wanted:
            self.fill()

    def clear(self) -> None:
        """Discards everything that is planned."""
        self.must_plan_again = False
        self.engine.plan_clear()
        self.planned.clear()

    def adopt(self) -> bool:
        """Continues with the epoch that was started early, if it is the current one now."""
        if not self.next_epoch.adopt():
            return False
        if self.draw.exhausted:
            self._begin_next()  # all of a short epoch was planned early
        self.fill()
        return True

    def _begin_next(self) -> None:
        """The sampler is exhausted: draws the next epoch's first window while this one ends."""
        progress = self.position.open_next()
        begin = partial(self.position.begin_next, self._sampler, progress)
        indices = _Early(self.next_epoch.changes, progress, begin)
        self._open(indices, EpochAhead(progress, self.draw.number))

    def _open(self, indices: Iterator[Any], early: EpochAhead | None = None) -> None:
        if self._spares is not None:
            indices = self._ahead = Ahead(indices)
            self._spares.clear()
        end = self.next_epoch.end
        end.epoch_begins()
        last = len(self._sampler) - end.short if end.draws else sys.maxsize
        progress = self.position.progress if early is None else early.progress
        draw, next_epoch = Draw(indices, self.batched, progress.first), self.next_epoch
        # A KeyboardInterrupt cannot be raised between these assignments.
        self.draw, self._epoch, self._last, self._progress, next_epoch.early = (
            draw, None, last, progress, early)  # fmt: skip

    def _epoch_of(self, progress: Progress) -> Epoch:
        if progress.dataset_epoch is None:
            progress.dataset_epoch = self.position.dataset_epochs.for_workers(progress.user_epoch)
        seeds = self._options.seeds
        return Epoch(
            progress.epoch,
            self.position.seed,
            # pickles anything but a list of int; with spares, a single index is put in a list
            numbered if self.batched or self._spares is not None else numbered_alone,
            user_epoch=progress.dataset_epoch,
            seeded=SEEDED_BY_INDEX if seeds and progress.by_index else seeds,
            splits=self._splits,
        )

    # ---- planning again ------------------------------------------------------------------

    def plan_whole(self) -> None:
        """Samples cannot be pickled for collating here. From now on, workers make whole batches if
        they may, and planned batches are planned again."""
        if not self._native:
            self.transport.shape.whole = self.must_plan_again = True

    def plan_without(self, batch: Batch, losses: list[Loss], whole: bool) -> None:
        """With ``on_error``: plans again after samples killed every worker that tried them.

        These samples are marked to fail in the worker, like others that raise. All planned batches
        are planned again. whole: the lost tasks were to make whole batches. If no sample caused the
        deaths, but a collate_fn, say, this has no effect.
        """
        if self._options.on_error == RAISE:
            return
        rows = len(batch.indices) if self.batched else 1
        indices = list(batch.sent) if self.batched or batch.spares else [batch.sent]
        first, together = losses[0], self.together and rows > 1
        if together and not any(type(index) is FatalIndex for index in indices):
            # the worker finds out which by fetching them one by one
            error = lost_sample(first, batch.indices, batch.number)
            indices, batch.spares = [*indices, FatalIndex(error)], batch.spares + 1
        elif whole or all(loss.nrows == 1 or loss.status == LATE for loss in losses):
            for loss in losses:
                known = loss.status == LATE or whole  # which row of several
                row = loss.row if known and rows > 1 else loss.row0
                if row >= rows or type(indices[row]) is FatalIndex:
                    return
                index = indices[row] if self.batched else batch.indices
                indices[row] = FatalIndex(lost_sample(loss, index, batch.number))
        batch.sent = indices if self.batched or batch.spares else indices[0]
        self.must_plan_again = True

    def plan_again(self) -> None:
        """Plans every planned batch again, as a whole batch for one worker. Discards what was made
        of it; seeding makes it the same. After an interrupt, the next call does all of it."""
        engine = self.engine
        self.transport.update(engine)
        # Use new Epoch objects. The engine recognises a batch that it already has by its epoch
        # object, also one that an interrupt kept from being recorded here.
        self._epoch = None
        engine.plan_clear()
        epochs: dict[int, Epoch] = {}  # by the id of the progress
        planned: dict[int, Batch] = {}
        end = self.sequence
        for batch in self.planned.values():
            number = id(batch.progress)
            if number not in epochs:
                epochs[number] = self._epoch_of(batch.progress)
            sequence = engine.plan(
                epochs[number], batch.sent, batch.number, batch.position, True, None, batch.spares,
                batch.hints,
            )  # fmt: skip
            assert sequence is not None  # it needs fewer tasks than before
            planned[sequence] = replace(batch, sequence=sequence)
            end = sequence + 1
        if self.draw.exhausted:
            engine.plan_end()
        # A KeyboardInterrupt cannot be raised between these assignments.
        self.planned, self.sequence, self.must_plan_again = planned, end, False

    # ---- drawing -------------------------------------------------------------------------

    def batch_of(self, sequence: int) -> Batch:
        """The planned batch with that sequence number."""
        batch = self.planned.get(sequence)
        if batch is None:  # an interrupt came before it was recorded; its index is still here
            self._plan(self.draw.index())
            batch = self.planned[sequence]
        return batch

    def indices_of(self, number: int) -> Any:
        """The sampler's indices of a planned batch; None if they are not known."""
        found = (batch for batch in self.planned.values() if batch.number == number)
        return next((batch.indices for batch in found), None)

    def drawn_ahead(self) -> int:
        """Number of batches drawn and not delivered; ``fill`` limits it."""
        return len(self.planned) + len(self.received)

    def check_all_drawn(self) -> None:
        """Checks, when everything planned was delivered, that the sampler has ended."""
        if not self.draw.exhausted:
            raise RuntimeError(
                f"internal error: nothing is planned after {self.draw.number} of the sampler's "
                "indices, but the sampler has not ended, so the epoch is not complete; please report this"
            )

    def fill(self, starved: bool = False) -> None:
        """Draws up to torch's window, and further where that is harmless. starved: one window
        further, because workers are idle behind a slow sample."""
        self.transport.update(self.engine)
        window = most = self.window.size()
        self.refill_at = sys.maxsize
        chosen = self._progress.chosen
        far = self.window.far and (chosen is None or not chosen.swaps)
        if far and starved:
            most = self.drawn_ahead() + window
        if far and self.window.knows_costs():
            most = max(most, self.window.reach(self.sequence), 2 * window)
            self.refill_at = max(most - self.window.bulk, window)
            if self._in_begin and self.window.quick:
                # The program waits for the first batch. The next() after it draws the others.
                most, self.refill_at = window + 1, window - 1
            elif self.drawn_ahead() > self.refill_at and not starved:
                return
        try:
            while not self.draw.exhausted and self.drawn_ahead() < most:
                chosen = self._progress.chosen
                if chosen is not None and self.drawn_ahead() >= chosen.most_ahead:
                    return
                if self.draw.number >= self._last and self._waits_for_its_end(window):
                    return
                if not self._draw():
                    return
        except BaseException as error:
            # An error in the next epoch does not affect the current one. That epoch starts anew in
            # its turn, and then the program gets the error.
            early = self.next_epoch.early
            if early is None:
                raise
            self.next_epoch.give_up(early)
            self.draw.exhausted = True  # draw.index may still be needed for a planned batch
            self.engine.plan_end()
            if not isinstance(error, Exception):
                raise

    def _draw(self) -> bool:
        """Draws one index. Returns whether there may be more to draw now."""
        try:
            index = self.draw.index()
        except StopIteration:
            return self._ended()
        if self._was_delivered():
            self._pass_over(index)  # before this process started
            return True
        try:
            return self._plan(index)
        except Exception:  # it cannot be pickled, say; it would fail again at each call
            if not self.draw.exhausted and self.draw.drawn is not None:
                self._pass_over(index)
            raise

    def _waits_for_its_end(self, window: int) -> bool:
        """Only the sampler's end remains to be drawn: whether it is too early for that."""
        if self.drawn_ahead() < window:
            return False
        if not self.next_epoch.due:
            self.engine.plan_end()  # all batches are known
            self.refill_at = window - 1
            return True
        self.next_epoch.note_end()
        return False

    def _ended(self) -> bool:
        """The sampler has ended. Returns whether there is more to draw, from the next epoch."""
        if self._in_begin and self.next_epoch.wanted:
            return False  # the next epoch draws from the program's generators
        self.draw.end()
        self._progress.check_end(self._counted())
        if not self.next_epoch.due:
            self.engine.plan_end()
            return False
        self._begin_next()
        return True

    def _was_delivered(self) -> bool:
        """Whether the current index was delivered before this process started."""
        return self._progress.has(self.draw.number)

    def _counted(self) -> int:
        """The number of drawn indices, in the units of progress."""
        return self.draw.number

    def _plan(self, index: Any) -> bool:
        """Plans an index. Returns whether the engine has accepted it."""
        draw, end = self.draw, self.draw.behind()
        batch = self._offer(index, draw.position)
        if batch is None:
            return False
        # A KeyboardInterrupt cannot be raised between these assignments, and any call could let one
        # in. An interrupt between them would plan the index twice.
        self.planned[batch.sequence], self.sequence = batch, batch.sequence + 1
        draw.drawn, draw.told, draw.number, draw.position, draw.within = (
            None, None, draw.number + 1, end, 0)  # fmt: skip
        if self._spares is not None:
            self._spares.passed(index)
        return True

    def _makes_whole(self, sent: Any) -> bool:
        """Whether one worker fetches and collates the next planned batch."""
        return self.transport.makes_whole(sent)

    def _offer(self, index: Any, first: int) -> Batch | None:
        """Offers a batch to the engine. Returns it if accepted, also when offered again. first:
        position of its first sample in the order."""
        number = self.draw.number
        sent, spares = integers(index) if self._native else index, 0
        if self._spares is not None:
            sent, spares = self._with_spares(self._spares, sent)
        whole = self._makes_whole(index)
        if self._epoch is None:
            self._epoch = self._epoch_of(self._progress)
        if self.draw.told is None:  # once, also if the engine has no room for the batch now
            hints = self._hints_of(index, first) if self._hints.predicts else None
            self.draw.told = hints, self._groups_of(index)
        hints, begins = self.draw.told
        sequence = self.engine.plan(self._epoch, sent, number, first, whole, begins, spares, hints)
        if sequence is None:
            return None
        return Batch(number, index, self._progress, sequence, first, sent, spares, hints)

    def _hints_of(self, index: Any, first: int) -> bytes | None:
        """What the dataset predicts that the samples of a batch cost."""
        progress = self._progress
        told = progress.dataset_epoch  # 1 + the epoch, 0: nothing
        user_epoch = told - 1 if told else None
        first = BY_INDEX if progress.by_index else first
        return self._hints.of(index, self.position.seed, progress.epoch, first, user_epoch)

    def _pass_over(self, index: Any) -> None:
        self.draw.pass_over()
        if self._spares is not None:
            self._spares.passed(index)

    def _with_spares(self, of: Spares, index: Any) -> tuple[Any, int]:
        """A batch's indices as they are sent, and how many spares are at their end."""
        if self.batched and type(index) not in (list, tuple):
            return index, 0
        spares = of.of(index, self._ahead.following)
        if self.batched:
            return ([*index, *spares] if spares else index), len(spares)
        return [index, *spares], len(spares)

    def _groups_of(self, index: Any) -> bytes | None:
        """Where the dataset's locality groups begin in the batch."""
        if self._groups is None or type(index) not in (list, tuple):
            return None
        try:
            return self._groups.begins(index)
        except Exception:  # it would fail again at each call
            self.draw.end()
            self.engine.plan_end()
            raise
