"""Loaders of random datasets, samplers and options, with torch's loader as the oracle.

Static scheduling matches torch bit for bit, including random numbers. So does balanced
scheduling, except for the draws of a map-style dataset in workers, which are only compared in
type and shape. ``MINATO_FUZZ_SECONDS`` runs new examples every time, for that long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import random
import time
import warnings
from typing import Any, Callable, Iterator, NamedTuple

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch.utils import data as tud

from .datasets import as_is
from .support import Kind, assert_same

SECONDS = float(os.environ.get("MINATO_FUZZ_SECONDS", "0"))
TIMEOUT_S = 90
#: warnings that depend on the machine, that torch raises in a worker where they are lost, or that
#: Python (from 3.12 on) raises at each fork: the program's, while minato has one fork for all
UNCOMPARED = ("worker processes in total", "list of numpy.ndarrays is extremely slow",
              "is multi-threaded, use of fork() may lead to deadlocks")


class Point(NamedTuple):
    x: Any
    y: Any


# ------------------------------------------------------------------- samples


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A value that is made of the sample's index."""

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def make(self, index: int) -> Any:
        count = int(np.prod(self.shape))
        if self.kind == "tensor":
            tensor = (torch.arange(count) + index) % 100
            return tensor.reshape(self.shape).to(getattr(torch, self.dtype))
        if self.kind == "strided":
            doubled = (torch.arange(2 * count) + index) % 100
            return doubled.to(getattr(torch, self.dtype))[::2].reshape(self.shape[::-1]).t()
        if self.kind == "array":
            return ((np.arange(count) + index) % 100).reshape(self.shape).astype(self.dtype)
        if self.kind == "scalar":
            return np.dtype(self.dtype).type(index % 100)
        return {"int": index, "float": index / 3, "bool": index % 2 == 0, "str": f"s{index}",
                "bytes": b"b%d" % index, "none": None}[self.kind]


TORCH_DTYPES = ["float32", "float64", "int64", "uint8", "bool", "bfloat16", "complex64"]
NUMPY_DTYPES = ["float32", "float64", "int64", "uint8", "bool", "int16"]

_shapes = st.sampled_from([(), (0,), (1,), (3,), (2, 3), (1, 1, 2), (40, 500)])
_leaves = st.one_of(
    st.builds(Leaf, st.just("tensor"), st.sampled_from(TORCH_DTYPES), _shapes),
    st.builds(Leaf, st.just("strided"), st.sampled_from(TORCH_DTYPES),
              st.sampled_from([(2, 3), (4, 1)])),
    st.builds(Leaf, st.just("array"), st.sampled_from(NUMPY_DTYPES), _shapes),
    st.builds(Leaf, st.just("scalar"), st.sampled_from(NUMPY_DTYPES)),
    st.builds(Leaf, st.sampled_from(["int", "float", "bool", "str", "bytes"])),
)
_trees = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=2),
        st.lists(inner, max_size=2),
        st.lists(inner, min_size=1, max_size=2).map(tuple),
        st.builds(Point, inner, inner),
    ),
    max_leaves=4,
)


def build(tree: Any, index: int) -> Any:
    """The sample of an index, of a tree of leaves."""
    if isinstance(tree, Leaf):
        return tree.make(index)
    if isinstance(tree, dict):
        return {key: build(value, index) for key, value in tree.items()}
    parts = [build(value, index) for value in tree]
    return Point(*parts) if isinstance(tree, Point) else type(tree)(parts)


def draws() -> torch.Tensor:
    """One number of each global generator, float64 (4,)."""
    return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item(),
                         torch.randn((), dtype=torch.float64).item()], dtype=torch.float64)


class Refused(Exception):
    """Cannot be made of one text."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(index, why)


ERRORS = [ValueError, KeyError, IndexError, Refused]


@dataclasses.dataclass(frozen=True)
class Samples:
    """The content of a dataset: the usual structure, other structures at some indices or at regular
    intervals, errors, draws."""

    length: int
    tree: Any
    others: dict[int, Any]
    every: int
    errors: dict[int, int]
    random: bool

    def get(self, index: int) -> Any:
        if index in self.errors:
            kind = ERRORS[self.errors[index]]
            raise Refused(index, "no") if kind is Refused else kind(f"bad {index}")
        tree = self.others.get(index % self.every if self.every else index, self.tree)
        sample = build(tree, index)
        return {"sample": sample, "drawn": draws()} if self.random else sample


_samples = st.builds(
    Samples,
    length=st.one_of(st.integers(0, 14), st.integers(15, 50)),
    tree=_trees,
    every=st.sampled_from([0, 0, 2, 5]),
    others=st.one_of(st.just({}), st.dictionaries(st.integers(0, 13), _trees, max_size=2)),
    errors=st.one_of(
        st.just({}), st.dictionaries(st.integers(0, 13), st.integers(0, 3), max_size=3)),
    random=st.booleans(),
)


class Mapped(tud.Dataset):
    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples.length

    def __getitem__(self, index: int) -> Any:
        return self.samples.get(index)


class Bulk(Mapped):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.samples.get(index) for index in indices]


class Stream(tud.IterableDataset):
    """Split over the workers, or by error all of it in each."""

    def __init__(self, samples: Samples, split: bool, sized: bool) -> None:
        self.samples, self.split = samples, split
        if sized:
            self.__class__ = SizedStream

    def __iter__(self) -> Iterator[Any]:
        info = tud.get_worker_info()
        first, step = (info.id, info.num_workers) if info and self.split else (0, 1)
        return map(self.samples.get, range(first, self.samples.length, step))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.samples.length


DATASETS = {
    "mapped": Mapped,
    "bulk": Bulk,
    "subset": lambda s: tud.Subset(Mapped(s), list(range(s.length))[::-1]),
    "bulk_subset": lambda s: tud.Subset(Bulk(s), list(range(s.length))),
    "nested_subset": lambda s: tud.Subset(
        tud.Subset(Mapped(s), list(range(s.length))[::-1]), list(range(s.length))),
    "concat": lambda s: tud.ConcatDataset([Mapped(s), Mapped(s)]),
    "stack": lambda s: tud.StackDataset(a=Mapped(s), b=Mapped(s)),
    "stack_bulk": lambda s: tud.StackDataset(Bulk(s), Mapped(s)),
    "split": lambda s: Stream(s, True, False),
    "split_sized": lambda s: Stream(s, True, True),
    "replicated": lambda s: Stream(s, False, True),
    "chain": lambda s: tud.ChainDataset([Stream(s, True, False), Stream(s, True, False)]),
}
STREAMS = ("split", "split_sized", "replicated", "chain")


# ------------------------------------------------------------------- loaders


def half(samples: list[Any]) -> Any:
    """A collate_fn that looks at half of the samples."""
    return tud.default_collate(samples[: (len(samples) + 1) // 2])


def drawing(samples: Any) -> Any:
    return {"batch": samples, "drawn": draws()}


COLLATES = {"default": None, "as_is": as_is, "half": half, "drawing": drawing}


def burn(worker: int) -> None:
    """A worker_init_fn that draws."""
    draws()


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of one loader, and the calls made on it."""

    samples: Samples
    dataset: str
    order: str
    batch_size: int | None
    drop_last: bool
    collate: str
    workers: int
    prefetch: int
    persistent: bool
    in_order: bool
    own_generator: bool
    init: bool
    epochs: tuple[int | None, ...]  # after how many batches each is left; None: at its end
    ask_len: bool

    @property
    def stream(self) -> bool:
        return self.dataset in STREAMS

    def arguments(self, dataset: Any, generator: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = dict(
            collate_fn=COLLATES[self.collate], num_workers=self.workers, generator=generator,
        )
        if self.workers:
            arguments.update(prefetch_factor=self.prefetch, timeout=TIMEOUT_S,
                             persistent_workers=self.persistent, in_order=self.in_order,
                             worker_init_fn=burn if self.init else None)
        if self.order == "batches" and not self.stream:
            size = max(1, self.batch_size or 1)
            places = list(range(len(dataset)))
            arguments["batch_sampler"] = [
                places[k:k + 1 + (k + size) % 3] for k in range(0, len(places), size)]
            return arguments
        arguments.update(batch_size=self.batch_size,
                         drop_last=self.drop_last and self.batch_size is not None)
        if not self.stream:
            arguments.update(self._order(dataset, generator))
        return arguments

    def _order(self, dataset: Any, generator: Any) -> dict[str, Any]:
        size = len(dataset)
        if self.order == "shuffle":
            return {"shuffle": True}
        if self.order == "replacement":
            return {"sampler": tud.RandomSampler(dataset, True, size + 3, generator)}
        if self.order == "more":
            return {"sampler": tud.RandomSampler(dataset, False, 2 * size + 1, generator)}
        if self.order == "weighted":
            weights = [1.0 + (k % 3) for k in range(size)]
            return {"sampler": tud.WeightedRandomSampler(weights, size, True, generator)}
        if self.order == "subset":
            return {"sampler": tud.SubsetRandomSampler(range(0, size, 2), generator)}
        if self.order == "distributed":
            return {"sampler": tud.DistributedSampler(dataset, 2, 1)}
        if self.order == "list":
            return {"sampler": [k for k in range(size) if k % 3] * 2}
        return {}


ORDERS = ["given", "shuffle", "replacement", "more", "weighted", "subset", "distributed",
          "list", "batches"]

_cases = st.builds(
    Case,
    samples=_samples,
    dataset=st.sampled_from(list(DATASETS)),
    order=st.sampled_from(ORDERS),
    batch_size=st.sampled_from([None, 1, 2, 3, 5]),
    drop_last=st.booleans(),
    collate=st.sampled_from(list(COLLATES)),
    workers=st.integers(0, 3),
    prefetch=st.integers(1, 3),
    persistent=st.booleans(),
    in_order=st.sampled_from([True, True, False]),
    own_generator=st.booleans(),
    init=st.booleans(),
    epochs=st.lists(
        st.sampled_from([None, None, 0, 1, 3]), min_size=1, max_size=3).map(tuple),
    ask_len=st.booleans(),
)


# ------------------------------------------------------------------- running


def _step(iterator: Any) -> Any:
    """The next batch; an error by its type and the words of the sample's own."""
    try:
        return next(iterator)
    except StopIteration:
        return StopIteration
    except Exception as error:
        own = str(error).split("\nminato: ")[0]  # Python 3.10 has notes inside the text
        lines = own.strip().splitlines() or [""]
        return "error", type(error).__name__, lines[0].rstrip("0123456789."), lines[-1]


def _epoch(iterator: Any, limit: int | None) -> list[Any]:
    batches: list[Any] = []
    while limit is None or len(batches) < limit:
        batch = _step(iterator)
        if batch is StopIteration:
            return batches
        batches.append(batch)
        assert len(batches) < 500, "the epoch does not end"
    return batches


def _run(kind: Kind, case: Case) -> list[tuple[str, Any]]:
    """All that a program sees of the loader: (what, value)."""
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)
    generator = torch.Generator().manual_seed(8) if case.own_generator else None
    seen: list[tuple[str, Any]] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            dataset = DATASETS[case.dataset](case.samples)
            loader = kind(dataset, **case.arguments(dataset, generator))
        except Exception as error:
            return [("refused", (type(error).__name__, str(error)))]
        if case.ask_len:
            seen.append(("length", _length(loader)))
        for number, limit in enumerate(case.epochs):
            try:
                iterator = iter(loader)
            except Exception as error:  # of the sampler
                seen.append((f"iter {number}", (type(error).__name__, str(error))))
                continue
            seen.append((f"epoch {number}", _epoch(iterator, limit)))
            seen.append((f"iterator's length {number}", _length(iterator)))
            if not (case.persistent and case.workers):
                if case.workers:
                    iterator._shutdown_workers()
                del iterator
            if not case.in_order and limit is not None:
                break  # how far it went is a matter of time
            if generator is not None:
                seen.append((f"generator {number}", generator.get_state()))
            seen.append((f"streams {number}", draws()))
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()
    seen.append(("warnings", sorted(
        str(w.message).split(" object at ")[0] for w in warned
        if not any(text in str(w.message) for text in UNCOMPARED))))
    return seen


def _length(sized: Any) -> Any:
    try:
        return len(sized)
    except TypeError as error:
        return str(error).split(" object ")[-1]


def _masked(value: Any) -> Any:
    """The same without the numbers that were drawn."""
    if isinstance(value, dict):
        return {
            key: torch.zeros_like(part) if key == "drawn" and torch.is_tensor(part)
            else _masked(part) for key, part in value.items()
        }
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_masked, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_masked, value))
    return value


def _key(value: Any) -> str:
    with np.printoptions(threshold=10), torch._tensor_str.printoptions(threshold=10):
        return repr(value)


def assert_like_torch(kind: Kind, case: Case) -> None:
    want = _run(Kind("torch"), case)
    got = _run(kind, case)
    assert [what for what, _ in got] == [what for what, _ in want]
    mask = not case.in_order and case.workers > 1  # which worker fetches depends on timing
    if not case.stream and case.workers > 0:
        mask = mask or kind.balanced
    for (what, mine), (_, theirs) in zip(got, want):
        if not what.startswith("epoch"):
            assert_same(mine, theirs, what)
            continue
        if mask:
            mine, theirs = _masked(mine), _masked(theirs)
        if not case.in_order and case.workers:
            full = case.epochs[int(what.split()[1])] is None
            if not full:
                assert len(mine) == len(theirs), what
                continue
            mine, theirs = sorted(mine, key=_key), sorted(theirs, key=_key)
        assert_same(mine, theirs, what)


# ------------------------------------------------------------ sequences of uses


COLLATE_NAMES = {"default": tud.default_collate, "as_is": as_is, "drawing": drawing}

_uses = st.one_of(
    st.tuples(st.just("iter"), st.integers(0, 1)),
    st.tuples(st.just("next"), st.integers(0, 1), st.integers(1, 4)),
    st.tuples(st.just("rest"), st.integers(0, 1)),
    st.tuples(st.just("drop"), st.integers(0, 1)),
    st.tuples(st.just("set"), st.just("collate_fn"), st.sampled_from(list(COLLATE_NAMES))),
    st.tuples(st.just("set"), st.just("num_workers"), st.integers(1, 3)),
    st.tuples(st.just("set"), st.just("prefetch_factor"), st.integers(1, 4)),
    st.tuples(st.just("set"), st.just("worker_init_fn"), st.sampled_from([None, burn])),
    st.tuples(st.just("grow"), st.integers(1, 3)),
    st.tuples(st.just("len")),
)


@dataclasses.dataclass(frozen=True)
class Story:
    """One loader, two variables for its iterators, and the calls made on them."""

    samples: Samples
    dataset: str
    shuffle: bool
    batch_size: int | None
    persistent: bool
    own_generator: bool
    uses: list[tuple]


_stories = st.builds(
    Story,
    samples=_samples,
    dataset=st.sampled_from(["mapped", "bulk", "subset", "split_sized"]),
    shuffle=st.booleans(),
    batch_size=st.sampled_from([None, 1, 2, 3]),
    persistent=st.booleans(),
    own_generator=st.booleans(),
    uses=st.lists(_uses, min_size=2, max_size=9),
)


def _spoiled(batch: Any) -> Any:
    """A copy of a batch whose tensors are then overwritten: no other holder may see that."""
    copy = pickle.loads(pickle.dumps(batch))
    for tensor in _tensors(batch):
        tensor.zero_()
    return copy


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _use(loader: Any, held: dict[int, Any], use: tuple) -> Any:
    what, *how = use
    if what == "iter":
        held[how[0]] = iter(loader)
        return how[0]
    if what == "drop":
        iterator = held.pop(how[0], None)
        return iterator is not None
    if what in ("next", "rest"):
        iterator = held.get(how[0])
        if iterator is None:
            return None
        batches = _epoch(iterator, how[1] if what == "next" else None)
        return [_spoiled(b) if loader.batch_size else b for b in batches]
    if what == "set":
        name, value = how
        setattr(loader, name, COLLATE_NAMES[value] if name == "collate_fn" else value)
        return None
    if what == "grow":
        dataset = loader.dataset
        if not isinstance(dataset, tud.Subset):
            more = dataset.samples.length + how[0]
            dataset.samples = dataclasses.replace(dataset.samples, length=more)
        return None
    return _length(loader)


def _tell(kind: Kind, story: Story) -> list[tuple[str, Any]]:
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)
    generator = torch.Generator().manual_seed(8) if story.own_generator else None
    dataset = DATASETS[story.dataset](story.samples)
    stream = story.dataset in STREAMS
    told: list[tuple[str, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loader = kind(
                dataset, batch_size=story.batch_size, num_workers=2, generator=generator,
                shuffle=None if stream else story.shuffle, timeout=TIMEOUT_S,
                persistent_workers=story.persistent)
        except ValueError as error:
            return [("refused", str(error))]
        held: dict[int, Any] = {}
        for number, use in enumerate(story.uses):
            told.append((f"{number} {use[0]}", _use(loader, held, use)))
            told.append((f"{number} streams", draws()))
            if generator is not None:
                told.append((f"{number} generator", generator.get_state()))
        for iterator in (*held.values(), loader._iterator):
            if iterator is not None:
                iterator._shutdown_workers()
    return told


def assert_told_as_by_torch(kind: Kind, story: Story) -> None:
    want, got = _tell(Kind("torch"), story), _tell(kind, story)
    assert [what for what, _ in got] == [what for what, _ in want]
    mask = kind.balanced and story.dataset not in STREAMS
    for (what, mine), (_, theirs) in zip(got, want):
        if mask and what.endswith(("next", "rest")):
            mine, theirs = _masked(mine), _masked(theirs)
        assert_same(mine, theirs, what)


# ----------------------------------------------------------------------- tests


@pytest.fixture(autouse=True)
def generators_as_before() -> Iterator[None]:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])


class TimeIsUp(BaseException):
    """Ends a search that has found nothing; hypothesis takes it for no failure."""


def _check(
    own: Kind, cases: Any, agree: Any, examples: int, seconds: float = SECONDS,
    now: Callable[[], float] = time.monotonic,
) -> None:  # fmt: skip
    deadline, failed = now() + seconds, False

    @hypothesis.settings(
        deadline=None, derandomize=not seconds, database=None,
        max_examples=10**6 if seconds else examples,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(cases)
    def check(case: Any) -> None:
        nonlocal failed
        if seconds and not failed and now() >= deadline:
            raise TimeIsUp
        try:
            agree(own, case)
        except BaseException:
            failed = True  # findings are shrunk and reported, however long that takes
            raise

    with contextlib.suppress(TimeIsUp):
        check()


def test_fuzzing_ends_when_its_time_is_up() -> None:
    seen: list[int] = []
    _check(Kind("minato"), st.integers(), lambda _, case: seen.append(case), 1, 5.0,
           lambda: float(len(seen)))  # fmt: skip
    assert len(seen) == 5


def test_fuzzing_reports_findings_after_its_time() -> None:
    seen: list[int] = []

    def agree(_: Kind, case: int) -> None:
        seen.append(case)
        assert case < 100, "found"

    with pytest.raises(AssertionError, match="found"):
        _check(Kind("minato"), st.integers(100), agree, 1, 1.0, lambda: float(len(seen)))
    assert min(seen) == seen[-1] == 100


#: hypothesis shrinks a finding for up to five minutes
LIMIT_S = SECONDS + (420 if SECONDS else 120)


@pytest.mark.limit(LIMIT_S)
def test_random_loaders_match_torch(own: Kind) -> None:
    _check(own, _cases, assert_like_torch, 40)


@pytest.mark.limit(LIMIT_S)
def test_random_sequences_of_calls_match_torch(own: Kind) -> None:
    _check(own, _stories, assert_told_as_by_torch, 25)
