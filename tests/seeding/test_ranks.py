"""Random numbers when several ranks load: no two ranks draw the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

import minato
from minato.seeding.ranks import ALONE, Ranks, ranks_of

from . import seeder_of

LENGTH = 24


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


class Draws(Dataset):  # type: ignore[type-arg]
    """Each sample is its index and 62 bits of torch's generator."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, int(torch.randint(0, 2**62, ()))


class WholeBatches(Draws):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
        return [self[index] for index in indices]


class Shard(BatchSampler):
    """Deals batches, or pieces of each batch, as Accelerate's BatchSamplerShard does."""

    def __init__(self, batches: Any, world: int, rank: int, split: bool = False) -> None:
        self.batch_sampler, self.split_batches = batches, split
        self.num_processes, self.process_index = world, rank
        self.batch_size = batches.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(self.batch_sampler):
            piece = len(batch) // self.num_processes
            if self.split_batches:
                yield batch[piece * self.process_index :][:piece]
            elif number % self.num_processes == self.process_index:
                yield batch


class Wrapped:
    """A batch sampler that only forwards another one's batches."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batch_sampler)


def batches(size: int = 4) -> BatchSampler:
    return BatchSampler(SequentialSampler(Draws()), size, False)


def drawn(seed: int = 7, dataset: Any = None, **options: Any) -> dict[int, int]:
    """What each sample of an epoch has drawn, by its index."""
    torch.manual_seed(seed)
    options = {"num_workers": 2, **options}
    if "batch_sampler" not in options:
        options.setdefault("batch_size", 3)
    found: dict[int, int] = {}
    for indices, values in minato.DataLoader(dataset or Draws(), **options):
        found.update(zip(indices.tolist(), values.tolist(), strict=True))
    return found


def strided(world: int, rank: int) -> DistributedSampler[Any]:
    return DistributedSampler(Draws(), world, rank, shuffle=False)


# ---- the numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("world, options", [
    (2, {}), (3, {}), (3, {"num_workers": 0, "seed_per_sample": True}),
    (3, {"batching": "ready", "in_order": False}), (2, {"on_error": "replace"}),
    (2, {"batch_size": None}),
], ids=["two", "three", "inline", "ready", "replace", "single samples"])  # fmt: skip
def test_ranks_together_draw_as_one_rank(world: int, options: dict[str, Any]) -> None:
    if options == {"batch_size": None}:
        def loaded(sampler: Any) -> dict[int, int]:
            torch.manual_seed(7)
            return dict(minato.DataLoader(
                Draws(), batch_size=None, sampler=sampler, num_workers=2,
                collate_fn=lambda sample: sample))  # fmt: skip
    else:
        def loaded(sampler: Any) -> dict[int, int]:
            return drawn(sampler=sampler, **options)

    together: dict[int, int] = {}
    for rank in range(world):
        together.update(loaded(strided(world, rank)))
    assert together == loaded(SequentialSampler(Draws()))
    assert len(set(together.values())) == LENGTH


@pytest.mark.parametrize("split", [False, True])
def test_ranks_dealing_batches_draw_as_one(split: bool) -> None:
    together: dict[int, int] = {}
    for rank in range(2):
        together.update(drawn(batch_sampler=Wrapped(Shard(batches(), 2, rank, split))))
    assert together == drawn(batch_sampler=batches())


def test_ranks_draw_apart_in_whole_batches() -> None:
    """__getitems__ is seeded once a batch."""
    ranks = [drawn(dataset=WholeBatches(), sampler=strided(2, rank)) for rank in range(2)]
    assert len({v for rank in ranks for v in rank.values()}) == LENGTH


def noisy_collate(samples: list[Any]) -> Any:
    return torch.tensor([i for i, _ in samples]), torch.randint(0, 2**62, (len(samples),))


def test_ranks_draw_apart_in_collate() -> None:
    ranks = [drawn(sampler=strided(2, rank), collate_fn=noisy_collate) for rank in range(2)]
    assert len({v for rank in ranks for v in rank.values()}) == LENGTH


@pytest.mark.parametrize("seeds", [(7, 7, 7), (7, 8, 9)])
def test_ranks_without_dealing_sampler_draw_apart(
    seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = drawn(seeds[0])
    monkeypatch.setenv("WORLD_SIZE", "3")
    ranks = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        ranks.append(drawn(seeds[rank]))
    assert ranks[0] == alone, "rank 0 draws what one rank alone draws"
    assert len({v for rank in ranks for v in rank.values()}) == 3 * LENGTH


def test_persistent_workers_follow_the_samplers_rank() -> None:
    torch.manual_seed(7)
    sampler = strided(2, 0)
    loader = minato.DataLoader(
        Draws(), 3, sampler=sampler, num_workers=2, persistent_workers=True
    )
    first = {v for _, values in loader for v in values.tolist()}
    sampler.rank = 1
    rows = {i: v for indices, values in loader for i, v in zip(indices.tolist(), values.tolist())}
    assert set(rows) == set(range(1, LENGTH, 2)) and not first & set(rows.values())
    assert loader._iterator is not None
    assert loader._iterator._position.ranks == Ranks(1, 2, 1)  # type: ignore[attr-defined]


def test_tensor_parallel_ranks_draw_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two by two ranks: the sampler's rank counts, and not the process's."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    ranks = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        ranks.append(drawn(sampler=strided(2, rank // 2)))
    assert ranks[0] == ranks[1] and ranks[2] == ranks[3]
    assert len({v for rank in ranks for v in rank.values()}) == LENGTH


# ---- seed_rank --------------------------------------------------------------------------------


def test_seed_rank_outranks_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    own = drawn()
    assert drawn(seed_rank=1) == own
    monkeypatch.setenv("RANK", "3")
    assert drawn(seed_rank=1) == own != drawn()


def test_seed_rank_outranks_the_sampler() -> None:
    zero = drawn(sampler=strided(2, 0))
    one = drawn(sampler=strided(2, 1), seed_rank=0)
    assert list(one.values()) == list(zero.values()) and set(one) == set(range(1, LENGTH, 2))


def test_seed_rank_counts_on_one_rank() -> None:
    assert drawn(seed_rank=0) == drawn()
    assert not set(drawn(seed_rank=1).values()) & set(drawn().values())


@pytest.mark.parametrize("rank", [-1, True, 1.0, "0", 2**31])
def test_invalid_seed_rank_is_refused(rank: Any) -> None:
    with pytest.raises(ValueError, match="seed_rank must be None or a rank"):
        minato.DataLoader(Draws(), seed_rank=rank)


def test_seed_rank_past_the_samplers_ranks_raises() -> None:
    loader = minato.DataLoader(Draws(), sampler=strided(2, 1), seed_rank=2, num_workers=1)
    with pytest.raises(ValueError, match="seed_rank=2, but .* deals samples to 2 ranks"):
        iter(loader)


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.mark.parametrize("options", [{"scheduling": "static"}, {"seed_per_sample": False}])
def test_seed_rank_without_seeded_samples_raises(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="seed_rank=0 has no effect"):
        minato.DataLoader(Draws(), num_workers=1, seed_rank=0, **options)
    with pytest.raises(ValueError, match="seed_rank=0 has no effect for an iterable"):
        minato.DataLoader(Stream(), num_workers=1, seed_rank=0)


# ---- sources of the rank ----------------------------------------------------------------------


class Named:
    """A sampler with these attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


class Refusing(Named):
    @property
    def rank(self) -> int:
        raise RuntimeError("not yet")

    num_replicas = 2


@pytest.mark.parametrize("sampler, ranks", [
    (strided(3, 2), Ranks(2, 3, 1)), (strided(1, 0), Ranks(0, 1, 1)),
    (Named(world_size=2, rank=1), Ranks(1, 2, 1)),
    (Named(num_processes=2, process_index=1, batch_size=4), Ranks(1, 2, 4)),
    (Named(num_replicas=2, rank=2), ALONE), (Named(num_replicas=2, rank=True), ALONE),
    (Named(num_replicas=None, rank=None), ALONE), (Refusing(), ALONE),
    (Named(sampler=strided(2, 1)), Ranks(1, 2, 1)), (SequentialSampler(Draws()), ALONE),
])  # fmt: skip
def test_ranks_are_read_from_the_sampler(sampler: Any, ranks: Ranks) -> None:
    assert ranks_of(minato.DataLoader(Draws(), 4, sampler=sampler)) == ranks


@pytest.mark.parametrize("sampler, ranks", [
    (Shard(batches(), 2, 1), Ranks(1, 2, 4)), (Shard(batches(), 2, 1, True), Ranks(1, 2, 2)),
    (Wrapped(Wrapped(Shard(batches(), 2, 1))), Ranks(1, 2, 4)),
    (BatchSampler(strided(2, 1), 4, False), Ranks(1, 2, 1)),
    (Named(num_replicas=2, rank=1, batch_size=3), Ranks(1, 2, 3)),
    (Named(num_replicas=2, rank=1, batch_size=None), Ranks(1, 2, 1)),
    (Named(data_parallel_size=2, data_parallel_rank=1, micro_batch_size=3), Ranks(1, 2, 3)),
    (Named(micro_batch_times_data_parallel_size=6, data_parallel_rank=1, micro_batch_size=3),
     Ranks(1, 2, 3)),
    (Named(data_parallel_rank=1, micro_batch_size=0), ALONE),
])  # fmt: skip
def test_ranks_are_read_from_the_batch_sampler(sampler: Any, ranks: Ranks) -> None:
    assert ranks_of(minato.DataLoader(Draws(), batch_sampler=sampler)) == ranks


@pytest.mark.parametrize("environment, ranks", [
    ({"RANK": "1", "WORLD_SIZE": "4"}, Ranks(1, 4, None)),
    ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, ALONE),
    ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, Ranks(3, 4, None)),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Ranks(1, 2, None)),
    ({"RANK": "one", "WORLD_SIZE": "4"}, ALONE), ({"RANK": "4", "WORLD_SIZE": "4"}, ALONE),
    ({"RANK": "1"}, ALONE),
])  # fmt: skip
def test_ranks_are_read_from_the_launchers_environment(
    environment: dict[str, str], ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    assert ranks_of(minato.DataLoader(Draws())) == ranks


def test_torch_distributed_outranks_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        assert ranks_of(minato.DataLoader(Draws())) == ALONE
    finally:
        torch.distributed.destroy_process_group()


# ---- the seeder -------------------------------------------------------------------------------


def first_draw(ranks: tuple[int, int, int], *place: int) -> int:
    seeder = seeder_of()
    seeder.share(ranks)
    seeder.seed(*place)
    return torch.initial_seed()


@pytest.mark.parametrize("world, block", [(2, 1), (3, 4), (5, 7)])
def test_seeder_counts_positions_over_all_ranks(world: int, block: int) -> None:
    taken = []
    for rank, position in itertools.product(range(world), range(3 * block)):
        turn, within = divmod(position, block)
        place = (turn * world + rank) * block + within
        taken.append(place)
        assert first_draw((rank, world, block), 9, 1, position) == first_draw((0, 1, 1), 9, 1, place)
    assert sorted(taken) == list(range(3 * block * world))


@pytest.mark.parametrize("domain", [1, 2])
def test_seeder_counts_batches_over_all_ranks(domain: int) -> None:
    assert first_draw((1, 3, 8), 9, 1, 5, domain) == first_draw((0, 1, 1), 9, 1, 16, domain)


def test_seeder_without_world_changes_nothing_on_rank_zero() -> None:
    assert first_draw((0, 0, 1), 9, 1, 5) == first_draw((0, 1, 1), 9, 1, 5)
    assert len({first_draw((rank, 0, 1), 9, 1, 5) for rank in range(100)}) == 100


@pytest.mark.parametrize("ranks", [(2, 2, 1), (0, 1, 0), (0, 1), None, ("0", 1, 1)])
def test_seeder_refuses_invalid_ranks(ranks: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        seeder_of().share(ranks)
