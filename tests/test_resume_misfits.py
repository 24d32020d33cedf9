"""States that are ahead of delivery, and loaders that a state does not fit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from resuming import check_rest, lists, through_json
from torch.utils.data import BatchSampler, IterableDataset, Sampler, SequentialSampler

import minato

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


# ---- a stream in this process, while it makes a batch ----------------------------------------


class Counts(IterableDataset):
    """Says where it is. What ``stop`` names is not made at first: an interrupt comes."""

    def __init__(self, stop: int | None = None, seconds: float = 0.0) -> None:
        self.at, self.stop, self.seconds = 0, stop, seconds

    def __iter__(self) -> Any:
        while self.at < 20:
            self.at += 1
            if self.at == self.stop:
                self.stop = None
                raise KeyboardInterrupt
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Goes(Counts):
    """Its iterator continues after an interrupt."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        if self.at >= 20:
            self.at = 0
            raise StopIteration
        self.at += 1
        if self.at == self.stop:
            self.stop = None
            raise KeyboardInterrupt
        return self.at


class Stateless(Counts):
    """Says nothing of where it is: delivered batches are made again and dropped."""

    state_dict = load_state_dict = None  # type: ignore[assignment]


@pytest.mark.parametrize("dear", [False, True])
@pytest.mark.parametrize("kind", [Counts, Goes, Stateless])
@pytest.mark.parametrize("stop", [1, 7, 18])
def test_stream_batch_lost_to_interrupt_is_repeated(
    kind: Any, stop: int, dear: bool, monkeypatch: Any
) -> None:
    """Also if state_dict() is expensive and only called at the start."""
    if dear:
        monkeypatch.setattr("minato.stateful.CHEAP_NS", 0)
        monkeypatch.setattr("minato.stateful.SHARE", 0.0)
    loader = minato.DataLoader(kind(stop), batch_size=4)
    iterator, taken = iter(loader), []
    with pytest.raises(KeyboardInterrupt):
        while True:
            taken.append(next(iterator).tolist())
    again = minato.DataLoader(kind(), batch_size=4)
    again.load_state_dict(through_json(loader.state_dict()))
    assert taken + lists(again) == lists(minato.DataLoader(Counts(), batch_size=4))
    assert lists(again) == lists(minato.DataLoader(Counts(), batch_size=4))


@pytest.mark.parametrize("kind", [Goes, Stateless])
def test_continued_iterator_has_lost_interrupted_batch(kind: Any) -> None:
    """And so have its states from there on. The iterator of a generator goes on if its interrupt
    was in collate_fn."""
    fired: list[bool] = []

    def collate(samples: list[int]) -> list[int]:
        if kind is Stateless and 8 in samples and not fired:
            fired.append(True)
            raise KeyboardInterrupt
        return samples

    stop = 7 if kind is Goes else None
    loader, again, later = (
        minato.DataLoader(kind(at), batch_size=4, collate_fn=collate) for at in (stop, None, None)
    )
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    again.load_state_dict(through_json(loader.state_dict()))
    assert next(iter(again)) == [5, 6, 7, 8]
    assert next(iterator) == ([8, 9, 10, 11] if kind is Goes else [9, 10, 11, 12])
    later.load_state_dict(through_json(loader.state_dict()))
    assert list(later) == list(iterator)
    assert sum(map(len, list(later))) == 20  # the next epoch is whole


@pytest.mark.parametrize("batch", [0, 1, 4])
def test_state_during_collation_includes_the_batch(batch: int) -> None:
    states: list[Any] = []

    def collate(samples: list[int]) -> list[int]:
        states.append(through_json(loader.state_dict()))
        return samples

    loader = minato.DataLoader(Counts(), batch_size=4, collate_fn=collate)
    whole = list(loader)
    again = minato.DataLoader(Counts(), batch_size=4, collate_fn=list)
    again.load_state_dict(states[batch])
    assert list(again) == whole[batch:]


# ---- other loaders ---------------------------------------------------------------------------


class Named(BatchSampler):
    """Refuses to say how many samples its batches have."""

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        raise RuntimeError("not yet")

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter([[n, n + 1] for n in range(0, 40, 2)])

    def __len__(self) -> int:
        return 20


def of_batches(size: int) -> dict[str, Any]:
    return {"batch_sampler": BatchSampler(SequentialSampler(range(40)), size, False)}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("then, now", [
    (of_batches(4), of_batches(8)), ({"batch_size": 4}, of_batches(8)),
    (of_batches(4), {"batch_size": 8}),
])  # fmt: skip
def test_a_batch_samplers_other_size_is_noticed(then: Any, now: Any, workers: int) -> None:
    first = minato.DataLoader(range(40), num_workers=workers, **then)
    next(iter(first))
    again = minato.DataLoader(range(40), num_workers=workers, **now)
    with pytest.raises(ValueError, match="batch_size=4, but this loader has 8"):
        again.load_state_dict(through_json(first.state_dict()))
    same = minato.DataLoader(range(40), batch_size=4, num_workers=workers)
    same.load_state_dict(through_json(first.state_dict()))
    assert lists(same)[0] == [4, 5, 6, 7]


def test_a_batch_sampler_need_not_say_its_size() -> None:
    def make() -> Any:
        return minato.DataLoader(
            range(40), batch_sampler=Named(SequentialSampler(range(40)), 2, False)
        )

    first, again = make(), make()
    next(iter(first))
    again.load_state_dict(through_json(first.state_dict()))
    assert lists(again)[0] == [2, 3]


class Grows:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("options", [
    {}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 2, "batching": "ready", "in_order": False},
])  # fmt: skip
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_dataset_that_grows_in_mid_epoch(options: Any, epoch: int) -> None:
    """The order is that of its length when the epoch began."""
    data = Grows(100)
    first = minato.DataLoader(data, batch_size=4, shuffle=True, **options)
    for _ in range(epoch):
        data.size += 20
        lists(first)
    iterator = iter(first)
    next(iterator)
    data.size += 20
    state = through_json(first.state_dict())
    again = minato.DataLoader(Grows(data.size), batch_size=4, shuffle=True, **options)
    with pytest.raises(ValueError, match="dataset_length"):
        again.load_state_dict(state)
    again = minato.DataLoader(Grows(data.size - 20), batch_size=4, shuffle=True, **options)
    again.load_state_dict(state)
    data.size -= 20  # which torch's sampler reads once more when it ends
    assert sorted(sum(lists(again), [])) == sorted(sum(lists(iterator), []))


class NoLength(Grows):
    def __len__(self) -> int:
        raise RuntimeError("nobody knows")


def test_a_dataset_need_not_say_its_length() -> None:
    first, again = (
        minato.DataLoader(NoLength(8), batch_size=4, sampler=range(8)) for _ in range(2)
    )
    assert check_rest(first, again, 1) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("options", [{}, {"scheduling": "static"}, {"worker_type": "thread"}])
def test_copied_loader_has_its_own_position(options: Any) -> None:
    """Though it is made with the other's workers in it."""
    first = minato.DataLoader(
        range(24), batch_size=4, num_workers=1, persistent_workers=True, **options
    )
    iterator = iter(first)
    next(iterator), next(iterator)
    state = through_json(first.state_dict())
    other = copy.copy(first)
    other.load_state_dict(state)
    assert lists(other) == [[8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19], [20, 21, 22, 23]]
    assert lists(first) == lists(other) == lists(minato.DataLoader(range(24), batch_size=4))


# ---- a share of the samples that may fail ----------------------------------------------------


class Fails(Grows):
    """The first samples of every hundred fail, a given number of them."""

    def __init__(self, size: int, of_hundred: int) -> None:
        super().__init__(size)
        self.of_hundred = of_hundred

    def __getitem__(self, index: int) -> int:
        if index % 100 < self.of_hundred:
            raise OSError(f"no sample {index}")
        return index


class OfItsOwn:
    """Batches of indices, and nothing said of how many each has."""

    def __init__(self, size: int, batch: int) -> None:
        self.batches = [list(range(n, n + batch)) for n in range(0, size, batch)]

    def __iter__(self) -> Any:
        return iter(self.batches)


class KnowsHowMany(OfItsOwn):
    def __len__(self) -> int:
        return len(self.batches)


class Unsized(Sampler):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter(range(self.size))


SHARES = {
    "a list of batches": {"batch_sampler": [list(range(n, n + 100)) for n in range(0, 1000, 100)]},
    "batches of its own": {"batch_sampler": OfItsOwn(1000, 100)},
    "batches, and how many": {"batch_sampler": KnowsHowMany(1000, 100)},
    "no length": {"batch_size": 100, "sampler": Unsized(1000)},
    "no length, ready": {
        "batch_size": 100, "sampler": Unsized(1000), "batching": "ready", "in_order": False
    },
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", SHARES)
def test_a_share_is_of_samples(kind: str, workers: int) -> None:
    """Also if their number is unknown: then a share of the delivered samples."""
    options = {**SHARES[kind], "num_workers": workers, "on_error": "skip", "max_errors": 0.1}
    if workers == 0:
        options = {k: v for k, v in options.items() if k not in ("batching", "in_order")}
    few = minato.DataLoader(Fails(1000, 5), **options)
    assert sum(map(len, few)) == 950
    assert few.stats()["failed"]["left_out"] == 50
    with pytest.raises(OSError, match="max_errors=0.1 allows"):
        lists(minato.DataLoader(Fails(1000, 30), **options))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_share_of_a_longer_epoch_allows_more(workers: int) -> None:
    data = Fails(20, 0)
    loader = minato.DataLoader(data, batch_size=10, num_workers=workers, on_error="skip",
                               max_errors=0.1, persistent_workers=workers > 0)  # fmt: skip
    assert sum(map(len, loader)) == 20
    data.size = 200
    if workers:  # their copies of the dataset have their own value
        data.of_hundred = 0
        lists(loader)
        position = loader._iterator._position
        assert position.allowed.most(position.progress, position.sources) == 20
        return
    data.of_hundred = 4
    assert sum(map(len, loader)) == 192
