"""How many samples may fail, with ``on_error="skip"`` or ``"replace"``: counted as batches are
handed out, so what is ahead of the program and never asked for does not count."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import Failure
from ..options import Options
from ..seeding.order_generators import sampler_of
from .failures import Amended

if TYPE_CHECKING:
    from ..progress import Progress

#: failed samples that stats() names
NAMED = 100


class Stands(Protocol):
    """Where an iterator is: ``position.py``."""

    progress: Progress


class ErrorsAllowed:
    """Counts the samples that failed, and raises the first when there are too many.

    Attributes:
        left_out, replaced: samples, in all epochs of the iterator.
        latest: (index, what went wrong, index in its place or None) of the last of them.
    """

    def __init__(self, loader: Any, options: Options, position: Stands) -> None:
        self.mode = options.on_error
        self.left_out = self.replaced = 0
        self.latest: deque[tuple[Any, str, Any]] = deque(maxlen=NAMED)
        self._position = position
        self._max_errors = options.max_errors
        self._first: tuple[Any, Failure] | None = None  # progress of its epoch, and it
        self._samples = _samples_of(loader) if self.mode != "raise" else None
        self._batch_size = loader.batch_size or 1

    def told(self) -> dict[str, Any]:
        """For stats()."""
        return {
            "left_out": self.left_out,
            "replaced": self.replaced,
            "latest": list(self.latest),
        }

    def most(self) -> int:
        """Samples of an epoch that may fail. A share of them allows one at least; of an epoch
        of unknown length it is a share of what was handed out."""
        if type(self._max_errors) is int:
            return self._max_errors
        samples = self._samples
        if samples is None:
            samples = (self._position.progress.count + 1) * self._batch_size
        return max(1, int(self._max_errors * samples))

    def take(self, batch: Amended) -> Any:
        """The batch's data. Raises the first failure of the epoch where this is one too many."""
        progress = self._position.progress
        for one, index in zip(batch.amiss, batch.indices):
            progress.failed += 1
            if one.replaced:
                self.replaced += 1
            else:
                self.left_out += 1
            text = str(one.failure.wrapper.exc_msg).strip().rpartition("\n")[2]
            self.latest.append((index, text, one.instead if one.replaced else None))
            if self._first is None or self._first[0] is not progress:
                self._first = progress, one.failure
        if progress.failed > (most := self.most()):
            assert self._first is not None
            first = self._first[1]
            text = (
                f"{first.note}\nminato: {progress.failed} samples of this epoch could not be made, "
                f"and max_errors={self._max_errors!r} allows {most}; this is one of them"
            )
            replace(first, note=text).reraise()
        return batch.data


def _samples_of(loader: Any) -> int | None:
    """What the sampler gives in an epoch, where it says so."""
    try:
        sampler = sampler_of(loader)
        if sampler is not None:
            return len(sampler)
        return len(loader.batch_sampler) * (loader.batch_size or 1)
    except Exception:  # whatever a sampler of the program's says
        return None
