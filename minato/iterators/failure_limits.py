"""Batches that cannot be made or read: the errors for the program, which name the samples.

With ``on_error="skip"`` or ``"replace"`` the number of failed samples is limited. They are counted
as their batches are delivered, so samples that were made ahead and never asked for do not count.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import _core
from .._core import Block, Engine
from .._records import Loss
from ..epoch_progress import Progress
from ..errors import (
    LATE, Failure, LoaderFailure, WorkerLost, add_note, describe_death, text_of, warn,
)  # fmt: skip
from ..options import Options
from ..seeding.order_generators import Sources, batch_size_of, sampler_of
from ..text import counted
from ..worker_exits import exit_cause
from ..workers.answers import BATCH
from ..workers.fetch_or_skip import FailedSample


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
    return f"minato: {placed(number, indices, row)}"


def placed(number: int, indices: Any, row: int | None) -> str:
    """Names a sample of a batch, or the whole batch. row: None if it is unknown."""
    if indices is None:
        return f"batch {number}"
    if row is None or not isinstance(indices, (Sequence, torch.Tensor, np.ndarray)):
        return f"batch {number}, sample indices {_short(indices)}"
    try:
        return f"sample index {text_of(indices[row])}, position {row} of batch {number}"
    except Exception:  # it is being collated, or its indices have no positions
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

    batch: Any  # the sampler's: planner.Batch
    block: Block
    row0: int = 0
    rows: int = sys.maxsize

    @property
    def position(self) -> int:
        """Of its first sample in the sampler's order."""
        return int(self.batch.position) + self.row0

    @property
    def indices(self) -> Any:
        """The sampler's indices of these rows."""
        return self.batch.indices[self.row0 : self.row0 + self.rows]


def lost(engine: Engine, parts: list[Part], together: bool = False) -> Failure:
    """The error for a batch with samples that killed every worker that tried them, or took too
    long. Names these samples and no others of the batch. together: one call makes all."""
    #: batch number, the dead worker's pid and status, and the lost samples
    found: list[tuple[int, int, int, list[Any]]] = []
    for part in parts:
        for loss in engine.lost(part.block):
            if samples := _lost_of(part, loss, together):
                found.append((part.batch.number, loss.pid, loss.status, samples))
    number, pid, status, first = found[0]
    others = [index for *_, samples in found[1:] for index in samples]
    index = first if len(first) > 1 else first[0]
    text = _loading(pid, status, index, number)
    if others:
        text += f" Other workers were lost in the same way, with sample indices {text_of(others)}."
    return LoaderFailure(WorkerLost(text, pid, [*first, *others] if others else index, status))


def _loading(pid: int, status: int, index: Any, number: int) -> str:
    if status == LATE:
        late = exit_cause(pid) or "took longer than sample_timeout"
        return f"Sample index {text_of(index)} of batch {number} {late}"
    return (
        f"{describe_death(pid, status).rstrip()} It was loading sample index {text_of(index)} of "
        f"batch {number}. Every earlier attempt also ended this way."
    )


def lost_sample(loss: Loss, index: Any, number: int) -> WorkerLost:
    """The error for one sample that killed every worker that tried it."""
    text = _loading(loss.pid, loss.status, index, number)
    return WorkerLost(text, loss.pid, index, loss.status)


def _lost_of(part: Part, loss: Loss, together: bool) -> list[Any]:
    """The lost indices of a part: of the sample that took too long, if that is known, or of all that
    the task makes."""
    indices, whole = part.batch.indices, part.block.kind == BATCH
    here = part.row0 <= loss.row < part.row0 + part.rows and type(indices) in (list, tuple)
    if loss.status == LATE and not (together and whole) and here and loss.row < len(indices):
        return [indices[loss.row]]
    if whole:  # it is unknown which sample was running
        return indices if type(indices) is list else [indices]
    end = min(loss.row0 + loss.nrows, part.row0 + part.rows)
    return list(indices[max(loss.row0, part.row0) : end])


def no_room() -> Failure:
    """The error of a worker that had no memory for its result."""
    error = MemoryError(
        "a worker's result exceeds memory_limit. Raise memory_limit, retain fewer batches, or "
        "use smaller batches. `ulimit -v` and `ulimit -f` may make it smaller than you have set it"
    )
    return Failure.of(error, "in DataLoader worker process")


#: how many failed samples stats() lists
NAMED = 100
#: and the warning at an epoch's end
FIRST = 5


class ErrorsAllowed:
    """Counts the failed samples, and raises the first failure when there are too many.

    Attributes:
        left_out, replaced: number of samples, in all epochs of the iterator.
        latest: (index, error text, index of the replacement or None) of the last of them.
    """

    def __init__(self, loader: Any, options: Options) -> None:
        self.mode = options.on_error
        self.left_out = self.replaced = 0
        self.latest: deque[tuple[Any, str, Any]] = deque(maxlen=NAMED)
        self._max_errors = options.max_errors
        self._batch_size = batch_size_of(loader) if loader.batch_sampler is not None else 1
        self._batches = self._asked = 0  # those amiss, and the samples asked for in them
        self._epoch: _FailuresOfEpoch | None = None  # the latest epoch with failures

    def as_stats(self) -> dict[str, Any]:
        """Counts for stats()."""
        return {
            "left_out": self.left_out,
            "replaced": self.replaced,
            "latest": list(self.latest),
        }

    def most(self, progress: Progress, sources: Sources) -> int:
        """How many samples of an epoch may fail. A share allows at least one; if the length of the
        epoch is unknown, it is a share of what was delivered."""
        if type(self._max_errors) is int:
            return self._max_errors
        samples = _samples_of(sources, self._size())
        if samples is None:
            per_unit = 1 if progress.unit == "sample" else self._size()
            samples = int((progress.count + 1) * per_unit)
        return max(1, int(self._max_errors * samples))

    def _size(self) -> float:
        """Samples of a batch. If the sampler does not say, the mean of batches with failures."""
        if self._batch_size is not None:
            return self._batch_size
        return self._asked / max(1, self._batches)

    def take(self, batch: Amended, progress: Progress, sources: Sources) -> Any:
        """The batch's data. Raises the epoch's first failure if the limit is exceeded. progress: of
        the epoch; sources: its samplers."""
        self._batches, self._asked = self._batches + 1, self._asked + batch.asked
        if self._epoch is None or self._epoch.progress is not progress:
            self.warn()
            self._epoch = _FailuresOfEpoch(progress, batch.amiss[0].failure)
        for one, index in zip(batch.amiss, batch.indices):
            progress.failed += 1
            self.replaced += one.replaced
            self.left_out += not one.replaced
            text = str(one.failure.wrapper.exc_msg).strip().rpartition("\n")[2]
            self.latest.append((index, text, one.instead if one.replaced else None))
            self._epoch.add(index, text, one.replaced)
        if progress.failed > (most := self.most(progress, sources)):
            first, self._epoch.told = self._epoch.first, True  # by the error
            text = (
                f"{first.note}\nminato: {progress.failed} samples of this epoch failed, and "
                f"max_errors={self._max_errors!r} allows {most}; this is the first. To tolerate more, "
                "raise max_errors"
            )
            replace(first, note=text).reraise()
        return batch.data

    def warn(self) -> None:
        """Warns of the epoch's samples that failed, when it has ended or the program has left it."""
        epoch = self._epoch
        if epoch is not None and not epoch.told:
            epoch.told = True
            warn(epoch.text())


class _FailuresOfEpoch:
    """Samples of an epoch that were skipped or replaced. told: a warning or an error has said so."""

    def __init__(self, progress: Progress, first: Failure) -> None:
        self.progress, self.first, self.told = progress, first, False
        self._left_out = self._replaced = 0
        self._named: list[str] = []
        self._error = ""

    def add(self, index: Any, error: str, replaced: bool) -> None:
        """One more."""
        self._replaced += replaced
        self._left_out += not replaced
        self._error = self._error or error
        if len(self._named) < FIRST:
            self._named.append(text_of(index))

    def text(self) -> str:
        """The warning."""
        both = (self._left_out, "skipped"), (self._replaced, "replaced")
        done = " and ".join(f"{count} {what}" for count, what in both if count)
        all_of_them = self._left_out + self._replaced
        samples = counted(all_of_them, "sample")
        return (
            f"{samples} of this epoch failed ({done}); first indices: {', '.join(self._named)}. The "
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
