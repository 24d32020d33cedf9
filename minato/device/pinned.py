"""``pin_memory=True`` with an accelerator: batches are pinned ahead of ``next()``.

torch's own thread function copies a batch into pinned memory while the program is at work on
the one before.  What goes to it, and when, is said in ``iterators/prefetcher.py``.  Without an
accelerator there is no thread.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import _utils

from .._deadline import Deadline
from ..errors import Failure
from ..workers import grace
from ..workers.thread_pool import start_quietly

#: how long a fork waits for a batch in the thread's hands; closing waits grace.STAGE
FORK_SECONDS = 1.0
#: how often a waiting caller looks whether the thread still lives
LOOK_SECONDS = 0.5


class Pinning:
    """A batch on its way through the thread; note says which it is if it cannot be pinned."""

    __slots__ = ("data", "done", "note", "thread")

    #: for an error: what has ended if the thread has
    what = "Pin memory thread"

    def __init__(self, thread: threading.Thread, note: Callable[[], str]) -> None:
        self.data: Any = None
        self.done = threading.Event()
        self.note = note
        self.thread = thread

    def result(self, timeout: float) -> Any:
        """The pinned batch, or a Failure. May be asked again after an interrupt.

        Raises RuntimeError in torch's words when the thread has died, or after timeout
        seconds (0: none).
        """
        deadline = Deadline(timeout)
        while not self.done.is_set():
            part = deadline.part()
            alive = self.thread.is_alive()
            if not self.done.wait(min(part, LOOK_SECONDS) if alive else 0) and not alive:
                raise RuntimeError(f"{self.what} exited unexpectedly")
        if isinstance(self.data, ExceptionWrapper):
            return Failure(self.data, None, self.note())
        return self.data


class Belt:
    """Both queues of torch's thread: what it gets and what it puts."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.busy = threading.Lock()  # the thread's, while it has a batch in hand

    def get(self, timeout: float | None = None) -> tuple[Any, Any]:
        item = self.waiting.get(timeout=timeout)
        self.busy.acquire()
        return item

    def put(self, item: tuple[Any, Any], timeout: float | None = None) -> None:
        pinning: Pinning = item[0]
        pinning.data = item[1]
        pinning.done.set()
        self.busy.release()


class Pinner:
    """The thread of one iterator. Knows nothing of it, so that it may be collected."""

    def __init__(self, device: str | None) -> None:
        self.ended = threading.Event()
        self._belt = Belt()
        self._owner = os.getpid()
        self.thread = self._thread(device)
        self.thread.daemon = True  # torch's is, too
        start_quietly([self.thread])
        _pinners.add(self)

    def _thread(self, device: str | None) -> threading.Thread:
        return threading.Thread(
            target=_utils.pin_memory._pin_memory_loop,
            args=(self._belt, self._belt, _device_index(), self.ended, device),
            name="minato-pin",
        )

    def most(self) -> int:
        """Batches that are prefetched: the one that is handed out, and the one after."""
        return 2

    def submit(self, data: Any, note: Callable[[], str]) -> Pinning:
        """Takes over data; the caller should keep no reference, so that its memory is free
        as soon as it was copied."""
        pinning = Pinning(self.thread, note)
        self._belt.waiting.put((pinning, data))
        return pinning

    def close(self) -> None:
        """Ends the thread after the batch in hand; what it has not begun is dropped."""
        if self._owner != os.getpid() or self.ended.is_set():
            return
        self.ended.set()
        self._belt.waiting.put((None, None))
        if self.thread is not threading.current_thread():  # else collected as garbage in it
            self.thread.join(grace.STAGE)

    def pause(self) -> bool:
        """Waits until nothing is being pinned, for a fork: the child would find the locks of
        the accelerator's allocator held for ever. Whether go_on() is to be called."""
        if self.thread is threading.current_thread() or not self.thread.is_alive():
            return False
        return self._belt.busy.acquire(timeout=FORK_SECONDS)

    def go_on(self) -> None:
        self._belt.busy.release()


def _device_index() -> int:
    accelerator = torch.accelerator
    if hasattr(accelerator, "current_device_index"):
        return accelerator.current_device_index()
    return accelerator.current_device_idx()  # torch 2.6


# ---- all threads -------------------------------------------------------------------------

_pinners: weakref.WeakSet[Pinner] = weakref.WeakSet()
_paused: list[Pinner] = []


@atexit.register
def _close_all() -> None:
    """Before the interpreter goes: a thread that comes back from pinning would find none."""
    for pinner in list(_pinners):
        pinner.close()


def _before_fork() -> None:
    _paused.extend(pinner for pinner in list(_pinners) if pinner.pause())


def _after_in_parent() -> None:
    while _paused:
        _paused.pop().go_on()


def _after_in_child() -> None:
    _paused.clear()
    _pinners.clear()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
