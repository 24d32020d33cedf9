"""``on_error``: what is done about a sample that cannot be made, where samples are made.

``"skip"`` leaves it out. ``"replace"`` makes another of the same epoch in its place, with the
seeds of that place: of those that come after it in its batch, then of the spares that the planner
has sent along, where a batch is small or only part of it is left to make, then of those before it.
Which one depends on the sampler's order alone, so it is the same with any number of workers.
Either is reported with the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from ..errors import Failure, no_end
from ..sampler_indices import as_given

RAISE, SKIP, REPLACE = "raise", "skip", "replace"
#: samples that are tried in the place of one
TRIES = 8
#: samples of a batch that has enough of its own to replace one
ENOUGH = 4


class Fatal(Exception):
    """Of no sample, so there is none to go on without: the worker could not be set up."""

    def __init__(self, failure: Failure) -> None:
        super().__init__("worker_init_fn failed")
        self.failure = failure


class Gone:
    """In place of the index of a sample that took with it each worker that tried: it fails with
    this error. Among a batch's spares it has a dataset asked for one sample after another that
    otherwise makes whole batches, so that a worker's death is known to be of one."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class NotDivisible(Exception):
    """A dataset's ``__getitems__`` makes something other than a list of samples: there is nothing
    to leave out of that, and nothing to put in a place in it."""


@dataclass
class Amiss:
    """A sample of a batch that could not be made."""

    row: int
    failure: Failure
    replaced: bool = False
    instead: Any = None  # the index of the sample that was made in its place


class Tolerant:
    """Makes samples, and goes on behind those that cannot be made.

    Attributes:
        amiss: what was wrong with the samples of the batch made last.
        check: called with each sample made; what it raises the sample has failed with.
    """

    def __init__(
        self, mode: str, failure: Callable[[BaseException], Failure], in_worker: bool = True
    ) -> None:
        self.mode = mode
        self.amiss: list[Amiss] = []
        self.failure = failure
        self.check: Callable[[Any], object] | None = None
        self._in_worker = in_worker

    def one(self, make: Callable[[Any], Any], index: Any) -> Any:
        """make(index), a sample of the dataset or several. In a worker sys.exit() is an error like
        others: of the program only a signal's handler may call it."""
        if type(index) is Gone:
            raise index.error
        try:
            made = make(index)
        except SystemExit as error:
            if not self._in_worker:
                raise
            raise no_end(error) from error
        if self.check is not None:
            self.check(made)
        return made

    def samples(
        self, indices: Sequence[Any], spares: Sequence[Any], get: Callable[[int, Any], Any]
    ) -> list[Any]:
        """get(row, index) for all, less those that fail.

        Raises what the first of them fails with if nothing can be made in its place.
        """
        self.amiss, made = [], []
        indices = indices if isinstance(indices, (list, tuple)) else list(indices)
        for row, index in enumerate(indices):
            try:
                made.append(get(row, index))
            except (Fatal, NotDivisible):
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
    ) -> tuple[list[Any], Amiss]:
        """What takes the place of a sample: another, or none. Raises its error if there is no
        other that can be made."""
        failure = self.failure(error)
        if self.mode == SKIP:
            return [], Amiss(row, failure)
        indices = indices if isinstance(indices, (list, tuple)) else list(indices)
        after = chain(indices[row + 1 :], spares, indices[:row])
        others = (index for index in after if not _same(index, indices[row]))
        for index in islice(others, TRIES):
            try:
                sample = get(row, index)
            except Exception:
                continue
            return [sample], Amiss(row, failure, replaced=True, instead=index)
        raise no_end(error)


def _same(one: Any, other: Any) -> bool:
    """Of two indices, which may be of any kind: where they do not say, they are two."""
    try:
        return bool(one == other)
    except Exception:
        return one is other


def split_spares(index: Any, spares: int) -> tuple[Any, Any]:
    """What a sampler gave for a batch, and the indices sent behind it to stand in."""
    return (index[:-spares], index[-spares:]) if spares else (index, ())


class Ahead:
    """What a sampler gives, some of which may be looked at before its turn. What it raises then,
    its end or an error, is raised when that has its turn."""

    def __init__(self, indices: Iterable[Any]) -> None:
        self._indices = iter(indices)
        self._drawn: deque[Any] = deque()
        self._raised: Exception | None = None  # behind these

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
        """So much of what comes next, or what there is before the sampler raises."""
        while len(self._drawn) < most and self._raised is None:
            try:
                self._drawn.append(next(self._indices))  # first, for interrupts
                self._drawn[-1] = as_given(self._drawn[-1])
            except Exception as error:
                self._raised = error
        return list(islice(self._drawn, most))


class Spares:
    """Samples of an epoch to stand in for those of small batches. batched: what the sampler gives
    are batches of them; else each, whatever it is, is of one."""

    def __init__(self, batched: bool) -> None:
        self._batched = batched
        self._recent: deque[Any] = deque(maxlen=TRIES)

    def clear(self) -> None:
        """A new epoch."""
        self._recent.clear()

    def of(self, index: Any, following: Callable[[int], list[Any]] = lambda _: []) -> list[Any]:
        """For a batch's indices, or one sample's; following: so much of what the sampler gives
        after it, for the first ones, which have few before them."""
        own = self._samples(index)
        if not own or len(own) >= ENOUGH:
            return []
        found = list(reversed(self._recent))
        if len(found) < ENOUGH:
            for more in following(ENOUGH):
                found += self._samples(more)
        return found[:TRIES]

    def passed(self, index: Any) -> None:
        """The sampler gave it, and what comes after it may use it."""
        self._recent.extend(self._samples(index))

    def _samples(self, index: Any) -> list[Any]:
        if not self._batched:
            return [index]
        return list(index) if isinstance(index, (list, tuple)) else []
