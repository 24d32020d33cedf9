"""Implements ``cache_reorder=True``: cached samples may come earlier than in the sampler's order.

The trainer draws the whole epoch from the sampler when it starts, and keeps the sizes of batches. Each
batch is filled when it is planned (``minato/cache/order.py`` chooses). So it is fixed before which samples
``drop_last`` leaves out, a distributed sampler pads, and this rank gets. Samples are seeded
by their index, so that what they draw does not depend on when they come.

Only random orders are changed. If an order must be kept, the seeds are those of positions, as without
``cache_reorder``.
"""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
)

from ..cache.order import Following, Order
from ..epoch_progress import Progress

if TYPE_CHECKING:
    from .across_iterators import Memo

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
        if self._kept is not None and not memo.warned_of_order:
            memo.warned_of_order = True
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
