"""Keys: equal bytes for equal values, other bytes for others, TypeError for what is neither."""

from __future__ import annotations

import enum
from collections import OrderedDict, namedtuple
from datetime import date, datetime, timezone, tzinfo
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minato.cache.keys import ARRAY_MOST, canonical



class Color(enum.Enum):
    RED, BLUE = "r", "b"


class Number(enum.IntEnum):
    ONE = 1


class Mode(enum.Flag):
    A, B = 1, 2


class Pair(NamedTuple):
    a: Any
    b: Any


Other = namedtuple("Other", "a b")  # noqa: PYI024


class Zone(tzinfo):
    """Its repr() says where it lies in memory."""


NAMED = torch.zeros(1)
NAMED.about = "a"  # type: ignore[attr-defined]

EQUAL = [
    (np.int64(1), np.int64(1)), (np.longdouble(1), np.longdouble("1.0")), (10**5000, 10**5000), (..., ...),
    ({"a": 1, "b": 2}, {"a": 1, "b": 2}), ({1, 2, 3}, {3, 2, 1}),
    (np.arange(4), np.arange(8)[::2] // 2), (torch.arange(4), torch.arange(4)),
    (Path("a") / "b", Path("a/b")), (Color.RED, Color("r")),
    (Mode.A | Mode.B, Mode(3)), (Pair(1, 2), Pair(*[1, 2])), (date(2020, 1, 2), date(2020, 1, 2)),
    (OrderedDict(a=1), OrderedDict(a=1)), (frozenset([1, 2]), frozenset([2, 1])),
]  # fmt: skip

DIFFERENT = [
    (1, 1.0), (1, True), (1.0, True), (0, False), (None, False), ("1", 1), ("a", b"a"), ("a", Path("a")),
    ((1, 2), [1, 2]), ((1, 2), (12,)), (("a", "b"), ("ab", "")), ((1, (2, 3)), ((1, 2), 3)),
    ([], ()), ({}, set()), (set(), frozenset()), (0.0, -0.0), (1j, 1.0),
    (np.arange(4), torch.arange(4)), (np.arange(4, dtype="i4"), np.arange(4, dtype="i8")),
    (np.zeros((2, 3)), np.zeros((3, 2))), (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)),
    (1, np.int64(1)), (1, torch.tensor(1)), (1, np.array(1)), (np.int64(1), np.array(1)), (True, np.bool_(True)),
    (0.5, np.float32(0.5)), (np.uint8(200), np.int64(200)), (np.longdouble(1), np.longdouble(2)), (..., None),
    (np.zeros(1, "i4,i4"), np.zeros(1, "f4,f4")), (np.zeros(1, [("a", "i4")]), np.zeros(1, [("b", "i4")])),
    (10**5000, 10**5000 + 1), ("a", np.str_("a")), (np.datetime64("2020-01-01"), np.datetime64("2020-01-02")),
    (slice(1), slice(0, 1)), (range(3), (0, 1, 2)), ("\ud800", "\ud801"), ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    (Color.RED, Color.BLUE), (Color.RED, "r"), (Number.ONE, 1), (Number.ONE, Mode.A), (Mode.A, Mode.B),
    (Pair(1, 2), (1, 2)), (Pair(1, 2), Other(1, 2)), (Pair(1, Color.RED), Pair(1, Color.BLUE)),
    (date(2020, 1, 1), datetime(2020, 1, 1)), (datetime(2020, 1, 1), datetime(2020, 1, 1, fold=1)),
    (datetime(2020, 1, 1), datetime(2020, 1, 1, tzinfo=timezone.utc)), (torch.int32, torch.int64),
    (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)), (OrderedDict(a=1), {"a": 1}),
    (PurePosixPath("a"), PureWindowsPath("a")),
    (torch.eye(3).t(), torch.eye(3)), (np.eye(3), np.asfortranarray(np.eye(3))),
    (np.eye(3), np.broadcast_to(np.eye(3), (3, 3))), (torch.eye(3), torch.eye(3).requires_grad_()),
    (torch.tensor([1j, 2j]).conj().imag, torch.tensor([1j, 2j]).imag),
]  # fmt: skip


@pytest.mark.parametrize("pair", EQUAL, ids=lambda pair: repr(type(pair[1]).__name__))
def test_equal_values_have_equal_keys(pair: tuple[Any, Any]) -> None:
    assert canonical(pair[0]) == canonical(pair[1])


@pytest.mark.parametrize("number", range(len(DIFFERENT)))
def test_different_values_have_different_keys(number: int) -> None:
    one, other = DIFFERENT[number]
    assert canonical(one) != canonical(other)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
)


def tagged(value: Any) -> Any:
    """A value whose equality tells 1, 1.0 and True apart."""
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [tagged(v) for v in value]
    if isinstance(value, dict):
        return "dict", [(k, tagged(v)) for k, v in value.items()]
    return type(value).__name__, repr(value)


@given(PLAIN, PLAIN)
def test_keys_are_equal_where_values_are(one: Any, other: Any) -> None:
    assert (canonical(one) == canonical(other)) == (tagged(one) == tagged(other))


@pytest.mark.parametrize("value, told", [
    (object(), "builtins.object"), ([1, {"a": {2: object()}}], r"the key\[1\]\['a'\]\[2\]"),
    (np.array([None]), "array of objects"), (np.zeros(ARRAY_MOST + 1, "u1"), "1048577 bytes"),
    (torch.zeros(ARRAY_MOST + 1, dtype=torch.uint8), "1048577 bytes"), (lambda: 1, "function"),
    (torch.empty(2, device="meta"), "meta"), (NAMED, r"attributes \(about\)"),
    (datetime(2020, 1, 1, tzinfo=Zone()), "datetime.datetime"),
], ids=["object", "nested", "objects", "large", "large tensor", "function", "device", "attributes",
        "time zone"])  # fmt: skip
def test_a_value_without_key_is_refused(value: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        canonical(value)


def test_relative_paths_in_other_folders_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relative, here = Path("data") / "0.npy", canonical(Path.cwd() / "data" / "0.npy")
    assert canonical(relative) == here
    monkeypatch.chdir(tmp_path)
    assert canonical(relative) == canonical(tmp_path / "data" / "0.npy") != here
