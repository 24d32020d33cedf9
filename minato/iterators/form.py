"""How the samples of new batches travel, as the engine was told."""

from __future__ import annotations

from .._core import Engine
from ..transport.layouts import Layout
from ..transport.rows_or_whole import Shape


class Form:
    """Tells the engine what was found out about a loader's samples."""

    def __init__(self, shape: Shape, in_parts: bool = False) -> None:
        self.shape = shape
        self.layout: Layout | None = None  # of the rows that new batches are made of
        self._in_parts = in_parts  # never a whole batch by one worker
        self._told: tuple[bool, Layout | None] | None = None

    def forget(self) -> None:
        """The engine is to be told again."""
        self._told = None

    def tell(self, engine: Engine) -> None:
        """Before anything is planned, if it has changed."""
        now = self.shape.whole, self.shape.layout
        if now == self._told:
            return
        self._told = now
        self.layout = layout = None if now[0] else now[1]
        if layout is not None:
            engine.post(layout.core, layout.pickled)
        engine.set_form(None if layout is None else layout.core)

    def makes_whole(self, index: object) -> bool:
        """Whether one worker fetches and collates the batch."""
        if self._in_parts:
            return False
        return self.shape.whole or type(index) not in (list, tuple) or not index
