"""States of generators as each epoch captures them, and as a state_dict() holds them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import minato
from minato.seeding import order_generators
from minato.seeding.order_generators import all_global, portable, put_global


def drawn() -> list[float]:
    return [random.gauss(0, 1), random.random(), np.random.normal(), np.random.random(),
            torch.rand(()).item()]  # fmt: skip


#: what programs do with NumPy's generator; a Gaussian leaves a second one that waits
BEFORE: dict[str, Callable[[], Any]] = {
    "seeded": lambda: np.random.seed(3),
    "one Gaussian": np.random.normal,
    "two Gaussians": lambda: np.random.normal(size=2),
    "a number": np.random.random,
    "nothing": lambda: None,
}


@pytest.mark.parametrize("second", BEFORE)
@pytest.mark.parametrize("first", BEFORE)
def test_captured_states_do_not_change_later(first: str, second: str) -> None:
    np.random.seed(5)
    for name in (first, second):
        BEFORE[name]()
        states = all_global()
        want = drawn()
        put_global(states)
        assert drawn() == want
        put_global(states)


def test_portable_json_restores_the_same_state() -> None:
    random.gauss(0, 1)
    np.random.normal()
    states = all_global()
    want = drawn()
    texts = {role: portable(data) for role, data in states.items()}
    assert len(json.loads(texts["python"])) == 3 and len(json.loads(texts["numpy"])) == 4
    assert texts["torch"] == states["torch"]
    assert {role: portable(data) for role, data in texts.items()} == texts
    put_global(texts)
    assert drawn() == want


class Shuffled(torch.utils.data.Sampler[int]):
    def __init__(self) -> None:
        self.rng = random.Random(1)

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        return iter(self.rng.sample(range(4), 4))


def test_an_epoch_without_workers_makes_no_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """That took a millisecond of each."""
    loader: Any = minato.DataLoader([1.0] * 4, sampler=Shuffled())  # type: ignore[arg-type]
    list(loader)
    asked, get_state = [], np.random.get_state
    monkeypatch.setattr(order_generators, "json", None)
    monkeypatch.setattr(np.random, "get_state", lambda **o: asked.append(0) or get_state(**o))
    for _ in range(3):
        assert len(list(loader)) == 4
    assert len(asked) <= 1
