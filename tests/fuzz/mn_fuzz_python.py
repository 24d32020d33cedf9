"""Targets in Python: each is a function of some bytes, which raises if minato is wrong.

    python mn_fuzz_python.py TARGET [options of libFuzzer, and folders]

runs one with atheris, guided by its coverage of minato's Python modules.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import math
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

if __name__ == "__main__":
    import atheris

    seen: contextlib.AbstractContextManager[None] = atheris.instrument_imports(include=["minato"])
else:
    seen = contextlib.nullcontext()
with seen:
    import minato
    from fuzz.mn_draws import Draws
    from fuzz.mn_fuzz_pipelines import dataset, pipeline
    from minato import _core
    from minato.transport import messages
    from minato.transport.layouts import Layout, NoLayout, alike, plain

# ---- layouts: samples of all kinds, as rows and as messages --------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


class Whole(int):
    """A class that collation drops."""


SHAPES = [(), (1,), (3,), (2, 2), (0,), (1, 0), (5, 1, 2)]
T_DTYPES = [torch.float32, torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.complex64,
            torch.float16, torch.int16]  # fmt: skip
N_DTYPES = ["f4", "i8", "u1", "?", "f2", "c8", ">f4", ">i2", "u2", "U3", "O", "M8[s]"]


def tensor(draws: Draws) -> torch.Tensor:
    shape, dtype = draws.one_of(SHAPES), draws.one_of(T_DTYPES)
    made = torch.arange(draws.below(9), draws.below(9) + 99)[: math.prod(shape)]
    made = made.reshape(shape).to(dtype) if made.numel() == math.prod(shape) else torch.ones(shape)
    turned: list[Callable[[torch.Tensor], Any]] = [
        lambda t: t, lambda t: t, lambda t: t.t() if t.dim() == 2 else t, lambda t: t.expand(2, *shape),
        lambda t: t.flip(0) if t.dim() else t, lambda t: t.conj() if t.is_complex() else t,
        lambda t: t.float().requires_grad_(), lambda t: t.to_sparse() if t.dim() else t,
        lambda t: torch._neg_view(t.float()), lambda t: t.new_empty(4)[1:3], lambda t: t.to("meta"),
        lambda t: torch.nn.Parameter(t.float()),
    ]  # fmt: skip
    return draws.one_of(turned)(made)


def array(draws: Draws) -> Any:
    shape, dtype = draws.one_of(SHAPES), np.dtype(draws.one_of(N_DTYPES))
    made = np.arange(draws.below(9), draws.below(9) + 99)[: math.prod(shape)]
    made = np.resize(made, shape).astype(dtype)
    turned: list[Callable[[Any], Any]] = [
        lambda a: a, lambda a: a, lambda a: a.T, lambda a: a[::-1] if a.ndim else a,
        lambda a: np.broadcast_to(a, (2, *shape)), lambda a: a[()],
        lambda a: (a.setflags(write=False), a)[1],
        # NumPy's own pickle brings those of other byte orders into this machine's
        lambda a: a.view(np.recarray) if a.dtype.isnative else a,
    ]  # fmt: skip
    return draws.one_of(turned)(made)


def sample(draws: Draws, depth: int = 3) -> Any:
    leaves: list[Callable[[], Any]] = [
        lambda: tensor(draws), lambda: array(draws), lambda: draws.below(200),
        lambda: draws.below(9) / 4, lambda: draws.below(2) == 1, lambda: "é" * draws.below(4),
        lambda: b"x" * draws.below(4), lambda: None, lambda: Whole(draws.below(9)),
        lambda: 2 ** (60 + draws.below(9)), lambda: math.nan, lambda: 1j, lambda: {1, 2},
        lambda: range(draws.below(3)), lambda: memoryview(b"ab"), lambda: object,
    ]  # fmt: skip
    if depth == 0 or draws.below(3) == 0:
        return draws.one_of(leaves)()
    inner = [sample(draws, depth - 1) for _ in range(draws.below(4))]
    made: list[Callable[[], Any]] = [
        lambda: inner, lambda: tuple(inner), lambda: {k: v for k, v in zip("abc", inner)},
        lambda: {k: v for k, v in zip((1, None, ("t", 2)), inner)},
        lambda: Pair(inner and inner[0], inner and inner[-1]),
    ]  # fmt: skip
    return draws.one_of(made)()


def same(a: Any, b: Any) -> bool:
    """Bit for bit, including types and memory that a program can see."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.layout is not torch.strided or a.is_meta:
            return repr(a) == repr(b)
        return (
            (a.dtype, a.shape, a.is_conj(), a.is_neg(), a.requires_grad)
            == (b.dtype, b.shape, b.is_conj(), b.is_neg(), b.requires_grad)
            and np.array_equal(*(torch.view_as_real(t.resolve_conj()).numpy() if t.is_complex()
                                 else t.detach().resolve_neg().float().numpy() for t in (a, b)),
                               equal_nan=True)
        )  # fmt: skip
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and repr(a) == repr(b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b or repr(a) == repr(b)


def collated(samples: list[Any]) -> Any:
    """torch's batch, or the class of its exception."""
    try:
        return default_collate(samples)
    except Exception as error:
        return type(error)


def layout(data: bytes) -> None:
    """For a batch: rows, messages and samples without the classes that collation drops give the
    same as torch's collate."""
    draws = Draws(data)
    first = sample(draws)
    at = draws.at
    samples = [first]
    for _ in range(draws.below(3)):
        again = Draws(data[: at if draws.below(4) else at // 2])
        again.at = draws.below(3) if draws.below(3) == 2 else 0
        samples.append(sample(again))
    want = collated(samples)
    try:
        pickled, buffers = messages.dumps(samples, samples=True)
    except Exception:  # what cannot travel is collated where it was made
        pass
    else:
        there = messages.loads(pickled, [bytearray(b) for b in buffers])
        assert same(collated(there), want), (samples, there)
    # What stands behind a string in a batch stays as it is; plain() drops its class there, too.
    assert same(collated([plain(one) for one in samples]), plain(want)), samples
    if isinstance(want, type):
        return
    try:
        found = Layout.prove(samples[0], want, len(samples))
    except NoLayout:
        return
    objects: list[list[Any]] = []
    engine = _core.Engine(1, 0, False, window=1)
    try:
        block = engine.place(samples, found.core, objects)
        if block is None:
            assert not alike(samples), samples
            return
        got = engine.decode(block, found.core, objects)
    finally:
        engine.close()
    assert same(got, want), (samples, got, want)


# ---- states: of loaders of several kinds, spoiled ------------------------------------------------


class Counts(torch.utils.data.Sampler):
    """A dataset with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 12:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def __len__(self) -> int:
        return 12

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        at = state.get("at") if isinstance(state, dict) else None
        if type(at) is not int or not 0 <= at <= 12:
            raise ValueError("not mine")
        self.at = at


class Stream(torch.utils.data.IterableDataset):
    __init__ = Counts.__init__
    __iter__ = Counts.__iter__
    state_dict = Counts.state_dict
    load_state_dict = Counts.load_state_dict


LOADERS: list[Callable[[], Any]] = [
    lambda: minato.DataLoader(range(12), 2, shuffle=True),
    lambda: minato.DataLoader(range(12), 2, shuffle=True, generator=torch.Generator()),
    lambda: minato.DataLoader(range(12), 2, sampler=Counts()),
    lambda: minato.DataLoader(range(12), 2, sampler=Counts(), on_error="replace"),
    lambda: minato.DataLoader(Stream(), 2),
]  # fmt: skip
ODD: list[Any] = [
    None, -1, 0, 1, 3, 7, 2**31, 2**63 - 1, 2**63, 2**80, 0.5, math.nan, True, False, "", "x", "eJw=",
    b"", b"\0", [], {}, [0], [None], [1, 1], [2**63], {"a": 1}, (1,), object(),
]  # fmt: skip


@functools.cache
def taken(kind: int, batches: int) -> str:
    torch.manual_seed(3)
    loader = LOADERS[kind]()
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator, None)
    return json.dumps(loader.state_dict())


def spoil(value: Any, draws: Draws) -> Any:
    """A copy in which one part is replaced, missing, or packed bytes with a changed content."""
    if isinstance(value, dict) and value and draws.below(8):
        key = draws.one_of(list(value))
        if draws.below(16) == 15:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: spoil(value[key], draws)}
    if isinstance(value, list) and value and draws.below(8):
        at = draws.below(len(value))
        return [*value[:at], spoil(value[at], draws), *value[at + 1 :]]
    if isinstance(value, int) and draws.below(2):
        return value + draws.below(5) - 2
    if isinstance(value, str) and len(value) > 8 and draws.below(4):
        raw = bytearray(zlib.decompress(base64.b64decode(value)))
        at = draws.below(256) * len(raw) // 256
        raw[at : at + draws.below(3)] = bytes([draws.below(256)]) * draws.below(3)
        return base64.b64encode(zlib.compress(bytes(raw))).decode()
    return draws.one_of(ODD)


def state(data: bytes) -> None:
    """It is refused with a ValueError, or the delivered samples are those of the dataset, none
    twice, and the loader has a state again."""
    draws = Draws(data)
    kind = draws.below(len(LOADERS))
    given = json.loads(taken(kind, draws.below(8)))
    for _ in range(1 + draws.below(2)):
        given = spoil(given, draws)
    loader = LOADERS[kind]()
    with warnings.catch_warnings(), contextlib.suppress(ValueError):
        warnings.simplefilter("ignore")
        loader.load_state_dict(given)
        got = [int(i) for batch in loader for i in batch]
        assert set(got) <= set(range(12)) and len(set(got)) == len(got), (got, given)
        json.dumps(loader.state_dict())


TARGETS: dict[str, Callable[[bytes], None]] = {
    "layout": layout, "state": state, "pipeline": pipeline, "dataset": dataset,
}  # fmt: skip


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[sys.argv[1]])
    atheris.Fuzz()
