"""Batches that are received early and delivered by a later ``next()``.

With ``device=``, or ``pin_memory=True`` and an accelerator, each ``next()`` checks, without
waiting, whether the batch after the delivered one is complete. If so, it sends that batch to the
thread of ``device/pinned.py``.

Without these, complete small batches are received together with the one that is asked for. A
program whose steps take milliseconds returns with cold caches, so the first batch costs several
times as much as the following ones. (If steps are long, batches are received one at a time. The
cost does not matter then, and each call shows how full the queue is.)

``mn_engine_type_take.c`` is told how many of those batches need nothing else, and delivers them without
running this code.

Sampler and engine stay in the program's thread. Prefetched batches still count as planned, so the
engine starts nothing more for them (mn_plan.h), and they are not visible before their turn.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

import torch

from .._core import Engine
from ..device.pinned import Pinner, Pinning
from ..errors import Failure
from ..transport.layouts import Layout
from ..transport.rows_or_whole import EngineTransport
from .receiver import Receives
from .supervisor import Supervisor
from .window import Window

#: limit for short steps. About ten pass between two decisions on the number of workers.
SHORT_STEP_NS = 25_000_000

#: small batches received at a time, and the limit on their total bytes
AT_A_TIME, AT_A_TIME_BYTES = 8, 1 << 20


class Raised:
    """An exception that was raised while a batch was received early."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class AtATime:
    """How many small batches are received at a time: few enough that workers find work while
    the program uses the earlier ones."""

    def __init__(self, transport: EngineTransport | None, window: Window) -> None:
        self._transport = transport  # None: always one
        self._window = window
        self._layout: Layout | None = None  # the layout for which _most was computed
        self._most = 1

    def most(self) -> int:
        """The number if steps are short."""
        layout = self._transport.layout if self._transport is not None else None
        if layout is not self._layout:
            self._layout, self._most = layout, 1
            if layout is not None:
                window = self._window
                fit = AT_A_TIME_BYTES // max(1, layout.core.row_bytes * window.batch_size)
                self._most = max(1, min(AT_A_TIME, window.size() // 2, fit))
        return self._most


class DeliveryQueue:
    """Delivers a receiver's batches, and makes sure that the next one is on its way."""

    engine: Engine

    def __init__(
        self,
        supervisor: Supervisor,
        receiver: Receives,
        entries: deque[list[Any]],
        at_a_time: AtATime,
    ) -> None:
        #: [description, data or Pinning or Raised] of received batches, in order of delivery
        self.entries = entries
        self.pinner: Pinner | None = None
        self.receiver = receiver
        self._supervisor = supervisor
        self._at_a_time = at_a_time
        self._waits = False  # wait_begins() was called and wait_ends() was not
        self._got = False  # the wait returned a batch

    def next(self) -> tuple[Any, Any] | None:
        """The receiver's next batch, pinned if that is asked for. Also prefetches the following
        batches if they are complete."""
        entries, supervisor = self.entries, self._supervisor
        if self._waits:  # an interrupt came before wait_ends()
            self._end_wait()
        if self.pinner is not None:
            most = self.pinner.most()
        elif entries:
            return self._handed_out()
        else:
            most = self._at_a_time.most() if supervisor.trace is None else 1
            if most == 1:
                return self.receiver.receive()
        if not supervisor.living():
            return self.receiver.receive()
        self._got, self._waits = False, True
        step = self.engine.wait_begins()
        try:
            if self.pinner is None and not 0 < step < SHORT_STEP_NS:
                most = 1
            if not entries:
                self._append(self.receiver.receive())
            if 0 < len(entries) < most:
                self._receive_ahead(most)
            if not entries:
                return None
            if self.pinner is not None:
                self._send_off(self.pinner, entries[0])
            what, data = entries[0]
            if isinstance(data, Pinning):
                data = data.result(supervisor.timeout)
            self._got = True  # a KeyboardInterrupt cannot be raised before the next line
            entries.popleft()
            if isinstance(data, Raised):
                raise data.error
            return what, data
        finally:
            self._end_wait()

    def _end_wait(self) -> None:
        supervisor = self._supervisor
        if supervisor.living():
            # With no batch and an empty queue, an interrupt has lost what was received.
            self.engine.wait_ends(self._got, bool(self.entries))
            if supervisor.trace is not None:
                supervisor.trace.news()
        self._waits = False

    def put_back(self, got: tuple[Any, Any]) -> None:
        """Returns a batch to the queue, for the next call; not if it is already pinned."""
        if self.pinner is None:
            self.entries.appendleft([*got])

    def need_nothing(self, most: int) -> int:
        """How many of the first ``most`` prefetched batches need nothing but delivery."""
        entries = self.entries
        whole = len(entries) - isinstance(entries[-1][1], (Failure, Raised))
        return min(most, whole)

    def _handed_out(self) -> tuple[Any, Any]:
        self.engine.delivered()  # first: after an interrupt it may be called twice for a batch
        what, data = self.entries.popleft()
        if self._supervisor.trace is not None:
            self._supervisor.trace.news()
        if isinstance(data, Raised):
            raise data.error
        return what, data

    def _receive_ahead(self, most: int) -> None:
        """Receives complete batches in torch's default modes. A later next() may run outside the
        inference mode or no_grad() block of this one. Tensors that are made in the default modes
        work in all modes."""
        if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
            with torch.inference_mode(False), torch.enable_grad():
                self._append_most(most)
        else:
            self._append_most(most)

    def _append_most(self, most: int) -> None:
        while len(self.entries) < most and self.receiver.more() and self._append_ahead():
            pass

    def _append_ahead(self) -> bool:
        try:
            return self._append(self.receiver.receive(wait=False))
        except Exception as error:
            self.entries.append([None, Raised(error)])  # raised in its turn
            return False

    def _append(self, received: tuple[Any, Any] | None) -> bool:
        """Adds to the queue. Returns whether more may be received: a failed batch is the last."""
        if received is None:
            return False
        entry = [*received]
        self.entries.append(entry)
        del received  # so that the pinning thread holds the last reference
        if self.pinner is not None:
            self._send_off(self.pinner, entry)
        return not isinstance(entry[1], Failure)

    def _send_off(self, pinner: Pinner, entry: list[Any]) -> None:
        """Submits a batch for pinning, unless it is already. An interrupt may have come first."""
        if not isinstance(entry[1], (Pinning, Failure, Raised)):
            note = functools.partial(self.receiver.named, entry[0])
            entry[1] = pinner.submit(entry[1], note)
