"""A tiny real fit in each library, with torch's loader and with minato's: same result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import minato

from .conftest import (
    KINDS,
    Named,
    NamedNet,
    Noisy,
    Points,
    Watch,
    loader,
    loss_of,
    model,
    printed,
    same,
    step,
    weights,
)


def test_plain_torch(watch: Watch) -> None:
    def fit(kind: str) -> torch.Tensor:
        net, batches = model(), loader(kind)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        for _epoch in range(2):
            for batch in batches:
                step(net, optimizer, batch)
        return weights(net)

    same(fit, watch)


def test_lightning(watch: Watch, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", exc_type=ImportError)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return loss_of(self.net, batch)

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("loss", loss_of(self.net, batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    def fit(kind: str) -> torch.Tensor:
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        module = Module()
        trainer.fit(module, loader(kind), loader(kind, shuffle=False))
        return torch.cat([weights(module.net), trainer.callback_metrics["loss"].reshape(1)])

    same(fit, watch)


def test_fabric(watch: Watch) -> None:
    fabric_module = pytest.importorskip("lightning.fabric", exc_type=ImportError)

    def fit(kind: str) -> torch.Tensor:
        fabric = fabric_module.Fabric(accelerator="cpu", devices=1)
        net = model()
        net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.5))
        batches = fabric.setup_dataloaders(loader(kind))
        for _epoch in range(2):
            for batch in batches:
                optimizer.zero_grad()
                fabric.backward(loss_of(net, batch))
                optimizer.step()
        return weights(net)

    same(fit, watch)


def test_lightning_rebuilds_a_loader_with_its_options() -> None:
    """For distributed sampling Lightning makes the loader anew from its attributes."""
    pytest.importorskip("lightning.pytorch", exc_type=ImportError)
    from lightning.fabric.utilities.data import _update_dataloader

    given = loader("minato", scheduling="static", max_retries=0, memory_limit="1GiB")
    sampler = torch.utils.data.DistributedSampler(Points(), num_replicas=2, rank=1)
    assert _update_dataloader(loader("minato", device="cuda:1"), sampler).device == "cuda:1"
    again = _update_dataloader(given, sampler)
    assert type(again) is minato.DataLoader and again.sampler is sampler
    assert (again.scheduling, again.max_retries, again.memory_limit) == ("static", 0, "1GiB")
    assert len(list(again)) == 3


def test_ignite(watch: Watch) -> None:
    engine = pytest.importorskip("ignite.engine", exc_type=ImportError)

    def fit(kind: str) -> torch.Tensor:
        net = model()
        trainer = engine.create_supervised_trainer(
            net,
            torch.optim.SGD(net.parameters(), lr=0.5),
            torch.nn.functional.binary_cross_entropy_with_logits,
        )
        trainer.run(loader(kind), max_epochs=2)
        return weights(net)

    same(fit, watch)


PATCHED = """
import minato
minato.patch_torch()
import ignite.distributed
from tests.integrations.conftest import Points
loader = ignite.distributed.auto_dataloader(Points(), batch_size=4, num_workers=2)
assert type(loader) is minato.DataLoader, type(loader)
assert type(iter(loader)).__module__.startswith("minato")
print(sum(len(x) for x, y in loader))
"""


def test_ignite_makes_minatos_loaders_when_patched_first() -> None:
    """auto_dataloader names torch's class, bound when ignite is imported: a new process."""
    pytest.importorskip("ignite", exc_type=ImportError)
    assert printed(PATCHED).strip() == "24"


def test_monai(watch: Watch) -> None:
    monai_data = pytest.importorskip("monai.data", exc_type=ImportError)
    transforms = pytest.importorskip("monai.transforms", exc_type=ImportError)

    def fit(kind: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2)
        items = [{"image": torch.rand(1, 8, 8, generator=generator)} for _ in range(8)]
        steps = transforms.Compose(
            [
                transforms.ScaleIntensityd("image"),
                transforms.CenterSpatialCropd("image", roi_size=(6, 6)),
            ]
        )
        data = monai_data.Dataset(items, steps)
        batches = KINDS[kind](
            data, batch_size=4, num_workers=2, collate_fn=monai_data.list_data_collate
        )
        net = torch.nn.Conv2d(1, 1, 3)
        torch.nn.init.constant_(net.weight, 0.1)
        out = [net(torch.as_tensor(batch["image"])).detach().reshape(-1) for batch in batches]
        return torch.cat([torch.as_tensor(o) for o in out])

    same(fit, watch)


def test_monai_trainer(watch: Watch) -> None:
    """MONAI's own training loop, over dictionaries."""
    engines = pytest.importorskip("monai.engines", exc_type=ImportError)

    def dictionaries(samples: list[Any]) -> dict[str, torch.Tensor]:
        image, label = torch.utils.data.default_collate(samples)
        return {"image": image, "label": label}

    def fit(kind: str) -> torch.Tensor:
        net = model()
        trainer = engines.SupervisedTrainer(
            torch.device("cpu"), 2, loader(kind, collate_fn=dictionaries), net,
            torch.optim.SGD(net.parameters(), lr=0.5),
            torch.nn.functional.binary_cross_entropy_with_logits,
        )  # fmt: skip
        trainer.run()
        return weights(net)

    same(fit, watch)


MONAI_PATCHED = """
import minato
if PATCH:
    minato.patch_torch()
import torch
import monai.data
import monai.transforms as transforms

items = [{"image": torch.arange(36.0).reshape(1, 6, 6) + i} for i in range(8)]
steps = transforms.Compose([
    transforms.RandFlipd("image", prob=0.5, spatial_axis=0),
    transforms.RandGaussianNoised("image", prob=0.5),
    transforms.RandSpatialCropd("image", roi_size=(4, 4), random_size=False),
])
torch.manual_seed(4)
loader = monai.data.DataLoader(monai.data.Dataset(items, steps), batch_size=2, num_workers=2)
assert isinstance(loader, minato.DataLoader) == PATCH
iterator = iter(loader)
assert type(iterator).__module__.startswith("minato") == PATCH
print([batch["image"].tolist() for batch in iterator])
"""


def test_monais_own_loader_when_patched_first() -> None:
    """It is a class below torch's, and seeds MONAI's transforms in each worker."""
    pytest.importorskip("monai.data", exc_type=ImportError)
    torchs = printed("PATCH = False" + MONAI_PATCHED)
    assert printed("PATCH = True" + MONAI_PATCHED, MINATO_SCHEDULING="static") == torchs


def test_monai_metatensors_travel_whole(watch: Watch) -> None:
    """With default_collate, a MetaTensor keeps its type and its metadata."""
    monai_data = pytest.importorskip("monai.data", exc_type=ImportError)

    def batches(kind: str) -> list[Any]:
        items = [
            {"image": monai_data.MetaTensor(torch.full((1, 4), float(i)), meta={"number": i})}
            for i in range(4)
        ]
        return list(KINDS[kind](monai_data.Dataset(items), batch_size=2, num_workers=2))

    for mine, theirs in zip(batches("minato"), batches("torch"), strict=True):
        assert type(mine["image"]) is type(theirs["image"])
        assert torch.equal(torch.as_tensor(mine["image"]), torch.as_tensor(theirs["image"]))
        assert str(mine["image"].meta) == str(theirs["image"].meta)


def test_torch_geometric(watch: Watch) -> None:
    """Graphs of different size, collated by the library's own Collater."""
    pytest.importorskip("torch_geometric", exc_type=ImportError)
    from torch_geometric.data import Data
    from torch_geometric.loader.dataloader import Collater
    from torch_geometric.nn import GCNConv, global_mean_pool

    def graph(index: int) -> Data:
        nodes = 2 + index % 3
        ring = torch.arange(nodes)
        return Data(
            x=torch.arange(2 * nodes, dtype=torch.float32).reshape(nodes, 2) / (index + 1),
            edge_index=torch.stack([ring, ring.roll(1)]),
            y=torch.tensor([float(index % 2)]),
        )

    graphs = [graph(i) for i in range(12)]

    def fit(kind: str) -> torch.Tensor:
        torch.manual_seed(1)
        net = GCNConv(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        batches = KINDS[kind](
            graphs, batch_size=4, num_workers=2, collate_fn=Collater(graphs, None, None)
        )
        for batch in batches:
            optimizer.zero_grad()
            out = global_mean_pool(net(batch.x, batch.edge_index), batch.batch).squeeze(1)
            torch.nn.functional.mse_loss(out, batch.y).backward()
            optimizer.step()
        return weights(net)

    same(fit, watch)


GEOMETRIC_PATCHED = """
import minato
minato.patch_torch()
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
graphs = [Data(x=torch.ones(1 + i % 3, 2), y=torch.tensor([i])) for i in range(8)]
loader = DataLoader(graphs, batch_size=4, num_workers=2)
assert isinstance(loader, minato.DataLoader)
iterator = iter(loader)
assert type(iterator).__module__.startswith("minato")
print([(batch.num_nodes, batch.y.tolist()) for batch in iterator])
"""


def test_torch_geometrics_own_loader_when_patched_first() -> None:
    pytest.importorskip("torch_geometric", exc_type=ImportError)
    want = [(7, [0, 1, 2, 3]), (8, [4, 5, 6, 7])]
    assert printed(GEOMETRIC_PATCHED).strip() == str(want)


def test_transformers_trainer(watch: Watch, tmp_path: Path) -> None:
    """The Trainer makes its loader by torch's name and hands it to Accelerate."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    trainer_module = pytest.importorskip("transformers.trainer", exc_type=ImportError)
    from minato.integrations import accelerate as integration

    def fit(kind: str) -> torch.Tensor:
        arguments = transformers.TrainingArguments(
            str(tmp_path), num_train_epochs=2, per_device_train_batch_size=4, use_cpu=True,
            dataloader_num_workers=2, report_to=[], save_strategy="no", disable_tqdm=True,
            logging_strategy="no", seed=3,
        )  # fmt: skip
        net, data = NamedNet(), Named(Noisy() if "noise" in kind else Points())
        trainer = transformers.Trainer(net, arguments, train_dataset=data)
        trainer.train()
        return weights(net.net)

    def with_minato(kind: str) -> torch.Tensor:
        if kind.startswith("torch"):
            return fit(kind)
        integration.install()
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(trainer_module, "DataLoader", KINDS[kind])
                return fit(kind)
        finally:
            integration.uninstall()

    same(with_minato, watch)
