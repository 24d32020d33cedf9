"""Batches are pinned (``pin_memory=True``) or sent to a device (``device=``) ahead of ``next()``.

torch's own thread function copies a batch into pinned memory while the program works on
the previous one. ``iterators/receiver.py`` decides what is sent to it, and when. Without an
accelerator there is no thread.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import _utils

from ..errors import Failure
from ..time_limits import Deadline
from ..workers.threads import start_quietly
from .copies import FEWEST, Copier
from .operators import Split
from .provider import Provider

#: how long a fork waits for the batch being pinned; and how long closing does
FORK_SECONDS, STAGE_SECONDS = 1.0, 5.0
#: how often a waiting caller checks that the thread is alive
LOOK_SECONDS = 0.5


class Pinning:
    """A batch on its way through the thread. note names it if it cannot be pinned."""

    #: subject of the error if the thread has ended
    what = "Pin memory thread"

    def __init__(self, stage: Any, note: Callable[[], str]) -> None:
        self.data: Any = None
        self.done = threading.Event()
        self.stage = stage
        self.note = note

    def result(self, timeout: float) -> Any:
        """The pinned batch, or a Failure. May be called again after an interrupt.

        Raises RuntimeError with torch's text if the thread has died, or after timeout
        seconds (0: no timeout).
        """
        deadline = Deadline(timeout)
        while not self.done.is_set():
            part = deadline.part()
            alive = self.stage.thread.is_alive()
            if not self.done.wait(min(part, LOOK_SECONDS) if alive else 0) and not alive:
                raise RuntimeError(f"{self.what} exited unexpectedly")
        if isinstance(self.data, ExceptionWrapper):
            return Failure(self.data, None, self.note())
        return self.data


class Belt:
    """Both queues of torch's thread: its input and its output."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.busy = threading.Lock()  # held by the thread while it pins a batch

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
    """The thread of one iterator. Holds no reference to it, so that it can be collected."""

    batch = Pinning

    def __init__(self, device: str | None) -> None:
        self.ended = threading.Event()
        self._belt = Belt()
        self._owner = os.getpid()
        self.thread = self._thread(device)
        self.thread.daemon = True  # as torch's
        start_quietly([self.thread])
        _pinners.add(self)

    def _thread(self, device: str | None) -> threading.Thread:
        return threading.Thread(
            target=_utils.pin_memory._pin_memory_loop,
            args=(self._belt, self._belt, _device_index(), self.ended, device),
            name="minato-pin",
        )

    def most(self) -> int:
        """Batches to prefetch: the one being delivered, and the one after."""
        return 2

    def submit(self, data: Any, note: Callable[[], str]) -> Pinning:
        """Takes over data. The caller should keep no reference, so that its memory is free
        as soon as it was copied."""
        pinning = self.batch(self, note)
        self._belt.waiting.put((pinning, data))
        return pinning

    def close(self) -> None:
        """Ends the thread after the current batch; batches that it has not started are dropped."""
        if self._owner != os.getpid() or self.ended.is_set():
            return
        self.ended.set()
        self._belt.waiting.put((None, None))
        if self.thread is not threading.current_thread():  # garbage collection may run in it
            self.thread.join(STAGE_SECONDS)

    def pause(self) -> bool:
        """Waits until no batch is being pinned, for a fork: in the child, the locks of the
        accelerator's allocator would be held forever. Returns whether to call go_on()."""
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
    """At exit: a thread that returns from pinning later would find no interpreter."""
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


# ---- ``device=``: a thread that copies batches ahead of ``next()`` ------------------------------
#
# It replaces the thread above, because it puts batches into page-locked memory itself. torch
# releases the GIL for all of its long operations: copies on the host and calls of the driver.

#: how often the thread checks whether copies are done: at first, and after many checks
SOON_SECONDS, LATE_SECONDS = 0.001, 0.05


class NoRoom:
    """The device had no memory for a batch. It is copied again when it is the next to deliver."""

    def __init__(self, data: Any) -> None:
        self.data = data


class Arriving(Pinning):
    """A batch on its way through the thread to the device."""

    what = "The thread that copies batches to the device"
    last_try = False

    def result(self, timeout: float) -> Any:
        """The batch, ready for the calling thread's current stream, or a Failure."""
        counts, since = self.stage.copier.counts, time.monotonic()
        try:
            sent = super().result(timeout)
            if isinstance(sent, NoRoom):
                self.stage.submit_again(self, sent.data)
                del sent
                sent = super().result(timeout)
        finally:
            counts.waited += time.monotonic() - since
        if isinstance(sent, Failure):
            return sent
        copier = self.stage.copier
        try:
            return copier.hand_over(sent)
        except Exception:  # most likely from a custom to(); the next batch may work
            where = f"while it was moved to {copier.provider.device}"
            return Failure(ExceptionWrapper(where=where), None, self.note())


class DeviceStage(Pinner):
    """The thread of one iterator, and its copies. Holds no reference to the iterator."""

    batch = Arriving

    def __init__(
        self, provider: Provider, most: int, engine: Any, split: Split | None = None
    ) -> None:
        self.copier = Copier(provider, engine=engine, split=split)
        self._most = most  # how many batches ahead the loader can have under way
        super().__init__(None)

    def _thread(self, device: str | None) -> threading.Thread:
        return threading.Thread(
            target=_copy_loop, args=(self._belt, self.copier, self.ended), name="minato-device"
        )

    def most(self) -> int:
        """Batches to prefetch, including the one being delivered."""
        return min(self.copier.counts.depth, max(FEWEST, self._most))

    def submit_again(self, arriving: Arriving, data: Any) -> None:
        """Retries a batch in its turn, after the device had no memory for it."""
        arriving.last_try = True
        arriving.done.clear()
        arriving.data = None
        self._belt.waiting.put((arriving, data))


def _copy_loop(belt: Belt, copier: Copier, ended: threading.Event) -> None:
    torch.set_num_threads(1)  # for copies in ordinary memory, in this thread
    provider, pause = copier.provider, SOON_SECONDS
    entered = False
    while not ended.is_set():
        with belt.busy:  # a fork waits for this lock
            flying = copier.look()
        try:
            arriving, data = belt.get(timeout=pause if flying else None)
        except queue.Empty:
            pause = min(2 * pause, LATE_SECONDS)
            continue
        pause = SOON_SECONDS
        if arriving is None:  # the end
            belt.busy.release()
            break
        try:
            if not entered:
                provider.enter()
                entered = True
            sent: Any = copier.begin(data)
        except provider.no_room:
            sent = _no_room(arriving, data, copier)
        except Exception:
            sent = ExceptionWrapper(where=f"while it was copied to {provider.device}")
        del data
        belt.put((arriving, sent))
        del arriving, sent
    copier.finish(STAGE_SECONDS)


def _no_room(arriving: Arriving, data: Any, copier: Copier) -> Any:
    copier.counts.refused += 1
    copier.counts.depth = 1
    if not arriving.last_try:
        return NoRoom(data)
    return ExceptionWrapper(
        where=f"while it was copied to {copier.provider.device}, which has not enough free memory "
        "besides what the program keeps there. Use smaller batches, or keep fewer"
    )
