"""Persistent workers: one iterator for life, reset at each epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, get_worker_info

from .datasets import Failing, Numbers, Sharded, Uneven, as_is
from .support import Kind, all_gone, assert_same, drain, flat, worker_pids


def _made(loader: Any, dataset: Any, **kwargs: Any) -> Any:
    return loader(dataset, **{"num_workers": 2, "persistent_workers": True, **kwargs})


def test_same_iterator_and_same_workers(loader: Kind) -> None:
    made = _made(loader, Numbers(6), batch_size=2)
    assert made._iterator is None
    first = iter(made)
    assert made._iterator is first
    pids = worker_pids(first)
    assert flat(first) == list(range(6))
    assert all(worker.is_alive() for worker in first._workers)
    for _ in range(3):
        again = iter(made)
        assert again is first
        assert flat(again) == list(range(6))
        assert worker_pids(again) == pids
    del first, again, made
    assert all_gone(pids)


@pytest.mark.parametrize("taken", [0, 1, 3, 7])
def test_broken_epoch_is_followed_by_a_whole_one(loader: Kind, taken: int) -> None:
    made = _made(loader, Numbers(20), batch_size=2)
    for _ in range(3):
        iterator = iter(made)
        for number in range(taken):
            assert next(iterator).tolist() == [2 * number, 2 * number + 1]
        assert flat(made) == list(range(20))


def test_nested_loop_resets_the_outer_one(loader: Kind) -> None:
    made = _made(loader, Numbers(4))
    outer = []
    for batch in made:
        outer.append(batch.item())
        if len(outer) == 1:
            assert flat(made) == [0, 1, 2, 3]
    assert outer == [0]


class Shifted(Numbers):
    offset = 0

    def __getitem__(self, index: int) -> int:
        return index + self.offset


@pytest.mark.parametrize("persistent", [False, True])
def test_changes_of_the_dataset_between_epochs(loader: Kind, persistent: bool) -> None:
    def run(make: Any) -> list[list[int]]:
        made = make(Shifted(4), num_workers=2, persistent_workers=persistent)
        epochs = [flat(made)]
        made.dataset.offset = 10
        epochs.append(flat(made))
        half = iter(made)
        next(half)
        made.dataset.offset = 20
        epochs.append(flat(half))
        epochs.append(flat(made))
        return epochs

    got = run(loader)
    assert got == run(DataLoader)
    assert got[1] == ([0, 1, 2, 3] if persistent else [10, 11, 12, 13])


@pytest.mark.parametrize("persistent", [False, True])
def test_changes_inside_a_worker(loader: Kind, persistent: bool) -> None:
    class Counting(Numbers):
        calls = 0

        def __getitem__(self, index: int) -> int:
            self.calls += 1
            return self.calls

    made = loader(Counting(3), num_workers=1, persistent_workers=persistent)
    assert flat(made) == [1, 2, 3]
    assert flat(made) == ([4, 5, 6] if persistent else [1, 2, 3])
    assert made.dataset.calls == 0


def test_generator_gives_one_base_seed_for_all_epochs(loader: Kind) -> None:
    def run(make: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(2)
        made = _made(make, Numbers(10), shuffle=True, generator=generator)
        found = []
        for _ in range(3):
            found.append(flat(made))
            found.append(made._iterator._base_seed)
        return found + [generator.get_state().tolist()]

    assert run(loader) == run(DataLoader)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("replacement", [False, True])
def test_broken_epochs_leave_the_generator_as_torch_does(
    loader: Kind, persistent: bool, replacement: bool
) -> None:
    # How far a random sampler was read determines the next numbers of its generator: the
    # order of the next epoch, and the base seed of the next iterator.
    def run(make: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(2)
        sampler = RandomSampler(Numbers(60), replacement, generator=generator)
        made = make(Numbers(60), sampler=sampler, generator=generator, batch_size=3,
                    num_workers=2, persistent_workers=persistent)
        found: list[Any] = []
        for taken in (2, 5, 0):
            iterator = iter(made)
            found.append([next(iterator).tolist() for _ in range(taken)])
            found.append(iterator._base_seed)
            del iterator
        return [*found, flat(made), flat(made), generator.get_state().tolist()]

    assert run(loader) == run(DataLoader)


@pytest.mark.parametrize("length, batch_size, prefetch", [(8, 2, 2), (9, 2, 2), (12, 2, 3)])
def test_sampler_ends_at_the_same_batch_as_torch(
    loader: Kind, length: int, batch_size: int, prefetch: int
) -> None:
    # A random sampler draws again at its end.
    def run(make: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(2)
        iterator = iter(make(Numbers(length), shuffle=True, generator=generator,
                             batch_size=batch_size, num_workers=2, prefetch_factor=prefetch))
        return [generator.get_state().tolist(),
                *(generator.get_state().tolist() for _ in iterator)]

    assert run(loader) == run(DataLoader)


def test_attributes_changed_later_do_not_reach_the_workers(loader: Kind) -> None:
    made = _made(loader, Numbers(3))
    assert flat(made) == [0, 1, 2]
    made.collate_fn = as_is
    assert flat(made) == [0, 1, 2]


def _raise(index: int) -> None:
    raise LookupError("bad sample")


def test_error_then_next_epoch(loader: Kind) -> None:
    made = _made(loader, Failing(6, {2}, _raise))
    for _ in range(3):
        assert drain(iter(made)) == [0, 1, ("error", LookupError), 3, 4, 5]
    with pytest.raises(LookupError):
        list(made)
    assert drain(iter(made)) == [0, 1, ("error", LookupError), 3, 4, 5]
    made._iterator._shutdown_workers()


@pytest.mark.parametrize("taken", [0, 2])
def test_iterable_dataset_starts_again(loader: Kind, taken: int) -> None:
    made = _made(loader, Sharded(10), batch_size=2)
    want = [batch.tolist() for batch in DataLoader(
        Sharded(10), batch_size=2, num_workers=2)]
    for _ in range(3):
        iterator = iter(made)
        for _ in range(taken):
            next(iterator)
        assert [batch.tolist() for batch in made] == want


class Starting(IterableDataset[int]):
    """A stream that fails to start in some epochs."""

    def __init__(self, *fails: int) -> None:
        self.fails, self.epoch = fails, -1

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        if self.epoch in self.fails:
            raise ConnectionError("not there yet")
        return iter(range(3))


def test_stream_failing_first_start_recovers(loader: Kind) -> None:
    made = _made(loader, Starting(0), num_workers=1)
    with pytest.raises(ConnectionError, match="not there yet"):
        next(iter(made))
    for _ in range(2):
        assert flat(made) == [0, 1, 2]


def test_a_stream_that_does_not_start_again_once(own: Kind) -> None:
    """It kills torch's worker."""
    made = _made(own, Starting(1, 3), num_workers=1)
    for epoch in range(5):
        iterator = iter(made)
        if epoch in (1, 3):
            with pytest.raises(ConnectionError, match="not there yet"):
                next(iterator)
        else:
            assert flat(iterator) == [0, 1, 2]


def test_uneven_iterable_dataset_over_epochs(loader: Kind) -> None:
    def run(make: Any) -> list[Any]:
        made = _made(make, Uneven([1, 5]), batch_size=2)
        return [list(made), list(made)]

    assert_same(run(loader), run(DataLoader))


def test_many_short_epochs(loader: Kind) -> None:
    made = _made(loader, Numbers(3), batch_size=2)
    for _ in range(100):
        assert flat(made) == [0, 1, 2]


def test_iterator_may_be_deleted_or_replaced(loader: Kind) -> None:
    made = _made(loader, Numbers(4))
    list(made)
    pids = worker_pids(made._iterator)
    made._iterator = None
    assert all_gone(pids)
    assert flat(made) == [0, 1, 2, 3]
    pids = worker_pids(made._iterator)
    del made._iterator
    made._iterator = None
    assert all_gone(pids)
    assert flat(made) == [0, 1, 2, 3]


def test_sampler_length_may_change(loader: Kind) -> None:
    cuts = [[0], [1]]
    made = _made(loader, Numbers(9), batch_sampler=cuts)
    assert flat(made) == [0, 1]
    cuts.append([7, 8])
    assert flat(made) == [0, 1, 7, 8]
    cuts.clear()
    assert flat(made) == []


def test_worker_info_stays(loader: Kind) -> None:
    class Info(Numbers):
        def __getitem__(self, index: int) -> tuple[int, int]:
            return get_worker_info().num_workers, get_worker_info().seed

    made = loader(Info(2), num_workers=1, persistent_workers=True, collate_fn=as_is)
    first, second = list(made), list(made)
    assert first == second == [[(1, made._iterator._base_seed)]] * 2
