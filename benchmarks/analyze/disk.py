"""A disk that gives 200 samples a second, however many processes read from it.

    python benchmarks/analyze/disk.py FOLDER    # writes 400 small files there at first
"""

import multiprocessing
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

PER_SECOND = 200
FILES, BATCH, WORKERS, EPOCHS = 400, 8, 4, 4


class Disk:
    """One read at a time, each as long as a slow disk takes for it."""

    def __init__(self):
        self.turn = multiprocessing.Lock()

    def read(self, path):
        with self.turn:
            time.sleep(1 / PER_SECOND)
            with open(path, "rb") as file:
                return file.read()


class Files(Dataset):
    def __init__(self, folder):
        self.paths = sorted(Path(folder).glob("*.bin"))
        self.disk = Disk()

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        content = bytearray(self.disk.read(self.paths[index]))
        return torch.frombuffer(content, dtype=torch.uint8).float()


def main(folder):
    Path(folder).mkdir(parents=True, exist_ok=True)
    for n in range(FILES):
        Path(folder, f"{n:03}.bin").write_bytes(bytes([n % 256]) * 1000)
    loader = DataLoader(Files(folder), BATCH, shuffle=True, num_workers=WORKERS)
    for _ in range(EPOCHS):
        for _batch in loader:
            time.sleep(0.002)


if __name__ == "__main__":
    main(sys.argv[1])
