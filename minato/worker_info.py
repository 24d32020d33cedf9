"""``torch.utils.data.get_worker_info()`` of a thread, and whether a dataset asks for it.

torch stores the answer in a global variable of a module, because each of its workers is a process.
Many modules hold the function itself (``from torch.utils.data import get_worker_info``). So minato
replaces the function's code while any thread is a worker, or collates for one. The new code
answers for worker threads, and as before for all others. The program's own threads, processes and
forks see no difference. Code that reads torch's global variable sees that of the process.

default_collate asks for it, too. In a worker it makes tensors in shared memory, for the process that gets
them. A thread needs no shared memory, and if it runs out the system would kill the program. So in a
worker thread default_collate gets the answer None, if that changes nothing else.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
from torch.utils.data._utils import collate, worker
from torch.utils.data._utils.worker import WorkerInfo


class _Here(threading.local):
    info: Any = None
    thread = False  # this thread is a worker


_here = _Here()
_lock = threading.RLock()  # reentrant: a collection of garbage inside may call end()
_users = 0
_torchs: CodeType | None = None  # torch's code while minato's is in its place


def _get_worker_info() -> Any:
    """Its code runs among the globals of torch's module."""
    return _minato_answer(_worker_info)  # type: ignore[name-defined]  # noqa: F821


def _answer(of_process: Any) -> Any:
    if _here.info is None:
        return of_process
    asks = sys._getframe(2)
    if _here.thread and asks.f_code is collate.collate_tensor_fn.__code__:
        if _stacks_alike(asks.f_locals["batch"]):
            return None
    return _here.info


def _stacks_alike(batch: Any) -> bool:
    """Whether the batch of these tensors is the same in any kind of memory: they are dense, and
    have one type and one shape."""
    first = batch[0]
    return type(first) is torch.Tensor and all(
        type(t) is torch.Tensor
        and t.dtype == first.dtype
        and t.shape == first.shape
        and t.layout == torch.strided
        and not t.requires_grad
        and t.is_contiguous()
        for t in batch
    )


def begin() -> None:
    """Adds a user of minato's code. The first one exchanges torch's."""
    global _users, _torchs
    with _lock:
        _users += 1
        if _torchs is None:
            _torchs = worker.get_worker_info.__code__
            vars(worker)["_minato_answer"] = _answer
            worker.get_worker_info.__code__ = _get_worker_info.__code__


def end() -> None:
    """Removes a user of minato's code. The last one restores torch's."""
    global _users, _torchs
    with _lock:
        _users -= 1
        if _users == 0 and _torchs is not None:
            if worker.get_worker_info.__code__ is _get_worker_info.__code__:
                # A thread that still runs minato's code finds _minato_answer.
                worker.get_worker_info.__code__ = _torchs
            _torchs = None


def is_worker_thread() -> bool:
    """Whether this thread is a worker, in the program's own process."""
    return _here.thread


def be_worker(**info: Any) -> None:
    """Makes this thread a worker."""
    _here.info, _here.thread = worker.WorkerInfo(**info), True


@contextlib.contextmanager
def as_in_worker(**info: Any) -> Iterator[None]:
    """Inside the block, get_worker_info() answers this thread as in a worker process."""
    begin()
    before = _here.info, _here.thread
    _here.info, _here.thread = worker.WorkerInfo(**info), False
    try:
        yield
    finally:
        _here.info, _here.thread = before
        end()


def _forked() -> None:
    """Resets the state in a fork. The thread that holds the lock does not exist there, and this
    thread is not a worker there."""
    global _lock
    _lock = threading.RLock()
    _here.info, _here.thread = None, False


os.register_at_fork(after_in_child=_forked)


# ---- iterable datasets that never ask which worker they are in --------------------------------
#
# A dataset that gives a share in each worker must ask. Otherwise every worker gives all samples, so
# each sample comes once from every worker. torch's loader does the same; minato warns of it.

_asked = False


class Watched(WorkerInfo):
    """The result of ``get_worker_info()`` in a worker process of an iterable dataset."""

    def __getattribute__(self, name: str) -> Any:
        global _asked
        if name == "id":
            _asked = True
        return super().__getattribute__(name)


watched = Watched
Watched.__name__ = Watched.__qualname__ = WorkerInfo.__name__


def asked() -> bool:
    """Whether any code in this process has asked for the worker's number."""
    return _asked


def shares_warning(dataset: Any, workers: int, batches: int) -> str:
    """The warning."""
    name = type(dataset).__name__
    return (
        f"each of {workers} workers has delivered {batches} batches of the iterable dataset {name}, "
        "which has never asked which worker it is in. Unless it chooses a share in another way, each "
        f"sample came {workers} times. Use info = minato.get_worker_info() and yield every "
        "info.num_workers-th sample, starting at info.id, or use num_workers=1. This warning is shown "
        "once."
    )
