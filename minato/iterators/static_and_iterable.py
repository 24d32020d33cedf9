"""torch's dispatch: batch i on worker i mod n, with torch's random streams."""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import weakref
from dataclasses import dataclass
from typing import Any

from torch.utils.data import _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from .. import worker_info
from .._core import Block
from .._dynamo import eager
from .._records import Epoch
from ..dataset_calls import warn_of_forwarded_getitems
from ..device.send_ahead import Pinning
from ..errors import Failure, LoaderFailure, WorkerLost, describe_death, warn
from ..sampler_indices import as_given
from ..transport.layouts import EngineTransport, Layout, is_default_collate
from ..workers.answers import EXHAUSTED, FAILED, OK
from ..workers.fetch_or_skip import RAISE, REPLACE, Ahead, Spares
from .failure_limits import Amended, note, unread
from .iterator import WHOLE, MinatoIterator, Queue
from .receiver import placed_batch, whole_batch
from .supervisor import stay_at_exit

#: stands for a batch that an earlier process has delivered
_PASSED = object()


class StaticIterator(MinatoIterator):
    """torch's dispatch: batch i on worker i mod n, with torch's random streams.

    Used for ``scheduling="static"`` and iterable datasets. A worker fetches a batch as in torch.
    If default_collate would copy its samples into one tensor per field, the worker copies them
    into the rows of the batch's block instead. The program receives rows without a copy.
    """

    _balanced = False

    def _compose(self, loader: Any) -> None:
        self._blocks: dict[int, _Sent] = {}  # by batch number
        self._came: dict[int, _Sent] = {}  # given to torch's dispatch and not delivered yet
        self._markers: list[Block] = []  # resume markers of a new epoch, by worker
        self._last_words: dict[int, bytes] = {}  # state of a worker's dataset at its end
        by_default = loader._auto_collation and is_default_collate(loader.collate_fn)
        self._shape = self._position.memo.shape if by_default else WHOLE
        self._places = not self._shape.whole
        self._form = EngineTransport(self._shape)
        self._dumps = _Wanted() if self._iterable else pickle.dumps
        replaces = self._options.on_error == REPLACE
        self._spares = Spares(loader._auto_collation) if replaces else None
        if loader._auto_collation and not self._iterable and self._options.on_error == RAISE:
            warn_of_forwarded_getitems(loader.dataset)

    def _start_workers(self, loader: Any) -> None:
        # each worker's window, the marker of a new epoch, and some for batches read late
        blocks = (self._prefetch_factor + 4) * self._num_workers
        self._engine = self._new_engine(loader, blocks=blocks)
        super()._start_workers(loader)

    def _begin(self, loader: Any, first_iter: bool) -> None:
        if first_iter:
            self._start_workers(loader)
        self._index_queues: list[Any] = [_IndexQueue(self, w) for w in range(self._num_workers)]
        self._send_idx = 0
        self._rcvd_idx = 0
        if self._spares is not None:
            self._spares.clear()
        self._task_info: dict[int, tuple[Any, ...]] = {}
        self._tasks_outstanding = 0
        self._workers_status = [True] * self._num_workers
        self._workers_num_tasks = [0] * self._num_workers
        self._came.clear()
        self._last_words.clear()
        self._unasked = 0  # workers whose dataset has come to its end and never asked which it is in
        resumed = self._position.memo.resume is not None
        with self._position.epoch_begins(loader, first=first_iter):
            _BaseDataLoaderIter._reset(self, loader, first_iter)
            self._epoch = Epoch(
                self._position.epoch,
                self._position.seed,
                self._dumps,
                user_epoch=self._position.dataset_epochs.for_workers(self._progress.user_epoch),
            )
            self._sampler_iter = self._position.watched(self._sampler_iter, self._progress)
            if self._spares is not None:
                self._sampler_iter = Ahead(self._sampler_iter)
            self._earlier = self._progress.copy()
            first = 0
            if self._position.starts is not None:  # workers resume from states, nothing is repeated
                first, self._earlier.by_worker = self._progress.turn(), [0] * self._num_workers
            turns = (*range(first, self._num_workers), *range(first))
            self._worker_queue_idx_cycle = itertools.cycle(turns)
            if not first_iter:
                self._restart(loader) if resumed else self._resume()
            for _ in range(self._prefetch_factor * self._num_workers):
                self._try_put_index()

    def _restart(self, loader: Any) -> None:
        """Starts new workers, because other random streams are needed."""
        self._shutdown_workers()
        self._blocks.clear()
        self._markers.clear()
        self._start_workers(loader)

    @eager
    def _next_data(self) -> Any:
        """torch's method. Batches that an earlier process delivered are made again and discarded,
        if the workers' random streams and positions cannot be restored otherwise."""
        if self._living():  # after the end, torch keeps raising StopIteration
            self._engine.wait_begins()
            self._supervisor.served.watch.look(self._engine)
        try:
            if self._pinner is not None and self._living():
                self._read_ahead()
            while (data := super()._next_data()) is _PASSED:  # type: ignore[no-untyped-call]
                pass
        except StopIteration:
            self._progress.finished = True
            for worker, words in self._last_words.items():
                self._progress.kept[worker].came(words)
            if self._dataset_kind == _DatasetKind.Map:
                self._progress.check_end(self._send_idx)
            self._position.ends()
            self._warn_of_copies()
            raise
        finally:
            if self._living():
                self._engine.wait_ends(not self._progress.finished, False)
                if self._supervisor.trace is not None:
                    self._supervisor.trace.news()
        return data

    def _warn_of_copies(self) -> None:
        """Warns if each worker seems to have delivered the whole iterable dataset. Does not warn if
        worker_init_fn may have given each worker a share. A queue or a live stream may be right
        without shares, so this does not raise."""
        memo, counts = self._position.memo, self._progress.by_worker or [0]
        alike = len(counts) > 1 and counts[0] > 0 and len(set(counts)) == 1
        alike = alike and self._unasked == len(counts) and self._worker_init_fn is None
        if alike and memo.warns_of("copies"):
            with contextlib.suppress(UserWarning):
                warn(worker_info.shares_warning(self._dataset, len(counts), counts[0]))

    def _resume(self) -> None:
        """Sends torch's resume markers: workers finish the batches left from the last epoch (which
        advances their random streams) and make new fetchers. Those batches are discarded."""
        engine = self._engine
        markers = self._markers  # may hold markers from an interrupted call
        workers, epoch = range(self._num_workers), self._epoch
        markers += [_placed(engine.submit(epoch, w, None, None, None, 0)) for w in workers]
        for number, sent in list(self._blocks.items()):
            if sent.answer is None:
                self._supervisor.wait_for(sent.block, functools.partial(engine.poll, sent.block))
                engine.retire(sent.block)
            del self._blocks[number]
        while markers:
            block, worker = markers[0], self._num_workers - len(markers)
            self._supervisor.wait_for(block, functools.partial(engine.poll, block))
            del markers[0]
            try:
                if worker >= 0 and self._iterable and not engine.lost(block):
                    _, stated = whole_batch(engine, block)
                    if stated is not None:
                        self._progress.kept[worker].came(stated)
            finally:
                engine.retire(block)

    def _send(self, worker: int, number: int, index: Any) -> None:
        """Sends a batch to a worker."""
        index = as_given(index)  # errors name its samples later
        layout = None if self._form.makes_whole(index) else self._shape.layout
        sent, spares = index, []
        lists = isinstance(index, (list, tuple)) or not self._auto_collation
        if self._spares is not None and lists:
            spares = self._spares.of(index, self._sampler_iter.following)
            self._spares.passed(index)
            sent = [*index, *spares] if self._auto_collation else [index, *spares]
        core = None if layout is None else layout.core
        block = self._engine.submit(self._epoch, worker, number, sent, core, len(spares))
        self._blocks[number] = _Sent(_placed(block), worker, index, layout)

    def _get_data(self) -> tuple[int, Any]:
        """Returns the batch that finished first, as torch's result queue would. torch calls
        this."""
        while True:
            number = self._first_done()
            sent = self._blocks[number]
            ended = not self._workers_status[sent.worker]  # it has nothing more to send
            self._read(number, ended)
            answer: Any = sent.answer
            if isinstance(answer[1], Pinning):
                answer = OK, answer[1].result(self._timeout)
            del self._blocks[number]
            status, data, *_ = answer
            if status != EXHAUSTED:
                break
            if not ended:
                self._unasked += data is False
                if sent.stated is not None:
                    self._last_words[sent.worker] = sent.stated
                if not self._persistent_workers:
                    self._engine.end_worker(sent.worker, True)  # it need not wait for the other workers
                return number, _utils.worker._IterableDatasetStopIteration(sent.worker)
        if status == FAILED and self._dataset_kind == _DatasetKind.Map:
            data.note_first(note(number, sent.index))
        self._got, sent.answer = number, None
        self._came[number] = sent
        return number, data

    def _read(self, number: int, ended: bool = False) -> None:
        """Reads a batch that is done: stores its data, or the error that reading raised, and
        frees its block. Submits it for pinning if needed."""
        sent = self._blocks[number]
        if sent.answer is not None:
            return
        sent.done_ns = self._engine.poll(sent.block)
        try:
            if (trace := self._supervisor.trace) is not None:
                trace.block(self._progress.number, sent.index, sent.block)
            sent.answer, sent.stated = (EXHAUSTED, None), None
            if not ended:
                sent.answer, sent.stated = placed_batch(
                    self._engine, self._shape, sent.block, sent.layout
                )
        except Exception as error:
            failed = LoaderFailure(error) if self._iterable else unread(error, number, sent.index)
            sent.answer = FAILED, failed  # in the batch's place: torch's dispatch expects one
        except BaseException:
            del self._blocks[number]
            raise
        finally:
            self._engine.retire(sent.block)
        if type(sent.answer[1]) is Amended:
            sent.answer[1].name(number, sent.index, self._auto_collation)
        elif self._pinner is not None and sent.answer[0] == OK:
            named = functools.partial(note, number, sent.index)
            sent.answer = OK, self._pinner.submit(sent.answer[1], named)

    def _read_ahead(self) -> None:
        """Submits finished batches for pinning: the one that is asked for and the one after."""
        assert self._pinner is not None
        for number in self._done()[: self._pinner.most()]:
            sent = self._blocks[number]
            if sent.answer is None and not self._engine.lost(sent.block):
                if self._workers_status[sent.worker]:
                    self._read(number)

    def _done(self) -> list[int]:
        """Numbers of finished batches, in the order in which they finished. A batch that finishes
        during the call only appears together with its worker's earlier batches. Otherwise the end
        of a worker's stream could be seen before its last batch."""
        found = [(sent.done_ns or self._engine.poll(sent.block), number)
                 for number, sent in reversed(self._blocks.items())]  # fmt: skip
        return [number for done_ns, number in sorted(found) if done_ns]

    def _first_done(self) -> int:
        engine = self._engine
        numbers = self._done()
        if not numbers:
            self._supervisor.wait_for(None, lambda: bool(self._done()), self._indices_of)
            numbers = self._done()
        batch = self._blocks[numbers[0]]
        lost = engine.lost(batch.block) if batch.answer is None else []
        if lost and self._workers_status[batch.worker]:
            stay_at_exit()
            loss = lost[0]
            died = describe_death(loss.pid, loss.status)
            self._supervisor.deaths_reported = engine.deaths()
            raise WorkerLost(died, loss.pid, batch.index, loss.status)
        return numbers[0]

    def _indices_of(self, number: int) -> Any:
        """Indices of a batch, for the error of a timeout."""
        map_style = self._dataset_kind == _DatasetKind.Map
        return self._blocks[number].index if map_style and number in self._blocks else None

    def _process_data(self, data: Any, worker: int | None = None) -> Any:
        """Counts a received batch and returns its data. torch calls this; 2.6 passes no worker."""
        number = self._rcvd_idx - 1 if self._in_order else self._got
        sent = self._came.pop(number)
        self._workers_num_tasks[sent.worker] -= 1
        self._try_put_index()
        if isinstance(data, Failure) and data.at_start:
            self._position.errors += 1
            data.reraise()
        if self._earlier.takes(number, sent.worker):
            return _PASSED
        self._progress.delivered(number, sent.worker)
        if self._iterable:
            self._progress.kept[sent.worker].delivered(sent.stated)
        if type(data) is Amended:
            amended = data
            data = self._allowed(amended)
            return _PASSED if amended.empty else data
        if isinstance(data, Failure):
            self._position.errors += 1
            data.reraise()
        return data

    def _finished(self) -> int:
        here = sum(len(info) == 2 for info in self._task_info.values())  # received out of order
        if not self._living():
            return here
        poll = self._engine.poll
        done = (s.answer is not None or poll(s.block) > 0 for s in self._blocks.values())
        return here + sum(done)

    def _waiting(self, worker: int) -> int:
        """Batches of a worker's that it has not begun."""
        poll = self._engine.poll if self._living() else lambda block: 1
        sent = [s for s in self._blocks.values() if s.worker == worker and s.answer is None]
        return max(0, sum(not poll(s.block) for s in sent) - 1)

    def _mark_worker_as_unavailable(self, worker_id: int, shutdown: bool = False) -> None:
        """torch calls this when a worker has nothing more to send."""
        self._workers_status[worker_id] = False


@dataclass
class _Sent:
    """A batch in a worker's own queue."""

    block: Block
    worker: int
    index: Any
    layout: Layout | None  # of its rows, if it may use them
    answer: Any = None  # (status, data) once read; its block is then free
    done_ns: int = 0
    stated: bytes | None = None  # state of the worker's dataset


def _placed(block: Block | None) -> Block:
    if block is None:
        raise RuntimeError(
            "more batches are in flight than the engine can hold; lower prefetch_factor"
        )
    return block


class _Wanted:
    """Pickles the indices of an iterable dataset, which only say how many samples are wanted. The
    pickles are cached."""

    def __init__(self) -> None:
        self._pickled: dict[int, bytes] = {}  # by number of samples

    def __call__(self, index: Any) -> bytes:
        size = len(index) if type(index) is list else -1
        if size not in self._pickled:
            self._pickled[size] = pickle.dumps(index)
        return self._pickled[size]


class _IndexQueue(Queue):
    """Takes the place of a worker's index queue in torch's dispatch."""

    def __init__(self, iterator: StaticIterator, worker: int) -> None:
        self._iterator = me = weakref.ref(iterator)
        super().__init__(lambda: it._waiting(worker) if (it := me()) is not None else 0)
        self._worker = worker

    def put(self, item: Any) -> None:
        iterator = self._iterator()
        if iterator is not None and item is not None:
            iterator._send(self._worker, *item)
