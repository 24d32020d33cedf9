"""What one epoch has delivered: counted while it runs, and what a state tells of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data.dataloader import _DatasetKind

from .seeding.ranks import Ranks
from .stateful import Kept


@dataclass
class Progress:
    """What one epoch has handed to the caller so far, and how it began."""

    epoch: int = 0
    base_seed: int | None = None
    persistent: bool = False
    user_epoch: int = 0  # 1 + what set_epoch was told; 0: nothing
    #: the same of what workers' copies of the dataset are told; None: it is not known yet
    dataset_epoch: int | None = None
    generators: dict[str, bytes] | None = None  # as the epoch found them; None: not begun
    head: int = 0  # all batches before this number were delivered
    beyond: set[int] = field(default_factory=set)  # and these after it
    by_worker: list[int] | None = None  # iterable datasets: batches of each worker
    sampler: Any = None  # what watches its sampler: see iterators/sampler_states.py
    kept: list[Kept] = field(default_factory=list)  # what each one's dataset says of itself
    failed: int = 0  # samples that were left out or replaced, of the batches delivered
    draws_late: bool = False  # its sampler, from a global generator as it goes
    finished: bool = False
    lives_on: bool = False  # the dataset's copy, into the next epoch
    dataset_length: int | None = None  # when the epoch began, where it says
    early: bool = False  # begun while the one before it ends, and nobody has asked for it yet
    sampler_epoch: int | None = None  # what the sampler was told by its own set_epoch
    ranks: Ranks | None = None  # that share the epoch; None: not begun
    unit: str = "batch"  # what numbers count: "batch", or "sample" for batching="ready"

    def delivered(self, number: int, worker: int = 0) -> None:
        if self.by_worker is not None:
            self.by_worker[worker] += 1
            return
        self.delivered_run(number, 1)

    def delivered_run(self, first: int, count: int) -> None:
        """So many numbers, one after the other."""
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
        """Whether a batch was delivered; of an iterable dataset, that one is counted off."""
        if self.by_worker is None:
            return self.has(number)
        if self.by_worker[worker] == 0:
            return False
        self.by_worker[worker] -= 1
        return True

    def turn(self) -> int:
        """The worker whose batch is the next in torch's order: behind the last of those that
        have delivered most."""
        counts = self.by_worker or [0]
        if not any(counts):
            return 0
        return (len(counts) - counts[::-1].index(max(counts))) % len(counts)

    def copy(self) -> Progress:
        by_worker = None if self.by_worker is None else list(self.by_worker)
        return replace(self, beyond=set(self.beyond), by_worker=by_worker)

    def check_end(self, number: int) -> None:
        """The sampler gave `number` of them; ValueError when fewer than were delivered."""
        most = max([self.head - 1, *self.beyond])
        if number <= most:
            raise ValueError(
                f"the state says that {self.unit} {most} was delivered, but the sampler gave "
                f"only {number}: it is not the sampler that the state was taken with"
            )

    @property
    def count(self) -> int:
        if self.by_worker is not None:
            return sum(self.by_worker)
        return self.head + len(self.beyond)


def length_of(loader: Any) -> int | None:
    """Of its dataset, where that says."""
    if loader._dataset_kind == _DatasetKind.Iterable:
        return None  # asking may cost, and the answer may be a guess
    try:
        return len(loader.dataset)
    except Exception:  # with a sampler torch asks for none
        return None


def title_of(loader: Any) -> str:
    """The loader by its dataset, for headings."""
    length = length_of(loader)
    size = "" if length is None else f" ({length} samples)"
    return (
        f"{type(loader).__name__} of {type(loader.dataset).__name__}{size}, "
        f"batch_size={loader.batch_size}, num_workers={loader.num_workers}"
    )
