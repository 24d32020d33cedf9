"""Samples that kill workers: lost samples are named, however their batches are made."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

import minato

PATIENCE = 120.0


class Deadly(torch.utils.data.Dataset[int]):
    """Some samples end the process that loads them; the first waits for a gate."""

    def __init__(self, deadly: set[int], gate: Any = None) -> None:
        self.deadly, self.gate = deadly, gate

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> int:
        if index == 0 and self.gate is not None:
            assert self.gate.wait(PATIENCE)
        if index in self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def epoch(data: Deadly, **options: Any) -> tuple[list[int], list[list[int]]]:
    """(delivered samples, samples named by each error). The gate opens after half of the epoch."""
    options = {"batch_size": 8, "num_workers": 3, "timeout": PATIENCE, **options}
    it = iter(minato.DataLoader(data, **options))
    seen: list[int] = []
    lost: list[list[int]] = []
    while True:
        try:
            seen += [int(index) for index in next(it)]
        except minato.WorkerLost as error:
            named = error.index if isinstance(error.index, list) else [error.index]
            lost.append(named)
            assert all(str(index) in str(error) for index in named)
        except StopIteration:
            return seen, lost
        if data.gate is not None and len(seen) >= 16:
            data.gate.set()


READY = {"batching": "ready", "in_order": False}


@pytest.mark.parametrize("options", [{}, READY, {"collate_fn": list}], ids=str)
@pytest.mark.filterwarnings("ignore:DataLoader worker", "ignore:This DataLoader will create")
def test_error_names_all_lost_samples(options: dict[str, Any]) -> None:
    seen, lost = epoch(Deadly({18, 22}), **options)
    named = [index for one in lost for index in one]
    assert {18, 22} <= set(named) and len(named) == len(set(named)) and not set(named) & set(seen)
    assert len(seen) == len(set(seen)) == 48 - 8 * len(lost)
    if options.get("in_order", True):
        assert len(lost) == 1 and set(named) <= set(range(16, 24))


@pytest.mark.filterwarnings("ignore:DataLoader worker", "ignore:This DataLoader will create")
def test_errors_of_split_batch_name_their_own_samples() -> None:
    """The first sample is late, so batches are mixed: 1 to 8, 9 to 16, and the like."""
    gate = torch.multiprocessing.get_context("fork").Event()
    seen, lost = epoch(Deadly({8, 12}, gate), **READY)
    named = [index for one in lost for index in one]
    assert {8, 12} <= set(named) and len(named) == len(set(named))
    assert not set(named) & set(seen)
    assert len(seen) == len(set(seen)) == 48 - 8 * len(lost)
