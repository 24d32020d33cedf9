"""Images that compress as photos do: those of the benchmark."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

_PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "analyze" / "photos.py"


def _benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("benchmark_photos", _PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_module = _benchmark()


def photo(seed: int, width: int = 320, height: int = 240) -> Any:
    return _module.photo(seed, width, height)


def folder_of(at: Path, count: int, quality: int = 95, width: int = 320, height: int = 240) -> Path:
    """JPEG files in two classes."""
    found: Path = _module.folder_of(at, count, quality, width=width, height=height)
    return found
