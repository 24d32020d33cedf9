"""How a run goes on within an epoch, exactly where the loader allows it.

Three ways, the first that serves:

- "state": the loader's own ``state_dict``, where it has one (minato). Nothing that was
  delivered is made again, random streams go on, also of batches in any order.
- "skip": the epoch from its beginning, its first batches thrown away. For samples that take
  their randomness from the loader's workers (``--seeding loader``), whose streams are
  nowhere kept; needs an order that repeats, and as many workers.
- "rest": a loader over what the checkpoint does not list as delivered. Exactly once with
  any loader and any number of workers and ranks; the same bytes where samples seed
  themselves (``--seeding sample``) and batches keep the sampler's order.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from unet3d.checkpoint import CheckpointError
from unet3d.ranks import Ranks

#: Loaders whose epoch is the same again if begun with the same generators.
REPEATABLE = ("minato", "minato-static", "minato-native", "minato-native-cached",
              "minato-native-process", "pytorch", "pytorch-expert", "pytorch-native")


class Skipping:
    """A loader without its first batches; they are made and thrown away."""

    def __init__(self, loader: Iterable, batches: int) -> None:
        self.loader, self.batches = loader, batches

    def __iter__(self) -> Iterator:
        iterator = iter(self.loader)
        for _ in range(self.batches):
            next(iterator)
        return iterator


@dataclasses.dataclass(frozen=True)
class Resumed:
    """Where an epoch goes on: `delivered` by all ranks, `state` of this rank's loader."""

    way: str
    delivered: list[int]
    state: dict[str, Any] | None
    path: Path

    def applied(self, loader: Iterable, batches: int) -> Iterable:
        """`loader`, whose next epoch begins behind its first `batches`."""
        if self.way == "skip":
            return Skipping(loader, batches)
        try:
            loader.load_state_dict(self.state)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {error}") from error
        return loader


def state_of(loader: Iterable | None) -> dict[str, Any] | None:
    """The loader's own state, if it keeps one."""
    return loader.state_dict() if hasattr(loader, "state_dict") else None


def plan(path: Path, saved: dict[str, Any], config: dict[str, Any],
         ranks: Ranks) -> Resumed | None:
    """How to go on from the checkpoint `saved`; None if it was made between epochs."""
    delivered = [index for rank in saved["ranks"] for index in rank["delivered"]]
    if not delivered:
        return None
    before, loader, workers = saved["config"], config["loader"], config["workers"]
    way, state = "rest", None
    if before["loader"] == loader and len(saved["ranks"]) == ranks.world:
        state = saved["ranks"][ranks.rank]["loader"]
        same_workers = before["workers"] == workers
        seeded = config["seeding"] == "sample"  # by themselves: no streams to bring back
        if state is not None and (same_workers or loader != "minato-static") \
                and (workers > 0 or seeded):
            way = "state"
        elif not seeded and same_workers and loader in REPEATABLE and \
                saved["ranks"][ranks.rank]["whole"]:
            way = "skip"
    return Resumed(way, delivered, state, path)
