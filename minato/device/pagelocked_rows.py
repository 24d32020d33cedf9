"""Rows in the arena as the source of copies: locked for the device if its driver allows it.

The device then reads the memory that workers have written, without a copy on the host.
If the driver refuses (a limit on locked memory, a container without the permission), rows are
copied through torch's page-locked memory instead.

A copy from locked memory continues after the call that started it, and minato cannot see the
program's own copies. So rows are not locked if the program receives any object that may lie in the
arena. Tensors arrive on the device, and plain values never lie in the arena. Other objects may.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, NamedTuple, Protocol

import torch

#: smaller tensors do not lie in the arena: they were copied when the batch was made
SMALLEST = 64 << 10


class Driver(NamedTuple):
    """Functions of a driver that lock pages, as arguments of ``Engine.set_page_driver``."""

    enter: int
    leave: int
    lock: int
    unlock: int
    context: int
    flags: int


class Lock(Protocol):
    """Allows the device to read a range as long as the lock lives."""

    @property
    def cuts(self) -> list[int]:
        """Offsets that no copy may cross."""


class Slots:
    """The arena of one engine, for one device."""

    def __init__(self, engine: Any, driver: Driver | None) -> None:
        self._engine = engine
        self.locks = driver is not None
        if driver is not None:
            engine.set_page_driver(*driver)

    def lock(self, tensor: torch.Tensor) -> Lock | None:
        """A lock for copies of a tensor; None if it is not in the arena, or may not be locked."""
        if not self.locks or tensor.nbytes < SMALLEST or not tensor.is_contiguous():
            return None
        try:
            lock: Lock | None = self._engine.lock_pages(tensor.data_ptr(), tensor.nbytes)
        except RuntimeError:  # the engine was closed in the meantime
            return None
        return lock

    def stop(self) -> None:
        """Stops locking, and unlocks what is not being read."""
        self.locks = False
        with contextlib.suppress(RuntimeError):  # the engine was closed in the meantime
            self._engine.set_page_driver()

    def page_locks(self) -> tuple[int, int]:
        """Locked bytes, and the driver's error number when it refused (0: it did not)."""
        try:
            locked: tuple[int, int] = self._engine.page_locks()
        except RuntimeError:
            return 0, 0
        return locked


#: the driver's library
CUDA = "libcuda.so.1"
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: locked for all contexts


def _functions() -> tuple[Any, list[int]]:
    """The driver's library, and the addresses of its functions that lock pages. Raises OSError if
    there is no library, AttributeError if it lacks a function. Initialises nothing.

    Contexts are entered with the driver's own functions. The runtime's functions would create a
    context on device 0 in each thread that has not chosen another.
    """
    library = ctypes.CDLL(CUDA)
    names = (
        "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuMemHostRegister_v2",
        "cuMemHostUnregister",
    )  # fmt: skip
    found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]
    return library, [address or 0 for address in found]


def cuda_driver() -> Driver | None:
    """The driver, with the calling thread's context, which torch has made current. None without a
    context, or if the driver lacks these functions."""
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
    """Whether the driver's library exists."""
    try:
        ctypes.CDLL(CUDA)
    except OSError:
        return False
    return True


def describe() -> str:
    """For ``minato info``: how batches are copied to a CUDA device on this system."""
    pinned = "through torch's page-locked memory, with one more copy"
    try:
        _functions()
    except OSError:
        return f"none: no CUDA driver ({CUDA}) was found"
    except AttributeError as error:
        return f"{pinned}: {error}"
    return f"from the memory that workers wrote, unless the driver refuses ({CUDA} was found)"


def cut(tensor: torch.Tensor, cuts: list[int]) -> list[torch.Tensor]:
    """The bytes of a contiguous tensor, cut at the given offsets."""
    flat = tensor.reshape(-1).view(torch.uint8)
    ends = [0, *cuts, flat.numel()]
    return [flat[begin:end] for begin, end in zip(ends, ends[1:])]
