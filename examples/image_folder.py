"""A folder of images with one folder per class in it, as for torchvision's ImageFolder.

    python examples/image_folder.py           # makes 48 small images in a temporary folder
    python examples/image_folder.py FOLDER    # yours: FOLDER/CLASS/NAME.png

Needs Pillow.
"""

import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from minato import DataLoader, Dataset  # instead of: from torch.utils.data import ...

SIDE = 32


class ImageFolder(Dataset):
    def __init__(self, folder):
        self.classes = sorted(p.name for p in Path(folder).iterdir() if p.is_dir())
        self.files = [(path, label) for label, name in enumerate(self.classes)
                      for path in sorted(Path(folder, name).iterdir())]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path, label = self.files[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        # Draw from random, NumPy or torch as you like: each sample is seeded separately, so it
        # is the same with any number of workers.
        x = random.randint(0, image.width - SIDE)
        y = random.randint(0, image.height - SIDE)
        pixels = np.asarray(image.crop((x, y, x + SIDE, y + SIDE)))
        if random.random() < 0.5:
            pixels = pixels[:, ::-1]
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1), label


def make(folder):
    """Reddish and bluish images; the last one is cut off, like a broken download."""
    numbers = np.random.default_rng(0)
    for name, channel in (("blue", 2), ("red", 0)):
        Path(folder, name).mkdir()
        for i in range(24):
            pixels = numbers.integers(0, 128, (40 + i, 48, 3), dtype=np.uint8)
            pixels[..., channel] += 100
            Image.fromarray(pixels).save(Path(folder, name, f"{i:02}.png"))
    broken = Path(folder, "red", "23.png")
    broken.write_bytes(broken.read_bytes()[:500])


def train(folder):
    torch.manual_seed(0)
    dataset = ImageFolder(folder)
    loader = DataLoader(
        dataset, batch_size=8, shuffle=True, num_workers=2, persistent_workers=True,
        on_error="replace",  # another sample replaces one that raises; torch's loader would stop
    )  # fmt: skip
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(), torch.nn.Linear(8, len(dataset.classes)),
    )  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for epoch in range(3):
        total = 0.0
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(net(images / 255), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(loader):.3f}")
    for index, error, instead in loader.stats()["failed"]["latest"][:1]:
        print(f"{dataset.files[index][0].name} cannot be read: sample {instead} was taken instead")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            make(folder)
            train(folder)
