"""A dataset whose set_epoch raises in a worker."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import minato


class Epochs(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Of the second epoch it has nothing, in processes that did not make it."""

    def __init__(self) -> None:
        self.process, self.epoch = os.getpid(), 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index + 100 * self.epoch

    def set_epoch(self, epoch: int) -> None:
        if os.getpid() != self.process and epoch == 1:
            raise KeyError("no list of the second epoch")
        self.epoch = epoch


class Stream(torch.utils.data.IterableDataset, Epochs):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return (self[n] for n in range(8))


OPTIONS: list[dict[str, Any]] = [
    {}, {"scheduling": "static"}, {"on_error": "skip"}, {"collate_fn": torch.tensor},
    {"batching": "ready", "in_order": False},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_set_epoch_error_in_worker_is_raised(options: dict[str, Any]) -> None:
    raises_in_its_epoch(Epochs(), options)


def test_set_epoch_error_of_stream_is_raised() -> None:
    raises_in_its_epoch(Stream(), {})


def raises_in_its_epoch(data: Any, options: dict[str, Any]) -> None:
    loader = minato.DataLoader(
        data, batch_size=4, num_workers=1, persistent_workers=True, **options
    )  # fmt: skip
    for epoch in (0, 1, 2):
        loader.set_epoch(epoch)
        if epoch == 1:
            with pytest.raises(KeyError, match="no list of the second epoch") as raised:
                list(loader)
            said = [str(raised.value), *getattr(raised.value, "__notes__", [])]
            assert "set_epoch(1) of the dataset raised this" in "".join(said)
        else:
            assert torch.cat(list(loader)).tolist() == [n + 100 * epoch for n in range(8)]
    assert loader.stats()["deaths"] == 0
