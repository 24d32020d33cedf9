"""What a dataset's locality_key may return and raise."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Dataset

from minato.iterators.locality import Groups, key_of


class Keyed(Dataset):
    groups = np.arange(20) // 5

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> int:
        return index

    def locality_key(self, index: int) -> np.int64:
        return self.groups[index]


def test_numpy_scalars_are_keys() -> None:
    key = key_of(Keyed())
    assert key is not None
    assert Groups(key).begins(range(12)) == bytes(n % 5 == 0 for n in range(12))


def test_parts_have_keys_of_their_own() -> None:
    key = key_of(ConcatDataset([Keyed(), [0, 1], Keyed()]))
    assert key is not None
    assert [key(i) for i in (0, 19, 20, 21, 22, 41, -1)] == [
        (0, 0), (0, 3), (1, None), (1, None), (2, 0), (2, 3), (2, 3)]  # fmt: skip


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_an_error_names_the_function_and_the_index() -> None:
    key = key_of(Keyed())
    assert key is not None
    with pytest.raises(IndexError) as caught:
        Groups(key).begins([1, 99])
    assert "locality_key(99)" in caught.value.__notes__[0]
