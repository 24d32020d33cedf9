"""Batches that were received before their turn, and are handed out by a later ``next()``.

With ``device=``, or ``pin_memory=True`` and an accelerator, each ``next()`` looks, without
waiting, whether the batch after the one it hands out is complete, and sends it to the thread of
``device/copy_thread.py`` or ``device/pinned.py``.

Without, small batches that are complete are received along with the one that is asked for: a
program whose steps take milliseconds comes back with cold caches, and then the first batch
costs several times what those after it do. (One by one where steps are long: that is no matter
then, and each time that it asks is a sign of how full the queue is.)

How many of those ask for nothing else is told to ``mn_delivery.c``, which hands them out without
coming here.

Sampler and engine stay in the program's thread. What is prefetched still counts as planned, the
engine starts nothing more for it (mn_plan.h), and nothing of it is seen until its turn.
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
from ..transport.rows_or_whole import Form
from .receiver import Receives
from .supervisor import Supervisor
from .window import Window

#: steps that are short. Some ten go by while the number of workers is decided on once.
SHORT_STEP_NS = 25_000_000

#: small batches received at a time, and what they may hold of memory together
AT_A_TIME, AT_A_TIME_BYTES = 8, 1 << 20


class Raised:
    """An exception that receiving a batch before its turn ended with."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class AtATime:
    """How many small batches are received at a time: few enough that workers find work while
    the program has those before it."""

    def __init__(self, form: Form | None, window: Window) -> None:
        self._form = form  # None: always one
        self._window = window
        self._layout: Layout | None = None  # of the rows that most was found for
        self._most = 1

    def most(self) -> int:
        """Where steps are short."""
        layout = self._form.layout if self._form is not None else None
        if layout is not self._layout:
            self._layout, self._most = layout, 1
            if layout is not None:
                window = self._window
                fit = AT_A_TIME_BYTES // max(1, layout.core.row_bytes * window.batch_size)
                self._most = max(1, min(AT_A_TIME, window.size() // 2, fit))
        return self._most


class Prefetcher:
    """Hands out what a receiver has, and sees to it that the next is on its way."""

    engine: Engine

    def __init__(
        self,
        supervisor: Supervisor,
        receiver: Receives,
        queue: deque[list[Any]],
        at_a_time: AtATime,
    ) -> None:
        #: [what was received, its data or Pinning or Raised], to be handed out in this order
        self.queue = queue
        self.pinner: Pinner | None = None
        self.receiver = receiver
        self._supervisor = supervisor
        self._at_a_time = at_a_time
        self._waits = False  # the engine was told that a wait begins, and not yet that it has ended
        self._got = False  # it has given a batch

    def next(self) -> tuple[Any, Any] | None:
        """What the receiver gives, pinned where that is asked for; what comes after it is
        prefetched if it is there."""
        queue, supervisor = self.queue, self._supervisor
        if self._waits:  # an interrupt came before that
            self._end_wait()
        if self.pinner is not None:
            most = self.pinner.most()
        elif queue:
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
            if not queue:
                self._append(self.receiver.receive())
            if 0 < len(queue) < most:
                self._receive_ahead(most)
            if not queue:
                return None
            self._send_off(queue[0])
            what, data = queue[0]
            if isinstance(data, Pinning):
                data = data.result(supervisor.timeout)
            self._got = True  # at once with the next line, as far as an interrupt can see
            queue.popleft()
            if isinstance(data, Raised):
                raise data.error
            return what, data
        finally:
            self._end_wait()

    def _end_wait(self) -> None:
        supervisor = self._supervisor
        if supervisor.living():
            # Without one, and with none here: an interrupt has lost what was received.
            self.engine.wait_ends(self._got, bool(self.queue))
            if supervisor.trace is not None:
                supervisor.trace.news()
        self._waits = False

    def put_back(self, got: tuple[Any, Any]) -> None:
        """What next() gave comes with the next call again; not where it is pinned by now."""
        if self.pinner is None:
            self.queue.appendleft([*got])

    def need_nothing(self, most: int) -> int:
        """Of so many that are prefetched: how many ask for nothing but being handed out."""
        queue = self.queue
        whole = len(queue) - isinstance(queue[-1][1], (Failure, Raised))
        return min(most, whole)

    def _handed_out(self) -> tuple[Any, Any]:
        self.engine.delivered()  # first: of one that an interrupt leaves that may be said twice
        what, data = self.queue.popleft()
        if self._supervisor.trace is not None:
            self._supervisor.trace.news()
        if isinstance(data, Raised):
            raise data.error
        return what, data

    def _receive_ahead(self, most: int) -> None:
        """Receives what is complete, in torch's default modes: a later next() may be called outside of
        the inference mode, or with the gradients, that this one is called in. Tensors that are made
        in the default modes serve in any."""
        if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
            with torch.inference_mode(False), torch.enable_grad():
                self._append_most(most)
        else:
            self._append_most(most)

    def _append_most(self, most: int) -> None:
        while len(self.queue) < most and self.receiver.more() and self._append_ahead():
            pass

    def _append_ahead(self) -> bool:
        try:
            return self._append(self.receiver.receive(wait=False))
        except Exception as error:
            self.queue.append([None, Raised(error)])  # not before its turn
            return False

    def _append(self, received: tuple[Any, Any] | None) -> bool:
        """Whether more may be received: what failed is the last."""
        if received is None:
            return False
        entry = [*received]
        self.queue.append(entry)
        del received  # the thread's hands are then the last that hold it
        self._send_off(entry)
        return not isinstance(entry[1], Failure)

    def _send_off(self, entry: list[Any]) -> None:
        """Sends what waits for it to be pinned. An interrupt may have come before that."""
        if self.pinner is not None and not isinstance(entry[1], (Pinning, Failure, Raised)):
            note = functools.partial(self.receiver.named, entry[0])
            entry[1] = self.pinner.submit(entry[1], note)
