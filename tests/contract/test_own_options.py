"""minato's own options: defaults, checks, attributes, effects."""

from __future__ import annotations

import inspect
import multiprocessing
import multiprocessing.context
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from .datasets import (
    DieOnce,
    Draws,
    Failing,
    Images,
    Numbers,
    Uneven,
    kill_now,
)
from .support import Kind, assert_same, drain, flat

OWN = {
    "scheduling": "balanced", "seed_per_sample": None, "seed_rank": None, "memory_limit": None,
    "max_retries": 1,
}


def _own_parameters(kind: Kind) -> dict[str, inspect.Parameter]:
    torchs = inspect.signature(DataLoader.__init__).parameters
    mine = inspect.signature(kind.cls.__init__).parameters
    return {name: p for name, p in mine.items() if name not in torchs}


def test_constructor_defaults_are_documented(own: Kind, monkeypatch) -> None:
    parameters = _own_parameters(own)
    assert {name: parameters[name].default for name in OWN} == OWN


def test_each_is_an_attribute_of_the_same_name(own: Kind) -> None:
    given = {"scheduling": "balanced", "seed_per_sample": False,
             "memory_limit": "256MiB", "max_retries": 3}
    made = own.cls(Numbers(2), **given)
    assert {name: vars(made)[name] for name in given} == given
    defaults = own.cls(Numbers(2))
    for name, parameter in _own_parameters(own).items():
        assert vars(defaults)[name] == parameter.default, name


def test_no_variadic_arguments(own: Kind) -> None:
    kinds = {p.kind for p in inspect.signature(own.cls.__init__).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert inspect.Parameter.VAR_POSITIONAL not in kinds


@pytest.mark.parametrize("name, value", [
    ("scheduling", "dynamic"), ("scheduling", None), ("scheduling", ""),
    ("memory_limit", "plenty"), ("memory_limit", 0), ("memory_limit", -5),
    ("memory_limit", "8 parsecs"), ("memory_limit", ""), ("memory_limit", True),
    ("max_retries", -1), ("max_retries", 1.5), ("max_retries", "2"),
    ("max_retries", None),
])
def test_senseless_option_values_raise(own: Kind, name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        own(Numbers(2), num_workers=1, **{name: value})


IGNORED: dict[str, Any] = {
    "seed_per_sample": True, "max_retries": 2, "autoscale": (1, 4), "straggler_threshold": 0.5,
    "prefetch_next_epoch": True, "sample_timeout": 60,
}  # fmt: skip


@pytest.mark.parametrize("name", IGNORED)
@pytest.mark.parametrize("case", ["iterable", "static"])
def test_option_without_effect_is_refused(case: str, name: str) -> None:
    from minato import DataLoader

    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
    if case == "static":
        options["scheduling"] = "static"
    dataset = Uneven([3, 3]) if case == "iterable" else Numbers(2)
    DataLoader(dataset, **options)
    with pytest.raises(ValueError, match=rf"{name}.*{case}"):
        DataLoader(dataset, **options, **{name: IGNORED[name]})


def test_changed_options_are_checked_by_next_iterator() -> None:
    from minato import DataLoader

    def refused(words: str, dataset: Any, later: dict[str, Any], **options: Any) -> None:
        made = DataLoader(dataset, num_workers=1, **options)
        for name, value in later.items():
            setattr(made, name, value)
        with pytest.raises(ValueError, match=words):
            iter(made)

    refused("'balanced' or 'static'", Numbers(2), {"scheduling": "statik"})
    refused("'skip' or 'replace'", Numbers(2), {"on_error": "skpi"})
    refused("on_error.*iterable", Uneven([2]), {"on_error": "skip"})
    refused("plain BatchSampler", Numbers(2), {"batching": "ready"},
            batch_sampler=[[0, 1]], in_order=False)
    refused("on_error.*OwnContext", Numbers(2), {"multiprocessing_context": OwnContext()},
            on_error="skip")


def test_defaults_written_out_are_not_refused() -> None:
    from minato import DataLoader

    options: dict[str, Any] = {
        "seed_per_sample": False, "max_retries": 1, "autoscale": None, "batching": "sampler",
        "straggler_threshold": "auto", "prefetch_next_epoch": False, "worker_type": "process",
    }  # fmt: skip
    for dataset in (Uneven([2]), Numbers(2)):
        for scheduling in ("balanced", "static"):
            made = DataLoader(dataset, num_workers=1, scheduling=scheduling, **options)
            assert len(list(made)) == 2
    DataLoader(Uneven([2]), num_workers=1, straggler_threshold=None, max_retries=0)


@pytest.mark.parametrize("bounds", [None, (2, 2)])
def test_no_standby_worker_without_autoscale(bounds: Any) -> None:
    from minato import DataLoader

    with pytest.raises(ValueError, match="straggler_threshold=0.5 has no effect without autosc"):
        DataLoader(Numbers(2), num_workers=2, autoscale=bounds, straggler_threshold=0.5)


class OwnContext(multiprocessing.context.ForkContext):
    """A dataset that only torch's own workers serve."""


@pytest.mark.parametrize("case", ["DataPipes", "OwnContext"])
@pytest.mark.parametrize("name, value", [
    *IGNORED.items(), ("memory_limit", "1GiB"), ("on_error", "skip"), ("batching", "ready"),
])
def test_options_ignored_by_torch_workers_raise(name: str, value: Any, case: str) -> None:
    from minato import DataLoader

    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "in_order": False}
    dataset: Any = torch.utils.data.datapipes.map.SequenceWrapper([1, 2])
    if case == "OwnContext":
        dataset = [1, 2]
        options["multiprocessing_context"] = OwnContext()
    with pytest.raises(ValueError, match=f"{name}=.*no effect .*{case}"):
        DataLoader(dataset, **options, **{name: value})
    assert sorted(flat(DataLoader(dataset, **options))) == [1, 2]


def test_a_data_pipe_without_workers_is_a_dataset() -> None:
    from minato import DataLoader

    pipe = torch.utils.data.datapipes.map.SequenceWrapper([1, 2])
    made = DataLoader(pipe.map([5, 6].index), on_error="skip", max_errors=2)
    assert flat(made) == []


@pytest.mark.parametrize("limit", ["8GiB", "64 MiB", "70MB", "1g", 1 << 26])
def test_ways_to_write_a_limit(own: Kind, limit: Any) -> None:
    made = own(Numbers(4), num_workers=1, memory_limit=limit)
    assert made.memory_limit == limit
    assert flat(made) == [0, 1, 2, 3]


@pytest.mark.parametrize("limit, persistent", [("4MiB", False), ("4MiB", True), ("16MiB", True)])
def test_keeping_more_than_the_limit(own: Kind, limit: str, persistent: bool) -> None:
    # Each batch has 1.5 MB; all of them are kept, over two epochs.
    made = own(Images(32, 256), batch_size=2, num_workers=2, memory_limit=limit,
               persistent_workers=persistent)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = [batch["image"] for _ in range(2) for batch in made]
    for number, image in enumerate(kept):
        first = 2 * (number % 16)
        assert image.amin(dim=(1, 2, 3)).tolist() == [first, first + 1]
        assert image.amax(dim=(1, 2, 3)).tolist() == [first, first + 1]


def test_batch_larger_than_the_limit(own: Kind) -> None:
    # One batch may always be under way, or nothing would ever be delivered.
    made = own(Images(4, 600), batch_size=2, num_workers=1, memory_limit="1MiB")
    images = [batch["image"] for batch in made]
    assert images[0].nbytes > 1 << 20
    assert [image[1].unique().tolist() for image in images] == [[1], [3]]


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_number_of_retries(own: Kind, retries: int) -> None:
    retries = retries if own.balanced else min(retries, 1)
    deadly = DieOnce(multiprocessing, deadly=1000)
    iterator = iter(own(Failing(5, {2}, deadly), num_workers=1, max_retries=retries))
    with pytest.raises(RuntimeError, match="is killed by signal: Killed"):
        list(iterator)
    iterator._shutdown_workers()
    assert deadly.calls.value == (1 + retries if own.balanced else 1)


def test_retries_are_counted_for_each_sample(own: Kind) -> None:
    if not own.balanced:
        pytest.skip("static workers are not replaced")

    class Fragile(Numbers):
        def __init__(self) -> None:
            super().__init__(12)
            self.deeds = {i: DieOnce(multiprocessing) for i in range(0, 12, 3)}

        def __getitem__(self, index: int) -> int:
            if index in self.deeds:
                self.deeds[index](index)
            return index

    assert flat(own(Fragile(), num_workers=2)) == list(range(12))


def test_worker_lost_is_a_runtime_error(own: Kind) -> None:
    import minato

    assert issubclass(minato.WorkerLost, RuntimeError)
    if not own.balanced:
        return
    bad = 918_273_645
    dataset = Failing(8, {bad}, kill_now)
    iterator = iter(own(dataset, num_workers=1, sampler=[0, bad], max_retries=0))
    with pytest.raises(minato.WorkerLost) as caught:
        list(iterator)
    iterator._shutdown_workers()
    assert str(bad) in str(caught.value)
    assert caught.value.index in (bad, [bad])
    assert "memory" in str(caught.value)


def test_streams_are_never_retried(own: Kind) -> None:
    deadly = DieOnce(multiprocessing, deadly=1000)

    class Stream(Uneven):
        def __iter__(self):
            for item in super().__iter__():
                if item[1] == 3:
                    deadly(0)
                yield item

    iterator = iter(own(Stream([9]), num_workers=1, max_retries=1))
    with pytest.raises(RuntimeError, match="killed by signal"):
        list(iterator)
    iterator._shutdown_workers()
    assert deadly.calls.value == 1


def test_options_may_change_between_epochs(own: Kind) -> None:
    made = own.cls(Draws(8), num_workers=2, batch_size=2, scheduling="balanced")

    def epoch() -> list[torch.Tensor]:
        made.generator = torch.Generator().manual_seed(1)
        return list(made)

    balanced = epoch()
    made.scheduling = "static"
    generator = torch.Generator().manual_seed(1)
    want = list(DataLoader(Draws(8), num_workers=2, batch_size=2, generator=generator))
    assert_same(epoch(), want)
    made.scheduling = "balanced"
    assert_same(epoch(), balanced)


def _raise(index: int) -> None:
    raise ValueError("bad")


def test_retries_are_for_deaths_not_for_errors(own: Kind) -> None:
    calls = multiprocessing.Value("i", 0)

    def count(index: int) -> None:
        with calls.get_lock():
            calls.value += 1
        _raise(index)

    retries = 3 if own.balanced else 1
    iterator = iter(own(Failing(4, {1}, count), num_workers=1, max_retries=retries))
    assert drain(iterator) == [0, ("error", ValueError), 2, 3]
    assert calls.value == 1


def test_options_without_effect_on_torch_workers_warn(monkeypatch: Any) -> None:
    """Because its code was replaced, for example by a profiler."""
    from torch.utils.data._utils import fetch

    from minato import DataLoader

    really = fetch._MapDatasetFetcher.fetch
    made = DataLoader(Numbers(8), 4, num_workers=1, max_retries=3, memory_limit="1GiB")
    tolerant = DataLoader(Numbers(8), 4, num_workers=1, on_error="skip")
    monkeypatch.setattr(fetch._MapDatasetFetcher, "fetch", lambda s, i: really(s, i))
    with pytest.warns(UserWarning, match="memory_limit, max_retries: no effect .* replaced"):
        assert len(list(made)) == 2
    with pytest.raises(ValueError, match="on_error='skip' has no effect .* replaced"):
        iter(tolerant)
