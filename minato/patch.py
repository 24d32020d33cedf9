"""``patch_torch()``: code that names ``torch.utils.data.DataLoader`` gets minato's class."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import torch.utils.data
import torch.utils.data.dataloader

from .loader import DataLoader

_MISSING = object()


class Swaps:
    """Attributes replaced in other people's modules, as long as someone wants them so.

    ``acquire`` and ``release`` count: what one part of a program has switched on is not
    switched off by another that did the same for a while. Both may be called from any
    thread. An attribute that somebody else has replaced meanwhile is left as it is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._undo: list[tuple[Any, str, Any, Any]] = []

    @property
    def active(self) -> bool:
        """Whether the attributes are replaced now."""
        return self._users > 0

    def acquire(self, wanted: list[tuple[Any, str, Any]]) -> None:
        """Sets each (object, attribute, value), unless that is so already."""
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            for owner, name, value in wanted:
                old = vars(owner).get(name, _MISSING)
                setattr(owner, name, value)
                self._undo.append((owner, name, value, old))

    def release(self) -> None:
        """Takes one ``acquire`` back; the last one puts back what was there."""
        with self._lock:
            if self._users == 0:
                return
            self._users -= 1
            while self._users == 0 and self._undo:
                owner, name, value, old = self._undo.pop()
                if vars(owner).get(name, _MISSING) is not value:
                    continue
                if old is _MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, old)


_torch = Swaps()


class Patch:
    """What ``patch_torch()`` returns: a context manager, or something to ``undo()``."""

    def __init__(self, swaps: Swaps) -> None:
        self._swaps = swaps
        self._held = True

    def undo(self) -> None:
        """Takes this call of ``patch_torch()`` back; once, however often it is called."""
        held, self._held = self._held, False
        if held:
            self._swaps.release()

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()


def patch_torch() -> Patch:
    """Makes ``torch.utils.data.DataLoader`` minato's class, for code that names torch's.

    >>> minato.patch_torch()            # until the program ends, or:
    >>> with minato.patch_torch():      # until the block ends
    ...     import library_that_makes_its_own_loaders

    ``torch.utils.data.DataLoader`` and ``torch.utils.data.dataloader.DataLoader`` are
    replaced. A module that ran ``from torch.utils.data import DataLoader`` before keeps
    torch's class: patch first, import it afterwards. ``isinstance(loader, DataLoader)``
    through the patched name is false for loaders made from torch's class before, and such
    loaders cannot be pickled while the patch lasts.

    Calling it again changes nothing; the replacement lasts until each call has been undone,
    by leaving its ``with`` block or by ``undo()`` of what it returned.

    Returns:
        A context manager with ``undo()``. The patch is in place when the call returns.
    """
    _torch.acquire(
        [
            (torch.utils.data, "DataLoader", DataLoader),
            (torch.utils.data.dataloader, "DataLoader", DataLoader),
        ]
    )
    return Patch(_torch)
