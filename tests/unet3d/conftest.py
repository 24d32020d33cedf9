"""Tiny data sets for the tests of the 3D U-Net workload."""
from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

torch = pytest.importorskip("torch")
pytest.importorskip("nibabel")
pytest.importorskip("scipy")

from unet3d import phantom, preprocess  # noqa: E402

SMALL = preprocess.Settings(min_shape=(16, 16, 16))


@pytest.fixture(autouse=True)
def one_thread():
    """The machine is shared; and equal thread counts are what makes runs comparable."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def nifti_folder(tmp_path_factory) -> Path:
    """Five phantoms an eighth of real size."""
    folder = tmp_path_factory.mktemp("nifti")
    phantom.generate(folder, cases=5, seed=3, scale=0.125)
    return folder


@pytest.fixture(scope="session")
def data_folder(nifti_folder, tmp_path_factory) -> Path:
    """The same five, preprocessed. Read only: tests that damage files make their own."""
    folder = tmp_path_factory.mktemp("npy")
    preprocess.preprocess(nifti_folder, folder, SMALL)
    return folder


@pytest.fixture(scope="session")
def real_labels() -> Path:
    """The folder of real KiTS19 label files, or a skip."""
    folder = Path(os.environ.get("MINATO_KITS19", ROOT.parent / "shared/data/kits19"))
    if not any(folder.glob("case_*/segmentation.nii.gz")):
        pytest.skip(f"no real KiTS19 labels in {folder} (set MINATO_KITS19)")
    return folder
