"""How a loader's samples travel: as rows of a layout, or as whole batches of their workers'.

``Shape`` is what was found out about a loader, and kept from iterator to iterator; ``Form`` is what
an iterator has told its engine of it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .._core import Engine
    from .layouts import Layout

#: batches that did not fit the layout, of the last so many, before it is given up
MISFIT_WINDOW, MISFIT_LIMIT = 16, 4


class Shape:
    """How a loader's samples travel: unknown yet, as rows, or only whole."""

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self._found: dict[str, Layout] = {}
        self.whole = False
        self.unsure = False  # whole until a batch was looked at
        self.misfits: deque[bool] = deque(maxlen=MISFIT_WINDOW)

    def learn(self, layout: Layout) -> None:
        """The first layout that is found holds: iterators of several threads look for it at once,
        and each has to read its rows by the one that it wrote them by."""
        self.layout = self._found.setdefault("layout", layout)  # one step, whoever else is here

    def doubt(self) -> None:
        """Samples may be such as only the worker that makes them may collate."""
        if self.layout is None and not self.whole:
            self.whole = self.unsure = True

    def seen(self, plain: bool) -> None:
        """Of a batch's samples: whether there is nothing in them but what rows can hold."""
        if self.unsure:
            self.whole, self.unsure = not plain, plain

    def fits(self) -> None:
        """A batch's samples were in rows."""
        self.misfits.append(False)

    def misfit(self) -> None:
        """They were not. Samples that seldom fit are collated where they are made, as torch
        does."""
        self.misfits.append(True)
        if sum(self.misfits) >= MISFIT_LIMIT:
            self.whole = True


class Form:
    """Tells the engine what was found out about a loader's samples."""

    def __init__(self, shape: Shape, in_parts: bool = False) -> None:
        self.shape = shape
        self.layout: Layout | None = None  # of the rows that new batches are made of
        self._in_parts = in_parts  # never a whole batch by one worker
        self._told: tuple[bool, Layout | None] | None = None

    def tell(self, engine: Engine) -> None:
        """Before anything is planned, if it has changed. It may be told the same again: what an
        interrupt comes between is noted last."""
        now = self.shape.whole, self.shape.layout
        if now == self._told:
            return
        self.layout = layout = None if now[0] else now[1]
        if layout is not None:
            engine.post(layout.core, layout.pickled)
        engine.set_form(None if layout is None else layout.core)
        self._told = now

    def makes_whole(self, index: object) -> bool:
        """Whether one worker fetches and collates the batch."""
        if self._in_parts:
            return False
        return self.shape.whole or type(index) not in (list, tuple) or not index
