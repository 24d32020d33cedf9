"""A job for tests: loads a data set through a cache, and says what it got.

Arguments: a folder for what it notes, the loader ("torch" or "minato"), the start method, epochs.
Each line of input lets it begin an epoch, after which it prints the sum and the samples.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import minato
from minato.cache import cache as cache_module

cache_module.MEMORY = os.environ["TEST_MEMORY"]
CACHE = minato.Cache("16MiB", directory=os.environ.get("TEST_DIRECTORY"))
SAMPLES = 60


class Data(torch.utils.data.Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return SAMPLES

    @CACHE.memoize(key=lambda self, i: i, version=1)
    def load(self, i: int) -> Any:
        if i == 5 and (self.folder / "die").exists():
            (self.folder / "die").unlink()
            os.kill(os.getpid(), 9)
        time.sleep(0.002)
        with open(self.folder / "made", "a") as file:
            file.write(f"{i}\n")
        return np.random.default_rng(i).integers(0, 256, 3000 + i * 100, np.uint8)

    def __getitem__(self, i: int) -> Any:
        found = self.load(i)
        right = np.random.default_rng(i).integers(0, 256, 3000 + i * 100, np.uint8)
        assert (found == right).all(), f"sample {i} is wrong"
        return i


def main() -> None:
    folder, kind, method, epochs = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    loader: Any = minato.DataLoader if kind == "minato" else torch.utils.data.DataLoader
    options: Any = {"worker_type": "thread"} if method == "thread" else {}
    if method not in ("thread", "none"):
        options["multiprocessing_context"] = method
    data = loader(Data(folder), 6, shuffle=True, num_workers=2 * (method != "none"), **options)
    print("ready", flush=True)
    for _ in range(epochs):
        sys.stdin.readline()
        seen = sorted(int(i) for batch in data for i in batch)
        print(json.dumps({"seen": seen == list(range(SAMPLES)), **CACHE.stats()}), flush=True)


if __name__ == "__main__":
    main()
