"""Samplers that give the same list or array again and again, and fill it anew each time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import minato

SIZE, BATCH = 48, 3
BAD = (7, 20, 21, 40)


class Reuses(torch.utils.data.Sampler[Any]):
    """Batches of samples."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        batch: Any = {"list": [0] * BATCH, "array": np.zeros(BATCH, int),
                      "tensor": torch.zeros(BATCH, dtype=torch.int64)}[self.kind]  # fmt: skip
        for first in range(0, SIZE, BATCH):
            for row in range(BATCH):
                batch[row] = first + row
            yield batch
        for row in range(BATCH):
            batch[row] = -1

    def __len__(self) -> int:
        return SIZE // BATCH


class Some(torch.utils.data.Dataset[Any]):
    """Some of its samples cannot be made."""

    def __init__(self, bad: tuple[int, ...]) -> None:
        self.bad = bad

    def __getitem__(self, index: Any) -> int:
        if int(index) in self.bad:
            raise ValueError(f"sample {int(index)} is corrupt")
        return int(index)


MODES = pytest.mark.parametrize("options", [
    dict(num_workers=0),
    dict(num_workers=2),
    dict(num_workers=2, worker_type="thread", seed_per_sample=False),
    dict(num_workers=2, scheduling="static"),
    dict(num_workers=2, collate_fn=torch.utils.data.default_convert),
], ids=["inline", "balanced", "threads", "static", "collate"])  # fmt: skip
KINDS = pytest.mark.parametrize("kind", ["list", "array", "tensor"])


def as_lists(loader: Any) -> list[list[int]]:
    return [[int(i) for i in batch] for batch in loader]


@MODES
@KINDS
def test_errors_name_the_sample(kind: str, options: dict[str, Any]) -> None:
    loader = minato.DataLoader(Some((20,)), batch_sampler=Reuses(kind), **options)
    with pytest.raises(ValueError, match="sample 20 is corrupt") as raised:
        list(loader)
    told = str(raised.value) + "".join(getattr(raised.value, "__notes__", []))
    if options["num_workers"]:
        assert "batch 6" in told and "20" in told.split("minato: ")[1]


@MODES
@KINDS
def test_what_is_left_out_is_named(kind: str, options: dict[str, Any]) -> None:
    loader = minato.DataLoader(
        Some(BAD), batch_sampler=Reuses(kind), on_error="skip", max_errors=len(BAD), **options
    )
    assert sum(as_lists(loader), []) == [i for i in range(SIZE) if i not in BAD]
    if options["num_workers"]:
        assert [int(i) for i, *_ in loader.stats()["failed"]["latest"]] == list(BAD)


@MODES
@KINDS
def test_others_stand_in_for_samples_of_the_epoch(kind: str, options: dict[str, Any]) -> None:
    """Batches are small: what stands in may be of those before and after."""
    loader = minato.DataLoader(
        Some(BAD), batch_sampler=Reuses(kind), on_error="replace", max_errors=len(BAD), **options
    )
    got = as_lists(loader)
    assert [len(batch) for batch in got] == [BATCH] * (SIZE // BATCH)
    for number, batch in enumerate(got):
        asked = range(BATCH * number, BATCH * (number + 1))
        for row, index in zip(asked, batch):
            assert index == row or row in BAD and 0 <= index < SIZE and index not in BAD
