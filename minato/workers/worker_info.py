"""``torch.utils.data.get_worker_info()`` of a thread.

torch keeps its answer in a global of a module, because each of its workers is a process. Many
modules hold the function itself (``from torch.utils.data import get_worker_info``), so it is the
function's code that is exchanged, for as long as there are threads that are workers, or collate for
one: the new code looks whether this thread is, and else answers as before. The program's own
threads, processes and forks see no difference. Code that reads torch's global itself sees that of
the process.

default_collate asks, too, and in a worker makes its tensors in shared memory for the process that
gets them. Of a thread nobody needs that, and where it runs out it is the program that would be
killed. So it is told that this is no worker, where that changes nothing else.
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


class _Here(threading.local):
    info: Any = None
    thread = False  # it is a worker


_here = _Here()
_lock = threading.RLock()  # garbage collected in it may end one
_users = 0
_torchs: CodeType | None = None  # while ours is in its place


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
    """Whether tensors make the same batch in whatever memory: neither their types nor their shapes
    have to be brought together, and it is as dense as they are."""
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
    """There is one more who makes threads workers."""
    global _users, _torchs
    with _lock:
        _users += 1
        if _torchs is None:
            _torchs = worker.get_worker_info.__code__
            vars(worker)["_minato_answer"] = _answer
            worker.get_worker_info.__code__ = _get_worker_info.__code__


def end() -> None:
    """One of them needs it no more."""
    global _users, _torchs
    with _lock:
        _users -= 1
        if _users == 0 and _torchs is not None:
            if worker.get_worker_info.__code__ is _get_worker_info.__code__:
                worker.get_worker_info.__code__ = _torchs  # whoever runs ours finds _minato_answer
            _torchs = None


def be_worker(**info: Any) -> None:
    """This thread is one, from now on."""
    _here.info, _here.thread = worker.WorkerInfo(**info), True


@contextlib.contextmanager
def as_in_worker(**info: Any) -> Iterator[None]:
    """What this thread does is answered as in a worker process."""
    begin()
    before = _here.info, _here.thread
    _here.info, _here.thread = worker.WorkerInfo(**info), False
    try:
        yield
    finally:
        _here.info, _here.thread = before
        end()


def _forked() -> None:
    """In a fork of this process: whoever holds the lock is not there, and this thread, if it is a
    worker, is none here."""
    global _lock
    _lock = threading.RLock()
    _here.info, _here.thread = None, False


os.register_at_fork(after_in_child=_forked)
