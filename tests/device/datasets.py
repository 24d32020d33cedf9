"""Datasets that are loaded to the fake device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

WIDTH = 16 << 10  # floats of a sample: such a field is delivered without a copy


class Rows(Dataset):  # type: ignore[type-arg]
    """Sample i: a large tensor full of i, a small one, and an object that no device can hold."""

    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        large = np.full(WIDTH, index, np.float32)
        return {"x": large, "label": index, "name": f"sample {index}"}


class Stream(IterableDataset):  # type: ignore[type-arg]
    """The same, of an iterable dataset, shared by its workers."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        rows = Rows()
        yield from (rows[index] for index in range(first, len(rows), step))


def as_list(samples: list[Any]) -> Any:
    """A collate_fn."""
    return {"x": torch.stack([torch.from_numpy(s["x"]) for s in samples]),
            "label": torch.tensor([s["label"] for s in samples]),
            "name": [s["name"] for s in samples]}  # fmt: skip
