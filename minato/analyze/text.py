"""Numbers, and how far a command is, as people read them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


def format_rate(rate: float) -> str:
    """Four digits for people."""
    return f"{rate:,.0f}" if rate >= 10_000 else f"{rate:.4g}"


def format_seconds(value: float) -> str:
    """A time for people."""
    if value >= 1:
        return f"{value:.3g} s"
    if value >= 1e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} us"


def format_place(place: Sequence[Any] | None) -> str:
    """File and line, from the current folder where the file lies in it."""
    if not place:
        return "an unknown place"
    if os.path.basename(str(place[0])) == "stand_in.py" and os.path.dirname(str(place[0])) == _HERE:
        return "your loader"  # of a folder, or of a dataset that a factory gave
    file, here = str(place[0]), os.getcwd() + os.sep
    return f"{file.removeprefix(here)}:{place[1]}"


def format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


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
