"""The order of an epoch in which cached samples may come earlier, each sample exactly once.

Several jobs on one data set read less if each takes what another has just cached. So the trainer swaps within the
sampler's order. It issues a cached sample that this epoch has not had yet, chosen at random. If there is none, it
issues the next sample of the sampler's order. A position of that order is issued once, whatever the cache holds; so
is each sample.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .._cache import Store


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
