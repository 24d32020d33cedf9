"""``pin_memory``: warnings and behaviour, without an accelerator and with one."""

from __future__ import annotations

import collections
import re
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

from .datasets import Images, Listed, Numbers, as_is
from .support import ASKS_ACCELERATOR, Kind, assert_same

ACCELERATOR = torch.accelerator.is_available()
NO_DEVICE = (
    "'pin_memory' argument is set as true but no accelerator is found, then device "
    "pinned memory won't be used."
)
OLD_NAME = (
    "pin_memory_device is deprecated, the current accelerator will be used as the "
    "device,ignore pin_memory_device='cuda'."
)

without = pytest.mark.skipif(ACCELERATOR, reason="an accelerator is present")
newer = pytest.mark.skipif(not ASKS_ACCELERATOR, reason="this torch asks CUDA whether to pin")
with_one = pytest.mark.skipif(not ACCELERATOR, reason="no accelerator")


@without
@newer
@pytest.mark.parametrize("workers", [0, 2])
def test_warning_and_same_data(loader: Kind, workers: int) -> None:
    made = loader(Images(6), batch_size=2, num_workers=workers, pin_memory=True)
    with pytest.warns(UserWarning, match=f"^{re.escape(NO_DEVICE)}$"):
        got = list(made)
    assert_same(got, list(DataLoader(Images(6), batch_size=2)))
    assert not any(batch["image"].is_pinned() for batch in got)


@without
@newer
@pytest.mark.parametrize("workers", [0, 1])
def test_device_name_is_deprecated(loader: Kind, workers: int) -> None:
    made = loader(Numbers(2), num_workers=workers, pin_memory=True,
                  pin_memory_device="cuda")
    with pytest.warns(UserWarning) as caught:
        list(made)
    # Python 3.12 and later may also warn about threads at a fork
    texts = [str(w.message) for w in caught if w.category is not DeprecationWarning]
    assert texts == [OLD_NAME, NO_DEVICE]


@newer
@pytest.mark.parametrize("workers", [0, 1])
def test_device_name_alone_does_nothing(loader: Kind, workers: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader(Numbers(2), num_workers=workers, pin_memory_device="cuda"))


class Custom:
    """A batch type that knows how to pin itself."""

    def __init__(self, samples: list[int]) -> None:
        self.tensor = torch.tensor(samples)
        self.pinned = False

    def pin_memory(self) -> "Custom":
        self.pinned = True
        return self


@without
@newer
def test_custom_batches_are_not_pinned_without_a_device(loader: Kind) -> None:
    made = loader(Numbers(4), batch_size=2, num_workers=1, collate_fn=Custom,
                  pin_memory=True)
    with pytest.warns(UserWarning, match="no accelerator"):
        assert [batch.pinned for batch in made] == [False, False]


@without
@newer
def test_warned_once_an_iterator(loader: Kind) -> None:
    made = loader(Numbers(3), num_workers=1, persistent_workers=True, pin_memory=True)
    with pytest.warns(UserWarning) as caught:
        for _ in range(3):
            list(made)
    assert len([w for w in caught if "no accelerator" in str(w.message)]) == 1


class Pair(NamedTuple):
    left: Any
    right: Any


def _structures(samples: list[int]) -> Any:
    tensor = torch.tensor(samples)
    return {
        "tensor": tensor, "list": [tensor, "s"], "tuple": (tensor, 1),
        "pair": Pair(tensor, b"b"), "none": None,
        "ordered": collections.OrderedDict(a=tensor),
    }


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
@pytest.mark.parametrize("workers", [0, 1])
def test_structures_keep_their_types(loader: Kind, workers: int) -> None:
    def run(make: Any) -> list[Any]:
        return list(make(Numbers(4), batch_size=2, num_workers=workers,
                         collate_fn=_structures, pin_memory=True))

    assert_same(run(loader), run(DataLoader))


@with_one
@pytest.mark.parametrize("workers", [0, 2])
def test_tensors_are_pinned(loader: Kind, workers: int) -> None:
    made = loader(Images(8), batch_size=2, num_workers=workers, pin_memory=True)
    for number, batch in enumerate(made):
        assert batch["image"].is_pinned() and batch["label"].is_pinned()
        assert batch["label"].tolist() == [2 * number, 2 * number + 1]


@with_one
@pytest.mark.parametrize("workers", [0, 1])
def test_custom_pin_memory_is_called(loader: Kind, workers: int) -> None:
    made = loader(Numbers(4), batch_size=2, num_workers=workers, collate_fn=Custom,
                  pin_memory=True)
    assert all(batch.pinned for batch in made)


@with_one
def test_pinned_batches_survive_copies_in_flight(loader: Kind) -> None:
    made = loader(Images(40, 256), batch_size=2, num_workers=2, pin_memory=True)
    copies = [batch["image"].to("cuda", non_blocking=True) for batch in made]
    for number, copy in enumerate(copies):
        assert copy.amax(dim=(1, 2, 3)).tolist() == [2 * number, 2 * number + 1]
        assert copy.amin(dim=(1, 2, 3)).tolist() == [2 * number, 2 * number + 1]


class Unpinnable:
    def __init__(self, samples: list[int]) -> None:
        self.samples = samples

    def pin_memory(self) -> None:
        raise LookupError("cannot be pinned")


@with_one
def test_error_while_pinning(loader: Kind) -> None:
    made = loader(Numbers(2), num_workers=1, collate_fn=Unpinnable, pin_memory=True)
    with pytest.raises(LookupError, match="in pin memory thread for device"):
        list(made)


@without
@newer
def test_sparse_and_other_values_pass_unpinned(loader: Kind) -> None:
    samples = [{"a": torch.eye(2).to_sparse()}] * 2
    made = loader(Listed(samples), num_workers=1, collate_fn=as_is, pin_memory=True)
    with pytest.warns(UserWarning, match="no accelerator"):
        got = list(made)
    assert got[0][0]["a"].to_dense().tolist() == torch.eye(2).tolist()
