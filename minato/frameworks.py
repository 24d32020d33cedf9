"""Whether a loader is called by the user's own program or by a framework, which decides what
happens when a state does not fit."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

#: packages that save and load checkpoints for a program
FRAMEWORKS = frozenset({
    "accelerate", "catalyst", "composer", "fastai", "ignite", "lightning", "lightning_fabric", "litgpt",
    "mmengine", "monai", "nemo", "pytorch_lightning", "ray", "torchdata", "torchtitan", "torchtnt",
    "torchtune", "transformers", "trl",
})  # fmt: skip

#: packages whose functions call a loader for some other code
_PASSED_OVER = frozenset({__name__.partition(".")[0], "torch"})


def calling_framework(loader: Any) -> str | None:
    """The framework that calls a method of the loader, or None if other code does.

    The caller is the innermost function that is neither minato's nor torch's nor a method of the
    loader, which a class derived from minato's may have. It is a framework's if its module
    belongs to one of ``FRAMEWORKS``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _PASSED_OVER and not _is_method_of(loader, frame):
            return package if package in FRAMEWORKS else None
        frame = frame.f_back
    return None


def _is_method_of(loader: Any, frame: FrameType) -> bool:
    code = frame.f_code
    methods = (vars(kind).get(code.co_name) for kind in type(loader).__mro__)
    return any(getattr(method, "__code__", None) is code for method in methods)


def is_strict(strict: bool | None, loader: Any) -> bool:
    """Whether a state that does not fit the loader is an error: ``strict`` if it is given, else
    whether the user's own program calls."""
    return calling_framework(loader) is None if strict is None else strict


def begins_instead(error: Exception) -> str:
    """The warning where it is none."""
    return (
        f"the loader cannot go on from the state that it was given: {error}. Its place in the epoch "
        "is lost, so the epoch begins as the program has set it up, as with torch's loader, and "
        "samples may come again. To go on instead, make the loader as it was when the state was "
        "saved; to have this raised, call load_state_dict(state, strict=True)"
    )


def goes_on_in_step(error: Exception) -> str:
    """The warning where the state is another rank's: Lightning, for one, saves that of rank 0."""
    return (
        f"{error}. This rank now skips as many batches of its own: the ones that it has had, if its "
        "order does not come from random numbers of its own"
    )
