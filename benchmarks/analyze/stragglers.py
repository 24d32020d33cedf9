"""One sample of a hundred takes a hundred times as long as the others.

    python benchmarks/analyze/stragglers.py
"""

import time

import torch
from torch.utils.data import DataLoader, Dataset

SAMPLES, BATCH, WORKERS, EPOCHS = 1000, 8, 4, 2
FAST, SLOW = 0.003, 0.3


class Samples(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        time.sleep(SLOW if index % 100 == 7 else FAST)
        return torch.tensor(index)


def main():
    loader = DataLoader(Samples(), BATCH, shuffle=True, num_workers=WORKERS)
    for _ in range(EPOCHS):
        for _batch in loader:
            time.sleep(0.002)


if __name__ == "__main__":
    main()
