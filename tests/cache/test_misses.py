"""What the verdict says while a cache fills, and when it is too small: counts, no times."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import minato
from minato.cache.misses import Missed, caches_of
from minato.cache.readers import SPARE, holds, parts_in, size_for
from minato.text import sized
from minato.iterators import stats as stats_module
from minato.iterators.loader_memo import memo_of
from minato.observe.verdict import Alone, Cause, Facts

from .support import new_cache

COUNT, BYTES = 120, 15000


class Parts(torch.utils.data.Dataset[Any]):
    """Read through the cache of a loader."""

    def __len__(self) -> int:
        return COUNT

    def read(self, i: int) -> bytes:
        return bytes(BYTES)

    def decode(self, raw: bytes, i: int) -> torch.Tensor:
        return torch.full((BYTES,), i, dtype=torch.uint8)

    def augment(self, value: torch.Tensor, i: int) -> Any:
        return i

    def __getitem__(self, i: int) -> Any:
        return self.augment(self.decode(self.read(i), i), i)


def memoizing(cache: minato.Cache, changes: bool = False) -> Any:
    """A dataset with a memoized method; changes: its key is another one in each epoch."""

    class Memoizing(torch.utils.data.Dataset[Any]):
        epoch = 0

        def __len__(self) -> int:
            return COUNT

        @cache.memoize(key=lambda self, i: (i, self.epoch if changes else 0))
        def load(self, i: int) -> bytes:
            return bytes(BYTES)

        def __getitem__(self, i: int) -> int:
            self.load(i)
            return i

    return Memoizing()


def loader_of(kind: str, size: str, **options: Any) -> Any:
    """With a cache of the loader, or with one that the dataset uses by itself."""
    if kind == "cache=":
        return minato.DataLoader(Parts(), 10, cache=new_cache(size), **options)
    return minato.DataLoader(memoizing(new_cache(size)), 10, **options)


def missed(loader: Any) -> Missed:
    found = memo_of(loader).missed()
    assert found is not None
    return found


KINDS = pytest.mark.parametrize("kind", ["cache=", "memoize"])
WORKERS = pytest.mark.parametrize("workers", [0, 2])


@KINDS
@WORKERS
def test_first_epoch_of_a_cache_counts_as_filling(kind: str, workers: int) -> None:
    loader = loader_of(kind, "16MiB", num_workers=workers)
    list(loader)
    found = missed(loader)
    assert (found.values, found.refused, found.too_small, found.again) == (COUNT, 0, False, False)
    assert found.seconds > 0
    list(loader)
    assert memo_of(loader).missed() is None  # all were found


@KINDS
@WORKERS
def test_advised_size_has_room_for_all(kind: str, workers: int) -> None:
    small = loader_of(kind, "1MiB", num_workers=workers)
    for _epoch in range(2):
        list(small)
        found = missed(small)
        assert found.too_small and found.refused > 0
    assert found.values == found.refused  # of the second epoch; the others were found
    assert found.enough is not None and found.saves is not None and found.saves > 0
    assert 1 << 20 < found.enough < 1.4 * COUNT * BYTES  # and not far too large
    large = loader_of(kind, str(int(found.enough)), num_workers=workers)
    list(large)
    assert (missed(large).values, missed(large).refused) == (COUNT, 0)


@pytest.mark.parametrize("each", [4096, 15232, 300_032])
@pytest.mark.parametrize("count", [100, 333])
def test_room_is_computed_as_the_cache_has_it(each: int, count: int) -> None:
    cache = new_cache(sized(size_for(count, each / SPARE)))

    @cache.memoize(key=lambda n: n)
    def value(n: int) -> bytes:
        return bytes(each - 232)  # less the record of an entry

    for n in range(2 * count):
        value(n)
    stats = cache.stats()
    assert stats["used_bytes"] == each * stats["entries"]
    room = holds(parts_in(stats), each)
    assert count <= min(room, stats["entries"]) and stats["entries"] in (room, 2 * count)


@WORKERS
def test_advised_size_counts_one_epoch_of_several(workers: int) -> None:
    options = {"persistent_workers": True} if workers else {}
    small = loader_of("memoize", "1MiB", num_workers=workers, **options)
    list(small)
    one = missed(small)
    list(small)
    two = missed(small)
    assert one.enough is not None and two.enough == pytest.approx(one.enough, rel=0.02)
    assert two.epochs == (2 if workers else 1)


def test_values_larger_than_the_cache_takes_leave_it_unused() -> None:
    loader = loader_of("memoize", "1MiB")
    loader.dataset.load.__minato_memoized__.function = lambda self, i: bytes(1 << 18)
    list(loader)
    found = missed(loader)
    assert found.refused == COUNT and found.enough is None and found.used < 0.5 * found.size
    assert "a larger cache would keep values of more than a 16th" in loader.stats()["verdict"]


@WORKERS
def test_changing_keys_count_as_misses_again(workers: int) -> None:
    data = memoizing(new_cache("16MiB"), changes=True)
    loader = minato.DataLoader(data, 10, num_workers=workers)
    list(loader)
    assert not missed(loader).again
    data.epoch = 1
    list(loader)
    assert missed(loader).again


def test_facts_of_the_verdict_have_the_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Facts] = []

    def causes(stats: Any, facts: Facts) -> list[Cause]:
        seen.append(facts)
        return []

    monkeypatch.setattr(stats_module, "causes", causes)
    loader = loader_of("memoize", "16MiB", num_workers=1)
    list(loader)
    loader.stats()
    assert seen and seen[-1].missed is not None and seen[-1].missed.values == COUNT


def test_verdict_without_workers_names_the_filling(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Alone] = []

    def alone(case: Alone) -> tuple[str, list[Cause]]:
        seen.append(case)
        return "Said.", []

    monkeypatch.setattr(stats_module, "alone", alone)
    loader = loader_of("memoize", "16MiB")
    list(loader)
    assert loader.stats()["verdict"] == "Said."
    assert seen[-1].missed is not None and seen[-1].missed.values == COUNT


@KINDS
def test_small_cache_is_reported_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_of(kind, "1MiB")
    list(loader)
    assert loader.stats()["verdict"].count("no room for") == 1
    monkeypatch.setattr(stats_module, "alone", lambda case: ("Hardly a wait.", []))
    told = loader.stats()["verdict"]
    assert re.match(r"Hardly a wait. The cache has no room for \d+ of 120 values that were made", told)
    assert told.count("would keep all") == 1
    other = "Memory has no room for more workers."
    monkeypatch.setattr(stats_module, "alone", lambda case: (other, []))
    assert "The cache has no room for" in loader.stats()["verdict"]


def test_misses_of_other_jobs_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = loader_of("memoize", "16MiB")
    list(loader)
    counts = missed(loader)
    assert counts.values == COUNT
    real = minato.cache.misses._counts
    monkeypatch.setattr("minato.cache.misses._counts", lambda cache: real(cache) | {"jobs": 2})
    assert memo_of(loader).missed() is None


# ---- which caches a dataset uses ---------------------------------------------------------------

shared = new_cache("1MiB")


@shared.memoize
def plain(n: int) -> bytes:
    return bytes(n)


class Calls(torch.utils.data.Dataset[Any]):
    """Calls a memoized function of its module, in a nested function."""

    def __getitem__(self, i: int) -> Any:
        return [plain(n) for n in range(i)]


class Static(torch.utils.data.Dataset[Any]):
    @staticmethod
    @shared.memoize
    def load(n: int) -> bytes:
        return bytes(n)


class Holds(torch.utils.data.Dataset[Any]):
    def __init__(self, part: Any) -> None:
        self.part = part


class Neither(torch.utils.data.Dataset[Any]):
    def __getitem__(self, i: int) -> int:
        return i


@pytest.mark.parametrize(
    "dataset",
    [Calls(), Static(), Holds(Static()), Holds(plain), torch.utils.data.Subset(Calls(), [0]),
     torch.utils.data.ConcatDataset([memoizing(shared)] * 2)],
    ids=["global", "static", "part", "function", "subset", "concat"],
)  # fmt: skip
def test_caches_of_memoized_functions_are_found(dataset: Any) -> None:
    assert caches_of(dataset) == [shared]


@pytest.mark.parametrize("dataset", [Neither(), [1, 2], torch.zeros(3)], ids=["own", "list", "tensor"])
def test_datasets_without_memoized_functions_use_no_cache(dataset: Any) -> None:
    assert caches_of(dataset) == []
