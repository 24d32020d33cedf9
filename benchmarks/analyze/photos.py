"""Photos that training crops and resizes, from this machine's storage or from one that is emulated.

    minato analyze --codecs -- python benchmarks/analyze/photos.py FOLDER            # writes 64 photos there at first
    minato analyze --codecs -- python benchmarks/analyze/photos.py FOLDER --disk 5   # read at 5 MB/s

The photos are noise of a falling spectrum, shapes and the grain of a sensor, tuned so that JPEG makes
of them what it makes of ImageNet's: 97 kB at quality 95, 2.9 times smaller at quality 75.
"""

import argparse
import io
import multiprocessing
import random
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.utils.data import DataLoader, Dataset

FILES, BATCH, WORKERS, EPOCHS = 64, 8, 2, 8
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def photo(seed, width=500, height=375):
    """An image that compresses as a photo does."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    frequency[0, 0] = 1

    def cloud():
        phases = np.exp(2j * np.pi * rng.random(frequency.shape))
        field = np.fft.irfft2(phases / frequency**1.5, (height, width))
        return field / field.std()

    light = cloud()
    pixels = np.stack([128 + 45 * (light + 0.3 * cloud()) for _ in range(3)], -1)
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        left, top = rng.integers(0, (width, height))
        right, bottom = (left, top) + rng.integers(4, height // 3, 2)
        color = tuple(int(value) for value in rng.integers(0, 256, 3))
        kind = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        kind([int(left), int(top), int(right), int(bottom)], fill=color)
    grain = np.asarray(image) + rng.normal(0, 6, (height, width, 1))
    return Image.fromarray(np.clip(grain, 0, 255).astype(np.uint8))


def folder_of(folder, count, quality=95, **size):
    """JPEG files in two classes; those that are there stay."""
    for n in range(count):
        path = Path(folder, f"class{n % 2}", f"{n}.jpg")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            photo(n, **size).save(path, quality=quality)
    return Path(folder)


class Disk:
    """One read at a time, each as long as its bytes take."""

    def __init__(self, bytes_per_s):
        self.turn, self.bytes_per_s = multiprocessing.Lock(), bytes_per_s

    def read(self, path):
        if not self.bytes_per_s:
            return path.read_bytes()
        with self.turn:
            content = path.read_bytes()
            time.sleep(len(content) / self.bytes_per_s)
            return content


class Photos(Dataset):
    def __init__(self, folder, disk):
        self.paths, self.disk = sorted(Path(folder).rglob("*.*")), disk

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        image = Image.open(io.BytesIO(self.disk.read(self.paths[index]))).convert("RGB")
        side = random.uniform(0.3, 1.0) * min(image.size)
        left, top = random.uniform(0, image.width - side), random.uniform(0, image.height - side)
        box = (left, top, left + side, top + side)
        pixels = np.array(image.resize((224, 224), Image.Resampling.BILINEAR, box))
        image = torch.from_numpy(pixels).float().div(255).sub(MEAN).div(STD)
        return image.flip(1) if random.random() < 0.5 else image


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--disk", type=float, metavar="MB/S", help="emulate a storage")
    options = parser.parse_args()
    folder_of(options.folder, FILES)
    data = Photos(options.folder, Disk(options.disk and options.disk * 1e6))
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True)
    for _ in range(EPOCHS):
        for _batch in loader:
            time.sleep(0.001)


if __name__ == "__main__":
    main()
