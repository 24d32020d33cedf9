"""Hugging Face Accelerate: ``Accelerator.prepare`` builds minato's loader.

``prepare`` makes a new loader from the one it is given: it names torch's class and copies
the arguments listed in a table of its own. ``install()`` puts minato's class in the place
of that name and minato's options into that table. Checked with Accelerate 1.15. Accelerate has
a ``device`` of its own, to which it moves batches itself: minato's is left out.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from ..loader import DataLoader
from ..patch import Swaps
from . import own_options

_swaps = Swaps()


def _extra(library: Any) -> dict[str, Any]:
    """minato's options, without those that Accelerate's own wrappers have a meaning for."""
    taken: set[str] = set()
    for name in ("DataLoaderShard", "DataLoaderDispatcher", "SkipDataLoader"):
        taken.update(inspect.signature(getattr(library, name).__init__).parameters)
    return {name: value for name, value in own_options().items() if name not in taken}


def install() -> None:
    """Loaders that Accelerate prepares are minato's, those given as torch's included.

    Calling it again changes nothing. Not for ``use_stateful_dataloader=True``: the loader
    of torchdata that this asks for refuses minato's options.

    Raises:
        ImportError: without Accelerate, or with a version that is built otherwise.
    """
    library: Any = importlib.import_module("accelerate.data_loader")

    if _swaps.active:
        return
    table: Any = getattr(library, "_PYTORCH_DATALOADER_KWARGS", None)
    if not isinstance(table, dict) or not hasattr(library, "DataLoader"):
        raise ImportError(
            "this version of accelerate rebuilds loaders in a way that minato does not know"
        )
    _swaps.acquire(
        [
            (library, "DataLoader", DataLoader),
            (library, "_PYTORCH_DATALOADER_KWARGS", {**table, **_extra(library)}),
        ]
    )


def uninstall() -> None:
    """Undoes ``install()``; loaders made meanwhile stay minato's."""
    _swaps.release()
