"""Iterators: their protocol, their number, and how they end."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import minato

from .datasets import Numbers, Sharded
from .support import Kind, all_gone, flat, worker_pids


@pytest.mark.parametrize("workers", [0, 2])
def test_iterator_protocol_equals_torch(loader: Kind, workers: int) -> None:
    made = loader(Numbers(7), batch_size=2, num_workers=workers)
    iterator = iter(made)
    assert iter(iterator) is iterator
    assert len(iterator) == 4
    assert iterator._num_workers == workers
    assert iterator._num_yielded == 0
    next(iterator)
    assert iterator._num_yielded == 1 and len(iterator) == 4
    assert len(list(iterator)) == 3
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)
    assert next(iterator, "default") == "default"


def test_workers_are_like_processes(loader: Kind) -> None:
    iterator = iter(loader(Numbers(50), num_workers=2))
    assert len(iterator._workers) == 2
    for worker in iterator._workers:
        assert worker.is_alive() and worker.exitcode is None
        assert isinstance(worker.pid, int)
    assert len(set(worker_pids(iterator))) == 2
    workers = list(iterator._workers)
    iterator._shutdown_workers()
    for worker in workers:
        worker.join(90)
        assert not worker.is_alive()


def test_new_iterator_each_time(loader: Kind) -> None:
    made = loader(Numbers(4), num_workers=1)
    first, second = iter(made), iter(made)
    assert first is not second
    assert not set(worker_pids(first)) & set(worker_pids(second))
    assert flat(first) == flat(second) == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [0, 1])
def test_several_iterators_in_turn(loader: Kind, workers: int) -> None:
    made = loader(Numbers(5), num_workers=workers)
    iterators = [iter(made) for _ in range(3)]
    for number in range(5):
        assert [next(it).item() for it in iterators] == [number] * 3
    for iterator in iterators:
        with pytest.raises(StopIteration):
            next(iterator)


def test_nested_loops(loader: Kind) -> None:
    made = loader(Numbers(3), num_workers=1)
    assert [(a.item(), b.item()) for a in made for b in made] == [
        (a, b) for a in range(3) for b in range(3)]


def test_loader_inside_a_loader(loader: Kind) -> None:
    # A dataset that itself reads a loader without workers, inside a worker.
    class Outer(Numbers):
        def __getitem__(self, index: int) -> int:
            return sum(flat(loader(Numbers(index + 1))))

    assert flat(loader(Outer(4), num_workers=2)) == [0, 1, 3, 6]


def test_workers_end_at_exhaustion(loader: Kind) -> None:
    iterator = iter(loader(Numbers(6), num_workers=2))
    pids = worker_pids(iterator)
    list(iterator)
    # The iterator is still referenced; only its end can have stopped them.
    assert all_gone(pids)
    assert iterator is not None


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_deleted_iterator_ends_its_workers(loader: Kind, taken: int) -> None:
    iterator = iter(loader(Numbers(100), num_workers=2))
    for _ in range(taken):
        next(iterator)
    pids = worker_pids(iterator)
    gc.disable()
    try:
        del iterator
        assert all_gone(pids)
    finally:
        gc.enable()


def test_iterator_outlives_its_loader(loader: Kind) -> None:
    made = loader(Numbers(20), num_workers=2)
    iterator = iter(made)
    next(iterator)
    del made
    gc.collect()
    assert flat(iterator) == list(range(1, 20))


def test_iterator_is_freed_by_reference_count(loader: Kind) -> None:
    iterator = iter(loader(Numbers(20), num_workers=1))
    next(iterator)
    reference = weakref.ref(iterator)
    gc.disable()
    try:
        del iterator
        assert reference() is None
    finally:
        gc.enable()


def test_cycle_with_an_iterator_is_collected(loader: Kind) -> None:
    class Holder:
        pass

    holder = Holder()
    holder.itself = holder
    holder.iterator = iter(loader(Numbers(50), num_workers=2))
    next(holder.iterator)
    pids = worker_pids(holder.iterator)
    del holder
    assert all_gone(pids)


def test_persistent_loader_in_a_cycle_is_collected(loader: Kind) -> None:
    made = loader(Numbers(20), num_workers=1, persistent_workers=True)
    made.itself = made
    list(made)
    pids = worker_pids(made._iterator)
    del made
    assert all_gone(pids)


def test_iterator_kept_by_a_traceback(loader: Kind) -> None:
    def consume() -> None:
        iterator = iter(loader(Numbers(50), num_workers=2))
        pids.extend(worker_pids(iterator))
        next(iterator)
        raise LookupError("consumer")

    pids: list[int] = []
    kept = None
    try:
        consume()
    except LookupError as error:
        kept = error
    # The traceback holds the iterator: its workers may live, and another loader still works.
    assert flat(loader(Numbers(4), num_workers=1)) == [0, 1, 2, 3]
    frames = [frame for frame, _ in _walk(kept.__traceback__)]
    assert next(frames[-1].f_locals["iterator"]).item() == 1
    del frames
    kept = None
    assert all_gone(pids)


def _walk(traceback: Any):
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def test_shutdown_may_be_repeated(loader: Kind) -> None:
    iterator = iter(loader(Numbers(50), num_workers=2))
    next(iterator)
    pids = worker_pids(iterator)
    for _ in range(3):
        iterator._shutdown_workers()
    assert all_gone(pids)


def test_next_after_shutdown_does_not_hang(loader: Kind) -> None:
    iterator = iter(loader(Numbers(500), num_workers=2))
    next(iterator)
    iterator._shutdown_workers()
    # Received batches may still be delivered, then an error or the end.
    try:
        for _ in range(600):
            next(iterator)
    except (StopIteration, AssertionError, RuntimeError):
        return
    pytest.fail("an iterator without workers goes on")


@pytest.mark.parametrize("workers", [0, 1])
def test_iterators_are_not_pickled(loader: Kind, workers: int) -> None:
    iterator = iter(loader(Numbers(4), num_workers=workers))
    with pytest.raises(NotImplementedError) as caught:
        pickle.dumps(iterator)
    assert caught.value.args == ("{} cannot be pickled", type(iterator).__name__)
    with pytest.raises(NotImplementedError):
        copy.copy(iterator)


@pytest.mark.parametrize("workers", [0, 1])
def test_profiler_label(loader: Kind, workers: int) -> None:
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        iterator = iter(loader(Numbers(3), num_workers=workers))
        list(iterator)
    kind = "MultiProcessing" if workers else "SingleProcess"
    counts = {event.key: event.count for event in profile.key_averages()
              if event.key.startswith("enumerate(DataLoader)")}
    # three batches and the end
    assert counts == {f"enumerate(DataLoader)#_{kind}DataLoaderIter.__next__": 4}


@pytest.mark.parametrize("workers", [0, 2])
def test_wrapper_of_next_sees_every_batch(loader: Kind, workers: int, monkeypatch) -> None:
    """Like tools that annotate data loading in a trace."""
    base = torch.utils.data.dataloader._BaseDataLoaderIter
    inner, seen = base.__next__, []

    def outer(self):
        seen.append(1)
        return inner(self)

    monkeypatch.setattr(base, "__next__", outer)
    assert len(list(loader(range(8), batch_size=2, num_workers=workers))) == 4
    assert len(seen) == 5


def test_loaders_in_several_threads(loader: Kind) -> None:
    found: dict[int, list[int]] = {}

    def consume(number: int) -> None:
        made = loader(Numbers(10 + number), num_workers=1)
        found[number] = flat(made) + flat(made)

    threads = [threading.Thread(target=consume, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert found == {n: list(range(10 + n)) * 2 for n in range(3)}


def test_iterator_handed_to_another_thread(loader: Kind) -> None:
    iterator = iter(loader(Numbers(10), num_workers=1))
    assert next(iterator).item() == 0
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(flat(iterator)))
    thread.start()
    thread.join(90)
    assert found == list(range(1, 10))


def test_iterator_attributes_read_by_others(loader: Kind) -> None:
    made = loader(Numbers(4), num_workers=1)
    iterator = iter(made)
    assert iterator._dataset is made.dataset
    assert iterator._index_sampler is made.batch_sampler
    assert isinstance(iterator._base_seed, int)
    assert not hasattr(iterator, "_pin_memory_thread")
    list(iterator)


def test_reference_counts_of_the_loader_do_not_grow(loader: Kind) -> None:
    made = loader(Numbers(2), num_workers=1)
    list(made)
    gc.collect()
    before = sys.getrefcount(made), sys.getrefcount(made.dataset)
    for _ in range(5):
        list(made)
    gc.collect()
    assert (sys.getrefcount(made), sys.getrefcount(made.dataset)) == before


def test_iterable_iterator_length(loader: Kind) -> None:
    # torch's endless index sampler has no length.
    def outcome(make: Any) -> Any:
        iterator = iter(make(Sharded(4), num_workers=1))
        try:
            return len(iterator)
        except TypeError:
            return TypeError
        finally:
            iterator._shutdown_workers()

    assert outcome(loader) == outcome(DataLoader)


class Piped(torch.utils.data.IterDataPipe):
    """A case for torch's own workers."""

    def __iter__(self) -> Any:
        return iter(range(6))


ENDING: dict[str, tuple[type, dict[str, Any]]] = {
    "inline": (Numbers, {"num_workers": 0}),
    "balanced": (Numbers, {}),
    "whole batches": (Numbers, {"collate_fn": list}),
    "single samples": (Numbers, {"batch_size": None}),
    "autoscale": (Numbers, {"autoscale": (1, 4)}),
    "autoscale, out of order": (Numbers, {"autoscale": (1, 4), "in_order": False}),
    "ready": (Numbers, {"batching": "ready", "in_order": False}),
    "ready, autoscale": (
        Numbers, {"batching": "ready", "in_order": False, "autoscale": (1, 4)}
    ),
    "static": (Numbers, {"scheduling": "static"}),
    "iterable": (Sharded, {}),
    "torch's": (Piped, {}),
}  # fmt: skip


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.filterwarnings("ignore:.pin_memory. argument")
@pytest.mark.parametrize("case", ENDING)
def test_next_after_the_end_raises_again(case: str, persistent: bool) -> None:
    """Libraries that iterate over several loaders at once ask ended ones again."""
    kind, options = ENDING[case]
    options = {"num_workers": 2, **options}
    persistent = persistent and options["num_workers"] > 0  # torch refuses it without workers
    dataset = kind() if kind is Piped else kind(6)
    for pinned in (False, True):
        iterator = iter(minato.DataLoader(dataset, pin_memory=pinned, persistent_workers=persistent,
                                          **options))  # fmt: skip
        for _ in iterator:
            pass
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(iterator)
        assert next(iterator, None) is None


@pytest.mark.parametrize("epochs", [1, 2])
def test_next_after_epoch_end_with_started_successor(epochs: int) -> None:
    made = minato.DataLoader(Numbers(6), num_workers=2, persistent_workers=True,
                             prefetch_next_epoch=True)  # fmt: skip
    for _ in range(epochs):
        iterator = iter(made)
        assert flat(iterator) == list(range(6))
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(iterator)
