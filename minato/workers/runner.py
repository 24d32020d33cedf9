"""Runs the tasks of a worker, a process or a thread, that need torch's rules.

The worker's loop is in the core (``csrc/py/types/mn_worker_type.c``), which makes rows by itself.
This file handles whole batches, parts of them, collating, new epochs, and samples that fail or do
not fit.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from operator import getitem
from typing import Any, NamedTuple, NoReturn

from torch.utils.data import default_collate
from torch.utils.data.dataloader import _DatasetKind

from .. import _core
from .._records import Task
from ..dataset_calls import attribute, by_sample, fetches_batches
from ..errors import Failure
from ..seeding.find_generators import Growing, OwnSeeds, own_seeds
from ..seeding.order_generators import all_global, put_global
from ..seeding.pitfalls import UNCHANGED, init_states
from ..stateful import Snapshots, make_again
from ..transport import messages
from ..transport.layouts import by_index, is_default_collate, open_layout, proven, why
from ..transport.messages import sendable, sending_ns
from ..worker_info import asked
from .answers import (
    AMISS, BATCH, COLLATE, ERROR, EXHAUSTED, FAILED, FATAL, LEFT_OUT, OK, PART, PLACED, REFUSED,
    REPLACED, RESUME, SAMPLE, STATED, Answer, Entry, encode, parted,
)  # fmt: skip
from .fetch_or_skip import (
    OF_COLLATE, OF_SAMPLE, RAISE, REPLACE, AllLeftOut, Fatal, Tolerant, Unseeded, fetched, made,
    position_of, seed_place, split_spares,
)  # fmt: skip
from .job import Job


class _Placed(NamedTuple):
    """Stands for a batch that was written into rows."""

    rows: int
    objects: list[list[Any]]  # by row: the leaves that a row cannot hold


class Runner:
    """Does the tasks that the core's loop passes to Python."""

    has_copy = True  # of the dataset, which is told the epoch, too

    def __init__(self, job: Job, number: int, not_loaded: Exception | None = None) -> None:
        """not_loaded: the reason why there is no dataset; then every task fails."""
        self.job = job
        self.where = f"in DataLoader worker process {number}"
        self.seeder: Any = None
        self.mark: Any = lambda row: None  # Worker.mark, once there is one
        self.at: Any = lambda row: None  # Worker.at, likewise
        self.place: Any = None  # Worker.place, likewise
        #: what samples come from, see Job.source(), and how they are asked for
        self.dataset: Any = None
        self.auto_collation = job.auto_collation
        #: None: the first sample that fails ends its batch
        self.tolerant = None if job.on_error == RAISE else Tolerant(job.on_error, self._failure)
        self.probing = job.probing  # until the sending of one batch's samples was measured
        self.learns = job.places  # until the layout of its samples was found
        self.sending: tuple[int | bytes, ...] = ()  # appended to the next answer: cost or layout
        self.reason = ""  # why default_collate has failed
        self.asked: Any = None  # indices of the batch that is being fetched
        self.row: tuple[int, ...] = ()  # the row of the sample that is being fetched
        self.init_failure: Failure | None = None
        self.epoch_failure: Failure | None = None  # of the dataset's set_epoch, in this epoch
        self.prepared = False  # set up, but for the fetcher, which each epoch makes anew
        self.exhausted = False
        self.snapshots: Snapshots | None = None
        self.fetcher: Any = None
        self.begin: bytes | None = None  # state of the dataset at the start of an epoch
        self.again = 0  # delivered batches of a process before, which this one makes again
        self.init_states = UNCHANGED
        try:
            if not_loaded is not None:
                raise not_loaded
            self._begin(number)
            self.dataset = job.source()  # after worker_init_fn
            if self.seeder is not None:
                self.seeder.share(job.ranks)
            if job.dataset_kind == _DatasetKind.Iterable:
                self.snapshots = Snapshots(self.where)
            self.prepared = True
            self._make_fetcher(job.starts[number] if job.starts else None)
        except Exception as error:
            self.init_failure = self._not_begun(error)

    def _begin(self, number: int) -> None:
        """Calls worker_init_fn, then finds the generators to seed."""
        job, before = self.job, None
        if job.worker_init_fn is not None:
            if job.seed_per_sample:
                before, states = own_seeds(job.dataset, job.collate_fn), all_global()
            self._init(number)
            if job.seed_per_sample:
                self.init_states = init_states(states)
        if job.seed_per_sample:
            self.seeder = self._make_seeder(before)

    def _make_seeder(self, before: OwnSeeds | None) -> Any:
        """before: the generators' own seeds before worker_init_fn; None: there is no such function."""
        job = self.job
        tell = job.notes.moves if job.notes is not None and job.num_workers > 1 else None
        of = job.dataset, job.collate_fn
        return Growing(*of, before=before, tell=tell, of_loader=job.generator).seeder

    def _init(self, number: int) -> None:
        """Calls worker_init_fn. It must not change default_collate: samples of several workers are
        collated as in the trainer."""
        job = self.job
        assert job.worker_init_fn is not None
        job.worker_init_fn(number)
        if job.collates_by_default and not is_default_collate(job.collate_fn):
            raise RuntimeError(
                "worker_init_fn has changed what default_collate makes of tensors or numbers "
                "(torch.utils.data._utils.collate.default_collate_fn_map), in workers only. "
                "Change it in the program, before the loader is iterated, or give the loader "
                "scheduling='static', with which each worker collates its own batches"
            )

    def _make_fetcher(self, start: tuple[bytes | None, int] | None = None) -> None:
        job, snapshots = self.job, self.snapshots
        # worker_init_fn may have changed default_collate in this process
        places = job.places and is_default_collate(job.collate_fn)
        by_default = self._by_default if is_default_collate(job.collate_fn) else job.collate_fn
        self.collate_fn: Callable[[Any], Any] = self._into_rows if places else by_default

        def create() -> Any:
            return _DatasetKind.create_fetcher(
                job.dataset_kind, self.dataset, job.auto_collation, self.collate_fn, job.drop_last
            )

        if start is not None and snapshots is not None:
            self.fetcher = snapshots.go_on(start[0], job.dataset, create, put_global)
        elif snapshots is not None:
            self.fetcher, self.begin = snapshots.epoch(job.dataset, create)
        else:
            self.fetcher = create()
        if snapshots is not None:
            snapshots.watch(job.dataset, self.fetcher)
        self.again = 0 if start is None else start[1]
        self.exhausted = False

    def _by_default(self, samples: Any) -> Any:
        """Calls default_collate. If it fails, notes why."""
        try:
            return self.job.collate_fn(samples)
        except Exception:
            self.reason = why(samples, self._name)
            raise

    def _name(self, row: int) -> str:
        """The name of a sample that is being collated: its index, if that is known."""
        indices, amiss = self.asked, self.tolerant.amiss if self.tolerant is not None else []
        if isinstance(indices, (list, tuple)) and not amiss:
            return by_index(indices)(row)
        return f"place {row} of the batch"

    def _into_rows(self, samples: Any) -> Any:
        """Stands in for default_collate: writes the samples of a batch to its rows. Samples that do
        not fit are collated. If the trainer may not know the layout yet, the answer carries it."""
        if self.tolerant is not None and self.tolerant.amiss:  # failures travel in a message
            return self._by_default(samples)
        objects: list[list[Any]] = []
        if self.place(samples, objects):
            return _Placed(len(samples), objects)
        data = self._by_default(samples)
        if self.learns and (found := proven(samples, data)) is not None:
            self.learns, self.sending = False, (found,)
        return data

    def rows(self, task: Task) -> list[Entry]:
        """The entries of an envelope of rows, with exceptions wrapped."""
        return [
            self._failed(row, what, obj, task) if what in (ERROR, FATAL) else (row, what, obj)
            for row, what, obj in task.extras or ()
        ]

    def _failed(self, row: int, what: int, error: BaseException, task: Task) -> Entry:
        """The entry of a row whose sample could not be made."""
        if self.tolerant is None or what == FATAL or isinstance(error, Fatal):
            return row, ERROR, self._failure(error)
        indices = split_spares(task.indices, task.spares)
        try:
            other, amiss = self.tolerant.instead(row, error, *indices, self._getter(task))
        except Exception as last:
            return row, ERROR, self._failure(last)
        if not other:
            return row, LEFT_OUT, amiss.failure
        return row, REPLACED, (amiss.failure, amiss.instead, *other)

    def _getter(self, task: Task) -> Callable[[int, Any], Any]:
        """Returns a function that makes the sample of a row from an index."""
        seeder = self.seeder if task.seeded and self.seeder is not None else Unseeded
        one = partial(getitem, by_sample(self.dataset, self.auto_collation))
        if self.tolerant is not None:
            one = partial(self.tolerant.one, one)

        def get(row: int, index: Any) -> Any:
            at = seed_place(position_of(task), row, index)
            return made(seeder, (task.base_seed, task.epoch, at, OF_SAMPLE), one, index)

        return get

    def encoded(self, answer: Any, task: Task) -> tuple[bytes | None, list[Any]]:
        """The message of an answer to this task, with its buffers. With ``on_error``, a sample that
        cannot be pickled may count as one that could not be made. It does if it keeps the batch
        from being pickled, or from being collated by default."""
        tolerant, rows = self.tolerant, isinstance(answer, list)
        if tolerant is None or answer is None:
            return encode(answer, self.where, task.kind)
        whole_failed = not rows and answer[0] == FAILED and len(answer) == 2
        if not whole_failed or not is_default_collate(self.job.collate_fn):
            try:
                return messages.dumps(answer, rows)
            except Exception:
                pass
        tolerant.check = messages.dumps
        try:
            if not rows:
                answer = self.batch(task)
            elif task.kind != PART:
                answer = [self._checked(entry, task) for entry in answer]
        finally:
            tolerant.check = None
        return encode(answer, self.where, task.kind)

    def _checked(self, entry: Entry, task: Task) -> Entry:
        """Checks that an entry can be pickled. A sample that can be collated, but not pickled,
        stays as it is."""
        row, what, obj = entry
        if what not in (SAMPLE, REPLACED):
            return entry
        sample = obj if what == SAMPLE else obj[2]
        try:
            messages.dumps([sample], True)
        except Exception as error:
            try:
                default_collate([sample])
            except Exception:
                return self._failed(row, ERROR, error, task)
        return entry

    def part(self, task: Task) -> list[Entry]:
        """The entries of rows that another worker may collate."""
        return [
            (row, what, obj) if _may_be_sent(what, obj) else (row, REFUSED, None)
            for row, what, obj in self.rows(task)
        ]

    def collate(self, task: Task, parts: list[Any]) -> Answer:
        """Does the same as ``batch``, from samples that the batch's parts have fetched. A sample's
        failure is followed by its row. If some sample could not be sent, fetches all of them again:
        with their seeds they are the same."""
        try:
            entries = [(row, what, obj) for part in parts for row, what, obj in messages.loads(*part)]
        except Exception:  # no memory for a part, a class that is missing here, or damage
            entries = []
        for row, what, obj in entries:
            if what == ERROR:
                return FAILED, obj, row  # the first in the order of rows, as in torch
        whole = len(entries) == len(task.indices) - task.spares
        if not whole or any(what == REFUSED for _, what, _ in entries):
            self.sending = (-1,)
            return self.batch(task)
        samples, amiss = parted(entries)
        if not samples:
            return AMISS, None, amiss
        try:
            seeder = self.seeder if task.seeded and self.seeder is not None else Unseeded
            place = task.base_seed, task.epoch, self._number_of(task), OF_COLLATE
            data = made(seeder, place, self.job.collate_fn, samples)
            return (AMISS, (OK, data), amiss) if amiss else (OK, data)
        except Exception as error:
            return FAILED, self._failure(error)

    def _not_begun(self, error: Exception) -> Failure:
        failure = Failure.of(error, self.where)
        failure.at_start = True
        return failure

    def _failure(self, error: BaseException) -> Failure:
        where, self.reason = f"{self.where}. minato: {self.reason}" if self.reason else self.where, ""
        return error.failure if isinstance(error, Fatal) else Failure.of(error, where)

    def batch(self, task: Task) -> Answer:
        """Fetches and collates. A sample's failure is followed by its row."""
        failure = self.init_failure or self.epoch_failure
        if failure is not None:
            return FAILED, failure
        if self.exhausted:
            return EXHAUSTED, asked()
        self.row, self.reason = (), ""
        self.asked = task.indices if self.job.dataset_kind == _DatasetKind.Map else None
        try:
            if isinstance(task.indices, _IndexError):
                raise task.indices.error
            if self.again:
                self._make_again(task.indices)
            data = self._fetch(task)
            if type(data) is _Placed:
                return PLACED, *data
            sending, self.sending = self.sending, ()
            if self.tolerant is not None and self.tolerant.amiss:
                return AMISS, (OK, data, *sending), self.tolerant.amiss
            return OK, data, *sending
        except AllLeftOut as left_out:
            return AMISS, None, left_out.amiss
        except StopIteration as error:
            if self.job.dataset_kind == _DatasetKind.Iterable:
                self.exhausted = True
                return EXHAUSTED, asked()
            return FAILED, self._failure(error), *self.row
        except Exception as error:
            return FAILED, self._failure(error), *self.row

    def begin_epoch(self, dataset: Any, epoch: int) -> Any:
        """Calls set_epoch of the runner's copy of the dataset, if it has that; not for -1. Returns the
        source of the epoch's samples: dataset, what now reads it through the cache, or, if set_epoch failed,
        a stand-in that raises its error for each; None if nothing has changed."""
        if epoch < 0 and self.job.through is None:
            return None
        try:
            if epoch >= 0 and self.has_copy:
                self.epoch_failure = None
                # The loader looks it up alike: a dataset may forward it by __getattr__.
                tell = attribute(self.job.dataset, "set_epoch")
                if callable(tell):
                    tell(epoch)
            if self.job.through is not None:
                self.dataset = self.fetcher.dataset = self.job.source(changed=True)
                dataset = by_sample(self.dataset, self.auto_collation)
        except Exception as error:
            self.epoch_failure = Failure.of(error, self.where)
            if epoch >= 0:
                self.epoch_failure.note = (
                    f"minato: set_epoch({epoch}) of the dataset raised this in a worker, where the "
                    "dataset is a copy, so the worker makes no sample of that epoch. Let set_epoch "
                    "work in worker processes, or use num_workers=0"
                )
        failure = self.init_failure or self.epoch_failure
        return dataset if failure is None else _Refusing(failure)

    def _make_again(self, index: Any) -> None:
        """Makes again what was delivered since the snapshot that this worker resumes from, failures
        included."""
        self.fetcher.collate_fn, again = self.job.collate_fn, self.again
        self.again = 0
        for _ in range(again):
            make_again(self.fetcher, index)
        self.fetcher.collate_fn = self.collate_fn

    def stated(self, answer: Answer) -> Answer | None:
        """The answer with the state of the dataset; None if there is no state. After a failure none
        is taken: only making the batch again restores what the failure left behind."""
        snapshots, status = self.snapshots, answer[0]
        if snapshots is None or status == FAILED:
            return None
        told = snapshots.taken(at_any_cost=status == EXHAUSTED)
        if status == EXHAUSTED:
            snapshots.forget()
        return None if told is None else (STATED, answer, told)

    def _fetch(self, task: Task) -> Any:
        job, seeder = self.job, self.seeder if task.seeded else None
        if seeder is None:
            alone = job.dataset_kind == _DatasetKind.Map and not job.auto_collation
            if not job.splits and not alone and self.tolerant is None:
                return self.fetcher.fetch(task.indices)  # costs of its samples are not needed
            seeder = Unseeded
        place = (task.base_seed, task.epoch, self._number_of(task), OF_COLLATE)
        return made(seeder, place, self.collate_fn, self._samples(seeder, task))

    def _number_of(self, task: Task) -> int:
        """What the seeds of a batch's collate_fn and ``__getitems__`` are made from."""
        return task.position if self.job.by_position else task.number

    def _samples(self, seeder: Any, task: Task) -> Any:
        job, indices = self.job, task.indices
        place = task.base_seed, task.epoch, self._number_of(task), position_of(task)
        spares: Any = ()
        if self.tolerant is not None:
            indices, spares = split_spares(indices, task.spares)
            if not job.auto_collation:  # the indices are in a list only because of the spares
                indices = indices[0] if job.on_error == REPLACE else indices
        told = self._at, self.mark
        data = fetched(seeder, self, indices, place, told, self.tolerant, spares)
        self.row = ()
        if self.probing and job.auto_collation and not fetches_batches(job.dataset):
            self.probing = False
            self.sending = (sending_ns(data),)
        return data

    def _at(self, row: int) -> None:
        self.row = (row,)
        if self.tolerant is not None:  # after a failed sample, rows do not follow one by one
            self.at(row)

    def resume(self) -> Answer:
        """A new epoch of persistent workers: torch makes a new fetcher."""
        self.begin = None
        if not self.prepared:  # nothing is tried again
            return OK, None
        try:
            self._make_fetcher()
            self.init_failure = None
        except Exception as error:
            self.init_failure = self._not_begun(error)
        return (OK, None) if self.begin is None else (STATED, (OK, None), self.begin)

    def drop_iterator(self) -> None:
        """Destroys the dataset's iterator, so that the code in its ``finally`` blocks runs. This
        object itself is part of a reference cycle."""
        self.fetcher = None
        if self.snapshots is not None:
            self.snapshots.forget()


class _IndexError:
    """Stands for indices that could not be unpickled here."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __iter__(self) -> NoReturn:
        raise self.error  # the core iterates over indices to find one

    def __getitem__(self, row: Any) -> NoReturn:
        raise self.error


def load_index(data: bytes) -> Any:
    """A batch's indices, or an object that raises the error of unpickling them."""
    try:
        return pickle.loads(data)
    except Exception as error:
        return _IndexError(error)


def _may_be_sent(what: int, obj: Any) -> bool:
    """Whether a sample is the same after it was sent to another worker."""
    sample = obj[2] if what == REPLACED else obj
    return what not in (SAMPLE, REPLACED) or sendable(sample)


def worker_of(job: Job, number: int, runner: Runner, thread: bool = False) -> _core.Worker:
    """The core's loop of a worker, connected with its runner. thread: the worker is a thread of the
    trainer."""
    dataset = by_sample(runner.dataset, job.auto_collation)
    worker = _core.Worker(
        job.memory.segment,
        number,
        _Refusing(runner.init_failure) if runner.init_failure else dataset,
        runner.seeder,
        open_layout,
        load_index,
        partial(runner.begin_epoch, dataset) if runner.has_copy or job.through is not None else None,
        job.user_epoch,
        runner.tolerant is not None,
        thread,
    )
    runner.mark, runner.at = worker.mark, worker.at
    runner.place = worker.place
    return worker


def serve(worker: _core.Worker, runner: Runner) -> bool:
    """Does tasks. Returns True when the loader stops, False after a second at most without a task."""
    while task := worker.next():
        if task.kind == RESUME:
            answer: Any = runner.resume()
        elif task.kind == BATCH:
            answer = runner.batch(task)
            if (stated := runner.stated(answer)) is not None:
                answer = stated
            elif answer[0] == PLACED and answer[1] == task.nrows and not answer[2]:
                answer = None  # its rows say it all
        elif task.kind == COLLATE:
            answer = runner.collate(task, worker.parts())
        elif task.kind == PART:
            answer = runner.part(task)
        else:
            answer = runner.rows(task)
        data, buffers = runner.encoded(answer, task)
        stated = None
        del task, answer  # large samples must not outlive their sending
        if not worker.finish(data, buffers):
            return True
        del data, buffers
    return task is False


class _Refusing:
    """Stands for a dataset that worker_init_fn or set_epoch could not prepare: each sample raises
    that error."""

    def __init__(self, failure: Failure) -> None:
        self._failure = failure

    def __getitem__(self, index: Any) -> Any:
        raise Fatal(self._failure)
