"""One lock that all workers share, for four fifths of a sample.

    python benchmarks/analyze/lock.py
"""

import multiprocessing
import time

import torch
from torch.utils.data import DataLoader, Dataset

SAMPLES, BATCH, WORKERS, EPOCHS = 400, 8, 4, 3


class Samples(Dataset):
    def __init__(self):
        self.tables = multiprocessing.Lock()

    def __len__(self):
        return SAMPLES

    def tokenize(self, index):
        with self.tables:
            time.sleep(0.004)
        return torch.full((16,), index)

    def __getitem__(self, index):
        tokens = self.tokenize(index)
        time.sleep(0.001)
        return tokens


def main():
    loader = DataLoader(Samples(), BATCH, shuffle=True, num_workers=WORKERS)
    for _ in range(EPOCHS):
        for _batch in loader:
            time.sleep(0.002)


if __name__ == "__main__":
    main()
