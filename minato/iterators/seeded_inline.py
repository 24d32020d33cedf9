"""Seeding in the program's own process: ``num_workers=0``, and a collate_fn that runs there.

The program's own generators are seeded, so they are restored after each batch: the
program continues to draw as if workers had made the batch.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..seeding.find_generators import Growing
from ..seeding.generator_states import put_back
from ..workers.fetching import OF_COLLATE, Unseeded, fetched, made, tolerated
from ..workers.on_error import Tolerant


class SeededHere:
    """Seeds what a worker would seed for this dataset and collate_fn, and restores it afterwards,
    except for the effects of seed_sample(), which cannot be undone."""

    def __init__(self, dataset: Any, collate_fn: Any, generator: Any) -> None:
        self._growing = Growing(dataset, collate_fn, of_loader=generator)
        rand = np.random.mtrand._rand  # type: ignore[attr-defined]
        self._everybodys = (random._inst, rand, torch.default_generator)  # type: ignore[attr-defined]
        self.seeder = self._growing.seeder

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Restores the program's generators afterwards."""
        generators = (*self._everybodys, *self._growing.seeded())
        before = [put_back(generator) for generator in generators]
        try:
            yield
        finally:
            for put in before:
                put()


class SeededFetcher:
    """Replaces torch's fetcher of a map-style dataset: the same batches as with workers."""

    def __init__(
        self,
        fetcher: Any,
        ranks: tuple[int, int, int],
        tolerant: Tolerant | None,
        generator: Any,  # the loader's own
    ) -> None:
        self._fetcher = fetcher
        self._tolerant = tolerant
        self.spares: list[Any] = []  # for the next batch
        self._here = SeededHere(fetcher.dataset, fetcher.collate_fn, generator)
        self._here.seeder.share(ranks)
        self.place = (0, 0, 0, 0)  # base seed, epoch, batch's number, position of its first

    def fetch(self, index: Any) -> Any:
        """The batch of an index, or of a list of them."""
        base_seed, epoch, number, _position = self.place
        with self._here.undisturbed():
            place = (base_seed, epoch, number, OF_COLLATE)
            return made(self._here.seeder, place, self._fetcher.collate_fn, self._samples(index))

    def _samples(self, index: Any) -> Any:
        seeder, fetcher = self._here.seeder, self._fetcher
        if self._tolerant is None:
            return fetched(seeder, fetcher, index, self.place)
        return tolerated(self._tolerant, seeder, fetcher, index, self.spares, self.place)


class TolerantFetcher:
    """Replaces torch's fetcher of a map-style dataset: continues after samples that fail."""

    def __init__(self, fetcher: Any, tolerant: Tolerant) -> None:
        self._fetcher = fetcher
        self._tolerant = tolerant
        self.spares: list[Any] = []  # for the next batch

    def fetch(self, index: Any) -> Any:
        """The batch of an index, or of a list of them."""
        nowhere = 0, 0, 0, 0
        fetcher, spares = self._fetcher, self.spares
        data = tolerated(self._tolerant, Unseeded, fetcher, index, spares, nowhere)
        return fetcher.collate_fn(data)
