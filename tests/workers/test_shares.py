"""Iterable datasets that give everything in every worker: one warning, and no other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import minato

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def all_of_it() -> Iterator[int]:
    return iter(range(8))


def share() -> Iterator[int]:
    info = torch.utils.data.get_worker_info()
    assert info is not None and type(info).__name__ == "WorkerInfo" and f"id={info.id}" in repr(info)
    return iter(range(info.id, 8, info.num_workers))


def by_workers_alone() -> Iterator[int]:
    """Asks how many there are, which is not enough for a share."""
    info = minato.get_worker_info()
    assert info is not None and info.num_workers == 2
    return all_of_it()


class Stream(torch.utils.data.IterableDataset[int]):
    def __init__(self, samples: Callable[[], Iterator[int]]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return self.samples()


def warned(loader: Any, epochs: int = 1) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(epochs):
            for _batch in loader:
                pass
    texts = [str(warning.message) for warning in seen]
    return [text for text in texts if "has never asked which worker it is in" in text]


@pytest.mark.parametrize("samples", [all_of_it, by_workers_alone])
@pytest.mark.parametrize("persistent", [False, True], ids=["new", "persistent"])
def test_iterable_that_never_asks_warns_once(samples: Any, persistent: bool) -> None:
    loader = minato.DataLoader(Stream(samples), 4, num_workers=2, persistent_workers=persistent)
    [text] = warned(loader, epochs=2)
    assert "each of 2 workers has delivered 2 batches of the iterable dataset Stream" in text
    assert "each sample came 2 times" in text


@pytest.mark.filterwarnings("error:each of")
def test_iterable_that_never_asks_raises_no_error() -> None:
    """A queue or a live stream needs no shares."""
    assert len(list(minato.DataLoader(Stream(all_of_it), 4, num_workers=2))) == 4


@pytest.mark.parametrize(
    "samples, options",
    [
        (share, {"num_workers": 2}),
        (all_of_it, {"num_workers": 1}),
        (all_of_it, {"num_workers": 0}),
        (all_of_it, {"num_workers": 2, "worker_init_fn": lambda _worker: None}),
    ],
    ids=["asks", "one", "none", "init"],
)
def test_iterable_with_a_share_does_not_warn(samples: Any, options: Any) -> None:
    assert warned(minato.DataLoader(Stream(samples), 4, **options)) == []


def test_epoch_that_is_left_does_not_warn() -> None:
    loader = minato.DataLoader(Stream(all_of_it), 4, num_workers=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        it = iter(loader)
        next(it)
        del it


def test_uneven_streams_do_not_warn() -> None:
    class Uneven(Stream):
        def __iter__(self) -> Iterator[int]:
            name = torch.multiprocessing.current_process().name
            return iter(range(4 if name.endswith("0") else 12))

    assert warned(minato.DataLoader(Uneven(all_of_it), 4, num_workers=2)) == []
