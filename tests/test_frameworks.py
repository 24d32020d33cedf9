"""States that do not fit: an error for a program, a warning for a framework that calls by itself."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import IterableDataset

import minato
from minato.frameworks import FRAMEWORKS


def of_module(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as if it were written in this module."""
    return types.FunctionType(
        function.__code__, {**function.__globals__, "__name__": name}, closure=function.__closure__
    )


def loads(loader: Any, state: Any, *strict: Any) -> None:
    loader.load_state_dict(state, *strict)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(20))


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
    with pytest.warns(UserWarning, match="batch_size=4, this loader has 5"):
        loads(loader, STATE, False)
    assert lists(loader) == lists(made(batch_size=5))


def test_misfit_keeps_what_was_loaded_before() -> None:
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


def test_framework_that_calls_the_program_is_not_the_caller() -> None:
    """A hook of the program's own, which a framework calls."""

    def calls(hook: Any) -> None:
        hook(made(batch_size=5), STATE)

    with pytest.raises(ValueError, match="batch_size"):
        of_module("lightning.pytorch.trainer", calls)(loads)
