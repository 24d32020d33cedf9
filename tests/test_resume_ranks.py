"""States when several ranks load: each rank resumes with its own samples."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, RandomSampler, Sampler

import minato

LENGTH, SIZE = 48, 4
Batches = list[list[list[int]]]


class Draws(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, int(torch.randint(0, 2**62, ()))


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Numbers of one rank, dealt by the program itself."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, LENGTH, 2))


class StatefulStream(Stream):
    """Says where it is, as torchdata's Stateful does."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        mine = range(self.rank, LENGTH, 2)
        while self.at < len(mine):
            self.at += 1
            yield mine[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "rank": self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.rank = state["at"], state["rank"]


class DealtStream(Stream):
    """Says how samples are dealt, as Accelerate's IterableDatasetShard does."""

    num_processes = 2
    batch_size = 1

    @property
    def process_index(self) -> int:
        return self.rank


class OfDistributed(DistributedSampler[Any]):
    """What Lightning puts around another sampler."""

    def __init__(self, inner: Any, world: int, rank: int) -> None:
        super().__init__(inner, world, rank, shuffle=False)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.dataset)[self.rank :: self.num_replicas])  # type: ignore[call-overload]


def made(rank: int, world: int = 2, **options: Any) -> Any:
    torch.manual_seed(7)
    sampler = DistributedSampler(Draws(), world, rank, seed=3)
    return minato.DataLoader(
        Draws(), **{"batch_size": SIZE, "num_workers": 2, "sampler": sampler, **options}
    )


def streaming(rank: int, kind: type[Stream] = Stream, workers: int = 1) -> Any:
    torch.manual_seed(7)
    return minato.DataLoader(kind(rank), SIZE, num_workers=workers)


def lists(loader: Any) -> Any:
    return [[part.tolist() for part in batch] if isinstance(batch, list) else batch.tolist()
            for batch in loader]  # fmt: skip


def state_after(loader: Any, batches: int) -> Any:
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return json.loads(json.dumps(loader.state_dict()))


@pytest.fixture
def on_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    def be(rank: int, world: int = 2) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))

    return be


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# ---- the sampler says how it deals ------------------------------------------------------------


def test_state_knows_rank_and_world() -> None:
    state = state_after(made(1), 2)
    assert (state["rank"], state["world"], state["block"]) == (1, 2, 1)
    state = minato.DataLoader(Draws()).state_dict()
    assert (state["rank"], state["world"]) == (0, 1)


@pytest.mark.parametrize("options", [{}, {"num_workers": 0, "seed_per_sample": True}])
def test_state_of_another_rank_gives_own_place(options: dict[str, Any]) -> None:
    whole = lists(made(1, **options))
    loader = made(1, **options)
    loader.load_state_dict(state_after(made(0, **options), 2))
    assert lists(loader) == whole[2:]


def test_state_of_another_rank_keeps_a_common_shuffle() -> None:
    """The sampler inside shuffles with a generator that is the same on all ranks."""

    def shuffled(rank: int, seed: int) -> Any:
        order = RandomSampler(Draws(), generator=torch.Generator().manual_seed(seed))
        return made(rank, sampler=OfDistributed(order, 2, rank))

    whole = lists(shuffled(1, 5))
    loader = shuffled(1, 6)  # the new process has not restored it
    loader.load_state_dict(state_after(shuffled(0, 5), 2))
    assert lists(loader) == whole[2:]


def test_state_of_another_rank_loaded_again_is_own() -> None:
    loader = made(1)
    loader.load_state_dict(state_after(made(0), 2))
    again = loader.state_dict()
    assert (again["rank"], again["delivered"]) == (1, 2)
    other = made(1)
    other.load_state_dict(again)
    assert lists(other) == lists(loader)


def test_state_of_another_world_raises_in_mid_epoch() -> None:
    state = state_after(made(0), 2)
    with pytest.raises(ValueError, match="taken in mid-epoch on 2 ranks, but 3 load now"):
        made(0, 3).load_state_dict(state)
    loader = made(0, 3)
    with pytest.warns(UserWarning, match="on 2 ranks"):
        loader.load_state_dict(state, strict=False)
    assert len(lists(loader)) == LENGTH // 3 // SIZE


@pytest.mark.parametrize("apart", [0, 1])
def test_state_of_rank_with_another_seed_warns(apart: int) -> None:
    """Its samples draw the numbers of that seed."""

    def loader(rank: int) -> minato.DataLoader[Any]:
        torch.manual_seed(7 + apart * rank)
        sampler = DistributedSampler(Draws(), num_replicas=2, rank=rank)
        return minato.DataLoader(Draws(), SIZE, sampler=sampler, num_workers=1)

    iterator = iter(first := loader(0))
    next(iterator)
    state = first.state_dict()
    del iterator
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        (other := loader(1)).load_state_dict(json.loads(json.dumps(state)))
        assert len(list(other)) == LENGTH // SIZE // 2 - 1
    assert ["rank 1 loads the state of rank 0" in str(one.message) for one in told] == [True] * apart


def test_state_between_epochs_fits_any_world() -> None:
    loader = made(0)
    lists(loader)
    state = loader.state_dict()
    other = made(2, 3)
    other.load_state_dict(state)
    assert len(lists(other)) == LENGTH // 3 // SIZE


def test_state_out_of_order_of_another_rank_raises() -> None:
    state = state_after(made(0), 2)
    state["delivered"], state["delivered_beyond"] = 1, [2]
    with pytest.raises(ValueError, match="and batches come in order"):
        made(1).load_state_dict(state)
    loader = made(1)
    with pytest.warns(UserWarning, match="skips the same number of its own batches"):
        loader.load_state_dict(state, strict=False)
    assert lists(loader) == lists(made(1))[2:]


def test_state_without_ranks_is_taken_for_own() -> None:
    """As older versions wrote them."""
    state = state_after(made(1), 2)
    for name in ("rank", "world", "block", "sampler_epoch"):
        del state[name]
    loader = made(1)
    loader.load_state_dict(state)
    assert lists(loader) == lists(made(1))[2:]


# ---- it does not say --------------------------------------------------------------------------


def test_state_of_unknown_rank_raises_for_the_program(on_rank: Any) -> None:
    on_rank(0)
    state = state_after(made(0, sampler=None, shuffle=True), 2)
    on_rank(1)
    loader = made(1, sampler=None, shuffle=True)
    with pytest.raises(ValueError, match="by rank 0, but this is rank 1"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("kind", [Stream, StatefulStream])
def test_stream_skips_own_batches_when_framework_loads(kind: Any, on_rank: Any) -> None:
    on_rank(0)
    state = state_after(streaming(0, kind), 2)
    on_rank(1)
    whole = lists(streaming(1, kind))
    with pytest.raises(ValueError, match="by rank 0, but this is rank 1"):
        streaming(1, kind).load_state_dict(state)
    loader = streaming(1, kind)
    with pytest.warns(UserWarning, match="skips the same number of its own batches"):
        loader.load_state_dict(state, strict=False)
    assert lists(loader) == whole[2:]


@pytest.mark.parametrize("workers", [0, 1])
def test_dealt_stream_goes_on_at_own_place(workers: int) -> None:
    whole = lists(streaming(1, DealtStream, workers))
    loader = streaming(1, DealtStream, workers)
    loader.load_state_dict(state_after(streaming(0, DealtStream, workers), 2))
    assert lists(loader) == whole[2:]


def test_state_between_epochs_leaves_another_ranks_generators(on_rank: Any) -> None:
    def shuffled(seed: int) -> Any:
        return made(0, sampler=None, shuffle=True, generator=torch.Generator().manual_seed(seed))

    on_rank(0)
    loader = shuffled(1)
    lists(loader)
    state = loader.state_dict()
    on_rank(1)
    other = shuffled(2)
    other.load_state_dict(state)
    assert lists(other) == lists(shuffled(2))


def test_ranks_with_one_seed_rank_share_states(on_rank: Any) -> None:
    """Ranks of one tensor-parallel group, which load the same batches."""
    on_rank(0)
    options = {"sampler": None, "shuffle": True, "seed_rank": 0,
               "generator": torch.Generator().manual_seed(1)}  # fmt: skip
    state = state_after(made(0, **options), 2)
    options["generator"] = torch.Generator().manual_seed(1)
    whole = lists(made(0, **options))
    on_rank(1)
    options["generator"] = torch.Generator().manual_seed(2)
    loader = made(1, **options)
    loader.load_state_dict(state)
    assert lists(loader) == whole[2:]


# ---- the sampler's own epoch ------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_state_holds_the_samplers_own_epoch(workers: int) -> None:
    def at_epoch(epoch: int) -> Any:
        loader = made(0, num_workers=workers, seed_per_sample=True)
        loader.sampler.set_epoch(epoch)
        return loader

    whole, state = lists(at_epoch(3)), state_after(at_epoch(3), 2)
    loader = at_epoch(0)  # the program has not set the epoch yet
    loader.load_state_dict(state)
    assert loader.sampler.epoch == 3 and lists(loader) == whole[2:]


def test_samplers_epoch_is_the_programs_between_epochs() -> None:
    loader = made(0)
    loader.sampler.set_epoch(3)
    lists(loader)
    state = loader.state_dict()
    other = made(0)
    other.sampler.set_epoch(4)
    other.load_state_dict(state)
    assert other.sampler.epoch == 4


# ---- another order ------------------------------------------------------------------------


class OwnSeed(DistributedSampler[Any]):
    """Its state has its seed."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        for index in list(super().__iter__())[self.at :]:
            self.at += 1
            yield index
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.at = state["seed"], state["at"]


class NextSeed(Sampler[int]):
    """Takes another seed for each epoch."""

    seed = 5

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed)
        self.seed += 1
        yield from torch.randperm(len(Draws()), generator=generator).tolist()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("change, words", [
    ({"seed": 4}, "the sampler's seed 3, but this loader's is 4"),
    ({"shuffle": False}, "the sampler's shuffle True, but this loader's is False"),
])  # fmt: skip
def test_other_order_on_as_many_ranks_raises(change: Any, words: str, workers: int) -> None:
    state = state_after(made(0), 2)
    args = {"seed": 3, **change}

    def other(rank: int) -> Any:
        sampler = DistributedSampler(Draws(), 2, rank, **args)
        return made(rank, sampler=sampler, num_workers=workers)

    for rank in (0, 1):
        loader = other(rank)
        with pytest.raises(ValueError, match=words):
            loader.load_state_dict(state)
        with pytest.warns(UserWarning, match="The epoch starts as the program has set it up") as told:
            loader.load_state_dict(state, strict=False)
        assert len(told) == 1 and len(list(loader)) == len(loader)
    loader = other(0)
    loader.load_state_dict(state_after(made(0), 0))  # no batch was delivered


def test_order_is_not_compared_without_a_constant_seed() -> None:
    """A state without the terms of the order, as older ones are; an order without a seed; a seed in
    the sampler's own state; a sampler that changes its seed."""
    state = state_after(made(0), 2)
    del state["sampler_seed"], state["sampler_shuffle"]
    loader = made(0, sampler=DistributedSampler(Draws(), 2, 0, seed=4))
    loader.load_state_dict(state)
    assert len(list(loader)) == len(loader) - 2

    def rest(loader: Any, again: Any, whole: Any) -> None:
        again.load_state_dict(state_after(loader, 2))
        assert [batch[0] for batch in lists(again)] == [batch[0] for batch in lists(whole)][2:]

    for kind, shuffle in ((DistributedSampler, False), (OwnSeed, True)):
        three, four, whole = (made(0, sampler=kind(Draws(), 2, 0, shuffle, n)) for n in (3, 4, 3))
        rest(three, four, whole)
    rest(*(made(0, sampler=NextSeed()) for _ in range(3)))
