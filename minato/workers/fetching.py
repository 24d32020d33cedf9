"""Samples made with the seeds of their places: by workers, and in the program's own process.

Whoever asks a dataset for samples in Python does it by ``made``, ``fetched`` and ``collated``, and
with ``on_error`` by ``tolerated`` and ``in_its_place``, so that all make the same. Two seed by
themselves, in the same domains: a batch that is collated of parts (``runner.py``), and a native
worker whose samples Python makes in its place (``native.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import getitem
from typing import Any, Protocol

from ..dataset_calls import by_sample, fetches_batches
from ..sampler_indices import as_given
from .answers import ERROR, LEFT_OUT, REPLACED, Entry
from .on_error import Amiss, Gone, NotDivisible, Tolerant, split_spares

#: domains of the seeds, enum mn_seed_domain: what a place stands for. Of a sample it is that of the
#: sampler's order, else the batch's number.
OF_SAMPLE, OF_GETITEMS, OF_COLLATE = range(3)


class Fetches(Protocol):
    """What samples come from, and how."""

    dataset: Any
    auto_collation: bool


def _ignore(_row: int) -> None:
    pass


#: base seed, epoch, the batch's number, its position
BatchPlace = tuple[int, int, int, int]
#: called before and after each sample, with its row
RowHooks = tuple[Callable[[int], None], Callable[[int], None]]


def fetched(
    seeder: Any, source: Fetches, index: Any, place: BatchPlace, told: RowHooks = (_ignore, _ignore)
) -> Any:
    """The samples of a batch; or one sample, which has no row, so nobody is told before it."""
    base_seed, epoch, number, position = place
    begins, ended = told
    dataset: Any = source.dataset
    if not source.auto_collation:
        sample = made(seeder, (base_seed, epoch, position, OF_SAMPLE), getitem, dataset, index)
        ended(0)
        return sample
    if fetches_batches(dataset):
        return made(seeder, (base_seed, epoch, number, OF_GETITEMS), _together, dataset, index)
    samples, dataset = [], by_sample(dataset)
    for row, i in enumerate(index):
        begins(row)
        place_of_one = base_seed, epoch, position + row, OF_SAMPLE
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
    """As ``fetched``, less what cannot be made, or with others in its place.

    Raises AllLeftOut where there are none.
    """
    base_seed, epoch, number, position = place
    begins, ended = told
    tolerant.amiss = []
    dataset: Any = source.dataset
    together = source.auto_collation and fetches_batches(dataset)
    alone = by_sample(dataset, source.auto_collation)
    one = partial(tolerant.one, partial(_one_of, dataset) if together else partial(getitem, alone))
    gone = next((i for i in (*index, *spares) if type(i) is Gone), None) if together else None

    def get(row: int, i: Any) -> Any:
        begins(row)
        sample = made(seeder, (base_seed, epoch, position + row, OF_SAMPLE), one, i)
        ended(row)
        return sample

    if together and gone is None:
        try:
            place_of_all = base_seed, epoch, number, OF_GETITEMS
            return made(seeder, place_of_all, tolerant.one, partial(_together, dataset), index)
        except Exception as error:  # of which? They are asked for one by one, with seeds of each
            try:
                data = tolerant.samples(index, spares, get)
            except NotDivisible:
                raise error from None
    else:
        try:
            data = tolerant.samples(index if source.auto_collation else [index], spares, get)
        except NotDivisible:
            assert gone is not None
            raise gone.error from None
    if not data and tolerant.amiss:
        raise AllLeftOut(tolerant.amiss)
    return data if source.auto_collation else data[0]


def _together(dataset: Any, index: Any) -> Any:
    """The samples of a batch, of a dataset that makes whole ones. It may do with the list what it
    likes, and is given another if it is asked again."""
    return dataset.__getitems__(as_given(index))


def _one_of(dataset: Any, index: Any) -> Any:
    """A sample of a dataset that makes whole batches."""
    found = dataset.__getitems__([index])
    if not isinstance(found, list) or len(found) != 1:
        raise NotDivisible
    return found[0]


class AllLeftOut(Exception):
    """There is nothing to collate."""

    def __init__(self, amiss: list[Amiss]) -> None:
        super().__init__("no sample of the batch could be made")
        self.amiss = amiss


def in_its_place(
    tolerant: Tolerant,
    row: int,
    error: BaseException,
    indices: tuple[Any, int],
    get: Callable[[int, Any], Any],
) -> Entry:
    """Of a row whose sample could not be made. indices: of its batch, and how many of them at the
    end are spares."""
    try:
        made, amiss = tolerant.instead(row, error, *split_spares(*indices), get)
    except Exception as last:
        return row, ERROR, tolerant.failure(last)
    if not made:
        return row, LEFT_OUT, amiss.failure
    return row, REPLACED, (amiss.failure, amiss.instead, made[0])


class Unseeded:
    """In place of a seeder."""

    @staticmethod
    def seed(*_place: int) -> None:
        pass

    @staticmethod
    def renew() -> bool:
        return False

    @staticmethod
    def drawn() -> bool:
        return False


def made(seeder: Any, place: tuple[int, ...], make: Callable[..., Any], *what: Any) -> Any:
    """What a dataset makes with the seeds of a place. Made again where it has made a generator of
    its own: what it drew from that, no other worker would. And where it is the first to draw from
    one that the dataset holds: what it built with that, a table say, every other worker builds, and
    what it is itself comes from its seeds."""
    while True:
        seeder.seed(*place)
        try:
            data = make(*what)
        except Exception:
            if not seeder.drawn():
                raise
            continue
        if not seeder.renew():
            return data


def collated(
    seeder: Any, place: tuple[int, ...], fetch: Callable[[], Any], collate_fn: Callable[..., Any]
) -> Any:
    """The batch of the samples fetched. To be collated again they are fetched again: a collate_fn
    may take samples apart."""
    while True:
        samples = fetch()
        seeder.seed(*place)
        try:
            batch = collate_fn(samples)
        except Exception:
            if not seeder.drawn():
                raise
            continue
        if not seeder.renew():
            return batch
