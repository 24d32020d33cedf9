"""Keeps ``torch.compile`` out of the loader. Dynamo recognises torch's own loader by its file and
does not compile it. It would compile functions of other loaders that a compiled frame calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

# torch.compiler.disable() would import Dynamo, which takes a second, and would slow each call.
_frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)


def eager(function: _Function) -> _Function:
    """Marks a function so that Dynamo compiles neither it nor the functions it calls. For functions
    that torch, C or the program calls. Calls do not become slower."""
    code, marked = function.__code__, vars(function)
    marked["_torchdynamo_disable"] = marked["_torchdynamo_disable_recursive"] = True
    marked["_torchdynamo_disable_msg"] = "it belongs to a data loader"
    if hasattr(_frames, "set_code_exec_strategy"):
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(skip, skip))
    elif hasattr(_frames, "skip_code"):  # torch 2.6, which still looks at the called functions
        _frames.skip_code(code)
    return function
