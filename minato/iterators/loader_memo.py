"""Remembers facts about a loader between its iterators.

Stored outside the loader, because libraries copy, pickle and rebuild loaders from their
attributes. The state from which the next iterator resumes is an attribute (``pending_state``) for
the same reason: the rebuilt loader resumes from it.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import DistributedSampler, SequentialSampler

from .._not_linux import CORE, NoCosts
from ..cache.cache import any_open
from ..dataset_calls import has_shared_buffers
from ..epoch_progress import Progress, length_of
from ..errors import program_level
from ..seeding.order_generators import Sources
from ..state import COSTS_MOST, pack_costs, pack_ratios
from ..stateful import Loaded
from ..typing import State

if CORE:
    from .._core import CostModel
    from ..transport.layouts import SampleTransport

if TYPE_CHECKING:
    from ..cache.datasets import CacheOfLoader, Through
    from ..cache.misses import Missed, Misses
    from ..device.copies import Copies
    from ..observe.measurements import Load
    from ..options import Options
    from ..seeding.find_generators import Growing

#: for datasets with more samples, packed costs are reused for this many times the time that packing
#: took. Packing millions takes a large part of a second
PACKED_QUICKLY, PACKED_FOR = 1 << 16, 50

#: id of a loader -> (weak reference, memo). By identity: different loaders may compare equal, or
#: be unhashable.
_memos: dict[int, tuple[weakref.ref[Any], Memo]] = {}


class Said(NamedTuple):
    """The sampler's state after a number of indices, and how many samples they contained."""

    drawn: int
    position: int
    pickled: bytes | Exception  # (state of the sampler, of its iterator)
    begins: bool = False  # it was taken at the end of the previous epoch

    def size(self) -> int:
        """Returns the size in bytes."""
        return len(self.pickled) if isinstance(self.pickled, bytes) else 0

    def state(self) -> State | None:
        """Returns it in the form of a loader's state; None if there is none: the sampler then
        starts as the program has left it."""
        if isinstance(self.pickled, Exception):
            raise RuntimeError(
                f"state_dict() of the sampler raised {type(self.pickled).__name__}: "
                f"{self.pickled}. Fix it, or set state_dict to None on the sampler"
            ) from self.pickled
        if not self.pickled:
            return None
        sampler, iterator = pickle.loads(self.pickled)
        return {"drawn": self.drawn, "position": self.position, "begins": self.begins,
                "sampler": sampler, "iterator": iterator}  # fmt: skip


class Memo:
    """Holds what is known about a loader's samples, for its next iterators."""

    def __init__(self, loader: Any) -> None:
        self.shape: Any = SampleTransport() if CORE else None
        self.size = min(length_of(loader) or 0, COSTS_MOST)
        self.costs: Any = CostModel(self.size) if CORE else NoCosts()
        # before workers start, which can move the dataset's tensors to shared memory
        self.shared_buffers = has_shared_buffers(loader.dataset)
        self._packed: list[str | None] = []  # packed costs and ratios of a large dataset
        self._packed_until = 0.0
        #: asks the latest iterator for its stats(); returns None once the iterator or its workers
        #: are gone
        self.as_stats: Callable[[], dict[str, Any] | None] = lambda: None
        self.progress: Progress | None = None  # of the latest iterator
        self.epochs = 0  # that have begun
        self.sampler_end: Said | None = None  # its sampler's state at the end of the last epoch
        self.resume: State | None = None  # an opened state, for the next iterator
        self.user_epoch = 0  # 1 + what set_epoch was told
        self.loaded = Loaded()  # the dataset, in this process
        self._warned: set[str] = set()  # subjects of warnings that are shown once
        self.elastic_epoch: int | None = None  # the latest that an ElasticSampler has begun
        self.hints_refused = False  # cost_hint() has failed, and is not asked again
        self.sized = bytearray()  # for each index, whether its bytes were looked up
        self.last_stats: Callable[[], dict[str, Any]] = dict  # of an iterator that has ended
        self.load: Load | None = None  # of the latest iterator, without workers
        self.growing: Growing | None = None  # what it seeds
        self.cached: CacheOfLoader | None = None  # with cache=
        self.misses: Misses | None = None  # of the latest iterator's caches
        self.cache_used = False  # an iterator has begun while a cache was open
        self.copies: Copies | None = None  # to a device, of the latest iterator
        #: by the bounds on the number of workers: the number that was sufficient, for a new engine
        self.schedulers: dict[tuple[int, int, int], bytes] = {}
        self.trace_group: tuple[int, Any] = (0, lambda: None)  # number, weak reference
        self.trace_number = 0  # of its first group, which is the loader's number

    def warns_of(self, subject: str) -> bool:
        """Whether a warning that is shown once for a loader is due. It is not due again."""
        due = subject not in self._warned
        self._warned.add(subject)
        return due

    def through(self, dataset: Any, options: Options, loader: Any) -> Through | None:
        """How a new iterator reads the dataset: through the loader's cache, if it has one."""
        through = None
        if options.cache is None:
            self.cached = None
        else:
            if self.cached is None or self.cached.given is not options.cache:
                from ..cache.datasets import CacheOfLoader  # not at import: few programs have a cache

                self.cached = CacheOfLoader(options.cache)
            evicts = not in_sequence(loader)
            through = self.cached.through(dataset, options.cache_format, evicts=evicts)
        self.misses = None
        if through is not None or any_open():
            from ..cache.misses import Misses

            self.misses = Misses(dataset, self.cached, first=not self.cache_used)
            self.cache_used = True
        return through

    def missed(self) -> Missed | None:
        """Values that the caches did not have while the latest iterator ran."""
        return self.misses.seen() if self.misses is not None else None

    def packed_costs(self) -> list[str | None]:
        """Packed costs and ratios to hints for a state. With millions of samples they may be slightly
        out of date. That does no harm: costs are only a first estimate."""
        begins = time.monotonic()
        if self._packed and begins < self._packed_until:
            return list(self._packed)
        saved = self.costs.save()
        packed = [*pack_costs(saved), pack_ratios(saved[2])]
        if self.size > PACKED_QUICKLY:
            self._packed = list(packed)
            self._packed_until = begins + PACKED_FOR * (time.monotonic() - begins)
        return packed

    def load_costs(self, *parts: Any) -> None:
        """Loads the costs of a state: arguments of CostModel.load()."""
        self.costs.load(*parts)
        self._packed = []

    def note_elastic(self, epoch: int, resumes: bool) -> None:
        """An epoch of an ElasticSampler begins. Warns if the last one had the same number."""
        if epoch == self.elastic_epoch and not resumes and self.warns_of("the same epoch"):
            warnings.warn(
                f"epoch {epoch} of the ElasticSampler begins again, with the same order and random "
                "numbers. Call set_epoch(epoch) before each epoch. This warning is shown once.",
                stacklevel=program_level(),
            )
        self.elastic_epoch = epoch

    @contextlib.contextmanager
    def until_begun(self, loader: Any) -> Iterator[None]:
        """Wraps code that consumes the pending state. If that code fails, the state is kept for the
        next attempt, and the generators are restored."""
        resume, pending = self.resume, pending_of(loader)
        found = Sources(loader).capture(everything=False) if resume is not None else {}
        try:
            yield
        except BaseException:
            if self.resume is None:
                self.resume = resume
                set_pending(loader, pending)
                Sources(loader).set_own(found)
            raise

    def take(self, loader: Any) -> State | None:
        """Returns the state to resume from, once."""
        state, self.resume = self.resume, None
        if state is not None:
            set_pending(loader, None)
        return state


def in_sequence(loader: Any) -> bool:
    """Whether a loader reads its samples in the same order in each epoch. Such a loader has no use for
    what it would cache in the place of what another job uses: it comes to it last."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler):
        return not sampler.shuffle
    return type(sampler) is SequentialSampler


def pending_of(loader: Any) -> State | None:
    """The argument of ``load_state_dict()``, until an iterator resumes from it."""
    pending: State | None = vars(loader).get("pending_state")
    return pending


def set_pending(loader: Any, state: State | None) -> None:
    """Sets the loader's attribute, even if its class refuses attributes."""
    try:
        loader.pending_state = state
    except Exception:
        vars(loader)["pending_state"] = state


def memo_of(loader: Any) -> Memo:
    """The loader's memo; it lives as long as the loader. A copied or rebuilt loader loads the
    pending state that it finds among its attributes."""
    key = id(loader)
    found = _memos.get(key)
    if found is not None and found[0]() is loader:
        return found[1]
    memo = Memo(loader)
    _memos[key] = (weakref.ref(loader, lambda _: _memos.pop(key, None)), memo)
    pending = pending_of(loader)
    if pending is not None:
        set_pending(loader, None)  # load_state_dict() sets it again if it fits
        loader.load_state_dict(pending)
    return memo
