"""Finds iterable datasets that never ask which worker they are in.

A dataset that gives a share in each worker must ask. Otherwise every worker gives all samples, so
each sample comes once from every worker. torch's loader does the same; minato warns of it.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data._utils.worker import WorkerInfo

_asked = False


class _Watched(WorkerInfo):
    """The result of ``get_worker_info()`` in a worker of an iterable dataset."""

    def __getattribute__(self, name: str) -> Any:
        global _asked
        if name == "id":
            _asked = True
        return super().__getattribute__(name)


_Watched.__name__ = _Watched.__qualname__ = WorkerInfo.__name__


def watched(**info: Any) -> WorkerInfo:
    """Worker info for a worker process."""
    return _Watched(**info)


def asked() -> bool:
    """Whether any code in this process has asked for the worker's number."""
    return _asked


def text(dataset: Any, workers: int, batches: int) -> str:
    """The warning."""
    name = type(dataset).__name__
    return (
        f"each of {workers} workers has delivered {batches} batches of the iterable dataset {name}, "
        "which has never asked which worker it is in. Unless it chooses a share in another way, each "
        f"sample came {workers} times. Use info = minato.get_worker_info() and yield every "
        "info.num_workers-th sample, starting at info.id, or use num_workers=1. This warning is shown "
        "once."
    )
