"""Batches that cannot be made or read: the errors for the program, which name the samples.

With ``on_error="skip"`` or ``"replace"`` the number of failed samples is limited. They are counted
as their batches are delivered, so samples that were made ahead and never asked for do not count.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from .. import _core
from .._core import Block, Engine
from .._records import Loss
from ..errors import (
    LATE, Failure, LoaderFailure, WorkerLost, add_note, describe_death, late_message, text_of,
    warn,
)  # fmt: skip
from ..options import Options
from ..seeding.order_generators import Sources, batch_size_of, sampler_of
from ..text import counted
from ..workers.answers import BATCH
from ..workers.fetching import FailedSample

if TYPE_CHECKING:
    from ..epoch_progress import Progress

def unread(
    error: Exception, number: int, indices: Any, row0: int = 0, rows: int = 0
) -> LoaderFailure:
    """The error for a result that cannot be read: of some rows of a batch, or of all rows."""
    if not rows or not isinstance(indices, (list, tuple)):
        add_note(error, note(number, indices))
    elif rows == 1:
        add_note(error, note(number, indices, row0))
    else:
        some = _short(list(indices[row0 : row0 + rows]))
        add_note(error, f"minato: one of sample indices {some} of batch {number}")
    return LoaderFailure(error)


class Amended(Failure):
    """A batch that differs from the sampler's because some of its samples could not be made.
    Until max_errors allows it, it is treated as a failed batch."""

    def __init__(self, data: Any, amiss: list[FailedSample], empty: bool) -> None:
        self.data = data
        self.amiss = amiss
        self.empty = empty  # none of its samples could be made
        self.indices: list[Any] = []  # of the samples in amiss, where known
        self.asked = 0  # number of samples in the sampler's batch

    def name(self, number: int, indices: Any, batched: bool = True) -> None:
        """Names the sample of each failure; not batched: indices is a single index."""
        amiss, self.amiss = self.amiss, []
        self.add(amiss, number, indices if batched else [indices])

    def add(self, amiss: list[FailedSample], number: int, indices: Any) -> None:
        """Adds failures of a sampler's batch."""
        every = indices if isinstance(indices, (list, tuple)) else list(indices)
        self.asked += len(every)
        for one in amiss:
            one.failure.note = note(number, every, one.row)
            self.indices.append(every[one.row])
        self.amiss += amiss


def note(number: int, indices: Any, row: int | None = None) -> str:
    """The note on an error: batch number and, if known, the sample."""
    if row is None or not isinstance(indices, (Sequence, torch.Tensor, np.ndarray)):
        return f"minato: batch {number}, sample indices {_short(indices)}"
    return f"minato: sample index {text_of(indices[row])}, position {row} of batch {number}"


def placed(number: int, indices: Any, row: int | None) -> str:
    """Describes what a worker is doing: a sample of a batch, or the whole batch. row: None if it
    is unknown."""
    if indices is not None and row is None:
        return f"batch {number}, sample indices {_short(indices)}"
    try:
        return f"sample index {text_of(indices[row])}, position {row} of batch {number}"
    except Exception:  # collating, an iterable dataset, or indices without positions
        return f"batch {number}"


def _short(indices: Any) -> str:
    text = text_of(indices)
    return text if len(text) <= 200 else text[:197] + "..."


#: what a refused batch needs, and what the user can do, by the engine's reason
_NEEDS = {
    _core.REFUSED_TASKS: (
        "{need} task descriptors at once, but there are {all} ({used} are in use: each waiting "
        "sample uses one). Use smaller batches, or a smaller prefetch_factor."
    ),
    _core.REFUSED_RECORDS: (
        "{need} bytes for its indices and the workers' reports, but there are {all}. Use "
        "smaller batches."
    ),
    _core.REFUSED_ROWS: (
        "{need} bytes for its samples, but the memory shared by loader and workers has {all} "
        "({used} are in use, {kept} of them by batches that the program retains). Use smaller "
        "batches, retain fewer, or raise memory_limit. A limit on address space (`ulimit -v`) or on "
        "the size of files (`ulimit -f`) can make that memory smaller than memory_limit."
    ),
    _core.REFUSED_PRIVATE: (
        "{need} bytes, which the system did not allocate. Free memory in the program, or raise its "
        "memory limit (`ulimit -v`, or the container's)."
    ),
}


def refused(engine: Engine, block: Block, what: str) -> Failure:
    """The error for a batch or sample that the engine cannot make."""
    assert block.refusal is not None
    why, need, there = block.refusal
    memory = engine.memory()
    used = memory["in_flight"] if why == _core.REFUSED_TASKS else memory["used"]
    needs = _NEEDS[why].format(need=need, all=there, used=used, kept=memory["kept"])
    return LoaderFailure(MemoryError(f"{what} cannot be made: it needs {needs}"))


class Part(NamedTuple):
    """Neighbouring rows of one of the sampler's batches (usually all of them) within a batch."""

    number: int  # of the sampler's batch
    indices: Any  # what the sampler gave for it
    block: Block
    row0: int = 0
    rows: int = sys.maxsize


def lost(engine: Engine, parts: list[Part], together: bool = False) -> Failure:
    """The error for a batch with samples that killed every worker that tried them, or took too
    long. Names these samples and no others of the batch. together: one call makes all."""
    #: batch number, the dead worker's pid and status, and the lost samples
    found: list[tuple[int, int, int, list[Any]]] = []
    for part in parts:
        for loss in engine.lost(part.block):
            whole = part.block.kind == BATCH
            samples = _late(part, loss, together and whole) or _lost_of(part, loss, whole)
            if samples:
                found.append((part.number, loss.pid, loss.status, samples))
    number, pid, status, first = found[0]
    others = [index for *_, samples in found[1:] for index in samples]
    index = first if len(first) > 1 else first[0]
    text = _loading(pid, status, index, number)
    if others:
        text += f" Other workers were lost in the same way, with sample indices {text_of(others)}."
    return LoaderFailure(WorkerLost(text, pid, [*first, *others] if others else index, status))


def _loading(pid: int, status: int, index: Any, number: int) -> str:
    if status == LATE:
        return late_message(pid, f"Sample index {text_of(index)} of batch {number}")
    return (
        f"{describe_death(pid, status).rstrip()} It was loading sample index {text_of(index)} of "
        f"batch {number}. Every earlier attempt also ended this way."
    )


def lost_sample(loss: Loss, index: Any, number: int) -> WorkerLost:
    """The error for one sample that killed every worker that tried it."""
    text = _loading(loss.pid, loss.status, index, number)
    return WorkerLost(text, loss.pid, index, loss.status)


def _late(part: Part, loss: Loss, together: bool) -> list[Any]:
    """The index of the sample that took too long, if it is one of the part's."""
    here = part.row0 <= loss.row < part.row0 + part.rows and type(part.indices) in (list, tuple)
    if loss.status != LATE or together or not here or loss.row >= len(part.indices):
        return []
    return [part.indices[loss.row]]


def _lost_of(part: Part, loss: Loss, whole: bool) -> list[Any]:
    """The lost indices of a part. whole: the task was the whole batch."""
    if whole:  # it is unknown which sample was running
        return part.indices if type(part.indices) is list else [part.indices]
    end = min(loss.row0 + loss.nrows, part.row0 + part.rows)
    return list(part.indices[max(loss.row0, part.row0) : end])


def no_room() -> Failure:
    """The error of a worker that had no memory for its result."""
    try:
        raise MemoryError(
            "a worker's result exceeds memory_limit. Raise memory_limit, retain fewer batches, or "
            "use smaller batches. `ulimit -v` and `ulimit -f` may make it smaller than you have set it"
        )
    except MemoryError as error:
        return Failure.of(error, "in DataLoader worker process")


#: how many failed samples stats() lists
NAMED = 100
#: and the warning at an epoch's end
FIRST = 5


class Stands(Protocol):
    """The part of ``position.Position`` that is used here."""

    progress: Progress
    sources: Sources


class ErrorsAllowed:
    """Counts the failed samples, and raises the first failure when there are too many.

    Attributes:
        left_out, replaced: number of samples, in all epochs of the iterator.
        latest: (index, error text, index of the replacement or None) of the last of them.
    """

    def __init__(self, loader: Any, options: Options, position: Stands) -> None:
        self.mode = options.on_error
        self.left_out = self.replaced = 0
        self.latest: deque[tuple[Any, str, Any]] = deque(maxlen=NAMED)
        self._position = position
        self._max_errors = options.max_errors
        self._first: tuple[Any, Failure] | None = None  # its epoch's progress, and the failure
        self._batch_size: int | None = batch_size_of(loader)
        if loader.batch_sampler is None:
            self._batch_size = 1
        self._batches = self._asked = 0  # those amiss, and the samples asked for in them
        self._untold: _Untold | None = None  # of the latest epoch with failures

    def as_stats(self) -> dict[str, Any]:
        """Counts for stats()."""
        return {
            "left_out": self.left_out,
            "replaced": self.replaced,
            "latest": list(self.latest),
        }

    def most(self) -> int:
        """How many samples of an epoch may fail. A share allows at least one; if the length of the
        epoch is unknown, it is a share of what was delivered."""
        if type(self._max_errors) is int:
            return self._max_errors
        samples = _samples_of(self._position.sources, self._size())
        if samples is None:
            progress = self._position.progress
            per_unit = 1 if progress.unit == "sample" else self._size()
            samples = int((progress.count + 1) * per_unit)
        return max(1, int(self._max_errors * samples))

    def _size(self) -> float:
        """Samples of a batch. If the sampler does not say, the mean of batches with failures."""
        if self._batch_size is not None:
            return self._batch_size
        return self._asked / max(1, self._batches)

    def take(self, batch: Amended) -> Any:
        """The batch's data. Raises the epoch's first failure if the limit is exceeded."""
        progress = self._position.progress
        self._batches, self._asked = self._batches + 1, self._asked + batch.asked
        if self._untold is not None and self._untold.progress is not progress:
            self.warn()
        if self._untold is None:
            self._untold = _Untold(progress)
        for one, index in zip(batch.amiss, batch.indices):
            progress.failed += 1
            if one.replaced:
                self.replaced += 1
            else:
                self.left_out += 1
            text = str(one.failure.wrapper.exc_msg).strip().rpartition("\n")[2]
            self.latest.append((index, text, one.instead if one.replaced else None))
            self._untold.add(index, text, one.replaced)
            if self._first is None or self._first[0] is not progress:
                self._first = progress, one.failure
        if progress.failed > (most := self.most()):
            assert self._first is not None
            first = self._first[1]
            self._untold = None  # the error tells
            text = (
                f"{first.note}\nminato: {progress.failed} samples of this epoch failed, and "
                f"max_errors={self._max_errors!r} allows {most}; this is the first. To tolerate more, "
                "raise max_errors"
            )
            replace(first, note=text).reraise()
        return batch.data

    def warn(self) -> None:
        """Warns of the epoch's samples that failed, when it has ended or the program has left it."""
        untold, self._untold = self._untold, None
        if untold is not None:
            warn(untold.text())


class _Untold:
    """Samples of an epoch that were skipped or replaced, and of which no warning tells yet."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._left_out = self._replaced = 0
        self._first: list[str] = []
        self._error = ""

    def add(self, index: Any, error: str, replaced: bool) -> None:
        """One more."""
        self._replaced += replaced
        self._left_out += not replaced
        self._error = self._error or error
        if len(self._first) < FIRST:
            self._first.append(text_of(index))

    def text(self) -> str:
        """The warning."""
        both = (self._left_out, "skipped"), (self._replaced, "replaced")
        done = " and ".join(f"{count} {what}" for count, what in both if count)
        all_of_them = self._left_out + self._replaced
        samples = counted(all_of_them, "sample")
        return (
            f"{samples} of this epoch failed ({done}); first indices: {', '.join(self._first)}. The "
            f"first error: {self._error}. loader.stats()['failed'] has details."
        )


def _samples_of(sources: Sources, size: float) -> int | None:
    """Samples of an epoch, if the sampler says so. size: samples of a batch."""
    try:
        sampler, batches = sampler_of(sources), sources.batch_sampler
        if sampler is not None:
            return len(sampler)
        if isinstance(batches, (list, tuple)):
            return sum(map(len, batches))
        return int(len(batches) * size)
    except Exception:  # a custom sampler's len() may raise
        return None
