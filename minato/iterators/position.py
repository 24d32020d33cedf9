"""An iterator's position: the epoch, its seed, and which of its batches were delivered."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data.dataloader import _DatasetKind

from ..elastic import ElasticSampler, elastic_of
from ..epoch_progress import Progress, length_of
from ..errors import program_level
from ..option_values import option
from ..seeding import order_generators
from ..seeding.order_generators import (
    Sources,
    all_global,
    global_generators,
    put_global,
    sampler_epoch,
)
from ..seeding.ranks import by_launcher, ranks_of
from ..state import Start, in_mid_epoch
from ..stateful import Kept
from ..typing import State
from .across_iterators import DatasetEpochs, Memo
from .samplers import DrawDetector, Reordering, SamplerStates

if TYPE_CHECKING:
    from .failed_batches import ErrorsAllowed


class Position:
    """Holds what one iterator knows of its position in the order, mainly for state_dict().

    ``taking_up`` wraps torch's constructor, ``epoch_begins`` the first use of
    the sampler in each epoch.
    """

    def __init__(self, loader: Any, memo: Memo, unit: str = "batch") -> None:
        self.memo = memo
        self.sources = Sources(loader)
        #: the state from load_state_dict(), until its epoch has started
        self.start: State | None = memo.take(loader)
        self._length = length_of(loader)
        self.launched = by_launcher()
        self.ranks = ranks_of(loader, self.launched)  # the ranks that share the epoch
        self.epoch = 0  # of the seeds
        self.base_seed = 0
        self._drawn: int | None = None  # the base seed that an ElasticSampler's has replaced
        self.elastic = elastic_of(loader)
        self.errors = 0  # batches that raised
        self.allowed: ErrorsAllowed | None = None  # limit on failed samples
        self.progress = Progress()
        self._unit = unit
        self._persistent = bool(loader.persistent_workers)
        iterable = loader._dataset_kind == _DatasetKind.Iterable
        self._streams: int | None = max(1, loader.num_workers) if iterable else None
        #: where the workers of an iterable dataset resume, from the dataset's own states
        self.starts: list[Start] | None = self.start.get("starts") if self.start else None
        self.sampler = SamplerStates(loader, memo, unit)
        self.dataset_epochs = DatasetEpochs(loader, memo)
        self.here: Kept | None = None  # the state of a Stateful dataset in this process
        self._alone = loader.num_workers == 0
        wanted = option(loader, "cache_reorder")
        self.reordering = Reordering(loader, memo) if wanted else None
        self._static = option(loader, "scheduling") == "static"
        self._lives_on = self._persistent or self._alone

    def as_stats(self) -> dict[str, Any]:
        """Failures, for stats()."""
        found: dict[str, Any] = {"errors": self.errors}
        if self.allowed is not None:
            found["failed"] = self.allowed.as_stats()
        return found

    def ends(self) -> None:
        """The epoch's end, or where the program leaves it: warns of samples that failed."""
        if self.allowed is not None:
            self.allowed.warn()
        if self._alone:  # with workers the supervisor saves more than this
            self.memo.last_stats = partial(dict, self.as_stats())

    @contextlib.contextmanager
    def taking_up(self) -> Iterator[None]:
        """Resumes from the state of load_state_dict(), or starts: torch draws the base seed."""
        start = self.start
        if start is None or start["base_seed"] is None:
            yield
        else:  # resuming must not draw from the program's generators
            found = self.sources.capture(everything=False)
            with global_generators(all_global()):
                yield
            self.sources.set_own(found)
            self.base_seed = start["base_seed"]
        if self._alone:
            me = weakref.ref(self)
            self.memo.as_stats = lambda: at.as_stats() if (at := me()) is not None else None

    @contextlib.contextmanager
    def epoch_begins(self, loader: Any, *, first: bool) -> Iterator[None]:
        """Records the generators of the epoch's order; delivered batches are left out."""
        if not first:
            self.sources = Sources(loader)
            self._length = length_of(loader)
            self.start = self.memo.take(loader)
            self.starts = self.start.get("starts") if self.start else None
            self.epoch = self.progress.epoch + 1
            if self.start is not None and self.start["base_seed"] is None:
                self.base_seed = order_generators.draw_base_seed(loader)
        start, self.start = self.start, None
        self.sampler.start = start.get("sampler") if start else None
        if self.reordering is not None:
            self.reordering.before = start.get("order") if start else None
        states: dict[str, bytes] = {}
        if start is not None:
            states = start["generators"]
            self.epoch = start["epoch"]
            if start["base_seed"] is not None:
                self.base_seed = start["base_seed"]
            if start["begun"]:
                if start.get("sampler_epoch") is None:  # else the sampler seeds it by its epoch
                    self._warn_of(self.sources.lacks(states))
                self.sources.set_own(states)
                self._check_epoch(start)
        if self.elastic is not None:
            self._begin_elastic(self.elastic, start)
        self.progress = self.new_progress(start)
        self.memo.epochs += 1
        self.progress.number = max(self.epoch, self.memo.epochs - 1)
        if self.memo.misses is not None:
            self.memo.misses.epochs += 1
        with global_generators(states):
            self.progress.generators = self.sources.capture()
            self.memo.progress = self.progress
            yield

    def _begin_elastic(self, sampler: ElasticSampler, start: State | None) -> None:
        """An epoch of an ElasticSampler starts or goes on. Samples depend on the sampler's seed and
        epoch and on the position in its order."""
        sampler.start_at(start.get("origin", 0) if start is not None else 0)
        resumes = start is not None and start["begun"]
        if not resumes:
            self.epoch = sampler.epoch
            if not self._static:
                self._drawn = self.workers_seed
                self.base_seed = sampler.seed
        self.memo.note_elastic(sampler.epoch, resumes)

    @staticmethod
    def _warn_of(lacking: list[str]) -> None:
        for role in lacking:
            warnings.warn(
                f"the state has the generator {role!r}, but this loader's sampler does not "
                "have it. If the order comes from it, the rest of the epoch may come in another "
                "order, with samples twice or not at all. Have the sampler make its generator in "
                "its constructor, not when it is iterated",
                stacklevel=program_level(),
            )

    def _check_epoch(self, start: State) -> None:
        """Warns if set_epoch was called since load_state_dict, with another epoch."""
        theirs, mine = start.get("sampler_epoch"), sampler_epoch(self.sources)
        if None in (theirs, mine) or theirs == mine or not in_mid_epoch(start):
            return
        if start.get("sampler_shuffle") is False:  # all epochs have the same order
            return
        reached = start.get("position")
        if self.sampler.has_all(start) or reached is not None and reached == start["dataset_length"]:
            return  # the rest is empty, and ignite, for example, begins the next epoch at once
        warnings.warn(
            f"the state was saved in the middle of epoch {theirs}, but set_epoch({mine}) was called "
            f"after load_state_dict. So the rest of the epoch comes in the order of epoch {mine}: some "
            "samples come twice and others not at all. Save the number of the epoch with the state, "
            f"and go on with set_epoch({theirs})",
            stacklevel=program_level(),
        )

    def watched(self, indices: Iterator[Any], progress: Progress) -> Iterator[Any]:
        """An epoch's indices, whose sampler is asked for its state if it has one, and resumes
        from it. Call it where the epoch starts."""

        def rewind() -> None:
            self.sources.set_own(progress.generators or {})
            put_global(progress.generators or {})

        watched = self.sampler.watched(indices, progress, rewind)
        programs = "python" in self.sources.globals and self._streams is None
        if watched is not indices:  # a sampler with its own state stores its position there
            return watched
        watched = DrawDetector(indices, progress) if programs else indices
        if self.reordering is None:
            return watched
        return self.reordering.watched(watched, progress, self.base_seed + progress.epoch)

    def new_progress(self, start: State | None = None) -> Progress:
        """Progress of an epoch that starts at its beginning, or at a state's position."""
        progress = Progress(
            self.epoch, self.base_seed, self._persistent, self.memo.user_epoch, unit=self._unit
        )
        if self._streams is not None:
            progress.by_worker = [0] * self._streams
            progress.kept = [Kept() for _ in range(self._streams)]
        if self.here is not None:
            progress.kept = [self.here]
        progress.ranks = self.ranks
        progress.origin = start.get("origin", 0) if start is not None else 0
        progress.first = -((self.ranks.rank - progress.origin) // self.ranks.world)
        progress.sampler_epoch = sampler_epoch(self.sources)
        progress.lives_on = self._lives_on
        progress.dataset_length = self._length
        # until the epoch has started
        progress.sampler = self.sampler.begin(start.get("sampler") if start else None)
        if start is not None:
            progress.head = start["delivered"]
            progress.failed = start.get("failed", 0)
            progress.beyond = set(start["delivered_beyond"])
            counts = start["delivered_by_worker"] or []
            if len(counts) == self._streams:  # otherwise nothing was delivered
                progress.by_worker = list(counts)
            if self.here is None:
                self._keep(progress)
        return progress

    def _keep(self, progress: Progress) -> None:
        """Sets the states that workers start with."""
        counts = progress.by_worker or []
        for worker, kept in enumerate(progress.kept):
            pickled, again = self.starts[worker] if self.starts else (None, counts[worker])
            if pickled is None:
                kept.again = again
            else:
                kept.came(pickled, again)

    def open_next(self) -> Progress:
        """Opens the next epoch, which starts while this one ends."""
        self.epoch = self.epoch + 1 if self.elastic is None else self.elastic.epoch
        self.sources = self.sources.again()
        progress = self.new_progress()
        progress.early = True
        progress.number = max(self.epoch, self.progress.number + 1)
        return progress

    def begin_next(self, sampler: Any, progress: Progress) -> Iterator[Any]:
        """The indices of the next epoch."""
        progress.generators = self.sources.capture()
        return self.watched(iter(sampler), progress)

    def adopt(self, progress: Progress) -> None:
        """Makes the epoch that was started early the current one."""
        progress.early = False
        self.memo.epochs += 1
        if self.elastic is not None:
            self.memo.note_elastic(progress.epoch, False)
        self.progress = self.memo.progress = progress

    @property
    def workers_seed(self) -> int:
        """The base seed for the random streams of workers."""
        return self.base_seed if self._drawn is None else self._drawn

    @property
    def seed(self) -> int:
        """The base seed as an unsigned 64-bit integer, for the engine."""
        return self.base_seed & (2**64 - 1)
