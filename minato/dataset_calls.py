"""A dataset's methods, and the ways in which minato asks it for samples."""

from __future__ import annotations

import bisect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.data import ConcatDataset, Subset

_T = TypeVar("_T")


def attribute(part: Any, name: str) -> Any:
    """An attribute of a program's object that torch would not look for; None if it has none or
    its property raises."""
    try:
        return getattr(part, name, None)
    except Exception:
        return None


def own_attributes(part: Any) -> Any:
    """An object's own attributes, by name, without calling its ``__getattr__``."""
    try:
        return object.__getattribute__(part, "__dict__")
    except AttributeError:
        return {}


def offered(part: Any, name: str) -> Callable[..., Any] | None:
    """A method that a dataset or sampler really has; ``__getattr__`` is ignored."""
    if name in own_attributes(part) or hasattr(type(part), name):
        method = attribute(part, name)
        return method if callable(method) else None
    return None


def through_subset(
    subset: Subset[Any], inner: Callable[[Any], _T] | None
) -> Callable[[Any], _T] | None:
    """Composes a function of an index with a subset's indices. inner: the function of the
    subset's dataset, or None if it has none."""
    indices = subset.indices
    return None if inner is None else lambda index: inner(indices[index])


def part_of(whole: ConcatDataset[Any], index: int) -> tuple[int, int]:
    """Which dataset of a ConcatDataset has a sample, by its place in the list, and which sample of
    that dataset it is. index: from 0; past the end, the place is the length of the list."""
    part = bisect.bisect_right(whole.cumulative_sizes, index)
    return part, index - (whole.cumulative_sizes[part - 1] if part else 0)


def behind_subsets(dataset: Any) -> tuple[Any, list[Subset[Any]]]:
    """The dataset inside nested torch Subsets, and the Subsets, the outermost first."""
    subsets = []
    while type(dataset) is Subset:  # a derived class may return other samples
        subsets.append(dataset)
        dataset = dataset.dataset
    return dataset, subsets


def fetches_batches(dataset: Any) -> bool:
    """Whether one call should fetch all samples of a batch, as torch does for a dataset with
    ``__getitems__``. A Subset always has that method, but asks its dataset for single samples if
    that has none, so the inner dataset decides. A wrapper whose ``__getattr__`` forwards the
    method of its inner dataset does not count: its own ``__getitem__`` would be bypassed."""
    return offered(behind_subsets(dataset)[0], "__getitems__") is not None


def forwards_getitems(dataset: Any) -> bool:
    """Whether torch would fetch whole batches from a dataset without its own ``__getitems__``."""
    inner = behind_subsets(dataset)[0]
    return not fetches_batches(dataset) and bool(getattr(inner, "__getitems__", None))


def warn_of_forwarded_getitems(dataset: Any) -> None:
    """Warns if torch's fetcher would bypass the dataset's ``__getitem__``."""
    if forwards_getitems(dataset):
        name = type(behind_subsets(dataset)[0]).__name__
        warnings.warn(
            f"{name} has no __getitems__ of its own, but forwards that of the dataset it wraps. "
            "With scheduling='static' that method is asked for whole batches, as in torch's "
            f"loader, and {name}.__getitem__ is not called: samples may be wrong. Give {name} a "
            "__getitems__, or have its __getattr__ raise AttributeError for that name.",
            stacklevel=2,
        )


class ByItem:
    """Replaces a dataset that torch's fetcher would wrongly ask for whole batches."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return by_sample(self.dataset)[index]


class _OneByOne:
    """Samples of a Subset, fetched as its ``__getitems__`` does for a dataset without one."""

    def __init__(self, subsets: list[Subset[Any]]) -> None:
        self.subsets = subsets

    def __getitem__(self, index: Any) -> Any:
        for subset in self.subsets:
            index = subset.indices[index]
        return subset.dataset[index]


def by_sample(dataset: Any, batched: bool = True) -> Any:
    """An object that gives single samples of a dataset. Not batched: the dataset itself, as torch
    uses it; a Subset's index may then be a list of indices."""
    subsets = behind_subsets(dataset)[1] if batched else []
    return _OneByOne(subsets) if subsets else dataset
