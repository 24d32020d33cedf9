"""A timeout counts the time that a wait takes, not that in which the program stood still."""

from __future__ import annotations

import math
import time

import pytest

from minato._patience import Patience


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("seconds", [0.05, 1, 7.5, 600])
def test_a_wait_ends_when_its_time_is_over(clock: list[float], seconds: float) -> None:
    patience, begin = Patience(seconds), clock[0]
    with pytest.raises(RuntimeError, match=f"^DataLoader timed out after {seconds} seconds$"):
        while True:
            clock[0] += max(patience.part(), 1e-6)
    assert clock[0] - begin == pytest.approx(seconds, abs=1e-5)


def test_parts_that_end_early_count_as_they_were(clock: list[float]) -> None:
    patience = Patience(10)
    for _ in range(99):
        assert 0 < patience.part() <= 1
        clock[0] += 0.1
    clock[0] += 0.2
    with pytest.raises(RuntimeError):
        patience.part()


def test_a_program_that_stood_still_is_not_late(clock: list[float]) -> None:
    """For hours, several times; what has really been waited for still counts."""
    patience, begin = Patience(60), clock[0]
    for _ in range(5):
        patience.part()
        clock[0] += 36_000
    slept = clock[0]
    with pytest.raises(RuntimeError):
        while True:
            clock[0] += max(patience.part(), 1e-6)
    assert begin + 5 * 36_000 == slept and 45 < clock[0] - slept < 60


def test_no_timeout_has_no_end(clock: list[float]) -> None:
    patience = Patience(0)
    for _ in range(3):
        assert patience.part() == math.inf
        clock[0] += 1e9
