"""Pinning ahead of ``next()``, with a fake accelerator."""

from __future__ import annotations

import _thread
import gc
import os
import threading
import time
import types
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler, _utils

import minato
from minato import ops

from .datasets import Failing, Numbers, Sharded
from .support import (
    ASKS_ACCELERATOR,
    Kind,
    await_batches,
    drain,
    error_text,
    flat,
    patiently,
    run_script,
    wait_for,
)

pytestmark = pytest.mark.skipif(not ASKS_ACCELERATOR, reason="this torch asks CUDA whether to pin")
DEVICE = 3  # its index
SECONDS = 90.0


class Fake:
    """Stands for an accelerator and torch's pin_memory, and records calls and results."""

    def __init__(self) -> None:
        self.pinned: dict[int, Any] = {}  # number of the sample -> the pinned object
        self.order: list[int] = []
        self.threads: set[threading.Thread] = set()
        self.devices: list[int] = []
        self.before: Callable[[int], None] = lambda number: None

    def pin(self, data: Any, device: Any = None) -> Any:
        tensor = data[0] if isinstance(data, list) else data
        if not isinstance(tensor, torch.Tensor):
            return data  # torch's thread also passes its own markers
        number = int(tensor.reshape(-1)[0])
        self.threads.add(threading.current_thread())
        self.order.append(number)
        self.before(number)
        self.pinned[number] = tensor.data_ptr()
        return data.clone() if tensor is data else [tensor.clone(), *data[1:]]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    made = Fake()
    kind = types.SimpleNamespace(type="fake")
    for name, value in {
        "is_available": lambda: True,
        "current_accelerator": lambda *_, **__: kind,
        "current_device_index": lambda: DEVICE,
        "set_device_index": made.devices.append,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, value)
    monkeypatch.setattr(_utils.pin_memory, "pin_memory", made.pin)
    before = set(threading.enumerate())
    yield made
    gc.collect()
    left = [t for t in threading.enumerate() if t not in before and "native" not in t.name]
    assert wait_for(lambda: not any(t.is_alive() for t in left)), left


def once(pinner: Fake, count: int) -> None:
    """Checks that each number was pinned once, in one thread that was given the device."""
    assert sorted(pinner.order) == list(range(count))
    assert len(pinner.threads) == 1 and threading.main_thread() not in pinner.threads
    assert pinner.devices == [DEVICE]


@pytest.mark.parametrize("persistent", [False, True])
def test_every_batch_is_pinned_once_in_a_thread(
    loader: Kind, fake: Fake, persistent: bool
) -> None:
    made = loader(Numbers(20), num_workers=2, pin_memory=True, persistent_workers=persistent)
    iterator = iter(made)
    assert iterator._pin_memory_thread.is_alive()
    assert flat(iterator) == list(range(20))
    once(fake, 20)
    assert iterator._pin_memory_thread.is_alive() == persistent
    if persistent:
        fake.order.clear()
        assert flat(made) == list(range(20))
        once(fake, 20)


@pytest.mark.parametrize("options", [
    {"in_order": False},
    {"in_order": False, "batching": "ready"},
    {"autoscale": (1, 3)},
    {"in_order": False, "persistent_workers": True, "prefetch_next_epoch": True},
    {"persistent_workers": True, "prefetch_next_epoch": True},
    {"collate_fn": list},
    {"scheduling": "static", "in_order": False},
], ids=lambda options: "-".join(map(str, options)))
def test_all_kinds_of_iterators(fake: Fake, options: dict[str, Any]) -> None:
    class Lists(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.tensor([index])

    made = minato.DataLoader(Lists(30), num_workers=2, pin_memory=True, **options)
    for _ in range(3 if options.get("persistent_workers") else 1):
        got = [batch[0].reshape(-1) for batch in made]
        assert sorted(flat(got)) == list(range(30))
        assert sorted(fake.order[:30]) == list(range(30)) and len(fake.threads) == 1
        del fake.order[:30]
    assert not fake.order


def test_iterable_datasets(loader: Kind, fake: Fake) -> None:
    made = loader(Sharded(21), num_workers=2, pin_memory=True)
    assert flat(made) == flat(DataLoader(Sharded(21), num_workers=2))
    once(fake, 21)


def test_native_workers(fake: Fake, tmp_path: Path) -> None:
    files = []
    for number in range(6):
        files.append(tmp_path / f"{number}.npy")
        np.save(files[-1], np.full((1, 32, 32, 32), number, np.float32))
    data = ops.VolumeDataset(files, ops.Pipeline([ops.ReadNpy(), ops.RandCrop(25)]))
    made = minato.DataLoader(data, num_workers=2, pin_memory=True, worker_type="native")
    got = [batch[0] if isinstance(batch, (list, tuple)) else batch for batch in made]
    assert [float(batch.mean()) for batch in got] == list(range(6))
    once(fake, 6)


def test_next_batch_is_pinned_ahead(own: Kind, fake: Fake) -> None:
    pinned = [threading.Event() for _ in range(6)]
    fake.before = lambda number: pinned[number].set()
    iterator = iter(own(Numbers(6), num_workers=1, prefetch_factor=6, pin_memory=True))
    next(iterator)
    for number in range(1, 5):
        await_batches(iterator, 2)
        assert next(iterator).item() == number
        assert pinned[number + 1].wait(SECONDS)
    assert flat(iterator) == [5]


def test_ready_batches_are_pinned_ahead(fake: Fake) -> None:
    pinned = threading.Semaphore(0)
    fake.before = lambda number: pinned.release()
    made = minato.DataLoader(Numbers(40), batch_size=2, num_workers=2, prefetch_factor=8,
                             in_order=False, batching="ready", pin_memory=True)
    iterator = iter(made)
    seen = [*next(iterator).tolist()]
    for number in range(2, 8):
        await_batches(iterator, 4)
        seen += next(iterator).tolist()
        while len(fake.order) < number + 1:
            assert pinned.acquire(timeout=SECONDS)
        assert iterator._supervisor.served.displacement()["mean"] >= 0
    seen += flat(iterator)
    assert sorted(seen) == list(range(40))


def test_a_batch_ahead_is_not_counted_as_delivered(own: Kind, fake: Fake) -> None:
    made = own(Numbers(20), num_workers=2, prefetch_factor=5, pin_memory=True)
    iterator = iter(made)
    for number in range(6):
        await_batches(iterator, 2)
        next(iterator)
        state = made.state_dict()
        assert state["delivered"] == number + 1 == made.stats()["delivered"]
    again = own(Numbers(20), num_workers=1, pin_memory=True)
    if own.balanced:
        again.load_state_dict(state)
        assert flat(again) == list(range(6, 20))
    assert wait_for(lambda: 6 in fake.pinned, SECONDS)
    assert iterator._data_queue.qsize() > 0
    assert made.stats()["wait"]["total"] > 0


class Counting(SequentialSampler):
    """Counts the indices that were drawn."""

    drawn = 0

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            self.drawn += 1
            yield index


def test_pinning_ahead_does_not_move_the_sampler(loader: Kind, fake: Fake) -> None:
    def draws(pin: bool) -> list[int]:
        sampler = Counting(range(20))
        made = loader(Numbers(20), sampler=sampler, num_workers=2, pin_memory=pin)
        found, iterator = [], iter(made)
        for _ in range(20):
            if pin and not loader.is_torch:
                wait_for(lambda: iterator._data_queue.qsize() >= 2, 0.2)
            next(iterator)
            found.append(sampler.drawn)
        return found

    assert draws(True) == draws(False)


class Broken(LookupError):
    pass


def _fails_at(*numbers: int) -> Callable[[int], None]:
    def fail(number: int) -> None:
        if number in numbers:
            raise Broken("cannot be pinned")

    return fail


def test_an_error_comes_at_its_batch(loader: Kind, fake: Fake) -> None:
    fake.before = _fails_at(2, 3)
    made = loader(Numbers(6), num_workers=2, pin_memory=True)
    iterator = iter(made)
    got = [next(iterator).item(), next(iterator).item()]
    with pytest.raises(LookupError, match=f"in pin memory thread for device {DEVICE}") as caught:
        next(iterator)
    assert "cannot be pinned" in str(caught.value)
    if not loader.is_torch:
        assert "minato: batch 2, sample indices [2]" in error_text(caught.value)
    assert got == [0, 1]
    rest = drain(iterator)
    assert rest == [("error", Broken), torch.tensor([4]), torch.tensor([5])]
    if not loader.is_torch:
        assert made.stats()["errors"] == 2


def test_errors_of_samples_keep_their_place(loader: Kind, fake: Fake) -> None:
    def fail(index: int) -> None:
        raise ValueError(index)

    iterator = iter(loader(Failing(6, {1, 4}, fail), num_workers=2, pin_memory=True))
    got = drain(iterator)
    assert [g[0] if isinstance(g, tuple) else "batch" for g in got] == [
        "batch", "error", "batch", "batch", "error", "batch"]  # fmt: skip
    assert sorted(fake.order) == [0, 2, 3, 5]


class Unreadable:
    """Can be pickled, and fails when it is unpickled."""

    def __reduce__(self) -> Any:
        return _unreadable, ()


def _unreadable() -> Any:
    raise Broken("not to be read")


class Half(Numbers):
    def __getitem__(self, index: int) -> Any:
        return [torch.tensor([index]), Unreadable() if index == 3 else None]


def _as_is(samples: list) -> Any:
    return samples[0]


def test_unreadable_batch_ahead_fails_in_turn(own: Kind, fake: Fake) -> None:
    made = own(Half(8), num_workers=1, prefetch_factor=4, collate_fn=_as_is, pin_memory=True)
    iterator = iter(made)
    got = []
    for _ in range(3):
        await_batches(iterator, 2)
        got.append(next(iterator)[0].item())
    assert got == [0, 1, 2]
    with pytest.raises(Broken, match="not to be read"):
        next(iterator)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_pinning_thread_is_reported(loader: Kind, fake: Fake) -> None:
    def leave(number: int) -> None:
        if number == 1:
            raise SystemExit

    fake.before = leave
    iterator = iter(loader(Numbers(6), num_workers=1, pin_memory=True))
    assert next(iterator).item() == 0
    with pytest.raises(RuntimeError, match="^Pin memory thread exited unexpectedly$"):
        next(iterator)
    assert not iterator._pin_memory_thread.is_alive()


def test_timeout_counts_for_pinning_too(own: Kind, fake: Fake) -> None:
    go = threading.Event()
    fake.before = lambda number: go.wait(SECONDS) and None
    iterator = iter(own(Numbers(3), num_workers=1, pin_memory=True, timeout=1))
    try:
        with pytest.raises(RuntimeError, match="^DataLoader timed out after 1 seconds$"):
            next(iterator)
    finally:
        go.set()
    assert flat(patiently(iterator)) == [0, 1, 2]


def test_an_interrupt_loses_nothing(own: Kind, fake: Fake) -> None:
    began, go = threading.Event(), threading.Event()

    def hold(number: int) -> None:
        began.set()
        go.wait(SECONDS)

    def interrupt() -> None:
        began.wait(SECONDS)
        _thread.interrupt_main()

    fake.before = hold
    iterator = iter(own(Numbers(5), num_workers=1, pin_memory=True))
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
    finally:
        go.set()
        thread.join()
    assert flat(iterator) == [0, 1, 2, 3, 4]


def test_abandoned_epoch_does_not_affect_the_next(own: Kind, fake: Fake) -> None:
    made = own(Numbers(12), num_workers=2, prefetch_factor=3, pin_memory=True,
               persistent_workers=True)
    thread = None
    for left_after in (1, 4, 2):
        iterator = iter(made)
        for number in range(left_after):
            await_batches(iterator, 2)
            assert next(iterator).item() == number
        assert thread in (None, iterator._pin_memory_thread)
        thread = iterator._pin_memory_thread
    assert flat(made) == list(range(12))
    assert thread.is_alive()
    iterator._shutdown_workers()
    assert not thread.is_alive()


def test_a_dropped_iterator_ends_its_thread(own: Kind, fake: Fake) -> None:
    iterator = iter(own(Numbers(12), num_workers=1, pin_memory=True))
    next(iterator)
    thread = iterator._pin_memory_thread
    del iterator
    gc.collect()
    assert not thread.is_alive()


def test_closing_does_not_wait_for_ever(
    own: Kind, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minato.device.send_ahead.STAGE_SECONDS", 0.05)
    began, go = threading.Event(), threading.Event()
    fake.before = lambda number: (began.set(), go.wait(SECONDS)) and None
    iterator = iter(own(Numbers(12), num_workers=1, pin_memory=True, timeout=1))
    try:
        with pytest.raises(RuntimeError, match="timed out"):
            next(iterator)
        assert began.wait(SECONDS)
        iterator._shutdown_workers()
        assert iterator._pin_memory_thread.is_alive() and not iterator._workers[0].is_alive()
    finally:
        go.set()


def test_several_at_once(own: Kind, fake: Fake) -> None:
    made = own(Numbers(9), num_workers=1, pin_memory=True)
    iterators = [iter(made) for _ in range(3)]
    got = [[int(batch) for batch in step] for step in zip(*iterators)]
    assert got == [[n] * 3 for n in range(9)]
    assert len(fake.threads) == 3


def test_memory_of_a_pinned_batch_is_free(own: Kind, fake: Fake) -> None:
    class Large(Numbers):
        def __getitem__(self, index: int) -> Any:
            return np.full(1 << 18, index, np.float32)

    made = own(Large(6), num_workers=1, prefetch_factor=4, pin_memory=True)
    iterator = iter(made)
    kept = [next(iterator)]
    for _ in range(5):
        kept.append(next(iterator))
    assert wait_for(lambda: made.stats()["memory"]["kept"] == 0, SECONDS)
    assert [int(batch[0, 0]) for batch in kept] == list(range(6))


_forked: list[Callable[[], None]] = []
os.register_at_fork(before=lambda: [call() for call in _forked])


def test_a_fork_waits_until_nothing_is_being_pinned(own: Kind, fake: Fake) -> None:
    inside, began, go = threading.Lock(), threading.Event(), threading.Event()

    def hold(number: int) -> None:
        with inside:
            began.set()
            go.wait(SECONDS)
            time.sleep(0.1)

    fake.before = hold
    iterator = iter(own(Numbers(4), num_workers=1, pin_memory=True, timeout=1))
    with pytest.raises(RuntimeError, match="timed out"):
        next(iterator)
    assert began.wait(SECONDS)
    _forked.append(go.set)  # runs before minato's own, which was registered earlier
    try:
        pid = os.fork()
        if pid == 0:
            os._exit(int(inside.locked()))
    finally:
        _forked.clear()
    assert os.waitpid(pid, 0)[1] == 0
    assert flat(patiently(iterator)) == [0, 1, 2, 3]


def test_forked_child_cannot_use_the_iterator(own: Kind, fake: Fake) -> None:
    iterator = iter(own(Numbers(8), num_workers=1, prefetch_factor=4, pin_memory=True))
    next(iterator)
    await_batches(iterator, 1)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            next(iterator)
        except RuntimeError as error:
            code = 0 if "another process" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert flat(iterator) == list(range(1, 8))


SCRIPT = """
import sys, threading, time, types
import torch
from contract.datasets import Numbers
from torch.utils.data import _utils
class Name:
    type = "fake"
torch.accelerator.is_available = lambda: True
torch.accelerator.current_accelerator = lambda *_, **__: Name
torch.accelerator.current_device_index = lambda: 0
torch.accelerator.set_device_index = lambda index: None
began = threading.Event()
def pin(data, device=None):
    began.set()
    time.sleep(0.05)
    return data
_utils.pin_memory.pin_memory = pin
made = make(Numbers(100), num_workers=2, pin_memory=True, persistent_workers=True)
iterator = iter(made)
next(iterator)
began.clear()
next(iterator)
"""


def test_exit_in_the_middle_of_pinning(own: Kind, tmp_path: Path) -> None:
    outcome = run_script(own, SCRIPT, tmp_path)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, "", ""), outcome
    assert not outcome.left


def test_pinning_without_accelerator_starts_no_thread(own: Kind) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    before = threading.active_count()
    with pytest.warns(UserWarning, match="no accelerator"):
        iterator = iter(own(Numbers(4), num_workers=1, pin_memory=True))
    assert threading.active_count() == before
    assert not hasattr(iterator, "_pin_memory_thread") and iterator._pinner is None
    assert flat(iterator) == [0, 1, 2, 3]
