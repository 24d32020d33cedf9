"""The base class of all iterators with workers, and the iterator of balanced scheduling.

A balanced iterator gives samples to the next free worker and delivers batches in the sampler's
order. ``ready.py`` forms its own batches. ``static_and_iterable.py`` keeps torch's dispatch.
All derive from torch's ``_MultiProcessingDataLoaderIter``, because libraries test for that class,
but do not run its constructor. They consist of parts that hold no reference to the iterator, so
an iterator is destroyed with the last reference to it:

``position.py``    the epoch, its seed, the delivered batches, the states of samplers
``planner.py``     from the sampler to the engine: the prefetch window, the next epoch
``receiver.py``    from the engine to a batch: rows, messages, collating here, failures; batches that
                   were received early, pinned or copied if asked
``supervisor.py``  the workers: start, watch, end
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

from torch.utils.data import dataloader
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter, _DatasetKind, _MultiProcessingDataLoaderIter,
)  # fmt: skip

from .. import _core
from .._dynamo import eager
from .._system import explained
from ..cache.cache import promise
from ..dataset_calls import fetches_batches
from ..device.operators import split
from ..device.send_ahead import DeviceStage, Pinner
from ..device.provider import provider_for
from ..epoch_progress import Progress, title_of
from ..errors import Failure
from ..option_values import option
from ..options import Options
from ..seeding import pitfalls
from ..seeding.order_generators import BASE_SEED
from ..seeding.ranks import ranks_of
from ..text import parse_bytes
from ..transport.layouts import (
    EngineTransport, SampleTransport, collates_more, is_default_collate,
)  # fmt: skip
from ..workers.fetch_or_skip import RAISE, REPLACE
from ..workers.job import Job, Memory
from ..workers.native import NativePool, offer_of
from ..workers.process_pool import Executor, Pool, WorkerHandle, start_method_context
from ..workers.remote_pool import RemotePool
from ..workers.threads import PythonPool, warn_of_generators
from .failure_limits import Amended, ErrorsAllowed
from .loader_memo import memo_of
from .planner import Planner, per_worker
from .position import Position
from .receiver import Receiver
from .stats import export
from .supervisor import Supervisor
from .trace import writer as trace_writer

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
    _engine: _core.Engine
    _supervisor: Supervisor  # once the workers were started
    _owner = 0  # process whose workers it has
    _awaits_first = True  # no batch has come yet

    def __init__(self, loader: Any) -> None:
        memo = memo_of(loader)
        self._turn = threading.RLock()  # one thread at a time calls next()
        self._options = options = Options.of(loader)
        self._provider = provider_for(options.device)  # before anything starts: it may fail
        memo.copies = None
        self._position = position = Position(
            loader, memo, self._unit, ErrorsAllowed(loader, options)
        )
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
        self._iterable = self._dataset_kind == _DatasetKind.Iterable
        self._worker_init_fn = loader.worker_init_fn
        self._bounds = options.bounds(self._num_workers)
        self._compose(loader)
        with memo.until_begun(loader):
            self._begin(loader, True)

    def _compose(self, loader: Any) -> None:
        """Makes the parts of this kind that exist before the workers do."""

    def _new_engine(self, loader: Any, *, processes: bool = True, **more: Any) -> _core.Engine:
        """An engine without workers. processes: they may be killed, and their samples tried again.
        more: arguments of Engine for this kind of iterator."""
        options, tries = self._options, self._balanced and processes
        retries = options.max_retries if tries else 0
        respawn = tries and (retries > 0 or options.sample_timeout is not None)
        if options.memory_limit is not None:  # caches of this process leave it free
            promise(parse_bytes(options.memory_limit))
        limit = options.memory_bytes(self._num_workers)
        with explained():
            return _core.Engine(
                self._num_workers, retries, respawn, limit,
                processes=processes, title=title_of(loader), **more,
            )  # fmt: skip

    def _start_workers(self, loader: Any) -> None:
        """Starts workers for the engine. If that fails, the iterator has no owner and is made anew
        when it is used again."""
        options, position = self._options, self._position
        trace_writer()  # first: if its file cannot be made, no worker is left behind
        self._supervisor = supervisor = Supervisor(
            loader, options, position, self._make_pool(loader), balanced=self._balanced,
            displacement=self._displacement(),
        )  # fmt: skip
        supervisor.start(loader)
        copied = isinstance(supervisor.pool, (Pool, RemotePool)) and self._persistent_workers
        position.dataset_epochs.workers_start(
            copied=copied, as_torch=options.static, overlap=options.prefetch_next_epoch
        )
        if self._pin_memory or self._provider is not None:
            try:
                self._start_pinner(supervisor)
            except BaseException:
                self._shutdown_workers()
                raise
        export(self, supervisor)
        self._owner = os.getpid()

    def _displacement(self) -> Callable[[], dict[str, float]] | None:
        """How far samples move; None if they do not. The result holds no reference to this."""
        return None

    def _start_pinner(self, supervisor: Supervisor) -> None:
        pinner: Pinner
        if self._provider is None:
            pinner = Pinner(self._pin_memory_device)
        else:
            most = self._prefetch_factor * self._num_workers // 2  # the workers fill the other half
            pinner = stage = DeviceStage(self._provider, most, self._engine, self._split)
            self._position.memo.copies = stage.copier.counts
        self._pinner = pinner
        supervisor.before_stop.insert(0, pinner.close)
        self._pin_memory_thread = pinner.thread  # torch's attribute names
        self._pin_memory_thread_done_event = pinner.ended

    def _make_pool(self, loader: Any) -> Executor:
        context = start_method_context(loader)
        return Pool(self._engine, self._num_workers, self._job(), context)

    def _job(self) -> Job:
        """Returns what workers need."""
        balanced, options, memo = self._balanced, self._options, self._position.memo
        generator = self._position.sources.generator
        return Job(
            memory=Memory(self._engine.segment, self._engine.fd),
            one_thread=not options.static,
            num_workers=self._bounds[2] if balanced else self._num_workers,
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
            # workers describe their first samples, see transport/messages.py
            probing=self._splits
            and (memo.shape.unsure or memo.costs.summary()["send_ns"] is None),
            places=self._places,
            on_error=options.on_error,
            starts=self._position.starts,
            through=self._through,
        )

    # ---- attributes of torch's iterator, for libraries and for stats --------------------------

    _base_seed: int = BASE_SEED

    @property
    def _workers(self) -> list[WorkerHandle]:  # type: ignore[override]  # torch's is an attribute
        return list(self._pool.handles)

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
    def _pool(self) -> Executor:
        return self._supervisor.pool

    @property
    def _progress(self) -> Progress:
        return self._position.progress

    @property
    def _shutdown(self) -> bool:  # type: ignore[override]
        return self._supervisor.stopped

    def _living(self) -> bool:
        return self._supervisor.living()

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
        if supervisor.living():
            costs = self._position.memo.costs
            supervisor.served.watch.first_came(self._engine, costs, self._first_indices())

    def _first_indices(self) -> Any:
        """Returns the indices of a batch's samples; None if they are not known."""
        return None

    def _allowed(self, amended: Amended) -> Any:
        """The data of a batch with failed samples, if max_errors allows that many."""
        position, supervisor = self._position, self._supervisor
        allowed = position.allowed
        assert allowed is not None
        try:
            data = allowed.take(amended, position.progress, position.sources)
        except Exception:
            position.errors += 1
            raise
        finally:
            if supervisor.living():
                self._engine.note_failed(allowed.left_out + allowed.replaced)
                if supervisor.trace is not None:
                    supervisor.trace.amiss(amended)
        if self._pinner is not None and not amended.empty:
            data = self._pinner.submit(data, lambda: "").result(self._timeout)
            if isinstance(data, Failure):
                data.reraise()
        return data

    @eager
    def __del__(self) -> None:
        with contextlib.suppress(UserWarning):  # of a death, under -W error: it cannot be raised here
            self._shutdown_workers()

    def _shutdown_workers(self) -> None:
        self._grant(0)
        if "_supervisor" in vars(self):
            self._supervisor.stop()
            self._position.ends()


#: the shape for loaders whose batches are always made whole by one worker
WHOLE = SampleTransport()
WHOLE.whole = True


class BalancedIterator(MinatoIterator):
    """For map-style datasets: samples go to the next free worker, batches keep their order."""

    _planner_type: type[Planner] = Planner
    _receiver_type: type[Receiver] = Receiver
    _planner: Planner
    _receiver: Receiver

    def _compose(self, loader: Any) -> None:
        position, options = self._position, self._options
        self._offer = offer = offer_of(loader, self._dataset)
        alone = offer is not None or options.remote is not None
        self._splits = loader._auto_collation and not alone and not fetches_batches(loader.dataset)
        transport = self._transport_of(self._shape_of(loader) if offer is None else offer.shape)
        processes = offer is None and options.worker_type != "thread"
        more = self._engine_options(loader, transport)
        self._engine = engine = self._new_engine(loader, processes=processes, **more)
        self._planner = self._planner_type(
            engine, loader, position, transport, options, batch_size=self._batch_size_of(loader),
            native=offer is not None, splits=self._splits,
        )  # fmt: skip

    def _start_workers(self, loader: Any) -> None:
        super()._start_workers(loader)
        planner, supervisor = self._planner, self._supervisor
        supervisor.before_stop.append(planner.received.clear)
        self._receiver = self._receiver_type(loader, supervisor, planner, self._pinner)

    def _batch_size_of(self, loader: Any) -> int:
        size: int = loader.batch_size or 1
        return size

    def _transport_of(self, shape: SampleTransport) -> EngineTransport:
        return EngineTransport(shape)

    def _shape_of(self, loader: Any) -> SampleTransport:
        """Returns what is known of the loader's samples, if they may travel as rows."""
        shape = WHOLE
        if self._options.remote is not None:
            return shape
        if loader._auto_collation and is_default_collate(loader.collate_fn):
            if not fetches_batches(loader.dataset):
                shape = self._position.memo.shape
        if collates_more():
            shape.doubt()
        return shape

    def _make_pool(self, loader: Any) -> Executor:
        engine, workers, options = self._engine, self._num_workers, self._options
        if options.remote is not None:
            return RemotePool(engine, workers, self._job(), options.remote, options.max_retries)
        if options.worker_type == "thread":
            if options.seed_per_sample is None and self._position.memo.warns_of("generators"):
                warn_of_generators(self._dataset, self._collate_fn)
            return PythonPool(engine, workers, self._job())
        if self._offer is None:
            return super()._make_pool(loader)
        return NativePool(engine, workers, self._job(), self._offer)

    def _engine_options(self, loader: Any, transport: EngineTransport) -> dict[str, Any]:
        memo, bounds = self._position.memo, self._bounds
        return dict(
            window=self._prefetch_factor * self._num_workers,
            in_order=self._in_order,
            costs=memo.costs,
            min_workers=bounds[0],
            max_workers=bounds[2],
            straggler_seconds=self._options.straggler_seconds(),
            saved_scheduler=memo.schedulers.get(bounds),
            group_neighbours=self._offer is None,
        )

    @property
    def _send_idx(self) -> int:  # type: ignore[override]  # torch's counters that libraries read
        return self._progress.count + self._planner.drawn_ahead()

    @property
    def _rcvd_idx(self) -> int:  # type: ignore[override]
        return self._progress.count

    @property
    def _tasks_outstanding(self) -> int:  # type: ignore[override]
        return self._planner.drawn_ahead()

    @property
    def _index_queues(self) -> list[Queue]:  # type: ignore[override]
        """All workers have one queue; each shows its share of the batches that wait for a worker."""
        return [Queue(partial(self._waiting, worker)) for worker in range(self._num_workers)]

    def _waiting(self, worker: int) -> int:
        waiting = self._tasks_outstanding - self._finished() - self._num_workers
        return max(0, waiting + self._num_workers - 1 - worker) // self._num_workers

    def _first_indices(self) -> Any:
        return self._receiver.first_indices

    def _finished(self) -> int:
        ready = self._engine.progress()["ready"] if self._living() else 0
        return ready + len(self._planner.received)

    # ---- an epoch --------------------------------------------------------------------------

    def _begin(self, loader: Any, first_iter: bool) -> None:
        planner = self._planner
        if not first_iter:
            if planner.adopt():
                self._num_yielded = 0
                self._IterableDataset_len_called = loader._IterableDataset_len_called
                return
            self._grant(0)
            self._receiver.clear()
            planner.clear()
        with self._position.epoch_begins(loader, first=first_iter):
            _BaseDataLoaderIter._reset(self, loader, first_iter)
            indices = self._position.watched(self._indices(), self._progress)
            start = partial(self._start_workers, loader) if first_iter else None
            goes_on = bool(option(loader, "prefetch_next_epoch"))
            planner.begin(indices, goes_on=goes_on, start=start)
        planner.go_on()

    def _indices(self) -> Iterator[Any]:
        """The indices to plan, one by one."""
        indices: Iterator[Any] = self._sampler_iter
        return indices

    _looked_at_init = False  # set once a worker has made a batch

    @eager
    def _next_data(self) -> Any:
        if not self._looked_at_init and self._position.progress.count:
            self._looked_at_init = True
            pitfalls.warn_of_own_number(self._seeded_by_init())
        while isinstance(got := self._next_batch(), Failure):
            if type(got) is not Amended:
                self._position.errors += 1
                got.reraise()
            data = self._allowed(got)
            if not got.empty:
                return data
        return got

    def _next_batch(self) -> Any:
        """The next batch, or the Failure that takes its place."""
        planner, receiver = self._planner, self._receiver
        queue = planner.received
        if queue:
            self._grant(0)  # its count included these batches
        else:
            if not planner.planned and not planner.draw.exhausted:
                planner.fill()  # an empty plan would be taken for the end
            if receiver.at_end():
                self._has_ended()
        got = receiver.next()
        assert got is not None  # at_end() was false
        what, data = got
        exhausted = planner.draw.exhausted
        if not exhausted and planner.drawn_ahead() <= planner.refill_at:
            self._draw_more(got)
            exhausted = planner.draw.exhausted
        progress = self._position.progress
        # A worker that failed at its start has made nothing, so nothing counts as delivered.
        if type(data) is not Failure or not data.at_start:
            self._delivered(what, progress)
        if queue and self._pinner is None and not progress.beyond:
            enough = -1 if exhausted else planner.refill_at
            most = receiver.need_nothing(planner.drawn_ahead() - enough - 1)
            if most > 0:
                self._grant(most, queue, self._engine, progress)
        return data

    def _delivered(self, what: Any, progress: Progress) -> None:
        """Counts a batch that next() returns."""
        progress.delivered(what.number)

    def _draw_more(self, got: tuple[Any, Any]) -> None:
        """Draws more indices after a batch was received; an interrupt does not lose the batch."""
        try:
            self._planner.fill()
        except Exception:
            raise  # the sampler's error: in torch, the program gets no batch then
        except BaseException:
            self._receiver.put_back(got)
            raise

    def _has_ended(self) -> NoReturn:
        """The program has received the whole epoch. Stops the workers unless they are persistent, and
        warns about worker_init_fn's seeds."""
        position, early = self._position, self._planner.next_epoch.early
        position.progress.finished = True
        if early is not None and not early.failed:
            position.memo.progress = early.progress
        found = self._seeded_by_init()
        if not self._persistent_workers:
            self._shutdown_workers()
        else:
            self._supervisor.warn_of_deaths(at_end=True)
        position.ends()
        pitfalls.warn_of_own_number(found)
        raise StopIteration

    def _seeded_by_init(self) -> list[str]:
        """Generators that worker_init_fn seeded from its own number, if warnings are due."""
        asked = self._options.seed_per_sample is not None or self._worker_init_fn is None
        if asked or self._supervisor.reproducible or not self._living():
            return []
        made_with = self._pool.base_seed if isinstance(self._pool, Pool) else 0
        return pitfalls.seeded_by_number(self._engine.workers(), made_with)
