"""Whether samples build lasting values from the generators that their dataset holds.

A generator that a dataset holds keeps the program's state until a sample draws from it. That sample
may build a table that all others use (``find_generators.py``). The sample is then made again with its
seeds. Most samples build nothing, and a loader finds that out once. One of its workers makes its
first such sample once more from the same states. If a generator ends in the same state both times,
the second run has drawn everything that the first one drew, so nothing was kept. Later iterators of
the loader seed this generator from the first sample on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from .generator_states import put_back, state_of


class Held(NamedTuple):
    """Holds what is known about the generators of one dataset.

    Attributes:
        kinds: the classes of all of them, in the order in which they are found.
        builds: by position in that order, whether a sample has kept what it drew from the
        generator.
    """

    kinds: tuple[str, ...]
    builds: dict[int, bool]

    def of(self, generators: Sequence[Any]) -> dict[int, bool]:
        """The knowledge about these generators; empty if they are others."""
        return self.builds if self.kinds == kinds_of(generators) else {}


def kinds_of(generators: Sequence[Any]) -> tuple[str, ...]:
    """The classes of generators, as ``Held`` names them."""
    return tuple(type(one).__name__ for one in generators)


class Finder(Protocol):
    """The source and the destination of trials."""

    def makes_trials(self) -> bool:
        """Whether this process is the one of its loader that makes trials."""

    def found_held(self, held: Held) -> None:
        """Records a result."""


class Trial:
    """Makes a sample twice from the same states; a Seeder calls it, see ``Seeder.leave()``."""

    def __init__(
        self,
        generators: Sequence[Any],
        known: dict[int, bool],
        now: Callable[[], Sequence[Any]],
        finder: Finder,
    ) -> None:
        """generators: in the order of discovery, in the program's states. known: those without need
        of a trial. now: those that the Seeder numbers."""
        self._generators = list(generators)  # kept, so that their ids are not reused
        self._kinds, self._now, self._finder = kinds_of(generators), now, finder
        self._builds = dict(known)
        self._puts: dict[int, tuple[int, Callable[[], Any]]] = {}
        for place, one in enumerate(generators):
            with contextlib.suppress(Exception):  # a class of the program may refuse
                if place not in known:
                    self._puts[id(one)] = place, put_back(one)
        self._ended: list[tuple[int, Any, bytes]] = []  # place, generator, its state after a run

    def __call__(self, drawn: list[int] | None) -> bool:
        if drawn is None:
            self._judge()
            return False
        now = self._now()
        generators = [now[number] for number in drawn]
        if not all(id(one) in self._puts for one in generators):
            return False  # the original state of one of them is unknown
        if not self._finder.makes_trials():
            return False
        for one in generators:
            place, put = self._puts[id(one)]
            self._ended.append((place, one, state_of(one)))
            put()
        return True

    def _judge(self) -> None:
        ended, self._ended = self._ended, []
        self._builds.update((place, state_of(one) != state) for place, one, state in ended)
        self._finder.found_held(Held(self._kinds, self._builds))
