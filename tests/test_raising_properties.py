"""Attributes that minato looks for and torch does not, as properties that raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

import minato

NAMES = (
    "state_dict", "load_state_dict", "seed_sample", "set_epoch", "cost_hint", "locality_key",
    "native_pipeline", "generator", "sampler", "batch_size",
)  # fmt: skip


class Samples(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(range(4))


class Order(Sampler):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(range(4))


class Batches(Sampler):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([[0, 1], [2, 3]])


def raising(kind: type) -> Any:
    def raises(_self: Any) -> Any:
        raise RuntimeError("not there yet")

    return type("Raising", (kind,), {name: property(raises) for name in NAMES})()


LOADERS: dict[str, Any] = {
    "dataset": lambda **o: minato.DataLoader(raising(Samples), batch_size=2, **o),
    "stream": lambda **o: minato.DataLoader(raising(Stream), batch_size=2, **o),
    "sampler": lambda **o: minato.DataLoader(
        Samples(), batch_size=2, sampler=raising(Order), **o
    ),
    "batch sampler": lambda **o: minato.DataLoader(
        Samples(), batch_sampler=raising(Batches), **o
    ),
}  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {}, {"num_workers": 1}, {"num_workers": 1, "scheduling": "static"},
    {"num_workers": 1, "worker_type": "thread", "seed_per_sample": False},
    {"num_workers": 1, "persistent_workers": True, "prefetch_next_epoch": True},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", LOADERS)
def test_raising_optional_properties_change_nothing(kind: str, options: Any) -> None:
    if kind == "stream" and ("worker_type" in options or "prefetch_next_epoch" in options):
        pytest.skip("not for iterable datasets")
    loader = LOADERS[kind](**options)
    for epoch in range(2):
        loader.set_epoch(epoch)
        iterator = iter(loader)
        found = [next(iterator)]
        again = LOADERS[kind](**options)
        again.load_state_dict(loader.state_dict())
        found += list(iterator)
        assert torch.cat(found).tolist() == [0, 1, 2, 3]
        assert torch.cat(list(again)).tolist() == [2, 3]
