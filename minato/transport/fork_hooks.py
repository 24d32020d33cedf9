"""Forks of the training process while it holds batches.

A forked child sees the arena's pages, not a copy, so a batch it inherited must not change
under it when the parent drops the batch and goes on.  The core counts forks and knows of each
whether the child, or anything that it has forked in turn, still lives (csrc/os/mn_forks.h).
Until they are gone what was out is not used again.

The core's own functions are the hooks: in one that is written in Python an interrupt could come
first, and Python forks all the same.
"""

from __future__ import annotations

import os
from multiprocessing import process
from typing import Any

from .. import _core


def _disown() -> None:
    """At its exit a child's multiprocessing would end "its" daemons, which are the parent's."""
    children: set[Any] = vars(process)["_children"]
    for child in list(children):
        if child.name == "minato-zygote":
            children.discard(child)


def watch() -> None:
    """Called once at import."""
    os.register_at_fork(
        before=_core.fork_begins,
        after_in_parent=_core.fork_ends,
        after_in_child=_core.forked,
    )
    os.register_at_fork(after_in_child=_disown)
