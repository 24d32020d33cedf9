"""Cases that stay on a device: a sample then sends the position of its crop, but no voxels.

Every file of a dataset is copied once, when a loader with ``device=`` first runs over it. It stays
on the device as long as the dataset lives. Workers draw a sample's window and recipe
(``csrc/ops/mn_recipe.h``) as usual, and the kernel reads its voxels from the case. No loader can
be faster, so this is the upper bound for comparisons. It is useful if the device has room for all
cases in addition to the training.

Files that change after they were copied are not read again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from ..ops import VolumeDataset
    from .interface import Provider

#: dtype before and after, and shape of the crop
Crop = tuple[str, str, tuple[int, ...]]
#: largest share of the device's free memory for cases: the program needs the rest
SHARE = 1 / 2
#: longest time for one copy, before anything depends on it
COPY_SECONDS = 30.0
NOT = "the cases are not resident"
OTHER_PIPELINE = f"{NOT}: the pipeline is not ReadNpy, a crop and operators that devices support"


class NotResident(RuntimeError):
    """The cases cannot stay on the device; the message says why."""


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
            raise NotResident(f"a case was not copied within {COPY_SECONDS:.0f} seconds")
        del _being_read[id(tensor)]
        return made


#: tensors that the device may still read; kept for good if a copy never finishes
_being_read: dict[int, torch.Tensor] = {}


def of(dataset: VolumeDataset, provider: Provider, crops: Sequence[Crop]) -> Resident | str:
    """A dataset's cases on a device, for these crops of image and label, or why they are
    not there."""
    kept = dataset._resident
    key = str(provider.device)
    fails: tuple[type[BaseException], ...] = (OSError, ValueError, RuntimeError, MemoryError)
    fails += provider.no_room
    if key not in kept:
        try:
            kept[key] = _loaded(dataset, provider, crops)
        except fails as error:
            said = str(error).splitlines() or [type(error).__name__]
            kept[key] = f"{NOT}: {said[0]}"
    found: Resident | str = kept[key]
    return found


def _loaded(dataset: VolumeDataset, provider: Provider, crops: Sequence[Crop]) -> Resident:
    files = [[case[which] for case in dataset.cases] for which in range(len(crops))]
    shapes = [[_shape(path, crop) for path in paths] for paths, crop in zip(files, crops)]
    nbytes = sum(
        math.prod(shape) * np.dtype(dtype).itemsize
        for of_all, (dtype, *_) in zip(shapes, crops)
        for shape in of_all
    )
    free = provider.free()
    if free is not None and nbytes > SHARE * free:
        raise NotResident(
            f"{nbytes / 1e9:.1f} GB are more than half of the {free / 1e9:.1f} GB that are free"
        )
    made = Resident(provider)
    for paths, of_all in zip(files, shapes):
        made.add(_volume(path, shape) for path, shape in zip(paths, of_all))
    return made


def _shape(path: str | None, crop: Crop) -> tuple[int, ...]:
    """The shape of a file that can be copied as it is."""
    dtype, _, patch = crop
    if path is None:
        raise NotResident("not every case has a label")
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        header: Any = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            header = np.lib.format.read_array_header_2_0
        shape, fortran, found = header(file)
    fits = len(shape) == 4 and not fortran and found == np.dtype(dtype)
    fits = fits and shape[0] == patch[0] and all(n >= p for n, p in zip(shape, patch))
    if not fits:
        raise NotResident(f"{path}: {found} {shape} is not {dtype} of at least {tuple(patch)}")
    return tuple(shape)


def _volume(path: str | None, shape: tuple[int, ...]) -> np.ndarray:
    volume: np.ndarray = np.load(str(path), allow_pickle=False)
    if volume.shape != shape:
        raise NotResident(f"{path}: the file was changed during the copy")
    return volume
