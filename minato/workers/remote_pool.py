"""``remote=``: the samples of a batch are made by actors on Ray.

A worker thread takes the task of a batch as any worker does. In place of making the samples it
cuts the batch into chunks, sends each to the least loaded actor, and waits. An actor runs the code
of a worker process (``runner.py``) and seeds each sample by its place. So order, seeds, states and
``on_error`` are those of local workers.

Samples travel as messages (``transport/messages.py``): Ray gets bytes and NumPy arrays, no tensors. Each
array of a sample is one, not stacked with others: shapes may differ, and the trainer collates.
"""

from __future__ import annotations

import atexit
import os
import pickle
import platform
import re
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import __version__ as _minato
from .. import worker_info
from .._core import SEED_SET_EPOCH, Engine
from .._records import Task
from ..errors import LoaderFailure, WorkerLost, add_note, program_level, text_of
from ..remote import Ray, connected, cuts
from . import library_threads
from .answers import ERROR, FAILED, OK, PART, SAMPLE, Answer, Entry
from .fetch_or_skip import RAISE, Fatal, FatalIndex
from .job import SENT_TOGETHER, Job
from .process_pool import Unseen
from .runner import Runner
from .threads import PythonPool, stop_all
from .zygote import seed_worker

#: seconds without any actor, after which one is started on the trainer's node that needs no CPU.
#: Threads of the trainer could not seed its generators for a sample, and Ray ends a trainer whose own
#: node is lost. So wherever training can go on, this one can be placed.
ALONE = 60.0
#: seconds that this one may take
HELP = 300.0
#: how often an actor may die as it starts, one after the other, while there is no other; with a larger
#: max_retries as often as that
STARTS = 3
#: seconds between looks at whether the loader ends
LOOK = 0.2

#: a message: the pickle and its buffers, which Ray sends without pickling them
Message = tuple[bytes, list[np.ndarray]]


class _Writable:
    """An array of Ray's memory as one that may be written, as torch wants it. Nothing writes to it:
    samples are copied as they are collated."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


# ---- on the node of an actor ---------------------------------------------------------------


def versions() -> dict[str, str]:
    """What must be the same everywhere."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "NumPy": np.__version__,
        "minato": _minato,
    }


def features() -> set[str]:
    """Vector instructions of the processor."""
    try:
        with open("/proc/cpuinfo") as file:
            line = re.search(r"^(?:flags|Features)\s*:(.*)$", file.read(), re.MULTILINE)
    except OSError:
        return set()
    found = line[1].split() if line is not None else ()
    return {f for f in found if re.match("avx|fma|sse|amx|f16c|asimd|sve|bf16|i8mm", f)}


class Actor:
    """A worker on Ray. Its methods run one at a time."""

    def __init__(self, number: int, starts: int, payload: bytes, job: Job) -> None:
        import ray

        self._node: str = ray.get_runtime_context().get_node_id()
        self.where = f"Ray actor {number} on node {ray.util.get_node_ip_address()} ({self._node[:8]})"
        self._error = ""
        self._user_epoch = job.user_epoch
        library_threads.limit(True)
        seed = seed_worker(job.base_seed, starts, number)
        try:
            vars(job).update(zip(SENT_TOGETHER, pickle.loads(payload), strict=True))
        except Exception as error:
            self._error = (
                f"{self.where} cannot load the dataset: {type(error).__name__}: {error}. Each node "
                "needs the modules of the program: ray.init(runtime_env={'working_dir': '.'}) sends "
                "them, and so does runtime_env in options= of minato.remote.Ray"
            )
            return
        worker_info.begin()
        count, dataset = job.num_workers, job.dataset
        worker_info.be_worker(id=number, num_workers=count, seed=seed, dataset=dataset)
        self._runner = runner = Runner(job, number)
        runner.where += f" ({self.where})"

    def hello(self) -> dict[str, Any]:
        """Tells what the trainer has to know before the first sample."""
        about = {"pid": os.getpid(), "versions": versions(), "features": features()}
        return {"node": self._node, "where": self.where, "error": self._error, **about}

    def make(self, task: Task, user_epoch: int, rows: range | None) -> tuple[Message, float]:
        """Makes some rows of a batch (see ``Runner.part``), or all of it, which it collates. Returns
        the message of the answer, and the seconds that it took."""
        began = time.perf_counter()
        self._tell(task, user_epoch)
        runner = self._runner
        if rows is None or len(rows) == len(task.indices) - task.spares:
            answer: Any = runner.batch(task)
        else:
            answer = self._part(task, rows)
        data, buffers = runner.encoded(answer, task)
        return (data or b"", [np.asarray(b) for b in buffers]), time.perf_counter() - began

    def _tell(self, task: Task, user_epoch: int) -> None:
        """Calls the dataset's set_epoch where the program has called the loader's."""
        if user_epoch == self._user_epoch:
            return
        self._user_epoch, runner = user_epoch, self._runner
        if task.seeded and runner.seeder is not None:
            runner.seeder.seed(task.base_seed, task.epoch, user_epoch, SEED_SET_EPOCH)
        runner.begin_epoch(None, user_epoch - 1)
        if runner.seeder is not None:
            runner.seeder.renew()

    def _part(self, task: Task, rows: range) -> list[Entry]:
        runner, entries = self._runner, list[Entry]()
        failure = runner.init_failure or runner.epoch_failure
        get = runner._getter(task)
        for row in rows:
            try:
                if failure is not None:
                    raise Fatal(failure)
                entries.append((row, SAMPLE, get(row, task.indices[row])))
            except Exception as error:
                entries.append((row, ERROR, error))
        return runner.part(task._replace(kind=PART, extras=entries))


# ---- in the trainer ------------------------------------------------------------------------


@dataclass(eq=False)
class _Member:
    """An actor, as the trainer knows it."""

    number: int
    actor: Any
    hello: Any  # until it has come, the reference to it
    starts: int  # of this number so far
    failed: int = 0  # of these, in a row, that died as they started
    calls: list[Any] = field(default_factory=list)  # not done, in the order in which they run
    alone: bool = False  # it may have no other call
    local: bool = False  # on the trainer's node
    where: str = ""
    pid: int = 0


class _Call(NamedTuple):
    task: Task
    rows: range | None
    tries: int  # actors that have died on it


class Closed(Exception):
    """The loader ends."""


class Fleet:
    """The actors of an iterator. Its worker threads share it."""

    def __init__(self, remote: Ray, job: Job, max_retries: int) -> None:
        self._ray = ray = connected()
        try:
            payload = ray.cloudpickle.dumps([getattr(job, name) for name in SENT_TOGETHER])
        except Exception as error:
            add_note(error, "minato: remote= sends dataset, collate_fn and worker_init_fn, pickled, to the "
                     f"actors, but {self._unpicklable(job)} cannot be pickled. Open files and connections, "
                     "and make locks, in the first sample")  # fmt: skip
            raise
        self.max_retries = max_retries
        self.on_error = job.on_error
        self.chunk = remote.chunk
        self._remote = remote
        self._payload = ray.put(payload)
        nowhere: Any = None  # there is no memory that actors share with the trainer
        self._job = replace(job, memory=nowhere, through=None, num_workers=remote.actors)
        self._here: str = ray.get_runtime_context().get_node_id()
        self._class = ray.remote(Actor)
        errors = ray.exceptions
        self._unplaced = errors.ActorUnschedulableError, errors.ActorPlacementGroupRemoved
        self._lost = (errors.RayActorError, errors.ObjectLostError, errors.NodeDiedError,
                      errors.OutOfMemoryError, *self._unplaced)  # fmt: skip
        self._lock = threading.RLock()
        self._closed = False
        self._warned = False
        self._why = "ray status shows why"  # there may be no actor
        self._looked = 0.0  # when hellos were last looked for
        self._alone = time.monotonic()  # since when no actor was ready
        self.made_s = 0.0  # seconds of the actors
        self.received_s = 0.0  # of the trainer's processor, for receiving
        self.unseen = Unseen()
        self._members = [self._started(number) for number in range(remote.actors)]

    def _unpicklable(self, job: Job) -> str:
        """The part of a job that cannot be pickled, with its class."""
        for name in SENT_TOGETHER:
            try:
                self._ray.cloudpickle.dumps(getattr(job, name))
            except Exception:
                return f"the {name} ({type(getattr(job, name)).__name__})"
        return "one of them"

    def _started(self, number: int, starts: int = 1, failed: int = 0) -> _Member:
        helps = number >= self._remote.actors  # see _help_itself()
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        near = affinity(self._here, soft=not helps, _spill_on_unavailable=not helps)
        given = dict(self._remote.options)
        if helps:
            given = {name: given[name] for name in ("runtime_env",) if name in given}
        asked = {"num_cpus": 0 if helps else self._remote.cpus, "scheduling_strategy": near, **given}
        actor = self._class.options(**asked).remote(number, starts, self._payload, self._job)
        return _Member(number, actor, actor.hello.remote(), starts, failed)

    def close(self) -> None:
        """Ends the actors; threads that wait for them raise Closed."""
        with self._lock:
            self._closed = True
            members, self._members = self._members, []
        if self._ray.is_initialized():
            for member in members:
                self._ray.kill(member.actor)

    def _check(self) -> None:
        if self._closed:
            raise Closed
        if not self._ray.is_initialized():  # any call would start a cluster
            raise RuntimeError("Ray was shut down while the loader used it. Make a new iterator")

    def _look(self) -> None:
        """Takes the hellos that have come."""
        self._looked = time.monotonic()
        waits = {m.hello: m for m in self._members if m.hello is not None}
        if waits:
            for ref in self._ray.wait([*waits], num_returns=len(waits), timeout=0)[0]:
                self._greet(waits[ref])

    def _greet(self, member: _Member) -> None:
        """Takes the hello of an actor."""
        try:
            told = self._ray.get(member.hello)
        except self._unplaced as error:  # its node or placement group is gone
            self._members.remove(member)
            self._why = str(error)
            return
        except self._lost as error:
            serves = any(one.hello is None for one in self._members)
            if member.failed + 1 >= max(STARTS, self.max_retries) and not serves:
                raise WorkerLost(f"Ray actors die as they start: {error}") from error
            self._replace(member, error, member.failed + 1)
            return
        if told["error"]:
            raise ValueError(told["error"])
        mine = versions()
        other = {name: one for name, one in told["versions"].items() if one != mine[name]}
        if other:
            here = ", ".join(f"{name} {mine[name]}" for name in other)
            there = ", ".join(f"{name} {one}" for name, one in other.items())
            raise ValueError(
                f"{told['where']} has {there}, but the trainer has {here}: samples may differ. "
                "Install the same versions on all nodes"
            )
        differ = features() ^ told["features"]
        if differ and not self._warned:
            self._warned = True
            warnings.warn(
                f"the processor of {told['where']} differs from the trainer's "
                f"({', '.join(sorted(differ))}): samples may differ in their last bits",
                stacklevel=program_level(),
            )
        member.hello, member.failed = None, 0
        member.local = told["node"] == self._here
        member.where, member.pid = told["where"], told["pid"]
        self._alone = 0.0

    def _replace(self, member: _Member, error: Exception, failed: int = 0) -> None:
        """Counts the death of an actor, and starts another in its place."""
        with self._lock:
            if member in self._members and not self._closed:
                who = f"pid {member.pid}, {member.where}" if member.pid else f"Ray actor {member.number}"
                again = member.calls and self.max_retries
                self.unseen.latest = (
                    f"DataLoader worker ({who}) exited unexpectedly: {' '.join(str(error).split())} "
                    f"{'Its samples are retried.' if again else 'It is replaced.'}"
                )
                self.unseen.deaths += 1
                self._ray.kill(member.actor)  # it may only be out of reach
                fresh = self._started(member.number, member.starts + 1, failed)
                self._members[self._members.index(member)] = fresh

    def _send(self, call: _Call, user_epoch: int, waits: bool) -> tuple[Any, _Member] | None:
        """Sends a call to the actor with the fewest, one of the trainer's node first. A call on which
        an actor has died gets one for itself: if that dies, too, the call is known to kill. Returns
        the reference to the result, and the actor. waits: until there is one; else None."""
        while True:
            self._check()
            with self._lock:
                if time.monotonic() > self._looked + LOOK / 10:
                    self._look()
                ready = [m for m in self._members if m.hello is None]
                free = [m for m in ready if not m.alone and not (call.tries and m.calls)]
                if free:
                    best = min(free, key=lambda m: (len(m.calls), not m.local))
                    best.alone = call.tries > 0
                    best.calls.append(best.actor.make.remote(call.task, user_epoch, call.rows))
                    return best.calls[-1], best
                if not ready:
                    self._alone = self._alone or time.monotonic()
                    helped = any(m.number == self._remote.actors for m in self._members)
                    if time.monotonic() - self._alone > (HELP if helped else ALONE):
                        self._help_itself(helped)
            if not waits:
                return None
            time.sleep(LOOK / 10)

    def _help_itself(self, helped: bool) -> None:
        """Starts an actor on the trainer's node that needs no room."""
        if helped:
            raise RuntimeError(
                f"remote=: Ray has placed no actor for {ALONE + HELP:.0f} s, not even one on the trainer's "
                f"node that needs no CPU ({self._why})"
            )
        self._alone = time.monotonic()
        warnings.warn(
            f"remote=: Ray has placed no actor for {ALONE:.0f} s ({self._why}). A process "
            "of the trainer's node makes samples until it does",
            stacklevel=program_level(),
        )
        self._members.append(self._started(self._remote.actors))

    def make(self, calls: list[_Call], user_epoch: int, at: list[str]) -> list[Message]:
        """The messages of all calls, in their order. at: shows where they are."""
        results, waiting = dict[int, Message](), list(calls)
        pending: dict[Any, tuple[_Call, _Member]] = {}
        try:
            while waiting or pending:
                if not pending:
                    at[:] = ["no Ray actor is ready"]
                while waiting:
                    sent = self._send(waiting[0], user_epoch, waits=not pending)
                    if sent is None:
                        break
                    pending[sent[0]] = waiting.pop(0), sent[1]
                at[:] = sorted({member.where for _, member in pending.values()})
                self._check()
                for ref in self._ray.wait([*pending], timeout=LOOK)[0]:
                    call, member = pending[ref]
                    try:
                        message, seconds = self._ray.get(ref)
                    except self._lost as error:
                        self._check()
                        self._replace(member, error)
                        guilty = self._was_running(ref, member)
                        if not guilty or call.tries < self.max_retries:
                            with self._lock:
                                self.unseen.retries += 1
                        waiting += self._again(call, member, error) if guilty else [call]
                        del pending[ref]  # but not from the actor's calls
                    else:
                        del pending[ref]
                        with self._lock:
                            self._done(ref, member)
                            self.made_s += seconds
                        results[0 if call.rows is None else call.rows.start] = message
        finally:
            with self._lock:
                for ref, (_, member) in pending.items():
                    self._done(ref, member)
        return [results[row] for row in sorted(results)]

    def received(self, seconds: float) -> None:
        """Counts what a thread took to receive a batch, without waiting."""
        with self._lock:
            self.received_s += seconds

    def _done(self, ref: Any, member: _Member) -> None:
        member.calls.remove(ref)
        member.alone = False

    def _was_running(self, ref: Any, member: _Member) -> bool:
        """Whether a call was the first of those that its dead actor had; others had not begun."""
        with self._lock:
            earlier = member.calls[: member.calls.index(ref)]
        try:
            self._ray.get(earlier)  # they are known, too
        except self._lost:
            return False
        return True

    def _again(self, call: _Call, member: _Member, error: Exception) -> Iterable[_Call]:
        """What to send in place of a call whose actor died. The samples of a chunk go one by one
        then, so that one that kills actors is known."""
        task, rows, tries = call
        if tries < self.max_retries:
            alone = [None] if rows is None else [range(row, row + 1) for row in rows]
            return [_Call(task, part, tries + 1) for part in alone]
        index = task.indices if rows is None else [task.indices[row] for row in rows]
        if rows is not None and len(rows) == 1:
            index = index[0]
        made = f"{member.where} died while it made sample index {text_of(index)}"
        lost = WorkerLost(f"{made}: {error}", 0, index)
        if rows is None or len(rows) > 1 or self.on_error == RAISE:
            raise lost
        indices = [*task.indices]
        indices[rows.start] = FatalIndex(lost)  # an actor makes what comes in its place
        return [_Call(task._replace(indices=indices), rows, tries)]


class _Encoded(NamedTuple):
    """An answer whose message an actor has made."""

    status: int
    data: bytes
    buffers: list[Any]


class _Runner(Runner):
    """The runner of a worker thread whose samples are made by actors."""

    def __init__(self, fleet: Fleet, at: list[str], job: Job, number: int) -> None:
        self._fleet, self._at_nodes, self._user_epoch = fleet, at, job.user_epoch
        self._whole = not cuts(job.dataset, job.collate_fn, job.auto_collation)
        super().__init__(job, number)

    def _begin(self, number: int) -> None:
        """Nothing: actors call worker_init_fn and seed."""

    def begin_epoch(self, dataset: Any, epoch: int) -> Any:
        """Notes what actors have to tell the dataset. The trainer's was told."""
        if epoch >= 0:
            self._user_epoch = epoch + 1
        return dataset

    def batch(self, task: Task) -> Answer:
        """Has the batch made by actors."""
        began, fleet = time.thread_time(), self._fleet
        try:
            if self._whole or type(task.indices) not in (list, tuple):
                (message,) = fleet.make([_Call(task, None, 0)], self._user_epoch, self._at_nodes)
                return _Encoded(OK, *message)
            end, step = len(task.indices) - task.spares, fleet.chunk
            calls = [_Call(task, range(k, min(k + step, end)), 0) for k in range(0, end, step)]
            parts = fleet.make(calls, self._user_epoch, self._at_nodes)
            if len(parts) == 1:  # collated, so its bytes are copied once less here
                return _Encoded(OK, *parts[0])
            parts = [(data, [np.asarray(_Writable(b)) for b in buffers]) for data, buffers in parts]
            self._whole = True  # where collate() asks for the batch again
            try:
                return self.collate(task, parts)
            finally:
                self._whole = False
        except Exception as error:
            return FAILED, LoaderFailure(error)
        finally:
            self._at_nodes.clear()
            fleet.received(time.thread_time() - began)

    def encoded(self, answer: Any, task: Task) -> tuple[bytes | None, list[Any]]:
        """The message of an answer, with its buffers."""
        if type(answer) is _Encoded:
            return answer.data, answer.buffers
        return super().encoded(answer, task)


class RemotePool(PythonPool):
    """The engine, the threads that wait for actors, and the actors."""

    kind = "remote"

    def __init__(
        self, engine: Engine, workers: int, job: Job, remote: Ray, max_retries: int
    ) -> None:
        self.fleet = Fleet(remote, job, max_retries)
        atexit.unregister(stop_all)  # again: it runs before Ray's, which was registered in the meantime
        atexit.register(stop_all)
        self._at = defaultdict[int, list[str]](list)  # where the calls of each thread are
        super().__init__(engine, workers, job, self._runner)
        self.unseen = self.fleet.unseen

    def _runner(self, job: Job, number: int) -> Runner:
        return _Runner(self.fleet, self._at[number], job, number)

    @property
    def seconds(self) -> tuple[float, float]:
        """What making samples took the actors, and receiving them a core of the trainer."""
        return self.fleet.made_s, self.fleet.received_s

    def stack_of(self, number: int) -> str:
        """The actors that a thread waits for."""
        return "\n".join(self._at[number])

    def stop(self) -> None:
        """Ends the actors, then the threads."""
        if self.mine():
            self.fleet.close()
        super().stop()

    def dismiss(self, deadline: float) -> None:
        """At exit: ends the actors, then the threads."""
        if self.mine():
            self.fleet.close()
        super().dismiss(deadline)
