"""Batches that were received before their turn, and are handed out by a later ``next()``.

With ``pin_memory=True`` and an accelerator each ``next()`` looks, without waiting, whether the
batch after the one it hands out is complete, and sends it to the thread of
``device/pinned.py``.

Without, small batches that are complete are received along with the one that is asked for: a
program whose steps take milliseconds comes back with cold caches, and then the first batch
costs several times what those after it do. (One by one where steps are long: that is no matter then,
and each time that it asks is a sign of how full the queue is.)

How many of those ask for nothing else is told to ``mn_hand.c``, which hands them out without
coming here.

Sampler and engine stay in the program's thread. What is in hand still counts as planned, the
engine starts nothing more for it (mn_plan.h), and nothing of it is seen until its turn.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

from .. import _core
from ..device.pinned import Pinner, Pinning
from ..errors import Failure

#: batches in hand where they are pinned: the one that is handed out, and the one after
PINNED = 2

#: steps that are short. Some ten go by while the number of workers is decided on once.
SHORT_STEP_NS = 25_000_000


class Raised:
    """An exception that receiving a batch before its turn ended with."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class ReceivesAhead(_core.HandsOut):
    """What iterators do about it; a mixin."""

    _pinner: Pinner | None = None
    #: [what was received, its data or Pinning or Raised], to be handed out in this order
    _in_hand: deque[list] = deque(maxlen=0)
    #: batches that are received at a time, where nothing is pinned and steps are short
    _at_a_time = 1
    _engine: Any
    _trace: Any
    _timeout: float
    _pin_memory_device: str | None

    def _start_pinner(self) -> None:
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
        self._drop_in_hand()

    def _drop_in_hand(self) -> None:
        self._grant(0)
        self._in_hand.clear()

    def _received(self) -> Any:
        """What _receive() gives, pinned where that is asked for; what comes after it is taken
        in hand if it is there."""
        in_hand = self._in_hand
        if in_hand and self._pinner is None:
            return self._handed_out()
        if self._pinner is None and self._at_a_time == 1 or not self._living():
            return self._receive()
        step = self._engine.asked()
        got = False
        try:
            most = PINNED if self._pinner is not None else self._at_a_time
            if self._pinner is None and not 0 < step < SHORT_STEP_NS:
                most = 1
            if not in_hand:
                self._take_in_hand(self._receive())
            while 0 < len(in_hand) < most and self._more() and self._take_ahead():
                pass
            if not in_hand:
                return None
            self._send_off(in_hand[0])
            what, data = in_hand[0]
            if isinstance(data, Pinning):
                data = data.result(self._timeout)
            in_hand.popleft()
            got = True
            if isinstance(data, Raised):
                raise data.error
            return what, data
        finally:
            if self._living():
                self._engine.given(got)
                if self._trace is not None:
                    self._trace.news()

    def _handed_out(self) -> Any:
        self._grant(0)  # it counted on this one
        what, data = self._in_hand.popleft()
        self._engine.handed()
        if self._trace is not None:
            self._trace.news()
        if isinstance(data, Raised):
            raise data.error
        return what, data

    def _take_ahead(self) -> bool:
        try:
            return self._take_in_hand(self._receive(wait=False))
        except Exception as error:
            self._in_hand.append([None, Raised(error)])  # not before its turn
            return False

    def _take_in_hand(self, received: Any) -> bool:
        """Whether more may be taken: what failed is the last."""
        if received is None:
            return False
        entry = [*received]
        self._in_hand.append(entry)
        del received  # the thread's hands are then the last that hold it
        self._send_off(entry)
        return not isinstance(entry[1], Failure)

    def _send_off(self, entry: list) -> None:
        """Sends what waits for it to be pinned. An interrupt may have come before that."""
        if self._pinner is not None and not isinstance(entry[1], (Pinning, Failure, Raised)):
            note = functools.partial(self._named, entry[0])
            entry[1] = self._pinner.submit(entry[1], note)

    def _grants(self, most: int, progress: Any) -> None:
        """So many batches in hand ask for nothing but being handed out (mn_hand.c)."""
        in_hand = self._in_hand
        whole = len(in_hand) - isinstance(in_hand[-1][1], (Failure, Raised))
        if min(most, whole) > 0:
            self._grant(min(most, whole), in_hand, self._engine, progress)

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
