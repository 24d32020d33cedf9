"""Cases that stay on the device: what travels, the bytes, and where it cannot be."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

import minato
from .emulated import Emulated, build
from .fake import Fake
from .test_device_operators import FINISHED, MODES, PATCH, able, files, pipeline, received, wanted
from minato import _ops, ops
from minato.device import operators
from minato.device.operators import _being_read as cases_being_read
from minato.device.provider import Job

__all__ = ["able", "files"]  # fixtures
ON_DEVICE = ["RandBalancedCrop", *FINISHED]


def resident(files: Any, **options: Any) -> ops.VolumeDataset:
    made = {"seed": 7, "repeat": 4, "with_index": True, **options}
    return ops.VolumeDataset(files, pipeline(), resident=True, **made)


def told(loader: Any) -> dict[str, Any]:
    found: dict[str, Any] = loader.stats()["device"]
    return found


def size(files: Any) -> int:
    return sum(np.load(path).nbytes for pair in files for path in pair)


@pytest.mark.parametrize("mode", MODES)
def test_the_bytes_are_those_of_the_host(able: Fake, files: Any, mode: str) -> None:
    dataset = resident(files)
    options = {"num_workers": 2, **MODES[mode]}
    loader = minato.DataLoader(dataset, batch_size=3, device="cuda", **options)
    for epoch in range(2):
        loader.set_epoch(epoch)
        assert received(able, loader) == wanted(dataset)
    found = told(loader)
    assert found["operators"] == ON_DEVICE and found["operators_why"] is None
    assert found["resident"] == size(files)
    # No voxel travels with a sample: four numbers, the recipe and the index do.
    assert found["bytes"] == 3 * found["batches"] * 8 * (4 + 2 + 4 * len(FINISHED) + 1)
    assert sum(n for n in able.copied if n > 10_000) == size(files)  # once


def test_workers_read_no_voxel(able: Fake, files: Any) -> None:
    dataset = resident(files)
    dataset.warm()
    before = dataset.pipeline.stats()["bytes_read"]
    loader = minato.DataLoader(dataset, batch_size=3, num_workers=1, worker_type="native",
                               device="cuda")  # fmt: skip
    assert len(received(able, loader)) == 12
    assert dataset.pipeline.stats()["bytes_read"] == before


def test_images_alone_and_a_crop_alone(able: Fake, files: Any) -> None:
    images = [image for image, _ in files]
    steps = [ops.ReadNpy(image="int16"), ops.RandCrop((5, 7, 9))]
    for more in ([], [ops.RandFlip(), ops.Normalize()]):
        data = ops.VolumeDataset(images, ops.Pipeline([*steps, *more]), resident=True)
        loader = minato.DataLoader(data, batch_size=3, num_workers=1, device="cuda")
        [[batch]] = list(loader)
        assert torch.equal(able.values(batch), torch.stack([data[k][0] for k in range(3)]))
        assert told(loader)["resident"] and told(loader)["operators"][0] == "RandCrop"


def test_subsets_and_several_channels(able: Fake, tmp_path: Path) -> None:
    rng, cases = np.random.default_rng(1), []
    for number, shape in enumerate([(2, 9, 12, 11), (2, 8, 8, 8)]):
        cases.append((tmp_path / f"{number}_x.npy", tmp_path / f"{number}_y.npy"))
        np.save(cases[-1][0], rng.normal(size=shape).astype(np.float32))
        np.save(cases[-1][1], rng.integers(0, 3, (1, *shape[1:]), np.uint8))
    steps = [ops.ReadNpy(), ops.RandBalancedCrop(8), ops.RandFlip(0.5), ops.RandGaussianNoise(1.0)]
    data = ops.VolumeDataset(cases, ops.Pipeline(steps), repeat=5, with_index=True, resident=True)
    part = Subset(data, [7, 2, 9])
    loader = minato.DataLoader(part, batch_size=2, num_workers=1, device="cuda")
    assert received(able, loader) == wanted(part, range(3)) and told(loader)["resident"]


def test_cases_are_copied_once_and_freed_with_dataset(able: Fake, files: Any) -> None:
    dataset = resident(files)
    for _ in range(2):
        loader = minato.DataLoader(dataset, batch_size=4, num_workers=1, device="cuda")
        assert received(able, loader) == wanted(dataset)
        assert told(loader)["resident"] == size(files)
    assert sum(n for n in able.copied if n > 10_000) == size(files)
    assert able.used >= size(files)
    del loader, dataset
    gc.collect()
    assert able.used < size(files)


def fallback(fake: Fake, dataset: Any) -> str:
    """It is loaded as without resident cases; says why."""
    loader = minato.DataLoader(dataset, batch_size=3, num_workers=1, device="cuda")
    assert received(fake, loader) == wanted(dataset)
    found = told(loader)
    assert found["resident"] == 0 and found["operators"] == FINISHED
    return str(found["operators_why"])


def test_cases_without_device_memory_stay_on_host(able: Fake, files: Any) -> None:
    able.room = 2 * size(files) - 1
    assert "more than half of" in fallback(able, resident(files))
    able.room = None
    able.free = lambda: 10**12  # type: ignore[method-assign]
    able.room = able.used + size(files) // 2  # another user has taken memory meanwhile
    dataset = resident(files)
    loader = minato.DataLoader(dataset, batch_size=3, num_workers=1, device="cuda")
    iterator = iter(loader)
    assert not cases_being_read  # no copy was started
    able.room = None
    assert received(able, iterator) == wanted(dataset)
    assert "not resident" in told(loader)["operators_why"] and not told(loader)["resident"]


def test_cases_of_different_dtypes_stay_on_host(able: Fake, files: Any, tmp_path: Path) -> None:
    for name, array in {
        "other.npy": np.zeros((1, 40, 40, 40), np.int32), "flat.npy": np.zeros(9, np.int16),
        "small.npy": np.zeros((1, 40, 40, PATCH - 1), np.int16),
        "fortran.npy": np.asfortranarray(np.zeros((1, 40, 40, 41), np.int16)),
        "channels.npy": np.zeros((2, 40, 40, 40), np.int16),
    }.items():  # fmt: skip
        np.save(tmp_path / name, array)
        data = resident([*files, (tmp_path / name, files[0][1])])
        loader = minato.DataLoader(data, batch_size=3, num_workers=0, device="cuda")
        iterator = iter(loader)
        assert [part.shape[0] for part in next(iterator)] == [3, 3, 3]
        assert name in told(loader)["operators_why"] and not told(loader)["resident"]
        with pytest.raises(ValueError, match=name):  # from its sample, as without
            next(iterator)


def test_missing_label_or_file_keeps_cases_on_host(able: Fake, files: Any) -> None:
    for case, words in (((files[0][0], None), "not every case"),
                        (("nowhere.npy", files[0][1]), "No such file")):  # fmt: skip
        loader = minato.DataLoader(resident([*files, case]), batch_size=3, num_workers=0,
                                   device="cuda")  # fmt: skip
        assert len(next(iter(loader))) == 3
        assert words in told(loader)["operators_why"]


def test_other_pipelines_keep_cases_on_host(able: Fake, files: Any) -> None:
    steps = pipeline().operators
    data = ops.VolumeDataset(files, ops.Pipeline([*steps[:2], ops.Pad(36), *steps[2:]]),
                             with_index=True, resident=True)  # fmt: skip
    assert "the pipeline is not ReadNpy, a crop" in fallback(able, data)


def test_device_without_operators_keeps_cases_on_host(fake: Fake, files: Any) -> None:
    fake.finisher = "not built"
    data = resident(files)
    loader = minato.DataLoader(data, batch_size=3, num_workers=1, device="cuda")
    assert received(fake, loader) == wanted(data)
    assert told(loader)["operators_why"] == "not built" and not told(loader)["resident"]


def test_copies_that_never_end_are_given_up(
    able: Fake, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minato.device.operators.COPY_SECONDS", 0.02)
    dataset = resident(files)
    before = len(cases_being_read)
    with able.held():
        iterator = iter(minato.DataLoader(dataset, batch_size=3, num_workers=0, device="cuda"))
    assert received(able, iterator) == wanted(dataset)
    assert "not copied within" in dataset._resident["cuda:1"]
    assert len(cases_being_read) == before + 1  # a hanging device may continue later
    cases_being_read.clear()


def test_an_interrupt_while_cases_are_copied(
    able: Fake, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources being read are kept; the next loader starts again."""
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    dataset = resident(files)
    loader = minato.DataLoader(dataset, batch_size=3, num_workers=0, device="cuda")
    with able.held(), monkeypatch.context() as patched:
        patched.setattr("minato.device.operators.time.sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
        assert cases_being_read
    assert received(able, loader) == wanted(dataset) and told(loader)["resident"]
    cases_being_read.clear()


def test_without_memory_on_the_host(
    able: Fake, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_args: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("minato.device.operators._volume", fails)
    assert "not resident: MemoryError" in fallback(able, resident(files))


def test_forked_child_has_no_resident_cases(able: Fake, files: Any) -> None:
    """A pickle of the dataset has none either."""
    dataset = resident(files)
    loader = minato.DataLoader(dataset, batch_size=3, num_workers=1, device="cuda")
    assert received(able, loader) == wanted(dataset)
    left = dataset._windows()
    assert left is not None and dataset._resident and not left.dataset._resident
    assert "_resident" not in dataset.__getstate__()
    pid = os.fork()
    if pid == 0:
        os._exit(int(len(dataset[0]) != 3))
    assert os.waitpid(pid, 0)[1] == 0


def test_windows_are_read_within_their_case(emulated: Emulated) -> None:
    """For any windows: the arrays around the case are neither read nor written."""
    around = np.full((3, 1, 4, 5, 6), 9, np.uint8)
    around[1] = np.arange(120).reshape(4, 5, 6)
    cases = np.array([[around[1].ctypes.data, 4, 5, 6]], np.int64)
    recipes = np.zeros((1, 2), np.int64)
    far = 2**62
    for window, corner in {
        (0, 1, 2, 3): (1, 2, 3), (7, 0, 0, 0): (0, 0, 0), (-far, -far, -1, -far): (0, 0, 0),
        (far, far, far, far): (2, 3, 3), (0, 3, 4, 5): (2, 3, 3),
    }.items():  # fmt: skip
        target = np.zeros((1, 1, 2, 2, 3), np.uint8)
        windows = np.array([window], np.int64)
        places = 0, target.ctypes.data, recipes.ctypes.data, 0, windows.ctypes.data, cases.ctypes.data
        emulated.finisher.run(0, Job(0, (1, 1), target.shape, *places, 1))
        z, y, x = corner
        np.testing.assert_array_equal(target[0, 0], around[1, 0, z : z + 2, y : y + 2, x : x + 3])


def test_a_source_or_windows_are_needed(emulated: Emulated) -> None:
    for more in ((), (0, 8, 1), (8, 8, 0)):
        with pytest.raises(ValueError, match="cannot finish volumes"):
            emulated.finisher.run(0, Job(0, (1, 1), (1, 1, 1, 1, 1), 0, 8, 8, 0, *more))


def test_windows_need_a_crop_of_files(files: Any) -> None:
    data = ops.VolumeDataset(files, pipeline())
    native, cases = data.pipeline._get(), data.cases
    for steps in (3, 0):
        with pytest.raises(ValueError, match="must be ReadNpy, a crop and steps"):
            _ops.Cases(native, cases, 1, False, 0, 0, data._epoch, steps, True)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("within(window[1], c->shape[0] - job->depth) + plane", "plane"),
        ("(channel * c->shape[0] + z)", "(channel * job->depth + z)"),
    ],
)  # fmt: skip
def test_a_kernel_that_crops_otherwise_is_found(tmp_path: Path, text: str, other: str) -> None:
    fake = Fake()
    try:
        broken = Emulated(build(tmp_path, {"cuda/mn_finish.cu": (text, other)}))
        fake.finisher = broken.finisher
        assert "other bytes than those of the host" in str(operators.differs(fake))
    finally:
        fake.close()
