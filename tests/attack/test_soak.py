"""Several loaders at once for any length of time: kills, breaks, retained batches, little memory.

``make soak`` runs it for an hour and prints what it has done.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset

import minato

from .datasets import keep_list
from .support import PATIENCE, SECONDS, Killer, epochs, resources, wait_for

LENGTH, BATCH = 64, 4
#: limit on a trainer's growth: caches of the interpreter, and of malloc
GROWN_MOST = 128 << 20


class Marked(Dataset):
    """Samples that contain the index everywhere, of one shape or many, with text or without."""

    def __init__(self, floats: int, ragged: bool = False, text: bool = False) -> None:
        self.floats, self.ragged, self.text = floats, ragged, text

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.01 if index % 16 == 5 else 0.0005)
        size = self.floats + (index % 5 if self.ragged else 0)
        sample = {"x": torch.full((size,), float(index)), "index": index}
        return {**sample, "text": f"sample {index}"} if self.text else sample


def check(batch: Any) -> list[int]:
    """The indices of a batch, after a check of its content."""
    samples = batch if isinstance(batch, list) else None
    if samples is None:
        rows = range(len(batch["index"]))
        samples = [{key: values[row] for key, values in batch.items()} for row in rows]
    for sample in samples:
        assert bool((sample["x"] == sample["index"]).all())
        assert sample.get("text", f"sample {int(sample['index'])}") == f"sample {sample['index']}"
    return [int(sample["index"]) for sample in samples]


KEPT = {"persistent_workers": True}
LOADERS: dict[str, tuple[Marked, dict[str, Any]]] = {
    "rows": (Marked(3000), KEPT),
    "little memory": (Marked(60_000, text=True), {"memory_limit": "6MiB", **KEPT}),
    "lists": (Marked(2000, ragged=True), {"collate_fn": keep_list}),
    "ready first": (Marked(3000, text=True), {"batching": "ready", "in_order": False, **KEPT}),
    "resized": (Marked(3000), {"autoscale": (1, 4), **KEPT}),
    "next epoch early": (Marked(500), {"prefetch_next_epoch": True, **KEPT}),
}
SLOW_TO_START: dict[str, tuple[Marked, dict[str, Any]]] = {
    "spawned": (Marked(3000), {"multiprocessing_context": "spawn", **KEPT}),
    "forkserver": (Marked(3000, text=True), {"multiprocessing_context": "forkserver"}),
}


def one_epoch(loader: Any, rng: random.Random, done: Counter[str]) -> Iterator[None]:
    """An epoch, or a part of it, one batch at a time; some workers are killed meanwhile."""
    iterator, got, kept = iter(loader), [], []
    most = rng.choice([None, None, None, rng.randrange(LENGTH // BATCH)])
    with Killer(iterator, rng, rng.choice([0.05, 0.3, 5.0])) as killer:
        for batch in itertools.islice(iterator, most):
            got += check(batch)
            if rng.random() < 0.1:
                kept.append(batch)
            yield
    assert loader.batching == "ready" or got == sorted(got)
    assert len(set(got)) == len(got)
    assert most is not None or len(got) == LENGTH
    for batch in kept:  # their memory was not overwritten
        check(batch)
    done["kills"] += killer.kills
    done["epochs" if most is None else "breaks"] += 1


@pytest.mark.limit(SECONDS + 8 * PATIENCE)
def test_mixed_loaders_survive_long_runs(seed: int) -> None:
    rng, done = random.Random(seed), Counter[str]()
    kinds = LOADERS if SECONDS < 30 else LOADERS | SLOW_TO_START
    before, grown = resources(), 0
    loaders = {
        name: minato.DataLoader(data, BATCH, num_workers=2, max_retries=1000, **options)
        for name, (data, options) in kinds.items()
    }
    for turn in epochs(SECONDS):
        names = rng.sample(list(loaders), 2)
        for _ in itertools.zip_longest(*(one_epoch(loaders[name], rng, done) for name in names)):
            pass
        if turn == 8:  # most of it has been used
            grown = -psutil.Process().memory_info().rss
    grown += psutil.Process().memory_info().rss if grown else 0
    loaders.clear()
    wait_for(lambda: resources()["processes"] <= before["processes"] + 2, "workers to end")
    left = {name: count for name, count in resources().items() if name != "processes"}
    # multiprocessing keeps its resource tracker and its fork server, with a pipe each
    assert all(count <= before[name] + 4 for name, count in left.items()), (before, left)
    assert grown < GROWN_MOST
    print(f"\n{dict(done)}, grown by {grown >> 10} KiB, left {left} of {before}")
