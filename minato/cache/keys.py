"""Keys: values as bytes that are equal exactly where the values are.

1, 1.0, True and NumPy's scalars differ, because a function may return something else for each, and so do lists and
tuples, and dicts of another order. Arrays and tensors count by dtype, shape, strides and content, and by whether
they may be written or require grad. A relative path counts with the folder that it starts from, because jobs in
other folders mean other files by it.
"""

from __future__ import annotations

import datetime
import enum
import os
import struct
from collections import OrderedDict
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

#: bytes of an array in a key
ARRAY_MOST = 1 << 20
#: types whose repr() says all, and modules of time zones of which it does
TOLD = (datetime.date, datetime.time, datetime.datetime, datetime.timedelta, torch.dtype, torch.device)
ZONES = (type(None).__module__, "datetime", "zoneinfo")


class Opaque:
    """Of its objects only the type counts as something that a value depends on."""


def _counted(tag: bytes, data: bytes) -> bytes:
    return b"%s%d:%s" % (tag, len(data), data)


def _float(value: float) -> bytes:
    return b"f" + struct.pack("<d", value)


def _array(value: np.ndarray[Any, Any], tag: bytes, where: str) -> bytes:
    if value.dtype.hasobject:
        raise TypeError(f"{where} is an array of objects, which a cache key cannot hold")
    if value.nbytes > ARRAY_MOST:
        raise TypeError(
            f"{where} is an array of {value.nbytes} bytes; a cache key holds up to {ARRAY_MOST}. "
            "Give memoize() a key= that names the array, for example by its path"
        )
    head = f"{np.lib.format.dtype_to_descr(value.dtype)}{value.shape}{value.strides}{value.flags.writeable}".encode()
    return _counted(tag, head) + _counted(b"", value.tobytes())


def tensor_bytes(value: torch.Tensor) -> np.ndarray[Any, Any]:
    """Of a dense tensor on the CPU, in C order."""
    flat = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if not flat.numel():  # may have any stride
        return np.empty(0, np.uint8)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy()


def _tensor(value: torch.Tensor, where: str) -> bytes:
    if value.device.type != "cpu" or value.layout != torch.strided:
        raise TypeError(
            f"{where} is a tensor on {value.device} ({value.layout}); a cache key holds dense CPU "
            "tensors. Give memoize() a key= of plain values"
        )
    data = tensor_bytes(value.detach())
    if data.nbytes > ARRAY_MOST:
        return _array(data, b"t", where)
    if vars(value):
        raise TypeError(f"{where} is a tensor with attributes ({', '.join(vars(value))}): a cache key cannot hold it")
    head = f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.requires_grad}{value.is_conj()}".encode()
    return _counted(b"t", head) + _counted(b"", data.tobytes())


def _all(tag: bytes, parts: list[bytes]) -> bytes:
    return b"%s%d(%s)" % (tag, len(parts), b"".join(parts))


def _container(value: Any, where: str) -> bytes | None:
    kind = type(value)
    if kind is tuple or kind is list:
        tag = b"(" if kind is tuple else b"["
        return _all(tag, [canonical(v, f"{where}[{i}]") for i, v in enumerate(value)])
    if kind is dict or kind is OrderedDict:
        pairs = [canonical(k, f"a key of {where}") + canonical(v, f"{where}[{k!r}]") for k, v in value.items()]
        return _all(b"{" if kind is dict else b"O", pairs)
    if kind is set or kind is frozenset:
        tag = b"S" if kind is set else b"Z"
        return _all(tag, sorted(canonical(v, f"an item of {where}") for v in value))
    if kind is slice:
        return _all(b":", [canonical(v, where) for v in (value.start, value.stop, value.step)])
    if kind is range:
        return _all(b"r", [canonical(v, where) for v in (value.start, value.stop, value.step)])
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, enum.Enum):
        return _all(b"m", [canonical(v, where) for v in (name, value.name, value.value)])
    if isinstance(value, tuple) and hasattr(kind, "_fields") and not hasattr(value, "__dict__"):
        return _all(b"n", [canonical(v, where) for v in (name, kind._fields, tuple(value))])
    if kind in TOLD and type(getattr(value, "tzinfo", None)).__module__ in ZONES:
        return _counted(b"d", repr(value).encode())
    return None


def canonical(value: Any, where: str = "the key") -> bytes:
    """A value of a key as bytes; TypeError, which says where, for one that a key cannot hold."""
    kind = type(value)
    if kind is str:
        return _counted(b"s", value.encode("utf-8", "surrogatepass"))
    if kind is int:
        return b"i%x;" % value
    if value is None or value is Ellipsis:
        return b"N" if value is None else b"E"
    if kind is bool:
        return b"T" if value else b"F"
    if kind is float:
        return _float(value)
    if kind is bytes:
        return _counted(b"b", value)
    found = _container(value, where)
    if found is not None:
        return found
    if kind is complex:
        return b"c" + _float(value.real) + _float(value.imag)
    if isinstance(value, PurePath):
        text = str(value)
        if isinstance(value, Path) and not value.is_absolute():
            text = os.path.join(os.getcwd(), text)
        kind = Path if isinstance(value, Path) else kind
        return _counted(b"p", kind.__qualname__.encode()) + _counted(b"", text.encode("utf-8", "surrogatepass"))
    if kind is np.ndarray:
        return _array(value, b"a", where)
    if isinstance(value, np.generic) and kind.__module__ == "numpy":
        if isinstance(value, (np.longdouble, np.clongdouble)):  # some of their bytes are unused
            return _counted(b"l", repr(value).encode())
        return _array(np.asarray(value), b"g", where)
    if kind is torch.Tensor:
        return _tensor(value, where)
    raise TypeError(
        f"{where} is of the type {kind.__module__}.{kind.__qualname__}, which a cache key cannot "
        "hold. Give memoize() a key= that returns numbers, strings, paths, arrays, dates, members of enums, "
        "and tuples of them"
    )
