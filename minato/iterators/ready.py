"""``batching="ready"``: batches from whichever samples are ready first.

The sampler's batches are planned and made as they are in order. The engine forms batches of the
rows that are ready (csrc/schedule/mn_forming.h): slow samples with their natural share, none
further than ``DISPLACEMENT`` batches from where the sampler had it, all full to the end. Where
nothing is slow they are the sampler's, delivered as they lie. Else rows of several are gathered
by one copy.

Where a worker collates, because there is a ``collate_fn`` of the program's or a dataset gives
batches, each is one of the sampler's, and all that is chosen is which comes next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from .._core import Block, Loss
from ..errors import Failure
from ..transport import received
from ..transport.layouts import Layout
from ..transport.rows_or_whole import Form, Shape
from ..workers.answers import ERROR, LEFT_OUT, OBJECTS, REFUSED, REPLACED, parted
from ..workers.on_error import Spares
from .balanced import BalancedIterator
from .collating import CollatesHere
from .failures import Amended, Part, Told, lost, no_room, note, refused, unread
from .planner import Batch, Planner
from .prefetcher import AtATime, Prefetcher
from .receiver import Completions, Receiver
from .supervisor import Supervisor

#: batches that a sample may move at most. Every one costs memory for samples that wait; a
#: slow sample of sixteen times a batch's time still fits.
DISPLACEMENT = 16
#: tasks of a batch at most (csrc/schedule/mn_plan_state.h)
BATCH_TASKS = 1024
#: what the engine says of a row that was written in place (csrc/workers/mn_records.h)
WRITTEN = 1

#: neighbouring rows of what was planned: (block, first row, rows)
Run = tuple[Block, int, int]
#: what travelled beside a row: one of SAMPLE, ERROR, OBJECTS and that; GONE: its worker was lost
Entry = tuple[int, Any]
GONE = -1


class UnitPlanner(Planner):
    """Plans the sampler's batches; of one that was delivered in parts before this process began,
    each stretch that was not."""

    _planned_rows = _formed_rows = 0
    _resumed = 0  # places before this one may have been delivered

    def begin(
        self, indices: Iterator[Any], *, goes_on: bool, start: Callable[[], object] | None = None
    ) -> None:
        progress = self.position.progress
        self._resumed = max([progress.head, *(number + 1 for number in progress.beyond)])
        self._planned_rows = self._formed_rows = 0
        super().begin(indices, goes_on=goes_on, start=start)

    def drawn_ahead(self) -> int:
        """In batches of samples that are in none yet, and those that are formed. What does not
        fill one is none before the end: it waits for more."""
        rows, size = self._planned_rows - self._formed_rows, self.window.batch_size
        return (-(-rows // size) if self.draw.exhausted else rows // size) + self.received()

    def plan_whole(self) -> None:
        """Not of what batches are formed of: it is their error."""

    def plan_without(self, batch: Batch, losses: list[Loss], whole: bool) -> None:
        """Likewise: other batches have some of its samples already."""

    def all_handed_out(self) -> bool:
        """Whether nothing is left of what is planned."""
        return not self.planned and not self.received()

    def formed(self, rows: int) -> None:
        """So many rows are in a batch now."""
        self._formed_rows += rows

    def _makes_whole(self, sent: Any) -> bool:
        """Only one that all of it is in: what is left of others is collated with them."""
        size = self.window.batch_size
        entire = self.draw.within == 0 and (
            len(sent) == size or self.draw.position >= self._resumed
        )
        return super()._makes_whole(sent) and entire and self._planned_rows % size == 0

    def _waits_for_its_end(self, window: int) -> bool:
        if self._planned_rows % self.window.batch_size == 0:
            return super()._waits_for_its_end(window)
        self.enough = window - 1  # not as good as the end: what fills no batch would be one
        return self.drawn_ahead() >= window

    def _was_delivered(self) -> bool:
        return False  # _plan() looks at each sample

    def _counted(self) -> int:
        return self.draw.position

    def _plan(self, index: Any) -> bool:
        draw, rows = self.draw, len(index)
        while draw.within < rows:
            begin, end = draw.within, self._end_of_stretch(rows)
            if end > begin:
                batch = self._offer(index[begin:end], draw.position + begin)
                if batch is None:
                    return False
                # At once, as far as an interrupt can see.
                self.planned[batch.sequence], self.sequence = batch, batch.sequence + 1
            self._planned_rows, draw.within = self._planned_rows + end - begin, end + 1
        self._pass_over(index)
        return True

    def _with_spares(self, of: Spares, index: Any) -> tuple[Any, int]:
        """A stretch's samples are replaced as they would be in their batch: its other samples are
        spares."""
        batch, begin = self.draw.index(), self.draw.within
        if len(index) == len(batch):
            return super()._with_spares(of, index)
        spares = of.of(batch, self._ahead.following)
        others = [*batch[begin + len(index) :], *spares, *batch[:begin]]
        return [*index, *others], len(others)

    def _end_of_stretch(self, rows: int) -> int:
        """The row before which the next one lies that was delivered."""
        first, within = self.draw.position, self.draw.within
        if first + within >= self._resumed:
            return rows
        has = self._progress.has
        return next((row for row in range(within, rows) if has(first + row)), rows)


class ReadyReceiver(Receiver):
    """Batches that the engine has formed: the sampler's, or mixed ones."""

    planner: UnitPlanner

    def __init__(
        self, completions: Completions, planner: UnitPlanner, collates: CollatesHere
    ) -> None:
        super().__init__(completions, planner, collates, forgets=False)
        self._left: dict[int, int] = {}  # rows, of what was delivered in part
        self._entries: dict[int, dict[int, Entry]] = {}  # of the same, by row
        self.formed = 0  # batches of the epoch

    def receive(self, wait: bool = True) -> tuple[Any, Any] | None:
        """([(Batch, first row, rows)], data or Failure); None at the end, without wait also
        where none is formed."""
        got = self.completions.next(wait)
        if got is None:
            return None
        runs, planned = self.engine.formed(), self.planner.planned
        what = [(self.planner.batch_of(block.sequence), row0, rows) for block, row0, rows in runs]
        batch, _, rows = what[0]
        entire = len(what) == 1 and rows == len(batch.indices)
        comes_again = False
        try:
            data = self._data_of(batch, got) if entire else self._mixed(runs, what)
            if entire:
                del planned[batch.sequence]
        except BaseException:  # an interrupt
            comes_again = entire and self._interrupted(batch, got)
            raise
        finally:
            if not comes_again:
                self.formed += 1
                self.planner.formed(sum(rows for _, _, rows in what))
        return what, data

    def named(self, what: Any) -> str:
        """For an error: which batch that is."""
        return note(self.formed - 1, indices_of(what))

    def clear(self) -> None:
        """What was received of an epoch that is left is dropped."""
        self._left.clear()
        self._entries.clear()

    def at_end(self) -> bool:
        """Whether the program has had all of this epoch."""
        if not self.planner.all_handed_out():
            return False
        self.planner.check_all_drawn()
        return True

    def _is_lost(self, batch: Batch) -> None:
        self.planner.position.progress.delivered_run(batch.position, len(batch.indices))

    # ---- mixed batches -------------------------------------------------------------------

    def _mixed(self, runs: list[Run], what: list[tuple[Batch, int, int]]) -> Any:
        """The data of a batch of several, or a Failure. However this ends, it is taken."""
        try:
            try:
                return self._data_of_runs(runs, what)
            finally:
                try:
                    self._let_go(runs)
                finally:
                    self.engine.taken(runs[0][0])
        except Exception as error:
            return Told(error)  # in its place: the end of the epoch counts on one
        except BaseException:  # an interrupt: nobody gets it, and the end counts on it
            progress = self.planner.position.progress
            for batch, row0, rows in what:
                progress.delivered_run(batch.position + row0, rows)
            raise

    def _let_go(self, runs: list[Run]) -> None:
        """Forgets what nothing is left of, and then traces it: that may fail."""
        trace, planned = self.completions.supervisor.trace, self.planner.planned
        gone: list[tuple[Batch, Block]] = []
        for block, _, rows in runs:
            sequence = block.sequence
            batch = planned[sequence]
            left = self._left.pop(sequence, len(batch.indices)) - rows
            if left:
                self._left[sequence] = left
                continue
            del planned[sequence]
            self._entries.pop(sequence, None)
            if block.made:
                gone.append((batch, block))
        if trace is not None:
            for batch, block in gone:
                trace.block(batch.indices, block)

    def _data_of_runs(self, runs: list[Run], what: list[tuple[Batch, int, int]]) -> Any:
        layout = self.shape.layout
        rows_only = None if layout is None else self.engine.gather(layout.core)
        if layout is not None and rows_only is not None:
            try:
                return self._gathered(rows_only, layout, runs)
            finally:
                self.engine.retire(rows_only)
        samples: list[Any] = []
        amended = Amended(None, [], empty=False)
        for block, row0, rows in runs:
            batch = self.planner.planned[block.sequence]
            if not block.made:
                return refused(self.engine, block, f"batch {batch.number}")
            for row in range(row0, row0 + rows):
                kind, obj = self._entry(block, row)
                if kind == GONE:
                    return lost(self.engine, self._parts(runs))
                if kind in (LEFT_OUT, REPLACED):
                    made, amiss = parted([(row, kind, obj)])
                    amended.add(amiss, batch.number, batch.indices)
                    samples += made
                    continue
                sample = self._sample(block, row)
                if isinstance(sample, Failure):
                    return sample
                samples.append(sample)
        place = self.formed - 1, indices_of(what)
        if amended.amiss:
            amended.empty = not samples
            if samples:
                amended.data = self.collates.batch(place, samples, 0, None)
            return amended.data if isinstance(amended.data, Failure) else amended
        # Samples that were sent before there was a layout say nothing of whether others fit it.
        told = layout if all(self.engine.form(block)[1] for block, _, _ in runs) else None
        return self.collates.batch(place, samples, 0, told)

    def _parts(self, runs: list[Run]) -> list[Part]:
        """The planned batches that the rows are of, for an error that names their samples; without
        those that could not be made at all."""
        parts = []
        for block, row0, rows in runs:
            if block.made:
                batch = self.planner.planned[block.sequence]
                parts.append(Part(batch.number, batch.indices, block, row0, rows))
        return parts

    def _gathered(self, block: Block, layout: Layout, runs: list[Run]) -> Any:
        """Of rows that were all written in place."""
        data = self.engine.decode(block, layout.core, None)
        if data is None:  # there are objects beside them
            objects = []
            for made, row0, rows in runs:
                for row in range(row0, row0 + rows):
                    what, obj = self._entry(made, row)
                    if what == ERROR:
                        return obj
                    objects.append(obj)
            data = self.engine.decode(block, layout.core, objects)
        self.shape.fits()
        return data

    def _sample(self, block: Block, row: int) -> Any:
        """A sample, or a Failure."""
        what, obj = self._entry(block, row)
        if what == OBJECTS:
            assert self.shape.layout is not None
            return self.engine.row(block, self.shape.layout.core, row, obj)
        return obj

    def _entry(self, block: Block, row: int) -> Entry:
        """What travelled beside a row. Read once, for all rows of its task: that is done, but
        others of the unit may not be."""
        entries = self._entries.setdefault(block.sequence, {})
        batch = self.planner.planned[block.sequence]
        if row not in entries:
            self._read(entries, batch, block, row)
        if row not in entries:
            entries[row] = GONE, None
        return entries[row]

    def _read(self, entries: dict[int, Entry], batch: Batch, block: Block, row: int) -> None:
        """What the row's task sent. If it failed, then for all rows of it that it has not sent."""
        reports = self.engine.reports(block)
        for sent in self.engine.envelopes(block, row):
            failed = no_room() if sent.pickle is None else None
            try:
                found = received.rows(sent) if failed is None else []
            except Exception as error:
                found, failed = [], unread(
                    error, batch.number, batch.indices, sent.row0, sent.nrows
                )
            sound = failed is None
            for made, what, obj in found:
                if what == REFUSED:  # what is formed no worker makes whole
                    what = ERROR
                entries[made] = what, obj
                if what == ERROR:
                    obj.note_first(note(batch.number, batch.indices, made))
                    failed = failed or obj
            for other in range(sent.row0, sent.row0 + sent.nrows):
                if other not in entries and not (sound and reports[other][0] == WRITTEN):
                    entries[other] = ERROR, failed or Told(received.nonsense(sent.worker))
                entries.setdefault(other, (OBJECTS, None))
        if row not in entries and reports[row][0] == WRITTEN:
            entries[row] = OBJECTS, None


def indices_of(what: list[tuple[Batch, int, int]]) -> list[Any]:
    """Of a batch's samples."""
    return [i for batch, row0, rows in what for i in batch.indices[row0 : row0 + rows]]


class Displacement:
    """How far samples moved from where the sampler had them."""

    def __init__(self, planner: UnitPlanner, queue: deque[list[Any]]) -> None:
        self.planner = planner
        self.queue = queue

    def __call__(self) -> dict[str, float]:
        """In batches."""
        most, moved = self.planner.engine.displaced()
        formed = self.planner.position.progress.count
        formed += sum(rows for what, _ in self.queue if what for _, _, rows in what)
        return {"max": most, "mean": moved / max(1, formed)}


class ReadyIterator(BalancedIterator):
    """Ready-first batches of a map-style dataset."""

    _unit = "sample"
    _planner: UnitPlanner
    _receiver: ReadyReceiver

    def _make_parts(
        self, loader: Any, supervisor: Supervisor, shape: Shape, queue: deque[list[Any]]
    ) -> None:
        self._mixes = not shape.whole
        form = Form(shape, in_parts=self._mixes)
        size = loader.batch_sampler.batch_size
        planner = self._planner_of(UnitPlanner, loader, form, queue, size)
        collates = CollatesHere(loader, self._position, shape)
        self._receiver = ReadyReceiver(Completions(supervisor, planner), planner, collates)
        at_a_time = AtATime(None, planner.window)
        self._prefetcher = Prefetcher(supervisor, self._receiver, queue, at_a_time)
        supervisor.served.displacement = Displacement(planner, queue)

    def _engine_options(self) -> dict[str, Any]:
        size = self._planner.window.batch_size
        return super()._engine_options() | {
            "ready_batch": size,
            "ready_bound": DISPLACEMENT,
            "ready_mixes": self._mixes,
        }

    def _blocks_out(self) -> int:
        """Tasks of all batches that may wait for a slow sample of the first."""
        window = self._planner.window
        return (DISPLACEMENT + 1 + window.size()) * min(window.batch_size, BATCH_TASKS)

    @property
    def _rcvd_idx(self) -> int:  # type: ignore[override]
        return -(-self._progress.count // self._planner.window.batch_size)

    @property
    def _send_idx(self) -> int:  # type: ignore[override]
        return self._rcvd_idx + self._planner.drawn_ahead()

    def _begin(self, loader: Any, first_iter: bool) -> None:
        super()._begin(loader, first_iter)
        self._receiver.formed = self._progress.count // self._planner.window.batch_size

    def _next_batch(self) -> Any:
        """The next batch, or in its place a Failure that the caller raises or takes apart."""
        planner, progress, position = self._planner, self._progress, self._position
        if not planner.planned and not planner.draw.exhausted:
            planner.fill()  # else there would be nothing, and that is the end
        if self._receiver.at_end():
            progress.finished = True
            self._end_epoch()
            raise StopIteration
        got = self._prefetcher.next()
        assert got is not None  # there are more
        what, data = got
        if planner.drawn_ahead() <= planner.enough:
            self._draw_more(got)
        # A worker that could not begin has made nothing: nothing counts as delivered.
        if type(data) is not Failure or not data.at_start:
            for batch, row0, rows in what:
                progress.delivered_run(batch.position + row0, rows)
        supervisor = self._supervisor
        if supervisor is not None and supervisor.trace is not None:
            supervisor.trace.formed(position.epoch, indices_of(what))
        return data
