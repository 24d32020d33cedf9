"""``sample_timeout=``: samples that take too long."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import minato
from minato.errors import LATE
from minato.iterators import supervisor as late_samples
from minato.time_limits import LateSamples

LATE_ONES = {13, 22}
#: so long no other sample takes, even on a busy machine
LIMIT_S = 1.0


class Hangs(Dataset):  # type: ignore[type-arg]
    """Some samples never come."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index in LATE_ONES:
            waits_for_ever()
        return index


class HangsTogether(Hangs):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


def waits_for_ever() -> None:
    while True:
        time.sleep(60)


class Polls(Hangs):
    """A signal ends the call of some samples early."""

    def __getitem__(self, index: int) -> int:
        if index in LATE_ONES:
            ctypes.CDLL(None).poll(None, 0, 60_000)
        return index


def made(**options: Any) -> Any:
    options = {"batch_size": 4, "num_workers": 2, "sample_timeout": LIMIT_S, "max_errors": 2, **options}
    return minato.DataLoader(options.pop("dataset", Hangs()), **options)


def received(loader: Any) -> tuple[list[int], list[Any]]:
    """The samples, and the errors in the place of batches."""
    samples, errors, batches = [], [], iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return samples, errors
        except minato.WorkerLost as error:
            errors.append(error)
            continue
        samples += torch.as_tensor(batch).reshape(-1).tolist()


KINDS: list[dict[str, Any]] = [
    {}, {"collate_fn": list}, {"batch_size": None}, {"num_workers": 1, "max_retries": 0},
    {"multiprocessing_context": "forkserver"},
]  # fmt: skip


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_late_sample_raises_with_its_index_and_stack(options: dict[str, Any]) -> None:
    loader = made(**options)
    samples, errors = received(loader)
    assert sorted(error.index for error in errors) == sorted(LATE_ONES)
    for error in errors:
        assert error.exit_status == LATE
        text = str(error)
        assert f"Sample index {error.index} of batch " in text
        assert "took longer than sample_timeout=1 seconds" in text and "in waits_for_ever" in text
    size = options.get("batch_size", 4) or 1
    gone = {index for late in LATE_ONES for index in range(late // size * size, late // size * size + size)}
    assert sorted(samples) == sorted({*range(40)} - gone)
    assert loader.stats()["deaths"] == 2 and loader.stats()["retries"] == 0


@pytest.mark.filterwarnings("ignore:2 samples of this epoch failed")
@pytest.mark.parametrize("mode, options", [
    *(("skip", options) for options in [*KINDS[1:3], {"in_order": False}, {"dataset": HangsTogether()}]),
    ("skip", {"dataset": Polls()}),
    ("replace", {}), ("replace", {"batch_size": None}),
], ids=lambda given: given if isinstance(given, str) else "-".join(given) or "default")
def test_late_sample_follows_on_error(options: dict[str, Any], mode: str) -> None:
    loader = made(**options, on_error=mode)
    samples, errors = received(loader)
    assert not errors and {*samples} == {*range(40)} - LATE_ONES
    assert len(samples) == (38 if mode == "skip" else 40)
    failed = loader.stats()["failed"]
    assert failed["left_out"] + failed["replaced"] == 2
    assert {index for index, _, _ in failed["latest"]} == LATE_ONES
    assert all("sample_timeout" in text and __file__ in text for _, text, _ in failed["latest"])


def test_late_samples_past_max_errors_raise() -> None:
    with pytest.raises(minato.WorkerLost, match="sample_timeout.*") as caught:
        list(made(on_error="skip", max_errors=1))
    assert caught.value.index in LATE_ONES and caught.value.exit_status == LATE


def test_late_call_of_getitems_names_the_batch() -> None:
    samples, errors = received(made(dataset=HangsTogether()))
    assert [error.index for error in errors] == [[12, 13, 14, 15], [20, 21, 22, 23]]


def test_other_samples_keep_their_numbers() -> None:
    class Draws(Hangs):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index), int(torch.randint(0, 2**62, ()))

    def drawn(dataset: Any, **options: Any) -> dict[int, int]:
        torch.manual_seed(1)
        loader = minato.DataLoader(dataset, 4, collate_fn=list, num_workers=2, **options)
        return {index: number for batch in loader for index, number in batch}

    class Quick(Draws):
        def __getitem__(self, index: int) -> Any:
            return index, int(torch.randint(0, 2**62, ()))

    whole = drawn(Quick())
    with pytest.warns(UserWarning, match="2 samples of this epoch failed"):
        found = drawn(Draws(), sample_timeout=LIMIT_S, on_error="skip", max_errors=2)
    assert found == {index: whole[index] for index in whole if index not in LATE_ONES}


@pytest.mark.filterwarnings("ignore:2 samples of this epoch failed")
def test_persistent_workers_go_on_after_late_samples() -> None:
    loader = made(persistent_workers=True, on_error="skip")
    for _ in range(2):
        samples, _ = received(loader)
        assert sorted(samples) == sorted({*range(40)} - LATE_ONES)


def test_slow_collate_function_ends_no_worker() -> None:
    def slowly(batch: list[int]) -> list[int]:
        time.sleep(1.5 * LIMIT_S)
        return batch

    class Few(Hangs):
        def __len__(self) -> int:
            return 8

    assert received(made(dataset=Few(), collate_fn=slowly)) == ([*range(8)], [])


class Numbers(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize("options, words", [
    ({"num_workers": 0}, "num_workers=0"), ({"scheduling": "static"}, "scheduling='static'"),
    ({"worker_type": "thread"}, "a thread cannot be killed"), ({"dataset": Numbers()}, "iterable"),
    ({"sample_timeout": 0}, "positive"), ({"sample_timeout": True}, "positive"),
    ({"sample_timeout": float("inf")}, "positive"), ({"sample_timeout": "1"}, "positive"),
])  # fmt: skip
def test_sample_timeout_without_effect_raises(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"sample_timeout.*{words}"):
        made(**options)


class FakePool:
    """A pool whose only worker makes one sample."""

    def __init__(self) -> None:
        self.engine = self.notes = self
        self.ended: list[Any] = []

    def workers(self) -> list[dict[str, Any]]:
        return [{"pid": 1, "since_ns": 5, "running": (0, 2)}]

    def ends_late(self, pid: int, text: str) -> None:
        pass

    def end_late(self, *what: int) -> str:
        self.ended.append(what)
        return ""


def test_stopped_program_makes_no_sample_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pool = [0.0], FakePool()
    monkeypatch.setattr(late_samples.time, "monotonic", lambda: now[0])
    late = LateSamples(10.0)
    for step in [1.0, 3600.0, *[1.0] * 7]:
        now[0] += step
        late.look(pool, lambda number: [0, 1, 2])
        assert not pool.ended
    now[0] += 1.0
    late.look(pool, lambda number: [0, 1, 2])
    assert pool.ended == [(0, 0, 2)]
