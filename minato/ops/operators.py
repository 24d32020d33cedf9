"""Operators on volumes, and pipelines of them."""
from __future__ import annotations

import dataclasses
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import Any, Union

import numpy as np
import torch

from .._not_linux import CORE, Absent

if CORE:
    from .. import _ops
else:
    _ops = Absent()  # type: ignore[assignment]

Path = Union[str, "os.PathLike[str]"]
Key = Union[int, tuple[int, int], None]
Volume = Union[Path, np.ndarray]
Pair = tuple[np.ndarray, Union[np.ndarray, None]]

MASK = (1 << 64) - 1
DTYPES = {"uint8": 1, "int16": 2, "uint16": 3, "int32": 4, "float32": 5, "float64": 6}
(_READ, _BALANCED, _CROP, _FLIP, _CAST, _SCALE, _NOISE, _NORMALIZE, _PAD, _RESAMPLE,
 _USER) = range(11)


def _spec(kind: int, *, flag: bool = False, keep_boxes: bool = False,
          dtypes: tuple[int, int] = (0, 0), size: Sequence[int] = (0, 0, 0), p: float = 0.0,
          per_axis: Sequence[float] = (0.0, 0.0, 0.0), values: Sequence[float] = (),
          capsule: Any = None) -> tuple[Any, ...]:
    """An operator as an argument of _ops.Pipeline. Raises TypeError unless values are numbers."""
    padded = (*array("d", values), 0.0, 0.0, 0.0, 0.0)[:4]
    return (kind, flag, keep_boxes, dtypes, tuple(size), p, tuple(per_axis), padded, capsule)


def _of_each_axis(value: Any) -> Any:
    """The values for the three axes, from three values or one."""
    return value if np.ndim(value) else (value,) * 3


def _three(name: str, value: int | Sequence[int]) -> tuple[int, int, int]:
    sizes = tuple(map(index, _of_each_axis(value)))
    if len(sizes) != 3 or any(not 1 <= v < 2**31 for v in sizes):
        raise ValueError(f"{name} must be one or three lengths of at least 1, got {value!r}")
    return sizes


def _probability(p: float) -> float:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"a probability lies in 0..1, got {p!r}")
    return float(p)


def _dtype(name: str, allowed: Iterable[str]) -> int:
    dtype = np.dtype(name)
    if dtype.name not in allowed or not dtype.isnative:
        raise ValueError(f"dtype must be one of {', '.join(allowed)}, got {dtype}")
    return DTYPES[dtype.name]


def random_bits() -> int:
    """One 64-bit number from torch's default generator."""
    number = torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), None).item()
    return int(number) & MASK


def _split_key(key: Key) -> tuple[int, int]:
    if key is None:
        return random_bits(), MASK
    if isinstance(key, tuple):
        high, low = key
        return int(high) & MASK, int(low) & MASK
    return int(key) & MASK, MASK


def _input(name: str, volume: Volume) -> Any:
    """A path or an array for _ops. Raises TypeError for other values."""
    if isinstance(volume, np.ndarray):
        if volume.dtype.name in DTYPES and volume.dtype.isnative:
            return volume
        raise TypeError(f"{name} has dtype {volume.dtype}; a volume is {', '.join(DTYPES)}, in "
                        "this machine's byte order: convert it, e.g. by astype(np.float32)")
    if isinstance(volume, (str, bytes, memoryview)):
        return volume
    if isinstance(volume, os.PathLike):
        return os.fspath(volume)
    raise TypeError(f"{name} must be a NumPy array or a path, got {type(volume).__name__}"
                    + ("; pass its numpy()" if hasattr(volume, "numpy") else ""))


class Operator:
    """Base class of all operators: one step of a pipeline, also callable alone."""

    def __post_init__(self) -> None:
        self._describe()  # raises ValueError or TypeError for wrong fields

    def _describe(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def __call__(self, image: Volume, label: Volume | None = None, *, key: Key = None,
                 out: Sequence[np.ndarray | None] | None = None) -> Pair:
        """Like Pipeline([self])(image, label, key=key, out=out): new arrays, or `out`."""
        return Pipeline([self])(image, label, key=key, out=out)


@dataclasses.dataclass(frozen=True)
class ReadNpy(Operator):
    """Opens .npy files with four axes: the first operator of pipelines that read files.

    `image` and `label` are the dtypes that the files must have. Voxels are only read when they
    are needed for the output, so a later crop reads just its rows.

    Files are mapped, and a pipeline keeps the mappings between samples: up to 1024 files and
    as many bytes as the machine has memory. Other files are read with system calls. Mapped pages
    are page cache, which the kernel reclaims when memory is short. The process's resident and
    proportional set sizes (RSS, PSS) nevertheless include the pages that it has touched. No
    descriptor is kept. The space of a deleted file is free when its mapping is removed, at the
    latest with the pipeline. The next sample sees a file that was replaced or changed. A file that
    becomes shorter during a read raises an OSError (EIO) that names it. For this, the first read
    installs a SIGBUS handler, which passes on all other signals. On network file systems, and if
    mapping fails, files are read with system calls, too. A call also reads the gap between two rows
    if that is cheaper than another call. All planes are requested before the first is read, so that
    storage latency is paid once. `direct` reads with system calls and bypasses the page cache
    (O_DIRECT); the file system must support it.

    A header is parsed once for each (path, mtime, size, inode) in a pipeline. Errors name the file.
    ValueError: the file is not .npy, or is truncated or longer than its header says. ValueError
    also: it has another dtype, byte order, number of axes or Fortran order. OSError: an error of
    the system.
    """

    image: str = "float32"
    label: str = "uint8"
    direct: bool = False

    def _describe(self) -> tuple[Any, ...]:
        dtypes = (_dtype(self.image, DTYPES), _dtype(self.label, DTYPES))
        return _spec(_READ, flag=self.direct, dtypes=dtypes)


@dataclasses.dataclass(frozen=True)
class RandBalancedCrop(Operator):
    """Crops a patch, with probability `foreground` around a component of the label.

    Foreground: draws a class uniformly from the values > 0 that occur. Of that class's
    connected components (voxels that share a face), takes the two with the largest bounding
    boxes and draws one of them uniformly. Per axis, a patch longer than the box covers the box,
    with the slack split uniformly; a shorter patch lies uniformly inside it. Finally the patch is
    moved into the volume. Otherwise, and for labels without foreground: a uniform start.

    Every valid start and split is equally likely. The MLPerf reference draws with randrange and
    so never takes the last one (unless it is the only one); `include_last=False` does the
    same.

    One pass over the label finds the boxes. With `keep_boxes`, a pipeline keeps the boxes
    of a file (a few dozen bytes) until the file changes.

    Raises ValueError if the volume is smaller than the patch, or the label is not uint8.
    """

    patch: int | Sequence[int]
    foreground: float = 0.4
    include_last: bool = True
    keep_boxes: bool = True

    def _describe(self) -> tuple[Any, ...]:
        return _spec(_BALANCED, flag=self.include_last, keep_boxes=self.keep_boxes,
                     size=_three("patch", self.patch), p=_probability(self.foreground))


@dataclasses.dataclass(frozen=True)
class RandCrop(Operator):
    """Crops a patch at a uniform start; `include_last` as in RandBalancedCrop."""

    patch: int | Sequence[int]
    include_last: bool = True

    def _describe(self) -> tuple[Any, ...]:
        return _spec(_CROP, flag=self.include_last, size=_three("patch", self.patch))


@dataclasses.dataclass(frozen=True)
class RandFlip(Operator):
    """Flips each spatial axis with its probability (1/3 each in the MLPerf reference)."""

    p: float | Sequence[float] = 1 / 3

    def _describe(self) -> tuple[Any, ...]:
        each = _of_each_axis(self.p)
        if len(each) != 3:
            raise ValueError(f"p must be one or three probabilities, got {self.p!r}")
        return _spec(_FLIP, per_axis=[_probability(p) for p in each])


@dataclasses.dataclass(frozen=True)
class Cast(Operator):
    """Converts dtypes: the image's and the label's, each to float32, uint8 or None (unchanged).

    Conversion to uint8 truncates toward zero; values outside 0..255 become 0 or 255,
    and NaN becomes 0 (NumPy's result for those depends on the machine).
    """

    image: str | None = "float32"
    label: str | None = "uint8"

    def _describe(self) -> tuple[Any, ...]:
        image, label = (0 if name is None else _dtype(name, ("float32", "uint8"))
                        for name in (self.image, self.label))
        return _spec(_CAST, dtypes=(image, label))


@dataclasses.dataclass(frozen=True)
class RandScaleIntensity(Operator):
    """With probability `p`, multiplies the image by 1 + f, f ~ U(low, high).

    That is the MLPerf reference's formula, which doubles the image on average. `around_one`
    multiplies by f, which was presumably intended. The product is computed in double
    and rounded to float32. The image becomes float32.
    """

    p: float = 0.1
    low: float = 0.7
    high: float = 1.3
    around_one: bool = False

    def _describe(self) -> tuple[Any, ...]:
        return _spec(_SCALE, p=_probability(self.p),
                     values=(self.low, self.high, 0.0 if self.around_one else 1.0))


@dataclasses.dataclass(frozen=True)
class RandGaussianNoise(Operator):
    """With probability `p`, adds noise of N(mean, s), with one s ~ U(0, std) per sample.

    Normals are float32, from the Box-Muller transform of 31 and 32 bits, so they reach
    6.5 standard deviations. A voxel's noise depends on its position in the volume at
    this step. The image becomes float32.
    """

    p: float = 0.1
    std: float = 0.1
    mean: float = 0.0

    def _describe(self) -> tuple[Any, ...]:
        if not self.std >= 0.0:
            raise ValueError(f"std must not be negative, got {self.std!r}")
        return _spec(_NOISE, p=_probability(self.p), values=(self.std, self.mean))


@dataclasses.dataclass(frozen=True)
class Normalize(Operator):
    """Clips the image to low..high, subtracts mean, divides by std, in float32.

    The defaults are those of the MLPerf reference for KiTS19 in Hounsfield units. NaN stays NaN.
    """

    low: float = -79.0
    high: float = 304.0
    mean: float = 101.0
    std: float = 76.9

    def _describe(self) -> tuple[Any, ...]:
        if not self.low <= self.high:
            raise ValueError(f"low {self.low!r} exceeds high {self.high!r}")
        if not self.std > 0.0:
            raise ValueError(f"std must be positive, got {self.std!r}")
        return _spec(_NORMALIZE, values=(self.low, self.high, self.mean, self.std))


@dataclasses.dataclass(frozen=True)
class Pad(Operator):
    """Pads to at least `size`, with the smaller half (floor) in front.

    `mode` "edge" repeats the outermost voxels of image and label; "constant" fills with
    `image` and `label` (dtypes float32 or uint8 only).
    """

    size: int | Sequence[int]
    mode: str = "edge"
    image: float = 0.0
    label: float = 0.0

    def _describe(self) -> tuple[Any, ...]:
        if self.mode not in ("edge", "constant"):
            raise ValueError(f"mode must be 'edge' or 'constant', got {self.mode!r}")
        return _spec(_PAD, flag=self.mode == "constant", size=_three("size", self.size),
                     values=(self.image, self.label))


@dataclasses.dataclass(frozen=True)
class Resample(Operator):
    """Changes the size: the image trilinear with aligned corners, the label nearest.

    Give `size` (three lengths) or `factors` (three numbers; new length = int(factor x
    length), so spacing / target spacing resamples to a spacing). Same conventions as
    torch's interpolate: mode "trilinear" with align_corners=True, and mode "nearest". The
    image becomes float32.
    """

    size: int | Sequence[int] | None = None
    factors: Sequence[float] | None = None

    def _describe(self) -> tuple[Any, ...]:
        if (self.size is None) == (self.factors is None):
            raise ValueError("give either size or factors")
        if self.size is not None:
            return _spec(_RESAMPLE, size=_three("size", self.size))
        factors = tuple(float(f) for f in self.factors or ())
        if len(factors) != 3 or not all(0.0 < f < float("inf") for f in factors):
            raise ValueError(f"factors must be three positive numbers, got {self.factors!r}")
        return _spec(_RESAMPLE, per_axis=factors)


class UserOperator(Operator):
    """An operator written in C against minato/ops.h.

    `make(*args)` returns its capsule ("minato.operator.v1"). It is called when the
    pipeline is first used, and again after unpickling. To pickle the pipeline, `make` must be
    importable by name.
    """

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        self.make = make
        self.args = args

    def _describe(self) -> tuple[Any, ...]:
        return _spec(_USER, capsule=self.make(*self.args))


class Pipeline:
    """A sequence of operators that one call runs without the GIL. Threads may share it.

    An operator's random draws depend on its position in the pipeline, so appending operators does
    not change the draws of earlier ones. ReadNpy must be the first operator if it is used.
    """

    _native: _ops.Pipeline | None = None  # made when first needed

    def __init__(self, operators: Sequence[Operator], *, _level: int = -1) -> None:
        self.operators = tuple(operators)
        self._level = _level  # of instruction sets; -1: the best available
        for place, operator in enumerate(self.operators):
            if not isinstance(operator, Operator):
                raise TypeError(f"operator {place} is not a minato.ops operator: {operator!r}")
            if isinstance(operator, ReadNpy) and place > 0:
                raise ValueError("ReadNpy must be the first operator")
        self._boxes: list[Any] = []  # of labels that another process has read (label_boxes)

    def __repr__(self) -> str:
        return f"Pipeline([{', '.join(map(repr, self.operators))}])"

    def __getstate__(self) -> Any:
        boxes = self._boxes if self._native is None else self._native.export_boxes()
        return {"operators": self.operators, "level": self._level, "boxes": boxes}

    def __setstate__(self, state: Any) -> None:
        self.__init__(state["operators"], _level=state["level"])  # type: ignore[misc]
        self._boxes = state["boxes"]

    def _get(self) -> _ops.Pipeline:
        native = self._native
        if native is None:
            made = _ops.Pipeline(tuple(op._describe() for op in self.operators), self._level)
            made.import_boxes(self._boxes)
            # Several threads may make one. No lock, because a fork could leave it locked.
            native = vars(self).setdefault("_native", made)
        return native

    def __call__(self, image: Volume, label: Volume | None = None, *, key: Key = None,
                 out: Sequence[np.ndarray | None] | None = None) -> Pair:
        """Run on two paths (if ReadNpy is first) or two arrays; label may be None.

        key: the sample's key, an int of 64 bits or a pair of them; None draws one from torch's
        default generator. out: arrays (image, label) for the result, C contiguous, of its dtype
        and shape, sharing no memory with the inputs. Returns (image, label). Raises ValueError, TypeError, OSError, MemoryError.
        """
        high, low = _split_key(key)
        inputs = [_input("image", image), None if label is None else _input("label", label)]

        def allocate(which: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
            given = None if out is None else out[which]
            if given is None:
                return np.empty(shape, dtype)
            if any(isinstance(v, np.ndarray) and np.may_share_memory(v, given) for v in inputs):
                raise ValueError("out shares memory with an input: pass another array")
            return given

        return self._get().apply(inputs[0], inputs[1], high, low, allocate)

    def stats(self) -> dict[str, Any]:
        """Counters since the pipeline was first used, in this process or in the process that it
        was forked from. samples; bytes_read: of voxels, copied or scanned; bytes_touched: of the
        files' 4096-byte blocks that contain them. scans: of labels for boxes; headers_parsed;
        files_mapped: number of mappings made; instruction_set."""
        return self._get().stats()


def label_boxes(label: Volume) -> list[tuple[int, int, tuple[_ops.Box, ...]]]:
    """The boxes that RandBalancedCrop chooses from, for a uint8 label [1, D, H, W].

    Returns a tuple for each value > 0 that occurs, ascending: (value, number of its connected
    components, up to two boxes). The largest box is last. A box is ((z, y, x), (z, y, x) one past
    the end).
    """
    return _ops.Pipeline(()).boxes(os.fspath(label) if isinstance(label, os.PathLike) else label)


def unet3d_training(patch: int | Sequence[int] = 128, *, around_one: bool = False,
                    include_last: bool = True, keep_boxes: bool = True,
                    direct: bool = False, foreground: float = 0.4) -> Pipeline:
    """The training transforms of the MLPerf Training 3D U-Net reference (KiTS19)."""
    crop = RandBalancedCrop(patch, foreground, include_last, keep_boxes)
    return Pipeline([ReadNpy(direct=direct), crop, RandFlip(), Cast(),
                     RandScaleIntensity(around_one=around_one), RandGaussianNoise()])
