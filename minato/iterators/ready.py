"""``batching="ready"``: batches of the samples that are ready first.

The sampler's batches are planned and made as usual. The engine forms batches from the
rows that are ready (csrc/engine/mn_delivery_ready.c). Slow samples keep their natural share. No sample
moves further than ``DISPLACEMENT`` batches from its position in the sampler's order. All batches up to
the last are full. If no sample is slow, they are the sampler's batches, delivered without a copy.
Otherwise rows of several batches are gathered by one copy.

Workers collate if the program has its own ``collate_fn``, or if the dataset returns batches. Then
each batch is one of the sampler's, and only their order changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from .._core import Block
from .._records import Loss
from ..errors import Failure, LoaderFailure
from ..transport.layouts import EngineTransport, SampleTransport
from ..workers.answers import OBJECTS
from ..workers.fetching import Spares
from .failed_batches import Part, note
from .iterator import BalancedIterator
from .planner import Batch, Planner
from .receiver import GONE, CollatesHere, Entry, Receiver, read_entries
from .supervisor import Supervisor

#: how many batches a sample may move at most. Each costs memory for samples that wait; a
#: slow sample of sixteen times a batch's time still fits.
DISPLACEMENT = 16

#: neighbouring rows of a planned batch: (block, first row, rows)
Run = tuple[Block, int, int]


class UnitPlanner(Planner):
    """Plans the sampler's batches. If an earlier process delivered parts of a batch, plans
    each stretch that was not delivered."""

    _planned_rows = _formed_rows = 0
    _resumed = 0  # samples before this position may have been delivered

    def begin(
        self, indices: Iterator[Any], *, goes_on: bool, start: Callable[[], object] | None = None
    ) -> None:
        progress = self.position.progress
        self._resumed = max([progress.head, *(number + 1 for number in progress.beyond)])
        self._planned_rows = self._formed_rows = 0
        super().begin(indices, goes_on=goes_on, start=start)

    def drawn_ahead(self) -> int:
        """Counts, in batches: samples that are in no batch yet, and formed batches. Before the end,
        a rest that does not fill a batch does not count."""
        rows, size = self._planned_rows - self._formed_rows, self.window.batch_size
        return (-(-rows // size) if self.draw.exhausted else rows // size) + self.received()

    def plan_whole(self) -> None:
        """Has no effect: a sample that cannot be sent fails its batch."""

    def plan_without(self, batch: Batch, losses: list[Loss], whole: bool) -> None:
        """Has no effect: other batches may already contain some of its samples."""

    def all_handed_out(self) -> bool:
        """Whether all planned batches were delivered."""
        return not self.planned and not self.received()

    def formed(self, rows: int) -> None:
        """Records that this many rows are in a batch now."""
        self._formed_rows += rows

    def _makes_whole(self, sent: Any) -> bool:
        """Only a complete batch; the rest of a partly delivered one is collated with others."""
        size = self.window.batch_size
        entire = self.draw.within == 0 and (
            len(sent) == size or self.draw.position >= self._resumed
        )
        return super()._makes_whole(sent) and entire and self._planned_rows % size == 0

    def _waits_for_its_end(self, window: int) -> bool:
        if self._planned_rows % self.window.batch_size == 0:
            return super()._waits_for_its_end(window)
        self.refill_at = window - 1  # not plan_end(): the rest would become a small batch
        return self.drawn_ahead() >= window

    def _was_delivered(self) -> bool:
        return False  # _plan() checks each sample

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
                # A KeyboardInterrupt cannot be raised between these assignments.
                self.planned[batch.sequence], self.sequence = batch, batch.sequence + 1
            self._planned_rows, draw.within, draw.hints = (
                self._planned_rows + end - begin, end + 1, None)  # fmt: skip
        self._pass_over(index)
        return True

    def _with_spares(self, of: Spares, index: Any) -> tuple[Any, int]:
        """A stretch's samples are replaced as in their complete batch: its other samples are
        spares."""
        batch, begin = self.draw.index(), self.draw.within
        if len(index) == len(batch):
            return super()._with_spares(of, index)
        spares = of.of(batch, self._ahead.following)
        others = [*batch[begin + len(index) :], *spares, *batch[:begin]]
        return [*index, *others], len(others)

    def _end_of_stretch(self, rows: int) -> int:
        """The first row from ``within`` on that was delivered, or the end of the batch."""
        first, within = self.draw.position, self.draw.within
        if first + within >= self._resumed:
            return rows
        has = self._progress.has
        return next((row for row in range(within, rows) if has(first + row)), rows)


class ReadyReceiver(Receiver):
    """Receives batches that the engine has formed: the sampler's, or mixed ones."""

    planner: UnitPlanner

    def __init__(
        self, supervisor: Supervisor, planner: UnitPlanner, collates: CollatesHere, *, forgets: bool
    ) -> None:
        super().__init__(supervisor, planner, collates, forgets=forgets)
        self._left: dict[int, int] = {}  # rows left of partly delivered batches
        self._entries: dict[int, dict[int, Entry]] = {}  # of the same batches, by row
        self.formed = 0  # batches of the epoch

    def receive(self, wait: bool = True) -> tuple[Any, Any] | None:
        """([(Batch, first row, rows)], data or Failure). None at the end, and without wait also
        if no batch is formed."""
        got = self._next_block(wait)
        if got is None:
            return None
        runs, planned = got.runs, self.planner.planned
        what = [(self.planner.batch_of(block.sequence), row0, rows) for block, row0, rows in runs]
        batch, _, rows = what[0]
        entire = len(what) == 1 and rows == len(batch.indices)
        comes_again = False
        try:
            data = self._data_of(batch, got) if entire else self._mixed(runs, what)
            if entire:
                del planned[batch.sequence]
        except BaseException:  # a KeyboardInterrupt
            comes_again = entire and self._interrupted(batch, got)
            raise
        finally:
            if not comes_again:
                self.formed += 1
                self.planner.formed(sum(rows for _, _, rows in what))
        return what, data

    def named(self, what: Any) -> str:
        """Names a batch for an error message."""
        return note(self.formed - 1, indices_of(what))

    def clear(self) -> None:
        """Drops what was received of an abandoned epoch."""
        self._left.clear()
        self._entries.clear()

    def at_end(self) -> bool:
        """Whether the program has received the whole epoch."""
        if not self.planner.all_handed_out():
            return False
        self.planner.check_all_drawn()
        return True

    def _is_lost(self, batch: Batch) -> None:
        self.planner.position.progress.delivered_run(batch.position, len(batch.indices))

    # ---- mixed batches -------------------------------------------------------------------

    def _mixed(self, runs: list[Run], what: list[tuple[Batch, int, int]]) -> Any:
        """The data of a mixed batch, or a Failure. Takes it from the engine in every case."""
        try:
            try:
                return self._data_of_runs(runs, what)
            finally:
                try:
                    self._let_go(runs)
                finally:
                    self.engine.retire(runs[0][0])
        except Exception as error:
            return LoaderFailure(error)  # in the batch's place: the end of the epoch expects one
        except BaseException:  # an interrupt: the batch is lost and counts as delivered
            progress = self.planner.position.progress
            for batch, row0, rows in what:
                progress.delivered_run(batch.position + row0, rows)
            raise

    def _let_go(self, runs: list[Run]) -> None:
        """Forgets batches that are completely delivered, and then traces them, which may fail."""
        trace, planned = self._supervisor.trace, self.planner.planned
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
            if not block.refusal:
                gone.append((batch, block))
        if trace is not None:
            for batch, block in gone:
                trace.block(batch.progress.number, batch.indices, block)

    def _data_of_runs(self, runs: list[Run], what: list[tuple[Batch, int, int]]) -> Any:
        layout = self.shape.layout
        data = None if layout is None else self.engine.gather(layout.core)
        if data is not None:
            self.shape.fits()
            return data
        place = self.formed - 1, indices_of(what)
        # Samples that were sent before the layout was known do not show whether others fit it.
        rows = all(block.has_rows for block, _, _ in runs)
        told = layout if rows else None
        return self._collected(place, self._parts(runs), 0, told, self._entry_of)

    def _parts(self, runs: list[Run]) -> list[Part]:
        """The planned batches that the rows belong to."""
        parts = []
        for block, row0, rows in runs:
            batch = self.planner.planned[block.sequence]
            parts.append(Part(batch.number, batch.indices, block, row0, rows))
        return parts

    def _entry_of(self, part: Part, row: int) -> Entry:
        return self._entry(part.block, row)

    def _entry(self, block: Block, row: int) -> Entry:
        """Returns what travelled for a row. Read once for all rows of its task, which is done;
        other tasks of the batch may still run."""
        entries = self._entries.setdefault(block.sequence, {})
        if row not in entries:
            batch = self.planner.planned[block.sequence]
            for sent in self.engine.envelopes(block, row):
                read_entries(entries, self.engine, batch, block, sent)
                for other in range(sent.row0, sent.row0 + sent.nrows):
                    entries.setdefault(other, (OBJECTS, None))
        if row not in entries:
            entries[row] = OBJECTS if self.engine.written(block, row) else GONE, None
        return entries[row]


def indices_of(what: list[tuple[Batch, int, int]]) -> list[Any]:
    """Indices of a batch's samples."""
    return [i for batch, row0, rows in what for i in batch.indices[row0 : row0 + rows]]


def displacement(planner: UnitPlanner, queue: deque[list[Any]]) -> dict[str, float]:
    """How far samples moved from their positions in the sampler's order: maximum and mean, in
    batches."""
    most, moved = planner.engine.progress()["displaced"]
    formed = planner.position.progress.count
    formed += sum(rows for what, _ in queue if what for _, _, rows in what)
    return {"max": most, "mean": moved / max(1, formed)}


class ReadyIterator(BalancedIterator):
    """Iterates over ready-first batches of a map-style dataset."""

    _unit = "sample"
    _planner_type = UnitPlanner
    _receiver_type = ReadyReceiver
    _planner: UnitPlanner
    _receiver: ReadyReceiver

    def _compose(self, loader: Any, supervisor: Supervisor) -> None:
        super()._compose(loader, supervisor)
        entries = self._delivery_queue.entries
        supervisor.served.displacement = partial(displacement, self._planner, entries)

    def _batch_size_of(self, loader: Any) -> int:
        size: int = loader.batch_sampler.batch_size
        return size

    def _transport_of(self, shape: SampleTransport) -> EngineTransport:
        self._mixes = not shape.whole
        return EngineTransport(shape, in_parts=self._mixes)

    def _engine_options(self) -> dict[str, Any]:
        return super()._engine_options() | {
            "ready_batch": self._window.batch_size,
            "ready_bound": DISPLACEMENT,
            "ready_mixes": self._mixes,
        }

    @property
    def _rcvd_idx(self) -> int:  # type: ignore[override]
        return -(-self._progress.count // self._window.batch_size)

    @property
    def _send_idx(self) -> int:  # type: ignore[override]
        return self._rcvd_idx + self._planner.drawn_ahead()

    def _begin(self, loader: Any, first_iter: bool) -> None:
        super()._begin(loader, first_iter)
        self._receiver.formed = self._progress.count // self._window.batch_size

    def _next_batch(self) -> Any:
        """The next batch, or a Failure that the caller raises or unpacks."""
        planner, progress = self._planner, self._progress
        if not planner.planned and not planner.draw.exhausted:
            planner.fill()  # an empty plan would be taken for the end
        if self._receiver.at_end():
            progress.finished = True
            self._end_epoch()
            raise StopIteration
        got = self._delivery_queue.next()
        assert got is not None  # at_end() was false
        what, data = got
        if planner.drawn_ahead() <= planner.refill_at:
            self._draw_more(got)
        # A worker that failed at its start has made nothing, so nothing counts as delivered.
        if type(data) is not Failure or not data.at_start:
            for batch, row0, rows in what:
                progress.delivered_run(batch.position + row0, rows)
        if (trace := self._supervisor.trace) is not None:
            trace.formed(progress.number, indices_of(what))
        return data
