"""``device=``: a thread that copies batches to the device ahead of ``next()``.

It stands where the thread of ``pinned.py`` does without ``device=``, and takes its place: it
puts batches into page-locked memory itself.  All that it does at length, copies on the host
and calls of the driver, torch does without the GIL.
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

#: how often the thread looks whether copies are done: at first, and after it has looked often
SOON_SECONDS, LATE_SECONDS = 0.001, 0.05


class NoRoom:
    """The device had no memory for a batch: it is copied once more in its turn."""

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
        """The batch, for the calling thread's current stream, or a Failure."""
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
        except Exception:  # of an object's own to(), most likely; the next batch may be well
            where = f"while it was moved to {copier.provider.device}"
            return Failure(ExceptionWrapper(where=where), None, self.note())


class DeviceStage(Pinner):
    """The thread of one iterator, and its copies. Knows nothing of the iterator."""

    def __init__(
        self, provider: Provider, most: int, engine: Any, split: Split | None = None
    ) -> None:
        self.copier = Copier(provider, engine=engine, split=split)
        self._most = most  # batches ahead that the loader can have on their way
        super().__init__(None)

    def _thread(self, device: str | None) -> threading.Thread:
        return threading.Thread(
            target=_copy_loop, args=(self._belt, self.copier, self.ended), name="minato-device"
        )

    def most(self) -> int:
        """Batches that are prefetched, the one that is handed out among them."""
        return min(self.copier.counts.depth, max(FEWEST, self._most))

    @property
    def counts(self) -> Copies:
        """What was copied."""
        return self.copier.counts

    def submit(self, data: Any, note: Callable[[], str]) -> Arriving:
        """Takes over data; the caller should keep no reference, so that its memory is free
        as soon as it was copied."""
        arriving = Arriving(self, note)
        self._belt.waiting.put((arriving, data))
        return arriving

    def submit_again(self, arriving: Arriving, data: Any) -> None:
        """Its turn has come, and the device had no memory for it before."""
        arriving.last_try = True
        arriving.done.clear()
        arriving.data = None
        self._belt.waiting.put((arriving, data))


def _copy_loop(belt: Belt, copier: Copier, ended: threading.Event) -> None:
    torch.set_num_threads(1)  # of copies in ordinary memory, in this thread
    provider, pause = copier.provider, SOON_SECONDS
    entered = False
    while not ended.is_set():
        with belt.busy:  # a fork waits for it
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
        where=f"while it was copied to {copier.provider.device}, where there is no room for it "
        "beside what the program keeps there. Smaller batches, or fewer kept, would help"
    )
