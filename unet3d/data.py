"""Preprocessed cases as a map-style dataset, and the split into training and evaluation.

Seeding: with ``seed=None`` the global generators are left to the loader, so each loader
draws other augmentations. With a seed the dataset seeds them itself before each sample
from (seed, epoch, index). Every loader, any number of workers and a resumed run then
produce the same bytes, and a comparison measures the same work.
"""
from __future__ import annotations

import dataclasses
import hashlib
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from unet3d import spec
from unet3d.nifti import DataError
from unet3d.preprocess import read_manifest
from unet3d.transforms import Compose


@dataclasses.dataclass(frozen=True)
class Case:
    """One preprocessed volume pair; `nbytes` counts both files."""

    name: str
    image: Path
    label: Path
    nbytes: int

    def load(self, mapped: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Read (float32 image, uint8 label), both [1, z, y, x], or map the files. Raises
        DataError."""
        arrays = []
        for path in (self.image, self.label):
            try:
                arrays.append(np.load(path, mmap_mode="r" if mapped else None,
                                      allow_pickle=False))
            except (OSError, ValueError, EOFError) as error:
                raise DataError(f"{path}: cannot be read: {error}") from error
        image, label = arrays
        if image.ndim != 4 or image.shape != label.shape:
            raise DataError(f"{self.image}: shapes {image.shape} and {label.shape} are not a "
                            "pair of [1, z, y, x] volumes")
        return image, label


def list_cases(folder: Path) -> list[Case]:
    """All cases of a preprocessed folder, sorted. Raises DataError if it has none."""
    manifest = read_manifest(folder)
    if manifest is None or not manifest["cases"]:
        source, out = "NIFTI", folder
        if next(folder.glob("case_*/*.nii*"), None) is not None:
            source, out = folder, "OTHER"  # the folder of the cases stays as it is
        raise DataError(f"{folder}: holds no preprocessed cases; run `python -m unet3d.preprocess "
                        f"--source {source} --out {out}` first")
    cases = []
    for name in sorted(manifest["cases"]):
        image, label = folder / f"{name}_x.npy", folder / f"{name}_y.npy"
        for path in (image, label):
            if not path.is_file():
                raise DataError(f"{path}: missing; preprocess again")
        cases.append(Case(name, image, label,
                          image.stat().st_size + label.stat().st_size))
    return cases


def is_kits19(cases: Sequence[Case]) -> bool:
    """Whether these are the 210 public KiTS19 cases, by name."""
    names = {case.name for case in cases}
    return names == {f"case_{i:05d}" for i in range(spec.KITS19_CASES)}


def split(cases: Sequence[Case], seed: int = 0,
          kind: str = "auto") -> tuple[list[Case], list[Case]]:
    """Return (training, evaluation) cases.

    ``kits19``: the reference's 42 evaluation cases. ``seeded``: as large a share, one
    fifth, drawn with `seed`. ``auto``: the first if these are the 210 KiTS19 cases.
    Raises DataError if a part would be empty.
    """
    if kind == "auto":
        kind = "kits19" if is_kits19(cases) else "seeded"
    if kind == "kits19":
        chosen = {f"case_{i:05d}" for i in spec.KITS19_EVALUATION}
    elif kind == "seeded":
        share = len(spec.KITS19_EVALUATION) / spec.KITS19_CASES
        count = max(1, round(len(cases) * share))
        names = sorted(case.name for case in cases)
        chosen = set(random.Random(f"unet3d split {seed}").sample(names, min(count, len(names))))
    else:
        raise ValueError(f"unknown split {kind!r}; choose auto, kits19 or seeded")
    train = [case for case in cases if case.name not in chosen]
    evaluation = [case for case in cases if case.name in chosen]
    if not train or not evaluation:
        raise DataError(f"{len(cases)} cases cannot be split into training and evaluation")
    return train, evaluation


def mix(*numbers: int) -> int:
    """A 64-bit seed from integers, the same on every machine."""
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


class VolumeDataset(Dataset):
    """Training samples: index i is case i mod len(cases); each case occurs `repeat` times.

    A sample is (image float32 [1, *patch], label uint8 [1, *patch], index int), so that
    delivered samples can be counted from the batches themselves.
    """

    def __init__(self, cases: Sequence[Case], transform: Compose, seed: int | None = None,
                 repeat: int = 1) -> None:
        self.cases = list(cases)
        self.transform = transform
        self.seed = seed
        self.repeat = repeat
        # Shared, so that workers that live across epochs see the new number.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the samples that are made next."""
        self._epoch[0] = epoch

    def __len__(self) -> int:
        return len(self.cases) * self.repeat

    def case(self, index: int) -> Case:
        """The case of sample `index`."""
        return self.cases[index % len(self.cases)]

    def _number(self, epoch: int, index: int) -> int:
        """Returns what a dataset with a seed seeds a sample by."""
        assert self.seed is not None
        return mix(self.seed, epoch, index)

    def cost_hint(self, index: int, *, seed: int | None = None,
                  epoch: int | None = None) -> float | None:
        """Returns what sample `index` will cost, in a unit of its own; None where that is not
        known.

        Bytes read, times what the crop that the sample will draw makes of them: a crop around
        foreground looks for the components of the label. minato asks for it.
        """
        if self.seed is not None:
            first = random.Random(self._number(int(self._epoch[0]) if epoch is None else epoch,
                                               index))
        elif seed is None:
            return None
        else:
            import minato  # only its loader gives a seed

            first = minato.draws(seed).random
        return self.case(index).nbytes * self.transform.cost_factor(first)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.augment(self.decode(self.read(index), index), index)

    # The parts of a sample, of which minato's cache= keeps the deterministic ones.

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The volumes of a sample's case."""
        return self.case(index).load()

    def decode(self, volumes: tuple[np.ndarray, np.ndarray],
               index: int) -> tuple[np.ndarray, np.ndarray]:
        """They are stored as they are used."""
        return volumes

    def cache_key(self, index: int) -> str:
        """Returns what the volumes depend on."""
        return str(self.case(index).image)

    def cache_files(self, index: int) -> tuple[Path, Path]:
        """The files that they come from."""
        return self.case(index).image, self.case(index).label

    def augment(self, volumes: tuple[np.ndarray, np.ndarray],
                index: int) -> tuple[np.ndarray, np.ndarray, int]:
        """The random part of a sample."""
        if self.seed is not None:
            number = self._number(int(self._epoch[0]), index)
            random.seed(number)
            np.random.seed(number & 0xFFFFFFFF)
        case = self.case(index)
        try:
            image, label = self._make(case, *volumes)
        except ValueError as error:
            raise DataError(f"{case.image}: {error}") from error
        return image, label, index

    def _make(self, case: Case, image: np.ndarray,
              label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.transform(image, label)


class ExpertVolumes(VolumeDataset):
    """The same samples as an expert would make them without another loader: files are mapped, so
    that only the crop is read, and each worker caches the boxes of the labels it has read."""

    def __init__(self, reference: VolumeDataset) -> None:
        super().__init__(reference.cases, reference.transform, reference.seed, reference.repeat)
        self._epoch = reference._epoch  # set_epoch() is called on the other one
        self._known: dict[str, dict[str, Any]] = {}

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.case(index).load(mapped=True)

    def _make(self, case: Case, image: np.ndarray,
              label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        crop, *others = self.transform.steps
        image, label = crop(image, label, self._known.setdefault(case.name, {}))
        return Compose(others)(np.asarray(image), np.asarray(label))


class WholeVolumes(Dataset):
    """The volumes themselves, for an evaluation: (image [1, z, y, x], label)."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases = list(cases)

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.cases[index].load()
