"""Images that compress as photos do: those of the benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .support import benchmark

_module = benchmark("photos")


def photo(seed: int, width: int = 320, height: int = 240) -> Any:
    return _module.photo(seed, width, height)


def folder_of(at: Path, count: int, quality: int = 95, width: int = 320, height: int = 240) -> Path:
    """JPEG files in two classes."""
    found: Path = _module.folder_of(at, count, quality, width=width, height=height)
    return found
