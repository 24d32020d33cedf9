"""Whether samples build something lasting from the generators that their dataset holds.

A generator that a dataset holds is left as the program left it until a sample draws from it,
because that sample may build a table that all others use (``generators.py``). The sample is then
made again with its seeds. Most samples build nothing, and a loader finds that out once: one of its
workers makes its first such sample once more from the same states. Where a generator ends in the
same state both times, the second run has drawn all that the first had drawn, so nothing of that
was kept. Later iterators of the loader seed this generator from the first sample on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from .generator_states import put_back, state_of


class Held(NamedTuple):
    """What is known of the generators of one dataset.

    Attributes:
        kinds: the classes of all of them, in the order in which they are found.
        builds: by the place in that order, whether something was kept that a sample drew from it.
    """

    kinds: tuple[str, ...]
    builds: dict[int, bool]

    def of(self, generators: Sequence[Any]) -> dict[int, bool]:
        """What is known of these; nothing where they are others."""
        return self.builds if self.kinds == kinds_of(generators) else {}


def kinds_of(generators: Sequence[Any]) -> tuple[str, ...]:
    """The classes of generators, as ``Held`` names them."""
    return tuple(type(one).__name__ for one in generators)


class Finder(Protocol):
    """What trials are made for."""

    def makes_trials(self) -> bool:
        """Whether this process is that one of its loader's which makes them."""

    def found_held(self, held: Held) -> None:
        """What was found out."""


class Trial:
    """Makes a sample twice from the same states; a Seeder calls it, see ``Seeder.leave()``."""

    def __init__(
        self,
        generators: Sequence[Any],
        known: dict[int, bool],
        now: Callable[[], Sequence[Any]],
        finder: Finder,
    ) -> None:
        """generators: as they are found first, in the states in which they are left. known: of
        which nothing is to be found out. now: those that the Seeder numbers."""
        self._generators = list(generators)  # kept, so that no id is given to another
        self._kinds, self._now, self._finder = kinds_of(generators), now, finder
        self._builds = dict(known)
        self._puts: dict[int, tuple[int, Callable[[], Any]]] = {}
        for place, one in enumerate(generators):
            with contextlib.suppress(Exception):  # a class of the program's may refuse
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
            return False  # the state in which one of them was left is not known
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
