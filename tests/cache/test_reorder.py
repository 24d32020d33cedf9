"""DataLoader(cache_reorder=True): each sample once an epoch and with the same draws, whatever is cached."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Running
from torch.utils.data import (
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

import minato
from minato import _cache
from minato.cache.cache import folder

from .support import Calls, Memory, new_cache, start
from .test_processes import begin, ended, ready

PROGRAM = Path(__file__).with_name("reorder_program.py")
SAMPLES = 60


class Data(torch.utils.data.Dataset[Any]):
    """A sample is its index and what it drew. 16 KiB of each are kept."""

    def __init__(self, calls: Calls | None = None) -> None:
        self.calls = None if calls is None else str(calls.path)

    def __len__(self) -> int:
        return SAMPLES

    def cache_key(self, i: int) -> int:
        return i

    def read(self, i: int) -> torch.Tensor:
        if self.calls is not None:
            Calls(Path(self.calls)).note(str(i))
        return torch.full((16000,), i, dtype=torch.uint8)

    def decode(self, raw: torch.Tensor, i: int) -> torch.Tensor:
        return raw

    def augment(self, value: torch.Tensor, i: int) -> Any:
        assert (value == i).all()
        return i, torch.rand(())

    def __getitem__(self, i: int) -> Any:
        return self.augment(self.decode(self.read(i), i), i)


class Wide(Data):
    """Sixty samples of a number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def cache_key(self, i: int) -> int:
        return SAMPLES * self.number + i

    def read(self, i: int) -> torch.Tensor:
        return super().read(i)[:12000]


@pytest.fixture
def cache() -> Iterator[minato.Cache]:
    """With room for all samples."""
    made = new_cache("4MiB")
    yield made
    store = made._attached()  # pytest holds the cache for longer than its file may stay
    assert store is not None
    store.detach()


def loader_of(cache: Any, dataset: Any = None, **options: Any) -> Any:
    options = {"batch_size": 4, "shuffle": True, "num_workers": 2, "cache_reorder": True, **options}
    dataset = Data() if dataset is None else dataset
    return minato.DataLoader(dataset, cache=cache, cache_format="decoded", **options)


def other_job(cache: minato.Cache) -> Any:
    """A client of another job; the file is shared as long as it lives."""
    assert cache._attached() is not None
    name = f"cache-{_cache.LAYOUT}-{cache._name}"
    store = _cache.Store(folder(), name, cache.size, 12345, False, 0, False)
    store.attach()
    return store


def random_order(many: int = SAMPLES) -> RandomSampler:
    generator = torch.Generator().manual_seed(3)
    return RandomSampler(range(SAMPLES), num_samples=many, generator=generator)


def make(cache: minato.Cache, indices: Any, dataset: Any = None) -> None:
    """Puts samples into the cache."""
    for _batch in loader_of(cache, Subset(dataset or Data(), list(indices)), cache_reorder=False):
        pass


def samples(batches: Any) -> dict[int, float]:
    """What each sample drew; each came once."""
    pairs = [(int(i), float(x)) for batch in batches for i, x in zip(*batch)]
    found = dict(pairs)
    assert len(found) == len(pairs)
    return found


def indices(batches: Any) -> list[int]:
    return [int(i) for batch in batches for i in batch[0]]


@pytest.fixture
def shared(cache: minato.Cache) -> Iterator[minato.Cache]:
    """Has the samples 40 to 51, and another job attached."""
    make(cache, range(40, 52))
    other = other_job(cache)
    yield cache
    other.detach()


# ---- the order ----


@pytest.mark.parametrize("options", [
    {}, {"num_workers": 0, "seed_per_sample": True}, {"worker_type": "thread"}, {"batch_size": None},
    {"persistent_workers": True, "prefetch_next_epoch": True}, {"in_order": False},
], ids=["processes", "inline", "threads", "unbatched", "next_epoch", "out_of_order"])  # fmt: skip
def test_cached_samples_come_first(shared: minato.Cache, options: Any) -> None:
    loader = loader_of(shared, **options)
    for _epoch in range(2):
        found = [b if b[0].dim() else (b[0][None], b[1][None]) for b in map(list, loader)] \
            if options.get("batch_size", 4) else [([i], [x]) for i, x in loader]
        assert sorted(samples(found)) == list(range(SAMPLES))
        if options.get("in_order", True) and _epoch == 0:
            assert set(indices(found)[:12]) == set(range(40, 52))


@pytest.mark.parametrize("size, fewer", [("1MiB", True), ("4MiB", False)])
def test_small_cache_limits_batches_in_flight(size: str, fewer: bool) -> None:
    cache = new_cache(size)  # 1 MiB: for five samples in each of 16 parts
    dataset: Any = ConcatDataset([Wide(number) for number in range(3)])
    make(cache, range(40), dataset)
    other = other_job(cache)
    batches = iter(loader_of(cache, dataset, prefetch_factor=8))
    found = [next(batches)]
    ahead = batches._tasks_outstanding
    assert sorted(indices([*found, *batches])) == sorted([*range(SAMPLES)] * 3)
    other.detach()
    assert (ahead <= 12) == fewer  # half of the cache is 8 to 11 batches, the window 16


def test_job_alone_keeps_its_samplers_order(cache: minato.Cache) -> None:
    make(cache, range(40, 52))
    loader = loader_of(cache, shuffle=False, sampler=random_order())
    assert indices(loader) == list(random_order())


def test_last_batch_is_dropped_before_swaps(shared: minato.Cache) -> None:
    loader = loader_of(shared, shuffle=False, sampler=random_order(), batch_size=7, drop_last=True)
    found = samples(loader)
    assert sorted(found) == sorted(list(random_order())[:56])


def test_ranks_swap_within_their_shares(shared: minato.Cache) -> None:
    shares = []
    for rank in range(2):
        sampler: Any = DistributedSampler(Data(), 2, rank, seed=4)
        loader = loader_of(shared, shuffle=False, sampler=sampler)
        found = indices(loader)
        assert sorted(found) == sorted(DistributedSampler(Data(), 2, rank, seed=4))
        first = [i for i in found if 40 <= i < 52]
        assert found[: len(first)] == first
        shares += found
    assert sorted(shares) == list(range(SAMPLES))


@pytest.mark.parametrize("sampler", [
    SequentialSampler(range(SAMPLES)),
    WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, generator=torch.Generator().manual_seed(1)),
    DistributedSampler(range(SAMPLES), 1, 0, shuffle=False),  # type: ignore[arg-type]
], ids=lambda sampler: type(sampler).__name__)  # fmt: skip
def test_other_samplers_keep_their_order(
    shared: minato.Cache, sampler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loader = loader_of(shared, shuffle=False, sampler=sampler)
    if isinstance(sampler, WeightedRandomSampler):
        sampler.generator.manual_seed(1)
    with caplog.at_level(logging.INFO, "minato"):
        found = indices(loader)
    if isinstance(sampler, WeightedRandomSampler):
        sampler.generator.manual_seed(1)
    assert found == list(sampler)
    assert [r.message for r in caplog.records if "keeps the order" in r.message]


def test_epoch_with_repeated_samples_keeps_its_order(shared: minato.Cache) -> None:
    loader = loader_of(shared, shuffle=False, sampler=random_order(80))
    assert indices(loader) == list(random_order(80))


def test_parts_of_a_data_set_have_keys(shared: minato.Cache) -> None:
    parts: Any = ConcatDataset([Subset(Data(), range(30)), Subset(Data(), range(59, 29, -1))])
    found = indices(loader_of(shared, parts))
    assert sorted(found) == list(range(SAMPLES))
    assert set(found[:12]) == set(range(40, 52))


def test_files_stamps_do_not_hide_keys(tmp_path: Path) -> None:
    class Files(Data):
        def cache_files(self, i: int) -> str:
            return str(tmp_path / "data")

    (tmp_path / "data").write_text("x")
    os.utime(tmp_path / "data", (1e9, 1e9))
    cache = new_cache("4MiB")
    make(cache, range(12), Files())
    other = other_job(cache)
    entries = cache.stats()["entries"]
    found = indices(loader_of(cache, Files()))
    other.detach()
    if entries < 12:
        pytest.skip("the file system's clock is too coarse for the file to count as settled")
    assert set(found[:12]) == set(range(12))


@pytest.mark.parametrize("options", [
    {}, {"num_workers": 0, "seed_per_sample": True}, {"shuffle": True},
], ids=["processes", "inline", "shuffled"])  # fmt: skip
def test_loader_in_sequence_evicts_nothing(options: Any) -> None:
    cache = new_cache("1MiB")  # with room for a segment each, 64 in all
    dataset: Any = ConcatDataset([Wide(number) for number in range(3)])
    make(cache, range(60), dataset)
    other = other_job(cache)
    options = {"shuffle": False, **options}
    for _batch in loader_of(cache, dataset, **options, cache_reorder=options["shuffle"]):
        pass
    recycled = cache.stats()["recycled"]
    other.detach()
    assert (recycled > 0) == options["shuffle"]


# ---- what samples draw ----


def list_of(samples: list[Any]) -> Any:
    return [i for i, _ in samples], [x for _, x in samples]


def draws(cache: Any, epochs: int = 2, **options: Any) -> list[dict[int, float]]:
    torch.manual_seed(7)
    loader = loader_of(cache, **options)
    return [samples(loader) for _ in range(epochs)]


@pytest.mark.parametrize("options", [
    {"num_workers": 0, "seed_per_sample": True}, {"num_workers": 1}, {"num_workers": 3},
    {"in_order": False}, {"collate_fn": list_of}, {"autoscale": (1, 3)},
], ids=["inline", "one", "three", "out_of_order", "collate_fn", "autoscale"])  # fmt: skip
def test_samples_draw_the_same_in_any_order(shared: minato.Cache, options: Any) -> None:
    alone = draws(new_cache("4MiB"))
    assert alone[0] != alone[1]
    assert draws(shared, **options) == alone


def test_draws_do_not_depend_on_batches(shared: minato.Cache) -> None:
    assert draws(shared, batch_size=4) == draws(shared, batch_size=6)


# ---- state ----


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("after", [1, 5, 11])
def test_resumed_epoch_has_exactly_the_rest(
    shared: minato.Cache, workers: int, after: int
) -> None:
    torch.manual_seed(7)
    whole = samples(loader_of(shared))
    torch.manual_seed(7)
    loader = loader_of(shared)
    batches = list(itertools.islice(loader, after))
    state = loader.state_dict()
    more = {} if workers else {"num_workers": 0, "seed_per_sample": True}
    resumed = loader_of(new_cache("4MiB"), **more)  # where nothing is cached
    resumed.load_state_dict(state)
    rest = list(itertools.islice(resumed, 3))
    state = resumed.state_dict()
    last = loader_of(shared)
    last.load_state_dict(state)
    assert samples([*batches, *rest, *last]) == whole


def test_state_needs_a_loader_that_reorders(shared: minato.Cache) -> None:
    loader = loader_of(shared)
    next(iter(loader))
    with pytest.raises(ValueError, match="cache_reorder=True"):
        loader_of(shared, cache_reorder=False).load_state_dict(loader.state_dict(), strict=True)


def test_state_without_order_resumes_by_batches(shared: minato.Cache) -> None:
    torch.manual_seed(7)
    loader = loader_of(shared, cache_reorder=False)
    batches = list(itertools.islice(loader, 3))
    resumed = loader_of(shared)
    resumed.load_state_dict(loader.state_dict())
    assert sorted(samples([*batches, *resumed])) == list(range(SAMPLES))


# ---- options ----


@pytest.mark.parametrize("options, words", [
    ({"cache": None}, "without cache="),
    ({"batching": "ready", "in_order": False}, "batching='ready'"),
    ({"on_error": "replace"}, "on_error='replace'"),
    ({"seed_per_sample": False}, "seed_per_sample=False"),
    ({"num_workers": 0}, "num_workers=0"),
    ({"scheduling": "static"}, "scheduling='static'"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_reorder_without_effect_is_refused(options: Any, words: str) -> None:
    options = {"cache": "4MiB", "num_workers": 2, **options}
    with pytest.raises(ValueError, match=words):
        minato.DataLoader(Data(), shuffle=True, cache_reorder=True, **options)


# ---- jobs at the same time ----


def told(job: Running) -> Any:
    line = job.stdout.readline()
    assert line, job.communicate()[1]
    return json.loads(line)


@pytest.mark.limit(300)
def test_two_jobs_read_less_and_draw_alike(tmp_path: Path, memory: Memory) -> None:
    epochs, batches = 4, 80
    jobs = [start(PROGRAM, str(tmp_path), str(epochs), str(seed), **memory.environment)
            for seed in range(2)]  # fmt: skip
    for job in jobs:
        ready(job)
    drew: list[Any] = [[], []]
    reads = [0]
    for _epoch in range(epochs):
        found: list[Any] = [[], []]
        for _batch in range(batches):
            for job in jobs:
                begin(job)
            for pairs, job in zip(found, jobs):
                pairs += told(job)
        for number in range(2):
            drew[number].append({i: x for i, x in found[number]})
            assert sorted(i for i, _ in found[number]) == list(range(5 * batches))
        reads.append(len((tmp_path / "read").read_text().split()))
    for job in jobs:
        begin(job)
        ended(job)
    assert drew[0] == drew[1] and drew[0][0] != drew[0][1]
    # two data sets without a cache, 1.6 with one that never evicts
    assert reads[4] - reads[1] < 1.3 * 3 * 5 * batches, reads
    assert memory.files() == []
