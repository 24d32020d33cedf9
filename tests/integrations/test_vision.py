"""Libraries that import torchvision: the same losses, bit for bit, with minato's workers."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import minato
from cache.support import new_cache
from minato.cache.files import look, settled

from .conftest import Watch, loader, loss_of, model, same, same_when_patched, step, weights


@pytest.fixture(autouse=True)
def torchvision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A version built for another torch works as well: transforms run none of its native operators.

    `make libraries` installs it next to the other packages, because some of those check whether
    it exists and then fail if it does not load.
    """
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    beside = str(Path(sys.prefix) / "torchvision")
    if importlib.util.find_spec("torchvision") is None and beside not in sys.path:
        sys.path.append(beside)
    if importlib.util.find_spec("torchvision") is None:
        pytest.importorskip("torchvision", exc_type=ImportError)
    with contextlib.suppress(RuntimeError):
        importlib.import_module("torchvision")
        return
    for name in ("nms", "qnms"):
        boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{name}", boxes)
    importlib.import_module("torchvision")


class Pictures(torch.utils.data.Dataset):
    """Small pictures; libraries set transform."""

    transform: Any = None

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        picture = Image.linear_gradient("L").resize((24, 20)).rotate(20 * index).convert("RGB")
        return self.transform(picture) if self.transform is not None else picture, index


def losses(batches: Any) -> list[float]:
    """Losses of two epochs of a small model that learns the pictures' numbers."""
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(1), torch.nn.Flatten(0))
    net(torch.zeros(1, 3, 16, 16))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    found = []
    for _epoch in range(2):
        for pictures, numbers in batches:
            optimizer.zero_grad()
            loss = (net(pictures.float()) - numbers / 16).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


@pytest.mark.parametrize("endless", [False, True], ids=["plain", "multi_epochs"])
def test_timms_own_loaders(endless: bool, watch: Watch) -> None:
    """With its augmentations. The endless loader starts the next epoch while this one ends."""
    data = pytest.importorskip("timm.data", exc_type=ImportError)

    def run(seen: Any = losses) -> Any:
        return seen(
            data.create_loader(
                Pictures(), (3, 16, 16), batch_size=4, is_training=True, use_prefetcher=False,
                auto_augment="rand-m9-mstd0.5", num_workers=2, persistent_workers=False,
                use_multi_epochs_loader=endless,
            )
        )  # fmt: skip

    same_when_patched(run, watch)
    with minato.patch_torch():  # balanced
        numbers = run(lambda batches: [sorted(sum((y.tolist() for _, y in batches), []))
                                       for _epoch in range(2)])  # fmt: skip
    assert numbers == [list(range(16))] * 2


def test_ultralytics_own_loader(watch: Watch) -> None:
    """It repeats its sampler forever, and asks torch's class for an iterator by itself."""
    build = pytest.importorskip("ultralytics.data.build", exc_type=ImportError)
    transforms = importlib.import_module("torchvision.transforms")

    def run(seen: Any = losses) -> Any:
        data = Pictures()
        data.transform = transforms.Compose(
            [transforms.RandomResizedCrop(16), transforms.ColorJitter(0.3), transforms.ToTensor()]
        )
        batches = build.build_dataloader(data, 4, 2, device="cpu")
        try:
            return seen(batches)
        finally:
            watch.iterators.append(type(batches.iterator).__module__)

    same_when_patched(run, watch)
    with minato.patch_torch():
        numbers = run(lambda batches: [sorted(sum((y.tolist() for _, y in batches), []))
                                       for _epoch in range(2)])  # fmt: skip
    assert numbers == [list(range(16))] * 2


def test_composer(watch: Watch) -> None:
    composer = pytest.importorskip("composer", exc_type=ImportError)

    class Model(composer.models.ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def forward(self, batch: Any) -> Any:
            return self.net(batch[0])

        def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
            return torch.nn.functional.binary_cross_entropy_with_logits(outputs, batch[1])

    def fit(kind: str) -> torch.Tensor:
        trained = Model()
        trainer = composer.Trainer(
            model=trained, train_dataloader=loader(kind), max_duration="2ep", device="cpu",
            optimizers=torch.optim.SGD(trained.parameters(), lr=0.5), progress_bar=False,
        )  # fmt: skip
        trainer.fit()
        trainer.close()
        return weights(trained)

    same(fit, watch)


def test_fastai(watch: Watch) -> None:
    """Its learner accepts torch's loaders besides its own, which are not of torch's class."""
    learner = pytest.importorskip("fastai.learner", exc_type=ImportError)
    core = importlib.import_module("fastai.data.core")
    importlib.import_module("fastai.callback.progress")  # gives the learner no_bar()

    def fit(kind: str) -> torch.Tensor:
        net = model()
        dls = core.DataLoaders(loader(kind), loader(kind, shuffle=False), device="cpu")
        trained = learner.Learner(dls, net, loss_func=torch.nn.BCEWithLogitsLoss())
        with trained.no_bar(), trained.no_logging():
            trained.fit(2, lr=0.1)
        return torch.cat([weights(net), torch.tensor(trained.recorder.losses)])

    same(fit, watch)


# ---- folders of pictures, through a cache -----------------------------------------------------


def folder_of_pictures(where: Path) -> None:
    from PIL import Image

    for n in range(12):
        kind = where / ("cats" if n % 2 else "dogs")
        kind.mkdir(exist_ok=True)
        Image.linear_gradient("L").resize((40, 30)).rotate(20 * n).convert("RGB").save(kind / f"{n}.png")
    paths = [str(path) for path in where.glob("*/*.png")]
    while not settled(look(path) for path in paths):
        time.sleep(0.01)  # a file that was written just now is not trusted


def counted(path: str) -> Any:
    """A loader of the program's."""
    with open(f"{path}.loaded", "a") as file:
        file.write("x")
    with open(path, "rb") as file:
        return torch.tensor(list(file.read(100)), dtype=torch.uint8)


@pytest.mark.parametrize("form", [None, "decoded", "encoded"])
def test_image_folder_reads_through_a_cache(form: Any, tmp_path: Path) -> None:
    datasets = importlib.import_module("torchvision.datasets")
    transforms = importlib.import_module("torchvision.transforms")
    folder_of_pictures(tmp_path)
    random_part = transforms.Compose([transforms.RandomResizedCrop(16), transforms.ToTensor()])
    data = datasets.ImageFolder(str(tmp_path), random_part, lambda target: target + 10)
    options: dict[str, Any] = {"batch_size": 5, "shuffle": True, "num_workers": 2}
    cache = new_cache()
    torch.manual_seed(0)
    plain = minato.DataLoader(data, **options)
    expected = [batch for _ in range(2) for batch in plain]
    torch.manual_seed(0)
    cached = minato.DataLoader(data, cache=cache, cache_format=form, **options)
    found = [batch for _ in range(2) for batch in cached]
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(expected, found))
    stats: Any = cached.stats()["cache"]
    assert (stats["misses"], stats["hits"], stats["form"]) == (12, 12, form or "decoded")


def test_dataset_folder_caches_results_of_its_loader(tmp_path: Path) -> None:
    datasets = importlib.import_module("torchvision.datasets")
    folder_of_pictures(tmp_path)
    data = datasets.DatasetFolder(str(tmp_path), counted, extensions=(".png",))
    loader = minato.DataLoader(data, 5, num_workers=2, cache=new_cache())
    first, second = list(loader), list(loader)
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, second))
    loaded = [path.read_text() for path in tmp_path.glob("*/*.loaded")]
    assert loaded == ["x"] * 12
    with pytest.raises(ValueError, match="keeps its samples decoded"):
        minato.DataLoader(data, cache=new_cache(), cache_format="encoded")
    stats: Any = loader.stats()["cache"]
    assert stats["decoded"] is None or stats["decoded"] > 0


def test_folder_with_a_getitem_of_its_own_is_refused(tmp_path: Path) -> None:
    datasets = importlib.import_module("torchvision.datasets")
    folder_of_pictures(tmp_path)

    class Own(datasets.ImageFolder):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[0]

    with pytest.raises(TypeError, match="Own does not say it"):
        minato.DataLoader(Own(str(tmp_path)), cache=new_cache())
    with pytest.raises(TypeError, match="ImageFolder makes only paths"):
        minato.DataLoader(datasets.ImageFolder(str(tmp_path), loader=str), cache=new_cache())
