"""Pipelines of ``minato.ops`` that end on the device: division of work, and lifetimes."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, default_collate

import minato
from minato import ops
from minato.device import operators
from minato.device import provider as providers
from minato.ops.dataset import Volume

from .emulated import Emulated
from .fake import SECONDS, Fake

PATCH = 33  # such an image is delivered without a copy
FINISHED = ["RandFlip", "Cast", "RandScaleIntensity", "RandGaussianNoise"]


def pipeline(image: str = "int16") -> ops.Pipeline:
    return ops.Pipeline([
        ops.ReadNpy(image=image), ops.RandBalancedCrop(PATCH), ops.RandFlip(0.5), ops.Cast(),
        ops.RandScaleIntensity(p=0.5), ops.RandGaussianNoise(p=0.5),
    ])  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Path]]:
    folder, rng = tmp_path_factory.mktemp("cases"), np.random.default_rng(3)
    cases = []
    for number, shape in enumerate([(1, 36, 40, 44), (1, 35, 38, 41), (1, 40, 34, 36)]):
        paths = folder / f"{number}_x.npy", folder / f"{number}_y.npy"
        np.save(paths[0], rng.integers(-500, 500, shape, np.int16))
        np.save(paths[1], (rng.random(shape) < 0.01).astype(np.uint8))
        cases.append(paths)
    return cases


@pytest.fixture
def dataset(files: list[tuple[Path, Path]]) -> ops.VolumeDataset:
    return ops.VolumeDataset(files, pipeline(), seed=7, repeat=4, with_index=True)


@pytest.fixture
def able(fake: Fake, emulated: Emulated) -> Fake:
    """A device that operators run on."""
    fake.finisher = emulated.finisher
    return fake


def wanted(dataset: Any, order: Any = None) -> dict[int, tuple[bytes, bytes]]:
    """Bytes by index, as the dataset itself makes them."""
    samples = [dataset[k] for k in (range(len(dataset)) if order is None else order)]
    return {s[2]: (s[0].numpy().tobytes(), s[1].numpy().tobytes()) for s in samples}


def received(fake: Fake, loader: Any) -> dict[int, tuple[bytes, bytes]]:
    """Bytes by index, as the caller's stream reads them from batches."""
    got = {}
    for batch in loader:
        assert isinstance(batch, list) and len(batch) == 3
        assert batch[0].dtype == torch.float32 and batch[1].dtype == torch.uint8
        image, label, index = (fake.values(part) for part in batch)
        for row, number in enumerate(index.tolist()):
            got[number] = image[row].numpy().tobytes(), label[row].numpy().tobytes()
        del batch, image, label, index
    return got


MODES: dict[str, dict[str, Any]] = {
    "native": {"worker_type": "native"},
    "processes": {"worker_type": "process"},
    "ready": {"worker_type": "native", "in_order": False, "batching": "ready"},
    "static": {"scheduling": "static", "persistent_workers": True},
    "pickled": {"multiprocessing_context": "forkserver", "num_workers": 1, "persistent_workers": True},
    "no workers": {"num_workers": 0},
    "seeded without workers": {"num_workers": 0, "seed_per_sample": True},
    "skipping": {"worker_type": "process", "on_error": "skip"},
}


@pytest.mark.parametrize("mode", MODES)
def test_the_bytes_are_those_of_the_host(able: Fake, dataset: ops.VolumeDataset, mode: str) -> None:
    options = {"num_workers": 2, **MODES[mode]}
    loader = minato.DataLoader(dataset, batch_size=3, device="cuda", **options)
    for epoch in range(2):
        loader.set_epoch(epoch)
        assert received(able, loader) == wanted(dataset)
    found = loader.stats()["device"]
    assert found["operators"] == FINISHED and found["operators_why"] is None
    assert len(able.jobs) == 16
    # 2 bytes per voxel of the image are sent and 1 of the label, not 4 and 1.
    assert sum(n for n in able.copied if n > 10_000) == 8 * 3 * 3 * PATCH**3


def test_keyed_by_the_loader(able: Fake, files: Any) -> None:
    data = ops.VolumeDataset(files, pipeline(), keyed_by="sample", with_index=True)
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 1, "worker_type": "native"}
    there = minato.DataLoader(
        data, device="cuda", generator=torch.Generator().manual_seed(5), **options
    )
    here = minato.DataLoader(data, generator=torch.Generator().manual_seed(5), **options)
    got = received(able, there)
    for image, label, index in here:
        for row, number in enumerate(index.tolist()):
            assert got[number] == (image[row].numpy().tobytes(), label[row].numpy().tobytes())
    assert able.jobs


@pytest.mark.parametrize("worker_type", ["native", "process"])
def test_a_subset_of_a_subset(able: Fake, dataset: ops.VolumeDataset, worker_type: str) -> None:
    part = Subset(Subset(dataset, [9, 1, 4, 6, 2]), [3, 0, 2])
    loader = minato.DataLoader(part, batch_size=2, num_workers=1, device="cuda",
                               worker_type=worker_type)  # fmt: skip
    got = received(able, loader)
    assert list(got) == [6, 9, 4] and got == wanted(part, range(3))
    assert able.jobs and loader.dataset is part


class Named(ops.VolumeDataset):
    """Has additional attributes, and makes the same samples."""

    def name(self, index: int) -> str:
        return self.cases[index % len(self.cases)][0]


def test_subclass_with_more_methods_runs_on_device(able: Fake, files: Any) -> None:
    data = Named(files, pipeline(), with_index=True)
    loader = minato.DataLoader(data, batch_size=3, num_workers=1, device="cuda")
    assert received(able, loader) == wanted(data) and able.jobs


def test_a_sample_that_is_left_out(able: Fake, files: Any, tmp_path: Path) -> None:
    missing = (tmp_path / "none.npy", tmp_path / "none_either.npy")
    data = ops.VolumeDataset([files[0], missing, files[1]], pipeline(), with_index=True)
    for workers in (0, 1):
        loader = minato.DataLoader(data, batch_size=3, num_workers=workers, device="cuda",
                                   on_error="skip", max_errors=1)  # fmt: skip
        assert received(able, loader) == wanted(data, [0, 2])
    assert len(able.jobs) == 4


def test_images_alone(able: Fake, files: Any) -> None:
    steps = [ops.ReadNpy(image="int16"), ops.RandCrop(PATCH), ops.RandFlip(), ops.Normalize()]
    data = ops.VolumeDataset([image for image, _ in files], ops.Pipeline(steps))
    loader = minato.DataLoader(data, batch_size=3, num_workers=1, device="cuda")
    [[images]] = list(loader)
    assert torch.equal(able.values(images), torch.stack([data[k][0] for k in range(3)]))
    assert [job.which for job in able.jobs] == [0]


def test_a_state_goes_on_in_the_middle(able: Fake, dataset: ops.VolumeDataset) -> None:
    options: dict[str, Any] = {"batch_size": 3, "num_workers": 2, "device": "cuda"}
    loader = minato.DataLoader(dataset, **options)
    first = received(able, itertools.islice(loader, 2))
    again = minato.DataLoader(dataset, **options)
    again.load_state_dict(loader.state_dict())
    rest = received(able, again)
    assert not first.keys() & rest.keys() and {**first, **rest} == wanted(dataset)


# ---- work that stays on the host -------------------------------------------------------------


class Looks(ops.VolumeDataset):
    """Sees each of its samples."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        made = super().__getitem__(index)
        assert made[0].dtype == torch.float32
        return made


class Twice(ops.VolumeDataset):
    """Has other samples than its pipeline, for C threads, too."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        image, *rest = super().__getitem__(index)
        return (2 * image, *rest)

    def native_pipeline(self) -> Any:
        raise ValueError("not of these")


def on_host(fake: Fake, data: Any, **options: Any) -> str | None:
    loader = minato.DataLoader(data, batch_size=3, num_workers=1, device="cuda", **options)
    assert received(fake, loader) == wanted(data)
    found = loader.stats()["device"]
    assert found["operators"] == [] and not fake.jobs
    why: str | None = found["operators_why"]
    return why


def collate(samples: list[Any]) -> Any:
    return default_collate(samples)


def init(worker: int) -> None:
    pass


def test_a_dataset_that_is_looked_at_is_whole(able: Fake, dataset: Any, files: Any) -> None:
    assert "collate_fn" in str(on_host(able, dataset, collate_fn=collate))
    assert "worker_init_fn" in str(on_host(able, dataset, worker_init_fn=init))
    looks = Looks(files, pipeline(), with_index=True)
    assert "has a __getitem__" in str(on_host(able, looks))
    twice = Twice(files, pipeline(), with_index=True)
    assert "has its own __getitem__" in str(on_host(able, twice))


def test_device_without_operators_runs_them_on_host(fake: Fake, dataset: ops.VolumeDataset) -> None:
    fake.finisher = "not built"
    assert on_host(fake, dataset) == "not built"


def test_environment_variable_disables_operators(
    able: Fake, dataset: ops.VolumeDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(operators.SWITCH, "0")
    assert on_host(able, dataset) == "MINATO_DEVICE_OPERATORS=0"
    switched_off = operators.describe().endswith("switched off by MINATO_DEVICE_OPERATORS=0")
    assert switched_off or isinstance(providers.kernels(), str)


def test_a_loader_without_device_asks_for_nothing(dataset: ops.VolumeDataset) -> None:
    loader = minato.DataLoader(dataset, batch_size=3, num_workers=1)
    got = {int(n): image.numpy().tobytes() for b in loader for image, n in zip(b[0], b[2])}
    assert got == {k: image for k, (image, _) in wanted(dataset).items()}


def place(*steps: ops.Operator, image: str = "float32", files: Any) -> list[str] | None:
    """The operators that are left for a device."""
    with_read = ops.Pipeline([ops.ReadNpy(image=image), *steps])
    left = ops.VolumeDataset(files, with_read)._unfinished()
    return left.operators if left is not None else None


def test_samples_are_sent_where_they_are_smallest(tmp_path: Path) -> None:
    files: dict[str, list[tuple[Path, Path]]] = {}
    for dtype in ("float32", "float64", "int16", "uint16"):
        pair = tmp_path / f"{dtype}_x.npy", tmp_path / f"{dtype}_y.npy"
        np.save(pair[0], np.zeros((1, 9, 9, 9), dtype))
        np.save(pair[1], np.zeros((1, 9, 9, 9), np.uint8))
        files[dtype] = [pair]
    crop, flip, cast, noise = ops.RandCrop(4), ops.RandFlip(), ops.Cast(), ops.RandGaussianNoise()
    f32, f64, i16 = files["float32"], files["float64"], files["int16"]
    assert place(crop, flip, cast, noise, files=f32) == ["RandFlip", "Cast", "RandGaussianNoise"]
    assert place(crop, flip, cast, noise, image="float64", files=f64) == ["RandGaussianNoise"]
    assert place(crop, flip, cast, image="float64", files=f64) is None
    assert place(crop, noise, ops.Cast("uint8"), files=f32) is None
    assert place(crop, noise, image="int16", files=i16) == ["RandGaussianNoise"]
    assert place(flip, crop, files=f32) is None  # a crop makes less of it
    assert place(crop, flip, ops.Pad(6), noise, files=f32) == ["RandGaussianNoise"]
    assert place(crop, ops.Normalize(), image="uint16", files=files["uint16"]) is None


def test_invalid_files_fail_as_on_host(able: Fake, tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(b"no volume at all")
    data = ops.VolumeDataset([tmp_path / "x.npy"], pipeline())
    loader = minato.DataLoader(data, num_workers=1, device="cuda")
    with pytest.raises(ValueError, match=r"x\.npy"):
        next(iter(loader))


def test_users_dataset_is_not_changed(able: Fake, dataset: ops.VolumeDataset) -> None:
    left = dataset._unfinished()
    assert left is not None
    copied = pickle.loads(pickle.dumps(left.dataset))
    assert [part.shape[0] for part in copied[0][:3]] == [1, 1, 18] and len(copied[0]) == 4
    dataset.set_epoch(5)
    assert left.dataset.epoch == 5 and left.dataset.pipeline is dataset.pipeline
    assert len(dataset[0]) == 3 and dataset[0][0].dtype == torch.float32


# ---- order and memory ------------------------------------------------------------------------


def late(fake: Fake, dataset: ops.VolumeDataset) -> dict[int, tuple[bytes, bytes]]:
    """Nothing is copied or finished before all batches were delivered and their sources were
    released. The results are read only afterwards."""
    loader = minato.DataLoader(dataset, batch_size=3, num_workers=1, device="cuda",
                               worker_type="native")  # fmt: skip
    iterator, reads, got = iter(loader), [], {}
    with fake.held():
        for batch in itertools.islice(iterator, len(loader)):
            reads.append([fake.read(part) for part in batch])
            del batch
    for image, label, index in ([read.value() for read in parts] for parts in reads):
        for row, number in enumerate(index.tolist()):
            got[number] = image[row].numpy().tobytes(), label[row].numpy().tobytes()
    return got


@pytest.mark.parametrize("way", ["pinned", "direct"])
def test_late_finish_gives_whole_batches(able: Fake, dataset: ops.VolumeDataset, way: str) -> None:
    able.way = way
    assert late(able, dataset) == wanted(dataset)


def test_finishing_too_early_is_found(able: Fake, dataset: ops.VolumeDataset) -> None:
    """In the host's time, not in the order of the stream."""
    able.finish = lambda stream, job: able.finisher.run(0, job)  # type: ignore[method-assign]
    assert late(able, dataset) != wanted(dataset)


def test_an_event_before_the_kernel_is_found(able: Fake, dataset: ops.VolumeDataset) -> None:
    """If it were recorded before the kernel, the caller's stream would read unwritten memory."""
    able.plant = lambda verb: verb == "wait"
    assert late(able, dataset) != wanted(dataset)


def test_device_without_memory_for_finished_volumes(able: Fake, dataset: ops.VolumeDataset) -> None:
    image = 3 * PATCH**3
    able.room = 2 * image + image + 4 * image + image + (4 << 10)  # one batch, before and after
    loader = minato.DataLoader(dataset, batch_size=3, num_workers=1, device="cuda")
    assert received(able, loader) == wanted(dataset)
    assert loader.stats()["device"]["refused"] >= 1


def test_a_kernel_that_cannot_be_started(able: Fake, dataset: ops.VolumeDataset) -> None:
    def broken(stream: Any, job: Any) -> None:
        raise RuntimeError("cuLaunchKernel: CUDA_ERROR_MADE_UP (1)")

    able.finish = broken  # type: ignore[method-assign]
    loader = minato.DataLoader(dataset, batch_size=3, num_workers=1, device="cuda", timeout=SECONDS)
    with pytest.raises(RuntimeError, match="cuLaunchKernel"):
        next(iter(loader))


def test_an_early_end_leaves_nothing(able: Fake, dataset: ops.VolumeDataset) -> None:
    loader = minato.DataLoader(dataset, batch_size=2, num_workers=2, device="cuda")
    for _ in range(3):
        next(iter(loader))


def test_a_pipeline_that_was_changed_under_a_loader(able: Fake, files: Any) -> None:
    volume = Volume("int16", "float32", (1, 2, 2, 2))
    recipes = torch.zeros((3, 6), dtype=torch.int64)
    for shape, dtype in (((3, 1, 2, 2, 3), torch.int16), ((3, 1, 2, 2, 2), torch.float32)):
        with pytest.raises(RuntimeError, match="make a new loader"):
            operators.Tail(["Cast"], [volume]).finish(
                able, able.stream(), [torch.zeros(shape, dtype=dtype), recipes]
            )
    with pytest.raises(RuntimeError, match="make a new loader"):
        volumes = torch.zeros((3, 1, 2, 2, 2), dtype=torch.int16)
        operators.Tail(["Cast", "Cast"], [volume]).finish(able, able.stream(), [volumes, recipes])


# ---- torch's own devices ---------------------------------------------------------------------


class Module:
    """The part of torch.cuda that is used."""

    def stream(self, stream: Any) -> Any:
        return torch.no_grad()


def test_cuda_devices_are_asked_once(
    emulated: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def finisher(ordinal: int) -> Any:
        asked.append(ordinal)
        return emulated.finisher if ordinal == 0 else "there is no driver"

    monkeypatch.setattr(providers, "_finishers", {})
    monkeypatch.setattr(providers, "finisher_of", finisher)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    said: list[Any] = [None, "its images would have other bytes than those of the host"]

    def differs(_provider: Any) -> Any:
        return said.pop(0)

    for _ in range(2):
        assert providers.Provider(torch.device("cuda:0"), Module()).operators(differs) is None
        other = providers.Provider(torch.device("cuda:1"), Module())
        assert other.operators(differs) == "there is no driver"
    assert asked == [0, 1]
    providers._finishers.clear()
    wrong = providers.Provider(torch.device("cuda:0"), Module())
    for _ in range(2):
        assert "other bytes" in str(wrong.operators(differs))


def test_a_device_that_fails_when_it_is_tried(
    emulated: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(provider: Any) -> None:
        raise RuntimeError("cuLaunchKernel: CUDA_ERROR_NOT_SUPPORTED (801)")

    monkeypatch.setattr(providers, "_finishers", {})
    monkeypatch.setattr(providers, "finisher_of", lambda ordinal: emulated.finisher)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    said = providers.Provider(torch.device("cuda:0"), Module()).operators(fails)
    assert said is not None and "failed when tried on cuda:0: cuLaunchKernel" in said


def test_other_accelerators_have_no_operators() -> None:
    said = providers.Provider(torch.device("xpu:0"), Module()).operators(operators.differs)
    assert said is not None and "xpu" in said


def test_info_shows_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(operators.SWITCH, raising=False)
    (tmp_path / "kernels").write_bytes(bytes(2048))
    monkeypatch.setattr(providers, "KERNELS", str(tmp_path / "kernels"))
    monkeypatch.setattr("minato.device.provider.CUDA", "libnowhere.so.1")
    assert "built (2 KiB" in operators.describe() and "not used: no CUDA driver" in operators.describe()
    monkeypatch.setattr("minato.device.provider.CUDA", "libm.so.6")
    assert operators.describe() == "built (2 KiB for CUDA devices)"
    monkeypatch.setattr(providers, "KERNELS", str(tmp_path / "none"))
    assert operators.describe().startswith("not built")
    assert providers.finisher_of(0) == providers.NOT_BUILT
