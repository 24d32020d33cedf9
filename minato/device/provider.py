"""torch's accelerators through the interface of ``interface.py``, and the meaning of ``device=``.

Nothing here touches a device before ``provider_for`` is called for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch

from . import operators
from .interface import Driver, Job, Provider
from .operators import Finisher, differs, finisher_of

#: by process and index of a CUDA device: runs the operators there, or the reason why none run
_finishers: dict[tuple[int, int | None], Finisher | str] = {}


class TorchProvider:
    """An accelerator of torch whose module (``torch.cuda``, ``torch.xpu``, ...) has streams
    and events."""

    no_room: tuple[type[BaseException], ...] = (torch.OutOfMemoryError,)
    _finisher: Finisher

    def __init__(self, device: torch.device, module: Any) -> None:
        self.device = device
        self._module = module

    def enter(self) -> None:
        self._module.set_device(self.device)

    def stream(self) -> Any:
        return self._module.Stream(device=self.device)

    def current(self) -> Any:
        return self._module.current_stream(self.device)

    def host(self, tensor: torch.Tensor, copies: bool) -> tuple[torch.Tensor, str]:
        if not copies and tensor.is_pinned():
            return tensor, "direct"
        try:
            pinned = torch.empty_like(tensor, pin_memory=True)
        except RuntimeError:  # no more memory may be locked: the driver stages the copy itself
            return tensor, "pageable"
        return pinned.copy_(tensor), "pinned"

    def copy(self, tensor: torch.Tensor, stream: Any, cuts: list[int]) -> torch.Tensor:
        with self._module.stream(stream):
            if not cuts:
                return tensor.to(self.device, non_blocking=True)
            made = torch.empty_like(tensor, device=self.device)
            for target, source in zip(cut(made, cuts), cut(tensor, cuts)):
                target.copy_(source, non_blocking=True)
            return made

    def record(self, stream: Any) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def passed(self, event: Any) -> bool:
        return bool(event.query())

    def seconds(self, begin: Any, end: Any) -> float | None:
        return float(begin.elapsed_time(end)) / 1e3

    def uses(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def driver(self) -> Driver | None:
        return cuda_driver() if self.device.type == "cuda" else None

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def move(self, data: Any, waits: bool) -> Any:
        try:
            return data.to(self.device, non_blocking=not waits)
        except TypeError:  # a custom to() that accepts only a device
            return data.to(self.device)

    def free(self) -> int | None:
        with contextlib.suppress(Exception):
            reserved = self._module.memory_reserved(self.device)
            unused: int = reserved - self._module.memory_allocated(self.device)
            return unused + int(self._module.mem_get_info(self.device)[0])
        return None

    def operators(self) -> str | None:
        if self.device.type != "cuda" or torch.version.cuda is None:
            return f"this torch has none for {self.device.type} devices"
        key = (os.getpid(), self.device.index)
        if key not in _finishers:
            _finishers[key] = self._tried()
        found = _finishers[key]
        if isinstance(found, str):
            return found
        self._finisher = found
        return None

    def _tried(self) -> Finisher | str:
        """Loads the operators and checks them on a small batch; once in a process."""
        found = finisher_of(self.device.index)
        if isinstance(found, str):
            return found
        self._finisher = found
        try:
            return differs(self) or found
        except RuntimeError as error:  # includes running out of memory
            return f"they failed when tried on {self.device}: {error}"

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, stream: Any) -> torch.Tensor:
        with self._module.stream(stream):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def finish(self, stream: Any, job: Job) -> None:
        self._finisher.run(stream.cuda_stream, job)


def cut(tensor: torch.Tensor, cuts: list[int]) -> list[torch.Tensor]:
    """The bytes of a contiguous tensor, cut at the given offsets."""
    flat = tensor.reshape(-1).view(torch.uint8)
    ends = [0, *cuts, flat.numel()]
    return [flat[begin:end] for begin, end in zip(ends, ends[1:])]


# ---- the driver's functions that lock pages ---------------------------------------------------

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: locked for all contexts


def _functions() -> tuple[Any, list[int]]:
    """The driver's library, and the addresses of its functions that lock pages. Raises OSError if
    there is no library, AttributeError if it lacks a function. Initialises nothing.

    Contexts are entered with the driver's own functions. The runtime's functions would create a
    context on device 0 in each thread that has not chosen another.
    """
    library = ctypes.CDLL(operators.CUDA)
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


def describe() -> str:
    """For ``minato info``: how batches are copied to a CUDA device on this system."""
    pinned = "through torch's page-locked memory, with one more copy"
    try:
        _functions()
    except OSError:
        return f"none: no CUDA driver ({operators.CUDA}) was found"
    except AttributeError as error:
        return f"{pinned}: {error}"
    return f"from the memory that workers wrote, unless the driver refuses ({operators.CUDA} was found)"


# ---- device= ---------------------------------------------------------------------------------


def target(device: Any) -> torch.device:
    """The device that ``device=`` names. Calls no driver: a loader may be made where there is none.

    Raises ValueError for values that name no device for batches.
    """
    try:
        if isinstance(device, bool):
            raise TypeError("a bool is not a device")
        named = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            "device must be a device such as 'cuda', 'cuda:1' or a torch.device, "
            f"got {device!r}: {str(error).splitlines()[0]}"
        ) from None
    if named.type == "meta":
        raise ValueError("device='meta' cannot receive batches: its tensors have no values")
    return named


def torchs(device: torch.device) -> Provider:
    """torch's accelerator for a device; without an index, the calling thread's current one.
    Initialises it. Raises ValueError if it does not exist."""
    module: Any = getattr(torch, device.type, None)
    verbs = ("Stream", "Event", "stream", "current_stream", "set_device", "current_device")
    if module is None or any(not hasattr(module, verb) for verb in verbs):
        raise ValueError(
            f"device={str(device)!r}: torch {torch.__version__} has no streams for it, which "
            "copying batches ahead needs. Leave out device and copy them in your program"
        )
    if not module.is_available():
        raise ValueError(
            f"device={str(device)!r} does not exist: torch {torch.__version__} finds no "
            f"{device.type} device. `minato info` lists devices; leave out device to load to CPU"
        )
    count = module.device_count()
    if device.index is not None and device.index >= count:
        raise ValueError(
            f"device={str(device)!r} does not exist: this process sees {count} {device.type} "
            f"device(s), counted from 0. Under a launcher, use the local rank as the index"
        )
    index = module.current_device() if device.index is None else device.index
    return TorchProvider(torch.device(device.type, index), module)


#: makes the provider for a type of device; torchs() makes the others
_makers: dict[str, Callable[[torch.device], Provider]] = {}


def provider_for(device: Any) -> Provider | None:
    """The provider for ``device=``; None if batches need not be copied."""
    if device is None or (named := target(device)).type == "cpu":
        return None
    return _makers.get(named.type, torchs)(named)
