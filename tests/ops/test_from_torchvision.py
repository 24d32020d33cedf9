"""native_images: the same bits from the same seeds as torchvision's transforms, or a refusal that names them."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minato import ops

from .test_jpeg import MEAN, OTHERS, STD, USUAL

torchvision = pytest.importorskip("torchvision", exc_type=ImportError)
datasets, v1 = torchvision.datasets, torchvision.transforms
v2 = pytest.importorskip("torchvision.transforms.v2", exc_type=ImportError)
MODE = v1.InterpolationMode


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("images")
    for n, file in enumerate([*USUAL.values(), *OTHERS.values()]):
        (folder / "ab"[n % 2]).mkdir(exist_ok=True)
        (folder / "ab"[n % 2] / f"{n:02}.jpg").write_bytes(file)
    return folder


NORMAL = v1.Normalize(MEAN, STD)
KNOWN = {
    "train": [v1.RandomResizedCrop(48), v1.RandomHorizontalFlip(), v1.ToTensor(), NORMAL],
    "valid": [v1.Resize(60), v1.CenterCrop(48), v1.ToTensor(), NORMAL],
    "second": [v2.RandomResizedCrop((48, 40)), v2.RandomHorizontalFlip(0.3), v2.ToImage(),
               v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)],
    "second valid": [v2.Resize([60]), v2.CenterCrop(48), v2.PILToTensor(),
                     v2.ToDtype(torch.float32, scale=True)],
    "nested": [v1.Compose([v1.RandomResizedCrop(48, (0.5, 1.0), (1.0, 2.0))]), v1.ToTensor()],
    "flip at the end": [v1.RandomResizedCrop(48), v1.ToTensor(), NORMAL, v1.RandomHorizontalFlip()],
    "integers": [v1.RandomResizedCrop(48), v1.PILToTensor()],
    "erasing": [v1.RandomResizedCrop(48), v1.RandomHorizontalFlip(), v1.ToTensor(), NORMAL,
                v1.RandomErasing()],
    "converted": [v1.RandomResizedCrop(48), v1.PILToTensor(), v1.ConvertImageDtype(torch.float32)],
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_known_transforms_give_the_same_bits(root: Path, name: str) -> None:
    compose = v2.Compose if "second" in name else v1.Compose
    dataset = datasets.ImageFolder(root, compose(KNOWN[name]))
    native = ops.native_images(dataset)
    assert isinstance(native, ops.ImageFolder) and dataset.loader is datasets.folder.default_loader
    assert (native.samples, native.classes, native.targets) == (
        dataset.samples, dataset.classes, dataset.targets)  # fmt: skip
    for n in range(len(dataset)):
        made = []
        for one in (dataset, native):
            torch.manual_seed(n)
            made.append(one[n])
        assert torch.equal(made[0][0], made[1][0]) and made[0][0].dtype == made[1][0].dtype
        assert made[0][1] == made[1][1]
    native.native_pipeline() if name != "erasing" else None
    assert repr(native).count("Jpeg") == 1


UNKNOWN = {
    "colours": [v1.RandomResizedCrop(48), v1.ColorJitter(0.5), v1.ToTensor()],
    "colours first": [v1.ColorJitter(0.5), v1.RandomResizedCrop(48), v1.ToTensor()],
    "bicubic": [v1.RandomResizedCrop(48, interpolation=MODE.BICUBIC), v1.ToTensor()],
    "both edges": [v1.Resize((60, 60)), v1.CenterCrop(48), v1.ToTensor()],
    "larger crop": [v1.Resize(40), v1.CenterCrop(48), v1.ToTensor()],
    "at most": [v1.Resize(60, max_size=90), v1.CenterCrop(48), v1.ToTensor()],
    "no crop": [v1.Resize(60), v1.ToTensor()], "pictures": [v1.RandomResizedCrop(48)],
    "never flipped": [v1.RandomResizedCrop(48), v1.RandomHorizontalFlip(0.0), v1.ToTensor()],
    "flipped first": [v1.RandomHorizontalFlip(), v1.RandomResizedCrop(48), v1.ToTensor()],
    "tensor first": [v2.ToImage(), v2.RandomResizedCrop(48), v2.ToDtype(torch.float32, scale=True)],
    "half": [v2.RandomResizedCrop(48), v2.ToImage(), v2.ToDtype(torch.float16, scale=True)],
    "not scaled": [v2.RandomResizedCrop(48), v2.ToImage(), v2.ToDtype(torch.float32)],
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_transforms_are_named(root: Path, name: str) -> None:
    dataset = datasets.ImageFolder(root, v1.Compose(UNKNOWN[name]))
    before = dict(vars(dataset))
    with pytest.raises(ValueError, match=r"does not know .* Nothing was changed"):
        ops.native_images(dataset)
    assert vars(dataset) == before


def test_subset_keeps_its_indices(root: Path) -> None:
    dataset = datasets.ImageFolder(root, v1.Compose(KNOWN["valid"]))
    subset = torch.utils.data.Subset(torch.utils.data.Subset(dataset, [4, 3, 2]), [2, 0])
    native = ops.native_images(subset)
    assert [y for _, y in native] == [y for _, y in subset]
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(native, subset, strict=True))


class Other(datasets.ImageFolder):  # type: ignore[misc, name-defined]
    """Of the program; it may make other samples."""


@pytest.mark.parametrize("make", [
    lambda root, t: Other(root, t), lambda root, t: datasets.ImageFolder(root, t, loader=str),
    lambda root, t: datasets.FakeData(3, transform=t), lambda root, t: [1, 2],
])  # fmt: skip
def test_unknown_dataset_is_named(root: Path, make: Any) -> None:
    with pytest.raises(ValueError, match="native_images"):
        ops.native_images(make(root, v1.Compose(KNOWN["train"])))
