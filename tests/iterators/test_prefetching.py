"""Small batches are received several at a time; the program sees them one after another."""

from __future__ import annotations

import collections
import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import dataloader
from workers.test_native import wait_for

import minato
from minato.iterators import planner as _planner
from minato.iterators import receiver as _receiver

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

BATCH, BATCHES, WINDOW = 2, 40, 16
WRONG = 12
#: half a window of 16
AT_A_TIME = 8
#: a window of such batches is a MiB: the engine makes no more of them for being cheap
LEAST_FLOATS = (1 << 20) // (WINDOW * BATCH * 4)


class Numbers(torch.utils.data.Dataset):
    """Samples of one number, or of many; one fails. They are expensive enough that the engine
    does not extend windows for them."""

    def __init__(self, floats: int = 1, wrong: int = -1, batches: int = BATCHES) -> None:
        self.floats, self.wrong, self.size = floats, wrong, BATCH * batches

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        if index == self.wrong:
            raise ValueError("wrong")
        return torch.full((self.floats,), float(index))


class Row(collections.namedtuple("Row", "numbers")):
    """The trainer refuses to make a batch of some numbers; a worker makes any sample."""

    def __new__(cls, numbers: torch.Tensor) -> Row:
        if numbers.dim() == 2 and WRONG in numbers:
            raise KeyError("wrong")
        return super().__new__(cls, numbers)


class Rows(Numbers):
    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        return Row(super().__getitem__(index))


@pytest.fixture(autouse=True)
def any_step_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_receiver, "SHORT_STEP_NS", 1 << 62)


def make(dataset: Any, **options: Any) -> minato.DataLoader:
    """Its second epoch starts with all that the first epoch has taught."""
    options = {"batch_size": BATCH, "num_workers": 2, "prefetch_factor": WINDOW // 2, **options}
    return minato.DataLoader(dataset, persistent_workers=True, **options)


def second(loader: minato.DataLoader) -> Any:
    for _ in range(len(loader)):
        last = loader._iterator
        if last is None:
            last = iter(loader)
        try:
            next(last)
        except ValueError:
            pass
    return iter(loader)


def complete(iterator: Any, batches: int) -> None:
    """Waits until this many are complete, none is running, and none were made past the window."""
    wait_for(lambda: iterator._finished() >= batches
             and not any(worker["running"] for worker in iterator._engine.workers()))


def firsts(batches: Iterator[torch.Tensor]) -> list[int]:
    return [int(batch[0, 0]) for batch in batches]


def test_small_batches_are_received_together() -> None:
    iterator = second(make(Numbers()))
    complete(iterator, WINDOW)
    got, asked = [next(iterator)], []
    assert len(iterator._planner.received) == AT_A_TIME - 1
    iterator._receiver.receive = asked.append  # the engine is not asked again
    got += [next(iterator) for _ in range(AT_A_TIME - 1)]
    assert not asked and not iterator._planner.received
    del iterator._receiver.receive
    got += list(iterator)
    assert firsts(got) == list(range(0, BATCH * BATCHES, BATCH))


def prefetched(loader: minato.DataLoader) -> Any:
    """An iterator that has given one batch of its second epoch and has the rest of AT_A_TIME."""
    iterator = second(loader)
    complete(iterator, WINDOW)
    assert int(next(iterator)[0, 0]) == 0 and len(iterator._planner.received) == AT_A_TIME - 1
    return iterator


def test_small_batches_are_delivered_without_python() -> None:
    loader = make(Numbers())
    iterator = prefetched(loader)
    iterator._next = None
    assert firsts(next(iterator) for _ in range(3)) == [2, 4, 6]
    assert iterator._num_yielded == iterator._rcvd_idx == loader.state_dict()["delivered"] == 4
    del iterator._next
    assert firsts(iterator) == list(range(8, BATCH * BATCHES, BATCH))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_batches_received_ahead_serve_in_any_mode(mode: Any) -> None:
    """A batch does not depend on the modes of the next() that received it."""
    iterator = second(make(Numbers()))
    complete(iterator, WINDOW)
    modes, receive = [], iterator._receiver.receive

    def noting(**options: Any) -> Any:
        modes.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return receive(**options)

    iterator._receiver.receive = noting
    with mode():
        first = next(iterator)
        assert not torch.is_grad_enabled()
    assert modes == [(mode is torch.inference_mode, False)] + [(False, True)] * (AT_A_TIME - 1)
    assert first.is_inference() == (mode is torch.inference_mode)
    weight = torch.ones(1, requires_grad=True)
    for _ in range(AT_A_TIME - 1):
        batch = next(iterator)
        (weight * batch).sum().backward()  # an inference tensor cannot be saved for that


def test_unpicklable_class_costs_only_its_batch() -> None:
    loader = make(Rows())
    iterator, got, failed = iter(loader), [], []
    for turn in range(BATCHES):
        try:
            got.append(int(next(iterator).numbers[0, 0]))
        except KeyError:
            failed.append(turn)
        assert loader.state_dict()["delivered"] == turn + 1
    assert failed == [WRONG // BATCH]
    assert got == [n for n in range(0, BATCH * BATCHES, BATCH) if n != WRONG]
    assert next(iterator, None) is None


def test_profiler_started_later_sees_each_batch() -> None:
    iterator = prefetched(make(Numbers()))
    next(iterator)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert firsts(next(iterator) for _ in range(2)) == [4, 6]
    ranges = [event for event in profile.events() if "DataLoader" in event.name]
    assert len(ranges) == 2
    assert firsts(iterator) == list(range(8, BATCH * BATCHES, BATCH))


@pytest.mark.parametrize("of", [dataloader._BaseDataLoaderIter,
                                dataloader._MultiProcessingDataLoaderIter])  # fmt: skip
def test_wrapper_of_torchs_next_sees_each_batch(of: type, monkeypatch: pytest.MonkeyPatch) -> None:
    iterator = prefetched(make(Numbers()))
    next(iterator)
    plain, seen = of.__next__, []
    with monkeypatch.context() as patch:
        patch.setattr(of, "__next__", lambda self: seen.append(batch := plain(self)) or batch)
        while iterator._planner.received:
            next(iterator)
    assert firsts(seen) == list(range(4, BATCH * AT_A_TIME, BATCH))
    assert firsts(iterator) == list(range(BATCH * AT_A_TIME, BATCH * BATCHES, BATCH))
    assert len(seen) == AT_A_TIME - 2


def after_a_break(loader: Any, generator: torch.Generator, at: int) -> tuple[bytes, list[int]]:
    """The generator's state after a break in a second epoch, and the delivered samples."""
    generator.manual_seed(5)
    list(loader)
    got = []
    for batch in loader:
        got.append(int(batch[0, 0]))
        time.sleep(0.006)  # so that some are prefetched
        if len(got) == at:
            break
    return generator.get_state().numpy().tobytes(), got


@pytest.mark.parametrize("window, indices", [(16, 1 << 17), (24, 64)])
def test_break_leaves_generator_as_in_torch(
    window: int, indices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That draws once more when the sampler ends, which is met a window ahead. The second time
    little more than that window may be drawn ahead."""
    monkeypatch.setattr(_planner, "LOOK_AHEAD_INDICES", indices)
    dataset, generator = Numbers(), torch.Generator()
    sampler = torch.utils.data.RandomSampler(dataset, generator=generator)
    options = {"sampler": sampler, "num_workers": 2, "prefetch_factor": window // 2}
    mine = make(dataset, sampler=sampler, prefetch_factor=window // 2)
    ours = torch.utils.data.DataLoader(dataset, BATCH, persistent_workers=True, **options)
    ends = BATCHES - window  # with the batch after this number, the sampler's end is met
    for at in [ends - 4, *range(ends - 1, ends + 3), ends + 5, BATCHES]:
        assert after_a_break(mine, generator, at) == after_a_break(ours, generator, at)


def past_the_window(iterator: Any) -> int:
    """Tasks that may have been started there: for slow samples, because workers idled, or because
    the costliest sample comes first at the epoch's end."""
    _window, early, ahead, finale, *_more = iterator._engine.progress()["starts"]
    return int(early) + int(ahead) + int(finale)


def test_prefetched_batches_count_in_the_window() -> None:
    """torch's window: that many are made before the program has taken the first one. The
    engine makes more of smaller batches if the machine has paused during some samples."""
    iterator = second(make(Numbers(floats=LEAST_FLOATS)))
    before = past_the_window(iterator)
    for _ in range(3 * AT_A_TIME):
        complete(iterator, WINDOW - AT_A_TIME)
        next(iterator)
        time.sleep(0.02)  # for more than should be made
        finished = iterator._finished()
        assert finished <= WINDOW + past_the_window(iterator) - before


@pytest.mark.parametrize(
    "options",
    [
        {"in_order": False},
        {"in_order": False, "batching": "ready"},
        {"scheduling": "static"},
        {"prefetch_factor": 1},
        {"collate_fn": lambda samples: torch.stack(samples)},
    ],
    ids=["out of order", "ready", "static", "small window", "collate_fn"],
)
def test_other_batches_are_received_singly(options: dict[str, Any]) -> None:
    iterator = second(make(Numbers(), **options))
    complete(iterator, 2)
    for _ in range(4):
        next(iterator)
        assert not hasattr(iterator, "_planner") or not iterator._planner.received


def test_long_steps_receive_single_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    iterator = second(make(Numbers()))
    for n in range(BATCHES):
        assert next(iterator).tolist() == [[BATCH * n + i] for i in range(BATCH)]
        assert not iterator._planner.received or n < 12  # the steps before were short
        time.sleep(0.05)


def test_large_batches_are_received_singly() -> None:
    iterator = second(make(Numbers(floats=1 << 18)))
    complete(iterator, 4)
    next(iterator)
    assert not iterator._planner.received


def test_state_counts_delivered_batches() -> None:
    loader = make(Numbers())
    iterator = second(loader)
    complete(iterator, WINDOW)
    got = [next(iterator), next(iterator)]
    assert iterator._planner.received
    state = loader.state_dict()
    rest = make(Numbers())
    rest.load_state_dict(state)
    assert firsts(got + list(rest)) == list(range(0, BATCH * BATCHES, BATCH))


def test_errors_come_in_their_turn() -> None:
    wrong = BATCH * 2
    iterator = second(make(Numbers(wrong=wrong)))
    complete(iterator, WINDOW)
    got = firsts([next(iterator), next(iterator)])
    with pytest.raises(ValueError, match="wrong"):
        next(iterator)
    got += firsts(iterator)
    assert got == [n for n in range(0, BATCH * BATCHES, BATCH) if n != wrong]


@pytest.mark.parametrize("ahead", [False, True])
def test_abandoned_epoch_drops_prefetched_batches(ahead: bool) -> None:
    loader = make(Numbers(), prefetch_next_epoch=ahead)
    iterator = second(loader)
    complete(iterator, WINDOW)
    next(iterator)
    assert iterator._planner.received
    for _ in range(2):
        assert firsts(iter(loader)) == list(range(0, BATCH * BATCHES, BATCH))


def test_prefetching_stops_at_epoch_end() -> None:
    loader = make(Numbers(batches=4), prefetch_next_epoch=True)
    for _ in range(4):
        iterator = iter(loader)
        complete(iterator, 4)
        assert firsts(iterator) == [0, 2, 4, 6]


class Waits(torch.utils.data.Dataset):
    """Its first sample waits, once, until all others of this epoch and of the next are made."""

    def __init__(self) -> None:
        self.made, self.waited = (multiprocessing.Value("i", 0) for _ in range(2))

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        if index == 0 and not self.waited.value:
            self.waited.value = 1
            assert wait_for(lambda: self.made.value >= 5)
            time.sleep(0.2)  # until the trainer has them
        else:
            with self.made.get_lock():
                self.made.value += 1
        return torch.tensor([index])


def test_short_epoch_received_early_is_complete() -> None:
    made = minato.DataLoader(
        Waits(), num_workers=2, prefetch_factor=8, in_order=False, persistent_workers=True,
        prefetch_next_epoch=True, timeout=30,
    )  # fmt: skip
    assert [sorted(int(batch) for batch in made) for _ in range(3)] == [[0, 1, 2]] * 3


@pytest.mark.parametrize("ahead", [False, True])
def test_slow_program_gets_all_batches(ahead: bool) -> None:
    """Also epochs whose end is reached, or whose successor is started, with some prefetched: they
    are longer than the first plan."""
    dataset = Numbers(batches=5 * BATCHES)
    order, sampler = (
        torch.utils.data.RandomSampler(dataset, generator=torch.Generator().manual_seed(3))
        for _ in range(2)
    )
    loader = make(dataset, sampler=sampler, prefetch_next_epoch=ahead)
    for _ in range(3):
        got, most = [], 0
        for batch in loader:
            got += [int(value) for value in batch[:, 0]]
            if len(got) == 50 * BATCH:
                wait_for(lambda: loader._iterator._finished() >= AT_A_TIME)
            most = max(most, len(loader._iterator._planner.received))
        assert got == list(order)
    assert most == AT_A_TIME - 1


def test_waits_are_counted() -> None:
    loader = make(Numbers())
    for _ in range(3):
        assert len(list(loader)) == BATCHES
    assert loader._iterator._engine.progress()["waits"] == 3 * BATCHES


def test_nothing_comes_after_the_end() -> None:
    iterator = second(make(Numbers()))
    complete(iterator, WINDOW)
    next(iterator)
    iterator._shutdown_workers()
    assert not iterator._planner.received
    with pytest.raises(RuntimeError, match="shut down"):
        next(iterator)
