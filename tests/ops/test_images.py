"""ImageFolder: native workers make the samples that Python makes from the same seeds."""
from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attack.support import in_child

import minato
from minato import ops

from .test_jpeg import BAD, MEAN, OTHERS, STD, USUAL, encoded, photo

TRAIN = ops.RandomResizedCropJpeg(48, mean=MEAN, std=STD)


class StandIn:
    """What torchvision's ImageFolder does for these tests, where torchvision is not installed."""

    def __init__(self, root: Any, transform: Any, target_transform: Any, loader: Any) -> None:
        self.classes = sorted(folder.name for folder in Path(root).iterdir())
        self.samples = [(str(path), number) for number, name in enumerate(self.classes)
                        for path in sorted(Path(root, name).iterdir())]
        self.targets = [target for _path, target in self.samples]
        self.transform, self.target_transform, self.loader = transform, target_transform, loader

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        path, target = self.samples[index]
        return self.transform(self.loader(path)), target


@pytest.fixture(scope="module", autouse=True)
def _torchvision() -> Any:
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    module: Any = types.ModuleType("torchvision")
    module.datasets = types.SimpleNamespace(ImageFolder=StandIn)
    module.get_image_backend = lambda: "PIL"
    module.transforms = types.ModuleType("torchvision.transforms")
    module.transforms.v2 = types.ModuleType("torchvision.transforms.v2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torchvision", module)
        patch.setitem(sys.modules, "torchvision.transforms", module.transforms)
        yield
        patch.delitem(sys.modules, "minato.ops.images", raising=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of all usual kinds and sizes, and others among them that only Pillow decodes."""
    folder: Path = tmp_path_factory.mktemp("images")
    files = [*USUAL.values(), *OTHERS.values()]
    files += [encoded(photo(width, height)) for width, height in ((40, 30), (30, 500), (500, 31))]
    for n, file in enumerate(files):
        (folder / "ab"[n % 2]).mkdir(exist_ok=True)
        (folder / "ab"[n % 2] / f"{n:02}.jpg").write_bytes(file)
    return folder


def loaded(dataset: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    options = {"batch_size": 4, "num_workers": 2, "shuffle": True, **options}
    batches = list(minato.DataLoader(dataset, **options))
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("transform", [
    TRAIN, ops.RandomResizedCropJpeg((40, 56), scale=(0.5, 1.0), ratio=(0.2, 0.3), flip=0.0),
    ops.ResizeCenterCropJpeg(40, (32, 36), mean=MEAN), ops.RandomResizedCropJpeg(32, dtype="uint8"),
    ops.ResizeCenterCropJpeg(40, 32, dtype="float16"), ops.RandomResizedCropJpeg(24, decode="scaled"),
], ids=lambda t: f"{type(t).__name__}, {t.dtype}")  # fmt: skip
def test_native_samples_equal_those_of_python(root: Path, transform: Any) -> None:
    dataset = ops.ImageFolder(root, transform)
    wanted = loaded(dataset, num_workers=0, seed_per_sample=True)
    for options in ({"num_workers": 1}, {"num_workers": 2}, {"worker_type": "process"}):
        loader = minato.DataLoader(dataset, num_workers=1)
        list(loader)
        assert loader.stats()["worker_type"] == "native"
        assert same(loaded(dataset, **options), wanted)
    assert wanted[1].dtype == torch.int64 and len(wanted[0]) == len(dataset)


def test_center_crop_equals_the_transform_alone(root: Path) -> None:
    transform = ops.ResizeCenterCropJpeg(40, 32, mean=MEAN, std=STD)
    dataset = ops.ImageFolder(root, transform)
    pixels, targets = loaded(dataset, shuffle=False)
    assert targets.tolist() == dataset.targets
    assert torch.equal(pixels, torch.stack([transform(path) for path, _ in dataset.samples]))


def test_random_parts_are_spread_as_the_transforms_own(root: Path) -> None:
    """Mean and spread of place, size and flip: 4000 draws of each."""
    from minato import _ops

    part = ops.RandomResizedCropJpeg(48)._part()
    keyed = [_ops.Photos.job(part, 300, 200, seed, 2**64 - 1) for seed in range(4000)]
    torch.manual_seed(0)
    own = [TRAIN._crop(300, 200) for _ in range(4000)]
    ours = np.array([[*region, flip] for region, _size, _window, flip in keyed], float)
    theirs = np.array([[*crop.region, crop.flip] for crop in own], float)
    error = np.sqrt((ours.var(0) + theirs.var(0)) / 4000)
    assert (np.abs(ours.mean(0) - theirs.mean(0)) < 5 * error).all()
    assert np.allclose(ours.std(0), theirs.std(0), rtol=0.06)


def test_torchs_loader_draws_from_torchs_generator(root: Path) -> None:
    dataset = ops.ImageFolder(root, TRAIN)
    torch.manual_seed(5)
    got = [pixels for pixels, _ in torch.utils.data.DataLoader(dataset, batch_size=None)]
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()  # the loader's seed
    assert same(got, [TRAIN(path) for path, _ in dataset.samples])


def test_subset_and_changed_samples_are_native(root: Path) -> None:
    dataset = ops.ImageFolder(root, ops.ResizeCenterCropJpeg(40, 32))
    whole = loaded(dataset, shuffle=False)
    subset = torch.utils.data.Subset(dataset, [5, 2, 7])
    assert same(loaded(subset, shuffle=False, worker_type="native"), [x[[5, 2, 7]] for x in whole])
    dataset.samples = dataset.samples[::-1]
    assert same(loaded(dataset, shuffle=False, worker_type="native"), [x.flip(0) for x in whole])
    kept = pickle.loads(pickle.dumps(dataset))
    assert same(loaded(kept, shuffle=False, worker_type="native"), [x.flip(0) for x in whole])


def test_left_epoch_resumes_with_equal_bits(root: Path) -> None:
    def loader() -> Any:
        torch.manual_seed(3)
        return minato.DataLoader(ops.ImageFolder(root, TRAIN), 4, shuffle=True, num_workers=2, worker_type="native")

    whole = list(loader())
    for position in range(len(whole) + 1):
        left = loader()
        iterator = iter(left)
        before = [next(iterator) for _ in range(position)]
        rest = loader()
        rest.load_state_dict(left.state_dict())
        assert same([part for batch in [*before, *rest] for part in batch], [part for batch in whole for part in batch])


@pytest.mark.parametrize("workers", [{"num_workers": 1}, {"num_workers": 3}, {"worker_type": "process"}], ids=str)
def test_killed_trainer_resumes_on_other_workers(root: Path, tmp_path: Path, workers: Any) -> None:
    """It is killed while its two threads decode."""
    def loader(**options: Any) -> Any:
        torch.manual_seed(3)
        return minato.DataLoader(ops.ImageFolder(root, TRAIN), 2, shuffle=True, **options)

    def train() -> None:
        data = loader(num_workers=2, worker_type="native")
        iterator = iter(data)
        torch.save(([next(iterator) for _ in range(position)], data.state_dict()), tmp_path / "saved")
        os.kill(os.getpid(), signal.SIGKILL)

    whole = list(loader(num_workers=0, seed_per_sample=True))
    for position in range(0, len(whole) + 1, 2):
        assert in_child(train) == -signal.SIGKILL
        before, state = torch.load(tmp_path / "saved", weights_only=False)
        rest = loader(**{"num_workers": 2, **workers})
        rest.load_state_dict(state)
        assert same([part for batch in [*before, *rest] for part in batch], [part for batch in whole for part in batch])


@pytest.mark.parametrize("name", BAD)
def test_bad_photo_raises_pillows_error(root: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "a").mkdir()
    for n, file in enumerate([USUAL["gray"], BAD[name], USUAL["gray"]]):
        (tmp_path / "a" / f"{n}.jpg").write_bytes(file)
    dataset = ops.ImageFolder(tmp_path, TRAIN)
    with pytest.raises(Exception) as wanted:
        TRAIN(str(tmp_path / "a" / "1.jpg"))
    loader = minato.DataLoader(dataset, num_workers=1, worker_type="native")
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(type(wanted.value)) as caught:
        next(iterator)
    assert str(wanted.value) in str(caught.value)
    assert "sample index 1" in str([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert len(list(iterator)) == 1
    skipping = minato.DataLoader(dataset, batch_size=3, num_workers=1, on_error="skip")
    with pytest.warns(UserWarning, match="skip"):
        assert [len(x) for x, _ in skipping] == [2]


def test_missing_photo_raises_its_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "0.jpg"
    path.write_bytes(USUAL["gray"])
    dataset = ops.ImageFolder(tmp_path, TRAIN)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="0.jpg"):
        loaded(dataset, worker_type="native")
    assert dataset.cost_hint(0) is None


@pytest.mark.parametrize(("options", "why"), [
    ({"transform": str}, "not one of minato.ops"),
    ({"transform": TRAIN, "target_transform": str}, "target_transform"),
    ({"transform": ops.RandomResizedCropJpeg(48, orient=True)}, "orient=True"),
    ({"transform": ops.RandomResizedCropJpeg(48, dtype="bfloat16")}, "bfloat16"),
], ids=str)  # fmt: skip
def test_unsupported_options_use_processes(root: Path, options: Any, why: str) -> None:
    dataset = ops.ImageFolder(root, **options)
    with pytest.raises(ValueError, match=why):
        iter(minato.DataLoader(dataset, num_workers=1, worker_type="native"))
    loader = minato.DataLoader(dataset, num_workers=1)
    assert next(iter(loader)) is not None and loader.stats()["worker_type"] == "process"


def test_cache_of_paths_is_refused_with_advice(root: Path) -> None:
    dataset = torch.utils.data.Subset(ops.ImageFolder(root, TRAIN), [0])
    with pytest.raises(TypeError, match="ImageFolder makes only paths: .* Leave out cache=.* torchvision's ImageFolder"):
        minato.DataLoader(dataset, cache="8MiB")


def test_cost_hint_grows_with_file_and_part(root: Path) -> None:
    dataset = ops.ImageFolder(root, TRAIN)
    sizes = [Path(path).stat().st_size for path, _ in dataset.samples]
    assert [dataset.cost_hint(n) for n in range(len(dataset))] == sizes
    hints = [dataset.cost_hint(0, seed=seed) for seed in range(300)]
    from minato import _ops

    parts = [_ops.Photos.job(TRAIN._part(), 250, 188, seed, 2**64 - 1)[0] for seed in range(300)]
    work = [top + height for _left, top, _width, height in parts]
    assert np.corrcoef(hints, work)[0, 1] > 0.9
