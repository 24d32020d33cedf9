"""Samples that are cheaper next to their neighbours, or in the worker that made them before.

Openings are counted, times are never asserted: opening takes so long that keeping neighbours
together pays on any machine. If any worker may take any sample, each of four workers opens each
group, so there are four openings instead of one. A busy machine moves tasks around,
which causes some more openings. The limit, half of the four, on average over three
epochs, is far from both. tests/policy/test_simulate_groups.py shows how few they are in virtual
time.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from contract.support import error_text
from torch.utils.data import ConcatDataset, Dataset, Sampler, Subset, get_worker_info

import minato
from minato.iterators.loader_memo import memo_of
from minato.iterators.dataset_hints import Groups, key_of

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

class Shards(Dataset):
    """Keeps the group that it opened last. Samples: (index, opened here, worker)."""

    def __init__(self, n: int, group: int, open_s: float = 0.02, each_s: float = 0.0005) -> None:
        self.n, self.group, self.open_s, self.each_s = n, group, open_s, each_s
        self.opened = -1

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        opens = self.open(index)
        time.sleep(self.each_s + opens * self.open_s)
        info = get_worker_info()
        return index, int(opens), info.id if info is not None else -1

    def open(self, index: int) -> bool:
        opens, self.opened = self.opened != index // self.group, index // self.group
        return opens


class Named(Shards):
    """Its indices are strings."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(int(index))


class Declared(Shards):
    """Says which samples belong together."""

    def locality_key(self, index: int) -> int:
        return index // self.group


class Keeps(Shards):
    """Keeps every sample that it decoded."""

    def __init__(self, n: int) -> None:
        super().__init__(n, 1, open_s=0.02)
        self.decoded: dict[int, bool] = {}

    def open(self, index: int) -> bool:
        missed = index not in self.decoded
        self.decoded[index] = True
        return missed


class Whole(Sampler):
    """A different order of groups in each epoch; the samples within a group in order, or not."""

    def __init__(self, n: int, group: int, within: bool = False) -> None:
        self.n, self.group, self.within = n, group, within
        self.rng = random.Random(5)

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        groups = [list(range(i, i + self.group)) for i in range(0, self.n, self.group)]
        self.rng.shuffle(groups)
        for group in groups:
            if self.within:
                self.rng.shuffle(group)
            yield from group


class Listed(Sampler):
    """An order for each epoch; the last one again when there are no more. ``at``: the next."""

    def __init__(self, *orders: list[int]) -> None:
        self.orders, self.at = orders, 0

    def __len__(self) -> int:
        return len(self.orders[0])

    def __iter__(self) -> Iterator[int]:
        order = self.orders[min(self.at, len(self.orders) - 1)]
        self.at += 1
        return iter(order)


def make(dataset: Any, **options: Any) -> minato.DataLoader:
    options = {"batch_size": 32, "num_workers": 4, "timeout": 60} | options
    return minato.DataLoader(dataset, **options)


def indices_of(batches: Any) -> list[int]:
    return [int(i) for batch in batches for i in batch[0]]


def openings(loader: Any) -> int:
    """Of an epoch, in which there is each sample once."""
    batches = list(loader)
    assert sorted(indices_of(batches)) == list(range(len(loader.dataset)))
    return sum(int(batch[1].sum()) for batch in batches)


def few(made: Iterable[int], most: int) -> None:
    """On average, an epoch has few openings."""
    seen = list(made)
    assert sum(seen) <= len(seen) * most, f"openings of each epoch: {seen}, and not {most}"


def near(loader: Any) -> bool | None:
    return memo_of(loader).costs.summary()["near"]


def declared_in_parts() -> Dataset:
    parts = ConcatDataset([Declared(128, 16), Subset(Declared(256, 16), range(128, 256))])
    return Subset(parts, range(256))


class TestGroups:
    """One worker makes a group, once that is known to be cheaper, or from the first epoch on if the
    dataset declares its groups."""

    @pytest.mark.parametrize("data, options, most", [
        (Shards(512, 32), {}, 32), (Shards(512, 8), {}, 128),
        (Shards(512, 32), {"persistent_workers": True}, 32),
        (Shards(512, 32), {"batching": "ready", "in_order": False}, 32),
        (Shards(512, 32), {"sampler": Whole(512, 32)}, 32),
        (Shards(512, 8), {"sampler": Whole(512, 8, within=True)}, 128),
        (Shards(1024, 128), {}, 1024 // 32 - 4),  # fewer than batches
        (Shards(1024, 128), {"sampler": Whole(1024, 128)}, 1024 // 32 - 4),
        (Declared(512, 8), {}, 128), (Declared(512, 32), {}, 32),
        (Declared(512, 64), {}, 512 // 32 - 1), (declared_in_parts(), {}, 32),
        # by chance a quarter of the samples are made where they were before: 72 and 54 miss then
        (Keeps(128), {"batch_size": 16, "persistent_workers": True}, 56),
        (Keeps(128), {"batch_size": 16, "shuffle": True, "persistent_workers": True}, 56),
    ])  # fmt: skip
    def test_openings_are_few(self, data: Any, options: dict[str, Any], most: int) -> None:
        loader = make(data, **options)
        declared = type(data) in (Declared, Subset)
        for _ in range(0 if declared else 2 if type(data) is Keeps else 1):
            openings(loader)  # these epochs show it
        few((openings(loader) for _ in range(3)), most)
        if type(data) is Shards:
            assert near(loader) is True
            place, slow = loader.stats()["locality"], loader.stats()["cost"]["slow"]
            assert place["opening"] > place["each"] > 0 and 1 < place["group"] < 2 * data.group
            assert slow is None or slow > place["opening"], "opening a group is nothing slow"


class TestNothingToGain:
    class Uneven(Shards):
        """Some samples are expensive in any worker."""

        def open(self, index: int) -> bool:
            return index % 7 == 0

    def test_samples_in_any_order(self) -> None:
        orders = []
        for cls in (minato.DataLoader, torch.utils.data.DataLoader):
            generator = torch.Generator().manual_seed(3)
            loader = cls(self.Uneven(128, 1, 0.008), 8, shuffle=True, num_workers=3,
                         generator=generator, persistent_workers=True)  # fmt: skip
            orders.append([indices_of(loader) for _ in range(3)])
            if cls is minato.DataLoader:
                assert near(loader) is not True
        assert orders[0] == orders[1]

    def test_samples_that_have_names(self) -> None:
        """The engine stops checking whether they are cheaper where they were made before: names
        have no known place."""
        names: Any = [str(i) for i in range(96)]
        loader = make(Named(96, 1, 0.0), batch_size=8, num_workers=3, sampler=names,
                      persistent_workers=True)  # fmt: skip
        for _epoch in range(12):
            assert indices_of(loader) == list(range(96))
            if near(loader) is False and not loader._iterator._engine.progress()["together"]:
                return
        raise AssertionError("batches are made by single workers for ever")


class TestKeys:
    class Dataset(Dataset):
        def __init__(self, n: int = 20, name: str = "") -> None:
            self.n, self.name = n, name

        def __len__(self) -> int:
            return self.n

        def locality_key(self, index: int) -> Any:
            assert -self.n <= index < self.n
            return f"{self.name}{index % self.n // 5}"

    class Plain(Dataset):
        locality_key = None

        def __init__(self, n: int = 20) -> None:
            self.n = n

        def __len__(self) -> int:
            return self.n

    def test_key_of_dataset_is_found(self) -> None:
        key = key_of(self.Dataset())
        assert key is not None
        assert [key(i) for i in (0, 4, 5, -1)] == [(0, "0"), (0, "0"), (0, "1"), (0, "3")]
        assert key_of(self.Plain()) is None
        assert key_of(range(4)) is None
        assert key_of(torch.arange(4)) is None

    def test_key_from_getattr_is_ignored(self) -> None:
        class Any_:
            def __getattr__(self, name: str) -> Any:
                return lambda index: 0

        assert key_of(Any_()) is None

    def test_key_of_instance_is_found(self) -> None:
        data = self.Plain()
        data.locality_key = lambda index: index // 2
        key = key_of(data)
        assert key is not None and key(3) == (0, 1)

    def test_through_subsets(self) -> None:
        inner = Subset(self.Dataset(), [19, 0, 7, 8, 12])
        outer = Subset(inner, [4, 3, -5])
        for subset, keys in ((inner, "30112"), (outer, "213")):
            key = key_of(subset)
            assert key is not None
            assert [key(i) for i in range(len(keys))] == [(0, k) for k in keys]
            assert [key(i - len(keys)) for i in range(len(keys))] == [(0, k) for k in keys]
        assert key_of(Subset(self.Plain(), [1, 2])) is None

    def test_through_a_concat(self) -> None:
        """A part of no key is one group; equal keys of two parts are two groups."""
        whole = ConcatDataset([self.Dataset(10), self.Plain(3), self.Dataset(10)])
        key = key_of(whole)
        assert key is not None
        keys = [key(i) for i in range(23)]
        assert keys == [key(i - 23) for i in range(23)]
        begins = Groups(key).begins(range(23))
        assert [i for i in range(23) if begins[i]] == [0, 5, 10, 13, 18]
        assert key_of(ConcatDataset([self.Plain(), self.Plain()])) is None

    def test_key_of_nested_datasets_splits_groups(self) -> None:
        concat = ConcatDataset([Subset(self.Dataset(), range(5, 15)), self.Dataset(5)])
        key = key_of(Subset(ConcatDataset([concat, concat]), range(30)))
        assert key is not None
        begins = Groups(key).begins(range(30))
        assert [i for i in range(30) if begins[i]] == [0, 5, 10, 15, 20, 25]

    def test_a_class_derived_from_torchs_is_asked_itself(self) -> None:
        class Mine(Subset):
            pass

        class Keyed(Subset):
            def locality_key(self, index: int) -> int:
                return index

        assert key_of(Mine(self.Dataset(), range(3))) is None
        key = key_of(Keyed(self.Dataset(), range(3)))
        assert key is not None and key(2) == (0, 2)

    def test_groups_go_on_from_batch_to_batch(self) -> None:
        groups = Groups(lambda index: index // 4)
        assert groups.begins([0, 1, 2]) == b"\1\0\0"
        assert groups.begins([3, 4, 5]) == b"\0\1\0"
        assert groups.begins([]) == b""
        assert groups.begins([6, 0]) == b"\0\1"
        assert Groups(lambda index: None).begins([1, 2, 3]) == b"\1\0\0"

    @pytest.mark.parametrize("persistent", [False, True])
    @pytest.mark.parametrize("bad", [3, 150])
    def test_key_error_names_the_index(self, bad: int, persistent: bool) -> None:
        """In the first batches planned, or when the loader draws further."""

        class Bad(Declared):
            bad: int | None = None

            def locality_key(self, index: int) -> int:
                if index == self.bad:
                    raise KeyError(f"no shard of {index}")
                return super().locality_key(index)

        data = Bad(160, 16, open_s=0.005)
        loader = make(data, batch_size=8, num_workers=2, persistent_workers=persistent)
        for _ in range(2):
            data.bad = bad
            with pytest.raises(KeyError, match=f"no shard of {bad}") as caught:
                list(loader)
            assert f"locality_key({bad})" in error_text(caught.value)
            data.bad = None
            assert indices_of(loader) == list(range(160))


N, GROUP = 96, 16  # of what follows
SHUFFLED = random.Random(2).sample(range(N), N)
#: options of loaders, the whole of the dataset's class, and whether groups come in another order
WAYS: dict[str, dict[str, Any]] = {
    "batches": {},
    "groups in another order": {"shuffled": True},
    "drop_last": {"batch_size": 13, "drop_last": True},
    "made by one worker": {"collate_fn": list},
    "single samples": {"batch_size": None},
    "__getitems__": {"together": True},
    "more workers and fewer": {"num_workers": 2, "autoscale": (1, 4)},
    "next epoch early": {"shuffled": True, "prefetch_next_epoch": True},
}


def indices_in(batch: Any) -> list[int]:
    """Of a batch, of a list of samples, or of one sample."""
    if isinstance(batch[0], torch.Tensor):
        return batch[0].tolist()
    return [int(sample[0]) for sample in batch] if isinstance(batch[0], tuple) else [int(batch[0])]


@pytest.mark.parametrize("kind", [Shards, Declared])
class TestEachSampleOnce:
    """However groups are kept together: torch's samples, in torch's order."""

    @pytest.fixture(autouse=True)
    def _kind(self, kind: type[Shards]) -> None:
        self.kind = kind

    def make(self, kind: type[Shards] | None = None, **options: Any) -> minato.DataLoader:
        data = (kind or self.kind)(N, GROUP, open_s=0.008)
        return make(data, **{"batch_size": 8, "num_workers": 3} | options)

    @pytest.mark.parametrize("in_order", [True, False])
    @pytest.mark.parametrize("way", WAYS)
    def test_each_way_gives_torchs_samples(self, way: str, in_order: bool) -> None:
        class Together(self.kind):  # type: ignore[name-defined]
            def __getitems__(self, indices: list[int]) -> list:
                return [self[index] for index in indices]

        options = dict(WAYS[way])
        kind = Together if options.pop("together", False) else None
        whole = options.pop("shuffled", False)
        sampler = Whole(N, GROUP) if whole else None
        loader = self.make(kind, persistent_workers=True, in_order=in_order, sampler=sampler, **options)
        expected = Whole(N, GROUP)
        for _ in range(3):
            order = list(expected) if whole else list(range(91 if "drop_last" in options else N))
            got = list(map(indices_in, loader))
            assert sum(got if in_order else sorted(got), []) == (order if in_order else sorted(order))

    @pytest.mark.parametrize("more", [dict(), dict(batching="ready")])
    @pytest.mark.parametrize("drop_last", [False, True])
    def test_out_of_order(self, more: dict, drop_last: bool) -> None:
        loader = self.make(in_order=False, batch_size=13, drop_last=drop_last, **more)
        for _ in range(3):
            batches = list(loader)
            got = indices_of(batches)
            sizes = sorted(len(batch[0]) for batch in batches)
            assert sizes == ([] if drop_last else [5]) + [13] * 7
            assert len(set(got)) == len(got) and set(got) <= set(range(N))

    @pytest.mark.parametrize("visit", [1, 2])
    def test_worker_death_in_mid_group_loses_nothing(self, visit: int) -> None:
        """Before groups are known, and while they are kept together."""
        visits = torch.multiprocessing.get_context("fork").Value("i", 0)

        class Dies(self.kind):  # type: ignore[name-defined]
            def __getitem__(self, index: int) -> Any:
                if index == 4 * GROUP + 7:
                    with visits.get_lock():
                        visits.value += 1
                        die = visits.value == visit
                    if die:
                        os.kill(os.getpid(), 9)
                return super().__getitem__(index)

        loader = self.make(Dies, persistent_workers=True)
        for _ in range(3):
            assert indices_of(loader) == list(range(N))
        assert visits.value == 4 and loader.stats()["deaths"] == 1

    @pytest.mark.parametrize("more", [dict(), dict(in_order=False, batching="ready")])
    def test_resume_in_another_process_keeps_groups(self, more: dict) -> None:
        """Five batches end in the middle of a group."""
        loader = self.make(**more)
        list(loader)
        it = iter(loader)
        got = indices_of(next(it) for _ in range(5))
        state = loader.state_dict()
        del it
        other = self.make(num_workers=2, **more)
        other.load_state_dict(state)
        got += indices_of(other)
        assert (sorted(got) if more else got) == list(range(N))
        assert sorted(indices_of(other)) == list(range(N))

    @pytest.mark.parametrize("early", [False, True])
    def test_grouped_and_shuffled_orders_alternate(self, early: bool) -> None:
        orders = [list(range(N)), SHUFFLED] * 2
        loader = self.make(sampler=Listed(*orders), persistent_workers=True,
                           prefetch_next_epoch=early)  # fmt: skip
        for order in orders:
            assert indices_of(loader) == order

    def test_an_epoch_left_in_the_middle(self) -> None:
        loader = self.make(persistent_workers=True)
        for taken in (1, 5, 9):
            it = iter(loader)
            assert indices_of(next(it) for _ in range(taken)) == list(range(8 * taken))
            assert indices_of(loader) == list(range(N))

    def test_locality_at_small_memory_limit_is_exact(self) -> None:
        """Four batches fit."""

        class Large(self.kind):  # type: ignore[name-defined]
            def __getitem__(self, index: int) -> Any:
                super().__getitem__(index)
                return torch.full((1 << 16,), float(index))

        loader = self.make(Large, memory_limit=8 << 20, persistent_workers=True)
        for _ in range(3):
            at = 0
            for batch in loader:
                expected = torch.arange(at, at + len(batch), dtype=batch.dtype)
                assert torch.equal(batch, expected[:, None].expand_as(batch))
                at += len(batch)
            assert at == N

    def test_an_error_in_the_middle_of_a_group(self) -> None:
        class Bad(self.kind):  # type: ignore[name-defined]
            def __getitem__(self, index: int) -> Any:
                if index == 3 * GROUP + 5:
                    raise ValueError("corrupt")
                return super().__getitem__(index)

        loader = self.make(Bad, persistent_workers=True)
        for _ in range(3):
            it, got, failed = iter(loader), [], 0
            for _ in range(len(loader)):
                try:
                    got += indices_of([next(it)])
                except ValueError as error:
                    failed += 1
                    assert "corrupt" in str(error)
            assert next(it, None) is None
            lost = range(3 * GROUP, 3 * GROUP + 8)
            assert failed == 1 and got == [i for i in range(N) if i not in lost]


@pytest.mark.parametrize("kind", [Shards, Declared])
def test_batches_are_those_of_any_number_of_workers(kind: type[Shards]) -> None:
    class Augmented(kind):  # type: ignore[misc, valid-type]
        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            draws = [index, np.random.rand(), random.random(), float(torch.rand(()))]
            return torch.tensor(draws, dtype=torch.float64)

    expected: list[torch.Tensor] = []
    for workers in (1, 2, 4):
        data = Augmented(96, 16, open_s=0.008)
        loader = make(data, batch_size=8, num_workers=workers, sampler=Whole(96, 16),
                      generator=torch.Generator().manual_seed(4))  # fmt: skip
        got = [batch for _ in range(2) for batch in loader]
        expected = expected or got
        assert len(got) == len(expected) == 24
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("kind, place", [(Shards, 0), (Shards, 45), (Declared, 45)])
@pytest.mark.parametrize("more", [dict(), dict(in_order=False), dict(collate_fn=list)])
def test_slow_sample_does_not_delay_its_group(
    kind: type[Shards], place: int, more: dict
) -> None:
    """In the second epoch, when groups are known. A worker that leaves the others of the group to
    the worker that makes it, or stops at the window, never opens the gate."""
    n = 120
    context = torch.multiprocessing.get_context("fork")
    gate, passed, shut = context.Event(), context.Semaphore(0), context.Event()

    class Gate(kind):  # type: ignore[misc, valid-type]
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            if index == place and shut.is_set():
                assert gate.wait(60)
            elif shut.is_set():
                passed.release()
            return sample

    whole = {"batch_size": 1} if "collate_fn" in more else {"batch_size": 2}
    loader = make(Gate(n, 20, open_s=0.01), num_workers=2, persistent_workers=True,
                  **whole, **more)  # fmt: skip
    list(loader)
    shut.set()
    release = threading.Thread(
        target=lambda: (all([passed.acquire(timeout=50) for _ in range(n - 1)]), gate.set())
    )
    release.start()
    batches = list(loader)
    release.join()
    if "collate_fn" in more:
        got = [sample[0] for batch in batches for sample in batch]
    else:
        got = indices_of(batches)
    assert (got if more.get("in_order", True) else sorted(got)) == list(range(n))
    assert passed.acquire(timeout=0) is False
