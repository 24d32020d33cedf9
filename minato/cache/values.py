"""Values as a description and buffers, and back. Nothing is pickled.

What can be stored: None, bool, int, float, complex, str, bytes, bytearray, NumPy's scalars, dense
arrays, dense CPU tensors and PIL images. Dicts, lists and tuples of them can be stored, too. A
stored value comes back as new objects of the same types, dtypes and, for dense arrays and tensors,
strides. An array or tensor with gaps or overlaps comes back dense, as its copy would be. PIL images
of any class come back as plain images; of their ``info`` only ``transparency`` is kept. All other
subclasses are refused, because their extra state is unknown.

The description is JSON. None, bool, int and str stand for themselves. Everything else is a list:

    ["a", dtype, shape, axes]         an array; axes: None in C order, "F", or the order in memory
    ["t", dtype, shape, strides]      a tensor; strides: None if contiguous
    ["d", keys, values]               a dict
    ["l", items], ["u", items]        a list, a tuple
    ["b", length], ["B", length]      bytes, a bytearray
    ["h", hex]                        bytes in a key or in an image's transparency: no buffer
    ["f", hex], ["c", hex, hex]       a float, a complex number
    ["g", dtype, hex]                 a NumPy scalar
    ["i", mode, size, length, extra]  a PIL image

Buffers follow in the order of the description, without the empty ones. ``_encode``, ``_allocate``
and ``_assemble`` must agree on this order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from .._not_linux import CORE

if CORE:
    from .. import _cache

#: kinds of dtypes that the buffer protocol knows
PLAIN = "biufc"
#: descriptions that were parsed; those of samples of one shape are equal
_parsed: dict[bytes, Any] = {}
PARSED_MOST = 4096


class Encoded(NamedTuple):
    description: bytes
    parts: tuple[Any, ...]


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def refusal(value: Any, where: str, why: str = "") -> TypeError:
    told = why or f"it is of the type {_name(value)}"
    return TypeError(
        f"minato.Cache cannot store {where}: {told}. It stores numbers, strings, bytes, plain arrays, "
        "CPU tensors, PIL images, and dicts, lists and tuples of them"
    )


# ---- to a description and buffers ----------------------------------------------------------


def _order(array: np.ndarray[Any, Any]) -> tuple[Any, np.ndarray[Any, Any]]:
    """How the axes of a dense array lie in memory, and the array in C order."""
    if array.flags.c_contiguous:
        return None, array
    if array.flags.f_contiguous:
        return "F", array.T
    axes = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    return axes, array.transpose(axes)


def _descr(dtype: np.dtype[Any]) -> Any:
    return dtype.str if dtype.names is None else np.lib.format.dtype_to_descr(dtype)


def _tuples(descr: Any) -> Any:
    """Turns JSON lists back into the tuples that a structured dtype needs."""
    if isinstance(descr, str):
        return descr
    return [
        (f[0], _tuples(f[1]), *(tuple(n) if isinstance(n, list) else n for n in f[2:]))
        for f in descr
    ]


def _dtype(descr: Any) -> np.dtype[Any]:
    found: np.dtype[Any] = np.lib.format.descr_to_dtype(_tuples(descr))
    return found


def _check_dtype(dtype: np.dtype[Any], value: Any, where: str) -> Any:
    if dtype.hasobject:
        raise refusal(value, where, "it is an array of Python objects")
    descr = _descr(dtype)
    again = None
    try:
        again = _dtype(json.loads(json.dumps(descr)))
    except (TypeError, ValueError):
        pass
    if again != dtype:
        raise refusal(value, where, f"its dtype {dtype!r} is not one of NumPy's own")
    return descr


def _flat(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of an array in C order, as a flat view."""
    return array.reshape(-1).view(np.uint8)


def _of_array(array: np.ndarray[Any, Any], where: str, parts: list[Any]) -> Any:
    descr = _check_dtype(array.dtype, array, where)
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        array = np.array(array, order="K", copy=True)  # dense, if it was not
    axes, ordered = _order(array)
    if ordered.nbytes:
        parts.append(_flat(ordered))
    return ["a", descr, list(array.shape), axes]


def _of_tensor(tensor: torch.Tensor, where: str, parts: list[Any]) -> Any:
    if tensor.requires_grad:
        raise refusal(tensor, where, "it is a tensor that requires grad; detach() it")
    if tensor.device.type != "cpu":
        raise refusal(tensor, where, f"it is a tensor on {tensor.device}; move it to the CPU")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise refusal(tensor, where, f"it is a tensor of the layout {tensor.layout}, not a dense one")
    strides = None
    if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.resolve_conj().resolve_neg().clone()  # dense, strides as they were
        strides = None if tensor.is_contiguous() else list(tensor.stride())
    if tensor.numel():
        flat = tensor.as_strided((tensor.numel(),), (1,))
        parts.append(flat.view(torch.uint8).numpy())
    return ["t", str(tensor.dtype).removeprefix("torch."), list(tensor.shape), strides]


def _of_image(image: Any, where: str, parts: list[Any]) -> Any:
    image.load()
    extra: dict[str, Any] = {}
    palette = getattr(image, "palette", None)
    if image.mode in ("P", "PA") and palette is not None:
        extra["palette"] = [image.palette.mode, image.palette.tobytes().hex()]
    transparency = image.info.get("transparency")
    if transparency is not None:
        extra["transparency"] = _encode(transparency, where, None)
    data = image.tobytes()
    if data:
        parts.append(data)
    return ["i", image.mode, list(image.size), len(data), extra]


def _is_image(value: Any) -> bool:
    """Whether it is a PIL image. Does not import PIL: without it there are no images."""
    return any(
        kind.__module__ == "PIL.Image" and kind.__qualname__ == "Image"
        for kind in type(value).__mro__
    )


def _of_container(value: Any, where: str, parts: list[Any] | None) -> Any:
    kind = type(value)
    if kind is dict:
        keys = [_encode(k, f"a key of {where}", None) for k in value]
        return ["d", keys, [_encode(v, f"{where}[{k!r}]", parts) for k, v in value.items()]]
    letter = "l" if kind is list else "u"
    return [letter, [_encode(v, f"{where}[{i}]", parts) for i, v in enumerate(value)]]


def _encode(value: Any, where: str, parts: list[Any] | None) -> Any:
    """The value's description; appends its buffers to parts. None: it must do without buffers."""
    kind = type(value)
    if value is None or kind is bool or kind is int or kind is str:
        return value
    if kind is dict or kind is list or kind is tuple:
        return _of_container(value, where, parts)
    if kind is float:
        return ["f", value.hex()]
    if kind is complex:
        return ["c", value.real.hex(), value.imag.hex()]
    if isinstance(value, np.generic) and kind.__module__ == "numpy":
        descr = _check_dtype(value.dtype, value, where)
        return ["g", descr, np.asarray(value).tobytes().hex()]
    if parts is None:
        if kind is bytes:
            return ["h", value.hex()]
        raise refusal(value, where)
    if kind is np.ndarray:
        return _of_array(value, where, parts)
    if kind is torch.Tensor:
        return _of_tensor(value, where, parts)
    if kind is bytes or kind is bytearray:
        if value:
            parts.append(value)
        return ["b" if kind is bytes else "B", len(value)]
    if _is_image(value):
        return _of_image(value, where, parts)
    raise refusal(value, where)


def encode(value: Any, what: str) -> Encoded:
    """A value as its description and buffers, which still are the value's own memory. what: the
    function that returned it, for messages."""
    parts: list[Any] = []
    node = _encode(value, f"what {what} returned", parts)
    return Encoded(json.dumps(node, separators=(",", ":")).encode(), tuple(parts))


# ---- and back ------------------------------------------------------------------------------


def _empty_array(node: Any) -> tuple[Any, Any]:
    """An array of uninitialised memory for a description, and the view to copy its bytes into."""
    _letter, descr, shape, axes = node
    dtype = np.dtype(descr) if isinstance(descr, str) else _dtype(descr)
    if axes is None or axes == "F":
        array = np.empty(shape, dtype, order=axes or "C")
        ordered = array if axes is None else array.T
    else:
        ordered = np.empty([shape[axis] for axis in axes], dtype)
        array = ordered.transpose(np.argsort(axes))
    return array, ordered if dtype.kind in PLAIN else _flat(ordered) if array.nbytes else ordered


def _empty_tensor(node: Any) -> torch.Tensor:
    _letter, name, shape, strides = node
    dtype = getattr(torch, name)
    if strides is None:
        return torch.empty(shape, dtype=dtype)
    return torch.empty_strided(shape, strides, dtype=dtype)


def _allocate(node: Any, targets: list[Any], objects: list[Any]) -> None:
    """Appends to objects each new array or tensor, and to targets where each buffer is to be copied,
    in the order of the description."""
    if type(node) is not list:
        return
    letter = node[0]
    if letter == "a":
        array, target = _empty_array(node)
        objects.append(array)
        if array.nbytes:
            targets.append(target)
    elif letter == "t":
        tensor = _empty_tensor(node)
        objects.append(tensor)
        if tensor.numel():
            targets.append((tensor.data_ptr(), tensor.numel() * tensor.element_size()))
    elif letter == "d":
        for inner in node[2]:
            _allocate(inner, targets, objects)
    elif letter in "lu":
        for inner in node[1]:
            _allocate(inner, targets, objects)
    elif letter in "bB" and node[1]:
        targets.append(node[1])
    elif letter == "i" and node[3]:
        targets.append(node[3])


def _image(node: Any, made: Iterator[bytes]) -> Any:
    from PIL import Image

    _letter, mode, size, n, extra = node
    image = Image.frombytes(mode, tuple(size), next(made)) if n else Image.new(mode, tuple(size))
    if "palette" in extra:
        palette_mode, data = extra["palette"]
        image.putpalette(bytes.fromhex(data), palette_mode)
    if "transparency" in extra:
        image.info["transparency"] = _assemble(extra["transparency"], iter(()), iter(()))
    return image


def _assemble(node: Any, objects: Iterator[Any], made: Iterator[bytes]) -> Any:
    """The value, of objects and bytes that were made in the same order."""
    if type(node) is not list:
        return node
    letter = node[0]
    if letter in "at":
        return next(objects)
    if letter == "d":
        keys = [_assemble(key, iter(()), iter(())) for key in node[1]]
        return dict(zip(keys, [_assemble(inner, objects, made) for inner in node[2]]))
    if letter == "l":
        return [_assemble(inner, objects, made) for inner in node[1]]
    if letter == "u":
        return tuple([_assemble(inner, objects, made) for inner in node[1]])
    if letter == "b":
        return next(made) if node[1] else b""
    if letter == "h":
        return bytes.fromhex(node[1])
    if letter == "B":
        return bytearray(next(made)) if node[1] else bytearray()
    if letter == "f":
        return float.fromhex(node[1])
    if letter == "c":
        return complex(float.fromhex(node[1]), float.fromhex(node[2]))
    if letter == "g":
        return np.frombuffer(bytes.fromhex(node[2]), _dtype(node[1])).copy()[0]
    return _image(node, made)


def parsed(description: bytes) -> Any:
    """The tree of a description, which callers must not change."""
    node = _parsed.get(description)
    if node is None:
        node = json.loads(description)
        if len(_parsed) < PARSED_MOST:
            _parsed[description] = node
    return node


def read(entry: _cache.Entry, description: bytes) -> tuple[bool, Any]:
    """Whether the entry is still there, and a new copy of its value."""
    node = parsed(description)
    targets: list[Any] = []
    objects: list[Any] = []
    _allocate(node, targets, objects)
    made = entry.copy(targets)
    if made is None:
        return False, None
    return True, _assemble(node, iter(objects), iter(made))


def copy(encoded: Encoded) -> Any:
    """A new copy of the value, as a hit would return it."""
    node = json.loads(encoded.description)
    targets: list[Any] = []
    objects: list[Any] = []
    _allocate(node, targets, objects)
    made = _cache.fill(encoded.parts, targets)
    return _assemble(node, iter(objects), iter(made))
