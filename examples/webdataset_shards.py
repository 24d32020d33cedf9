"""webdataset's shards: its pipeline is an iterable dataset, which minato's loader accepts.

    python examples/webdataset_shards.py    # makes four shards in a temporary folder

Needs webdataset (pip install webdataset).
"""

import tempfile

import torch
import webdataset as wds

from minato import DataLoader


def make(folder):
    for shard in range(4):
        with wds.TarWriter(f"{folder}/{shard}.tar") as archive:
            for i in range(10):
                number = 10 * shard + i
                archive.write({"__key__": f"{number:04}", "cls": number})


def load(folder):
    # Each worker reads different shards, so use no more workers than there are shards.
    stream = wds.WebDataset(f"{folder}/{{0..3}}.tar", shardshuffle=False).decode().to_tuple("cls")
    loader = DataLoader(stream, batch_size=5, num_workers=2)
    numbers = torch.cat([batch[0] for batch in loader])
    print(f"{len(numbers)} samples, each once: {sorted(numbers.tolist()) == list(range(40))}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make(folder)
        load(folder)
