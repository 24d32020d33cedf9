"""The kernel that finishes samples (``csrc/cuda/mn_finish.cu``), on one CUDA device.

The driver is found at run time: nothing of CUDA is linked, and its few functions that are called
here are as in its ABI. Only the kernel needs a compiler for devices. It comes as an image: code for
several devices in one file.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import struct
from collections.abc import Iterator
from typing import Any

from ..ops.operators import DTYPES

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


class _Job(ctypes.Structure):
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

    def run(
        self, stream: int, which: int, dtypes: tuple[int, int], shape: tuple[int, ...], source: int,
        target: int, recipes: int, steps: int, windows: int = 0, cases: int = 0, n_cases: int = 0,
    ) -> None:  # fmt: skip
        """Starts to finish the images (which 0) or labels (1) of a batch in the order of this
        CUstream. Arguments: codes of the dtypes before and after, shape (samples, channels, depth,
        height, width), addresses on the device, and the steps of each recipe. Without a source,
        samples are windows of the cases. The memory must live until the stream has passed it."""
        samples, *volume = shape
        voxels = math.prod(volume)
        if not 0 < voxels < 2**32:
            raise ValueError("a volume needs at least 1 voxel, and fewer than 2^32")
        if samples >= 2**32:
            raise ValueError("too many samples")
        if samples == 0:
            return
        before, after = dtypes
        known = before in DTYPES.values() and after in (before, DTYPES["float32"], DTYPES["uint8"])
        if not known or which not in (0, 1) or not (source or (windows and n_cases)):
            raise ValueError("a device cannot finish volumes of these shapes or dtypes")
        job = _Job(source, target, recipes, windows, cases, n_cases, samples, steps, voxels,
                   *volume[1:], before, after, which)  # fmt: skip
        grid = min((voxels - 1) // _THREADS + 1, _BLOCKS), min(samples, _BLOCKS), 1
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(job))
        with self._in_context():
            self._call("cuLaunchKernel", self._kernel, *grid, _THREADS, 1, 1, 0,
                       ctypes.c_void_p(stream), parameters, None)  # fmt: skip
