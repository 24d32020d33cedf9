"""Your own operator in C, in a pipeline with minato's operators, without the GIL.

    cd examples/c_operator
    python setup.py build_ext --inplace
    python use.py
"""

import tempfile
from pathlib import Path

import numpy as np
from threshold_operator import threshold

from minato import DataLoader, ops

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{i}.npy") for i in range(4)]
        for path in paths:
            np.save(path, np.random.default_rng(0).normal(size=(1, 20, 20, 20)).astype("float32"))
        pipeline = ops.Pipeline([
            ops.ReadNpy(), ops.RandCrop(16), ops.UserOperator(threshold, 0.5),
        ])  # fmt: skip
        loader = DataLoader(ops.VolumeDataset(paths, pipeline), batch_size=2, num_workers=2)
        for (images,) in loader:
            least = images[images != 0].min()
            print(tuple(images.shape), "nothing is left between 0 and", f"{least:.1f}")
