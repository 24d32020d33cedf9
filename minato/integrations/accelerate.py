"""Hugging Face Accelerate: makes ``Accelerator.prepare`` build minato's loader.

``prepare`` makes a new loader from its argument: it calls torch's class by name and copies
the arguments listed in its own table. ``install()`` replaces that name with minato's class
and adds minato's options to the table. Checked with Accelerate 1.15. Accelerate has its
own ``device`` option and moves batches itself, so minato's ``device`` is left out.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

from ..loader import DataLoader
from ..patch import Swaps
from . import own_options

_swaps = Swaps()


def _extra(library: Any) -> dict[str, Any]:
    """minato's options, without those that Accelerate's own wrappers use differently."""
    taken: set[str] = set()
    for name in ("DataLoaderShard", "DataLoaderDispatcher", "SkipDataLoader"):
        taken.update(inspect.signature(getattr(library, name).__init__).parameters)
    return {name: value for name, value in own_options().items() if name not in taken}


def install() -> None:
    """Makes Accelerate build minato's loaders, also from loaders of torch's class.

    Calling it again changes nothing. With ``use_stateful_dataloader=True`` Accelerate saves and
    loads the state of minato's loader; torchdata's loader is not used.

    Raises:
        ImportError: if Accelerate is missing, or this version of it is not supported.
    """
    library: Any = importlib.import_module("accelerate.data_loader")

    if _swaps.active:
        return
    table: Any = getattr(library, "_PYTORCH_DATALOADER_KWARGS", None)
    if not isinstance(table, dict) or not hasattr(library, "DataLoader"):
        raise ImportError(
            "this version of accelerate rebuilds loaders in a way that minato does not support"
        )
    adapter: Any = library.DataLoaderAdapter
    made = adapter.__init__

    @functools.wraps(made)
    def make(self: Any, dataset: Any, use_stateful_dataloader: bool = False, **kwargs: Any) -> None:
        made(self, dataset, **kwargs)
        self.use_stateful_dataloader = use_stateful_dataloader

    _swaps.acquire(
        [
            (library, "DataLoader", DataLoader),
            (adapter, "__init__", make),
            (library, "_PYTORCH_DATALOADER_KWARGS", {**table, **_extra(library)}),
        ]
    )


def uninstall() -> None:
    """Undoes ``install()``; loaders that were made in the meantime stay minato's."""
    _swaps.release()
