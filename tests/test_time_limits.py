"""When optional work may begin and go on."""

from __future__ import annotations

import pytest

from minato import time_limits
from minato.time_limits import TimeShare


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [1000]
    monkeypatch.setattr(time_limits.time, "perf_counter_ns", lambda: now[0])
    return now


def work(share: TimeShare, clock: list[int], takes: int) -> bool:
    """Works, if that is allowed."""
    allowed = share.allows()
    if allowed:
        with share:
            clock[0] += takes
    return allowed


def test_work_waits_until_its_share_is_reached(clock: list[int]) -> None:
    share = TimeShare(0.1)
    assert work(share, clock, 100) and not share.allows()
    clock[0] += 899
    assert not share.allows()
    clock[0] += 1
    assert work(share, clock, 50) and not share.allows()


def test_first_allowance_is_granted_at_once(clock: list[int]) -> None:
    share = TimeShare(0.01, first_ns=100)
    assert [work(share, clock, 40) for _ in range(4)] == [True, True, True, False]
    clock[0] = 1000 + 2000  # 20 more, by its share
    assert share.allows()


def test_running_work_is_counted_already(clock: list[int]) -> None:
    share = TimeShare(0.0, first_ns=100)
    with share:
        clock[0] += 100
        assert share.allows()
        clock[0] += 1
        assert not share.allows()


def test_cheap_work_is_always_allowed(clock: list[int]) -> None:
    share = TimeShare(0.0, cheap_ns=10)
    assert [work(share, clock, takes) for takes in (9, 9, 9, 10, 1)] == [True] * 4 + [False]


def test_work_that_raises_is_counted(clock: list[int]) -> None:
    share = TimeShare(0.5)
    with pytest.raises(ZeroDivisionError), share:
        clock[0] += 100
        raise ZeroDivisionError
    assert share.allows() is False
    clock[0] += 100
    assert share.allows() is True
