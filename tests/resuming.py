"""What tests of resuming share: states as a program saves them, and the rest of an epoch."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch


def seed(value: int) -> None:
    """Seeds every generator of the program."""
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Index, epoch, and draws from every global generator and its own. Some samples are unreadable."""

    def __init__(self, n: int, bad: frozenset[int] = frozenset()) -> None:
        self.n, self.bad, self.epoch, self.rng = n, bad, -1, np.random.default_rng(7)

    def __len__(self) -> int:
        return self.n

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.bad:
            raise LookupError(f"sample {index}")
        draws = [random.random(), np.random.rand(), float(torch.rand(())), self.rng.random()]
        return torch.tensor([index, self.epoch, *draws], dtype=torch.float64)


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def lists(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def take(iterator: Any, count: int) -> list[Any]:
    return [next(iterator).tolist() for _ in range(count)]


def check_rest(first: Any, again: Any, taken: int, epochs: int = 0, later: int = 0) -> list[Any]:
    """A loader gives the rest of an epoch of another one, and the same epochs after it.

    The first loader is interrupted after some epochs and batches. Returns all batches of that
    epoch: those before the interruption, and the rest.
    """
    for _ in range(epochs):
        lists(first)
    iterator = iter(first)
    begun = take(iterator, taken)
    state = through_json(first.state_dict())
    rest = lists(iterator)
    after = [lists(first) for _ in range(later)]
    again.load_state_dict(state)
    assert lists(again) == rest
    assert [lists(again) for _ in range(later)] == after
    return begun + rest
