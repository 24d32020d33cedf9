"""The end of a pipeline of ``minato.ops``, on the device.

Workers run such a pipeline up to the place where its samples have the fewest bytes. The samples are
finished on the device: a kernel flips, casts, scales, adds noise and normalizes each voxel. It
runs on the stream of the copies and before their event. The workers draw the
random numbers and send them along as a recipe (``csrc/ops/mn_recipe.h``). The arithmetic is the
same source code as on the host, so the bytes are equal.

If the cases themselves are on the device, samples are also cropped there, and a sample sends the
position of its crop, but no voxels.

If nothing can run on the device, workers make the whole sample, as without ``device=``.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset

from .._not_linux import CORE
from ..dataset_calls import behind_subsets
from ..option_values import option
from .provider import Job, Provider, codes, kernels, missing

if CORE:
    from ..workers.native import looked_at
if TYPE_CHECKING:
    from ..ops.dataset import Unfinished, Volume, VolumeDataset

#: "0": nothing runs on devices
SWITCH = "MINATO_DEVICE_OPERATORS"
#: longest time for the first batch of a device, before anything depends on it
CHECK_SECONDS = 30.0


@dataclasses.dataclass
class Tail:
    """The last operators of a pipeline, for batches of one shape."""

    operators: list[str]
    volumes: list[Volume]
    resident: Resident | None = None  # if set, the first operator crops its cases

    def finish(self, provider: Provider, stream: Any, batch: Any) -> tuple[list[Any], list[Any]]:
        """Finishes a batch on the device. Returns (its parts once the stream has got there, the new
        ones among them). The inputs (volumes or windows, and recipes) are not among the
        parts."""
        count = len(self.volumes) if self.resident is None else 1
        steps = len(self.operators) - (self.resident is not None)
        recipes, made = batch[count], []
        self._check(recipes, "int64", (len(recipes), 2 + 4 * steps))
        for which, volume in enumerate(self.volumes):
            shape = (len(recipes), *volume.shape)
            source, more = 0, {}
            if self.resident is None:
                self._check(batch[which], volume.before, shape)
                source = batch[which].data_ptr()
            else:
                self._check(batch[0], "int64", (len(recipes), 4))
                cases = self.resident.tables[which].data_ptr()
                more = {"windows": batch[0].data_ptr(), "cases": cases}
                more["n_cases"] = self.resident.cases
            target = provider.empty(shape, getattr(torch, volume.after), stream)
            dtypes = codes()[volume.before], codes()[volume.after]
            places = source, target.data_ptr(), recipes.data_ptr()
            provider.finish(stream, Job(which, dtypes, shape, *places, steps, **more))
            made.append(target)
        return [*made, *batch[count + 1 :]], made

    def _check(self, part: Any, dtype: str, shape: tuple[int, ...]) -> None:
        found = str(part.dtype).removeprefix("torch.")
        if found == dtype and part.shape == shape and part.is_contiguous():
            return
        raise RuntimeError(
            f"a batch has {found} of shape {tuple(part.shape)}, but {dtype} of "
            f"shape {shape} was expected on the device. If the dataset's pipeline was "
            f"changed, make a new loader; {SWITCH}=0 finishes samples on the host"
        )


class Split(NamedTuple):
    """How the work on a loader's samples is divided."""

    dataset: Any  # the part that workers run
    tail: Tail | None = None  # the part for the device
    why: str | None = None  # why the device does less than it could


def split(loader: Any, provider: Provider | None) -> Split:
    """Divides the work for a loader whose batches go to this device."""
    whole = Split(loader.dataset)
    if provider is None or not CORE:
        return whole
    from ..ops import VolumeDataset  # not at import: most programs use no operators

    dataset, subsets = behind_subsets(loader.dataset)
    if not isinstance(dataset, VolumeDataset):
        return whole
    why = looked_at(loader)
    if option(loader, "cache") is not None:
        why = why or "the samples are read through cache="
    for name in ("__getitem__", "native_pipeline"):
        if getattr(type(dataset), name) is not getattr(VolumeDataset, name):
            why = why or f"{type(dataset).__name__} has its own {name}"
    if why is not None:
        return whole._replace(why=why)
    left, kept, why = _divided(dataset, provider)
    if left is None:
        return whole._replace(why=why)
    unfinished: Any = left.dataset
    for subset in reversed(subsets):
        unfinished = Subset(unfinished, subset.indices)
    return Split(unfinished, Tail(left.operators, left.volumes, kept), why)


def _divided(
    dataset: VolumeDataset, provider: Provider
) -> tuple[Unfinished | None, Resident | None, str | None]:
    """The dataset for workers and what is left for the device, the resident cases, and why the
    device does less than it could."""
    try:
        unfinished, windows = dataset._unfinished(), dataset._windows()
    except Exception:  # the samples raise the same error, in their place
        return None, None, None
    if unfinished is None and not dataset.resident:
        return None, None, None
    why = f"{SWITCH}=0" if os.environ.get(SWITCH) == "0" else provider.operators(differs)
    if why is not None:
        return None, None, why
    if not dataset.resident:
        return unfinished, None, None
    if windows is None:
        return unfinished, None, OTHER_PIPELINE
    kept = resident_of(dataset, provider, windows.volumes)
    return (unfinished, None, kept) if isinstance(kept, str) else (windows, kept, None)


def describe() -> str:
    """For ``minato info``: whether operators of minato.ops can run on a device."""
    image = kernels()
    if isinstance(image, str):
        return image + "; they run on the host"
    built = f"built ({len(image) >> 10} KiB for CUDA devices)"
    if os.environ.get(SWITCH) == "0":
        return f"{built}, switched off by {SWITCH}=0"
    why = missing()
    return built if why is None else f"{built}, not used: {why}"


# ---- a check of the device -------------------------------------------------------------------


def differs(provider: Provider) -> str | None:
    """How a small batch that is finished on the device differs from the host's; None if it does
    not. A device is not trusted to round correctly before this check.

    The batch is finished twice: from volumes that arrive whole, and from windows of a case on the
    device. That case has voxels around the windows, which must be left out."""
    from .. import ops
    from ..ops.dataset import Volume

    pipeline = ops.Pipeline([
        ops.RandFlip(0.5), ops.Cast(), ops.RandScaleIntensity(p=1.0), ops.RandGaussianNoise(p=1.0),
        ops.RandFlip(0.5), ops.Normalize(), ops.RandGaussianNoise(p=1.0, mean=0.25),
    ])  # fmt: skip
    shape = (2, 7, 9, 33)  # two channels; no axis is a multiple of a block size
    numbers = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    pair = (numbers * 7919 % 4001 - 2000).astype(np.int16), (numbers * 31 % 7).astype(np.uint8)
    keys = [(2**63 + 5, 2**64 - 1), (3, 77), (2**64 - 1, 2**32)]
    wanted = [pipeline(*pair, key=key) for key in keys]
    steps = len(pipeline.operators)
    recipes = [np.frombuffer(pipeline._get().recipe(steps, *key), np.int64) for key in keys]
    kept = Resident(provider)
    for volume in pair:
        kept.add([np.pad(volume, ((0, 0), (1, 3), (2, 1), (3, 2)), mode="wrap")])
    names = [type(operator).__name__ for operator in pipeline.operators]
    volumes = [Volume("int16", "float32", shape), Volume("uint8", "uint8", shape)]
    whole = [np.stack([part] * len(keys)) for part in pair]
    windows = np.array([[0, 1, 2, 3]] * len(keys), np.int64)
    for tail, batch in (
        (Tail(names, volumes), [*whole, np.stack(recipes)]),
        (Tail(["RandCrop", *names], volumes, kept), [windows, np.stack(recipes)]),
    ):
        stream, sources = provider.stream(), [torch.from_numpy(part) for part in batch]
        there = [provider.copy(source, stream, []) for source in sources]
        _, made = tail.finish(provider, stream, there)
        if not finished(provider, stream, CHECK_SECONDS):
            return f"a first batch was not finished within {CHECK_SECONDS:.0f} seconds"
        for part, name in enumerate(("images", "labels")):
            want = b"".join(np.asarray(sample[part]).tobytes() for sample in wanted)
            if made[part].cpu().numpy().tobytes() != want:
                return f"its {name} would have other bytes than those of the host"
    return None


# ---- cases that stay on a device --------------------------------------------------------------
#
# Every file of a dataset is copied once, when a loader with ``device=`` first runs over it. It
# stays on the device as long as the dataset lives. Workers draw a sample's window and recipe
# (csrc/ops/mn_recipe.h) as usual, and the kernel reads its voxels from the case. No loader can be
# faster, so this is the upper bound for comparisons. It is useful if the device has room for all
# cases in addition to the training. Files that change after they were copied are not read again.

#: largest share of the device's free memory for cases: the program needs the rest
SHARE = 1 / 2
#: longest time for one copy, before anything depends on it
COPY_SECONDS = 30.0
NOT = "the cases are not resident"
OTHER_PIPELINE = f"{NOT}: the pipeline is not ReadNpy, a crop and operators that devices support"


def finished(provider: Provider, stream: Any, seconds: float) -> bool:
    """Waits until the stream has finished its work. Returns whether it did."""
    done, deadline = provider.record(stream), time.monotonic() + seconds
    while not provider.passed(done):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    return True


class Resident:
    """Cases that are resident on one device."""

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        self.stream = provider.stream()
        self.nbytes = 0
        self.cases = 0
        #: for images and for labels: a struct mn_resident for each case
        self.tables: list[torch.Tensor] = []
        self._voxels: list[torch.Tensor] = []

    def add(self, volumes: Iterable[np.ndarray]) -> None:
        """Copies the images (or labels) of all cases: C contiguous, [channels, z, y, x]."""
        rows = []
        for volume in volumes:
            voxels = self._copied(torch.from_numpy(volume.reshape(-1).view(np.uint8)))
            rows.append([voxels.data_ptr(), *volume.shape[1:]])
            self._voxels.append(voxels)
            self.nbytes += volume.nbytes
        self.cases = len(rows)
        self.tables.append(self._copied(torch.tensor(rows, dtype=torch.int64, device="cpu")))

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        _being_read[id(tensor)] = tensor
        try:
            made = self.provider.copy(tensor, self.stream, [])
        except Exception:  # no copy was started
            del _being_read[id(tensor)]
            raise
        if not finished(self.provider, self.stream, COPY_SECONDS):
            raise RuntimeError(f"a case was not copied within {COPY_SECONDS:.0f} seconds")
        del _being_read[id(tensor)]
        return made


#: tensors that the device may still read; kept for good if a copy never finishes
_being_read: dict[int, torch.Tensor] = {}


def resident_of(dataset: VolumeDataset, provider: Provider, crops: Sequence[Volume]) -> Resident | str:
    """A dataset's cases on a device, for these crops of image and label, or why they are
    not there."""
    kept: dict[str, Resident | str] = dataset._resident
    key = str(provider.device)
    if key not in kept:
        try:
            kept[key] = _loaded(dataset, provider, crops)
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            said = str(error).splitlines() or [type(error).__name__]
            kept[key] = f"{NOT}: {said[0]}"
    return kept[key]


def _loaded(dataset: VolumeDataset, provider: Provider, crops: Sequence[Volume]) -> Resident:
    """Raises OSError, ValueError, RuntimeError or MemoryError if the cases cannot stay there."""
    files = [[case[which] for case in dataset.cases] for which in range(len(crops))]
    shapes = [[_shape(path, crop) for path in paths] for paths, crop in zip(files, crops)]
    nbytes = sum(
        math.prod(shape) * np.dtype(crop.before).itemsize
        for of_all, crop in zip(shapes, crops)
        for shape in of_all
    )
    free = provider.free()
    if free is not None and nbytes > SHARE * free:
        raise RuntimeError(
            f"{nbytes / 1e9:.1f} GB are more than half of the {free / 1e9:.1f} GB that are free"
        )
    made = Resident(provider)
    for paths, of_all in zip(files, shapes):
        made.add(_volume(path, shape) for path, shape in zip(paths, of_all))
    return made


def _shape(path: str | None, crop: Volume) -> tuple[int, ...]:
    """The shape of a file that can be copied as it is."""
    if path is None:
        raise RuntimeError("not every case has a label")
    file, patch = np.lib.format.open_memmap(path, mode="r"), crop.shape
    fits = file.ndim == 4 and file.flags.c_contiguous and file.dtype == np.dtype(crop.before)
    fits = fits and len(file) == patch[0] and all(n >= p for n, p in zip(file.shape, patch))
    if not fits:
        raise RuntimeError(
            f"{path}: {file.dtype} {file.shape} is not {crop.before} of at least {tuple(patch)}"
        )
    return file.shape


def _volume(path: str | None, shape: tuple[int, ...]) -> np.ndarray:
    volume: np.ndarray = np.load(str(path), allow_pickle=False)
    if volume.shape != shape:
        raise RuntimeError(f"{path}: the file was changed during the copy")
    return volume
