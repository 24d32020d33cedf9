"""3D volumes in .npy files: crop, flip, scale and noise in C, by threads and without the GIL.

    python examples/volumes.py    # makes six small volumes with labels in a temporary folder
"""

import tempfile
from pathlib import Path

import numpy as np

from minato import DataLoader, ops


def make(folder):
    """Images float32 and labels uint8, both of shape [channel, depth, height, width]."""
    numbers = np.random.default_rng(0)
    cases = []
    for i in range(6):
        shape = (1, 40 + 8 * i, 48, 48)
        label = np.zeros(shape, np.uint8)
        label[:, 10:20, 10:20, 10:20] = 1
        image = numbers.normal(size=shape).astype(np.float32) + 3 * label
        paths = Path(folder, f"{i}_image.npy"), Path(folder, f"{i}_label.npy")
        np.save(paths[0], image)
        np.save(paths[1], label)
        cases.append(paths)
    return cases


def load(cases):
    # One call in C makes a sample, and reads only the rows that the crop needs.
    pipeline = ops.Pipeline([
        ops.ReadNpy(), ops.RandBalancedCrop(32, foreground=0.4), ops.RandFlip(),
        ops.RandScaleIntensity(), ops.RandGaussianNoise(),
    ])  # fmt: skip
    dataset = ops.VolumeDataset(cases, pipeline, seed=1)  # works with torch's loader, too
    loader = DataLoader(dataset, batch_size=2, shuffle=True, num_workers=2)
    for epoch in range(2):
        loader.set_epoch(epoch)  # passes it to the dataset, which draws new numbers each epoch
        iterator = iter(loader)
        for images, labels in iterator:
            print(tuple(images.shape), f"{(labels > 0).float().mean():.1%} of the voxels matter")
        print(f"epoch {epoch} was made by {loader.stats()['worker_type']} workers")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        load(make(folder))
