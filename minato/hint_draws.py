"""Checks that ``cost_hint`` draws the numbers that its sample draws first.

``check_determinism()`` uses this. It notes the states in which a hint leaves the generators, and
looks for these states while the sample is made.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .seeding.draws import Draws, SampleSeed

_State = tuple[Any, ...]


def _of_random(generator: Any) -> _State:
    return tuple(generator.getstate()[1])


def _of_numpy(generator: Any) -> _State:
    _, key, pos, *_rest = generator.get_state()
    return (*key.tolist(), pos)


def _of_torch(generator: Any) -> _State:
    return (generator.get_state().numpy().tobytes()[8:],)  # without the seed


#: by attribute of Draws: how to read a state, and the generator that the sample draws from
_LIBRARIES: dict[str, tuple[Callable[[Any], _State], Callable[[], Any]]] = {
    "random": (_of_random, lambda: random._inst),  # type: ignore[attr-defined]
    "numpy": (_of_numpy, lambda: np.random.mtrand._rand),  # type: ignore[attr-defined]
    "torch": (_of_torch, lambda: torch.default_generator),
}


class _StateWatch:
    """Finds out whether a generator reaches a given state while code runs."""

    def __init__(self, name: str, target: _State) -> None:
        self._read, found = _LIBRARIES[name]
        self._generator, self._target = found(), target
        self._strict = name != "numpy"  # a profiler does not see each of its calls
        self.seen = False

    def look(self) -> None:
        if not self.seen:
            state = self._read(self._generator)
            later = state[:-1] == self._target[:-1] and state[-1] > self._target[-1]
            self.seen = state == self._target or (later and not self._strict)


def drawn_by(hint: Callable[..., Any], index: int, seed: SampleSeed) -> dict[str, _State]:
    """Asks for a hint. Returns the states of the generators that the hint has drawn from."""
    used: dict[str, Any] = {}
    before = {name: read(getattr(Draws(seed.key), name)) for name, (read, _) in _LIBRARIES.items()}
    original = Draws.__init__

    def noted(self: Draws, key: tuple[int, int]) -> None:
        original(self, key)
        used["draws"] = self

    Draws.__init__ = noted  # type: ignore[method-assign]
    try:
        hint(index, seed=seed)
    finally:
        Draws.__init__ = original  # type: ignore[method-assign]
    made = vars(used["draws"]) if used else {}
    after = {name: _LIBRARIES[name][0](made[name]) for name in _LIBRARIES if name in made}
    return {name: state for name, state in after.items() if state != before[name]}


def differing(targets: dict[str, _State], make: Callable[[], Any]) -> list[str]:
    """Makes a sample. Returns the generators of ``drawn_by`` that do not reach their state."""
    watched = {name: _StateWatch(name, target) for name, target in targets.items()}

    def event(_frame: Any, what: str, _arg: Any) -> None:
        if what in ("c_return", "return"):
            for watch in watched.values():
                watch.look()

    before = sys.getprofile()
    sys.setprofile(event)
    try:
        make()
    finally:
        sys.setprofile(before)
    for watch in watched.values():
        watch.look()
    return [name for name, watch in watched.items() if not watch.seen]
