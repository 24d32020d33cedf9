"""``pin_memory=True`` with an accelerator: batches are pinned ahead of ``next()``.

torch's own thread function copies a batch into pinned memory while the program is at work on
the one before.  Sampler and engine stay in the program's thread: each ``next()`` looks, without
waiting, whether the batch after the one it hands out is complete, and sends it on its way.  That
one still counts as planned, and nothing of it is seen until its turn.

Without an accelerator there is no thread, and nothing of this runs.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import _utils

from ._errors import Failure
from ._native import _start_quietly

#: batches taken from the engine: the one that is handed out, and the one after
MOST = 2
#: how long closing waits for a batch in the thread's hands; a fork waits less
STOP_SECONDS, FORK_SECONDS = 5.0, 1.0
#: how often a waiting caller looks whether the thread still lives
LOOK_SECONDS = 0.5


class Pinning:
    """A batch on its way through the thread; note says which it is if it cannot be pinned."""

    __slots__ = ("data", "done", "note", "thread")

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
        deadline = time.monotonic() + timeout if timeout > 0 else math.inf
        while not self.done.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                raise RuntimeError(f"DataLoader timed out after {timeout} seconds")
            alive = self.thread.is_alive()
            if not self.done.wait(min(left, LOOK_SECONDS) if alive else 0) and not alive:
                raise RuntimeError("Pin memory thread exited unexpectedly")
        if isinstance(self.data, ExceptionWrapper):
            return Failure(self.data, None, self.note())
        return self.data


class _Belt:
    """Both queues of torch's thread: what it gets and what it puts."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self.busy = threading.Lock()  # the thread's, while it has a batch in hand

    def get(self, timeout: float | None = None) -> tuple:
        item = self.waiting.get(timeout=timeout)
        self.busy.acquire()
        return item

    def put(self, item: tuple, timeout: float | None = None) -> None:
        pinning, pinning.data = item
        pinning.done.set()
        self.busy.release()


class Pinner:
    """The thread of one iterator. Knows nothing of it, so that it may be collected."""

    def __init__(self, device: str | None) -> None:
        self.ended = threading.Event()
        self._belt = _Belt()
        self._owner = os.getpid()
        self.thread = threading.Thread(
            target=_utils.pin_memory._pin_memory_loop,
            args=(self._belt, self._belt, _device_index(), self.ended, device),
            name="minato-pin",
            daemon=True,  # torch's is, too
        )
        _start_quietly([self.thread])
        _pinners.add(self)

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
            self.thread.join(STOP_SECONDS)

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


# ---- iterators ---------------------------------------------------------------------------


class _Raised:
    """An exception that reading a batch ahead ended with."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class PinsAhead:
    """What iterators do about pinning; a mixin."""

    _pinner: Pinner | None = None
    #: [what was received, its Pinning or what needs none], to be handed out in this order
    _pinning: deque[list] = deque(maxlen=0)
    _engine: Any
    _trace: Any
    _timeout: float
    _pin_memory_device: str | None

    def _start_pinner(self) -> None:
        self._pinning = deque()
        try:
            self._pinner = pinner = Pinner(self._pin_memory_device)
        except BaseException:
            self._shutdown_workers()
            raise
        self._pin_memory_thread = pinner.thread  # torch's names
        self._pin_memory_thread_done_event = pinner.ended

    def _stop_pinner(self) -> None:
        if self._pinner is not None:
            self._pinner.close()
            self._pinning.clear()

    def _received(self) -> Any:
        """What _receive() gives, pinned; what comes after it is sent to be if it is there."""
        pinning = self._pinning
        if self._pinner is None or not self._living():
            return self._receive()
        self._engine.asked()
        got = False
        try:
            if not pinning:
                self._hand_in(self._receive())
            if 0 < len(pinning) < MOST and self._more():
                self._hand_in_ahead()
            if not pinning:
                return None
            self._send_off(pinning[0])
            what, data = pinning[0]
            if isinstance(data, Pinning):
                data = data.result(self._timeout)
            pinning.popleft()
            got = True
            if isinstance(data, _Raised):
                raise data.error
            return what, data
        finally:
            if self._living():
                self._engine.given(got)
                if self._trace is not None:
                    self._trace.news()

    def _hand_in_ahead(self) -> None:
        try:
            self._hand_in(self._receive(wait=False))
        except Exception as error:
            self._pinning.append([None, _Raised(error)])  # not before its turn

    def _hand_in(self, received: Any) -> None:
        if received is not None:
            self._pinning.append([*received])
            del received  # the thread's hands are then the last that hold it
            self._send_off(self._pinning[-1])

    def _send_off(self, entry: list) -> None:
        """Sends what waits for it to be pinned. An interrupt may have come before that."""
        if self._pinner is not None and not isinstance(entry[1], (Pinning, Failure, _Raised)):
            note = functools.partial(self._named, entry[0])
            entry[1] = self._pinner.submit(entry[1], note)

    # ---- what an iterator says --------------------------------------------------------------

    def _living(self) -> bool:
        raise NotImplementedError

    def _shutdown_workers(self) -> None:
        raise NotImplementedError

    def _receive(self, wait: bool = True) -> Any:
        """(what, data) of the next batch, None at the end; without wait also where it is not
        complete yet. What is received counts as planned until it is handed out."""
        raise NotImplementedError

    def _more(self) -> bool:
        """Whether the batch after the one in hand is known to be of this epoch."""
        raise NotImplementedError

    @staticmethod
    def _named(what: Any) -> str:
        raise NotImplementedError


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
