"""A dataset of volumes in files, made by a pipeline."""
from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Sequence
from multiprocessing import context as _mp_context
from multiprocessing import sharedctypes as _sharedctypes
from typing import Any, NamedTuple

import numpy as np
import torch

from .._not_linux import CORE, Absent
from ..dataset_calls import NextSeed
from .operators import MASK, Pipeline, RandBalancedCrop, RandCrop, ReadNpy, random_bits

if CORE:
    from .. import _core, _ops
else:
    _core = _ops = Absent()  # type: ignore[assignment]

_KEYINGS = {"epoch": 0, "sample": 1}
#: attributes that determine the samples
_MADE_OF = {"cases", "pipeline", "seed", "keyed_by", "repeat", "with_index"}


def _case_paths(case: Any) -> tuple[str, str | None]:
    """(image, label) of a pair, one path, or an object with these attributes."""
    if isinstance(case, (str, os.PathLike)):
        return os.fspath(case), None
    if hasattr(case, "image") and hasattr(case, "label"):
        image, label = case.image, case.label
    else:
        image, label = case
    return os.fspath(image), None if label is None else os.fspath(label)


class Volume(NamedTuple):
    """One volume of a sample: names of its dtypes before and after the last operators, and its
    shape, which these keep."""

    before: str
    after: str
    shape: tuple[int, ...]


class Unfinished(NamedTuple):
    """A dataset whose samples lack the last operators of their pipeline."""

    #: its samples are (image, label, recipe), followed by the index if with_index. The recipe,
    #: int64 [2 + 4 per operator], is described in csrc/ops/mn_recipe.h, as is the window,
    #: int64 [4], which _windows has instead of image and label
    dataset: VolumeDataset
    operators: list[str]  # the missing ones
    volumes: list[Volume]


class VolumeDataset:
    """A map-style dataset of .npy volumes and a pipeline, for any loader.

    cases: pairs (image path, label path), single image paths, or objects with attributes
    `image` and `label`. pipeline: must start with ReadNpy and give the same shape for every
    case, so it needs a crop or Resample(size). Sample i is case i mod len(cases); the dataset
    has `repeat` samples per case.

    A sample is (image, label), e.g. float32 [1, P, P, P] and uint8 [1, P, P, P], without
    the label if there is none, followed by the index (int) if `with_index`.
    `output`: "torch" tensors or "numpy" arrays, which share no memory with other objects.

    keyed_by selects the source of a sample's random numbers:

    - "epoch" (default): (seed, epoch, index). The same sample has the same bytes under
      torch's loader, minato's process workers and its native workers, in any order, and
      after a resume. Call set_epoch(n) before each epoch; otherwise every epoch repeats the
      augmentations of the first. If the sampler yields an index twice in an epoch, both samples
      get the same augmentation. Seeds from a loader (seed_sample) are not used.
    - "sample": the seed that the loader gives the next sample by seed_sample, as
      minato's loader does. With a loader that never calls it (torch's), the key is one 64-bit draw
      from torch's default generator. So torch's seeding of its workers determines it, and the bytes
      depend on the worker, as with any torch dataset.

    `resident`: with `device=`, all cases are copied to the device once, if they fit into half of
    its free memory, and samples are cropped there. The pipeline must consist of
    ReadNpy, one crop, and operators that devices support. The bytes are the same; later changes of
    the files are not seen. `stats()["device"]` shows whether this is active (resident,
    operators_why). Keep the boxes (RandBalancedCrop, `keep_boxes`); without them each sample reads
    its label.

    set_epoch reaches workers that live across epochs (persistent_workers) if they were
    started by fork or by multiprocessing's spawn, because the number is in shared memory. The
    dataset can be pickled, including the boxes found so far.
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

    _tail = 0  # number of operators left out at the end, see _unfinished
    _places = False  # samples hold the position of their crop instead of voxels, see _windows
    _native: _ops.Cases | None = None  # made when first needed
    #: likewise: bytes of a patch, and the crops around foreground with their places
    _hinted: tuple[float, list[tuple[int, RandBalancedCrop]]] | None = None
    _label_sizes: dict[int, int]  # by case, see _label_bytes
    _resident: dict[str, Any]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _MADE_OF:
            self._forget()

    def _forget(self) -> None:
        """Drops what was made from the attributes; it is made again when needed."""
        vars(self).pop("_native", None)
        vars(self).update(_hinted=None, _label_sizes={})
        vars(self)["_resident"] = {}  # by device: its resident cases, or why there are none

    def _start(self) -> None:
        self._sample_seed = NextSeed()
        self._outputs: list[tuple[tuple[int, ...], np.dtype[Any]]] = []
        self._forget()

    def __getstate__(self) -> Any:
        made = ("_sample_seed", "_native", "_outputs", "_resident", "_hinted", "_label_sizes")
        state = {name: value for name, value in vars(self).items() if name not in made}
        if _mp_context.get_spawning_popen() is None:
            # Shared memory can only be inherited; a plain pickle stores the number.
            state["_epoch"] = self._epoch.value
        return state

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)
        if isinstance(self._epoch, int):
            self._epoch = _sharedctypes.RawValue("Q", self._epoch)
        self._start()

    def _get(self) -> _ops.Cases:
        native = self._native
        if native is None:
            made = _ops.Cases(self.pipeline._get(), self.cases, self.repeat, self.with_index,
                              _KEYINGS[self.keyed_by], self.seed & MASK, self._epoch, self._tail,
                              self._places)
            self._outputs = [(shape, np.dtype(name)) for name, shape in _fields(made)]
            # Several threads may make one. No lock, because a fork could leave it locked.
            native = vars(self).setdefault("_native", made)
        return native

    def __len__(self) -> int:
        return len(self.cases) * self.repeat

    @property
    def epoch(self) -> int:
        """The current epoch, from which samples are made."""
        return int(self._epoch.value)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the samples that are made next (keyed_by="epoch")."""
        self._epoch.value = int(epoch) & MASK

    def seed_sample(self, seed: int) -> None:
        """Set the key of this thread's next __getitem__ (keyed_by="sample")."""
        self._sample_seed.value = int(seed) & MASK

    def _key(self, index: int) -> tuple[int, int]:
        sample_seed = self._sample_seed.take()
        if self.keyed_by == "sample" and sample_seed is None:
            sample_seed = random_bits()
        return _ops.sample_key(_KEYINGS[self.keyed_by], self.seed & MASK, self.epoch, index,
                               sample_seed or 0)

    def cost_hint(self, index: int, *, seed: int | None = None, epoch: int | None = None) -> float:
        """Returns what sample `index` will cost, in bytes that it goes through. These are the bytes
        of its patch. If it draws a crop around foreground whose boxes are not known yet, the bytes
        of its label count, too."""
        if self._hinted is None:
            self._get()
            size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._outputs)
            self._hinted = float(size), [
                (place, one) for place, one in enumerate(self.pipeline.operators)
                if isinstance(one, RandBalancedCrop)]
        patch, crops = self._hinted
        by_sample = self.keyed_by == "sample"
        if not crops or (by_sample and seed is None):
            return patch
        high, low = _ops.sample_key(_KEYINGS[self.keyed_by], self.seed & MASK,
                                    self.epoch if epoch is None else epoch & MASK, index,
                                    int(seed) & MASK if by_sample and seed is not None else 0)
        place, crop = crops[0]
        around = _ops.uniform(high, low, place, 0) < crop.foreground
        return patch + (self._label_bytes(index % len(self.cases), crop) if around else 0)

    def _label_bytes(self, case: int, crop: RandBalancedCrop) -> int:
        """Bytes of the label that are read for its boxes; with keep_boxes that is once."""
        label, size = self.cases[case][1], self._label_sizes.get(case)
        if size is None:
            size = os.stat(label).st_size if label is not None else 0
            self._label_sizes[case] = 0 if crop.keep_boxes else size
        return size

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Make a sample. Raises IndexError, and the pipeline's errors (OSError,
        ValueError, MemoryError), which name the file."""
        place, native = self._place(index), self._get()
        arrays = tuple(np.empty(shape, dtype) for shape, dtype in self._outputs)
        native.read(place, *self._key(place), arrays)
        return self._sample(place, arrays[:-1] if self.with_index else arrays)

    def _place(self, index: int) -> int:
        length, index = len(self), operator.index(index)
        place = index + length if index < 0 else index
        if not 0 <= place < length:
            raise IndexError(f"sample {index} is not among the {length} of the dataset")
        return place

    def _sample(self, place: int, volumes: Sequence[np.ndarray]) -> tuple[Any, ...]:
        """A sample of these volumes, as the options say."""
        made = volumes if self.output == "numpy" else [torch.from_numpy(one) for one in volumes]
        return (*made, place) if self.with_index else tuple(made)

    def warm(self) -> None:
        """Find the boxes of all cases now (one pass over each label), so that no sample
        has to. Workers started afterwards have them too."""
        native = self._get()
        for case in range(len(self.cases)):
            native.warm(case)

    def _unfinished(self) -> Unfinished | None:
        """The same samples up to the first place in the pipeline after which they do not get
        smaller. A device does the rest; None if there is no rest. Shares its epoch with this
        dataset. Raises errors from reading the first case's headers."""
        at = [self._volumes(tail) for tail in range(self.pipeline._get().tail_most() + 1)]
        sizes = [sum(np.dtype(v[0]).itemsize * math.prod(v[1]) for v in place) for place in at]
        tail = max(n for n, size in enumerate(sizes) if size == min(sizes))
        # torch does little with uint16
        fits = tail > 0 and all(name != "uint16" for name, _shape in at[tail])
        return self._without(tail, tail) if fits else None

    def _windows(self) -> Unfinished | None:
        """The same samples as windows of their cases, for a device that has the cases. None if
        that is not asked for, or the pipeline has other operators. Raises errors from reading the
        first case's headers."""
        operators = self.pipeline.operators[1:]
        tail = len(operators) - 1
        asked = self.resident and operators and isinstance(operators[0], (RandBalancedCrop, RandCrop))
        if not asked or self.pipeline._get().tail_most() != tail:
            return None
        left = self._without(tail, len(operators))
        if left is not None:
            left.dataset._places = True
        return left

    def _without(self, tail: int, left: int) -> Unfinished | None:
        """The samples before the last operators, and how many are left to a device. None if it cannot
        count the voxels."""
        both = zip(self._volumes(tail), self._volumes(0))
        volumes = [Volume(before, after, shape) for (before, shape), (after, _shape) in both]
        if any(math.prod(volume.shape) >= 2**32 for volume in volumes):
            return None
        names = [type(one).__name__ for one in self.pipeline.operators[-left:]]
        return Unfinished(self._twin(tail), names, volumes)

    def _volumes(self, tail: int) -> list[tuple[str, tuple[int, ...]]]:
        """dtype and shape of a sample's volumes before the last operators."""
        cases = _ops.Cases(self.pipeline._get(), self.cases[:1], 1, False, 0, 0, self._epoch, tail)
        found = _fields(cases)[:-1] if tail else _fields(cases)
        return [(np.dtype(name).name, shape) for name, shape in found]

    def _twin(self, tail: int) -> VolumeDataset:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._start()
        twin._tail = tail
        return twin

    def native_pipeline(self) -> Any:
        """A capsule "minato.native_pipeline.v1" (minato/ops.h): this dataset for C threads.

        It keeps everything alive that it needs. The caller computes each sample's key
        with mn_native_key. Raises errors from reading the first case's headers.
        """
        return self._get().native()


def _fields(cases: _ops.Cases) -> list[tuple[str, tuple[int, ...]]]:
    """dtype and shape of each part of a sample."""
    _keying, fields = _core.native_info(cases.native())
    return [(f"{kind}{itemsize}", shape) for kind, itemsize, shape in fields]
