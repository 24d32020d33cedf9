"""Code of the program that shuts the loader down while the loader runs it."""

from __future__ import annotations

import gc
import sys
from collections import namedtuple
from collections.abc import Iterator
from typing import Any, Callable

import pytest
import torch

import minato
from minato.transport import torch_bridge

from .support import PATIENCE

hook: list[Callable[[], Any]] = []


def run_hook() -> None:
    if hook:
        hook.pop()()


class Pair(namedtuple("Pair", "first second")):
    """Built again for each batch, in the program's process."""

    def __new__(cls, *values: Any) -> Pair:
        if torch.utils.data.get_worker_info() is None:
            run_hook()
        return super().__new__(cls, *values)


class Index:
    """Travels to the worker as __reduce__ says."""

    def __reduce__(self) -> tuple:
        run_hook()
        return int, (3,)


class Pairs(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple:
        return Pair(index, index + 1), torch.full((70_000,), index, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def no_hook() -> Any:
    yield
    hook.clear()


def test_unpickled_class_may_shut_down_the_loader() -> None:
    made = minato.DataLoader(Pairs(), 4, num_workers=1, timeout=PATIENCE)
    assert len(list(made)) == 16  # rows have a form from now on
    iterator = iter(made)
    next(iterator)
    hook.append(iterator._shutdown_workers)
    with pytest.raises(RuntimeError, match="engine is closed|shut down"):
        for _ in range(15):
            next(iterator)


@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_pickled_index_may_shut_down_the_loader(scheduling: str) -> None:
    indices = [[n] for n in range(8)] + [[Index()], [9]]
    made = minato.DataLoader(
        Pairs(), batch_sampler=indices, num_workers=1, timeout=PATIENCE, scheduling=scheduling
    )
    iterator = iter(made)
    hook.append(iterator._shutdown_workers)
    with pytest.raises(RuntimeError, match="engine is closed|shut down"):
        for _ in range(10):
            next(iterator)


@pytest.fixture
def looks_run_the_hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While the core checks whether memory is still in use. Garbage may be collected there."""
    really: Any = torch.UntypedStorage._expired

    def expired(reference: Any) -> bool:
        run_hook()
        return really(reference)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "_expired", staticmethod(expired))
        torch_bridge.bind()
    yield
    torch_bridge.bind()


@pytest.mark.parametrize("method", ["next", "memory"])
def test_collected_garbage_may_shut_down_the_loader(
    method: str, looks_run_the_hook: None
) -> None:
    made = minato.DataLoader(Pairs(), 4, num_workers=1, timeout=PATIENCE)
    list(made)
    iterator = iter(made)
    images = next(iterator)[1]
    images.share_memory_()  # its storage has no need of its memory, and lives on
    engine = iterator._engine
    hook.append(iterator._shutdown_workers)
    with pytest.raises(RuntimeError, match="engine is closed|shut down"):
        engine.next(0) if method == "next" else engine.memory()
    assert not hook


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="garbage is collected between bytecodes")
@pytest.mark.parametrize("method", ["workers", "envelopes", "lost", "spans"])
def test_iterator_collected_during_report(method: str) -> None:
    """Creating an object may collect the iterator, which closes the engine."""
    made = minato.DataLoader(Pairs(), 4, num_workers=1, timeout=PATIENCE, collate_fn=list)
    iterator = iter(made)
    engine = iterator._engine
    block = engine.next(PATIENCE)
    arguments = [] if method == "workers" else [block]
    kept: list[Any] = []

    def collect_in_it(_frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__name__", "") == method:
            kept.append([([], {}, ()) for _ in range(200)])  # uses up the free lists
            gc.enable()

    thresholds = gc.get_threshold()
    gc.collect()
    gc.disable()
    gc.set_threshold(1)
    ask = getattr(engine, method)
    iterator.itself = iterator
    del iterator
    sys.setprofile(collect_in_it)
    try:
        report = ask(*arguments)
    finally:
        sys.setprofile(None)
        gc.set_threshold(*thresholds)
        gc.enable()
    assert report or method == "lost"
    gc.collect()
    with pytest.raises(RuntimeError, match="engine is closed"):
        ask(*arguments)
