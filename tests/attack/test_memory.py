"""Memory that is retained, shared, sent on or dropped, and leftovers of many loaders."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random

import psutil
import pytest
import torch
import torch.multiprocessing

import minato

from .datasets import Counting, Images, Noisy, Ragged, Slow, Wordy, keep_list
from .support import PATIENCE, SECONDS, copied, epochs, expect_returned, held, resources, same, wait_for

MIB = 1 << 20


def make(dataset, **options):
    return minato.DataLoader(dataset, **{"batch_size": 4, "num_workers": 2, **options})


def right(batch) -> bool:
    images, index = batch
    return torch.equal(images, index[:, None, None].to(images.dtype).expand_as(images))


def resident() -> int:
    """Bytes of private and of shared memory, by this process's own account."""
    info = psutil.Process().memory_info()
    return info.rss


# ---- keeping --------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["1MiB", "6MiB", "64MiB"])
@pytest.mark.parametrize("dataset", [Images(48), Wordy(48, 60000)])
def test_keep_every_batch(dataset, limit):
    """Past half of the limit batches are ordinary memory; all of them stay right."""
    loader = make(dataset, memory_limit=limit, persistent_workers=True)
    torch.manual_seed(1)
    expected = [copied(batch) for batch in make(dataset)]
    torch.manual_seed(1)
    iterator = iter(loader)
    kept = []
    for batch in iterator:
        kept.append(batch)
        memory = iterator._engine.memory()
        assert memory["kept"] <= memory["limit"] // 2
    assert same(kept, expected)
    del kept, batch
    wait_for(lambda: iterator._engine.memory()["kept"] == 0)


def test_batches_of_very_different_sizes():
    """A batch that was started early must not keep the one before it from starting."""
    rng = random.Random(3)
    sizes = [rng.choice((1, 1, 2, 24)) for _ in range(40)]
    batches, at = [], 0
    for size in sizes:
        batches.append(list(range(at, at + size)))
        at += size
    loader = minato.DataLoader(
        Images(at, (128, 256)), batch_sampler=batches, num_workers=3, memory_limit="4MiB",
        persistent_workers=True,
    )  # fmt: skip
    for _ in range(3):
        assert [b[1].tolist() for b in loader] == batches


def test_a_batch_outlives_everything():
    loader = make(Images(48))
    iterator = iter(loader)
    batch = next(iterator)
    view = batch[0][1:3, :, ::7]
    array = batch[0].numpy()[3]
    index = batch[1].clone()
    assert right(batch)
    del batch, iterator, loader
    for _ in range(3):
        gc.collect()
        list(make(Images(48)))
    assert (view == index[1:3, None, None]).all() and (array == 3).all()


def test_random_keeping(seed):
    """Batches are kept and dropped at random; none ever changes."""
    rng = random.Random(seed)
    kept: list = []
    loader = make(Images(400, (33, 700)), memory_limit="12MiB", persistent_workers=True)
    for _ in epochs(SECONDS):
        for batch in loader:
            kept.append(batch if rng.random() < 0.5 else (batch[0].numpy(), batch[1]))
            while len(kept) > 40 or (kept and rng.random() < 0.4):
                images, index = kept.pop(rng.randrange(len(kept)))
                assert right((torch.as_tensor(images), index))
            del batch


# ---- sharing --------------------------------------------------------------------------------


def arena_batch(iterator):
    """A batch that lives in the arena: the first ones teach the layout and do not."""
    while True:
        before = iterator._engine.memory()["kept"]
        batch = next(iterator)
        if iterator._engine.memory()["kept"] > before:
            return batch


@pytest.mark.parametrize("collate", [None, keep_list])
def test_numpy_view_and_share_memory(collate):
    """share_memory_() gives the storage new memory; arrays over the old memory stay right."""
    options = {} if collate is None else {"collate_fn": collate}
    iterator = iter(make(Images(400), memory_limit="16MiB", **options))
    batch = arena_batch(iterator)
    images, index = batch if collate is None else batch[0]
    images, index = images.reshape(-1, 64, 1024), torch.as_tensor(index).reshape(-1)
    array = images.numpy()
    images.share_memory_()
    assert images.is_shared() and right((images, index))
    images.add_(1000)
    del images, batch
    for _ in iterator:
        pass
    assert (array == index[:, None, None].numpy()).all()


# ---- many loaders ---------------------------------------------------------------------------


def test_two_hundred_half_read_loaders(seed):
    rng = random.Random(seed)
    kinds = [
        lambda: make(Images(24)),
        lambda: make(Images(24), persistent_workers=True),
        lambda: make(Noisy(24), scheduling="static"),
        lambda: make(Counting(60)),
        lambda: make(Ragged(24), collate_fn=keep_list),
    ]

    def some(loader) -> None:
        iterator = iter(loader)
        for _ in range(rng.randrange(4)):
            next(iterator)

    for kind in kinds:
        some(kind())
    before, rss = held(), resident()
    count = 200 if SECONDS >= 30 else 30
    for number in range(count):
        some(kinds[number % len(kinds)]())
    expect_returned(before)
    assert resident() - rss < 48 * MIB


def test_live_persistent_loaders():
    """Each uses a handful of descriptors, and returns them."""
    # The first fork ends the program's threads of OpenMP, and some things belong to the process.
    list(make(Noisy(16), persistent_workers=True))
    mine, before = held(), resources()
    loaders = [make(Noisy(16), persistent_workers=True) for _ in range(15)]
    for loader in loaders:
        assert len(list(loader)) == 4
    # two workers, and the zygote that forks them
    assert resources()["processes"] == before["processes"] + 15 * 3
    wait_for(lambda: resources()["fds"] - before["fds"] <= 15 * 7, "the ends of the starts")  # which use more
    now = resources()
    assert now["threads"] - before["threads"] <= 15 * 2
    for loader in loaders:
        assert len(list(loader)) == 4
    assert resources() == now
    del loaders, loader
    expect_returned(mine)


def shared_pages() -> int:
    """Bytes of shared memory of the whole machine."""
    for line in open("/proc/meminfo"):
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    return 0


def test_a_closed_loader_gives_its_pages_back():
    """Also when another loader's zygote was forked while it was open."""
    # counts pages of the whole machine: far more than others use in the meantime
    first = iter(make(Images(200, (1024, 1024)), num_workers=1, prefetch_factor=16))
    batch = next(first)
    wait_for(lambda: first._engine.memory()["used"] > 200 * MIB)
    second = iter(make(Slow(40, 0.01), persistent_workers=True))
    next(second)
    full = shared_pages()
    del batch, first
    gc.collect()
    wait_for(lambda: full - shared_pages() > 100 * MIB, "the pages")
    next(second)


def mapped() -> int:
    """Bytes of shared memory that this process has touched and that still exist."""
    for line in open("/proc/self/status"):
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_released_batches_return_their_pages(scheduling):
    """Also pages below a batch that is retained while the loader continues with little memory."""
    loader = make(Images(160, (512, 512)), persistent_workers=True, scheduling=scheduling)
    before = mapped()
    kept = list(loader)
    assert all(map(right, kept))  # every page of them is this process's, too
    assert mapped() - before > 120 * MIB
    last = kept[-1]
    del kept

    def gone() -> bool:
        for batch in loader:
            assert right(batch)
        return mapped() - before < 80 * MIB

    wait_for(gone, "the pages", 2 * PATIENCE)
    assert right(last)


def test_early_breaks_at_small_memory_limit_work():
    """Batches of the last epoch hold the memory for a while: the new epoch waits for it."""
    loader = make(
        Images(16, (256, 1024), delay=0.02), persistent_workers=True, memory_limit="5MiB"
    )
    assert len(list(loader)) == 4
    for _ in range(4):
        next(iter(loader))
        got = [b[1].tolist() for b in loader]
        assert got == [list(range(n, n + 4)) for n in range(0, 16, 4)]


@pytest.mark.parametrize("rows", [4097, 20000, 70000])
def test_batches_of_very_many_samples(rows):
    loader = minato.DataLoader(Slow(rows + 5, 0.0), batch_size=rows, num_workers=2)
    got = list(loader)
    assert [len(b) for b in got] == [rows, 5]
    assert torch.equal(torch.cat(got), torch.arange(rows + 5))


@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_very_many_batches_in_flight(scheduling):
    loader = minato.DataLoader(
        Slow(3000, 0.0), num_workers=1, prefetch_factor=1500, scheduling=scheduling
    )
    assert torch.cat(list(loader)).tolist() == list(range(3000))


def test_indices_that_cannot_be_unpickled_say_so():
    """The error is the worker's own, not one about its placeholder."""
    loader = make(Slow(8, 0.0), sampler=[Shy(n) for n in range(8)])
    with pytest.raises(ZeroDivisionError, match="not here"):
        list(loader)


class Shy:
    """An index that is unpickled in the process that made it only."""

    def __init__(self, number: int, pid: int | None = None) -> None:
        if pid is not None and pid != os.getpid():
            raise ZeroDivisionError("not here")
        self.number = number

    def __reduce__(self):
        return Shy, (self.number, os.getpid())


def test_batches_held_by_other_processes_are_kept(seed):
    """Many children, each with the batch that was there when it was forked."""
    context = multiprocessing.get_context("fork")
    iterator = iter(make(Images(400, (64, 512)), memory_limit="64MiB"))
    children = []

    def check(batch, event) -> None:
        event.wait()
        images, index = batch[0].numpy(), batch[1].numpy()
        os._exit(int((images != index[:, None, None]).any()))

    event = context.Event()
    for number, batch in enumerate(iterator):
        if number % 20 == 0:
            children.append(context.Process(target=check, args=(batch, event)))
            children[-1].start()
        del batch
    event.set()
    for child in children:
        child.join(90)
    assert [child.exitcode for child in children] == [0] * len(children)
