"""Gives the core what it needs from torch (csrc/py/module/mn_state.h), its hooks for forks, and
tensors over the core's memory where torch has no C interface for that
(csrc/py/transport/mn_rows_to_tensors.c)."""

from __future__ import annotations

import os
from multiprocessing import process
from typing import Any

import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from .. import _core

_DTYPES: dict[tuple[int, int], torch.dtype] = {
    (0, 8): torch.int8,
    (0, 16): torch.int16,
    (0, 32): torch.int32,
    (0, 64): torch.int64,
    (1, 8): torch.uint8,
    (1, 16): torch.uint16,
    (1, 32): torch.uint32,
    (1, 64): torch.uint64,
    (2, 16): torch.float16,
    (2, 32): torch.float32,
    (2, 64): torch.float64,
    (4, 16): torch.bfloat16,
    (5, 64): torch.complex64,
    (5, 128): torch.complex128,
    (6, 8): torch.bool,
}
#: torch dtype -> (DLPack type code, bits)
DLPACK_CODES: dict[torch.dtype, tuple[int, int]] = {v: k for k, v in _DTYPES.items()}


def tensor_over(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that shares a writable buffer of exactly its size and keeps the buffer alive.

    The tensor alone owns its storage, which has exactly its size.
    """
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    tensor = torch.frombuffer(buffer, dtype=dtype).resize_(shape)
    if isinstance(buffer, _core.ArenaView):
        buffer.guard(tensor)
    return tensor


def _from_view(buffer: Any, code: int, bits: int, shape: tuple[int, ...]) -> torch.Tensor:
    return tensor_over(buffer, _DTYPES[code, bits], shape)


def _weak_ref(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()._weak_ref()


try:
    from .. import _torch
except ImportError:  # not built, or built for another version of torch
    _plain_tensor = None
else:
    _plain_tensor = _torch.plain_tensor


def bind() -> bool:
    """Gives the core torch's tensor type. Returns whether tensors use the C interface."""
    return _core.bind_torch(
        torch.Tensor,
        getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
        _plain_tensor,
        _from_view,
        _weak_ref,
        torch.UntypedStorage._expired,
        torch.UntypedStorage._free_weak_ref,
        _MultiProcessingDataLoaderIter,
    )


# ---- forks of the trainer while it holds batches ----------------------------------------------
#
# A forked child shares the arena's pages, so an inherited batch must not change when the parent
# drops it and continues. For each fork, the core knows whether the child, or any process that the
# child has forked, is still alive (csrc/os/mn_forks.h). Until they are gone, memory that was
# delivered at the fork is not reused.
#
# The hooks are C functions of the core: in a Python function, an interrupt could come first, and
# Python would fork nevertheless.


def _disown() -> None:
    """In a child: keeps multiprocessing's exit handler from ending the parent's daemons."""
    children: set[Any] = vars(process)["_children"]
    for child in list(children):
        if child.name == "minato-zygote":
            children.discard(child)


def watch_forks() -> None:
    """Registers the hooks; called once at import."""
    os.register_at_fork(
        before=_core.fork_begins,
        after_in_parent=_core.fork_ends,
        after_in_child=_core.forked,
    )
    os.register_at_fork(after_in_child=_disown)
