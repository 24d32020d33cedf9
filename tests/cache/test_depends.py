"""What a value depends on: any edit that can change it makes another digest, or is refused."""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import os
import pickle
import sqlite3
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import minato
from minato.cache import files
from minato.cache.depends import Depends, Unknown, is_data, of_call, of_methods

from .support import Calls, new_cache

HEAD = """
import enum, functools, operator, types
import numpy as np
import torch
import helpers
from helpers import scaled
"""
HELPERS = """
LIMIT = 7
def __getattr__(name): return 1000
def a(x): return x * 10
def b(x): return x
def scaled(k):
    def decorate(f):
        @functools.wraps(f)
        def inner(*args): return f(*args) * k
        return inner
    return decorate
class Reader:
    factor = 10
    def read(self, i): return i * self.factor
    def other(self): return 5
import functools
"""
#: name -> (program with a function or method `load`, the edited text, its new text)
FORMS = {
    "constant": ("SIZE = 3\ndef load(i): return i * SIZE", "SIZE = 3", "SIZE = 4"),
    "nested function": ("def load(i):\n    def f(x): return x * 2\n    return f(i)", "x * 2", "x * 3"),
    "default": ("def load(i, by=2): return i * by", "by=2", "by=4"),
    "keyword default": ("def load(i, *, by=2): return i * by", "by=2", "by=4"),
    "default of a helper": ("def f(x, by=2): return x * by\ndef load(i): return f(i)", "by=2", "by=4"),
    "list": ("TABLE = [1, 2]\ndef load(i): return TABLE[i]", "[1, 2]", "[1, 3]"),
    "array": ("TABLE = np.arange(3)\ndef load(i): return TABLE[i]", "arange(3)", "arange(4)"),
    "tensor": ("TABLE = torch.arange(3)\ndef load(i): return TABLE[i]", "arange(3)", "arange(4)"),
    "dict of functions": ("def f(x): return x * 2\nT = {1: f}\ndef load(i): return T[i](i)", "x * 2", "x * 3"),
    "helper of a module": ("def load(i): return helpers.a(i)", "x * 10", "x * 100"),
    "helpers used in two functions": (
        "def check(i): return helpers.b(i)\ndef load(i): return check(i) + helpers.a(i)", "x * 10", "x * 100"),
    "constant of a module": ("def load(i): return i * helpers.LIMIT", "LIMIT = 7", "LIMIT = 8"),
    "import inside": ("def load(i):\n    from helpers import a\n    return a(i)", "x * 10", "x * 100"),
    "module imported inside": ("def load(i):\n    import helpers as h\n    return h.a(i)", "x * 10", "x * 100"),
    "module as an argument": (
        "def f(m, i): return m.a(i)\ndef load(i): return f(helpers, i)", "x * 10", "x * 100"),
    "__getattr__ of a module": ("def load(i): return helpers.missing", "return 1000", "return 1001"),
    "class constant": ("class C:\n    SIZE = 3\ndef load(i): return i * C.SIZE", "SIZE = 3", "SIZE = 5"),
    "constant of a base class": (
        "class B:\n    SIZE = 3\nclass C(B): pass\ndef load(i): return i * C.SIZE", "SIZE = 3", "SIZE = 5"),
    "enum": ("class E(enum.Enum):\n    A = 3\ndef load(i): return i * E.A.value", "A = 3", "A = 5"),
    "object": ("class C:\n    def __init__(self, k): self.k = k\nC1 = C(3)\ndef load(i): return i * C1.k",
               "C(3)", "C(4)"),
    "method of an object": ("R = helpers.Reader()\ndef load(i): return R.read(i)", "i * self.f", "1 + self.f"),
    "class attribute of an object": ("R = helpers.Reader()\ndef load(i): return R.read(i)", "= 10", "= 100"),
    "slots": ("class C:\n    __slots__ = ('k',)\n    def __init__(self, k): self.k = k\nC1 = C(3)\n"
              "def load(i): return i * C1.k", "C(3)", "C(4)"),
    "not pickled": ("class C:\n    def __init__(self, k): self.k = k\n    def __getstate__(self): return {}\n"
                    "C1 = C(3)\ndef load(i): return i * C1.k", "C(3)", "C(4)"),
    "bound method": ("read = helpers.Reader().read\ndef load(i): return read(i)", "= 10", "= 100"),
    "method of a list": ("at = [1, 2, 3].__getitem__\ndef load(i): return at(i)", "[1, 2, 3]", "[1, 2, 4]"),
    "property": ("class C:\n    @property\n    def k(self): return 3\ndef load(i): return i * C().k",
                 "return 3", "return 4"),
    "cached property": ("class C:\n    @functools.cached_property\n    def k(self): return 3\n"
                        "def load(i): return i * C().k", "return 3", "return 4"),
    "static method": ("class C:\n    @staticmethod\n    def k(): return 3\ndef load(i): return i * C.k()",
                      "return 3", "return 4"),
    "descriptor": ("class D:\n    def __get__(self, *_): return 3\nclass C:\n    k = D()\n"
                   "def load(i): return i * C().k", "return 3", "return 4"),
    "metaclass": ("class M(type):\n    def __len__(cls): return 3\nclass C(metaclass=M): pass\n"
                  "def load(i): return i * len(C)", "return 3", "return 4"),
    "decorator's argument": ("@scaled(10)\ndef f(i): return i\ndef load(i): return f(i)",
                             "scaled(10)", "scaled(100)"),
    "decorated function": ("@scaled(10)\ndef f(i): return i + 1\ndef load(i): return f(i)", "i + 1", "i + 2"),
    "decorator of a package": ("@torch.no_grad()\ndef f(i): return i + 1\ndef load(i): return f(i)",
                               "i + 1", "i + 2"),
    "wrapper named as a package's": (
        "@functools.wraps(np.sum)\ndef f(i): return i + 1\ndef load(i): return f(i)", "i + 1", "i + 2"),
    "lru_cache": ("@functools.lru_cache\ndef f(i): return i + 1\ndef load(i): return f(i)", "i + 1", "i + 2"),
    "singledispatch": ("@functools.singledispatch\ndef f(i): return i\n@f.register\ndef _(i: int): return i + 1\n"
                       "def load(i): return f(i)", "i + 1", "i + 2"),
    "partial": ("f = functools.partial(pow, 3)\ndef load(i): return f(i)", "pow, 3", "pow, 4"),
    "partial of a function": ("def g(k, i): return k + i\nf = functools.partial(g, 3)\ndef load(i): return f(i)",
                              "k + i", "k - i"),
    "closure": ("def outer(k):\n    def f(i): return i * k\n    return f\nf = outer(3)\ndef load(i): return f(i)",
                "outer(3)", "outer(4)"),
    "lambda": ("f = lambda x: x + 1\ndef load(i): return f(i)", "x + 1", "x + 2"),
    "methodcaller": ("f = operator.methodcaller('read', 1)\nR = helpers.Reader()\ndef load(i): return f(R)",
                     "= 10", "= 100"),
    "attribute of a function": ("def f(i): return i * f.k\nf.k = 3\ndef load(i): return f(i)", "f.k = 3", "f.k = 4"),
    "np.vectorize": ("def one(x): return x * 10\nf = np.vectorize(one)\ndef load(i): return f(i)",
                     "x * 10\nf", "x * 100\nf"),
    "module of torch": ("pad = torch.nn.ConstantPad1d(1, 10.0)\ndef load(i): return pad(torch.zeros(1, i))",
                        "10.0", "100.0"),
    "weights": ("net = torch.nn.Linear(1, 1)\ntorch.nn.init.constant_(net.weight, 3.0)\n"
                "torch.nn.init.zeros_(net.bias)\ndef load(i): return net(torch.zeros(i, 1))", "3.0", "4.0"),
    "torch.jit.script": ("@torch.jit.script\ndef f(x: torch.Tensor): return x * 10\ndef load(i): return f(i)",
                         "x * 10\ndef load", "x * 100\ndef load"),
    "torch.compile": ("@torch.compile(backend='eager')\ndef f(x): return x * 10\ndef load(i): return f(i)",
                      "x * 10\ndef load", "x * 100\ndef load"),
    "getattr": ("def load(i): return getattr(helpers, 'ab'[0])(i)", "x * 10", "x * 100"),
    "globals": ("def f(x): return x + 1\ndef load(i): return globals()['f'](i)", "x + 1", "x + 2"),
    "subclasses": ("class B: pass\nclass C(B):\n    def f(self, i): return i + 1\n"
                   "def load(i): return B.__subclasses__()[0]().f(i)", "i + 1", "i + 2"),
    "what an lru_cache keeps": ("@functools.lru_cache\ndef f(a=0): return SIZES.pop()\nSIZES = [3]\nf()\n"
                                "def load(i): return i * f()", "= [3]", "= [4]"),
    "what an lru_cache without bound keeps": (
        "@functools.lru_cache(None)\ndef f(): return SIZES.pop()\nSIZES = [3]\nf()\ndef load(i): return i * f()",
        "= [3]", "= [4]"),
    "eval": ("def f(x): return x + 1\ndef load(i): return eval('f(i)')", "x + 1", "x + 2"),
    "class of an argument": ("def load(r, i): return r.read(i)", "= 10", "= 100"),
    "dict with attributes": (
        "class Cfg(dict):\n    __getattr__ = dict.__getitem__\ncfg = Cfg(k=3)\ndef load(i): return i * cfg.k",
        "k=3", "k=4"),
    "class registered with an ABC": (
        "import abc\nclass N(abc.ABC): pass\nN.register(int)\ndef load(i): return isinstance(i, N)",
        "register(int)", "register(str)"),
    "constant of a module of torch.jit": (
        "class M(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.k = 3\n"
        "    def forward(self, x): return x * self.k\nf = torch.jit.script(M())\n"
        "def load(i): return f(torch.tensor(i))", "self.k = 3", "self.k = 4"),
    "name of a function": ("def f(): pass\ng = f\ndef load(i): return g.__name__", "f(): pass\ng = f", "h(): pass\ng = h"),
    "annotations": ("def f(x: int): pass\ndef load(i): return f.__annotations__['x'](i)", "x: int", "x: float"),
    "function that a package got": ("import colorsys\ncolorsys.of_test = lambda i: i + 1\n"
                                    "def load(i): return colorsys.of_test(i)", "i + 1", "i + 2"),
    "function among the builtins": ("import builtins\nbuiltins.of_test = lambda i: i + 1\n"
                                    "def load(i): return of_test(i)", "i + 1", "i + 2"),
    "attrgetter of a module": ("f = operator.attrgetter('a')\ndef load(i): return f(helpers)(i)",
                               "x * 10", "x * 100"),
    "exception": ("def load(i):\n    try: return 1 / i\n    except ZeroDivisionError: return 3", "return 3", "return 4"),
}  # fmt: skip
#: programs with a function `load` whose values differ by V, which is no part of the source
STATES = {
    "module's name that is computed": "helpers.LIMIT = V\ndef load(i): return getattr(helpers, 'LIM' + 'IT')",
    "module's dict": "helpers.LIMIT = V\ndef load(i): return helpers.__dict__['LIMIT']",
    "globals": "def load(i): return globals()['V']",
    "sys.modules": "import sys\nhelpers.LIMIT = V\ndef load(i): return sys.modules['helpers'].LIMIT",
    "import_module": "import importlib as l\nhelpers.LIMIT = V\ndef load(i): return l.import_module('helpers').LIMIT",
    "globals of a function": "helpers.LIMIT = V\ndef load(i): return helpers.a.__globals__['LIMIT']",
    "eval": "def load(i): return eval('V')",
    "attribute of a tensor": "T = torch.ones(2)\nT.k = V\ndef load(i): return T.k",
    "strides of a tensor": "T = torch.ones(2, 2).t() if V else torch.ones(2, 2)\ndef load(i): return T.stride()",
    "strides of an array": "A = np.ones((2, 2), order='CF'[V])\ndef load(i): return A * i",
    "gradient": "T = torch.ones(1, requires_grad=True)\n(T * V).sum().backward()\ndef load(i): return T.grad.item()",
    "method of a tensor": "at = torch.tensor([V]).__getitem__\ndef load(i): return at(0)",
    "part of a complex tensor": "T = torch.tensor([1j * (V + 1)] * 2).conj().imag\ndef load(i): return T[i]",
    "attribute with another one's state": (
        "class C:\n    def __init__(self, k): self.k = k\n    def __getstate__(self): return {'k': None}\n"
        "C1 = C(V)\ndef load(i): return C1.k"),
    "object that copyreg pickles": (
        "import copyreg\nclass C: pass\ncopyreg.pickle(C, lambda one: (C, ()))\nC1 = C()\nC1.k = V\n"
        "def load(i): return C1.k"),
}  # fmt: skip
#: programs with a function `load` whose values `change` changes
CHANGES = {
    "attribute of a function": "def f(): return f.k\nf.k = 1\ndef load(i): return f()\ndef change(): f.k = 2",
    "default dtype": "def load(i): return torch.ones(1).dtype.itemsize\n"
                     "def change(): torch.set_default_dtype(torch.float64)",
    "object that leads back to its class": (
        "class C:\n    __slots__ = ('k',)\n    def __init__(self):\n        super().__init__()\n        self.k = 1\n"
        "one = C()\ndef load(i): return one.k\ndef change(): one.k = 2"),
    "buffer of a module of torch": (
        "class N(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('k', torch.tensor(1.0), persistent=False)\n"
        "    def forward(self, x): return x * self.k\nnet = N()\n"
        "def load(i): return net(torch.ones(1)).item()\ndef change(): net.k.fill_(2)"),
    "parser of a configuration": (
        "import configparser\nK = configparser.ConfigParser()\nK.read_string('[a]\\nk = 1')\n"
        "def load(i): return K['a']['k']\ndef change(): K['a']['k'] = '2'"),
    "object to which the call adds": (
        "class C: k = [1]\none = C()\none.k = [1]\ndef load(i):\n    one.made = i\n    return one.k[0]\n"
        "def change(): one.k[0] = 2"),
    "object of which the call counts": (
        "class C: pass\none = C()\none.k, one.n = [1], 0\ndef load(i):\n    one.n += 1\n    return one.k[0]\n"
        "def change(): one.k[0] = 2"),
    "class of an argument": (
        "class C: k = 1\ndef load(one): return type(one).k\ndef change(): C.k = 2\ndef argument(): return C()"),
}  # fmt: skip
#: the same with a method `load` of a class Scans, whose state the key stands for
METHODS = {
    "method": ("def load(self, i): return self.f(i)\n    def f(self, i): return i + 1", "i + 1", "i + 2"),
    "class constant": ("K = 3\n    def load(self, i): return i * self.K", "K = 3", "K = 4"),
    "constant by cls": ("K = 3\n    @classmethod\n    def f(cls): return cls.K\n    def load(self, i): return self.f()",
                        "K = 3", "K = 4"),
    "super": ("def load(self, i): return super().f(i)", "i - 1", "i - 2"),
    "inherited": ("def load(self, i): return self.f(i)", "i - 1", "i - 2"),
    "property": ("def load(self, i): return self.k\n    @property\n    def k(self): return 3", "return 3", "return 4"),
    "self handed on": ("def load(self, i): return show(self, i)\n    def f(self, i): return i + 1", "i + 1", "i + 2"),
    "self in a lambda": ("def load(self, i): return (lambda: self.f(i))()\n    def f(self, i): return i + 1",
                         "i + 1", "i + 2"),
    "self called": ("def load(self, i): return self(i)\n    def __call__(self, i): return i + 1", "i + 1", "i + 2"),
    "self indexed": ("def load(self, i): return self[i]\n    def __getitem__(self, i): return i + 1",
                     "i + 1", "i + 2"),
    "__getattr__": ("def load(self, i): return self.any(i)\n    def __getattr__(self, name): return lambda i: i + 1",
                    "i + 1", "i + 2"),
    "reader in an attribute": ("def __init__(self): self.r = helpers.Reader()\n"
                               "    def load(self, i): return self.r.read(i)", "= 10", "= 100"),
    "decorated method": ("@scaled(10)\n    def f(self, i): return i\n    def load(self, i): return self.f(i)",
                         "scaled(10)", "scaled(100)"),
    "partialmethod": ("def g(self, k): return k\n    f = functools.partialmethod(g, 3)\n"
                      "    def load(self, i): return self.f()", "(g, 3)", "(g, 4)"),
}  # fmt: skip
BASE = "class Base:\n    def f(self, i): return i - 1\ndef show(scans, i): return scans.f(i)\nclass Scans(Base):\n    "


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Writes a program, edited or not, and imports it anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load(text: str, old: str = "", new: str = "") -> ModuleType:
        assert not old or (text + HELPERS).count(old) == 1, old
        for name, content in (("helpers", HELPERS), ("prog", HEAD + text)):
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(content.replace(old, new) if old else content))
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module("prog")

    yield load
    for name in ("helpers", "prog"):
        sys.modules.pop(name, None)


def digest(module: ModuleType) -> bytes:
    args: tuple[Any, ...] = (1,)
    if hasattr(module, "Scans"):
        return of_call((module.Scans.load, None, None, 1), (module.Scans(), *args), True).digest()
    if module.load.__code__.co_varnames[0] == "r":
        args = module.helpers.Reader(), 1
    return of_call((module.load, None, None, 1), args, False).digest()


@pytest.mark.parametrize("form", FORMS)
def test_edit_below_a_function_changes_its_digest(program: Callable[..., ModuleType], form: str) -> None:
    before = digest(program(FORMS[form][0]))
    assert digest(program(FORMS[form][0])) == before
    assert digest(program(*FORMS[form])) != before


@pytest.mark.parametrize("form", STATES)
def test_state_set_at_run_time_changes_the_digest(program: Callable[..., ModuleType], form: str) -> None:
    text = "V = 0\n" + STATES[form]
    before = digest(module := program(text))
    source = Path(str(module.__file__))
    assert digest(program(text)) == before
    for name in ("helpers", "prog"):
        sys.modules.pop(name)
    changed = ModuleType("prog")
    changed.__file__ = str(source)
    sys.modules["prog"] = changed
    exec(compile((HEAD + text).replace("V = 0\n", "V = 1\n"), str(source), "exec", 0, True), vars(changed))
    assert digest(changed) != before


@pytest.mark.parametrize("form", METHODS)
def test_edit_below_a_method_changes_its_digest(program: Callable[..., ModuleType], form: str) -> None:
    text, old, new = METHODS[form]
    before = digest(program(BASE + text))
    assert digest(program(BASE + text)) == before
    assert digest(program(BASE + text, old, new)) != before


@pytest.mark.parametrize("text, old, new", [
    ("def load(i): return helpers.a(i)\ndef unused(x): return x - 1", "x - 1", "x - 2"),
    ("# a comment\ndef load(i): return helpers.a(i)", "# a comment", "# a comment\n# of two lines"),
    (BASE + "def load(self, i): return self.f(i)\n    def augment(self, x): return x * 2", "x * 2", "x * 3"),
    (BASE + "K = 3\n    def load(self, i): return super().f(i)", "K = 3", "K = 4"),
], ids=["unused function", "comment", "unused method", "unused constant"])  # fmt: skip
def test_edit_elsewhere_keeps_the_values(
    program: Callable[..., ModuleType], text: str, old: str, new: str
) -> None:
    assert digest(program(text)) == digest(program(text, old, new))


def test_pickling_an_object_keeps_the_values(program: Callable[..., ModuleType]) -> None:
    """Python notes the names of slots in a class when it first pickles an object of it."""
    module = program("class C:\n    def f(self, i): return i\none = C()\ndef load(i): return C.f(one, i)")
    before = digest(module)
    one = vars(module)["one"]
    one.__reduce_ex__(2)
    assert "__slotnames__" in vars(type(one)) and digest(module) == before


def test_object_without_state_is_refused_or_answered_for(program: Callable[..., ModuleType]) -> None:
    module = program("import threading\nown = threading.local()\ndef load(i): return own.k")
    with pytest.raises(Unknown, match=r"own, of the type _thread\._local"):
        of_call((module.load, None, None, None), (1,), False)
    answered = of_call((module.load, None, None, 1), (1,), False)
    assert answered.digest() and answered.whole == "own is of the type _thread._local"
    kept = new_cache().memoize()(module.load)
    with pytest.raises(TypeError, match=r"it uses own, .*memoize\(\) a version="):
        kept(1)
    module.own = memory = SharedMemory(create=True, size=8)  # type: ignore[attr-defined]
    memory.close()
    memory.unlink()
    with pytest.raises(TypeError, match=r"SharedMemory \(it pickles its name alone\)"):
        kept(1)


def test_object_without_state_is_told_of_in_a_directory(
    program: Callable[..., ModuleType], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = program("import threading\nown = threading.local()\nown.k = 3\ndef load(i): return own.k")
    load = minato.Cache("1MiB", directory=tmp_path / "cache").memoize(version=1)(module.load)
    assert load(1) == load(2) == 3
    assert [record.getMessage() for record in caplog.records if "it uses own, of the type" in record.getMessage()]


class HoldsItsThread(torch.utils.data.Dataset[Any]):
    cache_version = 1

    def __init__(self) -> None:
        self.own = threading.local()

    def __len__(self) -> int:
        return 4

    def read(self, index: int) -> Any:
        return index if self.own else None

    def decode(self, raw: Any, index: int) -> Any:
        return torch.full((2000,), float(raw))

    def augment(self, value: Any, index: int) -> Any:
        return value

    def __getitem__(self, index: int) -> Any:
        return self.augment(self.decode(self.read(index), index), index)


def test_dataset_with_an_uncompared_object_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = minato.DataLoader(HoldsItsThread(), 2, cache=minato.Cache("1MiB", directory=tmp_path / "cache"))
    assert [len(batch) for _ in range(2) for batch in loader] == [2] * 4
    [told] = [record.getMessage() for record in caplog.records if "cannot compare" in record.getMessage()]
    assert "self.own, of the type _thread._local" in told and "Change cache_version" in told


def test_changes_while_a_program_runs_count(program: Callable[..., ModuleType]) -> None:
    module = program("\n" + textwrap.dedent("""
        SIZE, TABLE, PAIR = 1, [1], ([1], 1)
        class C:
            k = 1
            def f(self): return 1
        def outer():
            n = 1
            def get(): return n
            def put(to):
                nonlocal n
                n = to
            return get, put
        get, put = outer()
        def load(i): return SIZE, TABLE[0], C.k, C().f(), get() + PAIR[0][0] - 1
    """))
    load = new_cache().memoize()(module.load)
    assert load(0) == load(0) == (1, 1, 1, 1, 1)
    module.SIZE = 2  # type: ignore[attr-defined]
    assert load(0) == (2, 1, 1, 1, 1)
    module.TABLE[0] = 2
    assert load(0) == (2, 2, 1, 1, 1)
    module.C.k = 2
    assert load(0) == (2, 2, 2, 1, 1)
    module.C.f = lambda self: 2
    assert load(0) == (2, 2, 2, 2, 1)
    module.put(2)
    assert load(0) == (2, 2, 2, 2, 2)
    module.PAIR[0][0] = 2  # a list within a tuple
    assert load(0) == (2, 2, 2, 2, 3)
    module.load.__code__ = (lambda i: i).__code__
    assert load(0) == 0


@pytest.mark.parametrize("form", CHANGES)
def test_change_between_two_calls_counts(program: Callable[..., ModuleType], form: str) -> None:
    module = program(CHANGES[form])
    argument = module.argument() if hasattr(module, "argument") else 1
    load, dtype = new_cache().memoize(key=lambda one: 0)(module.load), torch.get_default_dtype()
    try:
        before = load(argument)
        assert load(argument) == before == module.load(argument)
        module.change()
        assert load(argument) == load(argument) == module.load(argument) != before
    finally:
        torch.set_default_dtype(dtype)


def test_change_within_an_epoch_counts_for_new_values(program: Callable[..., ModuleType]) -> None:
    module = program("K = [1]\ndef load(i): return i * K[0]")
    load = new_cache().memoize()(module.load)
    assert load(1) == 1
    load.__minato_memoized__._looked = 0.0  # as after a look that took no time
    module.K[0] = 10
    assert load(2) == 20
    module.K[0] = 1
    assert [load(2), load(1)] == [2, 1]


def test_object_that_takes_long_to_compare_is_compared_each_epoch() -> None:
    class Slow:
        k = 1

        def __getstate__(self) -> Any:
            time.sleep(0.06)
            return {"k": self.k}

    slow = Slow()
    names: dict[str, Any] = {"cache": new_cache(), "slow": slow, "__name__": "__main__"}
    exec("@cache.memoize()\ndef make(x): return x * slow.k", names)
    for slow.k in (1, 2, 3):
        assert names["make"](1) == slow.k


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


def test_paths_of_a_large_dataset_are_compared_at_memory_speed() -> None:
    depends = Depends(False)
    paths = [f"/data/{i}.jpg" for i in range(100_000)]
    depends.add("paths", [(path, i) for i, path in enumerate(paths)])
    before = depends.parts["paths"]
    depends.add("paths", [(path, i + (i == 99_999)) for i, path in enumerate(paths)])
    assert depends.parts["paths"] != before and is_data(paths)


# ---- datasets ------------------------------------------------------------------------------------


class Base(torch.utils.data.Dataset[Any]):
    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return 2

    def item(self, i: int) -> Any:
        return self.items[i]

    def read(self, i: int) -> Any:
        return self.items[i]

    def decode(self, raw: Any, i: int) -> float:
        return float(raw)

    def augment(self, value: float, i: int) -> float:
        return value

    def __getitem__(self, i: int) -> float:
        return self.augment(self.decode(self.read(i), i), i)


def helper(dataset: Any, i: int) -> Any:
    return dataset.items[i]


class Holder:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def read(self, i: int) -> Any:
        return self.dataset.items[i]


class ByPartial(Base):
    def read(self, i: int) -> Any:
        return functools.partial(helper, self)(i)


class ByObject(Base):
    def read(self, i: int) -> Any:
        return Holder(self).read(i)


class ByHolder(Base):
    def __init__(self, items: Any) -> None:
        super().__init__(items)
        self.holder = Holder(self)

    def read(self, i: int) -> Any:
        return self.holder.read(i)


class ByCachedProperty(Base):
    @functools.cached_property
    def listed(self) -> list[Any]:
        return list(self.items)

    def read(self, i: int) -> Any:
        return self.listed[i]


class ByMethodCaller(Base):
    def read(self, i: int) -> Any:
        return operator.methodcaller("item", i)(self)


class ByAlias(Base):
    def read(self, i: int) -> Any:
        me = self
        return me.items[i]


class ByCall(Base):
    def __call__(self, i: int) -> Any:
        return self.items[i]

    def read(self, i: int) -> Any:
        return self(i)


class ByName(Base):
    def read(self, i: int) -> Any:
        return getattr(self, "it" + "ems")[i]


class ByDict(Base):
    def read(self, i: int) -> Any:
        return self.__dict__["items"][i]


class ByGetattr(Base):
    def __getattr__(self, name: str) -> Any:
        if name != "other":
            raise AttributeError(name)
        return self.__dict__["items"]

    def read(self, i: int) -> Any:
        return self.other[i]


class ByComprehension(Base):
    def read(self, i: int) -> Any:
        return [helper(self, i) for _ in range(1)][0]


class ByBoundMethod(Base):
    def __init__(self, items: Any) -> None:
        super().__init__(items)
        self.fetch = self.item

    def read(self, i: int) -> Any:
        return self.fetch(i)


class Reading:
    def __init__(self, items: Any) -> None:
        self.items = items

    def __call__(self, i: int) -> Any:
        return self.items[i]


class ByReplacedMethod(Base):
    def __init__(self, items: Any) -> None:
        super().__init__(None)
        self.read = Reading(items)  # type: ignore[method-assign, assignment]


class BySlots:
    __slots__ = ("items",)
    __init__ = Base.__init__
    __len__, read, decode, augment, __getitem__ = (
        Base.__len__, Base.read, Base.decode, Base.augment, Base.__getitem__
    )  # fmt: skip


def by_default(items: Any) -> Any:
    class ByDefault(Base):
        def read(self, i: int, items: Any = items) -> Any:
            return items[i]

    return ByDefault(None)


def by_closure(items: Any) -> Any:
    class ByClosure(Base):
        def read(self, i: int) -> Any:
            return items[i]

    return ByClosure(None)


def by_class(items: Any) -> Any:
    return type("ByClass", (Base,), {"items": items, "__init__": lambda self: None})()


class BySuper(Base):
    def __init__(self, items: Any) -> None:
        super().__init__(None)
        self.others = items

    def read(self, i: int) -> Any:
        return super().__getattribute__("others")[i]


KINDS: list[Any] = [
    ByPartial, ByObject, ByHolder, ByCachedProperty, ByMethodCaller, ByAlias, ByCall, ByName, ByDict, ByGetattr,
    BySuper, ByComprehension, ByBoundMethod, ByReplacedMethod, BySlots, by_default, by_closure, by_class,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_datasets_with_other_items_share_no_sample(kind: Any) -> None:
    cache = new_cache()
    for items in ([1, 2], [10, 20]):
        loader = minato.DataLoader(kind(items), cache=cache, cache_format="decoded")
        assert [float(batch) for batch in loader] == [float(item) for item in items]


def test_only_attributes_that_are_used_count() -> None:
    one, other = Base([1, 2]), Base([1, 2])
    other.epochs = 7  # type: ignore[attr-defined]
    found = [of_methods(dataset, ("read", "decode"), None, False) for dataset in (one, other)]
    assert found[0].digest == found[1].digest and found[0].counted == "items"
    whole = of_methods(ByAlias([1]), ("read",), None, False)
    assert whole.counted == "every attribute (ByAlias.read hands on self)"
    loader = minato.DataLoader(one, cache=new_cache(), cache_format="decoded")
    list(loader)
    told = loader.stats()["cache"]
    assert told is not None and told["counted"] == "items"


class Scaled(Base):
    def __getitem__(self, i: int) -> float:
        return super().__getitem__(i) * 100


class Shifted(Base):
    def __getitem__(self, i: int) -> float:
        j = (i + 1) % 2
        return self.augment(self.decode(self.read(j), j), j)


@pytest.mark.parametrize("kind", [Scaled, Shifted])
def test_dataset_that_makes_other_samples_is_refused(kind: Any) -> None:
    with pytest.raises(TypeError, match=rf"in place of {kind.__name__}\.__getitem__"):
        minato.DataLoader(kind([1, 2]), cache="4MiB")


class Counting(Base):
    def read(self, i: int) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return self.items[i]


def test_attribute_that_changes_each_epoch_is_named(caplog: pytest.LogCaptureFixture) -> None:
    loader = minato.DataLoader(Counting([1, 2]), cache=new_cache(), cache_format="decoded")
    for _ in range(3):
        assert [float(batch) for batch in loader] == [1.0, 2.0]
    [line] = [one for one in caplog.messages if "since the last epoch" in one]
    assert "self.calls" in line and "cache_key(self, i)" in line


# ---- random numbers ------------------------------------------------------------------------------


class Drawing(Base):
    def __init__(self, where: str) -> None:
        super().__init__([1, 2])
        self.where, self.rng = where, np.random.default_rng(0)

    def decode(self, raw: Any, i: int) -> float:
        if self.where == "torch":
            return float(torch.rand(()))
        return float(np.random.rand() if self.where == "numpy.random" else self.rng.random())


@pytest.mark.parametrize("form", ["decoded", None])
@pytest.mark.parametrize("where", ["torch", "numpy.random", "self.rng"])
def test_draws_of_the_cached_part_are_told_once(
    where: str, form: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    loader = minato.DataLoader(Drawing(where), cache=new_cache(), cache_format=form)
    for _ in range(2):
        list(loader)
    [line] = [one for one in caplog.messages if "draws random numbers" in one]
    assert f"numbers from {where}" in line and "Drawing" in line
    report = minato.check_determinism(Drawing(where))
    assert not report and where in str(report) and "cache" in str(report)


def test_generators_and_locks_do_not_keep_samples_apart() -> None:
    one, other = ByAlias([1, 2]), ByAlias([1, 2])
    for dataset in (one, other):
        dataset.lock, dataset.rng = threading.Lock(), np.random.default_rng()  # type: ignore[attr-defined]
    assert of_methods(one, ("read",), None, False).digest == of_methods(other, ("read",), None, False).digest


# ---- files ---------------------------------------------------------------------------------------


def test_file_that_python_opens_counts_unnamed(tmp_path: Path, calls: Calls) -> None:
    file, other = tmp_path / "data", tmp_path / "other"
    file.write_text("1")

    @new_cache().memoize(key=lambda: 0)
    def load() -> tuple[str, bool]:
        calls.note()
        return file.read_text(), other.exists() and other.read_text() == "there"

    time.sleep(0.05)  # a file that was written just now is not trusted
    assert load() == load() == ("1", False) and len(calls.all()) == 1
    file.write_text("2")
    time.sleep(0.05)
    assert load() == load() == ("2", False) and len(calls.all()) == 2


def test_folder_that_is_listed_counts(tmp_path: Path, calls: Calls) -> None:
    @new_cache().memoize(key=lambda: 0)
    def load() -> list[str]:
        calls.note()
        return sorted(path.name for path in tmp_path.glob("*.txt"))

    (tmp_path / "a.txt").touch()
    time.sleep(0.05)
    assert load() == load() == ["a.txt"]
    (tmp_path / "b.txt").touch()
    time.sleep(0.05)
    assert load() == ["a.txt", "b.txt"]


def test_temporary_file_of_the_maker_does_not_count(tmp_path: Path, calls: Calls) -> None:
    @new_cache().memoize(key=lambda: 0)
    def load() -> str:
        calls.note()
        file = tmp_path / "scratch"
        file.write_text("1")
        text = file.read_text()
        file.unlink()
        return text

    assert load() == load() == "1" and len(calls.all()) == 1


@pytest.mark.parametrize("write", [Path.write_text, lambda path, text: replaced(path, text)], ids=["open", "rename"])
def test_file_that_the_maker_leaves_counts(write: Any, tmp_path: Path, calls: Calls) -> None:
    file = tmp_path / "left"

    @new_cache().memoize(key=lambda: 0, check="use")
    def load() -> str:
        calls.note()
        if not file.exists():
            write(file, "1")
            return "1"
        return file.read_text()

    assert load() == "1"
    time.sleep(0.05)  # a file that was written just now is not trusted
    assert load() == load() == "1" and len(calls.all()) == 2
    rewritten(file, "2")
    assert load() == "2"


def replaced(file: Path, text: str) -> None:
    other = file.with_suffix(".new")
    other.write_text(text)
    other.replace(file)


@pytest.mark.parametrize("ask", [
    os.path.exists, Path.is_file, os.path.getsize, lambda path: os.readlink(path), lambda path: os.stat(path).st_size,
    lambda path: path.resolve().name, lambda path: os.access(path, os.R_OK),
], ids=["exists", "is_file", "getsize", "readlink", "stat", "resolve", "access"])  # fmt: skip
def test_path_that_is_asked_for_counts(ask: Any, tmp_path: Path, calls: Calls) -> None:
    file, link = tmp_path / "data", tmp_path / "link"
    file.write_text("1")
    link.symlink_to(file)

    @new_cache().memoize(key=lambda: 0, check="use")
    def load() -> Any:
        calls.note()
        try:
            return ask(link)
        except OSError:
            return None

    time.sleep(0.05)  # a file that was written just now is not trusted
    before = load()
    assert load() == before is not None and len(calls.all()) == 1
    (tmp_path / "other").write_text("22")
    link.unlink()
    if before is not True:
        link.symlink_to(tmp_path / "other")
    time.sleep(0.05)
    assert load() != before
    assert pickle.loads(pickle.dumps(os.stat)) is os.stat in os.supports_follow_symlinks


def rewritten(file: Path, text: str) -> None:
    time.sleep(0.05)  # a file that was written just now is not trusted
    file.write_text(text)
    time.sleep(0.05)


def test_files_of_a_value_within_a_value_count(tmp_path: Path) -> None:
    cache, file = new_cache(), tmp_path / "data"
    kept: Any = functools.partial(cache.memoize, key=lambda i: i, check="use")
    inner = kept()(lambda i: file.read_text())
    named = kept(files=lambda i: file)(lambda i: os.stat(file).st_size)
    outer = kept()(lambda i: (inner(0), named(0), i))
    rewritten(file, "1")
    assert [inner(0), named(0), outer(0), outer(1), outer(1)] == ["1", 1, ("1", 1, 0), ("1", 1, 1), ("1", 1, 1)]
    rewritten(file, "22")
    assert [outer(0), outer(1)] == [("22", 2, 0), ("22", 2, 1)]


class Lazy(Base):
    """Opens what it reads at its first sample, and keeps it."""

    def __init__(self, path: Path, how: str) -> None:
        super().__init__([1, 2])
        self.path, self.how, self.table = path, how, None

    @functools.lru_cache  # noqa: B019
    def listed(self) -> list[str]:
        return self.path.read_text().split()

    def read(self, i: int) -> Any:
        if self.how == "lru_cache":
            return self.listed()[i]
        if self.table is None:
            self.table = self.path.read_text().split()
        return self.table[i]


@pytest.mark.parametrize("how", ["lru_cache", "attribute"])
def test_file_that_is_kept_counts_for_later_samples(how: str, tmp_path: Path) -> None:
    cache, path = new_cache(), tmp_path / "data"
    for text in ("1 2", "10 20"):
        rewritten(path, text)
        Lazy.listed.cache_clear()
        files._lasting.clear()  # as in a program of its own
        loader = minato.DataLoader(Lazy(path, how), cache=cache, cache_format="decoded")
        assert [float(batch) for batch in loader] == [float(word) for word in text.split()]


def test_module_that_is_imported_by_a_computed_name_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    cache, file = new_cache(), tmp_path / "steps_of_test.py"

    def load(i: int) -> int:
        found: int = importlib.import_module("steps_of_" + "test").step(i)
        return found

    for factor in (10, 100):
        rewritten(file, f"def step(i): return i * {factor}")
        sys.modules.pop("steps_of_test", None)
        files._lasting.clear()
        importlib.invalidate_caches()
        kept = cache.memoize(key=lambda i: i)(load)
        assert [kept(1), kept(2)] == [factor, 2 * factor]
    sys.modules.pop("steps_of_test", None)


class Epochs(Base):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def decode(self, raw: Any, i: int) -> float:
        return float(raw) + 100 * self.epoch


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_epoch_of_persistent_workers_counts(method: str) -> None:
    loader = minato.DataLoader(
        Epochs([1, 2]), num_workers=1, cache=new_cache(), cache_format="decoded",
        persistent_workers=True, multiprocessing_context=method,
    )  # fmt: skip
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert [float(batch) for batch in loader] == [1 + 100 * epoch, 2 + 100 * epoch]


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_change_between_epochs_of_persistent_workers_counts(kind: str) -> None:
    """Worker threads share the dataset, and processes the memory of this tensor."""
    dataset = Base(torch.tensor([1, 2]).share_memory_())
    loader = minato.DataLoader(
        dataset, num_workers=1, cache=new_cache(), cache_format="decoded", persistent_workers=True,
        worker_type=kind, seed_per_sample=False,
    )  # fmt: skip
    for _ in range(3):
        assert [float(batch) for batch in loader] == [float(item) for item in dataset.items]
        dataset.items += 10


class Keyed(Base):
    """Says what its samples are made from, but not what code its transform has."""

    def __init__(self, transform: Any) -> None:
        super().__init__([1])
        self.transforms = [transform]

    def cache_key(self, i: int) -> int:
        return i

    def decode(self, raw: Any, i: int) -> Any:
        return self.transforms[0](raw)


def test_code_of_a_transform_counts_beside_cache_key(program: Callable[..., ModuleType]) -> None:
    def made_of(*edit: str) -> bytes:
        module = program("class Ten:\n    def __call__(self, x): return x + 1\ndef load(i): return i", *edit)
        return of_methods(Keyed(module.Ten()), ("read", "decode", "cache_key"), None, True).digest

    assert made_of() == made_of() != made_of("x + 1", "x + 2")


def test_class_of_an_unpickled_object_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    cache, file, pickled = new_cache(), tmp_path / "scale_of_test.py", b""
    text = "class Scale:\n    def of(self, i): return i * {}"
    for factor in (10, 100):
        rewritten(file, text.format(factor))
        sys.modules.pop("scale_of_test", None)
        importlib.invalidate_caches()
        pickled = pickled or pickle.dumps(importlib.import_module("scale_of_test").Scale())
        importlib.import_module("scale_of_test")

        @cache.memoize(key=lambda i: i)
        def load(i: int) -> Any:
            return pickle.loads(pickled).of(i)

        assert load(1) == load(1) == factor
    sys.modules.pop("scale_of_test", None)


@pytest.mark.parametrize("form", ["{}", "file:{}?mode=ro"])
def test_database_that_sqlite_opens_counts(tmp_path: Path, form: str) -> None:
    file = tmp_path / "data"
    name = form.format(file)
    loader = minato.DataLoader(Table(name), cache=new_cache(), cache_format="decoded")
    for value in (1, 2):
        file.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(file)) as table:
            table.execute("create table t (v)")
            table.execute(f"insert into t values ({value})")
            table.commit()
        time.sleep(0.05)  # a file that was written just now is not trusted
        assert [float(batch) for batch in loader] == [value, value]


@pytest.mark.parametrize("form", ["{}", "file:{}?mode=ro"])
def test_write_ahead_log_of_a_database_counts(tmp_path: Path, form: str) -> None:
    file = tmp_path / "data"
    with contextlib.closing(sqlite3.connect(file)) as writer:
        writer.execute("pragma journal_mode=wal")
        writer.execute("create table t (v)")
        writer.execute("insert into t values (0)")
        loader = minato.DataLoader(Table(form.format(file)), cache=new_cache(), cache_format="decoded")
        for value in (1, 2):
            writer.execute("update t set v = ?", (value,))
            writer.commit()
            time.sleep(0.05)
            assert [float(batch) for batch in loader] == [value, value]


class Table(Base):
    def __init__(self, path: str) -> None:
        super().__init__([0])
        self.path = path

    def read(self, i: int) -> Any:
        with contextlib.closing(sqlite3.connect(self.path, uri=True)) as table:
            return table.execute("select v from t").fetchone()[0]


@pytest.fixture
def calls(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    return Calls(tmp_path_factory.mktemp("calls") / "calls")


def other_items(_worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.items = [10, 20]


def test_worker_init_fn_that_changes_the_dataset_counts() -> None:
    cache = new_cache()
    plain = minato.DataLoader(Base([1, 2]), num_workers=1, cache=cache, cache_format="decoded")
    changed = minato.DataLoader(
        Base([1, 2]), num_workers=1, cache=cache, cache_format="decoded", worker_init_fn=other_items
    )
    assert [float(b) for b in plain] == [1, 2] and [float(b) for b in changed] == [10, 20]
