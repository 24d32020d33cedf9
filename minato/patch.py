"""``patch_torch()``: makes loaders of torch's class use minato's engine."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
from dataclasses import fields
from typing import Any

from ._dynamo import eager
from .loader import DataLoader, torchs_iterator
from .option_values import RECORD, record
from .options import Options

_MISSING = object()


class Swaps:
    """Replaces attributes of other modules while at least one caller wants it.

    ``acquire`` and ``release`` count, so one part of a program does not switch off what another
    part has switched on. Both may be called from any thread. An attribute that other code has
    replaced in the meantime stays as it is.
    """

    def __init__(self) -> None:
        self._forked()
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self._forked)
        self._users = 0
        self._undo: list[tuple[Any, str, Any, Any]] = []

    def _forked(self) -> None:
        """In a forked child, replaces the lock: the thread that held it does not exist there."""
        self._lock = threading.Lock()

    @property
    def active(self) -> bool:
        """Whether the attributes are currently replaced."""
        return self._users > 0

    def acquire(self, wanted: list[tuple[Any, str, Any]]) -> None:
        """Sets each (object, attribute, value), on the first call."""
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            for owner, name, value in wanted:
                old = vars(owner).get(name, _MISSING)
                setattr(owner, name, value)
                self._undo.append((owner, name, value, old))

    def release(self) -> None:
        """Undoes one ``acquire``; the last one restores the original attributes."""
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


class Patch(contextlib.ExitStack):
    """Return value of ``patch_torch()``: a context manager, also with ``undo()``."""

    def undo(self) -> None:
        """Undoes one call of ``patch_torch()``; further calls have no effect."""
        self.close()


@eager
def _get_iterator(loader: Any) -> Any:
    """For loaders of torch's class. Records the loader's options, because persistent workers
    need them in each epoch, even after the patch was undone."""
    if not _torch.active:  # the caller kept this method from before the undo
        return torchs_iterator(loader)
    known = vars(Options.of(loader))
    vars(loader)[RECORD] = {n: known[n] for n in known if n != "pending_state"}
    return DataLoader._get_iterator(loader)


def _taking_options(init: Any) -> Any:
    """torch's constructor, extended to accept minato's options for a loader of torch's class."""
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

    torchs = inspect.signature(init)  # libraries that rebuild a loader read the signature
    named = {**torchs.parameters, **{one.name: one for one in options}}
    taking: Any = __init__
    taking.__signature__ = torchs.replace(
        parameters=sorted(named.values(), key=lambda one: one.kind)
    )
    return taking


#: Methods that torch's class gets. A subclass that defines one of these itself keeps its own.
_METHODS = (
    "_new_iterator", "_next_epoch", "_why_torch",
    "set_epoch", "state_dict", "load_state_dict", "stats", "report", "_repr_html_",
)  # fmt: skip


def patch_torch() -> Patch:
    """Makes loaders of torch's own class use minato's engine, for code that names that class.

    >>> minato.patch_torch()            # until the program ends, or:
    >>> with minato.patch_torch():      # until the block ends
    ...     train(...)                  # code that makes its own loaders

    The class object stays the same, so loaders are pickled, compared and rebuilt as before; its
    ``_get_iterator`` is replaced. Libraries, subclasses and existing loaders are therefore
    covered: the patch applies when an epoch starts. A subclass whose own ``_get_iterator`` does
    not call torch's (torchdata's ``StatefulDataLoader``) is not affected.

    Loaders have minato's methods (``stats()``, ``report()``, ``state_dict()``, ``load_state_dict()``,
    ``set_epoch()``) as long as the patch lasts. Torch's constructor takes minato's options; of a
    loader of torch's own class they may be set later, before the first epoch
    (``loader.on_error = "skip"``). A class derived from torch's may have attributes of such names,
    ``device`` for one, for purposes of its own. They are no options. Its loaders have the options
    that torch's constructor is given.

    Calling it again changes nothing. The patch lasts until each call has been undone, by leaving
    its ``with`` block or by ``undo()`` on the returned object. Epochs that have started, and a
    loader's persistent workers, are not affected by undoing it.

    Returns:
        A context manager with ``undo()``. The patch is already in place.
    """
    (torchs,) = DataLoader.__bases__
    wanted = [(torchs, name, getattr(DataLoader, name)) for name in _METHODS]
    given = inspect.signature(DataLoader).parameters
    wanted += [(torchs, field.name, given[field.name].default) for field in fields(Options)]
    wanted.append((torchs, "__init__", _taking_options(vars(torchs)["__init__"])))
    _torch.acquire([*wanted, (torchs, "_get_iterator", _get_iterator)])
    patch = Patch()
    patch.callback(_torch.release)
    return patch
