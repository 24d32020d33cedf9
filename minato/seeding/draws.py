"""Predicts what a sample will draw, before a worker makes it: ``minato.draws(seed)``."""

from __future__ import annotations

import functools
import random as _random
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch as _torch

from .._not_linux import CORE
from .generator_states import STREAM_NUMPY, STREAM_RANDOM, STREAM_TORCH, plan_private

if CORE:
    from .._core import Seeder

__all__ = ["Draws", "SampleSeed", "draws"]

_T = TypeVar("_T")


class SampleSeed(int):
    """A sample's seed, as ``cost_hint(index, *, seed)`` gets it.

    As an int it is the number that the dataset's ``seed_sample(seed)`` will get for the same
    sample. It also carries the key from which ``minato.draws`` makes generators. So hand on the
    object itself: a number that is computed from it has no key.
    """

    key: tuple[int, int]


def sample_seed(number: int, lo: int, hi: int) -> SampleSeed:
    """Returns what ``Seeder.sample`` returned, as one object."""
    seed = SampleSeed(number)
    seed.key = lo, hi
    return seed


class _OfThisThread(threading.local):
    """One generator of each library, with the Seeder that puts it into a sample's state: to make
    a new one takes NumPy 80 us."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[Any, Seeder]] = {}

    def seeded(self, stream: int, make: Callable[[], _T], key: tuple[int, int]) -> _T:
        if stream not in self.made:
            made = make()
            ((_, _, plan, _),) = plan_private([made], [])
            self.made[stream] = made, Seeder([("draws", stream, plan)])
        generator: _T
        generator, seeder = self.made[stream]
        seeder.put(*key)
        return generator


_of_this_thread = _OfThisThread()


class Draws:
    """Private generators in the state in which a sample will find the global ones."""

    def __init__(self, key: tuple[int, int]) -> None:
        self._key = key

    @functools.cached_property
    def random(self) -> _random.Random:
        """For Python's ``random``."""
        return _of_this_thread.seeded(STREAM_RANDOM, _random.Random, self._key)

    @functools.cached_property
    def numpy(self) -> np.random.RandomState:
        """For the functions of ``numpy.random``."""
        return _of_this_thread.seeded(STREAM_NUMPY, np.random.RandomState, self._key)

    @functools.cached_property
    def torch(self) -> _torch.Generator:
        """For torch's default CPU generator: pass it as ``generator=``."""
        return _of_this_thread.seeded(STREAM_TORCH, _torch.Generator, self._key)


def draws(seed: int | None) -> Draws:
    """Generators that draw what a sample will draw, without touching the program's own.

    A dataset whose cost depends on random numbers uses it to predict that cost::

        def cost_hint(self, index, *, seed=None, epoch=None):
            if seed is None:                      # samples are not seeded one by one
                return self.mean_seconds
            rotate = minato.draws(seed).random.random() < 0.1
            return 0.200 if rotate else 0.005     # seconds, or any other unit

        def __getitem__(self, index):
            rotate = random.random() < 0.1        # the sample's first draw: the same number
            ...

    seed: the one that ``cost_hint`` was given. Returns an object with the attributes ``random``
    (``random.Random``), ``numpy`` (``numpy.random.RandomState``) and ``torch``
    (``torch.Generator``). Each stands where the global generator of that library will stand when
    the sample begins. So the hint must draw in the same order as the sample. They are used again by
    the next call in the same thread. ``minato.check_determinism`` checks that hint and sample draw
    alike.

    A generator that the dataset holds itself is not among them. A dataset that has one seeds it
    in ``seed_sample(seed)``, and makes another one of ``seed`` in ``cost_hint``.

    Raises TypeError for anything but a seed that a loader has given.
    """
    if not isinstance(seed, SampleSeed):
        said = "None: the loader does not seed samples one by one" if seed is None else (
            f"{seed!r}, which is a plain {type(seed).__name__}")
        raise TypeError(
            f"minato.draws() was given {said}. Pass the seed that cost_hint(index, *, seed=None, "
            "epoch=None) gets from the loader, and return a hint without draws where it is None."
        )
    return Draws(seed.key)
