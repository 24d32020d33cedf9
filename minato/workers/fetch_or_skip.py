"""Makes samples with the seeds of their places, in workers and in the program's own process.

All Python code that asks a dataset for samples calls ``made``, mostly through ``fetched``. So all
kinds of workers make the same samples. ``runner.py`` calls ``made`` itself for a batch collated
from parts, and for samples that Python makes in place of C.

``on_error`` skips or replaces a sample that cannot be made. ``"skip"`` leaves the sample out.
``"replace"`` makes another sample of the same epoch in its place, with the seeds of that place. It
tries those that come after it in its batch, then the spares from the planner, then those before it.
The planner sends spares if a batch is small, or if only part of it is left to make. The choice
depends on the sampler's order alone, so it is the same with any number of workers. Both modes report
the sample with the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from operator import getitem
from typing import Any

from .. import _core
from .._records import Task
from ..dataset_calls import by_sample, fetches_batches
from ..errors import Failure, as_ordinary_error
from ..sampler_indices import as_given, whole_number

#: Domains of the seeds: the meaning of a place. A sample's place is its
#: position in the sampler's order. In the other domains the place is the batch's number.
OF_SAMPLE, OF_GETITEMS, OF_COLLATE = _core.SEED_SAMPLE, _core.SEED_GETITEMS, _core.SEED_COLLATE
#: as a position, of batches whose samples are seeded by their indices
BY_INDEX = _core.SEED_BY_INDEX


def seed_place(position: int, row: int, index: Any) -> int:
    """Returns what the seeds of a sample are made from besides seed and epoch. position: of the
    batch."""
    return BY_INDEX + whole_number(index) if position == BY_INDEX else position + row


def position_of(task: Task) -> int:
    """The position of a task's batch, for seeds."""
    return BY_INDEX if task.seeded == _core.SEEDED_BY_INDEX else task.position


def _ignore(_row: int) -> None:
    pass


#: base seed, epoch, the batch's number, its position
BatchPlace = tuple[int, int, int, int]
#: called before and after each sample, with its row
RowHooks = tuple[Callable[[int], None], Callable[[int], None]]


def fetched(
    seeder: Any,
    source: Any,
    index: Any,
    place: BatchPlace,
    told: RowHooks = (_ignore, _ignore),
    tolerant: Tolerant | None = None,
    spares: Any = (),
) -> Any:
    """The samples of a batch, or one sample. source: has the dataset, and auto_collation. told:
    called before and after each sample; for a single sample, which has no row, only after it.
    tolerant: leaves out or replaces samples that cannot be made; spares: indices of others that may
    replace them. Raises AllLeftOut if no sample is left."""
    if tolerant is not None:
        return _tolerated(tolerant, seeder, source, index, spares, place, told)
    base_seed, epoch, number, position = place
    begins, ended = told
    dataset: Any = source.dataset
    if not source.auto_collation:
        at = base_seed, epoch, seed_place(position, 0, index), OF_SAMPLE
        sample = made(seeder, at, getitem, dataset, index)
        ended(0)
        return sample
    if fetches_batches(dataset):
        return made(seeder, (base_seed, epoch, number, OF_GETITEMS), _together, dataset, index)
    samples, dataset = [], by_sample(dataset)
    for row, i in enumerate(index):
        begins(row)
        place_of_one = base_seed, epoch, seed_place(position, row, i), OF_SAMPLE
        samples.append(made(seeder, place_of_one, getitem, dataset, i))
        ended(row)
    return samples


def _tolerated(
    tolerant: Tolerant,
    seeder: Any,
    source: Any,
    index: Any,
    spares: Any,
    place: BatchPlace,
    told: RowHooks,
) -> Any:
    base_seed, epoch, number, position = place
    begins, ended = told
    tolerant.amiss = []
    dataset: Any = source.dataset
    together = source.auto_collation and fetches_batches(dataset)
    alone = by_sample(dataset, source.auto_collation)
    one = partial(tolerant.one, partial(_one_of, dataset) if together else partial(getitem, alone))
    gone = next((i for i in (*index, *spares) if type(i) is FatalIndex), None) if together else None

    def get(row: int, i: Any) -> Any:
        begins(row)
        at = base_seed, epoch, seed_place(position, row, i), OF_SAMPLE
        sample = made(seeder, at, one, i)
        ended(row)
        return sample

    if together and gone is None:
        try:
            place_of_all = base_seed, epoch, number, OF_GETITEMS
            return made(seeder, place_of_all, tolerant.one, partial(_together, dataset), index)
        except Exception as error:  # of an unknown sample: ask for each, with its own seeds
            try:
                data = tolerant.samples(index, spares, get)
            except NotAList:
                raise error from None
    else:
        try:
            data = tolerant.samples(index if source.auto_collation else [index], spares, get)
        except NotAList:
            assert gone is not None
            raise gone.error from None
    if not data and tolerant.amiss:
        raise AllLeftOut(tolerant.amiss)
    return data if source.auto_collation else data[0]


def _together(dataset: Any, index: Any) -> Any:
    """The samples of a batch, of a dataset with ``__getitems__``. The dataset may change the list
    of indices: each call gets a new list."""
    return dataset.__getitems__(as_given(index))


def _one_of(dataset: Any, index: Any) -> Any:
    """One sample of a dataset with ``__getitems__``."""
    found = dataset.__getitems__([index])
    if not isinstance(found, list) or len(found) != 1:
        raise NotAList
    return found[0]


class Unseeded:
    """Stands for a seeder where samples are not seeded."""

    @staticmethod
    def seed(*_place: int) -> None:
        pass

    @staticmethod
    def renew() -> bool:
        return False


def made(seeder: Any, place: tuple[int, ...], make: Callable[..., Any], *what: Any) -> Any:
    """Returns what a dataset makes with the seeds of a place. A generator that it makes meanwhile is
    seeded from the next sample on."""
    seeder.seed(*place)
    data = make(*what)
    seeder.renew()
    return data


# ---- samples that cannot be made ----------------------------------------------------------

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


class AllLeftOut(Exception):
    """No sample of a batch could be made, so nothing can be collated."""

    def __init__(self, amiss: list[FailedSample]) -> None:
        super().__init__("no sample of the batch could be made")
        self.amiss = amiss


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
