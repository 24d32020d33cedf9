"""What a memoized function depends on: an edit anywhere in it makes other values."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minato.cache.fingerprint import Fingerprint

from .support import new_cache

BASE = """
import math
import numpy as np
import helpers
from helpers import scaled

SIZE = 3
LIMITS = (1, 2)
TABLE = [1, 2]
OBJECT = helpers.Thing()

class Scans:
    offset = 1
    def read(self, i):
        return i + self.shift()
    def shift(self):
        return 10
    def make(self, i):
        def inner(x):
            return x * 2
        return scaled(self.read(i)) + SIZE + inner(i) + math.floor(1.5) + helpers.other(i)

def make(i, by=2, *, and_by=3):
    return [scaled(k) for k in range(i)] + [SIZE, LIMITS, np.float32(by)] + TABLE

def uses_object(i):
    return OBJECT.value + i
"""
HELPERS = """
class Thing:
    value = 1
def deep(x):
    return x + 1
def scaled(x):
    return deep(x) * 3
def other(x):
    return x
def unused(x):
    return x
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Writes the program, changed or not, and imports it anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load(old: str = "", new: str = "") -> ModuleType:
        assert not old or (BASE + HELPERS).count(old) == 1
        (tmp_path / "helpers.py").write_text(textwrap.dedent(HELPERS.replace(old, new) if old else HELPERS))
        (tmp_path / "prog.py").write_text(textwrap.dedent(BASE.replace(old, new) if old else BASE))
        for name in ("helpers", "prog"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module("prog")

    yield load
    for name in ("helpers", "prog"):
        sys.modules.pop(name, None)


def of_method(module: ModuleType) -> bytes:
    return Fingerprint(module.Scans.make, module.Scans, None).digest


def of_function(module: ModuleType) -> bytes:
    return Fingerprint(module.make, None, None).digest


def test_the_same_code_has_the_same_fingerprint(program: Callable[..., ModuleType]) -> None:
    one, other = program(), program()
    assert one is not other
    assert of_method(one) == of_method(other) and of_function(one) == of_function(other)
    moved = program("\nimport math", "\n# a comment\n\nimport math")
    assert of_method(moved) == of_method(one) and of_function(moved) == of_function(one)


@pytest.mark.parametrize("old, new", [
    ("x * 2", "x * 3"), ("return 10", "return 11"), ("SIZE = 3", "SIZE = 4"), ("x + 1", "x + 2"),
    ("deep(x) * 3", "deep(x) - 3"), ("floor(1.5)", "ceil(1.5)"), ("offset = 1\n", "offset = 1\n    limit = 3\n"),
], ids=["nested", "method", "constant", "deep helper", "helper", "attribute", "irrelevant"])  # fmt: skip
def test_an_edit_below_a_method_changes_it(
    program: Callable[..., ModuleType], old: str, new: str
) -> None:
    before = of_method(program())
    changed = of_method(program(old, new)) != before
    assert changed != (old == "offset = 1\n")


@pytest.mark.parametrize("old, new", [
    ("by=2", "by=4"), ("and_by=3", "and_by=4"), ("(1, 2)", "(1, 3)"), ("x + 1", "x + 2"), ("[1, 2]", "[1, 3]"),
], ids=["default", "keyword default", "tuple", "deep helper", "list"])  # fmt: skip
def test_an_edit_below_a_function_changes_it(
    program: Callable[..., ModuleType], old: str, new: str
) -> None:
    assert of_function(program(old, new)) != of_function(program())


def test_functions_that_are_not_named_do_not_count(program: Callable[..., ModuleType]) -> None:
    text = "def unused(x):\n    return x"
    before = of_method(program()), of_function(program())
    after = program(text, text + " + 5")
    assert (of_method(after), of_function(after)) == before


def test_unfollowed_objects_are_listed(program: Callable[..., ModuleType]) -> None:
    module = program()
    [told] = Fingerprint(module.uses_object, None, None).unfollowed
    assert told == "OBJECT (helpers.Thing)"
    [told] = Fingerprint(module.make, None, None).unfollowed
    assert told.startswith("TABLE (read once")
    cache = new_cache()
    kept = cache.memoize()(module.uses_object)
    assert kept(1) == 2 and cache.stats()["unfollowed"] == ["OBJECT (helpers.Thing)"]


def test_a_subclass_that_overrides_a_helper_differs(program: Callable[..., ModuleType]) -> None:
    module = program()

    class Other(module.Scans):  # type: ignore[name-defined, misc]
        def shift(self) -> int:
            return 20

    assert Fingerprint(module.Scans.make, Other, None).digest != of_method(module)


def test_version_changes_fingerprint(program: Callable[..., ModuleType]) -> None:
    module = program()
    assert Fingerprint(module.make, None, "2").digest != of_function(module)


def test_cell_with_edited_helper_gets_new_key() -> None:
    """At a prompt, and by tools that change the code of a function in place."""
    names: dict[str, Any] = {"cache": new_cache(), "__name__": "__main__"}
    exec("def helper(x):\n    return x + 1\n", names)
    exec("@cache.memoize()\ndef make(x):\n    return helper(x) * SCALE\nSCALE = 10", names)
    assert names["make"](1) == names["make"](1) == 20
    exec("def helper(x):\n    return x + 2\n", names)
    assert names["make"](1) == 30
    exec("SCALE = 100", names)
    assert names["make"](1) == 300
    names["helper"].__code__ = (lambda x: x).__code__
    assert names["make"](1) == 100
    exec("def helper(x):\n    return x + 1\nSCALE = 10", names)
    assert names["make"](1) == 20
    assert names["cache"].stats()["stored"] == 4
