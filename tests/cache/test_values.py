"""Values come back as they were: types, dtypes, strides, bytes; others are refused by name."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from minato.cache import values

from .support import new_cache


def through_store(value: Any) -> Any:
    """A value that was stored and found."""
    cache = new_cache()
    store = cache._attached()
    assert store is not None
    encoded = values.encode(value, "f")
    assert store.put(b"k" * 16, 1, *encoded) == 0
    entry = store.find(b"k" * 16, True)
    assert entry is not None
    there, found = values.read(entry, entry.describe() or b"")
    assert there
    same(found, values.copy(encoded))  # a miss returns what a hit would
    return found


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert one.strides == other.strides and one.tobytes() == other.tobytes()
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert one.stride() == other.stride()
        assert torch.equal(one.view(torch.uint8) if one.dim() and one.is_contiguous() else one,
                           other.view(torch.uint8) if one.dim() and one.is_contiguous() else other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other):
            same(a, b)
    elif isinstance(one, float):
        assert repr(one) == repr(other)
    else:
        assert one == other


STRUCTURED = np.dtype([("a", "<f4"), ("b", ">i2", (2, 3)), ("c", [("d", "u1")])])
BACK = {
    "plain": [None, True, 7, -(2**80), 0.1, float("inf"), float("nan"), -0.0, 1 - 2j, "é\ud800", ""],
    "bytes": [b"", b"abc", bytearray(b"xyz"), bytearray()],
    "scalars": [np.float32(0.1), np.int16(-3), np.bool_(True), np.datetime64("2020-01-01"),
                np.str_("ab"), np.complex64(1j)],
    "containers": {"a": [1, (2.5, {"b": ()})], 3: None, (1, "k"): b"v", True: {}, b"key": 4, (b"", 0.5): {}},
    "arrays": [np.arange(10.0), np.zeros((0, 3)), np.array(5), np.arange(24).reshape(2, 3, 4),
               np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(4, dtype=">i4"),
               np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0),
               np.array(["2020-01-01", "NaT"], "M8[D]"), np.zeros(3, STRUCTURED),
               np.array(["ab", "c"]), np.array([b"ab"]), np.zeros(2, "S0"), np.zeros(4, bool)],
    "tensors": [torch.arange(5), torch.zeros(0, 2), torch.tensor(3.5), torch.randn(2, 3).t(),
                torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
                torch.tensor([True, False]), torch.zeros(3, dtype=torch.bfloat16),
                torch.zeros(2, dtype=torch.float8_e4m3fn), torch.zeros(2, dtype=torch.complex64)],
}  # fmt: skip


@pytest.mark.parametrize("name", BACK)
def test_a_stored_value_comes_back_the_same(name: str) -> None:
    same(through_store(BACK[name]), BACK[name])


@given(hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, min_side=0)))
def test_any_array_comes_back_the_same(array: np.ndarray[Any, Any]) -> None:
    encoded = values.encode(array, "f")
    same(values.copy(encoded), array)


@given(st.permutations(range(4)))
def test_any_order_of_axes_comes_back(axes: list[int]) -> None:
    array = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).transpose(axes)
    same(values.copy(values.encode(array, "f")), array)
    tensor = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).permute(*axes)
    same(values.copy(values.encode(tensor, "f")), tensor)


def test_strided_arrays_return_as_copies() -> None:
    for array in (np.arange(20)[::2], np.arange(20)[::-1], np.broadcast_to(np.arange(3), (2, 3)),
                  np.arange(24).reshape(4, 6)[1:3, 1:4]):  # fmt: skip
        found = through_store(array)
        assert (found == array).all() and found.flags.writeable
        assert found.strides == np.array(array, order="K").strides
    for tensor in (torch.arange(20)[::2], torch.arange(3).expand(2, 3), torch.arange(9)[3:6],
                   torch.tensor([1 + 2j, 3j]).conj(), torch.tensor([1 + 2j]).conj().imag):  # fmt: skip
        found = through_store(tensor)
        assert torch.equal(found, tensor.resolve_conj()) and not found.is_conj()


def test_images_come_back_as_pixels_and_mode() -> None:
    Image = pytest.importorskip("PIL.Image")
    base = Image.effect_noise((13, 7), 90)
    for mode in ("L", "RGB", "RGBA", "1", "P", "I;16", "F", "CMYK", "LA"):
        image = base.convert(mode) if mode != "I;16" else Image.new("I;16", (5, 5), 700)
        if mode == "P":
            image.info["transparency"] = bytes(range(256))
        found = through_store(image)
        assert type(found) is Image.Image and (found.mode, found.size) == (mode, image.size)
        assert found.tobytes() == image.tobytes() and found.getpalette() == image.getpalette()
        assert found.info.get("transparency") == image.info.get("transparency")


def test_values_are_copies() -> None:
    array = np.arange(5)
    encoded = values.encode({"a": array, "b": array}, "f")
    found = values.copy(encoded)
    found["a"] += 1
    assert found["b"].tolist() == array.tolist() == [0, 1, 2, 3, 4]


class Mine(np.ndarray):
    pass


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize("value, told", [
    (Point(1, 2), "Point"), (collections.OrderedDict(), "OrderedDict"), ({1, 2}, "set"),
    (np.arange(3).view(Mine), "Mine"), (np.array([None]), "Python objects"),
    (torch.nn.Parameter(torch.zeros(2)), "Parameter"), (object(), "builtins.object"),
    (torch.zeros(2, requires_grad=True), "requires grad"), (torch.empty(2, device="meta"), "meta"),
    (torch.eye(2).to_sparse(), "sparse"), ([1, {"a": object()}], r"returned\[1\]\['a'\]"),
    (np.zeros(2, np.dtype("u1", metadata={"a": 1})), None), (np.ma.zeros(2), "MaskedArray"),
], ids=["namedtuple", "ordered", "set", "subclass", "objects", "parameter", "object", "grad",
        "device", "sparse", "nested", "metadata", "masked"])  # fmt: skip
def test_a_value_that_cannot_be_stored_is_named(value: Any, told: str | None) -> None:
    if told is None:  # a dtype's metadata is left out, as NumPy's own files leave it out
        same(values.copy(values.encode(value, "f")), value)
        return
    with pytest.raises(TypeError, match=told) as caught:
        values.encode(value, "f")
    assert "minato.Cache cannot store" in str(caught.value)
