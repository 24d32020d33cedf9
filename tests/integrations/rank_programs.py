"""Programs that torchrun starts on each rank: ``python rank_programs.py NAME SEEDS FOLDER``.

Each trains on samples that hold their index and a random number, and writes the batches of its rank
to FOLDER as NAME-RANK.json. SEEDS: ``equal`` on all ranks, or ``different``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, get_worker_info

import minato

LENGTH, SIZE, SAVED_AFTER = 48, 4, 9
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def draw() -> int:
    return int(torch.randint(0, 2**62, ()))


class Draws(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, draw()


class Named(Draws):
    """For the Trainer of Transformers."""

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor(super().__getitem__(index))}


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Deals numbers to ranks and workers by itself, and has a state."""

    at = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        mine = range(RANK * workers + worker, 2 * LENGTH, WORLD * workers)
        while self.at < len(mine):
            self.at += 1
            yield mine[self.at - 1], draw()
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Program:
    def __init__(self, seeds: str, folder: Path) -> None:
        self.seed = 5 + (RANK if seeds == "different" else 0)
        self.folder = folder
        self.batches: list[list[list[int]]] = []

    def note(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        self.batches.append([indices.tolist(), values.tolist()])

    def torch(self, shape: tuple[int, int] = (WORLD, 1)) -> None:
        """shape: data parallel ranks, and the ranks of each that load the same batches."""
        torch.distributed.init_process_group("gloo")
        torch.manual_seed(self.seed)
        sampler = DistributedSampler(Draws(), shape[0], RANK // shape[1], seed=1)
        loader = minato.DataLoader(Draws(), SIZE, sampler=sampler, num_workers=2)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch in loader:
                self.note(*batch)

    def mesh(self) -> None:
        self.torch((WORLD // 2, 2))

    def lightning(self, data: Any = Draws(), phase: str = "whole") -> None:
        import lightning.pytorch as pl
        from lightning.pytorch.callbacks import ModelCheckpoint

        program = self

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = torch.nn.Linear(1, 1)

            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                program.note(*batch)
                loss: torch.Tensor = self.net(torch.zeros(1, 1)).sum()
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), 0.1)

        pl.seed_everything(self.seed, workers=True, verbose=False)
        saves, path = phase == "save", str(self.folder / "saved.ckpt")
        saving = ModelCheckpoint(self.folder, "saved", every_n_train_steps=SAVED_AFTER)
        trainer = pl.Trainer(
            max_epochs=2, max_steps=SAVED_AFTER if saves else -1, accelerator="cpu",
            devices=WORLD, strategy="ddp", logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=saves,
            callbacks=[saving] if saves else [], default_root_dir=self.folder,
        )  # fmt: skip
        shuffle = None if isinstance(data, IterableDataset) else True
        loader = minato.DataLoader(data, SIZE, shuffle=shuffle, num_workers=2)
        trainer.fit(Module(), loader, ckpt_path=path if phase == "resume" else None)

    def lightning_save(self) -> None:
        self.lightning(phase="save")

    def lightning_resume(self) -> None:
        self.lightning(phase="resume")

    def stream(self) -> None:
        self.lightning(Stream())

    def stream_save(self) -> None:
        self.lightning(Stream(), "save")

    def stream_resume(self) -> None:
        self.lightning(Stream(), "resume")

    def transformers(self) -> None:
        from transformers import Trainer, TrainingArguments

        from minato.integrations import accelerate

        program = self

        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = torch.nn.Linear(1, 1)

            def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
                program.note(*x.T)
                return {"loss": self.net(torch.zeros(1, 1)).sum()}

        arguments = TrainingArguments(
            output_dir=str(self.folder), per_device_train_batch_size=SIZE, num_train_epochs=2,
            report_to=[], save_strategy="no", use_cpu=True, dataloader_num_workers=2,
            seed=self.seed, disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        accelerate.install()
        with minato.patch_torch():
            Trainer(Net(), arguments, train_dataset=Named()).train()


if __name__ == "__main__":
    name, seeds, folder = sys.argv[1:]
    program = Program(seeds, Path(folder))
    getattr(program, name)()
    (Path(folder) / f"{name}-{RANK}.json").write_text(json.dumps(program.batches))
