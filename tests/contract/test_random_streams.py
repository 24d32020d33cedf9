"""Seeds, random streams of workers and samples, and get_worker_info()."""

from __future__ import annotations

import dataclasses
import multiprocessing
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from .datasets import (
    GATE_S,
    Draws,
    Environment,
    Numbers,
    OwnGenerator,
    SeedHook,
    Sharded,
    as_is,
)
from .support import Kind, assert_same, remembered, wait_for


def _generator(seed: int = 21) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _draw(generator: torch.Generator | None) -> int:
    return torch.empty((), dtype=torch.int64).random_(generator=generator).item()


# --------------------------------------------------------------- base seed


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_one_number_is_drawn_from_the_generator(loader: Kind, workers, shuffle) -> None:
    generator, reference = _generator(), _generator()
    made = loader(Numbers(4), num_workers=workers, generator=generator, shuffle=shuffle)
    assert torch.equal(generator.get_state(), reference.get_state())
    iterator = iter(made)
    want = _draw(reference)
    assert iterator._base_seed == want
    if not shuffle:
        assert torch.equal(generator.get_state(), reference.get_state())
        list(iterator)
        assert torch.equal(generator.get_state(), reference.get_state())
    else:
        list(iterator)
        list(DataLoader(Numbers(4), shuffle=True, generator=(other := _generator())))
        assert torch.equal(generator.get_state(), other.get_state())


@pytest.mark.parametrize("workers", [0, 1])
def test_one_number_is_drawn_from_torchs_default_generator(loader: Kind, workers) -> None:
    torch.manual_seed(4)
    _draw(None)
    want = torch.get_rng_state()
    torch.manual_seed(4)
    list(loader(Numbers(4), num_workers=workers))
    assert torch.equal(torch.get_rng_state(), want)


def test_other_generators_of_the_caller_are_untouched(loader: Kind) -> None:
    random.seed(1)
    np.random.seed(1)
    states = random.getstate(), np.random.get_state()
    list(loader(Draws(6), num_workers=2, batch_size=2))
    assert random.getstate() == states[0]
    assert str(np.random.get_state()) == str(states[1])


def test_without_workers_the_callers_streams_are_used(loader: Kind) -> None:
    def run(make: Any) -> list[torch.Tensor]:
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        return list(make(Draws(5), batch_size=2, shuffle=True))

    assert_same(run(loader), run(DataLoader))


# ----------------------------------------------------------- worker streams


def _epochs(make: Any, count: int, seed: int = 9, **kwargs: Any) -> list[Any]:
    made = make(Draws(14), batch_size=3, generator=_generator(seed), **kwargs)
    return [list(made) for _ in range(count)]


@pytest.mark.parametrize("kwargs", [
    {"num_workers": 1}, {"num_workers": 2}, {"num_workers": 3},
    {"num_workers": 2, "shuffle": True}, {"num_workers": 2, "prefetch_factor": 1},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 2, "shuffle": True, "persistent_workers": True},
], ids=str)
def test_static_draws_are_torchs_bit_for_bit(loader: Kind, kwargs) -> None:
    if loader.expects("draws_depend_on_num_workers") is False:
        pytest.skip("samples, not workers, are seeded")
    want = remembered(f"streams {kwargs}", lambda: _epochs(DataLoader, 3, **kwargs))
    assert_same(_epochs(loader, 3, **kwargs), want)


def _by_index(epoch: list[torch.Tensor]) -> dict[int, list[float]]:
    rows = torch.cat(epoch).tolist()
    return {int(row[0]): row[1:] for row in rows}


def test_dependence_on_the_number_of_workers(loader: Kind) -> None:
    one, two, three = (_epochs(loader, 1, num_workers=n)[0] for n in (1, 2, 3))
    if loader.expects("draws_depend_on_num_workers"):
        assert _by_index(one) != _by_index(two)
    else:
        assert_same(two, one)
        assert_same(three, one)


@pytest.mark.parametrize("kwargs", [
    {}, {"shuffle": True}, {"persistent_workers": True}, {"prefetch_factor": 4},
], ids=str)
def test_draws_repeat_with_the_seed(loader: Kind, kwargs) -> None:
    first = _epochs(loader, 2, num_workers=2, **kwargs)
    assert_same(_epochs(loader, 2, num_workers=2, **kwargs), first)
    other = _epochs(loader, 1, seed=10, num_workers=2, **kwargs)
    assert _by_index(other[0]) != _by_index(first[0])


def _stack(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples)


WAYS = [{"batch_size": 3}, {"batch_size": 3, "collate_fn": _stack}, {"batch_size": None}]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=["rows", "collate_fn", "unbatched"])
def test_draws_differ_between_samples_and_epochs(loader: Kind, persistent, way) -> None:
    made = loader(Draws(14), num_workers=2, persistent_workers=persistent,
                  generator=_generator(), **way)
    rows = torch.cat([batch.reshape(-1, 5) for _ in range(3) for batch in made])
    for column in range(1, rows.shape[1]):
        assert rows[:, column].unique().numel() == 3 * 14


def test_draws_do_not_depend_on_batching(own: Kind) -> None:
    if own.expects("draws_depend_on_num_workers"):
        pytest.skip("workers are seeded")
    runs = []
    for way in (*WAYS, {"batch_size": 5}, {"batch_size": 1, "prefetch_factor": 7}):
        made = own(Draws(14), num_workers=2, generator=_generator(), **way)
        epoch = [batch.reshape(-1, 5) for batch in made]
        runs.append(_by_index(epoch))
    assert all(run == runs[0] for run in runs)


def _collate_draw(samples: list[int]) -> list[float]:
    return [float(samples[0]), random.random(), float(np.random.rand()),
            torch.rand(()).item()]


class BulkDraws(Numbers):
    """One draw per list of indices."""

    def __getitems__(self, indices: list[int]) -> list[list[float]]:
        return [[float(i), random.random(), torch.rand(()).item()] for i in indices]


@pytest.mark.parametrize("dataset, kwargs", [
    (Numbers(9), {"collate_fn": _collate_draw}), (BulkDraws(9), {"collate_fn": as_is}),
    (OwnGenerator(9), {}), (SeedHook(9), {}),
], ids=["collate", "getitems", "own_generator", "seed_sample"])
def test_draws_beyond_getitem(own: Kind, dataset: Any, kwargs) -> None:
    if own.expects("draws_depend_on_num_workers"):
        pytest.skip("workers are seeded")

    def run(workers: int, seed: int) -> list[Any]:
        made = own(dataset, batch_size=2, num_workers=workers,
                   generator=_generator(seed), **kwargs)
        return list(made)

    first = run(1, 5)
    assert_same(run(2, 5), first)
    if isinstance(dataset, OwnGenerator):  # it has a seed of its own, as with torch
        assert_same(run(2, 6), first)
        return
    with pytest.raises(AssertionError):
        assert_same(run(2, 6), first)


def test_unseeded_samples_use_worker_streams(own: Kind) -> None:
    # With seed_per_sample off, the one worker of a balanced loader runs torch's stream.
    def run(make: Any, **kwargs: Any) -> list[torch.Tensor]:
        return list(make(Draws(8), batch_size=2, num_workers=1,
                         generator=_generator(), **kwargs))

    assert_same(run(own, seed_per_sample=False), run(DataLoader))


# ------------------------------------------------------------ worker's view


class InitDraws(Numbers):
    """Keeps what worker_init_fn drew and saw."""

    seen: Any = None

    def __getitem__(self, index: int) -> Any:
        return self.seen


def _note_init(worker: int) -> None:
    info = get_worker_info()
    info.dataset.seen = (
        worker, info.id, info.num_workers, info.seed, random.random(),
        float(np.random.rand()), torch.rand(()).item(), torch.initial_seed(),
    )


def test_init_runs_after_seeding_with_torchs_streams(loader: Kind) -> None:
    def run(make: Any) -> list[Any]:
        made = make(InitDraws(2), num_workers=1, worker_init_fn=_note_init,
                    collate_fn=as_is, generator=_generator())
        return list(made)

    assert run(loader) == run(DataLoader)


def test_each_worker_has_its_own_seed(loader: Kind) -> None:
    made = loader(InitDraws(16), num_workers=2, worker_init_fn=_note_init,
                  collate_fn=as_is, generator=_generator())
    iterator = iter(made)
    base = iterator._base_seed
    seen = {batch[0] for batch in iterator}
    assert {note[3] for note in seen} <= {base, base + 1}
    for worker, identity, count, seed, *_, initial in seen:
        assert (worker, count, seed, initial) == (identity, 2, base + worker, seed)


def test_worker_environment(loader: Kind) -> None:
    made = loader(Environment(6), num_workers=2, collate_fn=as_is)
    iterator = iter(made)
    base, pids = iterator._base_seed, {w.pid for w in iterator._workers}
    for (seen,) in iterator:
        worker, count, seed = seen["info"]
        assert worker in (0, 1) and (count, seed) == (2, base + worker)
        assert seen["pid"] in pids
        assert seen["threads"] == 1
        assert seen["dataset"] is True
        assert seen["daemon"] is True
        assert seen["method"] in (None, "multiprocessing")
    assert get_worker_info() is None


def test_static_tasks_go_round_robin(loader: Kind) -> None:
    if loader.balanced:
        pytest.skip("samples go to whichever worker is free")
    made = loader(Environment(9), num_workers=3, batch_size=2, collate_fn=as_is)
    assert [batch[0]["info"][0] for batch in made] == [0, 1, 2, 0, 1]


def test_no_info_without_workers(loader: Kind) -> None:
    (seen,) = next(iter(loader(Environment(1), collate_fn=as_is)))
    assert seen["info"] is None


class InfoProbe(Numbers):
    def __getitem__(self, index: int) -> dict[str, Any]:
        info = get_worker_info()
        try:
            info.id = 5
        except Exception as error:
            refused = type(error).__mro__
        return {
            "same": info is torch_worker._worker_info,
            "type": type(info).__name__,
            "frozen": AttributeError in refused or RuntimeError in refused,
            "repr": repr(info),
            # an older torch's is no dataclass
            "fields": [field.name for field in dataclasses.fields(info)]
            if dataclasses.is_dataclass(info) else sorted(vars(info)),
        }


def test_info_is_torchs_own_object(loader: Kind) -> None:
    def run(make: Any) -> dict[str, Any]:
        made = make(InfoProbe(1), num_workers=1, collate_fn=as_is,
                    generator=_generator())
        seen = list(made)[0][0]
        # The dataset's address differs from process to process.
        seen["repr"] = seen["repr"].split("dataset=")[0]
        return seen

    got = run(loader)
    assert got == run(DataLoader)
    assert got["same"] and got["frozen"] and got["type"] == "WorkerInfo"
    assert "num_workers=1" in got["repr"]


def _info_in_collate(samples: list[int]) -> tuple[int, int]:
    info = get_worker_info()
    return info.num_workers, len(samples)


def test_info_in_collate(loader: Kind) -> None:
    made = loader(Numbers(4), batch_size=2, num_workers=2, collate_fn=_info_in_collate)
    assert list(made) == [(2, 2), (2, 2)]


def test_iterable_streams_are_torchs(loader: Kind) -> None:
    class Noisy(Sharded):
        def __iter__(self):
            return (torch.tensor([i, torch.rand(()).item(), random.random(),
                                  np.random.rand()], dtype=torch.float64)
                    for i in super().__iter__())

    def run(make: Any, workers: int) -> list[Any]:
        made = make(Noisy(11), batch_size=2, num_workers=workers,
                    generator=_generator())
        return [list(made), list(made)]

    for workers in (1, 2):
        assert_same(run(loader, workers), run(DataLoader, workers))


class Census(Numbers):
    """Samples wait until worker_init_fn was called a given number of times."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.runs = multiprocessing.Value("i", 0)
        self.awaited = multiprocessing.Value("i", 0)

    def __getitem__(self, index: int) -> int:
        assert wait_for(lambda: self.runs.value >= self.awaited.value, GATE_S)
        return index


def _count_init(_: int) -> None:
    runs = get_worker_info().dataset.runs
    with runs.get_lock():
        runs.value += 1


@pytest.mark.parametrize("persistent, runs", [(False, [2, 4, 6]), (True, [2, 2, 2])])
def test_how_often_init_runs(loader: Kind, persistent: bool, runs: list[int]) -> None:
    dataset = Census(8)
    made = loader(dataset, num_workers=2, worker_init_fn=_count_init,
                  persistent_workers=persistent)
    for awaited in runs:
        dataset.awaited.value = awaited
        list(made)
        assert dataset.runs.value == awaited


class InitialSeeds(Numbers):
    """What torch says of its seed, and a draw."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        return torch.initial_seed(), torch.rand(()).item()


def _seed_all_alike(_: int) -> None:
    torch.manual_seed(12345)


def test_seed_given_in_init_is_read_again(loader: Kind) -> None:
    def run(workers: int) -> list[Any]:
        return list(loader(InitialSeeds(7), num_workers=workers, collate_fn=as_is,
                           worker_init_fn=_seed_all_alike, generator=_generator()))

    one, two = run(1), run(2)
    assert {seed for batch in one + two for seed, _ in batch} == {12345}
    if not loader.expects("draws_depend_on_num_workers"):
        assert one == two and len({draw for batch in one for _, draw in batch}) == 7


class Growing(Dataset):
    """Index i is i; its length may change in the trainer."""

    def __init__(self) -> None:
        self.length = 15

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def test_sampler_of_growing_dataset_ends_as_in_torch(own: Kind) -> None:
    def told(kind: Kind) -> tuple[list[int], bytes, bytes]:
        dataset, generator = Growing(), torch.Generator().manual_seed(8)
        loader = kind(dataset, batch_size=None, shuffle=True, num_workers=2, generator=generator)
        iterator = iter(loader)
        dataset.length += 1
        first = next(iterator)
        early = bytes(generator.get_state().tolist())
        return [first, *iterator], early, bytes(generator.get_state().tolist())

    assert told(own) == told(Kind("torch"))
