"""Photos that are augmented before they are shrunk, as in Pecan's example (USENIX ATC 2024).

    minato analyze --orders -- python benchmarks/analyze/augment.py FOLDER    # writes 64 photos there at first
"""

import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from photos import folder_of
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset

FILES, BATCH, WORKERS, EPOCHS = 64, 8, 2, 8


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, value):
        for transform in self.transforms:
            value = transform(value)
        return value


class Flip:
    def __call__(self, image):
        return ImageOps.mirror(image) if random.random() < 0.5 else image


class Rotate:
    def __call__(self, image):
        return image.rotate(random.uniform(-20, 20), Image.Resampling.BILINEAR)


class Shear:
    def __call__(self, image):
        matrix = (1, random.uniform(-0.2, 0.2), 0, 0, 1, 0)
        return image.transform(
            image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR
        )


class Resize:
    def __call__(self, image):
        return image.resize((96, 96), Image.Resampling.BILINEAR)


class ToTensor:
    def __call__(self, image):
        return torch.from_numpy(np.array(image)).float().div(255)


class Normal:
    def __call__(self, image):
        return (image - image.mean()) / image.std()


class Photos(Dataset):
    def __init__(self, folder):
        self.images = [Image.open(path).convert("RGB") for path in sorted(folder.rglob("*.jpg"))]
        self.transform = Compose([Flip(), Rotate(), Shear(), Resize(), ToTensor(), Normal()])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(self.images[index])


def main(folder):
    data = Photos(folder_of(folder, FILES, width=320, height=240))
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True)
    for _ in range(EPOCHS):
        for _batch in loader:
            time.sleep(0.001)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
