"""One transform of three takes nine tenths of a sample.

    python benchmarks/analyze/slow_transform.py
"""

import os
import time

import torch
from torch.utils.data import DataLoader, Dataset

SAMPLES, BATCH, EPOCHS = 400, 8, 3


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, value):
        for transform in self.transforms:
            value = transform(value)
        return value


class Scale:
    def __call__(self, value):
        return value * 2


class Denoise:
    def __call__(self, value):
        time.sleep(0.012)
        return value


class Shift:
    def __call__(self, value):
        return value + 1


class Samples(Dataset):
    def __init__(self):
        self.transform = Compose([Scale(), Denoise(), Shift()])

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.transform(torch.full((64,), float(index)))


def main():
    loader = DataLoader(Samples(), BATCH, shuffle=True, num_workers=len(os.sched_getaffinity(0)))
    for _ in range(EPOCHS):
        for _batch in loader:
            time.sleep(0.002)


if __name__ == "__main__":
    main()
