"""What a sampler gives, which may be kept for a while: until it is planned, sent, or named."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch


def as_given(index: Any) -> Any:
    """An index, or a batch of them, as it is now: a sampler may give the same list or array again
    and again, and fill it anew each time."""
    if type(index) is list:
        return index.copy()
    if type(index) is int:
        return index
    if isinstance(index, torch.Tensor):
        return index.clone()
    return copy.copy(index) if isinstance(index, (list, np.ndarray)) else index
