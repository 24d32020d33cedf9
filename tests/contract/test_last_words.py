"""Exit of workers: the exit functions, files and queues of a process that exits."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
from functools import partial
from multiprocessing import util
from pathlib import Path
from typing import Any, Iterator

import pytest
import torch
from torch.utils.data import IterableDataset

from minato.workers import zygote

from .datasets import Numbers
from .support import Kind, all_gone, wait_for, worker_pids


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may keep a worker from its end for seconds. Helper processes that are not
    forked have their own limits, so their tests need an idle machine (tests/slow.py)."""
    for name in ("LEAVE", "STOP", "FINISH"):
        monkeypatch.setattr(zygote, name, 60.0)


def at_its_end(function: Any, _number: int) -> None:
    """A worker_init_fn that registers an exit function, for any start method."""
    util.Finalize(None, function, exitpriority=0)


def write_late(folder: Path) -> None:
    time.sleep(1.0)  # longer than the wait for a worker that is stuck in a sample
    (folder / str(os.getpid())).touch()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_finish_their_exit_handlers(
    loader: Kind, method: str, tmp_path: Path, unhurried: None
) -> None:
    made = loader(Numbers(8), batch_size=2, num_workers=2, multiprocessing_context=method,
                  worker_init_fn=partial(at_its_end, partial(write_late, tmp_path)))  # fmt: skip
    iterator = iter(made)
    assert len([next(iterator) for _ in range(4)]) == 4
    del iterator
    gc.collect()
    assert len(list(tmp_path.iterdir())) == 2


def registers(folder: Path, _number: int) -> None:
    atexit.register((folder / "ended").touch)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_run_exit_functions_as_multiprocessing_does(
    loader: Kind, method: str, tmp_path: Path
) -> None:
    made = loader(Numbers(2), num_workers=1, multiprocessing_context=method,
                  worker_init_fn=partial(registers, tmp_path))  # fmt: skip
    assert len(list(made)) == 2
    gc.collect()
    runs = method == "spawn" or sys.version_info >= (3, 13)
    assert (tmp_path / "ended").exists() == runs


class Closing(IterableDataset[int]):
    """Leaves a file where its iterator is closed before its end."""

    def __init__(self, folder: Path, stateful: bool) -> None:
        self.folder = folder
        if not stateful:
            self.state_dict = None

    def __iter__(self) -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            write_late(self.folder)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_left_epoch_closes_iterators_in_workers(
    loader: Kind, method: str, stateful: bool, persistent: bool, tmp_path: Path, unhurried: None
) -> None:
    iterator = iter(loader(Closing(tmp_path, stateful), batch_size=2, num_workers=2,
                           multiprocessing_context=method, persistent_workers=persistent))
    assert len([next(iterator) for _ in range(4)]) == 4
    del iterator
    gc.collect()
    assert len(list(tmp_path.iterdir())) == 2


def test_left_epoch_closes_iterator_without_workers(loader: Kind, tmp_path: Path) -> None:
    iterator = iter(loader(Closing(tmp_path, False), batch_size=2))
    next(iterator)
    del iterator
    gc.collect()
    assert len(list(tmp_path.iterdir())) == 1


def begin_for_ever(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    time.sleep(3600)


def made_to_stay(own: Kind, folder: Path, **options: Any) -> Any:
    return own(Numbers(8), batch_size=2, num_workers=2,
               worker_init_fn=partial(at_its_end, partial(begin_for_ever, folder)),
               **options)  # fmt: skip


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_with_endless_exit_handlers_are_killed(
    own: Kind, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if method == "fork":  # elsewhere the zygote has its own
        monkeypatch.setattr(zygote, "FINISH", 1.0)
        monkeypatch.setattr(zygote, "LEAVE", 60.0)
    iterator = iter(made_to_stay(own, tmp_path, multiprocessing_context=method))
    pids = worker_pids(iterator)
    next(iterator)
    del iterator
    gc.collect()
    assert all_gone(pids)
    assert len(list(tmp_path.iterdir())) == 2


def test_interrupt_ends_the_wait_for_workers(
    own: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote, "FINISH", 3600.0)
    iterator = iter(made_to_stay(own, tmp_path, persistent_workers=True))
    pids = worker_pids(iterator)
    assert len([next(iterator) for _ in range(4)]) == 4

    def interrupt() -> None:
        assert wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    impatient = threading.Thread(target=interrupt)
    impatient.start()
    with pytest.raises(KeyboardInterrupt):
        iterator._shutdown_workers()
    impatient.join()
    assert all_gone(pids)


class Endless(torch.utils.data.Dataset):
    """Sample 1 never comes."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        time.sleep(3600 * index)
        return index


def test_worker_in_sample_is_not_given_finish_time(
    own: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote, "FINISH", 3600.0)
    iterator = iter(own(Endless(), batch_size=1, num_workers=2))
    pids = worker_pids(iterator)
    next(iterator)
    del iterator
    gc.collect()
    assert all_gone(pids)
