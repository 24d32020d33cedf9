"""Fixtures of the tests of minato.ops."""
from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from .native import instruction_sets

ROOT = Path(__file__).resolve().parents[2]

#: Seconds that a long run may take; each fuzz or stress test takes its share.
STRESS = float(os.environ.get("MINATO_STRESS_SECONDS") or 0.3)


def make_label(rng: np.random.Generator, shape, blobs: int = 6, values=(1, 2)) -> np.ndarray:
    """A uint8 label [1, *shape] with some boxes of each value, touching or not."""
    label = np.zeros((1, *shape), np.uint8)
    for _ in range(blobs):
        low = [rng.integers(0, n) for n in shape]
        high = [min(n, a + 1 + rng.integers(0, max(2, n // 2))) for n, a in zip(shape, low)]
        label[(0, *(slice(a, b) for a, b in zip(low, high)))] = rng.choice(values)
    return label


def make_pair(seed: int, shape, **kwargs) -> tuple[np.ndarray, np.ndarray]:
    """(float32 image, uint8 label), both [1, *shape]."""
    rng = np.random.default_rng(seed)
    image = rng.standard_normal((1, *shape)).astype(np.float32)
    return image, make_label(rng, shape, **kwargs)


@pytest.fixture(params=range(len(instruction_sets())),
                ids=lambda level: instruction_sets()[level])
def level(request) -> int:
    """Each instruction set of this machine."""
    return request.param


@pytest.fixture
def files(tmp_path):
    """Three cases on disk: [(image path, label path), ...]."""
    cases = []
    for number, shape in enumerate([(20, 24, 28), (17, 30, 23), (33, 16, 40)]):
        image, label = make_pair(number, shape)
        paths = tmp_path / f"case_{number}_x.npy", tmp_path / f"case_{number}_y.npy"
        np.save(paths[0], image)
        np.save(paths[1], label)
        cases.append(paths)
    return cases


@pytest.fixture(scope="session")
def kits19() -> list[Path]:
    """Real KiTS19 label files; skips without them."""
    folder = Path(os.environ.get("MINATO_KITS19") or ROOT / "../shared/data/kits19")
    found = sorted(folder.glob("case_*/segmentation.nii.gz"))
    if not found:
        pytest.skip(f"no real label files in {folder}; name their folder in MINATO_KITS19")
    return found
