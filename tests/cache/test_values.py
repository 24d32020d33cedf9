"""Values come back as they were: types, dtypes, strides, bytes; others are refused by name."""

from __future__ import annotations

import collections
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from minato.cache import values

from .support import FOLDER, new_cache


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
    "long ints": [2**4096, -(10**5000)],
    "bytes": [b"", b"abc", bytearray(b"xyz"), bytearray()],
    "scalars": [np.float32(0.1), np.int16(-3), np.bool_(True), np.datetime64("2020-01-01"),
                np.str_("ab"), np.complex64(1j), np.str_(""), np.str_("a\0"), np.bytes_(b""),
                np.bytes_(b"a\0")],
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
        image.info.update(exif=b"Exif\0\0", dpi=(72, 72.5), loop=0)
        found = through_store(image)
        assert type(found) is Image.Image and (found.mode, found.size) == (mode, image.size)
        assert found.tobytes() == image.tobytes() and found.getpalette() == image.getpalette()
        assert found.info == image.info
        image.info["other"] = object()  # is left out
        assert "other" not in through_store(image).info


def test_image_of_several_frames_is_refused(tmp_path: Path) -> None:
    Image = pytest.importorskip("PIL.Image")
    frames = [Image.new("L", (5, 5), gray) for gray in (10, 20)]
    frames[0].save(tmp_path / "two.gif", save_all=True, append_images=frames[1:])
    with Image.open(tmp_path / "two.gif") as image:
        with pytest.raises(TypeError, match="an image of 2 frames"):
            values.encode(image, "f")
        assert through_store(image.copy()).size == (5, 5)


def test_values_are_copies() -> None:
    array, tensor = np.arange(5), torch.arange(5)
    for value in ({"a": array, "b": tensor}, array, [array[1:]]):
        found = values.copy(values.encode(value, "f"))
        for one in found.values() if type(found) is dict else [found] if value is array else found:
            one += 1
    assert array.tolist() == tensor.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kept", ["list", "view", "tensor", "weak"])
def test_an_array_that_its_function_keeps_is_copied(kept: str) -> None:
    made = [np.arange(1000)]
    keep: Any = {"list": lambda a: [a], "view": lambda a: a[2:], "tensor": torch.from_numpy,
                 "weak": weakref.ref}[kept](made[0])  # fmt: skip
    address = made[0].__array_interface__["data"][0]
    encoded = values.encode(made[0], "f")
    assert values.copy(encoded).__array_interface__["data"][0] != address
    del keep


@pytest.mark.parametrize("value", [
    lambda: np.arange(1000.0), lambda: np.ones((3, 4), np.uint8, order="F"),
    lambda: {"a": [np.arange(9)]}, lambda: np.arange(20)[::2],
], ids=["plain", "fortran", "nested", "gaps"])  # fmt: skip
def test_an_array_that_nothing_else_has_is_not_copied(value: Any) -> None:
    made = [value()]
    expected = value()
    encoded = values.encode(made[0], "f")
    address = encoded.parts[0].__array_interface__["data"][0]
    found = values.copy(encoded)
    same(found, through_store(expected))
    array = found["a"][0] if type(found) is dict else found
    assert array.__array_interface__["data"][0] == address


def test_an_object_that_a_value_holds_twice_stays_one() -> None:
    array, tensor, text, inner = np.arange(3), torch.zeros(2), bytearray(b"ab"), {"k": [1]}
    value = [array, (tensor, {"t": tensor, "a": array}), text, text, inner, [inner, inner["k"]]]
    for found in (through_store(value), values.copy(values.encode(value, "f"))):
        assert found[1][0] is found[1][1]["t"] and found[0] is found[1][1]["a"]
        assert found[2] is found[3] and found[4] is found[5][0] and found[5][1] is found[4]["k"]
        found[1][0].add_(1)
        assert found[1][1]["t"].tolist() == [1, 1] and tensor.tolist() == [0, 0]
    value.append(value)
    found = values.copy(values.encode(value, "f"))
    assert found[-1] is found


def test_parsed_descriptions_are_bounded_in_bytes() -> None:
    for n in range(300):
        assert through_description([str(n) * 3000]) == [str(n) * 3000]
        assert through_description([n]) == [n]
    assert 0 < len(values._parsed) <= 128 and max(map(len, values._parsed)) <= 4096


def through_description(value: Any) -> Any:
    return values._assemble(values.parsed(values.encode(value, "f").description), iter(()), iter(()), [])


@pytest.mark.parametrize("byte", [b"\xff", b"{", b"9"])
def test_damaged_text_is_made_again_and_counted(byte: bytes) -> None:
    cache, calls = new_cache(), []

    @cache.memoize(key=lambda n: n)
    def make(n: int) -> Any:
        calls.append(n)
        return {"k": f"needle{n}"}

    make(1)
    [path] = FOLDER.glob(f"cache-*-{cache._name}")
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(data.index(b'["d",["k"],["needle1"]]') + 1 + (byte == b"9") * 9)
        file.write(byte)  # in place of a quotation mark or a letter
    for _ in range(2):
        assert make(1) == {"k": "needle1"}
    assert calls == [1, 1] and cache.stats()["damaged"] == 1
    del path


class Mine(np.ndarray):
    pass


NAMED = torch.zeros(1)
NAMED.about = "a"  # type: ignore[attr-defined]
Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize("value, told", [
    (Point(1, 2), "Point"), (collections.OrderedDict(), "OrderedDict"), ({1, 2}, "set"),
    (np.arange(3).view(Mine), "Mine"), (np.array([None]), "Python objects"),
    (torch.nn.Parameter(torch.zeros(2)), "Parameter"), (object(), "builtins.object"),
    (torch.zeros(2, requires_grad=True), "requires grad"), (NAMED, r"attributes of its own \(about\)"),
    (torch.empty(2, device="meta"), "meta"),
    (torch.eye(2).to_sparse(), "sparse"), ([1, {"a": object()}], r"returned\[1\]\['a'\]"),
    (np.zeros(2, np.dtype("u1", metadata={"a": 1})), None), (np.ma.zeros(2), "MaskedArray"),
], ids=["namedtuple", "ordered", "set", "subclass", "objects", "parameter", "object", "grad", "attributes",
        "device", "sparse", "nested", "metadata", "masked"])  # fmt: skip
def test_a_value_that_cannot_be_stored_is_named(value: Any, told: str | None) -> None:
    if told is None:  # a dtype's metadata is left out, as NumPy's own files leave it out
        same(values.copy(values.encode(value, "f")), value)
        return
    with pytest.raises(TypeError, match=told) as caught:
        values.encode(value, "f")
    assert "minato.Cache cannot store" in str(caught.value)
