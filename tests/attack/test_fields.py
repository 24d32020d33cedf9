"""Each field of each record that a worker may write, overwritten while the worker runs.

An epoch in which a worker does so once has the right samples, or an error in the place
of that worker's batch. The next epoch, with other workers, is complete.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import re
import time
from collections.abc import Iterator
from ctypes import c_int32, c_uint16, c_uint32, c_uint64
from pathlib import Path
from typing import Any

import pytest
import torch

import minato
from minato.iterators.across_iterators import memo_of

from .support import PATIENCE, SECONDS, wait_for
from .test_damage import DONE, READY, RUNNING, TASKS_OFF, WORKERS_OFF, mapping, tasks_of, word

U16, U32, I32, U64 = c_uint16, c_uint32, c_int32, c_uint64


class Task(ctypes.Structure):
    """struct mn_task"""

    _fields_ = [
        ("word", U64), ("block_off", U64), ("row0", U32), ("nrows", U32), ("kind", U32),
        ("queue", U32), ("env_off", U64), ("env_len", U64), ("made", U32), ("pad0", U32),
        ("flags", U32), ("why", U32), ("wall_ns", U64), ("cpu_ns", U64), ("done_ns", U64),
        ("pad1", U64 * 5),
    ]  # fmt: skip


class Report(ctypes.Structure):
    """struct mn_report"""

    _fields_ = [("status", U32), ("pad0", U32), ("wall_ns", U64)]


class Worker(ctypes.Structure):
    """struct mn_worker"""

    _fields_ = [
        ("event", U32), ("state", U32), ("owner", U64), ("tid", U32),
        ("began", U16), ("pause_ms", U16), ("exit_status", I32), ("respawn", U16),
        ("retired", U16), ("line1", U64 * 4), ("lease_state", U32), ("lease_event", U32),
        ("lease_off", U64), ("lease_len", U64), ("want_bytes", U64), ("used_end", U64),
        ("init_states", U64 * 3), ("running", U64), ("since_ns", U64), ("row", U64),
        ("tasks_done", U64), ("rows_done", U64), ("busy_ns", U64), ("cpu_ns", U64),
        ("exit_request", U32), ("low_own", U32),
    ]  # fmt: skip


RECORDS: dict[str, type[ctypes.Structure]] = {"task": Task, "report": Report, "worker": Worker}
SIZES = {"task": 128, "report": 16, "worker": 192}
#: padding; the header's name for the second line of an entry
UNNAMED = {"line1"}
#: offset in the block that a task is of
REPORTS_AT = 80
QUEUED, WAITING = 1, 7
HEADER = Path(__file__).resolve().parents[2] / "csrc" / "workers" / "mn_records.h"


@pytest.mark.parametrize("record", RECORDS)
def test_every_shared_field_is_listed(record: str) -> None:
    text = HEADER.read_text()
    body = text[text.index(f"struct mn_{record} {{") :]
    body = re.sub(r"/\*.*?\*/", "", body[: body.index("};")], flags=re.DOTALL)
    names = re.findall(r"(\w+)(?:\[\d\])?;", body)
    kind = RECORDS[record]
    assert names == [name for name, *_ in kind._fields_ if name not in UNNAMED]
    assert ctypes.sizeof(kind) == SIZES[record]


def fields(record: str) -> list[tuple[str, int, int]]:
    """(name, offset, bytes)"""
    kind = RECORDS[record]
    return [(name, getattr(kind, name).offset, getattr(kind, name).size)
            for name, *_ in kind._fields_]  # fmt: skip


def record_at(record: str) -> int:
    """Address of the record that this worker may write now."""
    base, me = mapping(), torch.utils.data.get_worker_info().id
    if record == "worker":
        return base + word(base + WORKERS_OFF) + me * SIZES["worker"]
    [task] = tasks_of(base, RUNNING)
    if record == "task":
        return task
    block = base + word(task + Task.block_off.offset)
    row = ctypes.c_uint32.from_address(task + Task.row0.offset).value
    reports = ctypes.c_uint32.from_address(block + REPORTS_AT).value
    return block + reports + row * SIZES["report"]


class Written(torch.utils.data.Dataset):
    """If enabled, sample 37 overwrites a field of its worker's records."""

    def __init__(self) -> None:
        # which record + 1, offset, bytes, which value; without a lock, in which one might be killed
        self.told = multiprocessing.RawArray("q", 4)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        if index == 37:
            which, offset, size, value = self.told
            self.told[0] = 0
            if which:
                record = [*RECORDS][which - 1]
                at = record_at(record) + offset
                old = ctypes.string_at(at, size)
                ctypes.memmove(at, VALUES[value](old), size)
        return index


VALUES = [
    lambda old: b"\xff" * len(old),
    lambda old: bytes([old[0] ^ 1]) + old[1:],
    lambda old: bytes(len(old)),
    lambda old: b"\x01" + bytes(len(old) - 1),
    lambda old: old[:-1] + bytes([old[-1] ^ 0x80]),
]
#: fields for which more values are meaningful
TELLING = {"word", "state"}


# A worker that has overwritten its own state checks for tasks once a second.
@pytest.mark.limit(1200 if SECONDS >= 30 else 240)
@pytest.mark.filterwarnings("ignore:DataLoader worker .* deaths in a row:UserWarning")
@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("workers", [1, 2])
def test_overwritten_field_loses_no_sample(record: str, workers: int) -> None:
    dataset = Written()
    loader = minato.DataLoader(
        dataset, 4, num_workers=workers, timeout=PATIENCE, persistent_workers=True, max_retries=1
    )
    assert torch.cat(list(loader)).tolist() == list(range(64))
    wrong = []
    for name, offset, size in fields(record):
        for value in range(len(VALUES)) if SECONDS >= 30 or name in TELLING else range(2):
            dataset.told[:] = [1 + [*RECORDS].index(record), offset, size, value]
            for turn in range(2):
                got = epoch(loader)
                if got != list(range(64)) and (turn or got != but_batch(9)):
                    wrong.append((name, value, turn, got))
            assert dataset.told[0] == 0
    assert not wrong, wrong


class Streams(Written, torch.utils.data.IterableDataset):
    """The same, from streams: sample 37 is that of the second of two workers."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        return map(self.__getitem__, range(info.id, 64, info.num_workers))


@pytest.mark.parametrize("kind", ["static", "iterable"])
def test_overwritten_field_of_static_worker_is_an_error(kind: str) -> None:
    """Samples that cannot be made again are missing, with an error. No other values are delivered,
    and no sample twice or in another place. With new workers the next epoch is complete."""
    dataset = Streams() if kind == "iterable" else Written()
    loader = minato.DataLoader(
        dataset, 4, num_workers=2, timeout=PATIENCE, persistent_workers=True,
        **({} if kind == "iterable" else {"scheduling": "static"}),
    )  # fmt: skip
    whole = epoch(loader)
    assert sorted(whole) == list(range(64))
    wrong, lost = [], 0
    for value in range(len(VALUES)) if SECONDS >= 30 else range(2):
        for which, record in enumerate(RECORDS):
            for name, offset, size in fields(record):
                told = [1 + which, offset, size, value]
                faults, errors = written_over(loader, told, whole)
                wrong += [(record, name, value, fault, errors) for fault in faults]
                lost += bool(errors)
    assert not wrong, wrong
    assert lost > 0


def written_over(loader: Any, told: list[int], whole: list[Any]) -> tuple[list[Any], list[str]]:
    """The wrong samples that were delivered, and the errors."""
    wrong: list[Any] = []
    errors: list[str] = []
    for _ in range(2):  # a worker may end only now for the field before
        loader.dataset.told[:] = told
        before, got = len(errors), one_epoch(loader, errors)
        missing = {at // 4 for at, sample in enumerate(whole) if sample not in got}
        kept = [sample for at, sample in enumerate(whole) if at // 4 not in missing]
        if got != kept or (missing and len(errors) == before):
            wrong.append(got)
        if loader.dataset.told[0] == 0:
            break
    else:
        wrong.append("it was not written over")
    if whole not in (one_epoch(loader, errors), one_epoch(loader, errors)):
        wrong.append("the next epochs")
    return wrong, errors


def one_epoch(loader: Any, errors: list[str]) -> list[int | str]:
    """An epoch; after an error, ends the workers: torch's, too, of which one has died."""
    before, got = len(errors), []
    try:
        got = epoch(loader, errors)
    except RuntimeError as error:  # at the start of the epoch
        errors.append(str(error))
    if len(errors) > before:
        loader._iterator = None
    return got


def but_batch(number: int) -> list[int]:
    return [i for i in range(64) if i // 4 != number]


def epoch(loader: Any, errors: list[str] | None = None) -> list[int | str]:
    iterator, got = iter(loader), []
    for _ in range(17):
        try:
            got += next(iterator).tolist()
        except StopIteration:
            break
        except RuntimeError as error:
            if errors is not None:
                errors.append(str(error))
            if not isinstance(error, minato.WorkerLost):
                got.append(str(error))
    return got


# ---- valid words of tasks that no worker will finish -------------------------------------------


def running_by(worker: int) -> None:
    """Makes the word of the running task name another worker."""
    [task] = tasks_of(mapping(), RUNNING)
    ctypes.c_uint16.from_address(task + 2).value = worker


def queued() -> None:
    """Makes the running task look queued, though it is on no queue."""
    [task] = tasks_of(mapping(), RUNNING)
    ctypes.c_uint8.from_address(task).value = QUEUED


def waiting() -> None:
    """Makes the running task look as if it waited for others, which are done."""
    [task] = tasks_of(mapping(), RUNNING)
    ctypes.c_uint8.from_address(task).value = WAITING


LIES = {
    "of a living worker": lambda me: running_by(1 - me),
    "of a worker that never was": lambda me: running_by(2),
    "of nobody": lambda me: queued(),
}


class Lies(torch.utils.data.Dataset):
    """Sample 37 overwrites the word of its task, once, and then continues or never ends."""

    def __init__(self, lie: str, ends: bool) -> None:
        self.lie, self.ends, self.left = lie, ends, multiprocessing.Value("i", 0)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        with self.left.get_lock():
            lies = index == 37 and self.left.value > 0
            self.left.value -= lies
        if lies:
            LIES[self.lie](torch.utils.data.get_worker_info().id)
            time.sleep(0 if self.ends else 4 * PATIENCE)
        return index


@pytest.mark.parametrize("lie, ends", [
    ("of a living worker", False), ("of a worker that never was", True), ("of nobody", True),
])  # fmt: skip
def test_task_word_without_matching_worker(lie: str, ends: bool) -> None:
    """Without timeout=. All workers that it names are ended, and another makes the task."""
    dataset = Lies(lie, ends)
    loader = minato.DataLoader(
        dataset, 4, num_workers=2, persistent_workers=True, autoscale=(2, 3), max_retries=2
    )
    assert torch.cat(list(loader)).tolist() == list(range(64))
    dataset.left.value = 1
    assert torch.cat(list(loader)).tolist() == list(range(64))
    assert dataset.left.value == 0
    assert torch.cat(list(loader)).tolist() == list(range(64))


class LiesLate(Lies):
    """The engine checks its run queues once a second, and has seen by then that it is claimed."""

    def __getitem__(self, index: int) -> int:
        if index == 37 and self.left.value > 0:
            time.sleep(2.5)
        return super().__getitem__(index)


@pytest.mark.parametrize("ends", [False, True])
def test_queued_task_word_missing_from_queue(ends: bool) -> None:
    """With one worker, tasks are on the common run queue, and no worker checks it again."""
    dataset = LiesLate("of nobody", ends)
    dataset.left.value = 1
    loader = minato.DataLoader(dataset, 4, num_workers=1)
    assert torch.cat(list(loader)).tolist() == list(range(64))
    assert dataset.left.value == 0


class Collates:
    """Collates batch 9 once with a word that says that it waits for others, and never ends."""

    def __init__(self) -> None:
        self.left = multiprocessing.Value("i", 1)

    def __call__(self, samples: list[int]) -> list[int]:
        with self.left.get_lock():
            lies = 37 in samples and self.left.value > 0
            self.left.value -= lies
        if lies:
            waiting()
            time.sleep(4 * PATIENCE)
        return samples


def test_waiting_collate_task_word_without_parts() -> None:
    collate = Collates()
    loader = minato.DataLoader(range(64), 4, num_workers=2, collate_fn=collate)
    for cost in [10**6, 10**6, 10**6, 10**9] * 16:  # batches are made in parts from the first on
        memo_of(loader).costs.observe(-1, cost)
        memo_of(loader).costs.sends(0)
    assert sum(loader, []) == list(range(64))
    assert collate.left.value == 0


# ---- records of other workers and unused records -----------------------------------------------

GARBAGE, WANTS_ROOM, EMPTY = 77, 1, 0
NWORKERS_AT, NTASKS_AT = 80, 84


def records() -> list[int]:
    base = mapping()
    count = ctypes.c_uint32.from_address(base + NTASKS_AT).value
    return [base + word(base + TASKS_OFF) + n * SIZES["task"] for n in range(count)]


def done_of_this_batch() -> list[int]:
    """Records of finished tasks of the current batch."""
    [mine] = tasks_of(mapping(), RUNNING)
    block = word(mine + Task.block_off.offset)
    return [task for task in records()
            if word(task + Task.block_off.offset) == block and word(task) & 0xFF == DONE]  # fmt: skip


class SpoilsWhatIsDone(torch.utils.data.Dataset):
    """Sample 83 waits for others of its batch, and overwrites their words."""

    def __init__(self, status: int) -> None:
        self.status, self.left = status, multiprocessing.Value("i", 0)

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01)  # so that each sample is a separate task
        with self.left.get_lock():
            mine = index == 83 and self.left.value > 0
            self.left.value -= mine
        if mine:
            wait_for(done_of_this_batch, "others of its batch")
            time.sleep(0.5)  # for the program to look at them, which it may do later as well
            for task in done_of_this_batch():
                ctypes.c_uint8.from_address(task).value = self.status
        return index


@pytest.mark.parametrize("status", [GARBAGE, RUNNING, QUEUED])
@pytest.mark.parametrize("options", [
    {}, {"in_order": False}, {"in_order": False, "batching": "ready"}, {"on_error": "skip"},
], ids=str)  # fmt: skip
def test_damaged_word_of_finished_task(status: int, options: dict[str, Any]) -> None:
    """Results that were already read are not requested again."""
    dataset = SpoilsWhatIsDone(status)
    loader = minato.DataLoader(
        dataset, 4, num_workers=2, persistent_workers=True, max_retries=3, **options
    )
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(160))
    dataset.left.value = 1
    for _ in range(2):
        assert sorted(torch.cat(list(loader)).tolist()) == list(range(160))
    assert dataset.left.value == 0


def spoil_empty_places(state: int) -> None:
    """Makes unused entries name a task that does not exist and wait for memory; optionally also
    claim to have a process."""
    base = mapping()
    for number in range(ctypes.c_uint32.from_address(base + NWORKERS_AT).value):
        at = base + word(base + WORKERS_OFF) + number * SIZES["worker"]
        if ctypes.c_uint32.from_address(at + Worker.state.offset).value == 0:
            ctypes.c_uint64.from_address(at + Worker.running.offset).value = 2**64 - 1
            ctypes.c_uint32.from_address(at + Worker.lease_state.offset).value = WANTS_ROOM
            ctypes.c_uint32.from_address(at + Worker.state.offset).value = state


class SpoilsEmptyPlaces(torch.utils.data.Dataset):
    """If enabled, sample 5 damages unused entries, and sample 37 its own task."""

    def __init__(self, state: int) -> None:
        self.places, self.own = multiprocessing.Value("i", 0), multiprocessing.Value("i", 0)
        self.state = state

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        if index == 5 and self.places.value:
            self.places.value = 0
            spoil_empty_places(self.state)
        if index == 37 and self.own.value:
            self.own.value = 0
            [task] = tasks_of(mapping(), RUNNING)
            ctypes.c_uint8.from_address(task).value = GARBAGE
        return index


@pytest.mark.parametrize("state", [EMPTY, READY])
def test_damaged_unused_entries_block_nothing(state: int) -> None:
    dataset = SpoilsEmptyPlaces(state)
    loader = minato.DataLoader(
        dataset, 4, num_workers=2, persistent_workers=True, autoscale=(2, 5), max_retries=3
    )
    assert torch.cat(list(loader)).tolist() == list(range(64))
    dataset.places.value = 1
    for _ in range(5):  # the rest of each epoch is dropped
        assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    assert torch.cat(list(loader)).tolist() == list(range(64))
    assert dataset.places.value == 0
    dataset.places.value = dataset.own.value = 1
    assert torch.cat(list(loader)).tolist() == list(range(64))
    assert torch.cat(list(loader)).tolist() == list(range(64))
    assert (dataset.places.value, dataset.own.value) == (0, 0)
    engine = loader._iterator._engine
    assert engine.health()["deaths"] == 1  # no deaths of the unused entries
    wait_for(lambda: engine.memory()["in_flight"] <= 8, "the rest to be dropped")
