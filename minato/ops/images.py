"""torchvision's ImageFolder, from whose photos workers decode what samples show."""
from __future__ import annotations

import os
from array import array
from typing import Any

from torchvision import datasets

from ..dataset_calls import NextSeed
from .jpeg import _Transform


class ImageFolder(datasets.ImageFolder):  # type: ignore[misc]
    """torchvision's ImageFolder for RandomResizedCropJpeg or ResizeCenterCropJpeg: the same classes,
    order, `samples`, `targets` and errors. A sample is (tensor [3, height, width], int).

    minato.DataLoader makes its samples in native workers: threads that need no Python and no GIL and
    write straight into the batch (`worker_type` says when). A sample's random numbers then come from
    the loader's seed for the sample, so every number and every kind of workers makes the same samples.
    Under other loaders they come from torch's generator. Photos that only Pillow decodes are made in
    Python, with the same random numbers.

    `transform`: called with a path. With another one than these two, or with a `target_transform`,
    workers are processes. `options`: torchvision's other options.
    """

    def __init__(self, root: Any, transform: Any, target_transform: Any = None, **options: Any) -> None:
        super().__init__(root, transform, target_transform, loader=str, **options)
        self._sample_seed = NextSeed()

    def __getstate__(self) -> Any:
        return {name: value for name, value in vars(self).items()
                if name not in ("_sample_seed", "_made", "_bytes")}

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)
        self._sample_seed = NextSeed()

    def seed_sample(self, seed: int) -> None:
        """Set the seed of this thread's next sample."""
        self._sample_seed.value = seed

    def __getitem__(self, index: int) -> Any:
        """Make a sample. Raises IndexError, and what reading and decoding the photo raises, with its path."""
        seed = self._sample_seed.take()
        if seed is None or not isinstance(self.transform, _Transform):
            return super().__getitem__(index)
        path, target = self.samples[index]
        made = self.transform._keyed(path, seed)
        return made, target if self.target_transform is None else self.target_transform(target)

    def cost_hint(self, index: int, *, seed: int | None = None, epoch: int | None = None) -> float | None:
        """What sample `index` will cost, in bytes of its file that are decoded. None: not known."""
        if not isinstance(self.transform, _Transform):
            return None
        if len(self._bytes) != len(self.samples):
            self._bytes = array("q", [0]) * len(self.samples)
        if not self._bytes[index]:
            try:
                self._bytes[index] = os.stat(self.samples[index][0]).st_size
            except OSError:  # the sample raises it
                return None
        return self._bytes[index] * (1.0 if seed is None else self.transform._share(seed))

    _bytes = array("q")  # of each file, once it was asked for; 0: not known
    _made: tuple[Any, Any] | None = None  # what the photos were made of, and they

    def native_pipeline(self) -> Any:
        """A capsule "minato.native_pipeline.v1" (minato/ops.h): this dataset for C threads. Raises
        ValueError if they cannot make its samples."""
        if not isinstance(self.transform, _Transform):
            raise ValueError(f"its transform is not one of minato.ops: {self.transform}")
        if self.target_transform is not None:
            raise ValueError("it has a target_transform")
        made_of = self.transform, list(self.samples)
        if self._made is None or self._made[0] != made_of:
            paths = [path for path, _target in self.samples]
            targets = [target for _path, target in self.samples]
            self._made = made_of, self.transform._photos(paths, targets)
        return self._made[1].native()
