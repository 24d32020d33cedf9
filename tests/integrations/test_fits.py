"""A tiny real fit in each library, with torch's loader and with minato's: same result."""

from __future__ import annotations

import sys
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
    same,
    same_when_patched,
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
    """For distributed sampling, Lightning rebuilds the loader from its attributes."""
    pytest.importorskip("lightning.pytorch", exc_type=ImportError)
    from lightning.fabric.utilities.data import _update_dataloader

    given = loader("minato", scheduling="static", max_retries=0, memory_limit="1GiB")
    sampler = torch.utils.data.DistributedSampler(Points(), num_replicas=2, rank=1)
    assert _update_dataloader(loader("minato", device="cuda:1"), sampler).device == "cuda:1"
    again = _update_dataloader(given, sampler)
    assert type(again) is minato.DataLoader and again.sampler is sampler
    assert (again.scheduling, again.max_retries, again.memory_limit) == ("static", 0, "1GiB")
    assert len(list(again)) == 3


def test_lightning_rebuilds_a_patched_loader(watch: Watch) -> None:
    pytest.importorskip("lightning.pytorch", exc_type=ImportError)
    from lightning.fabric.utilities.data import _update_dataloader

    with minato.patch_torch():
        given = loader("torch")
        list(given)
        sampler = torch.utils.data.DistributedSampler(Points(), num_replicas=2, rank=1)
        again = _update_dataloader(given, sampler)
        assert type(again) is type(given) and again.sampler is sampler
        assert len(list(again)) == 3
    assert watch.all_ours()


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


def test_ignites_own_loaders(watch: Watch) -> None:
    pytest.importorskip("ignite", exc_type=ImportError)
    import ignite.distributed

    def run() -> list[Any]:
        batches = ignite.distributed.auto_dataloader(
            Noisy(), batch_size=4, num_workers=2, shuffle=True
        )
        return [[x.tolist(), y.tolist()] for _epoch in range(2) for x, y in batches]

    same_when_patched(run, watch)


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


def test_monais_own_loader(watch: Watch) -> None:
    """It is a class below torch's, and seeds MONAI's transforms in each worker."""
    monai_data = pytest.importorskip("monai.data", exc_type=ImportError)
    transforms = pytest.importorskip("monai.transforms", exc_type=ImportError)
    items = [{"image": torch.arange(36.0).reshape(1, 6, 6) + i} for i in range(8)]
    steps = transforms.Compose(
        [
            transforms.RandFlipd("image", prob=0.5, spatial_axis=0),
            transforms.RandGaussianNoised("image", prob=0.5),
            transforms.RandSpatialCropd("image", roi_size=(4, 4), random_size=False),
        ]
    )

    def run() -> list[Any]:
        data = monai_data.Dataset(items, steps)
        batches = monai_data.DataLoader(data, batch_size=2, num_workers=2, shuffle=True)
        return [batch["image"].tolist() for _epoch in range(2) for batch in batches]

    same_when_patched(run, watch)


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


@pytest.fixture
def no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_geometric imports modules that it writes into the folder for temporary files."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def test_torch_geometric(watch: Watch, no_bytecode: None) -> None:
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


def test_torch_geometrics_own_loader(watch: Watch, no_bytecode: None) -> None:
    pytest.importorskip("torch_geometric", exc_type=ImportError)
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    class Graphs(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Data:
            return Data(x=torch.rand(1 + index % 3, 2), y=torch.tensor([index]))

    def run() -> list[Any]:
        batches = DataLoader(Graphs(), batch_size=4, num_workers=2, shuffle=True)
        return [[b.x.tolist(), b.y.tolist()] for _epoch in range(2) for b in batches]

    same_when_patched(run, watch)


def test_transformers_trainer(watch: Watch, tmp_path: Path) -> None:
    """The Trainer makes a loader of torch's class, of which Accelerate makes another."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    pytest.importorskip("transformers.trainer", exc_type=ImportError)

    def run() -> list[float]:
        arguments = transformers.TrainingArguments(
            str(tmp_path), num_train_epochs=2, per_device_train_batch_size=4, use_cpu=True,
            dataloader_num_workers=2, report_to=[], save_strategy="no", disable_tqdm=True,
            logging_strategy="steps", logging_steps=1, seed=3,
        )  # fmt: skip
        net = NamedNet()
        trainer = transformers.Trainer(net, arguments, train_dataset=Named(Noisy()))
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(losses) == 12
        return [*losses, *weights(net.net).tolist()]

    same_when_patched(run, watch)
