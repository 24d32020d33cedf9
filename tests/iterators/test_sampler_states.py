"""Samplers with their own state load it, and are not run again."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, Sampler

import minato
from minato.iterators import position as sampler_states

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

N, SIZE = 23, 4


@pytest.fixture(autouse=True)
def _always_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets limits that hold on any busy machine."""
    monkeypatch.setattr(sampler_states, "CHEAP_NS", 10**18)


class Noisy(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random()], dtype=torch.float64)


class Counts(Sampler):
    """Its order depends on how many epochs it has started, which only it knows."""

    def __init__(self) -> None:
        self.epoch, self.done, self.drawn = 0, 0, 0

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(N, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for index in order[self.done :]:
            self.done += 1
            self.drawn += 1
            yield index
        self.done, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.done = state["epoch"], state["done"]


class Stale(Counts):
    """Like torchdata's for distributed training: a loaded state applies to one __iter__, and
    the sampler does not restart before the next."""

    told = 0

    def __iter__(self) -> Iterator[int]:
        self.done, self.told = self.told, 0
        order = torch.randperm(N, generator=torch.Generator().manual_seed(3)).tolist()
        for index in order[self.done :]:
            self.done += 1
            self.drawn += 1
            yield index

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.told = state["done"]


class Walk:
    """An iterator over batches, with a state."""

    def __init__(self, sampler: Batches) -> None:
        self.sampler, self.at = sampler, 0

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> list[int]:
        if self.at >= N:
            raise StopIteration
        self.at, first = self.at + self.at % 3 + 1, self.at  # of different sizes
        self.sampler.drawn += 1
        return list(range(first, min(self.at, N)))

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Batches(Sampler):
    drawn = 0

    def __iter__(self) -> Any:
        return Walk(self)

    def __len__(self) -> int:
        return len(list(Walk(self)))


class Itself(Walk, Sampler):
    """A batch sampler that is its own iterator, and restarts when it has ended."""

    drawn = 0

    def __init__(self) -> None:
        super().__init__(self)  # type: ignore[arg-type]
        self.told = 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Itself:
        if self.at >= N:
            self.at = 0
        return self

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.told += 1


class Buckets:
    """Has no state, and takes more of its sampler than it has given."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        while taken := list(itertools.islice(indices, 9)):
            for first in range(0, len(taken), 3):
                yield taken[first : first + 3]

    def __len__(self) -> int:
        return len(list(iter(Buckets(range(N)))))


def make(kind: Any, workers: int, **kw: Any) -> Any:
    sampler = kind()
    batches = BatchSampler(sampler, SIZE, False) if isinstance(sampler, Counts) else sampler
    return minato.DataLoader(Noisy(), batch_sampler=batches, num_workers=workers, **kw)


def own(loader: Any) -> Any:
    return getattr(loader.batch_sampler, "sampler", loader.batch_sampler)


def seen(loader: Any) -> tuple[list[Any], list[str]]:
    batches, states = [], []
    for batch in loader:
        batches.append(batch.tolist())
        states.append(json.dumps(loader.state_dict()))
    return batches, [*states, json.dumps(loader.state_dict())]


#: the state of a sampler in a bucket is ahead of the batches that were made of its indices
KINDS: dict[str, Any] = {
    "indices": Counts, "stale": Stale, "batches": Batches, "itself": Itself,
    "buckets": lambda: Buckets(Counts()), "buckets, stale": lambda: Buckets(Stale()),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_from_every_position_of_two_epochs(name: str, workers: int) -> None:
    """And into the next epoch; delivered indices are not drawn again."""
    kind, kw = KINDS[name], {"seed_per_sample": True, "persistent_workers": workers > 0}
    torch.manual_seed(3)
    loader = make(kind, workers, **kw)
    epochs = [seen(loader) for _ in range(3)]
    orders = [[[row[0] for row in b] for b in batches] for batches, _states in epochs]
    assert (orders[0] != orders[1]) == (name in ("indices", "buckets"))
    for which in (0, 1):
        batches, states = epochs[which]
        # one that is its own iterator begins anew at its end
        ends = () if kind is Itself else (len(batches), len(batches) + 1)
        for done in (1, 3, *ends):
            other = make(kind, workers, **kw)
            other.load_state_dict(json.loads(states[done - 1]))
            if done <= len(batches):
                assert [b.tolist() for b in other] == batches[done:]
            if kind is Itself:
                assert own(other).told == 1
            if done <= len(batches) and kind in (Counts, Stale, Batches):
                again = SIZE - 1 if kind is not Batches else 0  # the last batch is short
                most = sum(map(len, batches[done:])) + again
                assert own(other).drawn <= (len(batches) - done if kind is Batches else most)
            following = [[row[0] for row in b.tolist()] for b in other]
            assert following == orders[which + 1], (which, done)


def test_slow_state_dict_is_asked_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then some indices are drawn again, and skipped."""
    monkeypatch.setattr(sampler_states, "CHEAP_NS", -1)
    monkeypatch.setattr(sampler_states, "SHARE", 0.0)
    it = iter(loader := make(Counts, 2))
    for _ in range(4):
        next(it)
    state = json.loads(json.dumps(loader.state_dict()))
    assert (state["delivered"], state["sampler"]["drawn"]) == (4, 1)
    other = make(Counts, 3)
    other.load_state_dict(state)
    assert [b.tolist() for b in other] == [b.tolist() for b in it]


def test_large_states_are_stored_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_states, "MOST_BYTES", 1)
    it = iter(loader := make(Counts, 2, prefetch_factor=3))
    for done in range(1, 6):
        next(it)
        kept = loader._iterator or it
        assert len(kept._progress.sampler.said) <= 3
        state = json.loads(json.dumps(loader.state_dict()))
        assert state["delivered"] == done
        other = make(Counts, 0)
        other.load_state_dict(state)
        assert len([b.tolist() for b in other]) == 6 - done


@pytest.mark.parametrize("kw", [
    {"scheduling": "static"}, {"on_error": "replace"}, {"in_order": False}
], ids=str)  # fmt: skip
def test_where_every_index_is_needed(kw: Any) -> None:
    """Indices are drawn again where batches are made again, and for replacements."""
    it = iter(loader := make(Stale, 2, **kw))
    first = [next(it)[:, 0].tolist() for _ in range(3)]
    state = loader.state_dict()
    # out of order it hangs on which came first
    assert state["sampler"] is None or "in_order" in kw
    other = make(Stale, 2, **kw)
    other.load_state_dict(json.loads(json.dumps(state)))
    rest = [b[:, 0].tolist() for b in other]
    assert sorted(sum(first + rest, [])) == list(range(N))


@pytest.mark.parametrize("kw", [
    {"num_workers": 2, "scheduling": "static"},
    {"num_workers": 2, "batching": "ready", "in_order": False},
    {"num_workers": 2, "on_error": "replace"}, {"num_workers": 0, "on_error": "replace"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", [Counts, Stale])
def test_a_later_epoch_where_every_index_is_needed(kind: Any, kw: dict[str, Any]) -> None:
    workers = kw["num_workers"]
    kw = {name: value for name, value in kw.items() if name != "num_workers"}
    loader = make(kind, workers, **kw)
    list(loader)
    states, first, it = [json.dumps(loader.state_dict())], [], iter(loader)
    for _ in range(3):
        states.append(json.dumps(loader.state_dict()))
        first.append(sorted(next(it)[:, 0].tolist()))
    whole = first + [sorted(b[:, 0].tolist()) for b in it]
    third = [sorted(b[:, 0].tolist()) for b in loader]
    for state, done in zip(states, (0, 0, 1, 2), strict=True):
        other = make(kind, workers, **kw)
        other.load_state_dict(json.loads(state))
        rest = [sorted(b[:, 0].tolist()) for b in other]
        if "batching" in kw:
            assert sorted(sum(first[:done] + rest, [])) == list(range(N))
            continue
        assert rest == whole[done:]
        assert [sorted(b[:, 0].tolist()) for b in other] == third


def test_mid_epoch_state_with_all_indices_needed() -> None:
    next(iter(loader := make(Counts, 2)))
    other = make(Counts, 2, scheduling="static")
    other.load_state_dict(loader.state_dict())
    with pytest.warns(UserWarning, match="after 1 of its indices, but this loader .* needs all"):
        assert len(list(other)) == 5


def test_state_before_first_batch() -> None:
    """Without workers, the sampler starts with the first batch."""
    loader = make(Counts, 0)
    list(loader)
    it = iter(loader)
    state = json.dumps(loader.state_dict())
    batches = [b[:, 0].tolist() for b in it]
    for _ in range(2):
        other = make(Counts, 0)
        other.load_state_dict(json.loads(state))
        it = iter(other)
        state = json.dumps(other.state_dict())
        assert [b[:, 0].tolist() for b in it] == batches


class Moody(Counts):
    """A sampler whose load_state_dict() fails once."""

    fails = True

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.fails:
            self.fails = False
            raise OSError("not mounted yet")
        super().load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_failed_resume_may_be_repeated(workers: int) -> None:
    loader = make(Counts, workers)
    batches, states = seen(loader)
    other = make(Moody, workers)
    other.load_state_dict(json.loads(states[2]))
    with pytest.raises(OSError, match="not mounted yet"):
        next(it := iter(other))
    assert other.state_dict()["sampler"] == json.loads(states[2])["sampler"]
    rest = it if workers == 0 else iter(other)
    assert [b[:, 0].tolist() for b in rest] == [[r[0] for r in b] for b in batches[3:]]


class Falters(Walk):
    """An iterator that raises once, before its third batch, and continues with unread indices."""

    raises: type[BaseException] | None = OSError

    def __next__(self) -> list[int]:
        if self.at == 3 and self.raises is not None:
            raises, self.raises = self.raises, None
            raise raises("not now")
        return super().__next__()


class FaltersWhenAsked(Walk):
    """And another that is interrupted in its state_dict()."""

    interrupts = True

    def state_dict(self) -> dict[str, int]:
        if self.at == 6 and self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt
        return super().state_dict()


def through(loader: Any) -> tuple[list[list[int]], int]:
    """Batches, and how many errors there were between them."""
    batches, errors, it = [], 0, iter(loader)
    while True:
        try:
            batches.append(next(it)[:, 0].tolist())
        except (OSError, KeyboardInterrupt):
            errors += 1
        except StopIteration:
            return batches, errors


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Falters, FaltersWhenAsked])
def test_an_iterator_that_raises_may_go_on(kind: type[Walk], workers: int) -> None:
    class Faltering(Batches):
        def __iter__(self) -> Any:
            return kind(self)

    def made(sampler: Any) -> Any:
        return minato.DataLoader(Noisy(), batch_sampler=sampler(), num_workers=workers)

    whole = through(made(Batches))[0]
    loader = made(Faltering)
    batches, errors = through(loader)
    lost = [batch for batch in whole if batch not in batches]
    # With workers an error of the sampler's takes the batch that was received before it along.
    assert errors == 1 and len(lost) == (workers if kind is Falters else 0)
    assert batches == [batch for batch in whole if batch not in lost]
    other = made(Batches)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert through(other)[0] == whole


class Mute(Counts):
    def state_dict(self) -> Any:
        raise OSError("no connection")


def test_a_state_dict_that_raises() -> None:
    loader = make(Mute, 2)
    it = iter(loader)
    next(it)
    with pytest.raises(RuntimeError, match="state_dict.. of the sampler raised OSError: no con"):
        loader.state_dict()
    assert len(list(it)) == 5


def test_a_sampler_without_a_state_now() -> None:
    it = iter(loader := make(Counts, 2))
    next(it)
    other = minato.DataLoader(Noisy(), SIZE, num_workers=2)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="a state_dict.. of the sampler"):
        next(iter(other))


@pytest.mark.parametrize("said", [
    7, {},
    {"drawn": 1, "position": -1, "begins": False, "sampler": None, "iterator": None},
    {"drawn": 1, "position": 2**63, "begins": False, "sampler": None, "iterator": None},
    # behind more batches than were delivered: it would skip undelivered ones
    {"drawn": 2, "position": 2 * SIZE, "begins": False, "sampler": None, "iterator": None},
], ids=str)  # fmt: skip
def test_damaged_states(said: Any) -> None:
    loader = make(Counts, 2)
    next(iter(loader))
    with pytest.raises(ValueError, match="the state is damaged"):
        loader.load_state_dict({**loader.state_dict(), "sampler": said})


class Keeps(Counts):
    """Modifies the state that it has loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"done": 0}

    def __iter__(self) -> Iterator[int]:
        while self.state["done"] < N:
            self.state["done"] += 1
            yield self.state["done"] - 1
        self.state["done"] = 0

    def state_dict(self) -> dict[str, int]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("done", [0, 2, 6])
def test_state_does_not_share_sampler_objects(workers: int, done: int) -> None:
    loader = make(Keeps, workers)
    whole = [b[:, 0].tolist() for b in loader]
    it = iter(loader)
    for _ in range(done):
        next(it)
    state = loader.state_dict()
    text = json.dumps(state)
    for _ in range(2):
        other = make(Keeps, workers)
        other.load_state_dict(state)
        assert [b[:, 0].tolist() for b in other] == whole[done:]
        assert json.dumps(state) == text
