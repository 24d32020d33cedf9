"""Start methods, context objects, and what travels to a worker."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import multiprocessing.context
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, dataloader

from .datasets import Draws, Numbers, Shared
from .support import Kind, all_gone, assert_same, flat, worker_pids

METHODS = ["fork", "spawn", "forkserver"]


@pytest.mark.parametrize("method", METHODS)
def test_shared_objects_inside_a_dataset(loader: Kind, method: str) -> None:
    context = torch.multiprocessing.get_context(method)
    dataset = Shared(6, context)
    workers = 2 if method == "fork" else 1
    made = loader(dataset, batch_size=2, num_workers=workers,
                  multiprocessing_context=method, collate_fn=dataset.collate)
    batches = list(made)
    # Within a worker the dataset and the function bound to it are one object.
    assert batches == [(True, [0, 1]), (True, [2, 3]), (True, [4, 5])]
    assert dataset.count.value == 6
    assert sorted(dataset.queue.get(timeout=90) for _ in range(6)) == list(range(6))
    dataset.queue.close()
    dataset.queue.join_thread()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_start_methods_give_the_same_streams(loader: Kind, method: str) -> None:
    def run(how: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(3)
        return list(loader(Draws(6), batch_size=2, num_workers=1, generator=generator,
                           multiprocessing_context=how))

    assert_same(run(method), run("fork"))


def test_dataset_is_pickled_anew_for_each_iterator(loader: Kind) -> None:
    dataset = Numbers(2)
    made = loader(dataset, num_workers=1, multiprocessing_context="forkserver")
    assert flat(made) == [0, 1]
    dataset.length = 4
    assert flat(made) == [0, 1, 2, 3]


@pytest.mark.parametrize("source", [multiprocessing, torch.multiprocessing])
def test_context_objects(loader: Kind, source: Any) -> None:
    context = source.get_context("fork")
    made = loader(Numbers(6), num_workers=2, multiprocessing_context=context)
    assert made.multiprocessing_context is context
    assert flat(made) == list(range(6))


class CountingProcess(multiprocessing.context.ForkProcess):
    """Counts the processes started through it."""

    started = 0

    def start(self) -> None:
        CountingProcess.started += 1
        super().start()


class CountingContext(multiprocessing.context.ForkContext):
    """A context of the user's own."""

    Process = CountingProcess


def test_custom_context_is_honoured(loader: Kind) -> None:
    CountingProcess.started = 0
    made = loader(Numbers(6), num_workers=2, multiprocessing_context=CountingContext())
    assert flat(made) == list(range(6))
    assert CountingProcess.started == 2


def told_of_pickle(loader: Kind) -> Any:
    """What minato warns of as torch does, but for the oldest, which say nothing."""
    if loader.is_torch and "Got pickle error" not in inspect.getsource(dataloader):
        return contextlib.nullcontext()
    return pytest.warns(UserWarning, match="^Got pickle error when attempting to start")


class Refusing(Numbers):
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not for export")


@pytest.mark.unraisable
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_dataset_that_cannot_be_pickled(loader: Kind, method: str) -> None:
    made = loader(Refusing(2), num_workers=1, multiprocessing_context=method)
    with told_of_pickle(loader):
        with pytest.raises(TypeError, match="not for export"):
            iter(made)
    assert flat(loader(Refusing(2), num_workers=1)) == [0, 1]


class Unreadable(Numbers):
    """Pickles, but cannot be made again."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise LookupError("cannot be loaded in a worker")


def test_dataset_that_cannot_be_unpickled(loader: Kind) -> None:
    # torch sees the dead worker when it polls; the timeout makes it look sooner.
    made = loader(Unreadable(2), num_workers=1, multiprocessing_context="forkserver",
                  timeout=2 if loader.is_torch else 90)
    iterator = iter(made)
    told = "timed out after 2 seconds|exited unexpectedly" if loader.is_torch else (
        "could not load the dataset: LookupError: cannot be loaded in a worker")
    with pytest.raises(RuntimeError, match=told):
        next(iterator)
    iterator._shutdown_workers()


def test_fork_shares_objects_that_cannot_be_pickled(loader: Kind) -> None:
    class Local(Numbers):
        function = staticmethod(lambda index: index * 7)

        def __getitem__(self, index: int) -> int:
            return self.function(index)

    made = loader(Local(4), num_workers=2, collate_fn=lambda samples: samples[0],
                  worker_init_fn=lambda worker: None)
    assert list(made) == [0, 7, 14, 21]


def test_persistent_workers_of_a_server(loader: Kind) -> None:
    made = loader(Numbers(4), num_workers=1, persistent_workers=True,
                  multiprocessing_context="forkserver")
    pids = []
    for _ in range(3):
        assert flat(made) == [0, 1, 2, 3]
        pids.append(worker_pids(made._iterator))
    assert pids[0] == pids[1] == pids[2]
    del made
    assert all_gone(pids[0])


def test_no_new_warning_on_plain_use(loader: Kind) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert flat(loader(Numbers(4), num_workers=2)) == [0, 1, 2, 3]


def test_default_start_method_is_the_interpreters(loader: Kind) -> None:
    # The suite sets fork; a loader without a context follows.
    iterator = iter(loader(Refusing(3), num_workers=1))
    assert flat(iterator) == [0, 1, 2]
    assert type(DataLoader(Numbers(1), num_workers=1).multiprocessing_context) is type(
        loader(Numbers(1), num_workers=1).multiprocessing_context)
