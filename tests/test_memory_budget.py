"""memory_limit: batches in flight and ready stay under it, with slow consumers and huge batches."""

from __future__ import annotations

import multiprocessing
import threading
import time
from typing import Any

import pytest
import torch
from workers.test_native import Recipe

import minato
from minato import _core, _system
from minato.transport.layouts import Layout

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

MIB = 1 << 20
SIZE, LIMIT = 4, 8 * MIB
DEADLINE_S = 60
#: size of the start of a message
HEAD = 4096


class Blocks(torch.utils.data.Dataset):
    """Samples of a quarter of a MiB, all bytes alike; some are huge."""

    def __init__(self, n: int, huge: tuple[int, ...] = ()) -> None:
        self.n, self.huge = n, huge

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((20 * MIB if index in self.huge else MIB // 4,), index, dtype=torch.uint8)


def as_list(samples: list) -> list:
    return samples


def fill(index: int, _key: Any, out: Any) -> None:
    out[0][:] = index


class Watch:
    """The most that the arena of an iterator holds."""

    def __init__(self, iterator: Any) -> None:
        self.engine, self.peak, self.over = iterator._engine, 0, threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def used(self) -> int:
        memory = self.engine.memory()
        assert memory["limit"] == LIMIT and memory["kept"] <= LIMIT
        self.peak = max(self.peak, memory["used"])
        return memory["used"]

    def run(self) -> None:
        while not self.over.wait(0.001):
            try:
                self.used()
            except RuntimeError:  # the engine is closed: nothing comes after
                return

    def rest(self) -> None:
        """Waits until workers are idle: everything is made that can be before more is taken."""
        deadline = time.monotonic() + DEADLINE_S
        alike, before = 0, -1
        while alike < 4 and time.monotonic() < deadline:
            now = self.used()
            alike, before = (alike + 1 if now == before else 0), now
            time.sleep(0.003)

    def end(self) -> int:
        self.over.set()
        self.thread.join(DEADLINE_S)
        return self.peak


def indices(batch: Any) -> list[int]:
    """The indices of a batch whose samples consist of one repeated byte."""
    found = []
    fields = isinstance(batch, (list, tuple)) and batch[0].dim() > 1  # native: a tensor a field
    for sample in batch[0] if fields else batch:
        low, high = sample.min(), sample.max()
        assert low == high
        found.append(int(low))
    return found


def epoch(loader: Any, keep: bool = False, every: int = 5) -> tuple[int, list[int]]:
    """(peak, indices) of an epoch whose consumer is slow now and then."""
    it = iter(loader)
    watch, seen, kept = Watch(it), [], []
    try:
        for number, batch in enumerate(it):
            if number % every == 0:
                watch.rest()
            seen += indices(batch)
            if keep:
                kept.append(batch)
            del batch
        assert sorted(i for b in kept for i in indices(b)) == (sorted(seen) if keep else [])
    finally:
        peak = watch.end()
    return peak, seen


KINDS: dict[str, dict[str, Any]] = {
    "rows": {},
    "out of order": {"in_order": False},
    "whole batches": {"collate_fn": as_list},
    "ready": {"in_order": False, "batching": "ready"},
    "the next epoch, too": {"persistent_workers": True, "prefetch_next_epoch": True},
    "static": {"scheduling": "static"},
    "whole and static": {"scheduling": "static", "collate_fn": as_list},
    "more workers": {"autoscale": (1, 6)},
}


def make(data: Any, **options: Any) -> Any:
    """A window of 24 batches of one MiB under a limit of eight."""
    return minato.DataLoader(data, **{"batch_size": SIZE, "num_workers": 3, "prefetch_factor": 8,
                                      "memory_limit": LIMIT, **options})  # fmt: skip


@pytest.mark.parametrize("kind, keep", [
    *((kind, False) for kind in KINDS), ("rows", True), ("ready", True), ("whole and static", True),
])
def test_slow_consumer_does_not_fill_memory(kind: str, keep: bool) -> None:
    """By one batch at most: the one that everything waits for."""
    loader = make(Blocks(72), **KINDS[kind])
    for _ in range(2):
        peak, seen = epoch(loader, keep)
        assert sorted(seen) == list(range(72))
        assert peak <= LIMIT + SIZE * MIB // 4 + HEAD, f"{peak / MIB:.1f} MiB"
    assert peak >= LIMIT // 2  # or the limit has limited nothing


class Held(Blocks):
    """One sample waits for the test."""

    def __init__(self, n: int, held: int) -> None:
        super().__init__(n)
        self.held, self.may = held, multiprocessing.get_context("fork").Event()

    def __getitem__(self, index: int) -> torch.Tensor:
        assert index != self.held or self.may.wait(DEADLINE_S)
        return super().__getitem__(index)


@pytest.mark.parametrize("in_order", [True, False])
def test_memory_is_reserved_for_head_batch(in_order: bool) -> None:
    """Its last sample comes when the others have their memory and the program needs some for
    the batch that it takes: together they exceed the limit by one batch at most."""
    data = Held(72, SIZE * 2 - 1)
    it = iter(make(data, in_order=in_order, multiprocessing_context="fork"))
    watch = Watch(it)
    try:
        seen = indices(next(it))  # from now on the size of a batch is known
        watch.rest()
        data.may.set()
        watch.rest()
        for batch in it:
            seen += indices(batch)
            del batch
    finally:
        peak = watch.end()
    assert sorted(seen) == list(range(72))
    assert LIMIT // 2 <= peak <= LIMIT + SIZE * MIB // 4 + HEAD, f"{peak / MIB:.1f} MiB"


def test_over_the_limit_the_program_gets_copies() -> None:
    """Otherwise its batches would still be there when the next one must exceed the limit."""
    sample = torch.zeros(MIB // 2, dtype=torch.uint8)
    layout = Layout.prove(sample, torch.stack([sample] * 2), 2).core
    engine = _core.Engine(1, 0, False, LIMIT, window=1)
    blocks = [engine.place([sample] * 2, layout, [[], []]) for _ in range(9)]
    assert engine.memory()["used"] == LIMIT + MIB
    for kept, block in enumerate(blocks[:3]):
        batch = engine.decode(block, layout, None)
        assert engine.memory()["kept"] == (MIB if kept else 0)
        engine.retire(block)
        assert engine.memory()["used"] <= LIMIT
        del batch
    engine.close()


def test_native_workers() -> None:
    data = Recipe(72, fill, (("u1", (MIB // 4,)),))
    loader = make(data, worker_type="native")
    peak, seen = epoch(loader)
    assert seen == list(range(72)) and LIMIT // 2 <= peak <= LIMIT + SIZE * MIB // 4


@pytest.mark.parametrize(
    "options",
    [
        {"collate_fn": as_list},
        {"collate_fn": as_list, "in_order": False, "batching": "ready"},
        {"collate_fn": as_list, "scheduling": "static"},
        {"batch_size": 1},
        {"batch_size": 1, "in_order": False, "batching": "ready"},
    ],
)
def test_one_sample_over_the_limit_passes_alone(options: dict) -> None:
    """Two of 20 MiB; in the second epoch they are known to be slow and start early.

    Until one of them is delivered, the other does not start, however long the workers wait. Then
    the trainer holds it. If all workers wait with results of later batches, the second may start,
    because otherwise nothing could continue."""
    large, loader = 20 * MIB, make(Blocks(48, (9, 33)), persistent_workers=True, **options)
    for _ in range(2):
        it = iter(loader)
        watch, seen, alone = Watch(it), [], None
        try:
            for number in range(49):
                if alone is None and number % 4 == 0:
                    watch.rest()
                made = watch.peak
                batch = next(it, None)
                if batch is None:
                    break
                seen += indices(batch)
                if alone is None and {9, 33} & set(seen):
                    alone = made
                del batch
        finally:
            peak = watch.end()
        assert sorted(seen) == list(range(48))
        assert alone is not None and alone <= LIMIT + large + 3 * MIB, f"{alone / MIB:.1f} MiB"
        assert large <= peak <= LIMIT + 2 * large + 3 * MIB, f"{peak / MIB:.1f} MiB"


def test_workers_waiting_for_memory_do_not_block_shutdown() -> None:
    """In mid-epoch, with all of them waiting: a new epoch, and no epoch at all."""
    for options in ({"collate_fn": as_list}, {"scheduling": "static", "collate_fn": as_list}):
        loader = make(Blocks(120), persistent_workers=True, **options)
        it = iter(loader)
        watch = Watch(it)
        first = next(it)
        watch.rest()
        watch.end()
        it = iter(loader)
        assert indices(first) == indices(next(it)) == list(range(SIZE))
        watch = Watch(it)
        watch.rest()
        watch.end()
        del it, loader


@pytest.mark.parametrize(
    "environ, ranks",
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": " 2 ", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 2),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "", "MPI_LOCALNRANKS": "3"}, 3),
        ({"SLURM_NTASKS_PER_NODE": "4"}, 4),
        *(({"LOCAL_WORLD_SIZE": text}, 1) for text in ("0", "-4", "1e3", "9" * 30, "many", "²")),
    ],
)
def test_ranks_of_this_machine(environ: dict[str, str], ranks: int) -> None:
    assert _system.ranks_here(environ) == ranks


def test_ranks_share_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it for all of them together, page tables of every process included."""
    machine = {**_core.machine(), "memory_available": 64 * 1024 * MIB}
    monkeypatch.setattr(_core, "machine", lambda: machine)
    limits = []
    for ranks in (1, 8):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        iterator = iter(minato.DataLoader(Blocks(8), num_workers=1))
        limits.append(iterator._engine.memory()["limit"])
        assert limits[-1] * ranks <= 32 * 1024 * MIB * 512 // 514
    assert limits[0] // 8 - 4096 <= limits[1] and limits[0] > 31 * 1024 * MIB
