"""Datasets with their own state: iterables that resume without repeating anything."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from resuming import seed
from torch.utils.data import IterableDataset, get_worker_info

import minato
from minato import stateful
from minato.iterators.static_and_iterable import StaticIterator

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

N, SIZE = 61, 4


@pytest.fixture(autouse=True)
def _always_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets limits that hold on any busy machine."""
    monkeypatch.setattr(stateful, "CHEAP_NS", 10**18)


def place() -> tuple[int, int]:
    info = get_worker_info()
    return (info.id, info.num_workers) if info is not None else (0, 1)


def sample(index: int, epoch: int = 0, made: int = 0) -> torch.Tensor:
    """With draws, its epoch, and how many this process has made of its epoch."""
    draws = [random.random(), random.gauss(0, 1), np.random.randn(), float(torch.randn(()))]
    return torch.tensor([index, *draws, epoch, made], dtype=torch.float64)


class Rows:
    """An iterator with a state."""

    def __init__(self, index: int, step: int, n: int) -> None:
        self.index, self.step, self.n, self.made = index, step, n, 0

    def __iter__(self) -> Rows:
        return self

    def __next__(self) -> torch.Tensor:
        if self.index >= self.n:
            raise StopIteration
        index, self.index, self.made = self.index, self.index + self.step, self.made + 1
        return sample(index, 0, self.made)

    def state_dict(self) -> dict[str, Any]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.index = state["index"]


class ByIterator(IterableDataset):
    """The iterator has the state."""

    def __init__(self, n: int = N) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return Rows(*place(), self.n)


class ByDataset(IterableDataset):
    """The dataset has the state, and a generator that continues once from the loaded state. After
    its end, its state is at the end until it restarts."""

    def __init__(self, n: int = N) -> None:
        self.n, self.done, self.told = n, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.done, self.told = self.told, 0
        (first, step), made = place(), 0
        for k in range(self.done, len(range(first, self.n, step))):
            self.done, made = k + 1, made + 1
            yield sample(first + k * step, 0, made)

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.told = state["done"]


class Raises(ByDataset):
    def state_dict(self) -> Any:
        raise OSError("no connection")


class Restarts(ByDataset):
    """Is at its beginning again after its end, and continues where it was left."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.done:
            self.told = self.done
        yield from super().__iter__()
        self.done = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Itself(Rows, IterableDataset):
    """A dataset that is its own iterator."""

    def __init__(self, n: int = N) -> None:
        super().__init__(0, 1, n)

    def __iter__(self) -> Itself:
        if self.made == 0 and self.index == 0:
            self.index, self.step = place()
        return self


class Uneven(ByIterator):
    """Its workers end one after another, some in the middle of a batch."""

    def __iter__(self) -> Any:
        number, _count = place()
        return Rows(100 * number, 1, 100 * number + 5 * number + 3)


def make(data: Any, workers: int, **kw: Any) -> Any:
    return minato.DataLoader(data, SIZE, num_workers=workers, **kw)


def values(batches: Any) -> list[Any]:
    """Without how many were made."""
    return [batch[:, :-1].tolist() for batch in batches]


def followed(loader: Any) -> tuple[list[Any], list[str]]:
    """An epoch, and the states before it, after each batch, and once it has ended, as JSON."""
    states, batches = [json.dumps(loader.state_dict())], []
    for batch in loader:
        batches.append(batch)
        states.append(json.dumps(loader.state_dict()))
    return values(batches), [*states, json.dumps(loader.state_dict())]


def rest(data: Any, state: str, workers: int, **kw: Any) -> list[torch.Tensor]:
    """The batches of a loader with this state, in a program that has drawn other numbers."""
    seed(99)
    loader = make(data, workers, **kw)
    loader.load_state_dict(json.loads(state))
    assert json.dumps(loader.state_dict()) == state
    return list(loader)


@pytest.mark.parametrize("kind, workers, step", [
    (ByIterator, 1, 5), (ByIterator, 2, 1), (ByIterator, 4, 5), (ByIterator, 8, 9),
    (ByDataset, 2, 5), (Itself, 2, 5), (Uneven, 3, 2),
])  # fmt: skip
def test_resume_anywhere_repeats_nothing(kind: Any, workers: int, step: int) -> None:
    seed(5)
    batches, states = followed(make(kind(), workers))
    for done in range(0, len(batches), step):
        tail = rest(kind(), states[done], workers)
        if done:  # before the first, the seed is the program's to come
            assert values(tail) == batches[done:], done
        made = sum(int(batch[:, -1].numel()) for batch in tail)
        highest = max(int(batch[:, -1].max()) for batch in tail)
        assert highest <= made, "samples that were delivered before were made again"
    assert rest(kind(), states[len(batches)], workers) == []


@pytest.mark.parametrize("kind", [ByIterator, ByDataset, Itself])
def test_without_workers(kind: Any) -> None:
    """The program itself restores the randomness of samples."""
    batches, states = followed(make(kind(), 0))
    for done in range(1, len(batches), 3):
        tail = rest(kind(), states[done], 0)
        assert [b[:, 0].tolist() for b in tail] == [[r[0] for r in b] for b in batches[done:]]
        assert tail[0][0, -1] == 1


class Known(ByIterator):
    """A dataset that knows its iterator and its loader."""

    made = loader = None

    def __iter__(self) -> Any:
        rows = Rows(*place(), self.n)
        self.made: Any = weakref.ref(rows)
        return rows


@pytest.mark.parametrize("ended", [False, True])
def test_finished_iterator_without_workers_is_freed(ended: bool) -> None:
    data = Known()
    data.loader = loader = make(data, 0)
    it = iter(loader)
    next(it)
    while ended and next(it, None) is not None:
        pass
    del it
    gc.collect()
    assert data.made() is None
    states = loader.state_dict()["worker_states"]
    assert states is not None
    if not ended:
        states[0]["iterator"].clear()  # it is the program's
        assert loader.state_dict()["worker_states"][0]["iterator"] == {"index": SIZE}
    gone = weakref.ref(loader)
    del loader, data
    gc.collect()
    assert gone() is None


def test_raising_state_dict_at_iterator_end_without_workers() -> None:
    loader = make(Raises(), 0)
    for _ in loader:
        break
    with pytest.raises(RuntimeError, match="of the dataset, a Raises, .* OSError: no connection"):
        loader.state_dict()


@pytest.mark.parametrize("workers", [0, 1])
def test_between_one_worker_and_none(workers: int) -> None:
    batches, states = followed(make(ByDataset(), workers))
    tail = rest(ByDataset(), states[3], 1 - workers)
    assert [b[:, 0].tolist() for b in tail] == [[r[0] for r in b] for b in batches[3:]]


def test_workers_are_ahead_of_their_states() -> None:
    it = iter(loader := make(ByIterator(), 2, prefetch_factor=4))
    for done in range(1, 7):
        next(it)
        given = [-(-done // 2), done // 2]
        states = loader.state_dict()["worker_states"]
        assert [s and s["iterator"]["index"] for s in states] == [
            number + 2 * SIZE * count if count else None and 0 for number, count in enumerate(given)
        ]


@pytest.mark.parametrize("kind", [ByIterator, ByDataset, Restarts])
def test_every_epoch_of_persistent_workers(kind: Any) -> None:
    """The end of one and places in the next, with the streams of random numbers."""
    seed(5)
    loader = make(kind(), 2, persistent_workers=True)
    _first, ended = followed(loader)
    batches, states = followed(loader)
    assert values(rest(kind(), ended[-1], 2, persistent_workers=True)) == batches
    for done in (0, 1, 7):
        seed(99)
        other = make(kind(), 2, persistent_workers=True)
        other.load_state_dict(json.loads(states[done]))
        assert values(other) == batches[done:], done
    third = values(loader)
    assert values(other) == third


def test_epochs_left_in_the_middle() -> None:
    seed(5)
    loader = make(ByDataset(), 2, persistent_workers=True)
    next(iter(loader))
    it = iter(loader)
    begun = json.dumps(loader.state_dict())
    batches = values(it)
    seed(99)
    other = make(ByDataset(), 2, persistent_workers=True)
    other.load_state_dict(json.loads(begun))
    assert values(other) == batches


def test_into_a_living_persistent_loader() -> None:
    loader = make(ByIterator(), 2, persistent_workers=True)
    batches, states = followed(loader)
    for _ in range(2):
        loader.load_state_dict(json.loads(states[5]))
        assert values(loader) == batches[5:]


def test_an_epoch_whose_beginning_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call waits for what the interrupted one waited for."""
    loader = make(ByIterator(), 2, persistent_workers=True)
    batches = [b[:, 0].tolist() for b in loader]
    it = iter(loader)
    for on_its_way, left in ((0, 3), (1, 3), (9, 2), (9, 1)):  # batches, or markers
        next(it)
        wait_for, waits = it._supervisor.wait_for, []

        def wait(*what: Any, stops: Any = (on_its_way, left), real: Any = wait_for,
                 waits: Any = waits, it: Any = it) -> None:  # fmt: skip
            if len(waits) == stops[0] or (not it._blocks and len(it._markers) == stops[1]):
                raise KeyboardInterrupt
            waits.append(what)
            real(*what)

        with monkeypatch.context() as patch:
            patch.setattr(it._supervisor, "wait_for", wait)
            with pytest.raises(KeyboardInterrupt):
                iter(loader)
        it = iter(loader)
    assert [b[:, 0].tolist() for b in it] == batches


def test_out_of_order_the_rest_comes_once() -> None:
    loader = make(ByIterator(), 3, in_order=False)
    it = iter(loader)
    first = values(next(it) for _ in range(5))
    state = json.dumps(loader.state_dict())
    tail = values(rest(ByIterator(), state, 3, in_order=False))
    assert Counter(r[0] for b in first + tail for r in b) == Counter(range(N))


@pytest.mark.parametrize("workers", [1, 3])
def test_slow_snapshots_are_taken_rarely(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches delivered since the last snapshot are made again, with the same draws."""
    monkeypatch.setattr(stateful, "CHEAP_NS", -1)
    monkeypatch.setattr(stateful, "SHARE", 0.0)
    seed(5)
    batches, states = followed(make(ByIterator(), workers))
    for done in range(1, len(batches), 6):
        again = [s["again"] for s in json.loads(states[done])["worker_states"] if s]
        assert sum(again) == done - min(done, workers)
        assert values(rest(ByIterator(), states[done], workers)) == batches[done:]


class Failing(ByDataset):
    """Its second worker's reader cannot read one sample, and stops there."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for row in super().__iter__():
            if row[0] == 21:
                raise LookupError("sample 21")
            yield row


def caught(loader: Any) -> list[Any]:
    found: list[Any] = []
    it = iter(loader)
    while True:
        try:
            found.append(next(it)[:, :-1].tolist())
        except StopIteration:
            return found
        except LookupError:
            found.append("LookupError")


def test_failed_stream_has_ended() -> None:
    """A generator that has raised is over; a loaded state would let it continue."""
    seed(5)
    whole = caught(make(Failing(), 2))
    assert whole.count("LookupError") == 1
    for done in range(4, len(whole), 3):
        it = iter(loader := make(Failing(), 2))
        for _ in range(done):
            try:
                next(it)
            except LookupError:
                pass
        other = make(Failing(), 2)
        other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert [b if b == "LookupError" else [r[0] for r in b] for b in caught(other)] == [
            b if b == "LookupError" else [r[0] for r in b] for b in whole[done:]
        ], done


class Stumbles(IterableDataset):
    """Its iterator continues after an unreadable sample, and has no state."""

    def __iter__(self) -> Any:
        rows = Rows(*place(), N)

        def read() -> Any:
            row = next(rows, None)
            if row is not None and row[0] == 9:
                raise LookupError("sample 9")
            return row

        return iter(read, None)


@pytest.mark.parametrize("workers", [0, 1])
def test_repeated_failure_is_hidden_on_resume(workers: int) -> None:
    whole = caught(make(Stumbles(), workers))
    assert whole[2] == "LookupError"
    it = iter(loader := make(Stumbles(), workers))
    next(it), next(it)
    with pytest.raises(LookupError):
        next(it)
    state = loader.state_dict()
    other = make(Stumbles(), workers)
    other.load_state_dict(state)
    assert [[r[0] for r in b] for b in caught(other)] == [[r[0] for r in b] for b in whole[3:]]


class Mute(ByIterator):
    """The state_dict() of its second worker raises."""

    def state_dict(self) -> Any:
        if place()[0] == 1:
            raise OSError("no connection")
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


class Moody(ByDataset):
    """Its load_state_dict() fails once."""

    def __init__(self, flag: str) -> None:
        super().__init__()
        self.flag = flag

    def load_state_dict(self, state: Any) -> None:
        if os.path.exists(self.flag):
            os.unlink(self.flag)
            raise OSError("not mounted yet")
        super().load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 1])
def test_failed_start_counts_nothing_as_delivered(workers: int, tmp_path: Any) -> None:
    flag = tmp_path / "flag"
    batches, states = followed(make(Moody(str(flag)), workers))
    flag.touch()
    loader = make(Moody(str(flag)), workers)
    loader.load_state_dict(json.loads(states[2]))
    with pytest.raises(OSError, match="not mounted yet"):
        next(iter(loader))
    state = loader.state_dict()
    if workers == 0:
        assert json.dumps(state) == states[2]
    else:
        loader.load_state_dict(state)
    assert [b[:, 0].tolist() for b in loader] == [[r[0] for r in b] for b in batches[2:]]


@pytest.mark.parametrize("data, kw", [
    (ByIterator(), {}), (list(range(9)), {}), (list(range(9)), {"scheduling": "static"}),
    (list(range(9)), {"batching": "ready", "in_order": False}),
])  # fmt: skip
def test_failed_worker_start_counts_nothing_as_delivered(data: Any, kw: Any) -> None:
    def fails(worker: int) -> None:
        raise OSError("not mounted yet")

    loader = make(data, 2, worker_init_fn=fails, **kw)
    with pytest.raises(OSError, match="not mounted yet"):
        next(iter(loader))
    state = loader.state_dict()
    assert (state["delivered"], state["delivered_by_worker"] or [0, 0]) == (0, [0, 0])


class Unsendable(ByDataset):
    def state_dict(self) -> Any:
        return {"open": lambda: None}


class Locked(ByDataset):
    def state_dict(self) -> Any:
        return {"lock": threading.Lock()}


@pytest.mark.parametrize("kind, workers, words", [
    (Mute, 2, "worker process 1.*Mute.*OSError: no connection"),
    (Raises, 0, "of the dataset, a Raises, .* OSError: no connection"),
    (Unsendable, 2, "worker process 0.*Unsendable.*cannot be pickled"),
    (Locked, 0, "a Locked, or of its iterator cannot be copied: .*lock"),
    (ByDataset, 1, "worker process 0.*bytes, but at most 20 may"),
])  # fmt: skip
def test_state_that_cannot_be_had_fails_only_when_asked(
    kind: Any, workers: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is ByDataset:
        monkeypatch.setattr(stateful, "MOST_BYTES", 20)
    it = iter(loader := make(kind(), workers))
    next(it), next(it)
    with pytest.raises(RuntimeError, match=f"(?s){words}"):
        loader.state_dict()
    assert len(list(it)) == 14


def test_state_dict_none_is_not_asked() -> None:
    """Then delivered batches are made again and discarded, as without a state."""
    data: Any = ByDataset()
    data.state_dict = None
    batches, states = followed(make(data, 2))
    assert json.loads(states[3])["worker_states"] is None
    assert values(rest(data, states[3], 2)) == batches[3:]


class Guesses:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Tells(dict[str, Any]):
    """Its methods are written in C."""

    state_dict, load_state_dict = dict.copy, dict.update


def test_methods_of_a_class_make_it_stateful() -> None:
    """Not what its __getattr__ gives."""
    assert stateful.is_stateful(ByDataset()) and stateful.is_stateful(Tells())
    assert not stateful.is_stateful(Guesses())


class Asks(ByDataset):
    """As MosaicML's streams."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> Any:  # type: ignore[override]
        raise AssertionError


class NineSamples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        return index


class AsksMap(NineSamples):
    state_dict, load_state_dict = Asks.state_dict, Asks.load_state_dict


class Columns(IterableDataset):
    def __getattr__(self, name: str) -> Any:
        return {"n": 9}[name]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


class Network(torch.nn.Module, NineSamples):
    """Its weights are not a place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("kind, workers", [
    (Asks, 2), (Asks, 0), (AsksMap, 0), (Columns, 0), (Columns, 1), (Network, 0),
])  # fmt: skip
def test_dataset_without_a_usable_state_is_not_asked(kind: Any, workers: int) -> None:
    loader = make(kind(), workers)
    assert len(list(loader)) == (16 if kind is Asks else 3)
    next(iter(loader))
    json.dumps(state := loader.state_dict())
    assert state["worker_states"] is None


def test_another_number_of_workers() -> None:
    _batches, states = followed(make(ByDataset(), 2, persistent_workers=True))
    with pytest.raises(ValueError, match="taken with 2 workers"):
        make(ByDataset(), 3).load_state_dict(json.loads(states[3]))
    assert len(rest(ByDataset(), states[-1], 3)) == 16  # a new epoch


class Plain(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        first, step = place()
        return iter(range(first, N, step))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_another_number_of_workers_before_anything_was_delivered(workers: int) -> None:
    it = iter(loader := make(Plain(), 2))
    state = json.dumps(loader.state_dict())
    del it
    loader = make(Plain(), workers)
    loader.load_state_dict(json.loads(state))
    it = iter(loader)
    batch = next(it)
    if workers:
        assert loader.state_dict()["delivered_by_worker"] == [1, *[0] * (workers - 1)]
    assert sorted(sum((b.tolist() for b in it), batch.tolist())) == list(range(N))


def test_batches_finished_during_check_keep_order() -> None:
    """Otherwise a worker's end is seen before its last batch, which is then not waited for."""
    iterator = StaticIterator.__new__(StaticIterator)
    polled: list[Any] = []

    def poll(block: int) -> bool:  # both are done as soon as one was looked at
        polled.append(block)
        return len(polled) > 1

    engine = SimpleNamespace(poll=poll)
    iterator._engine = engine  # type: ignore[assignment]
    sent = [SimpleNamespace(answer=None, done_ns=0, block=number) for number in range(2)]
    iterator._blocks = dict(enumerate(sent))  # type: ignore[arg-type]
    assert iterator._done() == [0]
    assert iterator._done() == [0, 1]


def test_a_dataset_that_has_no_state_now() -> None:
    class Plain(IterableDataset):
        def __iter__(self) -> Any:
            return iter([torch.zeros(7)] * N)

    _batches, states = followed(make(ByDataset(), 2))
    with pytest.raises(ValueError, match="dataset.*Plain.*load_state_dict"):
        rest(Plain(), states[3], 2)


def test_worker_killed_after_resume() -> None:
    """No other worker can replace it; the state before it is still valid."""
    batches, states = followed(make(ByIterator(200), 2))
    loader = make(ByIterator(200), 2)
    loader.load_state_dict(json.loads(states[3]))
    it = iter(loader)
    assert values([next(it)])[0] == batches[3]
    state = json.dumps(loader.state_dict())
    os.kill(it._workers[0].pid, signal.SIGKILL)
    with pytest.raises(minato.WorkerLost, match="killed by signal"):
        list(it)
    del it
    assert values(rest(ByIterator(200), state, 2)) == batches[4:]


class Counts(torch.utils.data.Dataset):
    """A map-style dataset with a state, which only lives on without workers."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        self.asked += 1
        return self.asked

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.asked = state["asked"]


def test_map_style_without_workers() -> None:
    loader = make(Counts(), 0)
    it = iter(loader)
    next(it), next(it)
    state = json.loads(json.dumps(loader.state_dict()))
    other = make(Counts(), 0)
    other.load_state_dict(state)
    assert [b.tolist() for b in other] == [b.tolist() for b in it]
    with pytest.raises(ValueError, match="1 copy of the dataset"):
        make(Counts(), 2).load_state_dict(state)
    list(loader)
    with pytest.warns(UserWarning, match="1 copy of the dataset.* does not get its state"):
        make(Counts(), 2).load_state_dict(loader.state_dict())


class DrawsMap(torch.utils.data.Dataset):
    """Keeps the generator that its samples draw from in its state."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, int(torch.randint(1000, (1,)))])

    def state_dict(self) -> Any:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: Any) -> None:
        torch.set_rng_state(state["torch"])


class Draws(IterableDataset):
    """The same of an iterable; its iterator is itself, or has the state."""

    def __init__(self, itself: bool) -> None:
        self.itself, self.made = itself, 0

    def __iter__(self) -> Draws:
        return self if self.itself else Draws(True)

    def __next__(self) -> torch.Tensor:
        if self.made == 24:
            raise StopIteration
        self.made += 1
        return torch.tensor([self.made, int(torch.randint(1000, (1,)))])

    def state_dict(self) -> Any:
        return {"torch": torch.get_rng_state(), "made": self.made}

    def load_state_dict(self, state: Any) -> None:
        torch.set_rng_state(state["torch"])
        self.made = state["made"]


@pytest.mark.parametrize("delivered", [0, 1, 5])
@pytest.mark.parametrize("kind", ["map", "shuffled", "itself", "iterator"])
def test_generators_set_by_loaded_dataset_are_kept(
    kind: str, delivered: int
) -> None:
    """It was asked to; torch's loader with a state also continues that way."""

    def loader() -> Any:
        data = DrawsMap() if kind in ("map", "shuffled") else Draws(kind == "itself")
        return make(data, 0, **({"shuffle": True} if kind == "shuffled" else {}))

    first = loader()
    batches = iter(first)
    for _ in range(delivered):
        next(batches)
    state = first.state_dict()
    expected = [batch.tolist() for batch in batches]
    torch.randn(7)  # the program draws, too
    second = loader()
    second.load_state_dict(state)
    assert [batch.tolist() for batch in second] == expected and len(expected) == 6 - delivered


class StatefulIterator(IterableDataset):
    def __iter__(self) -> Any:
        return MadeAlone(True)


class MadeAlone(Draws):
    """Its state leaves the generators to the program."""

    def state_dict(self) -> Any:
        return {"made": self.made}

    def load_state_dict(self, state: Any) -> None:
        self.made = state["made"]


def test_resumed_iterator_leaves_generators_to_the_program() -> None:
    """Without workers: the base seed of a resumed epoch is not drawn."""
    first = make(StatefulIterator(), 0)
    batches = iter(first)
    next(batches)
    state, generator = first.state_dict(), torch.get_rng_state()
    expected = [batch.tolist() for batch in batches]
    second = make(StatefulIterator(), 0)
    second.load_state_dict(state)
    torch.set_rng_state(generator)
    assert [batch.tolist() for batch in second] == expected


def test_map_style_with_workers_is_not_asked() -> None:
    loader = make(Counts(), 2)
    with pytest.warns(UserWarning, match="state_dict.. of the dataset, a Counts, is not part"):
        assert loader.state_dict()["worker_states"] is None
    loader.state_dict()
    make(Counts(), 2, scheduling="static").state_dict()


class Holds(ByDataset):
    """Keeps a loaded state in every epoch, like Hugging Face's streams."""

    _starting_state_dict: Any = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.told = self._starting_state_dict or 0
        yield from super().__iter__()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._starting_state_dict = state["done"]


@pytest.mark.parametrize("workers", [0, 2])
def test_epoch_after_resumed_epoch_is_complete(workers: int) -> None:
    kw = {"persistent_workers": workers > 0}
    batches, states = followed(make(Holds(), workers, **kw))
    loader = make(Holds(), workers, **kw)
    loader.load_state_dict(json.loads(states[3]))
    assert [len(list(loader)) for _ in range(2)] == [len(batches) - 3, len(batches)]
    data = Holds()
    data._starting_state_dict = 8  # set by the program, so it is kept
    assert [len(list(make(data, workers, **kw))) for _ in range(2)] == [
        len(batches) - 2 * max(1, workers)] * 2


class BufferShuffledExamplesIterable:
    def __init__(self, ex_iterable: Any) -> None:
        self.ex_iterable = ex_iterable


class Mapped(BufferShuffledExamplesIterable):
    pass


class Placed(torch.utils.data.IterableDataset[int]):
    """Counts its epochs, and begins each at the place that a state has set."""

    def __init__(self) -> None:
        self.begin = self.at = self.epoch = 0

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        items = range(24) if worker is None else range(worker.id, 24, worker.num_workers)
        self.epoch += 1
        for self.at in range(self.begin + 1, len(items) + 1):
            yield items[self.at - 1] + 100 * self.epoch

    def state_dict(self) -> Any:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: Any) -> None:
        self.begin, self.epoch = state["at"], state["epoch"]


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_after_a_resumed_one_begin_at_the_beginning(workers: int) -> None:
    options: Any = {"batch_size": 2, "num_workers": workers, "persistent_workers": workers > 0}
    loader = minato.DataLoader(Placed(), **options)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    del batches
    loader = minato.DataLoader(Placed(), **options)
    loader.load_state_dict(state)
    seen = [list(loader) for _ in range(3)]
    assert [len(epoch) for epoch in seen] == [7, 12, 12]
    assert [int(epoch[-1][0]) // 100 for epoch in seen] == [2, 3, 4]


@pytest.mark.parametrize("shuffled", [False, True])
def test_incomplete_shuffle_buffer_state_is_not_used(shuffled: bool) -> None:
    """Like a stream of Hugging Face's datasets with samples in its shuffle buffer."""
    data: Any = ByDataset()
    data._ex_iterable = Mapped((BufferShuffledExamplesIterable if shuffled else Mapped)(None))
    batches, states = followed(make(data, 1))
    assert (json.loads(states[3])["worker_states"] is None) == shuffled
    assert values(rest(data, states[3], 1)) == batches[3:]


@pytest.mark.parametrize("states", [
    7, [7], [{}], [{"dataset": 1}],
    [{"dataset": 1, "iterator": 1, "ended": 0, "begins": False, "generators": None, "again": 0}],
    [{"dataset": 1, "iterator": 1, "ended": False, "begins": False, "generators": [], "again": 0}],
    [{"dataset": 1, "iterator": 1, "ended": True, "begins": False, "generators": {}, "again": -1}],
], ids=str)  # fmt: skip
def test_damaged_states(states: Any) -> None:
    loader = make(ByDataset(), 1)
    next(iter(loader))
    state = {**loader.state_dict(), "worker_states": states}
    with pytest.raises(ValueError, match="the state is damaged"):
        loader.load_state_dict(state)
