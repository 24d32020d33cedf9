"""Workers whose extensions write where they must not: into what is shared with the loader."""

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

# offsets of csrc/workers/mn_message.h
WORKERS_OFF, TASKS_OFF, NTASKS = 24, 32, 84
TASK_BYTES, FLAGS, RUNNING, ENVELOPE = 128, 56, 2, 1
WORKER_BYTES, STATE = 192, 4


def mapping() -> int:
    with open("/proc/self/maps") as maps:
        line = next(line for line in maps if "memfd:minato" in line)
    return int(line.split("-")[0], 16)


def word(at: int) -> int:
    return ctypes.c_uint64.from_address(at).value


def spoil() -> None:
    """The record of the task in hand then says that its result is in an envelope."""
    base, me = mapping(), torch.utils.data.get_worker_info().id
    tasks = base + word(base + TASKS_OFF)
    for task in range(ctypes.c_uint32.from_address(base + NTASKS).value):
        state = word(tasks + task * TASK_BYTES)
        if state & 0xFF == RUNNING and state >> 16 & 0xFFFF == me:
            ctypes.c_uint32.from_address(tasks + task * TASK_BYTES + FLAGS).value = ENVELOPE
            return
    raise AssertionError("no task in hand")


def forge(state: int) -> None:
    """This worker's entry then says so of its process, which goes on."""
    base, me = mapping(), torch.utils.data.get_worker_info().id
    entry = base + word(base + WORKERS_OFF) + me * WORKER_BYTES
    ctypes.c_uint32.from_address(entry + STATE).value = state
    time.sleep(4 * PATIENCE)


def spoil_and_stay() -> None:
    """A worker that was told to leave would never do it."""
    spoil()
    Finalize(None, time.sleep, (4 * PATIENCE,), exitpriority=0)


class Spoils(torch.utils.data.Dataset):
    """Sample 37 damages the record of its task, so many times."""

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


def test_another_worker_does_what_a_damaged_record_was_of() -> None:
    dataset = Spoils(0)
    made = make(dataset)
    assert len(list(made)) == 16  # rows have a form from now on
    dataset.left.value = 1
    assert torch.cat(list(made)).tolist() == list(range(64))
    assert dataset.left.value == 0
    assert made._iterator._engine.health()["deaths"] == 1
    assert torch.cat(list(made)).tolist() == list(range(64))  # with a worker in its place


def test_what_is_damaged_each_time_is_an_error_in_its_place() -> None:
    dataset = Spoils(0)
    made = make(dataset)
    assert len(list(made)) == 16
    dataset.left.value = 100
    iterator, got = iter(made), []
    for number in range(16):
        if number == 9:
            with pytest.raises(minato.WorkerLost, match="damaged: its result lies in memory"):
                next(iterator)
        else:
            got += next(iterator).tolist()
    assert got == [i for i in range(64) if i // 4 != 9]


def test_a_static_batch_of_which_a_record_is_damaged() -> None:
    """Nobody can make it again. What it says of rows is not believed."""
    dataset = Spoils(0)
    made = make(dataset, scheduling="static")
    assert torch.cat(list(made)).tolist() == list(range(64))  # it is made in rows from now on
    dataset.left.value = 1
    iterator, got = iter(made), []
    with pytest.raises(minato.WorkerLost, match="damaged: its result lies in memory"):
        for batch in iterator:
            got += batch.tolist()
    assert got == list(range(len(got))) and len(got) <= 36


def test_a_worker_that_writes_damage_is_killed() -> None:
    dataset = Spoils(0, spoil_and_stay)
    made = make(dataset)
    assert len(list(made)) == 16
    dataset.left.value = 1
    assert torch.cat(list(made)).tolist() == list(range(64))
    wait_for(lambda: not alive(dataset.pid.value), "its end")


@pytest.mark.parametrize("state", [0, 1, 4, 5, 77])
def test_a_worker_that_lies_about_its_process_is_killed(state: int) -> None:
    """Its memory and its task are not anybody else's while it may write there."""
    dataset = Spoils(1, lambda: forge(state))
    iterator = iter(make(dataset))
    assert torch.cat(list(iterator)).tolist() == list(range(64))
    health = iterator._engine.health()
    assert not alive(dataset.pid.value)
    assert (health["deaths"], health["pid"]) == (1, dataset.pid.value)
    assert health["status"] == 2007 and not health["zygote_lost"]


GARBAGE = {
    "noise": b"\x80\x05\x95 what is this",
    "nothing": b"",
    "a number": pickle.dumps(7),
    "of another task": pickle.dumps([(99, 0, None)]),
    "no failure": pickle.dumps((1, "no failure")),
    "few": pickle.dumps([]),
    "wrong": pickle.dumps([(0, 1, "no failure")]),
}


@pytest.mark.parametrize("what", GARBAGE)
@pytest.mark.parametrize("options", [
    {}, {"collate_fn": list}, {"scheduling": "static"}, {"batching": "ready", "in_order": False},
], ids=str)  # fmt: skip
def test_a_message_that_is_garbage_names_its_worker(
    options: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "dumps", lambda *_: (GARBAGE[what], []))
    iterator = iter(minato.DataLoader(Wordy(8), 4, num_workers=1, timeout=PATIENCE, **options))
    for _ in range(2):
        with pytest.raises(Exception) as caught:  # also what is raised while it is unpickled
            next(iterator)
        text = error_text(caught.value)
        assert "DataLoader worker 0" in text and "memory" in text
    with pytest.raises(StopIteration):
        next(iterator)
