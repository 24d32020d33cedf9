"""Rows in the arena as the source of copies: locked for the device where its driver lets them be.

Then what workers have written is read by the device itself, and nothing is copied on the host.
What the driver refuses (a limit on locked memory, a container without the right) is copied
through page-locked memory of torch's instead.

A copy from locked memory goes on after the call that began it, and of the program's own copies
minato knows nothing. So nothing is locked where the program gets anything that may lie in the
arena: what is neither a tensor, which arrives on the device, nor plain.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, NamedTuple, Protocol

import torch

#: a tensor of fewer bytes is no slot of the arena's: it was copied when the batch was made
SMALLEST = 64 << 10


class Driver(NamedTuple):
    """Functions of a driver that lock pages, as ``Engine.set_page_driver`` takes them."""

    enter: int
    leave: int
    lock: int
    unlock: int
    context: int
    flags: int


class Lock(Protocol):
    """Lets a range be read as long as it lives."""

    @property
    def cuts(self) -> list[int]:
        """Offsets that no copy may reach across."""


class Slots:
    """The arena of one engine, for one device."""

    def __init__(self, engine: Any, driver: Driver | None) -> None:
        self._engine = engine
        self.locks = driver is not None
        if driver is not None:
            engine.set_page_driver(*driver)

    def lock(self, tensor: torch.Tensor) -> Lock | None:
        """For the copies of a tensor; None: it is not in the arena, or may not be locked."""
        if not self.locks or tensor.nbytes < SMALLEST or not tensor.is_contiguous():
            return None
        try:
            lock: Lock | None = self._engine.lock_pages(tensor.data_ptr(), tensor.nbytes)
        except RuntimeError:  # the engine was closed meanwhile
            return None
        return lock

    def stop(self) -> None:
        """Nothing more is locked, and what is not being read is unlocked."""
        self.locks = False
        with contextlib.suppress(RuntimeError):  # the engine was closed meanwhile
            self._engine.unlock_pages()

    def told(self) -> tuple[int, int]:
        """Bytes that are locked, and what the driver said when it refused; 0: it did not."""
        try:
            locked: tuple[int, int] = self._engine.page_locks()
        except RuntimeError:
            return 0, 0
        return locked


#: the library of the driver
CUDA = "libcuda.so.1"
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: locked for all contexts


def _functions() -> tuple[Any, list[int]]:
    """The driver's library, and where it has what locks pages. Raises OSError without it, and
    AttributeError where it has them not. Initialises nothing.

    Contexts are entered by the driver's own functions: those of the runtime would make one on
    device 0 in each thread that was never told of another.
    """
    library = ctypes.CDLL(CUDA)
    names = (
        "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuMemHostRegister_v2",
        "cuMemHostUnregister",
    )  # fmt: skip
    found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]
    return library, [address or 0 for address in found]


def cuda_driver() -> Driver | None:
    """In the calling thread's context, which torch has made current; None without one, or where
    the driver has not these functions."""
    try:
        library, (enter, leave, lock, unlock) = _functions()
        context = ctypes.c_void_p()
        failed = library.cuCtxGetCurrent(ctypes.byref(context))
    except (OSError, AttributeError):
        return None
    if failed or not context.value:
        return None
    return Driver(enter, leave, lock, unlock, context.value, _PORTABLE)


def has_driver() -> bool:
    """Whether the driver's library is here."""
    try:
        ctypes.CDLL(CUDA)
    except OSError:
        return False
    return True


def told() -> str:
    """For ``minato info``: how batches can go to a CUDA device from here."""
    pinned = "through page-locked memory of torch's, one copy more"
    try:
        _functions()
    except OSError:
        return f"{pinned}: there is no {CUDA}, the driver's library"
    except AttributeError as error:
        return f"{pinned}: {error}"
    return f"from where workers wrote them, unless the driver refuses ({CUDA} is there)"


def cut(tensor: torch.Tensor, cuts: list[int]) -> list[torch.Tensor]:
    """The bytes of a contiguous tensor, cut at these offsets."""
    flat = tensor.reshape(-1).view(torch.uint8)
    ends = [0, *cuts, flat.numel()]
    return [flat[begin:end] for begin, end in zip(ends, ends[1:])]
