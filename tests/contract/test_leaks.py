"""Nothing accumulates over many loaders made, half read, and dropped."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any, Callable

import pytest
import torch

from .datasets import Failing, Images, Numbers, Sharded
from .support import Kind, descendants, drain, wait_for


def _shm() -> set[str]:
    """Named shared memory of this process; others use the same folder."""
    own = str(os.getpid())
    return {name for name in os.listdir("/dev/shm") if own in name}


def _counts() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/maps") as maps:
        mappings = sum(1 for _ in maps)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "tasks": len(os.listdir("/proc/self/task")),
        "threads": threading.active_count(),
        "children": len(descendants()),
        "shm": len(_shm()),
        "mappings": mappings,
    }


def _whole(loader: Kind) -> None:
    list(loader(Images(8), batch_size=2, num_workers=2))


def _half(loader: Kind) -> None:
    iterator = iter(loader(Images(40), batch_size=2, num_workers=2))
    next(iterator)


def _untouched(loader: Kind) -> None:
    iter(loader(Images(40), batch_size=2, num_workers=2))


def _persistent(loader: Kind) -> None:
    made = loader(Numbers(6), num_workers=2, persistent_workers=True)
    list(made)
    next(iter(made))


def _raise(index: int) -> None:
    raise ValueError(index)


def _errors(loader: Kind) -> None:
    iterator = iter(loader(Failing(6, {1, 4}, _raise), num_workers=1))
    drain(iterator)


def _stream(loader: Kind) -> None:
    iterator = iter(loader(Sharded(40), batch_size=2, num_workers=2))
    next(iterator)


def _several(loader: Kind) -> None:
    made = loader(Numbers(9), num_workers=1)
    iterators = [iter(made) for _ in range(3)]
    for iterator in iterators:
        next(iterator)


@pytest.mark.parametrize("use", [
    _whole, _half, _untouched, _persistent, _errors, _stream, _several,
], ids=lambda function: function.__name__.strip("_"))
def test_resource_counts_stay_flat(loader: Kind, use: Callable[[Kind], Any]) -> None:
    rounds = 4 if loader.is_torch else 8
    for _ in range(2):
        use(loader)
    before = _counts()

    def grown() -> dict[str, int]:
        now = _counts()
        # The interpreter's and the allocator's own mappings come and go.
        slack = {"mappings": 40}
        return {name: now[name] - before[name] for name in now
                if now[name] > before[name] + slack.get(name, 0)}

    for _ in range(rounds):
        use(loader)
    assert wait_for(lambda: not grown()), grown()


def test_epochs_of_persistent_workers_stay_flat(loader: Kind) -> None:
    made = loader(Images(8), batch_size=2, num_workers=2, persistent_workers=True)
    for _ in range(5):
        list(made)
    before = _counts()
    for epoch in range(30):
        for batch in made:
            if epoch % 3 == 0:
                break
        del batch

    def grown() -> dict[str, int]:
        # Mappings are not compared: those of torch follow the batches in flight.
        now = _counts()
        return {name: now[name] - before[name] for name in now
                if name != "mappings" and now[name] > before[name] + 8}

    assert wait_for(lambda: not grown()), grown()


def _resident() -> int:
    """Bytes of memory, shared and private, that this process has touched."""
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))


@pytest.mark.parametrize("persistent", [False, True])
def test_memory_of_dropped_batches_is_used_again(loader: Kind, persistent) -> None:
    # An epoch is 12 MB; without reuse twelve of them would be 150 MB.
    made = loader(Images(16, 256), batch_size=2, num_workers=2,
                  persistent_workers=persistent)
    for _ in range(2):
        list(made)
    before = _resident()
    for _ in range(12):
        for batch in made:
            # Only pages that are read count as this process's.
            assert batch["image"].sum() == batch["label"].sum() * 3 * 256 * 256
        del batch
    assert _resident() - before < 80 << 20


def test_kept_batches_need_no_descriptors(own: Kind) -> None:
    made = own(Images(120), batch_size=2, num_workers=2, persistent_workers=True)
    kept = list(made)[:2]
    before = len(os.listdir("/proc/self/fd"))
    kept += list(made)
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert len(kept) == 62


class Large(Numbers):
    """4 MiB a sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 << 20,), index, dtype=torch.int32)


def test_copies_past_memory_limit_are_freed(own: Kind) -> None:
    # Half of the limit may be kept in the arena; from there on the caller gets copies. Nine
    # are kept and one is prefetched; what malloc keeps of dropped ones would be several times that.
    made = own(Large(120), batch_size=2, num_workers=2, memory_limit="64MiB")
    kept, most, before = [], 0, None
    for number, batch in enumerate(made):
        if number == 0:
            before = _private()
        if number < 9:
            kept.append(batch)
        most = max(most, _private() - before)
    assert most < (9 - 4 + 5) * 8 << 20
    assert [int(batch[0, 0]) for batch in kept] == list(range(0, 18, 2))


def _private() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if "RssAnon" in line)
