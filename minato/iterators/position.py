"""An iterator's position: the epoch, its seed, which of its batches were delivered, its samplers.

A sampler may have ``state_dict()`` and ``load_state_dict(state)``. It is ahead of delivery, so it is
asked after each index that it yields. That answer
becomes part of the loader's state once everything up to the index is delivered. To resume, the
sampler loads that state and yields what comes after it; earlier indices are not drawn again.

Samplers without a state are run again from the generators that they draw from:
minato/seeding/order_generators.py. If a sampler draws from a global generator while it is iterated,
its order depends on what the program draws in the meantime, so the generators' initial states do not
reproduce it.

A dataset's copies in persistent workers are told its epoch. ``DataLoader.set_epoch`` reaches these
copies. A program, or its sampler when it is iterated, may instead call the dataset's own
``set_epoch`` or set its ``epoch``. The copies then get the epoch of the program's dataset.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import pickle
import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _DatasetKind

from ..cache.order import Chosen, why_kept
from ..dataset_calls import attribute, is_stateful, offered
from ..elastic import elastic_of
from ..epoch_progress import Progress, length_of
from ..errors import program_level
from ..option_values import option
from ..seeding import order_generators
from ..seeding.order_generators import (
    PLAIN, TORCH_SAMPLERS, Sources, all_global, attributes, batch_size_of, fingerprint,
    global_generators, put_global, sampler_epoch, sampler_of, sampler_of_torch,
)  # fmt: skip
from ..seeding.ranks import by_launcher, ranks_of
from ..state import Start, in_mid_epoch
from ..stateful import Kept, load_state
from ..time_limits import TimeShare
from ..typing import State
from .loader_memo import Memo, Said

if TYPE_CHECKING:
    from .failure_limits import ErrorsAllowed

log = logging.getLogger("minato")

#: nanoseconds: if an answer takes less, the sampler is asked after each index
CHEAP_NS = 50_000
#: largest share of the time for slower answers
SHARE = 0.1
#: size limit of the stored answers; past it, the next is asked for after some were delivered
MOST_BYTES = 32 << 20


class SamplerStates:
    """One loader's samplers: which of them is asked, and what the current epoch resumes from."""

    def __init__(self, loader: Any, memo: Memo, unit: str) -> None:
        self.memo = memo
        self._index_sampler = loader._index_sampler
        parts = (self._index_sampler, sampler_of(loader))
        self._sampler = next((part for part in parts if is_stateful(part)), None)
        #: a custom batch sampler may have drawn more from the sampler than it has yielded
        inner = self._sampler is not None and self._sampler is not parts[0]
        ahead = inner and type(parts[0]) is not BatchSampler
        #: samples of a full batch; a smaller batch is the last, so its sampler has ended
        self.full = (batch_size_of(loader) or 0) if loader._auto_collation else None
        self.used = loader._dataset_kind == _DatasetKind.Map
        #: ask after each index. If batches are made again or samples are replaced, all indices are
        #: needed, and what counts is the state at the start of the epoch
        self.each = (
            self.used
            and unit == "batch"
            and not ahead
            and option(loader, "on_error") != "replace"
            and (loader.num_workers == 0 or option(loader, "scheduling") != "static")
        )

    def watched(
        self,
        indices: Iterator[Any],
        progress: Progress,
        resumes: State | None,
        rewind: Callable[[], None],
    ) -> Iterator[Any]:
        """Wraps the indices of an epoch and asks the sampler as they are drawn. resumes: the sampler's
        part of a state. rewind: sets the generators to their states before the epoch."""
        if not self.used:
            return indices
        begin = progress.sampler or Said(0, 0, b"")
        self.memo.sampler_end = None
        if resumes is not None and isinstance(begin.pickled, bytes) and begin.pickled:
            indices = self._told(begin.pickled, resumes["begins"], rewind)
        if self._sampler is None and not is_stateful(indices):
            return indices
        progress.sampler = answers = Answers(begin, progress)
        return Watched(self, answers, indices)

    def begin(self, start: State | None) -> Said | None:
        """The sampler's state before the epoch that starts now. None if the last epoch was left in
        the middle."""
        if not self.used:
            return None
        if start is None:
            return self.memo.sampler_end
        if start["drawn"] and not self.each:
            warnings.warn(
                f"the state holds the sampler's state after {start['drawn']} of its "
                "indices, but this loader (scheduling='static', batching='ready', "
                "on_error='replace', or a custom batch sampler) needs all indices of the epoch. "
                "The sampler does not get its state and starts as the program has left it. Restore "
                "it, or resume with the options that the state was taken with",
                stacklevel=program_level(),
            )
            return None
        said = pickle.dumps([start["sampler"], start["iterator"]])
        return Said(start["drawn"], start["position"], said, start["begins"])

    def has_all(self, start: State) -> bool:
        """Whether all batches of a state's epoch were delivered, if that is known."""
        with contextlib.suppress(Exception):  # a sampler without a length
            delivered = start["delivered"] + len(start["delivered_beyond"])
            counts_batches = start["unit"] == "batch" and not start["origin"]
            return counts_batches and bool(delivered >= len(self._index_sampler))
        return False

    def ask(self, indices: Any) -> bytes | Exception:
        """The present states of the sampler and its iterator, or the error of asking for them."""
        iterator = None if indices is self._sampler else indices
        parts: tuple[Any, ...] = (self._sampler, iterator)
        try:
            return pickle.dumps([part.state_dict() if is_stateful(part) else None for part in parts])
        except Exception as error:
            return error

    def _told(self, pickled: bytes, begins: bool, rewind: Callable[[], None]) -> Iterator[Any]:
        rewind()  # before loading: the sampler's state may include generators
        sampler, iterator = pickle.loads(pickled)
        load_state(self._sampler, sampler, "sampler")
        if begins:
            # The sampler was at its end. Most samplers end at once now and then start anew. If one
            # has already started anew, it yields an index here and loads the state a second time.
            if next(iter(self._index_sampler), self) is not self:
                rewind()
                sampler, _ = pickle.loads(pickled)  # it may modify the state that it loaded
                load_state(self._sampler, sampler, "sampler")
        indices: Iterator[Any] = iter(self._index_sampler)
        if not begins:
            load_state(indices, iterator, "iterator of the sampler")
        return indices


class Answers:
    """The states of a sampler in one epoch. Holds no iterator of it, as the loader keeps this."""

    def __init__(self, begin: Said, progress: Progress) -> None:
        self.said = deque([begin])
        self.end: Said | None = None
        self.bytes = begin.size()
        self.progress = progress

    def state(self) -> State | None:
        """The state after the last index up to which everything is delivered."""
        if self.progress.finished and self.end is not None:
            return self.end.state()
        return [one for one in self.said if one.drawn <= self.progress.head][-1].state()


class Watched(Iterator[Any]):
    """An epoch's indices, whose sampler is asked for its state as they are drawn. Placeholders stand
    for those delivered before the state was taken. Unlike a generator, it continues after an error if
    the sampler's iterator does."""

    def __init__(self, states: SamplerStates, answers: Answers, indices: Iterator[Any]) -> None:
        self._states, self._answers, self._indices = states, answers, indices
        begin = answers.said[0]
        self._count, self._position = begin.drawn, begin.position
        self._time = TimeShare(SHARE, cheap_ns=CHEAP_NS)
        self._drawn: list[Any] = []  # drawn and not yet returned
        self._before: Iterator[Any] = iter(())
        if begin.drawn:  # the first placeholder has all the samples
            self._before = chain([range(begin.position)], repeat(range(0), begin.drawn - 1))

    def __next__(self) -> Any:
        for index in self._before:
            return index
        if not self._drawn:
            try:
                self._drawn.append(next(self._indices))
            except StopIteration:
                if self._answers.end is None:
                    end = Said(0, 0, self._states.ask(self._indices), True)
                    self._answers.end = self._states.memo.sampler_end = end
                raise
        self._gave(self._drawn[0])
        return self._drawn.pop()

    def _gave(self, index: Any) -> None:
        """Records that an index was drawn. After an interrupt this is called again."""
        full, samples = self._states.full, 1
        if full is not None and hasattr(index, "__len__"):
            samples = len(index)
        drawn, position = self._count + 1, self._position + samples
        whole = full is None or samples >= full  # a smaller batch: it may have started anew
        if self._states.each and whole:
            self._ask_behind(drawn, position)
        self._count, self._position = drawn, position

    def _ask_behind(self, drawn: int, position: int) -> None:
        """Stores the sampler's state after an index, unless that takes much memory or time.
        Resuming then draws again from the last stored state."""
        answers = self._answers
        while len(answers.said) > 1 and answers.said[1].drawn <= answers.progress.head:
            answers.bytes -= answers.said.popleft().size()
        if answers.bytes > MOST_BYTES and len(answers.said) > 1:
            return
        if self._time.allows():
            with self._time:
                answers.said.append(Said(drawn, position, self._states.ask(self._indices)))
                answers.bytes += answers.said[-1].size()


#: largest share of the time spent on checks
DRAWS_SHARE = 0.02


class DrawDetector(Iterator[Any]):
    """An epoch's indices. Records in the epoch's progress whether drawing one of them used a
    global generator. The first index is exempt: starting an epoch may draw."""

    def __init__(self, indices: Iterator[Any], progress: Progress) -> None:
        self._indices, self._progress = indices, progress
        self._time = TimeShare(DRAWS_SHARE)
        self._begins = True

    def __next__(self) -> Any:
        if self._begins or self._progress.draws_while_iterated or not self._time.allows():
            index = next(self._indices)
            self._begins = False
            return index
        with self._time:
            before = fingerprint()
        index = next(self._indices)
        with self._time:
            self._progress.draws_while_iterated = fingerprint() != before
        return index


#: for custom samplers, which may change their contents while they are drawn from. Larger contents
#: are not compared after each index (bytes of an array, elements of a list)
COMPARED_BYTES, COMPARED_ELEMENTS = 1 << 18, 1 << 12


class Recorded:
    """A recorded attribute: the object, and the content of a tensor, array or container. Nested
    content is not recorded."""

    def __init__(self, value: Any, whole: bool) -> None:
        """whole: record the content whatever its size."""
        self._value, self._held, self._whole = value, _contents(value, whole), whole

    def is_now(self, value: Any) -> bool:
        """Whether the attribute still has this value."""
        was = self._value
        if was is not value:
            return type(was) is type(value) and type(was) in PLAIN and bool(was == value)
        now, then = _contents(value, self._whole), self._held
        try:
            return bool(now == then)
        except Exception:  # elements that cannot be compared, such as arrays
            return len(now) == len(then) and all(map(operator.is_, now, then))


def _contents(value: Any, whole: bool) -> Any:
    """A fingerprint that shows changes of a mutable object, without copying large memory."""
    if isinstance(value, (list, set, dict)):
        if not whole and len(value) > COMPARED_ELEMENTS:
            return len(value)
        return [*value.items()] if isinstance(value, dict) else [*value]
    if not isinstance(value, (torch.Tensor, np.ndarray)):
        return None
    try:
        version = value._version if isinstance(value, torch.Tensor) else 0
    except RuntimeError:  # an inference tensor
        version = 0
    try:
        if not whole and value.nbytes > COMPARED_BYTES:
            return version
        return version, zlib.crc32(np.ascontiguousarray(value).view(np.uint8).data)
    except Exception:  # on a device, sparse, or an array of objects
        return version


class SamplerChanges:
    """Detects whether the program has changed the samplers since the next epoch was started early.

    The program changes a sampler by the sampler's own ``set_epoch``, or by its attributes. This
    class compares object identities, plain values, the content of tensors, arrays and lists, and
    the lengths of torch's samplers. For samplers with ``set_epoch`` it also compares states of
    generators. From the generators of other samplers the program may draw at any time.
    """

    def __init__(self, position: Position) -> None:
        self._position = position
        self.states: dict[str, bytes] = {}  # of the samplers' generators
        self._held: list[Recorded] = []
        self._changed = False  # a change was seen between two drawn indices
        self._still = False  # these samplers change nothing while they are drawn from

    def note(self, begins: bool = False) -> None:
        """Records the current values. The early epoch is drawn from samplers in this state."""
        sources = self._position.sources
        if begins:  # the sampler may have replaced its generator
            sources = self._position.sources = sources.again()
        self.states = sources.capture(everything=False)
        if begins or not self._still:
            self._still = sampler_of_torch(sources)
            self._held = [Recorded(value, self._still) for value in self._values(sources)]

    def check(self) -> None:
        """Called before an index is drawn: compares with the values after the last index."""
        if not self._still and not self._is_held(self._position.sources):
            self._changed = True

    def seen(self) -> bool:
        """Whether anything has changed since the epoch was started."""
        known, now = self._position.sources, self._position.sources.again()
        if self._changed or known.own != now.own or not self._is_held(now):
            return True
        parts = now.samplers.values()
        if not any(callable(attribute(part, "set_epoch")) for part in parts):
            return False  # other draws from its generators are up to the program
        states = now.capture(everything=False)
        return any(states[role] != self.states[role] for role in states if role != "loader")

    def forget(self) -> None:
        """Drops the recorded values, so that replaced objects can be freed."""
        self.states, self._held, self._changed, self._still = {}, [], False, False

    def _is_held(self, sources: Sources) -> bool:
        values = self._values(sources)
        return len(values) == len(self._held) and all(map(Recorded.is_now, self._held, values))

    @staticmethod
    def _values(sources: Sources) -> list[Any]:
        parts = sources.samplers.values()
        sizes = [len(part) for part in parts if type(part) in TORCH_SAMPLERS]
        return [*sizes, *parts, *(value for part in parts for _name, value in attributes(part))]


#: attributes in which datasets keep their epoch
NAMES = ("epoch", "_epoch", "current_epoch", "_current_epoch")


def epoch_of(dataset: Any) -> tuple[str, int] | None:
    """The name and value of the attribute; runs no code of the dataset."""
    own = getattr(dataset, "__dict__", {})
    for name in NAMES:
        value = own.get(name, getattr(type(dataset), name, None))
        if type(value) is int and 0 <= value < 2**63:
            return name, value
    return None


class DatasetEpochs:
    """Finds the epoch that the dataset's copies in one iterator's workers should get."""

    def __init__(self, loader: Any, memo: Memo) -> None:
        self._dataset, self._memo = loader.dataset, memo
        self.workers_start(copied=False, as_torch=False, overlap=False)

    def workers_start(self, *, copied: bool, as_torch: bool, overlap: bool) -> None:
        """copied: each worker keeps a copy of the current dataset for more than one epoch.
        as_torch: workers must make the same samples as torch's workers, which get no epoch.
        overlap: an epoch may start while the previous one ends; then copies get it again."""
        self._copied, self._as_torch, self._overlap = copied, as_torch, overlap
        self._by_loader = self._sent = self._memo.user_epoch
        self._known = epoch_of(self._dataset)

    def for_workers(self, user_epoch: int) -> int:
        """1 + the epoch that copies get before the first sample of an epoch; 0: none. Call it after
        the sampler has yielded the epoch's first index. user_epoch: 1 + the epoch of the loader's
        set_epoch(); 0: it was not called."""
        now, known = epoch_of(self._dataset), self._known
        self._known = now
        if user_epoch != self._by_loader:
            self._by_loader = self._sent = user_epoch
        elif self._copied and now is not None and (
            now != known or (self._overlap and self._sent == 0)
        ):
            if not self._as_torch and offered(self._dataset, "set_epoch") is not None:
                self._sent = now[1] + 1
            elif now != known and self._memo.warns_of("the dataset's epoch"):
                self._hint(*now)
        return self._sent

    def _hint(self, name: str, value: int) -> None:
        kind = type(self._dataset).__name__
        give = ""
        if offered(self._dataset, "set_epoch") is None:
            give = f"give {kind} a method set_epoch(epoch), and "
        warnings.warn(
            f"{kind}.{name} is {value} in the program now. Persistent workers keep copies of "
            "the dataset, in which it still has the value from their start. To update them, "
            f"{give}call set_epoch(epoch) of the loader. This warning is shown once.",
            stacklevel=program_level(),
        )


class Position:
    """Holds what one iterator knows of its position in the order, mainly for state_dict().

    ``taking_up`` wraps torch's constructor, ``epoch_begins`` the first use of
    the sampler in each epoch.
    """

    def __init__(
        self, loader: Any, memo: Memo, unit: str = "batch", allowed: ErrorsAllowed | None = None
    ) -> None:
        """unit: what is counted, see Progress. allowed: the limit on failed samples."""
        self.memo = memo
        self.sources = Sources(loader)
        #: the state from load_state_dict(), until its epoch has started
        self.start: State | None = memo.take(loader)
        self._resumes: State = {}  # the state from which the present epoch resumes, until it is drawn
        self._length = length_of(loader)
        self.launched = by_launcher()
        self.ranks = ranks_of(loader, self.launched)  # the ranks that share the epoch
        self.epoch = 0  # of the seeds
        self.base_seed = 0
        self._drawn: int | None = None  # the base seed that an ElasticSampler's has replaced
        self.elastic = elastic_of(loader)
        self.errors = 0  # batches that raised
        self.allowed = allowed
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
        self._batched = bool(loader._auto_collation)
        self._reorders = bool(option(loader, "cache_reorder"))
        if self._reorders and (kept := why_kept(loader)) is not None:
            self._reorders = False
            if memo.warns_of("order"):
                log.info("cache_reorder=True keeps the order of this loader: %s", kept)
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
        self._resumes = start or {}
        states: dict[str, bytes] = {}
        if start is not None:
            states = start["generators"]
            self.epoch = start["epoch"]
            if start["base_seed"] is not None:
                self.base_seed = start["base_seed"]
            if start["begun"]:
                if start["sampler_epoch"] is None:  # else the sampler seeds it by its epoch
                    self._warn_of(self.sources.lacks(states))
                self.sources.set_own(states)
                self._check_epoch(start)
        if self.elastic is not None:
            self.elastic.start_at(start["origin"] if start is not None else 0)
            self.seed_elastic(start)
            self.memo.note_elastic(self.elastic.epoch, start is not None and start["begun"])
        self.progress = self.new_progress(start)
        self.memo.epochs += 1
        self.progress.number = max(self.epoch, self.memo.epochs - 1)
        if self.memo.misses is not None:
            self.memo.misses.epochs += 1
        with global_generators(states):
            self.progress.generators = self.sources.capture()
            self.memo.progress = self.progress
            yield

    def seed_elastic(self, start: State | None) -> None:
        """Where an ElasticSampler's epoch starts, and does not go on: samples depend on the sampler's
        seed and epoch and on the position in its order."""
        if self.elastic is not None and not (start is not None and start["begun"]):
            self.epoch = self.elastic.epoch
            if not self._static:
                self._drawn = self.workers_seed
                self.base_seed = self.elastic.seed

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
        theirs, mine = start["sampler_epoch"], sampler_epoch(self.sources)
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

        resumes, self._resumes = self._resumes, {}
        watched = self.sampler.watched(indices, progress, resumes.get("sampler"), rewind)
        if watched is not indices:  # a sampler with its own state stores its position there
            return watched
        if "python" in self.sources.globals and self._streams is None:
            watched = DrawDetector(indices, progress)
        if self._reorders:
            cached = self.memo.cached
            watched = progress.chosen = Chosen(
                watched, self._batched, progress, cached.follow if cached is not None else None,
                resumes.get("order"), self.base_seed + progress.epoch,
            )  # fmt: skip
        return watched

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
        progress.origin = start["origin"] if start is not None else 0
        progress.first = -((self.ranks.rank - progress.origin) // self.ranks.world)
        progress.sampler_epoch = sampler_epoch(self.sources)
        progress.lives_on = self._lives_on
        progress.dataset_length = self._length
        # until the epoch has started
        progress.sampler = self.sampler.begin(start["sampler"] if start else None)
        if start is not None:
            progress.head = start["delivered"]
            progress.failed = start["failed"]
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
