"""Finds what a cached value depends on besides its arguments, and digests it.

The rule: each thing that a value can depend on is followed completely; or everything that it could reach
counts; or it is refused. Nothing is assumed to be without effect. A value that is made again
needlessly is a cost, a wrong value is a defect.

- Code of the program is followed by the names that it uses: functions, classes with all their
  bases and attributes, constants, imports, decorators, closures.
- Objects count by their class and their state, as pickle would store it.
- Installed packages count by their version.
- If code reaches something by a name that is computed (getattr, eval), or an object hides its
  state, the source of all loaded modules of the program counts, and the object as pickled, or the
  objects of the modules in which the name may be.
- What cannot be pickled either raises TypeError, unless the caller gives a version= and so answers
  for it.
- Locks and the like, loggers, caches and random generators count by their type.
"""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import dis
import functools
import gc
import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import logging
import operator
import os
import pickle
import random
import re
import sys
import threading
import types
import weakref
import zipfile
from _abc import _get_dump  # type: ignore[import-not-found]
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch

from .._not_linux import CORE
from ..dataset_calls import own_attributes
from ..seeding import order_generators
from .files import installed, look
from .keys import Opaque, canonical, tensor_bytes

if CORE:
    from .. import _cache
    from .._core import Seeder

#: names by which code reaches what its other names do not show
COMPUTED = frozenset({
    "getattr", "setattr", "vars", "eval", "exec", "compile", "globals", "locals", "__import__", "import_module",
    "attrgetter", "methodcaller", "_getframe", "currentframe", "modules", "__subclasses__", "__annotations__",
    "get_type_hints", "get_annotations", "signature", "getsource", "getsourcelines", "__globals__",
})  # fmt: skip
#: those by which it reaches any name of the modules that it names; of its own module (as attributes, they
#: are others, such as model.eval())
ANY_NAME = frozenset({"getattr", "vars", "attrgetter", "methodcaller", "__dict__", "__globals__"})
OWN_MODULE = frozenset({"eval", "exec", "globals"})
#: those by which it reaches modules that its text names
BY_TEXT = frozenset({"modules", "import_module", "__import__"})
#: attributes of a class that say nothing of its values
WITHOUT_EFFECT = frozenset({
    "__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__firstlineno__", "__static_attributes__", "_abc_impl",
    "__orig_bases__", "__parameters__", "__type_params__", "__slotnames__",
})  # fmt: skip
GENERATORS = (*order_generators.GENERATORS, np.random.SeedSequence)
#: types that count by their name
OPAQUE = (
    type(threading.Lock()), type(threading.RLock()), threading.Event, threading.Condition,
    threading.Semaphore, threading.Barrier, threading.Thread, logging.Logger, Opaque, *GENERATORS,
)  # fmt: skip
#: types of data without code
DATA = frozenset({type(None), bool, int, float, complex, str, bytes, type(Path()), PurePath})
DESCRIPTORS = (
    types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.ClassMethodDescriptorType, types.MethodWrapperType,
)  # fmt: skip
#: digests by the id of an object, or of a holder and a name, and that object or holder
Tokens = dict[Any, tuple[bytes, Any]]
#: types of objects that change only by being replaced, or whose parts are looked at on their own
FIXED = (types.FunctionType, types.ModuleType, type, types.MethodType, *DESCRIPTORS, *OPAQUE, tuple, frozenset)


# ---- whose code it is ------------------------------------------------------------------------


@functools.cache
def _is_installed(file: str) -> bool:
    """Whether pip or the system has put a file where it is; minato's own files count so, too."""
    if {"site-packages", "dist-packages"} & set(PurePath(file).parts):
        return True
    return os.path.realpath(file).startswith(installed())


@functools.cache
def version(top: str) -> str:
    """Of an installed package, by the name under which it is imported. If pip knows it by another
    name, what its first file is."""
    try:
        return importlib.metadata.version(top)
    except (importlib.metadata.PackageNotFoundError, OSError):
        module = sys.modules.get(top)
        with contextlib.suppress(OSError):  # it may not be read any more
            spec = getattr(module, "__spec__", None) or importlib.util.find_spec(top)
            return str(look((spec and spec.origin) or ""))
        return str(getattr(module, "__version__", ""))


def _package(module: str) -> str | None:
    """Name and version of the installed package of a module; None: the program's own."""
    if module in ("__main__", "__mp_main__", ""):
        return None
    top = module.partition(".")[0]
    found = sys.modules.get(module) or sys.modules.get(top)
    file = getattr(found, "__file__", None)
    if file is None:
        spec = getattr(found, "__spec__", None)
        if found is None:
            try:
                spec = importlib.util.find_spec(top)
            except (ImportError, ValueError, AttributeError):
                return None
        if spec is None:
            return _package(top) if top != module else None
        if spec.origin in ("built-in", "frozen"):
            return "python"
        file = spec.origin or next(iter(spec.submodule_search_locations or ()), None)
        if file is None:
            return None
    if not os.path.isabs(file) and top != module:  # made up, as torch.ops
        return _package(top)
    if not _is_installed(file):
        return None
    return "python" if top in sys.stdlib_module_names else f"{top} {version(top)}"


def _package_of(function: types.FunctionType) -> str | None:
    file = function.__code__.co_filename
    if not file.startswith("<"):
        module = _module_name(function)
        return (_package(module) or module) if _is_installed(file) else None
    return "python" if file.startswith("<frozen") else _package(_module_name(function))


def _module_name(function: types.FunctionType) -> str:
    return str(function.__globals__.get("__name__") or "")


def _named(module: str, qualname: str) -> Any:
    """What a module has under this name; None: nothing."""
    try:
        return operator.attrgetter(qualname)(sys.modules[module])
    except (KeyError, AttributeError, TypeError):
        return None


def surroundings() -> bytes:
    """What each value depends on: versions, and torch's default dtype."""
    return repr((
        sys.version_info[:2], sys.implementation.name, np.__version__, torch.__version__,
        _package(__name__), torch.get_default_dtype(),
    )).encode()  # fmt: skip


# ---- code objects ------------------------------------------------------------------------------


class _Code(NamedTuple):
    """What one code object says, those inside it included.

    Attributes:
        digest: of all that its run depends on, but for what the names stand for
        names, attributes: that it loads, as variables of the module and of objects
        imports: (level, name, names that it takes from there)
    """

    digest: bytes
    names: frozenset[str]
    attributes: frozenset[str]
    imports: tuple[tuple[int, str, tuple[str, ...]], ...]


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


@functools.lru_cache(maxsize=4096)
def _code(code: types.CodeType) -> _Code:
    names, attributes = set(), set()
    imports: list[tuple[int, str, tuple[str, ...]]] = []
    parts: list[bytes] = []
    for one in codes(code):
        parts += [one.co_code, getattr(one, "co_exceptiontable", b"")]
        parts.append(repr((one.co_names, one.co_varnames, one.co_freevars, one.co_cellvars, one.co_argcount,
                           one.co_posonlyargcount, one.co_kwonlyargcount, one.co_flags)).encode())  # fmt: skip
        parts += [
            b"code" if isinstance(constant, types.CodeType) else canonical(constant)
            for constant in one.co_consts
        ]
        before: list[Any] = [None, None]
        for step in dis.get_instructions(one):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                names.add(step.argval)
            elif step.opname == "IMPORT_NAME":
                taken = before[1] if isinstance(before[1], tuple) else ()
                imports.append((before[0] or 0, step.argval, taken))
                attributes.update(step.argval.split(".")[1:])
            elif step.opcode in dis.hasname:
                attributes.add(step.argval)
            before = [before[1], step.argval]
    return _Code(_digest(parts), frozenset(names), frozenset(attributes), tuple(imports))


@functools.lru_cache(maxsize=4096)
def _escapes(code: types.CodeType, name: str) -> bool:
    """Whether a variable is used in another way than by ``name.attribute``."""
    for one in codes(code):
        steps = [step for step in dis.get_instructions(one) if step.opname != "EXTENDED_ARG"]
        for step, after in zip(steps, [*steps[1:], None]):
            used = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            if name not in used or step.opcode in (*dis.hasname, *dis.hasconst):
                continue
            if step.opname in ("MAKE_CELL", "LOAD_CLOSURE", "COPY_FREE_VARS"):
                continue
            if not step.opname.startswith("LOAD") or used[-1] != name or used.count(name) > 1:
                return True
            by_name = after is not None and (
                after.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "LOAD_SUPER_ATTR")
            )
            if not by_name or after.argval.startswith("__"):  # type: ignore[union-attr]
                return True
    return False


def _digest(parts: Iterable[bytes]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(b"%d:" % len(part) + part)
    return found.digest()


# ---- what is reached ---------------------------------------------------------------------------


class Unknown(TypeError):
    """Something that a value depends on, and that cannot be compared."""


class Depends:
    """What values depend on.

    Args:
        answered: someone has given a version, and so answers for what cannot be compared.
        own: what the code itself changes, by the id of an object, or of a holder and a name: its digest
            from before that, and the object or holder, which keeps the id.
        before: `tokens` from before a call.

    Attributes:
        tokens: of objects that may change, and of names, as `own`
        changed: those that are not as `before`. Of objects within each other only the innermost
        whole: why the source of the whole program counts; None: it does not
        uncompared: what was met that cannot be compared, and was answered for
        mutable: something was met that may change without being replaced
        parts: (what people know it by, its digest)
        generators: of random numbers, that were met
    """

    def __init__(self, answered: bool, own: Tokens | None = None, before: Tokens | None = None) -> None:
        self._answered = answered
        self._own, self._before = own or {}, before or {}
        self.tokens: Tokens = {}
        self.changed: Tokens = {}
        self.whole: str | None = None
        self.uncompared: str | None = None
        self.mutable = False
        self.parts: dict[str, bytes] = {}
        self.generators: dict[str, Any] = {}
        #: what is to be compared, as _cache.unchanged() takes it
        self._seen: list[tuple[Any, Any, Any]] = []
        self._known: dict[int, bytes] = {}
        self._open: dict[int, int] = {}
        self._alive: list[Any] = []
        self._used: set[str] = set()
        self._any_name = False  # of the modules counts, whether it is in _used or not
        self._modules: dict[str, types.ModuleType] = {}

    def add(self, name: str, value: Any) -> None:
        try:
            self.parts[name] = self._token(value, name)
        except RecursionError:
            raise self._refused(value, name, "is nested too deeply") from None

    def add_code(self, function: Any, name: str) -> None:
        """A function that is called with a `self` whose methods are followed apart."""
        self.parts[name] = _digest(self._own_function(function, name, without_class=True))

    def digest(self) -> bytes:
        """Of all that was added, and of what the program's modules have under names that were used."""
        looked: set[tuple[str, str]] = set()
        while True:
            before = len(self._modules)
            pairs = [
                (module, name) for module in sorted(self._modules) for name in self._names_of(module)
                if (module, name) not in looked
            ]  # fmt: skip
            if not pairs and len(self._modules) == before:
                break
            for module, name in pairs:
                looked.add((module, name))
                names = vars(self._modules[module])
                where = f"{name} of the module {module}"
                if name in self._used or name == "__getattr__":
                    self.parts[where] = self._name(names, name, names[name], where)
                else:
                    self._perhaps(names, name, where)
        if self.whole is not None:
            self.parts["the program's source"] = _digest(self._source())
        self._known.clear()
        self._alive.clear()
        named = [part for name in sorted(self.parts) for part in (name.encode("utf-8", "replace"), self.parts[name])]
        self._around = surroundings()
        return _digest([self._around, *named])

    def _names_of(self, module: str) -> list[str]:
        """Names of a module that count; in a package, those of functions that the program has put there."""
        names = vars(self._modules[module])
        if _package(module) is None:
            used = names if self._any_name else (self._used | {"__getattr__"}) & names.keys()
            return sorted(name for name in used if name in self._used or name == "__getattr__" or name[:2] != "__")
        used = {name: names[name] for name in sorted(self._used & names.keys())}
        for value in used.values():
            if type(value) is types.ModuleType and value.__name__.startswith(f"{module}."):
                self._modules[value.__name__] = value
        functions = {name: value for name, value in used.items() if isinstance(value, types.FunctionType)}
        return [name for name, value in functions.items() if _package_of(value) is None]

    def _perhaps(self, names: dict[str, Any], name: str, where: str) -> None:
        """What code may reach by a name that it computes: most of it without effect, so that it may be
        something that cannot be compared. The source of functions and classes counts anyway."""
        value = names[name]
        if not isinstance(value, (types.FunctionType, type, types.ModuleType)):
            self.mutable = True
            self._seen.append((names, name, value))
            inner = Depends(True, self._own, self._before)
            inner.tokens, inner.changed = self.tokens, self.changed
            with contextlib.suppress(Exception):  # of any object's code
                inner.add(where, value)
                self.parts |= inner.parts

    def unchanged(self) -> bool:
        """Whether all that it was made of is the same object as then."""
        return _cache.unchanged(self._seen)

    def may_have_changed(self) -> bool:
        """Whether it is to be looked at again, though all are the same objects."""
        return self.mutable or self._around != surroundings()

    # ---- tokens --------------------------------------------------------------------------------

    def _token(self, value: Any, where: str) -> bytes:
        at = id(value)
        if at in self._own:
            return self._own[at][0]
        plain = _cache.plain(value)
        if plain is not None:
            try:
                hash(value)
            except TypeError:  # it is, or holds, a list, dict or set
                self.mutable = True
                return self._since(at, value, plain)
            return plain
        if at in self._known:
            return self._known[at]
        if at in self._open:
            return b"^%d" % (len(self._open) - self._open[at])
        self._open[at] = len(self._open)
        self._alive.append(value)
        try:
            found = _digest(self._parts_of(value, where))
        finally:
            del self._open[at]
        if not isinstance(value, FIXED):
            found = self._since(at, value, found)
        self._known[at] = found
        return found

    def _since(self, at: Any, held: Any, token: bytes, value: Any = None) -> bytes:
        """The token from before, so that what holds a thing that has changed has not changed, too."""
        if id(value) in self._open:  # within itself
            return token
        before = self._before.get(at, (token, held))[0]
        if before != token:
            self.changed[at] = before, held
        self.tokens[at] = before, held
        return before

    def _name(self, holder: Any, name: Any, value: Any, where: str) -> bytes:
        """The token of what a name stands for, in a module, class or cell."""
        at = id(holder), name
        if at in self._own:
            return self._own[at][0]
        self._seen.append((holder, name, value))
        return self._since(at, holder, self._token(value, where), value)

    def _attribute(self, owner: Any, name: Any, value: Any, where: str) -> list[bytes]:
        at = id(owner), name
        if at in self._own:
            token = self._own[at][0]
        elif id(owner) in self._before and at not in self._before:  # the call has added it
            self.tokens[at] = self.changed[at] = token, _ = b"", owner
        else:
            token = self._since(at, owner, self._token(value, where), value)
        return [self._token(name, where), token] if token else []

    def _tokens(self, values: Iterable[Any], where: str) -> list[bytes]:
        return [self._token(value, where) for value in values]

    def _parts_of(self, value: Any, where: str) -> list[bytes]:
        kind = type(value)
        for types_, method in _BY_TYPE:
            if isinstance(value, types_):
                return [kind.__name__.encode(), *method(self, value, where)]
        if kind in (list, tuple):
            self.mutable |= kind is list
            if len(value) > 1000 and set(map(type, value)) == {type(Path())}:
                return [b"paths", *self._tokens([[str(path) for path in value]], where)]
            return [kind.__name__.encode(), *self._tokens(value, f"an item of {where}")]
        if kind in (dict, types.MappingProxyType):
            self.mutable = True
            return [b"dict", *self._items(value, where)]
        if kind in (set, frozenset):
            self.mutable |= kind is set
            return [kind.__name__.encode(), *sorted(self._tokens(value, f"an item of {where}"))]
        return [b"object", *self._object(value, where)]

    def _items(self, items: Any, where: str) -> Iterator[bytes]:
        for key, value in items.items():
            yield self._token(key, f"a key of {where}")
            yield self._token(value, f"{where}[{key!r:.40}]")

    # ---- functions -----------------------------------------------------------------------------

    def _function(self, function: types.FunctionType, where: str) -> list[bytes]:
        own = vars(function)
        memoized = own.get("__minato_memoized__")
        if memoized is not None:
            return self._tokens(memoized.made_of(), where)
        if "_torchdynamo_orig_callable" in own:  # torch.compile()
            return [b"compiled", self._token(own["_torchdynamo_orig_callable"], where)]
        package = _package_of(function)
        if package is None:
            return self._own_function(function, where)
        name, module = function.__qualname__, _module_name(function)
        found = [f"{function.__code__.co_name} {name} {module} of {package}".encode()]
        if _named(module, name) is not function:  # what a decorator of the package has made
            found += self._bound(function, where)
        return found

    def _own_function(self, function: types.FunctionType, where: str, without_class: bool = False) -> list[bytes]:
        self._seen.append((function, None, function.__code__))
        code = _code(function.__code__)
        found = [code.digest, function.__qualname__.encode(), *self._bound(function, where, without_class)]
        self._used |= code.attributes | code.names
        for level, name, taken in code.imports:
            found.append(self._imported(function, level, name, taken))
        names = function.__globals__
        for name in sorted(code.names):
            if name in names:
                found += [name.encode(), self._name(names, name, names[name], name)]
            else:
                self._seen.append((names, (name,), None))
                value = getattr(builtins, name, None)
                if value is None or (isinstance(value, types.FunctionType) and _package_of(value) is None):
                    # the program has replaced it
                    found += [name.encode(), self._token(value, name)]
        self._computed(function, code)
        return found

    def _computed(self, function: types.FunctionType, code: _Code) -> None:
        """Names that a code computes."""
        names = code.names | code.attributes
        if COMPUTED & names:
            self.reach_all(f"{function.__qualname__} uses {min(COMPUTED & names)}")
        modules = {_module_name(function)} if OWN_MODULE & code.names or BY_TEXT & names else set()
        if BY_TEXT & names:
            modules |= {text for one in codes(function.__code__) for text in one.co_consts if type(text) is str}
        for name in modules & sys.modules.keys():
            self._module(sys.modules[name], name)
        self._any_name |= bool(modules or names & ANY_NAME)

    def _bound(self, function: types.FunctionType, where: str, without_class: bool = False) -> list[bytes]:
        """Defaults, variables of functions around it, and attributes."""
        name = function.__qualname__
        found = self._tokens([function.__defaults__, function.__kwdefaults__], f"a default of {name}")
        self._seen.append((function, "", function.__defaults__))
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if without_class and variable == "__class__":
                continue
            try:
                value = cell.cell_contents
            except ValueError:
                found.append(b"empty")
                continue
            where = f"{variable}, a variable of the function around {name}"
            found.append(self._name(cell, None, value, where))
        self.mutable |= bool(vars(function).keys() - {"__wrapped__"})
        return [*found, *self._items(vars(function), f"an attribute of {name}")]

    def _imported(self, function: Any, level: int, name: str, taken: tuple[str, ...]) -> bytes:
        try:
            package = function.__globals__.get("__package__") or ""
            absolute = importlib.util.resolve_name("." * level + name, package) if level else name
        except (ImportError, ValueError):
            return b"missing"
        parts = absolute.split(".")
        self._used |= set(taken)
        found = [self._module_named(".".join(parts[: n + 1])) for n in range(len(parts))]
        for one in taken:
            if not hasattr(sys.modules.get(absolute), one) and _package(absolute) is None:
                found.append(self._module_named(f"{absolute}.{one}"))
        return _digest(found)

    def _module_named(self, name: str) -> bytes:
        package = _package(name)
        if package is not None:
            if name in sys.modules:
                self._module(sys.modules[name], name)
            return package.encode()
        try:
            importlib.import_module(name)  # as the function itself will
        except Exception:
            return b"missing"
        return self._token(sys.modules[name], name)

    def _module(self, module: types.ModuleType, where: str) -> list[bytes]:
        name = "__main__" if module.__name__ == "__mp_main__" else module.__name__
        package = _package(name)
        if package is not None:
            self._modules[name] = module
            return [name.encode(), package.encode()]
        file = getattr(module, "__file__", None) or ""
        if file and not file.endswith((".py", ".pyc")):  # compiled
            return [name.encode(), Path(file).read_bytes() if os.path.exists(file) else b""]
        self._modules[name] = module
        return [name.encode()]

    def _builtin(self, value: Any, where: str) -> list[bytes]:
        """A function in C: by name, with the object that it belongs to."""
        owner = getattr(value, "__self__", None)
        found = [str(value.__qualname__).encode(), str(_package(str(value.__module__))).encode()]
        if isinstance(owner, types.ModuleType):
            return [*found, *self._module(owner, where)]
        return found if owner is None else [*found, self._token(owner, where)]

    def _descriptor(self, value: Any, where: str) -> list[bytes]:
        owner = getattr(value, "__self__", getattr(value, "__objclass__", None))
        return [str(value.__qualname__).encode(), self._token(owner, where)]

    def _lru_cache(self, value: Any, where: str) -> list[bytes]:
        """What it keeps counts as this process first finds it: it may come of a file that is not read again."""
        if value not in _kept:
            _kept[value] = b""  # it may keep what leads back to it
            with contextlib.suppress(Unknown):
                _kept[value] = _digest(sorted(self._tokens(_kept_by(value), f"what {where} keeps")))
        return [*self._tokens([value.__wrapped__, dict(value.cache_parameters())], where), _kept[value]]

    def _code_object(self, code: types.CodeType, where: str) -> list[bytes]:
        self.reach_all(f"{where} is a code object")
        return [_code(code).digest]

    # ---- classes and objects -------------------------------------------------------------------

    def _class(self, cls: type, where: str) -> list[bytes]:
        package = _package(cls.__module__)
        if package is not None and _named(cls.__module__, cls.__qualname__) is cls:
            return [f"{cls.__qualname__} {cls.__module__} of {package}".encode()]
        found = [cls.__qualname__.encode(), *self._tokens([type(cls), *cls.__bases__], where)]
        members = vars(cls)
        self._seen.append((cls, None, len(members)))
        for name in sorted(members.keys() - WITHOUT_EFFECT):
            where = f"{cls.__qualname__}.{name}"
            found += [name.encode(), self._name(cls, name, members[name], where)]
        if "_abc_impl" in members:
            registered = [weak() for weak in _get_dump(cls)[0]]
            found += self._tokens(sorted(registered, key=lambda one: getattr(one, "__qualname__", "")), where)
        return found

    def _object(self, value: Any, where: str) -> list[bytes]:
        cls = type(value)
        self.mutable = True
        if isinstance(value, SharedMemory):
            return self._refuse(value, where, "it pickles its name alone")
        if cls.__module__.startswith("h5py.") and hasattr(value, "file"):
            return [str(value.name).encode(), *self._path(os.fsdecode(value.file.filename))]
        if cls in (operator.attrgetter, operator.methodcaller):
            self._any_name = True
            self.reach_all(f"{where} is an {cls.__name__}")
        own = own_attributes(value)
        if isinstance(own.get("py_func"), types.FunctionType):  # numba's
            options = {name: repr(one) for name, one in own.get("targetoptions", {}).items()}
            return self._tokens([cls, own["py_func"], options], where)
        reduce = copyreg.dispatch_table.get(cls)
        try:
            reduced = reduce(value) if reduce is not None else value.__reduce_ex__(4)
        except Exception as error:
            if not isinstance(value, (dict, list)):
                return self._unknown(value, where, error)
            # such as a dict whose __getattr__ raises KeyError
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            reduced = dict, (), own, None, list(pairs)
        if isinstance(reduced, str):
            module = getattr(value, "__module__", None) or cls.__module__
            if _package(module) is not None and _named(module, reduced) is value:
                return [f"{reduced} {module} of {_package(module)}".encode()]
            return self._unknown(value, where, None)
        function, args, state, items, pairs = (*reduced, None, None, None)[:5]
        found = self._tokens([cls, function, args], where)
        is_own = _package(cls.__module__) is None
        if isinstance(state, dict):
            if is_own:
                state = {k: v for k, v in state.items() if not _is_cached_property(cls, k)}
            for name, one in state.items():
                found += self._attribute(value, name, one, f"{where}.{name}")
        else:
            found.append(self._token(state, where))
        found += self._tokens(items or (), f"an item of {where}")
        for key, one in pairs or ():
            found += self._tokens([key, one], f"{where}[{key!r:.40}]")
        return [*found, *self._left_out(value, state, where)] if is_own else found

    def _left_out(self, value: Any, state: Any, where: str) -> Iterator[bytes]:
        """Attributes that a class of the program does not pickle. Those that cannot be compared are taken
        to be made of the others, as they are in a spawned worker."""
        known = state if isinstance(state, dict) else {}
        for name, one in sorted(attributes_of(value).items()):
            if known.get(name, known) is not one:
                try:
                    token = self._token(one, f"{where}.{name}")
                except Unknown:
                    continue
                yield from (name.encode(), token)

    def _tensor(self, value: torch.Tensor, where: str) -> list[bytes]:
        self.mutable = True
        if value.layout != torch.strided or value.device.type == "meta" or value.is_quantized or value.is_nested:
            return self._unknown(value, where, None)
        head = f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.device}{value.requires_grad}".encode()
        more = [type(value), own_attributes(value), value.grad if value.is_leaf else None]
        return [head, *self._tokens(more, where), _content(tensor_bytes(value.detach().cpu()))]

    def _array(self, value: np.ndarray[Any, Any], where: str) -> list[bytes]:
        self.mutable = True
        head = f"{np.lib.format.dtype_to_descr(value.dtype)}{value.shape}{value.strides}".encode()
        found = [head, self._token(type(value), where)]
        if type(value) is np.memmap and value.filename is not None:
            return [*found, str(value.offset).encode(), *self._path(os.fspath(value.filename))]
        plain = value.view(np.ndarray)
        if value.dtype.hasobject:
            return [*found, self._token(plain.tolist(), where)]
        found.append(_content(np.ascontiguousarray(plain).reshape(-1).view(np.uint8)))
        return found if type(value) is np.ndarray else found + self._object(value, where)

    def _file(self, value: Any, where: str) -> list[bytes]:
        name = getattr(value, "name", None)
        if not isinstance(name, (str, bytes)):
            return self._object(value, where)
        self.mutable = True
        return self._path(os.fsdecode(name)) if value.readable() else [os.fsencode(name)]

    @staticmethod
    def _path(path: str) -> list[bytes]:
        return [os.path.abspath(path).encode("utf-8", "surrogateescape"), canonical(look(path))]

    def _script(self, value: Any, where: str) -> list[bytes]:
        """What torch.jit has compiled."""
        self.mutable = True
        if not isinstance(value, torch.nn.Module):
            return [str(value.inlined_graph).encode()]
        archive = zipfile.ZipFile(io.BytesIO(value.save_to_buffer()))  # type: ignore[operator]
        names = [name for name in archive.namelist() if not name.endswith((".debug_pkl", "serialization_id"))]
        # torch numbers modules of one name as they are made.
        return [re.sub(rb"\.?___torch_mangle_\d+", b"", archive.read(name)) for name in names]

    def _opaque(self, value: Any, where: str) -> list[bytes]:
        if isinstance(value, GENERATORS):
            self.generators[where] = value
        return [f"{type(value).__module__}.{type(value).__qualname__}".encode()]

    # ---- what cannot be followed ---------------------------------------------------------------

    def reach_all(self, why: str) -> None:
        self.whole = self.whole or why

    def reach_code(self, values: Iterable[Any]) -> None:
        """Of values that a key names: their classes and the source of the program count if they have code of
        its own."""
        for value in values:
            if not is_data(value):
                cls = value if isinstance(value, type) else type(value)
                self.reach_all(f"it uses a {cls.__qualname__}, which its key names")
                with contextlib.suppress(Unknown):
                    self.add(f"the class {cls.__qualname__}", cls)

    def _unknown(self, value: Any, where: str, error: BaseException | None) -> list[bytes]:
        """An object that does not show its state: as pickled, with the source of the program."""
        try:
            found = [pickle.dumps(value, 4)]
        except Exception as failed:
            return self._refuse(value, where, str(error or failed))
        self._reach_for(value, where)
        return found

    def _refuse(self, value: Any, where: str, why: str) -> list[bytes]:
        refused = self._refused(value, where, why)
        if not self._answered:
            raise refused from None
        self.uncompared = self.uncompared or str(refused)
        self._reach_for(value, where)
        return self._opaque(value, where)

    def _reach_for(self, value: Any, where: str) -> None:
        self.reach_all(f"{where} is of the type {type(value).__module__}.{type(value).__qualname__}")

    @staticmethod
    def _refused(value: Any, where: str, why: str) -> Unknown:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return Unknown(f"{where}, of the type {kind} ({why})")

    def _source(self) -> Iterator[bytes]:
        """Of all loaded modules of the program."""
        files = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
        for file in sorted(file for file in files if file.endswith(".py") and not _is_installed(file)):
            try:
                yield Path(file).read_bytes()
            except OSError:
                yield b"missing"
        main = sys.modules.get("__main__")
        if main is not None and getattr(main, "__file__", None) is None:  # a notebook
            for name, value in sorted(vars(main).items()):
                if isinstance(value, (types.FunctionType, type)) and value.__module__ == "__main__":
                    yield self._token(value, name)


#: the digest of what each function with an lru_cache kept when it was met first
_kept: weakref.WeakKeyDictionary[Any, bytes] = weakref.WeakKeyDictionary()


def _kept_by(function: Any) -> list[Any]:
    """The arguments and results in an lru_cache, which only the garbage collector shows."""
    count, found = function.cache_info().currsize, gc.get_referents(function)
    if function.cache_parameters()["maxsize"] is None:
        dicts = [one for one in found if type(one) is dict and one is not vars(function)]
        return [pair for one in dicts if len(one) == count for pair in one.items()]
    nodes = (type(function).__name__, "_lru_list_elem")
    return [one for one in found if not (isinstance(one, type) and one.__name__ in nodes)][: 2 * count]


def _content(data: np.ndarray[Any, Any]) -> bytes:
    return hashlib.sha256(data).digest()  # type: ignore[arg-type]  # the CPU has instructions for it


def _is_cached_property(cls: type, name: Any) -> bool:
    return any(isinstance(vars(base).get(name), functools.cached_property) for base in cls.__mro__)


def attributes_of(value: Any) -> dict[str, Any]:
    """An object's own attributes, in its ``__dict__`` and its slots, without values of cached properties."""
    cls = type(value)
    found = {k: v for k, v in own_attributes(value).items() if not _is_cached_property(cls, k)}
    for base in cls.__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType) and _package(base.__module__) is None:
                with contextlib.suppress(AttributeError):  # not set
                    found.setdefault(name, member.__get__(value, cls))
    return found


_BY_TYPE: list[tuple[Any, Callable[..., list[bytes]]]] = [
    (types.FunctionType, Depends._function),
    (types.ModuleType, Depends._module),
    (type, Depends._class),
    (types.MethodType, lambda self, value, where: self._tokens([value.__func__, value.__self__], where)),
    (types.BuiltinFunctionType, Depends._builtin),
    (DESCRIPTORS, Depends._descriptor),
    ((staticmethod, classmethod), lambda self, value, where: [self._token(value.__func__, where)]),
    (functools.cached_property, lambda self, value, where: [self._token(value.func, where)]),
    (property, lambda self, value, where: self._tokens([value.fget, value.fset], where)),
    (functools._lru_cache_wrapper, Depends._lru_cache),
    (types.CodeType, Depends._code_object),
    (OPAQUE, Depends._opaque),
    ((torch.jit.ScriptFunction, torch.jit.ScriptModule), Depends._script),
    (torch.Tensor, Depends._tensor),
    (np.ndarray, Depends._array),
    (io.IOBase, Depends._file),
]


# ---- random numbers ----------------------------------------------------------------------------


def generators_of(owner: Any) -> dict[str, Any]:
    """The generators in an object's attributes, and in those of their objects."""
    found: dict[str, Any] = {}
    for name, value in own_attributes(owner).items():
        if isinstance(value, GENERATORS):
            found[f"self.{name}"] = value
        else:
            found |= {
                f"self.{name}.{inner}": one for inner, one in own_attributes(value).items()
                if isinstance(one, GENERATORS)
            }  # fmt: skip
    return found


def states_of(args: tuple[Any, ...]) -> list[tuple[str, int]]:
    """Which objects the first argument has, and its objects have: a file that is opened at its first
    use, say, changes that. Numbers and text do not count."""
    own = own_attributes(args[0]) if args else {}
    return [
        (name, id(value)) for part in (own, *map(own_attributes, own.values()))
        for name, value in part.items() if type(value) not in DATA
    ]  # fmt: skip


def generator_states(generators: dict[str, Any]) -> dict[str, Any]:
    """The states of the global generators and these, to be compared."""
    found: dict[str, Any] = {
        "random": Seeder._peek(random._inst),  # type: ignore[attr-defined]
        "numpy.random": order_generators.numpy_words(),
        "torch": torch.default_generator.get_state().numpy().tobytes(),
    }
    for name, one in generators.items():
        if isinstance(one, torch.Generator):
            found[name] = one.get_state().numpy().tobytes()
        else:
            found[name] = pickle.dumps(one)
    return found


# ---- functions and methods ---------------------------------------------------------------------


def is_data(value: Any) -> bool:
    """Whether a value has no code of the program's with it."""
    if type(value) in (list, tuple, set, frozenset):
        return all(map(is_data, value)) if set(map(type, value)) - DATA else True
    if type(value) is dict:
        return is_data(list(value)) and is_data(list(value.values()))
    if type(value) in DATA:
        return True
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return False
    kinds = (np.ndarray, np.generic, torch.Tensor, PurePath)
    return isinstance(value, kinds) and _package(type(value).__module__) is not None


def _body(member: Any) -> types.FunctionType | None:
    """The function that a class's member calls with an object of the class, or the class."""
    for kind, name in ((property, "fget"), (functools.cached_property, "func"), (classmethod, "__func__")):
        if isinstance(member, kind):
            member = getattr(member, name)
    if isinstance(member, functools._lru_cache_wrapper):
        member = member.__wrapped__
    return member if isinstance(member, types.FunctionType) else None


def follow(
    depends: Depends, cls: type, methods: Iterable[str], own: dict[str, Any], any_of: str | None = None
) -> tuple[set[str], str | None]:
    """Adds the code of methods, and of those that they call on `self`.

    own: the object's attributes. any_of: why the code may use any of them and of the class; None: that is not known.
    Returns those that it uses, and why it may use any; None: it does not."""
    used: set[str] = set()
    todo, done = [*methods], set()
    for base in cls.__mro__[:-1]:
        todo += {"__getattr__", "__getattribute__"} & vars(base).keys()
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        used |= {name} & own.keys()
        for base in cls.__mro__[:-1]:
            member = vars(base).get(name, done)
            if member is done or isinstance(member, types.MemberDescriptorType):
                continue
            where = f"{base.__qualname__}.{name}"
            function = _body(member)
            if isinstance(member, property) and member.fset is not None:
                depends.add(f"{where}.fset", member.fset)
            if function is None or _package_of(function) is not None or "__minato_memoized__" in vars(function):
                depends.add(where, member)
                if _package(base.__module__) is not None or hasattr(type(member), "__get__"):
                    if not isinstance(member, staticmethod):
                        any_of = any_of or f"{where} may use any of them"
                continue
            depends.add_code(function, where)
            code = function.__code__
            attributes = _code(code).attributes
            todo += attributes
            if "super" in _code(code).names and {"__getattribute__", "__getattr__", "__dict__"} & attributes:
                any_of = any_of or f"{where} uses super()"
            if code.co_argcount == 0 or _escapes(code, code.co_varnames[0]):
                any_of = any_of or f"{where} hands on {code.co_varnames[0] if code.co_argcount else 'self'}"
    if any_of is not None:
        depends.add(f"the class {cls.__qualname__}", cls)
        used = set(own)
    return used, any_of


class Found(NamedTuple):
    """What the values of a dataset's methods depend on.

    Attributes:
        digest: of all of it
        counted: which attributes, in words
        parts: (what people know it by, its digest)
        uncompared: what cannot be compared, and was answered for
    """

    digest: bytes
    counted: str
    parts: dict[str, bytes]
    uncompared: str | None = None


def of_call(
    made_of: tuple[Any, ...], args: tuple[Any, ...], is_method: bool,
    changed: Tokens | None = None, before: Tokens | None = None,
) -> Depends:  # fmt: skip
    """What the values of a memoized function depend on besides its key and files, if it is called
    with such arguments. made_of: the function, its key=, files= and version=. changed: as `own` of Depends."""
    function, key, files, version = made_of
    depends = Depends(version is not None or before is not None, changed, before)
    for name, value in (("version=", version), ("key=", key), ("files=", files)):
        depends.add(name, value)
    if is_method and args:
        owner, *args = args  # type: ignore[assignment]
        cls = owner if isinstance(owner, type) else type(owner)
        own = {} if isinstance(owner, type) else attributes_of(owner)
        depends.add_code(function, function.__qualname__)
        code = function.__code__
        any_of = "it hands on self" if _escapes(code, code.co_varnames[0]) else None
        used, _ = follow(depends, cls, _code(code).attributes, own, any_of)
        # Their values are what key= is for, but they may have code.
        args = [own[name] for name in sorted(used)] + args  # type: ignore[operator]
    else:
        depends.add(function.__qualname__, function)
    depends.reach_code(args)
    return depends


def of_methods(dataset: Any, methods: tuple[str, ...], version: Any, without_state: bool) -> Found:
    """What these methods of a dataset depend on besides their arguments. without_state: the dataset says in
    its key which attributes count."""
    cls, own = type(dataset), attributes_of(dataset)
    depends = Depends(version is not None)
    depends.add("the version", version)
    used, any_of = follow(depends, cls, methods, own)
    if without_state:
        depends.reach_code(own[name] for name in sorted(used))
        used = set()
    for name in sorted(used):
        depends.add(f"self.{name}", own[name])
    digest = depends.digest()
    counted = "cache_key()" if without_state else ", ".join(sorted(used)) or "no attribute"
    if any_of is not None and not without_state:
        counted = f"every attribute ({any_of})"
    if depends.whole is not None:
        counted += f", and the source of the whole program ({depends.whole})"
    return Found(digest, counted, depends.parts, depends.uncompared)
