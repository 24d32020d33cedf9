"""Where the time of a sample goes: clocks at few boundaries, set in a process that measures.

Boundaries are the transforms of a chain, what reads and decodes, locks, and what a dataset's
``__getitem__`` calls directly. A stage's time is its own: that of the stages inside it is taken
off. What no stage has taken is "other".
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import hashlib
import inspect
import io
import itertools
import logging
import mmap
import os
import random
import re
import sqlite3
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from .records import StageTimes
from .watch import QueueClock, find_place, write_nothing

READ, DECODE, TRANSFORM, LOCK, CALL, OPEN = "read", "decode", "transform", "lock", "call", "open"
#: a function with such a name reads, whatever it reads from
_READS = re.compile(r"read|fetch|download|storage|disk|(^|_)open|get_?bytes|get_?object", re.I)
#: packages whose classes get no clocks but those of _KNOWN
_NO_CODE_OF_THE_PROGRAM = {"builtins", "collections", "numpy", "pandas", "pathlib", "torch"}
#: levels of detail, for where clocks cost too much: with callees and reads, without them, what opens alone
FULL, COARSE, OPENS = 2, 1, 0

#: kind, module, names in it
_KNOWN = (
    (DECODE, "PIL.Image", "open"), (DECODE, "PIL.ImageFile", "ImageFile.load"),
    (DECODE, "cv2", "imread imdecode"), (READ, "numpy", "fromfile"), (READ, "torch", "load"),
    (DECODE, "torchvision.io", "read_image decode_image decode_jpeg"),
    (READ, "nibabel", "load"), (DECODE, "nibabel.dataobj_images", "DataobjImage.get_fdata"),
    (READ, "h5py", "Dataset.__getitem__"), (DECODE, "gzip", "GzipFile.read decompress"), (DECODE, "zlib", "decompress"),
    (DECODE, "bz2", "BZ2File.read"), (DECODE, "lzma", "LZMAFile.read"), (DECODE, "soundfile", "read"),
    (DECODE, "torchaudio", "load"), (OPEN, "numpy", "load memmap.__new__"),  # load() with mmap_mode
    (OPEN, "zipfile", "ZipFile.__init__"), (OPEN, "tarfile", "TarFile.__init__"), (OPEN, "h5py", "File.__init__"),
    (OPEN, "mmap", "mmap"), (OPEN, "sqlite3", "connect"), (OPEN, "lmdb", "open"),
    (OPEN, "pyarrow.parquet", "ParquetFile.__init__"), (READ, "os", "read pread"),
    (LOCK, "multiprocessing.synchronize", "SemLock.__enter__"), (LOCK, "fcntl", "flock lockf"),
)  # fmt: skip
#: labels of these that do not say what they are
_LABELS = {
    "ImageFile.load": "PIL decode", "Dataset.__getitem__": "h5py read", "SemLock.__enter__": "wait for a lock",
    "flock": "wait for a file's lock", "lockf": "wait for a file's lock",
}  # fmt: skip


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
#: objects that are looked into for what a dataset holds
OBJECTS = 20_000
#: elements of one container that are looked into
ELEMENTS = 64
_ELSEWHERE = (types.FunctionType, types.BuiltinFunctionType, logging.Logger, io.TextIOWrapper)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type, types.ModuleType)
_CONNECT, _MMAP = sqlite3.connect, mmap.mmap


class Stopwatch:
    """Time of one thread: seconds that it ran or waited, and CPU seconds. The first leave out the
    time in which it could have run and other programs had the cores."""

    def __init__(self) -> None:
        self.queued = QueueClock()

    def now(self) -> tuple[float, float]:
        queued, again = -1.0, self.queued.now()
        while queued != again:  # else the thread had no core between the two clocks
            queued, wall, cpu = again, perf_counter(), thread_time()
            again = self.queued.now()
        return wall - queued, cpu

    def time(self, make: Callable[[], Any]) -> tuple[Any, float, float]:
        """What a function returns, and the wall and CPU seconds that it took."""
        began = self.now()
        made = make()
        ended = self.now()
        return made, ended[0] - began[0], ended[1] - began[1]


@dataclass
class Call:
    """One call of an outermost stage, as a probe has seen it."""

    label: str
    digest: str | None
    size: int
    result: Any


class Clocks(Stopwatch):
    """The clocks of one process, and what they have measured."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: dict[str, StageTimes] = {}  # sums over samples
        self.opened: dict[str, set[str]] = {}  # what calls of kind OPEN were given
        self.on = False
        self.probe = False
        self.calls: list[Call] = []
        #: (label, result) that outermost calls give in place of being made, in order
        self.replay: list[tuple[str, Any]] | None = None
        self.thread = threading.get_ident()
        self._stack: list[tuple[str, list[float]]] = []
        self._by_object: dict[int, str] = {}
        self._undo: list[Callable[[], None]] = []
        self._patched: set[Any] = set()
        self._known: dict[int, tuple[str, str]] = {}
        #: what was opened, where files are to stay open
        self.kept: dict[Any, Any] | None = None

    # ---- measuring -------------------------------------------------------------------------

    def wrap(self, function: Any, name: str | None, of: str) -> Any:
        """The function with a clock. name: of the stage; None: of the object whose method it is."""

        @functools.wraps(function, updated=())
        def run_timed(*given: Any, **named: Any) -> Any:
            kind, label = of, name or self._by_object.get(id(given[0]))
            if name == "numpy.load" and not (named.get("mmap_mode") or any(given[1:2])):
                kind, label = READ, "numpy load"
            if self.kept is not None and kind == OPEN:
                return self._open_once(self.kept, function, given, named)
            if label is None or not self.on or threading.get_ident() != self.thread:
                return function(*given, **named)
            return self.run(label, kind, function, given, named)

        return run_timed

    def run(self, label: str, kind: str, function: Any, given: Any, named: Any) -> Any:
        # what opens gives a cache nothing to keep
        outermost = not self._stack and kind != OPEN and getattr(function, "__name__", "") != "__init__"
        if outermost and self.replay:
            # What came first may have made a later call needless: a picture that is decoded.
            at = next((n for n, held in enumerate(self.replay) if held[0] == label), None)
            if at is not None:
                held = self.replay[at][1]
                del self.replay[: at + 1]
                self.on = bool(self.replay)  # the rest of the sample needs no clocks
                return copy_value(held)
        stage = self.stages.get(label)
        if stage is None:
            if kind == OPEN and any(self.stages[above].kind == OPEN for above, _ in self._stack):
                kind = CALL  # a part of what opens
            reads = kind == READ or kind == CALL and bool(_READS.search(label))
            stage = self.stages[label] = StageTimes(label, kind, reads, calls=0, place=find_place()[0], order=len(self.stages))
        if kind == OPEN:
            opened = _name_arguments(function, given, named) or str(stage.calls)
            self.opened.setdefault(label, set()).add(opened)
        name, above = self._stack[-1] if self._stack else ("", [0.0, 0.0])
        if name not in stage.inside:
            stage.inside.append(name)
        below = [0.0, 0.0]
        self._stack.append((label, below))
        began = self.now()
        try:
            result = function(*given, **named)
        finally:
            ended = self.now()
            wall, cpu = ended[0] - began[0], ended[1] - began[1]
            self._stack.pop()
            above[0] += wall
            above[1] += cpu
            stage.whole += wall
            stage.seconds += wall - below[0]
            stage.cpu += cpu - below[1]
            stage.calls += 1
        if self.probe and outermost:
            self.on = False
            self.calls.append(Call(label, hash_value(result), size_of(result), copy_value(result)))
            self.on = True
        return result

    def _open_once(self, kept: dict[Any, Any], function: Any, given: Any, named: Any) -> Any:
        """What a program gets that keeps its files open: in each process the first call opens, and later
        ones give the same. An object gets the attributes of the first one, and is not closed."""
        key = os.getpid(), function, _name_arguments(function, given, named)
        sets_up = function.__name__ == "__init__"
        if key not in kept:
            if inspect.unwrap(function) is _CONNECT:
                named.setdefault("factory", _Unclosed)
            self.kept = None  # what this opens in turn is a part of it
            try:
                made = function(*given, **named)
            finally:
                self.kept = kept
            kept[key] = {**vars(given[0]), "close": lambda: None} if sets_up else made
        if not sets_up:
            return kept[key]
        vars(given[0]).update(kept[key])

    def sample(self, make: Callable[[], Any]) -> tuple[Any, float, float]:
        """A sample with the clocks on: it, and its wall and CPU seconds."""
        self._stack.clear()
        self.on = True
        try:
            return self.time(make)
        finally:
            self.on = False

    # ---- setting and removing --------------------------------------------------------------

    def set(self, dataset: Any, level: int) -> None:
        """Sets clocks for a dataset; those that were there are removed."""
        self.remove()
        for kind, module, names in _KNOWN:
            if module in sys.modules and (level > OPENS or kind == OPEN):
                for name in names.split():
                    with contextlib.suppress(Exception):
                        self._set_known(sys.modules[module], name, kind)
        if level == FULL:
            self._set_files()  # decoders read in many small parts
        for chain in find_chains(dataset) if level > OPENS else ():
            for n, element in enumerate(list_chain(chain)):
                if callable(element) and not list_chain(element):
                    with contextlib.suppress(Exception):
                        self._set_element(f"transform {n + 1} ({name_of(element)})", chain, n)
        if level == FULL:
            for part in find_datasets(dataset):
                with contextlib.suppress(Exception):
                    self._set_callees(part)

    def keep_open(self, dataset: Any) -> None:
        """From now on, what a sample opens stays open."""
        self.set(dataset, FULL)
        self.kept = {}

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._by_object.clear()
        self._patched.clear()
        self.stages, self.opened = {}, {}

    def _set_attribute(self, owner: Any, name: str, new: Any) -> None:
        if (id(owner), name) in self._patched:
            return
        own, old = name in vars(owner), vars(owner).get(name)
        setattr(owner, name, new)
        self._patched.add((id(owner), name))
        self._undo.append(lambda: setattr(owner, name, old) if own else delattr(owner, name))

    def _set_known(self, module: Any, name: str, kind: str) -> None:
        owner, _, attribute = name.rpartition(".")
        label = _LABELS.get(name) or f"{module.__name__.partition('.')[0]} {attribute}"
        if kind == OPEN:
            label = f"{module.__name__}.{owner or name}"
        module = getattr(module, owner) if owner else module
        if attribute in vars(module):
            function = vars(module)[attribute]
            function = getattr(function, "__func__", function)  # __new__ is a static method
            self._known[id(function)] = label, kind
            self._set_attribute(module, attribute, self.wrap(function, label, kind))

    def _set_files(self) -> None:
        """What Python reads by ``open()``."""
        opens, reader = io.open, io.BufferedReader
        timed_reads = {
            name: self.wrap(vars(reader)[name], "file read", READ) for name in ("read", "read1", "readinto")
        }
        timed_reader: Any = type("Reader", (reader,), timed_reads)

        def open_noted(file: Any, mode: str = "r", buffering: int = -1, *given: Any, **named: Any) -> Any:
            opened = opens(file, mode, buffering, *given, **named)
            if mode != "rb" or not self.on or type(opened) is not reader:
                return opened
            return timed_reader(opened.detach())

        timed = self.wrap(open_noted, "file read", READ)
        self._set_attribute(builtins, "open", timed)
        self._set_attribute(io, "open", timed)

    def _set_element(self, label: str, chain: Any, at: int) -> None:
        """One transform of a chain, by its class's ``__call__``, or in place where it has none."""
        element = list_chain(chain)[at]
        if isinstance(element, (*_FUNCTIONS, functools.partial)):
            container = chain.transforms
            container[at] = self.wrap(element, label, TRANSFORM)
            self._undo.append(lambda: container.__setitem__(at, element))
            return
        self._set_object(element, label, TRANSFORM)

    def _set_object(self, part: Any, label: str, kind: str) -> None:
        """``__call__`` of its class, for the objects that have a label."""
        self._by_object[id(part)] = label
        self._set_attribute(type(part), "__call__", self.wrap(type(part).__call__, None, kind))

    def _set_callees(self, dataset: Any) -> None:
        """What ``__getitem__`` calls by a name of its own class, its object or its module."""
        code: Any = getattr(type(dataset).__getitem__, "__code__", None)
        if code is None:
            return
        of, names = type(dataset).__getitem__.__globals__, code.co_names
        for name in names:
            value = of.get(name)
            if isinstance(value, _FUNCTIONS) and not inspect.isgeneratorfunction(value):
                of[name] = self.wrap(value, *self._known.get(id(value), (f"{name}()", CALL)))
                self._undo.append(functools.partial(of.__setitem__, name, value))
            elif isinstance(value, types.ModuleType):
                self._set_module(value, names)
            elif isinstance(value, type):
                self._set_constructor(value)
            self._set_dataset(dataset, name)
            part = getattr(dataset, "__dict__", {}).get(name)
            if type(part).__module__.partition(".")[0] not in _NO_CODE_OF_THE_PROGRAM:
                for method in names:  # self.part.method()
                    self._set_method(type(part), method)

    def _set_module(self, module: Any, names: tuple[str, ...]) -> None:
        for name in names:
            value = vars(module).get(name)
            if isinstance(value, _FUNCTIONS):
                label = f"{module.__name__.rpartition('.')[2]}.{name}()"
                self._set_attribute(module, name, self.wrap(value, label, CALL))
            elif isinstance(value, type):
                self._set_constructor(value)

    def _set_constructor(self, of: type) -> None:
        """A class that is called: what sets its objects up, where that is Python code."""
        if issubclass(of, BaseException) or of.__module__.partition(".")[0] in _NO_CODE_OF_THE_PROGRAM:
            return
        for name in ("__init__", "__new__"):
            function = getattr(of, name)
            if isinstance(function, types.FunctionType):
                kind = OPEN if hasattr(of, "close") else CALL
                with contextlib.suppress(TypeError):  # its attributes cannot be set
                    self._set_attribute(of, name, self.wrap(function, f"{of.__qualname__}()", kind))
                return

    def _set_dataset(self, dataset: Any, name: str) -> None:
        """Its method of that name, or what it has by that name: a function, a callable object."""
        if name in getattr(dataset, "__dict__", {}):
            value = vars(dataset)[name]
            if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                self._set_attribute(dataset, name, self.wrap(value, f"{name}()", CALL))
            elif callable(value) and id(value) not in self._by_object:
                if not list_chain(value) and not isinstance(value, type):
                    self._set_object(value, f"{name} ({type(value).__name__})", CALL)
            return
        self._set_method(type(dataset), name)

    def _set_method(self, of: type, name: str) -> None:
        for kind in of.__mro__:
            value = vars(kind).get(name)
            if isinstance(value, types.FunctionType) and not inspect.isgeneratorfunction(value):
                return self._set_attribute(kind, name, self.wrap(value, f"{name}()", CALL))


def _name_arguments(function: Any, given: Any, named: Any) -> str:
    """What a function of kind OPEN was given, but for the object or class that it sets up; "" for nothing."""
    if inspect.unwrap(function) is _MMAP:
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/self/fd/{given[0]}")
    given = given[function.__name__ in ("__init__", "__new__") :]
    return repr((given, sorted(named.items()))) if given or named else ""


class _Unclosed(sqlite3.Connection):
    def close(self) -> None:
        """It stays open."""


# ---- what a dataset is made of -------------------------------------------------------------


def find_datasets(dataset: Any) -> Iterator[Any]:
    """A dataset and those that it wraps."""
    seen: set[int] = set()
    ahead = [dataset]
    for part in ahead:
        if id(part) in seen or len(seen) > 32:
            continue
        seen.add(id(part))
        yield part
        inner = getattr(part, "dataset", None)
        ahead += [inner] if hasattr(inner, "__getitem__") else []
        more = getattr(part, "datasets", None)
        ahead += list(more)[:8] if isinstance(more, (list, tuple)) else []


def list_chain(part: Any) -> list[Any]:
    """The transforms of a chain; none where the part is no chain."""
    chain = part if isinstance(part, torch.nn.Sequential) else getattr(part, "transforms", None)
    return list(chain) if isinstance(chain, (list, tuple, torch.nn.ModuleList, torch.nn.Sequential)) else []


def name_of(element: Any) -> str:
    return getattr(element, "__name__", None) or type(element).__name__


def find_chains(dataset: Any) -> Iterator[Any]:
    """The chains of transforms that a dataset holds, and those inside of these."""
    seen: set[int] = set()
    ahead = [(part, 0) for part in find_datasets(dataset)]
    for part, depth in ahead:
        if id(part) in seen or depth > 3 or len(seen) > 500:
            continue
        seen.add(id(part))
        inside = [element for element in list_chain(part) if callable(element)]
        if inside:
            yield part
        ahead += [(each, depth + 1) for each in inside if list_chain(each)]
        ahead += [(v, depth + 1) for v in getattr(part, "__dict__", {}).values() if callable(v) or list_chain(v)]


def walk_objects(loader: Any) -> Iterator[tuple[str, Any]]:
    """What a loader's dataset and collate_fn hold, breadth first, each with its path."""
    ahead = [("dataset", loader.dataset), ("collate_fn", loader.collate_fn)]
    seen: set[int] = set()
    for path, part in ahead:
        if id(part) in seen or isinstance(part, (*_PLAIN, logging.Logger)) or len(seen) > OBJECTS:
            continue
        if getattr(getattr(type(part), "write", None), "__name__", "") == write_nothing.__name__:
            continue  # in place of standard output: it leads nowhere now
        seen.add(id(part))
        yield path, part
        with contextlib.suppress(Exception):
            ahead += _list_parts(path, part)


def _list_parts(path: str, part: Any) -> list[tuple[str, Any]]:
    # A copy of a whole container would write to each page of what it holds: references are counted.
    if isinstance(part, dict):
        return [(f"{path}[{key!r}]", part[key]) for key in itertools.islice(part, ELEMENTS)]
    if isinstance(part, (list, tuple, set, frozenset)):
        return [(f"{path}[{n}]", each) for n, each in enumerate(itertools.islice(part, ELEMENTS))]
    found = []
    if isinstance(part, types.MethodType):
        found += [(f"{path}.__self__", part.__self__), (path, part.__func__)]
    if isinstance(part, types.FunctionType):
        cells = zip(part.__code__.co_freevars, part.__closure__ or ())
        found += [(f"{path}.{name}", cell.cell_contents) for name, cell in cells]
        found += _list_globals(part)
    own = getattr(part, "__dict__", None)
    if isinstance(own, dict):
        found += [(f"{path}.{name}", value) for name, value in own.items()]
    for kind in type(part).__mro__[:-1]:
        for name in getattr(kind, "__slots__", ()) or ():
            if hasattr(part, name):
                found.append((f"{path}.{name}", getattr(part, name)))
        if kind.__module__.partition(".")[0] not in ("torch", "minato", "builtins"):
            for value in vars(kind).values():
                if isinstance(value, types.FunctionType):
                    found += _list_globals(value)
    if hasattr(part, "func") and hasattr(part, "args"):  # functools.partial
        found += [(f"{path}.func", part.func), (f"{path}.args", part.args)]
    return found


def _list_globals(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The variables of a module that a function names, but for functions and classes."""
    names, of = function.__code__.co_names, function.__globals__
    found = [(f"{of.get('__name__', '?')}.{name}", of[name]) for name in names if name in of]
    return [(path, part) for path, part in found if not isinstance(part, _ELSEWHERE)]

# ---- results -------------------------------------------------------------------------------


def size_of(value: Any) -> int:
    """Bytes of tensors, arrays, pictures, bytes and text, in containers too."""
    return sum(map(_size, tree_leaves(value)))


def _size(part: Any) -> int:
    if isinstance(part, (torch.Tensor, np.ndarray)):
        return int(part.nbytes)
    if isinstance(part, (bytes, bytearray, memoryview, str)):
        return len(part)
    if hasattr(part, "getbands"):
        return int(part.size[0] * part.size[1] * len(part.getbands()))
    return 8 if isinstance(part, (int, float)) else 0


def hash_value(value: Any) -> str | None:
    """Equal for equal results; None where that cannot be known."""
    parts, structure = tree_flatten(value)
    digest = hashlib.blake2b(repr(structure).encode(), digest_size=16)
    try:
        for content in map(_content, parts):
            digest.update(b"%d " % len(content) + content)
    except TypeError:
        return None
    return digest.hexdigest()


def _content(part: Any) -> bytes:
    if isinstance(part, torch.Tensor):
        part = part.detach().cpu().contiguous()
        values: bytes = part.view(-1).view(torch.uint8).numpy().tobytes()
        return repr((part.dtype, part.shape)).encode() + values
    if isinstance(part, np.ndarray):
        if part.dtype.hasobject:
            raise TypeError
        return repr((part.dtype, part.shape)).encode() + part.tobytes()
    if isinstance(part, (bytes, bytearray)):
        return bytes(part)
    if isinstance(part, (str, int, float, bool, type(None), np.generic)):
        return repr(part).encode()
    if hasattr(part, "getbands") and hasattr(part, "tobytes"):
        return repr(part.size).encode() + bytes(part.tobytes())
    raise TypeError(type(part))


def copy_value(value: Any) -> Any:
    """As a cache would hand it out: what the program may change is its own."""
    def copy(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.clone()
        return part.copy() if isinstance(part, np.ndarray) or hasattr(part, "getbands") else part

    return tree_map(copy, value)


def seed_generators(number: int) -> None:
    """The program's global generators, in this process alone."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def record_opened_paths() -> list[str]:
    """Files that this process opens from now on: a list that grows."""
    found: list[str] = []

    def audit(event: str, given: Any) -> None:
        if event == "open" and isinstance(given[0], (str, bytes, os.PathLike)):
            mode = given[1] if len(given) > 1 else None
            if mode is None or "r" in str(mode):
                path = os.fsdecode(given[0])
                if not path.endswith((".py", ".pyc", ".so")) and len(found) < 20_000:
                    found.append(path)

    sys.addaudithook(audit)
    return found
