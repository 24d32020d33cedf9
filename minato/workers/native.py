"""Native workers: threads of the loading process that make samples in C, without the GIL.

A dataset offers a pipeline by ``native_pipeline()``, a capsule of minato/ops.h. The engine treats
the threads like worker processes (csrc/py/types/mn_native_worker.h). Tasks, rows, costs and seeds
are the same, and so are the bytes, but nothing is forked or pickled. The threads call Python only
where torch's rules decide: errors, indices that are not integers, odd batches. torch's ``Subset`` of
such a dataset (also from ``random_split``) works, too. The workers get its indices with the
pipeline, as they were when the workers started.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Subset
from torch.utils.data.dataloader import _DatasetKind

from .. import _core
from .._core import Engine
from .._records import Task
from ..dataset_calls import behind_subsets, fetches_batches, offered
from ..errors import native_impossible_message
from ..option_values import option
from ..seeding.generator_states import STREAM_HOOK
from ..transport.layouts import (
    INT, TENSOR, TUPLE, Layout, SampleTransport, is_default_collate,
)  # fmt: skip
from ..transport.torch_bridge import DLPACK_CODES
from .answers import BATCH, ERROR, SAMPLE
from .fetch_or_skip import Unseeded
from .job import Job
from .runner import Runner, load_index
from .threads import ThreadPool

#: of struct mn_native_pipeline, minato/ops.h
_KEYED_BY_SAMPLE = 1
_KINDS = {"i": 0, "u": 1, "f": 2}  # of fields, as DLPack's type codes


# ---- which loaders native workers serve --------------------------------------------------


def looked_at(loader: Any) -> str | None:
    """The reason why Python code may see single samples of this loader, or may change the dataset
    in a worker. None: the native pipeline makes the samples, and only their batch is seen."""
    dataset, _subsets = behind_subsets(loader.dataset)
    if loader._dataset_kind != _DatasetKind.Map:
        return "the dataset is iterable"
    if offered(dataset, "native_pipeline") is None:
        return f"a {type(dataset).__name__} offers no native_pipeline()"
    for name in ("__getitem__", "__len__", "seed_sample"):
        if _overrides(dataset, name):
            return f"{type(dataset).__name__} has a {name} that its native_pipeline() ignores"
    if fetches_batches(dataset):
        return "the dataset has __getitems__"
    if not loader._auto_collation:
        return "batch_size=None asks for single samples"
    if not is_default_collate(loader.collate_fn):
        return "collate_fn is not torch's default"
    if loader.worker_init_fn is not None:
        return "worker_init_fn is to run in worker processes"
    return None


def why_not(loader: Any) -> str | None:
    """The reason why this loader needs Python in its workers; None: C threads are enough."""
    seen = looked_at(loader)
    if seen is not None:
        return seen
    if loader.multiprocessing_context is not None:
        return "multiprocessing_context asks for processes"
    if option(loader, "cache") is not None:
        return "cache= is read in Python"
    if option(loader, "sample_timeout") is not None:
        return "sample_timeout needs processes, because a thread cannot be killed"
    if option(loader, "scheduling") == "static":
        return "scheduling='static' needs the random streams of processes"
    reason: str | None = loader._why_torch()
    return reason


def _indices_of(subsets: list[Subset[Any]]) -> np.ndarray | str:
    """The innermost dataset's index of each sample, int64, or the reason why there is none."""
    indices: np.ndarray | None = None
    for subset in subsets:
        own = np.asarray(subset.indices) if len(subset.indices) else np.empty(0, np.int64)
        if own.ndim != 1 or own.dtype.kind not in "iu" or not np.can_cast(own.dtype, np.int64):
            return "the indices of its Subset are not integers"
        if indices is not None and not ((-len(own) <= indices) & (indices < len(own))).all():
            return "a Subset of its Subset names samples that are not there"
        indices = own if indices is None else own[indices]
    assert indices is not None
    return np.array(indices, np.int64)


def _overrides(dataset: Any, name: str) -> bool:
    """Whether the attribute of this name is set on the object, or in a class derived from the one
    with native_pipeline. Then the pipeline may make other samples."""
    mro = type(dataset).__mro__

    def place(name: str) -> int:
        if name in getattr(dataset, "__dict__", ()):
            return -1
        return next((k for k, cls in enumerate(mro) if name in vars(cls)), len(mro))

    return place(name) < place("native_pipeline")


class _FixedTransport(SampleTransport):
    """Native samples travel as rows of a layout that is known before the first."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout

    def misfit(self) -> None:
        """Ignores samples that do not fit: the next ones will."""


@dataclass
class Offer:
    """A dataset's pipeline and its properties."""

    capsule: Any
    shape: SampleTransport
    hook: Callable[[int], Any] | None  # the dataset's seed_sample, if it gives the seeds
    indices: np.ndarray | None  # of a subset


def offer_of(loader: Any, dataset: Any) -> Offer | None:
    """The pipeline that native workers would run for this loader; None: process workers serve it.
    dataset: the loader's, or its stand-in (device/operators.py).

    Raises:
        ValueError: worker_type="native", but native workers cannot serve the loader.
        MemoryError: no memory for a pipeline.
    """
    worker_type = option(loader, "worker_type")
    if worker_type in ("process", "thread"):
        return None
    if worker_type is None and option(loader, "max_retries") > 1:
        return None  # the user wants workers that can be killed, and samples tried again
    reason, cause = why_not(loader), None
    if reason is None:
        try:
            offer = _opened(loader, dataset)
            if not isinstance(offer, str):
                return offer
            reason = offer
        except MemoryError:  # it says nothing about the dataset
            raise
        except Exception as error:  # with process workers it comes from the samples
            reason, cause = f"the dataset's native_pipeline() failed: {error}", error
    if worker_type == "native":
        raise ValueError(native_impossible_message(reason)) from cause
    return None


def _opened(loader: Any, dataset: Any) -> Offer | str:
    dataset, subsets = behind_subsets(dataset)
    capsule = dataset.native_pipeline()
    keying, fields = _core.native_info(capsule)
    hook = None
    indices = _indices_of(subsets) if subsets else None
    if isinstance(indices, str):
        return indices
    if keying == _KEYED_BY_SAMPLE:
        if option(loader, "seed_per_sample") is False:
            return "with seed_per_sample=False nothing gives its samples their keys"
        hook = offered(dataset, "seed_sample")
    leaves: list[tuple[Any, ...]] = []
    for kind, itemsize, shape in fields:
        code = (_KINDS.get(kind, -1), 8 * itemsize)
        if code not in DLPACK_CODES.values():
            return f"torch has no dtype for a field of kind {kind!r} and {itemsize} bytes"
        leaves.append((TENSOR, *code, shape) if shape else (INT,))
    return Offer(capsule, _FixedTransport(Layout((TUPLE, tuple(leaves)))), hook, indices)


def integers(index: Any) -> Any:
    """A batch of indices as C takes them, a list of int. Unchanged if that is impossible: then the
    error comes from making the samples."""
    if type(index) is list and all(type(i) is int for i in index):
        return index
    try:
        return [operator.index(i) for i in index] if hasattr(index, "__len__") else index
    except Exception:
        return index


# ---- one worker --------------------------------------------------------------------------


class _Runner(Runner):
    """Does the tasks that a worker's C loop passes to Python."""

    has_copy = False

    def __init__(self, job: Job, hook: Any, number: int) -> None:
        self._hook = hook
        super().__init__(job, number)

    def _begin(self, _number: int) -> None:
        if self._hook is not None:
            plan = "seed_sample", STREAM_HOOK, ("hook", self._hook)
            self.seeder = _core.Seeder([plan])

    def answer(self, task: Task, mark: Callable[[int], None]) -> Any:
        """The answer to a task. C may have made its rows up to one that failed."""
        if task.kind == BATCH:
            return self.batch(task)
        entries, get = self.rows(task), self._getter(task)
        for row in range(entries[-1][0] + 1 if entries else task.row0, task.row0 + task.nrows):
            if entries and entries[-1][1] == ERROR:
                break  # torch stops at the first exception of a batch
            try:
                entries.append((row, SAMPLE, get(row, task.indices[row])))
            except Exception as error:
                entries.append(self._failed(row, ERROR, error, task))
            mark(row)
        return entries

    def _fetch(self, task: Task) -> Any:
        seeder = self.seeder if task.seeded and self.seeder is not None else Unseeded
        return self.collate_fn(self._samples(seeder, task))


def _work(worker: _core.Worker, runner: _Runner, segment: _core.Segment, number: int) -> None:
    """The life of a worker's thread."""
    try:
        while task := worker.next():
            if isinstance(task.indices, bytes):
                task = task._replace(indices=load_index(task.indices))
            data, buffers = runner.encoded(runner.answer(task, worker.mark), task)
            del task
            if not worker.finish(data, buffers):
                return
            del data, buffers
    except BaseException:
        if not segment.over():
            segment.exited(number, 1)  # its current task is lost, and the loader raises an error
            raise


class NativePool(ThreadPool):
    """The engine and its native threads."""

    kind = "native"

    def __init__(self, engine: Engine, workers: int, job: Job, offer: Offer) -> None:
        segment = engine.segment

        def work_of(number: int) -> Callable[[], None]:
            native = offer.capsule, STREAM_HOOK, job.ranks, offer.indices
            worker = _core.Worker(
                segment, number, None, None, None, None, thread=True, native=native
            )
            runner = _Runner(job, offer.hook, number)
            return functools.partial(_work, worker, runner, segment, number)

        super().__init__(engine, workers, [work_of(number) for number in range(segment.workers)])
