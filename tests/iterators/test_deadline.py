"""A timeout counts the time that a wait takes, not that in which the program stood still."""

from __future__ import annotations

import math
import time

import pytest

from minato.time_limits import Deadline


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("seconds", [0.05, 1, 7.5, 600])
def test_a_wait_ends_when_its_time_is_over(clock: list[float], seconds: float) -> None:
    deadline, begin = Deadline(seconds), clock[0]
    with pytest.raises(RuntimeError, match=f"^DataLoader timed out after {seconds} seconds$"):
        while True:
            clock[0] += max(deadline.part(), 1e-6)
    assert clock[0] - begin == pytest.approx(seconds, abs=1e-5)


def test_parts_that_end_early_count_as_they_were(clock: list[float]) -> None:
    deadline = Deadline(10)
    for _ in range(99):
        assert 0 < deadline.part() <= 1
        clock[0] += 0.1
    clock[0] += 0.2
    with pytest.raises(RuntimeError):
        deadline.part()


def test_stopped_program_does_not_time_out(clock: list[float]) -> None:
    """Stopped for hours, several times; real waiting time still counts."""
    deadline, begin = Deadline(60), clock[0]
    for _ in range(5):
        deadline.part()
        clock[0] += 36_000
    slept = clock[0]
    with pytest.raises(RuntimeError):
        while True:
            clock[0] += max(deadline.part(), 1e-6)
    assert begin + 5 * 36_000 == slept and 45 < clock[0] - slept < 60


def test_zero_timeout_is_infinite(clock: list[float]) -> None:
    deadline = Deadline(0)
    for _ in range(3):
        assert deadline.part() == math.inf
        clock[0] += 1e9
