"""From the sampler to the engine: what is drawn and planned ahead."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from .._core import Engine, Epoch, Loss
from ..dataset_calls import fetches_batches
from ..progress import Progress
from ..sampler_indices import as_given, numbered, numbered_alone
from ..transport.rows_or_whole import Form
from ..workers.native import integers
from ..workers.on_error import Ahead, Gone, Spares
from .cost_hints import CostHints
from .failures import lost_sample
from .locality_key import Groups
from .next_epoch import EpochAhead, NextEpoch
from .position import Position
from .window import Window


@dataclass(slots=True)
class Batch:
    """A batch that was drawn and not delivered yet."""

    number: int
    indices: Any
    whole: bool
    progress: Progress  # of its epoch
    sequence: int = -1  # what it is planned by
    position: int = 0  # of its first sample in the sampler's order
    sent: Any = None  # the indices as workers get them, and how many at the end are spares
    spares: int = 0
    hints: bytes | None = None  # of what its samples cost, a float32 each


class Making(NamedTuple):
    """How workers are to make what is planned."""

    seeds: bool = True  # before each sample
    native: bool = False  # in C, which takes lists of int
    splits: bool = False  # batches that one worker makes may be split over several
    replaces: bool = False  # samples that fail, by others of the epoch
    goes_on: bool = False  # behind samples that fail


def _length_of(index: Any) -> int:
    """Of a batch's indices, as far as what the sampler gave has one."""
    try:
        return len(index)
    except Exception:
        return 1


class Draw:
    """What a sampler gives in one epoch, one index at a time."""

    def __init__(self, indices: Iterator[Any], sized: bool) -> None:
        self._indices = indices
        self._sized = sized  # an index is a list of those of samples
        self.drawn: tuple[Any] | None = None  # the index, until it is passed over
        self.hints: tuple[bytes | None] | None = None  # of its samples, once they were asked for
        self.number = 0  # of the next index
        self.position = 0  # of its first sample in the sampler's order
        self.within = 0  # so many of its samples need not be planned any more
        self.exhausted = False
        self._over = False  # the sampler has said so

    def look(self) -> None:
        """Draws the next index, if there is one."""
        with contextlib.suppress(StopIteration):
            self.index()

    def index(self) -> Any:
        """The next index, until it is passed over. Raises StopIteration."""
        if self.drawn is None:
            if self._over:
                raise StopIteration
            try:
                self.drawn = (next(self._indices),)  # first: an interrupt does not lose it then
            except StopIteration:
                self._over = True
                raise
            self.drawn = (as_given(self.drawn[0]),)
        return self.drawn[0]

    def behind(self) -> int:
        """The place of the first sample of the index after this one."""
        assert self.drawn is not None
        return self.position + (_length_of(self.drawn[0]) if self._sized else 1)

    def pass_over(self) -> None:
        """The index was planned, or delivered before this process began."""
        end = self.behind()
        # At once, as far as an interrupt can see.
        self.drawn, self.hints, self.number, self.position, self.within = (
            None, None, self.number + 1, end, 0)  # fmt: skip

    def end(self) -> None:
        """Nothing more is drawn."""
        self.drawn, self.exhausted = None, True


class Planner:
    """Draws from the sampler and has the engine make what it draws."""

    engine: Engine
    draw: Draw
    _epoch: Epoch | None  # that batches are drawn for, once its first index is known
    _progress: Progress  # of that epoch
    _last: int  # so many of them are drawn without meeting the sampler's end
    _ahead: Ahead  # what is drawn from, where samples that fail are replaced

    def __init__(
        self,
        loader: Any,
        position: Position,
        form: Form,
        window: Window,
        received: Sized,
        hints: CostHints,
        groups: Groups | None = None,
        making: Making = Making(),
    ) -> None:
        self.planned: dict[int, Batch] = {}  # by sequence
        self.sequence = 0  # of what is planned next
        self.enough = sys.maxsize  # with more planned, none are drawn
        self.form, self.window = form, window
        self.position = position
        self.next_epoch = NextEpoch(loader, position, window)
        self.groups = groups
        self._received = received  # and not handed over yet
        self._sampler = loader._index_sampler
        self.batched = bool(loader._auto_collation)  # an index is a list of those of samples
        self._making = making
        self._spares = Spares(self.batched) if making.replaces else None
        self._hints = hints
        self._together = fetches_batches(loader.dataset)
        self._begins = False  # an epoch is just being begun
        self.again = False  # what is planned has to be planned again, see plan_again()

    # ---- an epoch ------------------------------------------------------------------------

    def begin(
        self, indices: Iterator[Any], *, goes_on: bool, start: Callable[[], object] | None = None
    ) -> None:
        """A new epoch: its first window is planned. goes_on: the next begins while it ends. start:
        starts the workers, after the first index is drawn: a sampler that is asked for it may tell
        the dataset of the epoch, and workers get copies of that."""
        self.next_epoch.epoch_begins(goes_on)
        self._open(indices)
        if start is not None:
            self.draw.look()
            start()
        self._begins = True
        self.fill()
        self._begins = False

    def go_on(self) -> None:
        """After begin(), once the program has its generators back: an epoch that was planned
        whole is followed by the next."""
        if self.next_epoch.wanted:
            self.fill()

    def clear(self) -> None:
        """What is planned is made for nothing."""
        self.again = False
        self.engine.plan_clear()
        self.planned.clear()

    def adopt(self) -> bool:
        """Goes on with the epoch that was begun early, if that is the present one now."""
        if not self.next_epoch.adopt():
            return False
        if self.draw.exhausted:
            self._begin_next()  # all of a short epoch was planned in time
        self.fill()
        return True

    def _begin_next(self) -> None:
        """The sampler is exhausted: draws the next epoch's first window while this ends."""
        early = EpochAhead(self.position.open_next(), self.draw.number)
        begin = partial(self.position.begin_next, self._sampler, early.progress)
        self._open(self.next_epoch.indices(early.progress, begin), early)

    def _open(self, indices: Iterator[Any], early: EpochAhead | None = None) -> None:
        if self._spares is not None:
            indices = self._ahead = Ahead(indices)
            self._spares.clear()
        end = self.next_epoch.end
        end.epoch_begins()
        last = self.how_many() - end.short if end.draws else sys.maxsize
        progress = self.position.progress if early is None else early.progress
        draw, next_epoch = Draw(indices, self.batched), self.next_epoch
        # At once, as far as an interrupt can see.
        self.draw, self._epoch, self._last, self._progress, next_epoch.early = (
            draw, None, last, progress, early)  # fmt: skip

    def _epoch_of(self, progress: Progress) -> Epoch:
        if progress.dataset_epoch is None:
            progress.dataset_epoch = self.position.dataset_epochs.told(progress.user_epoch)
        return Epoch(
            progress.epoch,
            self.position.seed,
            # what is no list of int; with spares the index of one sample stands in a list
            numbered if self.batched or self._spares is not None else numbered_alone,
            user_epoch=progress.dataset_epoch,
            seeded=self._making.seeds,
            splits=self._making.splits,
        )

    # ---- planning anew -------------------------------------------------------------------

    def plan_whole(self) -> None:
        """Samples cannot be sent to be collated: from now on workers make whole batches, where they
        may, and those that are planned are planned again."""
        if not self._making.native:
            self.form.shape.whole = self.again = True

    def plan_without(self, batch: Batch, losses: list[Loss], whole: bool) -> None:
        """With ``on_error``: plans again a batch some of whose samples took with them each worker
        that tried, so that they fail where they are made, as others do; all that is planned is.
        whole: the tasks that were lost were to make whole batches. Does nothing for what no sample
        has done, such as a collate_fn."""
        if not self._making.goes_on:
            return
        rows = len(batch.indices) if self.batched else 1
        indices = list(batch.sent) if self.batched or batch.spares else [batch.sent]
        first, together = losses[0], self._together and rows > 1
        if together and not any(type(index) is Gone for index in indices):
            # which of them is known once they are asked for one by one
            error = lost_sample(first, batch.indices, batch.number)
            indices, batch.spares = [*indices, Gone(error)], batch.spares + 1
        elif whole or all(loss.nrows == 1 for loss in losses):
            for loss in losses:
                row = loss.row if whole and rows > 1 else loss.row0
                if row >= rows or type(indices[row]) is Gone:
                    return
                index = indices[row] if self.batched else batch.indices
                indices[row] = Gone(lost_sample(loss, index, batch.number))
        batch.sent = indices if self.batched or batch.spares else indices[0]
        self.again = True

    def plan_again(self) -> None:
        """Has each batch that is planned made by one worker. What was made of it is dropped, and
        seeds make it what it was. An interrupt leaves all of it to the next call."""
        engine = self.engine
        self.form.tell(engine)
        # Epochs of their own: that which a batch was planned with says that the engine has it, and
        # so it would of one that an interrupt has kept from being noted.
        self._epoch = None
        engine.plan_clear()
        epochs: dict[int, Epoch] = {}
        planned: dict[int, Batch] = {}
        end = self.sequence
        for batch in self.planned.values():
            number = batch.progress.epoch
            if number not in epochs:
                epochs[number] = self._epoch_of(batch.progress)
            sequence = engine.plan(
                epochs[number], batch.sent, batch.number, batch.position, True, None, batch.spares,
                batch.hints,
            )  # fmt: skip
            assert sequence is not None  # fewer tasks than it had
            planned[sequence] = replace(batch, whole=True, sequence=sequence)
            end = sequence + 1
        if self.draw.exhausted:
            engine.plan_end()
        # At once, as far as an interrupt can see.
        self.planned, self.sequence, self.again = planned, end, False

    # ---- drawing -------------------------------------------------------------------------

    def batch_of(self, sequence: int) -> Batch:
        """What was planned by that sequence and not delivered yet."""
        batch = self.planned.get(sequence)
        if batch is None:  # an interrupt came before that was noted, and the index is still here
            self._plan(self.draw.index())
            batch = self.planned[sequence]
        return batch

    def indices_of(self, number: int) -> Any:
        """What the sampler gave for a batch that is planned; None where it is not known."""
        found = (batch for batch in self.planned.values() if batch.number == number)
        return next((batch.indices for batch in found), None)

    def received(self) -> int:
        """Batches that are not handed over yet, of those that were received."""
        return len(self._received)

    def drawn_ahead(self) -> int:
        """What was drawn and not handed out; its window is torch's."""
        return len(self.planned) + len(self._received)

    def check_all_drawn(self) -> None:
        """The program has had all that was planned: that must have been all there is."""
        if not self.draw.exhausted:
            raise RuntimeError(
                f"internal error: nothing is planned after {self.draw.number} of what the "
                "sampler gives, and it has not ended: the epoch is not complete"
            )

    def how_many(self) -> int:
        """What the sampler gives in an epoch, in what is planned."""
        return len(self._sampler)

    def fill(self, starved: bool = False) -> None:
        """Draws from the sampler up to torch's window, further where that is harmless.
        starved: by another window, because workers idle behind a slow sample."""
        self.form.tell(self.engine)
        window = most = self.window.size()
        self.enough = sys.maxsize
        if self.window.far and starved:
            most = self.drawn_ahead() + window
        elif self.window.far and self.window.knows_costs():
            most = max(self.window.reach(self.sequence), 2 * window)
            self.enough = max(most - self.window.bulk, window)
            if self.drawn_ahead() > self.enough:
                return
        try:
            while not self.draw.exhausted and self.drawn_ahead() < most:
                if self.draw.number >= self._last and self._waits_for_its_end(window):
                    return
                if not self._draw():
                    return
        except BaseException as error:
            # What goes wrong with the next epoch costs the present one nothing: it begins anew in
            # its turn, and then the program is told.
            early = self.next_epoch.early
            if early is None:
                raise
            self.next_epoch.give_up(early)
            self.draw.exhausted = True  # an index that the engine has taken is needed yet
            self.engine.plan_end()
            if not isinstance(error, Exception):
                raise

    def _draw(self) -> bool:
        """Whether there may be more to draw now."""
        try:
            index = self.draw.index()
        except StopIteration:
            return self._ended()
        if self._was_delivered():
            self._pass_over(index)  # before this process began
            return True
        try:
            return self._plan(index)
        except Exception:  # one that does not pickle, say: it would come again at each call
            if not self.draw.exhausted and self.draw.drawn is not None:
                self._pass_over(index)
            raise

    def _waits_for_its_end(self, window: int) -> bool:
        """Only the end is to be drawn: whether it is too early for that."""
        if self.drawn_ahead() < window:
            return False
        if not self.next_epoch.due:
            self.engine.plan_end()  # as good as all are known
            self.enough = window - 1
            return True
        self.next_epoch.note_end()
        return False

    def _ended(self) -> bool:
        """The sampler has ended. Whether there is more to draw: of the next epoch."""
        if self._begins and self.next_epoch.wanted:
            return False  # what comes next draws from the program's generators
        self.draw.end()
        self._progress.check_end(self._counted())
        if not self.next_epoch.due:
            self.engine.plan_end()
            return False
        self._begin_next()
        return True

    def _was_delivered(self) -> bool:
        """What was drawn last, before this process began."""
        return self._progress.has(self.draw.number)

    def _counted(self) -> int:
        """What was drawn, as progress counts."""
        return self.draw.number

    def _plan(self, index: Any) -> bool:
        """Whether the engine has taken it."""
        draw, end = self.draw, self.draw.behind()
        batch = self._offer(index, draw.position)
        if batch is None:
            return False
        # At once, as far as an interrupt can see: one between two of these would have the index
        # planned once more, and any call lets one in.
        self.planned[batch.sequence], self.sequence = batch, batch.sequence + 1
        draw.drawn, draw.hints, draw.number, draw.position, draw.within = (
            None, None, draw.number + 1, end, 0)  # fmt: skip
        if self._spares is not None:
            self._spares.passed(index)
        return True

    def _makes_whole(self, sent: Any) -> bool:
        """Whether one worker fetches and collates what is planned next."""
        return self.form.makes_whole(sent)

    def _offer(self, index: Any, first: int) -> Batch | None:
        """The batch, which is to be noted, if the engine has taken it; asked again, it says so again.
        first: place of its first sample in the order."""
        number = self.draw.number
        sent, spares = integers(index) if self._making.native else index, 0
        if self._spares is not None:
            sent, spares = self._with_spares(self._spares, sent)
        whole = self._makes_whole(index)
        begins = None if self.groups is None else self._groups_of(self.groups, index)
        if self._epoch is None:
            self._epoch = self._epoch_of(self._progress)
        if self.draw.hints is None:
            self.draw.hints = (self._hints_of(index, first),)
        (hints,) = self.draw.hints
        sequence = self.engine.plan(self._epoch, sent, number, first, whole, begins, spares, hints)
        if sequence is None:
            return None
        return Batch(number, index, whole, self._progress, sequence, first, sent, spares, hints)

    def _hints_of(self, index: Any, first: int) -> bytes | None:
        """What the dataset predicts that the samples of a batch cost."""
        if not self._hints.given:
            return None
        progress = self._progress
        told = progress.dataset_epoch  # 1 + the epoch, 0: nothing
        user_epoch = told - 1 if told else None
        return self._hints.of(index, self.position.seed, progress.epoch, first, user_epoch)

    def _pass_over(self, index: Any) -> None:
        self.draw.pass_over()
        if self._spares is not None:
            self._spares.passed(index)

    def _with_spares(self, of: Spares, index: Any) -> tuple[Any, int]:
        """A batch's indices as they are sent, and how many at the end are of other samples."""
        if self.batched and type(index) not in (list, tuple):
            return index, 0
        spares = of.of(index, self._ahead.following)
        if self.batched:
            return ([*index, *spares] if spares else index), len(spares)
        return [index, *spares], len(spares)

    def _groups_of(self, groups: Groups, index: Any) -> bytes | None:
        """Where groups of the batch begin, by the dataset's word."""
        if type(index) not in (list, tuple):
            return None
        try:
            return groups.of(index)
        except Exception:  # it would come again at each call
            self.draw.end()
            self.engine.plan_end()
            raise
