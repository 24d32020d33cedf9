"""Programs that torchrun starts on each rank: ``python rank_programs.py NAME SEEDS FOLDER``.

Each trains on samples that hold their index and a random number, and writes the batches of its rank
to FOLDER as NAME-RANK.json. SEEDS: ``equal`` on all ranks, or ``different``.

``python rank_programs.py ranks WORLD FOLDER NAME...`` runs programs one after the other, each with
WORLD ranks. It imports their library, which takes longer than the programs, and forks each rank.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import signal
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
        loader = minato.DataLoader(data, 2 * SIZE // WORLD, shuffle=shuffle, num_workers=2)
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


LIBRARIES = {"lightning": "lightning.pytorch", "stream": "lightning.pytorch", "transformers": "transformers"}


def serve_store() -> int:
    """Forks the process by which ranks find each other, as torchrun's agent is; returns its port. It
    ends with this process."""
    reads, writes = os.pipe()
    here, there = os.pipe()
    if os.fork() == 0:
        os.close(there)
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writes, str(store.port).encode())
        os.read(here, 1)
        os._exit(0)
    return int(os.read(reads, 9))


def run_ranks(world: str, folder: str, *names: str) -> None:
    """Runs programs. A rank returns from here as a fork with its own environment and arguments."""
    importlib.import_module(LIBRARIES.get(names[0].partition("_")[0], "minato"))
    for name in names:
        port, ranks = serve_store(), set[int]()
        for rank in map(str, range(int(world))):
            pid = os.fork()
            if pid == 0:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # when the parent ends
                os.environ.update(
                    RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world,
                    GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                    TORCHELASTIC_RUN_ID="ranks", TORCHELASTIC_USE_AGENT_STORE="True",
                    TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="0",
                )  # fmt: skip
                sys.argv[1:] = [name, "equal", folder]
                runpy.run_path(__file__, run_name="__main__")
                return
            ranks.add(pid)
        while ranks:
            pid, status = os.wait()
            if status:
                sys.exit(f"a rank of {name} failed")
            ranks.remove(pid)


if __name__ == "__main__":
    if sys.argv[1] == "ranks":
        run_ranks(*sys.argv[2:])
    else:
        name, seeds, folder = sys.argv[1:]
        program = Program(seeds, Path(folder))
        getattr(program, name)()
        (Path(folder) / f"{name}-{RANK}.json").write_text(json.dumps(program.batches))
