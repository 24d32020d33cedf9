"""Counts what an epoch has delivered so far; state_dict() reports it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data.dataloader import _DatasetKind

from .seeding.ranks import Ranks
from .stateful import Kept


@dataclass
class Progress:
    """Holds what one epoch has delivered so far, and how it started."""

    epoch: int = 0  # of the seeds: without persistent workers 0 in each
    base_seed: int | None = None
    persistent: bool = False
    user_epoch: int = 0  # 1 + the argument of set_epoch(); 0: it was not called
    #: the same for workers' copies of the dataset; None: not known yet
    dataset_epoch: int | None = None
    generators: dict[str, bytes] | None = None  # states before the epoch; None: not started
    head: int = 0  # all batches before this number are delivered
    beyond: set[int] = field(default_factory=set)  # and these after it
    by_worker: list[int] | None = None  # iterable datasets: batches delivered by each worker
    sampler: Any = None  # watches the epoch's sampler; see iterators/position.py
    kept: list[Kept] = field(default_factory=list)  # state_dict() of each worker's dataset
    failed: int = 0  # samples skipped or replaced in delivered batches
    #: the sampler draws from a global generator while it is iterated
    draws_while_iterated: bool = False
    finished: bool = False
    lives_on: bool = False  # the dataset's copy is used for the next epoch, too
    dataset_length: int | None = None  # when the epoch started, if the dataset has a length
    early: bool = False  # started during the previous epoch and not asked for yet
    sampler_epoch: int | None = None  # argument of the sampler's own set_epoch()
    origin: int = 0  # where an ElasticSampler went on in the order of all ranks
    first: int = 0  # position of its first sample from there in this rank's order
    ranks: Ranks | None = None  # the ranks that share the epoch; None: not started
    chosen: Any = None  # with cache_reorder=True: which samples batches have; cache/order.py
    unit: str = "batch"  # what the numbers count: "batch", or "sample" for batching="ready"
    number: int = 0  # of the loader's epoch, as stats() counts and the trace shows it

    def delivered(self, number: int, worker: int = 0) -> None:
        if self.by_worker is not None:
            self.by_worker[worker] += 1
            return
        self.delivered_run(number, 1)

    def delivered_run(self, first: int, count: int) -> None:
        """Records a run of consecutive numbers as delivered."""
        if first == self.head and not self.beyond:
            self.head += count
            return
        self.beyond.update(range(first, first + count))
        while self.head in self.beyond:
            self.beyond.remove(self.head)
            self.head += 1

    def has(self, number: int) -> bool:
        return number < self.head or number in self.beyond

    def takes(self, number: int, worker: int) -> bool:
        """Whether a batch was delivered; for an iterable dataset, also subtracts it."""
        if self.by_worker is None:
            return self.has(number)
        if self.by_worker[worker] == 0:
            return False
        self.by_worker[worker] -= 1
        return True

    def turn(self) -> int:
        """The worker that delivers next in torch's order: the one after the last worker with the
        highest count."""
        counts = self.by_worker or [0]
        if not any(counts):
            return 0
        return (len(counts) - counts[::-1].index(max(counts))) % len(counts)

    def copy(self) -> Progress:
        by_worker = None if self.by_worker is None else list(self.by_worker)
        return replace(self, beyond=set(self.beyond), by_worker=by_worker)

    def check_end(self, number: int) -> None:
        """Raises ValueError if the sampler gave fewer batches (`number`) than were delivered."""
        most = max([self.head - 1, *self.beyond])
        if number <= most:
            raise ValueError(
                f"the state says that {self.unit} {most} was delivered, but the sampler gave "
                f"only {number}: it is not the sampler with which the state was taken. Load the "
                "state into a loader with that sampler"
            )

    @property
    def by_index(self) -> bool:
        """Whether samples are seeded by their indices; known once an index was drawn."""
        return self.chosen is not None and self.chosen.by_index

    @property
    def count(self) -> int:
        if self.by_worker is not None:
            return sum(self.by_worker)
        return self.head + len(self.beyond)


def length_of(loader: Any) -> int | None:
    """Length of the loader's dataset, or None."""
    if loader._dataset_kind == _DatasetKind.Iterable:
        return None  # computing it may be expensive, and the result may be an estimate
    try:
        return len(loader.dataset)
    except Exception:  # torch does not need a length if there is a sampler
        return None


def title_of(loader: Any) -> str:
    """The loader by its dataset, for headings."""
    length = length_of(loader)
    size = "" if length is None else f" ({length} samples)"
    return (
        f"{type(loader).__name__} of {type(loader.dataset).__name__}{size}, "
        f"batch_size={loader.batch_size}, num_workers={loader.num_workers}"
    )
