"""Threads whose samples are loops of Python: the interpreter runs one of them at a time.

    python benchmarks/analyze/interpreter.py
"""

import time

import torch
from torch.utils.data import Dataset

from minato import DataLoader

SAMPLES, BATCH, WORKERS, EPOCHS = 400, 8, 4, 3


class Samples(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        total = 0
        for number in range(60_000):
            total += number ^ index
        return torch.tensor(total % 1000)


def main():
    loader = DataLoader(Samples(), BATCH, shuffle=True, num_workers=WORKERS, worker_type="thread")
    for _ in range(EPOCHS):
        for _batch in loader:
            time.sleep(0.002)


if __name__ == "__main__":
    main()
