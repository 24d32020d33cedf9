"""Helpers for indices of a sampler, which are stored until they are planned, sent or reported."""

from __future__ import annotations

import array
import copy
import operator
import pickle
from typing import Any

import numpy as np
import torch

#: If a batch's first element has such a type, none of its elements is copied.
_FIXED = (int, str, float, np.generic, type(None))


def as_given(index: Any) -> Any:
    """A copy of an index or batch of indices. A sampler may yield the same list, array or dict
    each time and refill it. A tensor is cloned even if it is a view, as iterating over a tensor
    yields, because pickling a view would write the whole storage."""
    kind = type(index)
    if kind is list or kind is tuple:
        if index and not isinstance(index[0], _FIXED):
            return kind([as_given(one) for one in index])
        return index.copy() if kind is list else index
    if isinstance(index, _FIXED):
        return index
    if isinstance(index, torch.Tensor):
        return index.clone()
    if kind is dict:
        return {key: as_given(one) for key, one in index.items()}
    return copy.copy(index) if isinstance(index, (list, dict, set, np.ndarray)) else index


def each_index(batch: Any) -> Any:
    """The indices of a batch; anything that is not a batch counts as a single index."""
    if not isinstance(batch, (list, tuple, np.ndarray, torch.Tensor)):
        return [batch]
    if isinstance(batch, (list, tuple)) or batch.ndim > 1:
        return batch
    return batch.tolist() if batch.ndim == 1 else [batch]


def whole_number(index: Any) -> int:
    """The number under which a sample's cost is stored. It is the index itself if that is an
    integer of any type, the first element of a tuple, list or array, and else -1."""
    while not hasattr(index, "__index__") or getattr(index, "ndim", 0) > 0:
        if not isinstance(index, (list, tuple, np.ndarray, torch.Tensor)) or not len(index):
            return -1
        index = index[0]
    try:
        number = operator.index(index)
    except Exception:  # for example a float tensor
        return -1
    return number if 0 <= number < 2**63 else -1


def _behind_numbers(indices: Any, sent: Any) -> bytes | tuple[int, bytes]:
    pickled = pickle.dumps(sent)
    numbers = array.array("q", map(whole_number, indices))
    known = max(numbers, default=-1) >= 0
    return (len(numbers), numbers.tobytes() + pickled) if known else pickled


def numbered(batch: Any) -> bytes | tuple[int, bytes]:
    """A pickle of a batch's indices for workers, preceded by their numbers if any has one."""
    if not isinstance(batch, (list, tuple, np.ndarray, torch.Tensor)):
        return pickle.dumps(batch)
    return _behind_numbers(each_index(batch), batch)


def numbered_alone(index: Any) -> bytes | tuple[int, bytes]:
    """Like numbered(), for the index of a single sample."""
    return _behind_numbers([index], index)
