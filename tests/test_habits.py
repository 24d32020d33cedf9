"""Typical actions at a prompt and in notebooks: look at a loader, watch its progress, interrupt a
cell and run it again."""

from __future__ import annotations

import bdb
import code
import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from contract.support import interrupt_in_minato
from torch.utils.data import BatchSampler, Dataset, IterableDataset, SequentialSampler

from minato import DataLoader



class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Broken(Numbers):
    def __len__(self) -> int:
        raise OSError("the server does not answer")


# ---- repr --------------------------------------------------------------------------------


@pytest.mark.parametrize("loader, text", [
    (DataLoader(Numbers()), "<minato.DataLoader of Numbers (40 samples): batch_size=1, "
     "num_workers=0>"),
    (DataLoader(Numbers(), 8, shuffle=True, num_workers=2, autoscale=(1, 4), max_retries=3),
     "<minato.DataLoader of Numbers (40 samples): batch_size=8, shuffle=True, num_workers=2, "
     "max_retries=3, autoscale=(1, 4)>"),
    (DataLoader(Numbers(), scheduling="static", memory_limit="1GiB"),
     "<minato.DataLoader of Numbers (40 samples): batch_size=1, num_workers=0, "
     "scheduling='static', memory_limit='1GiB'>"),
    (DataLoader(Numbers(), batch_sampler=BatchSampler(SequentialSampler(range(4)), 2, False)),
     "<minato.DataLoader of Numbers (40 samples): batch_sampler=BatchSampler, num_workers=0>"),
    (DataLoader(Numbers(), sampler=[1, 2], batch_size=None),
     "<minato.DataLoader of Numbers (40 samples): batch_size=None, sampler=list, num_workers=0>"),
    (DataLoader(Endless(), 2), "<minato.DataLoader of Endless: batch_size=2, num_workers=0>"),
    (DataLoader(Broken(), 2, sampler=range(4)),
     "<minato.DataLoader of Broken: batch_size=2, sampler=range, num_workers=0>"),
])  # fmt: skip
def test_repr(loader: DataLoader[Any], text: str) -> None:
    assert repr(loader) == text


def test_repr_of_subclass_and_half_made_loader() -> None:
    class Mine(DataLoader[Any]):
        pass

    assert re.match(r"<[\w.<>]*Mine of Numbers \(40", repr(Mine(Numbers())))
    assert repr(DataLoader.__new__(DataLoader)).startswith("<minato.DataLoader")


# ---- progress ----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_tqdm_knows_how_much_there_is(workers: int) -> None:
    tqdm = pytest.importorskip("tqdm")
    with open(os.devnull, "w") as out:
        bar = tqdm.tqdm(DataLoader(Numbers(), 8, num_workers=workers), file=out)
        assert bar.total == 5 and len(bar) == 5
        assert sum(1 for _ in bar) == bar.n == 5


def test_rich_knows_how_much_there_is() -> None:
    progress = pytest.importorskip("rich.progress")
    with open(os.devnull, "w") as out:
        console = pytest.importorskip("rich.console").Console(file=out)
        with progress.Progress(console=console) as bars:
            assert sum(1 for _ in bars.track(DataLoader(Numbers(), 8, num_workers=2))) == 5
            [task] = bars.tasks
            assert (task.total, task.completed) == (5, 5)


# ---- a cell, interrupted and run again ---------------------------------------------------

SETUP = """
import os, signal, time
from minato import DataLoader
seen = 0
def train():
    global seen
    seen = 0
    for batch in loader:
        seen += 1
        if seen == 2 and before_next is not None:
            before_next()
"""


def interrupt_when_waiting() -> None:
    """Ctrl-C while next() waits for a sample that is never ready."""
    interrupt_in_minato()


def interrupt_now() -> None:
    signal.raise_signal(signal.SIGINT)


class Stuck(Numbers):
    """One sample waits until it is released. (Not by an Event: setting one hangs if a
    process that waited for it was killed.)"""

    def __init__(self) -> None:
        self.free = multiprocessing.RawValue("b", 0)

    def let_go(self) -> None:
        self.free.value = 1

    def __getitem__(self, index: int) -> torch.Tensor:
        while index == 8 and not self.free.value:
            time.sleep(0.01)
        return torch.tensor(index)


class Shell(code.InteractiveInterpreter):
    """Like a prompt or a notebook: the last traceback is kept, and with it its frames."""

    def write(self, data: str) -> None:
        pass

    def cell(self, text: str) -> None:
        self.runsource(text, symbol="exec")


#: children of this process before a test: processes of other tests' start methods
before: set[int] = set()


@pytest.fixture(autouse=True)
def _those_before() -> None:
    before.clear()
    before.update(child.pid for child in psutil.Process().children(recursive=True))


def processes() -> int:
    return len({child.pid for child in psutil.Process().children(recursive=True)} - before)


def ended(limit_s: float = 90.0) -> bool:
    end = time.monotonic() + limit_s
    while processes() and time.monotonic() < end:
        time.sleep(0.01)
    return processes() == 0


@pytest.mark.parametrize("options", [
    {}, {"scheduling": "static"}, {"persistent_workers": True},
    {"in_order": False, "batching": "ready"},
], ids=["balanced", "static", "persistent", "ready"])  # fmt: skip
@pytest.mark.parametrize("interrupt", [interrupt_now, interrupt_when_waiting])
def test_a_cell_interrupted_and_run_again_leaves_nothing(
    interrupt: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        monkeypatch.setattr(sys, name, None, raising=False)
    data = Stuck()
    loader = DataLoader(data, 4, num_workers=2, **options)
    shell = Shell({"loader": loader, "before_next": interrupt})
    del loader
    shell.cell(SETUP)
    shell.cell("train()")
    assert sys.last_type is KeyboardInterrupt
    ready = "batching" in options  # goes round the sample that is stuck
    assert shell.locals["seen"] >= 2 if ready else shell.locals["seen"] == 2
    data.let_go()
    assert options.get("persistent_workers") or ended(), "the interrupted loop's workers stay"
    shell.cell("before_next = None")
    shell.cell("train()")
    assert shell.locals["seen"] == 10
    shell.cell("del loader")
    assert ended(), "workers stay"
    assert sys.last_type is KeyboardInterrupt  # and nothing else has happened


class Failing(Stuck):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 8 and not self.free.value:
            raise LookupError(index)
        return torch.tensor(index)


@pytest.mark.parametrize("options", [{}, {"scheduling": "static"}], ids=["balanced", "static"])
def test_a_cell_that_fails_leaves_nothing(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        monkeypatch.setattr(sys, name, None, raising=False)
    shell = Shell({"loader": DataLoader(Failing(), 4, num_workers=2, **options)})
    shell.cell(SETUP + "before_next = None")
    shell.cell("train()")
    assert sys.last_type is LookupError
    names = [frame.name for frame in traceback.extract_tb(sys.last_traceback)]
    assert "train" in names and "_next" in names  # it still says where
    assert ended(), "the workers of the loop that failed stay"


class BrokenSampler(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        kept = "for a debugger"
        yield from range(32)
        raise LookupError(kept)


def test_program_frames_are_kept_for_debuggers() -> None:
    """Variables of the program's own functions below next()."""
    iterator = iter(DataLoader(Numbers(), 4, sampler=BrokenSampler(Numbers()), num_workers=2))
    with pytest.raises(LookupError) as caught:
        list(iterator)
    frames = list(traceback.walk_tb(caught.tb))
    assert [frame.f_code.co_name for frame, _line in frames][1:2] == ["_next"]
    assert frames[-1][0].f_locals["kept"] == "for a debugger"


def test_iteration_continues_after_caught_interrupt() -> None:
    """The interrupt does not end the epoch, as with torch's loader."""
    data = Stuck()
    iterator = iter(DataLoader(data, 4, num_workers=2))
    seen = [next(iterator), next(iterator)]
    interrupt_when_waiting()
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    data.let_go()
    seen += iterator
    assert torch.cat(seen).tolist() == list(range(40))


# ---- programs that cannot work -----------------------------------------------------------------


def notes(error: BaseException) -> str:
    """Notes as text, also before Python 3.11."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


class Debugged(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise bdb.BdbQuit  # as a breakpoint() does where nothing can be read from a terminal


def test_breakpoint_in_worker_suggests_no_workers() -> None:
    with pytest.raises(bdb.BdbQuit) as caught:
        next(iter(DataLoader(Debugged(), 4, num_workers=1)))
    assert "num_workers=0" in notes(caught.value)


@pytest.mark.parametrize("name", ["dataset", "collate_fn", "worker_init_fn"])
def test_unpicklable_argument_under_spawn_is_named(name: str) -> None:
    class Local(Numbers):
        pass

    bad = {"dataset": Local(), "collate_fn": lambda batch: batch, "worker_init_fn": lambda n: None}
    given = {"dataset": Numbers(), name: bad[name]}
    loader = DataLoader(num_workers=1, multiprocessing_context="spawn", **given)
    with pytest.raises((AttributeError, pickle.PicklingError)) as caught:
        with pytest.warns(UserWarning, match="pickle error"):
            iter(loader)
    assert re.findall(r"it is (\w+) that cannot be pickled", notes(caught.value)) == [name]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_pickle_warning_names_the_start_method(method: str) -> None:
    loader = DataLoader(Numbers(), num_workers=1, collate_fn=lambda batch: batch,
                        multiprocessing_context=method)  # fmt: skip
    with pytest.warns(UserWarning, match="pickle error") as caught:
        with pytest.raises((AttributeError, pickle.PicklingError)):
            iter(loader)
    text = str(caught[0].message)
    assert "the worker Process arguments are not picklable" in text
    if sys.version_info >= (3, 14) and method == "forkserver":
        assert "Python 3.14+" in text
    else:
        assert f"start method {method!r}" in text and "3.14" not in text


class OwnLoader(DataLoader[Any]):
    def __init__(self, dataset: Any, **given: Any) -> None:
        super().__init__(dataset, **given)


@pytest.mark.parametrize("kind", [DataLoader, OwnLoader])
@pytest.mark.parametrize(
    ("name", "meant"),
    [("num_worker", "num_workers"), ("on_eror", "on_error"), ("batchsize", "batch_size")],
)
def test_misspelt_option_suggests_the_similar_one(kind: Any, name: str, meant: str) -> None:
    with pytest.raises(TypeError) as caught:
        kind(Numbers(), **{name: 1})
    assert str(caught.value).count(f"{name!r}. Did you mean {meant!r}?") == 1


def test_unknown_option_unlike_any_has_no_suggestion() -> None:
    with pytest.raises(TypeError, match="'zzzzzz'$"):
        DataLoader(Numbers(), **{"zzzzzz": 1})  # type: ignore[arg-type]
