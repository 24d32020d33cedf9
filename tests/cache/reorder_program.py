"""A job for tests: loads a data set with cache_reorder=True.

Arguments: a folder for what it notes, epochs, a seed of its order. Each line of input lets it take a batch, after which it
prints the samples, and what each drew.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import minato
from minato.cache import cache as cache_module

cache_module.MEMORY = os.environ["TEST_MEMORY"]
SAMPLES = 400


class Data(torch.utils.data.Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return SAMPLES

    def cache_key(self, i: int) -> int:
        return i

    def read(self, i: int) -> torch.Tensor:
        with open(self.folder / "read", "a") as file:
            file.write(f"{i}\n")
        return torch.full((16000,), i, dtype=torch.int16).view(torch.uint8)[:16000]

    def decode(self, raw: torch.Tensor, i: int) -> torch.Tensor:
        return raw

    def augment(self, value: torch.Tensor, i: int) -> Any:
        assert (value.view(torch.int16) == i).all(), f"sample {i} is wrong"
        return i, torch.rand(())

    def __getitem__(self, i: int) -> Any:
        return self.augment(self.decode(self.read(i), i), i)


def main() -> None:
    folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(7)  # of what samples draw
    order = torch.Generator().manual_seed(int(sys.argv[3]))
    data = Data(folder)
    loader = minato.DataLoader(
        data, 5, sampler=torch.utils.data.RandomSampler(data, generator=order), num_workers=2, cache=80 * 16384, cache_format="decoded",
        cache_reorder=True, persistent_workers=True,
    )  # fmt: skip
    iterator = iter(loader)  # opens the cache
    print("ready", flush=True)
    for epoch in range(epochs):
        batches = iterator if epoch == 0 else iter(loader)
        for _line in range(len(loader)):
            sys.stdin.readline()
            drew = [(int(i), float(x)) for i, x in zip(*next(batches))]
            print(json.dumps(drew), flush=True)
        assert next(batches, None) is None
    sys.stdin.readline()


main()
