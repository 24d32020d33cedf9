"""``patch_torch()``: loaders of torch's class load as minato's do."""

from __future__ import annotations

import functools
import inspect
import os
import threading
from dataclasses import fields
from types import TracebackType
from typing import Any

from ._dynamo import eager
from .loader import DataLoader, torchs_iterator
from .option_values import RECORD, record
from .options import Options

_MISSING = object()


class Swaps:
    """Attributes replaced in other people's modules, as long as someone wants them so.

    ``acquire`` and ``release`` count: what one part of a program has switched on is not
    switched off by another that did the same for a while. Both may be called from any
    thread. An attribute that somebody else has replaced meanwhile is left as it is.
    """

    def __init__(self) -> None:
        self._forked()
        if hasattr(os, "register_at_fork"):  # a system that forks
            os.register_at_fork(after_in_child=self._forked)
        self._users = 0
        self._undo: list[tuple[Any, str, Any, Any]] = []

    def _forked(self) -> None:
        """Whoever holds the lock is not there, in a fork of this process."""
        self._lock = threading.Lock()

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


@eager
def _get_iterator(loader: Any) -> Any:
    """Of a loader of torch's class. It keeps its options, which persistent workers ask for in
    each epoch, also after the patch has been undone."""
    if not _torch.active:  # whoever calls this has kept it
        return torchs_iterator(loader)
    known = vars(Options.of(loader))
    vars(loader)[RECORD] = {n: known[n] for n in known if n != "pending_state"}
    return DataLoader._get_iterator(loader)


def _taking_options(init: Any) -> Any:
    """torch's constructor, for code that gives minato's options to a loader of torch's class."""
    given = inspect.signature(DataLoader).parameters
    options = [given[field.name] for field in fields(Options)]

    @eager
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        takes = options if _torch.active else []  # a library may have kept this function
        own = {one.name: kwargs.pop(one.name) for one in takes if one.name in kwargs}
        init(self, *args, **kwargs)
        if own:
            record(self, own)
            checked = Options.of(self)
            checked.check(self.num_workers, self.persistent_workers)
            checked.check_effect(self)

    torchs = inspect.signature(init)  # libraries that make a loader again go by it
    named = {**torchs.parameters, **{one.name: one for one in options}}
    taking: Any = __init__
    taking.__signature__ = torchs.replace(
        parameters=sorted(named.values(), key=lambda one: one.kind)
    )
    return taking


#: What torch's class takes over. A class below it that has one of these itself keeps its own.
_METHODS = (
    "_new_iterator", "_why_torch", "_shares_a_stateful_dataset",
    "set_epoch", "state_dict", "load_state_dict", "stats", "report", "_repr_html_",
)  # fmt: skip


def patch_torch() -> Patch:
    """Makes loaders of torch's own class load as minato's do, for code that names that class.

    >>> minato.patch_torch()            # until the program ends, or:
    >>> with minato.patch_torch():      # until the block ends
    ...     train(...)                  # which makes its own loaders

    The class stays what it is (so loaders are pickled, compared and rebuilt as ever), and its
    ``_get_iterator`` is replaced. So it does not matter whether a library, a class below torch's,
    or a loader is there already: what counts is when an epoch begins. A class that has a
    ``_get_iterator`` of its own which does not call torch's (torchdata's ``StatefulDataLoader``)
    keeps that.

    Loaders have minato's methods (``stats()``, ``report()``, ``state_dict()``, ``load_state_dict()``,
    ``set_epoch()``) as long as the patch lasts. Torch's constructor takes minato's options; of a
    loader of torch's own class they may be set later, before the first epoch
    (``loader.on_error = "skip"``). A class derived from torch's may have attributes of such names,
    ``device`` for one, for purposes of its own: they are no options, and its loaders have those that
    torch's constructor is given.

    Calling it again changes nothing; the patch lasts until each call has been undone, by leaving
    its ``with`` block or by ``undo()`` of what it returned. Epochs that have begun, and the
    persistent workers of a loader, stay what they were before.

    Returns:
        A context manager with ``undo()``. The patch is in place when the call returns.
    """
    (torchs,) = DataLoader.__bases__
    wanted = [(torchs, name, getattr(DataLoader, name)) for name in _METHODS]
    given = inspect.signature(DataLoader).parameters
    wanted += [(torchs, field.name, given[field.name].default) for field in fields(Options)]
    wanted.append((torchs, "__init__", _taking_options(vars(torchs)["__init__"])))
    _torch.acquire([*wanted, (torchs, "_get_iterator", _get_iterator)])
    return Patch(_torch)
