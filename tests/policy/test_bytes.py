"""Costs predicted from bytes and from history: which predictor serves, and how well."""

import math
import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from minato import _core

HISTORY, BYTES, BOTH = 0, 1, 2
SAMPLES = 400
MS, KIB = 1_000_000, 1024
#: index, bytes, random numbers -> ns
Cost = Callable[[int, int, random.Random], float]


def sizes_of(spread: float = 1.0) -> list[int]:
    draw = random.Random(3)
    return [round(100 * KIB * draw.lognormvariate(0, spread)) for _ in range(SAMPLES)]


def told(sizes: list[int]) -> Any:
    model = _core.CostModel(SAMPLES)
    model.tell_bytes(array("q", range(SAMPLES)), array("q", sizes))
    return model


def run(cost: Cost, epochs: float, sizes: list[int] | None = None, model: Any = None) -> Any:
    """A model that has seen epochs, in shuffled orders."""
    sizes = sizes or sizes_of()
    model, draw = model or told(sizes), random.Random(7)
    for epoch in range(math.ceil(epochs)):
        order = draw.sample(range(SAMPLES), round(SAMPLES * min(1.0, epochs - epoch)))
        for index in order:
            model.observe(index, int(cost(index, sizes[index], draw)))
    return model


def error(model: Any, cost: Cost, sizes: list[int]) -> float:
    """Root mean square logarithm of cost over prediction, over new draws."""
    draw = random.Random(8)
    pairs = [(model.predict(i), cost(i, size, draw)) for i, size in enumerate(sizes)]
    return math.sqrt(sum(math.log(ns / said) ** 2 for said, ns in pairs) / len(pairs))


def of_bytes(index: int, size: int, draw: random.Random) -> float:
    """Grows with bytes; a sample costs 1 ms besides, and each epoch draws a factor."""
    return (1 * MS + 50 * size) * draw.lognormvariate(0, 0.5)


def steady(index: int, size: int, draw: random.Random) -> float:
    """Of the index alone."""
    return (2 + index * 7919 % 50) * MS


def steady_by_bytes(index: int, size: int, draw: random.Random) -> float:
    """Grows with bytes, by a factor of the index."""
    return 50 * size * (1 + index % 3)


def drawn(index: int, size: int, draw: random.Random) -> float:
    return 50 * MS if draw.random() < 0.1 else 5 * MS


def test_bytes_predict_new_indices_in_first_epoch() -> None:
    sizes = sizes_of()
    model = run(of_bytes, 0.25, sizes)
    new = [i for i in range(SAMPLES) if i not in known(model)]
    said = [model.predict(i) for i in new]
    actual = [1 * MS + 50 * sizes[i] for i in new]
    assert len(new) == SAMPLES * 3 // 4
    assert correlation(said, actual) > 0.98
    assert model.summary()["bytes_correlations"][BYTES] > 0.8


def known(model: Any) -> set[int]:
    return set(array("q", model.save()[0]))


def correlation(a: list[Any], b: list[Any]) -> float:
    logs = [[math.log(x) for x in values] for values in (a, b)]
    (ma, mb), n = [sum(v) / len(v) for v in logs], len(a)
    aa, bb = (sum((x - m) ** 2 for x in v) / n for v, m in zip(logs, (ma, mb), strict=True))
    ab = sum((x - ma) * (y - mb) for x, y in zip(*logs, strict=True)) / n
    return ab / math.sqrt(aa * bb)


@pytest.mark.parametrize("epochs", [2, 4])
def test_mix_beats_bytes_and_history_alone(epochs: int) -> None:
    """Each index has a factor that its bytes do not tell, and each epoch draws another one."""

    def cost(index: int, size: int, draw: random.Random) -> float:
        own = random.Random(index).lognormvariate(0, 0.4)
        return 50 * size * own * draw.lognormvariate(0, 0.4)

    sizes = sizes_of()
    model, alone = run(cost, epochs, sizes), run(cost, epochs, sizes, _core.CostModel(SAMPLES))
    summary = model.summary()
    assert summary["bytes_by"] == BOTH
    by_history, by_bytes, by_both = summary["bytes_errors"]
    assert by_both < 0.95 * min(by_history, by_bytes)
    assert error(model, cost, sizes) < 0.95 * error(alone, cost, sizes)
    correlations = summary["bytes_correlations"]
    assert correlations[BOTH] > max(correlations[HISTORY], correlations[BYTES])


@pytest.mark.parametrize("cost", [steady, steady_by_bytes, drawn])
@pytest.mark.parametrize("spread", [0.0, 1.0], ids=["equal", "uneven"])
def test_bytes_never_make_later_predictions_worse(cost: Cost, spread: float) -> None:
    sizes = sizes_of(spread)
    alone = error(run(cost, 3, sizes, _core.CostModel(SAMPLES)), cost, sizes)
    assert error(run(cost, 3, sizes), cost, sizes) <= max(1.02 * alone, 0.01)


@pytest.mark.parametrize("cost", [steady, drawn], ids=["steady", "drawn"])
def test_unrelated_bytes_leave_new_indices_to_mean(cost: Cost) -> None:
    model = run(cost, 0.5)
    summary = model.summary()
    assert summary["sized"] == SAMPLES and summary["bytes_by"] == HISTORY
    new = next(i for i in range(SAMPLES) if i not in known(model))
    assert model.predict(new) == pytest.approx(summary["mean_ns"], rel=1e-6)


def test_steady_history_is_used_unchanged() -> None:
    model = run(steady_by_bytes, 3)
    assert model.summary()["bytes_by"] == HISTORY
    sizes = sizes_of()
    assert [model.predict(i) for i in range(SAMPLES)] == pytest.approx(
        [steady_by_bytes(i, sizes[i], random.Random()) for i in range(SAMPLES)], rel=1e-6)


def test_bytes_follow_a_machine_that_slows_down() -> None:
    sizes = sizes_of()
    model = run(of_bytes, 1, sizes)
    slower = lambda i, size, draw: 3 * of_bytes(i, size, draw)  # noqa: E731
    alone = run(of_bytes, 1, sizes, _core.CostModel(SAMPLES))
    for each in (model, alone):
        run(slower, 1, sizes, each)
    assert error(model, slower, sizes) < 0.8 * error(alone, slower, sizes)


def test_bytes_told_after_history_are_fitted_at_once() -> None:
    """As after a resume: the state holds costs, and the files are looked up again."""
    sizes = sizes_of()
    costs = run(of_bytes, 0.5, sizes, _core.CostModel(SAMPLES))
    model = _core.CostModel(SAMPLES)
    model.load(*costs.save())
    model.tell_bytes(array("q", range(SAMPLES)), array("q", sizes))
    assert model.summary()["bytes_by"] == BOTH
    new = [i for i in range(SAMPLES) if i not in known(model)]
    assert correlation([model.predict(i) for i in new], [1 * MS + 50 * sizes[i] for i in new]) > 0.98
    for i in known(model):
        assert model.predict(i) == costs.predict(i)  # history, until both were compared


def test_unknown_bytes_leave_predictions_to_history() -> None:
    sizes = sizes_of()
    model = _core.CostModel(SAMPLES)
    few = range(0, SAMPLES, 2)
    model.tell_bytes(array("q", few), array("q", [sizes[i] for i in few]))
    model.tell_bytes(array("q", range(1, SAMPLES, 2)), array("q", [0, 1] * (SAMPLES // 4)))
    assert model.summary()["sized"] == len(few)
    for i in (*few, 1, 3):
        model.observe(i, 50 * sizes[i])
    assert model.predict(1) == pytest.approx(50 * sizes[1], rel=1e-6)
    assert model.predict(5) == pytest.approx(model.summary()["mean_ns"], rel=1e-6)


@pytest.mark.parametrize("wall", [0, 1, 2**62, -5])
def test_extreme_bytes_and_costs_are_bounded(wall: int) -> None:
    model = _core.CostModel(4)
    extremes = [2**63 - 1, 2, -(2**63), 0]
    model.tell_bytes(array("q", range(4)), array("q", extremes))
    model.tell_bytes(array("q", [-1, 4, 2**62]), array("q", [10, 10, 10]))
    for k in range(200):
        model.observe(k % 4, wall)
        model.observe(0, 2**62 if k % 2 else 3)
    assert all(0 <= model.predict(i) <= 10**15 for i in range(-1, 6))


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        _core.CostModel(4).tell_bytes(array("q", [1, 2]), array("q", [5]))
