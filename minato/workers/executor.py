"""The interface of workers: processes (``process_pool.py``) or threads (``thread_pool.py``).

Tasks reach all kinds of workers in the same way. The engine *submits* a task to a run queue in the
shared mapping. The worker *completes* it by writing DONE to the task's word. A worker is *lost*
when its entry says so, or when the engine sees that its process has ended. The engine then takes
its tasks back (csrc/workers/mn_crew.h). An executor only *starts* and *stops* workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .._core import Engine, _WorkerEntry
    from .process_pool import WorkerHandle


class Executor(Protocol):
    """The engine and its workers; belongs to one iterator, and to the process that made it."""

    kind: str  #: for ``stats()``
    engine: Engine
    started: bool
    stopped: bool

    @property
    def handles(self) -> Sequence[WorkerHandle]:
        """Handles of the first workers, with the interface of ``Process``."""

    def start(self) -> None:
        """Starts the workers; to be called once. After an exception ``stop()`` cleans up."""

    def stop(self) -> None:
        """Ends the workers and frees the memory. Does nothing the second time."""

    def mine(self) -> bool:
        """Whether this process has to stop it."""

    def starts_workers(self) -> bool:
        """Whether the process that starts wanted workers is there."""

    def starter(self) -> int | None:
        """Id of the process that starts workers; None: the loading process itself."""

    def restart(self) -> bool:
        """Replaces a lost process that starts workers; running workers go on. Returns False if
        that would not help."""

    def stack_of(self, number: int) -> str:
        """A worker's Python stack, the latest call first; empty if it is unknown."""

    def growing(self) -> str:
        """The name of an attribute of the dataset that grows with samples; empty if there is none."""

    def worker_entry(self, number: int) -> _WorkerEntry | None:
        """The engine's entry of a worker, or after the end its last one; None in a fork."""
