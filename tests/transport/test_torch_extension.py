"""minato._torch, where it was built."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch
from contract.support import programs

import minato


ext = pytest.importorskip("minato._torch", exc_type=ImportError)


def test_extension_names_its_torch_version() -> None:
    assert torch.__version__.startswith(ext.torch_version + ".")


OTHER = """
import torch, json
torch.__version__ = "1.99.0"
from minato.commands import info as _info
try:
    import minato._torch
except ImportError as error:
    print(error)
print(_info.build()["torch extension"])
"""


def test_extension_refuses_other_torch_and_info_explains() -> None:
    done = programs().run(OTHER)
    assert done.returncode == 0, done.stderr
    refused, info = done.stdout.splitlines()
    assert f"built for torch {ext.torch_version} and does not load with torch 1.99.0" in refused
    assert info.startswith("built, but does not load: ") and refused in info


@pytest.mark.skipif(shutil.which("nm") is None, reason="there is no nm")
def test_extension_exports_only_its_init() -> None:
    done = subprocess.run(
        ["nm", "-D", "--defined-only", ext.__file__], capture_output=True, text=True, timeout=60
    )
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["PyInit__torch"]


ODD = """
import sys
if sys.argv[1] == "without":
    sys.modules["minato._torch"] = None
import torch, minato
from torch.utils.data import DataLoader

z = torch.randn(8, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
samples = {
    "dense": torch.arange(32.0).view(8, 4),
    "strided": torch.arange(64).view(8, 8)[:, ::2],
    "scalar": torch.arange(8).to(torch.uint16),
    "half": torch.arange(16).view(8, 2).half(),
    "neg": z.conj().imag,
    "conj": z.conj(),
    "empty": torch.empty(8, 0),
}

class Data(torch.utils.data.Dataset):
    def __init__(self, name):
        self.rows = samples[name]
    def __len__(self):
        return 8
    def __getitem__(self, i):
        row = self.rows[i]  # the first batches prove a layout, which the others do not fit
        return row if i >= 4 else row.detach().resolve_conj().resolve_neg().clone()

samples["grad"] = torch.ones(8, 2, requires_grad=True)

def outcome(cls, name, workers=1):
    try:
        batches = list(cls(Data(name), batch_size=2, num_workers=workers))
    except RuntimeError as error:  # torch refuses some in workers
        return next(x for x in reversed(str(error).splitlines()) if x.startswith("RuntimeError"))
    return torch.cat(batches).resolve_conj().tolist(), batches[0].dtype

for name in samples:
    lazy = name in ("neg", "conj")  # torch's workers refuse them
    mine, theirs = outcome(minato.DataLoader, name), outcome(DataLoader, name, 0 if lazy else 1)
    assert mine == theirs, (name, mine, theirs)
print("minato._torch" in sys.modules and sys.modules["minato._torch"] is not None)
"""


@pytest.mark.parametrize("way", ["with", "without"])
def test_tensors_that_are_not_their_bytes(way) -> None:
    """Tensors cross by minato._torch where it was built; the loader does not need it."""
    done = programs().run(ODD, way)
    assert done.stdout.strip() == str(way == "with"), done.stderr
