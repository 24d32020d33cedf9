"""Training cases that are still NIfTI: a worker prepares a case when it loads it, by the code of
preprocess.py.

With a cache (minato.Cache), each case is prepared once for all workers, ranks and jobs of the
machine, and later loads copy it from memory. A cache keeps no value over a 64th of its size, so
a case is kept in slabs of slices.
"""
from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unet3d import nifti, preprocess
from unet3d.data import Case, list_cases
from unet3d.nifti import DataError

SLAB_BYTES = 32 << 20
Pair = tuple[np.ndarray, np.ndarray]
_held = threading.local()  # the prepared case of the load() that this thread is in


@dataclasses.dataclass(frozen=True)
class SourceCase(Case):
    """One case of NIfTI files; `nbytes` counts the volumes that preprocess.py would make of it."""

    shape: tuple[int, int, int]  # (z, y, x), prepared
    settings: preprocess.Settings
    cache: int | None  # bytes

    def load(self, mapped: bool = False) -> Pair:
        """Prepare (float32 image, uint8 label), both [1, z, y, x], or copy them from the cache.
        Raises DataError."""
        if self.cache is None:
            return preprocess.load_case(self.image.parent, self.settings)
        slab = memoized(self.cache)
        image, label = np.empty((1, *self.shape), np.float32), np.empty((1, *self.shape), np.uint8)
        _held.pair = None
        try:
            for number, place in enumerate(self.slabs()):
                image[:, place], label[:, place] = slab(self, number)
        finally:
            _held.pair = None
        return image, label

    def slabs(self) -> list[slice]:
        """The slices of each part that is kept as a value."""
        assert self.cache is not None
        depth, height, width = self.shape
        most = min(SLAB_BYTES, self.cache // 80)
        rows = max(1, most // (height * width * 5))
        return [slice(first, first + rows) for first in range(0, depth, rows)]

    def key(self) -> tuple[Any, ...]:
        """Returns what a prepared case depends on, but for the files' content."""
        return str(self.image), self.settings.spacing, self.settings.min_shape, self.cache


@functools.cache
def cache_of(size: int) -> Any:
    """This process's cache of prepared cases."""
    import minato

    return minato.Cache(size)


@functools.cache
def memoized(size: int) -> Callable[[SourceCase, int], Pair]:
    """The function from (case, number) to a slab of the pair, which is kept in a cache."""
    # With a version, because _held cannot be compared: it never outlives a load().
    @cache_of(size).memoize(key=lambda case, number: (case.key(), number), version=1,
                            files=lambda case, number: (case.image, case.label))
    def slab(case: SourceCase, number: int) -> Pair:
        if _held.pair is None:
            _held.pair = preprocess.load_case(case.image.parent, case.settings)
        slabs = case.slabs()
        if number == 0:
            # Other workers wait for this one. When they have it, the others are there, too.
            for other in range(1, len(slabs)):
                slab(case, other)
        image, label = _held.pair
        return image[:, slabs[number]], label[:, slabs[number]]

    return slab


def list_sources(folder: Path, settings: preprocess.Settings,
                 cache: str | int | None = None) -> list[SourceCase]:
    """The labelled NIfTI cases of a folder, sorted; `cache` is the size of the cache, None: none.
    Raises DataError, and ValueError for a size that is none."""
    size = None
    if cache is not None:
        import minato

        size = minato.Cache(cache).size
        memoized(size)  # opened here, it outlives the workers of an epoch
    found = []
    for case in preprocess.labelled_cases(folder):
        image, label = case / nifti.IMAGE_NAME, case / nifti.LABEL_NAME
        if not label.is_file():
            raise DataError(f"{label}: missing")
        shape = preprocess.prepared_shape(*nifti.read_shape(image), settings)
        nbytes = int(np.prod(shape)) * 5 + 2 * 128  # as .npy files
        found.append(SourceCase(case.name, image, label, nbytes, shape, settings, size))
    return found


def cases_of(data: Path | None, source: Path | None, patch: Sequence[int],
             cache: str | int | None = None) -> Sequence[Case]:
    """The cases of a preprocessed folder, or those of a folder of NIfTI cases, padded to the patch
    when they are prepared. Raises DataError."""
    if source is None:
        assert data is not None
        return list_cases(data)
    depth, height, width = patch
    return list_sources(source, preprocess.Settings(min_shape=(depth, height, width)), cache)
