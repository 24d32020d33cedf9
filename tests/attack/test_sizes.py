"""Batches of any size are made, or an error in their place says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minato
from minato.iterators import iterator as _balanced

from .support import PATIENCE


class Wide(torch.utils.data.Dataset):
    """Rows of 128 KiB."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((128, 1024), index % 251, dtype=torch.uint8)


class Numbers(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def options(monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """Sets options of every engine from now on."""
    own = _balanced.BalancedIterator._engine_options
    monkeypatch.setattr(
        _balanced.BalancedIterator, "_engine_options", lambda *given: {**own(*given), **more}
    )


def test_ready_batches_larger_than_default_engine_capacity() -> None:
    made = minato.DataLoader(
        Numbers(16600), 16500, num_workers=2, batching="ready", in_order=False, timeout=PATIENCE
    )
    for _epoch in range(2):  # rows have a form, and samples keep descriptors, in the second
        first, last = made
        assert (len(first), len(last)) == (16500, 100)
        assert sorted(torch.cat([first, last]).tolist()) == list(range(16600))


def test_ready_batches_with_few_descriptors(monkeypatch) -> None:
    """One batch is cut into as many tasks as there are for it."""
    options(monkeypatch, blocks=0)
    made = minato.DataLoader(
        Numbers(18100), 4500, num_workers=2, batching="ready", in_order=False, timeout=PATIENCE
    )
    for _epoch in range(2):
        got = list(made)
        assert [len(batch) for batch in got] == [4500] * 4 + [100]
        assert sorted(torch.cat(got).tolist()) == list(range(18100))


@pytest.mark.parametrize("in_order", [True, False])
def test_batch_larger_than_arena_is_an_error(monkeypatch, in_order: bool) -> None:
    """As under a limit on address space. The neighbouring batches are complete."""
    options(monkeypatch, arena_bytes=16 << 20)
    wanted = [[0, 1], [2, 3], list(range(200)), [4, 5], [6, 7]]
    made = minato.DataLoader(
        Wide(), batch_sampler=wanted, num_workers=2, timeout=PATIENCE, in_order=in_order,
        persistent_workers=True,
    )
    for epoch in range(2):  # rows have a form from the second on
        iterator, got, errors = iter(made), [], []
        for _ in wanted:
            try:
                got.append(next(iterator)[:, 0, 0].tolist())
            except MemoryError as error:
                errors.append(str(error))
        assert sorted(got) == sorted(b for b in wanted if len(b) == 2)
        (text,) = errors
        assert "`ulimit -v`" in text and "`ulimit -f`" in text
        if epoch == 1:
            assert "batch 2 cannot be made: it needs 26214400 bytes" in text
            assert "has 16777216" in text
        with pytest.raises(StopIteration):
            next(iterator)


def test_batch_with_too_large_indices_is_an_error(monkeypatch) -> None:
    options(monkeypatch, arena_bytes=16 << 20)

    class Long(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: Any) -> int:
            return len(index)

    wanted = [["a"], ["b" * (65 << 20)], ["cc"]]
    made = iter(minato.DataLoader(Long(), batch_sampler=wanted, num_workers=1, timeout=PATIENCE))
    assert next(made).tolist() == [1]
    with pytest.raises(MemoryError, match="batch 1 cannot be made.*indices"):
        next(made)
    assert next(made).tolist() == [2]
