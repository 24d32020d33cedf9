"""A dataset that fills 60 % of the memory, or of what a control group leaves.

    python benchmarks/analyze/memory.py 60                      # percent of what is available
    python benchmarks/analyze/memory.py 60 --objects            # as many Python objects
    python benchmarks/analyze/memory.py 60 --objects --touch    # and the program looks at each of them

A process that looks at a Python object writes to it, because it counts references, and so does one
that frees it. Pages that two processes share become two pages then, so a copy of such a program
may come to cost as much as the program. So may each of its workers: with --touch it has none.
"""

import argparse
import time

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from minato import _core

#: bytes of one text, and of all that an object takes
TEXT, OBJECT = 935, 1000
BATCH, WORKERS, STEPS = 16, 2, 90


class Texts(Dataset):
    def __init__(self, count, objects):
        if objects:
            self.texts = [b"%09d" % number * (TEXT // 9) for number in range(count)]
        else:
            self.texts = np.full((count, OBJECT), ord("7"), np.uint8)

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        time.sleep(0.0005)
        return torch.frombuffer(bytearray(self.texts[index][:64]), dtype=torch.uint8)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("percent", type=float)
    parser.add_argument("--objects", action="store_true", help="a list of texts, not one array")
    parser.add_argument("--touch", action="store_true", help="look at each of them")
    options = parser.parse_args()
    count = int(options.percent / 100 * _core.machine()["memory_available"] / OBJECT)
    data = Texts(count, options.objects)
    total = seen = 0
    workers = 0 if options.touch else WORKERS
    for step, batch in enumerate(DataLoader(data, BATCH, num_workers=workers)):
        total += int(batch.sum())
        if options.touch:
            part = data.texts[step * count // STEPS : (step + 1) * count // STEPS]
            seen += sum(map(len, part))
        time.sleep(0.05)
        if step + 1 == STEPS:
            break
    print(f"{count} texts, checksum {total}, {seen} bytes looked at")


if __name__ == "__main__":
    main()
