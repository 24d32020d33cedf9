"""Default collation of every supported type in workers, with torch as the oracle."""

from __future__ import annotations

import collections
import functools
import os
import re
import warnings
from typing import Any, Callable, Iterator, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

import minato

from .datasets import Listed, Numbers, as_is
from .support import Failure, Kind, assert_same

LENGTH = 5


class Point(NamedTuple):
    x: Any
    y: Any


Pair = collections.namedtuple("Pair", "left right")


class Tagged(dict):
    """A dict with an additional attribute, which collation keeps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tag = "t"


class Frozen(collections.abc.Mapping):
    """An immutable mapping made from a dict."""

    def __init__(self, items: dict[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Awkward(Frozen):
    """A mapping that cannot be made from a mapping: collation falls back to dict."""

    def __init__(self, left: Any, right: Any) -> None:
        super().__init__({"left": left, "right": right})


class Row(list):
    """A list subclass."""


class Fixed(collections.abc.Sequence):
    """An immutable sequence made from a list."""

    def __init__(self, items: list[Any]) -> None:
        self._items = list(items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


class Stubborn(Fixed):
    """A sequence that cannot be made from a sequence: collation falls back to list."""

    def __init__(self, left: Any, right: Any) -> None:
        super().__init__([left, right])


class Marked(torch.Tensor):
    """A tensor subclass."""


class Opaque:
    """A type that default_collate does not know."""

    def __init__(self, value: int) -> None:
        self.value = value


def _rows(function: Callable[[int], Any]) -> list[Any]:
    return [function(i) for i in range(LENGTH)]


def _memmap(i: int) -> np.ndarray:
    # An anonymous type: the type is what matters to the registry's isinstance walk.
    return np.arange(4 * i, 4 * i + 4, dtype=np.int16).view(np.ndarray)


def _tensor(dtype: torch.dtype) -> list[Any]:
    if dtype is torch.bool:
        return _rows(lambda i: torch.tensor([i % 2 == 0, True]))
    return _rows(lambda i: torch.tensor([i, 2 * i, 3]).to(dtype))


TORCH_DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
    torch.float8_e5m2,
]
NUMPY_DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
]

CASES: dict[str, list[Any]] = {
    "int": [3, -1, 2**40, 0, 5],
    "float": [0.5, float("nan"), float("inf"), -0.0, 1e300],
    "bool": [True, False, True, True, False],
    "complex": [1 + 2j, 2j, 0j, 1 + 0j, 3j],
    "str": ["a", "", "\u00e9", "d", "e"],
    "bytes": [b"a", b"", b"\x00", b"d", b"e"],
    "str_subclass": _rows(lambda i: np.str_(f"s{i}")),
    "bool_then_int": [True, 2, False, 4, 5],
    "int_then_bool": [2, True, 0, False, 5],
    "int_then_float": [1, 2.5, 3, 4.5, 5],
    "float_then_int": [1.5, 2, 3.5, 4, 5],
    "int_too_large": [1, 2**70, 3, 4, 5],
    "int_then_none": [1, None, 3, 4, 5],
    "int_then_str": [1, "a", 3, 4, 5],
    "none": _rows(lambda i: None),
    "set": _rows(lambda i: {i}),
    "opaque": _rows(Opaque),
    "scalar_tensor": _rows(lambda i: torch.tensor(i)),
    "tensor_and_int": [torch.tensor(1), 2, 3, 4, 5],
    "empty_tensor": _rows(lambda i: torch.empty(0)),
    "empty_rows": _rows(lambda i: torch.empty(0, 3, dtype=torch.int16)),
    "four_dimensions": _rows(lambda i: torch.full((2, 3, 1, 2), float(i))),
    "transposed": _rows(lambda i: torch.arange(6.0).reshape(2, 3).t() + i),
    "transposed_view": _rows(lambda i: (torch.arange(6) * (i + 1)).reshape(2, 3).t()),
    "strided": _rows(lambda i: (torch.arange(10) + i)[::3]),
    "expanded": _rows(lambda i: torch.tensor([i]).expand(4)),
    "offset_view": _rows(lambda i: torch.arange(100)[i + 10:i + 13]),
    "channels_last": _rows(
        lambda i: (torch.arange(24.0).reshape(1, 2, 3, 4) + i)
        .to(memory_format=torch.channels_last)),
    "subclass": _rows(lambda i: torch.tensor([i, 1]).as_subclass(Marked)),
    "requires_grad": _rows(lambda i: torch.ones(2, requires_grad=True)),
    "parameter": _rows(lambda i: torch.nn.Parameter(torch.ones(2))),
    "mixed_dtypes": [torch.ones(2, dtype=torch.float32 if i else torch.int64)
                     for i in range(LENGTH)],
    "mixed_dtypes_up": [torch.ones(2, dtype=torch.int64 if i else torch.float32)
                        for i in range(LENGTH)],
    "unequal_shapes": _rows(lambda i: torch.ones(i + 1)),
    "unequal_ranks": _rows(lambda i: torch.ones((2,) * (i % 2 + 1))),
    "sparse": _rows(lambda i: torch.eye(2).to_sparse()),
    "sparse_csr": _rows(lambda i: torch.eye(2).to_sparse_csr()),
    "nested": _rows(lambda i: torch.nested.nested_tensor([torch.ones(2)])),
    "zero_dim_array": _rows(lambda i: np.array(i, dtype=np.int16)),
    "empty_array": _rows(lambda i: np.zeros((0, 2), dtype=np.float32)),
    "fortran_array": _rows(lambda i: np.asfortranarray(np.arange(6).reshape(2, 3) + i)),
    "strided_array": _rows(lambda i: (np.arange(12) + i)[2::3]),
    "negative_stride": _rows(lambda i: (np.arange(4) + i)[::-1]),
    "swapped_bytes": _rows(lambda i: np.arange(3, dtype=">i4")),
    "array_view": _rows(_memmap),
    "object_array": _rows(lambda i: np.array([i, None], dtype=object)),
    "str_array": _rows(lambda i: np.array(["a", "b"])),
    "bytes_array": _rows(lambda i: np.array([b"a", b"b"])),
    "date_array": _rows(lambda i: np.array(["2020-01-01"], dtype="M8[D]")),
    "unequal_arrays": _rows(lambda i: np.zeros(i + 1)),
    "mixed_array_dtypes": _rows(lambda i: np.zeros(2, ("i4", "f8")[i % 2])),
    "array_then_tensor": [np.zeros(2, np.float32), *[torch.zeros(2)] * 4],
    "dict": _rows(lambda i: {"a": torch.tensor([i]), "b": i, "c": "x"}),
    "dict_int_keys": _rows(lambda i: {2: i, 1: float(i)}),
    "dict_missing_key": [{"a": 1, "b": 2}, *[{"a": 1}] * 4],
    "dict_extra_key": [{"a": 1}, *[{"a": 1, "b": 2}] * 4],
    "dict_order_differs": [{"a": 1, "b": 2}, *[{"b": 3, "a": 4}] * 4],
    "empty_dict": _rows(lambda i: {}),
    "ordered_dict": _rows(lambda i: collections.OrderedDict(z=i, a=torch.ones(1))),
    "default_dict": _rows(lambda i: collections.defaultdict(int, {"a": i})),
    "tagged_dict": _rows(lambda i: Tagged({"a": i})),
    "frozen_mapping": _rows(lambda i: Frozen({"a": i, "b": torch.ones(2) * i})),
    "awkward_mapping": _rows(lambda i: Awkward(i, float(i))),
    "namedtuple": _rows(lambda i: Point(i, torch.tensor([i]))),
    "namedtuple_factory": _rows(lambda i: Pair(np.ones(2), "s")),
    "tuple": _rows(lambda i: (i, float(i), "s")),
    "list": _rows(lambda i: [torch.tensor(i), i]),
    "row": _rows(lambda i: Row([i, 2 * i])),
    "fixed": _rows(lambda i: Fixed([i, 2 * i])),
    "stubborn": _rows(lambda i: Stubborn(i, 2 * i)),
    "range": _rows(lambda i: range(i, i + 3)),
    "deque": _rows(lambda i: collections.deque([i, "a"])),
    "empty_list": _rows(lambda i: []),
    "empty_tuple": _rows(lambda i: ()),
    "unequal_lists": _rows(lambda i: [0] * (i + 1)),
    "unequal_tuples": _rows(lambda i: (0,) * (i % 2 + 1)),
    "deep": _rows(lambda i: {"a": [(i, {"b": Point(torch.ones(2) * i, [b"x", i])})],
                             "n": np.float32(i)}),
    "none_inside": _rows(lambda i: {"a": i, "b": None}),
    "same_tensor_twice": _rows(lambda i: (lambda t: {"a": t, "b": t})(torch.ones(3) * i)),
}
CASES.update({f"tensor_{str(d)[6:]}": _tensor(d) for d in TORCH_DTYPES})
CASES.update({
    f"array_{d}": _rows(lambda i, d=d: np.arange(i, i + 3).astype(d))
    for d in NUMPY_DTYPES
})
CASES.update({
    f"scalar_{d}": _rows(lambda i, d=d: np.dtype(d).type(i)) for d in NUMPY_DTYPES
})


def _outcome(make: Any, samples: list[Any], **kwargs: Any) -> tuple[str, Any]:
    made = make(Listed(samples), num_workers=1, timeout=90, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        iterator = iter(made)
        try:
            return "batches", list(iterator)
        except Exception as error:
            return "error", Failure.of(error)
        finally:
            iterator._shutdown_workers()


@functools.cache
def _oracle() -> dict[str, tuple[str, Any]]:
    """torch's batches of each case, or its first error: by one loader of all samples."""
    names = [name for name, samples in CASES.items() for _ in range(0, len(samples), 2)]
    samples = [sample for case in CASES.values() for sample in case]
    starts = np.cumsum([0, *map(len, CASES.values())])
    cuts = [range(at, min(at + 2, end)) for begin, end in zip(starts, starts[1:])
            for at in range(begin, end, 2)]
    found: dict[str, tuple[str, Any]] = {name: ("batches", []) for name in CASES}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        iterator = iter(DataLoader(Listed(samples), batch_sampler=cuts, num_workers=1, timeout=90))
        for name in names:
            try:
                batch = next(iterator)
            except Exception as error:
                if found[name][0] == "batches":
                    found[name] = "error", Failure.of(error)
            else:
                if found[name][0] == "batches":
                    found[name][1].append(batch)
        iterator._shutdown_workers()
    return found


def assert_like_torch(got: tuple[str, Any], want: tuple[str, Any]) -> None:
    """Same batches bit for bit, or the same error with the same text."""
    assert got[0] == want[0], f"{got} instead of {want}"
    if want[0] == "batches":
        assert_same(got[1], want[1], "batches")
        return
    assert got[1].kind is want[1].kind
    assert want[1].last_line in got[1].text
    name = want[1].kind.__name__
    assert re.match(rf"Caught {name} in DataLoader worker process \d+\.", got[1].text)


@pytest.mark.parametrize("name", CASES)
def test_collated_types_equal_torch(loader: Kind, name: str) -> None:
    # Two full batches and a short one; torch itself only has to answer.
    want = _oracle()[name]
    if not loader.is_torch:
        assert_like_torch(_outcome(loader, CASES[name], batch_size=2), want)


@pytest.mark.parametrize("options", [
    {}, {"batching": "ready", "in_order": False}, {"worker_type": "thread"},
], ids=["balanced", "ready", "threads"])  # fmt: skip
def test_lazily_conjugated_tensors_are_collated_as_without_workers(options: Any) -> None:
    """torch's workers refuse them."""
    lazy = [{"conj": z.conj(), "neg": z.conj().imag, "plain": z} for z in torch.randn(4, 2).cfloat()]
    [want] = DataLoader(Listed(lazy), batch_size=4)
    [got] = minato.DataLoader(
        Listed(lazy), batch_size=4, num_workers=2, seed_per_sample=False, **options)
    assert_same(got, want, "batch")


def test_attributes_of_mappings_are_kept(loader: Kind) -> None:
    """assert_same() compares types and items alone."""
    [tagged] = _outcome(loader, CASES["tagged_dict"], batch_size=LENGTH)[1]
    [counted] = _outcome(loader, CASES["default_dict"], batch_size=LENGTH)[1]
    assert tagged.tag == "t" and counted.default_factory is int


def test_layout_may_change_between_batches(loader: Kind) -> None:
    samples = (
        [torch.ones(2)] * 2 + [torch.ones(3, dtype=torch.int32)] * 2
        + [{"a": i} for i in range(2)] + ["x", "y"] + [torch.ones(2, 2) * 3] * 2
        + [7] * 2 + [torch.ones(2) * 5] * 2
    )
    got = _outcome(loader, samples, batch_size=2)
    assert_like_torch(got, _outcome(DataLoader, samples, batch_size=2))


def test_batches_grow_and_shrink(loader: Kind) -> None:
    samples = [torch.arange(1000) + i for i in range(40)]
    cuts = [[0], list(range(17)), [3, 4], list(range(40)), [9], list(range(30))]

    def run(make: Any) -> list[Any]:
        return list(make(Listed(samples), batch_sampler=cuts, num_workers=2))

    assert_same(run(loader), run(DataLoader))


def test_large_batches(loader: Kind) -> None:
    samples = [torch.full((700_001,), i, dtype=torch.int16) for i in range(6)]
    made = loader(Listed(samples), batch_size=3, num_workers=2)
    for number, batch in enumerate(made):
        first = torch.arange(3 * number, 3 * number + 3, dtype=torch.int16)
        assert torch.equal(batch, first[:, None].expand(3, 700_001))


# ------------------------------------------------------------------ registry


def _collate_opaque(batch: list[Opaque], *, collate_fn_map: Any) -> torch.Tensor:
    return torch.tensor([item.value * 10 for item in batch])


def _collate_negated(batch: list[Any], *, collate_fn_map: Any) -> torch.Tensor:
    return -torch.stack([torch.as_tensor(item) for item in batch])


def _collate_padded(batch: list[torch.Tensor], *, collate_fn_map: Any) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(batch), batch_first=True)


@pytest.mark.parametrize("key, function, samples", [
    (Opaque, _collate_opaque, [Opaque(i) for i in range(4)]),
    (torch.Tensor, _collate_padded, [torch.ones(i + 1) for i in range(4)]),
    (int, _collate_negated, [1, 2, 3, 4]),
    (float, _collate_negated, [1.0, 2.0, 3.0, 4.0]),
    (np.ndarray, _collate_negated, [np.ones(2) * i for i in range(4)]),
    (bool, _collate_negated, [{"a": 1, "b": torch.ones(2)}] * 4),
    (Marked, _collate_negated, [torch.ones(2).as_subclass(Marked)] * 4),
    (dict, as_is, [{"a": 1}] * 4),
], ids=lambda value: getattr(value, "__name__", ""))
def test_registry_entries_of_the_user(loader: Kind, monkeypatch, key, function, samples):
    if function is as_is:
        def function(batch, *, collate_fn_map):
            return [dict(item, seen=True) for item in batch]
    monkeypatch.setitem(default_collate_fn_map, key, function)
    want = [default_collate(samples[:2]), default_collate(samples[2:])]
    got = list(loader(Listed(samples), batch_size=2, num_workers=1))
    assert_same(got, want)


class Bound:
    """Objects that only the worker that made them may collate, with the others, in order."""

    made: int = 0

    def __init__(self) -> None:
        self.pid, self.number, self.cannot_be_sent = os.getpid(), Bound.made, lambda: None
        Bound.made += 1


def _collate_bound(batch: list[Bound], *, collate_fn_map: Any) -> torch.Tensor:
    assert {item.pid for item in batch} == {os.getpid()}
    assert [item.number - batch[0].number for item in batch] == list(range(len(batch)))
    return torch.arange(len(batch))


class MadeInWorkers(Numbers):
    """Objects next to values that rows can hold, and from some index on only such objects."""

    def __init__(self, size: int, plain_before: int) -> None:
        super().__init__(size)
        self.plain_before = plain_before

    def __getitem__(self, index: int) -> Any:
        return {"n": index, "bound": index if index < self.plain_before else Bound()}


@pytest.mark.parametrize("plain_before", [0, 40])
def test_registered_classes_are_collated_where_they_are_made(
        loader: Kind, monkeypatch: pytest.MonkeyPatch, plain_before: int) -> None:
    monkeypatch.setitem(default_collate_fn_map, Bound, _collate_bound)
    made = loader(MadeInWorkers(40, plain_before), batch_size=4, num_workers=3)
    for _ in range(2):
        batches = list(made)
        assert torch.cat([batch["n"] for batch in batches]).tolist() == list(range(40))
        want = range(4) if plain_before == 0 else range(40)
        assert {int(n) for batch in batches for n in batch["bound"]} == set(want)


def test_registry_entry_removed_again(loader: Kind) -> None:
    made = loader(Listed([Opaque(1), Opaque(2)]), batch_size=2, num_workers=1)
    default_collate_fn_map[Opaque] = _collate_opaque
    try:
        assert [batch.tolist() for batch in made] == [[10, 20]]
    finally:
        del default_collate_fn_map[Opaque]
    with pytest.raises(TypeError, match="default_collate: batch must contain"):
        list(made)


# --------------------------------------------------------------- collate_fn


class Summed:
    """A callable object as collate_fn."""

    def __call__(self, samples: list[int]) -> int:
        return sum(samples)

    def method(self, samples: list[int]) -> int:
        return -sum(samples)


def _scaled(samples: list[int], factor: int) -> list[int]:
    return [factor * sample for sample in samples]


def _seen(samples: Any) -> tuple[str, bool, list[int]]:
    return type(samples).__name__, get_worker_info() is not None, samples


@pytest.mark.parametrize("function, want", [
    (as_is, [[0, 1], [2, 3], [4]]),
    (Summed(), [1, 5, 4]),
    (Summed().method, [-1, -5, -4]),
    (functools.partial(_scaled, factor=3), [[0, 3], [6, 9], [12]]),
    (lambda samples: tuple(samples), [(0, 1), (2, 3), (4,)]),
    (lambda samples: None, [None, None, None]),
    (lambda samples: {"n": {1, *samples}},
     [{"n": {0, 1}}, {"n": {1, 2, 3}}, {"n": {1, 4}}]),
    (max, [1, 3, 4]),
], ids=["function", "object", "bound", "partial", "lambda", "none", "sets", "builtin"])
def test_custom_collate(loader: Kind, function, want) -> None:
    for workers in (0, 2):
        made = loader(Numbers(5), batch_size=2, num_workers=workers, collate_fn=function)
        assert_same(list(made), want)


def test_collate_sees_a_list_inside_a_worker(loader: Kind) -> None:
    made = loader(Numbers(3), batch_size=2, num_workers=1, collate_fn=_seen)
    assert list(made) == [("list", True, [0, 1]), ("list", True, [2])]


def _views(samples: list[int]) -> dict[str, torch.Tensor]:
    base = torch.arange(1000) + samples[0]
    return {"base": base, "head": base[:3], "column": base.reshape(10, 100)[:, 1],
            "flag": torch.tensor(samples) > 1}


def test_collate_that_returns_views(loader: Kind) -> None:
    made = loader(Numbers(4), batch_size=2, num_workers=1, collate_fn=_views)
    assert_same(list(made), [_views([0, 1]), _views([2, 3])])


def _of_one_buffer(samples: list[int]) -> list[torch.Tensor]:
    base = torch.arange(1000.0) + samples[0]
    part, whole = base[100:200], base.view(10, 100)
    return [part, whole, base[:3], base.view(torch.int32), base.clone()]


@pytest.mark.parametrize("alone", [False, True])
def test_tensors_of_one_buffer_are_written_together(loader: Kind, alone: bool) -> None:
    samples = [_of_one_buffer([k, k]) for k in range(4)]
    if alone:
        made = loader(Listed(samples), batch_size=None, num_workers=2)
    else:
        made = loader(Numbers(4), batch_size=2, num_workers=2, collate_fn=_of_one_buffer)
    for batch in list(made):
        part, whole, head, bits, other = batch
        before = other.clone()
        whole.fill_(7)
        assert part.tolist() == [7] * 100 and head.tolist() == [7] * 3
        assert bits.unique().tolist() == [torch.tensor(7.0).view(torch.int32)]
        assert torch.equal(other, before)


def _mixture(samples: list[int]) -> Any:
    return [torch.tensor(samples), np.array(samples), Opaque, "s", {1: b"b"},
            np.float32(1), torch.float16, torch.Size([1, 2]), torch.nn.Parameter(
                torch.ones(2)), torch.ones(2).to_sparse(), slice(1, 2)]


def test_collate_that_returns_a_mixture(loader: Kind) -> None:
    made = loader(Numbers(2), batch_size=2, num_workers=1, collate_fn=_mixture)
    (got,) = list(made)
    want = _mixture([0, 1])
    assert_same(got[:9], want[:9])
    assert got[9].is_sparse and got[9].to_dense().tolist() == [1, 1]
    assert got[10] == slice(1, 2)


class WithoutMemory(torch.utils.data.Dataset[torch.Tensor]):
    """Some samples are tensors of the usual shape without memory."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index < 4 or index % 2:
            return torch.full((3000,), float(index))
        if self.kind == "zeros":
            return torch._efficientzerotensor(3000)
        return torch.zeros(3000, device="meta")


@pytest.mark.parametrize("kind", ["zeros", "meta"])
def test_a_tensor_without_memory_raises_as_in_torch(loader: Kind, kind: str) -> None:
    """Its samples are not written to rows: default_collate decides."""
    texts = {"zeros": "DispatchKey ZeroTensor", "meta": "meta"}
    with pytest.raises((RuntimeError, NotImplementedError), match=texts[kind]):
        list(loader(WithoutMemory(kind), batch_size=2, num_workers=1))


def test_threads_stack_a_tensor_without_memory() -> None:
    made = minato.DataLoader(WithoutMemory("zeros"), batch_size=2, num_workers=1,
                             worker_type="thread", seed_per_sample=False)
    want = list(torch.utils.data.DataLoader(WithoutMemory("zeros"), batch_size=2))
    assert_same(list(made), want)
