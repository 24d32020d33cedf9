"""Ray Train: makes ``prepare_data_loader`` build minato's loader.

With more than one training worker, Ray makes a new loader with a DistributedSampler: it
calls torch's class by name with explicit arguments. ``install()`` replaces that name with a
subclass of minato's loader, which adds minato's options of the loader being
prepared. Both generations of Ray Train are covered. Checked with Ray 2.60.

Call it in the training function, which runs in its own process.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
from collections.abc import Callable
from typing import Any

from .. import loader
from ..patch import Swaps
from . import options_of

_swaps = Swaps()
_options: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "minato_options_of_the_loader_being_prepared", default=None
)


class DataLoader(loader.DataLoader[Any]):
    """minato's loader as Ray makes it, with the options of the loader it replaces."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**(_options.get() or {}), **kwargs})


def _keeping(prepare: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Wraps a prepare function whose positional argument number ``at`` is the loader."""

    @functools.wraps(prepare)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        data_loader = args[at] if len(args) > at else kwargs.get("data_loader")
        token = _options.set(options_of(data_loader))
        try:
            return prepare(*args, **kwargs)
        finally:
            _options.reset(token)

    return wrapper


def _wanted() -> list[tuple[Any, str, Any]]:
    first = importlib.import_module("ray.train.torch.train_loop_utils")
    accelerator = first._TorchAccelerator
    wanted: list[tuple[Any, str, Any]] = [
        (first, "DataLoader", DataLoader),
        (accelerator, "prepare_data_loader", _keeping(accelerator.prepare_data_loader, 1)),
    ]
    try:
        second = importlib.import_module("ray.train.v2.torch.train_loop_utils")
    except ImportError:  # older versions of Ray have no second generation of Ray Train
        return wanted
    prepare = second.prepare_data_loader
    keeping = _keeping(prepare, 0)
    wanted += [(second, "DataLoader", DataLoader), (second, "prepare_data_loader", keeping)]
    public = importlib.import_module("ray.train.torch")
    if public.prepare_data_loader is prepare:
        wanted.append((public, "prepare_data_loader", keeping))
    return wanted


def install() -> None:
    """Makes Ray Train build minato's loaders, also from loaders of torch's class.

    Calling it again changes nothing. Ray drops the same arguments of torch as without minato:
    ``prefetch_factor``, ``persistent_workers`` and ``in_order``.

    Raises:
        ImportError: if Ray Train is missing, or this version of it is not supported.
    """
    if _swaps.active:
        return
    try:
        wanted = _wanted()
    except AttributeError as error:
        raise ImportError(
            f"this version of ray rebuilds loaders in a way that minato does not support: {error}"
        ) from error
    _swaps.acquire(wanted)


def uninstall() -> None:
    """Undoes ``install()``; loaders that were made in the meantime stay minato's."""
    _swaps.release()
