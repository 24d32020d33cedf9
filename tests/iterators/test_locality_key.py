"""Return values and errors of a dataset's locality_key."""

from __future__ import annotations

import random

import numpy as np
import pytest
from torch.utils.data import Dataset

from minato.iterators.dataset_hints import Groups, key_of


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


def begins(keys: str, batch: int = 100) -> str:
    groups = Groups(lambda index: keys[index])
    out = b""
    for at in range(0, len(keys), batch):
        out += groups.begins(range(at, min(at + batch, len(keys))))
    return "".join("-1"[there] for there in out)


def test_mixed_groups_are_merged() -> None:
    """A worker that keeps both opens each once; from batch to batch, too."""
    assert begins("aaabbbcc") == "1--1--1-"
    assert begins("abaabbccdcd") == "1-----1----"
    assert begins("ababbacdcddc") == "1-----1-----"
    assert begins("abab" "baba" "cdcd" "dccd", batch=4) == "1-------1-------"
    assert begins("aab" "bba" "bcc", batch=3) == "1-1" "--1" "11-"


def test_endlessly_mixed_groups_are_not_merged() -> None:
    """All samples shuffled: no worker can keep that many groups open, or should make them all."""
    keys = [chr(40 + n % 64) for n in range(640)]
    random.Random(0).shuffle(keys)
    made = begins("".join(keys), batch=64)
    assert max(map(len, made.split("1"))) < 40
    assert set(begins("".join(map(chr, range(40, 100))))) == {"1"}


def test_a_key_is_hashable() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        Groups(lambda index: [index]).begins([0])
