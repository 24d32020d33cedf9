"""Receives finished batches from the engine, and delivers them. The result is data from rows, data
from messages, samples collated here, or a failure.

Some batches are received early and delivered by a later ``next()``. With ``device=``, or
``pin_memory=True`` and an accelerator, each ``next()`` checks, without waiting, whether the batch
after the delivered one is complete. If so, it sends that batch to the thread of
``device/send_ahead.py``.

Without these, complete small batches are received together with the one that is asked for. A
program whose steps take milliseconds returns with cold caches, so the first batch costs several
times as much as the following ones. (If steps are long, batches are received one at a time. The
cost does not matter then, and each call shows how full the queue is.)

``mn_engine_type_take.c`` is told how many of those batches need nothing else, and delivers them without
running this code.

Sampler and engine stay in the program's thread. Received batches still count as not delivered, so
the engine starts nothing more for them (mn_plan.h), and they are not visible before their turn.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from .._core import NEXT_HEALTH, NEXT_PLAN, Block, Engine
from .._records import Envelope
from ..device.send_ahead import Pinner, Pinning
from ..errors import Failure
from ..time_limits import Deadline
from ..transport.layouts import (
    Layout, NoLayout, SampleTransport, alike, by_index, is_default_collate, why,
)  # fmt: skip
from ..worker_info import as_in_worker
from ..workers import answers
from ..workers.answers import (
    AMISS, BATCH, ERROR, FAILED, LEFT_OUT, OBJECTS, OK, PART, PLACED, REFUSED, REPLACED, parted,
)  # fmt: skip
from ..workers.fetch_or_skip import FailedSample
from .failure_limits import Amended, Part, lost, no_room, note, refused, unread
from .planner import Batch, Planner
from .position import Position
from .supervisor import Supervisor
from .trace import Trace


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Makes new tensors on the CPU, as in workers, whatever the program's default device."""
    elsewhere = torch.get_default_device().type != "cpu"
    return torch.device("cpu") if elsewhere else contextlib.nullcontext()


class CollatesHere:
    """Runs the loader's collate_fn where workers have left that to the trainer."""

    def __init__(
        self, engine: Engine, loader: Any, position: Position, shape: SampleTransport
    ) -> None:
        self.engine = engine
        self.shape = shape
        self.position = position
        self.dataset = loader.dataset
        self.collate_fn = loader.collate_fn
        self._num_workers: int = loader.num_workers

    def batch(
        self, place: tuple[int, Any], samples: list[Any], worker: int, layout: Layout | None
    ) -> Any:
        """The batch of samples that did not travel as rows, or a Failure with torch's text.
        place: batch number and indices; layout: the layout that they should have had."""
        try:
            with _on_cpu():
                data = self.collated(samples, worker)
        except Exception as error:
            where = f"in DataLoader worker process {worker}"
            reason = why(samples, by_index(place[1])) if is_default_collate(self.collate_fn) else ""
            failure = Failure.of(error, f"{where}. minato: {reason}" if reason else where)
            failure.note = note(*place)
            return failure
        if layout is not None:
            self.shape.misfit()
        return data

    def collated(self, samples: list[Any], worker: int) -> object:
        """Collates samples. Samples of equal structure prove a layout and are placed in rows.
        For others, torch's collate depends on running in a worker, so that is simulated."""
        shape = self.shape
        if not shape.whole and alike(samples):
            if shape.layout is None:
                try:
                    proof = self.collate_fn(samples)
                    shape.learn(Layout.prove(samples[0], proof, len(samples)))
                except NoLayout:
                    shape.whole = True
            if shape.layout is not None:
                data = self._placed(samples, shape.layout)
                if data is not None:
                    return data
        try:
            with as_in_worker(  # torch's collate then uses shared memory
                id=worker,
                num_workers=self._num_workers,
                seed=self.position.base_seed + worker,
                dataset=self.dataset,
            ):
                return self.collate_fn(samples)
        except RuntimeError as error:
            if "</torch_" not in str(error):
                raise
        # In a worker, torch collates into files of /dev/shm, one per tensor. If there is no space
        # or no descriptor for them, collate without: this batch does not travel any more.
        return self.collate_fn(samples)

    def _placed(self, samples: list[Any], layout: Layout) -> object:
        """The batch in minato's own memory, or None if a sample does not fit."""
        objects: list[list[Any]] = []
        block = self.engine.place(samples, layout.core, objects)
        if block is None:
            return None
        try:
            return self.engine.decode(block, layout.core, objects)
        finally:
            self.engine.retire(block)


#: what travelled for a row: one of SAMPLE, ERROR, LEFT_OUT, REPLACED, or OBJECTS besides the row
#: itself, and its value; GONE: its worker was lost
Entry = tuple[int, Any]
GONE = -1


def read_entries(
    entries: dict[int, Entry], engine: Engine, batch: Batch, block: Block, sent: Envelope
) -> None:
    """Adds what travelled for the rows of a task. What cannot be read fails all of them."""
    failed = no_room() if sent.pickle is None else None
    try:
        found = answers.rows(sent) if failed is None else []
    except Exception as error:
        found, failed = [], unread(error, batch.number, batch.indices, sent.row0, sent.nrows)
    rows, readable = range(sent.row0, sent.row0 + sent.nrows), failed is None
    for row, what, obj in found:
        if what in (ERROR, REFUSED):
            obj.note_first(note(batch.number, batch.indices, row))
            obj.unsent, what = what == REFUSED, ERROR
            failed = failed or obj  # its task may have ended there
        entries[row] = what, obj
    for row in rows if failed is not None else ():
        if row not in entries and not (readable and engine.written(block, row)):
            entries[row] = ERROR, failed


def whole_batch(engine: Engine, block: Block) -> tuple[answers.Answer, bytes | None]:
    """The answer to a BATCH or COLLATE task, with Amended in place of AMISS, and the state of the
    worker's dataset."""
    sent = engine.envelopes(block)[0]
    if sent.pickle is None:
        return (FAILED, no_room()), None
    answer, stated = answers.read(sent)
    if answer[0] != AMISS:
        return answer, stated
    _, inner, amiss = answer
    if inner is None:
        return (OK, Amended(None, amiss, empty=True)), stated
    status, data, *more = inner
    return (status, Amended(data, amiss, empty=False), *more), stated


def placed_batch(
    engine: Engine, shape: SampleTransport, block: Block, told: Layout | None
) -> tuple[tuple[Any, ...], bytes | None]:
    """Reads a BATCH task whose samples may be in rows. told: the layout that its worker got. Returns
    ((status, payload), state of the worker's dataset)."""
    layout = told if block.has_rows else None
    data = engine.decode(block, layout.core, None) if layout is not None else None
    if data is not None:
        shape.fits()
        return (OK, data), None
    (status, data, *more), stated = whole_batch(engine, block)
    if type(data) is Amended:
        return (status, data), stated
    if status == PLACED and layout is not None:
        shape.fits()
        rows, objects = data, more[0]
        return (OK, engine.decode(block, layout.core, objects, rows)), stated
    if status == OK and layout is not None:
        shape.misfit()
    elif more and shape.layout is None and not shape.whole:
        shape.whole = not more[0]
        if more[0]:
            shape.learn(Layout.sent(more[0]))
    return (status, data), stated


#: limit for short steps. About ten pass between two decisions on the number of workers.
SHORT_STEP_NS = 25_000_000

#: small batches received at a time, and the limit on their total bytes
AT_A_TIME, AT_A_TIME_BYTES = 8, 1 << 20


class Raised:
    """An exception that was raised while a batch was received early."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Receiver:
    """Receives the sampler's batches, in its order or as they complete, and delivers them."""

    def __init__(
        self, loader: Any, supervisor: Supervisor, planner: Planner, pinner: Pinner | None
    ) -> None:
        self.engine = planner.engine
        self._supervisor = supervisor
        self.planner = planner
        self.shape = planner.transport.shape
        self.collates = CollatesHere(planner.engine, loader, planner.position, self.shape)
        self._pinner = pinner
        self.first_indices: Any = None  # of the first batch that was received
        #: out of order one of the next epoch may be done first
        self.kept_back: deque[tuple[Batch, Any]] = deque()
        self._watch = supervisor.served.watch
        self._costs = planner.position.memo.costs
        # Drop indices that are not needed again: freeing them later, on cold caches, is slower.
        self._forgets = pinner is None  # else errors may name them
        self._singly = not loader.in_order or supervisor.trace is not None
        self._layout: Layout | None = None  # the layout for which _at_a_time was computed
        self._at_a_time = 1
        self._waits = False  # wait_begins() was called and wait_ends() was not
        self._got = False  # the wait returned a batch

    # ---- delivery ------------------------------------------------------------------------

    def next(self) -> tuple[Any, Any] | None:
        """(description, data or a Failure) of the next batch, pinned if that is asked for. Also
        receives the following batches if they are complete."""
        received, supervisor, pinner = self.planner.received, self._supervisor, self._pinner
        if self._waits:  # an interrupt came before wait_ends()
            self._end_wait()
        if pinner is not None:
            most = pinner.most()
        elif received:
            return self._handed_out()
        elif self._singly or (most := self._most_at_a_time()) == 1:
            return self.receive()
        if not supervisor.living():
            return self.receive()
        self._got, self._waits = False, True
        step = self.engine.wait_begins()
        try:
            if pinner is None and not 0 < step < SHORT_STEP_NS:
                most = 1
            if not received:
                self._append(self.receive())
            if 0 < len(received) < most:
                self._receive_ahead(most)
            if not received:
                return None
            self._send_off(received[0])
            what, data = received[0]
            if isinstance(data, Pinning):
                data = data.result(supervisor.timeout)
            self._got = True  # a KeyboardInterrupt cannot be raised before the next line
            received.popleft()
            if isinstance(data, Raised):
                raise data.error
            return what, data
        finally:
            self._end_wait()

    def _handed_out(self) -> tuple[Any, Any]:
        self.engine.wait_ends(True, False)  # first: an interrupt may have it called twice for a batch
        what, data = self.planner.received.popleft()
        if isinstance(data, Raised):
            raise data.error
        return what, data

    def _end_wait(self) -> None:
        supervisor = self._supervisor
        if supervisor.living():
            # With no batch and an empty queue, an interrupt has lost what was received.
            self.engine.wait_ends(self._got, bool(self.planner.received))
            if supervisor.trace is not None:
                supervisor.trace.news()
        self._waits = False

    def put_back(self, got: tuple[Any, Any]) -> None:
        """Returns a batch to the queue, for the next call; not if it is already pinned."""
        if self._pinner is None:
            self.planner.received.appendleft([*got])

    def need_nothing(self, most: int) -> int:
        """How many of the first ``most`` received batches need nothing but delivery."""
        received = self.planner.received
        whole = len(received) - isinstance(received[-1][1], (Failure, Raised))
        return min(most, whole)

    # ---- receiving early -----------------------------------------------------------------

    def _most_at_a_time(self) -> int:
        """How many small batches are received at a time if steps are short: few enough that workers
        find work while the program uses the earlier ones."""
        layout = self.planner.transport.layout
        if layout is not self._layout:
            self._layout, self._at_a_time = layout, 1
            if layout is not None:
                window = self.planner.window
                fit = AT_A_TIME_BYTES // max(1, layout.core.row_bytes * window.batch_size)
                self._at_a_time = max(1, min(AT_A_TIME, window.size() // 2, fit))
        return self._at_a_time

    def _receive_ahead(self, most: int) -> None:
        """Receives complete batches in torch's default modes. A later next() may run outside the
        inference mode or no_grad() block of this one. Tensors that are made in the default modes
        work in all modes."""
        if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
            with torch.inference_mode(False), torch.enable_grad():
                return self._receive_ahead(most)
        received = self.planner.received
        try:
            while len(received) < most and self.more() and self._append(self.receive(wait=False)):
                pass
        except Exception as error:
            received.append([None, Raised(error)])  # raised in its turn

    def more(self) -> bool:
        """Whether the batch after the received ones is known to belong to this epoch."""
        planner = self.planner
        next_epoch = planner.next_epoch
        if next_epoch.early is not None:
            return next_epoch.left(next_epoch.early) > len(planner.received)
        return bool(planner.planned) and not self.kept_back

    def _append(self, got: tuple[Any, Any] | None) -> bool:
        """Adds to the received batches. Returns whether more may be received: a failed batch is the
        last."""
        if got is None:
            return False
        entry = [*got]
        self.planner.received.append(entry)
        del got  # so that the pinning thread holds the last reference
        self._send_off(entry)
        return not isinstance(entry[1], Failure)

    def _send_off(self, entry: list[Any]) -> None:
        """Submits a batch for pinning, unless it is already. An interrupt may have come first."""
        if self._pinner is not None and not isinstance(entry[1], (Pinning, Failure, Raised)):
            note = functools.partial(self.named, entry[0])
            entry[1] = self._pinner.submit(entry[1], note)

    def named(self, what: Any) -> str:
        """Names a batch for an error message."""
        return note(what.number, what.indices)

    # ---- from the engine -----------------------------------------------------------------

    def receive(self, wait: bool = True) -> tuple[Any, Any] | None:
        """(Batch, data or a Failure) to deliver next. None at the end, and without wait also if it is
        not done. A received batch is not delivered yet."""
        if self.kept_back and self._of_this_epoch(self.kept_back[0][0]):
            return self.kept_back.popleft()
        planner = self.planner
        while (block := self._next_block(wait)) is not None:
            batch = planner.batch_of(block.sequence)
            try:
                data = self._data_of(batch, block)
                if planner.must_plan_again:
                    continue
                del planner.planned[block.sequence]
            except BaseException:  # a KeyboardInterrupt
                self._interrupted(batch, block)
                raise
            if self._of_this_epoch(batch):
                if self.first_indices is None:
                    self.first_indices = batch.indices
                if self._forgets:
                    batch.indices = batch.sent = None
                return batch, data
            self.kept_back.append((batch, data))
        return None

    def _next_block(self, wait: bool) -> Block | None:
        """The next block, even if it cannot be made. Raises torch's errors for timeouts and
        deaths."""
        supervisor = self._supervisor
        if wait:
            if not supervisor.living() and threading.current_thread() is threading.main_thread():
                # At exit the engine may be gone. Other threads block there instead (stay_at_exit).
                raise RuntimeError("the loader was shut down; make a new iterator")
            supervisor.warn_of_deaths()
            self._watch.look(self.engine)
        if self.planner.must_plan_again:
            self.planner.plan_again()
        indices_of, deadline = self.planner.indices_of, None
        if wait and supervisor.timeout > 0:
            under_way = functools.partial(supervisor.under_way, indices_of)
            deadline = Deadline(supervisor.timeout, under_way)
        timeout = -1.0 if wait else 0.0
        while True:
            part = timeout if deadline is None else deadline.part()
            if wait:
                part = supervisor.look(part, indices_of)
            got = self.engine.next(part)
            if not isinstance(got, int):
                return got
            if got == NEXT_PLAN:
                self.planner.fill(starved=True)
            elif not wait:
                return None
            elif got == NEXT_HEALTH:
                supervisor.check(lambda: False)

    def clear(self) -> None:
        """Drops what was received of an abandoned epoch."""
        self.planner.received.clear()
        self.kept_back.clear()

    def at_end(self) -> bool:
        """Whether the program has received the whole epoch."""
        planner = self.planner
        early = planner.next_epoch.early
        if early is not None:  # an interrupt may have lost a batch, so counts do not help
            first = next(iter(planner.planned.values()), None)
            if self.kept_back and self._of_this_epoch(self.kept_back[0][0]):
                return False
            left = first is not None and self._of_this_epoch(first)
            return not planner.received and not left
        if planner.planned or planner.received or self.kept_back:
            return False
        planner.check_all_drawn()
        return True

    def _of_this_epoch(self, batch: Batch) -> bool:
        return batch.progress is self.planner.position.progress

    def _data_of(self, batch: Batch, block: Block) -> Any:
        """The data of a batch, or a Failure. Also takes the block from the engine, unless the
        planner is to plan it again; an interrupt may come first."""
        if block.refusal:
            data: Any = refused(self.engine, block, f"batch {batch.number}")
            self.engine.retire(block)
            return data
        trace = self._supervisor.trace
        try:
            if trace is not None:
                self._trace(trace, batch, block)
            data = self._take_rows(block)
            if data is None:
                try:
                    data = self._take(batch, block)
                    if isinstance(data, Failure) and data.unsent:
                        self.planner.plan_whole()
                finally:
                    if not self.planner.must_plan_again:
                        self.engine.retire(block)
        except Exception as error:
            # in the batch's place: the end of the epoch expects one
            data = unread(error, batch.number, batch.indices)
        return data

    def _interrupted(self, batch: Batch, block: Block) -> bool:
        """After an interrupt. If the engine has released the batch, counts it as delivered, because
        the program cannot get it any more. Otherwise the next call delivers it: returns True."""
        with contextlib.suppress(ValueError):  # nothing is in flight, or it was taken
            if not block.refusal:
                self.engine.poll(block)
                return True
            self.engine.retire(block)
        if self.planner.planned.pop(block.sequence, None) is not None:
            self._is_lost(batch)
        return False

    def _trace(self, trace: Trace, batch: Batch, block: Block) -> None:
        try:
            trace.block(batch.progress.number, batch.indices, block)
        except Exception:  # an index whose repr fails
            self.engine.retire(block)
            raise

    def _is_lost(self, batch: Batch) -> None:
        if self._of_this_epoch(batch):
            self.planner.position.progress.delivered(batch.number)

    def _take_rows(self, block: Block) -> Any:
        """The batch if it consists of rows only; also takes it from the engine, even on an error.
        None otherwise: see _take()."""
        layout = self.shape.layout
        data = self.engine.take(block, layout.core) if layout is not None else None
        if data is not None:
            self.shape.fits()
        return data

    def _take(self, batch: Batch, block: Block) -> Any:
        """The data of a batch that is not only rows, or a Failure."""
        engine = self.engine
        if losses := engine.lost(block):
            failure = lost(engine, [Part(batch, block)], self.planner.together)
            self.planner.plan_without(batch, losses, block.kind == BATCH)
            return failure
        if block.kind in (BATCH, PART):
            (status, data, *more), _ = whole_batch(engine, block)
            if status == FAILED:
                data.note_first(note(batch.number, batch.indices, more[0] if more else None))
            elif more:
                self._costs.sends(more[0])
                self.shape.seen(more[0] >= 0)
            if type(data) is Amended:
                data.name(batch.number, batch.indices, self.planner.batched)
            return data
        return self._take_mixed(batch, block, self.shape.layout if block.has_rows else None)

    def _take_mixed(self, batch: Batch, block: Block, layout: Layout | None) -> Any:
        """The data of a batch of rows, some of which travelled in envelopes."""
        engine, rows, worker = self.engine, len(batch.indices), 0
        entries: dict[int, Entry] = {}
        for sent in engine.envelopes(block):
            worker = sent.worker
            read_entries(entries, engine, batch, block, sent)
        kinds = {what for what, _ in entries.values()}
        if layout is not None and kinds <= {OBJECTS} and len(entries) == rows:
            self.shape.fits()
            return engine.decode(block, layout.core, [entries[r][1] for r in range(rows)])
        part = Part(batch, block, 0, rows)
        place = batch.number, batch.indices
        in_place = OBJECTS, None
        return self._collected(place, [part], worker, layout, lambda _, r: entries.get(r, in_place))

    def _collected(
        self,
        place: tuple[int, Any],
        parts: list[Part],
        worker: int,
        layout: Layout | None,
        entry_of: Callable[[Part, int], Entry],
    ) -> Any:
        """Collates rows, as they travelled or read from the rows themselves. A Failure if one
        failed; Amended without failed samples, or with their replacements. place, worker, layout: see
        CollatesHere.batch()."""
        samples: list[Any] = []
        amended = Amended(None, [], empty=False)
        for part in parts:
            if part.block.refusal:
                return refused(self.engine, part.block, f"batch {part.batch.number}")
            amiss: list[FailedSample] = []
            for row in range(part.row0, part.row0 + part.rows):
                what, obj = entry_of(part, row)
                if what == ERROR:
                    return obj  # the first one in the order of rows, as in torch
                if what == GONE:
                    return lost(self.engine, [one for one in parts if not one.block.refusal])
                if what in (LEFT_OUT, REPLACED):
                    made, failed = parted([(row, what, obj)])
                    samples += made
                    amiss += failed
                elif what == OBJECTS:
                    assert self.shape.layout is not None
                    samples.append(self.engine.row(part.block, self.shape.layout.core, row, obj))
                else:
                    samples.append(obj)
            if amiss:
                amended.add(amiss, part.batch.number, part.batch.indices)
        if not amended.amiss:
            return self.collates.batch(place, samples, worker, layout)
        amended.empty = not samples
        if samples:
            amended.data = self.collates.batch(place, samples, worker, None)
        return amended.data if isinstance(amended.data, Failure) else amended
