"""struct mn_native_pipeline of minato/ops.h, seen through ctypes, as a C host would."""
from __future__ import annotations

import ctypes

import numpy as np


class Field(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_char), ("itemsize", ctypes.c_uint8),
                ("reserved", ctypes.c_uint16), ("ndim", ctypes.c_int32),
                ("shape", ctypes.c_int64 * 8), ("bytes", ctypes.c_uint64)]


RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64,
                       ctypes.c_uint64, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p,
                       ctypes.c_size_t)


class Native(ctypes.Structure):
    _fields_ = [("abi", ctypes.c_uint32), ("size", ctypes.c_uint32),
                ("state", ctypes.c_void_p), ("length", ctypes.c_int64),
                ("keying", ctypes.c_uint32), ("n_fields", ctypes.c_int32),
                ("seed", ctypes.c_uint64), ("fields", Field * 8), ("run", RUN),
                ("epoch", ctypes.POINTER(ctypes.c_uint64))]


class Host:
    """Runs the samples of a capsule; ctypes releases the GIL around each."""

    def __init__(self, capsule) -> None:
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        self.capsule = capsule
        self.native = Native.from_address(get(capsule, b"minato.native_pipeline.v1"))

    @property
    def fields(self):
        return [(np.dtype(f"{f.kind.decode()}{f.itemsize}"), tuple(f.shape[:f.ndim]))
                for f in self.native.fields[:self.native.n_fields]]

    def run(self, index: int, key: tuple[int, int]):
        """(0, arrays) or (negative errno, text)."""
        arrays = [np.empty(shape, dtype) for dtype, shape in self.fields]
        for array, field in zip(arrays, self.native.fields):
            assert array.nbytes == field.bytes
        out = (ctypes.c_void_p * len(arrays))(*[a.ctypes.data for a in arrays])
        text = ctypes.create_string_buffer(300)
        rc = self.native.run(self.native.state, index, *key, out, text, len(text))
        return (rc, arrays) if rc == 0 else (rc, text.value.decode())
