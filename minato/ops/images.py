"""torchvision's ImageFolder, from whose photos workers decode what samples show, and native_images: a
dataset with torchvision's usual transforms becomes one with minato's."""
from __future__ import annotations

import dataclasses
import os
from array import array
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Subset
from torchvision import datasets, get_image_backend, transforms
from torchvision.transforms import v2

from ..dataset_calls import NextSeed
from .jpeg import REFERENCES, RandomResizedCropJpeg, ResizeCenterCropJpeg, _Transform


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


# ---- minato's transforms in place of torchvision's ------------------------------------------

#: of torchvision: what makes a tensor of a crop, and changes single values
TENSOR = ("ToTensor", "PILToTensor", "ToImage", "ToDtype", "ConvertImageDtype", "ToPureTensor", "Normalize")


def native_images(dataset: Any) -> Any:
    """The same dataset, with minato.ops in place of torchvision's usual transforms.

    `dataset`: torchvision's ImageFolder or DatasetFolder of images, or torch's Subset of one. Its transforms must be
    Resize and CenterCrop or RandomResizedCrop, perhaps RandomHorizontalFlip, a conversion to a tensor
    (ToTensor, PILToTensor, or ToImage and ToDtype), and perhaps Normalize, of the first or second version. What
    follows stays as it is. The bits are the same from the same seeds where Python makes the samples (see
    ImageFolder for where minato's loader does not). Returns an ImageFolder, or a Subset of one; `dataset` is
    unchanged. Raises ValueError if anything of it is not known, and names it.
    """
    if type(dataset) is Subset:
        return Subset(native_images(dataset.dataset), dataset.indices)
    if type(dataset) not in (datasets.ImageFolder, datasets.DatasetFolder):
        raise ValueError(f"native_images() takes torchvision's ImageFolder, DatasetFolder or a Subset of one, got "
                         f"{type(dataset).__name__}. Give it each part of a list or ConcatDataset; a class derived from "
                         "ImageFolder may make other samples")  # fmt: skip
    if dataset.transform is None:
        raise ValueError("native_images() needs the dataset's transform, which is None")
    loader = dataset.loader
    backend = get_image_backend()
    if loader is not datasets.folder.pil_loader and (
        loader is not datasets.folder.default_loader or backend != "PIL"
    ):
        raise ValueError(f"native_images() does not know what the loader {loader!r} does (image backend {backend}). "
                         "Nothing was changed.")  # fmt: skip
    made = ImageFolder.__new__(ImageFolder)
    made.__setstate__({**vars(dataset), "loader": str, "transform": _replaced(dataset.transform)})
    made.imgs = made.samples
    if made.transforms is not None:  # only for the representation
        made.transforms = type(made.transforms)(made.transform, made.target_transform)
    return made


def _flat(transform: Any) -> list[Any]:
    if type(transform) in (transforms.Compose, v2.Compose):
        return [each for one in transform.transforms for each in _flat(one)]
    return [transform]


def _is(transform: Any, *names: str) -> bool:
    """Whether a transform is torchvision's of one of these names, of either version."""
    found = [getattr(module, name, None) for module in (transforms, v2) for name in names]
    return type(transform) in found


def _replaced(transform: Any) -> Any:
    """minato's transform in place of torchvision's, followed by those after it. Raises ValueError."""
    steps = _flat(transform)
    crop = _crop_of(steps)
    random = isinstance(crop, RandomResizedCropJpeg)
    number, tensor = 1 if random else 2, []
    options: dict[str, Any] = {"flip": 0.0} if random else {}
    for step in steps[number:]:
        if random and not options["flip"] and _is(step, "RandomHorizontalFlip") and step.p > 0:
            options["flip"] = float(step.p)
        elif _is(step, *TENSOR):
            tensor.append(step)
        else:
            break
        number += 1
    normal = [step for step in tensor if _is(step, "Normalize")]
    if normal:
        options |= {name: [float(x) for x in getattr(normal[-1], name)] for name in ("mean", "std")}
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 256, 1).repeat(3, 2)
    wanted: Any = Image.fromarray(pixels)
    for step in tensor:
        wanted = step(wanted)
    for reference in REFERENCES:
        for dtype in ("float32", "uint8"):
            if len(normal) > 1 or (normal and dtype == "uint8") or not isinstance(wanted, torch.Tensor):
                continue
            made = dataclasses.replace(crop, **options, dtype=dtype, reference=reference)
            table = made._table()
            if wanted.dtype == table.dtype and torch.equal(wanted.reshape(3, 256), table):
                rest = steps[number:]
                return made if not rest else transforms.Compose([made, *rest])
    raise _unknown(steps, *(tensor or steps[number:][:1]))


def _crop_of(steps: list[Any]) -> Any:
    first = steps[0]
    bilinear = getattr(first, "interpolation", None) in (
        transforms.InterpolationMode.BILINEAR, "bilinear", Image.Resampling.BILINEAR)  # fmt: skip
    try:
        if _is(first, "RandomResizedCrop") and bilinear:
            return RandomResizedCropJpeg(first.size, tuple(first.scale), tuple(first.ratio))
        if _is(first, "Resize") and bilinear and first.max_size is None and _is(steps[1], "CenterCrop"):
            size = [first.size] if isinstance(first.size, int) else list(first.size)
            if len(size) == 1:
                return ResizeCenterCropJpeg(size[0], steps[1].size)
    except (IndexError, TypeError, ValueError):
        pass
    raise _unknown(steps, *steps[:2])


def _unknown(steps: list[Any], *which: Any) -> ValueError:
    return ValueError(
        f"native_images() does not know {' and '.join(map(repr, which))} among {[type(one).__name__ for one in steps]}. "
        "It knows RandomResizedCrop, or Resize(length) and CenterCrop, both bilinear, then RandomHorizontalFlip, "
        "a conversion to a tensor and Normalize. Nothing was changed."
    )
