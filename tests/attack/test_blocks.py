"""Blocks: whatever Python passes instead of one, an engine reads no foreign memory."""

from __future__ import annotations

import gc
import pickle
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import minato
from minato import _core
from minato._records import Epoch
from minato.transport.layouts import Layout

MATRIX = torch.zeros(3, 5)
SMALL = Layout.prove(MATRIX, torch.stack([MATRIX] * 2), 2)
LARGE = torch.zeros(1 << 16)
OTHER = Layout.prove(LARGE, torch.stack([LARGE] * 2), 2)


@pytest.fixture
def engines() -> Iterator[list[Any]]:
    """Two engines without workers, and a closed one."""
    made = [_core.Engine(1, 0, False, window=2) for _ in range(3)]
    made[2].close()
    yield made
    for engine in made[:2]:
        engine.close()


def asks(engine: Any) -> list[Callable[[Any], object]]:
    """All methods that take a block."""
    return [
        engine.poll, engine.envelopes, engine.lost, engine.spans, engine.retire,
        lambda block: engine.written(block, 0),
        lambda block: engine.wait(block, 0.0),
        lambda block: engine.decode(block, SMALL.core, None),
        lambda block: engine.row(block, SMALL.core, 0, None),
        lambda block: engine.take(block, SMALL.core),
    ]  # fmt: skip


def place(engine: Any, value: float) -> Any:
    """A block of two rows."""
    return engine.place([torch.full((3, 5), value)] * 2, SMALL.core, [[], []])


def test_number_in_place_of_block_raises(engines: list[Any]) -> None:
    engine, chance = engines[0], random.Random(5)
    place(engine, 1.0)
    numbers = [0, 1, -1, (1 << 64) - 8, *range(4096, 1 << 16, 4096)]
    numbers += [chance.randrange(1 << chance.randrange(1, 65)) for _ in range(200)]
    for ask in asks(engine):
        for wrong in [*numbers, "block", object(), engine]:
            with pytest.raises(TypeError, match="Block"):
                ask(wrong)
    with pytest.raises(TypeError):
        _core.Block()


def test_number_that_closes_the_engine() -> None:
    engine = _core.Engine(1, 0, False, window=2)
    block = place(engine, 1.0)

    class Closing:
        def __index__(self) -> int:
            engine.close()
            return 2

    with pytest.raises(RuntimeError, match="closed"):
        engine.decode(block, SMALL.core, None, Closing())


def test_foreign_or_dead_block_is_refused(engines: list[Any]) -> None:
    """Any order of making, asking and freeing; freed memory is reused for new blocks."""
    chance = random.Random(7)
    living: list[list[tuple[Any, float]]] = [[], []]
    gone: list[tuple[int, Any]] = []
    for turn in range(600):
        mine = chance.randrange(2)
        engine, own = engines[mine], living[mine]
        what = chance.random()
        if what < 0.3 or not own:
            own.append((place(engine, float(turn)), float(turn)))
        elif what < 0.5:
            block, _ = own.pop(chance.randrange(len(own)))
            engine.retire(block)
            gone.append((mine, block))
        elif what < 0.7:
            block, value = chance.choice(own)
            assert torch.equal(
                engine.decode(block, SMALL.core, None), torch.full((2, 3, 5), value)
            )
            assert torch.equal(engine.row(block, SMALL.core, 1, None), torch.full((3, 5), value))
        else:
            others = [block for block, _ in living[1 - mine]] + [block for _, block in gone]
            if others:
                with pytest.raises(ValueError, match="not in flight|another engine"):
                    chance.choice(asks(engine)[:5])(chance.choice(others))
    for _, block in gone:
        for engine in engines[:2]:
            for ask in asks(engine):
                with pytest.raises(ValueError):
                    ask(block)
        with pytest.raises(RuntimeError, match="closed"):
            engines[2].poll(block)


def test_missing_objects_of_row_raise(engines: list[Any]) -> None:
    engine, wordy = engines[0], (MATRIX, "text")
    layout = Layout.prove(wordy, torch.utils.data.default_collate([wordy] * 2), 2)
    found: list[list[Any]] = []
    block = engine.place([wordy] * 2, layout.core, found)
    assert found == [["text"], ["text"]]
    assert engine.row(block, layout.core, 0, found[0])[1] == "text"
    for missing in (None, [], "text"):
        with pytest.raises(RuntimeError, match="sent with a row is missing"):
            engine.row(block, layout.core, 0, missing)
        with pytest.raises(RuntimeError, match="sent with a row is missing"):
            engine.decode(block, layout.core, [["text"], missing])


def test_rows_are_read_by_their_own_layout(engines: list[Any]) -> None:
    engine = engines[0]
    block = place(engine, 1.0)
    for wrong in (lambda: engine.decode(block, OTHER.core, [[], []]),
                  lambda: engine.row(block, OTHER.core, 0, None)):  # fmt: skip
        with pytest.raises(ValueError, match="follow another layout"):
            wrong()
    for row in (2, 3, 1 << 31):
        with pytest.raises(ValueError, match="no such row"):
            engine.row(block, SMALL.core, row, None)
    with pytest.raises(ValueError, match="not planned"):
        engine.take(block, SMALL.core)
    with pytest.raises(TypeError, match="must be a Layout"):
        engine.set_form(4096)
    with pytest.raises(ValueError, match="no description"):
        engine.set_form(_core.Layout((6,)))


def test_block_of_running_task_is_not_freed() -> None:
    engine = _core.Engine(1, 0, False, blocks=8)
    epoch = Epoch(0, 0, pickle.dumps)
    block = engine.submit(epoch, 0, 0, [1, 2], None, 0)
    assert block is not None
    for ask in (engine.retire, lambda block: engine.decode(block, SMALL.core, None)):
        with pytest.raises(ValueError, match="not done"):
            ask(block)
    for wrong, text in (
        (lambda: engine.submit(epoch, 1, 0, [1], None, 0), "no such worker"),
        (lambda: engine.submit(epoch, 0, 0, [1], None, 2), "fewer indices than spares"),
        (lambda: engine.submit(epoch, 0, 0, [], None, 4_000_000_000), "fewer indices than spares"),
        (lambda: engine.submit(epoch, 1 << 20, None, None, None, 0), "no such worker"),
    ):
        with pytest.raises(ValueError, match=text):
            wrong()
    for wrong in (lambda: engine.submit(0, 0, 0, [1], None, 0),
                  lambda: engine.submit(epoch, 0, 0, [1])):  # fmt: skip
        with pytest.raises(TypeError):
            wrong()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.poll(block)


def test_cycle_of_task_and_error_is_collected() -> None:
    """As when frames of the error's traceback hold the task: both are collected."""

    class Fails:
        def __getitem__(self, index: int) -> Any:
            raise Failed

    class Failed(Exception):
        task: Any

    engine = _core.Engine(1, 0, False, window=1)
    try:
        engine.start(-1, -1)
        worker = _core.Worker(engine.segment, 0, Fails(), None, Layout, pickle.loads)
        worker.ready()
        engine.set_form(None)
        engine.plan(Epoch(0, 0, pickle.dumps), [0], 0, 0, False, None, 0, None)
        task = worker.next()
        assert task and task.extras and (task.row0, task.nrows) == (0, 1)
        error = task.extras[0][2]
        error.task, gone = task, weakref.ref(error)
        del error, task
        gc.collect()
        assert gone() is None
    finally:
        engine.stop()
        engine.close()


def test_planned_batch_is_taken_once_in_order() -> None:
    data = [torch.full((3, 5), float(i)) for i in range(64)]
    it: Any = iter(minato.DataLoader(data, 2, num_workers=1))  # type: ignore[arg-type]
    engine = it._engine
    while it._receiver.shape.layout is None or it._planner.received:
        next(it)
    layout = it._receiver.shape.layout.core

    def following() -> Any:
        while (got := engine.next(60.0)) == _core.NEXT_PLAN:
            it._planner.fill()
        return got

    while not (block := following()).has_rows:  # planned before the layout was known
        engine.retire(block)
    assert block.kind == _core.KIND_ROWS and block.refusal is None
    with pytest.raises(ValueError, match="another layout"):
        engine.row(block, OTHER.core, 0, None)
    batch = engine.take(block, layout)
    assert torch.equal(batch, torch.stack(data)[2 * block.sequence : 2 * block.sequence + 2])
    for again in (lambda: engine.take(block, layout), lambda: engine.retire(block)):
        with pytest.raises(ValueError):
            again()
    it._shutdown_workers()
