"""How many samples may fail, with ``on_error="skip"`` or ``"replace"``: counted as batches are
handed out, so what is ahead of the program and never asked for does not count."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from .._warn import warn
from ..errors import Failure, text_of
from ..options import Options
from ..seeding.order_generators import Sources, batch_size_of, sampler_of
from .failures import Amended

if TYPE_CHECKING:
    from ..progress import Progress

#: failed samples that stats() names
NAMED = 100
#: and the warning at an epoch's end
FIRST = 5


class Stands(Protocol):
    """Where an iterator is: ``position.py``."""

    progress: Progress
    sources: Sources


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
        self._batch_size: int | None = batch_size_of(loader)
        if loader.batch_sampler is None:
            self._batch_size = 1
        self._batches = self._asked = 0  # those amiss, and the samples asked for in them
        self._untold: _Untold | None = None  # of the latest epoch with failures

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
        samples = _samples_of(self._position.sources, self._size())
        if samples is None:
            progress = self._position.progress
            per_unit = 1 if progress.unit == "sample" else self._size()
            samples = int((progress.count + 1) * per_unit)
        return max(1, int(self._max_errors * samples))

    def _size(self) -> float:
        """Samples of a batch. Where its sampler does not say, as in those with failures so far."""
        if self._batch_size is not None:
            return self._batch_size
        return self._asked / max(1, self._batches)

    def take(self, batch: Amended) -> Any:
        """The batch's data. Raises the first failure of the epoch where this is one too many."""
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
                f"{first.note}\nminato: {progress.failed} samples of this epoch could not be made, "
                f"and max_errors={self._max_errors!r} allows {most}; this is one of them. If the "
                "epoch may go on without more samples, raise max_errors"
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
        samples = "1 sample" if all_of_them == 1 else f"{all_of_them} samples"
        first = ", ".join(self._first) + (", ..." if all_of_them > FIRST else "")
        return (
            f"{samples} of this epoch could not be made ({done}): index {first}. The first error: "
            f"{self._error}. loader.stats()['failed'] lists the others."
        )


def _samples_of(sources: Sources, size: float) -> int | None:
    """What the sampler gives in an epoch, where it says so. size: samples of a batch."""
    try:
        sampler, batches = sampler_of(sources), sources.batch_sampler
        if sampler is not None:
            return len(sampler)
        if isinstance(batches, (list, tuple)):
            return sum(map(len, batches))
        return int(len(batches) * size)
    except Exception:  # whatever a sampler of the program's says
        return None
