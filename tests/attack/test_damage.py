"""Workers whose extensions write where they must not: into what is shared with the loader."""

from __future__ import annotations

import ctypes
import multiprocessing
from typing import Any

import pytest
import torch

import minato

from .support import PATIENCE

# offsets of csrc/workers/mn_message.h
WORKERS_OFF, TASKS_OFF, NTASKS = 24, 32, 84
TASK_BYTES, FLAGS, RUNNING, ENVELOPE = 128, 56, 2, 1


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


class Spoils(torch.utils.data.Dataset):
    """Sample 37 damages the record of its task, so many times."""

    def __init__(self, times: int) -> None:
        self.left = multiprocessing.Value("i", times)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        with self.left.get_lock():
            if index == 37 and self.left.value > 0:
                self.left.value -= 1
                spoil()
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
