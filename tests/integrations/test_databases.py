"""Datasets that keep a handle of LMDB or HDF5, which no two processes may share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import minato

SAMPLES, FLOATS = 96, 700


def sample(index: int) -> np.ndarray:
    return np.random.default_rng(index).random(FLOATS, dtype=np.float32)


class Kept(torch.utils.data.Dataset):
    """Opens a handle when it is unpickled, for the first sample, or when it is made."""

    def __init__(self, path: str, when: str) -> None:
        self.path, self.when = path, when
        self.handle = self.open() if when == "made" else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.when == "unpickled":
            self.handle = self.open()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, np.ndarray]:
        if self.handle is None:
            self.handle = self.open()
        return index, self.read(index)

    def open(self) -> Any:
        raise NotImplementedError

    def read(self, index: int) -> np.ndarray:
        raise NotImplementedError


class Lmdb(Kept):
    def open(self) -> Any:
        import lmdb

        return lmdb.open(self.path, readonly=True)

    def read(self, index: int) -> np.ndarray:
        with self.handle.begin() as transaction:
            return np.frombuffer(transaction.get(str(index).encode()), np.float32)


class Hdf5(Kept):
    def open(self) -> Any:
        import h5py

        return h5py.File(self.path, "r")["samples"]

    def read(self, index: int) -> np.ndarray:
        return self.handle[index]


def make(kind: type[Kept], folder: Path, when: str) -> Kept:
    """The dataset, and the file it reads."""
    if kind is Lmdb:
        lmdb = pytest.importorskip("lmdb", exc_type=ImportError)
        with lmdb.open(str(folder), map_size=1 << 24) as env, env.begin(write=True) as writes:
            for i in range(SAMPLES):
                writes.put(str(i).encode(), sample(i).tobytes())
        return Lmdb(str(folder), when)
    h5py = pytest.importorskip("h5py", exc_type=ImportError)
    with h5py.File(folder / "samples.h5", "w") as file:
        file.create_dataset("samples", data=[sample(i) for i in range(SAMPLES)], chunks=(5, 70))
    return Hdf5(str(folder / "samples.h5"), when)


@pytest.mark.parametrize("kind, when, method", [
    (Lmdb, "unpickled", "spawn"), (Lmdb, "first used", "forkserver"),
    (Hdf5, "unpickled", "forkserver"), (Hdf5, "first used", "spawn"),
    (Lmdb, "first used", "fork"), (Hdf5, "first used", "fork"),
])  # fmt: skip
def test_each_worker_has_its_own_handle(
    kind: type[Kept], when: str, method: str, tmp_path: Path
) -> None:
    loader = minato.DataLoader(
        make(kind, tmp_path, when), 4, num_workers=2, multiprocessing_context=method,
        persistent_workers=True,
    )  # fmt: skip
    for _ in range(2):
        seen = 0
        for indices, values in loader:
            assert indices.tolist() == list(range(seen, seen + len(indices)))
            want = np.stack([sample(int(i)) for i in indices])
            assert np.array_equal(values.numpy(), want)
            seen += len(indices)
        assert seen == SAMPLES
    assert loader.stats()["worker_start"] == "forked"


@pytest.mark.parametrize("kind", [Lmdb, Hdf5])
def test_a_handle_that_cannot_be_pickled_is_refused(kind: type[Kept], tmp_path: Path) -> None:
    loader = minato.DataLoader(
        make(kind, tmp_path, "made"), 4, num_workers=2, multiprocessing_context="spawn"
    )
    with pytest.warns(UserWarning, match="pickle error"), pytest.raises(TypeError, match="pickle"):
        iter(loader)
