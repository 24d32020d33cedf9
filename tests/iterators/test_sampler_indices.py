"""Samplers that yield the same list or array again and again, refilled each time."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import minato
from minato.sampler_indices import as_given, numbered_alone, whole_number

SIZE, BATCH = 48, 3
BAD = (7, 20, 21, 40)


class Reuses(torch.utils.data.Sampler[Any]):
    """Batches of samples."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        batch: Any = {"list": [0] * BATCH, "array": np.zeros(BATCH, int),
                      "tensor": torch.zeros(BATCH, dtype=torch.int64)}[self.kind]  # fmt: skip
        for first in range(0, SIZE, BATCH):
            for row in range(BATCH):
                batch[row] = first + row
            yield batch
        for row in range(BATCH):
            batch[row] = -1

    def __len__(self) -> int:
        return SIZE // BATCH


class Some(torch.utils.data.Dataset[Any]):
    """Some of its samples cannot be made."""

    def __init__(self, bad: tuple[int, ...]) -> None:
        self.bad = bad

    def __getitem__(self, index: Any) -> int:
        if int(index) in self.bad:
            raise ValueError(f"sample {int(index)} is corrupt")
        return int(index)


MODES: dict[str, dict[str, Any]] = {
    "inline": dict(num_workers=0),
    "balanced": dict(num_workers=2),
    "threads": dict(num_workers=2, worker_type="thread", seed_per_sample=False),
    "static": dict(num_workers=2, scheduling="static"),
    "collate": dict(num_workers=2, collate_fn=torch.utils.data.default_convert),
}
#: each kind of batch where this process and where a worker fetches, one of them in every mode
KINDS_AND_MODES = pytest.mark.parametrize("kind, mode", [
    (kind, mode) for kind in ("list", "array", "tensor") for mode in MODES
    if kind == "array" or mode in ("inline", "balanced")
])  # fmt: skip


def as_lists(loader: Any) -> list[list[int]]:
    return [[int(i) for i in batch] for batch in loader]


@KINDS_AND_MODES
def test_errors_name_the_sample(kind: str, mode: str) -> None:
    loader = minato.DataLoader(Some((20,)), batch_sampler=Reuses(kind), **MODES[mode])
    with pytest.raises(ValueError, match="sample 20 is corrupt") as raised:
        list(loader)
    told = str(raised.value) + "".join(getattr(raised.value, "__notes__", []))
    if MODES[mode]["num_workers"]:
        assert "batch 6" in told and "20" in told.split("minato: ")[1]


@KINDS_AND_MODES
def test_skipped_sample_is_named(kind: str, mode: str) -> None:
    loader = minato.DataLoader(
        Some(BAD), batch_sampler=Reuses(kind), on_error="skip", max_errors=len(BAD), **MODES[mode]
    )
    assert sum(as_lists(loader), []) == [i for i in range(SIZE) if i not in BAD]
    if MODES[mode]["num_workers"]:
        assert [int(i) for i, *_ in loader.stats()["failed"]["latest"]] == list(BAD)


@KINDS_AND_MODES
def test_replacements_come_from_the_same_epoch(kind: str, mode: str) -> None:
    """Batches are small: replacements may come from batches before and after."""
    loader = minato.DataLoader(
        Some(BAD), batch_sampler=Reuses(kind), on_error="replace", max_errors=len(BAD), **MODES[mode]
    )
    got = as_lists(loader)
    assert [len(batch) for batch in got] == [BATCH] * (SIZE // BATCH)
    for number, batch in enumerate(got):
        asked = range(BATCH * number, BATCH * (number + 1))
        for row, index in zip(asked, batch):
            assert index == row or row in BAD and 0 <= index < SIZE and index not in BAD


class OneDict(torch.utils.data.Sampler[dict[str, int]]):
    def __iter__(self) -> Iterator[dict[str, int]]:
        query: dict[str, int] = {}
        for index in range(10):
            query["index"] = index
            yield query

    def __len__(self) -> int:
        return 10


class Queried(torch.utils.data.Dataset[Any]):
    def __getitem__(self, query: dict[str, int]) -> int:
        if query["index"] == 6:
            raise ValueError("no answer")
        return query["index"]


@pytest.mark.parametrize("workers", [0, 2])
def test_refilled_dict_index_is_copied(workers: int) -> None:
    loader = minato.DataLoader(
        Queried(), batch_size=None, sampler=OneDict(), on_error="replace", max_errors=1,
        num_workers=workers,
    )  # fmt: skip
    got = [int(i) for i in loader]
    assert got[:6] + got[7:] == [0, 1, 2, 3, 4, 5, 7, 8, 9] and got[6] in (5, 7)


def test_tensor_view_index_is_pickled_alone() -> None:
    """As when iterating over a permutation: each pickle would otherwise hold all of it."""
    order = torch.randperm(10_000)
    for index in (list(order[:8]), tuple(order[:8]), order[3], {"at": order[0]}, [(order[0], 1)]):
        kept = as_given(index)
        assert type(kept) is type(index) and str(kept) == str(index)
        assert len(pickle.dumps(kept)) < 8_000


class OnceOnly(torch.utils.data.Sampler[Any]):
    """Its batches can be gone through once."""

    def __iter__(self) -> Iterator[Iterator[int]]:
        return (map(int, range(at, at + BATCH)) for at in range(0, SIZE, BATCH))

    def __len__(self) -> int:
        return SIZE // BATCH


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_one_pass_batches_keep_their_indices(on_error: str) -> None:
    loader = minato.DataLoader(
        Some((20,)), batch_sampler=OnceOnly(), on_error=on_error, max_errors=1
    )
    got = as_lists(loader)
    assert len(got) == SIZE // BATCH and got[6][:2] == [18, 19]


class Together(torch.utils.data.Dataset[Any]):
    """Modifies the list that it is given."""

    generator = None

    def __init__(self, bad: tuple[int, ...] = (), sorts: bool = False) -> None:
        self.bad, self.sorts = bad, sorts

    def __getitems__(self, indices: list[int]) -> list[int]:
        if self.generator is None:
            self.generator = np.random.default_rng()
        if self.sorts:
            indices.sort()
        made = []
        while indices:
            index = indices.pop(0)
            if index in self.bad:
                raise ValueError(f"sample {index} is corrupt")
            made.append(index)
        return made


ORDER = [5, 1, 3, 0, 7, 2, 4, 6]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("seeds", [None, True])
def test_dataset_that_empties_its_index_list(workers: int, seeds: bool | None) -> None:
    loader = minato.DataLoader(
        Together(), 4, sampler=ORDER, num_workers=workers, seed_per_sample=seeds
    )
    assert as_lists(loader) == [ORDER[:4], ORDER[4:]]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("sorts", [False, True])
def test_failed_sample_of_emptied_list_is_named(workers: int, sorts: bool) -> None:
    loader = minato.DataLoader(
        Together((3,), sorts), 4, sampler=ORDER, num_workers=workers,
        on_error="skip", max_errors=1,
    )  # fmt: skip
    assert [sorted(batch) for batch in as_lists(loader)] == [[0, 1, 5], [2, 4, 6, 7]]
    if workers:
        assert [index for index, *_ in loader.stats()["failed"]["latest"]] == [3]


class AnyIndex(torch.utils.data.Dataset[int]):
    """Takes any index."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: Any) -> int:
        return len(str(index))

    def seed_sample(self, seed: int) -> None:
        pass


class Hinted(AnyIndex):
    def __init__(self) -> None:
        self.asked: list[int] = []

    def cost_hint(self, index: int) -> float:
        self.asked.append(index)
        return 0.5


def choice_of(given: str) -> dict[str, Any]:
    choice = GIVEN[given]
    return choice if "batch_sampler" in choice else {"batch_size": BATCH, **choice}


def grouped(indices: Any) -> list[Any]:
    return [indices[first : first + BATCH] for first in range(0, SIZE, BATCH)]


#: what a sampler may yield instead of int
GIVEN: dict[str, dict[str, Any]] = {
    "int": dict(sampler=range(SIZE)),
    "int alone": dict(sampler=range(SIZE), batch_size=None),
    "numpy": dict(sampler=list(np.arange(SIZE, dtype=np.int32))),
    "numpy alone": dict(sampler=list(np.arange(SIZE)), batch_size=None),
    "tensor": dict(sampler=torch.arange(SIZE)),
    "array of no dimension": dict(sampler=[np.array(i) for i in range(SIZE)]),
    "tuple": dict(sampler=[(i, "large") for i in range(SIZE)]),
    "tuple alone": dict(sampler=[(i, "large") for i in range(SIZE)], batch_size=None),
    "tuple of numpy": dict(sampler=[(i, 224) for i in np.arange(SIZE)]),
    "batch of tuple": dict(batch_sampler=[tuple(part) for part in grouped(range(SIZE))]),
    "batch of array": dict(batch_sampler=grouped(np.arange(SIZE))),
    "batch of tensor": dict(batch_sampler=grouped(torch.arange(SIZE))),
    "rows of an array": dict(batch_sampler=grouped(np.arange(2 * SIZE).reshape(2, SIZE).T)),
}
WAYS: dict[str, dict[str, Any]] = {
    "rows": dict(),
    "threads": dict(worker_type="thread"),
    "collate": dict(collate_fn=torch.utils.data.default_convert),
    "replace": dict(on_error="replace"),
    "unseeded": dict(seed_per_sample=False),
}


@pytest.mark.parametrize("given, way", [
    *((given, "rows") for given in GIVEN),
    *((given, way) for way in WAYS if way != "rows"
      for given in ("int", "numpy alone", "tuple", "batch of array")),
])  # fmt: skip
def test_costs_are_learned_for_any_integer_index(given: str, way: str) -> None:
    options = WAYS[way]
    choice = choice_of(given)
    collate_fn = options.get("collate_fn")
    theirs = torch.utils.data.DataLoader(AnyIndex(), collate_fn=collate_fn, **choice)
    loader = minato.DataLoader(AnyIndex(), num_workers=2, **choice, **options)
    assert str(list(loader)) == str(list(theirs))
    assert loader.stats()["cost"]["known"] == SIZE


@pytest.mark.parametrize("given", GIVEN)
def test_cost_hint_gets_the_number_of_any_index(given: str) -> None:
    data = Hinted()
    list(minato.DataLoader(data, num_workers=1, **choice_of(given)))
    assert {*data.asked} >= {*range(SIZE)} and {*map(type, data.asked)} == {int}


@pytest.mark.parametrize("index", ["7", 7.0, None, (), [], {}, torch.tensor(7.0), np.array([]),
                                   np.float64(7), -7, 2**63, ("7", 7)], ids=str)  # fmt: skip
def test_an_index_without_number_has_no_known_cost(index: Any) -> None:
    assert whole_number(index) == -1
    assert type(numbered_alone(index)) is bytes


def test_costs_of_text_indices_are_averaged() -> None:
    loader = minato.DataLoader(AnyIndex(), BATCH, sampler=list(map(str, range(SIZE))), num_workers=1)
    assert sum(map(len, loader)) == SIZE
    cost = loader.stats()["cost"]
    assert (cost["known"], cost["samples"]) == (0, SIZE)
