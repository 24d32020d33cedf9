"""What a sampler gives, which may be kept for a while: until it is planned, sent, or named."""

from __future__ import annotations

import array
import copy
import operator
import pickle
from typing import Any

import numpy as np
import torch

#: of which others stay what they are, too: batches are of one kind
_FIXED = (int, str, float, np.generic, type(None))


def as_given(index: Any) -> Any:
    """An index, or a batch of them, as it is now: a sampler may give the same list, array or dict
    again and again, and fill it anew each time. A tensor that is a view of a larger one, as those
    are that iterating it gives, is then one of its own: a pickle would hold all of the other."""
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
    """The indices of a batch, or of what is none the one that it is."""
    if not isinstance(batch, (list, tuple, np.ndarray, torch.Tensor)):
        return [batch]
    if isinstance(batch, (list, tuple)) or batch.ndim > 1:
        return batch
    return batch.tolist() if batch.ndim == 1 else [batch]


def whole_number(index: Any) -> int:
    """The number by which the cost of a sample is known: an integer of any type counts as itself,
    a tuple, list or array as its first element; -1 for anything else."""
    while not hasattr(index, "__index__") or getattr(index, "ndim", 0) > 0:
        if not isinstance(index, (list, tuple, np.ndarray, torch.Tensor)) or not len(index):
            return -1
        index = index[0]
    try:
        number = operator.index(index)
    except Exception:  # a tensor that holds a float
        return -1
    return number if 0 <= number < 2**63 else -1


def _behind_numbers(indices: Any, sent: Any) -> bytes | tuple[int, bytes]:
    pickled = pickle.dumps(sent)
    numbers = array.array("q", map(whole_number, indices))
    known = max(numbers, default=-1) >= 0
    return (len(numbers), numbers.tobytes() + pickled) if known else pickled


def numbered(batch: Any) -> bytes | tuple[int, bytes]:
    """A pickle of a batch's indices for workers, behind the number of each, if any has one."""
    if not isinstance(batch, (list, tuple, np.ndarray, torch.Tensor)):
        return pickle.dumps(batch)
    return _behind_numbers(each_index(batch), batch)


def numbered_alone(index: Any) -> bytes | tuple[int, bytes]:
    """The same of the index of one sample."""
    return _behind_numbers([index], index)
