"""Balanced scheduling: samples go to the next free worker, batches arrive in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn, TypeVar

from torch.utils.data.dataloader import _BaseDataLoaderIter

from .._dynamo import eager
from ..dataset_calls import fetches_batches
from ..errors import Failure
from ..option_values import option
from ..seeding import init_states
from ..transport.layouts import collates_more, is_default_collate
from ..transport.rows_or_whole import EngineTransport, SampleTransport
from ..workers.native import NativePool, Offer, offer_of
from ..workers.on_error import RAISE, REPLACE
from ..workers.process_pool import Executor, Pool
from ..workers.python_threads import PythonPool, warn_of_generators
from .base import MinatoIterator, Queue
from .batch_errors import Amended
from .collating import CollatesHere
from .cost_hints import CostHints
from .delivery_queue import AtATime, DeliveryQueue
from .locality_key import groups_of
from .planner import Making, Planner
from .receiver import Completions, Receiver
from .supervisor import Supervisor
from .window import Window

AnyPlanner = TypeVar("AnyPlanner", bound=Planner)

#: the shape for loaders whose batches are always made whole by one worker
WHOLE = SampleTransport()
WHOLE.whole = True


class BalancedIterator(MinatoIterator):
    """For map-style datasets: samples go to the next free worker, batches keep their order."""

    _planner: Planner
    _delivery_queue: DeliveryQueue
    _receiver: Receiver
    _offer: Offer | None

    def _compose(self, loader: Any, supervisor: Supervisor) -> None:
        self._offer = offer = offer_of(loader, self._dataset)
        batched = loader._auto_collation
        alone = offer is not None or self._options.remote is not None
        self._splits = batched and not alone and not fetches_batches(loader.dataset)
        shape = self._shape_of(loader) if offer is None else offer.shape
        queue: deque[list[Any]] = deque()
        supervisor.before_stop.append(queue.clear)
        self._make_parts(loader, supervisor, shape, queue)

    def _make_parts(
        self, loader: Any, supervisor: Supervisor, shape: SampleTransport, queue: deque[list[Any]]
    ) -> None:
        transport = EngineTransport(shape)
        planner = self._planner_of(Planner, loader, transport, queue, loader.batch_size or 1)
        collates = CollatesHere(loader, self._position, shape)
        completions = Completions(supervisor, planner)
        forgets = not self._pin_memory and self._provider is None  # else errors may name indices
        self._receiver = Receiver(completions, planner, collates, forgets=forgets)
        at_a_time = AtATime(transport if self._in_order else None, planner.window)
        self._delivery_queue = DeliveryQueue(supervisor, self._receiver, queue, at_a_time)

    def _planner_of(
        self,
        kind: type[AnyPlanner],
        loader: Any,
        transport: EngineTransport,
        queue: deque[list[Any]],
        batch_size: int,
    ) -> AnyPlanner:
        position, options = self._position, self._options
        hints = CostHints(
            loader.dataset,
            loader.collate_fn,
            position.memo,
            ranks=position.ranks.for_seeds(),
            seeds=options.seeds,
        )
        costs, known = position.memo.costs, hints.given
        window = Window(
            loader,
            options,
            costs,
            hinted=known,
            batch_size=batch_size,
            shared_buffers=position.memo.shared_buffers,
        )
        making = Making(
            seeds=options.seeds,
            native=self._offer is not None,
            splits=self._splits,
            replaces=options.on_error == REPLACE,
            goes_on=options.on_error != RAISE,
        )
        groups = groups_of(loader)
        planner = kind(loader, position, transport, window, queue, hints, groups, making)
        self._planner = planner
        return planner

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

    def _start_workers(self, loader: Any, supervisor: Supervisor) -> None:
        super()._start_workers(loader, supervisor)
        receiver, engine = self._receiver, supervisor.engine
        self._planner.engine = self._delivery_queue.engine = engine
        receiver.engine = receiver.completions.engine = receiver.collates.engine = engine
        self._planner.window.watch(engine)
        self._delivery_queue.pinner = self._pinner

    def _make_pool(self, loader: Any) -> Executor:
        if (remote := self._options.remote) is not None:
            from ..workers.actors import RemotePool  # not at import: few programs have a cluster

            retries = self._options.max_retries
            return RemotePool(remote=remote, max_retries=retries, job=self._job(), **self._pool_options())
        if self._options.worker_type == "thread":
            self._warn_of_generators()
            return PythonPool(job=self._job(), **self._pool_options())
        if self._offer is None:
            return super()._make_pool(loader)
        return NativePool(
            offer=self._offer,
            dataset=self._dataset,
            collate_fn=self._collate_fn,
            ranks=self._position.ranks.for_seeds(),
            on_error=self._options.on_error,
            **self._pool_options(),
        )

    def _pool_options(self) -> dict[str, Any]:
        """Options of a pool of threads."""
        return dict(
            workers=self._num_workers,
            memory_limit=self._memory_limit(),
            options=self._engine_options(),
        )

    def _warn_of_generators(self) -> None:
        memo = self._position.memo
        if self._options.seed_per_sample is None and not memo.warned_of_generators:
            memo.warned_of_generators = warn_of_generators(self._dataset, self._collate_fn)

    def _engine_options(self) -> dict[str, Any]:
        assert self._supervisor is not None
        memo, bounds = self._position.memo, self._supervisor.bounds
        return dict(
            window=self._planner.window.size(),
            in_order=self._in_order,
            costs=memo.costs,
            min_workers=bounds[0],
            max_workers=bounds[2],
            straggler_seconds=self._options.straggler_seconds(),
            blocks=self._blocks_out(),
            saved_scheduler=memo.saved_scheduler(bounds),
            group_neighbours=self._offer is None,
        )

    def _blocks_out(self) -> int:
        """Upper bound of blocks in flight where that is large; 0 for the default."""
        return 0

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
        ready = self._engine.timing()["ready"] if self._living() else 0
        return ready + len(self._delivery_queue.entries)

    # ---- an epoch --------------------------------------------------------------------------

    def _begin(self, loader: Any, first_iter: bool) -> None:
        planner = self._planner
        if not first_iter:
            if planner.adopt():
                self._num_yielded = 0
                self._IterableDataset_len_called = loader._IterableDataset_len_called
                return
            self._grant(0)
            self._delivery_queue.entries.clear()
            self._receiver.clear()
            planner.clear()
        with self._position.epoch_begins(loader, first=first_iter):
            _BaseDataLoaderIter._reset(self, loader, first_iter)
            indices = self._position.watched(self._indices(), self._progress)
            start = partial(self._start_first, loader) if first_iter else None
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
            init_states.warn_of(self._seeded_by_init())
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
        planner, delivery_queue = self._planner, self._delivery_queue
        queue = delivery_queue.entries
        if queue:
            self._grant(0)  # its count included these batches
        else:
            if not planner.planned and not planner.draw.exhausted:
                planner.fill()
            if self._receiver.at_end():
                self._has_ended()
        got = delivery_queue.next()
        assert got is not None  # at_end() was false
        batch, data = got
        exhausted = planner.draw.exhausted
        if not exhausted and planner.drawn_ahead() <= planner.refill_at:
            self._draw_more(got)
            exhausted = planner.draw.exhausted
        progress = self._position.progress
        # A worker that failed at its start has made nothing, so nothing counts as delivered.
        if type(data) is not Failure or not data.at_start:
            progress.delivered(batch.number)
        if queue and delivery_queue.pinner is None and not progress.beyond:
            enough = -1 if exhausted else planner.refill_at
            most = delivery_queue.need_nothing(planner.drawn_ahead() - enough - 1)
            if most > 0:
                self._grant(most, queue, self._engine, progress)
        return data

    def _draw_more(self, got: tuple[Any, Any]) -> None:
        """Draws more indices after a batch was received; an interrupt does not lose the batch."""
        try:
            self._planner.fill()
        except Exception:
            raise  # the sampler's error: in torch, the program gets no batch then
        except BaseException:
            self._delivery_queue.put_back(got)
            raise

    def _has_ended(self) -> NoReturn:
        """The program has received the whole epoch."""
        position, early = self._position, self._planner.next_epoch.early
        position.progress.finished = True
        if early is not None and not early.failed:
            position.memo.progress = early.progress
        self._end_epoch()
        raise StopIteration

    def _end_epoch(self) -> None:
        """Stops the workers unless they are persistent, and warns about worker_init_fn's seeds."""
        found = self._seeded_by_init()
        if not self._persistent_workers:
            self._shutdown_workers()
        elif self._supervisor is not None:
            self._supervisor.warn_of_deaths(at_end=True)
        self._position.ends()
        init_states.warn_of(found)

    def _seeded_by_init(self) -> list[str]:
        """Generators that worker_init_fn seeded from its own number, if warnings are due."""
        asked = self._options.seed_per_sample is not None or self._worker_init_fn is None
        supervisor = self._supervisor
        if asked or supervisor is None or supervisor.reproducible or not self._living():
            return []
        made_with = self._pool.base_seed if isinstance(self._pool, Pool) else 0
        return init_states.look(self._engine.workers(), made_with)
