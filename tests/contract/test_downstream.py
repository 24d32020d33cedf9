"""What libraries do to loaders, re-enacted: subclassing, rebuilding, patching."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import multiprocessing
import operator
from pathlib import Path
from typing import Any, Iterator

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from .datasets import Numbers, Sharded, as_is
from .support import Kind, all_gone, flat, run_script, wait_for, worker_pids


def _subclasses(cls: type) -> set[type]:
    return {cls}.union(*(_subclasses(sub) for sub in cls.__subclasses__()))


# --------------------------------------------------- Lightning and Fabric


def _recording_init(init: Any) -> Any:
    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        # Only the outermost call, the one the user wrote, is recorded.
        if not hasattr(self, "_recorded"):
            object.__setattr__(self, "_recorded", (args, kwargs))
        init(self, *args, **kwargs)

    return wrapper


def _recording_set(original: Any, log: list[Any]) -> Any:
    @functools.wraps(original)
    def wrapper(self: Any, *args: Any) -> None:
        log.append((type(self).__name__, args[0]))
        original(self, *args)

    return wrapper


@contextlib.contextmanager
def _patched(log: list[Any]) -> Iterator[None]:
    """Replace methods on DataLoader and all subclasses that define them."""
    replaced = []
    for cls in _subclasses(DataLoader):
        for name, wrap in (
            ("__init__", _recording_init),
            ("__setattr__", lambda f: _recording_set(f, log)),
            ("__delattr__", lambda f: _recording_set(f, log)),
        ):
            if name in cls.__dict__ or (name == "__delattr__" and cls is DataLoader):
                replaced.append((cls, name, cls.__dict__.get(name)))
                setattr(cls, name, wrap(getattr(cls, name)))
    try:
        yield
    finally:
        for cls, name, original in replaced:
            if original is None:
                delattr(cls, name)
            else:
                setattr(cls, name, original)


def test_patched_methods(loader: Kind) -> None:
    log: list[Any] = []
    loader(Numbers(6))  # its class is there before it is patched
    with _patched(log):
        made = loader(Numbers(6), batch_size=2, num_workers=1)
        made.worker_init_fn = None
        made.note = 1
        del made.note
    args, kwargs = made._recorded
    assert args[0].length == 6
    assert kwargs == {**loader.options, "batch_size": 2, "num_workers": 1}
    names = [name for _, name in log]
    assert names[-3:] == ["worker_init_fn", "note", "note"]
    assert flat(made) == list(range(6))
    assert flat(type(made)(*args, **kwargs)) == list(range(6))
    assert "_recorded" not in vars(loader(Numbers(2)))


def _rebuild_arguments(made: Any, sampler: Any) -> dict[str, Any]:
    """The arguments that would make a loader like this one, with another sampler."""
    attributes = {k: v for k, v in vars(made).items() if not k.startswith("_")}
    attributes["multiprocessing_context"] = made.multiprocessing_context
    parameters = inspect.signature(made.__init__).parameters
    arguments = {
        name: attributes[name] for name, parameter in parameters.items()
        if name in attributes and attributes[name] is not parameter.default
    }
    required = {
        name for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
    }
    assert required <= set(attributes)
    cuts = made.batch_sampler
    if cuts is not None and type(cuts) is not BatchSampler:
        arguments.update(batch_sampler=type(cuts)(sampler, cuts.batch_size,
                                                  cuts.drop_last))
        for name in ("batch_size", "sampler", "drop_last", "shuffle"):
            arguments.pop(name, None)
    else:
        arguments.update(sampler=sampler, shuffle=False)
        arguments.pop("batch_sampler", None)
    return arguments


class EveryOther(BatchSampler):
    """A batch sampler of the user's own."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(super().__iter__())[::2])


@pytest.mark.parametrize("kwargs", [
    {"batch_size": 2, "num_workers": 2},
    {"batch_size": 2, "num_workers": 1, "persistent_workers": True,
     "prefetch_factor": 3, "timeout": 30, "multiprocessing_context": "fork"},
    {"batch_size": 3, "drop_last": True},
    {"batch_sampler": EveryOther(SequentialSampler(range(12)), 2, False)},
], ids=lambda value: str(value).split(" at 0x")[0])
def test_rebuilt_from_attributes(loader: Kind, kwargs: dict[str, Any]) -> None:
    made = loader(Numbers(12), **kwargs)
    sampler = DistributedSampler(Numbers(12), 2, 1, shuffle=False)
    arguments = _rebuild_arguments(made, sampler)
    other = type(made)(**arguments)
    assert other.num_workers == made.num_workers
    assert other.persistent_workers == made.persistent_workers
    assert set(flat(other)) <= set(sampler)
    for name in vars(made):
        if name in inspect.signature(made.__init__).parameters and name not in (
            "sampler", "batch_sampler"
        ):
            assert getattr(other, name) == getattr(made, name), name


def test_own_options_survive_a_rebuild(own: Kind) -> None:
    made = own.cls(Numbers(4), scheduling="static", memory_limit="64MiB", num_workers=1,
                   max_retries=0)
    other = type(made)(**_rebuild_arguments(made, [1, 2]))
    assert (other.scheduling, other.memory_limit, other.max_retries) == (
        "static", "64MiB", 0)
    assert flat(other) == [1, 2]


def test_wrapper_with_a_copied_dict(loader: Kind) -> None:
    class Wrapper:
        def __init__(self, made: Any) -> None:
            self.__dict__.update(made.__dict__)
            self.wrapped = made

        def __len__(self) -> int:
            return len(self.wrapped)

        def __iter__(self) -> Iterator[Any]:
            yield from self.wrapped

    wrapper = Wrapper(loader(Numbers(5), batch_size=2, num_workers=2))
    assert wrapper.batch_size == 2 and wrapper.num_workers == 2
    assert flat(wrapper) == flat(wrapper) == list(range(5))


def test_teardown_of_persistent_workers(loader: Kind) -> None:
    made = loader(Numbers(5), num_workers=2, persistent_workers=True)
    list(made)
    pids = worker_pids(made._iterator)
    del made._iterator
    made._iterator = None
    assert all_gone(pids)


def test_advice_on_workers_reads_attributes(loader: Kind) -> None:
    made = loader(Numbers(5), num_workers=1, multiprocessing_context="fork")
    context = made.multiprocessing_context
    assert context is not None and context.get_start_method() == "fork"
    assert (made.num_workers, made.persistent_workers, made.pin_memory) == (
        1, False, False)
    assert type(made.sampler) is SequentialSampler
    assert isinstance(loader(Numbers(5), shuffle=True).sampler, RandomSampler)


# ------------------------------------------------------------------ ignite


@pytest.mark.parametrize("kwargs", [
    {"batch_size": 2}, {"batch_size": 2, "num_workers": 2, "persistent_workers": True},
], ids=str)
def test_updated_by_public_attributes(loader: Kind, kwargs: dict[str, Any]) -> None:
    made = loader(Numbers(8), **kwargs)
    skipped = {"batch_size", "sampler", "drop_last", "batch_sampler", "dataset_kind"}
    arguments = {
        name: value for name, value in vars(made).items()
        if not name.startswith("_") and name not in skipped
    }
    other = type(made)(**arguments, batch_sampler=[[7, 6], [5]])
    assert [batch.tolist() for batch in other] == [[7, 6], [5]]


# -------------------------------------------------------------- Accelerate

TORCH_DEFAULTS = {
    "batch_size": 1, "shuffle": False, "sampler": None, "batch_sampler": None,
    "num_workers": 0, "collate_fn": None, "pin_memory": False, "drop_last": False,
    "timeout": 0, "worker_init_fn": None, "multiprocessing_context": None,
    "generator": None, "prefetch_factor": 2, "persistent_workers": False,
    "pin_memory_device": "",
}


@pytest.mark.parametrize("workers", [0, 2])
def test_rebuilt_from_a_table_of_arguments(loader: Kind, workers: int) -> None:
    made = loader(Numbers(9), batch_size=2, num_workers=workers)
    ignored = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
    arguments = {
        name: getattr(made, name, default) for name, default in TORCH_DEFAULTS.items()
        if name not in ignored
    }
    if workers == 0:
        assert arguments["prefetch_factor"] is None
    for cls, options in ((DataLoader, {}), (loader.cls, loader.options)):
        other = cls(made.dataset, batch_sampler=made.batch_sampler, **arguments,
                    **options)
        assert flat(other) == list(range(9))


def test_wrapper_that_looks_one_batch_ahead(loader: Kind) -> None:
    class Ahead(loader.cls):
        def __iter__(self) -> Iterator[Any]:
            source = super().__iter__()
            current = next(source, None)
            while current is not None:
                following = next(source, None)
                self.last = following is None
                yield current
                current = following

    made = Ahead(Numbers(5), batch_size=2, num_workers=2, **loader.options)
    assert [(batch.tolist(), made.last) for batch in made] == [
        ([0, 1], False), ([2, 3], False), ([4], True)]


def test_sampler_of_the_batch_sampler_is_replaced(loader: Kind) -> None:
    made = loader(Numbers(8), batch_size=2, num_workers=1)
    made.batch_sampler.sampler = [7, 6, 5]
    assert flat(made) == [7, 6, 5]


# --------------------------------------------------------------- Ray Train


def test_subclass_that_never_calls_init(loader: Kind) -> None:
    class Wrapped(loader.cls):
        def __init__(self, base: Any) -> None:
            self.__dict__.update(getattr(base, "__dict__", {}))
            self.base = base

        def __len__(self) -> int:
            return len(self.base)

        def __iter__(self) -> Iterator[Any]:
            iterator = iter(self.base)
            while (batch := next(iterator, None)) is not None:
                yield batch

    made = Wrapped(loader(Numbers(5), batch_size=2, num_workers=1))
    assert flat(made) == flat(made) == list(range(5))
    assert len(made) == 3 and isinstance(made, DataLoader)


def test_half_made_instances(loader: Kind) -> None:
    class HalfMade(loader.cls):
        def __init__(self) -> None:
            self.dataset = Numbers(3)

    made = HalfMade()
    assert made.dataset.length == 3
    made.dataset = Numbers(4)
    del made
    gc.collect()


# --------------------------------------------------------------------- PyG


class _Filtered:
    """An iterator around another, as graph loaders return from _get_iterator."""

    def __init__(self, inner: Any, transform: Any) -> None:
        self.inner, self.transform = inner, transform

    def __iter__(self) -> "_Filtered":
        return self

    def _reset(self, made: Any, first_iter: bool = False) -> None:
        self.inner._reset(made, first_iter)

    def __len__(self) -> int:
        return len(self.inner)

    def __next__(self) -> Any:
        return self.transform(next(self.inner))

    def __del__(self) -> None:
        if hasattr(self.inner, "_shutdown_workers"):
            self.inner.__del__()


def _graph_loader(cls: type) -> type:
    class GraphLoader(cls):
        def __init__(self, data: list[int], **kwargs: Any) -> None:
            self.data = data
            kwargs.pop("dataset", None)
            super().__init__(range(len(data)), collate_fn=self.gather, **kwargs)

        def gather(self, indices: list[int]) -> list[int]:
            return [self.data[index] for index in indices]

        def _get_iterator(self) -> Any:
            return _Filtered(super()._get_iterator(), torch.tensor)

    return GraphLoader


@pytest.mark.parametrize("kwargs", [
    {}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True},
], ids=str)
def test_bound_collate_and_wrapped_iterator(loader: Kind, kwargs) -> None:
    made = _graph_loader(loader.cls)([3, 1, 4, 1, 5], batch_size=2, **kwargs,
                                     **loader.options)
    for _ in range(3):
        assert [batch.tolist() for batch in made] == [[3, 1], [4, 1], [5]]
    iterator = iter(made)
    assert len(iterator) == 3
    next(iterator)
    del iterator


def test_affinity_swaps_worker_init(loader: Kind) -> None:
    class Affine(loader.cls):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            original = self.worker_init_fn

            def init(worker: int) -> None:
                torch.set_num_threads(2)
                if original is not None:
                    original(worker)

            self.worker_init_fn = init

    class Threads(Numbers):
        def __getitem__(self, index: int) -> int:
            return torch.get_num_threads()

    made = Affine(Threads(2), num_workers=1, **loader.options)
    assert flat(made) == [2, 2]


def test_iterator_set_by_hand(loader: Kind) -> None:
    made = loader(Numbers(6), num_workers=1, persistent_workers=True)
    made._iterator = made._get_iterator()
    made.prefetch_factor = 4
    assert flat(made) == list(range(6))


# -------------------------------------------------------------------- timm


class _Repeated:
    """A batch sampler repeated for ever, without a length."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


@pytest.mark.parametrize("workers", [0, 2])
def test_one_iterator_for_many_epochs(loader: Kind, workers: int) -> None:
    class MultiEpochs(loader.cls):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._DataLoader__initialized = False
            self.batch_sampler = _Repeated(self.batch_sampler)
            self._DataLoader__initialized = True
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return len(self.batch_sampler.sampler)

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

    made = MultiEpochs(Numbers(7), batch_size=2, num_workers=workers, **loader.options)
    for _ in range(4):
        assert flat(made) == list(range(7))


# ------------------------------------------------------------- ultralytics


def test_infinite_loader_with_pokes_at_workers(loader: Kind) -> None:
    class Infinite(loader.cls):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            object.__setattr__(self, "batch_sampler", _Repeated(self.batch_sampler))
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return len(self.batch_sampler.sampler)

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

        def reset(self) -> None:
            self.iterator = self._get_iterator()

        def close(self) -> None:
            workers = self.iterator._workers
            for worker in workers:
                if worker.is_alive():
                    worker.terminate()
            self.iterator._shutdown_workers()

    made = Infinite(Numbers(5), batch_size=2, num_workers=2, **loader.options)
    assert flat(made) == flat(made) == list(range(5))
    old = worker_pids(made.iterator)
    made.reset()
    assert all_gone(old)
    assert flat(made) == list(range(5))
    pids = worker_pids(made.iterator)
    try:
        made.close()
    except RuntimeError:  # torch's SIGCHLD handler sees workers that were terminated
        assert loader.is_torch
    assert all_gone(pids)
    if loader.is_torch:  # its worker leaves the file of a tensor that it was about to send
        for path in (p for pid in pids for p in Path("/dev/shm").glob(f"torch_{pid}_*")):
            path.unlink()


# ---------------------------------------------------- Composer, streaming


def test_pokes_at_the_stored_iterator(loader: Kind) -> None:
    class Streaming(loader.cls):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                self.seen = getattr(self, "seen", 0) + len(batch)
                yield batch

        def __del__(self) -> None:
            if self._iterator is not None:
                self._iterator._shutdown_workers()

    made = Streaming(Numbers(5), batch_size=2, num_workers=2, persistent_workers=True,
                     **loader.options)
    assert made._iterator is None
    assert flat(made) == list(range(5)) and made.seen == len(made.dataset)
    assert made._iterator is not None
    pids = worker_pids(made._iterator)
    made._iterator._shutdown_workers()
    assert all_gone(pids)
    made._iterator = None
    assert flat(made) == list(range(5))
    pids = worker_pids(made._iterator)
    del made
    assert all_gone(pids)


# ------------------------------------------------------------------- MONAI

THREAD_CONTEXT = """
import threading, queue
from multiprocessing.context import SpawnContext
from contract.datasets import Numbers


class ProcessThread(threading.Thread):
    pid = property(lambda self: id(self))
    exitcode = None

    def run(self):
        try:
            super().run()
        finally:
            import torch.utils.data._utils.worker as worker
            worker._worker_info = None


class ThreadContext(SpawnContext):
    Process = ProcessThread

    def Queue(self, *args, **kwargs):
        made = queue.Queue()
        made.cancel_join_thread = made.close = lambda: None
        return made

    def Event(self):
        return threading.Event()


class ThreadLoader(DataLoader):
    def __init__(self, dataset, num_workers=0, **kwargs):
        kwargs["multiprocessing_context"] = ThreadContext()
        kwargs["persistent_workers"] = True
        super().__init__(dataset=dataset, num_workers=num_workers, **kwargs)


made = ThreadLoader(Numbers(6), num_workers=1, batch_size=2, **OPTIONS)
for _ in range(2):
    print([batch.tolist() for batch in made])
made._iterator._shutdown_workers()
"""


def test_context_whose_process_is_a_thread(loader: Kind, tmp_path: Path) -> None:
    outcome = run_script(loader, THREAD_CONTEXT, tmp_path)
    assert outcome.stdout == "[[0, 1], [2, 3], [4, 5]]\n" * 2, outcome.stderr
    assert (outcome.returncode, outcome.left) == (0, [])


def test_keyword_construction_in_a_subclass(loader: Kind) -> None:
    class Keyword(loader.cls):
        def __init__(self, dataset: Any, num_workers: int = 0, **kwargs: Any) -> None:
            kwargs.setdefault("collate_fn", as_is)
            super().__init__(dataset=dataset, num_workers=num_workers, **kwargs)

    made = Keyword(Numbers(3), num_workers=1, batch_size=2, **loader.options)
    assert list(made) == [[0, 1], [2]]


# ------------------------------- loggers and samplers that look at the result queue


@pytest.mark.parametrize("dataset", [Numbers(6), Sharded(6)], ids=["map", "iterable"])
def test_how_far_workers_are_ahead(loader: Kind, dataset: Any) -> None:
    made = loader(dataset, num_workers=1, prefetch_factor=3, persistent_workers=True)
    iterator = iter(made)
    # the steady window, as nothing was asked for; iterable datasets say later that they end
    assert wait_for(lambda: iterator._data_queue.qsize() == 3)
    assert wait_for(lambda: not iterator._worker_result_queue.empty())
    assert iterator._rcvd_idx == 0
    assert iterator._send_idx == iterator._tasks_outstanding == 3
    next(iterator)
    assert iterator._rcvd_idx == 1
    assert iterator._send_idx == 1 + iterator._tasks_outstanding
    assert len(list(iterator)) == 5
    if isinstance(dataset, Numbers):  # else markers of the end are left
        assert wait_for(lambda: iterator._data_queue.qsize() == 0)


class Held(torch.utils.data.Dataset[int]):
    """Samples that wait until the test lets them go."""

    def __init__(self, go: Any) -> None:
        self.go = go

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        self.go.wait()
        return index


def test_index_queues_hold_waiting_batches(loader: Kind) -> None:
    go = multiprocessing.Event()
    iterator = iter(loader(Held(go), num_workers=2, prefetch_factor=3, batch_size=1))
    queues = iterator._index_queues
    try:
        assert wait_for(lambda: [queue.qsize() for queue in queues] == [2, 2])
        assert not queues[0].empty()
    finally:
        go.set()
    assert len(list(iterator)) == 8
    assert wait_for(lambda: all(queue.empty() for queue in queues))


# ------------------------------------------------------ DeepSpeed, torchrec


def test_repeating_loader(loader: Kind) -> None:
    made = loader(Numbers(3), num_workers=1)
    iterator, found = iter(made), []
    for _ in range(8):
        try:
            found.append(next(iterator).item())
        except StopIteration:
            iterator = iter(made)
            found.append(next(iterator).item())
    assert found == [0, 1, 2, 0, 1, 2, 0, 1]


def test_webdataset_like_wrapper(loader: Kind) -> None:
    class Pipeline(torch.utils.data.IterableDataset):
        def __init__(self, source: Any) -> None:
            self.source = source

        def __iter__(self) -> Iterator[Any]:
            if isinstance(self.source, DataLoader):
                yield from self.source

    made = loader(Sharded(6), batch_size=None, num_workers=2)
    assert sorted(Pipeline(made)) == list(range(6))


def test_global_name_is_replaced(loader: Kind, monkeypatch) -> None:
    # Libraries that name torch's class find another one if it is put in its place.
    monkeypatch.setattr(torch.utils.data, "DataLoader", loader.cls)
    made = torch.utils.data.DataLoader(Numbers(4), num_workers=1, **loader.options)
    assert flat(made) == [0, 1, 2, 3]


@pytest.mark.parametrize("place", ["worker._worker_loop", "fetch._MapDatasetFetcher.fetch"])
def test_code_of_torchs_workers_is_replaced(loader: Kind, place: str, monkeypatch) -> None:
    used = multiprocessing.Event()
    original = operator.attrgetter(place)(torch.utils.data._utils)

    @functools.wraps(original)
    def replacement(*args: Any) -> Any:
        used.set()
        return original(*args)

    monkeypatch.setattr(f"torch.utils.data._utils.{place}", replacement)
    assert flat(loader(Numbers(4), num_workers=1)) == [0, 1, 2, 3]
    assert used.is_set()
