"""Replacements for testing parts of an iterator alone: an engine, workers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple, cast

import torch

import minato
from minato._core import CostModel
from minato._records import Epoch
from minato.iterators.loader_memo import memo_of
from minato.iterators.planner import Planner
from minato.iterators.position import Position
from minato.options import Options
from minato.transport.layouts import EngineTransport, SampleTransport


class Loader:
    """The attributes of a loader that a part reads: torch's, of a list, with minato's options."""

    def __init__(self, samples: int = 20, batch_size: int = 2, **options: Any) -> None:
        own = {f.name: getattr(minato.DataLoader, f.name) for f in fields(Options)}
        own = {name: options.pop(name, value) for name, value in own.items()}
        options = {"num_workers": 2, "prefetch_factor": 2, **options}
        data = [torch.tensor(i) for i in range(samples)]
        self.inner = torch.utils.data.DataLoader(data, batch_size, **options)  # type: ignore
        for name, value in own.items():
            setattr(self.inner, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Plan(NamedTuple):
    """A planned batch as the engine received it, and its sequence number."""

    sequence: int
    epoch: Epoch
    indices: Any
    number: int
    position: int
    whole: bool
    begins: bytes | None
    spares: int
    hints: bytes | None


class Engine:
    """Accepts planned batches and records them, and the reports of waits."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room = room
        self.told: list[Any] = []  # layouts
        self.planned = 0
        self.last: tuple[Any, ...] = (None, -1, -1, -1)  # epoch, number, position, sequence
        self.plans: list[Plan] = []
        self.ended = False
        self.waits_ended: list[bool] = []
        self.waits_held: list[bool] = []

    def set_form(self, layout: Any) -> None:
        self.told.append(layout)

    def plan(self, *told: Any) -> int | None:
        epoch, _, number, position, *_ = told
        last, *place, sequence = self.last
        if last is epoch and place == [number, position]:  # an interrupt may have kept the caller from hearing of it
            return sequence
        if len(self.plans) >= self.room:
            return None
        self.plans.append(Plan(self.planned, *told))
        self.last = epoch, number, position, self.planned
        self.planned += 1
        return self.planned - 1

    def plan_end(self) -> None:
        self.ended = True

    def plan_clear(self) -> None:
        self.plans.clear()

    def wait_begins(self) -> int:
        return 1_000_000

    def wait_ends(self, got: bool, held: bool) -> None:
        self.waits_ended.append(got)
        self.waits_held.append(held)


def position_of(loader: Any) -> Position:
    """The position of an iterator that has started its first epoch."""
    position = Position(loader, memo_of(loader))
    with position.taking_up():
        position.base_seed = 7
    with position.epoch_begins(loader, first=True):
        pass
    return position


def planner_of(
    loader: Any,
    engine: Engine,
    *,
    goes_on: bool = False,
    kind: type[Planner] = Planner,
) -> Planner:
    """A planner that has started the first epoch of a loader."""
    position = position_of(loader)
    options = Options.of(loader)
    transport, of_tests = EngineTransport(SampleTransport()), cast(Any, engine)
    planner = kind(
        of_tests, loader, position, transport, options, batch_size=loader.batch_size
    )
    planner.begin(iter(loader._index_sampler), goes_on=goes_on)
    return planner


def costs_known(loader: Any, wall_ns: int = 10_000_000) -> CostModel:
    """The costs of a loader of which one sample was made."""
    costs: CostModel = memo_of(loader).costs
    costs.observe(0, wall_ns)
    return costs
