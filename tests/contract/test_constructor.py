"""Constructor: signature, checks in torch's order with torch's texts, warnings."""

from __future__ import annotations

import inspect
import itertools
import json
import multiprocessing
import os
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from .datasets import Numbers, Sharded, as_is
from .support import Kind, assert_same

NON_NEGATIVE = (
    "num_workers option should be non-negative; "
    "use num_workers=0 to disable multiprocessing."
)
EXCLUSIVE = (
    "batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, "
    "and drop_last"
)
ITERABLE = "DataLoader with IterableDataset: expected unspecified "

# Arguments that are refused, in the order in which torch checks them.
REFUSED: list[tuple[str, dict[str, Any], type, str]] = [
    ("workers", {"num_workers": -1}, ValueError, NON_NEGATIVE),
    ("timeout", {"timeout": -1}, ValueError, "timeout option should be non-negative"),
    ("prefetch_alone", {"num_workers": 0, "prefetch_factor": 2}, ValueError,
     "prefetch_factor option could only be specified in multiprocessing.let "
     "num_workers > 0 to enable multiprocessing, otherwise set prefetch_factor to "
     "None."),
    ("prefetch", {"num_workers": 1, "prefetch_factor": -1}, ValueError,
     "prefetch_factor option should be non-negative"),
    ("persistent", {"num_workers": 0, "persistent_workers": True}, ValueError,
     "persistent_workers option needs num_workers > 0"),
    ("context_alone", {"num_workers": 0, "multiprocessing_context": "fork"}, ValueError,
     "multiprocessing_context can only be used with multi-process loading "
     "(num_workers > 0), but got num_workers=0"),
    ("context_name", {"num_workers": 1, "multiprocessing_context": "bad"}, ValueError,
     "multiprocessing_context option should specify a valid start method in "
     f"{torch.multiprocessing.get_all_start_methods()!r}, but got "
     "multiprocessing_context='bad'"),
    ("context_type", {"num_workers": 1, "multiprocessing_context": 5}, TypeError,
     "multiprocessing_context option should be a valid context object or a string "
     "specifying the start method, but got multiprocessing_context=5"),
    ("shuffle_sampler", {"shuffle": True, "sampler": [0]}, ValueError,
     "sampler option is mutually exclusive with shuffle"),
    ("bs_size", {"batch_sampler": [[0]], "batch_size": 2}, ValueError, EXCLUSIVE),
    ("bs_shuffle", {"batch_sampler": [[0]], "shuffle": True}, ValueError, EXCLUSIVE),
    ("bs_sampler", {"batch_sampler": [[0]], "sampler": [0]}, ValueError, EXCLUSIVE),
    ("bs_drop", {"batch_sampler": [[0]], "drop_last": True}, ValueError, EXCLUSIVE),
    ("bs_none", {"batch_sampler": [[0]], "batch_size": None}, ValueError, EXCLUSIVE),
    ("none_drop", {"batch_size": None, "drop_last": True}, ValueError,
     "batch_size=None option disables auto-batching and is mutually exclusive with "
     "drop_last"),
    ("size_0", {"batch_size": 0}, ValueError,
     "batch_size should be a positive integer value, but got batch_size=0"),
]


@pytest.mark.parametrize("kwargs, kind, text", [row[1:] for row in REFUSED],
                         ids=[row[0] for row in REFUSED])
def test_refused_arguments(loader: Kind, kwargs, kind, text) -> None:
    with pytest.raises(kind) as caught:
        loader(Numbers(4), **kwargs)
    assert type(caught.value) is kind
    assert str(caught.value) == text


def _refusal(make: Any, dataset: Any, kwargs: dict[str, Any]) -> tuple[type, str]:
    with pytest.raises((ValueError, TypeError)) as caught:
        make(dataset, **kwargs)
    return type(caught.value), str(caught.value)


def test_the_earlier_check_wins(loader: Kind) -> None:
    pairs = 0
    for first, second in itertools.combinations(REFUSED, 2):
        if any(first[1].get(key, value) != value for key, value in second[1].items()):
            continue
        kwargs = {**first[1], **second[1]}
        want = _refusal(DataLoader, Numbers(4), kwargs)
        assert _refusal(loader, Numbers(4), kwargs) == want, kwargs
        pairs += 1
    assert pairs > 60


@pytest.mark.parametrize("kwargs, tail", [
    ({"shuffle": True}, "shuffle option, but got shuffle=True"),
    ({"sampler": [1]}, "sampler option, but got sampler=[1]"),
    ({"batch_sampler": [[1]]}, "batch_sampler option, but got batch_sampler=[[1]]"),
    ({"sampler": [1], "batch_sampler": [[1]]}, "sampler option, but got sampler=[1]"),
    ({"batch_sampler": [[1]], "batch_size": 3},
     "batch_sampler option, but got batch_sampler=[[1]]"),
])
def test_iterable_dataset_takes_no_sampler(loader: Kind, kwargs, tail) -> None:
    with pytest.raises(ValueError) as caught:
        loader(Sharded(4), **kwargs)
    assert str(caught.value) == ITERABLE + tail


def test_iterable_dataset_accepts_shuffle_false(loader: Kind) -> None:
    made = loader(Sharded(4), shuffle=False, batch_size=2)
    assert [batch.tolist() for batch in made] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True, (1,), torch.tensor(2)])
def test_batch_sizes_are_checked_by_torchs_batch_sampler(loader: Kind, size) -> None:
    want = _refusal(DataLoader, Numbers(4), {"batch_size": size})
    assert _refusal(loader, Numbers(4), {"batch_size": size}) == want


def test_drop_last_is_checked_by_torchs_batch_sampler(loader: Kind) -> None:
    want = _refusal(DataLoader, Numbers(4), {"drop_last": 1})
    assert _refusal(loader, Numbers(4), {"drop_last": 1}) == want


def test_empty_dataset(loader: Kind) -> None:
    for workers in (0, 2):
        assert list(loader(Numbers(0), num_workers=workers)) == []
        assert len(loader(Numbers(0), num_workers=workers)) == 0
        # Both loaders use RandomSampler, whose rule differs between releases.
        try:
            want = list(DataLoader(Numbers(0), shuffle=True))
        except ValueError as error:
            with pytest.raises(ValueError, match=re.escape(str(error))):
                loader(Numbers(0), shuffle=True, num_workers=workers)
        else:
            assert list(loader(Numbers(0), shuffle=True, num_workers=workers)) == want


def test_all_torch_parameters_exist(loader: Kind) -> None:
    want = inspect.signature(DataLoader.__init__).parameters
    got = inspect.signature(loader.cls.__init__).parameters
    shared = [name for name in got if name in want]
    assert shared == list(want)
    for name, parameter in want.items():
        assert got[name].kind == parameter.kind, name
        assert got[name].default == parameter.default, name
    for name in set(got) - set(want):
        assert got[name].kind is inspect.Parameter.KEYWORD_ONLY, name
    made = loader(Numbers(2))
    assert list(inspect.signature(made.__init__).parameters) == list(got)[1:]


def test_positional_arguments(loader: Kind) -> None:
    generator = torch.Generator()
    context = multiprocessing.get_context("fork")
    made = loader(Numbers(6), 2, False, None, None, 1, as_is, False, True, 9, print,
                  context, generator)
    assert (made.batch_size, made.num_workers, made.drop_last) == (2, 1, True)
    assert (made.collate_fn, made.timeout, made.worker_init_fn) == (as_is, 9, print)
    assert made.multiprocessing_context is context
    assert made.generator is generator
    with pytest.raises(TypeError):
        loader(Numbers(6), 2, False, None, None, 1, None, False, True, 9, None, None,
               None, 2)


def test_unknown_keyword(loader: Kind) -> None:
    with pytest.raises(TypeError, match="frobnicate"):
        loader(Numbers(2), frobnicate=1)
    with pytest.raises(TypeError):
        loader.cls()


def test_default_samplers_are_torchs_own(loader: Kind) -> None:
    plain = loader(Numbers(6), batch_size=2)
    assert type(plain.sampler) is SequentialSampler
    assert type(plain.batch_sampler) is BatchSampler
    generator = torch.Generator()
    mixed = loader(Numbers(6), shuffle=True, generator=generator)
    assert type(mixed.sampler) is RandomSampler
    assert mixed.sampler.generator is generator
    assert mixed.sampler.data_source is mixed.dataset


def test_default_functions_are_torchs_own(loader: Kind) -> None:
    from torch.utils.data import default_collate, default_convert

    assert loader(Numbers(2)).collate_fn is default_collate
    assert loader(Numbers(2), batch_size=None).collate_fn is default_convert


def test_batch_sampler_replaces_size(loader: Kind) -> None:
    made = loader(Numbers(4), batch_sampler=[[0, 1], [2]])
    assert made.batch_size is None and made.drop_last is False
    assert type(made.sampler) is SequentialSampler
    assert [batch.tolist() for batch in made] == [[0, 1], [2]]


def test_prefetch_defaults_to_two(loader: Kind) -> None:
    assert loader(Numbers(2)).prefetch_factor is None
    assert loader(Numbers(2), num_workers=1).prefetch_factor == 2


@pytest.mark.parametrize("as_type", [np.int64, np.uint8, torch.tensor, np.array], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("workers", [0, 2])
def test_integers_of_any_type_are_numbers_of_workers(
    loader: Kind, workers: int, as_type: Any
) -> None:
    options = {"prefetch_factor": as_type(3)} if workers else {}
    made = loader(list(range(8)), batch_size=4, num_workers=as_type(workers), **options)
    if not loader.is_torch:
        json.dumps(made.state_dict())
    assert [batch.tolist() for batch in made] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    if not loader.is_torch:
        made.load_state_dict(json.loads(json.dumps(made.state_dict())))
        assert len(list(made)) == 2


@pytest.mark.parametrize("factor", [2**31, 2**32, 2**63, 2**70])
def test_a_huge_prefetch_factor_is_a_large_window(own: Kind, factor: int) -> None:
    made = own(list(range(8)), batch_size=4, num_workers=2, prefetch_factor=factor)
    assert [batch.tolist() for batch in made] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_timeout_without_workers_fails_at_iter(loader: Kind) -> None:
    with pytest.raises(AssertionError) as wanted:
        iter(DataLoader(Numbers(2), timeout=1))
    made = loader(Numbers(2), timeout=1)
    with pytest.raises(AssertionError) as caught:
        iter(made)
    assert str(caught.value) == str(wanted.value)


def test_start_method_by_name(loader: Kind) -> None:
    for method in ("fork", "spawn", "forkserver"):
        made = loader(Numbers(2), num_workers=1, multiprocessing_context=method)
        assert made.multiprocessing_context.get_start_method() == method
        assert made.multiprocessing_context is torch.multiprocessing.get_context(method)
    assert loader(Numbers(2)).multiprocessing_context is None


def test_too_many_workers_are_warned_about(loader: Kind) -> None:
    cores = len(os.sched_getaffinity(0))
    text = (
        f"This DataLoader will create {cores + 1} worker processes in total. Our "
        f"suggested max number of worker in current system is {cores}, which is "
        "smaller than what this DataLoader is going to create. Please be aware that "
        "excessive worker creation might get DataLoader running slow or even freeze, "
        "lower the worker number to avoid potential slowness/freeze if necessary."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        made = loader(Numbers(2), num_workers=cores + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's own iterator says it again
        warnings.filterwarnings("ignore" if loader.cls is DataLoader else "error", "This DataLoader will")
        list(made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader(Numbers(2), num_workers=cores)


def test_class_is_a_generic_subclass(loader: Kind) -> None:
    assert issubclass(loader.cls, DataLoader)
    assert loader.cls[int] is not None
    assert loader.cls.__name__ == "DataLoader"
    made = loader.cls[int](Numbers(4), **loader.options)
    assert isinstance(made, DataLoader)


def test_subset_subclass_needs_getitems(loader: Kind) -> None:
    class Doubled(Subset):
        def __getitem__(self, index: int) -> int:
            return 2 * super().__getitem__(index)

    try:
        DataLoader(Doubled(Numbers(4), [1, 2]))
    except NotImplementedError as error:
        with pytest.raises(NotImplementedError, match=re.escape(str(error))):
            loader(Doubled(Numbers(4), [1, 2]))
    else:
        want = list(DataLoader(Doubled(Numbers(4), [1, 2])))
        assert_same(list(loader(Doubled(Numbers(4), [1, 2]))), want)


@pytest.mark.unraisable  # torch's half-made iterator fails in __del__
def test_zero_prefetch_behaves_as_torchs(loader: Kind) -> None:
    def outcome(make: Any) -> Any:
        try:
            return list(make(Numbers(2), num_workers=1, prefetch_factor=0))
        except Exception as error:
            return type(error)

    assert outcome(loader) == outcome(DataLoader)


@pytest.mark.unraisable  # torch's iterator was not made and is deleted
@pytest.mark.parametrize("workers", [0, 1])
def test_invalid_generator_is_refused_at_first_use(loader: Kind, workers: int) -> None:
    made = loader(Numbers(4), num_workers=workers, generator=5)
    with pytest.raises(TypeError, match="invalid combination of arguments"):
        iter(made)
