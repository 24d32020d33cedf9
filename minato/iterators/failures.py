"""Batches that cannot be had: what the program is told, and of which samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from .._core import Block, Engine
from ..errors import Failure
from ..workers.tolerance import Amiss


class Told(Failure):
    """The loader's own word on a batch, raised as it is."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.note = self.stand_in = ""

    def reraise(self) -> NoReturn:
        """Raises it."""
        raise self.error


class Amended(Failure):
    """A batch that is not what the sampler asked for: some of its samples could not be made.
    Until that is counted, and allowed, it is treated as one that failed."""

    def __init__(self, data: Any, amiss: list[Amiss], empty: bool) -> None:
        self.data = data
        self.amiss = amiss
        self.empty = empty  # none of its samples could be made
        self.indices: list[Any] = []  # of those in amiss, as far as they are known

    def name(self, number: int, indices: Any, batched: bool = True) -> None:
        """Says of each failure which sample it is of; not batched: indices is that of one."""
        amiss, self.amiss = self.amiss, []
        self.add(amiss, number, indices if batched else [indices])

    def add(self, amiss: list[Amiss], number: int, indices: Any) -> None:
        """More that are amiss, of this batch of the sampler's."""
        every = indices if isinstance(indices, (list, tuple)) else list(indices)
        for one in amiss:
            one.failure.note = note(number, every, one.row)
            self.indices.append(every[one.row])
        self.amiss += amiss


def note(number: int, indices: Any, row: int | None = None) -> str:
    """Which batch it was, and where that is known, which sample of it."""
    if row is None or not isinstance(indices, (Sequence, torch.Tensor, np.ndarray)):
        return f"minato: batch {number}, sample indices {_short(indices)}"
    return f"minato: sample index {indices[row]!r}, place {row} of batch {number}"


def _short(indices: Any) -> str:
    text = repr(indices)
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


def no_room() -> Failure:
    """A worker had no memory for its result."""
    try:
        raise MemoryError(
            "a worker's result does not fit under memory_limit; raise it, keep fewer batches, "
            "or make batches smaller"
        )
    except MemoryError as error:
        return Failure.of(error, "in DataLoader worker process")
