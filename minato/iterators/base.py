"""The base class of all iterators with workers.

``balanced.py`` gives samples to the next free worker and delivers batches in the sampler's
order. ``ready.py`` forms its own batches. ``static_and_iterable.py`` keeps torch's dispatch.
All derive from torch's ``_MultiProcessingDataLoaderIter``, because libraries test for that class,
but do not run its constructor. They consist of parts that hold no reference to the iterator, so
an iterator is destroyed with the last reference to it:

``position.py``        the epoch, its seed, the delivered batches
``planner.py``         from the sampler to the engine: prefetch window, look-ahead
``next_epoch.py``      batches of the next epoch that are planned while this one ends
``receiver.py``        from the engine to a batch: rows, messages, collating here, failures
``delivery_queue.py``  batches that were received early, pinned or copied if asked
``supervisor.py``      the workers: start, watch, end
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Callable
from typing import Any

from torch.utils.data import dataloader
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
)

from .. import _core
from .._dynamo import eager
from ..cache.cache import promise
from ..device.operators import split
from ..device.pinned import DeviceStage, Pinner
from ..device.provider import provider_for
from ..epoch_progress import Progress
from ..errors import Failure
from ..options import Options
from ..seeding.order_generators import BASE_SEED
from ..seeding.ranks import ranks_of
from ..text import parse_bytes
from ..transport.layouts import is_default_collate
from ..workers.process_pool import Executor, Pool, WorkerHandle, start_method_context
from .across_iterators import memo_of
from .batch_errors import Amended
from .max_errors import ErrorsAllowed
from .position import Position
from .stats import export
from .supervisor import Supervisor
from .window import per_worker

#: files whose functions may have an iterator in a local variable
_OURS = (os.path.dirname(os.path.dirname(__file__)) + os.sep, dataloader.__file__)


def _forget_locals(error: BaseException) -> None:
    """Clears minato's frames in a traceback. Prompts and notebooks keep the last traceback, whose
    frames keep this iterator, so its workers would stay until the next error. The program's own
    frames are kept for debuggers."""
    for frame, _line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename.startswith(_OURS):
            with contextlib.suppress(RuntimeError):  # the frame is still running
                frame.clear()


class Queue:
    """Replaces a queue of torch's: libraries read from them how far ahead the workers are."""

    def __init__(self, qsize: Callable[[], int]) -> None:
        self.qsize = qsize

    def empty(self) -> bool:
        """Returns whether qsize() is 0."""
        return self.qsize() == 0


class MinatoIterator(_core.HandsOut, _MultiProcessingDataLoaderIter):
    """Has what all kinds of iterators share: torch's attributes, the workers, the end."""

    _balanced = True
    _unit = "batch"
    _splits = False  # whether a batch with a collate_fn may be split over several workers
    _places = False  # whether a worker may place the samples of such a batch in rows
    _pinner: Pinner | None = None
    _supervisor: Supervisor | None = None
    _owner = 0  # process whose workers it has
    _awaits_first = True  # no batch has come yet

    def __init__(self, loader: Any) -> None:
        memo = memo_of(loader)
        self._turn = threading.RLock()  # one thread at a time calls next()
        self._options = options = Options.of(loader)
        self._provider = provider_for(options.device)  # before anything starts: it may fail
        memo.copies = None
        self._position = position = Position(loader, memo, self._unit)
        with position.taking_up():
            _BaseDataLoaderIter.__init__(self, loader)
        self._split = split(loader, self._provider)
        self._dataset = self._split.dataset
        self._through = memo.through(self._dataset, options, loader)
        name = _MultiProcessingDataLoaderIter.__name__  # profilers know torch's name
        self._profile_name = f"enumerate(DataLoader)#{name}.__next__"
        self._prefetch_factor = per_worker(loader)
        self._in_order = loader.in_order
        if self._num_workers <= 0:
            raise AssertionError(
                "num_workers must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        if self._prefetch_factor <= 0:
            raise AssertionError(
                "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        position.allowed = ErrorsAllowed(loader, options, position)
        self._iterable = self._dataset_kind == _DatasetKind.Iterable
        self._worker_init_fn = loader.worker_init_fn
        self._supervisor = supervisor = Supervisor(
            loader, options, position, balanced=self._balanced
        )
        self._compose(loader, supervisor)
        with memo.until_begun(loader):
            self._begin(loader, True)
        export(self, supervisor)

    def _compose(self, loader: Any, supervisor: Supervisor) -> None:
        """Makes the parts of this kind; the workers do not exist yet."""

    def _start_workers(self, loader: Any, supervisor: Supervisor) -> None:
        supervisor.start(lambda: self._make_pool(loader))
        copied = isinstance(supervisor.pool, Pool) and self._persistent_workers
        options = self._options
        self._position.dataset_epochs.workers_start(
            copied, options.static, options.prefetch_next_epoch
        )
        if self._pin_memory or self._provider is not None:
            try:
                self._start_pinner(supervisor)
            except BaseException:
                self._shutdown_workers()
                raise

    def _start_first(self, loader: Any) -> None:
        """Starts the workers of a new iterator. If that fails, the iterator has no owner and is
        made anew when it is used again."""
        assert self._supervisor is not None
        self._start_workers(loader, self._supervisor)
        self._owner = os.getpid()

    def _start_pinner(self, supervisor: Supervisor) -> None:
        if self._pinner is not None:
            supervisor.before_stop.remove(self._pinner.close)
        pinner = Pinner(self._pin_memory_device) if self._provider is None else self._stage()
        self._pinner = pinner
        supervisor.before_stop.insert(0, pinner.close)
        self._pin_memory_thread = pinner.thread  # torch's attribute names
        self._pin_memory_thread_done_event = pinner.ended

    def _stage(self) -> DeviceStage:
        assert self._provider is not None
        window = self._prefetch_factor * self._num_workers
        most = window // 2  # the workers fill the other half
        stage = DeviceStage(self._provider, most, self._engine, self._split)
        self._position.memo.copies = stage.counts
        return stage

    def _make_pool(self, loader: Any) -> Executor:
        balanced, options = self._balanced, self._options
        context = start_method_context(loader)
        return Pool(
            context=context,
            workers=self._num_workers,
            max_retries=options.max_retries if balanced else 0,
            respawn=balanced and (options.max_retries > 0 or options.sample_timeout is not None),
            memory_limit=self._memory_limit(),
            one_thread=not options.static,
            options=self._engine_options(),
            job=self._job(),
        )

    def _memory_limit(self) -> int:
        """Returns the limit in bytes of the memory shared with workers. Caches of this process
        leave a memory_limit= free."""
        if self._options.memory_limit is not None:
            promise(parse_bytes(self._options.memory_limit))
        return self._options.memory_bytes(self._num_workers)

    def _job(self) -> dict[str, Any]:
        """Returns what workers need besides their memory."""
        assert self._supervisor is not None
        balanced, options, memo = self._balanced, self._options, self._position.memo
        generator = self._position.sources.generator
        return dict(
            num_workers=self._supervisor.bounds[2] if balanced else self._num_workers,
            base_seed=self._position.workers_seed,
            dataset_kind=self._dataset_kind,
            auto_collation=self._auto_collation,
            drop_last=self._drop_last,
            seed_per_sample=balanced and options.seeds,
            ranks=self._position.ranks.for_seeds(),
            by_position=self._position.elastic is not None,
            user_epoch=memo.user_epoch,
            dataset=self._dataset,
            collate_fn=self._collate_fn,
            worker_init_fn=self._worker_init_fn,
            # loading an accelerator's generator would start the accelerator in workers
            generator=generator if generator is None or generator.device.type == "cpu" else None,
            splits=self._splits,
            collates_by_default=self._splits and is_default_collate(self._collate_fn),
            probing=self._splits and memo.asks_for_samples(),
            places=self._places,
            on_error=options.on_error,
            starts=self._position.starts,
            through=self._through,
        )

    def _engine_options(self) -> dict[str, Any]:
        return {}

    # ---- attributes of torch's iterator, for libraries and for stats --------------------------

    _base_seed: int = BASE_SEED

    @property
    def _workers(self) -> list[WorkerHandle]:  # type: ignore[override]  # torch's is an attribute
        pool = self._pool
        return list(pool.handles) if pool is not None else []

    @property
    def _data_queue(self) -> Queue:  # type: ignore[override]
        return Queue(self._finished)

    @property
    def _worker_result_queue(self) -> Queue:  # type: ignore[override]
        return Queue(self._finished)

    def _finished(self) -> int:
        """Batches that are done and not delivered."""
        raise NotImplementedError

    @property
    def _pool(self) -> Executor | None:
        return self._supervisor.pool if self._supervisor is not None else None

    @property
    def _engine(self) -> _core.Engine:
        assert self._supervisor is not None
        return self._supervisor.engine

    @property
    def _progress(self) -> Progress:
        return self._position.progress

    @property
    def _shutdown(self) -> bool:  # type: ignore[override]
        return self._supervisor is not None and self._supervisor.stopped

    def _living(self) -> bool:
        return self._supervisor is not None and self._supervisor.living()

    # ---- an epoch ----------------------------------------------------------------------------

    @eager
    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """torch's method, called at the start of each epoch of a persistent iterator."""
        memo = memo_of(loader)
        with memo.until_begun(loader):
            if self._owner == os.getpid() and not self._shutdown:
                position = self._position
                same = memo is position.memo
                if same and ranks_of(loader, position.launched) == position.ranks:
                    self._begin(loader, first_iter)
                    return
                # These workers belong to the loader that this one was copied from, or seed the
                # samples of another rank.
                self._shutdown_workers()
            # In a forked child, the workers and their records belong to the parent. If an error
            # ended the workers, a new iterator is the program's only way to get new ones.
            self._grant(0)
            vars(self).clear()
            type(self).__init__(self, loader)

    def _begin(self, loader: Any, first_iter: bool) -> None:
        raise NotImplementedError

    # ---- next() ------------------------------------------------------------------------------

    @eager
    def _next(self) -> Any:
        """torch's __next__ without the range that it records for profilers. Without a profiler,
        that range takes a large share of a small batch's time. mn_engine_type_take.c chooses between the
        two."""
        if self._owner != os.getpid():  # here the lock may be held by a thread that does not exist
            raise RuntimeError("this iterator belongs to another process; make a new one here")
        try:
            with self._turn:
                if self._sampler_iter is None or self._iterable:
                    data = _MultiProcessingDataLoaderIter.__next__(self)  # counts it
                else:
                    data = self._next_data()  # type: ignore[no-untyped-call]
                    self._num_yielded += 1
                if self._awaits_first:
                    self._first_came()
        except StopIteration:
            raise  # the normal end of a loop
        except BaseException as error:
            _forget_locals(error)
            del self
            raise
        return data

    def _first_came(self) -> None:
        """The first batch since the workers were started."""
        self._awaits_first = False
        supervisor = self._supervisor
        if supervisor is not None and supervisor.living():
            costs = self._position.memo.costs
            supervisor.watch.first_came(supervisor.engine, costs, self._first_indices())

    def _first_indices(self) -> Any:
        """Returns the indices of a batch's samples; None if they are not known."""
        return None

    def _allowed(self, amended: Amended) -> Any:
        """The data of a batch with failed samples, if max_errors allows that many."""
        allowed, supervisor = self._position.allowed, self._supervisor
        assert allowed is not None
        try:
            data = allowed.take(amended)
        except Exception:
            self._position.errors += 1
            raise
        finally:
            if supervisor is not None and supervisor.living():
                self._engine.note_failed(allowed.left_out + allowed.replaced)
                if supervisor.trace is not None:
                    supervisor.trace.amiss(amended)
        if self._pinner is not None and not amended.empty:
            data = self._pinner.submit(data, lambda: "").result(self._timeout)
            if isinstance(data, Failure):
                data.reraise()
        return data

    @eager
    def _shutdown_workers(self) -> None:
        self._grant(0)
        if self._supervisor is not None:
            self._supervisor.stop()
            self._position.ends()
