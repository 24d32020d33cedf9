"""Positions of iterators, tested without an iterator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minato
from minato.iterators.across_iterators import memo_of
from minato.iterators.position import Position
from minato.state import opened, state_of

from .parts import Loader, position_of


def test_positions_begin_where_a_state_says() -> None:
    loader = Loader(20)
    first = position_of(loader)
    assert (first.epoch, first.base_seed, first.progress.head) == (0, 7, 0)
    first.memo.resume = {
        "base_seed": 9, "epoch": 3, "generators": {}, "delivered": 4, "delivered_beyond": [6],
        "delivered_by_worker": None, "begun": True,
    }  # fmt: skip
    second = position_of(loader)
    assert (second.epoch, second.progress.head, second.progress.beyond) == (3, 4, {6})
    assert second.base_seed == 9 and second.start is None


def test_state_in_mid_epoch_restores_the_epoch() -> None:
    loader, again = Loader(20), Loader(20)
    first = position_of(loader)
    for number in (0, 1, 3):
        first.progress.delivered(number)
    again_memo = memo_of(again)
    again_memo.resume = opened(state_of(loader, first.memo), again)
    second = position_of(again)
    assert (second.base_seed, second.progress.head, second.progress.beyond) == (7, 2, {3})
    assert second.progress.count == 3


def test_seed_from_state_draws_nothing() -> None:
    loader = Loader(20)
    memo = memo_of(loader)
    memo.resume = opened(state_of(loader, position_of(loader).memo), loader)
    position, before = Position(loader, memo), torch.get_rng_state()
    with position.taking_up():
        torch.randn(3)  # torch draws a base seed, which is not used
    assert torch.equal(torch.get_rng_state(), before) and position.base_seed == 7


def test_an_epoch_that_follows_counts_on() -> None:
    loader = Loader(20)
    position = position_of(loader)
    position.progress.delivered(0)
    with position.epoch_begins(loader, first=False):
        assert position.progress.generators is not None
    assert (position.epoch, position.progress.count) == (1, 0)
    assert position.memo.progress is position.progress and position.base_seed == 7


def test_adopted_early_epoch_becomes_current() -> None:
    position = position_of(Loader(20))
    ahead = position.open_next()
    assert ahead.early and ahead.epoch == 1 and position.progress.epoch == 0
    position.adopt(ahead)
    assert position.progress is ahead and not ahead.early


@pytest.mark.parametrize("seed, sent", [(5, 5), (-1, 2**64 - 1)])
def test_the_engine_takes_seeds_without_a_sign(seed: int, sent: int) -> None:
    position = position_of(Loader(20))
    position.base_seed = seed
    assert position.seed == sent


def test_iterable_batches_are_counted_by_worker() -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(4))

    loader: Any = minato.DataLoader(Stream(), num_workers=2)
    progress = position_of(loader).progress
    progress.delivered(0, worker=1)
    assert progress.by_worker == [0, 1] and progress.count == 1
