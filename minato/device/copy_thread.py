"""``device=``: a thread that copies batches to the device ahead of ``next()``.

It replaces the thread of ``pinned.py``, because it puts batches into page-locked memory
itself. torch releases the GIL for all of its long operations: copies on the host and
calls of the driver.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._utils import ExceptionWrapper

from ..errors import Failure
from ..workers import grace
from .copies import FEWEST, Copier, Copies
from .interface import Provider
from .operators import Split
from .pinned import Belt, Pinner, Pinning

#: how often the thread checks whether copies are done: at first, and after many checks
SOON_SECONDS, LATE_SECONDS = 0.001, 0.05


class NoRoom:
    """The device had no memory for a batch. It is copied again when it is the next to deliver."""

    def __init__(self, data: Any) -> None:
        self.data = data


class Arriving(Pinning):
    """A batch on its way through the thread to the device."""

    __slots__ = ("last_try", "stage")

    what = "The thread that copies batches to the device"

    def __init__(self, stage: DeviceStage, note: Callable[[], str]) -> None:
        super().__init__(stage.thread, note)
        self.stage = stage
        self.last_try = False

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
            counts.waited_s += time.monotonic() - since
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

    @property
    def counts(self) -> Copies:
        """Counters of copies."""
        return self.copier.counts

    def submit(self, data: Any, note: Callable[[], str]) -> Arriving:
        """Takes over data. The caller should keep no reference, so that its memory is free
        as soon as it was copied."""
        arriving = Arriving(self, note)
        self._belt.waiting.put((arriving, data))
        return arriving

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
    copier.finish(grace.STAGE)


def _no_room(arriving: Arriving, data: Any, copier: Copier) -> Any:
    copier.counts.refused += 1
    copier.counts.depth = 1
    if not arriving.last_try:
        return NoRoom(data)
    return ExceptionWrapper(
        where=f"while it was copied to {copier.provider.device}, which has not enough free memory "
        "besides what the program keeps there. Use smaller batches, or keep fewer"
    )
