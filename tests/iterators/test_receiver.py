"""From the engine to a batch, with messages as workers write them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minato._records import Envelope
from minato.iterators.receiver import CollatesHere
from minato.iterators.supervisor import FirstSamples
from minato.iterators.planner import Planner
from minato.iterators.ready import ReadyReceiver, UnitPlanner
from minato.iterators.receiver import Receiver
from minato.transport import messages
from minato.transport.rows_or_whole import SampleTransport
from minato.workers.answers import SAMPLE, SAMPLES

from .parts import Block, Engine, Loader, planner_of


def receiver_of(
    engine: Engine, loader: Any, whole: bool = False, ready: bool = False
) -> Receiver:
    planner = planner_of(loader, engine, kind=UnitPlanner if ready else Planner)
    supervisor: Any = SimpleNamespace(
        late=None, watch=SimpleNamespace(look=lambda engine: None),
        living=lambda: True, timeout=0, warn_of_deaths=lambda: None, trace=None, check=lambda done: None,
        under_way=lambda indices_of: "", first=FirstSamples(False),
    )  # fmt: skip
    shape = SampleTransport()
    shape.whole = whole
    collates = CollatesHere(planner.engine, loader, planner.position, shape)
    kind: Any = ReadyReceiver if ready else Receiver
    receiver: Receiver = kind(supervisor, planner, collates, forgets=True)
    return receiver


def done(engine: Engine, sequence: int, answer: Any, kind: int) -> None:
    """A worker is done with a batch."""
    block = Block(sequence, kind=kind)
    data, buffers = messages.dumps(answer)
    engine.data[block] = [Envelope(0, 0, 2, data, [bytearray(b) for b in buffers])]
    engine.ready.append(block)


def test_collate_fn_in_trainer_sees_worker_info() -> None:
    seen: list[Any] = []

    def look(samples: list[Any]) -> Any:
        seen.append(torch.utils.data.get_worker_info())
        return samples

    loader = Loader(20, collate_fn=look)
    receiver = receiver_of(engine := Engine(), loader, whole=True)
    done(engine, 0, [(0, SAMPLE, 1), (1, SAMPLE, 2)], SAMPLES)
    receiver.receive()
    assert (seen[0].id, seen[0].num_workers, seen[0].seed) == (0, 2, 7)
    assert seen[0].dataset is loader.dataset
    assert torch.utils.data.get_worker_info() is None


def cannot_be_read(error: BaseException) -> tuple[Receiver, Engine]:
    """A receiver of rows that raises for the first batch, and has a second."""
    receiver = receiver_of(engine := Engine(), Loader(20), whole=True)
    receiver.shape.layout = SimpleNamespace(core=None)  # type: ignore[assignment]
    answers: Any = iter([error, "second"])

    def take(block: Block, layout: Any) -> Any:
        engine.retired.append(block)
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    engine.take = take  # type: ignore[attr-defined]
    engine.ready.extend([Block(0), Block(1)])
    return receiver, engine


def test_unreadable_rows_fail_the_batch() -> None:
    receiver, engine = cannot_be_read(MemoryError("no more"))
    got = receiver.receive()
    assert got is not None and got[0].number == 0
    with pytest.raises(MemoryError, match="no more"):
        got[1].reraise()
    got = receiver.receive()
    assert got is not None and got[0].number == 1 and got[1] == "second"
    assert engine.retired == [Block(0), Block(1)]


def test_batch_lost_to_interrupt_counts_as_delivered() -> None:
    receiver, engine = cannot_be_read(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        receiver.receive()
    assert receiver.planner.position.progress.count == 1
    got = receiver.receive()
    assert got is not None and got[1] == "second" and engine.retired == [Block(0), Block(1)]


def test_batch_left_by_interrupt_is_received_again() -> None:
    receiver, engine = cannot_be_read(KeyboardInterrupt())
    take = engine.take  # type: ignore[attr-defined]

    def interrupted(block: Block, layout: Any) -> Any:
        engine.take = take  # type: ignore[attr-defined]
        engine.ready.appendleft(block)
        raise KeyboardInterrupt

    engine.take = interrupted  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        receiver.receive()
    assert receiver.planner.position.progress.count == 0 and 0 in receiver.planner.planned


@pytest.mark.parametrize("ready", [False, True])
def test_the_end_is_not_before_the_samplers(ready: bool) -> None:
    """If nothing is planned although there is more, the epoch must not simply end."""
    receiver = receiver_of(engine := Engine(room=0), Loader(2), ready=ready)
    with pytest.raises(RuntimeError, match="internal error: nothing is planned after 0 of"):
        receiver.at_end()
    engine.room = 1
    receiver.planner.fill()
    assert receiver.planner.draw.exhausted and not receiver.at_end()
    empty = receiver_of(Engine(), Loader(0), ready=ready)
    assert empty.at_end()
