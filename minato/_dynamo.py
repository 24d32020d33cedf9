"""Keeps ``torch.compile`` out of the loader. Dynamo knows torch's own loader by its file and runs it as it
is; of other code it compiles each function that runs while a compiled one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Not torch.compiler.disable(), which imports Dynamo: that takes a second, and a call of its own each time.
_frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)


def eager(function: _Function) -> _Function:
    """Has Dynamo run a function, and all that it calls, as they are. For what torch, C or the
    program calls; that costs a call nothing."""
    code, marked = function.__code__, vars(function)
    marked["_torchdynamo_disable"] = marked["_torchdynamo_disable_recursive"] = True
    marked["_torchdynamo_disable_msg"] = "it belongs to a data loader"
    if hasattr(_frames, "set_code_exec_strategy"):
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(skip, skip))
    elif hasattr(_frames, "skip_code"):  # torch 2.6, which looks at what it calls all the same
        _frames.skip_code(code)
    return function
