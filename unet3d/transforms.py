"""The training transforms of the MLPerf Training 3D U-Net reference, in NumPy and SciPy.

Volumes are [1, z, y, x]: image float32, label uint8. Random numbers come from the global
generators of Python's `random` and of NumPy (`numpy.random`), as in the reference, in
its order of draws, so seeding those determines the augmentation:

| draw                                   | generator       |
|----------------------------------------|-----------------|
| foreground or not; component; crop position; each flip; brightness or not; noise or not | `random` |
| class of a foreground crop; brightness factor; noise strength; noise values | `numpy.random` |

Two choices differ from the reference unless `reference_starts` is set: its windows never
start at the last valid position of an axis (`randrange` of the number of steps, not of
the number of positions); here every valid start is equally likely.
"""
from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import ndimage

from unet3d import spec

Pair = tuple[np.ndarray, np.ndarray]

#: A crop around foreground costs this many times a random one: it labels the components of the
#: whole volume. Measured on eight KiTS19 labels (benchmarks/draws.py).
FOREGROUND_COST = 6.0


def largest_boxes(label: np.ndarray, value: int, count: int = 2) -> list[tuple[slice, ...]]:
    """Bounding boxes of the `count` connected components of `value` with most voxels in
    their box, over the three spatial axes of `label` [1, z, y, x], smallest first.

    Neighbours share a face (SciPy's default), as in the reference.
    """
    components, _ = ndimage.label(label[0] == value)
    boxes = ndimage.find_objects(components)
    volumes = [np.prod([s.stop - s.start for s in box]) for box in boxes]
    return [boxes[i] for i in np.argsort(volumes, kind="stable")[-count:]]


class RandBalancedCrop:
    """Crop a patch, with probability `oversampling` around a foreground component.

    Foreground: a class drawn uniformly from the values > 0 that occur, one of that class's
    two components with the largest boxes, then per axis a window that covers the box
    (slack split uniformly) or, if the box is longer, lies inside it; moved back
    inside the volume. Otherwise, and without foreground: a uniform position.
    """

    def __init__(self, patch: Sequence[int], oversampling: float = spec.FOREGROUND_PROBABILITY,
                 reference_starts: bool = False) -> None:
        self.patch = tuple(patch)
        self.oversampling = oversampling
        self.reference_starts = reference_starts

    def __call__(self, image: np.ndarray, label: np.ndarray,
                 known: dict[str, Any] | None = None) -> Pair:
        """Return views of shape [1, *patch]. Raises ValueError if a volume is smaller.

        `known` holds the results of earlier calls for this label, and is added to.
        """
        shape = image.shape[1:]
        if any(n < p for n, p in zip(shape, self.patch)):
            raise ValueError(f"volume {shape} is smaller than the patch {self.patch}; "
                             "preprocess with a larger --min-shape")
        foreground = random.random() < self.oversampling
        box = self._foreground(label, {} if known is None else known) if foreground else None
        starts = self._random_starts(shape) if box is None else self._around(box, shape)
        window = tuple(slice(s, s + p) for s, p in zip(starts, self.patch))
        return image[(slice(None), *window)], label[(slice(None), *window)]

    def _draw(self, last: int) -> int:
        """Uniform in 0..last; the reference's excludes `last`. If there is no choice, nothing is
        drawn, as in the reference."""
        return random.randrange(last if self.reference_starts else last + 1) if last else 0

    def _random_starts(self, shape: Sequence[int]) -> list[int]:
        return [self._draw(n - p) for n, p in zip(shape, self.patch)]

    @staticmethod
    def _foreground(label: np.ndarray, known: dict[str, Any]) -> tuple[slice, ...] | None:
        if "present" not in known:
            known["present"] = np.unique(label[label > 0])
        if known["present"].size == 0:
            return None
        value = int(np.random.choice(known["present"]))
        boxes = known.setdefault("boxes", {})
        if value not in boxes:
            boxes[value] = largest_boxes(label, value)
        return boxes[value][random.randrange(len(boxes[value]))]

    def _around(self, box: tuple[slice, ...], shape: Sequence[int]) -> list[int]:
        starts = []
        for extent, patch, size in zip(box, self.patch, shape):
            slack = patch - (extent.stop - extent.start)
            shift = self._draw(abs(slack))
            start = extent.start - shift if slack >= 0 else extent.start + shift
            starts.append(min(max(0, start), size - patch))
        return starts


    def cost_factor(self, first: random.Random) -> float:
        """How many times the cost of a random crop the next one has, by the first number that it
        draws from `random`; `first` gives that number."""
        return FOREGROUND_COST if first.random() < self.oversampling else 1.0


class RandFlip:
    """Flip each spatial axis with probability 1/3."""

    def __call__(self, image: np.ndarray, label: np.ndarray) -> Pair:
        axes = [axis for axis in (1, 2, 3) if random.random() < spec.FLIP_PROBABILITY]
        if axes:
            image, label = np.flip(image, axes), np.flip(label, axes)
        return image, label


class Cast:
    """float32 image, uint8 label: contiguous copies, so that the whole volume is freed."""

    def __call__(self, image: np.ndarray, label: np.ndarray) -> Pair:
        return image.astype(np.float32, order="C"), label.astype(np.uint8, order="C")


class RandBrightness:
    """With probability 0.1 multiply the image by 1 + f, f ~ U(0.7, 1.3).

    That is the reference's formula (in float64, rounded to float32), a doubling on
    average. `around_one` multiplies by f, which was presumably intended.
    """

    def __init__(self, around_one: bool = False) -> None:
        self.offset = 0.0 if around_one else 1.0

    def __call__(self, image: np.ndarray, label: np.ndarray) -> Pair:
        if random.random() < spec.BRIGHTNESS_PROBABILITY:
            factor = self.offset + np.random.uniform(*spec.BRIGHTNESS_RANGE)
            image = (image * np.array([factor])).astype(image.dtype)
        return image, label


class GaussianNoise:
    """With probability 0.1 add N(0, s), s ~ U(0, 0.1) drawn once per sample."""

    def __call__(self, image: np.ndarray, label: np.ndarray) -> Pair:
        if random.random() < spec.NOISE_PROBABILITY:
            scale = np.random.uniform(0.0, spec.NOISE_STD_MAX)
            image = image + np.random.normal(0.0, scale, image.shape).astype(image.dtype)
        return image, label


class Compose:
    """Apply transforms one after the other."""

    def __init__(self, steps: Sequence[Callable[[np.ndarray, np.ndarray], Pair]]) -> None:
        self.steps = list(steps)

    def __call__(self, image: np.ndarray, label: np.ndarray) -> Pair:
        for step in self.steps:
            image, label = step(image, label)
        return image, label

    def cost_factor(self, first: random.Random) -> float:
        """The same as of the first step, if it has one; else 1."""
        factor = getattr(self.steps[0], "cost_factor", None) if self.steps else None
        return 1.0 if factor is None else float(factor(first))


class TrainTransforms(Compose):
    """The specified chain: crop, flip, cast, brightness, noise.

    Its settings are readable, so that another implementation (native, DALI) can
    do the same: `patch` (z, y, x), `around_one` (brightness x f instead of x (1 + f)),
    `reference_starts` (never crop at an axis's last position), `oversampling` (the share of crops
    around foreground).
    """

    def __init__(self, patch: Sequence[int], around_one: bool = False,
                 reference_starts: bool = False,
                 oversampling: float = spec.FOREGROUND_PROBABILITY) -> None:
        super().__init__([RandBalancedCrop(patch, oversampling, reference_starts),
                          RandFlip(), Cast(), RandBrightness(around_one), GaussianNoise()])
        self.patch = tuple(patch)
        self.around_one = around_one
        self.reference_starts = reference_starts
        self.oversampling = oversampling


def train_transforms(patch: Sequence[int], brightness_around_one: bool = False,
                     reference_starts: bool = False,
                     oversampling: float = spec.FOREGROUND_PROBABILITY) -> TrainTransforms:
    """The specified chain for patches of `patch` voxels."""
    return TrainTransforms(patch, brightness_around_one, reference_starts, oversampling)
