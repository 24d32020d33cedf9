"""Results that a worker pickles and the trainer cannot unpickle."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
import torch

import minato


class OneWay:
    """Is pickled anywhere, and unpickled in the process that has pickled it only."""

    def __init__(self, error: Exception) -> None:
        self.process, self.error = os.getpid(), error

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["process"] != os.getpid():
            raise state["error"]


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return OneWay(self.error) if index == 5 else index


class Batches(Samples):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def said(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def raised(data: Samples, **options: Any) -> str:
    loader = minato.DataLoader(data, batch_size=4, num_workers=1, **options)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(type(data.error)) as caught:
        next(iterator)
    assert list(iterator) == []
    return said(caught.value)


OPTIONS: list[dict[str, Any]] = [
    {"collate_fn": list}, {"scheduling": "static", "collate_fn": list}, {},
    {"batching": "ready", "in_order": False},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_unpickling_error_names_worker_and_samples(options: dict[str, Any]) -> None:
    text = raised(Samples(AttributeError("no such class")), **options)
    assert "DataLoader worker 0 has pickled this result" in text
    assert "5" in text[text.index("minato: ") :] and "batch 1" in text
    assert "memory" not in text


def test_unpickling_error_of_getitems_names_batch() -> None:
    text = raised(Batches(AttributeError("no such class")), collate_fn=list)
    assert "batch 1, sample indices [4, 5, 6, 7]" in text


def test_damaged_pickle_still_suspects_memory() -> None:
    text = raised(Samples(pickle.UnpicklingError("invalid load key")), collate_fn=list)
    assert "batch 1" in text and "writes to memory that is not its own" in text
