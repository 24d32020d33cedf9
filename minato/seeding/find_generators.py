"""The generators that a worker seeds before each sample: finding them, building a Seeder.

The global generators of ``random``, NumPy, torch and OpenCV are always seeded. A bounded walk of
the dataset's object graph, and of the globals that its code names, finds private ones. Generators
that the walk cannot reach (in an installed package's module, or C) keep the state that their worker
gives them, unless the dataset offers ``seed_sample(seed)``.
"""

from __future__ import annotations

import functools
import math
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from .._core import Seeder
from ..dataset_calls import behind_subsets
from .generator_states import (
    GLOBALS, bitgen_of, generator_kind, mro_of, opencv_plans, own_seed, plan_all, plan_bitgen,
    plan_private,
)  # fmt: skip
from .pitfalls import Attributes, History

#: Limit on objects searched. One costs 3 to 5 us, so the walk ends within about 50 ms for any
#: dataset. Starting a worker takes about this time anyway.
NODE_LIMIT = 10_000
#: Elements checked in each container. Lists of transforms or concatenated datasets
#: are shorter. Lists of samples are longer and hold no generators; they must leave
#: most of NODE_LIMIT to the other objects.
CONTAINER_LIMIT = 1_024
#: Generators in one container that are seeded. More of them cost too much for each sample, and are
#: mostly one for each sample, which draws the same whichever worker makes it.
GENERATORS_LIMIT = 128
#: Elements checked in all, per object that may be searched. For most of them a look at the type
#: (0.1 us) shows that they are text or numbers.
LOOKS_PER_NODE = 8

#: Bits of a change of attributes that can be no new generator
ONLY_VALUES = 8

#: Attributes watched for generators that are made later, in the objects nearest to the root:
#: each is checked after each sample, in 5 ns.
WATCHED = 256
#: Further objects whose attributes are only counted, in 1 ns each: this shows new attributes,
#: but not replaced ones.
COUNTED = 1_024

#: packages whose classes hold no generators of a program's
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "minato"}) - {"__main__"}

#: folders of packages that are no part of a program
_INSTALLED = {"site-packages", "dist-packages"}

_OF_A_THREAD = frozenset({threading.local})

_type_dict = type.__dict__["__dict__"].__get__
_type_module = type.__dict__["__module__"].__get__
_type_name = type.__dict__["__qualname__"].__get__

_Members = Callable[[Any], Iterable[Any]]
#: plans of everything to be seeded, and what is watched: dicts, counted ones, types of generators
News = tuple[list[Any], list[Any], list[Any], set[type]]


def _by_type(elements: Iterable[Any]) -> Iterable[Any]:
    """Orders a set by type: its own order does not outlive a process. Equal types keep theirs."""
    some = list(islice(elements, CONTAINER_LIMIT))
    return sorted(some, key=lambda e: f"{_type_module(type(e))}.{_type_name(type(e))}")


def _function_members(f: Any) -> Iterable[Any]:
    yield from f.__defaults__ or ()
    yield from (f.__kwdefaults__ or {}).values()
    for cell in f.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            continue
    if _is_of_program(f.__globals__):
        yield from _named_globals(f)


@functools.cache
def _is_program(name: str, file: str) -> bool:
    return name.partition(".")[0] not in _LIBRARIES and _INSTALLED.isdisjoint(PurePath(file).parts)


def _is_of_program(module: Attributes) -> bool:
    return _is_program(str(dict.get(module, "__name__")), str(dict.get(module, "__file__")))


def _named_globals(f: types.FunctionType) -> Iterator[Any]:
    """What the code of a function names in its module, and in modules of the program."""
    codes = [f.__code__]
    for code in codes:
        codes += [c for c in code.co_consts if type(c) is types.CodeType]
    names = dict.fromkeys(name for code in codes for name in code.co_names)
    for name in names:
        value = dict.get(f.__globals__, name)
        if type(value) is not types.ModuleType:
            yield value
        elif _is_of_program(vars(value)):
            yield from (dict.get(vars(value), n) for n in names)


def _holds(f: types.FunctionType) -> bool:
    return bool(f.__defaults__ or f.__kwdefaults__ or f.__closure__ or _is_of_program(f.__globals__))


def _partial_members(p: Any) -> Iterable[Any]:
    for name in ("func", "args", "keywords"):
        yield functools.partial.__dict__[name].__get__(p)


_READERS: dict[type, _Members] = {
    list: list.__iter__,
    tuple: tuple.__iter__,
    dict: dict.values,
    deque: deque.__iter__,
    set: lambda s: _by_type(set.__iter__(s)),
    frozenset: lambda s: _by_type(frozenset.__iter__(s)),
    functools.partial: _partial_members,
    types.FunctionType: _function_members,
    types.MethodType: lambda m: (m.__self__, m.__func__),
    types.BuiltinFunctionType: lambda m: (m.__self__,),
    types.MethodWrapperType: lambda m: (m.__self__,),
}

#: Types that are never searched.
_CLOSED: frozenset[type] = frozenset({
    type, types.ModuleType, str, bytes, bytearray, memoryview, int, float, complex, type(None), np.ndarray,
    np.generic, torch.Tensor,
})  # fmt: skip


def _slot_readers(mro: tuple[type, ...]) -> list[Any]:
    """Descriptors of ``__slots__``; those of C types may lead anywhere."""
    return [d for cls in mro if "__slots__" in _type_dict(cls)
            for d in _type_dict(cls).values() if type(d) is types.MemberDescriptorType]


class _OfThisThread:
    """Reads the ``__dict__`` of a ``threading.local``, which has one for each thread."""

    @staticmethod
    def __get__(obj: Any) -> Any:
        return threading.local.__getattribute__(obj, "__dict__")


def _dict_reader(mro: tuple[type, ...]) -> Any:
    """The real ``__dict__``, or None if there is none or a property replaces it."""
    if threading.local in mro:
        return _OfThisThread
    for cls in mro:
        found = _type_dict(cls).get("__dict__")
        if found is not None:
            return found if type(found) is types.GetSetDescriptorType else None
    return None


class _Shape(NamedTuple):
    """How objects of one type are searched; no user code runs."""

    kind: str | None
    readers: tuple[_Members, ...]
    slots: tuple[Any, ...]
    attributes: Any
    hook: Any

    def members(self, obj: Any) -> Iterator[Any]:
        for read in self.readers:
            yield from islice(read(obj), CONTAINER_LIMIT)
        for slot in self.slots:
            try:
                yield slot.__get__(obj)
            except AttributeError:  # not assigned
                continue
        if self.attributes is not None:
            yield from islice(dict.values(self.attributes.__get__(obj)), CONTAINER_LIMIT)


def _shape_of(cls: type, closed: frozenset[Any]) -> _Shape | None:
    """None: objects of this type hold nothing to find."""
    mro = mro_of(cls)
    kind = generator_kind(mro)
    if kind is not None:
        return None if random.SystemRandom in mro else _Shape(kind, (), (), None, None)
    if not closed.isdisjoint(mro):
        return None
    readers = tuple(_READERS[c] for c in mro if c in _READERS)
    slots, attributes = tuple(_slot_readers(mro)), _dict_reader(mro)
    hook = next((_type_dict(c)["seed_sample"] for c in mro
                 if "seed_sample" in _type_dict(c)), None)
    if not readers and not slots and attributes is None and hook is None:
        return None
    return _Shape(kind, readers, slots, attributes, hook)


@dataclass
class Found:
    """The result of a walk. Attributes are those of objects, in dicts."""

    generators: list[Any] = field(default_factory=list)  # in order of discovery, as the hooks are
    hooks: list[Callable[[int], Any]] = field(default_factory=list)  # functions ``seed_sample``
    nodes: int = 0  # objects searched
    truncated: bool = False  # the limit cut the walk short
    watched: list[Attributes] = field(default_factory=list)  # of the objects nearest to the roots
    counted: list[Attributes] = field(default_factory=list)  # of further ones
    owners: list[type] = field(default_factory=list)  # classes of the objects of both
    crowds: list[Any] = field(default_factory=list)  # containers of too many generators
    sequences: list[Any] = field(default_factory=list)  # SeedSequences, which spawn() counts in


def _key(kind: str, obj: Any) -> int:
    """Identity of a generator; two Generators with one bit generator count as one."""
    return id(bitgen_of(obj) if kind == "numpy" else obj)


def global_keys() -> set[int]:
    """Identities of the global generators."""
    rand: Any = np.random.mtrand._rand
    return {id(random._inst), id(rand), id(rand._bit_generator), id(torch.default_generator)}


def _bind_hook(obj: Any, raw: Any) -> Any:
    if isinstance(raw, property):
        return None
    bind = getattr(type(raw), "__get__", None)
    return raw if bind is None else bind(raw, obj, type(obj))


def _root_hook(root: Any, shape: _Shape | None) -> Any:
    """A root need not be a torch Dataset, and may hold the function as an attribute."""
    if shape is None:
        return None
    own = shape.attributes.__get__(root) if shape.attributes is not None else {}
    if "seed_sample" in own:
        return own["seed_sample"]
    return _bind_hook(root, shape.hook) if shape.hook is not None else None


class _Walk:
    """Breadth first, so that objects near the root are found however deep the graph is. closed:
    classes of objects that are not searched, besides those that hold nothing to find."""

    def __init__(self, limit: int = NODE_LIMIT, closed: frozenset[Any] = frozenset()) -> None:
        self.nodes = limit
        self.looks = LOOKS_PER_NODE * limit
        self.closed = _CLOSED | closed
        self.taken = global_keys()
        self.shapes: dict[type, _Shape | None] = {}
        self.seen: set[int] = set()
        self.classes: set[type] = set()
        self.queue: deque[tuple[Any, _Shape]] = deque()
        self.kept: list[Any] = []  # so that no id is given to another object
        self.found = Found()
        self.unwatched = WATCHED

    def shape(self, obj: Any) -> _Shape | None:
        cls = type(obj)
        try:
            return self.shapes[cls]
        except KeyError:
            shape = self.shapes[cls] = _shape_of(cls, self.closed)
            if shape is not None and shape.kind is None:
                self.reach_class(cls)
            return shape

    def reach_class(self, cls: type) -> None:
        """Attributes of the program's classes, and defaults of their methods."""
        for base in mro_of(cls):
            if base not in self.classes and _type_module(base).partition(".")[0] not in _LIBRARIES:
                self.classes.add(base)
                for member in list(_type_dict(base).values()):
                    if type(member) in (staticmethod, classmethod):
                        member = member.__func__
                    if type(member) is not types.FunctionType or _holds(member):
                        self.guarded(self.reach, member)

    def reach(self, obj: Any) -> None:
        shape = self.shape(obj)
        if shape is None or id(obj) in self.seen:
            return
        self.seen.add(id(obj))
        self.kept.append(obj)
        if shape.kind is None:
            self.queue.append((obj, shape))
        elif _key(shape.kind, obj) not in self.taken and _is_seedable(shape.kind, obj):
            self.taken.add(_key(shape.kind, obj))
            found = self.found
            (found.sequences if shape.kind == "sequence" else found.generators).append(obj)
            if shape.kind in ("numpy", "bitgen"):  # for the children of spawn()
                bits = bitgen_of(obj) if shape.kind == "numpy" else obj
                self.guarded(self.reach, getattr(bits, "_seed_seq", None))

    def add_hook(self, hook: Any) -> None:
        if callable(hook):
            self.found.hooks.append(hook)

    def run(self, roots: Sequence[Any]) -> Found:
        for root in roots:
            self.guarded(self.enter_root, root)
        skip = {id(root) for root in roots}
        limit = self.nodes
        while self.queue and self.nodes > 0 and self.looks > 0:
            self.nodes -= 1
            obj, shape = self.queue.popleft()
            self.guarded(self.enter, obj, shape, id(obj) in skip)
        self.found.nodes, self.found.truncated = limit - self.nodes, bool(self.queue) or self.looks <= 0
        return self.found

    def enter_root(self, root: Any) -> None:
        self.reach(root)
        self.add_hook(_root_hook(root, self.shape(root)))

    def enter(self, obj: Any, shape: _Shape, is_root: bool) -> None:
        if shape.hook is not None and not is_root and Dataset in mro_of(type(obj)):
            self.guarded(lambda: self.add_hook(_bind_hook(obj, shape.hook)))
        found = self.found
        if shape.attributes is not None and len(found.counted) < COUNTED:
            attributes = shape.attributes.__get__(obj)
            self.unwatched -= 1 + dict.__len__(attributes)
            (found.watched if self.unwatched >= 0 else found.counted).append(attributes)
            found.owners.append(type(obj))
        shapes, looks = self.shapes, self.looks
        before, sequences = len(found.generators), len(found.sequences)
        for member in shape.members(obj):
            looks -= 1
            if shapes.get(type(member), self) is not None:  # None: known to hold nothing
                self.guarded(self.reach, member)
            if looks <= 0:
                break
        self.looks = looks
        if len(found.generators) - before > GENERATORS_LIMIT:
            del found.generators[before:]
            found.crowds.append(obj)
        if len(found.sequences) - sequences > GENERATORS_LIMIT:
            del found.sequences[sequences:]

    @staticmethod
    def guarded(step: Callable[..., None], *args: Any) -> None:
        try:
            step(*args)
        except Exception:  # an object that cannot be read has nothing to offer
            return


def _is_seedable(kind: str, obj: Any) -> bool:
    if kind not in ("numpy", "bitgen"):
        return True
    plan = plan_bitgen(bitgen_of(obj) if kind == "numpy" else obj)
    return bool(plan[0] != "none")


def find_all(roots: Iterable[Any], limit: int = NODE_LIMIT) -> Found:
    """Walks several object graphs as one, for example a dataset and its collate_fn. The order of
    generators depends only on the structure of the graphs.

    Searches instance attributes, ``__slots__``, lists, tuples, dict values, sets,
    deques (the first 1024 elements of each), partials, bound methods, closures and
    defaults of functions, globals that functions of the program name, and attributes and methods of
    the objects' classes, breadth first and at most ``limit`` objects. Does not search classes that
    are only referred to, tensors, arrays or strings. Runs no property, ``__getattr__`` or
    other code of the user, and never raises. Returns each generator once, and no
    global ones; ``random.SystemRandom`` cannot be seeded and is left out.

    Generators in one *set* are ordered by type only. Two of the same type have an order that is
    stable in forked workers, but not between runs.

    ``seed_sample`` is taken from the roots and from torch Datasets found inside them
    (for example the wrapped dataset of a Subset).
    """
    return _Walk(limit).run(list(roots))


#: by the id of a generator: the generator, and its own seed
OwnSeeds = dict[int, tuple[Any, int]]


def own_seeds(dataset: Any, *others: Any) -> OwnSeeds:
    """The own seeds of the generators of a dataset and the other objects."""
    found = find_of(dataset, *others)
    return {id(g): (g, own_seed(g)) for g in (*found.generators, *found.sequences)}


def _roots_of(dataset: Any, *others: Any) -> tuple[Any, ...]:
    inner, subsets = behind_subsets(dataset)
    return (dataset, *([inner] if subsets else []), *others)


def _length(dataset: Any) -> float:
    """Infinite if it cannot be told."""
    try:
        return len(behind_subsets(dataset)[0])
    except Exception:  # of the program's code
        return math.inf


def find_of(dataset: Any, *others: Any) -> Found:
    """The objects to seed: a dataset, the dataset of its Subset, and the others."""
    return find_all(_roots_of(dataset, *others))


def find_shared(dataset: Any, *others: Any) -> list[Any]:
    """The generators that threads with the same dataset share: all that can be reached without a
    ``threading.local``; if there is none, the seed sequences that make some."""
    found = _Walk(closed=_OF_A_THREAD).run(_roots_of(dataset, *others))
    return list(found.generators or found.sequences)


class Growing:
    """The Seeder of a worker's dataset and other objects (collate_fn), and what it seeds: the global
    generators, and private ones of these objects. Then it calls each offered ``seed_sample(seed)``
    *in addition* with 63 bits of its own, so that its effect prevails. ``seeder.renew()`` after a
    sample finds generators that the sample has made, if the watched attributes have changed.

    A generator that the program has seeded (``default_rng(42)``) draws from its own seed in place
    of the loader's: see ``own_seed``. A generator that a sample makes does not, because another
    worker may seed it otherwise.

    before: the own seeds before worker_init_fn, which may give each worker another; None: there is
    no such function. tell: if given, is told what lets a sample depend on those that its worker has
    made before, see ``History``. of_loader: the loader's ``generator=``, which has no own seed: each
    epoch draws from it, so its state depends on when workers start. The loader's seed comes from
    it. last: that of the epoch before in this process, whose samples may have left generators that
    workers do not have as they start."""

    def __init__(
        self,
        *roots: Any,
        before: OwnSeeds | None = None,
        tell: Callable[[str], None] | None = None,
        of_loader: Any = None,
        last: Growing | None = None,
    ) -> None:
        self._roots, self._of_loader = roots, of_loader
        self.found = self._walk()
        left = {id(g) for g in last.seeded()} - {id(g) for g in last._alike} if last else set()
        #: those that no sample has made: each worker has them, by their stream
        self._alike: list[Any] = [g for g in self.seeded() if id(g) not in left]
        places = list(zip(self.found.watched, self.found.owners, strict=False))
        self._history = History(places, self.found.crowds, _length(roots[0]), tell) if tell else None
        now = self._seeds_of(self._alike)
        kept = now if before is None else {i: now[i] for i in now if now[i] == before.get(i)}
        self._own_seeds: OwnSeeds = kept
        self._opencv = opencv_plans(before is None)
        self.seeder = self._seeder()

    def _seeds_of(self, generators: Iterable[Any]) -> OwnSeeds:
        return {id(g): (g, own_seed(g)) for g in generators if g is not self._of_loader}

    def _seeder(self) -> Seeder:
        seeder = Seeder([*plan_all(), *self._plans()])
        self._watch(seeder, GLOBALS)
        return seeder

    def _watch(self, seeder: Seeder, nglobal: int) -> None:
        found = self.found
        seeder.watch(found.watched, found.counted, self._again, nglobal, self._types())

    def _walk(self) -> Found:
        return find_of(*self._roots)

    def _types(self) -> set[type]:
        return {type(g) for g in self.seeded()}

    def seeded(self) -> list[Any]:
        """The private generators, as found."""
        return [*self.found.generators, *self.found.sequences]

    def _again(self, changed: int) -> News | None:
        """changed: 0: set_epoch() may have made generators, alike in each worker."""
        if self._history is not None:
            self._history.look() if changed else self._history.epoch()
        if changed == ONLY_VALUES:
            return None
        now, known = self._walk(), {id(g) for g in self.seeded()}
        new = [g for g in (*now.generators, *now.sequences) if id(g) not in known]
        if not new:
            return None
        self.found = now
        if not changed:
            self._own_seeds |= self._seeds_of(new)
            alike = {id(g) for g in (*self._alike, *new)}
            self._alike = [g for g in self.seeded() if id(g) in alike]
        return self._news()

    def _news(self) -> News:
        return self._plans(), self.found.watched, self.found.counted, self._types()

    def _plans(self) -> list[Any]:
        """Generators that a sample makes take the streams that the others leave."""
        seeded, own = self.seeded(), self._own_seeds
        alike = {id(g): k for k, g in enumerate(self._alike)}
        taken = {alike.get(id(g)) for g in seeded}
        free = (k for k in count() if k not in taken)
        streams = [alike[id(g)] if id(g) in alike else next(free) for g in seeded]
        seeds = [own[id(g)][1] if id(g) in own else 0 for g in seeded]
        return [*plan_private(seeded, self.found.hooks, seeds, streams), *self._opencv]


class GrowingInThread(Growing):
    """The same for a thread that shares its dataset with others: it seeds the thread's own generators,
    and leaves alone those that others draw from. They get the same numbers as in a process."""

    def _seeder(self) -> Seeder:
        seeder = Seeder(self._plans())
        self._watch(seeder, 0)
        return seeder

    def _again(self, changed: int) -> News | None:
        known = self._own()
        self.found = self._walk()
        if self._own() <= known:
            return None
        return self._news()

    def _own(self) -> set[int]:
        shared = {id(g) for g in find_shared(*self._roots)}
        return {id(g) for g in self.seeded()} - shared

    def _plans(self) -> list[Any]:
        """Finds them as in a process with its own dataset, without the shared generators."""
        own, found, hooks = self._own(), self.seeded(), self.found.hooks
        plans = super()._plans()
        chosen = [plan for plan, g in zip(plans, found, strict=False) if id(g) in own]
        return [*chosen, *plans[len(found) : len(found) + len(hooks)]]
