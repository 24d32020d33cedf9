"""The samples of an epoch, their order, and the rest of it after a resume."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch.utils.data import Dataset, DistributedSampler, Sampler

from unet3d.data import mix


class DeliveryError(RuntimeError):
    """A loader lost or repeated samples."""


def epoch_sampler(dataset: Dataset, seed: int, rank: int = 0,
                  world: int = 1) -> DistributedSampler:
    """torch's own sampler: a permutation determined by (seed, epoch), dealt out to ranks.

    Call ``set_epoch`` before each epoch. If the length does not divide by `world`, the
    permutation's first samples are repeated at its end, as in the reference, so that every
    rank takes equally many steps.
    """
    return DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=True,
                              seed=mix(seed) & 0x7FFFFFFF, drop_last=False)


def epoch_order(dataset: Dataset, seed: int, epoch: int) -> list[int]:
    """The permutation of `epoch` before it is dealt out."""
    sampler = epoch_sampler(dataset, seed)
    sampler.set_epoch(epoch)
    return list(sampler)


class RestSampler(Sampler[int]):
    """A given list of indices: the rest of an epoch."""

    def __init__(self, indices: Sequence[int]) -> None:
        self.indices = list(indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def remaining(order: Sequence[int], delivered: Iterable[int], rank: int = 0,
              world: int = 1) -> list[int]:
    """This rank's share of `order` less what all ranks together have `delivered`, filled up
    to equal shares like in `epoch_sampler`.

    With as many ranks as before and a loader that keeps the order, each rank resumes
    exactly where it stopped.
    """
    done = set(delivered)
    rest = [index for index in order if index not in done]
    return [*rest, *order[:-len(rest) % world]][rank::world]


def expected_count(planned: int, batch_size: int, drop_last: bool) -> int:
    """How many of `planned` samples a loader must deliver."""
    return planned - planned % batch_size if drop_last else planned


def check_delivery(planned: Sequence[int], delivered: Sequence[int], batch_size: int,
                   drop_last: bool, epoch: int) -> None:
    """Raise DeliveryError unless exactly the planned samples were delivered, each as often as
    planned (once, except samples that fill up the last round of all ranks)."""
    want = expected_count(len(planned), batch_size, drop_last)
    plan, counts = Counter(planned), Counter(delivered)
    foreign = sorted(set(counts) - set(plan))
    repeated = sorted(index for index, n in counts.items() if n > plan[index] > 0)
    missing = sorted((plan - counts).elements())
    if drop_last and len(missing) == len(planned) - want:
        missing = []
    if len(delivered) != want or repeated or foreign or missing:
        raise DeliveryError(
            f"epoch {epoch}: {len(delivered)} samples delivered, {want} expected; "
            f"missing {missing[:10]}, repeated {repeated[:10]}, never asked for "
            f"{foreign[:10]} (first ten of each)")
