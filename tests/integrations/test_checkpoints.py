"""Resume in the middle of an epoch with each library's own checkpoint: as if never interrupted.

Of 12 steps (two epochs of 6), the first run makes 8. The second starts with new objects from
the first run's checkpoint, and makes the other 4.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import minato

from .conftest import (
    Named,
    NamedNet,
    Noisy,
    Points,
    loader,
    loss_of,
    model,
    step,
    weights,
)  # fmt: skip

STEPS, FIRST = 12, 8

#: (number of steps, checkpoint to resume from) -> final weights
Run = Callable[[int, Any], torch.Tensor]


def goes_on(run: Run, saved: Any) -> None:
    torch.manual_seed(0)
    whole = run(STEPS, None)
    part = run(FIRST, None)
    assert not torch.equal(part, whole)
    torch.manual_seed(1)  # a new process does not know the first one's state
    assert torch.equal(run(STEPS, saved), whole)


def lightning_module() -> Any:
    lightning = pytest.importorskip("lightning.pytorch", exc_type=ImportError)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    return Module()


class Stream(torch.utils.data.IterableDataset):
    """With a length: without one, the trainer fetches one more batch than it has trained on before
    it asks for the state, with any stateful loader."""

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        points = Points()
        return (points[i] for i in range(worker.id, len(self), worker.num_workers))


class Reader:
    """An iterator that says where it is."""

    def __init__(self) -> None:
        worker = torch.utils.data.get_worker_info()
        self.index, self.step, self.points = worker.id, worker.num_workers, Noisy()

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Any:
        if self.index >= len(self.points):
            raise StopIteration
        index, self.index = self.index, self.index + self.step
        return self.points[index]

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"]
        assert self.index >= self.step, "goes on, and does not begin anew"


class StatefulStream(Stream):
    """With augmentations and its own state."""

    def __iter__(self) -> Any:
        return Reader()


@pytest.mark.parametrize("kind", ["minato", "static, noise", "stream", "stateful stream"])
def test_lightning(kind: str, tmp_path: Path) -> None:
    """The trainer itself asks loaders for their state."""
    lightning = pytest.importorskip("lightning.pytorch", exc_type=ImportError)
    from lightning.pytorch.callbacks import ModelCheckpoint

    def run(steps: int, saved: Any) -> torch.Tensor:
        keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=FIRST, save_top_k=-1)
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", logger=False, callbacks=[keep],
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        module = lightning_module()
        if "stream" in kind:
            data = Stream() if kind == "stream" else StatefulStream()
            batches = minato.DataLoader(data, 4, num_workers=2)
        else:
            batches = loader(kind, persistent_workers=False)
        trainer.fit(module, batches, ckpt_path=saved)
        return weights(module)

    goes_on(run, tmp_path / f"step={FIRST}.ckpt")


def lightning_batches(
    batches: Any, steps: int, folder: Path, saved: Any = None, limits: Any = None, **hooks: Any
) -> Any:
    """The batches that a fit trains on up to this step; it saves each third step."""
    lightning = pytest.importorskip("lightning.pytorch", exc_type=ImportError)
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(1, 1)
            self.seen: list[list[int]] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.seen.append(batch.tolist())
            return self.net(batch.float().reshape(-1, 1)).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.001)

    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, callbacks=[keep], **limits or {},
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    module = type("WithHooks", (Module,), hooks)()
    trainer.fit(module, batches, ckpt_path=saved)
    return module.seen


class Shares(torch.utils.data.IterableDataset):
    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        return iter(range(worker.id, len(self), worker.num_workers))


@pytest.mark.parametrize("kind", ["no workers", "processes", "persistent", "static", "ranks", "stream"])
@pytest.mark.parametrize("batches", [6, 3])
def test_lightning_saved_at_last_step_begins_next_epoch(
    kind: str, batches: int, tmp_path: Path
) -> None:
    """Before Lightning counts the step as completed. It goes on with the next epoch, also if it
    leaves out the last batches of each."""

    def made() -> Any:
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(3)
        options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "generator": generator}
        if kind == "stream":
            return minato.DataLoader(Shares(), **options)
        if kind == "ranks":
            sampler = torch.utils.data.DistributedSampler(range(48), 2, 0)  # type: ignore[arg-type]
            return minato.DataLoader(range(48), sampler=sampler, **options)  # type: ignore[arg-type]
        options |= {"no workers": {"num_workers": 0}, "persistent": {"persistent_workers": True},
                    "static": {"scheduling": "static"}}.get(kind, {})  # fmt: skip
        return minato.DataLoader(range(24), shuffle=True, **options)  # type: ignore[arg-type]

    limits = {"max_epochs": 3, "limit_train_batches": batches}
    whole = lightning_batches(made(), -1, tmp_path, limits=limits)
    assert len(whole) == 3 * batches
    for step in (batches, 2 * batches):
        saved = tmp_path / f"step={step}.ckpt"
        rest = lightning_batches(made(), -1, tmp_path / "again", saved, limits)
        assert rest == whole[step:]


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_validation_end"])
def test_lightning_saved_at_epoch_end_begins_next_epoch(hook: str, tmp_path: Path) -> None:
    """After Lightning has counted the last step as completed. It asks for the rest, which is empty,
    or makes another iterator."""
    saved = tmp_path / "saved.ckpt"

    def save(module: Any) -> None:
        if len(module.seen) == 6 and not saved.exists():
            module.trainer.save_checkpoint(saved)

    def fit(path: Any) -> Any:
        hooks: dict[str, Any] = {hook: save}
        if hook == "on_validation_end":
            hooks["validation_step"] = lambda *_: None
            hooks["val_dataloader"] = lambda _: torch.utils.data.DataLoader(range(4))  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(3)
        batches = minato.DataLoader(
            range(24), 4, shuffle=True, num_workers=2, generator=generator  # type: ignore[arg-type]
        )
        return lightning_batches(batches, 18, tmp_path, path, **hooks)

    whole = fit(None)
    assert fit(saved) == whole[6:]


#: what is changed between a fit and the fit that resumes from its checkpoint
CHANGES: dict[str, tuple[Any, Any]] = {
    # 12 samples were delivered, which are no whole batches of 5
    "batch size": ((range(24), {"batch_size": 4}), (range(24), {"batch_size": 5})),
    "length": ((range(24), {"batch_size": 4}), (range(28), {"batch_size": 4})),
    "workers": (
        (Shares(), {"batch_size": 4, "num_workers": 2}),
        (Shares(), {"batch_size": 4, "num_workers": 1}),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_lightning_continues_after_change_as_with_torch(change: str, tmp_path: Path) -> None:
    def run(kind: Any) -> Any:
        folder = tmp_path / kind.__module__
        (data, before), (other, after) = CHANGES[change]
        lightning_batches(kind(data, **before), 3, folder)
        return lightning_batches(kind(other, **after), 6, folder, folder / "step=3.ckpt")

    with pytest.warns(UserWarning, match="the loader cannot resume from the state"):
        mine = run(minato.DataLoader)
    assert mine == run(torch.utils.data.DataLoader)


def test_lightning_trains_on_from_a_torch_loaders_checkpoint(tmp_path: Path) -> None:
    torchs = torch.utils.data.DataLoader(range(24), batch_size=4)  # type: ignore[arg-type]
    lightning_batches(torchs, 3, tmp_path)
    saved = tmp_path / "step=3.ckpt"
    mine = minato.DataLoader(range(24), batch_size=4)  # type: ignore[arg-type]
    assert lightning_batches(mine, 6, tmp_path, saved) == [
        *([*range(n, n + 4)] for n in (0, 4, 8)),
    ]


def test_lightning_resumes_with_torch_once_states_are_removed(tmp_path: Path) -> None:
    """With the line from docs/resume.md: Lightning refuses states for loaders without any."""
    mine = minato.DataLoader(range(24), batch_size=4)  # type: ignore[arg-type]
    lightning_batches(mine, 3, tmp_path)
    saved = tmp_path / "step=3.ckpt"
    torchs = torch.utils.data.DataLoader(range(24), batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="0 stateful loaders, but found 1 states"):
        lightning_batches(torchs, 6, tmp_path, saved)

    def on_load_checkpoint(module: Any, checkpoint: Any) -> None:
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)

    seen = lightning_batches(
        torchs, 6, tmp_path, saved, on_load_checkpoint=on_load_checkpoint
    )
    assert seen == [[*range(n, n + 4)] for n in (0, 4, 8)]


def test_fabric_warns_if_state_does_not_fit(tmp_path: Path) -> None:
    fabric_module = pytest.importorskip("lightning.fabric", exc_type=ImportError)
    fabric = fabric_module.Fabric(accelerator="cpu", devices=1)

    def made(kind: Any, size: int) -> Any:
        return fabric.setup_dataloaders(kind(range(24), batch_size=size))

    for kind in (minato.DataLoader, torch.utils.data.DataLoader):
        batches = made(kind, 4)
        next(iter(batches))
        fabric.save(tmp_path / "saved", {"loader": batches})
        other = made(minato.DataLoader, 3)
        with pytest.warns(UserWarning, match="the loader cannot resume from the state"):
            fabric.load(tmp_path / "saved", {"loader": other}, weights_only=False)
        assert len(list(other)) == 8


def test_fabric_keeps_a_state_loaded_before_its_setup() -> None:
    fabric_module = pytest.importorskip("lightning.fabric", exc_type=ImportError)
    fabric = fabric_module.Fabric(accelerator="cpu", devices=1)
    loader = minato.DataLoader(range(24), batch_size=4)  # type: ignore[arg-type]
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    assert len(list(fabric.setup_dataloaders(loader))) == 5


def test_lightning_rebuild_keeps_a_pending_state() -> None:
    """With a sampler of the same kind, as a loader of one rank gets another rank's."""
    pytest.importorskip("lightning.pytorch", exc_type=ImportError)
    from lightning.fabric.utilities.data import _replace_dunder_methods, _update_dataloader

    def made() -> Any:
        return minato.DataLoader(range(24), batch_size=4)  # type: ignore[arg-type]

    first = made()
    next(iter(first))
    state = first.state_dict()
    with _replace_dunder_methods(torch.utils.data.DataLoader, "dataset"):  # a hook of the module
        in_hook = made()
        in_hook.load_state_dict(state)
    outside = made()
    outside.load_state_dict(state)
    for loader in (in_hook, outside):
        again = _update_dataloader(loader, torch.utils.data.SequentialSampler(range(24)))
        assert [batch.tolist() for batch in again][0] == [4, 5, 6, 7]


def test_fabric(tmp_path: Path) -> None:
    """A loader is saved with the model and the optimizer, by the same call."""
    fabric_module = pytest.importorskip("lightning.fabric", exc_type=ImportError)

    def run(steps: int, saved: Any) -> torch.Tensor:
        fabric = fabric_module.Fabric(accelerator="cpu", devices=1)
        net = model()
        net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.5))
        batches = fabric.setup_dataloaders(loader("minato"))
        state = {"net": net, "optimizer": optimizer, "loader": batches, "done": 0}
        if saved is not None:
            fabric.load(saved, state)
        while state["done"] < steps:
            for batch in batches:
                optimizer.zero_grad()
                fabric.backward(loss_of(net, batch))
                optimizer.step()
                state["done"] += 1
                if state["done"] == FIRST:
                    fabric.save(tmp_path / "saved", state)
                if state["done"] == steps:
                    break
        return weights(net)

    goes_on(run, tmp_path / "saved")


def test_ignite(tmp_path: Path) -> None:
    """With the loader among what ignite's Checkpoint saves; ignite itself skips no batches."""
    engine = pytest.importorskip("ignite.engine", exc_type=ImportError)
    handlers = pytest.importorskip("ignite.handlers", exc_type=ImportError)

    def run(steps: int, saved: Any) -> torch.Tensor:
        net, batches = model(), loader("minato", persistent_workers=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        trainer = engine.Engine(lambda _engine, batch: step(net, optimizer, batch))
        parts = {"net": net, "optimizer": optimizer, "trainer": trainer, "loader": batches}
        keep = handlers.Checkpoint(parts, handlers.DiskSaver(tmp_path, require_empty=False))
        trainer.add_event_handler(engine.Events.ITERATION_COMPLETED(once=FIRST), keep)
        trainer.add_event_handler(
            engine.Events.ITERATION_COMPLETED(once=steps), lambda e: e.terminate()
        )
        if saved is not None:
            keep.load_objects(parts, torch.load(saved))
        trainer.run(batches, max_epochs=2)
        return weights(net)

    goes_on(run, tmp_path / f"checkpoint_{FIRST}.pt")


def test_accelerate(tmp_path: Path) -> None:
    """Accelerate skips the batches that were done, in a loader that it has prepared."""
    accelerate = pytest.importorskip("accelerate")
    from minato.integrations import accelerate as integration

    def run(steps: int, saved: Any) -> torch.Tensor:
        accelerator = accelerate.Accelerator(
            cpu=True,
            dataloader_config=accelerate.DataLoaderConfiguration(use_seedable_sampler=True),
        )
        net = model()
        net, optimizer, batches = accelerator.prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.5), loader("minato")
        )
        done, left, epoch = 0, batches, 0
        if saved is not None:
            accelerator.load_state(saved)
            done = FIRST
            epoch = done // len(batches)
            left = accelerator.skip_first_batches(batches, done % len(batches))
        while done < steps:
            left.set_epoch(epoch)
            for batch in left:
                optimizer.zero_grad()
                accelerator.backward(loss_of(net, batch))
                optimizer.step()
                done += 1
                if done == FIRST:
                    accelerator.save_state(str(tmp_path / "saved"))
                if done == steps:
                    break
            left, epoch = batches, epoch + 1
        return weights(net)

    integration.install()
    try:
        goes_on(run, str(tmp_path / "saved"))
    finally:
        integration.uninstall()


def test_accelerate_prepare_keeps_a_pending_state() -> None:
    accelerate = pytest.importorskip("accelerate")
    from minato.integrations import accelerate as integration

    integration.install()
    try:
        loader = minato.DataLoader(range(24), batch_size=4)  # type: ignore[arg-type]
        next(iter(loader))
        loader.load_state_dict(loader.state_dict())
        prepared = accelerate.Accelerator(cpu=True).prepare(loader)
        assert prepared is not loader
        assert [batch.tolist() for batch in prepared][0] == [4, 5, 6, 7]
        assert len(list(prepared)) == 6
    finally:
        integration.uninstall()


def test_ignite_warns_if_state_does_not_fit(tmp_path: Path) -> None:
    handlers = pytest.importorskip("ignite.handlers", exc_type=ImportError)
    first = minato.DataLoader(range(24), batch_size=4)  # type: ignore[arg-type]
    next(iter(first))
    other = minato.DataLoader(range(24), batch_size=3)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="batch_size=4, but this loader has 3"):
        handlers.Checkpoint.load_objects({"loader": other}, {"loader": first.state_dict()})
    assert len(list(other)) == 8


def test_transformers_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    trainer_module = pytest.importorskip("transformers.trainer", exc_type=ImportError)
    from minato.integrations import accelerate as integration

    class Stop(transformers.TrainerCallback):
        def __init__(self, steps: int) -> None:
            self.steps = steps

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == self.steps

    def run(steps: int, saved: Any) -> torch.Tensor:
        arguments = transformers.TrainingArguments(
            str(tmp_path), num_train_epochs=2, per_device_train_batch_size=4, use_cpu=True,
            dataloader_num_workers=2, report_to=[], save_strategy="steps", save_steps=FIRST,
            disable_tqdm=True, logging_strategy="no", seed=3,
        )  # fmt: skip
        net = NamedNet()
        trainer = transformers.Trainer(
            net, arguments, train_dataset=Named(Points()), callbacks=[Stop(steps)]
        )
        trainer.train(resume_from_checkpoint=saved)
        return weights(net)

    integration.install()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer_module, "DataLoader", minato.DataLoader)
            goes_on(run, str(tmp_path / f"checkpoint-{FIRST}"))
    finally:
        integration.uninstall()


def test_as_torchdatas_stateful_loader() -> None:
    """The same batches come before and after a resume as from torchdata's own loader."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader", exc_type=ImportError)

    order = torch.randperm(24, generator=torch.Generator().manual_seed(3)).tolist()

    def batches(kind: Any) -> list[list[float]]:
        def made() -> Any:
            return kind(Points(), 4, sampler=order, num_workers=2)

        first, found = made(), []
        for batch in first:
            found.append(batch[0].reshape(-1).tolist())
            if len(found) == 2:
                state = first.state_dict()
                break
        second = made()
        second.load_state_dict(state)
        return found + [x.reshape(-1).tolist() for x, _y in second]

    assert batches(minato.DataLoader) == batches(stateful.StatefulDataLoader)


def test_datasets_stream() -> None:
    """A shuffled stream of Hugging Face datasets, in its second epoch."""
    datasets = pytest.importorskip("datasets", exc_type=ImportError)

    def made() -> Any:
        rows = datasets.Dataset.from_dict({"y": list(range(40))})
        stream = rows.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=5)
        return minato.DataLoader(stream.with_format("torch"), 4, num_workers=2)

    first = made()
    epochs = []
    for epoch in range(2):
        first.set_epoch(epoch)
        epochs.append([])
        for batch in first:
            epochs[-1].append(batch["y"].tolist())
            if (epoch, len(epochs[-1])) == (1, 3):
                state = first.state_dict()
    assert epochs[0] != epochs[1]
    second = made()
    second.load_state_dict(state)
    assert [batch["y"].tolist() for batch in second] == epochs[1][3:]
