"""Iterable datasets: sharding, uneven ends, lengths, and the order of workers."""

from __future__ import annotations

import multiprocessing
import re
import warnings
from typing import Any, Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from .datasets import Replicated, Sharded, Uneven, as_is
from .support import Kind, assert_same, drain, flat, remembered, wait_for


def _batches(make: Any, dataset: Any, **kwargs: Any) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(make(dataset, **kwargs))


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("kwargs", [
    {}, {"batch_size": 3}, {"batch_size": 3, "drop_last": True}, {"batch_size": None},
    {"batch_size": 100}, {"batch_size": 100, "drop_last": True},
], ids=str)
def test_order_is_torchs(loader: Kind, workers: int, kwargs: dict[str, Any]) -> None:
    for dataset in (Sharded(17), Uneven([7, 0, 4]), Replicated(5)):
        want = remembered(
            f"stream {type(dataset).__name__} {workers} {kwargs}",
            lambda: _batches(DataLoader, dataset, num_workers=workers, **kwargs))
        assert_same(_batches(loader, dataset, num_workers=workers, **kwargs), want)


@pytest.mark.parametrize("counts", [[0, 0], [0, 5], [5, 0], [1, 9], [9, 1], [4, 4]])
@pytest.mark.parametrize("prefetch", [1, 4])
def test_uneven_ends(loader: Kind, counts: list[int], prefetch: int) -> None:
    kwargs = {"num_workers": 2, "batch_size": 2, "prefetch_factor": prefetch}
    want = remembered(f"uneven {counts} {prefetch}",
                      lambda: _batches(DataLoader, Uneven(counts), **kwargs))
    got = _batches(loader, Uneven(counts), **kwargs)
    assert_same(got, want)
    assert sum(len(batch) for batch in got) == sum(counts)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_exit_at_end_of_stream(loader: Kind, persistent: bool) -> None:
    made = loader(Uneven([1, 9]), batch_size=None, num_workers=2, prefetch_factor=2,
                  persistent_workers=persistent)
    for _ in range(2):
        iterator = iter(made)
        workers = list(iterator._workers)
        rows = [next(iterator).tolist() for _ in range(7)]
        assert wait_for(lambda: not workers[0].is_alive(), 0.5 if persistent else 20) \
            is not persistent
        assert workers[1].is_alive()
        rows += [row.tolist() for row in iterator]
        assert sorted(rows) == [[0, 0]] + [[1, i] for i in range(9)]
        if not persistent:
            workers[0].join(90)
        assert workers[0].exitcode == (None if persistent else 0)


def test_out_of_order(loader: Kind) -> None:
    made = loader(Uneven([6, 3]), batch_size=2, num_workers=2, in_order=False)
    for _ in range(2):
        rows = [row for batch in made for row in batch.tolist()]
        assert sorted(rows) == [[0, i] for i in range(6)] + [[1, i] for i in range(3)]
        assert [row for row in rows if row[0] == 0] == [[0, i] for i in range(6)]


def test_out_of_order_without_batching(loader: Kind) -> None:
    made = loader(Sharded(11), batch_size=None, num_workers=2, in_order=False)
    assert sorted(made) == list(range(11))


class Info(IterableDataset):
    def __iter__(self) -> Iterator[tuple[int, int, bool]]:
        info = get_worker_info()
        yield info.id, info.num_workers, info.dataset is self


def test_worker_info(loader: Kind) -> None:
    made = loader(Info(), batch_size=None, num_workers=2, collate_fn=as_is)
    assert list(made) == [(0, 2, True), (1, 2, True)]


def _shard(worker: int) -> None:
    dataset = get_worker_info().dataset
    dataset.first = worker


class ByInit(IterableDataset):
    """Sharded by worker_init_fn rather than in __iter__."""

    first = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, 9, get_worker_info().num_workers))


def test_sharding_in_worker_init(loader: Kind) -> None:
    made = loader(ByInit(), num_workers=2, worker_init_fn=_shard)
    assert sorted(flat(made)) == list(range(9))


class Fresh(IterableDataset):
    """Counts how often it was asked for an iterator."""

    def __init__(self) -> None:
        self.asked = 0

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        yield self.asked


@pytest.mark.parametrize("persistent", [False, True])
def test_iter_is_called_once_an_epoch(loader: Kind, persistent: bool) -> None:
    made = loader(Fresh(), num_workers=1, persistent_workers=persistent)
    want = [[1], [2], [3]] if persistent else [[1], [1], [1]]
    assert [flat(made) for _ in range(3)] == want


class Itself(IterableDataset):
    """Its own iterator, as file-like datasets often are."""

    def __init__(self, length: int) -> None:
        self.left = length

    def __iter__(self) -> "Itself":
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left


def test_dataset_that_is_its_own_iterator(loader: Kind) -> None:
    assert flat(loader(Itself(5), batch_size=2, num_workers=1)) == [4, 3, 2, 1, 0]
    assert flat(loader(Itself(5), batch_size=2, num_workers=0)) == [4, 3, 2, 1, 0]


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1


def test_endless_stream_is_read_and_dropped(loader: Kind) -> None:
    iterator = iter(loader(Endless(), batch_size=4, num_workers=2))
    first = [next(iterator).tolist() for _ in range(6)]
    assert first == [[4 * (n // 2) + i for i in range(4)] for n in range(6)]
    del iterator


def _drawn(make: Any, taken: int) -> int:
    """How many samples of a stream are drawn once ``taken`` batches were given."""
    drawn = multiprocessing.Value("i", 0)

    class Counted(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            for number in range(1000):
                drawn.value += 1
                yield number

    iterator = iter(make(Counted(), batch_size=2, num_workers=1, prefetch_factor=3))
    for _ in range(taken):
        next(iterator)
    iterator._shutdown_workers()
    return drawn.value


def test_streams_are_not_read_past_the_window(loader: Kind) -> None:
    # One worker, window 3: at most taken + 3 batches have been started.
    assert _drawn(loader, 4) <= 2 * (4 + 3)


class Broken(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        yield 0
        yield 1
        raise LookupError("broken stream")


def test_error_in_a_stream(loader: Kind) -> None:
    def run(make: Any) -> list[Any]:
        iterator = iter(make(Broken(), num_workers=1))
        found = drain(iterator)
        iterator._shutdown_workers()
        return found

    assert run(loader) == run(DataLoader)
    with pytest.raises(LookupError, match="Caught LookupError in DataLoader worker"):
        list(loader(Broken(), num_workers=1))


class Faulty(IterableDataset):
    """An iterator that continues after an error."""

    def __iter__(self) -> "Faulty":
        self.number = -1
        return self

    def __next__(self) -> int:
        self.number += 1
        if self.number == 2:
            raise LookupError("once")
        if self.number == 5:
            raise StopIteration
        return self.number


def test_stream_goes_on_after_an_error(loader: Kind) -> None:
    iterator = iter(loader(Faulty(), num_workers=1))
    assert drain(iterator) == [0, 1, ("error", LookupError), 3, 4]
    iterator._shutdown_workers()


# ------------------------------------------------------------------ lengths


WARNING = (
    "Length of IterableDataset {} was reported to be 5(when accessing "
    "len(dataloader)), but 6 samples have been fetched. "
)
ADVICE = (
    "For multiprocessing data-loading, this could be caused by not properly "
    "configuring the IterableDataset replica at each worker. Please see "
    "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset "
    "for examples."
)


class Understated(Sharded):
    """Claims fewer samples than it has."""

    def __len__(self) -> int:
        return self.length - 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_too_many_samples_are_warned_about(loader, workers, persistent) -> None:
    if persistent and not workers:
        pytest.skip("persistent workers need workers")
    dataset = Understated(6)
    made = loader(dataset, num_workers=workers, persistent_workers=persistent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(made)
    assert len(made) == 5
    text = WARNING.format(dataset) + (ADVICE if workers else "")
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$") as caught:
        list(made)
    assert len([w for w in caught if "Length of" in str(w.message)]) == 1


def test_len_call_does_not_affect_running_iterator(loader: Kind) -> None:
    made = loader(Understated(6), num_workers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        iterator = iter(made)
        next(iterator)
        len(made)
        list(iterator)


def test_batches_are_compared_with_samples(loader: Kind) -> None:
    made = loader(Replicated(5), batch_size=2, num_workers=2)
    assert len(made) == 3
    with pytest.warns(UserWarning, match="but 6 samples have been fetched"):
        assert len(list(made)) == 6


def test_tensors_of_a_stream_are_kept(loader: Kind) -> None:
    class Filled(Sharded):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return (torch.full((3000,), float(i)) for i in super().__iter__())

    kept = _batches(loader, Filled(20), batch_size=2, num_workers=2)
    found = sorted(row.unique().item() for batch in kept for row in batch)
    assert found == list(range(20))


class Unmeasured(Sharded):
    """Its length cannot be asked for."""

    def __len__(self) -> int:
        raise ValueError("length is not known")


@pytest.mark.parametrize("workers", [0, 2])
def test_length_of_a_stream_is_not_asked_for(loader: Kind, workers: int) -> None:
    assert sorted(flat(batch for batch in loader(Unmeasured(5), num_workers=workers))) \
        == [0, 1, 2, 3, 4]
