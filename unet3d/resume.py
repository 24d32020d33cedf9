"""How a run resumes within an epoch, exactly if the loader allows it.

Three ways; the first possible one is used:

- "state": the loader's own ``state_dict``, if it has one (minato). No delivered sample
  is made again, and random streams continue, also with batches in any order.
- "skip": the epoch from its beginning, with its first batches discarded. For samples whose
  randomness comes from the loader's workers (``--seeding loader``), whose streams are not
  saved; needs an order that repeats, and the same number of workers.
- "rest": a loader over the samples that the checkpoint does not list as delivered. Exactly once
  with any loader and any number of workers and ranks; the same bytes if samples seed
  themselves (``--seeding sample``) and batches keep the sampler's order.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from unet3d.checkpoint import CheckpointError
from unet3d.ranks import Ranks

#: Loaders whose epoch repeats exactly if it starts with the same generators.
REPEATABLE = ("minato", "minato-static", "minato-native", "minato-native-cached",
              "minato-native-process", "minato-shared", "pytorch", "pytorch-expert", "pytorch-native")


class Skipping:
    """A loader without its first batches; they are made and discarded."""

    def __init__(self, loader: Iterable, batches: int) -> None:
        self.loader, self.batches = loader, batches

    def __iter__(self) -> Iterator:
        iterator = iter(self.loader)
        for _ in range(self.batches):
            next(iterator)
        return iterator


@dataclasses.dataclass(frozen=True)
class Resumed:
    """Where an epoch resumes: `delivered` by all ranks, `state` of this rank's loader."""

    way: str
    delivered: list[int]
    state: dict[str, Any] | None
    path: Path

    def applied(self, loader: Iterable, batches: int) -> Iterable:
        """`loader`, whose next epoch begins after its first `batches`."""
        if self.way == "skip":
            return Skipping(loader, batches)
        try:
            loader.load_state_dict(self.state)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {error}") from error
        return loader


def state_of(loader: Iterable | None) -> dict[str, Any] | None:
    """The loader's own state, if it has one."""
    return loader.state_dict() if hasattr(loader, "state_dict") else None


def plan(path: Path, saved: dict[str, Any], config: dict[str, Any],
         ranks: Ranks) -> Resumed | None:
    """How to resume from the checkpoint `saved`; None if it was made between epochs."""
    delivered = [index for rank in saved["ranks"] for index in rank["delivered"]]
    if not delivered:
        return None
    before, loader, workers = saved["config"], config["loader"], config["workers"]
    way, state = "rest", None
    if before["loader"] == loader and len(saved["ranks"]) == ranks.world:
        state = saved["ranks"][ranks.rank]["loader"]
        same_workers = before["workers"] == workers
        seeded = config["seeding"] == "sample"  # by themselves: no streams to restore
        if state is not None and (same_workers or loader != "minato-static") \
                and (workers > 0 or seeded):
            way = "state"
        elif not seeded and same_workers and loader in REPEATABLE and \
                saved["ranks"][ranks.rank]["whole"]:
            way = "skip"
    return Resumed(way, delivered, state, path)
