"""JPEG photos in one folder per class, decoded only where the random crop needs it.

    python examples/photos.py           # makes 24 small photos in a temporary folder
    python examples/photos.py FOLDER    # yours: FOLDER/CLASS/NAME.jpg

The transform takes the path of a photo. With torchvision installed, its ImageFolder does as well:
ImageFolder(folder, transform, loader=str). Needs Pillow.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from minato import DataLoader, Dataset, ops


class Photos(Dataset):
    def __init__(self, folder, transform):
        self.classes = sorted(p.name for p in Path(folder).iterdir() if p.is_dir())
        self.files = [(path, label) for label, name in enumerate(self.classes)
                      for path in sorted(Path(folder, name).iterdir())]
        self.transform = transform

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path, label = self.files[index]
        return self.transform(path), label


def make(folder):
    """Waves of one colour or the other."""
    y, x = np.mgrid[:150, :200]
    for name, channel in (("blue", 2), ("red", 0)):
        Path(folder, name).mkdir()
        for i in range(12):
            pixels = np.full((150, 200, 3), 60, np.uint8)
            pixels[..., channel] = 128 + 100 * np.sin(x / (9 + i)) * np.cos(y / (20 - i))
            Image.fromarray(pixels).save(Path(folder, name, f"{i:02}.jpg"), quality=90)


def train(folder):
    torch.manual_seed(0)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    dataset = Photos(folder, ops.RandomResizedCropJpeg(64, mean=mean, std=std))
    loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2, persistent_workers=True)
    net = torch.nn.Sequential(
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, len(dataset.classes)),
    )  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for epoch in range(3):
        total = 0.0
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(loader):.3f}")

    whole = ops.ResizeCenterCropJpeg(72, 64, mean=mean, std=std)
    print("validation:", tuple(whole(dataset.files[0][0]).shape))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            make(temporary)
            train(temporary)
