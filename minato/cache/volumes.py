"""ops.VolumeDataset through a cache: volumes are kept, and only the crop of a sample is copied.

A volume is kept in slabs of planes, so that one that is larger than an entry may be fits, too. If the crop comes
right after ReadNpy, C code says where a sample's crop begins. It uses the boxes of the label, which are kept with
the volume. All operators after that run on the crop, in C, with the same draws.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ops import Cast, Pipeline, RandBalancedCrop, RandCrop, ReadNpy, VolumeDataset
from .files import Stamp, look
from .order import NO_KEY
from .readers import MadeOf, Reader, estimate, spread

if TYPE_CHECKING:
    from .cache import Cache

#: bytes of a slab at most, and the share of the largest entry that one may be
SLAB, OF_LARGEST = 16 << 20, 0.9
#: does nothing to a sample, in place of an operator: those after it draw as in its pipeline
NOTHING = Cast(image=None, label=None)


def _slab(path: str, dtype: str, low: int, high: int) -> Any:
    """Planes of a file, which the pipeline has checked."""
    return np.array(np.load(path, mmap_mode="r")[:, low:high])


def _boxes(path: str, crop: RandBalancedCrop, dtype: str) -> Any:
    """Returns what a pipeline knows of a label after one pass over it."""
    pipeline = Pipeline([ReadNpy(image=dtype, label=dtype), crop])
    VolumeDataset([(path, path)], pipeline).warm()
    return pipeline._get().export_boxes()


class Volumes(Reader):
    """A VolumeDataset."""

    def __init__(self, dataset: Any, cache: Cache, form: str | None, made_of: MadeOf) -> None:
        super().__init__(dataset, cache, form, made_of)
        read, *rest = dataset.pipeline.operators
        self._dtypes: list[str] = [read.image, read.label]
        crop = rest[0] if rest and isinstance(rest[0], (RandBalancedCrop, RandCrop)) else None
        self._start: Any = None  # where crops begin
        self._pipeline = Pipeline([NOTHING, *rest], _level=dataset.pipeline._level)
        if crop is not None:
            self._size = crop._describe()[4]
            self._start = dataset._twin(0)
            self._start.pipeline = Pipeline([read, crop], _level=dataset.pipeline._level)
            self._start.pipeline._get().import_boxes(dataset.pipeline._get().export_boxes())
            self._start._places, self._start.with_index = True, False
            after = [NOTHING, NOTHING, *rest[1:]]
            self._pipeline = Pipeline(after, _level=dataset.pipeline._level)
        self._keeps = isinstance(crop, RandBalancedCrop) and crop.keep_boxes
        self._crop = crop
        self._boxed: set[str] = set()
        self._most = 0  # bytes of a slab; 0: not known yet
        self._shapes: dict[str, tuple[Stamp, tuple[int, ...]]] = {}
        self._slab = self.memoized(_slab, "pipeline", lambda *key: key, lambda path, *_: path)
        self._boxes = self.memoized(
            _boxes, "pipeline", lambda path, crop, dtype: (path, dtype), lambda path, *_: path
        )

    @classmethod
    def forms_of(cls, dataset: Any) -> tuple[str, ...]:
        return ("decoded",)

    def sizes(self, make: bool) -> dict[str, int | None] | None:
        """Estimates by the files' sizes, so that nothing is made."""
        cases = self.dataset.cases
        found: list[tuple[int | None, int | None]] = []
        for case in spread(len(cases)):
            try:
                size = sum(os.path.getsize(path) for path in cases[case] if path is not None)
            except OSError:
                continue
            found.append((None, size))
        sizes = estimate(found, len(cases))
        if sizes["decoded"] is not None:
            sizes["values"] = max(len(cases), -(-sizes["decoded"] // self._slab_bytes()))
        return sizes

    def key_words(self) -> Iterator[int]:
        """Yields the key of a slab in the middle of each image: if that is cached, others may
        be."""
        dtype = self._dtypes[0]
        words: list[int] = []
        for path, _label in self.dataset.cases:
            word = NO_KEY
            with contextlib.suppress(ValueError, OSError):
                shape = self._shape(path, dtype)
                rows = self._rows(shape, dtype)
                low = shape[1] // 2 // rows * rows
                call = path, dtype, low, min(low + rows, shape[1])
                (word,) = self._slab.key_words([call])
            words.append(word)
        return (words[place % len(words)] for place in range(len(self.dataset)))

    def __getitem__(self, index: Any) -> Any:
        dataset = self.dataset
        place = dataset._place(index)
        key = dataset._key(place)
        image, label = dataset.cases[place % len(dataset.cases)]
        start = None if self._start is None else self._begins(place, key, label)
        volumes: list[Any] = [
            None if path is None else self._box(path, dtype, start)
            for path, dtype in zip((image, label), self._dtypes)
        ]
        arrays = self._pipeline(volumes[0], volumes[1], key=key)
        return dataset._sample(place, [array for array in arrays if array is not None])

    def _begins(self, place: int, key: tuple[int, int], label: str | None) -> tuple[int, ...]:
        """Where in the volume the crop of a sample begins."""
        if self._keeps and label is not None and label not in self._boxed:
            boxes = self._boxes.call((label, self._crop, self._dtypes[1]), {}, None)
            self._start.pipeline._get().import_boxes(boxes)
            self._boxed.add(label)
        native = self._start._get()
        window = np.empty(4, np.int64)
        outputs = tuple(
            window if n == 0 else np.empty(shape, dtype)
            for n, (shape, dtype) in enumerate(self._start._outputs)
        )
        native.read(place, *key, outputs)
        return tuple(int(n) for n in window[1:])

    def _shape(self, path: str, dtype: str) -> tuple[int, ...]:
        """Describes a file. Raises the pipeline's errors for one that it would not take."""
        stamp = look(path)
        known = self._shapes.get(path)
        if known is None or known[0] != stamp:
            shape: tuple[int, ...] = ()
            with contextlib.suppress(ValueError, OSError):
                mapped = np.load(path, mmap_mode="r")
                if mapped.dtype == np.dtype(dtype) and mapped.flags.c_contiguous:
                    shape = mapped.shape
            if len(shape) != 4:
                shape = Pipeline([ReadNpy(image=dtype)])(path)[0].shape
            known = self._shapes[path] = stamp, shape
        return known[1]

    def _box(self, path: str, dtype: str, start: tuple[int, ...] | None) -> Any:
        """The crop of a volume that begins there, or all of it, of the slabs that it lies in."""
        shape = self._shape(path, dtype)
        rows = self._rows(shape, dtype)
        (z, y, x), (depth, height, width) = start or (0, 0, 0), self._size if start else shape[1:]
        box = np.empty((shape[0], depth, height, width), dtype)
        for low in range(z - z % rows, z + depth, rows):
            high = min(low + rows, shape[1])
            first, last = max(z, low), min(z + depth, high)
            part = np.s_[:, first - low : last - low, y : y + height, x : x + width]
            found = self._slab.call((path, dtype, low, high), {}, part)
            if last - first == depth:
                return found
            box[:, first - z : last - z] = found
        return box

    def _rows(self, shape: tuple[int, ...], dtype: str) -> int:
        """Planes of a slab."""
        plane = shape[0] * shape[2] * shape[3] * np.dtype(dtype).itemsize
        return max(1, min(shape[1], self._slab_bytes() // max(1, plane)))

    def _slab_bytes(self) -> int:
        """At most."""
        if self._most == 0:
            store = self.cache._attached()
            largest = SLAB if store is None else int(store.stats()["largest"] * OF_LARGEST)
            self._most = min(SLAB, largest)
        return self._most
