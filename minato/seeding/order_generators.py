"""The generators that determine a loader's order, and their states.

A sampler repeats its order from the states of the generators that it draws from. These are the
generators that it and its nested samplers hold, the loader's, and the global ones of torch,
``random`` and NumPy.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import marshal
import random
import weakref
from collections.abc import Callable, Iterator
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _DatasetKind

from .._not_linux import CORE
from ..dataset_calls import attribute, is_stateful

if CORE:
    from .._core import Seeder

TORCH_SAMPLERS = (
    torch.utils.data.SequentialSampler,
    torch.utils.data.RandomSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
    torch.utils.data.DistributedSampler,
)

#: torch's samplers that have no set_epoch(), and do not deal to ranks
PLAIN_SAMPLERS = (torch.utils.data.BatchSampler, *TORCH_SAMPLERS[:-1])


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


#: first item of a state captured in the form that takes microseconds. Each epoch captures these,
#: and only those in a state_dict() are converted to JSON
_QUICK = b"minato, by marshal: "


def portable(data: bytes) -> bytes:
    """A captured state in the form of state_dict(), which any version of Python can read."""
    if not data.startswith(_QUICK):
        return data
    first, *rest = marshal.loads(data[len(_QUICK) :])
    if isinstance(first, bytes):  # NumPy's words
        first = np.frombuffer(first, np.uint32).tolist()
    return json.dumps([first, *rest]).encode()


#: of NumPy's global generator: its memory at the last call, and its state then
_numpy_was: tuple[bytes, bytes | None] = b"", None


#: bytes of a Mersenne Twister's words and position, in NumPy's memory layout
_MT19937 = 4 * 625


def numpy_words() -> bytes:
    """The words of NumPy's global generator in memory; empty if it is of another kind."""
    bits: Any = np.random.mtrand._rand._bit_generator  # type: ignore[attr-defined]
    is_mt = type(bits) is np.random.MT19937
    return ctypes.string_at(bits.ctypes.state_address, _MT19937) if is_mt else b""


def legacy_state(generator: Any) -> bytes | None:
    """The state of a RandomState, or of the functions of ``numpy.random``; None if it is no Mersenne
    Twister: then the program has replaced it, and it is not saved."""
    name, words, *rest = generator.get_state(legacy=True)
    return _QUICK + marshal.dumps((words.tobytes(), *rest)) if name == "MT19937" else None


def _numpy_memory() -> bytes:
    """The words of NumPy's global generator, and the rest of its RandomState."""
    words = numpy_words() if CORE else b""
    everybodys: Any = np.random.mtrand._rand  # type: ignore[attr-defined]
    return words and words + Seeder._peek(everybodys)[object.__basicsize__ :]


def _get_numpy() -> bytes | None:
    global _numpy_was
    memory, (was, state) = _numpy_memory(), _numpy_was
    if not memory or memory != was:  # asking NumPy takes 80 us
        state = legacy_state(np.random)
        _numpy_was = memory, state
    return state


def _set_numpy(data: bytes) -> None:
    if data.startswith(_QUICK):
        first, *rest = marshal.loads(data[len(_QUICK) :])
        words = np.frombuffer(first, np.uint32)
    else:
        first, *rest = json.loads(data)
        words = np.array(first, np.uint32)
    np.random.set_state(("MT19937", words, *rest))


def _plain(state: Any) -> Any:
    """A NumPy bit generator's state for JSON: arrays become pairs of type and numbers."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    if isinstance(state, np.ndarray):
        return [state.dtype.name, state.tolist()]
    return state.item() if isinstance(state, np.generic) else state


def _whole(state: Any) -> Any:
    """Reverses _plain()."""
    if isinstance(state, dict):
        return {name: _whole(value) for name, value in state.items()}
    return np.array(state[1], state[0]) if isinstance(state, list) else state


def get_state(generator: Any) -> bytes:
    """A generator's state, as capture() has it."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return _QUICK + marshal.dumps(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return json.dumps(_plain(generator.get_state(legacy=False))).encode()
    return json.dumps(_plain(getattr(generator, "bit_generator", generator).state)).encode()


def _set_state(generator: Any, data: bytes) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(_tensor(data))
    elif isinstance(generator, random.Random):
        version, words, gauss = json.loads(portable(data))
        generator.setstate((version, tuple(words), gauss))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_whole(json.loads(data)))
    else:
        getattr(generator, "bit_generator", generator).state = _whole(json.loads(data))


#: generator of the module random
_PYTHON: random.Random = random._inst  # type: ignore[attr-defined]

#: role -> (get, set) of the global generators
_GLOBALS: dict[str, tuple[Callable[[], bytes | None], Callable[[bytes], None]]] = {
    "torch": (
        lambda: get_state(torch.default_generator),
        lambda data: _set_state(torch.default_generator, data),
    ),
    "python": (lambda: get_state(_PYTHON), lambda data: _set_state(_PYTHON, data)),
    "numpy": (_get_numpy, _set_numpy),
}


#: types that are no sampler, generator or dataset, and are compared by value
PLAIN = (int, float, str, bool, type(None))

#: limit on samplers, and on the length of a list that is searched for them
MOST = 64

#: kinds of generators whose states can be saved
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState,
               np.random.BitGenerator)  # fmt: skip


def _has_state(generator: Any) -> bool:
    """Whether it can be restored. A class derived from ``random.Random`` may have no state, or one
    in another form; such generators are left to the program."""
    if not isinstance(generator, random.Random):
        return True
    try:
        _version, words, _gauss = generator.getstate()
        return isinstance(words, (list, tuple)) and {*map(type, words)} == {int}
    except Exception:
        return False


def _is_own(generator: Any) -> bool:
    """Whether it belongs to its holder, is not global, and has a state."""
    if generator is _PYTHON or generator is torch.default_generator:
        return False
    everybodys: Any = np.random.mtrand._rand  # type: ignore[attr-defined]
    return generator is not everybodys and _has_state(generator)


def _is_sampler(value: Any) -> bool:
    """Whether it yields indices; data, in contrast, returns samples by index."""
    kind = type(value)
    by_index = hasattr(kind, "__getitem__") or hasattr(kind, "__getitems__")
    gives = hasattr(kind, "__iter__") and not by_index and not isinstance(value, DataLoader)
    return gives or isinstance(value, Sampler)


def attributes(part: Any) -> Iterator[tuple[str, Any]]:
    """An object's own attributes by name, including slots."""
    yield from getattr(part, "__dict__", {}).items()
    for kind in type(part).__mro__:
        if not vars(kind).get("__slots__"):
            continue
        for name, member in vars(kind).items():
            if isinstance(member, MemberDescriptorType) and hasattr(part, name):
                yield name, getattr(part, name)


def _held(part: Any, way: str) -> Iterator[tuple[str, Any]]:
    """An object's attributes, and the elements of small containers, by the path to each; without
    numbers and text."""
    for attribute, value in attributes(part):
        if type(value) in PLAIN:
            continue
        yield f"{way}.{attribute}", value
        if issubclass(type(value), (list, tuple, dict)) and len(value) <= MOST:
            for number, one in enumerate(value.values() if isinstance(value, dict) else value):
                yield f"{way}.{attribute}.{number}", one


def _holds_any(part: Any) -> bool:
    """Whether it has attributes. A set has none, and may be large."""
    return next(attributes(part), None) is not None


#: generators or parts, by the path to each
ByRole = dict[str, Any]
#: parts, and the generators that they hold
Found = tuple[ByRole, ByRole]


def _search(ways: list[tuple[str, Any]], is_part: Callable[[Any], bool]) -> Found:
    """These parts and those that they hold, the nearest first."""
    known = {id(part) for _way, part in ways}
    generators = {}
    for way, part in ways:
        for role, one in _held(part, way):
            if type(one) in weakref.ProxyTypes:
                continue  # a weak proxy raises if its object is gone
            if isinstance(one, GENERATORS) and _is_own(one):
                generators[role] = one
            if id(one) not in known and len(ways) < MOST and is_part(one) and _holds_any(one):
                known.add(id(one))
                ways.append((role, one))
    return dict(ways), generators


def _datasets_in(dataset: Any) -> Found:
    """An iterable dataset, and those that it holds. One that has its own state includes its
    generators there, and those of nested ones."""
    if is_stateful(dataset):
        return {}, {}
    return _search([("dataset", dataset)], lambda one: isinstance(one, Dataset))


def sampler_of(loader: Any) -> Any:
    """The source of the order of samples; None if a batch sampler does not say."""
    batches = loader.batch_sampler
    return loader.sampler if batches is None else attribute(batches, "sampler")


def _told_of_epochs(loader: Any) -> Any:
    """The sampler or batch sampler with ``set_epoch`` that stores the epoch in its
    attribute ``epoch``, like torch's DistributedSampler; None without one."""
    batches = loader.batch_sampler
    parts = [batches, sampler_of(loader)]
    if type(batches) not in PLAIN_SAMPLERS:  # a rank's share of another's batches
        inner = attribute(batches, "batch_sampler")
        parts += [inner, attribute(inner, "sampler")]
    for part in parts:
        if (type(part) not in PLAIN_SAMPLERS and callable(attribute(part, "set_epoch"))
                and type(attribute(part, "epoch")) is int):
            return part
    return None


def sampler_epoch(loader: Any) -> int | None:
    """The epoch of the sampler's order, if it was set."""
    sampler = _told_of_epochs(loader)
    return None if sampler is None else int(sampler.epoch)


def set_sampler_epoch(loader: Any, epoch: int) -> None:
    """Passes the result of ``sampler_epoch()`` to the sampler."""
    sampler = _told_of_epochs(loader)
    if sampler is not None and sampler.epoch != epoch:
        sampler.set_epoch(epoch)


def batch_size_of(loader: Any) -> int | None:
    """Samples of a batch, if the loader or its batch sampler says so."""
    if loader.batch_size is not None:
        return int(loader.batch_size)
    size = attribute(loader.batch_sampler, "batch_size")
    return size if type(size) is int and size > 0 else None


def _generator_of(sampler: Any) -> torch.Generator | None:
    """What it says is its own."""
    generator = attribute(sampler, "generator")
    if generator is None or not isinstance(generator, torch.Generator):
        return None
    return generator


def sampler_of_torch(loader: Any) -> bool:
    """Whether torch's own classes make the order: they draw only from torch's generators."""
    batches = loader.batch_sampler
    plain = batches is None or type(batches) is torch.utils.data.BatchSampler
    return plain and type(sampler_of(loader)) in TORCH_SAMPLERS


class Sources:
    """The generators of a loader's order and base seeds, as they are when this object is made. It
    copies the loader's relevant attributes, and does not hold the loader."""

    def __init__(self, loader: Any) -> None:
        self.batch_sampler, self.sampler = loader.batch_sampler, loader.sampler
        self.generator, self.num_workers = loader.generator, loader.num_workers
        self._dataset_kind = loader._dataset_kind
        of_torch, sampler = sampler_of_torch(self), sampler_of(self)
        of_batches = _generator_of(self.batch_sampler)
        own = of_batches if of_batches is not None else _generator_of(sampler)
        self.own: ByRole = {} if own is None else {"sampler": own}
        #: the samplers, and those that they hold
        self.samplers = {"batch_sampler": self.batch_sampler, "sampler": sampler}
        if not of_torch or of_batches is not None:  # torch's draw from their attribute generator
            self.samplers, generators = _search([*self.samplers.items()], _is_sampler)
            for role, one in generators.items():
                if not self._has(one):
                    self.own[role] = one
        # For base seeds; if a sampler draws from it, too, it counts as the sampler's.
        given = isinstance(self.generator, torch.Generator)  # torch refuses others
        if given and not self._has(self.generator):
            self.own["loader"] = self.generator
        #: of an iterable dataset that is read in this process and may shuffle
        self.of_dataset: ByRole = {}
        if self._dataset_kind == _DatasetKind.Iterable and self.num_workers == 0:
            generators = _datasets_in(loader.dataset)[1]
            self.of_dataset = {r: one for r, one in generators.items() if not self._has(one)}
        #: global generators that the sampler may draw from
        self.globals: tuple[str, ...] = ("torch", "python", "numpy")
        if of_torch:
            self.globals = ("torch",) if own is None else ()
        elif self._dataset_kind == _DatasetKind.Iterable and self.num_workers > 0:
            self.globals = ()

    def again(self) -> Sources:
        """The current ones: the program may have replaced some."""
        return Sources(self)

    def _has(self, generator: Any) -> bool:
        return any(generator is known for known in self.own.values())

    def capture(self, everything: bool = True) -> dict[str, bytes]:
        """Current states, by role; the global ones only if the order may come from them."""
        states = {role: get_state(g) for role, g in (self.own | self.of_dataset).items()}
        for role in self.globals if everything else ():
            data = _GLOBALS[role][0]()
            if data is not None:
                states[role] = data
        return states

    def drew(self, before: dict[str, bytes]) -> bool:
        """Whether anything except a base seed was drawn since."""
        source = torch.default_generator if self.generator is None else self.generator
        roles = {role for role, g in self.own.items() if g is source}
        if self.generator is None and torch.get_default_device().type == "cpu":
            roles.add("torch")  # otherwise torch draws the seed from another device's generator
        after = dict(before)
        for role in roles & before.keys():
            seeds = torch.Generator(source.device)
            seeds.set_state(_tensor(before[role]))
            torch.empty((), dtype=torch.int64, device=source.device).random_(generator=seeds)
            after[role] = get_state(seeds)
        return self.capture() != after

    def lacks(self, states: dict[str, bytes]) -> list[str]:
        """Samplers' generators with a state in the dict that no sampler holds now."""
        return [role for role in states
                if role.partition(".")[0] in ("sampler", "batch_sampler") and role not in self.own]  # fmt: skip

    def set_own(self, states: dict[str, bytes]) -> None:
        if "loader" in states and self.generator is not None:
            # older states have it under this role, whichever object holds it
            held = {role for role, g in self.own.items() if g is self.generator}
            states = {**dict.fromkeys(held, states["loader"]), **states}
        self._set(self.own, states, "sampler")

    def set_dataset(self, states: dict[str, bytes]) -> None:
        """Sets those of the dataset, before its iterator is made."""
        self._set(self.of_dataset, states, "dataset")

    def check(self, states: dict[str, bytes]) -> None:
        """Raises ValueError for states of other kinds of generators; changes nothing."""
        found = self.capture(everything=False)
        try:
            self.set_own(states)
            self.set_dataset(states)
            with global_generators(states):
                pass
        finally:
            self.set_own(found)
            self.set_dataset(found)

    @staticmethod
    def _set(generators: ByRole, states: dict[str, bytes], whose: str) -> None:
        for role, generator in generators.items():
            if role not in states:
                continue
            try:
                _set_state(generator, states[role])
            except Exception as error:
                raise ValueError(
                    f"the state's generator {role!r} is of another kind than this loader's, a "
                    f"{type(generator).__name__}: it was taken with another {whose} ({error})"
                ) from error


def fingerprint() -> tuple[Any, ...]:
    """Fingerprint of the global generators: it changes with every draw."""
    return get_state(torch.default_generator), _PYTHON.getstate(), _get_numpy()


def all_global() -> dict[str, bytes]:
    """States of the global generators, by role."""
    states = {role: get() for role, (get, _set) in _GLOBALS.items()}
    return {role: data for role, data in states.items() if data is not None}


def put_global(states: dict[str, bytes]) -> None:
    """Sets global generators to these states, in a process of minato's."""
    for role, (_get, set_) in _GLOBALS.items():
        if role not in states:
            continue
        try:
            set_(states[role])
        except Exception as error:
            raise ValueError(
                f"the state's generator {role!r} is damaged, or from another version of its "
                f"library: {error}"
            ) from error


@contextlib.contextmanager
def global_generators(states: dict[str, bytes]) -> Iterator[None]:
    """Sets the global generators to these states, and restores the program's afterwards."""
    if not states:
        yield
        return
    found = {role: get() for role, (get, _set) in _GLOBALS.items() if role in states}
    before = {role: data for role, data in found.items() if data is not None}
    try:
        put_global({role: states[role] for role in before})
        yield
    finally:
        put_global(before)


# ---- the base seed of an epoch, from which seeds of torch's workers and of samples are made ----
#
# torch draws one in the constructor of its iterators, and persistent workers keep it for all
# epochs. draw_base_seed() draws the one that torch does not draw: that of an epoch whose state was
# loaded by an iterator that already existed.

#: torch's attribute of an iterator, which its position stores
BASE_SEED: Any = property(
    lambda iterator: iterator._position.base_seed,
    lambda iterator, seed: setattr(iterator._position, "base_seed", seed),
)


#: torch's seeds from here on are the system's, which gives 64 bits; a new torch.Generator has 2**45.9
SYSTEMS_SEEDS = 1 << 48


def seed_of(loader: Any) -> int:
    """The initial seed of the generator that base seeds are drawn from."""
    return int((loader.generator or torch.default_generator).initial_seed())


def draw_base_seed(loader: Any) -> int:
    """Draws from the loader's own generator, or else from torch's global one, as torch does."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
