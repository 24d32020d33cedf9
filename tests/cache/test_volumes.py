"""ops.VolumeDataset through a cache: the same bytes, of volumes that are read once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import minato
from minato.cache.files import look, settled
from minato.cache.volumes import SLAB
from minato.ops import (
    Normalize,
    Pad,
    Pipeline,
    RandBalancedCrop,
    RandCrop,
    RandFlip,
    RandGaussianNoise,
    ReadNpy,
    Resample,
    VolumeDataset,
    unet3d_training,
)

from .support import new_cache

CASES = 4


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    folder, rng = tmp_path_factory.mktemp("volumes"), np.random.default_rng(0)
    paths = []
    for n in range(CASES):
        shape = (1, 20 + n, 24, 30 - n)
        label = (rng.random(shape) < 0.01).astype(np.uint8)
        label[:, 5:9, 5:9, 5:9] = 1
        image = rng.normal(size=shape).astype(np.float32)
        pair = str(folder / f"image{n}.npy"), str(folder / f"label{n}.npy")
        np.save(pair[0], image)
        np.save(pair[1], label)
        paths.append(pair)
    while not settled(look(path) for pair in paths for path in pair):
        time.sleep(0.01)  # a file that was written just now is not trusted
    return paths


CROP = RandBalancedCrop((8, 9, 10))
PIPELINES = {
    "mlperf": unet3d_training((8, 9, 10)),
    "crop": Pipeline([ReadNpy(), CROP]),
    "boxes are not kept": Pipeline([ReadNpy(), RandBalancedCrop(8, keep_boxes=False), RandFlip()]),
    "random crop": Pipeline([ReadNpy(), RandCrop((8, 9, 10)), RandFlip(), RandGaussianNoise(p=1)]),
    "padded crop": Pipeline([ReadNpy(), RandCrop(8), Pad(16), RandGaussianNoise(p=1)]),
    "whole": Pipeline([ReadNpy(), Resample((8, 9, 10)), RandFlip(), RandGaussianNoise(p=1)]),
    "late crop": Pipeline([ReadNpy(), Normalize(), CROP, RandFlip(), RandGaussianNoise(p=1)]),
}


def epochs(dataset: VolumeDataset, workers: int, **options: Any) -> tuple[list[Any], Any]:
    kind = {"worker_type": "process"} if workers else {}
    loader: Any = minato.DataLoader(dataset, 2, shuffle=True, num_workers=workers, **kind, **options)
    torch.manual_seed(0)
    found = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        found += list(loader)
    return found, loader


def check(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    for batches in zip(one, other):
        for a, b in zip(*batches):
            assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", PIPELINES)
def test_volumes_of_a_cache_give_the_same_bytes(
    name: str, workers: int, cases: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {"repeat": 2, "with_index": True} if workers else {"keyed_by": "sample"}
    plain, _ = epochs(VolumeDataset(cases, PIPELINES[name], **made), workers)
    for size, slab in (("16MiB", SLAB), ("4MiB", 16 << 10)):  # whole, and in slabs of some planes
        monkeypatch.setattr("minato.cache.volumes.SLAB", slab)
        cached, loader = epochs(
            VolumeDataset(cases, PIPELINES[name], **made), workers, cache=new_cache(size)
        )
        check(plain, cached)
        found = loader.stats()["cache"]
        if size == "16MiB":
            boxes = "crop" in name and name not in ("random crop", "padded crop", "late crop")
            assert found["stored"] == CASES * (3 if boxes or name == "mlperf" else 2)
        assert found["form"] == "decoded" and found["lacking"] == 0
        assert found["decoded"] == sum(Path(p).stat().st_size for pair in cases for p in pair)


def test_volumes_without_labels_are_kept(cases: list[tuple[str, str]]) -> None:
    pipeline = Pipeline([ReadNpy(), RandCrop(8), RandFlip()])
    dataset = VolumeDataset([pair[0] for pair in cases], pipeline, output="numpy")
    cache = new_cache()
    for _ in range(2):
        loader = minato.DataLoader(dataset, None, cache=cache)  # type: ignore[arg-type]
        for made, (plain,) in zip(loader, (dataset[n] for n in range(CASES))):
            assert (made[0] == plain).all()
    assert cache.stats()["misses"] == CASES


def test_volumes_that_are_too_small_raise_the_same_error(cases: list[tuple[str, str]]) -> None:
    dataset = VolumeDataset(cases, Pipeline([ReadNpy(), RandCrop(24)]))
    with pytest.raises(ValueError, match="image0.npy: axis 1 has 20 voxels"):
        next(iter(minato.DataLoader(dataset, cache=new_cache())))  # type: ignore[arg-type]


def test_volumes_of_another_dtype_raise_the_same_error(cases: list[tuple[str, str]]) -> None:
    for pipeline in ([ReadNpy(image="int16"), RandCrop(8)], [ReadNpy(image="int16"), Resample(8)]):
        dataset = VolumeDataset(cases, Pipeline(pipeline))
        texts = []
        for options in ({}, {"cache": new_cache()}):
            with pytest.raises(ValueError, match="image0.npy") as caught:
                next(iter(minato.DataLoader(dataset, **options)))  # type: ignore[arg-type]
            texts.append(str(caught.value))
        assert texts[0] == texts[1]


def test_native_workers_refuse_a_cache(cases: list[tuple[str, str]]) -> None:
    dataset: Any = VolumeDataset(cases, PIPELINES["mlperf"])
    with pytest.raises(ValueError, match="cache= is read in Python"):
        minato.DataLoader(dataset, num_workers=2, worker_type="native", cache="16MiB")
    with pytest.raises(ValueError, match="keeps its samples decoded"):
        minato.DataLoader(dataset, cache="16MiB", cache_format="encoded")
