"""The limit on failed samples with ``on_error="skip"`` or ``"replace"``. Samples are counted as
their batches are delivered, so samples that were made ahead and never asked for do not count."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import Failure, text_of, warn
from ..options import Options
from ..seeding.order_generators import Sources, batch_size_of, sampler_of
from ..text import counted
from .batch_errors import Amended

if TYPE_CHECKING:
    from ..epoch_progress import Progress

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
