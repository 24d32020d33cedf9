"""How many batches are planned ahead: torch's window, and further where that is harmless."""

from __future__ import annotations

from typing import Any

import torch

from .._core import CostModel, Engine
from ..options import Options
from ..seeding.order_generators import sampler_of, sampler_of_torch

#: batches drawn ahead of the steady window from samplers where that changes nothing; what
#: may start is decided by costs and memory. As far as the slowest samples ask for, in bounds.
LOOK_AHEAD_BATCHES = 128, 512
#: indices drawn ahead in all: at 0.1 us each they are drawn between two batches
LOOK_AHEAD_INDICES = 1 << 17
#: how often it is decided how far; up to which batch many are drawn at a time, and else how many
LOOK_AGAIN_BATCHES, BULK_NS, FEW = 64, 1_000_000, 32
#: batches in flight for each worker: a larger prefetch_factor would not fit the engine's counters
MOST_PER_WORKER = 1 << 16


def per_worker(loader: Any) -> int:
    """The loader's prefetch_factor, as far as it makes a difference."""
    factor: int = loader.prefetch_factor
    return min(factor, MOST_PER_WORKER)


def may_look_ahead(loader: Any) -> bool:
    """Whether drawing indices early changes nothing: torch's own samplers only."""
    sampler, own = sampler_of(loader), sampler_of_torch(loader)
    if type(sampler) is torch.utils.data.RandomSampler and sampler.generator is not None:
        # It draws again in the middle of an epoch: an early break would leave the caller's
        # generator elsewhere than torch does.
        source: Any = sampler.data_source
        own = own and not sampler.replacement and sampler.num_samples == len(source)
    return own


class Window:
    """Counts in batches, of batch_size samples."""

    def __init__(
        self,
        loader: Any,
        options: Options,
        costs: CostModel,
        *,
        hinted: bool,
        batch_size: int = 1,
    ) -> None:
        self.far = may_look_ahead(loader)
        self.batch_size = batch_size
        self.bulk = 1  # drawn at a time beyond the window
        self._costs = costs
        self._costs_known = hinted
        self._per_worker = per_worker(loader)
        self._workers: int = loader.num_workers
        self._moves = options.bounds(self._workers)[2] > self._workers
        self._engine: Engine | None = None  # where the number of workers moves
        self._reach = 0
        self._looked = -LOOK_AGAIN_BATCHES  # when that was decided last, by sequence

    def watch(self, engine: Engine) -> None:
        """From here on the window grows with the number of workers."""
        if self._moves:
            self._engine = engine

    def size(self) -> int:
        """Torch's prefetch window for the workers there are."""
        workers = self._workers
        if self._engine is not None:
            scheduler = self._engine.scheduler()
            workers = max(workers, scheduler["active"] if scheduler else 0)
        return self._per_worker * workers

    def knows_costs(self) -> bool:
        """Whether anything is known of costs: before that nothing beyond the window is cut
        into tasks, because the cut follows costs."""
        if not self._costs_known:
            self._costs_known = self._costs.summary()["samples"] > 0
        return self._costs_known

    def reach(self, sequence: int) -> int:
        """The batch from which a slow sample may have to start now, to be ready in time or not
        to end the epoch: three times the batches that go by while one is made. Looked at
        once for many of them.

        How many are drawn at a time follows from how long one takes: each visit to the
        engine wakes sleeping workers, which for small batches costs more than they do, and
        comes to cold caches where steps are long."""
        if sequence - self._looked >= LOOK_AGAIN_BATCHES:
            self._looked = sequence
            costs, (least, most) = self._costs.summary(), LOOK_AHEAD_BATCHES
            batch = costs["mean_ns"] * self.batch_size / self._workers
            slow = 3 * costs["p995_ns"] / batch if batch > 0 else 0
            most = min(most, LOOK_AHEAD_INDICES // self.batch_size)
            self._reach = int(min(max(slow, least), most))
            half = self._reach // 2
            self.bulk = min(FEW, half) if batch > BULK_NS else half
        return self._reach
