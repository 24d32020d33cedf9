"""What the tests of other libraries share: loaders of both kinds, and who made a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.data.dataloader as torch_dataloader

import minato

TorchLoader = torch_dataloader.DataLoader


class Points(torch.utils.data.Dataset):
    """Points of a plane and whether they lie above its diagonal; no randomness."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = torch.tensor([(index * 7 % 24) / 24, (index * 5 % 24) / 24])
        return point, (point[1] > point[0]).float()


class Watch:
    """Modules of the iterators that minato's loaders have made."""

    def __init__(self) -> None:
        self.iterators: list[str] = []

    def all_ours(self) -> bool:
        """At least one iterator, and each of them minato's own."""
        return bool(self.iterators) and all(m.startswith("minato") for m in self.iterators)


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


#: both kinds of loader with the same arguments
KINDS = {"torch": TorchLoader, "minato": minato.DataLoader}


def loader(kind: str, **more: Any) -> Any:
    """A loader of that kind over Points, 2 workers, shuffled by a fixed seed."""
    generator = torch.Generator().manual_seed(3)
    options = dict(
        batch_size=4, num_workers=2, shuffle=True, generator=generator, persistent_workers=True
    )
    return KINDS[kind](Points(), **{**options, **more})


def model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1), torch.nn.Flatten(0)
    )


def weights(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])
