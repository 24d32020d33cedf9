"""``on_error``, where samples are made: skips or replaces a sample that cannot be made.

``"skip"`` leaves the sample out. ``"replace"`` makes another sample of the same epoch in its place,
with the seeds of that place. It tries those that come after it in its batch, then the spares from
the planner, then those before it. The planner sends spares if a batch is small, or if only part of
it is left to make. The choice depends on the sampler's order alone, so it is the same with any
number of workers. Both modes report the sample with the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from ..errors import Failure, as_ordinary_error
from ..sampler_indices import as_given

RAISE, SKIP, REPLACE = "raise", "skip", "replace"
#: number of samples that are tried in the place of one
TRIES = 8
#: a batch of this many samples needs no spares
MIN_BATCH_WITHOUT_SPARES = 4


class Fatal(Exception):
    """The worker could not be set up. The error belongs to no sample, so none can be left out."""

    def __init__(self, failure: Failure) -> None:
        super().__init__("worker_init_fn failed")
        self.failure = failure


class FatalIndex:
    """Stands for the index of a sample that killed each worker that tried it. Making it raises this
    error. Among a batch's spares it makes workers ask for one sample at a time, even if the dataset
    makes whole batches. Then it is known which sample kills a worker."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class NotAList(Exception):
    """A dataset's ``__getitems__`` returned something other than a list of samples, so no sample
    can be left out or replaced."""


@dataclass
class FailedSample:
    """A sample of a batch that could not be made."""

    row: int
    failure: Failure
    replaced: bool = False
    instead: Any = None  # the index of the sample that was made in its place


class Tolerant:
    """Makes samples, and goes on after those that cannot be made.

    Attributes:
        amiss: the failed samples of the last batch.
        check: called with each sample; if it raises, the sample has failed.
    """

    def __init__(
        self, mode: str, failure: Callable[[BaseException], Failure], in_worker: bool = True
    ) -> None:
        self.mode = mode
        self.amiss: list[FailedSample] = []
        self.failure = failure
        self.check: Callable[[Any], object] | None = None
        self._in_worker = in_worker

    def one(self, make: Callable[[Any], Any], index: Any) -> Any:
        """Returns make(index): a sample of the dataset, or several. In a worker, sys.exit() counts
        as an error of the sample."""
        if type(index) is FatalIndex:
            raise index.error
        try:
            made = make(index)
        except SystemExit as error:
            if not self._in_worker:
                raise
            raise as_ordinary_error(error) from error
        if self.check is not None:
            self.check(made)
        return made

    def samples(
        self, indices: Sequence[Any], spares: Sequence[Any], get: Callable[[int, Any], Any]
    ) -> list[Any]:
        """Returns get(row, index) for all rows but those that fail.

        Raises the first failure if no sample can be made in its place.
        """
        self.amiss, made = [], []
        indices = indices if isinstance(indices, (list, tuple)) else list(indices)
        for row, index in enumerate(indices):
            try:
                made.append(get(row, index))
            except (Fatal, NotAList):
                raise
            except Exception as error:
                others, amiss = self.instead(row, error, indices, spares, get)
                made += others
                self.amiss.append(amiss)
        return made

    def instead(
        self,
        row: int,
        error: BaseException,
        indices: Sequence[Any],
        spares: Sequence[Any],
        get: Callable[[int, Any], Any],
    ) -> tuple[list[Any], FailedSample]:
        """Returns what takes the place of a failed sample: another sample, or none. Raises its
        error if no other can be made."""
        failure = self.failure(error)
        if self.mode == SKIP:
            return [], FailedSample(row, failure)
        indices = indices if isinstance(indices, (list, tuple)) else list(indices)
        after = chain(indices[row + 1 :], spares, indices[:row])
        others = (index for index in after if not _same(index, indices[row]))
        for index in islice(others, TRIES):
            try:
                sample = get(row, index)
            except Exception:
                continue
            return [sample], FailedSample(row, failure, replaced=True, instead=index)
        raise as_ordinary_error(error)


def _same(one: Any, other: Any) -> bool:
    """Whether two indices of any kind are equal. If they cannot be compared: whether they are the
    same object."""
    try:
        return bool(one == other)
    except Exception:
        return one is other


def split_spares(index: Any, spares: int) -> tuple[Any, Any]:
    """Splits a batch's indices into the sampler's own and the spares sent after them."""
    return (index[:-spares], index[-spares:]) if spares else (index, ())


class Ahead:
    """A sampler's items, some of which may be drawn before their turn. If the sampler raises then
    (its end, or an error), the exception is raised in its turn."""

    def __init__(self, indices: Iterable[Any]) -> None:
        self._indices = iter(indices)
        self._drawn: deque[Any] = deque()
        self._raised: Exception | None = None  # to be raised after the drawn items

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> Any:
        self.following(1)
        if self._drawn:
            return self._drawn.popleft()
        assert self._raised is not None
        try:
            raise self._raised
        finally:
            self._raised = None

    def following(self, most: int) -> list[Any]:
        """The next indices, at most this many; fewer if the sampler raises or ends before."""
        while len(self._drawn) < most and self._raised is None:
            try:
                self._drawn.append(next(self._indices))  # first, for interrupts
                self._drawn[-1] = as_given(self._drawn[-1])
            except Exception as error:
                self._raised = error
        return list(islice(self._drawn, most))


class Spares:
    """Samples of an epoch that may replace others in small batches. batched: the sampler gives
    batches of indices; else each of its items is one index."""

    def __init__(self, batched: bool) -> None:
        self._batched = batched
        self._recent: deque[Any] = deque(maxlen=TRIES)

    def clear(self) -> None:
        """Begins a new epoch."""
        self._recent.clear()

    def of(self, index: Any, following: Callable[[int], list[Any]] = lambda _: []) -> list[Any]:
        """Spares for a batch, or for one sample. following: returns the given number of the
        sampler's next items, for the first batches, which have few before them."""
        own = self._samples(index)
        if not own or len(own) >= MIN_BATCH_WITHOUT_SPARES:
            return []
        found = list(reversed(self._recent))
        if len(found) < MIN_BATCH_WITHOUT_SPARES:
            for more in following(MIN_BATCH_WITHOUT_SPARES):
                found += self._samples(more)
        return found[:TRIES]

    def passed(self, index: Any) -> None:
        """Notes an item of the sampler: later batches may use it as a spare."""
        self._recent.extend(self._samples(index))

    def _samples(self, index: Any) -> list[Any]:
        if not self._batched:
            return [index]
        return list(index) if isinstance(index, (list, tuple)) else []
