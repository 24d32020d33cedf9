"""Two epochs and a second job over the same files: each file is decoded once.

The decode here is slow on purpose. `load` is the deterministic part of a sample and is kept in shared
memory; the random crop runs every time. `Parts` says the same in the form that
`DataLoader(cache=)` reads. Run it: python examples/cache.py
"""

import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import minato

cache = minato.Cache("64MiB")


class Images(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.paths = sorted(Path(folder).glob("*.npy"))

    def __len__(self):
        return len(self.paths)

    @cache.memoize(key=lambda self, i: self.paths[i], files=lambda self, i: self.paths[i])
    def load(self, i):
        time.sleep(0.02)  # an expensive decode
        return np.load(self.paths[i])

    def __getitem__(self, i):
        y, x = torch.randint(0, 32, (2,)).tolist()
        return self.load(i, part=np.s_[y : y + 64, x : x + 64])  # copies the crop alone


class Parts(Images):
    def read(self, i):
        return self.paths[i].read_bytes()

    def decode(self, raw, i):
        time.sleep(0.02)
        return np.load(io.BytesIO(raw))

    def augment(self, image, i):
        y, x = torch.randint(0, 32, (2,)).tolist()
        return image[y : y + 64, x : x + 64]

    def __getitem__(self, i):
        return self.augment(self.decode(self.read(i), i), i)


def train(folder, job):
    loader = minato.DataLoader(Images(folder), batch_size=8, shuffle=True, num_workers=2)
    for epoch in range(2):
        start = time.perf_counter()
        samples = sum(len(batch) for batch in loader)
        print(f"{job}, epoch {epoch}: {samples} samples in {time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1], "second job")
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        for n in range(40):
            np.save(f"{folder}/{n:03}.npy", np.full((96, 96), n, np.uint8))
        time.sleep(0.1)  # a file that was written just now is not trusted yet
        train(folder, "first job")
        sys.stdout.flush()
        subprocess.run([sys.executable, __file__, folder], check=True)
        stats = cache.stats()
        print(f"{stats['stored']} files decoded, {stats['hits']} found")
        loader = minato.DataLoader(Parts(folder), batch_size=8, num_workers=2, cache="64MiB")
        for _ in range(2):
            for batch in loader:
                pass
        found = loader.stats()["cache"]
        print(f"{found['stored']} files {found['form']} by the loader, {found['hits']} found")
