"""From the engine to a batch, with messages as workers write them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minato._core import Envelope
from minato.epoch_progress import Progress
from minato.errors import Failure
from minato.iterators.collating import CollatesHere
from minato.iterators.foreign_threads import FirstSamples
from minato.iterators.planner import Planner
from minato.iterators.ready import ReadyReceiver, UnitPlanner
from minato.iterators.receiver import Completions, Receiver
from minato.transport import messages
from minato.transport.rows_or_whole import SampleTransport
from minato.workers.answers import BATCH, ERROR, FAILED, OK, REFUSED, SAMPLE, SAMPLES

from .parts import Block, Engine, Loader, planner_of


def receiver_of(
    engine: Engine, loader: Any, whole: bool = False, ready: bool = False
) -> Receiver:
    planner = planner_of(loader, engine, kind=UnitPlanner if ready else Planner)
    supervisor: Any = SimpleNamespace(
        deaths_reported=0, late=None, watch=SimpleNamespace(look=lambda engine: None),
        living=lambda: True, timeout=0, trace=None, check=lambda done: None,
        under_way=lambda indices_of: "", first=FirstSamples(False),
    )  # fmt: skip
    shape = SampleTransport()
    shape.whole = whole
    completions = Completions(supervisor, planner)
    collates = CollatesHere(loader, planner.position, shape)
    if isinstance(planner, UnitPlanner):
        receiver: Receiver = ReadyReceiver(completions, planner, collates)
    else:
        receiver = Receiver(completions, planner, collates, forgets=True)
    receiver.engine = completions.engine = receiver.collates.engine = engine  # type: ignore
    return receiver


def done(engine: Engine, sequence: int, answer: Any, kind: int) -> None:
    """A worker is done with a batch."""
    block = Block(sequence)
    engine.kinds[block] = kind
    data, buffers = messages.dumps(answer)
    engine.data[block] = [Envelope((0, 0, 2, data, [bytearray(b) for b in buffers]))]
    engine.ready.append(block)


def test_whole_batch_of_worker_is_received() -> None:
    receiver = receiver_of(engine := Engine(), Loader(20), whole=True)
    done(engine, 0, (OK, torch.arange(3)), BATCH)
    got = receiver.receive()
    assert got is not None and got[0].number == 0 and got[1].tolist() == [0, 1, 2]
    assert engine.retired == [Block(0)] and 0 not in receiver.planner.planned


def test_samples_are_collated_in_trainer() -> None:
    def joined(samples: list[Any]) -> Any:
        return ["here", *samples]

    receiver = receiver_of(engine := Engine(), Loader(20, collate_fn=joined), whole=True)
    done(engine, 0, [(0, SAMPLE, "a"), (1, SAMPLE, "b")], SAMPLES)
    got = receiver.receive()
    assert got is not None and got[1] == ["here", "a", "b"]


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


def test_first_error_by_row_fails_the_batch() -> None:
    receiver = receiver_of(engine := Engine(), Loader(20))
    wrong = Failure.of(KeyError("wrong"), "in DataLoader worker process 1")
    done(engine, 0, [(0, SAMPLE, 1), (1, ERROR, wrong)], SAMPLES)
    got = receiver.receive()
    assert got is not None and isinstance(got[1], Failure)
    assert got[1].note == "minato: sample index 1, position 1 of batch 0"


@pytest.mark.parametrize("elsewhere", [True, False])
def test_unpicklable_samples_are_collated_by_worker(elsewhere: bool) -> None:
    receiver = receiver_of(engine := Engine(), Loader(20))
    planner = receiver.planner
    planner._making = planner._making._replace(native=not elsewhere)
    failure = Failure.of(TypeError("no pickle"), "in DataLoader worker process 1")
    done(engine, 0, [(0, REFUSED, failure)], SAMPLES)
    got = receiver.receive(wait=False)
    if not elsewhere:
        assert got is not None and got[0].number == 0 and isinstance(got[1], Failure)
        assert engine.retired == [Block(0)]
        return
    assert got is None and not engine.retired and planner.position.progress.count == 0
    done(engine, 4, (OK, "whole"), BATCH)
    got = receiver.receive()
    assert got is not None and (got[0].number, got[1]) == (0, "whole")
    assert engine.retired == [Block(4)] and planner.drawn_ahead() == 3


def test_an_error_of_a_whole_batch_names_it() -> None:
    receiver = receiver_of(engine := Engine(), Loader(20), whole=True)
    wrong = Failure.of(KeyError("wrong"), "in DataLoader worker process 1")
    done(engine, 0, (FAILED, wrong), BATCH)
    got = receiver.receive()
    assert got is not None and got[1].note == "minato: batch 0, sample indices [0, 1]"


def test_failing_collate_fn_fails_the_batch() -> None:
    def fails(samples: list[Any]) -> Any:
        raise ValueError("uneven")

    receiver = receiver_of(engine := Engine(), Loader(20, collate_fn=fails), whole=True)
    done(engine, 0, [(0, SAMPLE, 1), (1, SAMPLE, 2)], SAMPLES)
    got = receiver.receive()
    assert got is not None
    with pytest.raises(ValueError, match="uneven"):
        got[1].reraise()


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


def test_batch_of_next_epoch_is_kept_back() -> None:
    receiver = receiver_of(engine := Engine(), Loader(20), whole=True)
    planner: Any = receiver.planner
    planner.planned[1].progress = Progress(epoch=1)
    planner.next_epoch.early = SimpleNamespace(progress=planner.planned[1].progress, ends=1)
    done(engine, 1, (OK, "next"), BATCH)
    done(engine, 0, (OK, "this"), BATCH)
    got = receiver.receive()
    assert got is not None and got[1] == "this" and len(receiver.kept_back) == 1
    planner.next_epoch.early = None
    got = receiver.receive()
    assert got is not None and got[1] == "next"


def test_receive_without_wait_returns_at_once() -> None:
    receiver = receiver_of(Engine(), Loader(20))
    assert receiver.receive(wait=False) is None
    assert not receiver.at_end() and receiver.more()


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


def test_a_timeout_is_raised_as_torch_does() -> None:
    receiver = receiver_of(Engine(), Loader(20))
    receiver.completions.supervisor.timeout = 3
    with pytest.raises(RuntimeError, match="DataLoader timed out after 3 seconds"):
        receiver.receive()
