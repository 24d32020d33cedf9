"""Forks of the training process while it holds batches.

A forked child sees the arena's pages, not a copy, so a batch it inherited must not change
under it when the parent drops the batch and goes on.  For each fork with batches out a pipe
is made whose write end only the child keeps: its end of file says that the child, and
whatever it forked in turn, is gone.  Until then what was out is not used again.
"""

from __future__ import annotations

import contextlib
import os
import select
from multiprocessing import process
from typing import Any

from .. import _core

#: count of a fork -> read end of its pipe; None: no descriptor was left, it counts for ever
_living: dict[int, int | None] = {}
_pending: list[tuple[int, int | None, int | None]] = []
#: pipes at most; a program with more children that inherited batches pays with memory
PIPES = 64


def _before() -> None:
    count = _core.fork_begins()
    if count == 0:
        return
    read = write = None
    if len(_living) < PIPES:
        try:
            read, write = os.pipe()
        except OSError:
            read = write = None
    _pending.append((count, read, write))
    _living[count] = read
    with contextlib.suppress(MemoryError):  # until it is told, the core takes it for living
        _core.living_forks(list(_living), [])


def _in_parent() -> None:
    while _pending:
        _count, _read, write = _pending.pop()
        if write is not None:
            os.close(write)


def _in_child() -> None:
    """Keeps the write end open for as long as this process lives."""
    for _count, read, _write in _pending:
        if read is not None:
            os.close(read)
    _pending.clear()
    _living.clear()
    _core.forked()
    # At its exit multiprocessing would end "its" daemons, which are the parent's.
    children: set[Any] = vars(process)["_children"]
    for child in list(children):
        if child.name == "minato-zygote":
            children.discard(child)


def _over(read: int) -> bool:
    poller = select.poll()
    poller.register(read, 0)
    return bool(poller.poll(0))


def poll() -> None:
    """Forgets forks whose children are gone. It may be entered again on the way, by another
    thread or a finalizer, or be broken off: a descriptor is closed by whoever took it out."""
    ended = [n for n, read in list(_living.items()) if read is not None and _over(read)]
    for count in ended:
        read = _living.pop(count, None)
        if read is not None:
            os.close(read)
    if ended:
        _core.living_forks(list(_living), ended)


def watch() -> None:
    """Called once at import."""
    os.register_at_fork(
        before=_before, after_in_parent=_in_parent, after_in_child=_in_child
    )
    _core.watch_forks(poll)
