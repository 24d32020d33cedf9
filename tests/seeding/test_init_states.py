"""Warnings for a worker_init_fn that seeds from its own number; none for others."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import minato
from minato.seeding import pitfalls
from minato.seeding.order_generators import SYSTEMS_SEEDS

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def forgets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing was seen yet, and the program has set no seed."""
    monkeypatch.setattr(pitfalls, "_told", False)
    monkeypatch.setattr(pitfalls, "_seen", {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SYSTEMS_SEEDS)
        yield


class Data(torch.utils.data.Dataset):
    """Each worker waits in its first sample until all are there."""

    met = False

    def __init__(self, barrier: Any) -> None:
        self.barrier = barrier

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        if not self.met:
            self.met = True
            self.barrier.wait(60)
        return random.random() + np.random.rand() + float(torch.rand(()))


def constant(_number: int) -> None:
    np.random.seed(86420)


def constants(_number: int) -> None:
    random.seed(86421)
    torch.manual_seed(86422)


def own_of_each(number: int) -> None:
    random.seed(86420 + number)


def written(_number: int) -> None:
    np.random.seed(42)


def written_twice(_number: int) -> None:
    random.seed(1)
    torch.manual_seed(1234)


def written_for_each(number: int) -> None:
    random.seed(42 + number)


def as_torch_shows(_number: int) -> None:
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def of_the_epoch(number: int) -> None:
    np.random.seed((torch.initial_seed() - number) % 2**32)


def as_many_do(number: int) -> None:
    """The first word of a state that torch has seeded is the same in every worker."""
    np.random.seed(np.random.get_state()[1][0] + number)  # type: ignore[index]


def next_seed(_number: int) -> None:
    torch.manual_seed(torch.initial_seed() + 1)


def entropy(_number: int) -> None:
    np.random.seed()
    random.seed()


def nothing(_number: int) -> None:
    pass


def epochs(function: Callable[[int], None], count: int, **options: Any) -> list[str]:
    """Warnings of this many iterators of one loader."""
    options = {"num_workers": 2, "multiprocessing_context": "fork", **options}
    context = torch.multiprocessing.get_context(options["multiprocessing_context"])
    barrier = context.Barrier(options["num_workers"])
    loader = minato.DataLoader(Data(barrier), 2, worker_init_fn=function, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            assert len(list(loader)) == 4
    return [str(w.message) for w in caught if "worker_init_fn" in str(w.message)]


@pytest.mark.parametrize(
    "function, names, options",
    [
        (constant, "numpy.random", {}),
        (constant, "numpy.random", {"persistent_workers": True}),
        (constant, "numpy.random", {"batching": "ready", "in_order": False}),
        (constant, "numpy.random", {"multiprocessing_context": "spawn"}),
        (constants, "random and torch", {}),
    ],
)
def test_workers_of_two_seeds_in_one_state(function: Any, names: str, options: dict) -> None:
    assert epochs(function, 1, **options) == []  # workers of one seed prove nothing
    told = epochs(function, 1, **options)
    assert len(told) == 1 and f"seeds {names} from its own number" in told[0]
    for remedy in ("torch.manual_seed", "seed_per_sample=False", "scheduling='static'"):
        assert remedy in told[0]
    assert epochs(function, 1) == []  # once


@pytest.mark.parametrize(
    "function, names, options",
    [
        (written, "numpy.random", {}),
        (written, "numpy.random", {"persistent_workers": True}),
        (written, "numpy.random", {"batching": "ready", "in_order": False}),
        (written, "numpy.random", {"multiprocessing_context": "spawn"}),
        (written_twice, "random and torch", {}),
        (written_for_each, "random", {"num_workers": 1}),
        (as_many_do, "numpy.random", {}),
    ],
)
def test_written_seed_is_noticed_in_first_epoch(
    function: Any, names: str, options: dict[str, Any]
) -> None:
    told = epochs(function, 1, **options)
    assert len(told) == 1 and f"seeds {names} from its own number" in told[0]
    assert epochs(function, 1, **options) == []  # once


class Gated(torch.utils.data.Dataset):
    """All but the first two samples wait for the gate."""

    def __init__(self, gate: Any) -> None:
        self.gate = gate

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        assert index < 2 or self.gate.wait(60)
        return index


@pytest.mark.parametrize("options", [{}, {"batching": "ready", "in_order": False}], ids=str)
def test_written_seed_is_noticed_with_the_second_batch(options: dict[str, Any]) -> None:
    gate = torch.multiprocessing.get_context("fork").Event()
    loader = minato.DataLoader(Gated(gate), 2, worker_init_fn=written, num_workers=1, **options)
    iterator = iter(loader)
    next(iterator)
    gate.set()
    with pytest.warns(UserWarning, match="seeds numpy.random from its own number"):
        next(iterator)


@pytest.mark.filterwarnings("error:worker_init_fn seeds")
def test_written_seed_raises_no_warning_as_error() -> None:
    """Samples may draw nothing."""
    loader = minato.DataLoader(range(8), 2, worker_init_fn=written, num_workers=1)
    assert len(list(loader)) == 4 and epochs(written, 1) == []  # it was told


@pytest.mark.parametrize("function", [constant, own_of_each])
def test_two_epochs_in_one_state(function: Any) -> None:
    assert epochs(function, 1, num_workers=1) == []
    assert len(epochs(function, 1, num_workers=1)) == 1


@pytest.mark.parametrize("function", [as_torch_shows, of_the_epoch, next_seed, entropy, nothing])
def test_seeds_that_follow_the_loaders(function: Any) -> None:
    assert epochs(function, 2) == []


@pytest.mark.parametrize("own", [False, True], ids=["global", "own generator"])
@pytest.mark.parametrize("function", [constant, written])
def test_constant_seed_beside_torchs_does_not_warn(function: Any, own: bool) -> None:
    generator = torch.Generator().manual_seed(3) if own else None
    if not own:
        torch.manual_seed(3)
    assert epochs(function, 2, generator=generator) == []


@pytest.mark.parametrize(
    "options", [{"seed_per_sample": False}, {"seed_per_sample": True}, {"scheduling": "static"}]
)
def test_explicit_seed_per_sample_does_not_warn(options: dict) -> None:
    assert epochs(constant, 2, **options) == []


def test_the_same_seed_again_proves_nothing() -> None:
    for _ in range(2):
        torch.manual_seed(SYSTEMS_SEEDS + 7)
        assert epochs(as_torch_shows, 1) == []
        torch.manual_seed(SYSTEMS_SEEDS + 7)
        assert epochs(own_of_each, 1) == []


def test_persistent_workers_after_loading_another_epoch() -> None:
    barrier = torch.multiprocessing.get_context("fork").Barrier(2)
    loader = minato.DataLoader(
        Data(barrier), 2, worker_init_fn=as_torch_shows, num_workers=2, persistent_workers=True
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="worker_init_fn")
        state = loader.state_dict()
        list(loader)
        loader.load_state_dict(state)
        list(loader)
