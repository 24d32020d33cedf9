"""Passes the dataset's epoch on to the copies in persistent workers.

``DataLoader.set_epoch`` reaches these copies. A program, or its sampler when it is iterated, may
instead call the dataset's own ``set_epoch`` or set its ``epoch``. The copies then get the epoch
of the program's dataset.
"""

from __future__ import annotations

import warnings
from typing import Any

from ..dataset_calls import offered
from .across_iterators import Memo

#: attributes in which datasets keep their epoch
NAMES = ("epoch", "_epoch", "current_epoch", "_current_epoch")


def epoch_of(dataset: Any) -> tuple[str, int] | None:
    """The name and value of the attribute; runs no code of the dataset."""
    own = getattr(dataset, "__dict__", {})
    for name in NAMES:
        value = own.get(name, getattr(type(dataset), name, None))
        if type(value) is int and 0 <= value < 2**63:
            return name, value
    return None


class DatasetEpochs:
    """Finds the epoch that the dataset's copies in one iterator's workers should get."""

    def __init__(self, loader: Any, memo: Memo) -> None:
        self._dataset, self._memo = loader.dataset, memo
        self._copied = self._as_torch = self._overlap = False
        self._by_loader = self._sent = memo.user_epoch
        self._known = epoch_of(self._dataset)

    def workers_start(self, copied: bool, as_torch: bool, overlap: bool) -> None:
        """copied: each worker keeps a copy of the current dataset for more than one epoch.
        as_torch: workers must make the same samples as torch's workers, which get no epoch.
        overlap: an epoch may start while the previous one ends; then copies get it again."""
        self._copied, self._as_torch, self._overlap = copied, as_torch, overlap
        self._by_loader = self._sent = self._memo.user_epoch
        self._known = epoch_of(self._dataset)

    def for_workers(self, user_epoch: int) -> int:
        """1 + the epoch that copies get before the first sample of an epoch; 0: none. Call it after
        the sampler has yielded the epoch's first index. user_epoch: 1 + the epoch of the loader's
        set_epoch(); 0: it was not called."""
        now, known = epoch_of(self._dataset), self._known
        self._known = now
        if user_epoch != self._by_loader:
            self._by_loader = self._sent = user_epoch
        elif self._copied and now is not None and (
            now != known or (self._overlap and self._sent == 0)
        ):
            if not self._as_torch and offered(self._dataset, "set_epoch") is not None:
                self._sent = now[1] + 1
            elif now != known and not self._memo.warned_of_epoch:
                self._memo.warned_of_epoch = True
                self._hint(*now)
        return self._sent

    def _hint(self, name: str, value: int) -> None:
        kind = type(self._dataset).__name__
        give = ""
        if offered(self._dataset, "set_epoch") is None:
            give = f"give {kind} a method set_epoch(epoch), and "
        warnings.warn(
            f"{kind}.{name} is {value} in the program now. Persistent workers keep copies of "
            "the dataset, in which it still has the value from their start. To update them, "
            f"{give}call set_epoch(epoch) of the loader. This warning is shown once.",
            stacklevel=2,
        )
