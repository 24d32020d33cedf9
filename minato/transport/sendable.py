"""Whether another worker than the one that made a sample may collate it.

A batch with a custom collate_fn is split over workers only if that changes nothing
(csrc/schedule/policy_chunk.h decides when). A sample must come out of a message bit for bit
as it went in, including its memory order, on which sums may depend.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from . import messages

_SCALARS = (type(None), bool, int, float, complex, str, bytes)
#: depth to which nested containers are examined
_DEPTH = 8
#: nanoseconds for a byte that is copied twice, into the message and out of it. The figure is for
#: memory of which a part is used for the first time
_BYTE_NS = 1


def sendable(sample: Any, depth: int = _DEPTH) -> bool:
    """Whether a sample consists only of plain numbers, text, dense arrays and tensors."""
    kind = type(sample)
    if kind in _SCALARS:
        return True
    if kind is torch.Tensor:
        return (
            messages._is_plain(sample)
            and not sample.requires_grad
            and not sample.is_conj()
            and not sample.is_neg()
            and sample.is_contiguous()
        )
    if kind is np.ndarray:
        flags = sample.flags
        return (
            not sample.dtype.hasobject
            and sample.dtype.isnative
            and (flags.c_contiguous or flags.f_contiguous)
        )
    if isinstance(sample, np.generic):
        return not sample.dtype.hasobject
    if depth == 0:
        return False
    if kind is dict:
        return all(
            type(key) in _SCALARS and sendable(value, depth - 1)
            for key, value in sample.items()
        )
    if kind is list or kind is tuple or (isinstance(sample, tuple) and hasattr(kind, "_fields")):
        return all(sendable(value, depth - 1) for value in sample)
    return False


def sending_ns(samples: list[Any]) -> int:
    """Nanoseconds for sending one of these samples, or -1 if some cannot be sent."""
    if not samples or not all(sendable(sample) for sample in samples):
        return -1
    try:
        took = min(_round_trip(samples) for _ in range(2))  # the first one warms up
    except Exception:
        return -1
    return took // len(samples)


def _round_trip(samples: list[Any]) -> int:
    begin = time.thread_time_ns()
    data, buffers = messages.dumps(samples)
    messages.loads(data, buffers)
    bytes_sent = len(data) + sum(buffer.nbytes for buffer in buffers)
    return time.thread_time_ns() - begin + _BYTE_NS * bytes_sent
