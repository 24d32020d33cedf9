"""Loaders are pickled and copied; the copies are independent."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from .datasets import Images, Numbers, as_is
from .support import Kind, assert_same, flat


@pytest.mark.parametrize("kwargs", [
    {}, {"batch_size": 3, "shuffle": True}, {"num_workers": 2, "prefetch_factor": 3},
    {"num_workers": 1, "persistent_workers": True, "collate_fn": as_is},
    {"batch_size": None}, {"batch_sampler": [[0], [1, 2]]},
    {"num_workers": 1, "timeout": 20, "in_order": False},
], ids=lambda value: str(value).split(" at 0x")[0])
@pytest.mark.parametrize("duplicate", [
    lambda made: pickle.loads(pickle.dumps(made)), copy.copy, copy.deepcopy,
], ids=["pickle", "copy", "deepcopy"])
def test_copies_load_the_same(loader: Kind, kwargs: dict[str, Any], duplicate) -> None:
    made = loader(Numbers(6), **kwargs)
    other = duplicate(made)
    assert type(other) is type(made)
    assert set(vars(other)) == set(vars(made))
    runs = []
    for each in (made, other):
        torch.manual_seed(6)
        runs.append(sorted(map(str, each)))
    assert runs[0] == runs[1]
    with pytest.raises(ValueError, match="attribute should not be set"):
        other.dataset = 1


def test_own_options_travel(own: Kind) -> None:
    made = own(Numbers(4), num_workers=1, memory_limit="64MiB")
    other = pickle.loads(pickle.dumps(made))
    assert other.memory_limit == "64MiB" and other.scheduling == made.scheduling


def test_after_use(loader: Kind) -> None:
    made = loader(Images(4), num_workers=1)
    want = list(made)
    assert_same(list(pickle.loads(pickle.dumps(made))), want)


def test_with_a_live_persistent_iterator(loader: Kind) -> None:
    # The iterator is an attribute of the loader, and iterators are not pickled.
    made = loader(Numbers(4), num_workers=1, persistent_workers=True)
    list(made)
    with pytest.raises(NotImplementedError):
        pickle.dumps(made)
    made._iterator = None
    assert flat(pickle.loads(pickle.dumps(made))) == [0, 1, 2, 3]


def test_start_method_objects_are_kept(loader: Kind) -> None:
    made = loader(Numbers(4), num_workers=1, multiprocessing_context="fork")
    other = copy.copy(made)
    assert other.multiprocessing_context is made.multiprocessing_context
    assert flat(other) == [0, 1, 2, 3]


class Holder:
    """A dataset-like object that holds a loader, as trainers do."""

    def __init__(self, made: Any) -> None:
        self.made = made


def test_inside_other_objects(loader: Kind) -> None:
    holder = Holder(loader(Numbers(3), num_workers=1))
    assert flat(pickle.loads(pickle.dumps(holder)).made) == [0, 1, 2]
