"""Asks a dataset which of its samples share an opened file or another costly resource.

A dataset may offer ``locality_key(index)``: any hashable, equal for samples that are cheaper
in succession (a row group, a shard, a video). Without it, workers' reports show the groups
(``csrc/schedule/policy_locality.h``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from ..dataset_calls import offered, parts_of
from ..errors import add_note, stop_iteration_error

Key = Callable[[Any], Hashable]


def key_of(dataset: Any) -> Key | None:
    """The dataset's ``locality_key``, through torch's ``Subset`` and ``ConcatDataset``. A part of a
    ConcatDataset without a key is one group."""
    parts, find = parts_of(dataset)
    keys = [offered(part, "locality_key") for part in parts]
    if all(key is None for key in keys):
        return None

    def key_in(index: Any) -> Hashable:
        try:
            part, inner = find(index)
        except IndexError:
            return None  # there is no such sample: the worker raises the error
        key = keys[part]
        return part, key(inner) if key is not None else None

    return key_in


#: limit on groups that are merged because the order mixes their samples. A dataset keeps only a
#: few groups open, and one worker's share must not grow without bound.
MIXED = 8


class Groups:
    """Finds where groups begin in the sampler's order.

    Groups that the order mixes, as a shuffle buffer does, are merged. A worker that keeps both open
    opens each once, and a worker that keeps only the last one open loses nothing. Two groups are
    mixed if one begins before the last sample of the other, within one batch.
    """

    def __init__(self, key: Key) -> None:
        self._key = key
        self._together: set[Any] = set()  # the keys of the current merged group
        self._asked: tuple[Any, bytes] | None = None  # last argument of of(), and its result

    def of(self, indices: Any) -> bytes:
        """Like begins(). Caches the result for the same list, in case the engine had no space for
        it."""
        if self._asked is None or self._asked[0] is not indices:
            self._asked = indices, self.begins(indices)
        return self._asked[1]

    def begins(self, indices: Any) -> bytes:
        """A byte for each index: 1 if a new group begins there, also compared with the previous
        batch."""
        keys = [self._key_of(index) for index in indices]
        last = {key: at for at, key in enumerate(keys)}
        out, end = bytearray(), -1
        for at, key in enumerate(keys):
            goes_on = key in self._together or (at <= end and len(self._together) < MIXED)
            if not goes_on:
                self._together, end = set(), -1
            self._together.add(key)
            end = max(end, last[key])
            out.append(not goes_on)
        return bytes(out)

    def _key_of(self, index: Any) -> Hashable:
        try:
            key = self._key(index)
            hash(key)
            return key
        except StopIteration as error:
            raise stop_iteration_error(f"locality_key({index!r})") from error
        except Exception as error:
            add_note(error, f"It was raised for locality_key({index!r}) of the dataset.")
            raise


def groups_of(loader: Any) -> Groups | None:
    """The groups in a loader's order, if its dataset defines them."""
    key = key_of(loader.dataset) if loader._auto_collation else None
    return Groups(key) if key is not None else None
