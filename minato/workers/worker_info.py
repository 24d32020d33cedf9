"""``torch.utils.data.get_worker_info()`` in threads that are workers.

torch keeps its answer in a global of a module, because each of its workers is a process. Many
modules hold the function itself (``from torch.utils.data import get_worker_info``), so it is the
function's code that is exchanged, for as long as there are such threads: the new code looks
whether this thread is a worker, and else answers as before. The program's own threads, processes
and forks see no difference. Code that reads torch's global itself sees that of the process.
"""

from __future__ import annotations

import threading
from types import CodeType
from typing import Any

from torch.utils.data._utils import worker

_here = threading.local()
_lock = threading.Lock()
_users = 0
_torchs: CodeType | None = None  # while ours is in its place


def _get_worker_info() -> Any:
    """Its code runs among the globals of torch's module."""
    return getattr(_minato_here, "info", _worker_info)  # type: ignore[name-defined]  # noqa: F821


def begin() -> None:
    """There will be one more who makes threads workers."""
    global _users, _torchs
    with _lock:
        _users += 1
        if _users == 1:
            _torchs = worker.get_worker_info.__code__
            vars(worker)["_minato_here"] = _here
            worker.get_worker_info.__code__ = _get_worker_info.__code__


def end() -> None:
    """The threads of one of them have ended."""
    global _users, _torchs
    with _lock:
        _users -= 1
        if _users == 0 and _torchs is not None:
            if worker.get_worker_info.__code__ is _get_worker_info.__code__:
                worker.get_worker_info.__code__ = _torchs
                del vars(worker)["_minato_here"]
            _torchs = None


def be_worker(number: int, num_workers: int, seed: int, dataset: Any) -> None:
    """This thread is one, from now on."""
    _here.info = worker.WorkerInfo(
        id=number, num_workers=num_workers, seed=seed, dataset=dataset
    )
