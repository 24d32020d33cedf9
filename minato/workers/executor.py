"""What workers run in: processes (``process_pool.py``) or threads (``thread_pool.py``), in Python or in C.

Work reaches them by one way, whatever they are: a task is *submitted* to a run queue of the shared
mapping and its *completion* is its word, that says DONE; both are the engine's. A worker that is
*lost* says so in its entry, or its process is seen to have ended, and the engine takes its tasks
back (csrc/workers/mn_crew.h). What is left for an executor is to *start* workers and to *stop* them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .._core import Engine, _WorkerEntry
    from ..seeding.held import Held
    from .process_pool import WorkerHandle


class Executor(Protocol):
    """The engine and its workers; belongs to one iterator, and to the process that made it."""

    kind: str  #: for ``stats()``
    engine: Engine
    started: bool
    stopped: bool

    @property
    def handles(self) -> Sequence[WorkerHandle]:
        """Of the workers there are at first, with the interface of ``Process``."""

    def start(self) -> None:
        """Once. What an exception leaves behind is for ``stop()``."""

    def stop(self) -> None:
        """Ends the workers and frees the memory; nothing where that was done."""

    def mine(self) -> bool:
        """Whether it is to be stopped by this process."""

    def starts_workers(self) -> bool:
        """Whether somebody does who might start one that is wanted."""

    def starter(self) -> int | None:
        """Process id of who starts them; None: the loading process itself."""

    def restart(self) -> bool:
        """Where the process that starts workers is gone, starts another; workers go on. False: that
        would not help."""

    def stack_of(self, number: int) -> str:
        """Where a worker is in its Python code, the latest call first; empty where that is not
        known."""

    def held(self) -> Held | None:
        """What a worker has found out about the generators of its dataset."""

    def worker_entry(self, number: int) -> _WorkerEntry | None:
        """What the engine knows of a worker, and knew last; None in a fork."""
