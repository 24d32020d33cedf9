"""Ray Train rebuilds loaders for several training workers: with install(), as minato's.

No cluster is started: what Ray asks of one (rank, number of workers) is answered here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import minato
from minato.integrations import own_options
from minato.integrations import ray as integration

from .conftest import Watch, loader

pytest.importorskip("ray.train", exc_type=ImportError)
first = pytest.importorskip("ray.train.torch.train_loop_utils", exc_type=ImportError)
second = pytest.importorskip("ray.train.v2.torch.train_loop_utils", exc_type=ImportError)


def prepare_first(given: Any) -> Any:
    return first._TorchAccelerator().prepare_data_loader(given, move_to_device=False)


def prepare_second(given: Any) -> Any:
    return second.prepare_data_loader(given, move_to_device=False)


@pytest.fixture(params=[prepare_first, prepare_second])
def prepare(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Any], Any]]:
    """Ray's function, as the second of two training workers."""
    ranks = SimpleNamespace(get_world_size=lambda: 2, get_world_rank=lambda: 1)
    monkeypatch.setattr(first, "session", ranks)
    monkeypatch.setattr(second.ray.train, "get_context", lambda: ranks)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    # it would ask the runtime of Ray for devices, and that starts a cluster
    monkeypatch.setattr(first, "get_torch_device_manager_by_context", lambda: None)
    for module in (first, second):
        monkeypatch.setattr(module, "record_extra_usage_tag", lambda *tag: None)
    yield request.param
    integration.uninstall()


def test_a_rebuilt_loader_is_minatos_with_its_options(prepare: Callable[[Any], Any]) -> None:
    given = loader("minato", scheduling="static", max_retries=0, persistent_workers=False)
    assert not isinstance(prepare(given), minato.DataLoader)
    integration.install()
    again = prepare(given)
    assert isinstance(again, minato.DataLoader) and again is not given
    for name in own_options():
        assert getattr(again, name) == getattr(given, name), name
    theirs = prepare(loader("torch"))
    assert isinstance(theirs, minato.DataLoader) and theirs.scheduling == "balanced"


def test_batches_equal_torchs(prepare: Callable[[Any], Any], watch: Watch) -> None:
    def batches(kind: str) -> list[list[float]]:
        return [x.reshape(-1).tolist() for x, _y in prepare(loader(kind))]

    expected = batches("torch")
    assert len(expected) == 3
    watch.iterators.clear()
    integration.install()
    assert batches("minato") == expected
    assert watch.all_ours()


def test_patched(prepare: Callable[[Any], Any], watch: Watch) -> None:
    with minato.patch_torch():
        assert len([x for x, _y in prepare(loader("torch"))]) == 3
    assert watch.all_ours()


def test_uninstall_puts_everything_back() -> None:
    before = [first.DataLoader, first._TorchAccelerator.prepare_data_loader, second.DataLoader]
    integration.install()
    integration.install()
    assert first.DataLoader is second.DataLoader is integration.DataLoader
    integration.uninstall()
    after = [first.DataLoader, first._TorchAccelerator.prepare_data_loader, second.DataLoader]
    assert after == before


def test_an_unknown_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(first, "_TorchAccelerator")
    with pytest.raises(ImportError, match="_TorchAccelerator"):
        integration.install()
