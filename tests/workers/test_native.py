"""Native workers: the same bytes as other workers, errors in place, and orderly ends.

``Recipe`` is a dataset whose native pipeline is a Python function behind ctypes, so that a
test decides what a sample does and when; ctypes takes the GIL for it.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import gc
import hashlib
import itertools
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attack import support
from contract.support import interrupt_in_minato, patiently, programs
from ops.native import RUN, Native  # tests/ops
from torch.utils.data import DistributedSampler, SequentialSampler, Subset
from torch.utils.data._utils.collate import default_collate_fn_map

import minato
from minato import ops
from minato.transport.layouts import INT, TUPLE, Layout
from minato.workers.native import _FixedTransport

PATCH = 8
#: where a wait that should end at once is given up
PATIENCE = 60.0
wait_for = functools.partial(support.wait_for, seconds=PATIENCE)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def native_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("minato-native")]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    gc.collect()
    wait_for(lambda: not native_threads())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("volumes")
    return [save_case(folder, n) for n in range(4)]


def save_case(folder: Path, number: int) -> tuple[Path, Path]:
    rng = np.random.default_rng(number)
    shape = rng.integers(PATCH, 3 * PATCH, 3)
    label = np.zeros((1, *shape), np.uint8)
    label[0, 2:6, 1:7, 3:8] = 1
    label[0, 5:8, 2:4, 1:3] = 2
    paths = folder / f"{number}_x.npy", folder / f"{number}_y.npy"
    np.save(paths[0], rng.standard_normal((1, *shape)).astype(np.float32))
    np.save(paths[1], label)
    return paths


def volumes(files: list, **options: Any) -> ops.VolumeDataset:
    steps = [ops.ReadNpy(), ops.RandBalancedCrop(PATCH), ops.RandFlip(), ops.Cast(),
             ops.RandScaleIntensity(p=0.5), ops.RandGaussianNoise(p=0.5)]
    return ops.VolumeDataset(files, ops.Pipeline(steps), seed=7, **{"repeat": 5, **options})


def digest(batch: Any) -> str:
    assert all(type(t) is torch.Tensor for t in batch)
    parts = [f"{t.dtype}{tuple(t.shape)}".encode() + t.numpy().tobytes() for t in batch]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def native(dataset: Any, *args: Any, **options: Any) -> minato.DataLoader:
    options = {"num_workers": 2, "worker_type": "native", **options}
    return minato.DataLoader(dataset, *args, **options)


class Recipe(torch.utils.data.Dataset):
    """Sample i is what fill(i, (key_hi, key_lo), arrays) writes; it returns 0 or (errno, text).
    """

    def __init__(
        self, length: int, fill: Callable[..., Any] = lambda i, key, out: None,
        fields: tuple = (("f4", (3,)),), **native: Any,
    ) -> None:  # fmt: skip
        self.length, self.fill = length, fill
        self.fields = [(np.dtype(name), shape) for name, shape in fields]
        self.native = Native(abi=1, size=ctypes.sizeof(Native), length=length,
                             n_fields=len(fields), run=RUN(self._run), **native)  # fmt: skip
        for field, (dtype, shape) in zip(self.native.fields, self.fields):
            size = dtype.itemsize * int(np.prod(shape))
            field.kind, field.itemsize, field.ndim = dtype.kind.encode(), dtype.itemsize, len(shape)
            field.shape[: len(shape)] = shape
            field.bytes = size

    def _run(self, _state, index, hi, lo, out, err, errlen) -> int:
        arrays = [
            np.frombuffer((ctypes.c_uint8 * field.bytes).from_address(out[k]), dtype).reshape(shape)
            for k, (field, (dtype, shape)) in enumerate(zip(self.native.fields, self.fields))
        ]
        code, text = self.fill(index, (hi, lo), arrays) or (0, "")
        ctypes.memmove(err, text.encode() + b"\0", min(errlen, len(text) + 1))
        return -code

    def native_pipeline(self) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.native), b"minato.native_pipeline.v1", None)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple:
        raise AssertionError("a native worker makes this sample")


def numbered(index: int, _key: Any, out: list) -> None:
    for array in out:
        array[...] = index


# ---- the same bytes ----------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {}, {"with_index": True}, {"output": "numpy", "keyed_by": "sample"},
    {"keyed_by": "sample", "with_index": True},
])  # fmt: skip
def test_every_worker_type_gives_the_same_bytes(files, options) -> None:
    def epochs(kind: type, **more: Any) -> list[list[str]]:
        torch.manual_seed(3)
        dataset = volumes(files, **options)
        loader = kind(dataset, batch_size=3, shuffle=True, **more)
        out = []
        for epoch in range(2):
            dataset.set_epoch(epoch)
            out.append([digest(batch) for batch in loader])
        if more.get("num_workers") and kind is minato.DataLoader:
            assert loader.stats()["worker_type"] == more.get("worker_type", "native")
        return out

    want = epochs(minato.DataLoader, num_workers=2, worker_type="process")
    assert len(want[0]) == 7 and want[0] != want[1]
    for workers in (1, 2, 5):
        assert epochs(minato.DataLoader, num_workers=workers) == want
    assert epochs(minato.DataLoader, num_workers=2, persistent_workers=True,
                  prefetch_factor=4)[0] == want[0]  # fmt: skip
    if "keyed_by" not in options:  # torch gives samples no seeds
        assert epochs(torch.utils.data.DataLoader, num_workers=2) == want
        assert epochs(minato.DataLoader, num_workers=0) == want


def test_native_samples_are_seeded_by_the_samplers_rank(files) -> None:
    data = volumes(files, keyed_by="sample", repeat=2)

    def loaded(kind: str, sampler: Any) -> list[bytes]:
        torch.manual_seed(1)
        loader = minato.DataLoader(data, 1, sampler=sampler, num_workers=2, worker_type=kind)
        return [digest(batch) for batch in loader]

    whole = loaded("native", SequentialSampler(data))
    for kind, rank in itertools.product(("native", "process"), range(2)):
        sampler = DistributedSampler(data, 2, rank, shuffle=False)
        assert loaded(kind, sampler) == whole[rank::2]


@pytest.mark.parametrize("keyed_by", ["epoch", "sample"])
def test_persistent_workers_and_epochs(files, keyed_by) -> None:
    def epochs(**more: Any) -> list[list[str]]:
        torch.manual_seed(4)
        loader = minato.DataLoader(volumes(files, keyed_by=keyed_by), 4, num_workers=2,
                                   persistent_workers=True, **more)  # fmt: skip
        out = []
        for epoch in (0, 5, 1):
            loader.set_epoch(epoch)
            out.append([digest(batch) for batch in loader])
        return out

    assert epochs() == epochs(worker_type="process")
    assert epochs(prefetch_next_epoch=True) == epochs()


@pytest.mark.parametrize("batching", ["sampler", "ready"])
def test_out_of_order(files, batching) -> None:
    dataset = volumes(files, with_index=True)
    want = {i: digest([t[None] for t in map(torch.as_tensor, dataset[i])]) for i in range(20)}
    loader = native(dataset, 3, shuffle=True, in_order=False, batching=batching)
    got = {}
    for batch in loader:
        for k, index in enumerate(batch[2].tolist()):
            assert index not in got
            got[index] = digest([t[k : k + 1] for t in batch])
    assert got == want


@pytest.mark.parametrize("first, then", [("native", "process"), ("process", "native")])
@pytest.mark.parametrize("keyed_by", ["epoch", "sample"])
def test_resume_with_the_other_workers(files, first, then, keyed_by) -> None:
    def loader(kind: str, workers: int) -> minato.DataLoader:
        return minato.DataLoader(volumes(files, keyed_by=keyed_by), 2, shuffle=True,
                                 num_workers=workers, worker_type=kind)  # fmt: skip

    torch.manual_seed(8)
    whole = loader(first, 2)
    whole.set_epoch(6)
    iterator = iter(whole)
    head = [digest(next(iterator)) for _ in range(4)]
    state = whole.state_dict()
    tail = [digest(b) for b in iterator]
    resumed = loader(then, 3)
    resumed.load_state_dict(state)
    assert [digest(b) for b in resumed] == tail
    assert len(head + tail) == 10


# ---- torch's subsets -------------------------------------------------------------------------

SUBSETS: dict[str, Callable[[Any], Subset]] = {
    "list": lambda d: Subset(d, [5, -1, 0, 3, 3]),
    "range": lambda d: Subset(d, range(3, 17, 2)),
    "tensor": lambda d: Subset(d, torch.tensor([7, 1, 19])),
    "array": lambda d: Subset(d, np.array([2, -20, 4], np.int16)),
    "keyed": lambda d: Subset(d, [5, 1, 0, 3]),
    "nested": lambda d: Subset(Subset(d, [9, 8, -3, 1]), [3, -4, 2]),
    "random_split": lambda d: torch.utils.data.random_split(
        d, [0.3, 0.7], torch.Generator().manual_seed(1))[1],
    "split of a split": lambda d: torch.utils.data.random_split(
        Subset(d, range(10)), [4, 6], torch.Generator().manual_seed(2))[0],
}  # fmt: skip


@pytest.mark.parametrize("name", SUBSETS)
def test_subsets(files, name) -> None:
    def epochs(**options: Any) -> list[list[str]]:
        torch.manual_seed(5)
        keyed = {"keyed_by": "sample"} if name == "keyed" else {}
        dataset = volumes(files, with_index=True, **keyed)
        loader = minato.DataLoader(SUBSETS[name](dataset), 2, shuffle=True, **options)
        out = []
        for epoch in (0, 4):
            dataset.set_epoch(epoch)
            out.append([digest(batch) for batch in loader])
        used = options.get("worker_type") or "native"
        assert loader.stats()["worker_type"] == used
        return out

    want = epochs(num_workers=2, worker_type="process")
    assert want[0] != want[1]
    for workers in (1, 3):
        assert epochs(num_workers=workers) == want
    assert epochs(num_workers=2, worker_type="native") == want


def test_an_empty_subset(files) -> None:
    assert list(native(Subset(volumes(files), []))) == []


def test_subset_indices_are_read_at_start(files) -> None:
    indices = [1, 2, 3, 4]
    subset = Subset(volumes(files, with_index=True), indices)
    loader = native(subset, persistent_workers=True, num_workers=1)
    iterator = iter(loader)
    indices[:] = [9, 9, 9, 9]
    assert [batch[2].item() for batch in iterator] == [1, 2, 3, 4]
    again = native(subset, num_workers=1)
    assert [batch[2].item() for batch in again] == [9, 9, 9, 9]


@pytest.mark.parametrize("indices", [[0, 20, 1, 2], [0, 2, -21, 1]], ids=str)
def test_subset_index_out_of_range_raises_as_processes(files, indices) -> None:
    """The dataset refuses it, as its own index."""
    def loader(kind: str) -> Any:
        subset = Subset(volumes(files), indices)
        return minato.DataLoader(subset, num_workers=1, worker_type=kind)

    want = outcome(loader("process"))
    assert sum(not isinstance(o, str) for o in want) == 1
    assert outcome(loader("native")) == want


# ---- datasets of others ------------------------------------------------------------------


def test_every_dtype() -> None:
    fields = (("f4", (2, 3)), ("f8", (1,)), ("u1", (5,)), ("i2", (2,)), ("u2", (2,)),
              ("i4", (2, 2)), ("i8", ()), ("f4", (0, 3)))  # fmt: skip
    batch = next(iter(native(Recipe(4, numbered, fields), 4)))
    assert type(batch) is list
    for tensor, (name, shape) in zip(batch, fields):
        want = [np.full(shape, k, name) for k in range(4)]
        collated = torch.utils.data.default_collate(want)
        assert tensor.dtype == collated.dtype and torch.equal(tensor, collated)


@pytest.mark.parametrize("told", [None, 9])
def test_keys_of_a_dataset_that_keeps_no_epoch(told) -> None:
    keys = {}
    dataset = Recipe(3, lambda i, key, out: keys.__setitem__(i, key), seed=5)
    loader = native(dataset)
    if told is not None:
        loader.set_epoch(told)
    list(loader)
    assert keys == {i: (5, (told or 0) << 32 | i) for i in range(3)}


def test_keys_of_samples_follow_the_position() -> None:
    def keys(**options: Any) -> list:
        seen = {}
        dataset = Recipe(6, lambda i, key, out: seen.__setitem__(i, key), keying=1)
        torch.manual_seed(1)
        list(native(dataset, sampler=[5, 3, 1, 0], **options))
        return [seen[i] for i in (5, 3, 1, 0)]

    assert keys() == keys(batch_size=3, num_workers=1)
    assert len(set(keys())) == 4 and all(low == 2**64 - 1 for _, low in keys())


@pytest.mark.parametrize("change, words", [
    (dict(abi=2), "another version"), (dict(size=8), "another version"),
    (dict(n_fields=0), "too few"), (dict(n_fields=9), "too few"), (dict(keying=2), "unknown"),
    (dict(run=RUN()), "no run"),
])  # fmt: skip
def test_pipelines_that_cannot_be_used(change, words) -> None:
    dataset = Recipe(3)
    for name, value in change.items():
        setattr(dataset.native, name, value)
    with pytest.raises(ValueError, match=f"native_pipeline.. failed.*{words}"):
        iter(native(dataset))


@pytest.mark.parametrize("change", [dict(bytes=11), dict(ndim=-1), dict(ndim=9), dict(itemsize=0),
                                    dict(ndim=0)])  # fmt: skip
def test_fields_that_cannot_be_used(change) -> None:
    dataset = Recipe(3)
    for name, value in change.items():
        setattr(dataset.native.fields[0], name, value)
    with pytest.raises(ValueError, match="makes no sense"):
        iter(native(dataset))


def test_missing_memory_for_pipeline_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is nothing about the dataset, and no reason for other workers."""
    monkeypatch.setattr(Recipe, "native_pipeline", lambda self: bytearray(1 << 62))
    for kind in ("native", None):
        with pytest.raises(MemoryError):
            iter(native(Recipe(3), worker_type=kind))


def test_a_dtype_that_torch_lacks() -> None:
    with pytest.raises(ValueError, match="no dtype for a field of kind 'f' and 16"):
        iter(native(Recipe(3, fields=(("f16", (2,)),))))


# ---- choice of the worker type -----------------------------------------------------------


def collate(samples: list) -> Any:
    return torch.utils.data.default_collate(samples)


class Derived(ops.VolumeDataset):
    def __getitem__(self, index: int) -> tuple:
        image, label = super().__getitem__(index)
        return image + 1, label


class DerivedNative(Derived):
    def native_pipeline(self) -> Any:
        return super().native_pipeline()


class Fetching(ops.VolumeDataset):
    def __getitems__(self, indices: list) -> list:
        return [self[i] for i in indices]


class Delegating:
    def __init__(self, dataset: Any) -> None:
        self.inner = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index][::-1]


class Reversed(Subset):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[::-1]

    def __getitems__(self, indices: list) -> list:
        return [self[i] for i in indices]


class Truncated(list):
    def __getitem__(self, index: int) -> int:
        return int(super().__getitem__(index))


def plain(files: list, kind: type = ops.VolumeDataset) -> Any:
    return kind(files, ops.unet3d_training(PATCH))


PYTHON: dict[str, tuple[Callable[[list], Any], dict, str]] = {
    "collate_fn": (plain, {"collate_fn": collate}, "collate_fn"),
    "worker_init_fn": (plain, {"worker_init_fn": print}, "worker_init_fn"),
    "static": (plain, {"scheduling": "static"}, "static"),
    "batch_size": (plain, {"batch_size": None}, "batch_size=None"),
    "context": (plain, {"multiprocessing_context": "fork"}, "multiprocessing_context"),
    "getitem": (lambda f: plain(f, Derived), {}, "Derived has a __getitem__"),
    "getitems": (lambda f: plain(f, Fetching), {}, "__getitems__"),
    "wrapped": (lambda f: Delegating(plain(f)), {}, "no native_pipeline"),
    "subset derived": (lambda f: Reversed(plain(f), [1, 2]), {}, "Reversed offers no"),
    "subset of other": (lambda f: Subset(Delegating(plain(f)), [1]), {}, "Delegating offers no"),
    "subset getitem": (lambda f: Subset(plain(f, Derived), [1]), {}, "Derived has a __getitem__"),
    "subset getitems": (lambda f: Subset(plain(f, Fetching), [1]), {}, "__getitems__"),
}


@pytest.mark.parametrize("name", PYTHON)
def test_options_needing_python_use_processes(files, name) -> None:
    make, options, words = PYTHON[name]
    with pytest.raises(ValueError, match=f"(?s)worker_type='native'.*{words}.*worker_type=None"):
        native(make(files), **options)
    if name == "worker_init_fn":
        return
    loader = minato.DataLoader(make(files), num_workers=1, **options)
    assert loader.worker_type is None
    assert len(list(loader)) == len(make(files))
    assert loader.stats()["worker_type"] == "process"


def test_sample_keys_without_seeding_use_processes(files) -> None:
    dataset = volumes(files, keyed_by="sample", repeat=1)
    with pytest.raises(ValueError, match="seed_per_sample=False"):
        iter(native(dataset, seed_per_sample=False))
    loader = minato.DataLoader(dataset, num_workers=1, seed_per_sample=False)
    assert len(list(loader)) == 4 and loader.stats()["worker_type"] == "process"


@pytest.mark.parametrize("make, words", [
    (lambda f: Subset(plain(f), Truncated([1.5, 2.5])), "are not integers"),
    (lambda f: Subset(Subset(volumes(f), [4, 5]), [1, -3]), "names samples that are not there"),
])  # fmt: skip
def test_subsets_needing_python_use_processes(files, make, words) -> None:
    with pytest.raises(ValueError, match=f"(?s)worker_type='native'.*{words}.*worker_type=None"):
        iter(native(make(files)))
    loader = minato.DataLoader(make(files), num_workers=1)
    assert isinstance(outcome(loader)[0], str) and loader.stats()["worker_type"] == "process"


def test_worker_type_is_chosen(files) -> None:
    for dataset in (plain(files), plain(files, DerivedNative)):
        loader = minato.DataLoader(dataset, num_workers=1)
        list(loader)
        assert loader.stats()["worker_type"] == "native"
    for options in ({"worker_type": "process"}, {"max_retries": 2}):  # threads know no retries
        asked = minato.DataLoader(plain(files), num_workers=1, **options)
        list(asked)
        assert asked.stats()["worker_type"] == "process"
    without = minato.DataLoader(plain(files))
    list(without)
    assert without.stats()["worker_type"] is None


def test_collate_classes_for_tensors_use_processes(files, monkeypatch) -> None:
    """As importing DALI's plugin for torch does: samples have no objects of them."""
    monkeypatch.setitem(default_collate_fn_map, Recipe, collate)
    assert len(list(native(volumes(files)))) > 0
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, collate)
    with pytest.raises(ValueError, match="collate_fn is not torch's default"):
        native(volumes(files))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize("options, words", [
    *(({"worker_type": value}, "None, 'process', 'native' or 'thread', got") for value in ("threads", "", 3, True)),
    ({"num_workers": 0}, "num_workers is 0"),
    ({"max_retries": 2}, "max_retries=2 has no effect with worker_type='native'"),
    ({"dataset": Stream()}, "iterable"),
])  # fmt: skip
def test_options_without_a_meaning_are_refused(files, options, words) -> None:
    with pytest.raises(ValueError, match=words):
        native(**{"dataset": plain(files), **options})


# ---- errors ------------------------------------------------------------------------------


def outcome(loader: Any) -> list[Any]:
    """What each next() gave: a digest, or the error and what torch says at its end."""
    out: list[Any] = []
    iterator = iter(loader)
    while True:
        try:
            out.append(digest(next(iterator)))
        except StopIteration:
            return out
        except Exception as error:
            words = str(error).strip().splitlines()
            notes = getattr(error, "__notes__", [])
            out.append((type(error), words[0], words[-1], notes, type(error.__cause__),
                        str(error.__cause__)))  # fmt: skip


@pytest.mark.parametrize("damage", ["missing", "truncated", "dtype", "shape"])
@pytest.mark.parametrize("at", [0, 2])
def test_errors_at_their_place(tmp_path, damage, at) -> None:
    cases = [save_case(tmp_path, n) for n in range(4)]
    image = cases[at][0]
    if damage == "missing":
        image.unlink()
    elif damage == "truncated":
        image.write_bytes(image.read_bytes()[:-5])
    elif damage == "dtype":
        np.save(image, np.load(image).astype(np.float64))
    else:
        np.save(image, np.load(image)[:, :3])

    def loader(kind: str | None) -> Any:
        return minato.DataLoader(volumes(cases, repeat=3), 2, num_workers=1, worker_type=kind)

    want = outcome(loader("process"))
    failed = [n for n, o in enumerate(want) if not isinstance(o, str)]
    assert failed == ([at // 2, at // 2 + 2, at // 2 + 4] if at or damage == "shape"
                      else list(range(6)))  # fmt: skip
    assert all(str(image) in want[n][2] for n in failed)
    got = loader(None)
    assert outcome(got) == want
    headers = at == 0 and damage != "shape"  # without the first no field is known
    assert got.stats()["worker_type"] == ("process" if headers else "native")
    assert got.stats()["errors"] == len(failed)
    if headers:
        with pytest.raises(ValueError, match=re.escape(str(image))) as caught:
            iter(loader("native"))
        assert isinstance(caught.value.__cause__, (OSError, ValueError))


@pytest.mark.parametrize("code, kind", [
    (errno.EINVAL, ValueError), (errno.ENOMEM, MemoryError), (errno.ERANGE, IndexError),
    (errno.EACCES, PermissionError), (errno.EIO, OSError),
])  # fmt: skip
def test_error_codes(code, kind) -> None:
    def fill(index: int, _key: Any, _out: Any) -> Any:
        return (code, "of the plot") if index == 2 else None

    iterator = iter(native(Recipe(5, fill), num_workers=1))
    next(iterator), next(iterator)
    words = "(?s)Caught .* in DataLoader worker process 0.*of the plot"
    with pytest.raises(kind, match=words) as caught:
        next(iterator)
    assert type(caught.value.__cause__) is kind
    assert len(list(iterator)) == 2


class Batches:
    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@pytest.mark.parametrize("subset", [None, list(range(19, -1, -1))], ids=["whole", "subset"])
@pytest.mark.parametrize("batch", [
    [-1, -20], [np.int64(3), np.uint8(4)], [torch.tensor(5), True], (1, 2), np.array([4, 2]),
    torch.tensor([3, 1]), range(3), {7: "x"}, [20], [0, -21], [2**70], ["a"], [1, 2.5], [None],
    [], "12", 5, [[1, 2]], iter([1, 2]),
], ids=lambda value: repr(value).split(" at 0x")[0])  # fmt: skip
def test_indices_follow_the_datasets_rules(files, batch, subset) -> None:
    def loader(kind: str) -> Any:
        dataset = volumes(files)
        dataset = dataset if subset is None else Subset(dataset, subset)
        copies = [iter([1, 2]) if isinstance(batch, Iterator) else batch for _ in range(2)]
        return minato.DataLoader(dataset, num_workers=1, worker_type=kind,
                                 batch_sampler=Batches([0], *copies, [1]))  # fmt: skip

    got, want = outcome(loader("native")), outcome(loader("process"))
    assert got == want


def test_native_misfits_keep_row_transport() -> None:
    """Shapes of process workers' samples are guessed from earlier ones; native ones are known."""
    shape = _FixedTransport(Layout((TUPLE, ((INT,),))))
    for _ in range(100):
        shape.misfit()
    assert not shape.whole


def test_a_thread_that_fails_is_a_lost_worker(monkeypatch) -> None:
    """Not the sample's error but one of the loader's own."""
    from minato.workers import native as _native

    def broken(*_: Any) -> Any:
        raise MemoryError("of the runner")

    monkeypatch.setattr(_native._Runner, "answer", broken)
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))
    seen: list[Any] = []
    iterator = iter(native(Recipe(4, lambda *_: (5, "bad")), num_workers=1))
    with pytest.raises(minato.WorkerLost, match="exited unexpectedly with exit code 1"):
        next(iterator)
    iterator._shutdown_workers()
    assert [str(e) for e in seen] == ["of the runner"]


# ---- life and end ------------------------------------------------------------------------


class Gate:
    """Samples of the given indices wait here."""

    def __init__(self, *indices: int) -> None:
        self.indices = indices
        self.open = threading.Event()
        self.waiting: list[int] = []
        self.done: list[int] = []

    def __call__(self, index: int, key: Any, out: list) -> None:
        if index in self.indices:
            self.waiting.append(index)
            assert self.open.wait(PATIENCE)
        numbered(index, key, out)
        self.done.append(index)


def firsts(batches: Any) -> list[float]:
    return [b[0][:, 0].tolist() for b in batches]


def test_shutdown_waits_for_running_sample() -> None:
    gate = Gate(0, 1)
    iterator = iter(native(Recipe(8, gate)))
    wait_for(lambda: len(gate.waiting) == 2)
    ending = threading.Thread(target=iterator._shutdown_workers)
    ending.start()
    wait_for(lambda: iterator._pool.stopped)
    ending.join(0.05)
    assert ending.is_alive() and len(native_threads()) == 2
    gate.open.set()
    ending.join(PATIENCE)
    assert not ending.is_alive()
    assert sorted(gate.done) == [0, 1]  # and nothing was started after the stop


def test_timeout() -> None:
    gate = Gate(1)
    iterator = iter(native(Recipe(4, gate), num_workers=1, timeout=0.3))
    assert next(patiently(iterator))[0][0, 0] == 0
    with pytest.raises(RuntimeError, match="timed out after 0.3 seconds"):
        next(iterator)
    gate.open.set()
    assert firsts(patiently(iterator)) == [[1], [2], [3]]


def test_interrupt_while_waiting() -> None:
    gate = Gate(0)
    iterator = iter(native(Recipe(4, gate)))
    wait_for(lambda: gate.waiting)
    with pytest.raises(KeyboardInterrupt):
        interrupt_in_minato()
        next(iterator)
    gate.open.set()
    assert firsts(iterator) == [[0], [1], [2], [3]]


def test_interrupt_while_it_shuts_down() -> None:
    gate = Gate(0)
    iterator = iter(native(Recipe(4, gate)))
    wait_for(lambda: gate.waiting)

    def act() -> None:
        wait_for(lambda: iterator._pool.stopped)
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.05)
        gate.open.set()

    main = threading.get_ident()
    acting = threading.Thread(target=act)
    acting.start()
    with pytest.raises(KeyboardInterrupt):
        iterator._shutdown_workers()
    acting.join()
    assert not native_threads() and gate.done[-1] == 0


def test_many_half_read_loaders(files) -> None:
    dataset = volumes(files)
    want = [digest(b) for b in native(dataset, 2)]
    kept = []
    for n in range(200):
        iterator = iter(native(dataset, 2, num_workers=1 + n % 3))
        assert [digest(next(iterator)) for _ in range(n % 3)] == want[: n % 3]
        if n % 10 == 0:
            kept.append(iterator)
    del iterator
    assert len(native_threads()) == sum(len(i._pool._threads) for i in kept)
    for n, iterator in enumerate(kept):
        assert [digest(b) for b in iterator] == want[n * 10 % 3 :]


def test_garbage_collected_in_a_worker() -> None:
    """The thread that finds the iterator to be garbage cannot wait for itself."""
    found = []

    def fill(index: int, *_: Any) -> None:
        if index == 1:
            found.append(threading.current_thread().name)
            assert dropped.wait(PATIENCE)
            gc.collect()

    dropped = threading.Event()
    gc.disable()
    try:
        iterator = iter(native(Recipe(8, fill), num_workers=1))
        iterator.me = iterator
        pool = iterator._pool
        next(iterator)
        wait_for(lambda: found)
        del iterator
        dropped.set()
        wait_for(lambda: pool.stopped and not native_threads())
    finally:
        gc.enable()
    assert found == ["minato-native-0"]


def test_handles_act_like_processes() -> None:
    iterator = iter(native(Recipe(40, numbered)))
    first, second = iterator._workers
    assert first.pid == first.ident == os.getpid() and first.daemon
    assert first.is_alive() and first.exitcode is None and "minato-native-0" in repr(first)
    assert not hasattr(first, "sentinel")
    first.terminate()
    first.join(PATIENCE)
    assert not first.is_alive() and second.is_alive()
    assert first.exitcode == -signal.SIGTERM
    batches = firsts(iterator)
    assert batches == [[n] for n in range(40)]
    assert not second.is_alive() and second.exitcode == 0


def test_without_any_worker_left() -> None:
    iterator = iter(native(Recipe(400, numbered)))
    next(iterator)
    for worker in iterator._workers:
        worker.kill()
    with pytest.raises(minato.WorkerLost, match="killed by signal: Terminated"):
        list(iterator)


def test_a_standby_worker_is_a_thread_more() -> None:
    gate = Gate(0)
    loader = native(Recipe(12, gate), num_workers=1, autoscale=(1, 2), straggler_threshold=0.02,
                    prefetch_factor=20, in_order=False)  # fmt: skip
    iterator = iter(loader)
    others = [next(iterator)[0][0, 0].item() for _ in range(11)]  # sample 0 is waited for
    assert sorted(others) == list(range(1, 12))
    assert [w["state"] for w in loader.stats()["workers"]] == ["ready", "ready"]
    gate.open.set()
    assert firsts(iterator) == [[0]]


def test_added_workers_are_threads() -> None:
    threads: Counter[str] = Counter()

    def fill(index: int, key: Any, out: list) -> None:
        threads[threading.current_thread().name] += 1
        time.sleep(0.02)
        numbered(index, key, out)

    loader = native(Recipe(10**6, fill), 2, num_workers=1, autoscale=(1, 4), straggler_threshold=None,
                    persistent_workers=True)  # fmt: skip
    iterator = iter(loader)
    seen = 0
    while len(threads) < 4:  # or until the test's limit
        iterator._engine.move_to(4)
        assert next(iterator)[0][:, 0].tolist() == [seen, seen + 1]
        seen += 2
    iterator._shutdown_workers()


@pytest.mark.parametrize("limit", ["4MiB", "16MiB"])
def test_keeping_more_than_the_limit(limit) -> None:
    dataset = Recipe(24, numbered, (("f4", (1 << 18,)), ("i8", ())))
    kept = [batch for batch in native(dataset, 2, memory_limit=limit)]
    for n, (rows, index) in enumerate(kept):
        assert index.tolist() == [2 * n, 2 * n + 1]
        assert rows.amin(1).tolist() == rows.amax(1).tolist() == index.tolist()


# ---- forks and exits ---------------------------------------------------------------------


def test_a_forked_child_leaves_the_threads_alone(files) -> None:
    dataset = volumes(files)
    want = [digest(b) for b in native(dataset, 2)]
    for turn in range(10):
        iterator = iter(native(dataset, 2))
        got = [digest(next(iterator)) for _ in range(turn % 4)]

        def child() -> None:
            assert not native_threads()
            with pytest.raises(RuntimeError, match="another process"):
                next(iterator)
            iterator._shutdown_workers()
            assert iterator._workers[0].is_alive() is False
            if turn % 3 == 0:  # the pipeline that threads were in at the fork still works
                assert [digest(b) for b in native(dataset, 2)] == want
            minato.workers.threads.stop_all()

        assert support.in_child(child) == 0
        assert got + [digest(b) for b in iterator] == want


def test_process_and_thread_loaders_run_together(files) -> None:
    """The fork of worker processes meets threads that are in the same pipeline."""
    dataset = volumes(files, repeat=10)
    want = [digest(b) for b in native(dataset, 4)]
    for _ in range(5):
        threads = iter(native(dataset, 4))
        next(threads)
        other = minato.DataLoader(dataset, 4, num_workers=1, worker_type="process")
        assert [digest(b) for b in other] == want
        assert [digest(b) for b in threads] == want[1:]


WAYS = {
    "end": ("", 0),
    "exception": ("raise KeyError('of the script')", 1),
    "cycle": ("it.me = it; del it", 0),
    "os._exit": ("os._exit(5)", 5),
    "thread waits": ("threading.Thread(target=list, args=(it,), daemon=True).start()", 0),
    "in a handler": ("atexit.register(list, it)", 0),
    "in a late handler": ("", 0),
    "child": ("pid = os.fork(); pid or sys.exit(); os.waitpid(pid, 0)", 0),
}
SCRIPT = """
import atexit, os, sys, threading, time
def late():
    try: next(it)
    except RuntimeError as error: assert "shut down" in str(error)
    else: assert False
if {late}: atexit.register(late)
import minato
from workers import test_native
slow = lambda index, key, out: time.sleep(0.2 if index else 0)
it = iter(minato.DataLoader(test_native.Recipe(12, slow), num_workers=2))
kept = next(it)
assert len(test_native.native_threads()) == 2
{way}
"""


@pytest.mark.parametrize("way", WAYS)
def test_exit_in_mid_epoch(way) -> None:
    code, status = WAYS[way]
    done = programs().run(SCRIPT.format(way=code, late=way == "in a late handler"))
    assert done.returncode == status, done.stderr
    if way == "exception":
        assert done.stderr.splitlines()[-1] == "KeyError: 'of the script'"
    else:
        assert done.stderr == ""
