"""Workers whose extensions write to memory of the loader that they must not touch."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

import pytest
import torch
from contract.support import error_text

import minato
from minato.transport import messages

from .datasets import Wordy
from .support import PATIENCE, alive, wait_for

# offsets of csrc/workers/mn_records.h
WORKERS_OFF, TASKS_OFF, NTASKS = 24, 32, 84
TASK_BYTES, FLAGS, RUNNING, ENVELOPE = 128, 48, 2, 1
WORKER_BYTES, STATE, PID, READY = 192, 4, 8, 3


def mapping() -> int:
    with open("/proc/self/maps") as maps:
        line = next(line for line in maps if "memfd:minato" in line)
    return int(line.split("-")[0], 16)


def word(at: int) -> int:
    return ctypes.c_uint64.from_address(at).value


def tasks_of(base: int, status: int) -> list[int]:
    """Addresses of the records of this worker's tasks in that state."""
    me, tasks = torch.utils.data.get_worker_info().id, base + word(base + TASKS_OFF)
    count = ctypes.c_uint32.from_address(base + NTASKS).value
    records = [tasks + task * TASK_BYTES for task in range(count)]
    return [at for at in records if word(at) & 0xFF == status and word(at) >> 16 & 0xFFFF == me]


def spoil() -> None:
    """Makes the record of the running task say that its result is in an envelope."""
    [task] = tasks_of(mapping(), RUNNING)
    ctypes.c_uint32.from_address(task + FLAGS).value = ENVELOPE


def entry() -> int:
    base, me = mapping(), torch.utils.data.get_worker_info().id
    return base + word(base + WORKERS_OFF) + me * WORKER_BYTES


def spoil_and_be_another() -> None:
    """Makes the worker's entry name a process that never existed."""
    ctypes.c_uint32.from_address(entry() + PID).value = 0xFFFFFFFF
    spoil()


def spoil_and_stay() -> None:
    """For a worker that would not exit when told to."""
    spoil()
    Finalize(None, time.sleep, (4 * PATIENCE,), exitpriority=0)


class Spoils(torch.utils.data.Dataset):
    """Sample 37 damages the record of its task, a given number of times."""

    def __init__(self, times: int, spoil: Callable[[], None] = spoil) -> None:
        self.left, self.pid = multiprocessing.Value("i", times), multiprocessing.Value("i", 0)
        self.spoil = spoil

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        with self.left.get_lock():
            if index == 37 and self.left.value > 0:
                self.left.value -= 1
                self.pid.value = os.getpid()
            else:
                return index
        self.spoil()
        return index


def make(dataset: Any, **options: Any) -> minato.DataLoader:
    return minato.DataLoader(
        dataset, 4, num_workers=2, timeout=PATIENCE, persistent_workers=True, **options
    )


def test_task_of_damaged_record_is_made_again() -> None:
    dataset = Spoils(0)
    made = make(dataset)
    assert len(list(made)) == 16  # rows have a form from now on
    dataset.left.value = 1
    assert torch.cat(list(made)).tolist() == list(range(64))
    assert dataset.left.value == 0
    assert made._iterator._engine.health()["deaths"] == 1
    assert torch.cat(list(made)).tolist() == list(range(64))  # with a worker in its place


def test_repeated_damage_is_error_in_place() -> None:
    dataset = Spoils(0)
    made = make(dataset)
    assert len(list(made)) == 16
    dataset.left.value = 100
    iterator, got = iter(made), []
    for number in range(16):
        if number == 9:
            with pytest.raises(minato.WorkerLost, match="damaged: its result lies outside"):
                next(iterator)
        else:
            got += next(iterator).tolist()
    assert got == [i for i in range(64) if i // 4 != 9]


def test_damage_error_names_the_process() -> None:
    dataset = Spoils(0, spoil_and_be_another)
    made = make(dataset, max_retries=0)
    assert len(list(made)) == 16
    dataset.left.value = 1
    with pytest.raises(minato.WorkerLost, match="damaged: its result lies outside") as caught:
        list(made)
    assert caught.value.pid == dataset.pid.value
    assert made.stats()["deaths"] == 1


def test_damaged_static_batch_is_an_error() -> None:
    """The batch cannot be made again, and its reports of rows are not trusted."""
    dataset = Spoils(0)
    made = make(dataset, scheduling="static")
    assert torch.cat(list(made)).tolist() == list(range(64))  # it is made in rows from now on
    dataset.left.value = 1
    iterator, got = iter(made), []
    with pytest.raises(minato.WorkerLost, match="damaged: its result lies outside"):
        for batch in iterator:
            got += batch.tolist()
    assert got == list(range(len(got))) and len(got) <= 36


def test_worker_that_damages_records_is_killed() -> None:
    dataset = Spoils(0, spoil_and_stay)
    made = make(dataset)
    assert len(list(made)) == 16
    dataset.left.value = 1
    assert torch.cat(list(made)).tolist() == list(range(64))
    wait_for(lambda: not alive(dataset.pid.value), "its end")


# ---- a task whose word is overwritten while its worker is at it --------------------------------

#: garbage; a worker that does not exist
WORDS = {"garbage": 0xFFFE << 16 | 99, "of nobody": 0xFFFE << 16 | RUNNING}


class Overwrites(Spoils):
    """Sample 37 overwrites the word of its task, whose generation stays."""

    def __init__(self, what: str) -> None:
        super().__init__(1, lambda: self.overwrite(WORDS[what]))

    def overwrite(self, low: int) -> None:
        [task] = tasks_of(mapping(), RUNNING)
        ctypes.c_uint32.from_address(task).value = low


@pytest.mark.parametrize("what", WORDS)
def test_task_of_overwritten_word_is_made_again(what: str) -> None:
    """The worker ends by its own assertion, and another makes the task."""
    loader = make(Overwrites(what))
    assert torch.cat(list(loader)).tolist() == list(range(64))
    assert loader.stats()["deaths"] == 1
    assert torch.cat(list(loader)).tolist() == list(range(64))


@pytest.mark.parametrize("what", WORDS)
def test_overwritten_static_word_is_an_error(what: str) -> None:
    with pytest.raises(minato.WorkerLost):
        list(make(Overwrites(what), scheduling="static"))


def garble_status() -> None:
    """Damages the status in the running task's word, which still names its worker."""
    [task] = tasks_of(mapping(), RUNNING)
    ctypes.c_uint8.from_address(task).value = 99


class SpoilsSlowly(Spoils):
    def __getitem__(self, index: int) -> int:
        time.sleep(0.03)
        return super().__getitem__(index)


def test_damage_of_dead_worker_spares_its_replacement() -> None:
    """It is read while only its author can have written there."""
    dataset = SpoilsSlowly(0, garble_status)  # and its worker ends by its own assertion
    made = make(dataset, prefetch_factor=10)
    assert len(list(made)) == 16
    dataset.left.value = 1
    iterator = iter(made)
    got = next(iterator).tolist()

    def replaced() -> bool:
        workers = iterator._engine.workers()
        return dataset.left.value == 0 and all(
            entry["state"] == READY and entry["pid"] != dataset.pid.value for entry in workers
        )

    wait_for(replaced, "another in its place")
    assert got + torch.cat(list(iterator)).tolist() == list(range(64))
    assert made._iterator._engine.health()["deaths"] == 1


GARBAGE = {
    "noise": b"\x80\x05\x95 what is this",
    "nothing": b"",
    "a number": pickle.dumps(7),
    "of another task": pickle.dumps([(99, 0, None)]),
    "no failure": pickle.dumps((1, "no failure")),
    "few": pickle.dumps([]),
}


@pytest.mark.parametrize("what", GARBAGE)
@pytest.mark.parametrize("options", [
    {}, {"collate_fn": list}, {"scheduling": "static"}, {"batching": "ready", "in_order": False},
], ids=str)  # fmt: skip
def test_garbage_message_names_its_worker(
    options: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "dumps", lambda *_: (GARBAGE[what], []))
    iterator = iter(minato.DataLoader(Wordy(8), 4, num_workers=1, timeout=PATIENCE, **options))
    for _ in range(2):
        with pytest.raises(Exception) as caught:  # includes errors of unpickling
            next(iterator)
        text = error_text(caught.value)
        assert "DataLoader worker 0" in text and "memory" in text
    with pytest.raises(StopIteration):
        next(iterator)
