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

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from .._records import Loss
from ..device.send_ahead import Pinner
from ..epoch_progress import Progress
from ..errors import LoaderFailure
from ..transport.layouts import EngineTransport, SampleTransport
from ..workers.answers import OBJECTS
from ..workers.fetch_or_skip import Spares
from .failure_limits import Part, note
from .iterator import BalancedIterator
from .planner import Batch, Planner
from .receiver import GONE, Entry, Receiver, read_entries
from .supervisor import Supervisor

#: how many batches a sample may move at most. Each costs memory for samples that wait; a
#: slow sample of sixteen times a batch's time still fits.
DISPLACEMENT = 16


class UnitPlanner(Planner):
    """Plans the sampler's batches. If an earlier process delivered parts of a batch, plans
    each stretch that was not delivered."""

    _planned_rows = 0
    formed_rows = 0  # rows that are in a batch
    _resumed = 0  # samples before this position may have been delivered

    def begin(
        self, indices: Iterator[Any], *, goes_on: bool, start: Callable[[], object] | None = None
    ) -> None:
        progress = self.position.progress
        self._resumed = max([progress.head, *(number + 1 for number in progress.beyond)])
        self._planned_rows = self.formed_rows = 0
        super().begin(indices, goes_on=goes_on, start=start)

    def drawn_ahead(self) -> int:
        """Counts, in batches: samples that are in no batch yet, and formed batches. Before the end,
        a rest that does not fill a batch does not count."""
        rows, size = self._planned_rows - self.formed_rows, self.window.batch_size
        return (-(-rows // size) if self.draw.exhausted else rows // size) + len(self.received)

    def plan_whole(self) -> None:
        """Has no effect: a sample that cannot be sent fails its batch."""

    def plan_without(self, batch: Batch, losses: list[Loss], whole: bool) -> None:
        """Has no effect: other batches may already contain some of its samples."""

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
            self._planned_rows, draw.within, draw.told = (
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
        self, loader: Any, supervisor: Supervisor, planner: UnitPlanner, pinner: Pinner | None
    ) -> None:
        super().__init__(loader, supervisor, planner, pinner)
        self._left: dict[int, int] = {}  # rows left of partly delivered batches
        self._entries: dict[int, dict[int, Entry]] = {}  # of the same batches, by row
        self.formed = 0  # batches of the epoch

    def receive(self, wait: bool = True) -> tuple[Any, Any] | None:
        """(parts, data or Failure). None at the end, and without wait also if no batch is formed."""
        got = self._next_block(wait)
        if got is None:
            return None
        batch_of = self.planner.batch_of
        parts = [Part(batch_of(run[0].sequence), *run) for run in got.runs]
        batch = parts[0].batch
        entire = len(parts) == 1 and parts[0].rows == len(batch.indices)
        comes_again = False
        try:
            data = self._data_of(batch, got) if entire else self._mixed(parts)
            if entire:
                del self.planner.planned[batch.sequence]
        except BaseException:  # a KeyboardInterrupt
            comes_again = entire and self._interrupted(batch, got)
            raise
        finally:
            if not comes_again:
                self.formed += 1
                self.planner.formed_rows += sum(part.rows for part in parts)
        return parts, data

    def named(self, what: Any) -> str:
        """Names a batch for an error message."""
        return note(self.formed - 1, indices_of(what))

    def clear(self) -> None:
        """Drops what was received of an abandoned epoch."""
        super().clear()
        self._left.clear()
        self._entries.clear()

    def _is_lost(self, batch: Batch) -> None:
        self.planner.position.progress.delivered_run(batch.position, len(batch.indices))

    # ---- mixed batches -------------------------------------------------------------------

    def _mixed(self, parts: list[Part]) -> Any:
        """The data of a mixed batch, or a Failure. Takes it from the engine in every case."""
        try:
            try:
                return self._data_of_parts(parts)
            finally:
                try:
                    self._let_go(parts)
                finally:
                    self.engine.retire(parts[0].block)
        except Exception as error:
            return LoaderFailure(error)  # in the batch's place: the end of the epoch expects one
        except BaseException:  # an interrupt: the batch is lost and counts as delivered
            progress = self.planner.position.progress
            for part in parts:
                progress.delivered_run(part.position, part.rows)
            raise

    def _let_go(self, parts: list[Part]) -> None:
        """Forgets batches that are completely delivered, and then traces them, which may fail."""
        gone: list[Part] = []
        for part in parts:
            sequence = part.block.sequence
            left = self._left.pop(sequence, len(part.batch.indices)) - part.rows
            if left:
                self._left[sequence] = left
                continue
            del self.planner.planned[sequence]
            self._entries.pop(sequence, None)
            if not part.block.refusal:
                gone.append(part)
        if (trace := self._supervisor.trace) is not None:
            for part in gone:
                trace.block(part.batch.progress.number, part.batch.indices, part.block)

    def _data_of_parts(self, parts: list[Part]) -> Any:
        layout = self.shape.layout
        data = None if layout is None else self.engine.gather(layout.core)
        if data is not None:
            self.shape.fits()
            return data
        place = self.formed - 1, indices_of(parts)
        # Samples that were sent before the layout was known do not show whether others fit it.
        told = layout if all(part.block.has_rows for part in parts) else None
        return self._collected(place, parts, 0, told, self._entry_of)

    def _entry_of(self, part: Part, row: int) -> Entry:
        """Returns what travelled for a row. Read once for all rows of its task, which is done;
        other tasks of the batch may still run."""
        block = part.block
        entries = self._entries.setdefault(block.sequence, {})
        if row not in entries:
            for sent in self.engine.envelopes(block, row):
                read_entries(entries, self.engine, part.batch, block, sent)
                for other in range(sent.row0, sent.row0 + sent.nrows):
                    entries.setdefault(other, (OBJECTS, None))
        if row not in entries:
            entries[row] = OBJECTS if self.engine.written(block, row) else GONE, None
        return entries[row]


def indices_of(parts: list[Part]) -> list[Any]:
    """Indices of a batch's samples."""
    return [index for part in parts for index in part.indices]


def displacement(planner: UnitPlanner) -> dict[str, float]:
    """How far samples moved from their positions in the sampler's order: maximum and mean, in
    batches."""
    most, moved = planner.engine.progress()["displaced"]
    formed = planner.position.progress.count
    formed += sum(part.rows for parts, _ in planner.received for part in parts or ())
    return {"max": most, "mean": moved / max(1, formed)}


class ReadyIterator(BalancedIterator):
    """Iterates over ready-first batches of a map-style dataset."""

    _unit = "sample"
    _planner_type = UnitPlanner
    _receiver_type = ReadyReceiver
    _planner: UnitPlanner
    _receiver: ReadyReceiver

    def _displacement(self) -> Callable[[], dict[str, float]]:
        return partial(displacement, self._planner)

    def _batch_size_of(self, loader: Any) -> int:
        size: int = loader.batch_sampler.batch_size
        return size

    def _transport_of(self, shape: SampleTransport) -> EngineTransport:
        return EngineTransport(shape, in_parts=not shape.whole)

    def _engine_options(self, loader: Any, transport: EngineTransport) -> dict[str, Any]:
        return super()._engine_options(loader, transport) | {
            "ready_batch": self._batch_size_of(loader),
            "ready_bound": DISPLACEMENT,
            "ready_mixes": transport.in_parts,
        }

    @property
    def _rcvd_idx(self) -> int:  # type: ignore[override]
        return -(-self._progress.count // self._planner.window.batch_size)

    @property
    def _send_idx(self) -> int:  # type: ignore[override]
        return self._rcvd_idx + self._planner.drawn_ahead()

    def _begin(self, loader: Any, first_iter: bool) -> None:
        super()._begin(loader, first_iter)
        self._receiver.formed = self._progress.count // self._planner.window.batch_size

    def _delivered(self, what: list[Part], progress: Progress) -> None:
        for part in what:
            progress.delivered_run(part.position, part.rows)
        self._planner.transport.update(self._engine)  # for planned batches that have not started
        if (trace := self._supervisor.trace) is not None:
            trace.formed(progress.number, indices_of(what))
