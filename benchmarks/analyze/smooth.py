"""A slow program, and what an analysis makes of it: photos that are smoothed, cropped, and trained on.

    minato analyze --out before -- python benchmarks/analyze/smooth.py FOLDER    # writes 160 photos there at first
    minato analyze --out after -- python benchmarks/analyze/smooth.py FOLDER --crop-first --workers 2
"""

import argparse
import random
from pathlib import Path

import numpy as np
import torch
from photos import folder_of
from PIL import Image, ImageFilter
from torch.utils.data import DataLoader, Dataset

FILES, BATCH, EPOCHS, SIDE = 160, 16, 6, 160


class Compose:
    def __init__(self, *transforms):
        self.transforms = list(transforms)

    def __call__(self, value):
        for transform in self.transforms:
            value = transform(value)
        return value


class Smooth:
    def __call__(self, image):
        return image.filter(ImageFilter.GaussianBlur(2))


class Crop:
    def __call__(self, image):
        left = random.randint(0, image.width - SIDE)
        top = random.randint(0, image.height - SIDE)
        return image.crop((left, top, left + SIDE, top + SIDE))


class ToTensor:
    def __call__(self, image):
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)


class Photos(Dataset):
    def __init__(self, folder, transform):
        self.paths, self.transform = sorted(folder.rglob("*.jpg")), transform

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return self.transform(Image.open(self.paths[index]).convert("RGB"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--crop-first", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    chain = Compose(Smooth(), Crop(), ToTensor())
    if options.crop_first:
        chain = Compose(Crop(), Smooth(), ToTensor())
    data = Photos(folder_of(Path(options.folder), FILES), chain)
    loader = DataLoader(
        data, BATCH, shuffle=True, num_workers=options.workers,
        persistent_workers=options.workers > 0,
    )  # fmt: skip
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 5, stride=2), torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, stride=2), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 3),
    )  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(EPOCHS):
        for batch in loader:
            loss = (net(batch) - batch.mean((2, 3))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
