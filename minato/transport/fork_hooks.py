"""Forks of the trainer process while it holds batches.

A forked child shares the arena's pages, so an inherited batch must not change when the parent
drops it and continues. For each fork, the core knows whether the child, or any process that
the child has forked, is still alive (csrc/os/mn_forks.h). Until they are gone, memory that was
delivered at the fork is not reused.

The hooks are C functions of the core: in a Python function, an interrupt could come first, and
Python would fork nevertheless.
"""

from __future__ import annotations

import os
from multiprocessing import process
from typing import Any

from .. import _core


def _disown() -> None:
    """In a child: keeps multiprocessing's exit handler from ending the parent's daemons."""
    children: set[Any] = vars(process)["_children"]
    for child in list(children):
        if child.name == "minato-zygote":
            children.discard(child)


def watch() -> None:
    """Registers the hooks; called once at import."""
    os.register_at_fork(
        before=_core.fork_begins,
        after_in_parent=_core.fork_ends,
        after_in_child=_core.forked,
    )
    os.register_at_fork(after_in_child=_disown)
