"""Numbers and the progress of a command as people write and read them. Imports nothing of the
package, see commands/info.py."""

from __future__ import annotations

import re
import sys

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse_bytes(text: int | str, name: str = "memory_limit") -> int:
    """Converts an int or text such as ``"8GiB"``, ``"500 MB"`` to bytes; raises ValueError."""
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", str(text).lower())
        if match is None:
            raise ValueError(
                f"{name} must be a number of bytes (an int) or text such as '8GiB', got {text!r}"
            )
        number, unit, binary = match.groups()
        scale = 1024 ** " kmgt".index(unit or " ") if binary else _UNITS[unit]
        size = int(float(number) * scale)
    if size <= 0:
        raise ValueError(f"{name} must be positive, got {text!r}")
    return size


def sized(count: float) -> str:
    """A number of bytes, for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def seconds(value: float) -> str:
    """Formats a duration."""
    if value < 0.0995:
        return f"{value * 1e3:.3g} ms" if value >= 0.001 else f"{value * 1e6:.3g} us"
    return f"{value:.1f} s" if value < 600 else f"{value / 60:.0f} min"


def counted(count: int, noun: str) -> str:
    """For example "1 job", "2 jobs"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_rate(rate: float) -> str:
    """Four digits for people."""
    return f"{rate:,.0f}" if rate >= 10_000 else f"{rate:.4g}"


def format_seconds(value: float) -> str:
    """A time, with three digits."""
    scale, unit = (1.0, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 else (1e6, "us")
    return f"{value * scale:.3g} {unit}"


def format_bytes(count: float) -> str:
    """As storage is sold: in powers of 1,000."""
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
