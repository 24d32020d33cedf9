"""Turns what a memoized function does into bytes, so that other code makes other entries.

A function counts by its code, constants, defaults and closure cells, and by what its code names.
These are the program's own functions and classes (followed in turn), plain values of the module,
and installed packages by their version. Methods that it calls on `self` are looked up in the class
of `self`. What cannot be followed is listed: an object of the program's, a list that may change, a
name that is found only at run time.

A fingerprint holds only as long as its sources are the same. So it knows which names it has looked
up and which code they had. Looking again is a comparison of identities each.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import importlib.metadata
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from .keys import canonical

#: values that cannot change under their name
CONSTANT = (type(None), bool, int, float, complex, str, bytes)


@functools.cache
def _is_installed(file: str) -> bool:
    """Whether pip or the system has put a file where it is."""
    if {"site-packages", "dist-packages"} & set(PurePath(file).parts):
        return True
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(PurePath(file).is_relative_to(os.path.realpath(path)) for path in paths if path)


@functools.cache
def _package(module: str) -> str | None:
    """Name and version of the installed package of a module; None for the program's own code."""
    top = module.partition(".")[0]
    if top == "__main__":  # under a notebook the launcher's, which is installed
        return None
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return "python"
    found = sys.modules.get(top)
    file = getattr(found, "__file__", None)
    if file is None:
        if found is None or getattr(found, "__path__", None) is None:
            return None
        file = next(iter(found.__path__), "")
    if top != "minato" and not _is_installed(os.path.realpath(file)):
        return None
    version = getattr(found, "__version__", None)
    if not isinstance(version, str):
        try:
            version = importlib.metadata.version(top)
        except importlib.metadata.PackageNotFoundError:
            version = ""
    return f"{top} {version}"


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


class Fingerprint:
    """Fingerprints a function; a method, as called on objects of a class."""

    def __init__(self, function: Any, cls: type | None, version: Any) -> None:
        self._hash = hashlib.blake2b(digest_size=32)
        self._seen: set[int] = set()
        #: what could not be followed, for people
        self.unfollowed: list[str] = []
        #: (names, name, object) and (function, code) that it was made of
        self._names: list[tuple[dict[str, Any], str, Any]] = []
        self._code: list[tuple[Any, Any]] = []
        self._add(f"python {sys.version_info[:2]} {sys.implementation.name}".encode())
        if version is not None:
            self._add(canonical(version, "version"))
        self._function(function, cls)
        self.digest = self._hash.digest()

    def still(self) -> bool:
        """Whether everything it was made of is what it was."""
        for names, name, value in self._names:
            if names.get(name) is not value:
                return False
        for function, code in self._code:
            if function.__code__ is not code:
                return False
        return True

    def _add(self, data: bytes) -> None:
        self._hash.update(b"%d:" % len(data) + data)

    def _skip(self, what: str) -> None:
        if what not in self.unfollowed:
            self.unfollowed.append(what)
        self._add(b"?" + what.encode())

    # ---- functions ---------------------------------------------------------------------------

    def _function(self, function: Any, cls: type | None) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        code = function.__code__
        self._code.append((function, code))
        for inner in _codes(code):
            self._one_code(inner)
        for name, default in zip(("defaults", "kwdefaults"),
                                 (function.__defaults__, function.__kwdefaults__)):  # fmt: skip
            if default is not None:
                for at, value in enumerate(default.values() if name == "kwdefaults" else default):
                    self._value(value, f"a default of {function.__qualname__} ({at})")
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            self._cell(name, cell, function)
        names = {name for inner in _codes(code) for name in inner.co_names}
        for name in sorted(names):
            if name in function.__globals__:
                self._global(function.__globals__, name, names)
            elif cls is not None:
                self._method(cls, name, names)

    def _one_code(self, code: types.CodeType) -> None:
        self._add(code.co_code)
        self._add(repr((code.co_names, code.co_varnames, code.co_freevars, code.co_argcount,
                        code.co_kwonlyargcount, code.co_flags)).encode())  # fmt: skip
        for constant in code.co_consts:
            if not isinstance(constant, types.CodeType):
                self._add(self._constant(constant))

    @staticmethod
    def _constant(constant: Any) -> bytes:
        if constant is Ellipsis:
            return b"..."
        return canonical(constant)

    def _cell(self, name: str, cell: Any, function: Any) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            return self._skip(f"{name}, a variable of the function around {function.__qualname__}")
        if isinstance(value, type) and name == "__class__":
            return None
        return self._value(value, f"{name}, a variable of the function around "
                                  f"{function.__qualname__}")  # fmt: skip

    # ---- names -------------------------------------------------------------------------------

    def _global(self, names: dict[str, Any], name: str, used: set[str]) -> None:
        value = names[name]
        self._names.append((names, name, value))
        self._add(name.encode())
        if isinstance(value, types.ModuleType):
            self._module(value, used)
        else:
            self._value(value, name)

    def _module(self, module: types.ModuleType, used: set[str]) -> None:
        package = _package(module.__name__)
        if package is not None:
            self._add(package.encode())
            return
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        for name in sorted(used & vars(module).keys()):
            self._global(vars(module), name, used)

    def _method(self, cls: type, name: str, used: set[str]) -> None:
        for base in cls.__mro__:
            if name in vars(base):
                if _package(base.__module__) is None:
                    self._add(name.encode())
                    self._member(base, name, vars(base)[name], cls)
                return

    def _member(self, base: type, name: str, value: Any, cls: type) -> None:
        value = getattr(value, "__func__", value)  # static and class methods
        value = value.fget if isinstance(value, property) else value
        value = getattr(value, "__wrapped__", value)
        if isinstance(value, types.FunctionType):
            self._function(value, cls)
        else:
            self._value(value, f"{base.__qualname__}.{name}")

    # ---- values ------------------------------------------------------------------------------

    def _class(self, cls: type) -> None:
        package = _package(cls.__module__)
        if package is not None:
            self._add(f"{cls.__qualname__} of {package}".encode())
            return
        if id(cls) in self._seen:
            return
        self._seen.add(id(cls))
        self._add(cls.__qualname__.encode())
        for base in cls.__mro__[1:]:
            self._class(base)
        for name, value in sorted(vars(cls).items()):
            function = getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                self._function(function, cls)

    def _value(self, value: Any, where: str) -> None:
        if isinstance(value, types.FunctionType):
            package = _package(value.__module__ or "")
            if package is not None:
                self._add(f"{value.__qualname__} of {package}".encode())
            else:
                wrapped = getattr(value, "__wrapped__", None)
                if isinstance(wrapped, types.FunctionType):
                    self._function(wrapped, None)
                self._function(value, None)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            self._module(value, set())
        elif isinstance(value, functools.partial):
            self._value(value.func, where)
            self._value(value.args, where)
            self._value(value.keywords, where)
        elif (name := getattr(value, "__name__", None)) and vars(builtins).get(name) is value:
            self._add(name.encode())
        elif isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType)):
            self._add(f"{value.__qualname__} of {_package(str(value.__module__))}".encode())
        else:
            self._plain(value, where)

    def _plain(self, value: Any, where: str) -> None:
        package = _package(type(value).__module__)
        try:
            self._add(canonical(value, where))
        except (TypeError, RecursionError):
            if package not in (None, "python") and hasattr(value, "__qualname__"):
                self._add(f"{value.__qualname__} of {package}".encode())  # np.add, torch.float32
            elif package not in (None, "python") and callable(value):
                self._add(f"{type(value).__qualname__} of {package}".encode())
            else:
                self._skip(f"{where} ({type(value).__module__}.{type(value).__qualname__})")
            return
        if not isinstance(value, (*CONSTANT, tuple, frozenset)):
            self.unfollowed.append(f"{where} (read once; changes of its content are not seen)")
