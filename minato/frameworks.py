"""Finds out whether the user's own program or a framework calls a loader. This decides what happens
when a state does not fit."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

#: packages that save and load a program's checkpoints
FRAMEWORKS = frozenset({
    "accelerate", "catalyst", "composer", "fastai", "ignite", "lightning", "lightning_fabric", "litgpt",
    "mmengine", "monai", "nemo", "pytorch_lightning", "ray", "torchdata", "torchtitan", "torchtnt",
    "torchtune", "transformers", "trl",
})  # fmt: skip

#: packages whose functions call a loader on behalf of other code
_PASSED_OVER = frozenset({__name__.partition(".")[0], "torch"})


def calling_framework(loader: Any) -> str | None:
    """The framework that calls a method of the loader, or None if other code calls it.

    The caller is the innermost function that is not minato's, not torch's, and not a method of the
    loader's class. It is a framework's function if its module belongs to one of ``FRAMEWORKS``."""
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
    True if the user's own program calls."""
    return calling_framework(loader) is None if strict is None else strict


def epoch_starts_again_warning(error: Exception) -> str:
    """The warning when a state that does not fit is not an error."""
    return (
        f"the loader cannot resume from the state that it was given: {error}. Its position in the "
        "epoch is lost. The epoch starts as the program has set it up, as with torch's loader, so "
        "samples may be delivered twice. To resume, make the loader as it was when the state was "
        "saved; to get an error instead, call load_state_dict(state, strict=True)"
    )


def other_rank_warning(error: Exception) -> str:
    """The warning for another rank's state. Lightning, for example, saves only that of rank 0."""
    return (
        f"{error}. This rank now skips the same number of its own batches. These are the batches "
        "it has delivered, unless its order comes from its own random numbers"
    )
