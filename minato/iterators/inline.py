"""The iterator of a loader without workers: torch's, with a counted position that can be resumed.

With ``seed_per_sample=True`` it makes the same samples as workers. The program's own generators are
seeded for that, so they are restored after each batch: the program continues to draw as if workers
had made the batch.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from .._dynamo import eager
from .._not_linux import CORE
from ..dataset_calls import ByItem, NextSeed, forwards_getitems, warn_of_forwarded_getitems
from ..device.copies import Copier
from ..device.operators import split
from ..device.provider import provider_for
from ..epoch_progress import Progress
from ..errors import Failure
from ..observe import totals
from ..observe.measurements import Load
from ..options import Options
from ..seeding.order_generators import BASE_SEED, all_global, global_generators, put_global
from ..stateful import Kept, Snapshot, load_iterator_state, make_again, may_be_asked, read
from .loader_memo import memo_of
from .position import Position
from .stats import export

if CORE:
    from ..seeding.find_generators import Growing
    from ..seeding.generator_states import put_back
    from ..workers.fetch_or_skip import (
        BY_INDEX, OF_COLLATE, Ahead, AllLeftOut, Spares, Tolerant, Unseeded, fetched, made,
    )  # fmt: skip
    from .failure_limits import Amended, ErrorsAllowed

class SeededHere:
    """Seeds what a worker would seed for this dataset and collate_fn, and restores it afterwards,
    except for the effects of a program's seed_sample(), which cannot be undone. last: of the epoch
    before."""

    def __init__(self, dataset: Any, collate_fn: Any, generator: Any, last: Growing | None) -> None:
        self.growing = Growing(dataset, collate_fn, of_loader=generator, last=last)
        rand = np.random.mtrand._rand  # type: ignore[attr-defined]
        self._everybodys = (random._inst, rand, torch.default_generator)  # type: ignore[attr-defined]
        self.seeder = self.growing.seeder

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Restores the program's generators afterwards."""
        generators = (*self._everybodys, *self.growing.seeded())
        before = [put_back(generator) for generator in generators]
        try:
            yield
        finally:
            for put in before:
                put()
            for hook in self.growing.found.hooks:
                left = getattr(getattr(hook, "__self__", None), "_sample_seed", None)
                if isinstance(left, NextSeed):  # that of collate_fn, for which hooks are called, too
                    left.take()


class Fetcher:
    """Replaces torch's fetcher of a map-style dataset: seeds as workers do, or continues after
    samples that fail, or both."""

    def __init__(self, fetcher: Any, seeded: SeededHere | None, tolerant: Tolerant | None) -> None:
        self._fetcher, self._seeded, self._tolerant = fetcher, seeded, tolerant
        self.spares: list[Any] = []  # for the next batch
        self.place = (0, 0, 0, 0)  # base seed, epoch, batch's number, position of its first

    def fetch(self, index: Any) -> Any:
        """The batch of an index, or of a list of them."""
        if self._seeded is None:
            return self._fetcher.collate_fn(self._samples(Unseeded, index))
        with self._seeded.undisturbed():
            place, seeder = (*self.place[:3], OF_COLLATE), self._seeded.seeder
            return made(seeder, place, self._fetcher.collate_fn, self._samples(seeder, index))

    def _samples(self, seeder: Any, index: Any) -> Any:
        return fetched(
            seeder, self._fetcher, index, self.place, tolerant=self._tolerant, spares=self.spares
        )


def _begins_with_next(loader: Any) -> bool:
    """Whether making the iterator draws nothing but a base seed: the sampler's ``__iter__`` is a
    generator function, whose code runs at the first ``next()``."""
    begin = getattr(type(loader._index_sampler), "__iter__", None)
    code = getattr(begin, "__code__", None)
    return code is not None and bool(code.co_flags & inspect.CO_GENERATOR)


class InlineIterator(_SingleProcessDataLoaderIter):
    """torch's iterator for ``num_workers=0``. Samples draw from the program's generators, or with
    ``seed_per_sample=True`` from generators that are seeded as in workers.

    The sampler starts at the first ``next()``, as in torch, or earlier if its ``__iter__``
    draws at once. An iterable dataset may draw its order from the program's generators or its
    own. To resume it, it is therefore read up to its position with these generators as the epoch
    found them. If loading its state sets the generators, the dataset finds them that way.
    """

    _base_seed: int = BASE_SEED

    def __init__(self, loader: Any, options: Options) -> None:
        memo, provider = memo_of(loader), provider_for(options.device)
        allowed = ErrorsAllowed(loader, options) if options.on_error != "raise" else None
        self._position = position = Position(loader, memo, allowed=allowed)
        with position.taking_up():
            start = position.start or {}
            if start.get("begun") and position.starts is None:  # else it loads its own state
                position.sources.set_dataset(start["generators"])
            iterable = loader._dataset_kind == _DatasetKind.Iterable
            at_once = iterable or not _begins_with_next(loader)
            found = position.sources.capture() if at_once else {}
            again, snapshot = sum(start.get("delivered_by_worker") or []), Snapshot()
            if position.starts is not None:
                pickled, again = position.starts[0]
                snapshot = snapshot if pickled is None else read(pickled)
            memo.loaded.begin_anew(loader.dataset)
            memo.loaded.load(loader.dataset, snapshot.dataset)
            with global_generators(start["generators"] if again else {}):
                own = snapshot.dataset is not None or snapshot.iterator is not None
                told = all_global() if own else {}
                super().__init__(loader)
                put_global(told)
                load_iterator_state(self._dataset_fetcher, snapshot)
                with contextlib.suppress(StopIteration):  # it is shorter now: nothing is left
                    for _ in range(again):
                        index = super()._next_index()  # type: ignore[no-untyped-call]
                        make_again(self._dataset_fetcher, index)
                if own:
                    told = all_global()
        put_global(told)
        #: the generators are as the epoch found them, and its sampler draws from these
        begins = self._dataset_kind == _DatasetKind.Map and not start.get("delivered")
        self._draws_from_told = bool(told) and begins
        made = split(loader, provider)
        self._copier = Copier(provider, split=made) if provider is not None else None
        memo.copies = self._copier.counts if self._copier is not None else None
        self._load = memo.load = Load(loader.batch_size or 1, totals.name_of(loader))
        totals.begins(self._load)
        self._dataset = made.dataset
        if made.tail is not None:
            self._dataset_fetcher.dataset = made.dataset
        elif self._dataset_kind == _DatasetKind.Map and self._auto_collation:
            if forwards_getitems(loader.dataset):
                if options.static:
                    warn_of_forwarded_getitems(loader.dataset)
                else:
                    self._dataset_fetcher.dataset = ByItem(loader.dataset)
        self._stream: Kept | None = None  # a Stateful iterable dataset's state
        if may_be_asked(loader.dataset, self._dataset_fetcher):
            self._loader = weakref.ref(loader)
            position.here = Kept()
            position.here.lives(loader.dataset, self._dataset_fetcher)
            if self._dataset_kind == _DatasetKind.Iterable:
                self._stream = position.here
        through = memo.through(made.dataset, options, loader)
        fetcher = self._dataset_fetcher
        name = _SingleProcessDataLoaderIter.__name__  # profilers know torch's name
        self._profile_name = f"enumerate(DataLoader)#{name}.__next__"
        self._begun = False
        self._lost = False  # an interrupt lost what an iterable dataset yielded for a batch
        self._tolerant: Any = None
        self._spares: Any = None
        if allowed is not None:
            self._tolerant = Tolerant(
                options.on_error, lambda error: Failure.of(error, "here"), in_worker=False
            )
            replaces = options.on_error == "replace"
            self._spares = Spares(self._auto_collation) if replaces else None
        seeded = None
        if options.seed_per_sample and CORE:
            roots = fetcher.dataset, fetcher.collate_fn
            seeded = SeededHere(*roots, loader.generator, memo.growing)
            memo.growing = seeded.growing
            seeded.seeder.share(position.ranks.for_seeds())
        if seeded is not None or self._tolerant is not None:
            self._dataset_fetcher = Fetcher(fetcher, seeded, self._tolerant)
        self._seeds = seeded is not None
        if through is not None:  # the generators found are those of the program's dataset
            fetcher.dataset = through.over(made.dataset)
        if start and start["base_seed"] is not None:
            position.epoch = start["epoch"]
        position.seed_elastic(position.start)
        position.progress = progress = position.new_progress(position.start)
        self._number, self._place = 0, progress.first  # of the next batch, and of its first sample
        me = weakref.ref(self)
        if self._dataset_kind == _DatasetKind.Map:
            self._load.samples = lambda: it._place - it._progress.first if (it := me()) else 0
        if start.get("begun"):
            progress.generators = start["generators"]
        elif at_once and (iterable or position.sources.drew(found)):
            progress.generators = found  # not the states at the first next()
        self._found = progress.generators
        position.memo.progress = progress
        export(self, self._load)

    @eager
    def __del__(self) -> None:
        """Stores the dataset's state: the loader may still be asked for it, and the dataset's
        iterator is destroyed with this one."""
        position = self.__dict__.get("_position")
        if position is None or sys.is_finalizing():
            return
        position.ends()
        if "_place" not in self.__dict__:  # its start failed
            return
        made = self._place - self._progress.first
        if self._dataset_kind == _DatasetKind.Map:
            self._load.samples = lambda: made
        if position.here is None:
            return
        progress = position.progress
        latest = position.memo.progress is progress and self._loader() is not None
        if latest and not progress.finished and self._dataset_kind == _DatasetKind.Iterable:
            position.here.settle()

    @property
    def _progress(self) -> Progress:
        return self._position.progress

    def _begin(self) -> contextlib.AbstractContextManager[None]:
        if self._begun:
            return contextlib.nullcontext()
        self._begun = True
        return self._position.epoch_begins(None, first=True)

    def _next_index(self) -> Any:
        first, start = not self._begun, self._position.start or {}
        with self._begin():
            if first and self._found is not None:
                self._progress.generators = self._found
            resumed = start.get("base_seed") is not None
            if first and resumed and self._dataset_kind == _DatasetKind.Map:
                self._sampler_iter = iter(self._index_sampler)  # its generators are set now
            if first:
                try:
                    self._sampler_iter = self._position.watched(self._sampler_iter, self._progress)
                except BaseException:  # the next next() may start again
                    self._position.start, self._begun = start or None, False
                    raise
            if first and self._spares is not None:
                self._sampler_iter = Ahead(self._sampler_iter)
            try:
                index = super()._next_index()  # type: ignore[no-untyped-call]
                while self._progress.has(self._number):
                    self._pass_over(index)
                    self._may_stand_in(index)
                    index = super()._next_index()  # type: ignore[no-untyped-call]
            except StopIteration:
                self._progress.check_end(self._number)
                raise
            drawn = all_global() if first and self._draws_from_told else None
        if drawn is not None:
            put_global(drawn)
        if self._tolerant is not None and self._auto_collation and not hasattr(index, "__len__"):
            index = list(index)  # an iterator would be exhausted before samples are named
        position, number, place = self._position, self._number, self._place
        self._pass_over(index)
        if self._seeds:
            place = BY_INDEX if self._progress.by_index else place
            number = number if position.elastic is None else place
            self._dataset_fetcher.place = (position.seed, position.epoch, number, place)
        if self._tolerant is not None:
            self._indices = index
            if self._spares is not None:
                spares = self._spares.of(index, self._sampler_iter.following)
                self._dataset_fetcher.spares = spares
                self._may_stand_in(index)
        return index

    def draw_delivered(self) -> None:
        """Draws the indices of a resumed epoch's delivered batches, and no others. Nothing else may
        be asked of this iterator."""
        with self._begin():
            indices = self._position.watched(iter(self._index_sampler), self._progress)
            for _ in range(self._progress.head):
                next(indices, None)

    def _pass_over(self, index: Any) -> None:
        sized = self._auto_collation and hasattr(index, "__len__")
        samples = len(index) if sized else 1
        # A KeyboardInterrupt cannot be raised between these assignments.
        self._number, self._place = self._number + 1, self._place + samples

    def _may_stand_in(self, index: Any) -> None:
        """Makes this batch's samples available as replacements in later batches."""
        if self._spares is not None:
            self._spares.passed(index)

    @eager
    def _next_data(self) -> Any:
        """A batch lost to an interrupt does not count as delivered: a state includes it, although
        this iterator goes on after it. Then an iterable dataset's samples of it are lost."""
        if self._lost:
            self._lost = False
            self._delivered(self._number - 1)
        if self._stream is not None:
            self._stream.goes_on()
        drawn = self._number
        got, load = False, self._load
        load.begins()
        try:
            data = self._fetched()
            if self._copier is not None:
                data = self._copier.hand_over(self._copier.begin(data))
            got = True
        except StopIteration:
            self._progress.finished = True
            if self._stream is not None:
                self._stream.stands(0)
            self._position.ends()
            raise
        except Exception:
            self._position.errors += 1
            self._delivered(drawn)
            raise
        except BaseException:
            iterable = self._dataset_kind == _DatasetKind.Iterable
            self._lost = iterable and self._number > drawn
            raise
        finally:
            load.ends(got)
        self._delivered(drawn)
        return data

    def _delivered(self, drawn: int) -> None:
        """Records the latest batch, if one was drawn since, or its error."""
        last = self._number - 1
        made = last >= drawn and not self._progress.has(last)  # a skipped batch is already recorded
        if made:
            self._progress.delivered(last)
        if self._stream is not None:
            self._stream.stands(int(made))

    def _fetched(self) -> Any:
        if self._tolerant is None:
            return super()._next_data()  # type: ignore[no-untyped-call]
        while True:
            try:
                data = super()._next_data()  # type: ignore[no-untyped-call]
                if not self._tolerant.amiss:
                    return data
                amended = Amended(data, self._tolerant.amiss, empty=False)
            except AllLeftOut as left_out:
                amended = Amended(None, left_out.amiss, empty=True)
            amended.name(self._number - 1, self._indices, self._auto_collation)
            position = self._position
            assert position.allowed is not None
            data = position.allowed.take(amended, position.progress, position.sources)
            if not amended.empty:
                return data
            self._progress.delivered(self._number - 1)
            if self._stream is not None:
                self._stream.stands(1)
                self._stream.goes_on()
