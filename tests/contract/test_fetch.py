"""How samples are fetched: indices of any kind, ``__getitems__``, no batching."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_convert,
)

from .datasets import Listed, Numbers, as_is
from .support import Kind, assert_same, flat


class Echo(Dataset):
    """Sample of index i: the name of its type, and i itself."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: Any) -> tuple[str, Any]:
        return type(index).__name__, index


class Bulk(Numbers):
    """Answers lists of indices, and records the requests."""

    def __getitems__(self, indices: Any) -> list[tuple[str, int]]:
        return [(type(indices).__name__, 100 + index) for index in indices]


class NoBulk(Numbers):
    """Has the attribute, but it is None."""

    __getitems__ = None


class Table(Dataset):
    """Indexed by a list at once: bulk loading without automatic batching."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.arange(10)[index] * 2


INDICES = {
    "str": ["a", "bc", ""],
    "tuple": [(1, 2), (3, "x"), ()],
    "numpy": list(np.arange(3, dtype=np.int32)),
    "tensor": list(torch.arange(3)),
    "none": [None, None, None],
    "float": [0.5, 1.5, 2.5],
    "mixed": [1, "a", (2,)],
    "negative": [-1, -2, -3],
    "huge": [2**70, 2**63, 2**64],
    "dict": [{"a": 1}, {}, {"b": [1, 2]}],
    "array": [np.ones(3), np.zeros(2), np.ones(0)],
    "slice": [slice(1), slice(2, 3), slice(None)],
    "bool": [True, False, True],
}


def test_indices_of_any_type_arrive_as_they_are(loader: Kind) -> None:
    cuts = [part for keys in INDICES.values() for part in (keys[:2], keys[2:])]
    for workers in (0, 1):
        made = loader(Echo(), batch_sampler=cuts, num_workers=workers, collate_fn=as_is)
        assert_same(list(made), [[(type(key).__name__, key) for key in cut] for cut in cuts])


class Key:
    """An index object of the user's own."""

    def __init__(self, value: int) -> None:
        self.value = value


class ByKey(Numbers):
    def __getitem__(self, index: Key) -> int:
        return index.value


def test_index_objects(loader: Kind) -> None:
    keys = [Key(i) for i in range(5)]
    made = loader(ByKey(5), sampler=keys, batch_size=2, num_workers=2)
    assert [batch.tolist() for batch in made] == [[0, 1], [2, 3], [4]]


def test_batches_of_any_container(loader: Kind) -> None:
    cuts = [[0, 1], (0, 1), np.array([0, 1]), torch.tensor([0, 1]), range(2), {0, 1}, [3]]
    made = loader(Numbers(4), batch_sampler=cuts, num_workers=1, collate_fn=as_is)
    assert_same(list(made), list(DataLoader(Numbers(4), batch_sampler=cuts, collate_fn=as_is)))


def test_getitems_is_used(loader: Kind) -> None:
    for workers in (0, 2):
        made = loader(Bulk(5), batch_size=2, num_workers=workers)
        want = list(DataLoader(Bulk(5), batch_size=2))
        got = list(made)
        assert_same(got, want)
        assert got[0][1].tolist() == [100, 101]


def test_getitems_gets_the_samplers_own_container(loader: Kind) -> None:
    made = loader(Bulk(5), batch_sampler=[(0, 1), [2], range(2)], num_workers=1,
                  collate_fn=as_is)
    assert [batch[0][0] for batch in made] == ["tuple", "list", "range"]


def test_getitems_none_falls_back(loader: Kind) -> None:
    made = loader(NoBulk(4), batch_size=2, num_workers=1)
    assert [batch.tolist() for batch in made] == [[0, 1], [2, 3]]


class HandsOn(Dataset):
    """Wraps a dataset, forwards all of its attributes, and returns other samples."""

    def __init__(self, within: Any) -> None:
        self.within = within

    def __len__(self) -> int:
        return len(self.within)

    def __getitem__(self, index: int) -> int:
        return -index

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["within"], name)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(d, range(4))], ids=["it", "subset"])
def test_wrappers_own_getitem_is_used(own: Kind, workers: int, wrap: Any) -> None:
    dataset = wrap(HandsOn(Bulk(4)))
    if not own.balanced:  # torch's samples, bit for bit
        with pytest.warns(UserWarning, match="HandsOn forwards __getitems__"):
            got = list(own(dataset, batch_size=2, num_workers=workers))
        assert_same(got, list(DataLoader(dataset, batch_size=2)))
        return
    made = own(dataset, batch_size=2, num_workers=workers)
    assert [batch.tolist() for batch in made] == [[0, -1], [-2, -3]]


def test_getitems_of_the_instance_is_used(own: Kind) -> None:
    dataset: Any = Numbers(4)
    dataset.__getitems__ = Bulk(4).__getitems__
    for workers in (0, 2):
        made = list(own(dataset, batch_size=2, num_workers=workers))
        assert_same(made, list(DataLoader(dataset, batch_size=2)))


class Whole(Numbers):
    """Answers a list of indices with a finished tensor."""

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor(indices) * 3


def _marked(batch: Any) -> Any:
    return "collated", batch


def test_getitems_output_goes_through_collate(loader: Kind) -> None:
    made = loader(Whole(4), batch_size=2, num_workers=1, collate_fn=_marked)
    assert_same(list(made), [("collated", torch.tensor([0, 3])),
                             ("collated", torch.tensor([6, 9]))])


def test_getitems_is_not_used_without_batching(loader: Kind) -> None:
    made = loader(Bulk(3), batch_size=None, num_workers=1)
    assert list(made) == [0, 1, 2]


def test_subsets_and_concatenations(loader: Kind) -> None:
    tensors = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
    for dataset in (
        tensors,
        Subset(tensors, [5, 0, 3]),
        Subset(Bulk(6), [5, 0, 3]),
        Subset(Subset(Numbers(9), range(0, 9, 2)), [4, 1]),
        ConcatDataset([Numbers(3), Listed([10, 11])]),
    ):
        got = list(loader(dataset, batch_size=2, num_workers=2))
        assert_same(got, list(DataLoader(dataset, batch_size=2)))


@pytest.mark.parametrize("dataset", [
    [10, 11, 12], (1, 2, 3), range(3), "abc", {0: "x", 1: "y", 2: "z"},
    np.arange(6).reshape(3, 2), torch.arange(6).reshape(3, 2),
], ids=lambda value: type(value).__name__)
def test_anything_indexable_is_a_dataset(loader: Kind, dataset: Any) -> None:
    for workers in (0, 1):
        got = list(loader(dataset, batch_size=2, num_workers=workers))
        assert_same(got, list(DataLoader(dataset, batch_size=2)))


class Obliging(Numbers):
    """Has a method for every name that is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class Gruff(Numbers):
    """Raises its own error for every missing attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"what is {name}?")


class Odd(Numbers):
    """Cannot be compared, hashed or tested for truth."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: Any) -> bool:
        raise RuntimeError("compared")

    def __bool__(self) -> bool:
        raise RuntimeError("tested")


@pytest.mark.parametrize("kind", [Obliging, Gruff, Odd])
def test_dataset_needs_no_optional_methods(loader: Kind, kind: type) -> None:
    made = loader(kind(6), batch_size=2, num_workers=2, persistent_workers=True)
    for _ in range(2):
        assert flat(made) == list(range(6))


@pytest.mark.parametrize("length", [10**6, 2**40, 2**62])
def test_datasets_of_any_length(loader: Kind, length: int) -> None:
    keys = [0, length - 1, length // 2]
    made = loader(Numbers(length), sampler=keys, batch_size=2, num_workers=2)
    assert [batch.tolist() for batch in made] == [keys[:2], keys[2:]]
    first = iter(loader(Numbers(length), num_workers=1))
    assert next(first).tolist() == [0]


# ------------------------------------------------------- without batching


UNBATCHED: list[Any] = [
    5, 1.5, True, "text", b"bytes", None, np.arange(3), np.float32(2), np.int64(7),
    np.bool_(True), np.array(4), np.array(["a"]), np.array([None], dtype=object),
    np.str_("s"), torch.ones(2), torch.tensor(3), torch.ones(2, requires_grad=True),
    {"a": np.ones(2), "b": 1}, (np.ones(1), "x"), [np.ones(1), (1, 2)], {1, 2},
    torch.arange(6).reshape(2, 3).t(), torch.empty(0, 4), slice(1, 2), 3 + 4j,
]


def test_default_convert(loader: Kind) -> None:
    want = [default_convert(sample) for sample in UNBATCHED]
    for workers in (0, 2):
        got = list(loader(Listed(UNBATCHED), batch_size=None, num_workers=workers))
        assert_same(got, want)


def test_unbatched_collate_gets_the_sample(loader: Kind) -> None:
    for workers in (0, 1):
        made = loader(Numbers(3), batch_size=None, num_workers=workers,
                      collate_fn=_marked)
        assert list(made) == [("collated", 0), ("collated", 1), ("collated", 2)]


def test_lists_of_indices_without_batching(loader: Kind) -> None:
    for workers in (0, 1):
        made = loader(Table(), sampler=[[0, 3], [9], []], batch_size=None,
                      num_workers=workers)
        got = [batch.tolist() if len(batch) else [] for batch in made]
        assert got == [[0, 6], [18], []]


class Unmeasured(Numbers):
    """Its length cannot be asked for."""

    def __len__(self) -> int:
        raise ValueError("length is not known")


def test_sampler_makes_length_unnecessary(loader: Kind) -> None:
    for workers in (0, 2):
        made = loader(Unmeasured(5), sampler=[3, 1], num_workers=workers)
        assert flat(made) == [3, 1]
