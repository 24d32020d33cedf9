"""Batches received early, without an engine."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from minato.iterators.receiver import SHORT_STEP_NS, DeliveryQueue

from .parts import Engine


class Numbers:
    """Numbers that are complete up to `done`; some cannot be received."""

    def __init__(self, done: int, wrong: int = -1) -> None:
        self.done, self.wrong, self.at = done, wrong, 0

    def receive(self, wait: bool = True) -> tuple[str, Any] | None:
        if not wait and self.at >= self.done:
            return None
        self.at += 1
        if self.at - 1 == self.wrong:
            raise ValueError("wrong")
        return f"batch {self.at - 1}", self.at - 1

    def more(self) -> bool:
        return True

    def named(self, what: str) -> str:
        return what


def delivery_queue_of(receiver: Any, most: int = 4, living: bool = True) -> DeliveryQueue:
    supervisor: Any = SimpleNamespace(trace=None, timeout=0, living=lambda: living)
    at_a_time: Any = SimpleNamespace(most=lambda: most)
    engine: Any = Engine()
    return DeliveryQueue(engine, supervisor, receiver, deque(), at_a_time)


@pytest.mark.parametrize("at", ["wait_begins", "wait_ends"])
def test_interrupted_wait_ends_at_next_call(at: str) -> None:
    """The engine counts batches taken during one wait as prefetched, and makes no more than a
    window of them."""
    delivery_queue = delivery_queue_of(Numbers(done=0))
    engine: Any = delivery_queue.engine
    usual = getattr(engine, at)

    def interrupted(*told: Any) -> Any:
        setattr(engine, at, usual)
        raise KeyboardInterrupt

    setattr(engine, at, interrupted)
    with pytest.raises(KeyboardInterrupt):
        delivery_queue.next()
    assert engine.waits_ended == []
    delivery_queue._at_a_time = SimpleNamespace(most=lambda: 1)  # type: ignore[assignment]
    delivery_queue.next()
    delivery_queue.next()
    assert engine.waits_ended == [at == "wait_ends"]


def test_batch_lost_to_interrupt_is_not_held() -> None:
    """It counts as prefetched until its turn."""
    delivery_queue = delivery_queue_of(receiver := Numbers(done=0))
    engine: Any = delivery_queue.engine
    usual = receiver.receive

    def interrupted(wait: bool = True) -> Any:
        raise KeyboardInterrupt

    receiver.receive = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        delivery_queue.next()
    receiver.receive = usual  # type: ignore[method-assign]
    delivery_queue.entries.append(["batch 0", 0])
    delivery_queue.next()
    assert engine.waits_ended == [False, True] and engine.waits_held == [False, False]


@pytest.mark.parametrize("step", [0, SHORT_STEP_NS])
def test_long_or_unknown_steps_receive_single_batches(step: int) -> None:
    delivery_queue = delivery_queue_of(receiver := Numbers(done=100))
    delivery_queue.engine.wait_begins = lambda: step  # type: ignore[method-assign]
    delivery_queue.next()
    assert receiver.at == 1


def test_stopped_supervisor_receives_single_batches() -> None:
    delivery_queue = delivery_queue_of(receiver := Numbers(done=100), living=False)
    assert delivery_queue.next() == ("batch 0", 0) and receiver.at == 1


def test_need_nothing_counts_plain_batches() -> None:
    delivery_queue = delivery_queue_of(Numbers(done=100, wrong=3))
    delivery_queue.next()
    assert len(delivery_queue.entries) == 3
    assert delivery_queue.need_nothing(10) == 2 and delivery_queue.need_nothing(1) == 1
