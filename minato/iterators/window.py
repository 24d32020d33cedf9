"""How many batches are planned ahead: torch's prefetch window, and more where that is harmless."""

from __future__ import annotations

from typing import Any

import torch

from .._core import CostModel, Engine
from ..options import Options
from ..seeding.order_generators import sampler_of, sampler_of_torch

#: least and most batches drawn ahead of the steady window, for samplers where that changes nothing.
#: The slowest samples determine the number; costs and memory determine what starts.
LOOK_AHEAD_BATCHES = 128, 512
#: limit on indices drawn ahead: at 0.1 us each, they fit between two batches
LOOK_AHEAD_INDICES = 1 << 17
#: batches between two decisions; below this time per batch, half of the reach is drawn at once, and
#: otherwise this many batches
LOOK_AGAIN_BATCHES, BULK_NS, FEW = 64, 1_000_000, 32
#: batches in flight per worker: a larger prefetch_factor would overflow the engine's counters
MOST_PER_WORKER = 1 << 16


def per_worker(loader: Any) -> int:
    """The loader's prefetch_factor, limited to what the engine can count."""
    factor: int = loader.prefetch_factor
    return min(factor, MOST_PER_WORKER)


def _is_fixed(order: Any) -> bool:
    """Whether no program can change it while it is read."""
    return type(order) in (int, str, range) or (
        type(order) is tuple and all(map(_is_fixed, order))
    )


def may_look_ahead(loader: Any) -> bool:
    """Whether drawing indices early changes nothing: for torch's own samplers, and for an order
    that cannot change, which a list can."""
    sampler, own = sampler_of(loader), sampler_of_torch(loader)
    if type(loader.batch_sampler) not in (type(None), torch.utils.data.BatchSampler):
        return _is_fixed(loader.batch_sampler)
    if type(sampler) is torch.utils.data.SubsetRandomSampler:
        return _is_fixed(sampler.indices)  # it looks them up one by one
    if type(sampler) is torch.utils.data.RandomSampler and sampler.generator is not None:
        # It may draw again in the middle of an epoch. If the program then leaves the epoch early,
        # its generator would not be where torch leaves it.
        source: Any = sampler.data_source
        own = own and not sampler.replacement and sampler.num_samples == len(source)
    return own or _is_fixed(sampler)


class Window:
    """The prefetch window. Counts in batches of batch_size samples."""

    def __init__(
        self,
        loader: Any,
        options: Options,
        costs: CostModel,
        *,
        hinted: bool,
        batch_size: int = 1,
        shared_buffers: bool = False,
    ) -> None:
        self.far = may_look_ahead(loader) and not shared_buffers
        self.batch_size = batch_size
        self.bulk = 1  # batches drawn at a time beyond the window
        self.quick = False  # a batch is made before a whole look-ahead is planned
        self._costs = costs
        self._costs_known = hinted
        self._per_worker = per_worker(loader)
        self._workers: int = loader.num_workers
        self._moves = options.bounds(self._workers)[2] > self._workers
        self._engine: Engine | None = None  # set if the number of workers changes
        self._reach = 0
        self._looked = -LOOK_AGAIN_BATCHES  # sequence number of the last decision

    def watch(self, engine: Engine) -> None:
        """From now on, the window grows with the number of workers."""
        if self._moves:
            self._engine = engine

    def size(self) -> int:
        """torch's prefetch window for the current number of workers."""
        workers = self._workers
        if self._engine is not None:
            scheduler = self._engine.scheduler()
            workers = max(workers, scheduler["active"] if scheduler else 0)
        return self._per_worker * workers

    def knows_costs(self) -> bool:
        """Whether any costs are known. Before that, no tasks are planned beyond the window, because
        the size of tasks depends on costs."""
        if not self._costs_known:
            self._costs_known = self._costs.summary()["samples"] > 0
        return self._costs_known

    def reach(self, sequence: int) -> int:
        """How many batches to plan ahead: three times the batches that pass while the slowest
        sample is made. Then a slow sample starts in time and does not delay the end of the epoch.
        Decided once for many batches.

        The time per batch determines how many are drawn at once. Each call of the engine wakes
        sleeping workers. This costs more than drawing if batches are small, and runs on cold caches
        if steps are long."""
        if sequence - self._looked >= LOOK_AGAIN_BATCHES:
            self._looked = sequence
            costs, (least, most) = self._costs.summary(), LOOK_AHEAD_BATCHES
            batch = costs["mean_ns"] * self.batch_size / self._workers
            slow = 3 * costs["p995_ns"] / batch if batch > 0 else 0
            most = min(most, LOOK_AHEAD_INDICES // self.batch_size)
            self._reach = int(min(max(slow, least), most))
            half = self._reach // 2
            self.bulk = min(FEW, half) if batch > BULK_NS else half
            self.quick = 0 < batch <= BULK_NS
        return self._reach
