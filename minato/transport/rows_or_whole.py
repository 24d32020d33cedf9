"""How a loader's samples travel: as rows of a layout, or as batches made whole by one worker.

``SampleTransport`` holds what is known about a loader, and survives its iterators.
``EngineTransport`` holds what the engine of one iterator has been told about it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .._core import Engine
    from .layouts import Layout

#: rows are given up after this many misfits (second) among this many batches (first)
MISFIT_WINDOW, MISFIT_LIMIT = 16, 4


class SampleTransport:
    """How a loader's samples travel: not known yet, as rows, or only whole."""

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self._found: dict[str, Layout] = {}
        self.whole = False
        self.unsure = False  # whole until a batch was examined
        self.misfits: deque[bool] = deque(maxlen=MISFIT_WINDOW)

    def learn(self, layout: Layout) -> None:
        """Sets the first layout that is found. Iterators in several threads may find one at the
        same time, and each must read its rows by the layout that they were written with."""
        self.layout = self._found.setdefault("layout", layout)  # atomic among threads

    def doubt(self) -> None:
        """Assumes that only the worker that makes the samples may collate them."""
        if self.layout is None and not self.whole:
            self.whole = self.unsure = True

    def seen(self, plain: bool) -> None:
        """Records whether a batch's samples contain only what rows can hold."""
        if self.unsure:
            self.whole, self.unsure = not plain, plain

    def fits(self) -> None:
        """Records that a batch's samples were in rows."""
        self.misfits.append(False)

    def misfit(self) -> None:
        """Records that they were not. Samples that often do not fit are collated by the worker that
        makes them, as in torch."""
        self.misfits.append(True)
        if sum(self.misfits) >= MISFIT_LIMIT:
            self.whole = True


class EngineTransport:
    """Passes on to one engine what is known about a loader's samples."""

    def __init__(self, shape: SampleTransport, in_parts: bool = False) -> None:
        self.shape = shape
        self.layout: Layout | None = None  # of the rows in new batches
        self.in_parts = in_parts  # no batch is made whole by one worker
        self._sent: tuple[bool, Layout | None] | None = None

    def update(self, engine: Engine) -> None:
        """Updates the engine before planning, if anything has changed. After an interrupt, it may
        get the same again, because _sent is set last."""
        now = self.shape.whole, self.shape.layout
        if now == self._sent:
            return
        self.layout = layout = None if now[0] else now[1]
        engine.set_form(None if layout is None else layout.core)
        self._sent = now

    def makes_whole(self, index: object) -> bool:
        """Whether one worker fetches and collates the batch."""
        if self.in_parts:
            return False
        return self.shape.whole or type(index) not in (list, tuple) or not index
