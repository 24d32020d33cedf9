"""Makes samples with the seeds of their places, in workers and in the program's own process.

All Python code that asks a dataset for samples calls ``made`` and ``fetched``. With
``on_error`` it calls ``tolerated`` and ``in_its_place``. So all kinds of workers make the same
samples. Two callers seed by themselves, in the same domains. ``runner.py`` does it for a batch
collated from parts, and ``native.py`` for samples that Python makes in place of C.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import getitem
from typing import Any, Protocol

from .. import _core
from .._records import Task
from ..dataset_calls import by_sample, fetches_batches
from ..sampler_indices import as_given, whole_number
from .answers import ERROR, LEFT_OUT, REPLACED, Entry
from .on_error import FailedSample, FatalIndex, NotAList, Tolerant, split_spares

#: Domains of the seeds: the meaning of a place. A sample's place is its
#: position in the sampler's order. In the other domains the place is the batch's number.
OF_SAMPLE, OF_GETITEMS, OF_COLLATE = _core.SEED_SAMPLE, _core.SEED_GETITEMS, _core.SEED_COLLATE
#: as a position, of batches whose samples are seeded by their indices
BY_INDEX = _core.SEED_BY_INDEX


class Fetches(Protocol):
    """A dataset, and how samples are asked for."""

    dataset: Any
    auto_collation: bool


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
    seeder: Any, source: Fetches, index: Any, place: BatchPlace, told: RowHooks = (_ignore, _ignore)
) -> Any:
    """The samples of a batch, or one sample. told: called before and after each sample; for a
    single sample, which has no row, only after it."""
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


def tolerated(
    tolerant: Tolerant,
    seeder: Any,
    source: Fetches,
    index: Any,
    spares: Any,
    place: BatchPlace,
    told: RowHooks = (_ignore, _ignore),
) -> Any:
    """Does the same as ``fetched``, but samples that cannot be made are left out or replaced.

    Raises AllLeftOut if no sample is left.
    """
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


class AllLeftOut(Exception):
    """No sample of a batch could be made, so nothing can be collated."""

    def __init__(self, amiss: list[FailedSample]) -> None:
        super().__init__("no sample of the batch could be made")
        self.amiss = amiss


def in_its_place(
    tolerant: Tolerant,
    row: int,
    error: BaseException,
    indices: tuple[Any, int],
    get: Callable[[int, Any], Any],
) -> Entry:
    """The entry of a row whose sample could not be made. indices: those of its batch, and how many
    of them, at the end, are spares."""
    try:
        made, amiss = tolerant.instead(row, error, *split_spares(*indices), get)
    except Exception as last:
        return row, ERROR, tolerant.failure(last)
    if not made:
        return row, LEFT_OUT, amiss.failure
    return row, REPLACED, (amiss.failure, amiss.instead, made[0])


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
