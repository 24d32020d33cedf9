"""What a dataset offers, and how it is asked for samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.data import Subset

_T = TypeVar("_T")


def attribute(part: Any, name: str) -> Any:
    """An attribute of an object of the program's that torch would not look for; None where it
    has none, or where its property raises."""
    try:
        return getattr(part, name, None)
    except Exception:
        return None


def own_attributes(part: Any) -> Any:
    """An object's own, by name; its ``__getattr__`` is not called."""
    try:
        return object.__getattribute__(part, "__dict__")
    except AttributeError:
        return {}


def offered(part: Any, name: str) -> Callable[..., Any] | None:
    """A method that a dataset or sampler has, not one that its ``__getattr__`` makes up."""
    if name in own_attributes(part) or hasattr(type(part), name):
        method = attribute(part, name)
        return method if callable(method) else None
    return None


def through_subset(
    subset: Subset[Any], inner: Callable[[Any], _T] | None
) -> Callable[[Any], _T] | None:
    """The same by the subset's indices. inner: what its dataset says of an index, if it does."""
    indices = subset.indices
    return None if inner is None else lambda index: inner(indices[index])


def behind_subsets(dataset: Any) -> tuple[Any, list[Subset[Any]]]:
    """The dataset that torch's subsets of it show, and these, the outermost first."""
    subsets = []
    while type(dataset) is Subset:  # a class derived from it may give other samples
        subsets.append(dataset)
        dataset = dataset.dataset
    return dataset, subsets


def fetches_batches(dataset: Any) -> bool:
    """Whether a batch's samples are to be asked for in one call, as torch does of a dataset
    with ``__getitems__``. A Subset has that for its dataset's sake: where that one has none
    the Subset asks it for one sample after another, and so may we. A wrapper whose ``__getattr__``
    hands on that of the dataset within has none: its own ``__getitem__`` would be passed by."""
    return offered(behind_subsets(dataset)[0], "__getitems__") is not None


def hands_on_batches(dataset: Any) -> bool:
    """Whether torch would ask a dataset for whole batches that has no ``__getitems__`` of its own."""
    inner = behind_subsets(dataset)[0]
    return not fetches_batches(dataset) and bool(getattr(inner, "__getitems__", None))


def warn_of_batches_handed_on(dataset: Any) -> None:
    """Where torch's fetcher asks such a dataset."""
    if hands_on_batches(dataset):
        name = type(behind_subsets(dataset)[0]).__name__
        warnings.warn(
            f"{name} has no __getitems__ of its own, and hands on that of the dataset that it "
            "wraps. With scheduling='static' that is asked for whole batches, as torch's loader does, "
            f"and {name}.__getitem__ is not called: samples may be wrong. Give {name} a "
            "__getitems__, or have its __getattr__ raise AttributeError for that name.",
            stacklevel=2,
        )


class ByItem:
    """In place of a dataset that torch's fetcher would ask for whole batches."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return by_sample(self.dataset)[index]


class _OneByOne:
    """Samples of a Subset as its ``__getitems__`` gets them from a dataset without."""

    def __init__(self, subsets: list[Subset[Any]]) -> None:
        self.subsets = subsets

    def __getitem__(self, index: Any) -> Any:
        for subset in self.subsets:
            index = subset.indices[index]
        return subset.dataset[index]


def by_sample(dataset: Any, batched: bool = True) -> Any:
    """What gives a sample of a dataset that is not to be asked for whole batches. Not batched: the
    dataset itself, as torch asks it then; to a Subset an index may be a list of them."""
    subsets = behind_subsets(dataset)[1] if batched else []
    return _OneByOne(subsets) if subsets else dataset
