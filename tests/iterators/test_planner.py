"""From the sampler to the engine, without workers."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import minato

from minato.iterators.loader_memo import memo_of
from minato.iterators.planner import Window, may_look_ahead
from minato.options import Options

from . import parts
from .parts import Engine, Loader, costs_known, planner_of, position_of

#: the folder of minato's Python code
OURS = os.path.join(*minato.__path__, "")


def indices(engine: Engine) -> list[Any]:
    return [plan.indices for plan in engine.plans]


def test_look_ahead_for_quick_batches_follows_the_first() -> None:
    """The program waits for the first batch, which is made sooner than many are planned."""
    engine, loader = Engine(), Loader(20)
    costs_known(loader, 1000)
    planner = planner_of(loader, engine)
    window = planner.window.size()
    assert len(engine.plans) == window + 1 < 10
    del planner.planned[0]  # the first is delivered, and torch's window is planned
    assert planner.drawn_ahead() > planner.refill_at
    del planner.planned[1]
    assert planner.drawn_ahead() <= planner.refill_at


def test_hints_alone_do_not_make_batches_quick() -> None:
    loader = Loader(20)
    engine: Any = Engine()
    window = Window(loader, Options.of(loader), memo_of(loader), engine, hinted=True, batch_size=1)
    assert window.knows_costs() and window.reach(0) > 0 and not window.quick


class OwnBatches(torch.utils.data.BatchSampler):
    """Batches of a program's class, which may do anything when they are drawn."""


@pytest.mark.parametrize("order, safe", [
    ({"sampler": [3, 1, 2]}, False),
    ({"sampler": (3, 1, 2)}, True),
    ({"sampler": range(4)}, True),
    ({"sampler": torch.utils.data.SubsetRandomSampler([3, 1])}, False),
    ({"sampler": torch.utils.data.SubsetRandomSampler((3, 1))}, True),
    ({"batch_sampler": torch.utils.data.BatchSampler([3, 1, 2], 2, False)}, False),
    ({"batch_sampler": torch.utils.data.BatchSampler((3, 1, 2), 2, False)}, True),
    ({"batch_sampler": [(0, 1), (2,)]}, False),
    ({"batch_sampler": ([0], [1, 2])}, False),
    ({"batch_sampler": ((0,), range(1, 3))}, True),
    ({"sampler": ((0, (1, "a")), (1, ()))}, True),
    ({"sampler": ((0, [1]), (1, [2]))}, False),
    ({"sampler": torch.arange(4)}, False),
    ({"sampler": iter([3, 1])}, False),
    ({"batch_sampler": OwnBatches([0, 1, 2], 2, False)}, False),
], ids=["list", "tuple", "range", "some of a list", "some of a tuple", "batches of a list",
        "batches of a tuple", "list of batches", "tuple of lists", "tuple of tuples", "nested tuples",
        "lists in nested tuples", "tensor", "iterator", "own class"])
def test_only_an_order_that_cannot_change_allows_look_ahead(order: dict[str, Any], safe: bool) -> None:
    loader = minato.DataLoader(torch.arange(4), **order)
    assert may_look_ahead(loader) is safe


class Ring(torch.utils.data.Dataset[int]):
    """Writes samples to slots that the program reads, as many as torch has in flight."""

    def __init__(self, shared: bool) -> None:
        self.slots = torch.zeros(5, dtype=torch.int64)
        if shared:
            self.slots.share_memory_()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_tensor_in_shared_memory_keeps_torchs_window(shared: bool, context: str) -> None:
    dataset = torch.utils.data.Subset(Ring(shared), range(40))
    loader = minato.DataLoader(dataset, None, num_workers=2, multiprocessing_context=context)
    for _ in range(2):  # starting processes may have moved it there
        batches = iter(loader)
        assert batches._planner.window.far is not shared
        assert list(batches) == list(range(40))


def test_idle_workers_begin_the_look_ahead() -> None:
    engine, loader = Engine(), Loader(20)
    costs_known(loader, 1000)
    planner_of(loader, engine).fill(starved=True)
    assert len(engine.plans) == 10


def test_idle_workers_extend_the_window() -> None:
    engine = Engine()
    planner = planner_of(Loader(100), engine)
    planner.fill(starved=True)
    assert len(engine.plans) == 8


def test_refused_batch_is_planned_again() -> None:
    engine = Engine(room=2)
    planner = planner_of(Loader(20), engine)
    assert indices(engine) == [[0, 1], [2, 3]]
    engine.room = 3
    planner.fill()
    assert indices(engine) == [[0, 1], [2, 3], [4, 5]] and planner.draw.number == 3


@pytest.mark.parametrize("seed, sent", [(5, 5), (-1, 2**64 - 1)])
def test_the_engine_takes_seeds_without_a_sign(seed: int, sent: int) -> None:
    position = position_of(Loader(20))
    position.base_seed = seed
    assert position.seed == sent


# ---- planning again -----------------------------------------------------------------------


@contextlib.contextmanager
def interrupt_at(call: int) -> Iterator[list[int]]:
    """Interrupts at the start of that function call of minato's or of the engine's, as Python
    delivers signals there. Yields the number of calls so far."""
    calls, before = [0], sys.gettrace()

    def look(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith((OURS, parts.__file__)):
            calls[0] += 1
            if calls[0] == call:
                raise KeyboardInterrupt

    sys.settrace(look)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield calls
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("when", ["planned", "planned, before all again", "planned again"])
@pytest.mark.parametrize("options", [{}, {"on_error": "replace"}], ids=str)
def test_an_interrupt_at_any_call_plans_nothing_twice(options: Any, when: str) -> None:
    for call in range(1, 1000):
        planner = planner_of(Loader(60, **options), engine := Engine())
        planner.window.size = lambda: 8  # type: ignore[method-assign]
        again = when == "planned again"
        if again:
            planner.fill()
            planner.plan_whole()
        with interrupt_at(call) as calls:
            (planner.plan_again if again else planner.fill)()
        assert planner.must_plan_again is (again and calls[0] >= call)
        if when == "planned, before all again":
            planner.plan_whole()
        if when != "planned":
            planner.plan_again()
        planner.fill()
        assert [batch.number for batch in planner.planned.values()] == [*range(8)]
        assert [batch.indices for batch in planner.planned.values()] == [
            [2 * number, 2 * number + 1] for number in range(8)
        ]
        assert list(planner.planned) == [plan.sequence for plan in engine.plans]
        if calls[0] < call:
            break
    assert (4 if again else 20) < call < 1000


@pytest.mark.parametrize("received", [0, 1, 2])
def test_the_next_epoch_is_planned_again_as_such(received: int) -> None:
    planner = planner_of(Loader(4), engine := Engine(), goes_on=True)
    planner.go_on()
    for sequence in range(received):
        planner.planned.pop(sequence)
        planner.position.progress.delivered(sequence)
    planner.plan_whole()
    planner.plan_again()
    assert [plan.epoch.number for plan in engine.plans] == [0, 0, 1, 1][received:]
    early = planner.next_epoch.early
    assert early is not None
    assert [batch.progress is early.progress for batch in planner.planned.values()] == [
        False, False, True, True,
    ][received:]  # fmt: skip
    for sequence in list(planner.planned)[: 2 - received]:
        planner.planned.pop(sequence)
        planner.position.progress.delivered(planner.position.progress.count)
    assert planner.adopt() and planner.position.progress.epoch == 1


def test_interrupted_form_update_is_repeated() -> None:
    """That samples travel as rows: else they would not, for the rest of the epoch."""

    class Interrupted(Engine):
        interrupts = True

        def set_form(self, layout: Any) -> None:
            if layout is not None and self.interrupts:
                self.interrupts = False
                raise KeyboardInterrupt
            super().set_form(layout)

    planner = planner_of(Loader(20), engine := Interrupted())
    planner.transport.shape.learn(SimpleNamespace(core="layout", pickled=b""))
    with pytest.raises(KeyboardInterrupt):
        planner.fill()
    planner.fill()
    assert engine.told[-1] == "layout"
