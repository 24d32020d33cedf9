"""For libraries that rebuild a loader with torch's class: one module per library.

``minato.integrations.accelerate.install()`` and ``minato.integrations.ray.install()`` make
the library build minato's class instead, with the loader's minato options. Each module also has an
``uninstall()``. ``import minato`` imports nothing of this.
"""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

from ..loader import DataLoader
from ..option_values import option


def __getattr__(name: str) -> ModuleType:
    if name not in ("accelerate", "ray"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def own_options() -> dict[str, Any]:
    """The options that minato's loader has and torch's does not, with their defaults."""
    (torch_class,) = DataLoader.__bases__
    theirs = inspect.signature(torch_class).parameters
    mine = inspect.signature(DataLoader).parameters
    return {name: p.default for name, p in mine.items() if name not in theirs}


def options_of(loader: Any) -> dict[str, Any]:
    """minato's options of a loader; empty for a loader of torch's class."""
    if not isinstance(loader, DataLoader):
        return {}
    return {name: option(loader, name) for name in own_options()}
