"""Libraries that import torchvision: the same losses, bit for bit, with minato's workers."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import minato

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
