"""Where the samples of torch's Subset and ConcatDataset are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset

from minato.dataset_calls import by_part, fetches_batches, parts_of

A, B, C = [*range(10, 15)], [*range(20, 23)], [*range(30, 37)]
CONCAT = ConcatDataset([A, Subset(B, [2, 0]), ConcatDataset([C, B])])  # type: ignore[list-item]


@pytest.mark.parametrize("dataset", [
    A, Subset(A, [4, 0, 2]), Subset(Subset(C, range(1, 7)), [5, -6, 0]), CONCAT,
    Subset(CONCAT, [16, 5, 0, -1, 7]), ConcatDataset([CONCAT, Subset(CONCAT, [3, 6])]),
    Subset(CONCAT, np.array([16, 5])), Subset(CONCAT, torch.tensor([16, 5])),
], ids=["plain", "subset", "nested", "concat", "of-concat", "concats", "array", "tensor"])  # fmt: skip
def test_found_samples_equal_those_of_dataset(dataset: Any) -> None:
    parts, find = parts_of(dataset)
    assert all(type(part) is list for part in parts)
    for index in range(-len(dataset), len(dataset)):
        part, inner = find(index)
        assert parts[part][inner] == dataset[index]


@pytest.mark.parametrize("index", [17, -18])
def test_sample_outside_concatenation_is_refused(index: int) -> None:
    assert len(CONCAT) == 17
    with pytest.raises(IndexError):
        parts_of(CONCAT)[1](index)


def test_derived_classes_are_parts_themselves() -> None:
    outer = type("Mine", (Subset,), {})(A, [1])
    assert parts_of(Subset(outer, [0]))[0] == [outer]


def test_functions_of_parts_are_combined() -> None:
    def of(part: Any) -> Any:
        return None if part is B else lambda index, add: part[index] + add

    numbers = by_part(CONCAT, of, "unknown")
    assert numbers is not None
    assert [numbers(i, 100) for i in (4, 5, 7, 13, 14)] == [114, "unknown", 130, 136, "unknown"]
    assert by_part(Subset(CONCAT, [0]), lambda _part: None, 0) is None
    assert by_part(A, of, 0) is not None and by_part(B, of, 0) is None


def test_index_from_the_end_is_unknown() -> None:
    """A Subset passes such an index on, and only the dataset itself knows its length."""
    numbers = by_part(Subset(A, [-1, np.int64(2)]), lambda part: part.__getitem__, None)
    assert numbers is not None and [numbers(0), numbers(1)] == [None, 12]


class Together(list[int]):
    """Fetches batches."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[i] for i in indices]


@pytest.mark.parametrize(("dataset", "together"), [
    (Subset(A, [1]), False), (Subset(Together(A), [1]), True),
    (StackDataset(A, B + B[:2]), False), (StackDataset(a=A, b=Subset(A, range(5))), False),
    (StackDataset(A, Together(A)), True), (StackDataset(a=Subset(Together(A), range(5))), True),
    (Subset(StackDataset(A), [1]), False), (StackDataset(StackDataset(Together(A))), True),
    (ConcatDataset([A, Subset(B, [1])]), False), (type("Mine", (StackDataset,), {})(A), True),
], ids=["subset", "subset of batches", "stack", "stack of names", "stack with batches",
        "stack of batches", "subset of stack", "stack of stacks", "concat", "derived"])  # fmt: skip
def test_inner_datasets_decide_whether_batches_are_fetched(dataset: Any, together: bool) -> None:
    assert fetches_batches(dataset) is together
