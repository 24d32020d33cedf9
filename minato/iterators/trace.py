"""``MINATO_TRACE=file``: a timeline of loading, for Perfetto or chrome://tracing.

The file is a JSON array of trace events (the Trace Event Format). A group ("process") is one set of
workers. Its metadata says what tells its loader from others, for ``minato ranks``. It has a track
for each worker, one for the trainer's waits in ``next()`` and one for decisions. A span in a
worker's track is a sample, or a batch that one worker made whole. The collating of a batch that
several workers have fetched is a span, too. Batches are asynchronous spans from the start of the
first sample to the end of the last. An arrow leads from the task that completed a batch to the wait
that it ended. Times are microseconds of the monotonic clock. Tracing costs the trainer some seven
microseconds a sample.

Events are written with the batch that they belong to. A program that dies leaves an array without
its closing bracket, which the format allows. ``%p`` in the name becomes the process id. If the file
exists, ``.PID`` is appended, so ranks and later runs do not write to each other's files.
"""

from __future__ import annotations

import atexit
import io
import itertools
import json
import math
import os
import time
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from .._core import start_reasons
from ..epoch_progress import length_of
from ..errors import program_level, text_of
from ..observe.totals import name_of
from ..seeding.order_generators import batch_size_of, sampler_of
from ..workers.answers import BATCH, COLLATE

if TYPE_CHECKING:
    from .._core import Block, Engine
    from .loader_memo import Memo
    from .failure_limits import Amended

#: of the Trace Event Format
Event = dict[str, Any]

#: reasons for starting a task that are decisions; the others are the steady window
DECISIONS = ("early", "ahead", "finale")
#: tracks of a group: two besides its workers, which come after them
WAITS, CHOICES, FIRST_WORKER = 1, 2, 10

_writer: Writer | None = None


class Writer:
    """The file of this process. It is unbuffered: a fork would write a copied buffer again."""

    def __init__(self, name: str) -> None:
        self.pid = os.getpid()
        self.file = _open(name.replace("%p", str(self.pid)), self.pid)
        self.numbers, self.arrows = itertools.count(1), itertools.count(1)
        self.before = "[\n"
        atexit.register(self.close)

    def write(self, events: list[Event]) -> None:
        """Appends events. They are in the file when this returns."""
        lines = ",\n".join(json.dumps(e, separators=(",", ":")) for e in events)
        if lines:
            self._append(self.before + lines)
            self.before = ",\n"

    def _append(self, text: str) -> None:
        if self.file.closed or self.pid != os.getpid():
            return
        data = memoryview(text.encode())
        try:
            while data:
                data = data[self.file.write(data) :]
        except OSError as error:  # a full disk ends the trace, not the training
            self.file.close()
            warnings.warn(f"MINATO_TRACE: {error}; the trace ends here", stacklevel=program_level())

    def close(self) -> None:
        self._append("\n]\n" if self.before != "[\n" else "[]\n")
        if self.pid == os.getpid():
            self.file.close()


def _open(name: str, pid: int) -> io.FileIO:
    try:
        return io.FileIO(name, "x")
    except FileExistsError:
        return io.FileIO(f"{name}.{pid}", "w")


def writer() -> Writer | None:
    """The writer of this process; None: tracing is off.

    Raises OSError if its file cannot be made.
    """
    global _writer
    name = os.environ.get("MINATO_TRACE")
    if not name:
        return None
    if _writer is None or _writer.pid != os.getpid():
        _writer = Writer(name)
    return _writer


class Lives(Protocol):
    """The owner of the workers in a group."""

    def living(self) -> bool:
        """Whether the workers are there."""


def tracer(memo: Memo, owner: Lives, engine: Engine, balanced: bool, loader: Any) -> Trace | None:
    """The trace of an iterator whose workers have just started; None: tracing is off."""
    out = writer()
    if out is None:
        return None
    group, last_owner = memo.trace_group
    last = last_owner()
    if not group or (last is not None and last is not owner and last.living()):
        group = next(out.numbers)  # two at once must not share tracks
    memo.trace_group = (group, weakref.ref(owner))
    memo.trace_number = memo.trace_number or group
    traits = {  # by which ``minato ranks`` finds the same loader in the traces of other ranks
        "name": name_of(loader), "batch_size": batch_size_of(loader),
        "sampler": type(sampler_of(loader)).__name__, "samples": length_of(loader),
        "number": memo.trace_number,
    }  # fmt: skip
    return Trace(out, group, engine, balanced, traits)


class Trace:
    """Events of one iterator."""

    def __init__(
        self, out: Writer, group: int, engine: Engine, balanced: bool, loader: Event
    ) -> None:
        self.out = out
        self.group = out.pid * 1000 + group
        self.waits = 0
        self.retries = self.deaths = self.decisions = 0
        self.pids: dict[int, int] = {}
        self.engine = engine
        self.balanced = balanced
        rank = os.environ.get("RANK")
        name = f"loader {group} of process {out.pid}" + (f" (rank {rank})" if rank else "")
        tracks = [(WAITS, "trainer: waits in next()"), (CHOICES, "decisions")]
        tracks += [
            (FIRST_WORKER + w, f"worker {w}") for w in range(len(self.engine.workers()))
        ]
        out.write(
            [self._meta("process_name", 0, name, loader=loader)]
            + [self._meta("thread_name", tid, text) for tid, text in tracks]
        )

    def _meta(self, what: str, tid: int, name: str, **more: Any) -> Event:
        args = {"name": name, **more}
        return {"ph": "M", "name": what, "pid": self.group, "tid": tid, "args": args}

    def _span(
        self, name: str, kind: str, tid: int, begin: int, ns: int, **args: Any
    ) -> Event:
        return {
            "ph": "X", "name": name, "cat": kind, "pid": self.group, "tid": tid,
            "ts": begin / 1000, "dur": ns / 1000, "args": args,
        }  # fmt: skip

    def _instant(self, name: str, at_ns: int, tid: int = CHOICES, **args: Any) -> Event:
        return {
            "ph": "i", "s": "t", "name": name, "cat": "decision", "pid": self.group,
            "tid": tid, "ts": at_ns / 1000, "args": args,
        }  # fmt: skip

    # ---- a batch -----------------------------------------------------------------------

    def block(self, epoch: int, indices: Any, block: Block) -> None:
        """Writes the tasks of a block that is about to be read, and the events since the last. epoch:
        its number, as stats() counts; the engine knows only that of the seeds."""
        _, number, tasks = self.engine.spans(block)
        common: Event = {"epoch": epoch, "batch": number}
        events: list[Event] = []
        for task in tasks:
            begin, wall, tid = task.done_ns - task.wall_ns, task.wall_ns, FIRST_WORKER + task.worker
            why, cpu = start_reasons[task.why], task.cpu_ns / 1000
            args = {**common, "why": why, **({"attempt": task.attempt} if task.attempt else {})}
            if task.kind == COLLATE:
                name = f"collate {number}"
                args["cpu_us"] = cpu
                del args["why"]  # it starts when its samples are there
                events.append(self._span(name, "collate", tid, begin, wall, **args))
                continue
            if task.kind == BATCH and not all(task.rows):  # its samples were not timed
                args.update(indices=_plain(indices), cpu_us=cpu)
                events.append(self._span(f"batch {number}", "whole", tid, begin, wall, **args))
            else:
                events += self._samples(indices, task.row0, task.rows, tid, begin, args)
            if why in DECISIONS:
                events.append(self._instant(f"started {why}", begin, **args, row=task.row0))
        if tasks:
            begin = min(task.done_ns - task.wall_ns for task in tasks)
            events += self._batch(common, begin, max(task.done_ns for task in tasks))
        for loss in self.engine.lost(block):
            args = {**common, "worker": loss.worker, "pid": loss.pid, "status": loss.status}
            events.append(self._instant("given up", self._now(), **args))
        since = self._since(batch=number)
        spans = [e for e in events if e["ph"] == "X"]
        if since and spans:
            events += self._arrow(max(spans, key=_end), since[0])
        self.out.write(events + since)

    def _arrow(self, last: Event, wait: Event) -> list[Event]:
        """An arrow from inside a worker's span to inside the trainer's wait: the ends of a span do
        not belong to it."""
        common = {
            "name": "handed over", "cat": "batch", "id": next(self.out.arrows),
            "pid": self.group,
        }  # fmt: skip
        begin, end = (_end(e) - min(1, e["dur"] / 2) for e in (last, wait))
        return [
            {**common, "ph": "s", "tid": last["tid"], "ts": begin},
            {**common, "ph": "f", "bp": "e", "tid": WAITS, "ts": end},
        ]

    def _samples(
        self, indices: Any, row0: int, rows: list[int], tid: int, begin: int, args: Event
    ) -> list[Event]:
        events = []
        for row, ns in enumerate(rows, row0):
            if ns:
                index = _plain(indices[row] if isinstance(indices, (list, tuple)) else indices)
                name = f"sample {index}"
                more = {"index": index, "row": row}
                events.append(self._span(name, "sample", tid, begin, ns, **args, **more))
            begin += ns
        return events

    def _batch(self, args: Event, begin: int, end: int) -> list[Event]:
        name = f"batch {args['batch']}"
        common = {"name": name, "cat": "batch", "id": args["batch"], "pid": self.group}
        return [
            {**common, "ph": "b", "tid": 0, "ts": begin / 1000, "args": args},
            {**common, "ph": "e", "tid": 0, "ts": end / 1000},
        ]

    def formed(self, epoch: int, indices: list[Any]) -> None:
        """Writes that these samples became a batch (batching="ready")."""
        now = self._now()
        args = {"epoch": epoch, "indices": _plain(indices)}
        self.out.write([self._instant("batch formed", now, **args)])

    def amiss(self, amended: Amended) -> None:
        """Writes the samples of a batch that could not be made."""
        now = self._now()
        self.out.write([
            self._instant("replaced" if one.replaced else "left out", now, index=_plain(index),
                          instead=_plain(one.instead))
            for one, index in zip(amended.amiss, amended.indices)
        ])  # fmt: skip

    def _now(self) -> int:
        """The end of the last wait; during a wait, the present time."""
        return self.engine.progress()["given_ns"] or time.monotonic_ns()

    # ---- everything else -----------------------------------------------------------------

    def news(self) -> None:
        """Writes the last wait, and what happened since the one before."""
        self.out.write(self._since())

    def ended(self) -> None:
        """Writes what happened last. Called before the workers are stopped."""
        self.out.write(self._fates(time.monotonic_ns()))

    def _since(self, **args: Any) -> list[Event]:
        waits = self.engine.progress()
        if waits["waits"] == self.waits or not waits["given_ns"]:
            return []
        self.waits = waits["waits"]
        begin, end = waits["asked_ns"], waits["given_ns"]
        wait = self._span("wait", "wait", WAITS, begin, end - begin, **args)
        return [wait, *self._fates(end)]

    def _fates(self, now: int) -> list[Event]:
        """Deaths, retries, starts and the scheduler's decisions since the last batch."""
        events = []
        health = self.engine.health()
        if health["deaths"] != self.deaths:
            self.deaths = health["deaths"]
            seen = {k: health[k] for k in ("worker", "pid", "status")}
            events.append(self._instant("worker died", now, deaths=self.deaths, **seen))
        if health["retries"] != self.retries:
            more = health["retries"] - self.retries
            self.retries = health["retries"]
            events.append(self._instant("tasks tried again", now, tasks=more))
        for number, entry in enumerate(self.engine.workers()):
            pid = entry["pid"]
            if pid and self.pids.get(number) != pid:
                self.pids[number] = pid
                events.append(
                    self._instant("worker started", now, FIRST_WORKER + number, pid=pid)
                )
        scheduler = self.engine.scheduler() if self.balanced else None
        fresh = scheduler["decisions"] if scheduler else []
        for one in fresh:
            if one.at_ns > self.decisions:
                self.decisions = one.at_ns
                change = {"workers": one.after, "before": one.before}
                events.append(self._instant(one.text, one.at_ns, **change))
        return events


def _end(span: Event) -> float:
    end: float = span["ts"] + span["dur"]
    return end


def _plain(index: Any) -> Any:
    """An index as JSON: numbers, text and lists of them as they are, else their text."""
    if isinstance(index, (list, tuple)):
        return [_plain(i) for i in index]
    if isinstance(index, float):
        return index if math.isfinite(index) else repr(index)
    return index if isinstance(index, (int, str, type(None))) else text_of(index)
