"""Samples that are nearly free, and a program that waits for them for a twentieth of its time.

    python benchmarks/analyze/nothing.py
"""

import time

import torch
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(0.0002)
        return torch.tensor(index)


def main():
    for _batch in DataLoader(Samples(), 8, shuffle=True):
        time.sleep(0.045)


if __name__ == "__main__":
    main()
