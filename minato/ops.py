"""Native operators on 3D volumes: single, fused in a pipeline, or as a dataset.

A volume is an array of shape [channel, depth, height, width]; images are float32 (or
uint8, int16, uint16, int32, float64 on the way in), labels uint8 with one channel. Every
operator takes an image and, where there is one, its label, and treats both alike. All
work is done in C without the GIL; arrays may be strided, results are C contiguous.

    pipeline = ops.Pipeline([ops.ReadNpy(), ops.RandBalancedCrop((128, 128, 128)),
                             ops.RandFlip(), ops.Cast(), ops.RandScaleIntensity(),
                             ops.RandGaussianNoise()])
    dataset = ops.VolumeDataset([("case_00000_x.npy", "case_00000_y.npy"), ...], pipeline)
    image, label = dataset[0]                  # under any loader
    image, label = ops.RandFlip()(image, label, key=7)

Fusion: windows and flips only move a start and strides, casts and arithmetic are noted;
then one pass reads the rows that are wanted, plane by plane, and writes them, finished,
to the output. Magnitudes, probabilities and draws follow the MLPerf Training 3D U-Net
reference (KiTS19); where they differ, the operator says so.

With `device=` a loader has the end of a dataset's pipeline done on the device: flips, casts,
scaling, noise and normalizing behind the last other operator, from where samples have the
fewest bytes on. Where it can, and where not, `stats()["device"]` says (operators,
operators_why). The bytes are the same; only which of the many patterns of NaN an operation on a
NaN gives is not promised.

Random numbers are counter-based (Philox4x32-10): draw n of the operator at place i of its
pipeline is a function of (key, i, n) alone, key being 128 bits. There is no state, so the
result does not depend on threads, processes, order or instruction set. `csrc/ops/
mn_pipeline.h` lists the draws of each operator; minato/ops.h gives them to operators
written in C by users.
"""
from __future__ import annotations

import dataclasses
import math
import operator
import os
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import context as _mp_context
from multiprocessing import sharedctypes as _sharedctypes
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import numpy as np

from minato._system import CORE, Absent

if CORE:
    from minato import _ops
else:
    _ops = Absent("minato.ops")  # type: ignore[assignment]

if TYPE_CHECKING:
    import torch

__all__ = [
    "Cast", "Normalize", "Operator", "Pad", "Pipeline", "RandBalancedCrop", "RandCrop",
    "RandFlip", "RandGaussianNoise", "RandScaleIntensity", "ReadNpy", "Resample",
    "UserOperator", "VolumeDataset", "label_boxes", "unet3d_training",
]

Path = Union[str, "os.PathLike[str]"]
Key = Union[int, tuple[int, int], None]
Volume = Union[Path, np.ndarray]
Pair = tuple[np.ndarray, Union[np.ndarray, None]]

_MASK = (1 << 64) - 1
_DTYPES = {"uint8": 1, "int16": 2, "uint16": 3, "int32": 4, "float32": 5, "float64": 6}
_KEYINGS = {"epoch": 0, "sample": 1}
(_READ, _BALANCED, _CROP, _FLIP, _CAST, _SCALE, _NOISE, _NORMALIZE, _PAD, _RESAMPLE,
 _USER) = range(11)


def _spec(kind: int, *, flag: bool = False, keep: bool = False,
          dtypes: tuple[int, int] = (0, 0), size: Sequence[int] = (0, 0, 0), p: float = 0.0,
          per_axis: Sequence[float] = (0.0, 0.0, 0.0), values: Sequence[float] = (),
          capsule: Any = None) -> tuple[Any, ...]:
    """An operator as _ops.Pipeline takes it."""
    padded = (*values, 0.0, 0.0, 0.0, 0.0)[:4]
    return (kind, flag, keep, dtypes, tuple(size), p, tuple(per_axis), padded, capsule)


def _three(name: str, value: int | Sequence[int]) -> tuple[int, int, int]:
    sizes = (value,) * 3 if isinstance(value, int) else tuple(int(v) for v in value)
    if len(sizes) != 3 or any(not 1 <= v < 2**31 for v in sizes):
        raise ValueError(f"{name} must be one or three lengths of at least 1, got {value!r}")
    return sizes


def _probability(p: float) -> float:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"a probability lies in 0..1, got {p!r}")
    return float(p)


def _dtype(name: str, allowed: Iterable[str]) -> int:
    text = np.dtype(name).name
    if text not in allowed:
        raise ValueError(f"dtype must be one of {', '.join(allowed)}, got {text}")
    return _DTYPES[text]


def _random_bits() -> int:
    """One 64-bit number from torch's default generator; from `random` without torch."""
    try:
        import torch
    except ImportError:
        return random.getrandbits(64)
    number = torch.empty((), dtype=torch.int64).random_(-(2**63), None).item()
    return int(number) & _MASK


def _split_key(key: Key) -> tuple[int, int]:
    if key is None:
        return _random_bits(), _MASK
    if isinstance(key, tuple):
        high, low = key
        return int(high) & _MASK, int(low) & _MASK
    return int(key) & _MASK, _MASK


def _input(name: str, volume: Volume) -> Any:
    """A path or an array as _ops takes it. Raises TypeError for what it would not."""
    if isinstance(volume, np.ndarray):
        if volume.dtype.name in _DTYPES and volume.dtype.isnative:
            return volume
        raise TypeError(f"{name} has dtype {volume.dtype}; a volume is {', '.join(_DTYPES)}, in "
                        "this machine's byte order: convert it, e.g. by astype(np.float32)")
    if isinstance(volume, (str, bytes, memoryview)):
        return volume
    if isinstance(volume, os.PathLike):
        return os.fspath(volume)
    raise TypeError(f"{name} must be a NumPy array or a path, got {type(volume).__name__}"
                    + ("; pass its numpy()" if hasattr(volume, "numpy") else ""))


class Operator:
    """Base of all operators: one step of a pipeline, also callable alone."""

    def _describe(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def __call__(self, image: Volume, label: Volume | None = None, *, key: Key = None,
                 out: Sequence[np.ndarray | None] | None = None) -> Pair:
        """As Pipeline([self])(image, label, key=key, out=out): new arrays, or `out`."""
        return Pipeline([self])(image, label, key=key, out=out)


@dataclasses.dataclass(frozen=True)
class ReadNpy(Operator):
    """Opens .npy files of four axes: the first operator where a pipeline reads files.

    `image` and `label` are the dtypes that the files must have. Voxels are read when they
    are stored, so a crop behind it reads just its rows.

    Files are mapped, and a pipeline keeps the mappings between samples: up to 1024 files and
    as many bytes as the machine has memory; the others are read by calls. Mapped pages are
    page cache, which the kernel takes back when memory is short; yet the process's resident
    and proportional set sizes (RSS, PSS) count those that it has touched. No descriptor is
    kept; a deleted file's space is free when its mapping goes, at the latest with the
    pipeline. A file that is replaced or changed is seen at the next sample; one that becomes
    shorter while it is read is an OSError (EIO) that names it, for which the first read
    installs a handler of SIGBUS that passes on what it does not know. On network file
    systems, and where mapping fails, files are read by calls, too. Calls read with the rows
    what lies between two of them, where that is cheaper than another call; all planes are
    asked for before the first is read, so that storage is waited for once. `direct` reads by
    calls and bypasses the page cache (O_DIRECT); the file system must be able to.

    A header is parsed once for each (path, mtime, size, inode) of a pipeline. Errors name
    the file: ValueError for a file that is no .npy, is truncated or longer than its header
    says, has another dtype, byte order, number of axes or Fortran order; OSError for what
    the system refuses.
    """

    image: str = "float32"
    label: str = "uint8"
    direct: bool = False

    def __post_init__(self) -> None:
        self._describe()

    def _describe(self) -> tuple[Any, ...]:
        dtypes = (_dtype(self.image, _DTYPES), _dtype(self.label, _DTYPES))
        return _spec(_READ, flag=self.direct, dtypes=dtypes)


@dataclasses.dataclass(frozen=True)
class RandBalancedCrop(Operator):
    """Crops a patch, with probability `foreground` around a component of the label.

    Foreground: a class drawn uniformly from the values > 0 present; of that class's
    connected components (voxels that share a face) the two with the largest bounding
    boxes, one of them uniformly; per axis, a patch longer than the box covers it with the
    slack split uniformly, a shorter one lies uniformly inside it; pushed back into the
    volume. A label without foreground, and otherwise: a uniform start.

    Every valid start and split is equally likely. The reference draws with randrange and
    so never takes the last one (unless it is the only one); `include_last=False` does
    that.

    The boxes are found by one pass over the label. With `keep_boxes` a pipeline keeps those
    of a file (a few dozen bytes) until the file changes.

    Raises ValueError if the volume is smaller than the patch, or the label is not uint8.
    """

    patch: int | Sequence[int]
    foreground: float = 0.4
    include_last: bool = True
    keep_boxes: bool = True

    def __post_init__(self) -> None:
        self._describe()

    def _describe(self) -> tuple[Any, ...]:
        return _spec(_BALANCED, flag=self.include_last, keep=self.keep_boxes,
                     size=_three("patch", self.patch), p=_probability(self.foreground))


@dataclasses.dataclass(frozen=True)
class RandCrop(Operator):
    """Crops a patch at a uniform start; `include_last` as in RandBalancedCrop."""

    patch: int | Sequence[int]
    include_last: bool = True

    def __post_init__(self) -> None:
        self._describe()

    def _describe(self) -> tuple[Any, ...]:
        return _spec(_CROP, flag=self.include_last, size=_three("patch", self.patch))


@dataclasses.dataclass(frozen=True)
class RandFlip(Operator):
    """Flips each spatial axis with its probability (the reference: 1/3 each)."""

    p: float | Sequence[float] = 1 / 3

    def __post_init__(self) -> None:
        self._describe()

    def _describe(self) -> tuple[Any, ...]:
        each = (self.p,) * 3 if isinstance(self.p, (int, float)) else tuple(self.p)
        if len(each) != 3:
            raise ValueError(f"p must be one or three probabilities, got {self.p!r}")
        return _spec(_FLIP, per_axis=[_probability(p) for p in each])


@dataclasses.dataclass(frozen=True)
class Cast(Operator):
    """Converts dtypes: the image's and the label's, each float32, uint8 or None (leave).

    To uint8 values are truncated toward zero; what lies outside 0..255 becomes 0 or 255
    and NaN 0 (NumPy's result for those depends on the machine).
    """

    image: str | None = "float32"
    label: str | None = "uint8"

    def __post_init__(self) -> None:
        self._describe()

    def _describe(self) -> tuple[Any, ...]:
        image, label = (0 if name is None else _dtype(name, ("float32", "uint8"))
                        for name in (self.image, self.label))
        return _spec(_CAST, dtypes=(image, label))


@dataclasses.dataclass(frozen=True)
class RandScaleIntensity(Operator):
    """With probability `p` multiplies the image by 1 + f, f ~ U(low, high).

    That is the reference's formula, which doubles the image on average; `around_one`
    multiplies by f, which is presumably what was meant. The product is taken in double
    and rounded to float32. The image becomes float32.
    """

    p: float = 0.1
    low: float = 0.7
    high: float = 1.3
    around_one: bool = False

    def __post_init__(self) -> None:
        self._describe()

    def _describe(self) -> tuple[Any, ...]:
        return _spec(_SCALE, p=_probability(self.p),
                     values=(self.low, self.high, 0.0 if self.around_one else 1.0))


@dataclasses.dataclass(frozen=True)
class RandGaussianNoise(Operator):
    """With probability `p` adds noise of N(mean, s), s ~ U(0, std) once a sample.

    Normals are float32, from Box and Muller's transform of 31 and 32 bits, so they reach
    6.5 standard deviations. The noise of a voxel depends on its place in the volume at
    this step. The image becomes float32.
    """

    p: float = 0.1
    std: float = 0.1
    mean: float = 0.0

    def __post_init__(self) -> None:
        self._describe()

    def _describe(self) -> tuple[Any, ...]:
        if not self.std >= 0.0:
            raise ValueError(f"std must not be negative, got {self.std!r}")
        return _spec(_NOISE, p=_probability(self.p), values=(self.std, self.mean))


@dataclasses.dataclass(frozen=True)
class Normalize(Operator):
    """Clips the image to low..high, subtracts mean, divides by std, in float32.

    The defaults are the reference's for KiTS19 in Hounsfield units. NaN stays NaN.
    """

    low: float = -79.0
    high: float = 304.0
    mean: float = 101.0
    std: float = 76.9

    def __post_init__(self) -> None:
        self._describe()

    def _describe(self) -> tuple[Any, ...]:
        if not self.low <= self.high:
            raise ValueError(f"low {self.low!r} exceeds high {self.high!r}")
        if not self.std > 0.0:
            raise ValueError(f"std must be positive, got {self.std!r}")
        return _spec(_NORMALIZE, values=(self.low, self.high, self.mean, self.std))


@dataclasses.dataclass(frozen=True)
class Pad(Operator):
    """Pads to at least `size`, the smaller half (floor) first.

    `mode` "edge" repeats the outermost voxels of image and label; "constant" fills with
    `image` and `label` (dtypes float32 or uint8 only).
    """

    size: int | Sequence[int]
    mode: str = "edge"
    image: float = 0.0
    label: float = 0.0

    def __post_init__(self) -> None:
        self._describe()

    def _describe(self) -> tuple[Any, ...]:
        if self.mode not in ("edge", "constant"):
            raise ValueError(f"mode must be 'edge' or 'constant', got {self.mode!r}")
        return _spec(_PAD, flag=self.mode == "constant", size=_three("size", self.size),
                     values=(self.image, self.label))


@dataclasses.dataclass(frozen=True)
class Resample(Operator):
    """Changes the size: the image trilinear with aligned corners, the label nearest.

    Give `size` (three lengths), or `factors` (three numbers; new length = int(factor x
    length), so spacing / target spacing resamples to a spacing). Same conventions as
    torch's interpolate: mode "trilinear" with align_corners=True, and mode "nearest". The
    image becomes float32.
    """

    size: int | Sequence[int] | None = None
    factors: Sequence[float] | None = None

    def __post_init__(self) -> None:
        self._describe()

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

    `make(*args)` returns its capsule ("minato.operator.v1"); it is called once where the
    pipeline is first used, again after unpickling, so it must be importable by name for a
    pipeline to be pickled.
    """

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        self.make = make
        self.args = args

    def _describe(self) -> tuple[Any, ...]:
        return _spec(_USER, capsule=self.make(*self.args))


class Pipeline:
    """Operators in a row, run by one call without the GIL. Threads may share it.

    An operator's number for its draws is its place in the row, so what is appended does
    not change what stands before. ReadNpy, if any, comes first.
    """

    def __init__(self, operators: Sequence[Operator], *, _level: int = -1) -> None:
        self.operators = tuple(operators)
        self._level = _level
        for place, operator in enumerate(self.operators):
            if not isinstance(operator, Operator):
                raise TypeError(f"operator {place} is no minato.ops operator: {operator!r}")
            if isinstance(operator, ReadNpy) and place > 0:
                raise ValueError("ReadNpy must be the first operator")
        self._lock = threading.Lock()
        self._native: _ops.Pipeline | None = None
        self._boxes: list[Any] = []

    def __repr__(self) -> str:
        return f"Pipeline([{', '.join(map(repr, self.operators))}])"

    def __getstate__(self) -> dict[str, Any]:
        boxes = self._boxes if self._native is None else self._native.export_boxes()
        return {"operators": self.operators, "level": self._level, "boxes": boxes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["operators"], _level=state["level"])  # type: ignore[misc]
        self._boxes = state["boxes"]

    def _get(self) -> _ops.Pipeline:
        native = self._native
        if native is None:
            with self._lock:
                if self._native is None:
                    specs = tuple(op._describe() for op in self.operators)
                    made = _ops.Pipeline(specs, self._level)
                    made.import_boxes(self._boxes)
                    self._native = made
                native = self._native
        return native

    def __call__(self, image: Volume, label: Volume | None = None, *, key: Key = None,
                 out: Sequence[np.ndarray | None] | None = None) -> Pair:
        """Run on two paths (if ReadNpy is first) or two arrays; label may be None.

        key: the sample's, an int of 64 bits or a pair of them; None draws one from torch's
        default generator (without torch, from `random`). out: arrays (image, label) to
        write to, C contiguous, of the result's dtype and shape, sharing no memory with the
        inputs. Returns (image, label). Raises ValueError, TypeError, OSError, MemoryError.
        """
        high, low = _split_key(key)
        inputs = [_input("image", image), None if label is None else _input("label", label)]

        def allocate(which: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
            given = None if out is None else out[which]
            if given is None:
                return np.empty(shape, dtype)
            if any(isinstance(v, np.ndarray) and np.may_share_memory(v, given)
                   for v in inputs):
                raise ValueError("out shares memory with an input")
            return given

        return self._get().apply(inputs[0], inputs[1], high, low, allocate)

    def stats(self) -> dict[str, Any]:
        """Counters since the pipeline was first used (here, or in the process that this one
        was forked from): samples, bytes_read (of voxels, copied or scanned), bytes_touched (of
        the files' 4096-byte blocks in which they lie), scans (of labels for boxes),
        headers_parsed, files_mapped (how often); and instruction_set."""
        return self._get().stats()


def label_boxes(label: Volume) -> list[tuple[int, int, tuple[_ops.Box, ...]]]:
    """The boxes that RandBalancedCrop chooses from, for a uint8 label [1, D, H, W].

    Returns for each value > 0 present, ascending: (value, number of its connected
    components, up to two boxes ((z, y, x), (z, y, x) one past the end), the largest last).
    """
    return _ops.Pipeline(()).boxes(os.fspath(label) if isinstance(label, os.PathLike)
                                   else label)


def unet3d_training(patch: int | Sequence[int] = 128, *, around_one: bool = False,
                    include_last: bool = True, keep_boxes: bool = True,
                    direct: bool = False) -> Pipeline:
    """The training transforms of the MLPerf Training 3D U-Net reference (KiTS19)."""
    crop = RandBalancedCrop(patch, include_last=include_last, keep_boxes=keep_boxes)
    return Pipeline([ReadNpy(direct=direct), crop, RandFlip(), Cast(),
                     RandScaleIntensity(around_one=around_one), RandGaussianNoise()])


def _case_paths(case: Any) -> tuple[str, str | None]:
    """(image, label) from a pair, one path, or an object with these attributes."""
    if isinstance(case, (str, os.PathLike)):
        return os.fspath(case), None
    if hasattr(case, "image") and hasattr(case, "label"):
        image, label = case.image, case.label
    else:
        image, label = case
    return os.fspath(image), None if label is None else os.fspath(label)


class _SampleSeed(threading.local):
    value: int | None = None


class _Unfinished(NamedTuple):
    """A dataset whose samples end before the last operators of their pipeline."""

    #: of it the samples are (image, label, recipe), with the index behind them if with_index;
    #: the recipe, int64 [2 + 4 for each operator], is what csrc/ops/mn_recipe.h says, and so is
    #: the window, int64 [4], that _windows has in the place of image and label
    dataset: VolumeDataset
    operators: list[str]  # those that are left out
    volumes: list[tuple[str, str, tuple[int, ...]]]  # dtype before and after, shape


class VolumeDataset:
    """A map-style dataset of .npy volumes behind a pipeline, for any loader.

    cases: pairs (image path, label path), single image paths, or objects with attributes
    `image` and `label`. pipeline: begins with ReadNpy and gives the same shape for every
    case, so it ends with a crop or Resample(size). Sample i is case i mod len(cases),
    `repeat` times over.

    A sample is (image, label), e.g. float32 [1, P, P, P] and uint8 [1, P, P, P], without
    the label where there is none, and with the index (int) behind them if `with_index`.
    `output`: "torch" tensors or "numpy" arrays; they share memory with nothing.

    keyed_by says where the random numbers of a sample come from:

    - "epoch" (default): from (seed, epoch, index). The same sample has the same bytes under
      torch's loader, minato's process workers and its native workers, in any order, and
      after a resume. Call set_epoch(n) before each epoch, or every epoch repeats the
      augmentations of the first. Where the sampler names an index twice in an epoch both
      get the same augmentation. Seeds given by a loader (seed_sample) are not used.
    - "sample": from the seed that the loader gives the next sample by seed_sample, as
      minato's loader does. A loader that never calls it (torch's) leaves the key to one
      64-bit draw from torch's default generator, so that torch's seeding of its workers
      governs; the bytes then depend on the worker, as with any torch dataset.

    `resident`: with `device=` all cases are copied to the device, once, as far as half of its
    free memory is enough for them, and samples are cropped there. That needs a pipeline of
    ReadNpy, one crop, and operators that can be done on a device. The bytes are the same; files
    that change later are not seen. `stats()["device"]` says whether it is so (resident,
    operators_why). Keep the boxes (RandBalancedCrop, `keep_boxes`), or each sample still reads
    its label.

    set_epoch reaches workers that live across epochs (persistent_workers) where they were
    started by fork or by multiprocessing's spawn: the number is in shared memory. Picklable;
    the boxes found so far travel along.
    """

    def __init__(self, cases: Iterable[Any], pipeline: Pipeline, *, seed: int = 0,
                 keyed_by: str = "epoch", output: str = "torch", repeat: int = 1,
                 with_index: bool = False, resident: bool = False) -> None:
        if keyed_by not in _KEYINGS:
            raise ValueError(f"keyed_by must be 'epoch' or 'sample', got {keyed_by!r}")
        if output not in ("torch", "numpy"):
            raise ValueError(f"output must be 'torch' or 'numpy', got {output!r}")
        if repeat < 1:
            raise ValueError(f"repeat must be at least 1, got {repeat!r}")
        if not pipeline.operators or not isinstance(pipeline.operators[0], ReadNpy):
            raise ValueError("the pipeline of a dataset must begin with ReadNpy")
        self.cases = [_case_paths(case) for case in cases]
        if not self.cases:
            raise ValueError("a dataset needs at least one case")
        self.pipeline = pipeline
        self.seed = int(seed)
        self.keyed_by = keyed_by
        self.output = output
        self.repeat = repeat
        self.with_index = with_index
        self.resident = resident
        self._epoch = _sharedctypes.RawValue("Q", 0)
        self._start()

    _tail = 0  # operators at the end that are left out, see _unfinished
    _places = False  # samples have the place of their crop, and no voxels, see _windows

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._sample_seed = _SampleSeed()
        self._native: _ops.Cases | None = None
        self._outputs: list[tuple[tuple[int, ...], np.dtype[Any]]] = []
        self._resident: dict[str, Any] = {}  # by device: its cases there, or why they are not

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("_lock", "_sample_seed", "_native", "_outputs", "_resident"):
            del state[name]
        if _mp_context.get_spawning_popen() is None:
            # Shared memory can be inherited only; a plain pickle carries the number.
            state["_epoch"] = self._epoch.value
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self._epoch, int):
            self._epoch = _sharedctypes.RawValue("Q", self._epoch)
        self._start()

    def _get(self) -> _ops.Cases:
        native = self._native
        if native is None:
            with self._lock:
                if self._native is None:
                    made = _ops.Cases(self.pipeline._get(), self.cases, self.repeat,
                                      self.with_index, _KEYINGS[self.keyed_by],
                                      self.seed & _MASK, self._epoch, self._tail,
                                      self._places)
                    self._outputs = [(shape, np.dtype(name)) for name, shape in made.fields()]
                    self._native = made
                native = self._native
        return native

    def __len__(self) -> int:
        return len(self.cases) * self.repeat

    @property
    def epoch(self) -> int:
        """The epoch whose samples are made."""
        return int(self._epoch.value)

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch whose samples are asked for next (keyed_by="epoch")."""
        self._epoch.value = int(epoch) & _MASK

    def seed_sample(self, seed: int) -> None:
        """Key the next __getitem__ of this thread (keyed_by="sample")."""
        self._sample_seed.value = int(seed) & _MASK

    def _key(self, index: int) -> tuple[int, int]:
        sample_seed = self._sample_seed.value
        self._sample_seed.value = None
        if self.keyed_by == "sample" and sample_seed is None:
            sample_seed = _random_bits()
        return _ops.sample_key(_KEYINGS[self.keyed_by], self.seed & _MASK, self.epoch, index,
                               sample_seed or 0)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Make a sample. Raises IndexError, and what the pipeline raises (OSError,
        ValueError, MemoryError), naming the file."""
        length, index = len(self), operator.index(index)
        place = index + length if index < 0 else index
        if not 0 <= place < length:
            raise IndexError(f"sample {index} is not among {length}")
        native = self._get()
        arrays = tuple(np.empty(shape, dtype) for shape, dtype in self._outputs)
        native.read(place, *self._key(place), arrays)
        volumes = arrays[:-1] if self.with_index else arrays
        made = volumes if self.output == "numpy" else _as_tensors(volumes)
        return (*made, place) if self.with_index else tuple(made)

    def warm(self) -> None:
        """Find the boxes of all cases now (one pass over each label), so that no sample
        waits for them. Workers started afterwards have them too."""
        native = self._get()
        for case in range(len(self.cases)):
            native.warm(case)

    def _unfinished(self) -> _Unfinished | None:
        """The same samples up to the first place in the pipeline from which on they do not
        become smaller, for somebody who does the rest; None where that is nothing. Shares
        its epoch with this one. Raises what reading the first case's headers raises."""
        native = self.pipeline._get()

        def volumes(tail: int) -> list[tuple[str, tuple[int, ...]]]:
            cases = _ops.Cases(native, self.cases[:1], 1, False, 0, 0, self._epoch, tail)
            found = cases.fields()[:-1] if tail else cases.fields()
            return [(np.dtype(name).name, shape) for name, shape in found]

        at = [volumes(tail) for tail in range(native.steps() + 1)]
        sizes = [sum(np.dtype(v[0]).itemsize * math.prod(v[1]) for v in place) for place in at]
        tail = max(n for n, size in enumerate(sizes) if size == min(sizes))
        before, after = at[tail], at[0]
        fits = all(math.prod(shape) < 2**32 and name != "uint16" for name, shape in before)
        if tail == 0 or not fits:  # torch does little with uint16
            return None
        names = [type(op).__name__ for op in self.pipeline.operators[-tail:]]
        both = [(b[0], a[0], b[1]) for b, a in zip(before, after)]
        return _Unfinished(self._twin(tail), names, both)

    def _windows(self) -> _Unfinished | None:
        """The same samples as windows of their cases, for somebody who has those; None where
        that is not asked for, or more than a crop and steps makes them. Raises what reading
        the first case's headers raises."""
        native, crops = self.pipeline._get(), (RandBalancedCrop, RandCrop)
        operators = self.pipeline.operators[1:]
        tail = len(operators) - 1
        asked = self.resident and operators and isinstance(operators[0], crops)
        if not asked or native.steps() != tail:
            return None
        before, after = (_ops.Cases(native, self.cases[:1], 1, False, 0, 0, self._epoch, n).fields()
                         for n in (tail, 0))
        both = [(np.dtype(b[0]).name, np.dtype(a[0]).name, b[1]) for b, a in zip(before, after)]
        if any(math.prod(shape) >= 2**32 for _, _, shape in both):
            return None
        twin = self._twin(tail)
        twin._places = True
        return _Unfinished(twin, [type(op).__name__ for op in operators], both)

    def _twin(self, tail: int) -> VolumeDataset:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._start()
        twin._tail = tail
        return twin

    def native_pipeline(self) -> Any:
        """A capsule "minato.native_pipeline.v1" (minato/ops.h): this dataset for C threads.

        It keeps everything that it needs alive. Whoever runs it gives each sample's key,
        by mn_native_key. Raises what reading the first case's headers raises.
        """
        return self._get().native()


def _as_tensors(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    import torch  # here, so that the operators alone need no torch

    return [torch.from_numpy(array) for array in arrays]
