"""What is noted of loaders inside the program, and what a keeper refuses to study."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import socket
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.support import programs
from torch.utils.data import DataLoader

from minato import _core
from minato.analyze import command, keeper, measure, own_files, watch
from minato.analyze.facts import Facts
from minato.analyze.records import Rate, RateRequest, Told, parse

from .support import in_a_fork, program
from .test_limits import facts

if watch.current is not None:  # its import has begun a watch of this process, for notebooks
    watch.current.end()


def run(folder: Path, text: str) -> str:
    """A program that is watched with no command to tell."""
    file = program(folder, text)
    done = programs().run("import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')", str(file), cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_loaders_of_all_kinds_are_noted(tmp_path: Path) -> None:
    """A class below torch's, one with a generator, one made before the watch, minato's."""
    printed = run(tmp_path, """
        import torch.utils.data
        from torch.utils.data import DataLoader
        old = DataLoader(range(6), 2)
        class Before(DataLoader):
            def __iter__(self):
                for batch in super().__iter__():
                    yield batch
        import minato.analyze.watch as watch
        import minato
        class After(DataLoader):
            def __iter__(self):
                yield from [1, 2, 3]
        watch.Watch._fork_keeper = lambda *_: None  # no copies of the process
        for loader in (old, Before(range(5), 1), After(range(7), 1), minato.DataLoader(range(8), 2)):
            batches = list(loader)
            assert len(batches) in (3, 5, 4)
        for record in watch.current.loaders.values():
            print(record.batches, record.loader["class"], record.place and record.place[1])
        """)  # fmt: skip
    lines = printed.splitlines()
    assert lines[0].startswith("3 torch.utils.data.dataloader.DataLoader None")
    assert lines[1].startswith("5 __main__.Before") and lines[2].startswith("3 __main__.After")
    assert lines[3].startswith("4 minato.loader.DataLoader")
    assert lines[1].endswith(" 15") and lines[3].endswith(" 15")


def test_loader_made_by_library_has_programs_place(tmp_path: Path) -> None:
    """One that a library makes again has the place of the program's own; transformers is named."""
    for name in ("prepares", "transformers/trainer"):
        file = tmp_path / "site-packages" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("from torch.utils.data import DataLoader\ndef make(data):\n    return DataLoader(data)\n")
    printed = run(tmp_path, """
        import os, runpy
        import minato.analyze.watch as watch
        from torch.utils.data import DataLoader
        make, make_for = (
            runpy.run_path(os.path.abspath(f"site-packages/{name}.py"))["make"]
            for name in ("prepares", "transformers/trainer")
        )
        watch.Watch._keep = lambda *_: None
        own = DataLoader(list(range(4)))
        list(make(own.dataset))
        list(make_for([1, 2]))
        for record in watch.current.loaders.values():
            print(record.place[1], record.loader["maker"], record.place[2])
        """)  # fmt: skip
    assert printed.splitlines() == ["10 prepares <module>", "12 transformers <module>"]


#: what they begin with; no copies of the process are made
WATCHED = """
        import minato.analyze.watch as watch
        from torch.utils.data import DataLoader, Dataset
        watch.Watch._fork_keeper = lambda *_: None
        loaders = watch.current.loaders"""
#: programs -> what they print
NOTED = {
    "a loader that validates": ("""
        import torch
        list(DataLoader(range(8), 2))
        with torch.inference_mode():
            list(DataLoader(range(9), 2))
        print([record.summary()["validates"] for record in loaders.values()])
        """, "[False, True]"),
    "steps without the waits for another loader": ("""
        import time
        class Slow(Dataset):
            def __len__(self):
                return 5
            def __getitem__(self, index):
                time.sleep(0.1)
                return index
        for fast, slow in zip(DataLoader(range(5)), DataLoader(Slow())):
            pass
        fast, slow = loaders.values()
        print(sum(step.step for step in fast.steps) < 0.1, slow.spent > 0.3, fast.spent < 0.1)
        """, "True True True"),
    "samples of a batch": ("""
        import torch
        from torch.utils.data import BatchSampler
        from minato.analyze.facts import watch_facts
        from minato.analyze.records import Told, parse
        images = lambda batch: tuple(batch)  # the first thing in a batch is one image of 3 channels
        data = [torch.zeros(3, 8, 9)] * 20
        for loader in (
            DataLoader(data, batch_size=4, collate_fn=images),
            DataLoader(data, batch_sampler=BatchSampler(range(20), 4, False), collate_fn=images),
            DataLoader(data, batch_sampler=[[0, 1], [2, 3]]),
            DataLoader(data, batch_size=None),  # a sample, whatever it holds
        ):
            list(loader)
        print([watch_facts(parse(Told, record.summary())).batch for record in loaders.values()])
        """, "[4, 4, 2, 1]"),
    "torch's loader, and one that is patched": ("""
        import minato
        list(DataLoader(range(6), 2))
        minato.patch_torch()
        list(DataLoader(range(7), 2))
        print([record.loader["minato"] for record in loaders.values()])
        """, "[False, True]"),
    "epochs to their end, and one that is left": ("""
        import time
        class Slow(DataLoader):
            def __iter__(self):
                time.sleep(0.05)  # of the first batch
                return super().__iter__()
        loader = Slow(range(6), 2)
        for epoch in range(3):
            for number, batch in enumerate(loader):
                if epoch == 1 and number == 1:
                    break
        record, = loaders.values()
        print([step[4] for step in record.steps], record.whole, record.loader["length"])
        print([step[0] > 0.05 for step in record.steps])
        """, "[0, 0, 0, 1, 2, 2, 2] [0, 2] 3\n[True, False, False, True, True, False, False]"),
}  # fmt: skip


@pytest.mark.parametrize("what", NOTED)
def test_programs_are_noted_by_the_watch(what: str, tmp_path: Path) -> None:
    text, printed = NOTED[what]
    assert run(tmp_path, WATCHED + text) == printed + "\n"


def test_a_notebook_gets_its_answer(tmp_path: Path) -> None:
    printed = run(tmp_path, """
        import minato.analyze.watch as watch
        import time
        from torch.utils.data import DataLoader
        for batch in DataLoader(list(range(200)), 4):
            time.sleep(0.002)
        print(watch.report("1s"))
        print(watch.report("1s"))
        """)  # fmt: skip
    answers = [line for line in printed.splitlines() if line.startswith(("Limit: ", "No conclusion: "))]
    assert len(answers) == 2


def test_watch_restores_replaced_methods(tmp_path: Path) -> None:
    assert run(tmp_path, """
        from torch.utils.data import DataLoader
        from torch.utils.data.dataloader import _BaseDataLoaderIter
        def hooks():
            return [vars(DataLoader)["__init__"], vars(DataLoader)["__iter__"],
                    vars(_BaseDataLoaderIter)["__next__"], vars(DataLoader).get("__init_subclass__")]
        before = hooks()
        import minato.analyze.watch as watch
        watch.Watch._fork_keeper = lambda *_: None
        list(DataLoader(range(4)))
        assert hooks()[:3] != before[:3]
        watch.current.end()
        print(hooks() == before)
        """) == "True\n"  # fmt: skip


def test_a_device_is_watched_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """In virtual time: a loader takes 30 ms, and next() does not wait for the steps of 20 ms. So
    the device idles for the 10 ms that are left."""
    now, device_is_free = 0.0, 0.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = max(now, device_is_free)

        def query(self) -> bool:
            return True

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) * 1e3

    def load(_iterator: Any) -> None:
        nonlocal now
        now += 0.03

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(watch, "clock", lambda: now)
    record = watch.LoaderRecord("key", DataLoader(range(100), 4), None)  # type: ignore[arg-type]
    for number in range(40):
        record.next(load, None, number == 0)
        record.leave()
        device_is_free = max(now, device_is_free) + 0.02
    from minato.analyze.facts import watch_facts

    found = watch_facts(parse(Told, record.summary(2000)))
    assert found.by == "events on the device"
    assert found.step == pytest.approx(0.02)
    assert found.wait == pytest.approx(1 / 3, abs=0.02)


def test_watch_notes_steps_without_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step of 20 ms and a loader of 30 ms, the thread has no core for 5 and 2 ms."""
    now = without = 0.0

    def load(_iterator: Any) -> None:
        nonlocal now, without
        now, without = now + 0.03, without + 0.002

    monkeypatch.setattr(watch, "clock", lambda: now)
    record = watch.LoaderRecord("key", DataLoader(range(100), 4), None)  # type: ignore[arg-type]
    monkeypatch.setattr(record.queued, "now", lambda: without)
    for number in range(3):
        record.next(load, None, number == 0)
        record.leave()
        now, without = now + 0.02, without + 0.005
    inside, step, _cpu, queued, _epoch, step_queued = record.steps[-1]
    assert [inside, step, queued, step_queued] == pytest.approx([0.03, 0.02, 0.002, 0.005])


def test_programs_in_a_folder_named_minato_have_a_place(tmp_path: Path) -> None:
    folder = tmp_path / "minato"
    folder.mkdir()
    printed = run(folder, """
        from torch.utils.data import DataLoader
        import minato.analyze.watch as watch
        watch.Watch._fork_keeper = lambda *_: None
        list(DataLoader(range(6), 2))
        record, = watch.current.loaders.values()
        print(record.place[1])
        """)  # fmt: skip
    assert printed == "5\n"


def test_watch_waits_for_a_second_epoch_nearby(monkeypatch: pytest.MonkeyPatch) -> None:
    def enough(length: int, batches: int, seconds: float, whole: int) -> bool:
        record = watch.LoaderRecord("key", DataLoader(range(length)), None)  # type: ignore[arg-type]
        record.begun, record.batches, record.whole = 0.0, batches, list(range(whole))
        record.later = max(0, whole - 1) * length
        record.steps = [watch.Step(0.0, 0.0, 0.0)] * batches
        return record.has_seen_enough(seconds)

    assert not enough(length=40, batches=40, seconds=4.0, whole=1)
    assert enough(length=40, batches=80, seconds=8.0, whole=2)
    assert enough(length=400, batches=40, seconds=4.0, whole=0)  # 80 s away
    assert enough(length=40, batches=40, seconds=21.0, whole=0)
    assert not enough(length=40, batches=20, seconds=4.0, whole=1)
    assert not enough(length=16, batches=32, seconds=4.0, whole=2)  # of 16 steps of later epochs
    assert enough(length=16, batches=48, seconds=6.0, whole=3)
    monkeypatch.setenv(watch.VARIABLE, command.Listener(pauses=True).name)
    assert enough(length=40, batches=40, seconds=4.0, whole=1)  # a program that is to be paused may have no other


def test_no_random_number_is_drawn(tmp_path: Path) -> None:
    assert run(tmp_path, """
        import random, numpy, torch
        import minato.analyze.watch as watch
        from torch.utils.data import DataLoader
        def states():
            return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        before = states()
        loader = iter(DataLoader(range(64), 2, sampler=range(64)))
        made = states()  # torch's own iterator draws a seed
        for batch in loader:
            pass
        assert watch.current.loaders
        print(before[:2] == made[:2], made == states())
        """) == "True True\n"  # fmt: skip


# ---- the keeper ----------------------------------------------------------------------------


class Holds:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


def refused(dataset: Any, writes: bool = False) -> list[str]:
    return keeper.find_refusals(DataLoader(dataset), watch.list_open_files(), writes)


def test_shared_objects_are_refused_by_path(tmp_path: Path) -> None:
    one, other = socket.socketpair()
    ends = Pipe()
    database = sqlite3.connect(":memory:")
    with one, other, ends[0], ends[1], open(tmp_path / "out", "w") as out:
        held = Holds(deep={"list": [one]}, pipe=ends[0], base=database, log=out)
        found = refused(held)
        assert found[0] == "dataset.pipe is a pipe" and found[1] == "dataset.base is a database"
        assert found[2].startswith("dataset.log is a file open for writing")
        assert found[3] == "dataset.deep['list'][0] is a socket"
        assert refused(Holds(log=out), writes=True) == []
    database.close()


def test_objects_of_a_manager_are_refused_by_name() -> None:
    with multiprocessing.get_context("fork").Manager() as manager:
        found = refused(Holds(shared=manager.dict(), plain={"list": [manager.list()]}))
    assert found[0] == "dataset.shared is an object of a multiprocessing.Manager (DictProxy)"
    assert found[-1] == "dataset.plain['list'][0] is an object of a multiprocessing.Manager (ListProxy)"


def test_read_only_files_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"data")
    with open(tmp_path / "data", "rb") as file:
        assert refused(Holds(file=file, numbers=list(range(100_000)), table=torch.zeros(3))) == []


def test_logs_and_standard_error_are_accepted(tmp_path: Path) -> None:
    """A study prints nothing, and Hugging Face's collators hold a logger."""
    logger = logging.Logger("mine")
    logger.addHandler(logging.FileHandler(tmp_path / "log"))
    with open(2, "w", closefd=False) as errors:
        assert refused(Holds(logger=logger, errors=errors)) == []
    logger.handlers[0].close()


@pytest.fixture
def sleeping() -> Iterator[int]:
    """A process that measures for ever."""
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"],
                             stdin=subprocess.PIPE)  # fmt: skip
    yield child.pid
    child.kill()
    child.communicate()


def test_a_measurement_ends_by_time_memory_or_reader(
    sleeping: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = socket.socketpair()
    writes, listener = socket.socketpair()
    with mine, other, writes, listener:
        guard = own_files.WriteGuard(writes, "")
        assert keeper._wait(mine, sleeping, 0.0, guard) == "ended because it took too long"
        free = iter([1000, 800, 700])
        monkeypatch.setattr(_core, "machine", lambda: {"memory_available": next(free)})
        assert "25% of the available memory" in str(keeper._wait(mine, sleeping, 100.0, guard))
        other.close()
        monkeypatch.setattr(_core, "machine", lambda: {"memory_available": 1000})
        assert keeper._wait(mine, sleeping, 100.0, guard) == "gone"


class Stream(io.TextIOBase):
    """In place of standard output, as that of a notebook's kernel: a thread of the program must help."""

    def __init__(self) -> None:
        self.helper, self.written = os.getpid(), 0
        self.thread = socket.socket()

    def fileno(self) -> int:
        return 9999  # a copy of its own of what it stands for

    def write(self, text: str) -> int:
        self.flush()
        self.written += len(text)
        return len(text)

    def flush(self) -> None:
        assert os.getpid() == self.helper, "would wait for ever"


def test_streams_of_the_programs_own_are_silent_in_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a logger and a progress bar that hold the object."""
    stream: Any = Stream()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    handler = logging.StreamHandler(stream)

    def print_all() -> list[bool]:
        watch._silence()
        print("lost")
        warnings.warn("lost", stacklevel=1)
        handler.emit(logging.makeLogRecord({"msg": "lost"}))
        print("lost", file=stream, flush=True)
        return [sys.stdout is sys.__stdout__, sys.stdin.read() == "", refused(Holds(bar=stream)) == []]

    assert in_a_fork(print_all) == [True, True, True]
    print("kept")
    stream.thread.close()
    assert stream.written == len("kept\n")


def test_numbers_of_closed_files_stay_taken(tmp_path: Path) -> None:
    """An object of the program writes to the number that it holds: to no file of the study."""
    log = open(tmp_path / "log", "w")
    mine, other = socket.socketpair()
    with log, mine, other:
        pid = os.fork()
        if pid == 0:
            watch.own_descriptors(mine.fileno())
            open(tmp_path / "other", "w")  # noqa: SIM115
            log.write("lost")
            log.flush()
            os._exit(0 if os.readlink(f"/proc/self/fd/{log.fileno()}") == os.devnull else 1)
        assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "log").read_text() == (tmp_path / "other").read_text() == ""


@pytest.mark.parametrize("ends", [
    [{"kind": "end", "why": "ended because it took too long"}],
    [{"kind": "failed", "error": "OSError: gone"}, {"kind": "end", "why": None}],
])  # fmt: skip
def test_measurement_that_ends_early_has_no_result(ends: list[dict[str, Any]]) -> None:
    mine, other = socket.socketpair()
    with mine, other:
        study = measure.Study(measure.Connection(mine), None, None)  # type: ignore[arg-type]
        result = {"kind": "rate", "rate": 25_611.0}
        for message in [result, *ends]:
            watch.send(other, message)
        assert study.ask_rate(RateRequest("own", 2)) is None
        assert len(study.notes) == 1 and "the program's loader with 2 workers" in study.notes[0]
        for message in [result, {"kind": "end", "why": None}]:
            watch.send(other, message)
        assert study.ask_rate(RateRequest("own", 2)) == Rate(rate=25_611.0)


def test_small_budget_names_batch_that_fits() -> None:
    def fits(mean: float) -> int | None:
        return measure.fitting_batch(Facts(facts(costs=[(mean, mean)])), 10.0)  # of batches of 8

    assert fits(0.01) is None and fits(0.5) == 3 and fits(3.0) == 0


def test_keepers_file_has_its_own_position(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"0123456789")
    number = os.open(tmp_path / "data", os.O_RDONLY)
    os.lseek(number, 3, os.SEEK_SET)
    pid = os.fork()
    if pid == 0:
        watch.own_descriptors(-1)
        os._exit(0 if os.read(number, 4) == b"3456" else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(number, 4) == b"3456"
    os.close(number)


def test_failure_of_all_loaders_is_one_line() -> None:
    study = measure.Study(None, None, None)  # type: ignore[arg-type]
    error = "KeyError: Caught KeyError in DataLoader worker process 0.\nOriginal Traceback:\n  x\nKeyError: 'a'\n"
    for what in ("torch's loader", "minato's loader"):
        study._note_failure(what, error)
    assert study.notes == ["torch's loader failed: KeyError: 'a'"]
