"""Helpers of the tests of other libraries: loaders of both kinds, and which loader made a batch."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data.dataloader as torch_dataloader

import minato

TorchLoader = torch_dataloader.DataLoader
ROOT = Path(__file__).resolve().parents[2]


class Points(torch.utils.data.Dataset):
    """Points of a plane and whether they lie above its diagonal; no randomness."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = torch.tensor([(index * 7 % 24) / 24, (index * 5 % 24) / 24])
        return point, (point[1] > point[0]).float()


class Noisy(Points):
    """The same, moved by numbers that the three global generators draw in the worker."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        point, label = super().__getitem__(index)
        return point + torch.rand(2) / 9 + np.random.rand() / 9 + random.random() / 9, label


class Named(torch.utils.data.Dataset):
    """Points or Noisy with names, as the Trainer of Transformers needs them."""

    def __init__(self, points: Points) -> None:
        self.points = points

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        point, label = self.points[index]
        return {"points": point, "labels": label}


class Watch:
    """Modules of the iterators that minato's loaders have made."""

    def __init__(self) -> None:
        self.iterators: list[str] = []

    def all_ours(self) -> bool:
        """At least one iterator, and each of them minato's own."""
        return bool(self.iterators) and all(m.startswith("minato") for m in self.iterators)


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    """Importing Composer replaces what interrupts do, for all tests that come after."""
    names = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(name) for name in names]
    yield
    for name, handler in zip(names, before, strict=True):
        signal.signal(name, handler)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    make: Callable[[Any], Any] = TorchLoader.__iter__

    def watched(loader: Any) -> Iterator[Any]:
        iterator = make(loader)
        watch.iterators.append(type(iterator).__module__)
        return iterator

    monkeypatch.setattr(TorchLoader, "__iter__", watched)
    return watch


#: With the same arguments, those with noise give the same batches, and so do the others.
KINDS: dict[str, Any] = {
    "torch": TorchLoader,
    "minato": minato.DataLoader,
    "torch, noise": TorchLoader,
    "static, noise": functools.partial(minato.DataLoader, scheduling="static"),
}


def loader(kind: str, **more: Any) -> Any:
    """A loader of that kind over Points or Noisy, 2 workers, shuffled by a fixed seed."""
    generator = torch.Generator().manual_seed(3)
    options = dict(
        batch_size=4, num_workers=2, shuffle=True, generator=generator, persistent_workers=True
    )
    data = Noisy() if "noise" in kind else Points()
    return KINDS[kind](data, **{**options, **more})


def model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1), torch.nn.Flatten(0)
    )


def weights(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def loss_of(net: torch.nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return torch.nn.functional.binary_cross_entropy_with_logits(net(x), y)


class NamedNet(torch.nn.Module):
    """The model of batches of Named; it gives their loss, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, points: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": loss_of(self.net, (points, labels))}


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    loss_of(net, batch).backward()
    optimizer.step()


def same(fit: Callable[[str], torch.Tensor], watch: Watch) -> None:
    """The fit's result (a tensor) does not depend on the kind of loader."""
    for theirs, ours in (("torch", "minato"), ("torch, noise", "static, noise")):
        watch.iterators.clear()
        torch.manual_seed(0)
        expected = fit(theirs)
        assert watch.iterators and not watch.all_ours()
        watch.iterators.clear()
        torch.manual_seed(0)
        assert torch.equal(fit(ours), expected), ours
        assert watch.all_ours(), watch.iterators


def same_when_patched(run: Callable[[], Any], watch: Watch) -> None:
    """The result with loaders that a library makes itself is the same with minato's workers."""
    torch.manual_seed(0)
    expected = run()
    assert watch.iterators and not watch.all_ours()
    watch.iterators.clear()
    with minato.patch_torch(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchLoader, "scheduling", "static")
        torch.manual_seed(0)
        assert run() == expected
    assert watch.all_ours(), watch.iterators


def printed(program: str, **environment: str) -> str:
    """The output of a program in a separate process, which may import these tests."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
