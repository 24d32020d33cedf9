from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any, Iterable
from unittest import mock

from minato._core import Seeder
from minato.seeding import generator_states
from minato.seeding.generator_states import plan_all, plan_private

#: without them, states are set through the public APIs
LAYOUTS = ("_random_layout", "_bitgen_layout", "_random_state_layout")


def _torch_plan(generator: Any, seed: int | None = None) -> tuple[Any, ...]:
    return "call", functools.partial(generator_states._set_torch, generator), 624


def plans_of(
    private: Iterable[Any] = (), hooks: Iterable[Any] = (), public: bool = False
) -> list[tuple[Any, ...]]:
    """Plans of the global generators and of private ones; public: by the libraries' public APIs."""
    with ExitStack() as patches:
        if public:
            assert generator_states._torch_layout()
            for name in LAYOUTS:
                patches.enter_context(mock.patch.object(generator_states, name, lambda *_: None))
            patches.enter_context(mock.patch.object(generator_states, "_torch_plan", _torch_plan))
        return [*plan_all(), *plan_private(private, hooks)]


def seeder_of(*given: Any, **more: Any) -> Seeder:
    """Their Seeder."""
    return Seeder(plans_of(*given, **more))
