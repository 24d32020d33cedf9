"""``patch_torch()``: what it replaces, and that it is undone exactly when it should be."""

from __future__ import annotations

import inspect
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from attack.support import in_child
from contract.support import programs
from torch.utils.data import DataLoader as Torchs
from torch.utils.data import IterableDataset, TensorDataset

import minato
from minato.option_values import option
from minato.patch import _METHODS, Swaps

Torchs.__reduce_ex__(Torchs([]), 2)  # by which Python writes something into the class
BEFORE = dict(vars(Torchs))
GET_ITERATOR = Torchs._get_iterator


def is_patched() -> bool:
    return Torchs._get_iterator is not GET_ITERATOR


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    assert dict(vars(Torchs)) == BEFORE
    yield
    assert dict(vars(Torchs)) == BEFORE


def numbers(kind: Callable[..., Any] = Torchs, **options: Any) -> Any:
    return kind(TensorDataset(torch.arange(8)), **{"batch_size": 2, "num_workers": 1, **options})


def made_by(loader: Any) -> str:
    """The package of what loads; and the batches are right."""
    iterator = iter(loader)
    assert [batch[0].tolist() for batch in iterator] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    return type(iterator).__module__.partition(".")[0]


class Below(Torchs):
    """A library's class, which is there before the patch."""


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Torchs, Below])
def test_existing_loaders_use_minato_after_patch(kind: type, workers: int) -> None:
    loader = numbers(kind, num_workers=workers)
    assert made_by(loader) == "torch"
    with minato.patch_torch():
        assert made_by(loader) == "minato"
        assert loader.stats()["delivered"] == 4
        assert "4 batches delivered" in loader._repr_html_() and "4 batches delivered" in loader.report()
        assert made_by(numbers(kind, num_workers=workers)) == "minato"
    assert made_by(loader) == "torch" and not hasattr(loader, "stats")


def test_patched_loaders_have_all_methods_that_minato_calls() -> None:
    own = {name for name, value in vars(minato.DataLoader).items() if inspect.isfunction(value)}
    kept = {"__init__", "__repr__", "_get_iterator", "check_worker_number_rationality"}
    assert own - set(_METHODS) == kept
    with minato.patch_torch():
        loader = numbers()
        next(iter(loader))
        loader.load_state_dict([loader.state_dict()])  # of all ranks
        assert len(list(loader)) == 3


def test_the_class_stays_torchs() -> None:
    with minato.patch_torch():
        assert torch.utils.data.DataLoader is torch.utils.data.dataloader.DataLoader is Torchs
        loader = numbers()
        assert type(loader) is Torchs
        list(loader)
        again = pickle.loads(pickle.dumps(loader))
        assert type(again) is Torchs and made_by(again) == "minato"
        data = pickle.dumps(loader)
    assert made_by(pickle.loads(data)) == "torch"


def test_pickled_patched_loader_loads_without_minato(tmp_path: Path) -> None:
    with minato.patch_torch():
        loader = numbers()
        list(loader)
        (tmp_path / "loader").write_bytes(pickle.dumps(loader))
    program = (
        "import pickle, sys; loader = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert not any(name.startswith('minato') for name in sys.modules)\n"
        "print(len(list(loader)))"
    )
    done = programs().run(program, str(tmp_path / "loader"))
    assert done.stdout == "4\n", done.stderr


def test_minatos_own_class_is_as_before() -> None:
    with minato.patch_torch():
        loader = numbers(minato.DataLoader, scheduling="static")
        assert type(loader) is minato.DataLoader and made_by(loader) == "minato"
        assert loader.scheduling == "static"


class Placed(Torchs):
    """An attribute has the name of an option."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


class Takes(Torchs):
    """Sets attributes with the names of options, for its own handling of batches."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.max_errors = "no number"
        super().__init__(*args, **options)
        self.device = torch.device("meta")
        self.scheduling, self.batching, self.on_error = "cosine", "packed", ["log"]
        self.memory_limit = "a lot"
        self.autoscale = True


class OwnClassAttributes(Torchs):
    scheduling, device, worker_type = "cosine", "tpu", "spot"


class OnMinatos(minato.DataLoader):
    """The same for a class whose base was exchanged."""

    @property
    def memory_limit(self) -> str:  # type: ignore[override]
        return "a lot"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.device = torch.device("meta")
        self.scheduling = "cosine"


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Takes, OwnClassAttributes, OnMinatos, Placed])
def test_derived_class_attributes_are_not_options(kind: Any, workers: int) -> None:
    there = numbers(kind, num_workers=workers)
    with minato.patch_torch():
        for loader in (there, numbers(kind, num_workers=workers)):
            before = {name: str(getattr(loader, name)) for name in ("device", "scheduling")}
            assert made_by(loader) == "minato"
            loader.load_state_dict(loader.state_dict())
            assert made_by(pickle.loads(pickle.dumps(loader))) == "minato"
            repr(loader)
            assert {name: str(getattr(loader, name)) for name in before} == before


@pytest.mark.parametrize("kind", [Takes, OwnClassAttributes, OnMinatos])
def test_derived_class_uses_given_options(kind: Any) -> None:
    with minato.patch_torch():
        loader = numbers(kind, worker_type="thread", seed_per_sample=False)
        assert made_by(loader) == "minato" and option(loader, "worker_type") == "thread"
        assert loader.stats()["workers"] is not None
        again = pickle.loads(pickle.dumps(loader))
        assert option(again, "worker_type") == "thread"
        with pytest.raises(ValueError, match="worker_type"):
            numbers(kind, worker_type="fast")


class Pipe(torch.utils.data.IterDataPipe):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_torch_workers_still_serve_when_needed() -> None:
    with minato.patch_torch():
        for kind in (Torchs, minato.DataLoader):
            iterator = iter(kind(Pipe(), batch_size=2, num_workers=1))
            assert type(iterator).__module__.startswith("torch")
            assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3]]


def test_options_are_attributes() -> None:
    with minato.patch_torch():
        loader = numbers()
        loader.scheduling = "static"
        assert made_by(loader) == "minato"
        assert loader.stats()["scheduler"] is None  # scheduling is not balanced
        loader.scheduling = "fast"
        with pytest.raises(ValueError, match="'balanced' or 'static'"):
            iter(loader)
        loader.scheduling = "static"
        loader.max_retries = 3
        with pytest.raises(ValueError, match="has no effect"):
            iter(loader)


def test_state_of_patched_loader_resumes_in_another() -> None:
    with minato.patch_torch():
        options = {"shuffle": True, "generator": torch.Generator().manual_seed(1)}
        first = numbers(**options)
        iterator = iter(first)
        taken = [next(iterator)[0].tolist()]
        state = first.state_dict()
        rest = [batch[0].tolist() for batch in iterator]
        second = numbers(shuffle=True, generator=torch.Generator())
        second.load_state_dict(state)
        assert [batch[0].tolist() for batch in second] == rest and len(taken + rest) == 4


class OfItsOwn(Torchs):
    """As torchdata's StatefulDataLoader."""

    def state_dict(self) -> str:
        return "mine"

    def _get_iterator(self) -> Any:
        return iter(["mine"])


def test_class_with_own_iterator_keeps_it() -> None:
    with minato.patch_torch():
        loader = numbers(OfItsOwn)
        assert list(loader) == ["mine"] and loader.state_dict() == "mine"


def test_persistent_workers_outlive_the_patch() -> None:
    """Those of the time before it, too."""
    theirs = numbers(persistent_workers=True)
    assert made_by(theirs) == "torch"
    with minato.patch_torch():
        assert made_by(theirs) == "torch"
        ours = numbers(persistent_workers=True)
        assert made_by(ours) == "minato"
    assert made_by(ours) == "minato"


class Counted(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_iterable_datasets() -> None:
    with minato.patch_torch():
        iterator = iter(Torchs(Counted(), batch_size=4, num_workers=1))
        assert type(iterator).__module__.startswith("minato")
        assert [batch.tolist() for batch in iterator] == [[0, 1, 2, 3], [4, 5, 6, 7]]


# ---- when it is undone -------------------------------------------------------------------------


def test_as_a_function_until_undone() -> None:
    patch = minato.patch_torch()
    assert is_patched()
    patch.undo()
    patch.undo()
    assert not is_patched()


def test_undone_after_an_exception() -> None:
    with pytest.raises(KeyError), minato.patch_torch():
        raise KeyError
    assert not is_patched()


def test_with_block_keeps_earlier_patch() -> None:
    outer = minato.patch_torch()
    with minato.patch_torch(), minato.patch_torch():
        pass
    assert is_patched()
    outer.undo()


def test_someone_elses_later_patch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with minato.patch_torch():
        ours = Torchs._get_iterator

        def other(loader: Any) -> Any:
            return ours(loader)

        monkeypatch.setattr(Torchs, "_get_iterator", other)
        assert made_by(numbers()) == "minato"
    assert Torchs._get_iterator is other and not hasattr(Torchs, "stats")
    assert made_by(numbers()) == "torch"  # as it was at first
    # monkeypatch will restore minato's function; leave the world as it was
    monkeypatch.undo()
    Torchs._get_iterator = GET_ITERATOR


def test_added_attribute_is_removed_on_undo() -> None:
    class Owner:
        pass

    swaps = Swaps()
    swaps.acquire([(Owner, "name", 1)])
    assert Owner.name == 1
    swaps.release()
    assert not hasattr(Owner, "name") and not swaps.active
    swaps.release()
    assert not swaps.active


def test_threads_share_the_patch() -> None:
    """While any thread is inside, all see it."""
    inside = threading.Barrier(8)
    seen: list[bool] = []

    def use() -> None:
        for _ in range(50):
            with minato.patch_torch():
                inside.wait(60)
                seen.append(is_patched())
                inside.wait(60)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 400 and all(seen)


def test_a_fork_while_another_thread_changes_it() -> None:
    """The child, where that thread is not, can do so, too."""
    swaps = Swaps()

    def child() -> None:
        swaps.acquire([(Below, "length", 5)])
        assert vars(Below)["length"] == 5

    with swaps._lock:
        assert in_child(child) == 0


@pytest.mark.parametrize("kind", [Torchs, Below])
def test_torchs_constructor_takes_minatos_options(kind: type) -> None:
    with minato.patch_torch():
        loader = numbers(kind, batching="ready", in_order=False, max_retries=3)
        assert (loader.batching, loader.max_retries, loader.on_error) == ("ready", 3, "raise")
        assert made_by(loader) == "minato"
        with pytest.raises(ValueError, match="on_error"):
            numbers(kind, on_error="ignore")
        named = inspect.signature(kind).parameters
        assert {"dataset", "on_error", "device"} <= set(named)
    with pytest.raises(TypeError, match="max_retries"):
        numbers(kind, max_retries=3)


def test_undone_patch_kept_by_library_calls_torchs_constructor() -> None:
    """The library has kept the constructor that it found, and that is the patch's."""
    torchs = torch.utils.data.DataLoader
    before = torchs.__init__
    with minato.patch_torch():
        found = torchs.__init__

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
            found(self, *args, **kwargs)

        torchs.__init__ = wrapped  # type: ignore[method-assign]
    try:
        assert torch.cat(list(torchs(range(3)))).tolist() == [0, 1, 2]  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="unexpected keyword argument 'on_error'"):
            torchs(range(3), on_error="skip")  # type: ignore[call-arg,arg-type]
    finally:
        torchs.__init__ = before  # type: ignore[method-assign]
