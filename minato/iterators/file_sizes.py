"""Bytes of the files that a dataset lists, from which the loader predicts costs.

A dataset without ``cost_hint`` often holds its files as a list, one entry for each sample: paths,
or tuples or dicts with paths in them (torchvision's folders, MONAI's data lists). Their sizes are
known before any sample was made. csrc/schedule/policy_bytes.h learns whether they say anything.
"""

from __future__ import annotations

import itertools
import os
import stat
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from ..dataset_calls import by_part, own_attributes
from ..sampler_indices import each_index, whole_number
from ..time_share import TimeShare
from .across_iterators import Memo

#: Looking up sizes takes at most this share of the trainer's time, beyond what the first ones may
#: take. The dataset has not asked for it, so it must not delay the first batch.
SHARE, FIRST_NS = 0.01, 5_000_000

#: batches that may wait for the thread
BATCHES_MOST = 1024

#: parts of an entry that may be paths; an entry may also be a long text, cut into words
PARTS = 8

#: index -> bytes. Raises an OSError, or another exception, if it cannot tell.
SizeOf = Callable[[int], int]


def _is_file(path: Any) -> bool:
    try:
        return isinstance(path, (str, os.PathLike)) and stat.S_ISREG(os.stat(path).st_mode)
    except Exception:  # no such file, no path, or code of the program
        return False


def _size(path: Any) -> int:
    return os.stat(path).st_size


def _entries(listed: Any) -> SizeOf | None:
    """How to find the bytes of an entry of a list, by what its first entry is like."""
    first = listed[0]
    if isinstance(first, (tuple, list, dict)):
        parts = first.items() if isinstance(first, dict) else enumerate(first)
        places = [key for key, part in itertools.islice(parts, PARTS) if _is_file(part)]
    else:
        return (lambda index: _size(listed[index])) if _is_file(first) else None
    return (lambda index: sum(_size(listed[index][k]) for k in places)) if places else None


def _is_list(value: Any) -> bool:
    return type(value) in (list, tuple) or (
        type(value) is np.ndarray and value.ndim == 1 and value.dtype.kind in "UO"
    )


def size_of(dataset: Any) -> SizeOf | None:
    """How to find the bytes of the files that a sample is read from; None if the dataset lists
    none. Looks into torch's Subset and ConcatDataset, and into a dataset that another one wraps."""
    return by_part(dataset, _of_part, 0)


def _of_part(dataset: Any) -> SizeOf | None:
    try:
        length = len(dataset)
    except Exception:  # of the program's code
        return None
    values = {id(value): value for value in own_attributes(dataset).values()}.values()
    lists = [value for value in values if _is_list(value) and len(value) == length > 0]
    found = [size for size in map(_entries, lists) if size is not None]
    if not found:
        return _of_wrapped(values, length)
    return found[0] if len(found) == 1 else lambda index: sum(size(index) for size in found)


def _of_wrapped(values: Any, length: int) -> SizeOf | None:
    """Of the only dataset among an object's attributes that has as many samples."""
    inner: Sequence[Any] = [v for v in values if isinstance(v, Dataset) and hasattr(v, "__len__")]
    try:
        inner = [value for value in inner if len(value) == length]
        return size_of(inner[0]) if len(inner) == 1 else None
    except Exception:  # of the program's code; or datasets that hold each other
        return None


class FileSizes:
    """Looks up sizes in the look-ahead, once for each index, while that takes little time.

    A thread of its own does it, which ends when it has nothing to do: a mount that does not answer
    holds up the thread, and not the program."""

    def __init__(self, dataset: Any, memo: Memo) -> None:
        self._memo = memo
        self._dataset = dataset
        self._size_of: SizeOf | None = None  # found out by the thread
        #: whether there are, or may be, sizes to look up
        self.known = memo.size > 0 and (not memo.sized or 0 in memo.sized)
        self._batches: deque[Any] = deque()
        self._thread: threading.Thread | None = None
        self._time = TimeShare(SHARE, first_ns=FIRST_NS)

    def look_up(self, batch: Any) -> None:
        """Has the bytes of a batch's samples, or of one sample, told to the cost model."""
        if not self.known or not self._time.allows() or len(self._batches) >= BATCHES_MOST:
            return
        self._batches.append(batch)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="minato-file-sizes", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with self._time:
            if self._size_of is None:
                self._size_of = size_of(self._dataset)
                self.known = self._size_of is not None
            if self._size_of is not None and not self._memo.sized:
                self._memo.sized = bytearray(self._memo.size)
        while self._size_of is not None and self._batches and self._time.allows():
            with self._time:
                self._tell(self._size_of, self._batches.popleft())

    def _tell(self, size: SizeOf, batch: Any) -> None:
        indices, sizes = self._found(size, batch)
        if indices:
            self._memo.costs.tell_bytes(indices, sizes)
            for index in indices:
                self._memo.sized[index] = 1
        elif 0 not in self._memo.sized:
            self.known, self._size_of = False, None  # all were looked up

    def _found(self, size: SizeOf, batch: Any) -> tuple[array[int], array[int]]:
        """Indices that are looked up now, and their bytes."""
        indices, sizes = array("q"), array("q")
        sized = self._memo.sized
        for one in each_index(batch):
            index = whole_number(one)
            if not 0 <= index < len(sized) or sized[index]:
                continue
            try:
                found = size(index)
            except Exception:  # no such file, or an entry unlike the first
                found = 0
            indices.append(index)
            sizes.append(found)
            if not self._time.allows():
                break
        return indices, sizes
