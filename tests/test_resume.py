"""state_dict, load_state_dict and set_epoch: the rest of an epoch, anywhere."""

from __future__ import annotations

import base64
import gc
import json
import math
import os
import random
import threading
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from contract.support import programs
from resuming import (
    N,
    SIZE,
    Noisy,
    Stream,
    indices,
    lists,
    make,
    pull,
    seed,
    take,
    through_json,
    with_draws,
)
from torch.utils.data import Sampler

import minato
from minato import _core
from minato.iterators import loader_memo
from minato.seeding.order_generators import all_global
from minato.state import pack, pack_costs, pack_ratios, unpack_costs, unpack_ratios

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


REST = """
import json, sys, resuming
found = []
for kind, kw, state, epochs in json.load(sys.stdin):
    resuming.seed(987654)  # another process knows nothing of the first one's generators
    loader = resuming.make(kind, **kw)
    loader.load_state_dict(state)
    found.append([resuming.lists(loader) for _ in range(epochs)])
print(json.dumps(found))
"""


def saved(state: dict, tmp_path: Path) -> dict:
    """Through JSON and torch.save, both of which must keep it as it is."""
    assert through_json(state) == state
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    return state


# ---- in order: bit for bit -------------------------------------------------------------

KINDS = [
    "sequence", "shuffle", "shuffle of its own", "two generators", "replacement", "distributed",
    "batches of random", "batches at once of numpy.random", "plain batches",
]  # fmt: skip
SHUFFLE = ["shuffle of its own"]
OWN = [*SHUFFLE, "two generators"]
READY = {"in_order": False, "batching": "ready"}


#: how the loader is made, the workers that resume, and the samplers. Without workers, samples draw
#: from the program's generators, which the program restores itself. Out of order, the rest is the
#: same samples in any batches.
MODES: dict[str, tuple[dict[str, Any], list[int], list[str]]] = {
    "balanced": ({}, [1, 2, 3], KINDS),
    "persistent": ({"persistent_workers": True}, [1, 2], ["shuffle", *OWN]),
    "begun early": (
        {"persistent_workers": True, "prefetch_next_epoch": True}, [1, 2], ["shuffle", *SHUFFLE],
    ),
    "static": ({"scheduling": "static"}, [2], ["shuffle", *SHUFFLE, "batches of Philox"]),
    "no workers": (
        {"num_workers": 0}, [0], ["sequence", "shuffle", *SHUFFLE, "batches of random", "stream"]
    ),
    "failing samples": ({"bad": (3, 17)}, [1, 2], ["sequence", *SHUFFLE]),
    "failing, static": ({"bad": (3, 17), "scheduling": "static"}, [2], ["sequence"]),
    "failing, no workers": ({"bad": (3, 17), "num_workers": 0}, [0], ["sequence"]),
    "random collate_fn": ({"collate_fn": with_draws, "prefetch_factor": 1}, [1, 3], SHUFFLE),
    "out of order": ({"in_order": False, "batch_size": 3}, [1], [*SHUFFLE, "indices of random"]),
    "out of order, whole": ({"in_order": False, "batch_size": 3, "drop_last": True}, [1], SHUFFLE),
    "out of order, random collate_fn": ({"in_order": False, "collate_fn": with_draws}, [3], SHUFFLE),
    "ready": ({**READY, "batch_size": 3}, [1], [*SHUFFLE, "indices of Philox"]),
    "ready, whole": ({**READY, "batch_size": 3, "drop_last": True}, [1], SHUFFLE),
}  # fmt: skip
#: epochs before, and batches of the next; None: it has not begun
PLACES = [(0, None), (0, 0), (0, 3), (1, None), (1, 0), (1, 4), (1, N // SIZE)]


def of_program(loader: Any, state: Any = None) -> Any:
    """The state of the generators of the program and of its dataset, which may be set first."""
    own = getattr(loader.dataset, "rng", np.random.default_rng(7)).bit_generator
    if state is not None:
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        np.random.set_state(state[2])
        own.state = state[3]
    return torch.get_rng_state(), random.getstate(), np.random.get_state(), own.state


def interrupted(
    kind: str, kw: dict[str, Any], places: list[tuple[int, int | None]], epochs: int
) -> list[tuple[dict, list[Any], Any]]:
    """For each place in a run of this many epochs: the state, what came after it (the rest of the epoch,
    and later ones), and the program's generators."""
    seed(6)
    loader = make(kind, **kw)
    noted, whole = [], []
    for epoch in range(epochs):
        it, begun = None, []
        for done in [done for at, done in places if at == epoch]:
            if done is not None:
                it = iter(loader) if it is None else it
                begun += pull(it, done - len(begun))
            noted.append((epoch, done or 0, loader.state_dict(), of_program(loader)))
        whole.append(begun + pull(iter(loader) if it is None else it))
        if "drop_last" not in kw and "bad" not in kw:
            assert sum(map(len, whole[-1])) == {"distributed": N // 2, "replacement": N + 3}.get(kind, N)
    return [(state, [whole[epoch][done:], *whole[epoch + 1 :]], mine) for epoch, done, state, mine in noted]


def check_resumed(
    mode: str, kind: str, places: list[tuple[int, int | None]], workers: list[int]
) -> None:
    """Another loader, with one of these numbers of workers, gives the rest; if the generators are the
    loader's, also a later epoch after some places."""
    kw, own = MODES[mode][0], kind in OWN
    compared = [1 + int(own and (mode == "begun early" or done == 3) and mode != "no workers")
                for _, done in places]  # fmt: skip
    run = interrupted(kind, kw, places, max(at + n for (at, _), n in zip(places, compared, strict=True)))
    for place, (state, expected, mine) in enumerate(run):
        epochs, done = places[place]
        del expected[compared[place] :]
        seed(11)
        other = make(kind, **{**kw, "num_workers": workers[place % len(workers)]})
        if other.generator is not None:
            other.generator.manual_seed(1234)
        other.load_state_dict(state)
        if other.num_workers == 0 or (done is None and not own):
            of_program(other, mine)
        found = [pull(iter(other)) for _ in expected]
        if not kw.get("in_order", True):
            found, expected = ([_part(epoch) for epoch in both] for both in (found, expected))
        assert found == expected, (epochs, done)


@pytest.mark.parametrize("mode, kind", [(mode, kind) for mode in MODES for kind in MODES[mode][2]])
def test_rest_comes_at_any_place_with_any_workers(mode: str, kind: str) -> None:
    """An epoch that has not begun, and a later one, is the same if the generators are the loader's,
    or if the program restores its own."""
    places = PLACES if kind in OWN else [(0, 0), (0, 3), (1, 4)]
    if kind == "shuffle" and mode != "begun early":
        places = [(0, 0), (0, 3), (1, None), (1, 4)]
    check_resumed(mode, kind, places, MODES[mode][1])


def test_rest_comes_in_a_new_process(tmp_path: Path) -> None:
    """One process resumes all of them."""
    cases: list[tuple[str, dict[str, Any], int, dict[str, Any]]] = [
        *((kind, {}, 0, {"num_workers": 3}) for kind in KINDS),
        *(("two generators", kw, 2, kw) for kw in ({}, {"persistent_workers": True})),
        *(("stream", kw, 0, kw) for workers in (1, 3) for in_order in (True, False)
          for kw in [{"num_workers": workers, "in_order": in_order}]),
    ]  # fmt: skip
    given, expected = [], []
    for kind, kw, later, resumed in cases:
        [(state, came, _)] = interrupted(kind, kw, [(0, 2)], 1 + later)
        given.append([kind, resumed, saved(state, tmp_path), later + 1])
        expected.append(came)
    run = programs().run(REST, given=json.dumps(given), timeout=120)
    assert run.returncode == 0, run.stderr
    for (kind, kw, *_), came, again in zip(cases, expected, json.loads(run.stdout), strict=True):
        if not kw.get("in_order", True):
            came, again = [_part(came[0])], [_part(again[0])]
        assert again == came and len(came[0]) >= 3, (kind, kw)


def test_going_on_draws_nothing_from_the_program() -> None:
    """A model's draws after it are the same as without the interruption."""
    seed(6)
    loader = make("shuffle")
    it = iter(loader)
    take(it, 3)
    state, rng = loader.state_dict(), torch.get_rng_state()
    expected = torch.rand(3)
    lists(it)
    other = make("shuffle")
    other.load_state_dict(state)
    torch.set_rng_state(rng)
    random.seed(1)
    np.random.seed(1)
    before = (random.getstate(), np.random.get_state(legacy=False)["state"]["pos"])
    next(iter(other))
    assert torch.equal(torch.rand(3), expected)
    assert before == (random.getstate(), np.random.get_state(legacy=False)["state"]["pos"])


def test_state_after_resume_equals_loaded_state() -> None:
    seed(6)
    loader = make("shuffle of its own")
    it = iter(loader)
    take(it, 2)
    first = loader.state_dict()
    take(it, 2)
    expected = lists(it)
    second = make("shuffle of its own")
    second.load_state_dict(first)
    assert second.state_dict() == first
    it = iter(second)
    again = second.state_dict()
    assert {**again, "costs": 0} == {**first, "costs": 0}
    take(it, 2)
    third = make("shuffle of its own", num_workers=1)
    third.load_state_dict(second.state_dict())
    assert lists(third) == expected


@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_into_a_living_persistent_loader(scheduling: str) -> None:
    seed(6)
    loader = make("shuffle of its own", persistent_workers=True, scheduling=scheduling)
    it = iter(loader)
    take(it, 3)
    state = loader.state_dict()
    expected = [lists(it), lists(loader)]
    pids = {w.pid for w in loader._iterator._workers}
    loader.load_state_dict(state)
    assert [lists(loader), lists(loader)] == expected
    assert scheduling == "static" or {w.pid for w in loader._iterator._workers} == pids


class Moody(Sampler):
    """Its list of samples cannot be read once."""

    fails: type[BaseException] | None = None

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Any:
        fails, self.fails = self.fails, None
        if fails is not None:
            raise fails("not now")
        return iter(range(N))


@pytest.mark.parametrize("living", [False, True])
@pytest.mark.parametrize("scheduling", ["balanced", "static"])
@pytest.mark.parametrize("fails", [OSError, KeyboardInterrupt])
def test_failed_epoch_start_keeps_pending_state(
    fails: type[BaseException], scheduling: str, living: bool
) -> None:
    kw: dict[str, Any] = dict(persistent_workers=True, scheduling=scheduling)
    loaders = [minato.DataLoader(Noisy(N), SIZE, sampler=Moody(), num_workers=2, **kw) for _ in "ab"]
    it = iter(loaders[0])
    take(it, 2)
    state = loaders[0].state_dict()
    other: Any = loaders[1]
    if living:
        lists(other)
    other.load_state_dict(state)
    other.sampler.fails = fails
    with pytest.raises(fails, match="not now"):
        iter(other)
    assert other.state_dict() == state
    assert lists(other) == lists(it)
    assert indices(lists(other)) == list(range(N))  # and is not taken again


def test_empty_state_starts_new_epoch() -> None:
    loader = make("sequence")
    take(iter(loader), 3)
    loader.load_state_dict({})
    assert len(lists(loader)) == N // SIZE


def test_equal_loaders_have_separate_states() -> None:
    class Alike(minato.DataLoader):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Alike)

    one, two = (Alike(Noisy(N), SIZE, num_workers=1) for _ in range(2))
    it = iter(one)
    take(it, 3)
    two.load_state_dict(one.state_dict())
    assert len(lists(it)) == len(lists(two)) == N // SIZE - 3


# ---- out of order: the rest of the epoch -----------------------------------------------


class Gated(torch.utils.data.Dataset):
    """Sample 0 waits for the event."""

    def __init__(self, gate: Any) -> None:
        self.gate = gate

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 0:
            assert self.gate.wait(60)
        return index


@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_gaps_are_remembered(scheduling: str) -> None:
    gate = torch.multiprocessing.get_context("fork").Event()
    kw = dict(batch_size=2, num_workers=2, in_order=False, scheduling=scheduling)
    loader = minato.DataLoader(Gated(gate), **kw)
    it = iter(loader)
    first = [next(it).tolist() for _ in range(2)]
    state = loader.state_dict()
    gate.set()
    assert [0, 1] not in first and state["delivered"] == 0
    assert state["delivered_beyond"] == sorted(b[0] // 2 for b in first)
    other = minato.DataLoader(Gated(gate), **kw)
    other.load_state_dict(state)
    second = [b.tolist() for b in other]
    assert sorted(sum(first + second, [])) == list(range(12))
    del it


def test_gaps_in_order_again() -> None:
    gate = torch.multiprocessing.get_context("fork").Event()
    gate.set()
    state = {**minato.DataLoader(Gated(gate), 2).state_dict(), "base_seed": 1}
    state.update(delivered=1, delivered_beyond=[2, 4])
    for workers in (0, 2):
        for scheduling in ("balanced", "static"):
            loader = minato.DataLoader(
                Gated(gate), 2, num_workers=workers, scheduling=scheduling
            )
            loader.load_state_dict(state)
            assert [b.tolist() for b in loader] == [[2, 3], [6, 7], [10, 11]]


class EveryThirdFails(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> int:
        if index % 3 == 1:
            raise ValueError("this sample is broken")
        return index


@pytest.mark.parametrize("collate_fn", [None, list])
@pytest.mark.parametrize("batch", [2, 3, 8])
def test_replacements_after_resume_equal_whole_batch(
    batch: int, collate_fn: Any
) -> None:
    def replaced(state: dict[str, Any]) -> tuple[dict[int, int], list[Any]]:
        loader = minato.DataLoader(
            EveryThirdFails(), batch, sampler=order, num_workers=2, in_order=False,
            batching="ready", on_error="replace", max_errors=48, collate_fn=collate_fn,
        )  # fmt: skip
        loader.load_state_dict({**loader.state_dict(), "base_seed": 1, "unit": "sample", **state})
        epoch = [len(data) for data in loader]
        latest = loader.stats()["failed"]["latest"]
        return {index: other for index, _, other in latest}, epoch

    order = random.Random(3).sample(range(48), 48)
    whole, _ = replaced({})
    assert len(whole) == 16
    for delivered in ([0, 4, 5, 11], [1, 2, 3, 9], [7, 15, 23, 24, 25, 26], [0, 1, 2, 45, 47]):
        rest, epoch = replaced({"delivered_beyond": delivered})
        there = {order[i] for i in delivered}
        assert rest == {index: other for index, other in whole.items() if index not in there}
        assert sum(epoch) == 48 - len(delivered)


# ---- static and iterable: fast forward -------------------------------------------------


def _part(batches: list) -> list[tuple]:
    return sorted(tuple(row) for batch in batches for row in batch)


def test_iterable_whose_workers_end_one_after_another() -> None:
    class Uneven(Stream):
        def __iter__(self) -> Iterator[torch.Tensor]:
            info = torch.utils.data.get_worker_info()
            for i in range(3 + 8 * info.id):
                yield torch.tensor([info.id, i], dtype=torch.float64)

    for done in range(0, 9, 2):
        loader = minato.DataLoader(Uneven(), 2, num_workers=3)
        it = iter(loader)
        first = take(it, done)
        other = minato.DataLoader(Uneven(), 2, num_workers=3)
        other.load_state_dict(loader.state_dict())
        second = lists(other)
        assert Counter(_part(first + second)) == Counter(_part(first + lists(it)))


# ---- without workers -------------------------------------------------------------------


class Interrupted(Noisy):
    """Once, in the middle of a batch."""

    fired = False

    def __getitem__(self, index: int) -> Any:
        if index == 9 and not self.fired:
            self.fired = True
            raise KeyboardInterrupt
        return index


@pytest.mark.parametrize("goes_on", [0, 1, 3])
@pytest.mark.parametrize("options", [
    {}, {"seed_per_sample": True}, {"on_error": "skip"}, {"on_error": "replace", "batch_size": 2},
])  # fmt: skip
def test_batch_lost_to_interrupt_is_not_delivered(goes_on: int, options: dict) -> None:
    """Also if the program continues with the batch after it."""
    options = {"batch_size": SIZE, **options}
    loader = minato.DataLoader(Interrupted(N), **options)
    it, found = iter(loader), []
    with pytest.raises(KeyboardInterrupt):
        for batch in it:
            found.append(batch.tolist())
    found += [next(it).tolist() for _ in range(goes_on)]
    other = minato.DataLoader(Interrupted(N), **options)
    other.dataset.fired = True
    other.load_state_dict(through_json(loader.state_dict()))
    rest = [batch.tolist() for batch in other]
    assert 9 in rest[0] and len(rest[0]) == options["batch_size"]
    assert sorted(sum(found + rest, [])) == list(range(N))


# ---- taking it is cheap ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shuffle", "shuffle of its own", "batches of random", "stream"])
def test_state_dict_starts_and_draws_nothing(kind: str) -> None:
    seed(6)
    loader = make(kind)
    generator = loader.generator

    def drawn() -> list:
        own = generator.get_state().tolist() if generator is not None else None
        numpys = np.random.get_state(legacy=False)["state"]
        return [torch.get_rng_state().tolist(), random.getstate(), numpys["pos"], own]

    gc.collect()
    before = drawn(), len(psutil.Process().children()), threading.active_count()
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    after = drawn(), len(psutil.Process().children()), threading.active_count()
    assert before == after
    it = iter(loader)
    next(it)
    now = drawn()
    assert loader.state_dict()["base_seed"] is not None and drawn() == now
    del it


def test_a_state_is_a_copy() -> None:
    loader = make("sequence", in_order=False)
    it = iter(loader)
    next(it)
    state = loader.state_dict()
    before = json.dumps(state)
    take(it, 3)
    assert json.dumps(state) == before
    del it


def costs_of(loader: minato.DataLoader) -> list[list[int]]:
    """Indices, and what each has cost in nanoseconds."""
    parts = loader_memo.memo_of(loader).costs.save()[:2]
    return [np.frombuffer(part, np.int64).tolist() for part in parts]


def test_learned_costs_travel() -> None:
    """With eight bits of mantissa: which are the slowest may differ among those that cost alike."""
    loader = make("sequence")
    lists(loader)
    known = loader.stats()["cost"]
    assert known["known"] == N
    other = make("sequence")
    other.load_state_dict(through_json(loader.state_dict()))
    cost = other.stats()["cost"]
    assert cost["known"] == N and cost["mean"] == pytest.approx(known["mean"], rel=0.2)
    (index, wall), (there, learned) = costs_of(other), costs_of(loader)
    assert index == there and wall == pytest.approx(learned, rel=2**-8)
    assert len(other.stats()["slow"]) == len(loader.stats()["slow"]) == 10


class Hinted(Noisy):
    def cost_hint(self, index: int) -> float:
        return 1.0 + index


def test_ratios_to_hints_travel() -> None:
    """With five bits of mantissa, and the scale for indices that have none."""
    model = loader_memo.memo_of(loader := minato.DataLoader(Hinted(N), num_workers=1)).costs
    for hint in (1.0, 3.0, 2.0):  # drawn anew in each epoch
        for index in range(N - 1):
            model.observe(index, int(1e6 * hint * (index % 7 + 1)), hint)
    state = through_json(loader.state_dict())
    other = minato.DataLoader(Hinted(N), num_workers=1)
    other.load_state_dict(state)
    resumed = loader_memo.memo_of(other).costs
    for index in range(N - 1):
        assert resumed.predict(index, 5.0) == pytest.approx(5e6 * (index % 7 + 1), rel=2**-5)
    scale = resumed.summary()["hint_scale_ns"]
    assert scale == pytest.approx(model.summary()["hint_scale_ns"], rel=2**-5)
    assert resumed.predict(N - 1, 5.0) == pytest.approx(5 * scale, rel=1e-6)
    list(other)
    again = other.state_dict()["hint_ratios"]
    assert len(unpack_ratios(again, N)) == 4 * N


def test_useless_hints_stay_unused_after_resume() -> None:
    model = loader_memo.memo_of(loader := minato.DataLoader(Hinted(N), num_workers=1)).costs
    draw = random.Random(5)
    for _ in range(3):
        for index in range(N):
            model.observe(index, 1_000_000 * (index + 1), 10 ** draw.uniform(-3, 3))
    state = through_json(loader.state_dict())
    other = minato.DataLoader(Hinted(N), num_workers=1)
    other.load_state_dict(state)
    resumed = loader_memo.memo_of(other).costs
    assert other.stats()["cost"]["predicted_by"] == "history"
    for index in range(N):
        assert resumed.predict(index, 500.0) == pytest.approx(1e6 * (index + 1), rel=2**-8)


@pytest.mark.parametrize("missing", [("hint_ratios", "hint_errors"), ("begun",)], ids=str)
def test_states_of_older_versions_are_read(missing: tuple[str, ...]) -> None:
    """The first are also missing for a dataset without hints."""
    it = iter(loader := make("sequence"))
    take(it, 3)
    state = loader.state_dict()
    assert state["hint_ratios"] is None
    other = make("sequence")
    other.load_state_dict({name: value for name, value in state.items() if name not in missing})
    assert other.stats()["cost"]["known"] >= 3 * SIZE and other.stats()["cost"]["hinted"] == 0
    assert lists(other) == lists(it)


def test_senseless_ratios_are_left_out() -> None:
    halves = np.full(N, 0x7FC0, np.uint16)  # not a number
    halves[:3] = 0x7F80, 0xBF80, 0  # infinity, -1, unknown
    loader = make("sequence")
    lists(loader)
    other = make("sequence")
    other.load_state_dict({**loader.state_dict(), "hint_ratios": pack(halves.tobytes())})
    assert other.stats()["cost"]["hinted"] == 0
    assert loader_memo.memo_of(other).costs.save()[2] == b""


def test_million_ratios_take_few_megabytes() -> None:
    ratios = np.random.default_rng(0).lognormal(10, 1, 1_000_000).astype(np.float32)
    text = pack_ratios(ratios.tobytes())
    assert text is not None and len(text) < 1.6e6
    back = np.frombuffer(unpack_ratios(text, len(ratios)), np.float32)
    assert np.abs(back / ratios - 1).max() <= 2**-5


@pytest.mark.parametrize("size, again", [(1 << 17, True), (1 << 10, False)])
def test_costs_of_many_are_packed_now_and_then(
    size: int, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_memo, "PACKED_FOR", 1e9)
    loader = minato.DataLoader(Noisy(size), num_workers=1)
    costs = loader_memo.memo_of(loader).costs

    def learn(wall: int) -> Any:
        ones = np.arange(100, dtype=np.int64)
        costs.load(ones.tobytes(), np.full(100, wall, np.int64).tobytes())
        return loader.state_dict()["costs"]

    first = learn(1000)
    assert (learn(2000) == first) == again
    loader.load_state_dict({**loader.state_dict(), "costs": first})
    next(iter(loader))
    monkeypatch.setattr(loader_memo, "PACKED_FOR", 0)
    assert learn(4000) != first


# ---- invalid states --------------------------------------------------------------------


MISSING = object()


@pytest.fixture(scope="module")
def good() -> dict:
    loader = make("shuffle of its own")
    it = iter(loader)
    take(it, 2)
    return loader.state_dict()


@pytest.mark.parametrize(
    "change, words",
    [
        (None, "not a state"), ([], "not a state"), ({"a": 1}, "not a state"),
        ({"version": 99}, "another version"), ({"epoch": "1"}, "epoch"),
        ({"epoch": -1}, "not an integer"), ({"epoch": True}, "epoch"),
        ({"delivered": -2}, "not an integer"), ({"delivered": 1.5}, "delivered"),
        ({"delivered_beyond": ["a"]}, "not an integer"), ({"delivered_beyond": 3}, "beyond"),
        ({"base_seed": "x"}, "base_seed"), ({"generators": []}, "generators"),
        ({"generators": {"sampler": "%%%"}}, "damaged"), ({"generators": {"sampler": 3}}, "damaged"),
        ({"generators": {"sampler": "AAAA"}}, "damaged"), ({"costs": []}, "two"),
        ({"costs": ["x", "y"]}, "damaged"), ({"costs": None}, "costs"),
        ({"costs": [pack(b"1234"), pack(b"\x80\xff")]}, "not a valid time"),
        ({"dataset_length": 7}, "dataset_length=7"), ({"batch_size": 3}, "batch_size=3"),
        ({"delivered_by_worker": [1, 1]}, "iterable"), ({"unit": "sample"}, "this loader counts batches"),
        ({"begun": "yes"}, "damaged: begun is 'yes'"), ({"costs": "short"}, "lengths of costs differ"), ({"generators": {"sampler": "short"}}, "damaged: truncated"),
        *(({name: MISSING}, f"{name} missing")
          for name in ("epoch", "base_seed", "generators", "delivered", "costs")),
        *(({"hint_errors": errors}, "hint_errors is")
          for errors in ([1.0, 2.0], [1.0, 2.0, math.nan], [1.0, -2.0, 0.0], [0.0, 0.0, math.inf], 3,
                         ["a", "b", "c"])),
        ({"hint_ratios": pack(b"1234")}, "lengths of costs and hint_ratios"),
        ({"hint_ratios": pack(bytes(2 * N + 1))}, "lengths"), ({"hint_ratios": "x"}, "damaged"),
        ({"hint_ratios": 7}, "damaged"),
        *(({name: value}, "the state is damaged") for name, value in [
            ("rank", 2), ("rank", -1), ("rank", "0"), ("world", None), ("block", 0), ("world", 0),
            ("sampler_epoch", -1)]),
    ],
)  # fmt: skip
def test_bad_states(good: dict, change: Any, words: str) -> None:
    state = {**good, **change} if isinstance(change, dict) and "a" not in change else change
    if isinstance(change, dict) and change.get("costs") == "short":
        state["costs"] = [good["costs"][0], pack(b"12345678")]
    if isinstance(change, dict) and change.get("generators") == {"sampler": "short"}:
        whole = base64.b64decode(good["generators"]["sampler"])
        state["generators"] = {"sampler": base64.b64encode(whole[:-5]).decode()}
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if value is not MISSING}
    loader = make("shuffle of its own")
    with pytest.raises(ValueError, match=words):
        loader.load_state_dict(state)
    assert loader.state_dict()["delivered"] == 0


@pytest.mark.parametrize("where", ["generators", "many", "costs", "times", "version 1", "worker"])
def test_a_state_that_stands_for_gigabytes(good: dict, where: str) -> None:
    """It is refused before there is memory for that."""
    bomb, part = pack(bytes(256 << 20)), pack(bytes(2 << 20))
    worker = {"dataset": None, "iterator": None, "ended": False, "begins": False, "again": 0}
    changes: dict[str, dict[str, Any]] = {
        "generators": {"generators": {"sampler": bomb}},
        "many": {"generators": {str(n): part for n in range(99)}},
        "costs": {"costs": [bomb, pack(b"")]}, "times": {"costs": [pack(b""), bomb]},
        "version 1": {"version": 1, "costs": [bomb, bomb, bomb]},
        "worker": {"worker_states": [{**worker, "generators": {"torch": bomb}}]},
    }  # fmt: skip
    loader = make("shuffle of its own", num_workers=0) if where == "worker" else make("shuffle of its own")
    state = {**good, **changes[where]}
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="the packed data has more than .* bytes"):
            loader.load_state_dict(state)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_costs_are_kept_to_eight_bits() -> None:
    model = _core.CostModel(5_000_000)
    want = {index: 3**k for k, index in enumerate((0, 1, 7, 4_000_000, 4_999_999))}
    for index, wall in want.items():
        model.observe(index, 1000 * wall)
    texts = pack_costs(model.save())
    index, wall = (np.frombuffer(p, np.int64) for p in unpack_costs(texts))
    assert index.tolist() == list(want)
    assert wall.tolist() == pytest.approx([1000 * w for w in want.values()], rel=2**-8)
    other = _core.CostModel(5_000_000)
    assert other.load(index, wall) == len(want)
    assert pack_costs(other.save()) == texts  # however often it travels
    assert unpack_costs(pack_costs((b"", b""))) == [b"", b""]


def test_states_of_the_first_format_are_read(good: dict) -> None:
    index, wall = unpack_costs(good["costs"])
    old = {**good, "version": 1, "costs": [pack(p) for p in (index, wall, bytes(len(index)))]}
    first, second = make("shuffle of its own"), make("shuffle of its own")
    first.load_state_dict(old)
    second.load_state_dict(good)
    assert first.stats()["slow"] == second.stats()["slow"] != []


def test_a_new_epoch_may_begin_with_other_data() -> None:
    loader = make("sequence")
    lists(loader)
    other = minato.DataLoader(Noisy(7), batch_size=3, num_workers=1)
    other.load_state_dict(loader.state_dict())
    assert len(lists(other)) == 3


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_a_sampler_that_ends_too_early(workers: int, scheduling: str) -> None:
    loader = make("sequence")
    it = iter(loader)
    take(it, 8)
    state = loader.state_dict()
    fewer = range(0, len(Noisy(N)), 2)
    other = minato.DataLoader(
        Noisy(N), SIZE, sampler=fewer, num_workers=workers, scheduling=scheduling
    )
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="sampler gave only 5"):
        list(other)


class Pipe(torch.utils.data.IterDataPipe):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class OwnContext(type(torch.multiprocessing.get_context("fork"))):  # type: ignore[misc]
    """A multiprocessing context that is none of the standard ones."""


def served_by_torch(kind: str) -> minato.DataLoader:
    if kind == "pipe":
        return minato.DataLoader(Pipe(), num_workers=1)
    return make("shuffle of its own", multiprocessing_context=OwnContext())


@pytest.mark.parametrize("kind", ["pipe", "context"])
def test_uncounted_loader_knows_its_epoch(kind: str) -> None:
    """A trainer takes a state with each checkpoint, and must not die of it."""
    loader = served_by_torch(kind)
    with pytest.warns(UserWarning, match="uses torch's own workers.*holds the epoch"):
        assert loader.state_dict()["user_epoch"] is None
    loader.set_epoch(3)
    it = iter(loader)
    next(it)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        state = through_json(loader.state_dict())
    assert (state["user_epoch"], state["delivered"], state["base_seed"]) == (3, 0, None)
    del it

    other = served_by_torch(kind)
    other.load_state_dict(state)
    with pytest.warns(UserWarning, match="torch's own workers"):
        assert other.state_dict() == state
    assert len(list(other)) == (4 if kind == "pipe" else N // SIZE)
    other.load_state_dict({})
    assert "torch's own workers" in other.stats()["verdict"]


def test_uncounted_loader_restores_sampler_generator() -> None:
    loader = served_by_torch("context")
    orders = [indices(lists(loader))]
    with pytest.warns(UserWarning, match="torch's own workers"):
        state = loader.state_dict()
    orders += [indices(lists(loader))]
    other = served_by_torch("context")
    other.load_state_dict(state)
    assert indices(lists(other)) == orders[1] != orders[0]


def test_uncounted_loader_loses_mid_epoch_position() -> None:
    loader = make("shuffle of its own")
    it = iter(loader)
    take(it, 3)
    other = served_by_torch("context")
    with pytest.warns(UserWarning, match="restarts and delivers 3 batches again.* skip them"):
        other.load_state_dict(loader.state_dict())
    assert sorted(indices(lists(other))) == list(range(N))
    back = make("shuffle of its own")
    with pytest.warns(UserWarning, match="torch's own workers"):
        back.load_state_dict(other.state_dict())
    assert sorted(indices(lists(back))) == list(range(N))


# ---- damage ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("role, data", [
    ("torch", b"12345678"), ("python", b"[3, [1], null]"), ("numpy", b"[[1], 0, 0, 0.0]"),
    ("numpy", json.dumps([[2**70] * 624, 1, 0, 0.0]).encode()),
])  # fmt: skip
def test_a_generators_state_that_cannot_be_set(role: str, data: bytes, workers: int) -> None:
    """The program has its own generators as they were, those before it too."""
    loader = minato.DataLoader(range(8), batch_sampler=[[0, 1], [2, 3]], num_workers=workers)
    next(iter(loader))
    state = loader.state_dict()
    seed(5)
    before = all_global()
    with pytest.raises(ValueError, match=f"the state's generator '{role}'"):
        loader.load_state_dict({**state, "generators": {**state["generators"], role: pack(data)}})
    assert all_global() == before


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("damage", [{"delivered": 2**62}, {"delivered_beyond": [3]}], ids=str)
def test_batches_of_a_stream_are_counted_by_worker(damage: dict[str, Any], workers: int) -> None:
    """Its sampler has no end at which another count would be found wrong."""
    loader = minato.DataLoader(Stream(20), batch_size=3, num_workers=workers)
    next(iter(loader))
    with pytest.raises(ValueError, match="the state is damaged"):
        loader.load_state_dict({**loader.state_dict(), **damage})


ODD: list[Any] = [
    None, -1, 0, 2**80, -(2**63), 1.5, float("nan"), True, "x", b"\0" * 7, b"\0" * 8, [], {}, (),
    [None], [2**70], torch.zeros(3), torch.zeros(0, dtype=torch.uint8), np.zeros(2), object(),
]  # fmt: skip


def spoiled(value: Any, rng: random.Random) -> Any:
    """A copy in which one part, at any depth, is another or is missing."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: spoiled(value[key], rng)}
    if isinstance(value, (list, tuple)) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        parts = [*value[:at], spoiled(value[at], rng), *value[at + 1 :]]
        return parts if isinstance(value, list) else tuple(parts)
    return rng.choice(ODD)


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_damaged_states_load_or_raise(kind: str) -> None:
    seed = int(os.environ["MINATO_TEST_SEED"])
    rng = random.Random(seed)

    def make() -> Any:
        if kind == "map":
            return minato.DataLoader(range(20), batch_size=3, shuffle=True)
        return minato.DataLoader(Stream(20), batch_size=3)

    loader = make()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    refused = 0
    for _ in range(400):
        changed, other = spoiled(state, rng), make()
        try:
            other.load_state_dict(changed)
            assert len(list(other)) <= 7, (seed, changed)
        except (ValueError, TypeError) as error:
            refused += 1
            assert str(error), (seed, changed)
    assert refused > 100


def test_changing_a_loaded_state_changes_nothing() -> None:
    """It may be changed once it is loaded, and so may what state_dict() has given."""
    first = minato.DataLoader(range(12), 2, shuffle=True, generator=torch.Generator())
    next(iter(first))
    state = first.state_dict()
    text = json.dumps(state)
    second = minato.DataLoader(range(12), 2, shuffle=True, generator=torch.Generator())
    second.load_state_dict(state)
    for mine in (state, second.state_dict()):
        mine["generators"].clear()
        mine["delivered_beyond"].append(3)
        mine.pop("costs")
    assert json.dumps(second.state_dict()) == text
    assert len(list(second)) == 5
