"""Parts of minato/ops.h and csrc/ops, seen through ctypes as a C host would."""
from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

from minato.ops import Pipeline

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def instruction_sets() -> list[str]:
    """Names by level, plainest first, as this machine has."""
    names: list[str] = []
    while True:
        try:
            names.append(Pipeline([], _level=len(names)).stats()["instruction_set"])
        except ValueError:
            return names


@functools.cache
def draws() -> ctypes.CDLL:
    """c/mn_ops_draws.c."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler")
    sources = [ROOT / "tests/ops/c/mn_ops_draws.c", ROOT / "csrc/ops/mn_kernels.c"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "draws.so"
        command = [compiler, "-std=c11", "-O3", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}",
                   f"-I{ROOT / 'minato/include'}", *map(str, sources), "-o", str(out)]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(out))
    key = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32]
    library.uniform.argtypes = [*key, ctypes.c_uint32]
    library.uniform.restype = ctypes.c_double
    library.below.argtypes = [*key, ctypes.c_uint32, ctypes.c_uint64]
    library.below.restype = ctypes.c_uint64
    library.normals.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, *key, ctypes.c_int]
    return library


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
