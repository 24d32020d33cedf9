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

#: names of the package that has Lightning's trainer
_LIGHTNINGS = ("lightning", "pytorch_lightning")

#: packages whose functions call a loader on behalf of other code
_PASSED_OVER = frozenset({__name__.partition(".")[0], "torch"})


def calling_framework(loader: Any) -> str | None:
    """The framework that calls a method of the loader, or None if other code calls it.

    The caller is the innermost function that is not minato's, not torch's, and not a method of the
    loader's class. It is a framework's function if its module belongs to one of ``FRAMEWORKS``."""
    package = _package_of(_caller(loader))
    return package if package in FRAMEWORKS else None


def _caller(loader: Any) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (_package_of(frame) in _PASSED_OVER or _is_method_of(loader, frame)):
        frame = frame.f_back
    return frame


def _package_of(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_method_of(loader: Any, frame: FrameType) -> bool:
    code = frame.f_code
    methods = (vars(kind).get(code.co_name) for kind in type(loader).__mro__)
    return any(getattr(method, "__code__", None) is code for method in methods)


def begins_next_epoch(loader: Any) -> bool:
    """Whether Lightning's trainer loads a state in the middle of an epoch, and goes on with the next
    epoch at once, with the iterator that it makes now.

    It does so if its checkpoint was saved after the last training step of an epoch, before it had
    counted that step as completed (``ModelCheckpoint(every_n_train_steps=...)``): see reset() of its
    FitLoop and _TrainingEpochLoop. These are Lightning's own counters, from the checkpoint. Its
    versions before 2.5 have no ``restarted_on_train_batch_end``, and ask for the rest of the epoch."""
    frame = _caller(loader)  # CombinedLoader's, which the FitLoop calls
    if frame is None or frame.f_back is None or _package_of(frame) not in _LIGHTNINGS:
        return False
    steps = getattr(frame.f_back.f_locals.get("self"), "epoch_loop", None)
    done = getattr(steps, "batch_progress", None)
    if done is None or not hasattr(type(steps), "restarted_on_train_batch_end"):
        return False
    counted = done.total.completed + 1 == done.total.processed == done.total.started == done.total.ready
    return bool(done.is_last_batch and counted)
