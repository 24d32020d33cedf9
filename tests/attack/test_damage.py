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

# offsets of csrc/workers/mn_records.h
WORKERS_OFF, TASKS_OFF, NTASKS = 24, 32, 84
TASK_BYTES, ENV_OFF, ENV_LEN, FLAGS, RUNNING, DONE, ENVELOPE = 128, 32, 40, 56, 2, 3, 1
ENVELOPE_HEAD = 32
WORKER_BYTES, STATE, PID, READY = 192, 4, 8, 3


def mapping() -> int:
    with open("/proc/self/maps") as maps:
        line = next(line for line in maps if "memfd:minato" in line)
    return int(line.split("-")[0], 16)


def word(at: int) -> int:
    return ctypes.c_uint64.from_address(at).value


def tasks_of(base: int, status: int) -> list[int]:
    """Where the records are of this worker's tasks in that state."""
    me, tasks = torch.utils.data.get_worker_info().id, base + word(base + TASKS_OFF)
    count = ctypes.c_uint32.from_address(base + NTASKS).value
    records = [tasks + task * TASK_BYTES for task in range(count)]
    return [at for at in records if word(at) & 0xFF == status and word(at) >> 16 & 0xFFFF == me]


def spoil() -> None:
    """The record of the task in hand then says that its result is in an envelope."""
    [task] = tasks_of(mapping(), RUNNING)
    ctypes.c_uint32.from_address(task + FLAGS).value = ENVELOPE


def entry() -> int:
    base, me = mapping(), torch.utils.data.get_worker_info().id
    return base + word(base + WORKERS_OFF) + me * WORKER_BYTES


def forge(state: int) -> None:
    """This worker's entry then says so of its process, which goes on."""
    ctypes.c_uint32.from_address(entry() + STATE).value = state
    time.sleep(4 * PATIENCE)


def spoil_and_be_another() -> None:
    """The worker's entry then names a process that was never there."""
    ctypes.c_uint32.from_address(entry() + PID).value = 0xFFFFFFFF
    spoil()


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
            with pytest.raises(minato.WorkerLost, match="damaged: its result lies outside"):
                next(iterator)
        else:
            got += next(iterator).tolist()
    assert got == [i for i in range(64) if i // 4 != 9]


def test_an_error_names_the_process_that_it_was() -> None:
    dataset = Spoils(0, spoil_and_be_another)
    made = make(dataset, max_retries=0)
    assert len(list(made)) == 16
    dataset.left.value = 1
    with pytest.raises(minato.WorkerLost, match="damaged: its result lies outside") as caught:
        list(made)
    assert caught.value.pid == dataset.pid.value
    assert made.stats()["deaths"] == 1


def test_a_static_batch_of_which_a_record_is_damaged() -> None:
    """Nobody can make it again. What it says of rows is not believed."""
    dataset = Spoils(0)
    made = make(dataset, scheduling="static")
    assert torch.cat(list(made)).tolist() == list(range(64))  # it is made in rows from now on
    dataset.left.value = 1
    iterator, got = iter(made), []
    with pytest.raises(minato.WorkerLost, match="damaged: its result lies outside"):
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


# ---- a task whose record is damaged while its worker is at it ---------------------------------

#: garbage; a worker that there is not; done
WORDS = {"garbage": 0xFFFE << 16 | 99, "of nobody": 0xFFFE << 16 | RUNNING, "done": None}


def garble(what: str) -> None:
    """The word of the task in hand; its generation stays."""
    [task] = tasks_of(mapping(), RUNNING)
    low = WORDS[what]
    if low is None:
        ctypes.c_uint8.from_address(task).value = DONE
    else:
        ctypes.c_uint32.from_address(task).value = low


class GoesOn(torch.utils.data.Dataset):
    """Sample 13 damages the word of its task, if it is told to, and goes on with it later."""

    def __init__(self, what: str) -> None:
        self.what, self.left = what, multiprocessing.Value("i", 0)
        self.pid, self.goes_on = multiprocessing.Value("i", 0), multiprocessing.Value("i", 0)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.left.get_lock():
            mine = index == 13 and self.left.value > 0
            self.left.value -= mine
        if mine:
            self.pid.value = os.getpid()
            garble(self.what)
            wait_for(lambda: self.goes_on.value, "the program", 4 * PATIENCE)
        return torch.full((40_000,), float(index))  # rows of a batch are handed out uncopied


@pytest.mark.parametrize("what", WORDS)
def test_a_batch_that_is_held_has_no_other_writer(what: str) -> None:
    """Whoever is at a damaged task is gone before another worker makes it."""
    dataset = GoesOn(what)
    loader = make(dataset)
    for _ in range(2):  # the layout is known, and the first batches are not of one sample
        assert len(list(loader)) == 4
    dataset.left.value, held = 1, None
    for held in loader:
        pass
    assert dataset.left.value == 0 and held[:, 0].tolist() == [12.0, 13.0, 14.0, 15.0]
    held.fill_(-1.0)
    dataset.goes_on.value = 1
    wait_for(lambda: not alive(dataset.pid.value), "its end")
    assert bool((held == -1.0).all())
    assert loader.stats()["deaths"] == 1


@pytest.mark.parametrize("what", WORDS)
def test_a_damaged_task_of_a_worker_that_is_not_replaced(what: str) -> None:
    """With static scheduling its batch is an error, and next() does not wait for the worker."""
    dataset = GoesOn(what)
    loader = make(dataset, scheduling="static")
    for _ in range(2):
        assert len(list(loader)) == 4
    dataset.left.value = 1
    with pytest.raises(minato.WorkerLost, match="damaged"):
        list(loader)
    wait_for(lambda: not alive(dataset.pid.value), "its end")


def garble_status() -> None:
    """The word of the task in hand goes on to name its worker."""
    [task] = tasks_of(mapping(), RUNNING)
    ctypes.c_uint8.from_address(task).value = 99


class SpoilsSlowly(Spoils):
    def __getitem__(self, index: int) -> int:
        time.sleep(0.03)
        return super().__getitem__(index)


def test_what_the_dead_has_damaged_is_not_said_of_the_next() -> None:
    """It is read when nobody but its author can have been in that place."""
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


def envelopes() -> tuple[list[int], list[int]]:
    """Where this worker's finished tasks have their records, and their envelopes."""
    base = mapping()
    done = tasks_of(base, DONE)
    assert len(done) == 2, done
    return done, [base + word(task + ENV_OFF) for task in done]


def swap_envelopes() -> None:
    """Each of two finished tasks then has the other's result."""
    (a, b), _ = envelopes()
    for field in (ENV_OFF, ENV_LEN):
        first, second = word(a + field), word(b + field)
        ctypes.c_uint64.from_address(a + field).value = second
        ctypes.c_uint64.from_address(b + field).value = first


def move_a_part() -> None:
    """The tensors of finished results then are other bytes of the same envelope."""
    for at in envelopes()[1]:
        ctypes.c_uint64.from_address(at + ENVELOPE_HEAD).value += 16


def change_a_pickle() -> None:
    """One letter of finished results then is another one."""
    for at in envelopes()[1]:
        pickle_at, size = word(at + 8), word(at + 16)
        text = (ctypes.c_char * size).from_address(at + pickle_at)
        place = text.raw.index(b"sample ")
        ctypes.c_char.from_address(at + pickle_at + place).value = b"e"


class Told(Spoils):
    """Its tensors and texts tell the index; before sample 8 it damages what is finished."""

    def __getitem__(self, index: int) -> Any:
        if index == 8 and self.left.value > 0:
            self.spoil()
            with self.left.get_lock():
                self.left.value -= 1
        return index, torch.full((16,), index), f"sample {index}"


@pytest.mark.parametrize("scheduling", ["balanced", "static"])
@pytest.mark.parametrize("spoil", [swap_envelopes, move_a_part, change_a_pickle])
def test_a_finished_result_that_is_damaged_is_not_delivered(
    spoil: Callable[[], None], scheduling: str
) -> None:
    dataset = Told(1, spoil)
    iterator = iter(minato.DataLoader(
        dataset, 4, num_workers=1, prefetch_factor=4, collate_fn=list, timeout=PATIENCE,
        scheduling=scheduling,
    ))  # fmt: skip
    wait_for(lambda: dataset.left.value == 0, "damage")
    got, errors = [], 0
    for _ in range(16):
        try:
            batch = next(iterator)
        except RuntimeError as error:
            assert "a DataLoader worker has sent is damaged" in str(error)
            errors += 1
            continue
        for index, tensor, text in batch:
            assert tensor.tolist() == [index] * 16 and text == f"sample {index}"
            got.append(index)
    # with balanced scheduling records may have been read before that, to learn from them
    read_before = scheduling == "balanced" and spoil is swap_envelopes
    assert errors == 2 or read_before
    assert got == list(range(4 * errors, 64))


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
