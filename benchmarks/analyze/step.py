"""A step that takes longer than its batch.

    python benchmarks/analyze/step.py
"""

import time

import torch
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.tensor(index)


def main():
    loader = DataLoader(Samples(), 8, shuffle=True, num_workers=2)
    for _batch in loader:
        time.sleep(0.8)


if __name__ == "__main__":
    main()
