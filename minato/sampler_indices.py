"""What a sampler gives, which may be kept for a while: until it is planned, sent, or named."""

from __future__ import annotations

import copy
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
