"""How a loader's samples travel: as rows of a layout, or as whole batches of their workers'."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
