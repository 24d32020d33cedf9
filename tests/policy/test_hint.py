"""Costs predicted from a dataset's hints: which predictor serves, and how well."""

import math
import random
from typing import Any

import pytest

from minato import _core

HISTORY, SCALE, RATIO = 0, 1, 2
SAMPLES, EPOCHS = 32, 12
MS = 1_000_000


def taught(cost: Any, hint: Any, epochs: int = EPOCHS) -> Any:
    """A model that has seen epochs; cost(index, draw) in ns, hint(index, draw)."""
    model, draw = _core.CostModel(SAMPLES), random.Random(7)
    for _ in range(epochs):
        for index in range(SAMPLES):
            u = draw.random()
            model.observe(index, int(cost(index, u)), hint(index, u))
    return model


def drawn_cost(index: int, u: float) -> float:
    """Ten times as much for one draw in five, and more for later indices."""
    return (50 * MS if u < 0.2 else 5 * MS) * (1 + index / SAMPLES)


def error(model: Any, cost: Any, hint: Any) -> float:
    """Root mean square logarithm of cost over prediction, over new draws."""
    draw, squares = random.Random(8), []
    for index in range(SAMPLES):
        u = draw.random()
        squares.append(math.log(cost(index, u) / model.predict(index, hint(index, u))) ** 2)
    return math.sqrt(sum(squares) / len(squares))


def test_hint_of_the_draw_beats_history() -> None:
    model = taught(drawn_cost, lambda i, u: drawn_cost(i, u) / 1e9)
    assert model.summary()["by"] in (SCALE, RATIO)
    assert error(model, drawn_cost, lambda i, u: drawn_cost(i, u) / 1e9) < 0.01
    assert error(taught(drawn_cost, lambda *_: 1.0), drawn_cost, lambda *_: 1.0) > 0.5


@pytest.mark.parametrize("unit", [1e-12, 1e-3, 1.0, 1e9])
def test_scale_of_another_unit_is_learned(unit: float) -> None:
    hint = lambda i, u: drawn_cost(i, u) * unit  # noqa: E731
    model = taught(drawn_cost, hint)
    assert error(model, drawn_cost, hint) < 0.01
    assert model.summary()["hint_scale_ns"] == pytest.approx(1 / unit, rel=1e-3)


def test_ratio_of_an_index_corrects_its_hint() -> None:
    """A hint that knows the draw, and not what the index costs."""
    cost = lambda i, u: (50 * MS if u < 0.2 else 5 * MS) * (1 + 20 * (i % 2))  # noqa: E731
    hint = lambda i, u: 10.0 if u < 0.2 else 1.0  # noqa: E731
    model = taught(cost, hint)
    assert model.summary()["by"] == RATIO
    assert error(model, cost, hint) < 0.01


@pytest.mark.parametrize("hint", [
    lambda i, u: 3.0,
    lambda i, u: 1e15 / drawn_cost(i, 1.0),
    lambda i, u: 0.0,
    lambda i, u: 1.0 + 1000 * ((i * 7919) % 13 == 0),
], ids=["constant", "opposite", "zero", "noise"])  # fmt: skip
def test_hint_without_information_leaves_predictions_to_history(hint: Any) -> None:
    steady = lambda i, u: (2 + i) * MS  # noqa: E731
    model = taught(steady, hint)
    assert error(model, steady, hint) < 0.01


def test_first_hints_are_taken_for_seconds() -> None:
    model = _core.CostModel(SAMPLES)
    assert model.predict(0) == 0
    assert model.predict(0, 0.25) == pytest.approx(250 * MS, rel=1e-6)
    model.observe(1, 100 * MS, 0.2)  # twice as fast as the hint says
    assert model.predict(0, 0.25) == pytest.approx(125 * MS, rel=1e-6)


def test_zero_hints_are_predicted_by_their_own_mean() -> None:
    cost = lambda i, u: 80 * MS if u < 0.2 else 2 * MS  # noqa: E731
    model = taught(cost, lambda i, u: float(u < 0.2))
    assert model.predict(0, 0.0) == pytest.approx(2 * MS, rel=1e-3)
    assert model.predict(0, 1.0) == pytest.approx(80 * MS, rel=1e-3)


def test_indices_outside_the_dataset_have_the_scale() -> None:
    model = taught(drawn_cost, lambda i, u: drawn_cost(i, u) / 1e9)
    for index in (-1, SAMPLES, 2**62):
        assert model.predict(index, 0.02) == pytest.approx(20 * MS, rel=0.01)
        model.observe(index, 20 * MS, 0.02)


def test_hints_beyond_any_time_are_bounded() -> None:
    model = _core.CostModel(2)
    model.observe(0, 1, 3e38)
    model.observe(1, 2**63 - 1, 1e-38)
    assert 0 <= model.predict(0, 3e38) <= 10**15
    assert 0 <= model.predict(1, 3e38) <= 10**15


def test_samples_without_hints_keep_the_model_unchanged() -> None:
    model = taught(drawn_cost, lambda *_: -1.0)  # less than 0: none
    summary = model.summary()
    assert summary["hinted"] == 0 and summary["errors"] is None
