"""Batches that cannot be had: what the program is told, and of which samples."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from .._core import Block, Engine, Loss
from ..errors import Failure, WorkerLost, add_note, describe_death, text_of
from ..workers.answers import BATCH
from ..workers.on_error import Amiss


class Told(Failure):
    """The loader's own word on a batch, raised as it is."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.note = self.stand_in = ""

    def reraise(self) -> NoReturn:
        """Raises it."""
        raise self.error


def unread(error: Exception, number: int, indices: Any, row0: int = 0, rows: int = 0) -> Told:
    """Of a result that cannot be read: of these rows of a batch, or of all of it."""
    if not rows or not isinstance(indices, (list, tuple)):
        add_note(error, note(number, indices))
    elif rows == 1:
        add_note(error, note(number, indices, row0))
    else:
        some = _short(list(indices[row0 : row0 + rows]))
        add_note(error, f"minato: one of sample indices {some} of batch {number}")
    return Told(error)


class Amended(Failure):
    """A batch that is not what the sampler asked for: some of its samples could not be made.
    Until that is counted, and allowed, it is treated as one that failed."""

    def __init__(self, data: Any, amiss: list[Amiss], empty: bool) -> None:
        self.data = data
        self.amiss = amiss
        self.empty = empty  # none of its samples could be made
        self.indices: list[Any] = []  # of those in amiss, as far as they are known
        self.asked = 0  # samples that the sampler asked for

    def name(self, number: int, indices: Any, batched: bool = True) -> None:
        """Says of each failure which sample it is of; not batched: indices is that of one."""
        amiss, self.amiss = self.amiss, []
        self.add(amiss, number, indices if batched else [indices])

    def add(self, amiss: list[Amiss], number: int, indices: Any) -> None:
        """More that are amiss, of this batch of the sampler's."""
        every = indices if isinstance(indices, (list, tuple)) else list(indices)
        self.asked += len(every)
        for one in amiss:
            one.failure.note = note(number, every, one.row)
            self.indices.append(every[one.row])
        self.amiss += amiss


def note(number: int, indices: Any, row: int | None = None) -> str:
    """Which batch it was, and where that is known, which sample of it."""
    if row is None or not isinstance(indices, (Sequence, torch.Tensor, np.ndarray)):
        return f"minato: batch {number}, sample indices {_short(indices)}"
    return f"minato: sample index {text_of(indices[row])}, place {row} of batch {number}"


def placed(number: int, indices: Any, row: int | None) -> str:
    """What a worker is at: a sample of a batch, if it has one of that number, or all of it. row:
    None where that is not known."""
    if indices is not None and row is None:
        return f"batch {number}, sample indices {_short(indices)}"
    try:
        return f"sample index {text_of(indices[row])}, place {row} of batch {number}"
    except Exception:  # collating, an iterable dataset, or nothing that is known by numbers
        return f"batch {number}"


def _short(indices: Any) -> str:
    text = text_of(indices)
    return text if len(text) <= 200 else text[:197] + "..."


#: by the engine's reasons for not making a batch (csrc/engine/mn_engine.h): what it needs
_NEEDS = {
    1: "{need} task descriptors at once, and there are {all} ({used} are in use: each sample that "
    "waits for its batch has one)",
    2: "{need} bytes for its indices and for what workers report, and there are {all}",
    3: "{need} bytes for its samples, and the memory that loader and workers share has {all} "
    "({used} are in use, {kept} of them by batches that the program keeps). A limit on address "
    "space (`ulimit -v`) makes that smaller than memory_limit",
    4: "{need} bytes that the system refuses to the program",
}


def refused(engine: Engine, block: Block, what: str) -> Failure:
    """A batch, or a sample of one, that the engine cannot make."""
    why, need, there = engine.refused(block)
    memory = engine.memory()
    used = memory["in_flight"] if why == 1 else memory["used"]
    needs = _NEEDS[why].format(need=need, all=there, used=used, kept=memory["kept"])
    text = f"{what} cannot be made: it needs {needs}. Make batches smaller, or keep fewer."
    return Told(MemoryError(text))


class Part(NamedTuple):
    """Neighbouring rows of one of the sampler's batches, as a rule all, that are in a batch."""

    number: int  # of the sampler's batch
    indices: Any  # what the sampler gave for it
    block: Block
    row0: int = 0
    rows: int = sys.maxsize


def lost(engine: Engine, parts: list[Part]) -> Failure:
    """A batch some of whose samples took every worker with them that tried: which of it they
    are, and no others of what the sampler gave along with them."""
    #: number of the batch, a death's pid and status, and the samples that it took
    found: list[tuple[int, int, int, list[Any]]] = []
    for part in parts:
        for loss in engine.lost(part.block):
            samples = _lost_of(part, loss, engine.form(part.block)[0] == BATCH)
            if samples:
                found.append((part.number, loss.pid, loss.status, samples))
    number, pid, status, first = found[0]
    others = [index for *_, samples in found[1:] for index in samples]
    index = first if len(first) > 1 else first[0]
    text = _loading(pid, status, index, number)
    if others:
        text += f" Other workers were lost in the same way, with sample indices {text_of(others)}."
    return Told(WorkerLost(text, pid, [*first, *others] if others else index, status))


def _loading(pid: int, status: int, index: Any, number: int) -> str:
    return (
        f"{describe_death(pid, status).rstrip()} It was loading sample index {text_of(index)} of batch "
        f"{number}, and so was every worker that tried before it."
    )


def lost_sample(loss: Loss, index: Any, number: int) -> WorkerLost:
    """The error of one sample that took every worker with it that tried."""
    text = _loading(loss.pid, loss.status, index, number)
    return WorkerLost(text, loss.pid, index, loss.status)


def _lost_of(part: Part, loss: Loss, whole: bool) -> list[Any]:
    """The indices of what is lost of a part with a task."""
    if whole:  # which one it was at is not known
        return part.indices if type(part.indices) is list else [part.indices]
    end = min(loss.row0 + loss.nrows, part.row0 + part.rows)
    return list(part.indices[max(loss.row0, part.row0) : end])


def no_room() -> Failure:
    """A worker had no memory for its result."""
    try:
        raise MemoryError(
            "a worker's result does not fit under memory_limit; raise it, keep fewer batches, "
            "or make batches smaller"
        )
    except MemoryError as error:
        return Failure.of(error, "in DataLoader worker process")
