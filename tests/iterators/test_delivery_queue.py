"""Batches received early, without an engine."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from minato.iterators.receiver import DeliveryQueue

from .parts import Engine


class Numbers:
    """Numbers that are complete up to `done`."""

    def __init__(self, done: int) -> None:
        self.done, self.at = done, 0

    def receive(self, wait: bool = True) -> tuple[str, Any] | None:
        if not wait and self.at >= self.done:
            return None
        self.at += 1
        return f"batch {self.at - 1}", self.at - 1

    def more(self) -> bool:
        return True

    def named(self, what: str) -> str:
        return what


def delivery_queue_of(receiver: Any) -> DeliveryQueue:
    supervisor: Any = SimpleNamespace(trace=None, timeout=0, living=lambda: True)
    at_a_time: Any = SimpleNamespace(most=lambda: 4)
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
