"""A dataset's methods, and the ways in which minato asks it for samples."""

from __future__ import annotations

import inspect
import threading
import types
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset

from .errors import program_level
from .sampler_indices import whole_number

#: (index of a sample) -> number of the part that has it, and its index there
Find = Callable[[Any], "tuple[int, Any]"]

#: signatures of functions, cached
_signatures: weakref.WeakKeyDictionary[Any, inspect.Signature] = weakref.WeakKeyDictionary()


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


class NextSeed(threading.local):
    """The seed that a loader gives this thread's next sample."""

    value: int | None = None

    def take(self) -> int | None:
        """It, once: it counts for one sample."""
        value, self.value = self.value, None
        return value


def is_stateful(part: Any) -> bool:
    """Whether an object really has both methods; ``__getattr__`` is ignored. Three kinds of objects
    are not stateful: those with ``state_dict = None``, those whose methods need more arguments (as
    in MosaicML's streams), and modules of a network. The methods of a module are for its
    weights."""
    if type(part) is types.GeneratorType or isinstance(part, torch.nn.Module):
        return False
    save, load = offered(part, "state_dict"), offered(part, "load_state_dict")
    return save is not None and _takes(save) and load is not None and _takes(load, None)


def _takes(method: Any, *arguments: Any) -> bool:
    """Whether a method can be called with these arguments. Cached, because it is asked often."""
    function = method
    if isinstance(method, types.MethodType):
        function, arguments = method.__func__, (method.__self__, *arguments)
    kept = _signatures if isinstance(function, types.FunctionType) else {}
    try:
        signature = kept.get(function) or inspect.signature(function)
        kept[function] = signature
        signature.bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # written in C, without a signature
        pass
    return True


def parts_of(dataset: Any) -> tuple[list[Any], Find]:
    """The datasets inside torch's Subset and ConcatDataset, in their order, and a function that
    finds a sample in them. The function raises IndexError if there is no such sample."""
    if type(dataset) is Subset:  # a derived class may return other samples
        parts, find_inside = parts_of(dataset.dataset)
        indices = dataset.indices
        return parts, lambda index: find_inside(indices[index])
    if type(dataset) is not ConcatDataset:
        return [dataset], lambda index: (0, index)
    found = [parts_of(inner) for inner in dataset.datasets]
    first_parts = list(accumulate((len(parts) for parts, _find in found), initial=0))
    ends = dataset.cumulative_sizes
    begins = [0, *ends]

    def find(index: Any) -> tuple[int, Any]:
        if index < 0:
            index += ends[-1]
        inner = bisect_right(ends, index)
        if index < 0 or inner == len(ends):
            raise IndexError(f"sample index {index} is out of range (length {ends[-1]})")
        part, index = found[inner][1](index - begins[inner])
        return first_parts[inner] + part, index

    return [part for parts, _find in found for part in parts], find


def by_part(
    dataset: Any, of: Callable[[Any], Callable[..., Any] | None], unknown: Any
) -> Callable[..., Any] | None:
    """Combines functions of a sample's number, and perhaps more arguments. of: the function of one
    of parts_of(); None if it has none. unknown: the result for samples of such parts.
    Returns None if no part has a function."""
    parts, find = parts_of(dataset)
    functions = [of(part) for part in parts]
    if parts[0] is dataset or all(function is None for function in functions):
        return functions[0]

    def combined(index: Any, *more: Any) -> Any:
        part, index = find(index)
        function, number = functions[part], whole_number(index)
        return unknown if function is None or number < 0 else function(number, *more)

    return combined


def behind_subsets(dataset: Any) -> tuple[Any, list[Subset[Any]]]:
    """The dataset inside nested torch Subsets, and the Subsets, the outermost first."""
    subsets = []
    while type(dataset) is Subset:  # a derived class may return other samples
        subsets.append(dataset)
        dataset = dataset.dataset
    return dataset, subsets


def has_shared_buffers(dataset: Any) -> bool:
    """Whether the dataset holds a tensor in shared memory with fewer rows than it has samples. It may
    write samples into that, as many as torch's window has, so a sample past the window would overwrite
    one that waits."""
    inner = behind_subsets(dataset)[0]
    shared = [
        held for held in own_attributes(inner).values()
        if isinstance(held, torch.Tensor) and held.layout == torch.strided and held.is_shared()
    ]  # fmt: skip
    try:
        return any(held.ndim > 0 and 1 < len(held) < len(inner) for held in shared)
    except Exception:  # of the program's code; an iterable dataset has no window of samples
        return False


def fetches_batches(dataset: Any) -> bool:
    """Whether one call should fetch all samples of a batch, as torch does for a dataset with
    ``__getitems__``. Datasets of torch that hold others may have that method, but ask these for
    single samples if they have none, so the inner datasets decide. A wrapper whose ``__getattr__`` forwards the
    method of its inner dataset does not count: its own ``__getitem__`` would be bypassed."""
    inner = behind_subsets(dataset)[0]
    if offered(inner, "__getitems__") is None:
        return False
    if type(inner) not in (StackDataset, ConcatDataset):
        return True
    parts = inner.datasets
    return any(map(fetches_batches, parts.values() if isinstance(parts, dict) else parts))


def forwards_getitems(dataset: Any) -> bool:
    """Whether torch would fetch whole batches from a dataset without its own ``__getitems__``."""
    inner = behind_subsets(dataset)[0]
    return not fetches_batches(dataset) and bool(getattr(inner, "__getitems__", None))


def warn_of_forwarded_getitems(dataset: Any) -> None:
    """Warns if torch's fetcher would bypass the dataset's ``__getitem__``."""
    if forwards_getitems(dataset):
        name = type(behind_subsets(dataset)[0]).__name__
        warnings.warn(
            f"{name} forwards __getitems__ of the dataset that it wraps, so scheduling='static' "
            f"calls the wrapped __getitems__ and skips {name}.__getitem__. Define "
            f"{name}.__getitems__, or make __getattr__ raise AttributeError for it.",
            stacklevel=program_level(),
        )


class ByItem:
    """Single samples of a dataset that torch's fetcher would wrongly ask for whole batches. Those of
    a Subset are fetched as its ``__getitems__`` does for a dataset without one."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.subsets = behind_subsets(dataset)

    def __getitem__(self, index: Any) -> Any:
        for subset in self.subsets:
            index = subset.indices[index]
        return self.dataset[index]


def by_sample(dataset: Any, batched: bool = True) -> Any:
    """An object that gives single samples of a dataset. Not batched: the dataset itself, as torch
    uses it; a Subset's index may then be a list of indices."""
    return ByItem(dataset) if batched and type(dataset) is Subset else dataset
