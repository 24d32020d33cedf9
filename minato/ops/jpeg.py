"""Transforms from the file of a photo to a normalized tensor, in one pass."""
from __future__ import annotations

import dataclasses
import functools
import glob
import importlib.util
import io
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .._not_linux import CORE
from ..errors import warn
from .operators import MASK

if CORE:
    from .. import _ops
else:
    _ops = None  # type: ignore[assignment]

#: what a transform is called with
File = str | os.PathLike[str] | bytes | bytearray | memoryview | np.ndarray | torch.Tensor

REFERENCES = ("pillow", "pillow v2")
DTYPES = ("float32", "float16", "bfloat16", "uint8")
ORIENTATION = 0x0112  # the EXIF tag
#: width and height of a photo whose size is not known yet
TYPICAL = (500, 375)
#: no side of a JPEG photo is longer
LONGEST = 65535


class Library(NamedTuple):
    """The decoder that this process uses."""

    path: str
    handle: Any


def _libraries() -> list[str]:
    """Where a libjpeg-turbo may be: first the one that Pillow itself uses."""
    spec = importlib.util.find_spec("PIL")
    folders = [] if spec is None else spec.submodule_search_locations or []
    bundled = [path for folder in folders for path in sorted(
        glob.glob(os.path.join(os.path.dirname(folder), "pillow.libs", "libjpeg-*.so.62.*")))]
    return [*bundled, "libjpeg.so.62", "libjpeg.so.8"]


@functools.cache
def find_library() -> Library | None:
    """The first library that works, or None."""
    for path in _libraries() if CORE else []:
        try:
            return Library(path, _ops.jpeg_library(path))
        except (OSError, ValueError):
            continue
    return None


@functools.cache
def _library() -> Library | None:
    """Like find_library(), and warns if there is none."""
    found = find_library()
    if found is None:
        warn("minato.ops decodes photos with Pillow, which is slower, because there is no "
             "libjpeg-turbo: install Pillow's wheel (pip install pillow) or the system's "
             "libjpeg-turbo. `minato doctor` shows which one is used.")
    return found


@functools.cache
def _tall_down_first() -> bool:
    """Whether the installed Pillow resizes tall images vertically first, as it does since 13."""
    try:
        from PIL import __version__
    except ImportError:
        return True
    return int(__version__.partition(".")[0]) >= 13


class _Crop(NamedTuple):
    """A region of a photo (left, top, width, height), the size that it is resized to, and the
    window of the result that is wanted."""

    region: tuple[int, int, int, int]
    size: tuple[int, int]
    window: tuple[int, int, int, int]
    flip: bool


def _read(file: Any) -> tuple[Any, str | None]:
    """(bytes, path) of what a transform was called with."""
    if isinstance(file, (str, os.PathLike)):
        path = os.fsdecode(file)
        with open(path, "rb") as opened:
            return opened.read(), path
    if isinstance(file, torch.Tensor):
        file = file.numpy()
    if isinstance(file, np.ndarray):
        if file.ndim != 1 or file.dtype != np.uint8:
            raise TypeError(f"a file's bytes are uint8 with one dimension, got {file.dtype} of "
                            f"shape {file.shape}")
        return np.ascontiguousarray(file), None
    if not isinstance(file, (bytes, bytearray, memoryview)):
        raise TypeError(f"pass a photo's path or the bytes of its file, got {type(file).__name__}. "
                        "For torchvision's ImageFolder, loader=str passes the path.")
    return file, None


@functools.cache
def _table(mean: tuple[float, ...] | None, std: tuple[float, ...] | None, dtype: str,
           reference: str) -> torch.Tensor:
    """[3, 256]: what each value of each colour becomes, by the operations of torchvision's
    ToTensor (or ToDtype) and Normalize."""
    values = torch.arange(256, dtype=torch.uint8).repeat(3, 1)
    if dtype == "uint8":
        return values
    numbers = values.to(torch.float32)
    numbers = numbers.div_(255) if reference == "pillow" else numbers.mul_(1.0 / 255)
    if mean is not None:
        numbers.sub_(torch.tensor(mean).view(3, 1))
    if std is not None:
        numbers.div_(torch.tensor(std).view(3, 1))
    return numbers.to(getattr(torch, dtype))


@functools.cache
def _logarithms(ratio: Sequence[float], dtype: torch.dtype) -> list[float]:
    return torch.log(torch.tensor(ratio, dtype=dtype)).tolist()


class _Transform:
    """What both transforms share. A subclass is a frozen dataclass with these fields, and says
    which crop it wants of a photo."""

    mean: Sequence[float] | None
    std: Sequence[float] | None
    dtype: str
    reference: str
    orient: bool
    decode: str

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            if getattr(self, name) is not None:
                self._numbers(name, 3)
        if self.std is not None and 0.0 in self.std:
            raise ValueError(f"std must not be zero, got {self.std!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.dtype == "uint8" and (self.mean is not None or self.std is not None):
            raise ValueError("mean and std need a floating-point dtype, got 'uint8'")
        if self.decode not in ("exact", "scaled"):
            raise ValueError(f"decode must be 'exact' or 'scaled', got {self.decode!r}")
        if self.reference not in REFERENCES:
            raise ValueError(f"reference must be one of {REFERENCES}, got {self.reference!r}")
        _library()

    def _numbers(self, name: str, count: int) -> None:
        """Makes a field a tuple of numbers."""
        found = tuple(float(value) for value in getattr(self, name))
        if len(found) != count or not all(map(math.isfinite, found)):
            raise ValueError(f"{name} must be {count} numbers, got {getattr(self, name)!r}")
        object.__setattr__(self, name, found)

    def _pair(self, name: str) -> None:
        """Makes a field a pair (height, width) of lengths."""
        value = getattr(self, name)
        pair = tuple(map(int, value)) if isinstance(value, Sequence) else (int(value),) * 2
        if len(pair) != 2 or not 0 < min(pair) <= max(pair) <= LONGEST:
            raise ValueError(f"{name} must be a length in pixels or (height, width), got {value!r}")
        object.__setattr__(self, name, pair)

    def _crop(self, width: int, height: int) -> _Crop:
        """Draws or computes the crop of a photo."""
        raise NotImplementedError

    def _table(self) -> torch.Tensor:
        return _table(self.mean, self.std, self.dtype, self.reference)

    def _part(self) -> tuple[Any, ...]:
        """What a sample shows of a photo, as _ops.Photos.job() takes it."""
        raise NotImplementedError

    def __call__(self, file: File) -> torch.Tensor:
        """Make a tensor [3, height, width] of a photo's path or the bytes of its file."""
        return self._call(file, self._crop)

    def _keyed(self, file: File, seed: int) -> torch.Tensor:
        """The tensor that native workers make for a sample with this seed."""
        part = self._part()
        return self._call(
            file, lambda width, height: _Crop(*_ops.Photos.job(part, width, height, seed, MASK)))

    def _share(self, seed: int) -> float:
        """What a sample with this seed costs, as a share of its file's bytes: codes are read up to
        the part's last row. Correlates by 0.94 with measured times."""
        width, height = TYPICAL
        (_left, top, w, h), *_ = _ops.Photos.job(self._part(), width, height, seed, MASK)
        return 0.12 + (top + h) / height + 0.5 * w * h / (width * height)

    def _photos(self, paths: list[str], targets: Sequence[int]) -> Any:
        """The samples of files for native workers. Raises ValueError if they cannot make them."""
        kind = {"float32": "f", "float16": "f", "uint8": "u"}.get(self.dtype)
        library = _library()
        if kind is None or self.orient or library is None:
            raise ValueError("there is no libjpeg-turbo" if library is None else
                             f"native workers have no orient=True and no dtype {self.dtype!r}")
        most: int | None = MASK
        if importlib.util.find_spec("PIL") is not None:
            from PIL import Image

            most = Image.MAX_IMAGE_PIXELS
        table = self._table().view(torch.uint8).numpy()
        return _ops.Photos(library.handle, paths, np.array(targets, np.int64), table, kind,
                           MASK if most is None else most, self._part())

    def _call(self, file: File, crop_of: Callable[[int, int], _Crop]) -> torch.Tensor:
        data, path = _read(file)
        try:
            return self._make(data, path, crop_of)
        except Exception as error:
            if path is not None and path not in str(error) and len(error.args) == 1:
                error.args = (f"{error} (file {path!r})",)  # Pillow does not always name it
            raise

    def _make(
        self, data: Any, path: str | None, crop_of: Callable[[int, int], _Crop]
    ) -> torch.Tensor:
        table, library, crop = self._table(), _library(), None
        size = None if library is None else _ops.jpeg_size(data)
        if library is not None and size is not None and not self._is_for_pillow(size, data):
            crop = crop_of(*size)
            _left, _top, width, height = crop.window
            out = torch.empty(3 * height * width * table.itemsize, dtype=torch.uint8)
            if max(crop.size) <= LONGEST and _ops.jpeg_crop(
                library.handle, data, crop.region, crop.size, crop.window, crop.flip,
                _tall_down_first(), self.decode == "scaled",
                table.view(torch.uint8).numpy(), out.numpy(),
            ):  # fmt: skip
                return out.view(table.dtype).view(3, height, width)
        pixels = torch.from_numpy(self._by_pillow(data, path, crop or crop_of)).permute(2, 0, 1).long()
        return torch.stack([row[plane] for row, plane in zip(table, pixels)])

    def _is_for_pillow(self, size: tuple[int, int], data: Any) -> bool:
        """Whether Pillow limits the size of the photo, or turns it."""
        try:
            from PIL import Image
        except ImportError:
            return False
        most = Image.MAX_IMAGE_PIXELS
        if most is not None and size[0] * size[1] > most:
            return True
        if not self.orient:
            return False
        with Image.open(io.BytesIO(data)) as image:
            return bool(image.getexif().get(ORIENTATION, 1) != 1)

    def _by_pillow(
        self, data: Any, path: str | None, crop: _Crop | Callable[[int, int], _Crop]
    ) -> np.ndarray:
        """Pixels [height, width, 3] of a file of any kind."""
        from PIL import Image, ImageOps

        with (io.BytesIO(data) if path is None else open(path, "rb")) as file, \
                Image.open(file) as opened:
            image = ImageOps.exif_transpose(opened) if self.orient else opened
            image = image.convert("RGB")
        crop = crop if isinstance(crop, _Crop) else crop(*image.size)
        left, top, width, height = crop.region
        image = image.crop((left, top, left + width, top + height))
        image = image.resize(crop.size, Image.Resampling.BILINEAR)
        left, top, width, height = crop.window
        image = image.crop((left, top, left + width, top + height))
        if crop.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.array(image)


@dataclasses.dataclass(frozen=True)
class RandomResizedCropJpeg(_Transform):
    """A random part of a photo in a fixed size, perhaps flipped: torchvision's RandomResizedCrop,
    RandomHorizontalFlip, ToTensor and Normalize on what Pillow decodes, with the same bits.

    Called with a photo's path, or the bytes of its file (bytes, memoryview, or uint8 array or
    tensor with one dimension). Returns a tensor [3, height, width] of `dtype`: float32, float16,
    bfloat16 or uint8.

    `size`: a length or (height, width). `scale`, `ratio`: the ranges of the part's area, as a share
    of the photo's, and of its width divided by its height. `flip`: the probability of exchanging
    left and right. Random numbers come from torch's default generator, in torchvision's order, so a
    program that replaces these transforms gets the same samples from the same seed. flip=0 draws no
    number for it, like a program without RandomHorizontalFlip. `mean`, `std`: three numbers each, for
    values from 0 to 1. With uint8, values stay 0 to 255. `orient` turns photos as their EXIF data
    say, which torchvision does not. `reference`: the library whose pixels these are. "pillow v2": values from 0 to
    1 as torchvision's second ToDtype makes them, which multiplies by 1/255 where ToTensor divides by 255.
    `decode`: "scaled" decodes a part at 1/2, 1/4 or 1/8 of its size where that still covers the result, like
    Pillow's draft(): faster for large photos, and the values differ slightly.

    Only what the part needs is decoded: by the libjpeg-turbo of Pillow's wheel, else by the system's
    (`minato doctor` shows which). Files of other kinds (PNG, CMYK, damaged, turned, ...) go through
    Pillow, with its pixels, limits and errors. Pillow's errors get the path of the file.
    """

    size: int | Sequence[int]
    scale: Sequence[float] = (0.08, 1.0)
    ratio: Sequence[float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    dtype: str = "float32"
    reference: str = "pillow"
    orient: bool = False
    decode: str = "exact"

    def __post_init__(self) -> None:
        self._pair("size")
        for name in ("scale", "ratio"):
            self._numbers(name, 2)
            low, high = getattr(self, name)
            if not 0.0 < low <= high:
                raise ValueError(f"{name} must be two positive numbers, the smaller first, "
                                 f"got {getattr(self, name)!r}")
        if not 0.0 <= self.flip <= 1.0:
            raise ValueError(f"flip must be a probability, got {self.flip!r}")
        super().__post_init__()

    def _region(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Draws as torchvision's RandomResizedCrop.get_params does."""
        low, high = _logarithms(self.ratio, torch.get_default_dtype())
        for _ in range(10):
            area = height * width * torch.empty(1).uniform_(*self.scale).item()
            ratio = torch.exp(torch.empty(1).uniform_(low, high)).item()
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                top = int(torch.randint(0, height - h + 1, size=(1,)).item())
                return int(torch.randint(0, width - w + 1, size=(1,)).item()), top, w, h
        w, h = width, height  # none fits: the largest in the middle whose ratio is allowed
        if width / height < min(self.ratio):
            h = round(w / min(self.ratio))
        elif width / height > max(self.ratio):
            w = round(h * max(self.ratio))
        return (width - w) // 2, (height - h) // 2, w, h

    def _part(self) -> tuple[Any, ...]:
        height, width = self.size  # type: ignore[misc]
        logarithms = tuple(map(math.log, self.ratio))
        return (True, _tall_down_first(), self.decode == "scaled", 0, width, height, self.scale, self.ratio, logarithms,
                self.flip)

    def _crop(self, width: int, height: int) -> _Crop:
        to_height, to_width = self.size  # type: ignore[misc]
        region = self._region(width, height)
        flip = self.flip > 0.0 and bool(torch.rand(1) < self.flip)
        return _Crop(region, (to_width, to_height), (0, 0, to_width, to_height), flip)


@dataclasses.dataclass(frozen=True)
class ResizeCenterCropJpeg(_Transform):
    """The middle of a photo, for validation: torchvision's Resize(size), CenterCrop(crop), ToTensor
    and Normalize on what Pillow decodes, with the same bits.

    `size`: the length of the shorter edge of the resized photo. `crop`: a length or (height, width),
    at most `size`. All else is as with RandomResizedCropJpeg.
    """

    size: int
    crop: int | Sequence[int]
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    dtype: str = "float32"
    reference: str = "pillow"
    orient: bool = False
    decode: str = "exact"

    def __post_init__(self) -> None:
        self._pair("crop")
        if not max(self.crop) <= self.size <= LONGEST:  # type: ignore[arg-type]
            raise ValueError(f"size must be a length in pixels and crop at most that, got size "
                             f"{self.size!r} and crop {self.crop!r}")
        super().__post_init__()

    def _part(self) -> tuple[Any, ...]:
        height, width = self.crop  # type: ignore[misc]
        none = (1.0, 1.0)
        return (False, _tall_down_first(), self.decode == "scaled", self.size, width, height, none, none, none, 0.0)

    def _crop(self, width: int, height: int) -> _Crop:
        long = int(self.size * max(width, height) / min(width, height))
        size = (self.size, long) if width <= height else (long, self.size)
        crop_height, crop_width = self.crop  # type: ignore[misc]
        left, top = round((size[0] - crop_width) / 2.0), round((size[1] - crop_height) / 2.0)
        return _Crop((0, 0, width, height), size, (left, top, crop_width, crop_height), False)


# ---- without a loss to baseline files ---------------------------------------------------------


def _segments(data: bytes) -> tuple[list[bytes], int]:
    """The markers of a JPEG file before its first scan, whole, and where that begins. Raises ValueError."""
    found, at = [], 2
    while data[at : at + 1] == b"\xff" and data[at + 1 : at + 2] != b"\xda":
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if end <= at + 3 or end >= len(data) - 2:
            break
        found.append(data[at:end])
        at = end
    if data[:2] != b"\xff\xd8" or data[at : at + 2] != b"\xff\xda":
        raise ValueError("this is no JPEG file")
    return found, at


def _is_kept(segment: bytes) -> bool:
    """Whether a marker is not about codes: APP, or a comment."""
    return segment[1] & 0xF0 == 0xE0 or segment[1] == 0xFE


def baseline(data: bytes) -> bytes | None:
    """The same photo as a baseline JPEG file with the same pixels and markers, which is faster to decode; None if it
    is no progressive JPEG file, or one that is damaged. Raises RuntimeError if there is no libjpeg-turbo."""
    library = find_library()
    if library is None:
        raise RuntimeError("there is no libjpeg-turbo: install Pillow's wheel (pip install pillow)")
    try:
        before, _ = _segments(data)
    except ValueError:
        return None
    if not any(segment[1] == 0xC2 for segment in before):
        return None
    made = _ops.jpeg_baseline(library.handle, data)
    if made is None:
        return None
    after, scan = _segments(made)
    kept = [one for one in before if _is_kept(one)] + [one for one in after if not _is_kept(one)]
    return b"\xff\xd8" + b"".join(kept) + made[scan:]
