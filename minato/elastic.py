"""The position of all ranks together in an epoch, from which any number of ranks can go on.

All ranks take ``world * batch`` samples of the epoch's order at a time. So the number of samples
that they have had together follows from one rank's number of batches, if the sampler says how it
deals samples to ranks. A sampler of torch's goes on at a multiple of what the ranks then take at a
time. ``ElasticSampler`` goes on anywhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler
from torch.utils.data.dataloader import _DatasetKind

from .dataset_calls import attribute
from .errors import program_level
from .option_values import option
from .seeding.order_generators import batch_size_of, sampler_epoch
from .seeding.ranks import (
    Ranks, batch_of_rank, deals_batches, is_megatrons, of_process, ranks_of, samplers_of,
)  # fmt: skip
from .typing import State

#: options that must have these values for a state to know the position
_DEFAULTS = {"scheduling": "balanced", "batching": "sampler", "cache_reorder": False}


class ElasticSampler(DistributedSampler[Any]):
    """Deals samples to ranks as torch's ``DistributedSampler`` does, and goes on from a state that
    another number of ranks has saved.

    The order is that of ``DistributedSampler`` with the same seed and epoch. Rank r takes the
    positions g of the order with ``g % num_replicas == r``. If the rest of the epoch is no multiple
    of the number of ranks, ``drop_last`` leaves out its last samples. Otherwise the order is
    repeated until all ranks have equally many. ``len()`` is that of a whole epoch.

    The random numbers of samples depend on ``seed``, the epoch and the position in the order, and
    on nothing else. So call ``set_epoch`` before each epoch.

    Args:
        dataset: what the indices are of; only its length matters.
        num_replicas, rank: as for ``DistributedSampler``. ``None``: those of the process group,
            or else of the launcher, or else one rank. They are read anew for each epoch.
        shuffle, seed, drop_last: as for ``DistributedSampler``.

    Raises:
        ValueError: if rank is not below the number of ranks.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.dataset: Any = dataset
        self._given = num_replicas, rank
        self.shuffle, self.seed, self.drop_last = shuffle, int(seed), drop_last
        self.epoch = self._origin = 0
        self._check()

    def _check(self) -> None:
        rank, world = self.rank, self.num_replicas
        if world < 1 or not 0 <= rank < world:
            raise ValueError(
                f"ElasticSampler: rank={rank} of num_replicas={world}; rank must be from 0 to "
                "num_replicas - 1"
            )

    @property
    def num_replicas(self) -> int:  # type: ignore[override]  # torch's is an attribute
        """The number of ranks."""
        return of_process().world if self._given[0] is None else self._given[0]

    @property
    def rank(self) -> int:  # type: ignore[override]
        """The rank of this process."""
        return of_process().rank if self._given[1] is None else self._given[1]

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """The number of samples of one rank in a whole epoch."""
        return self.total_size // self.num_replicas

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """The number of samples of all ranks in a whole epoch."""
        return len(self.dataset) + self.tail(0)

    def tail(self, origin: int) -> int:
        """How many samples are repeated at the end of an epoch that goes on at a position of the
        order; below 0: left out."""
        over = (len(self.dataset) - origin) % self.num_replicas
        return -over if self.drop_last or not over else self.num_replicas - over

    def start_at(self, origin: int) -> None:
        """Makes the next iteration go on at a position of the order."""
        self._origin = origin

    def __iter__(self) -> Iterator[int]:
        self._check()
        length, rank, world = len(self.dataset), self.rank, self.num_replicas
        origin, self._origin = self._origin, 0
        order: Any = range(length)
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order = torch.randperm(length, generator=generator).tolist()
        begin, end = origin + (rank - origin) % world, length + self.tail(origin)
        for place in range(begin, end, world):
            yield order[place % length]

    def __len__(self) -> int:
        return self.num_samples


def elastic_of(loader: Any) -> ElasticSampler | None:
    """The loader's ElasticSampler, if that deals the samples.

    Raises:
        ValueError: if a sampler around it deals its share to ranks once more.
    """
    if loader._dataset_kind == _DatasetKind.Iterable:
        return None
    around: list[Any] = []
    for part, _gives_batches in samplers_of(loader):
        if isinstance(part, ElasticSampler):
            shard = next(filter(deals_batches, around), None)
            if part.num_replicas > 1 and shard is not None:
                raise ValueError(
                    f"an ElasticSampler deals samples to {part.num_replicas} ranks, and "
                    f"{type(shard).__name__} around it deals each rank's share to ranks again, "
                    "so most samples would be left out. Give a sampler that does not deal "
                    "(shuffle=True), or do not let the framework shard the loader"
                )
            return part if all(type(one) is BatchSampler for one in around) else None
        around.append(part)
    return None


def why_unknown(loader: Any) -> str | None:
    """Why the position of all ranks in the epoch does not follow from that of one; None if it
    does."""
    if loader._dataset_kind == _DatasetKind.Iterable:
        return "the dataset is iterable"
    if loader.num_workers > 0 and not loader.in_order:
        return "in_order=False"
    for name, default in _DEFAULTS.items():
        if (value := option(loader, name)) not in (default, None):
            return f"{name}={value!r}"
    ranks = ranks_of(loader)
    if not ranks.dealt:
        return "the sampler does not say how it deals samples to ranks"
    if any(is_megatrons(part) for part, _gives_batches in samplers_of(loader)):
        return "Megatron's samplers go on from their consumed_samples"
    if batch_of_rank(loader, ranks) is None:
        return "the batch sampler does not say its batch size"
    return None


def position(loader: Any, state: State) -> int | None:
    """The number of samples of the epoch's order that all ranks together have received, if all have
    received as many batches as the rank of the state."""
    known = not state["delivered_beyond"] and state["order"] is None
    if not known or state["worker_states"] is not None or why_unknown(loader) is not None:
        return None
    ranks = Ranks(state["rank"], state["world"], state["block"])
    size = state["batch_size"]
    taken = size if size is not None and not _splits(loader) else batch_of_rank(loader, ranks)
    if taken is None or not ranks.dealt:
        return None
    length: int | None = state["dataset_length"]
    reached: int = state["origin"] + state["delivered"] * ranks.world * taken
    return reached if length is None else min(reached, length)


def _splits(loader: Any) -> bool:
    return bool(attribute(loader.batch_sampler, "split_batches"))


def misfit(loader: Any, state: State, theirs: Ranks, mine: Ranks) -> str | None:
    """What differs between a state and the loader, so that batches do not count alike; or None."""
    then, now = state["batch_size"], batch_size_of(loader)
    if theirs.world != mine.world:
        return f"on {theirs.world} ranks, but {mine.world} load now"
    if None not in (then, now) and then != now:
        return f"with batch_size={then}, but this loader has {now}"
    if state["origin"] and elastic_of(loader) is None:
        return "with an ElasticSampler in an epoch that it had resumed, but this loader has none"
    return None


def begun_anew(loader: Any, state: State, differs: str, mine: Ranks) -> dict[str, int]:
    """Fields of a state that make this loader go on where all ranks of the state were. differs:
    the result of misfit().

    Raises:
        ValueError: if the position is not known, or no batch of these ranks begins there.
    """
    said = f"the state was taken in mid-epoch {differs}"
    reached = state["position"] if "position" in state else position(loader, state)
    reason, taken = why_unknown(loader), batch_of_rank(loader, mine)
    if state["delivered_beyond"]:
        reached = None
    if reached is None or reason is not None or taken is None:
        raise ValueError(
            f"{said}: the position of all ranks together does not follow from the state "
            f"({reason or 'it was saved with other options, or another kind of sampler or dataset'}). "
            f"Save each rank's state, and resume on {state['world']} ranks with the same batch size"
        )
    if (part := _depends_on_batches(loader)) and state["batch_size"] != batch_size_of(loader):
        raise ValueError(
            f"{said}, and the order of {type(part).__name__} may depend on that. Use the same value"
        )
    if (elastic := elastic_of(loader)) is not None:
        if tail := elastic.tail(reached):
            warnings.warn(
                f"{len(elastic.dataset) - reached} samples of the epoch are left, which is no multiple "
                f"of {mine.world} ranks: at its end {abs(tail)} samples "
                + ("are left out" if tail < 0 else "are delivered a second time"),
                stacklevel=program_level(),
            )
        return {"origin": reached, "delivered": 0}
    if reached == state["dataset_length"] and isinstance(loader._index_sampler, Sized):
        return {"origin": 0, "delivered": len(loader._index_sampler)}
    if reached % (mine.world * taken) == 0:
        return {"origin": 0, "delivered": reached // (mine.world * taken)}
    advice = f"No batch size fits {mine.world} ranks: use"
    if reached % mine.world == 0:
        sizes = (n for off in range(taken) for n in (taken - off, taken + off))
        nearest = next(n for n in sizes if reached // mine.world % n == 0)
        advice = f"Use batch_size={nearest * (mine.world if _splits(loader) else 1)}, or"
    raise ValueError(
        f"{said}. All ranks together had received {reached} samples, which is not a multiple of the "
        f"{mine.world * taken} that {mine.world} x {taken} are at a time. {advice} "
        "minato.ElasticSampler, which goes on anywhere"
    )


def _depends_on_batches(loader: Any) -> Any:
    """A sampler whose order may depend on the batch size."""
    for part, gives_batches in samplers_of(loader):
        if type(part) is not BatchSampler and not deals_batches(part):
            if gives_batches or attribute(part, "batch_size") is not None:
                return part
    return None


def of_order(loader: Any) -> State:
    """The seed and shuffle of the sampler, for a state."""
    parts = [part for part, _gives_batches in samplers_of(loader)]
    found = {}
    for name, kind in (("seed", int), ("shuffle", bool)):
        values = (attribute(part, name) for part in parts)
        found[f"sampler_{name}"] = next((v for v in values if type(v) is kind), None)
    return found


def check_order(loader: Any, state: State, *, wholly: bool) -> None:
    """Raises ValueError if the state is of another order. Not wholly: compares only what both have,
    of samplers with ``set_epoch``. Others may change their seed as they go, or load it with a state
    of their own."""
    of_mine = of_order(loader)
    if not wholly:
        epochs = state["sampler_epoch"], sampler_epoch(loader)
        if None in epochs or state["sampler"] is not None:
            return
        of_mine = {n: v for n, v in of_mine.items() if None not in (v, state.get(n))}
        if of_mine.get("sampler_shuffle") is False and state["sampler_shuffle"] is False:
            return  # their order comes from no seed
    for name, mine in of_mine.items():
        theirs = state.get(name, mine)  # older states lack it
        if type(theirs) is not type(mine) or theirs != mine:
            what = name.replace("_", "'s ")
            raise ValueError(
                f"the state was taken in mid-epoch with the {what} {theirs!r}, but this loader's is "
                f"{mine!r}, so its order is another one: use the same value"
            )


def one_of(states: list[State], loader: Any, strict: bool) -> State:
    """The state to load, of those of all ranks. Not strict: warns if ranks differ in what they have
    received, and chooses that of one that had least.

    Raises:
        ValueError: if a rank's state is missing, or if states are of different orders, or (strict)
            if ranks differ in what they have received.
    """
    names = [(state["rank"], state["world"]) for state in states]
    found, (_, world) = {state["rank"]: state for state in states}, names[0]
    if {*names} != {(rank, world) for rank in range(world or 0)}:
        listed = ", ".join(f"{rank} of {size}" for rank, size in names)
        raise ValueError(
            f"the list has states of the ranks {listed}. Give those of all ranks, saved at one time"
        )
    _check_one_order(states)
    mine = ranks_of(loader)
    own = found[mine.rank if mine.world == world else 0]
    places = {rank: _place(loader, state) for rank, state in sorted(found.items())}
    if None in places.values() or len({*places.values()}) == 1:
        return own
    at = (f"rank {rank} at {one[1]} of epoch {one[0]}" for rank, one in places.items() if one)
    told = (
        "the ranks had not received equally many samples when their states were saved: "
        f"{', '.join(at)}. Save on all ranks after the same step"
    )
    if strict:
        raise ValueError(told)
    warnings.warn(
        f"{told}. All ranks go on at the smallest: samples repeat", stacklevel=program_level()
    )
    return found[min(places, key=lambda rank: places[rank] or (0, 0))]


def _check_one_order(states: list[State]) -> None:
    """Raises ValueError if ranks that share one order have states of different ones."""
    first = states[0]
    if any(state["block"] is None for state in states):
        return  # each rank may have an order of its own
    for name in ("dataset_length", "sampler_seed", "sampler_shuffle"):
        for state in states:
            if (one := first.get(name)) != (other := state.get(name)):
                what = name.replace("sampler_", "sampler's ")
                raise ValueError(
                    f"the states in the list are not of one run: the {what} is {one!r} on rank "
                    f"{first['rank']}, but {other!r} on rank {state['rank']}. Give the states that all "
                    "ranks of one run have saved at one time"
                )


def _place(loader: Any, state: State) -> tuple[int, float] | None:
    """The epoch of a state and its position there; None if that is unknown."""
    reached = state["position"] if "position" in state else position(loader, state)
    epoch = state["sampler_epoch"]
    if epoch is None:
        epoch = state["user_epoch"] or 0
    if not state["begun"]:  # between two epochs
        reached = state["dataset_length"]
    return None if reached is None else (epoch, reached)
