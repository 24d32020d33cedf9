"""States that do not fit: an error for a program, a warning for a framework."""

from __future__ import annotations

import copy
import inspect
import pickle
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import minato
from minato.frameworks import FRAMEWORKS
from minato.state import pack


def of_module(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as if it were defined in this module."""
    return types.FunctionType(
        function.__code__, {**function.__globals__, "__name__": name}, closure=function.__closure__
    )


def loads(loader: Any, state: Any, *strict: Any) -> None:
    loader.load_state_dict(state, *strict)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(20))


class Says(Stream):
    def state_dict(self) -> dict[str, int]:
        return {"at": 4}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError("not for this")


def made(data: Any = range(20), **options: Any) -> Any:
    return minato.DataLoader(data, **{"batch_size": 4, **options})


def mid_epoch(loader: Any) -> Any:
    iterator = iter(loader)
    next(iterator)
    return loader.state_dict()


def lists(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


STATE = mid_epoch(made())

#: a loader, a state that does not fit it, and what the message names
MISFITS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "batch size": (lambda: made(batch_size=5), lambda: STATE, "batch_size"),
    "length": (lambda: made(range(24)), lambda: STATE, "dataset_length"),
    "workers": (
        lambda: made(Stream(), num_workers=1), lambda: mid_epoch(made(Stream(), num_workers=2)),
        "workers",
    ),
    "kind": (lambda: made(Stream()), lambda: STATE, "iterable"),
    "unit": (
        lambda: made(num_workers=1, batching="ready", in_order=False), lambda: STATE, "batching"
    ),
    "torchdata's": (made, lambda: {"_snapshot": {}, "_steps_since_snapshot": 1}, "version"),
    "another format": (made, lambda: {**STATE, "version": 99}, "format 99"),
    "incomplete": (made, lambda: {"version": STATE["version"]}, "missing"),
    "damaged": (made, lambda: {**STATE, "generators": {"torch": "?"}}, "damaged"),
    "generator": (
        lambda: made(shuffle=True, generator=torch.Generator()),
        lambda: {**STATE, "generators": {"sampler": pack(b"12345678")}}, "generator 'sampler'",
    ),
    "dataset": (
        lambda: made(Stream()), lambda: mid_epoch(made(Says())), "Stream without load_state_dict"
    ),
    "no state": (made, lambda: None, "version"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISFITS)
def test_misfit_loaded_by_framework_begins_epoch_with_warning(kind: str) -> None:
    make, state, names = MISFITS[kind]
    loader = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        of_module("lightning.pytorch.loops.fit_loop", loads)(loader, state())
    assert [names in str(one.message) for one in caught] == [True]
    assert lists(loader) == lists(make())


@pytest.mark.parametrize("kind", MISFITS)
def test_misfit_loaded_by_program_raises(kind: str) -> None:
    make, state, names = MISFITS[kind]
    with pytest.raises(ValueError, match=names):
        loads(make(), state())


def test_misfit_strict_outranks_the_caller() -> None:
    loader = made(batch_size=5)
    with pytest.raises(ValueError, match="batch_size"):
        of_module("lightning", loads)(loader, STATE, True)
    with pytest.warns(UserWarning, match="batch_size=4, but this loader has 5"):
        loads(loader, STATE, False)
    assert lists(loader) == lists(made(batch_size=5))


def test_refused_state_keeps_earlier_loaded_state() -> None:
    loader = made()
    loader.load_state_dict(STATE)
    with pytest.warns(UserWarning, match="version"):
        loader.load_state_dict({"other": 1}, strict=False)
    assert lists(loader) == lists(made())[1:]


@pytest.mark.parametrize("name", sorted(FRAMEWORKS))
def test_framework_is_known_by_its_package(name: str) -> None:
    with pytest.warns(UserWarning, match="batch_size"):
        of_module(f"{name}.some.module", loads)(made(batch_size=5), STATE)
    with pytest.raises(ValueError, match="batch_size"):
        of_module(f"{name}ish", loads)(made(batch_size=5), STATE)


def test_framework_is_seen_through_torch_and_derived_loader() -> None:
    class Derived(minato.DataLoader):  # type: ignore[type-arg]
        def load_state_dict(self, state: Any, strict: Any = None) -> None:
            super().load_state_dict(state, strict)

    through_torch = of_module("torch.distributed.checkpoint", loads)

    def hands_on(loader: Any, state: Any) -> None:
        through_torch(loader, state)

    loader = Derived(range(20), batch_size=5)
    with pytest.warns(UserWarning, match="batch_size"):
        of_module("composer.core", hands_on)(loader, STATE)
    with pytest.raises(ValueError, match="batch_size"):
        hands_on(loader, STATE)


def test_framework_calling_the_program_is_not_caller() -> None:
    """The program's own hook, which a framework calls."""

    def calls(hook: Any) -> None:
        hook(made(batch_size=5), STATE)

    with pytest.raises(ValueError, match="batch_size"):
        of_module("lightning.pytorch.trainer", calls)(loads)


# ---- loaders that are made of others ----------------------------------------------------------


def rebuilt(loader: Any) -> Any:
    """Like Lightning and Ray: from the attributes that its constructor has parameters for."""
    names = inspect.signature(type(loader)).parameters
    given = {name: value for name, value in vars(loader).items() if name in names}
    del given["batch_sampler"]
    return type(loader)(**given)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda loader: pickle.loads(pickle.dumps(loader)),
    "rebuilt": rebuilt,
    "twice": lambda loader: copy.copy(rebuilt(loader)),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("way", COPIES)
def test_copy_of_pending_loader_goes_on_once(way: str, workers: int) -> None:
    def shuffled() -> Any:
        generator = torch.Generator().manual_seed(3)
        return made(shuffle=True, num_workers=workers, generator=generator)

    first = shuffled()
    state, rest = mid_epoch(first), lists(shuffled())[1:]
    loader = shuffled()
    loader.load_state_dict(state)
    again = COPIES[way](loader)
    assert again.state_dict() == state
    assert lists(again) == rest
    assert again.pending_state is None and len(lists(again)) == 5
    assert lists(loader) == rest


class Epochs(torch.utils.data.Sampler):  # type: ignore[type-arg]
    """The order of an epoch, which it needs to be given."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter([(n + self.epoch) % 20 for n in range(20)])

    def __len__(self) -> int:
        return 20


def test_rebuilt_loaders_new_sampler_learns_the_epoch() -> None:
    first = made(sampler=Epochs())
    first.set_epoch(7)
    state = mid_epoch(first)
    loader = made(sampler=Epochs())
    loader.load_state_dict(state)
    loader = made(sampler=Epochs(), pending_state=loader.pending_state)
    assert lists(loader)[0] == [11, 12, 13, 14]
    iterator = iter(loader)
    next(iterator)
    assert loader.state_dict()["user_epoch"] == 7


def test_rebuilt_loader_that_does_not_fit_raises_once() -> None:
    loader = made(batch_size=5, pending_state=STATE)
    with pytest.raises(ValueError, match="batch_size"):
        iter(loader)
    assert lists(loader) == lists(made(batch_size=5))


def test_misfit_of_framework_rebuilt_loader_warns() -> None:
    loader = made(batch_size=5, pending_state=STATE)

    def starts(loader: Any) -> Any:
        return [batch.tolist() for batch in loader]

    with pytest.warns(UserWarning, match="batch_size=4, but this loader has 5"):
        found = of_module("accelerate.data_loader", starts)(loader)
    assert found == lists(loader)


def test_patched_torch_loader_passes_pending_state() -> None:
    with minato.patch_torch():
        loader = torch.utils.data.DataLoader(range(20), batch_size=4)  # type: ignore[arg-type]
        loader.load_state_dict(STATE)  # type: ignore[attr-defined]
        assert lists(rebuilt(loader)) == lists(copy.copy(loader)) == lists(loader) == lists(made())[1:]


def test_repr_omits_pending_state() -> None:
    loader = made()
    loader.load_state_dict(STATE)
    assert repr(loader) == repr(made())


def test_pending_state_is_dropped_by_an_empty_state() -> None:
    loader = made()
    loader.load_state_dict(STATE)
    loader.load_state_dict({})
    assert lists(copy.copy(loader)) == lists(made())


def test_pending_state_survives_an_iterator_that_cannot_begin() -> None:
    sampler = Epochs()
    loader = made(num_workers=1, sampler=sampler)
    loader.load_state_dict(STATE)
    loader.generator = "none"
    with pytest.raises(Exception, match="generator"):
        iter(loader)
    loader.generator = None
    assert lists(copy.copy(loader)) == lists(loader) == lists(made())[1:]
