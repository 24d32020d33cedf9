"""Workers that die: the errors, the repeated samples, and the absence of hangs."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
import warnings
from typing import Any

import pytest
import torch

import minato

from .datasets import (
    Blocking,
    DieOnce,
    Failing,
    Gate,
    Numbers,
    Uneven,
    as_is,
    exit_now,
    kill_now,
    leave_now,
    segfault_now,
)
from .support import Failure, Kind, all_gone, flat, worker_pids

EXITED = r"DataLoader worker \(pid(\(s\))? [\d, ]+\) exited unexpectedly"
KILLED = r"DataLoader worker \(pid \d+\) is killed by signal: "


def _end(loader: Kind, iterator: Any) -> None:
    """Shuts an iterator down; torch's SIGCHLD handler may raise at any point meanwhile."""
    try:
        iterator._shutdown_workers()
    except RuntimeError:
        if not loader.is_torch:
            raise


def _death(loader: Kind, dataset: Any, **kwargs: Any) -> Failure:
    """The error of a loader whose worker dies; its other workers exit as well."""
    iterator, pids = None, []
    # Lists of numbers: torch's tensors need the dead worker's socket to be received.
    kwargs = {"num_workers": 2, "collate_fn": as_is, **kwargs}
    try:
        iterator = iter(loader(dataset, **kwargs))
        pids = worker_pids(iterator)
        for _ in range(200):
            next(iterator)
    except RuntimeError as error:
        return Failure.of(error)
    finally:
        if iterator is not None:
            _end(loader, iterator)
            assert all_gone(pids)
    raise AssertionError("the death was not reported")


@pytest.mark.parametrize("deed, said", [
    (exit_now, "exited unexpectedly with exit code 3"),
    (leave_now, "exited unexpectedly with exit code 5"),
    (kill_now, "is killed by signal: Killed"),
    (segfault_now, "is killed by signal: Segmentation fault"),
], ids=["exit", "sys_exit", "kill", "segfault"])
def test_death_is_reported(loader: Kind, deed: Any, said: str) -> None:
    bad = 918_273_645
    dataset = Failing(8, {bad}, deed)
    failure = _death(loader, dataset, sampler=[0, 1, 2, bad, 3, 4, 5, 6])
    # torch notices by SIGCHLD or while it polls; the texts differ.
    assert re.search(f"{EXITED}|{KILLED}", failure.text)
    if loader.is_torch:
        assert failure.kind is RuntimeError
        return
    assert said in failure.text
    assert issubclass(failure.kind, RuntimeError)
    if loader.expects("death_error") == "WorkerLost":
        import minato

        assert failure.kind is minato.WorkerLost
        assert " It was loading sample index " in failure.text and str(bad) in failure.text


def test_worker_killed_once(loader: Kind) -> None:
    deadly = DieOnce(multiprocessing)
    dataset = Failing(30, {7}, deadly)
    if loader.expects("worker_killed_once") == "error":
        _death(loader, dataset, batch_size=2)
        return
    assert flat(loader(dataset, batch_size=2, num_workers=2)) == list(range(30))
    assert deadly.calls.value == 2


def test_every_worker_killed_from_outside(loader: Kind) -> None:
    entered, gate = Gate(), Gate()
    dataset = Blocking(12, {3}, entered, gate)
    iterator, found = None, []
    try:
        iterator = iter(loader(dataset, num_workers=2, collate_fn=as_is))
        assert entered.wait(90)
        pids = worker_pids(iterator)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        gate.set()
        found = [number for batch in iterator for number in batch]
    except RuntimeError as error:
        assert loader.expects("worker_killed_once") == "error"
        assert re.search(f"{EXITED}|{KILLED}", str(error))
    else:
        assert loader.expects("worker_killed_once") == "recovers"
        assert found == list(range(12))
    finally:
        gate.set()
        if iterator is not None:
            _end(loader, iterator)


def test_persistent_workers_killed_between_epochs(loader: Kind) -> None:
    made = loader(Numbers(10), num_workers=2, persistent_workers=True)
    assert flat(made) == list(range(10))
    try:
        for pid in worker_pids(made._iterator):
            os.kill(pid, signal.SIGKILL)
        found = flat(made)
    except RuntimeError as error:
        assert loader.expects("worker_killed_once") == "error"
        assert re.search(f"{EXITED}|{KILLED}", str(error))
    else:
        assert found == list(range(10))
        assert flat(made) == list(range(10))
    _end(loader, made._iterator)


def _die(worker: int) -> None:
    os._exit(9)


def test_death_in_worker_init(loader: Kind) -> None:
    failure = _death(loader, Numbers(5), num_workers=1, worker_init_fn=_die)
    assert re.search(f"{EXITED}|{KILLED}", failure.text)


@pytest.mark.filterwarnings("ignore:DataLoader worker .* deaths in a row:UserWarning")
def test_a_row_of_deaths_is_not_the_end(own: Kind) -> None:
    """The only worker and its replacements die while they start and then at the same sample."""
    if not own.balanced:
        pytest.skip("static workers are not replaced")
    starting, working = DieOnce(multiprocessing, 3), DieOnce(multiprocessing, 3)
    made = own(Failing(6, {2}, working), num_workers=1, max_retries=1000, worker_init_fn=starting)
    assert flat(made) == list(range(6))
    assert made.stats()["deaths"] == 6


def _die_in_collate(samples: list[int]) -> list[int]:
    if 4 in samples:
        os.kill(os.getpid(), signal.SIGKILL)
    return samples


def test_death_in_collate(loader: Kind) -> None:
    failure = _death(loader, Numbers(8), batch_size=2, collate_fn=_die_in_collate)
    assert re.search(f"{EXITED}|{KILLED}", failure.text)


class DeadlyStream(Uneven):
    """Worker 1 dies at its second sample. Not tensors: torch's handler of SIGCHLD may raise while
    a received tensor is being released."""

    def __iter__(self):
        for item in map(torch.Tensor.tolist, super().__iter__()):
            if item == [1, 1]:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item


def test_worker_of_an_iterable_dataset_dies(loader: Kind) -> None:
    # Its position dies with it, so loading must not continue silently.
    failure = _death(loader, DeadlyStream([200, 200]))
    assert re.search(f"{EXITED}|{KILLED}", failure.text)


def test_finished_batches_come_before_the_death(own: Kind) -> None:
    dataset = Failing(9, {6}, kill_now)
    iterator, found = iter(own(dataset, num_workers=1)), []
    with pytest.raises(RuntimeError, match=KILLED):
        for batch in iterator:
            found.append(batch.item())
    assert found == list(range(len(found))) and len(found) <= 6
    if own.balanced:
        assert found == list(range(6))
    iterator._shutdown_workers()


def test_loader_works_again_after_a_death(loader: Kind) -> None:
    deadly = DieOnce(multiprocessing, deadly=2)
    dataset = Failing(6, {2}, deadly)
    _death(loader, dataset, num_workers=1)
    deadly.calls.value = 5
    assert flat(loader(dataset, num_workers=1)) == list(range(6))


def test_memory_of_dead_worker_is_not_delivered(own: Kind) -> None:
    if not own.balanced:
        pytest.skip("static workers are not replaced")
    deadly = DieOnce(multiprocessing, deadly=3)

    class Half(Failing):
        def __getitem__(self, index: int) -> torch.Tensor:
            filled = torch.full((100_000,), -1.0)
            super().__getitem__(index)
            return filled.fill_(float(index))

    made = own(Half(40, set(range(0, 40, 5)), deadly), batch_size=4, num_workers=2,
               max_retries=3)
    for number, batch in enumerate(made):
        want = [[float(4 * number + i)] for i in range(4)]
        assert [row.unique().tolist() for row in batch] == want


def test_stuck_workers_do_not_hold_up_the_shutdown(own: Kind) -> None:
    entered, gate = Gate(), Gate()
    dataset = Blocking(8, set(range(8)), entered, gate)
    iterator = iter(own(dataset, num_workers=2))
    pids = worker_pids(iterator)
    assert entered.wait(90)
    begin = time.monotonic()
    iterator._shutdown_workers()
    bound = own.expects("stuck_workers_shutdown_bound_s")
    assert time.monotonic() - begin < bound
    assert all_gone(pids)
    gate.set()


@pytest.mark.parametrize("way", ["terminate", "kill"])
def test_workers_ended_by_the_program_are_not_warned_of(way: str) -> None:
    iterator: Any = iter(minato.DataLoader(torch.arange(64), batch_size=4, num_workers=2))
    next(iterator)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for worker in iterator._workers:
            getattr(worker, way)()
        for worker in iterator._workers:
            worker.join()
        iterator._shutdown_workers()
