"""For libraries that rebuild a loader from torch's class: one module a library.

``minato.integrations.accelerate.install()`` and ``minato.integrations.ray.install()`` make
that library build minato's class, with minato's own options kept. Each has an
``uninstall()``. Nothing here is imported by ``import minato``.
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
    """minato's options that torch's loader does not have, with their defaults."""
    (torch_class,) = DataLoader.__bases__
    theirs = inspect.signature(torch_class).parameters
    mine = inspect.signature(DataLoader).parameters
    return {name: p.default for name, p in mine.items() if name not in theirs}


def options_of(loader: Any) -> dict[str, Any]:
    """The own options of a loader; empty for one of torch's."""
    if not isinstance(loader, DataLoader):
        return {}
    return {name: option(loader, name) for name in own_options()}
