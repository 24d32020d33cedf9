"""Implements part=: copies only a box of one stored array or tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import values

if TYPE_CHECKING:
    from .. import _cache


def check(description: bytes, name: str) -> Any:
    """The description's tree, of one array or tensor; TypeError for other values."""
    node = values.parsed(description)
    if type(node) is not list or node[0] not in "at":
        raise TypeError(
            f"part= is for functions that return one array or tensor, and {name} returns something else"
        )
    return node


def _slices(part: Any, ndim: int) -> tuple[Any, ...]:
    """One index for each dimension."""
    given = part if isinstance(part, tuple) else (part,)
    if Ellipsis in [one for one in given if one is Ellipsis]:
        at = next(i for i, one in enumerate(given) if one is Ellipsis)
        given = (*given[:at], *[slice(None)] * (ndim - len(given) + 1), *given[at + 1 :])
    if len(given) > ndim:
        raise IndexError(f"part= has {len(given)} indices, and the array has {ndim} dimensions")
    for one in given:
        if not isinstance(one, (slice, int, np.integer)) or isinstance(one, bool):
            raise TypeError(f"part= must hold slices, integers and ..., got {type(one).__name__}")
    return (*given, *[slice(None)] * (ndim - len(given)))


def of(value: Any, part: Any) -> Any:
    """The same part of a value that is at hand, as a dense copy."""
    if not isinstance(value, (np.ndarray, torch.Tensor)):
        raise TypeError(f"part= is for functions that return one array or tensor, not {type(value).__name__}")
    found = value[_slices(part, value.ndim)]
    if isinstance(found, torch.Tensor):
        return found.clone(memory_format=torch.contiguous_format)
    return np.array(found, order="C")


def _box(shape: list[int], indices: tuple[Any, ...]) -> tuple[list[int], list[int], tuple[Any, ...]]:
    """Start and count of the box that covers the part, and what is to be taken of the box."""
    start: list[int] = []
    count: list[int] = []
    rest: list[Any] = []
    for size, index in zip(shape, indices):
        if isinstance(index, slice):
            chosen = range(*index.indices(size))
            low = min(chosen[0], chosen[-1]) if len(chosen) else 0
            high = max(chosen[0], chosen[-1]) + 1 if len(chosen) else 0
            start.append(low)
            count.append(high - low)
            stop = chosen.stop - low
            rest.append(slice(chosen.start - low if len(chosen) else 0,
                              None if stop < 0 else stop, chosen.step))  # fmt: skip
        else:
            at = int(index) + size if index < 0 else int(index)
            if not 0 <= at < size:
                raise IndexError(f"part= has the index {index} for a dimension of {size}")
            start.append(at)
            count.append(1)
            rest.append(0)
    return start, count, tuple(rest)


@values.unless_damaged
def read(entry: _cache.Entry, description: bytes, part: Any, name: str) -> tuple[bool, Any]:
    """Whether the entry is still there, and a new copy of a part of its value."""
    node = check(description, name)
    letter, kind, shape, order = node
    if order is not None:  # another order of axes than C's: all of it, then the part
        found, value = values.read(entry, description)
        return found, of(value, part) if found else None
    start, count, rest = _box(shape, _slices(part, len(shape)))
    if letter == "a":
        dtype = values._dtype(kind)
        whole: Any = np.empty(count, dtype)
        address, itemsize = whole.__array_interface__["data"][0], dtype.itemsize
    else:
        whole = torch.empty(count, dtype=getattr(torch, kind))
        address, itemsize = whole.data_ptr(), whole.element_size()
    if 0 not in count and itemsize:
        if not entry.box(address, itemsize, tuple(shape), tuple(start), tuple(count)):
            return False, None
    if all(one == slice(0, n, 1) for one, n in zip(rest, count)):
        return True, whole
    return True, of(whole, rest)
