"""Values as a description and buffers, and back. Nothing is pickled.

What can be stored: None, bool, int, float, complex, str, bytes, bytearray, NumPy's scalars, dense
arrays, dense CPU tensors and PIL images. Dicts, lists and tuples of them can be stored, too. A
stored value comes back as new objects of the same types, dtypes and, for dense arrays and tensors,
strides. An array or tensor with gaps or overlaps comes back dense, as its copy would be. An object that
a value holds twice comes back as one object. PIL images of any class come back as plain images, with
those parts of their ``info`` that are numbers, text, bytes, or tuples of them. All other subclasses are
refused, because their extra state is unknown.

The description is JSON. None, bool, int and str stand for themselves. Everything else is a list:

    ["a", dtype, shape, axes]         an array; axes: None in C order, "F", or the order in memory
    ["t", dtype, shape, strides]      a tensor; strides: None if contiguous
    ["d", keys, values]               a dict
    ["l", items], ["u", items]        a list, a tuple
    ["b", length], ["B", length]      bytes, a bytearray
    ["h", hex]                        bytes in a key or in an image's info: no buffer
    ["f", hex], ["c", hex, hex]       a float, a complex number
    ["n", hex]                        an int that is too long for JSON
    ["g", dtype, hex]                 a NumPy scalar
    ["s", text], ["z", hex]           NumPy's str_ and bytes_
    ["i", mode, size, length, extra]  a PIL image
    ["r", number]                     an object that came before: arrays, tensors, dicts, lists,
                                      bytearrays and images are numbered in the order in which they
                                      begin, except in keys

Buffers follow in the order of the description, without the empty ones. ``_encode``, ``_allocate`` and ``_assemble``
must agree on this order.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .._not_linux import CORE

if CORE:
    from .. import _cache

#: kinds of dtypes that the buffer protocol knows
PLAIN = "biufc"
#: Parsed descriptions. Samples of one shape share one. At most PARSED_MOST are kept, of SHORT bytes each.
_parsed: dict[bytes, Any] = {}
PARSED_MOST = 128
SHORT = 4096
#: Python prints no int of many more bits than this
INT_BITS = 4096


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


def _tuples(descr: Any) -> Any:
    """Turns JSON lists back into the tuples that a structured dtype needs."""
    if isinstance(descr, str):
        return descr
    return [(f[0], _tuples(f[1]), *(tuple(n) if isinstance(n, list) else n for n in f[2:])) for f in descr]


def _dtype(descr: Any) -> np.dtype[Any]:
    found: np.dtype[Any] = np.lib.format.descr_to_dtype(_tuples(descr))
    return found


def _check_dtype(dtype: np.dtype[Any], value: Any, where: str) -> Any:
    if dtype.hasobject:
        raise refusal(value, where, "it is an array of Python objects")
    descr = dtype.str if dtype.names is None else np.lib.format.dtype_to_descr(dtype)
    if dtype.isbuiltin == 1 and dtype.metadata is None and dtype.kind in PLAIN:
        return descr
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
    if vars(tensor):
        raise refusal(tensor, where, f"it is a tensor with attributes of its own ({', '.join(vars(tensor))})")
    strides = None
    if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.resolve_conj().resolve_neg().clone()  # dense, strides as they were
        strides = None if tensor.is_contiguous() else list(tensor.stride())
    if tensor.numel():
        flat = tensor.as_strided((tensor.numel(),), (1,))
        parts.append(flat.view(torch.uint8).numpy())
    return ["t", str(tensor.dtype).removeprefix("torch."), list(tensor.shape), strides]


def _of_image(image: Any, where: str, parts: list[Any]) -> Any:
    if getattr(image, "n_frames", 1) > 1:
        raise refusal(image, where, f"it is an image of {image.n_frames} frames; copy() the one that you need")
    image.load()
    extra: dict[str, Any] = {}
    palette = getattr(image, "palette", None)
    if image.mode in ("P", "PA") and palette is not None:
        extra["palette"] = [image.palette.mode, image.palette.tobytes().hex()]
    for name, value in image.info.items():
        with contextlib.suppress(TypeError):
            extra.setdefault("info", []).append([_key(name, where), _key(value, where)])
    data = image.tobytes()
    if data:
        parts.append(data)
    return ["i", image.mode, list(image.size), len(data), extra]


def _is_image(value: Any) -> bool:
    """Whether it is a PIL image. Does not import PIL: without it there are no images."""
    return any(kind.__module__ == "PIL.Image" and kind.__qualname__ == "Image" for kind in type(value).__mro__)


def _of_scalar(value: Any, where: str) -> Any:
    """The description of a number or text; None: it is something else."""
    kind = type(value)
    if kind is bool or kind is str:
        return value
    if kind is int:
        return value if value.bit_length() <= INT_BITS else ["n", hex(value)]
    if kind is float:
        return ["f", value.hex()]
    if kind is complex:
        return ["c", value.real.hex(), value.imag.hex()]
    if kind is np.str_:
        return ["s", value[:]]  # str() leaves out zeros at the end
    if kind is np.bytes_:
        return ["z", value.hex()]
    if isinstance(value, np.generic) and kind.__module__ == "numpy":
        descr = _check_dtype(value.dtype, value, where)
        return ["g", descr, np.asarray(value).tobytes().hex()]
    return None


def _key(value: Any, where: str) -> Any:
    """The description of a value without buffers: a number, text, bytes, or a tuple of them."""
    kind = type(value)
    if kind is tuple:
        return ["u", [_key(inner, where) for inner in value]]
    if kind is bytes:
        return ["h", value.hex()]
    found = _of_scalar(value, where)
    if found is None and value is not None:
        raise refusal(value, where)
    return found


def _encode(value: Any, where: str, parts: list[Any], numbers: dict[int, int]) -> Any:
    """The value's description; appends its buffers to parts. numbers: of the objects so far, by id."""
    found = _of_scalar(value, where)
    if found is not None or value is None:
        return found
    kind = type(value)
    if kind is bytes:
        if value:
            parts.append(value)
        return ["b", len(value)]
    if kind is tuple:
        return ["u", [_encode(v, f"{where}[{i}]", parts, numbers) for i, v in enumerate(value)]]
    if id(value) in numbers:
        return ["r", numbers[id(value)]]
    numbers[id(value)] = len(numbers)
    if kind is list:
        return ["l", [_encode(v, f"{where}[{i}]", parts, numbers) for i, v in enumerate(value)]]
    if kind is dict:
        keys = [_key(k, f"a key of {where}") for k in value]
        inner = [_encode(v, f"{where}[{k!r}]", parts, numbers) for k, v in value.items()]
        return ["d", keys, inner]
    if kind is np.ndarray or kind is np.memmap:  # a part of a map, or a copy of it
        return _of_array(value.view(np.ndarray), where, parts)
    if kind is torch.Tensor:
        return _of_tensor(value, where, parts)
    if kind is bytearray:
        if value:
            parts.append(value)
        return ["B", len(value)]
    if _is_image(value):
        return _of_image(value, where, parts)
    raise refusal(value, where)


def encode(value: Any, what: str) -> Encoded:
    """A value as its description and buffers, which still are the value's own memory. what: the
    function that returned it, for messages."""
    parts: list[Any] = []
    node = _encode(value, f"what {what} returned", parts, {})
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


def _references(part: Any) -> int:
    return sys.getrefcount(part.base)


def _references_of_one() -> int:
    """What _references() returns for an array that only one list holds, besides its part."""
    made = [np.zeros(1)]
    return _references(_flat(made[0]))


_ONE = _references_of_one()


def _alone(node: Any, part: Any) -> Any:
    """The array that a buffer is of, if it is as a copy would be, and nothing but the value has it: then
    no copy is needed. Else None."""
    if type(part) is not np.ndarray or type(part.base) is not np.ndarray or _references(part) > _ONE:
        return None
    array = part.base
    same = array.flags.owndata and array.flags.writeable and array.dtype.kind in PLAIN
    same = same and array.dtype.metadata is None
    same = same and list(array.shape) == node[2] and array.dtype.str == node[1]
    return array if same and not weakref.getweakrefcount(array) else None


def _allocate(node: Any, targets: list[Any], objects: list[Any], parts: Sequence[Any] = ()) -> None:
    """Appends to objects each new array or tensor, and to targets where each buffer is to be copied,
    in the order of the description. parts: the buffers, if they are of a value that was just made,
    whose own arrays can be taken."""
    if type(node) is not list:
        return
    letter = node[0]
    if letter == "a":
        array = _alone(node, parts[len(targets)]) if len(targets) < len(parts) else None
        target = None
        if array is None:
            array, target = _empty_array(node)
        objects.append(array)
        if array.nbytes:
            targets.append(target)
    elif letter == "t":
        _letter, name, shape, strides = node
        plain, dtype = strides is None, getattr(torch, name)
        tensor = torch.empty(shape, dtype=dtype) if plain else torch.empty_strided(shape, strides, dtype=dtype)
        objects.append(tensor)
        if tensor.numel():
            targets.append((tensor.data_ptr(), tensor.numel() * tensor.element_size()))
    elif letter == "d":
        for inner in node[2]:
            _allocate(inner, targets, objects, parts)
    elif letter in "lu":
        for inner in node[1]:
            _allocate(inner, targets, objects, parts)
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
    for key, value in extra.get("info", ()):
        image.info[_of_key(key)] = _of_key(value)
    return image


def _of_key(node: Any) -> Any:
    return _assemble(node, iter(()), iter(()), [])


def _assemble(node: Any, objects: Iterator[Any], made: Iterator[bytes], before: list[Any]) -> Any:
    """The value, of objects and bytes that were made in the same order. before: the numbered objects so far."""
    if type(node) is not list:
        return node
    letter = node[0]
    if letter in "at":
        before.append(next(objects))
        return before[-1]
    if letter == "r":
        return before[node[1]]
    if letter == "d":
        found: dict[Any, Any] = {}
        before.append(found)
        keys = [_of_key(key) for key in node[1]]
        found.update(zip(keys, [_assemble(one, objects, made, before) for one in node[2]]))
        return found
    if letter == "l":
        before.append(items := [])
        items += [_assemble(one, objects, made, before) for one in node[1]]
        return items
    if letter == "u":
        return tuple([_assemble(one, objects, made, before) for one in node[1]])
    if letter == "b":
        return next(made) if node[1] else b""
    if letter == "B":
        before.append(bytearray(next(made)) if node[1] else bytearray())
        return before[-1]
    if letter == "i":
        before.append(_image(node, made))
        return before[-1]
    return _SCALARS[letter](*node[1:])


#: the other letters
_SCALARS: dict[str, Callable[..., Any]] = {
    "h": bytes.fromhex, "f": float.fromhex, "n": lambda text: int(text, 16), "s": np.str_,
    "z": lambda text: np.bytes_(bytes.fromhex(text)),
    "c": lambda real, imag: complex(float.fromhex(real), float.fromhex(imag)),
    "g": lambda descr, text: np.frombuffer(bytes.fromhex(text), _dtype(descr)).copy()[0],
}  # fmt: skip


def parsed(description: bytes) -> Any:
    """The tree of a description, which callers must not change."""
    node = _parsed.get(description)
    if node is None:
        node = json.loads(description)
        if len(description) <= SHORT:
            if len(_parsed) >= PARSED_MOST:
                _parsed.clear()
            _parsed[description] = node
    return node


def unless_damaged(read: Callable[..., tuple[bool, Any]]) -> Callable[..., tuple[bool, Any]]:
    """Has a reader return that an entry has gone if it fails on one whose checksums are wrong."""

    @functools.wraps(read)
    def call(entry: _cache.Entry, *rest: Any) -> tuple[bool, Any]:
        try:
            return read(entry, *rest)
        except OSError:
            raise
        except Exception:
            if entry.verify():
                raise
            return False, None

    return call


@unless_damaged
def read(entry: _cache.Entry, description: bytes) -> tuple[bool, Any]:
    """Whether the entry is still there, and a new copy of its value."""
    node = parsed(description)
    targets: list[Any] = []
    objects: list[Any] = []
    _allocate(node, targets, objects)
    made = entry.copy(targets)
    if made is None:
        return False, None
    return True, _assemble(node, iter(objects), iter(made), [])


def copy(encoded: Encoded) -> Any:
    """A copy of the value, as a hit would return it. Arrays that nothing but the value holds are not
    copied but taken; so the caller must have the value in a container that nothing else has, such as a
    list of one item, and must not use it any more."""
    node = parsed(encoded.description)
    targets: list[Any] = []
    objects: list[Any] = []
    _allocate(node, targets, objects, encoded.parts)
    made = _cache.fill(encoded.parts, targets)
    return _assemble(node, iter(objects), iter(made), [])


# ---- part=: only a box of one stored array or tensor is copied --------------------------------


def check_part(description: bytes, name: str) -> Any:
    """The description's tree, of one array or tensor; TypeError for other """
    node = parsed(description)
    if type(node) is not list or node[0] not in "at":
        raise TypeError(
            f"part= is for functions that return one array or tensor, and {name} returns something else"
        )
    return node


def _slices(part: Any, ndim: int) -> tuple[Any, ...]:
    """One index for each dimension."""
    given = part if isinstance(part, tuple) else (part,)
    at = next((i for i, one in enumerate(given) if one is Ellipsis), None)
    if at is not None:
        given = (*given[:at], *[slice(None)] * (ndim - len(given) + 1), *given[at + 1 :])
    if len(given) > ndim:
        raise IndexError(f"part= has {len(given)} indices, and the array has {ndim} dimensions")
    for one in given:
        if not isinstance(one, (slice, int, np.integer)) or isinstance(one, bool):
            raise TypeError(f"part= must hold slices, integers and ..., got {type(one).__name__}")
    return (*given, *[slice(None)] * (ndim - len(given)))


def part_of(value: Any, part: Any) -> Any:
    """The same part of a value that is at hand, as a dense copy; the value itself without part=."""
    if part is None:
        return value
    if not isinstance(value, (np.ndarray, torch.Tensor)):
        raise TypeError(f"part= is for functions that return one array or tensor, not {type(value).__name__}")
    found = value[_slices(part, value.ndim)]
    if isinstance(found, torch.Tensor):
        return found.clone(memory_format=torch.contiguous_format)
    return np.array(found, order="C")


def _box(shape: list[int], indices: tuple[Any, ...]) -> tuple[list[int], list[int], tuple[Any, ...]]:
    """Start and count of the box that covers the part, and what is to be taken of the box."""
    start: list[int] = []
    count: list[int] = []
    rest: list[Any] = []
    for size, index in zip(shape, indices):
        if isinstance(index, slice):
            chosen = range(*index.indices(size))
            low = min(chosen[0], chosen[-1]) if len(chosen) else 0
            high = max(chosen[0], chosen[-1]) + 1 if len(chosen) else 0
            start.append(low)
            count.append(high - low)
            stop = chosen.stop - low
            rest.append(slice(chosen.start - low if len(chosen) else 0,
                              None if stop < 0 else stop, chosen.step))  # fmt: skip
        else:
            at = int(index) + size if index < 0 else int(index)
            if not 0 <= at < size:
                raise IndexError(f"part= has the index {index} for a dimension of {size}")
            start.append(at)
            count.append(1)
            rest.append(0)
    return start, count, tuple(rest)


@unless_damaged
def read_part(entry: _cache.Entry, description: bytes, part: Any, name: str) -> tuple[bool, Any]:
    """Whether the entry is still there, and a new copy of a part of its value."""
    node = check_part(description, name)
    letter, kind, shape, order = node
    if order is not None:  # another order of axes than C's: all of it, then the part
        found, value = read(entry, description)
        return found, part_of(value, part) if found else None
    start, count, rest = _box(shape, _slices(part, len(shape)))
    if letter == "a":
        dtype = _dtype(kind)
        whole: Any = np.empty(count, dtype)
        address, itemsize = whole.__array_interface__["data"][0], dtype.itemsize
    else:
        whole = torch.empty(count, dtype=getattr(torch, kind))
        address, itemsize = whole.data_ptr(), whole.element_size()
    if 0 not in count and itemsize:
        if not entry.box(address, itemsize, tuple(shape), tuple(start), tuple(count)):
            return False, None
    if all(one == slice(0, n, 1) for one, n in zip(rest, count)):
        return True, whole
    return True, part_of(whole, rest)
