"""Tests on a real CUDA device, for what a fake cannot show."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.support import Kind, run_script, wait_for
from torch.utils.data import Dataset

import minato
from minato import ops
from minato.device import copies
from minato.device.operators import differs
from minato.device.provider import kernels, provider_for

from .datasets import Rows
from .test_device_operators import FINISHED, MODES, files, pipeline, wanted

__all__ = ["files"]  # a fixture
DEVICE = "cuda"
SECONDS = 90.0
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.fixture(autouse=True)
def settled() -> Any:
    """Checks that no sources of copies are left."""
    yield
    gc.collect()
    assert wait_for(lambda: copies.sweep() == 0, SECONDS)


def told(loader: Any) -> dict[str, Any]:
    found: dict[str, Any] = loader.stats()["device"]
    return found


def received(loader: Any) -> dict[int, tuple[bytes, bytes]]:
    """Bytes by index, when the caller's stream has reached them."""
    got = {}
    for image, label, index in loader:
        assert image.device.type == label.device.type == DEVICE
        for row, number in enumerate(index.tolist()):
            got[number] = image[row].cpu().numpy().tobytes(), label[row].cpu().numpy().tobytes()
    return got


def needs_kernels() -> None:
    if isinstance(said := kernels(), str):
        pytest.skip(said)


def test_the_kernels_give_the_bytes_of_the_host() -> None:
    needs_kernels()
    provider = provider_for(DEVICE)
    assert provider is not None and provider.operators(differs) is None


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_bytes_are_those_of_the_host(files: Any, mode: str, resident: bool) -> None:
    needs_kernels()
    data = ops.VolumeDataset(files, pipeline(), seed=7, repeat=4, with_index=True,
                             resident=resident)  # fmt: skip
    options = {"num_workers": 2, **MODES[mode]}
    loader = minato.DataLoader(data, batch_size=3, device=DEVICE, **options)
    for epoch in range(2):
        loader.set_epoch(epoch)
        assert received(loader) == wanted(data)
    found = told(loader)
    assert found["operators"] == (["RandBalancedCrop"] if resident else []) + FINISHED
    assert found["operators_why"] is None and bool(found["resident"]) == resident


def test_a_slow_stream_finds_each_batch_whole() -> None:
    """The caller's stream is busy while the next batches are made and copied. They exceed the
    arena's memory, so memory that was released early would have other bytes."""
    loader = minato.DataLoader(Rows(80), batch_size=4, num_workers=2, prefetch_factor=4,
                               memory_limit="2MiB", device=DEVICE)  # fmt: skip
    lows, highs, labels = [], [], []
    for batch in loader:
        torch.cuda._sleep(20_000_000)
        lows.append(batch["x"].amin(dim=1))
        highs.append(batch["x"].amax(dim=1))
        labels.append(batch["label"])
        del batch
    found = torch.cat(labels).tolist()
    assert found == list(range(80))
    assert torch.cat(lows).tolist() == found == torch.cat(highs).tolist()


def test_device_reads_rows_without_host_copy() -> None:
    """Where the driver locks pages of a file in memory. Two iterators, one after the other, lock
    the same kind of chunks again."""
    for _ in range(2):
        loader = minato.DataLoader(Rows(), batch_size=4, num_workers=2, device=DEVICE,
                                   persistent_workers=True)  # fmt: skip
        for _ in range(3):
            assert [n for batch in loader for n in batch["label"].tolist()] == list(range(24))
        found = told(loader)
        if found["lock_error"]:
            pytest.skip(f"the driver refuses to lock pages: error {found['lock_error']}")
        assert found["through"]["locked"] > 0 and found["locked"] > 0
        assert found["bandwidth"] > 0 and found["overlap"] is not None
        del loader


class Looks(Dataset):  # type: ignore[type-arg]
    """Whether CUDA is initialised where a sample is made."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(int(torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork()))


def test_workers_do_not_use_the_device() -> None:
    torch.zeros(1, device=DEVICE)
    loader = minato.DataLoader(Looks(), num_workers=2, device=DEVICE)
    assert [int(batch) for batch in loader] == [0] * 8


SCRIPT = """
import torch
from device.datasets import Rows
iterator = iter(make(Rows(100), num_workers=2, device="cuda"))
for _ in range(5):
    batch = next(iterator)
torch.cuda._sleep(200_000_000)
kept = next(iterator)
{end}
"""


@pytest.mark.parametrize("end", ["", "del iterator", "raise SystemExit(0)"])
def test_a_program_ends_with_copies_under_way(tmp_path: Path, end: str) -> None:
    outcome = run_script(Kind("minato"), SCRIPT.format(end=end), tmp_path)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, "", ""), outcome
    assert not outcome.left
