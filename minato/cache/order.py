"""The order of an epoch in which cached samples may come earlier, each sample exactly once.

Several jobs on one data set read less if each takes what another has just cached. So the trainer swaps within the
sampler's order. It issues a cached sample that this epoch has not had yet, chosen at random. If there is none, it
issues the next sample of the sampler's order. A position of that order is issued once, whatever the cache holds; so
is each sample.

The trainer draws the whole epoch from the sampler when it starts, and keeps the sizes of batches. Each batch is
filled when it is planned. So it is fixed before which samples ``drop_last`` leaves out, a distributed sampler pads,
and this rank gets. Samples are seeded by their index, so that what they draw does not depend on when they come. Only
random orders are changed. If an order must be kept, the seeds are those of positions, as without
``cache_reorder``.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler

if TYPE_CHECKING:
    from .._cache import Store
    from ..epoch_progress import Progress


class Order:
    """Positions 0 to n - 1 of the sampler's order, each drawn once.

    Args:
        n: how many there are.
        seen: positions that were delivered before; they are not drawn.
        apart: positions whose samples cannot be cached. Swaps would push them to the end of the
            epoch, so they are spread evenly over it.
        seed: of the choice among cached ones.

    Attributes:
        drawn: how many were drawn.
        swaps: how many of them because they were cached.
    """

    def __init__(self, n: int, seen: Iterable[int] = (), apart: Iterable[int] = (), seed: int = 0) -> None:
        self._seen = bytearray(n)
        for position in seen:
            self._seen[position] = 1
        self._next = 0  # all before it are drawn, but for those apart
        self._ready: list[int] = []  # cached and not drawn
        self._at = array("q", [-1]) * n  # where each is in _ready
        self._generation = array("Q", [0]) * n  # of its value in the cache, where it is in _ready
        self._oldest = 0  # values of lower generations are gone
        self._apart = [position for position in apart if not self._seen[position]]
        self._is_apart = bytearray(n)
        for position in self._apart:
            self._is_apart[position] = 1
        self._next_apart = self._drawn_apart = 0
        self._total = n - sum(self._seen)
        self._random = random.Random(seed)
        self.drawn = self.swaps = 0

    def __len__(self) -> int:
        """How many are left."""
        return self._total - self.drawn

    def cached(self, positions: Iterable[tuple[int, int]], oldest: int = 0) -> None:
        """Positions that are in the cache, with the generations of their values there. oldest:
        values of lower generations are gone."""
        self._oldest = oldest
        seen, at, ready = self._seen, self._at, self._ready
        for position, generation in positions:
            self._generation[position] = generation
            if not seen[position] and at[position] < 0:
                place = len(ready)
                # No call from here on: no interrupt comes between the two.
                at[position] = place
                ready += [position]

    def draw(self, out: list[int]) -> None:
        """Appends a position to ``out``. An interrupt comes before or after all of it."""
        apart = self._apart_is_due()
        swap = -1 if apart else self._pick()
        position = swap
        if apart:
            position = self._following_apart()
        elif swap < 0:
            position = self._following()
        seen, at, ready = self._seen, self._at, self._ready
        place = at[position]
        # No call from here on: no interrupt comes between these statements.
        seen[position] = 1
        self.drawn += 1
        if self._is_apart[position]:
            self._drawn_apart += 1
        if swap >= 0:
            self.swaps += 1
        if place >= 0:
            last = ready[-1]
            ready[place] = last
            at[last] = place
            at[position] = -1
            del ready[-1]
        out += [position]

    def _pick(self) -> int:
        """A cached position at random; -1: there is none. Forgets those that are gone."""
        ready, at = self._ready, self._at
        while ready:
            place = int(self._random.random() * len(ready))
            position, last = ready[place], ready[-1]
            if self._generation[position] >= self._oldest:
                return position
            # No call from here on.
            ready[place] = last
            at[last] = place
            at[position] = -1
            del ready[-1]
        return -1

    def _following(self) -> int:
        """The next of the sampler's order, but for those apart."""
        seen, apart, position = self._seen, self._is_apart, self._next
        while seen[position] or apart[position]:
            position += 1
        self._next = position
        return position

    def _apart_is_due(self) -> bool:
        """Whether the next is one of those apart: after k of n samples, their share of k is drawn.
        So the last of them comes last, and of the others some are left until then."""
        many = len(self._apart)
        return many > 0 and self._drawn_apart < (self.drawn + 1) * many // self._total

    def _following_apart(self) -> int:
        at = self._next_apart
        while self._seen[self._apart[at]]:  # it was found in the cache after all
            at += 1
        self._next_apart = at
        return self._apart[at]


#: of samples that have no key
NO_KEY = 0


class Keys:
    """The keys of all samples of a data set: the first eight bytes of the digests of their values.

    Args:
        words: uint64, one for each index; NO_KEY: the sample has none.
    """

    def __init__(self, words: np.ndarray) -> None:
        self.words = words
        self._order = np.argsort(words, kind="stable")
        self._sorted = words[self._order]
        #: what was found in the cache at any time, and what was made without being found there later
        self.stored = np.zeros(len(words), np.bool_)
        self.made = np.zeros(len(words), np.bool_)

    def indices_of(self, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The indices of the samples with these keys, and for each which of the words it has.
        Samples may share a key; words of other data sets have no index."""
        left = np.searchsorted(self._sorted, words, "left")
        counts = np.searchsorted(self._sorted, words, "right") - left
        which = np.repeat(np.arange(len(words)), counts)
        first = np.repeat(left - np.cumsum(counts) + counts, counts)
        return self._order[first + np.arange(len(which))], which

    def apart(self, indices: np.ndarray) -> np.ndarray:
        """Which of these cannot be cached: they have no key, or were made while values were stored,
        and never came to the cache."""
        without: np.ndarray = self.words[indices] == NO_KEY
        without |= self.made[indices] & ~self.stored[indices]
        return without


class Following:
    """Holds what the cache holds of one epoch's samples, as it changes.

    Args:
        store: the cache's file.
        keys: of the data set.
        indices: the epoch's, by position; none twice.
        share: how many samples this job may choose before workers read them.
    """

    def __init__(self, store: Store, keys: Keys, indices: np.ndarray, share: int) -> None:
        self._store, self._keys, self._indices, self._cursor = store, keys, indices, b""
        self.share = share
        self._position = np.full(len(keys.words), -1, np.int64)
        self._position[indices] = np.arange(len(indices))

    def news(self) -> tuple[Iterable[tuple[int, int]], int]:
        """The arguments of ``Order.cached()``: what was stored since the last call; at first, what is
        there. After an error there is nothing any more."""
        try:
            stored, oldest, self._cursor = self._store.inserted(self._cursor)
        except (OSError, RuntimeError, MemoryError):  # readers find out the same, and say so
            return (), 2**64 - 1
        if not stored:
            return (), oldest
        entries = np.frombuffer(stored, np.uint64).reshape(-1, 2)
        indices, which = self._keys.indices_of(entries[:, 0])
        self._keys.stored[indices] = True
        positions = self._position[indices]
        here = positions >= 0
        generations = entries[which[here], 1]
        return zip(positions[here].tolist(), generations.tolist()), oldest

    def apart(self) -> np.ndarray:
        """For each position, whether its sample cannot be cached."""
        return self._keys.apart(self._indices)

    def ended(self) -> None:
        """All of the epoch was issued."""
        self._keys.made[self._indices] = True


# ---- the indices of an epoch in that order -------------------------------------------------------

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
        self, indices: Iterator[Any], batched: bool, progress: Progress, follow: Follow | None,
        before: bytes | None, seed: int,
    ) -> None:  # fmt: skip
        """follow: None: no cache is followed. before: a bit for each position that was delivered
        before, of a state."""
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
        following, news = self._follow(flat) if self._follow is not None else None, None
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
