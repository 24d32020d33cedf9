"""States that another number of ranks, or another batch size, resumes from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, RandomSampler, SequentialSampler

import minato
from minato import ElasticSampler

LENGTH, GLOBAL = 431, 24
WORLDS = [1, 2, 3, 4, 6, 8]
PAIRS = [(a, b) for a in WORLDS for b in WORLDS]
ROOT = Path(__file__).parents[1]

#: an index, and what the sample and its batch drew
Sample = tuple[int, int]


class Draws(Dataset):  # type: ignore[type-arg]
    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        return index, int(torch.randint(0, 2**62, ()))


def loader_of(sampler: Any, size: int, **options: Any) -> Any:
    """Without workers samples are the same as with them, and a test of many loaders is short."""
    options = {"num_workers": 0, "seed_per_sample": True, **options}
    return minato.DataLoader(Draws(len(sampler.dataset)), size, sampler=sampler, **options)


def elastic(rank: int, world: int, size: int, drop_last: bool = False, **options: Any) -> Any:
    sampler = ElasticSampler(Draws(), world, rank, seed=3, drop_last=drop_last)
    return loader_of(sampler, size, **options)


def distributed(rank: int, world: int, size: int, drop_last: bool = False, **options: Any) -> Any:
    torch.manual_seed(7)
    sampler = DistributedSampler(Draws(), world, rank, seed=3, drop_last=drop_last)
    return loader_of(sampler, size, **options)


def samples(batches: Any) -> list[Sample]:
    return [pair for indices, drawn in batches for pair in zip(indices.tolist(), drawn.tolist())]


def begin(make: Any, world: int, size: int, steps: int, **options: Any) -> Any:
    """What all ranks receive in the first steps of an epoch, and their states."""
    had, states = [], []
    for rank in range(world):
        loader = make(rank, world, size, **options)
        batches = iter(loader)
        had += samples(next(batches) for _ in range(steps))
        states.append(json.loads(json.dumps(loader.state_dict())))
    return had, states


def rest(make: Any, world: int, size: int, state: Any, **options: Any) -> list[list[Sample]]:
    """What each rank receives that resumes from a state, or from a list of them."""
    found = []
    for rank in range(world):
        loader = make(rank, world, size, **options)
        loader.load_state_dict(state)
        found.append(samples(loader))
    return found


def order(make: Any) -> list[Sample]:
    """An epoch as a single rank receives it, in order."""
    return samples(make(0, 1, 16))


def check(whole: list[Sample], had: list[Sample], ranks: list[list[Sample]], drop: bool) -> None:
    """Each sample comes once, with its bits, except for the tail: samples that are left out or
    repeated, with numbers of their own."""
    assert len({len(rank) for rank in ranks}) == 1
    found, known = Counter([*had, *(pair for rank in ranks for pair in rank)]), set(whole)
    tail = (len(whole) - len(had)) % len(ranks)
    assert set(found.values()) == {1}
    assert len(known - found.keys()) == (tail if drop else 0)
    assert len(found.keys() - known) == (0 if drop or not tail else len(ranks) - tail)


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".* samples of the epoch are left")
        yield


# ---- torch's DistributedSampler: where a batch of the new ranks begins ------------------------


@pytest.mark.parametrize("old, new", PAIRS)
def test_kept_global_batch_resumes_on_any_ranks(old: int, new: int) -> None:
    had, states = begin(distributed, old, GLOBAL // old, 5)
    check(order(distributed), had, rest(distributed, new, GLOBAL // new, states[-1]), False)


@pytest.mark.parametrize("drop_last", [False, True])
def test_state_of_the_last_step_leaves_nothing(drop_last: bool) -> None:
    _, states = begin(distributed, 2, 12, 18, drop_last=drop_last)
    assert rest(distributed, 3, 8, states[0], drop_last=drop_last) == [[], [], []]


def test_workers_resume_on_other_ranks_as_without() -> None:
    had, states = begin(distributed, 2, 12, 5, num_workers=2, seed_per_sample=None)
    ranks = rest(distributed, 3, 8, states[0], num_workers=1, seed_per_sample=None)
    check(order(distributed), had, ranks, False)


def test_changed_batch_size_resumes_on_one_rank() -> None:
    """A sampler of the program's own process, whose generator the state holds."""

    def make(size: int, seed: int) -> Any:
        sampler = RandomSampler(Draws(96), generator=torch.Generator().manual_seed(seed))
        return minato.DataLoader(Draws(96), size, sampler=sampler, seed_per_sample=True)

    torch.manual_seed(7)
    whole, loader = samples(make(8, 1)), make(8, 1)
    torch.manual_seed(7)
    batches = iter(loader)
    had = samples(next(batches) for _ in range(3))
    other = make(6, 2)
    other.load_state_dict(loader.state_dict())
    assert had + samples(other) == whole


def test_older_state_has_the_terms_of_the_position() -> None:
    had, states = begin(distributed, 2, 12, 5)
    for name in ("position", "origin", "sampler_seed", "sampler_shuffle"):
        del states[0][name]
    check(order(distributed), had, rest(distributed, 3, 8, states[0]), False)


def test_misfitting_batch_names_position_and_nearest_batch() -> None:
    _, states = begin(distributed, 2, 12, 5)
    words = r"on 2 ranks, but 3 load now.*120 samples.*the 27 that 3 x 9.*batch_size=8.*ElasticSampler"
    with pytest.raises(ValueError, match=words):
        distributed(0, 3, 9).load_state_dict(states[0])
    with pytest.raises(ValueError, match="No batch size fits 7 ranks: use minato.ElasticSampler"):
        distributed(0, 7, 9).load_state_dict(states[0])
    loader = distributed(0, 3, 9)
    with pytest.warns(UserWarning, match="The epoch starts"):
        loader.load_state_dict(states[0], strict=False)
    assert len(samples(loader)) == 144


@pytest.mark.parametrize("change, words", [
    ({"position": -1}, "position is -1"), ({"position": "x"}, "position is 'x'"),
    ({"position": 121}, "position is 121"), ({"position": 2 * LENGTH}, "position is 862"),
    ({"origin": -1}, "a count is not an integer"), ({"sampler_seed": 4}, "sampler's seed 4"),
    ({"sampler_shuffle": False}, "sampler's shuffle False"), ({"dataset_length": 430}, "dataset_length"),
    ({"position": None}, "position of all ranks together does not follow"),
])  # fmt: skip
@pytest.mark.parametrize("make", [distributed, elastic])
def test_state_of_another_order_raises(make: Any, change: Any, words: str) -> None:
    _, states = begin(make, 2, 12, 5)
    with pytest.raises(ValueError, match=words):
        make(0, 3, 8).load_state_dict({**states[0], **change})


@pytest.mark.parametrize("options, words", [
    ({"in_order": False}, "in_order=False"), ({"scheduling": "static"}, "scheduling='static'"),
])  # fmt: skip
def test_unknown_position_asks_for_each_ranks_state(options: Any, words: str) -> None:
    options = {"num_workers": 1, "seed_per_sample": None, **options}
    _, states = begin(distributed, 2, 12, 2, **options)
    assert states[0]["position"] is None
    with pytest.raises(ValueError, match="Save each rank's state, and resume on 2 ranks"):
        distributed(0, 3, 8, num_workers=1).load_state_dict(states[0])
    _, states = begin(distributed, 2, 12, 2)
    with pytest.raises(ValueError, match=words):
        distributed(0, 3, 8, **options).load_state_dict(states[0])


def test_order_by_batch_size_raises() -> None:
    """As a sampler that groups samples of equal length does."""

    def make(size: int) -> Any:
        sampler = SequentialSampler(Draws(96))
        sampler.batch_size = size  # type: ignore[attr-defined]
        return minato.DataLoader(Draws(96), size, sampler=sampler)

    loader = make(8)
    next(iter(loader))
    with pytest.raises(ValueError, match="order of SequentialSampler may depend on that"):
        make(4).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("make, new", [(distributed, 2), (distributed, 3), (elastic, 2), (elastic, 3)])
@pytest.mark.parametrize("of", ["loader", "sampler"])
def test_set_epoch_after_load_of_another_epoch_warns(make: Any, new: int, of: str) -> None:
    """The program has forgotten the number of its epoch. Any number is right before the first
    batch and after the last one, or if all epochs have the same order."""

    def loader_of(world: int, shuffle: bool, epoch: int, state: Any = None) -> Any:
        loader = make(0, world, GLOBAL // world)
        loader.sampler.shuffle = shuffle
        if state is not None:
            loader.load_state_dict(state)
        (loader if of == "loader" else loader.sampler).set_epoch(epoch)
        return loader

    def told(epoch: int, steps: int = 5, shuffle: bool = True, **change: Any) -> list[str]:
        loader = loader_of(2, shuffle, 2)
        batches = iter(loader)
        samples(next(batches) for _ in range(steps))
        again = loader_of(new, shuffle, epoch, {**loader.state_dict(), **change})
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            samples(again)
        assert all(one.filename == __file__ for one in found)
        return [str(one.message) for one in found]

    (words,) = told(0)
    for part in ("the middle of epoch 2", "set_epoch(0) was called", "twice", "go on with set_epoch(2)"):
        assert part in words
    assert told(2) == told(0, steps=0) == told(0, steps=18) == told(0, shuffle=False) == []
    assert told(0, sampler_epoch=None) == []  # an older state


def test_set_epoch_after_a_finished_epoch_is_silent() -> None:
    loader = distributed(0, 1, 24)
    samples(loader)
    other = distributed(0, 1, 24)
    other.load_state_dict(loader.state_dict())
    other.set_epoch(1)
    assert len(samples(other)) == LENGTH


@pytest.mark.parametrize("rank", [0, 1])
def test_state_of_another_seed_and_world_names_both(rank: int) -> None:
    """Each new rank has a seed of its own, and none has a state of its own."""
    _, states = begin(distributed, 3, 8, 5)
    loader = distributed(rank, 2, 12)
    torch.manual_seed(8 + rank)
    words = f"rank {rank} of 2 loads the state of rank 0 of 3, .* seed 7, but its own seed is {8 + rank}"
    with pytest.warns(UserWarning, match=f"{words}.*all 3 ranks.*ElasticSampler") as found:
        loader.load_state_dict(states)
    assert len(found) == 1 and "Save the state" not in str(found[0].message)


def test_own_state_with_another_seed_is_silent() -> None:
    """With another batch size, its samples are those of the rank's own seed still."""
    _, states = begin(distributed, 1, 24, 5)
    whole = order(distributed)
    loader = distributed(0, 1, 12)
    torch.manual_seed(8)
    loader.load_state_dict(states[0])
    assert samples(loader) == whole[120:]


# ---- ElasticSampler: anywhere -------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("old, new", PAIRS)
def test_elastic_resume_loses_and_doubles_nothing(
    old: int, new: int, changed: bool, drop_last: bool
) -> None:
    before, after = (GLOBAL // old, GLOBAL // new) if not changed else (7, 5)
    had, states = begin(elastic, old, before, 4, drop_last=drop_last)
    ranks = rest(elastic, new, after, states[-1], drop_last=drop_last)
    check(order(elastic), had, ranks, drop_last)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_elastic_resume_of_a_resume(steps: int) -> None:
    """Batches of the second run count from where it went on."""
    had, states = begin(elastic, 3, 7, 4)
    second = []
    for rank in range(4):
        loader = elastic(rank, 4, 5)
        loader.load_state_dict(states[1])
        batches = iter(loader)
        had += samples(next(batches) for _ in range(steps))
        second.append(loader.state_dict())
    assert {state["position"] for state in second} == {84 + steps * 20}
    assert rest(elastic, 4, 5, second[0]) == rest(elastic, 4, 5, second)
    check(order(elastic), had, rest(elastic, 2, 9, second[0]), False)


def test_elastic_order_is_that_of_torch() -> None:
    for world, drop_last, shuffle, length in [(3, False, True, 10), (4, True, False, 10), (5, False, True, 3)]:
        for rank in range(world):
            args: Any = (Draws(length), world, rank, shuffle, 5, drop_last)
            mine, torchs = ElasticSampler(*args), DistributedSampler(*args)
            mine.set_epoch(2)
            torchs.set_epoch(2)
            assert list(mine) == list(torchs) and len(mine) == len(torchs)
            assert mine.total_size == torchs.total_size


def test_elastic_resumes_from_a_state_of_torchs_sampler() -> None:
    had, states = begin(distributed, 2, 12, 5)
    check(order(distributed), had, rest(elastic, 5, 7, states[0]), False)


@pytest.mark.parametrize("drop_last, words", [
    (False, "1 samples are delivered a second time"), (True, "7 samples are left out"),
])  # fmt: skip
def test_elastic_tail_is_told_in_one_warning(drop_last: bool, words: str) -> None:
    _, states = begin(elastic, 2, 12, 5)
    with pytest.warns(UserWarning, match=f"311 samples of the epoch are left.*{words}") as found:
        samples(loaded(elastic(0, 8, 7, drop_last), states[0]))
    assert len(found) == 1 and found[0].filename == __file__


@pytest.mark.parametrize("left", [0, 1, 2])
def test_elastic_with_fewer_samples_left_than_ranks(left: int) -> None:
    """The order is repeated until all ranks have one."""
    sampler = ElasticSampler(Draws(12), 4, 3, shuffle=False)
    sampler.start_at(12 - left)
    assert list(sampler) == ([] if left == 0 else [11])


def test_elastic_seeds_depend_on_nothing_else() -> None:
    """Not on torch's seed, nor on workers and whether they live on."""
    found = []
    for seed, options in enumerate([
        {}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True},
        {"num_workers": 1, "persistent_workers": True, "prefetch_next_epoch": True},
    ]):  # fmt: skip
        torch.manual_seed(seed)
        loader = elastic(0, 1, 16, **options)
        epochs = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            epochs.append(samples(loader))
        found.append(epochs)
    assert all(epochs == found[0] for epochs in found)
    assert not {drawn for _, drawn in found[0][0]} & {drawn for _, drawn in found[0][1]}


def with_draw(batch: list[Sample]) -> Any:
    return torch.tensor([i for i, _ in batch]), torch.randint(0, 2**62, (len(batch),))


class Together(Draws):
    def __getitems__(self, indices: list[int]) -> list[Sample]:
        return [(index, int(drawn)) for index, drawn in zip(indices, torch.randint(0, 2**62, (len(indices),)))]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("what", ["collate_fn", "getitems"])
def test_elastic_batches_are_seeded_by_position(what: str, workers: int) -> None:
    """A batch that begins at the same position draws the same, whatever its number."""

    def make() -> Any:
        dataset, collate_fn = (Draws(), with_draw) if what == "collate_fn" else (Together(), None)
        sampler = ElasticSampler(dataset, 1, 0, seed=3)
        return minato.DataLoader(dataset, 10, sampler=sampler, collate_fn=collate_fn,
                                 num_workers=workers, seed_per_sample=True)  # fmt: skip

    _, states = begin(elastic, 2, 10, 3)
    loader = make()
    loader.load_state_dict(states[0])
    assert samples(loader) == samples(make())[60:]


@pytest.mark.parametrize("workers", [0, 1])
def test_elastic_state_before_the_first_batch_has_its_seeds(workers: int) -> None:
    whole, saved, resumed = (elastic(0, 1, 16, num_workers=workers) for _ in range(3))
    whole.set_epoch(2)
    saved.set_epoch(2)
    iterator = iter(saved)
    resumed.load_state_dict(saved.state_dict())
    del iterator
    assert samples(resumed) == samples(whole)


def test_elastic_epoch_begun_twice_warns_once() -> None:
    loader = elastic(0, 1, 64)
    samples(loader)
    with pytest.warns(UserWarning, match="epoch 0 of the ElasticSampler begins again") as found:
        samples(loader)
        samples(loader)
    assert len(found) == 1
    loader = elastic(0, 1, 64)
    for epoch in range(3):
        loader.set_epoch(epoch)
        samples(loader)


def test_elastic_ranks_are_read_for_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the launcher; without one there is a single rank. Nothing waits for other ranks."""
    sampler = ElasticSampler(Draws(), seed=3)
    loader = loader_of(sampler, 8)
    assert len(sampler) == LENGTH and samples(loader) == order(elastic)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    loader.set_epoch(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert samples(loader) == samples(elastic(2, 4, 8))
    assert (sampler.num_replicas, sampler.rank, len(sampler)) == (4, 2, 108)


@pytest.mark.parametrize("world, rank", [(2, 2), (2, -1), (0, 0), (None, 1)])
def test_elastic_rank_beyond_the_ranks_raises(world: Any, rank: int) -> None:
    with pytest.raises(ValueError, match="rank must be from 0"):
        ElasticSampler(Draws(), world, rank)


def test_elastic_state_goes_on_with_torchs_sampler() -> None:
    had, states = begin(elastic, 3, 7, 4)
    loader = elastic(0, 2, 6)
    loader.load_state_dict(states[0])
    state = loader.state_dict()
    check(order(elastic), had, rest(distributed, 2, 6, state), False)
    with pytest.raises(ValueError, match="this loader has none.*batch_size=6"):
        distributed(0, 2, 5).load_state_dict({**state, "batch_size": 5})


def test_elastic_state_between_epochs_fits_any_ranks() -> None:
    loader = elastic(0, 2, 12, num_workers=1, persistent_workers=True)
    samples(loader)
    other = elastic(0, 1, 16, num_workers=1)
    other.load_state_dict(loader.state_dict())
    other.set_epoch(1)
    whole = elastic(0, 1, 16)
    whole.set_epoch(1)
    assert samples(other) == samples(whole)


# ---- states of all ranks ------------------------------------------------------------------------


def test_list_of_states_resumes_as_each_state() -> None:
    had, states = begin(elastic, 3, 7, 4)
    check(order(elastic), had, rest(elastic, 2, 9, states[::-1]), False)
    assert rest(elastic, 3, 7, states) == [
        samples(loaded(elastic(rank, 3, 7), states[rank])) for rank in range(3)
    ]


def loaded(loader: Any, state: Any) -> Any:
    loader.load_state_dict(state)
    return loader


def test_list_of_unequal_states_raises_or_takes_the_smallest() -> None:
    _, states = begin(elastic, 3, 7, 4)
    states[1] = begin(elastic, 3, 7, 3)[1][1]
    words = "rank 0 at 84 of epoch 0, rank 1 at 63 of epoch 0, rank 2 at 84"
    with pytest.raises(ValueError, match=words):
        elastic(0, 2, 9).load_state_dict(states)
    loader = elastic(0, 2, 9)
    with pytest.warns(UserWarning, match=f"{words}.*smallest: samples repeat"):
        loader.load_state_dict(states, strict=False)
    assert samples(loader) == rest(elastic, 2, 9, states[1])[0]


@pytest.mark.parametrize("change", ["missing", "doubled", "other world", "older"])
def test_list_without_all_ranks_raises(change: str) -> None:
    _, states = begin(elastic, 3, 7, 4)
    if change == "missing":
        del states[1]
    elif change == "doubled":
        states[1] = states[0]
    elif change == "other world":
        states[1]["world"] = 4
    else:
        del states[1]["rank"]
    with pytest.raises(ValueError, match="Give those of all ranks"):
        elastic(0, 2, 9).load_state_dict(states)
    loader = elastic(0, 2, 9)
    with pytest.warns(UserWarning, match="Give those of all ranks.*The epoch starts") as found:
        loader.load_state_dict(states, strict=False)
    assert len(found) == 1 and samples(loader) == samples(elastic(0, 2, 9))


@pytest.mark.parametrize("name, other, words", [
    ("sampler_seed", 4, "the sampler's seed is 3 on rank 0, but 4 on rank 2"),
    ("sampler_shuffle", False, "the sampler's shuffle is True on rank 0, but False on rank 2"),
    ("dataset_length", 430, "the dataset_length is 431 on rank 0, but 430 on rank 2"),
])  # fmt: skip
@pytest.mark.parametrize("make", [distributed, elastic])
def test_list_of_different_runs_raises(make: Any, name: str, other: Any, words: str) -> None:
    _, states = begin(make, 3, 8, 5)
    states[2][name] = other
    for world in (2, 3):
        with pytest.raises(ValueError, match=words):
            make(0, world, GLOBAL // world).load_state_dict(states)


def test_list_of_ranks_with_their_own_datasets_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sampler deals samples, so each rank has an order of its own."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    states, left = [], []
    for resumes in (False, True):
        for rank in range(2):
            monkeypatch.setenv("RANK", str(rank))
            loader = minato.DataLoader(Draws(40 + rank), 8)
            if resumes:
                loader.load_state_dict(states)
                left.append(len(samples(loader)))
                continue
            next(iter(loader))
            states.append(loader.state_dict())
    assert left == [32, 33]


def test_list_of_unknown_positions_gives_each_rank_its_own() -> None:
    options = {"num_workers": 1, "in_order": False, "seed_per_sample": None}
    _, states = begin(distributed, 2, 12, 5, **options)
    found = rest(distributed, 2, 12, states, **options)
    assert [len(rank) for rank in found] == [216 - 60] * 2


# ---- several processes --------------------------------------------------------------------------


class Deadly(Draws):
    """Kills the worker that makes one of these samples for the first time."""

    def __init__(self, folder: Path, every: int) -> None:
        super().__init__()
        self.folder, self.every = folder, every

    def __getitem__(self, index: int) -> Sample:
        if index % self.every == 0 and not (mark := self.folder / str(index)).exists():
            mark.touch()
            os.kill(os.getpid(), 9)
        return super().__getitem__(index)


@pytest.mark.parametrize("old, new", [(2, 3), (4, 1), (1, 4), (3, 2)])
def test_elastic_resume_with_killed_workers(old: int, new: int, tmp_path: Path) -> None:
    dataset = Deadly(tmp_path, 8)

    def make(rank: int, world: int, size: int) -> Any:
        sampler = ElasticSampler(dataset, world, rank, seed=3)
        return minato.DataLoader(dataset, size, sampler=sampler, num_workers=2,
                                 max_retries=50)  # fmt: skip

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        had, states = begin(make, old, 12, 5)
        ranks = rest(make, new, 7, states[0])
    assert len(list(tmp_path.iterdir())) >= 50
    check(order(elastic), had, ranks, False)


PROGRAM = """
import json, pathlib, sys, torch, warnings
import torch.distributed as dist
import minato
sys.path.insert(0, sys.argv[3])
from test_resume_elastic import Draws, samples

folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
warnings.filterwarnings("ignore", ".* samples of the epoch are left")
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
sampler = minato.ElasticSampler(Draws(), seed=3)
loader = minato.DataLoader(Draws(), 14 // world, sampler=sampler, num_workers=1)
if rank == 0:
    next(iter(loader))  # on one rank alone: it waits for no other
    loader = minato.DataLoader(Draws(), 14 // world, sampler=sampler, num_workers=1)
if states := sorted(folder.glob("state-*.json")):
    loader.load_state_dict([json.loads(state.read_text()) for state in states])
dist.barrier()
batches = iter(loader)
had = samples(next(batches) for _ in range(steps)) if steps else samples(batches)
(folder / f"had-{world}-{rank}.json").write_text(json.dumps(had))
if steps:
    (folder / f"state-{rank}.json").write_text(json.dumps(loader.state_dict()))
dist.barrier()
dist.destroy_process_group()
"""


def test_torchrun_resumes_three_ranks_on_two(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    folder = tmp_path / "out"
    folder.mkdir()
    for world, steps in [(3, 20), (2, 0)]:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             f"--nproc_per_node={world}", str(program), str(folder), str(steps),
             str(Path(__file__).parent)],
            capture_output=True, text=True, timeout=300, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
    had, ranks = (
        [[(i, d) for i, d in json.loads((folder / f"had-{world}-{rank}.json").read_text())]
         for rank in range(world)]
        for world in (3, 2)
    )  # fmt: skip
    check(order(elastic), [pair for rank in had for pair in rank], ranks, False)


# ---- Accelerate's shards ------------------------------------------------------------------------


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_accelerates_shards_resume_on_any_ranks(split: bool, even: bool) -> None:
    shard = pytest.importorskip("accelerate.data_loader", exc_type=ImportError).BatchSamplerShard

    def make(rank: int, world: int, size: int) -> Any:
        torch.manual_seed(7)
        order = RandomSampler(Draws(), generator=torch.Generator().manual_seed(5))
        inner = torch.utils.data.BatchSampler(order, size * world if split else size, False)
        batches = shard(inner, world, rank, split_batches=split, even_batches=even)
        return minato.DataLoader(Draws(), batch_sampler=batches, seed_per_sample=True)

    whole = order(make)
    for old, new in [(1, 2), (2, 4), (4, 2), (3, 8), (8, 3), (6, 1), (2, 3), (4, 6)]:
        for steps in (1, 7):
            had, states = begin(make, old, GLOBAL // old, steps)
            after = [pair for rank in rest(make, new, GLOBAL // new, states[-1]) for pair in rank]
            times = Counter(had) + Counter(after)
            assert set(times) == set(whole) and sum(times.values()) - LENGTH in (
                [0] if not even else range(GLOBAL))  # fmt: skip


def test_elastic_sampler_within_a_shard_raises() -> None:
    """Accelerate would deal each rank's share once more."""
    shard = pytest.importorskip("accelerate.data_loader", exc_type=ImportError).BatchSamplerShard
    inner = torch.utils.data.BatchSampler(ElasticSampler(Draws(), 2, 0), 8, False)
    with pytest.raises(ValueError, match="BatchSamplerShard around it deals each rank's share"):
        minato.DataLoader(Draws(), batch_sampler=shard(inner, 2, 0))
    inner = torch.utils.data.BatchSampler(ElasticSampler(Draws(), 1, 0), 8, False)
    assert len(list(minato.DataLoader(Draws(), batch_sampler=shard(inner, 2, 0)))) == 27
