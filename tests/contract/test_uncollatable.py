"""Errors of default_collate name the sample and the key that it could not collate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from .support import Kind


class Made(Dataset):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def uneven(index: int) -> Any:
    return {"of": {"image": torch.zeros(3, 9 if index == 5 else 8)}, "index": index}


def view(index: int) -> Any:
    return {"image": torch.zeros(3, 64)[:, : 9 if index == 5 else 8]}


def longer(index: int) -> Any:
    return index, [1.0] * (3 if index == 5 else 2)


def lacking(index: int) -> Any:
    return {"x": 1} if index == 5 else {"x": 1, "y": 2}


def absent(index: int) -> Any:
    return index, None if index == 5 else torch.zeros(2)


def never(index: int) -> Any:
    return {"mask": None, "index": index}


def with_gradient(index: int) -> Any:
    return {"w": torch.ones(2, requires_grad=True)}


@pytest.mark.parametrize(("make", "told"), [
    (uneven, "['of']['image'] has shape [3, 9] in sample index 5 and shape [3, 8] in most others"),
    (view, "['image'] has shape [3, 9] in sample index 5 and shape [3, 8] in most others"),
    (longer, "[1] has length 3 in sample index 5 and length 2 in most others"),
    (lacking, "the sample has keys ['x'] in sample index 5 and keys ['x', 'y'] in most others"),
    (absent, "[1] is a NoneType in sample index 5 and shape [2] in most others"),
    (never, "['mask'] is a NoneType in sample index 0, which default_collate cannot make a batch of"),
    (with_gradient, "['w'] requires grad in sample index 0"),
])  # fmt: skip
def test_error_of_default_collate_names_sample_and_key(own: Kind, make: Any, told: str) -> None:
    with pytest.raises((RuntimeError, TypeError, KeyError, AttributeError)) as caught:
        list(own(Made(make), batch_size=4, num_workers=2))
    first = str(caught.value.args[0]).splitlines()[0]
    assert told in first


def test_error_for_tensor_with_gradient_says_detach(own: Kind) -> None:
    data = torch.ones(4, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"requires grad .* return its detach\(\)"):
        list(own(Made(lambda index: (data[index],)), batch_size=2, num_workers=1))


class Odd(dict):
    def __getitem__(self, key: Any) -> Any:
        raise LookupError("as it likes")


def test_samples_with_raising_attributes_keep_torchs_error(own: Kind) -> None:
    with pytest.raises(LookupError, match="as it likes"):
        list(own(Made(lambda index: Odd(x=index)), batch_size=2, num_workers=1))
