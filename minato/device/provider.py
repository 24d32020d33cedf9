"""torch's accelerators, CUDA's driver, and the meaning of ``device=``.

Nothing here touches a device before ``provider_for`` is called for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

#: code for devices, built if there was a compiler for it
KERNELS = os.path.join(os.path.dirname(__file__), "kernels.fatbin")
NOT_BUILT = "not built: minato was installed without nvcc"
#: by process and index of a CUDA device: runs the operators there, or the reason why none run
_finishers: dict[tuple[int, int | None], Finisher | str] = {}


class Driver(NamedTuple):
    """Functions of a driver that lock pages, as arguments of ``Engine.set_page_driver``."""

    enter: int
    leave: int
    lock: int
    unlock: int
    context: int
    flags: int


class Job(NamedTuple):
    """What ``Finisher.run`` finishes: the images or labels of a batch. Places are addresses on the
    device."""

    which: int  # 0: images, 1: labels
    dtypes: tuple[int, int]  # codes of those before and after
    shape: tuple[int, ...]  # samples, channels, depth, height, width
    source: int
    target: int
    recipes: int
    steps: int  # of each recipe
    windows: int = 0  # if set, samples are windows of the cases, and there is no source
    cases: int = 0
    n_cases: int = 0


def codes() -> dict[str, int]:
    """The kernel's codes of dtypes, by name."""
    from ..ops.operators import DTYPES  # not at import: most programs use no operators

    return DTYPES


class Provider:
    """An accelerator of torch whose module (``torch.cuda``, ``torch.xpu``, ...) has streams
    and events. ``copies.py`` decides what is copied when, and what must wait for what, using only its
    methods. Tests can therefore substitute a device that finishes late, out of order or never."""

    #: exceptions of copy() when the device has no memory left
    no_room: tuple[type[BaseException], ...] = (torch.OutOfMemoryError,)
    _finisher: Finisher

    def __init__(self, device: torch.device, module: Any) -> None:
        self.device = device
        self._module = module

    def enter(self) -> None:
        """Declares that the calling thread works for this device only from now on."""
        self._module.set_device(self.device)

    def stream(self) -> Any:
        """A new stream; copies on it run one after the other."""
        return self._module.Stream(device=self.device)

    def current(self) -> Any:
        """The calling thread's current stream."""
        return self._module.current_stream(self.device)

    def host(self, tensor: torch.Tensor, copies: bool) -> tuple[torch.Tensor, str]:
        """The tensor in memory that copies can read in the background, and how: a key of
        ``Copies.through``. The tensor itself, or with ``copies``, or if necessary, a copy in
        page-locked memory."""
        if not copies and tensor.is_pinned():
            return tensor, "direct"
        try:
            pinned = torch.empty_like(tensor, pin_memory=True)
        except RuntimeError:  # no more memory may be locked: the driver stages the copy itself
            return tensor, "pageable"
        return pinned.copy_(tensor), "pinned"

    def copy(self, tensor: torch.Tensor, stream: Any, cuts: list[int]) -> torch.Tensor:
        """Starts copying a tensor to the device, in parts if no copy may cross the offsets in cuts.
        The tensor must not change until an event recorded after this call has passed."""
        with self._module.stream(stream):
            if not cuts:
                return tensor.to(self.device, non_blocking=True)
            made = torch.empty_like(tensor, device=self.device)
            for target, source in zip(cut(made, cuts), cut(tensor, cuts)):
                target.copy_(source, non_blocking=True)
            return made

    def record(self, stream: Any) -> Any:
        """An event that passes when all current work of the stream is done."""
        event = self._module.Event(enable_timing=True)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Later work of the stream starts after the event. The host does not wait."""
        stream.wait_event(event)

    def passed(self, event: Any) -> bool:
        """Whether an event has passed; does not wait."""
        return bool(event.query())

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Time between two passed events; None if the device cannot tell."""
        return float(begin.elapsed_time(end)) / 1e3

    def uses(self, tensor: torch.Tensor, stream: Any) -> None:
        """The tensor's device memory is not reused before the work that the stream has when
        the tensor dies is done."""
        tensor.record_stream(stream)

    def driver(self) -> Driver | None:
        """Functions that lock pages for the device; None if there are none. Called in the
        thread that has called enter()."""
        return cuda_driver() if self.device.type == "cuda" else None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on the device."""
        return tensor.device == self.device

    def move(self, data: Any, waits: bool) -> Any:
        """Moves an object with torch's ``to()`` to the device on the calling thread's own stream.
        waits: return when the move is done."""
        try:
            return data.to(self.device, non_blocking=not waits)
        except TypeError:  # a custom to() that accepts only a device
            return data.to(self.device)

    def free(self) -> int | None:
        """Free bytes of the device; None if it does not say."""
        with contextlib.suppress(Exception):
            reserved = self._module.memory_reserved(self.device)
            unused: int = reserved - self._module.memory_allocated(self.device)
            return unused + int(self._module.mem_get_info(self.device)[0])
        return None

    def operators(self, check: Callable[[Provider], str | None]) -> str | None:
        """Why operators of minato.ops do not run on the device; None if they do. Called before empty()
        and finish(). check: called with this provider once in a process, when they could run; tells
        how its results differ from the host's."""
        if self.device.type != "cuda" or torch.version.cuda is None:
            return f"this torch has none for {self.device.type} devices"
        key = (os.getpid(), self.device.index)
        found = _finishers.get(key) or finisher_of(self.device.index)
        if not isinstance(found, str):
            self._finisher = found
            if key not in _finishers:
                try:
                    found = check(self) or found
                except RuntimeError as error:  # includes running out of memory
                    found = f"they failed when tried on {self.device}: {error}"
        _finishers[key] = found
        return found if isinstance(found, str) else None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, stream: Any) -> torch.Tensor:
        """Device memory for the stream's output. Raises like copy()."""
        with self._module.stream(stream):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def finish(self, stream: Any, job: Job) -> None:
        """Starts finishing volumes, in the stream's order. Device memory that was made for this
        stream may be released at once."""
        self._finisher.run(stream.cuda_stream, job)


def cut(tensor: torch.Tensor, cuts: list[int]) -> list[torch.Tensor]:
    """The bytes of a contiguous tensor, cut at the given offsets."""
    flat = tensor.reshape(-1).view(torch.uint8)
    ends = [0, *cuts, flat.numel()]
    return [flat[begin:end] for begin, end in zip(ends, ends[1:])]


# ---- CUDA devices ----------------------------------------------------------------------------
#
# The driver is found at run time: nothing of CUDA is linked, and its few functions that are called
# here are as in its ABI. Only the kernel (csrc/cuda/mn_finish.cu) needs a compiler for devices. It
# comes as an image: code for several devices in one file.

#: the driver's library
CUDA = "libcuda.so.1"
_FUNCTIONS = (
    "cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuModuleLoadData", "cuModuleGetFunction",
    "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuLaunchKernel", "cuGetErrorName",
)  # fmt: skip
#: the head of an image: magic, version, bytes of the head, bytes of the rest
_HEAD = struct.Struct("<IHHQ")
_MAGIC = 0xBA55ED50
#: threads of a block, for which the kernel was compiled
_THREADS = 256
#: blocks of a launch on each axis; the driver's own limits lie above. Beyond it, a thread handles
#: several voxels, and a row of blocks several samples
_BLOCKS = 65535


class _Finish(ctypes.Structure):
    """struct mn_finish, which csrc/ops/mn_recipe.h describes."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("source", "target", "recipes", "windows", "cases")),
        *((name, ctypes.c_uint32) for name in ("n_cases", "samples", "steps", "voxels")),
        *((name, ctypes.c_uint32) for name in ("depth", "height", "width")),
        *((name, ctypes.c_int32) for name in ("before", "after", "which")),
    ]


def _is_whole(image: bytes) -> bool:
    """Whether the driver, which is not given the length, reads no further than to the end."""
    if len(image) < _HEAD.size:
        return False
    magic, _version, head, rest = map(int, _HEAD.unpack_from(image))
    return magic == _MAGIC and _HEAD.size <= head <= head + rest <= len(image)


class Finisher:
    """The kernel of an image on one CUDA device. Any thread may use it.

    Its code stays loaded until the process ends, and the device's primary context, which torch
    uses, retained: kernels may still be running. Calls leave the thread's current context as it is.
    Raises ValueError for an image that is not whole, and RuntimeError if the driver refuses.
    """

    def __init__(self, library: str, ordinal: int, image: bytes) -> None:
        if not _is_whole(image):
            raise ValueError("the kernels that were built are damaged or cut short: build minato again")
        try:
            self._driver = ctypes.CDLL(library)
        except OSError:
            raise RuntimeError(f"there is no {library}, the driver's library") from None
        if not all(hasattr(self._driver, name) for name in _FUNCTIONS):
            raise RuntimeError(f"{library} is too old")
        device, module = ctypes.c_int(), ctypes.c_void_p()
        self._context, self._kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        with self._in_context():
            self._call("cuModuleLoadData", ctypes.byref(module), image)
            self._call("cuModuleGetFunction", ctypes.byref(self._kernel), module, b"mn_finish_kernel")

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            failed = self._driver.cuGetErrorName(code, ctypes.byref(text))
            said = "an error without a name" if failed or not text.value else text.value.decode()
            raise RuntimeError(f"{name.removesuffix('_v2')}: {said} ({code})")

    @contextlib.contextmanager
    def _in_context(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def run(self, stream: int, job: Job) -> None:
        """Starts a job in the order of this CUstream. The memory must live until the stream has passed
        it."""
        samples, *volume = job.shape
        voxels = math.prod(volume)
        if not 0 < voxels < 2**32:
            raise ValueError("a volume needs at least 1 voxel, and fewer than 2^32")
        if samples >= 2**32:
            raise ValueError("too many samples")
        if samples == 0:
            return
        (before, after), known = job.dtypes, codes()
        fits = before in known.values() and after in (before, known["float32"], known["uint8"])
        given = job.source or (job.windows and job.n_cases)
        if not fits or job.which not in (0, 1) or not given:
            raise ValueError("a device cannot finish volumes of these shapes or dtypes")
        argument = _Finish(
            job.source, job.target, job.recipes, job.windows, job.cases, job.n_cases, samples,
            job.steps, voxels, *volume[1:], before, after, job.which,
        )  # fmt: skip
        grid = min((voxels - 1) // _THREADS + 1, _BLOCKS), min(samples, _BLOCKS), 1
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        with self._in_context():
            self._call("cuLaunchKernel", self._kernel, *grid, _THREADS, 1, 1, 0,
                       ctypes.c_void_p(stream), parameters, None)  # fmt: skip


def missing() -> str | None:
    """Says that there is no driver; None: there is one."""
    try:
        ctypes.CDLL(CUDA)
    except OSError:
        return f"no CUDA driver ({CUDA}) was found"
    return None


def kernels() -> bytes | str:
    """The code for devices, or why there is none."""
    try:
        with open(KERNELS, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return NOT_BUILT
    except OSError as error:
        return f"{KERNELS}: {error.strerror}"


def finisher_of(ordinal: int) -> Finisher | str:
    """Runs the kernel on a CUDA device; a text says why none can. Initialises the driver."""
    image = kernels()
    if isinstance(image, str):
        return image
    try:
        return Finisher(CUDA, ordinal, image)
    except (RuntimeError, ValueError) as error:
        return str(error)


# ---- the driver's functions that lock pages ---------------------------------------------------

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


def describe() -> str:
    """For ``minato info``: how batches are copied to a CUDA device on this system."""
    pinned = "through torch's page-locked memory, with one more copy"
    if (why := missing()) is not None:
        return f"none: {why}"
    try:
        _functions()
    except AttributeError as error:
        return f"{pinned}: {error}"
    return f"from the memory that workers wrote, unless the driver refuses ({CUDA} was found)"


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
    return Provider(torch.device(device.type, index), module)


#: makes the provider for a type of device; torchs() makes the others
_makers: dict[str, Callable[[torch.device], Provider]] = {}


def provider_for(device: Any) -> Provider | None:
    """The provider for ``device=``; None if batches need not be copied."""
    if device is None or (named := target(device)).type == "cpu":
        return None
    return _makers.get(named.type, torchs)(named)
