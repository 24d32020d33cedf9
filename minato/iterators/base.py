"""What stands behind ``iter(loader)`` with workers, and what all its kinds share.

``balanced.py`` gives samples to whichever worker is free and hands batches over in the
sampler's order; ``ready.py`` fills batches anew, ``static.py`` keeps torch's own dispatch.  All are instances of torch's ``_MultiProcessingDataLoaderIter``,
because libraries test for it, and run none of its constructor.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import _utils
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
)

from .._limits import NOT_STARTED
from ..errors import DAMAGED, Failure, WorkerLost, describe_death
from ..observe.stats import engine_stats
from ..observe.trace import Trace, tracer
from ..observe.trace import writer as trace_writer
from ..state import Counted
from ..transport import messages
from ..workers import signals
from ..workers.native import NativePool
from ..workers.pool import Pool, start_method_context
from ..workers.process import FAILED, OK
from .memo import memo_of
from .prefetcher import ReceivesAhead

@dataclass(slots=True)
class _Batch:
    """A batch that was drawn and not delivered yet."""

    number: int
    indices: Any
    whole: bool
    sequence: int = -1  # what it is planned by


class _Finished:
    """What libraries read of torch's result queue: how far the workers are ahead."""

    def __init__(self, iterator: _MinatoIterator) -> None:
        self._iterator = iterator

    def qsize(self) -> int:
        return self._iterator._finished()

    def empty(self) -> bool:
        return self.qsize() == 0


class _MinatoIterator(ReceivesAhead, Counted, _MultiProcessingDataLoaderIter):
    """What both iterators share: the pool, waiting, shutting down."""

    _pool: Pool | NativePool | None = None
    _shutdown = False
    _fewer = False  # workers than asked for, and the program was told
    _trace: Trace | None = None

    def __init__(self, loader: Any) -> None:
        self._in_hand = deque()
        with self._taking_up(loader, memo_of(loader)):
            _BaseDataLoaderIter.__init__(self, loader)
        name = _MultiProcessingDataLoaderIter.__name__  # profilers know torch's
        self._profile_name = f"enumerate(DataLoader)#{name}.__next__"
        self._prefetch_factor = loader.prefetch_factor
        self._in_order = loader.in_order
        if self._num_workers <= 0:
            raise AssertionError(
                "num_workers must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        if self._prefetch_factor <= 0:
            raise AssertionError(
                "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        self._iterable = self._dataset_kind == _DatasetKind.Iterable
        self._worker_init_fn = loader.worker_init_fn
        bounds = loader.autoscale or (self._num_workers, self._num_workers)
        self._least_workers: int = bounds[0]
        self._most_workers: int = bounds[1]
        self._straggler_threshold = loader.straggler_threshold
        self._start_pool(loader)
        self._reset(loader, first_iter=True)

    def _start_pool(self, loader: Any) -> None:
        trace_writer()  # a file that cannot be made is no reason to leave workers behind
        self._pool = pool = self._make_pool(loader)
        self._engine = pool.engine
        try:
            pool.start()
        except BaseException:
            pool.stop()
            raise
        self._trace = tracer(self, self._memo)
        if self._pin_memory:
            self._start_pinner()

    def _make_pool(self, loader: Any) -> Pool | NativePool:
        balanced = self._balanced
        return Pool(
            context=start_method_context(loader),
            workers=self._num_workers,
            max_retries=loader.max_retries if balanced else 0,
            respawn=balanced and loader.max_retries > 0,
            memory_limit=loader._memory_limit_bytes(),
            one_thread=loader.scheduling != "static",
            options=self._engine_options(),
            job=dict(
                num_workers=self._most_workers if balanced else self._num_workers,
                base_seed=self._base_seed,
                dataset_kind=self._dataset_kind,
                auto_collation=self._auto_collation,
                drop_last=self._drop_last,
                seed_per_sample=self._seeds,
                user_epoch=self._memo.user_epoch,
                dataset=self._dataset,
                collate_fn=self._collate_fn,
                worker_init_fn=self._worker_init_fn,
                splits=self._splits,
                probing=self._splits and self._memo.asks_for_samples(),
            ),
        )

    def _bounds(self) -> tuple[int, int, int]:
        """What the number of workers moves between, and where it begins."""
        return self._least_workers, self._num_workers, self._most_workers

    def _living(self) -> bool:
        return self._pool is not None and not self._pool.stopped

    _balanced = True
    _seeds = False
    _splits = False  # whether batches that one worker makes may be split over several

    def _engine_options(self) -> dict[str, Any]:
        return {}

    @property
    def _workers(self) -> list[Any]:  # type: ignore[override]  # torch's is an attribute
        return self._pool.handles if self._pool is not None else []

    @property
    def _data_queue(self) -> _Finished:  # type: ignore[override]
        return _Finished(self)

    @property
    def _worker_result_queue(self) -> _Finished:  # type: ignore[override]
        return _Finished(self)

    def _finished(self) -> int:
        """Batches that are made and not handed over."""
        ready = self._engine.timing()["ready"] if self._living() else 0
        return ready + len(self._in_hand)

    # ---- waiting ---------------------------------------------------------------------

    def _await(self, block: int, done: Any) -> None:
        """Waits until done() is true; raises torch's errors for timeouts and deaths."""
        engine, timeout = self._engine, self._timeout
        deadline = time.monotonic() + timeout if timeout > 0 else None
        while not done():
            self._check_health(done)
            left = -1.0 if deadline is None else deadline - time.monotonic()
            if deadline is not None and left <= 0:
                raise RuntimeError(f"DataLoader timed out after {timeout} seconds")
            engine.wait(block, left)

    def _check_health(self, done: Any) -> None:
        health = self._engine.health()
        unstarted = health["deaths"] > 0 and NOT_STARTED <= health["status"] < DAMAGED
        if health["zygote_lost"] and not unstarted:
            if not done():
                pool = self._pool
                pid = pool.zygote.pid if isinstance(pool, Pool) else None
                self._shutdown_workers()  # nobody could see them end, or replace them
                how = "died unexpectedly"
                if health["zygote_hung"]:
                    how = "was ended, because it had hung when a worker died"
                raise RuntimeError(
                    f"The process that starts DataLoader workers (pid {pid}) {how}; workers "
                    "cannot be watched or replaced any more. Make a new iterator."
                )
        elif health["deaths"]:
            died = describe_death(health["pid"], health["status"])
            if not self._balanced or health["live"] == 0 or health["zygote_lost"]:
                if not done():
                    raise WorkerLost(died, health["pid"], None, health["status"])
            elif unstarted:
                self._tell_of_fewer(died)

    def _tell_of_fewer(self, died: str) -> None:
        if not self._fewer:
            self._fewer = True
            warnings.warn(f"{died}The others do its work.", stacklevel=4)

    # ---- receiving -------------------------------------------------------------------

    def _next(self) -> Any:
        """torch's __next__ without the range that it marks for profilers: where none listens
        that would be a good part of a small batch's time. mn_hand.c decides between them."""
        if self._sampler_iter is None or self._iterable:
            return _MultiProcessingDataLoaderIter.__next__(self)
        data = self._next_data()
        self._num_yielded += 1
        return data

    def _whole(self, block: int) -> Any:
        """Answer of a BATCH or COLLATE task: (status, payload, ...), see workers/process.py."""
        (_worker, _row0, _nrows, data, buffers) = self._engine.envelopes(block)[0]
        if data is None:
            return FAILED, _no_room()
        status, data, *more = messages.loads(data, buffers or [])
        if status == OK and more:
            self._memo.costs.sends(more[0])
        return status, data, *more

    # ---- ending ----------------------------------------------------------------------

    def _shutdown_workers(self) -> None:
        if _utils is None or _utils.python_exit_status is not False:
            return  # the interpreter exits: multiprocessing ends the zygote
        try:
            self._stop_pinner()
        finally:
            pool = self._pool
            if pool is not None and not self._shutdown:
                self._stop_pool(pool)

    def _stop_pool(self, pool: Pool | NativePool) -> None:
        health = None
        with signals.Held():
            if self._shutdown:
                return  # another thread was here first
            self._shutdown = True
            try:
                if pool.mine() and pool.started:
                    health = self._engine.health()
                    self._tell_last()
            finally:
                pool.stop()
        unstarted = health is not None and NOT_STARTED <= health["status"] < DAMAGED
        if health is not None and health["deaths"] and unstarted:
            self._tell_of_fewer(describe_death(health["pid"], health["status"]))

    def _tell_last(self) -> None:
        """What the program may ask for when the workers are gone."""
        self._memo.last_stats = engine_stats(self)
        if self._balanced:
            self._memo.keep_scheduler(self._bounds(), self._engine)
        if self._trace is not None:
            self._trace.ended()


class _Told(Failure):
    """The loader's own word on a batch, raised as it is."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.note = self.stand_in = ""

    def reraise(self) -> Any:
        raise self.error


def _note(batch: _Batch, row: int | None = None) -> str:
    if row is None or not isinstance(batch.indices, (Sequence, torch.Tensor, np.ndarray)):
        return _batch_note(batch.number, batch.indices)
    return f"minato: sample index {batch.indices[row]!r}, place {row} of batch {batch.number}"


def _batch_note(number: int, indices: Any) -> str:
    return f"minato: batch {number}, sample indices {_short(indices)}"


def _short(indices: Any) -> str:
    text = repr(indices)
    return text if len(text) <= 200 else text[:197] + "..."


#: by the engine's reasons for not making a batch (csrc/engine/mn_engine.h): what it needs
_NEEDS = {
    1: "{need} task descriptors at once, and there are {all} ({used} are in use: each sample that "
    "waits for its batch has one)",
    2: "{need} bytes for its indices and for what workers report, and there are {all}",
    3: "{need} bytes for its samples, and the memory that loader and workers share has {all} "
    "({used} are in use, {kept} of them by batches that the program keeps). A limit on address "
    "space (`ulimit -v`) makes that smaller than memory_limit",
    4: "{need} bytes that the system refuses to the program",
}


def _refused(engine: Any, sequence: int, what: str) -> Failure:
    """A batch, or a sample of one, that the engine cannot make."""
    why, need, there = engine.refused(sequence)
    memory = engine.memory()
    used = memory["in_flight"] if why == 1 else memory["used"]
    needs = _NEEDS[why].format(need=need, all=there, used=used, kept=memory["kept"])
    return _Told(
        MemoryError(f"{what} cannot be made: it needs {needs}. Make batches smaller, or keep fewer.")
    )


def _no_room() -> Failure:
    try:
        raise MemoryError(
            "a worker's result does not fit under memory_limit; raise it, keep fewer batches, "
            "or make batches smaller"
        )
    except MemoryError as error:
        return Failure.of(error, "in DataLoader worker process")
