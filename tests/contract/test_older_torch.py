"""Repeats the tests of memory and transport with a torch without the DLPack C exchange
interface: a Python function then makes the tensors, as with torch 2.6 to 2.10."""

from __future__ import annotations

import gc
from typing import Any, Iterator

import numpy as np
import pytest
import torch

from . import test_memory, test_transport
from .datasets import Listed
from .support import Kind, selected, wait_for

globals().update(
    {
        name: value
        for module in (test_memory, test_transport)
        for name, value in vars(module).items()
        if name.startswith("test_")
    }
)


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The bridge to such a torch."""
    if "minato" not in selected():
        pytest.skip("minato is not selected")
    from minato.transport import torch_bridge as _torch_bridge

    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__", raising=False)
    assert not _torch_bridge.bind()
    yield _torch_bridge
    monkeypatch.undo()
    _torch_bridge.bind()


@pytest.fixture
def loader(older: Any) -> Kind:
    return Kind("minato")


@pytest.mark.parametrize("extension", [True, False], ids=["extension", "bare"])
def test_storage_guards_are_released(
    older: Any, monkeypatch: pytest.MonkeyPatch, extension: bool
) -> None:
    """One is made for each tensor over the arena, none for one that has no values."""
    taken: list[int] = []
    freed: list[int] = []
    take, free = older._weak_ref, torch.UntypedStorage._free_weak_ref

    def weak_ref(tensor: torch.Tensor) -> int:
        taken.append(take(tensor))
        return taken[-1]

    def free_weak_ref(ref: int) -> None:
        freed.append(ref)
        free(ref)

    if not extension:
        monkeypatch.setattr(older, "_plain_tensor", None)
    monkeypatch.setattr(older, "_weak_ref", weak_ref)
    monkeypatch.setattr(torch.UntypedStorage, "_free_weak_ref", staticmethod(free_weak_ref))
    older.bind()
    sample = {
        "large": np.ones(50_000, np.float32),
        "small": np.ones(3, np.float32),
        "empty": np.ones((0, 3), np.float32),
    }
    made = Kind("minato")(Listed([sample] * 16), batch_size=2, num_workers=1,
                          persistent_workers=True)  # fmt: skip
    for _ in range(2):
        for batch in made:
            assert {k: tuple(v.shape) for k, v in batch.items()} == {
                "large": (2, 50_000), "small": (2, 3), "empty": (2, 0, 3),
            }  # fmt: skip
            assert batch["large"].sum() == 100_000 and batch["small"].sum() == 6
    del batch
    iterator = iter(made)
    gc.collect()

    def even() -> bool:
        iterator._engine.memory()  # reclaims memory that has become unreachable
        return len(taken) == len(freed)

    assert len(taken) >= 8
    assert wait_for(even), (len(taken), len(freed))
    assert sorted(taken) == sorted(freed)
