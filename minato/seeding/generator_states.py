"""How each generator is set to the state that belongs to a sample.

The C type ``minato._core.Seeder`` computes and writes states; this module tells it
where. It has two parts:

* *states*: for each generator, the public form of the state made from given words;
* *layouts*: where an object stores that state in memory. Layouts are verified: a fresh object of
  the same type is set to two known states through its public API. Its memory is searched for the
  difference. Then a Seeder fills it, and the public API must report exactly that state. If any step
  fails, states are set through the public API, which gives the same bytes, only more slowly.

Probes never touch global generators. ``minato.draws(seed)`` predicts with private generators what a
sample will draw, before a worker makes it.

Streams: 1 ``random``, 2 NumPy's legacy generator, 3 torch, 5 OpenCV, 16 + k the k-th private
generator in order of discovery, 4 + k * 2**32 the k-th ``seed_sample``. All private generators
with an own seed have stream 16: two in the same state draw the same, as paired transforms expect.
"""

from __future__ import annotations

import functools
import hashlib
import random
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import get_worker_info

from .._core import Seeder
from .order_generators import SYSTEMS_SEEDS

STREAM_RANDOM = 1
STREAM_NUMPY = 2
STREAM_TORCH = 3
STREAM_HOOK = 4
STREAM_OPENCV = 5
STREAM_PRIVATE = 16

_MT_WORDS = 624
_TORCH_BLOB = struct.Struct(f"=QiiQ{_MT_WORDS}Q40x")
_TORCH_SEED = struct.Struct("=Q")

Plan = tuple[Any, ...]
#: a state of NumPy's, as its public API gives it
State = dict[str, Any]
#: where words go in a generator's memory: (offset, first word, count), and what else is written:
#: (offset, 32-bit value)
Runs = tuple[tuple[int, int, int], ...]
Fixed = tuple[tuple[int, int], ...]


# ---- states ---------------------------------------------------------------------------


def _join(w: Sequence[int]) -> int:
    """One integer made of 32-bit words, the least significant first."""
    return sum(x << (32 * i) for i, x in enumerate(w))


def _u64s(w: Sequence[int]) -> Any:
    return np.array([_join(w[i : i + 2]) for i in range(0, len(w), 2)], dtype=np.uint64)


class _Algorithm(NamedTuple):
    """How an algorithm's state is made from words.

    A Mersenne Twister must not be all zero, so one bit is set in its first word, as in its
    authors' initialisation by array. The increment of a PCG is odd.
    """

    words: int
    or_word: int
    or_mask: int
    state: Callable[[Sequence[int]], State]
    runs: tuple[tuple[int, int], ...]

    def read(self, raw: bytes) -> list[int]:
        """The words of a state, from a Seeder's raw words."""
        w = list(struct.unpack_from(f"={self.words}I", raw))
        w[self.or_word] |= self.or_mask
        return w


_MT = _Algorithm(_MT_WORDS, 0, 0x8000_0000, lambda w: {"key": np.array(w, np.uint32), "pos": _MT_WORDS},
                 ((0, _MT_WORDS),))  # fmt: skip
_PCG = _Algorithm(8, 4, 1, lambda w: {"state": _join(w[:4]), "inc": _join(w[4:8])}, ((0, 4), (4, 4)))
_SEQUENCE = _Algorithm(1, 0, 0, lambda w: {"n_children_spawned": w[0]}, ((0, 1),))
_ALGORITHMS = {
    "MT19937": _MT,
    "PCG64": _PCG,
    "PCG64DXSM": _PCG,
    "Philox": _Algorithm(12, 0, 0, lambda w: {"counter": _u64s(w[:8]), "key": _u64s(w[8:12])}, ((0, 8), (8, 4))),
    "SFC64": _Algorithm(6, 0, 0, lambda w: {"state": _u64s([*w[:6], 1, 0])}, ((0, 6),)),
}


def _algorithm(bitgen: Any) -> _Algorithm | None:
    """Whether it is one of NumPy's bit generators by exact type: a subclass may have more state."""
    cls = type(bitgen)
    known = getattr(np.random, cls.__name__, None) is cls
    return _ALGORITHMS.get(cls.__name__) if known else None


def _public_state(name: str, w: Sequence[int]) -> State:
    """The format of ``bit_generator.state``, with empty caches."""
    state: State = {"bit_generator": name, "state": _ALGORITHMS[name].state(w)}
    if name == "Philox":
        state.update(buffer=_u64s([0] * 8), buffer_pos=4)
    if name != "MT19937":
        state.update(has_uint32=0, uinteger=0)
    return state


def _bitgen_state(bitgen: Any, raw: bytes) -> State:
    """The state for any bit generator; for one unknown to this module, that of a new seeded one."""
    algorithm = _algorithm(bitgen)
    if algorithm is None:
        return dict(type(bitgen)(list(struct.unpack_from("=8I", raw))).state)
    return _public_state(type(bitgen).__name__, algorithm.read(raw))


def _set_bitgen(bitgen: Any, raw: bytes, seed: int) -> None:
    bitgen.state = _bitgen_state(bitgen, raw)


def _set_random_state(rs: Any, raw: bytes, seed: int) -> None:
    """A RandomState's bit generator and its cached Gaussian."""
    rs.set_state({**_bitgen_state(rs._bit_generator, raw), "has_gauss": 0, "gauss": 0.0})


def _set_random(rng: random.Random, raw: bytes, seed: int) -> None:
    rng.setstate((3, (*_MT.read(raw), _MT_WORDS), None))


def _torch_blob(raw: bytes, seed: int) -> bytes:
    """torch's CPU generator state: seed, left, seeded, next, words, no cached normals.

    ``left`` 1 and ``next`` 0 is what ``manual_seed`` leaves: the first draw regenerates.
    """
    return _TORCH_BLOB.pack(seed, 1, 1, 0, *_MT.read(raw))


def _set_torch(generator: Any, raw: bytes, seed: int) -> None:
    blob = bytearray(_torch_blob(raw, seed))
    generator.set_state(torch.frombuffer(blob, dtype=torch.uint8))


# ---- layouts --------------------------------------------------------------------------


class _ProbeFailed(Exception):
    """A layout is not one that this module can fill."""


def _locate(obj: Any, apply: Callable[[bytes], None], a: bytes, b: bytes) -> int:
    """The one offset in obj's struct that holds a after apply(a) and b after apply(b)."""
    apply(a)
    first = Seeder._peek(obj)
    apply(b)
    second = Seeder._peek(obj)
    span = range(object.__basicsize__, len(first) - len(a) + 1, 4)
    hits = [o for o in span if first.startswith(a, o) and second.startswith(b, o)]
    if len(hits) != 1:
        raise _ProbeFailed(f"{type(obj).__name__}: {len(hits)} places for {len(a)} bytes")
    return hits[0]


def _probe_words(n: int, position: int) -> bytes:
    return Seeder._words(0, 0, position, 0, 0, n)[0]


def _seeded_by(plan: Plan) -> tuple[bytes, int]:
    """Lets a Seeder carry out a plan; returns the raw words and the seed that it used."""
    Seeder([("probe", STREAM_PRIVATE, plan)]).seed(1, 2, 3)
    return Seeder._words(1, 2, 3, 0, STREAM_PRIVATE, _MT_WORDS)


def _int_bytes(value: int) -> bytes:
    return struct.pack("=I", value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return bool((a == b) if isinstance(a, (int, float, str)) else (a == b).all())


def _fill_plan(obj: Any, lock: Any, cache: str | None, algorithm: _Algorithm,
               layout: tuple[Runs, Fixed]) -> Plan:
    return ("fill", obj, lock, cache, algorithm.words, algorithm.or_word,
            algorithm.or_mask, *layout)


def _probed(probe: Callable[..., Any]) -> Callable[..., Any]:
    """The probe's layout, found once per process, or None if it fails in any way."""

    @functools.cache
    @functools.wraps(probe)
    def run(*args: Any) -> Any:
        try:
            return probe(*args)
        except Exception:  # an unknown release of a library: use its public API
            return None

    return run


@_probed
def _random_layout() -> tuple[Runs, Fixed]:
    rng = random.Random()
    words = [_probe_words(_MT_WORDS, p) for p in (1, 2)]

    def put_words(raw: bytes) -> None:
        rng.setstate((3, (*struct.unpack(f"={_MT_WORDS}I", raw), 300), None))

    def put_index(raw: bytes) -> None:
        (index,) = struct.unpack("=I", raw)
        rng.setstate((3, (*range(1000, 1000 + _MT_WORDS), index), None))

    runs = ((_locate(rng, put_words, *words), 0, _MT_WORDS),)
    index = _locate(rng, put_index, _int_bytes(11), _int_bytes(517))
    layout = (runs, ((index, _MT_WORDS),))
    setattr(rng, "gauss_next", 0.5)  # its type does not declare it
    raw, _ = _seeded_by(_fill_plan(rng, None, "gauss_next", _MT, layout))
    if rng.getstate() != (3, (*_MT.read(raw), _MT_WORDS), None):
        raise _ProbeFailed("random.Random")
    return layout


class _Field(NamedTuple):
    """The rest of a state besides words: its place in the public state, two values to
    search for, and the value that every seeding leaves."""

    path: tuple[str | int, ...]
    a: bytes
    b: bytes
    final: bytes


def _fields(name: str) -> Iterator[_Field]:
    if name == "MT19937":
        yield _Field(("state", "pos"), *map(_int_bytes, (11, 517, _MT_WORDS)))
        return
    yield _Field(("has_uint32",), *map(_int_bytes, (1, 0, 0)))
    yield _Field(("uinteger",), *map(_int_bytes, (0x8BAD_F00D, 0x1234_5678, 0)))
    if name == "Philox":
        yield _Field(("buffer_pos",), *map(_int_bytes, (3, 1, 4)))
        yield _Field(("buffer",), _probe_words(8, 3), _probe_words(8, 4), bytes(32))
    if name == "SFC64":
        yield _Field(("state", "state", 3), _probe_words(2, 5), _probe_words(2, 6),
                     struct.pack("=Q", 1))


def _put_field(bitgen: Any, state: State, path: tuple[str | int, ...],
               raw: bytes) -> None:
    inner: Any = state
    for step in path[:-1]:
        inner = inner[step]
    values = np.frombuffer(raw, dtype=np.uint32 if len(raw) == 4 else np.uint64)
    inner[path[-1]] = values if len(values) > 1 else int(values[0])
    bitgen.state = state


@_probed
def _bitgen_layout(cls: type) -> tuple[Runs, Fixed]:
    """Where NumPy's bit generators store their words, and what else a seeding sets."""
    bitgen, name = cls(0), cls.__name__
    algorithm = _ALGORITHMS[name]
    words = [algorithm.read(_probe_words(algorithm.words, p)) for p in (1, 2)]
    packed = [struct.pack(f"={algorithm.words}I", *w) for w in words]
    by_bytes = dict(zip(packed, words, strict=True))
    runs = []
    for first, n in algorithm.runs:
        part = slice(4 * first, 4 * (first + n))
        states = {raw[part]: w for raw, w in by_bytes.items()}

        def put(raw: bytes, states: dict[bytes, list[int]] = states) -> None:
            bitgen.state = _public_state(name, states[raw])

        runs.append((_locate(bitgen, put, packed[0][part], packed[1][part]), first, n))
    fixed: list[tuple[int, int]] = []
    for path, a, b, final in _fields(name):
        put_field = functools.partial(
            _put_field, bitgen, _public_state(name, words[0]), path)
        offset = _locate(bitgen, put_field, a, b)
        values = struct.unpack(f"={len(final) // 4}I", final)
        fixed += [(offset + 4 * i, v) for i, v in enumerate(values)]
    layout = (tuple(runs), tuple(fixed))
    raw, _ = _seeded_by(_fill_plan(bitgen, bitgen.lock, None, algorithm, layout))
    if not _same(bitgen.state, _public_state(name, algorithm.read(raw))):
        raise _ProbeFailed(name)
    return layout


@_probed
def _random_state_layout(cls: type) -> tuple[int, Fixed]:
    """Offset of a RandomState's bit generator, and of its cached Gaussian."""
    rs, other = cls(np.random.MT19937(1)), cls(np.random.MT19937(2))
    places = []
    for each in (rs, other):
        pointer, raw = struct.pack("P", id(each._bit_generator)), Seeder._peek(each)
        span = range(object.__basicsize__, len(raw), 4)
        places.append([o for o in span if raw.startswith(pointer, o)])
    if len(places[0]) != 1 or places[0] != places[1]:
        raise _ProbeFailed("RandomState: bit generator")
    state = rs.get_state(legacy=False)

    def put_flag(raw: bytes) -> None:
        rs.set_state({**state, "has_gauss": struct.unpack("=I", raw)[0], "gauss": 0.5})

    def put_gauss(raw: bytes) -> None:
        rs.set_state({**state, "has_gauss": 1, "gauss": struct.unpack("=d", raw)[0]})

    flag = _locate(rs, put_flag, _int_bytes(1), _int_bytes(0))
    gauss = _locate(rs, put_gauss, struct.pack("=d", 1.375), struct.pack("=d", -2.625))
    layout = (places[0][0], ((flag, 0), (gauss, 0), (gauss + 4, 0)))
    plan = ("state", rs, *layout, plan_bitgen(rs._bit_generator))
    put_gauss(struct.pack("=d", 0.25))
    raw, _ = _seeded_by(plan)
    expected = {**_bitgen_state(rs._bit_generator, raw), "has_gauss": 0, "gauss": 0.0}
    if not _same(rs.get_state(legacy=False), expected):
        raise _ProbeFailed("RandomState")
    return layout


@_probed
def _sequence_layout() -> tuple[Runs, Fixed]:
    """Where a SeedSequence counts the children that it has spawned."""
    sequence: Any = np.random.SeedSequence(0)

    def put(raw: bytes) -> None:
        sequence.__init__(0, n_children_spawned=struct.unpack("=I", raw)[0])

    layout: tuple[Runs, Fixed] = (((_locate(sequence, put, _int_bytes(11), _int_bytes(517)), 0, 1),), ())
    raw, _ = _seeded_by(_fill_plan(sequence, None, None, _SEQUENCE, layout))
    if sequence.n_children_spawned != _SEQUENCE.read(raw)[0]:
        raise _ProbeFailed("SeedSequence")
    return layout


@_probed
def _torch_layout() -> bool:
    """Whether torch reads a state blob in the way that this module and the Seeder write it."""
    raw, seed = Seeder._words(1, 2, 3, 0, STREAM_PRIVATE, _MT_WORDS)
    by_api, by_fill = torch.Generator(), torch.Generator()
    one = torch.empty(1, device="cpu")
    one.normal_(generator=by_api)  # leaves a cached value to be cleared
    _set_torch(by_api, raw, seed)
    _seeded_by(_torch_plan(by_fill))
    expected = _torch_blob(raw, seed)
    blobs = [bytes(g.get_state().numpy()) for g in (by_api, by_fill)]
    if blobs != [expected, expected] or by_fill.initial_seed() != seed:
        raise _ProbeFailed("torch: state")
    twin = random.Random()
    _set_random(twin, raw, seed)
    drawn = torch.empty(700, dtype=torch.int64, device="cpu")
    drawn.random_(0, 1 << 24, generator=by_fill)
    if drawn.tolist() != [twin.getrandbits(32) % (1 << 24) for _ in range(700)]:
        raise _ProbeFailed("torch: draws")
    return True


# ---- kinds of generators -------------------------------------------------------------

_type_mro = type.__dict__["__mro__"].__get__


def mro_of(cls: type) -> tuple[type, ...]:
    """The classes of an object, ignoring any metaclass and any ``__class__`` property."""
    classes: tuple[type, ...] = _type_mro(cls)
    return classes


_KINDS: dict[type, str] = {
    random.Random: "random", torch.Generator: "torch", np.random.Generator: "numpy", np.random.RandomState: "legacy",
    np.random.BitGenerator: "bitgen", np.random.SeedSequence: "sequence",
}  # fmt: skip


def generator_kind(mro: tuple[type, ...]) -> str | None:
    return next((_KINDS[cls] for cls in mro if cls in _KINDS), None)


def bitgen_of(generator: Any) -> Any:
    return vars(np.random.Generator)["bit_generator"].__get__(generator)


#: of each kind: how its library gives a state, and how it takes one
_STATES: dict[str | None, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    "random": (lambda g: g.getstate(), lambda g, state: g.setstate(state)),
    "torch": (lambda g: g.get_state().numpy(), lambda g, state: g.set_state(torch.from_numpy(state))),
    "numpy": (lambda g: bitgen_of(g).state, lambda g, state: setattr(bitgen_of(g), "state", state)),
    "legacy": (lambda g: g.get_state(legacy=False), lambda g, state: g.set_state(state)),
    "bitgen": (lambda g: g.state, lambda g, state: setattr(g, "state", state)),
    "sequence": (lambda g: g.state, lambda g, state: g.__init__(**state)),
}


def state_of(generator: Any) -> Any:
    """A generator's state, as its library gives it."""
    return _STATES[generator_kind(mro_of(type(generator)))][0](generator)


def put_back(generator: Any) -> Callable[[], Any]:
    """A function that restores a generator's current state."""
    get, put = _STATES[generator_kind(mro_of(type(generator)))]
    return functools.partial(put, generator, get(generator))


#: seeds of NumPy from here on are the system's, which gives 128 bits
_SYSTEMS_NUMPY = 1 << 96
#: words of a key of ``random``: texts and numbers have fewer, the system gives all 624
_KEY_WORDS = 64


def own_seed(generator: Any) -> int:
    """A number that stands for the present state of a generator that the program has seeded; 0 if
    the system has seeded it."""
    try:
        if _is_systems(generator):
            return 0
        state = repr(_plain(state_of(generator))).encode()
    except Exception:  # a class of the program's own may refuse
        return 0
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") or 1


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return [(name, _plain(value)) for name, value in sorted(state.items())]
    if isinstance(state, tuple) and len(state) > _KEY_WORDS:
        return np.array(state, np.uint32).tobytes()
    if isinstance(state, tuple):
        return [_plain(value) for value in state]
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _is_systems(generator: Any) -> bool:
    kind = generator_kind(mro_of(type(generator)))
    if kind == "torch":
        return bool(generator.initial_seed() >= SYSTEMS_SEEDS)
    if kind == "random":
        return _is_systems_key(generator.getstate()[1])
    bits = bitgen_of(generator) if kind == "numpy" else generator
    bits = bits._bit_generator if kind == "legacy" else bits
    sequence = bits if kind == "sequence" else getattr(bits, "_seed_seq", None)
    entropy = getattr(sequence, "entropy", None)
    return isinstance(entropy, int) and entropy >= _SYSTEMS_NUMPY


@functools.cache
def _begin() -> Any:
    """The words from which that initialisation starts."""
    return np.random.RandomState(19650218).get_state(legacy=False)["state"]["key"]


def _is_systems_key(words: tuple[int, ...]) -> bool:
    """Whether ``random`` was seeded with as many words as the system gives, and has not been drawn
    from. Undoes the initialisation by array of the Mersenne Twister's authors, which adds the words
    of the key, and their places, in turn: those of a short key come again and again."""
    if len(words) != _MT_WORDS + 1 or words[-1] != _MT_WORDS or words[0] != 1 << 31:
        return False
    mt, place = np.array(words[:-1], np.uint32), np.arange(_MT_WORDS, dtype=np.uint32)
    begin = _begin()
    first = (mt[3:] + place[3:]) ^ ((mt[2:-1] ^ mt[2:-1] >> 30) * np.uint32(1566083941))
    key = first[1:] - (begin[4:] ^ (first[:-1] ^ first[:-1] >> 30) * np.uint32(1664525))
    again = np.flatnonzero(key[1:_KEY_WORDS] == key[0]) + 1
    return not any((key[n:] == key[:-n]).all() for n in again)


# ---- plans ----------------------------------------------------------------------------


def plan_bitgen(bitgen: Any) -> Plan:
    """The plan for seeding a NumPy bit generator."""
    algorithm = _algorithm(bitgen)
    if algorithm is None:
        return ("call", functools.partial(_set_bitgen, bitgen), 8) \
            if _is_reseedable(bitgen) else ("none",)
    layout = _bitgen_layout(type(bitgen))
    if layout is None:
        return ("call", functools.partial(_set_bitgen, bitgen), algorithm.words)
    return _fill_plan(bitgen, bitgen.lock, None, algorithm, layout)


def _plan_sequence(sequence: Any) -> Plan:
    """spawn() goes on from a number that belongs to the sample."""
    state = sequence.state
    layout = _sequence_layout() if type(sequence) is np.random.SeedSequence else None
    if layout is None:
        return ("hook", lambda seed: sequence.__init__(**{**state, "n_children_spawned": seed >> 32}))
    return _fill_plan(sequence, None, None, _SEQUENCE, layout)


def _is_reseedable(bitgen: Any) -> bool:
    """Whether a foreign bit generator can be given the state of a newly seeded one."""
    try:
        bitgen.state = bitgen.state
        return isinstance(_bitgen_state(bitgen, bytes(32)), dict)
    except Exception:
        return False


def _plan_random_state(rs: Any) -> Plan:
    layout = _random_state_layout(np.random.RandomState)
    if layout is None:
        return ("call", functools.partial(_set_random_state, rs), _MT_WORDS)
    return ("state", rs, *layout, plan_bitgen(rs._bit_generator))


_STANDARD = ("random", "getrandbits", "seed", "getstate", "setstate")


def _plan_random(rng: random.Random) -> Plan:
    """A subclass with its own algorithm must be seeded by its own method; it does not draw from the
    state that it inherits."""
    cls = type(rng)
    if any(getattr(cls, n) is not getattr(random.Random, n) for n in _STANDARD):
        return ("hook", rng.seed)
    layout = _random_layout()
    if layout is None:
        return ("call", functools.partial(_set_random, rng), _MT_WORDS)
    return _fill_plan(rng, None, "gauss_next", _MT, layout)


def _torch_plan(generator: Any, seed: int | None = None) -> Plan:
    """seed: the result of ``initial_seed()`` from now on, instead of each sample's own seed."""
    blob: Any = torch.zeros(_TORCH_BLOB.size, dtype=torch.uint8, device="cpu")
    if seed is not None:
        _TORCH_SEED.pack_into(blob.numpy(), 0, seed)
    return ("torch", generator.set_state, blob, blob.data_ptr(), blob.numel(), seed is not None)


def _chosen_seed(generator: Any) -> int | None:
    """The seed that worker_init_fn has given torch, which programs may read again."""
    info = get_worker_info()
    seed = generator.initial_seed()
    return None if info is None or seed == info.seed else seed


def _plan_torch(generator: Any) -> Plan:
    """Only CPU generators are Mersenne Twisters; others take a seed."""
    if generator.device.type != "cpu" or _torch_layout() is None:
        return ("hook", generator.manual_seed)
    chosen = _chosen_seed(generator) if generator is torch.default_generator else None
    return _torch_plan(generator, chosen)


def plan_all() -> list[tuple[str, int, Plan]]:
    """Plans for a Seeder of the global generators."""
    return [
        ("random", STREAM_RANDOM, _plan_random(random._inst)),
        ("numpy", STREAM_NUMPY, _plan_random_state(np.random.mtrand._rand)),
        ("torch", STREAM_TORCH, _plan_torch(torch.default_generator)),
    ]


#: the number of them
GLOBALS = 3


def ways(plans: Iterable[tuple[Any, ...]]) -> dict[str, str]:
    """How each plan seeds its generator, by label: the first word of its plan."""
    return {label: (plan[-1] if plan[0] == "state" else plan)[0] for label, _, plan, *_ in plans}


def probe_globals() -> None:
    """Probes the global generators once, so that forks of this process need not: this saves each
    worker 2 to 5 ms."""
    plan_all()


def _plan_private(obj: Any) -> tuple[str, Plan]:
    kind, name = generator_kind(mro_of(type(obj))), type(obj).__name__
    if kind == "random":
        return name, _plan_random(obj)
    if kind == "torch":
        return f"{name}({obj.device.type})", _plan_torch(obj)
    if kind == "bitgen":
        return name, plan_bitgen(obj)
    if kind == "numpy":
        bitgen = bitgen_of(obj)
        return f"{name}({type(bitgen).__name__})", plan_bitgen(bitgen)
    if kind == "sequence":
        return name, _plan_sequence(obj)
    if kind == "legacy":
        bitgen = obj._bit_generator
        return f"{name}({type(bitgen).__name__})", _plan_random_state(obj)
    raise TypeError(f"cannot seed a {name}: not a generator of random, NumPy or torch")


def opencv_plans(keeps_own: bool) -> list[tuple[Any, ...]]:
    """OpenCV has one generator, whose state can be told by its draws only. keeps_own: its state is
    the same in all workers, and stands for the seed that the program has given it."""
    cv2 = sys.modules.get("cv2")
    set_seed, draw = getattr(cv2, "setRNGSeed", None), getattr(cv2, "randu", None)
    if set_seed is None or draw is None:
        return []
    own = 0
    if keeps_own:
        drawn = draw(np.empty((1, 4), np.int32), 0, 1 << 30).tobytes()
        own = int.from_bytes(hashlib.blake2b(drawn, digest_size=8).digest(), "little") or 1
    return [("cv2", STREAM_OPENCV, ("hook", lambda seed: set_seed(seed >> 32)), own)]


def plan_private(private: Iterable[Any], hooks: Iterable[Any],
                 own_seeds: Sequence[int] = (), streams: Sequence[int] = (),
                 ) -> list[tuple[Any, ...]]:
    """Plans for a Seeder of private generators, and of functions that take a 63-bit seed, called after
    all generators are seeded. own_seeds: by generator, see own_seed(). streams: the number of each
    generator's stream, its position by default. Raises TypeError for a generator of an unknown kind."""
    plans: list[tuple[Any, ...]] = []
    for k, obj in enumerate(private):
        name, plan = _plan_private(obj)
        own = own_seeds[k] if own_seeds else 0
        stream = STREAM_PRIVATE + (0 if own else streams[k] if streams else k)
        plans.append((f"private[{k}] {name}", stream, plan, own))
    for k, hook in enumerate(hooks):
        if not callable(hook):
            raise TypeError(f"a hook must be callable, not {type(hook).__name__}")
        plans.append((f"seed_sample[{k}]", STREAM_HOOK + (k << 32), ("hook", hook)))
    return plans


# ---- the draws of a sample, before it is made: ``minato.draws(seed)`` ------------------------

_T = TypeVar("_T")
# Draws has attributes with the names of these modules.
_Random = random.Random
_TorchGenerator = torch.Generator


class SampleSeed(int):
    """A sample's seed, as ``cost_hint(index, *, seed)`` gets it.

    As an int it is the number that the dataset's ``seed_sample(seed)`` will get for the same
    sample. It also carries the key from which ``minato.draws`` makes generators. So hand on the
    object itself: a number that is computed from it has no key.
    """

    key: tuple[int, int]


def sample_seed(number: int, lo: int, hi: int) -> SampleSeed:
    """Returns what ``Seeder.sample`` returned, as one object."""
    seed = SampleSeed(number)
    seed.key = lo, hi
    return seed


class _OfThisThread(threading.local):
    """One generator of each library, with the Seeder that puts it into a sample's state: to make
    a new one takes NumPy 80 us."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[Any, Seeder]] = {}

    def seeded(self, stream: int, make: Callable[[], _T], key: tuple[int, int]) -> _T:
        if stream not in self.made:
            made = make()
            ((_, _, plan, _),) = plan_private([made], [])
            self.made[stream] = made, Seeder([("draws", stream, plan)])
        generator: _T
        generator, seeder = self.made[stream]
        seeder.put(*key)
        return generator


_of_this_thread = _OfThisThread()


class Draws:
    """Private generators in the state in which a sample will find the global ones."""

    def __init__(self, key: tuple[int, int]) -> None:
        self._key = key

    @functools.cached_property
    def random(self) -> _Random:
        """For Python's ``random``."""
        return _of_this_thread.seeded(STREAM_RANDOM, _Random, self._key)

    @functools.cached_property
    def numpy(self) -> np.random.RandomState:
        """For the functions of ``numpy.random``."""
        return _of_this_thread.seeded(STREAM_NUMPY, np.random.RandomState, self._key)

    @functools.cached_property
    def torch(self) -> _TorchGenerator:
        """For torch's default CPU generator: pass it as ``generator=``."""
        return _of_this_thread.seeded(STREAM_TORCH, _TorchGenerator, self._key)


def draws(seed: int | None) -> Draws:
    """Generators that draw what a sample will draw, without touching the program's own.

    A dataset whose cost depends on random numbers uses it to predict that cost::

        def cost_hint(self, index, *, seed=None, epoch=None):
            if seed is None:                      # samples are not seeded one by one
                return self.mean_seconds
            rotate = minato.draws(seed).random.random() < 0.1
            return 0.200 if rotate else 0.005     # seconds, or any other unit

        def __getitem__(self, index):
            rotate = random.random() < 0.1        # the sample's first draw: the same number
            ...

    seed: the one that ``cost_hint`` was given. Returns an object with the attributes ``random``
    (``random.Random``), ``numpy`` (``numpy.random.RandomState``) and ``torch``
    (``torch.Generator``). Each stands where the global generator of that library will stand when
    the sample begins. So the hint must draw in the same order as the sample. They are used again by
    the next call in the same thread. ``minato.check_determinism`` checks that hint and sample draw
    alike.

    A generator that the dataset holds itself is not among them. A dataset that has one seeds it
    in ``seed_sample(seed)``, and makes another one of ``seed`` in ``cost_hint``.

    Raises TypeError for anything but a seed that a loader has given.
    """
    if not isinstance(seed, SampleSeed):
        said = "None: the loader does not seed samples one by one" if seed is None else (
            f"{seed!r}, which is a plain {type(seed).__name__}")
        raise TypeError(
            f"minato.draws() was given {said}. Pass the seed that cost_hint(index, *, seed=None, "
            "epoch=None) gets from the loader, and return a hint without draws where it is None."
        )
    return Draws(seed.key)
