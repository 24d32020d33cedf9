"""Copies of batches to a device, without a loader: order of events, and lifetime of sources."""

from __future__ import annotations

import array
import collections
import dataclasses
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from contract.support import wait_for

from minato.device import copies
from minato.device.copies import FEWEST, MOST, Copier, depth, mapped

from .fake import Fake, NoMemory


def batch(value: float, rows: int = 4) -> torch.Tensor:
    return torch.full((rows, 8192), value)


def arrived(fake: Fake, copier: Copier, data: Any) -> Any:
    """A batch that is delivered at once."""
    return copier.hand_over(copier.begin(data))


# ---- order -----------------------------------------------------------------------------------


def test_batch_is_delivered_before_its_copy_ends(fake: Fake) -> None:
    copier = Copier(fake)
    with fake.held():
        made = arrived(fake, copier, batch(3.0))
        read = fake.read(made)
        assert not read.done.wait(0.02)  # its stream waits for the copy; the host does not
    assert torch.equal(read.value(), batch(3.0))


def late_copies(fake: Fake) -> None:
    """Batches that are made one after the other in the same memory, as by workers."""
    copier, slot = Copier(fake), batch(0.0)
    fake.way = "direct"
    reads = []
    for value in range(1, 9):
        # after a slot is released, the next batch is written to it
        if value > 1:
            while copier.look():
                pass
        slot.fill_(float(value))
        reads.append(fake.read(arrived(fake, copier, slot)))
    fake.stream().gate.set()
    for value, read in enumerate(reads, 1):
        assert torch.equal(read.value(), batch(float(value)))


def freed_at_once(fake: Fake) -> None:
    """Page-locked memory that is overwritten as soon as it is free."""
    copier = Copier(fake)
    with fake.held():
        reads = [fake.read(arrived(fake, copier, batch(float(n)))) for n in range(6)]
        for _ in range(3):
            copier.look()
        reached = fake.record(fake.calling)  # not unless the wait is left out
        assert wait_for(lambda: fake.waiting.is_set() or reached.done.is_set())
    for value, read in enumerate(reads):
        assert torch.equal(read.value(), batch(float(value)))


def dropped_while_used(fake: Fake) -> None:
    """A batch that the program drops while its stream still works on it."""
    copier = Copier(fake)
    made = arrived(fake, copier, batch(5.0))
    while copier.look():
        pass
    fake.calling.gate.clear()
    read = fake.read(made)
    fake.plant("drops")  # for the test: the reader is queued before
    del made
    gc.collect()
    fake.values_settled()  # type: ignore[attr-defined]
    fake.calling.gate.set()
    assert torch.equal(read.value(), batch(5.0))


def _settle(fake: Fake) -> None:
    """The stream of copies has finished all its work."""
    event = fake.record(fake.stream())
    assert event.done.wait(90)


CHECKS: dict[str, tuple[Callable[[Fake], None], str]] = {
    "memory is let go of before it was read": (freed_at_once, "passed"),
    "the caller's stream does not wait": (freed_at_once, "wait"),
    "the device's memory is used again too early": (dropped_while_used, "uses"),
}


@pytest.fixture
def settling(fake: Fake) -> Fake:
    fake.values_settled = lambda: _settle(fake)  # type: ignore[attr-defined]
    return fake


@pytest.mark.parametrize("check", [freed_at_once, dropped_while_used, late_copies])
def test_bytes_are_right(settling: Fake, check: Callable[[Fake], None]) -> None:
    check(settling)


@pytest.mark.parametrize("fault", CHECKS)
def test_a_planted_fault_is_found(settling: Fake, fault: str) -> None:
    check, verb = CHECKS[fault]
    settling.plant = lambda asked: asked == verb
    with pytest.raises(AssertionError):
        check(settling)


def test_early_reuse_of_slot_is_found(settling: Fake) -> None:
    settling.plant = lambda asked: asked == "passed"
    settling.stream().gate.clear()
    with pytest.raises(AssertionError):
        late_copies(settling)


def test_sources_are_freed_after_their_own_event(fake: Fake) -> None:
    fake.way = "direct"
    copier = Copier(fake)
    kept = []
    with fake.held():
        for value in range(3):
            data = batch(float(value))
            kept.append(weakref.ref(data))
            copier.begin(data)
            del data
        assert copier.look() and all(ref() is not None for ref in kept)
    _settle(fake)
    assert not copier.look() and all(ref() is None for ref in kept)


def test_events_that_are_reported_out_of_order(fake: Fake) -> None:
    fake.way = "direct"
    fake.slow_to_say = {2: 3}  # begin, end, done: the first batch's last event
    copier = Copier(fake)
    first, second = batch(1.0), batch(2.0)
    copier.begin(first)
    copier.begin(second)
    _settle(fake)
    refs = weakref.ref(first), weakref.ref(second)
    del first, second
    assert copier.look()
    assert refs[0]() is not None and refs[1]() is None  # that one has passed
    while copier.look():
        pass
    assert refs[0]() is None


def test_sources_of_endless_copy_are_kept_until_end(fake: Fake) -> None:
    fake.way = "direct"
    copier = Copier(fake)
    data = batch(1.0)
    ref = weakref.ref(data)
    with fake.held():
        copier.begin(data)
        del data
        copier.finish(0.0)
        assert ref() is not None
        del copier
        gc.collect()
        assert copies.sweep() == 1 and ref() is not None
    _settle(fake)
    assert copies.sweep() == 0 and ref() is None


def test_failed_device_keeps_no_sources(fake: Fake) -> None:
    fake.way = "direct"
    copier = Copier(fake)

    def failed(event: Any) -> bool:
        raise RuntimeError("device-side assert")

    fake.passed = failed  # type: ignore[method-assign]
    copier.begin(batch(1.0))
    assert not copier.look()


def test_a_device_that_records_nothing_has_failed(fake: Fake) -> None:
    copier, record = Copier(fake), fake.record
    fake.record = lambda stream: (_ for _ in ()).throw(RuntimeError("gone"))  # type: ignore
    with pytest.raises(RuntimeError, match="gone"):
        copier.begin(torch.arange(3))  # too small to be timed: the last event is the first
    fake.record = record  # type: ignore[method-assign]
    assert not copier.look()


def test_device_memory_exhausted_in_mid_batch(fake: Fake) -> None:
    fake.way = "direct"
    fake.room = batch(0.0).nbytes
    copier = Copier(fake)
    first, second = batch(1.0), batch(2.0)
    ref = weakref.ref(first)
    with fake.held():
        with pytest.raises(NoMemory):
            copier.begin([first, second])
        del first
        gc.collect()
        assert copier.look() and ref() is not None  # it is being read all the same
    _settle(fake)
    assert not copier.look() and ref() is None


# ---- content of a batch ----------------------------------------------------------------------


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Record:
    image: torch.Tensor
    name: str


class Dict(dict):  # type: ignore[type-arg]
    """Has more than its items."""

    extra = "kept"


class ReadOnly(collections.abc.Mapping):  # type: ignore[type-arg]
    def __init__(self, items: dict[str, Any]) -> None:
        self.items_ = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __iter__(self) -> Any:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


def test_containers_are_made_anew_and_keep_their_type(fake: Fake) -> None:
    one = torch.arange(3)
    dictionary = Dict(a=one, deep=[one, (one, "text")])
    dictionary.extra = "mine"
    data = [
        dictionary, Pair(one, b"bytes"), Record(one, "name"), ReadOnly({"x": one}), 3, 2.5, None,
        "string", collections.OrderedDict(k=one), array.array("i", [1, 2]), object,
    ]  # fmt: skip
    made = arrived(fake, Copier(fake), data)
    assert [type(part) for part in made] == [type(part) for part in data]
    assert made[0].extra == "mine" and made[0] is not dictionary
    assert made[4:8] == [3, 2.5, None, "string"] and made[9] == data[9] and made[10] is object
    assert made[1].b == b"bytes" and made[2].name == "name" and made[0]["deep"][1][1] == "text"
    found = [
        made[0]["a"], made[0]["deep"][0], made[0]["deep"][1][0], made[1].a, made[2].image,
        made[3]["x"], made[8]["k"],
    ]  # fmt: skip
    assert all(torch.equal(fake.values(tensor), one) for tensor in found)
    assert torch.equal(dictionary["a"], one) and not fake.holds(dictionary["a"])


@pytest.mark.parametrize("tensor", [
    torch.tensor(7), torch.empty(0, 3), torch.arange(6).reshape(2, 3).t(),
    torch.arange(3, dtype=torch.uint8), torch.tensor([True, False]),
    torch.tensor([1.5], dtype=torch.bfloat16), torch.tensor([1 + 2j]),
], ids=lambda t: f"{t.dtype}-{tuple(t.shape)}")  # fmt: skip
def test_shapes_and_types(fake: Fake, tensor: torch.Tensor) -> None:
    made = arrived(fake, Copier(fake), tensor)
    assert made.shape == tensor.shape and made.dtype == tensor.dtype
    assert torch.equal(fake.values(made), tensor)


def test_tensors_on_the_device_stay(fake: Fake) -> None:
    copier = Copier(fake)
    there = arrived(fake, copier, batch(1.0))
    again = arrived(fake, copier, {"x": there, "y": batch(2.0)})
    assert again["x"] is there and len(fake.copied) == 2


class Moves:
    """Has its own way to move to a device."""

    def __init__(self) -> None:
        self.to_: list[Any] = []
        self.pinned = False

    def pin_memory(self) -> Moves:
        self.pinned = True
        return self

    def to(self, device: torch.device) -> Moves:
        self.to_.append(device)
        return self


def test_objects_with_to_move_on_callers_stream(fake: Fake) -> None:
    copier, graph = Copier(fake), Moves()
    sent = copier.begin([graph, batch(1.0)])
    assert graph.pinned and not graph.to_  # not before its turn
    made = copier.hand_over(sent)
    assert made[0] is graph and graph.to_ == [fake.device]
    assert fake.moved == [(graph, False)]  # torch keeps pinned memory until it was read
    assert torch.equal(fake.values(made[1]), batch(1.0))


def test_unusual_tensors_move_on_callers_stream(fake: Fake) -> None:
    odd = [
        torch.eye(3).to_sparse(),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.tensor([1 + 1j]).conj(),
    ]
    made = arrived(fake, Copier(fake), list(odd))
    assert [waits for _data, waits in fake.moved] == [True] * len(odd) and not fake.copied and len(made) == len(odd)


def test_batch_without_tensors_does_not_use_device(fake: Fake) -> None:
    assert arrived(fake, Copier(fake), {"a": [1, "x"]}) == {"a": [1, "x"]}
    assert fake.events == 0


@pytest.mark.parametrize("data, said", [
    ({"a": torch.ones(1), "b": [1, 2.0, "text", None, b"x", (True,)]}, False),
    (Pair(torch.ones(1), np.float32(1)), False),
    (Record(torch.ones(1), "name"), False),
    (collections.defaultdict(list, a=[torch.ones(1)]), False),
    ({"a": np.ones(3)}, True), ([Moves()], True), (ReadOnly({"a": 1}), True), (Dict(), True),
    (Pair(1, object()), True),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_opaque_objects_are_recognised(data: Any, said: bool) -> None:
    assert copies.opaque(data) is said


def test_containers_that_cannot_be_rebuilt(fake: Fake) -> None:
    assert mapped(range(3), lambda part: None) == [0, 1, 2]  # as torch's pin_memory has it
    proxy = types.MappingProxyType({"a": 1})
    assert mapped(proxy, lambda part: None) == proxy


# ---- depth and timing --------------------------------------------------------------------------


def test_depth_grows_with_waits_and_memory() -> None:
    assert depth(0, 0, 0, None) == FEWEST  # nothing is known
    assert depth(0.001, 1.0, 1e6, None) == FEWEST
    assert depth(0.6, 1.0, 1e6, None) == FEWEST + 1
    assert depth(50.0, 1.0, 1e6, None) == MOST
    assert depth(50.0, 1.0, 1e9, 1e9) == FEWEST  # no memory for more
    assert depth(50.0, 1.0, 1e9, 1e12) == MOST


class Clocked(Fake):
    """Its streams take a given time."""

    def seconds(self, begin: Any, end: Any) -> float | None:
        return 0.25 if end.number - begin.number == 1 else -1.0  # a copy; otherwise a wait


def test_copies_are_counted(fake: Fake) -> None:
    clocked = Clocked()
    copier = Copier(clocked)
    try:
        for value in range(4):
            arrived(clocked, copier, {"x": batch(float(value)), "label": torch.arange(4)})
            _settle(clocked)
            assert clocked.record(clocked.calling).done.wait(90)
        copier.look()
    finally:
        clocked.close()
    found = copier.counts.summary()
    size = batch(0.0).nbytes
    assert found["batches"] == 4 and found["copies"] == 8
    assert found["bytes"] == 4 * (size + 32) == found["through"]["pinned"]
    assert found["copy"] == 1.0 and found["bandwidth"] == 4 * size
    assert found["stalled"] == 0 and found["overlap"] == 1.0
    assert found["device"] == "cuda:1"


def test_stream_waits_are_counted(fake: Fake) -> None:
    fake.seconds = lambda begin, end: 0.5  # type: ignore[method-assign]
    copier = Copier(fake)
    arrived(fake, copier, batch(1.0))
    _settle(fake)
    assert fake.record(fake.calling).done.wait(90)
    copier.look()
    found = copier.counts.summary()
    assert found["stalled"] == found["copy"] == 0.5 and found["overlap"] == 0.0


def test_times_of_dropped_batches_do_not_pile_up(fake: Fake) -> None:
    copier = Copier(fake)
    for value in range(5 * MOST):
        copier.begin(batch(float(value), rows=1))
        _settle(fake)
    copier.look()
    assert len(copier._landed) <= 2 * MOST
