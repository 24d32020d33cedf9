"""One line of a terminal that shows how far a command is."""

from __future__ import annotations

import sys


class Progress:
    """Writes to stderr; nothing where stderr is no terminal."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.shows = sys.stderr.isatty()

    def show(self, text: str, share: float | None = None) -> None:
        if self.shows:
            bar = "" if share is None else f" [{'#' * round(20 * share):20}]"
            sys.stderr.write(f"\r\x1b[K{self.command}: {text}{bar}")
            sys.stderr.flush()

    def clear(self) -> None:
        if self.shows:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
