"""Batches received early, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from minato.iterators.receiver import Receiver

from .parts import Engine, Loader, planner_of


class Numbers(Receiver):
    """Receives numbers in place of batches, four at a time; those below `done` are complete."""

    def __init__(self, done: int) -> None:
        loader: Any = Loader()
        planner = planner_of(loader, Engine())
        supervisor: Any = SimpleNamespace(
            trace=None, timeout=0, living=lambda: True, served=SimpleNamespace(watch=None)
        )
        super().__init__(loader, supervisor, planner, None)
        self.done, self.at, self.together = done, 0, 4

    def receive(self, wait: bool = True) -> tuple[str, Any] | None:
        if not wait and self.at >= self.done:
            return None
        self.at += 1
        return f"batch {self.at - 1}", self.at - 1

    def more(self) -> bool:
        return True

    def _most_at_a_time(self) -> int:
        return self.together


@pytest.mark.parametrize("at", ["wait_begins", "wait_ends"])
def test_interrupted_wait_ends_at_next_call(at: str) -> None:
    """The engine counts batches taken during one wait as prefetched, and makes no more than a
    window of them."""
    receiver = Numbers(done=0)
    engine: Any = receiver.engine
    usual = getattr(engine, at)

    def interrupted(*told: Any) -> Any:
        setattr(engine, at, usual)
        raise KeyboardInterrupt

    setattr(engine, at, interrupted)
    with pytest.raises(KeyboardInterrupt):
        receiver.next()
    assert engine.waits_ended == []
    receiver.together = 1
    receiver.next()
    receiver.next()
    assert engine.waits_ended == [at == "wait_ends"]


def test_batch_lost_to_interrupt_is_not_held() -> None:
    """It counts as prefetched until its turn."""
    receiver = Numbers(done=0)
    engine: Any = receiver.engine

    def interrupted(wait: bool = True) -> Any:
        raise KeyboardInterrupt

    receiver.receive = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        receiver.next()
    del receiver.receive
    receiver.planner.received.append(["batch 0", 0])
    receiver.next()
    assert engine.waits_ended == [False, True] and engine.waits_held == [False, False]
