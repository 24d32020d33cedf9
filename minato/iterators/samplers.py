"""An epoch's indices as they are drawn: states of samplers, and their order.

A sampler may have ``state_dict()`` and ``load_state_dict(state)``. It is ahead of delivery, so it is
asked after each index that it yields. That answer
becomes part of the loader's state once everything up to the index is delivered. To resume, the
sampler loads that state and yields what comes after it; earlier indices are not drawn again.

Samplers without a state are run again from the generators that they draw from:
minato/seeding/order_generators.py. If a sampler draws from a global generator while it is iterated,
its order depends on what the program draws in the meantime, so the generators' initial states do not
reproduce it.

With ``cache_reorder=True`` cached samples may come earlier than in the sampler's order. The trainer
draws the whole epoch from the sampler when it starts, and keeps the sizes of batches. Each
batch is filled when it is planned (``minato/cache/order.py`` chooses). So it is fixed before which samples
``drop_last`` leaves out, a distributed sampler pads, and this rank gets. Samples are seeded
by their index, so that what they draw does not depend on when they come. Only random orders are
changed. If an order must be kept, the seeds are those of positions, as without ``cache_reorder``.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import sys
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler
from torch.utils.data.dataloader import _DatasetKind

from ..cache.order import Following, Order
from ..dataset_calls import is_stateful
from ..epoch_progress import Progress
from ..errors import program_level
from ..option_values import option
from ..seeding.order_generators import batch_size_of, fingerprint, sampler_of
from ..stateful import load_state
from ..time_limits import TimeShare
from ..typing import State
from .across_iterators import Memo, Said

#: nanoseconds: if an answer takes less, the sampler is asked after each index
CHEAP_NS = 50_000
#: largest share of the time for slower answers
SHARE = 0.1
#: size limit of the stored answers; past it, the next is asked for after some were delivered
MOST_BYTES = 32 << 20


class SamplerStates:
    """One loader's samplers: which of them is asked, and what the current epoch resumes from."""

    def __init__(self, loader: Any, memo: Memo, unit: str) -> None:
        self._memo = memo
        self._index_sampler = loader._index_sampler
        parts = (self._index_sampler, sampler_of(loader))
        self._sampler = next((part for part in parts if is_stateful(part)), None)
        #: a custom batch sampler may have drawn more from the sampler than it has yielded
        inner = self._sampler is not None and self._sampler is not parts[0]
        ahead = inner and type(parts[0]) is not BatchSampler
        #: samples of a full batch; a smaller batch is the last, so its sampler has ended
        self._full = (batch_size_of(loader) or 0) if loader._auto_collation else None
        self._used = loader._dataset_kind == _DatasetKind.Map
        #: ask after each index. If batches are made again or samples are replaced, all indices are
        #: needed, and what counts is the state at the start of the epoch
        self._each = (
            self._used
            and unit == "batch"
            and not ahead
            and option(loader, "on_error") != "replace"
            and (loader.num_workers == 0 or option(loader, "scheduling") != "static")
        )
        self.start: State | None = None  # from a state, until its epoch has started

    def watched(
        self, indices: Iterator[Any], progress: Progress, rewind: Callable[[], None]
    ) -> Iterator[Any]:
        """Wraps the indices of an epoch and asks the sampler as they are drawn. rewind: sets the
        generators to their states before the epoch."""
        start, self.start = self.start, None
        if not self._used:
            return indices
        begin = self.begin(start) or Said(0, 0, b"")
        self._memo.sampler_end = None
        if start is not None and isinstance(begin.pickled, bytes) and begin.pickled:
            indices = self._told(begin.pickled, start["begins"], rewind)
        if self._sampler is None and not is_stateful(indices):
            return indices
        progress.sampler = watch = _Watch(self._ask, begin, progress, self._full, self._each)
        return _Watched(watch, begin, indices, self._ended)

    def begin(self, start: State | None) -> Said | None:
        """The sampler's state before the epoch that starts now. None if the last epoch was left in
        the middle."""
        if not self._used:
            return None
        if start is None:
            return self._memo.sampler_end
        if start["drawn"] and not self._each:
            warnings.warn(
                f"the state holds the sampler's state after {start['drawn']} of its "
                "indices, but this loader (scheduling='static', batching='ready', "
                "on_error='replace', or a custom batch sampler) needs all indices of the epoch. "
                "The sampler does not get its state and starts as the program has left it. Restore "
                "it, or resume with the options that the state was taken with",
                stacklevel=program_level(),
            )
            return None
        return Said(start["drawn"], start["position"], _pickled(start), start["begins"])

    def has_all(self, start: State) -> bool:
        """Whether all batches of a state's epoch were delivered, if that is known."""
        with contextlib.suppress(Exception):  # a sampler without a length
            delivered = start["delivered"] + len(start["delivered_beyond"])
            counts_batches = start["unit"] == "batch" and not start.get("origin")
            return counts_batches and bool(delivered >= len(self._index_sampler))
        return False

    def _ended(self, said: Said) -> None:
        self._memo.sampler_end = said

    def _ask(self, indices: Any) -> bytes:
        iterator = None if indices is self._sampler else indices
        parts: tuple[Any, ...] = (self._sampler, iterator)
        return pickle.dumps([part.state_dict() if is_stateful(part) else None for part in parts])

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


def _pickled(start: State) -> bytes:
    return pickle.dumps([start["sampler"], start["iterator"]])


class _Watch:
    """The states of a sampler in one epoch."""

    def __init__(
        self,
        ask: Callable[[Any], bytes],
        begin: Said,
        progress: Progress,
        full: int | None,
        each: bool,
    ) -> None:
        self._ask, self._progress, self._full, self._each = ask, progress, full, each
        self._said = deque([begin])
        self._drawn, self._position = begin.drawn, begin.position
        self._bytes = begin.size()
        self._end: Said | None = None
        self._time = TimeShare(SHARE, cheap_ns=CHEAP_NS)

    def gave(self, indices: Any, index: Any) -> None:
        """Records that an index was drawn. After an interrupt this is called again."""
        full, samples = self._full, 1
        if full is not None and hasattr(index, "__len__"):
            samples = len(index)
        drawn, position = self._drawn + 1, self._position + samples
        whole = full is None or samples >= full  # a smaller batch: it may have started anew
        if self._each and whole:
            self._ask_behind(indices, drawn, position)
        self._drawn, self._position = drawn, position

    def met_end(self, indices: Any) -> Said | None:
        """Asks for the state at the end; None if it is known."""
        if self._end is not None:
            return None
        self._end = Said(0, 0, self._asked(indices), True)
        return self._end

    def _asked(self, indices: Any) -> bytes | Exception:
        try:
            return self._ask(indices)
        except Exception as error:
            return error

    def _ask_behind(self, indices: Any, drawn: int, position: int) -> None:
        """Stores the sampler's state after an index, unless that takes much memory or time.
        Resuming then draws again from the last stored state."""
        while len(self._said) > 1 and self._said[1].drawn <= self._progress.head:
            self._bytes -= self._said.popleft().size()
        if self._bytes > MOST_BYTES and len(self._said) > 1:
            return
        if self._time.allows():
            with self._time:
                self._said.append(Said(drawn, position, self._asked(indices)))
                self._bytes += self._said[-1].size()

    def state(self) -> State | None:
        """The state after the last index up to which everything is delivered."""
        head = self._progress.head
        last = [one for one in self._said if one.drawn <= head][-1]
        if self._progress.finished and self._end is not None:
            last = self._end
        return last.state()


class _Watched(Iterator[Any]):
    """An epoch's indices; placeholders stand for those delivered before the state was taken.
    Unlike a generator, it continues after an error if the sampler's iterator does."""

    def __init__(
        self, watch: _Watch, begin: Said, indices: Iterator[Any], ended: Callable[[Said], None]
    ) -> None:
        self._watch, self._indices, self._ended = watch, indices, ended
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
                said = self._watch.met_end(self._indices)
                if said is not None:
                    self._ended(said)
                raise
        self._watch.gave(self._indices, self._drawn[0])
        return self._drawn.pop()


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


log = logging.getLogger("minato")

#: makes what follows the cache during an epoch of these indices; None: nothing is to be followed
Follow = Callable[[np.ndarray], "Following | None"]


def why_kept(loader: Any) -> str | None:
    """Why a loader's order must not be changed; None: it is random, and each index comes once."""
    batches, sampler = loader.batch_sampler, loader.sampler
    if batches is not None:
        if type(batches) is not BatchSampler:
            return f"{type(batches).__name__} may choose which samples come together"
        sampler = batches.sampler
    kind: Any = type(sampler)
    if kind is RandomSampler:
        return "its RandomSampler draws with replacement" if sampler.replacement else None
    if kind is SubsetRandomSampler:
        return None
    if isinstance(sampler, DistributedSampler) and kind.__iter__ is DistributedSampler.__iter__:
        return None if sampler.shuffle else "its DistributedSampler does not shuffle"
    return f"{kind.__name__} is not a sampler that shuffles"


def share_of(stats: dict[str, int]) -> int:
    """How many samples a job may choose before workers read them: its part of those that fit in
    the cache. If all jobs together choose more, many are recycled before they are read. Reading
    them again recycles others, so the jobs soon read most samples several times."""
    if not stats["entries"]:
        return sys.maxsize
    fit = stats["entries"] * stats["bytes"] // max(1, stats["used_bytes"])
    return fit // stats["jobs"]


class Chosen(Iterator[Any]):
    """An epoch's indices, chosen as they are drawn.

    Attributes:
        order: which of the sampler's positions were drawn; None: its order is kept.
        most_ahead: how many batches may be in flight.
    """

    order: Order | None = None
    most_ahead = sys.maxsize

    def __init__(
        self, indices: Iterator[Any], batched: bool, progress: Progress, follow: Follow,
        before: bytes | None, seed: int,
    ) -> None:  # fmt: skip
        """before: a bit for each position that was delivered before, of a state."""
        self._indices, self._batched, self._follow, self._seed = indices, batched, follow, seed
        self._head, self._beyond = progress.head, frozenset(progress.beyond)
        self._before = before
        self._drawn: list[Any] = []  # what the sampler gave
        self._read = False  # all of it
        self._flat = array("q")  # index by position
        self._seen = np.zeros(0, np.bool_)  # positions delivered before
        self._following: Following | None = None
        self._drawing: list[int] = []  # positions of the next batch so far
        self._positions: dict[int, array[int]] = {}  # by number of the batch
        self._number = 0  # of the next batch

    @property
    def by_index(self) -> bool:
        """Whether samples are seeded by their indices; known once an index was drawn."""
        return self.order is not None

    @property
    def swaps(self) -> bool:
        """Whether cached samples may come earlier."""
        return self._following is not None

    def __next__(self) -> Any:
        if not self._read:
            self._begin()
        number = self._number
        if number >= len(self._drawn):
            if self._following is not None:
                self._following.ended()
            raise StopIteration
        index, order = self._drawn[number], self.order
        if order is None or self._was_delivered(number):
            self._number = number + 1
            return index
        return self._chosen(order, number, len(index) if self._batched else 1)

    def _was_delivered(self, number: int) -> bool:
        """Returns whether a batch was delivered before this process started. The index of such a
        batch is only counted."""
        return number < self._head or number in self._beyond

    def _chosen(self, order: Order, number: int, size: int) -> Any:
        drawing, flat = self._drawing, self._flat
        if self._following is not None:
            order.cached(*self._following.news())
        while len(drawing) < size:
            order.draw(drawing)
        positions, chosen = array("q", drawing), [flat[position] for position in drawing]
        # No call from here on: no interrupt comes between these assignments.
        self._positions[number], self._drawing, self._number = positions, [], number + 1
        return chosen if self._batched else chosen[0]

    # ---- the start of an epoch -----------------------------------------------------------

    def _begin(self) -> None:
        for index in self._indices:
            self._drawn += [index]
        flat = self._flattened()
        if flat is None or len(np.unique(flat)) < len(flat):
            if self._before is not None:
                raise ValueError(
                    "the state was taken with cache_reorder=True in an epoch in which no sample repeats; "
                    "this loader's sampler gives others. Load the state into a loader with that sampler"
                )
            self._read = True
            return
        self._flat = array("q", flat.tobytes())
        seen, apart = self._delivered_before(len(flat)), np.zeros(0, np.int64)
        following, news = self._follow(flat), None
        if following is not None:
            news, apart = following.news(), np.flatnonzero(following.apart())
            size = len(self._drawn[0]) if self._batched else 1
            self.most_ahead = max(1, following.share // size)
        order = Order(len(flat), np.flatnonzero(seen).tolist(), apart.tolist(), self._seed)
        if news is not None:
            order.cached(*news)
        # No call from here on.
        self._seen, self._following, self.order, self._read = seen, following, order, True

    def _flattened(self) -> np.ndarray | None:
        """All indices; None: not all are of type int, or one is negative."""
        if not self._batched:
            flat = self._drawn
        elif all(type(batch) is list for batch in self._drawn):
            flat = [index for batch in self._drawn for index in batch]
        else:
            return None
        if not flat or any(type(index) is not int or index < 0 for index in flat):
            return None
        return np.array(flat, np.int64)

    def _delivered_before(self, n: int) -> np.ndarray:
        """A bool for each position. A state from a loader that keeps its order says it by batches."""
        sizes = [len(batch) if self._batched else 1 for batch in self._drawn]
        if self._before is None:
            each = [self._was_delivered(number) for number in range(len(sizes))]
            return np.repeat(np.array(each, np.bool_), sizes)
        if len(self._before) != (n + 7) // 8:
            raise ValueError(
                f"the state was taken in an epoch of about {8 * len(self._before)} samples, but the "
                f"sampler gives {n}: it is not the sampler with which the state was taken. Load the "
                "state into a loader with that sampler"
            )
        return np.unpackbits(np.frombuffer(self._before, np.uint8), count=n).astype(np.bool_)

    # ---- state ---------------------------------------------------------------------------

    def delivered(self, progress: Progress) -> bytes | None:
        """A bit for each position of the sampler's order that was delivered; None: the order is
        kept, so the numbers of batches say it."""
        if self.order is None:
            return self._before
        seen = self._seen.copy()
        for number, positions in self._positions.items():
            if progress.has(number):
                seen[np.frombuffer(positions, np.int64)] = True
        return np.packbits(seen).tobytes()


class Reordering:
    """The option of one iterator's loader."""

    def __init__(self, loader: Any, memo: Memo) -> None:
        self._memo = memo
        self._batched = bool(loader._auto_collation)
        self._kept = why_kept(loader)
        #: a state's bits, until its epoch has started
        self.before: bytes | None = None
        if self._kept is not None and memo.warns_of("order"):
            log.info("cache_reorder=True keeps the order of this loader: %s", self._kept)

    def watched(self, indices: Iterator[Any], progress: Progress, seed: int) -> Iterator[Any]:
        """An epoch's indices. Call it where the epoch starts."""
        before, self.before = self.before, None
        if self._kept is not None:
            return indices
        chosen = Chosen(indices, self._batched, progress, self._follow, before, seed)
        progress.chosen = chosen
        return chosen

    def _follow(self, indices: np.ndarray) -> Following | None:
        """Only while another job is attached: a job that is alone reads no less with swaps."""
        cached = self._memo.cached
        store = cached.cache._attached() if cached is not None else None
        stats = store.stats() if store is not None else {"jobs": 0}
        if cached is None or store is None or stats["jobs"] < 2:
            return None
        keys = cached.keys()
        if keys is None or int(indices.max()) >= len(keys.words):
            return None
        return Following(store, keys, indices, share_of(stats))
