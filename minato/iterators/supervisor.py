"""The workers of one iterator: started, watched, ended.

A library may start a thread pool in the program (polars, an executor) and give it work in a forked
worker. The pool's threads do not exist there, so workers wait forever. The only visible sign is that
all workers sleep in their first sample. One warning then names the threads.

``sample_timeout=``: a worker whose sample takes too long is killed, and the sample has failed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.utils.data import _utils
from torch.utils.data.dataloader import _DatasetKind

from .._core import WORKER_READY, Block, Engine
from .._system import NOT_STARTED
from ..epoch_progress import Progress
from ..errors import (
    DAMAGED, LATE, WorkerLost, describe_death, never_began_message, program_level,
    starter_died_message, warn,
)  # fmt: skip
from ..observe import totals
from ..observe.measurements import Watch
from ..observe.verdict import Facts
from ..options import Options
from ..seeding.order_generators import SYSTEMS_SEEDS, seed_of
from ..time_limits import Deadline, LateSamples
from ..workers import signals
from ..workers.process_pool import Executor, Pool
from .failure_limits import placed
from .planner import per_worker
from .position import Position
from .stats import Served, engine_stats
from .trace import Trace, tracer

#: all workers must have been in their first sample for this many seconds
SECONDS = 5.0
#: and must have used no CPU during a period of this many seconds
LOOK = 1.0
#: how many threads the warning names
NAMED = 6
#: names of threads that a fork does not need: minato's and torch's
_HARMLESS = ("minato", "pt_", "cuda")


class FirstSamples:
    """Watches one iterator's workers until one of them has made a sample."""

    def __init__(self, forked: bool) -> None:
        self.watching = forked
        self._looked = time.monotonic()
        self._used: list[bytes] | None = None  # CPU time of each process at the last look

    def part(self, seconds: float) -> float:
        """Shortens a wait (below 0: unlimited) so that it ends at the next look."""
        return min(seconds, LOOK) if seconds >= 0 else LOOK

    def look(self, engine: Engine) -> None:
        """Warns if all workers sleep in their first sample."""
        now = time.monotonic()
        if now < self._looked + LOOK:
            return
        self._looked, before, self._used = now, self._used, None
        entries = [entry for entry in engine.workers() if entry["state"] == WORKER_READY]
        if any(entry["rows"] for entry in entries):
            self.watching = False
            return
        late = time.monotonic_ns() - int(1e9 * SECONDS)
        if not entries or any(e["running"] is None or e["since_ns"] > late for e in entries):
            return
        with suppress(OSError):  # a worker has ended, or there is no /proc
            self._used = [_sleeps(entry["pid"]) for entry in entries]
        if self._used is None or b"" in self._used or self._used != before:
            return
        self.watching = False
        names = foreign_threads()
        if names:
            _warn(len(entries), names)


def _sleeps(pid: int) -> bytes:
    """CPU time of a process that waits for another thread; empty if it does not wait."""
    with open(f"/proc/{pid}/stat", "rb") as stat, open(f"/proc/{pid}/wchan", "rb") as wchan:
        fields, waits_in = stat.read().rpartition(b")")[2].split(), wchan.read()
    if fields[0] != b"S" or b"futex" not in waits_in:  # or the system hides it
        return b""
    return b" ".join(fields[11:13])


def foreign_threads() -> list[str]:
    """Names of this process's threads, without those that workers do not need."""
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    names = set()
    with open("/proc/self/comm") as file:
        unnamed = file.read()
    for number in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{number}/comm") as file:
            comm = file.read()
            name = python.get(int(number), "" if comm == unnamed else comm.strip())
            me = int(number) in (os.getpid(), threading.get_native_id())
            if name and not me and not name.startswith(_HARMLESS):
                names.add(name)
    return sorted(names)


def _warn(workers: int, names: list[str]) -> None:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    who = f"All {workers} workers have" if workers > 1 else "The worker has"
    warnings.warn(
        f"{who} been asleep in the first sample for {SECONDS:.0f} seconds. Workers are forks of "
        f"this program and do not have its threads: {', '.join(names[:NAMED])}{more}. If the "
        "dataset uses a library or an executor that started these threads in the program, it "
        "may wait for them forever. Give the loader multiprocessing_context='forkserver', or "
        "use the library only in workers. With timeout=0 the loader waits forever; timeout=60 raises "
        "an error after 60 seconds. This warning is shown once.",
        stacklevel=program_level(),
    )


#: number of workers that the error of a timeout names
WORKERS_NAMED = 8
#: A warning comes when one worker and its replacements die this often in a row without a sample.
CRASH_LOOP = 3


def _of_a_row(died: str, deaths: int) -> str:
    return (f"{died.rstrip()} It is one of {deaths} deaths in a row without a finished "
            "sample.")  # fmt: skip


#: Set at the interpreter's exit before multiprocessing ends the workers: the function registered
#: last runs first. torch's own flag is set after that.
_exit = threading.Event()
atexit.register(_exit.set)


def stay_at_exit() -> None:
    """Does not return in a daemon thread at the interpreter's exit. Its workers are gone then, and
    that is no error to report to the program."""
    while _exit.is_set() and threading.current_thread() is not threading.main_thread():
        time.sleep(1.0)


class Supervisor:
    """Starts, watches and ends the workers of one iterator. It holds no reference to the iterator,
    so the iterator can be collected."""

    def __init__(
        self,
        loader: Any,
        options: Options,
        position: Position,
        pool: Executor,
        *,
        balanced: bool,
        displacement: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        """pool: has not been started. displacement: see ``stats.Served``."""
        workers: int = loader.num_workers
        self.pool, self.engine = pool, pool.engine
        self.timeout: float = loader.timeout
        self.reproducible = seed_of(loader) < SYSTEMS_SEEDS
        self.name = totals.name_of(loader)
        self.counted = self.watched = False
        self.trace: Trace | None = None
        self.stopped = False
        seconds = options.sample_timeout
        self._late = LateSamples(seconds) if seconds is not None else None
        self._first = FirstSamples(getattr(pool, "forks", False))
        #: functions that end what must end before the workers, in this order
        self.before_stop: list[Callable[[], object]] = []
        may_prefetch = balanced and options.batching == "sampler"
        facts = Facts(
            balanced=balanced,
            persistent=bool(loader.persistent_workers),
            iterable=loader._dataset_kind == _DatasetKind.Iterable,
            prefetch=per_worker(loader),
            ready=balanced and options.batching == "ready",
            prefetches=options.prefetch_next_epoch if may_prefetch else None,
        )
        self.served = Served(
            position, facts, per_worker(loader) * workers, loader.batch_size or 1,
            Watch(pool.kind == "process"), displacement,
        )  # fmt: skip
        self.balanced = balanced
        self._bounds = options.bounds(workers)
        self._memo = position.memo
        self._cached = self._cache_counts()
        me = weakref.ref(self)
        self._memo.as_stats = lambda: own.as_stats() if (own := me()) is not None else None
        self._warned: set[str] = set()  # what warnings that are shown once were about
        self.deaths_reported = 0  # deaths reported to the program, by a warning or a coming error
        self._retries_reported = 0
        #: whether a death raises no error: the process is replaced and makes its samples again
        self._replaces = balanced and options.max_retries > 0 and pool.kind in ("process", "remote")
        self._deaths_in: Progress | None = None  # the epoch of the latest warning

    def start(self, loader: Any) -> None:
        """Starts the workers. Leaves none if that fails."""
        try:
            self.pool.start()
        except BaseException:
            self.stopped = True
            self.pool.stop()
            raise
        self.trace = tracer(self._memo, self, self.engine, self.balanced, loader)
        totals.begins(self)

    def as_stats(self) -> dict[str, Any] | None:
        """Data for stats() while the workers run; else None."""
        if not self.living():
            return None
        try:
            return engine_stats(self.pool, self.served)()
        except RuntimeError:
            if self.living():
                raise
            return None  # garbage was collected meanwhile, and it was the iterator

    def counts(self) -> dict[str, float]:
        """Totals since the workers were started, see ``minato.metrics``."""
        engine, layout = self.engine, self._memo.shape.layout
        waits, health = engine.progress(), self.pool.unseen.added_to(engine.health())
        samples = sum(entry["rows"] for entry in engine.workers())
        failed = self.served.position.as_stats().get("failed", {})
        hits, misses = self._cache_counts()
        made: dict[str, float] = {}
        if not self.served.facts.iterable:  # else only its workers know how many samples a batch has
            made = {
                "minato.samples": samples,
                "minato.bytes": samples * layout.core.row_bytes if layout is not None else 0,
            }
        return {
            **made,
            "minato.batches": waits["waits"],
            "minato.wait.time": waits["wait_ns"] * 1e-9,
            "minato.program.time": waits["used_ns"] * 1e-9,
            "minato.retries": health["retries"],
            "minato.worker.deaths": health["deaths"],
            "minato.samples.failed": failed.get("left_out", 0) + failed.get("replaced", 0),
            "minato.cache.hits": hits - self._cached[0],
            "minato.cache.misses": misses - self._cached[1],
        }

    def _cache_counts(self) -> tuple[int, int]:
        """Hits and misses since the loader's first iterator."""
        seen = self._memo.cached.stats() if self._memo.cached is not None else {}
        return seen.get("hits", 0), seen.get("misses", 0)

    def gauges(self) -> dict[str, float]:
        """Present values, see ``minato.metrics``."""
        engine = self.engine
        memory = engine.memory()
        return {
            "minato.batches.ready": engine.progress()["ready"],
            "minato.workers": sum(entry["state"] == WORKER_READY for entry in engine.workers()),
            "minato.memory.used": memory["used"],
            "minato.memory.limit": memory["limit"],
        }

    def living(self) -> bool:
        """Whether there is an engine that can be asked."""
        return not self.pool.stopped

    def under_way(self, indices_of: Callable[[int], Any]) -> str:
        """Returns what workers are doing, the oldest task first, with the stack of that worker.
        indices_of: returns the sampler's indices of a batch by its number, or None."""
        if not self.living():
            return ""
        now = time.monotonic_ns()
        busy = [(e["since_ns"], number, e) for number, e in enumerate(self.engine.workers())
                if e["running"] is not None and e["state"] == WORKER_READY]  # fmt: skip
        busy.sort(key=lambda one: one[:2])
        if not busy:
            return "minato: no worker is making a sample."
        lines = ["minato: under way were"]
        for since, number, entry in busy[:WORKERS_NAMED]:
            assert entry["running"] is not None
            batch, row = entry["running"]
            what = placed(batch, indices_of(batch), row if self.balanced else None)
            seconds = (now - since) * 1e-9
            lines.append(f"  {what}, for {seconds:.1f} s in worker {number} (pid {entry['pid']})")
        if len(busy) > WORKERS_NAMED:
            lines.append(f"  and {len(busy) - WORKERS_NAMED} more")
        stack = self.pool.stack_of(busy[0][1])
        if stack:
            lines.append(f"The first of these is here, latest call first:\n{stack}")
        return "\n".join(lines)

    def look(self, seconds: float, indices_of: Callable[[int], Any]) -> float:
        """Looks for samples that are late or will not come, before a wait. seconds: its limit; below
        0: none. Returns how long it may last until the next look."""
        if self._first.watching:
            self._first.look(self.engine)
            seconds = self._first.part(seconds)
        if self._late is not None:
            self._late.look(self.pool, indices_of)
            seconds = self._late.part(seconds)
        return seconds

    def wait_for(
        self,
        block: Block | None,
        done: Callable[[], object],
        indices_of: Callable[[int], Any] = lambda number: None,
    ) -> None:
        """Waits until done() is true. block: the one that done() asks about; None: any block.
        Raises torch's errors for timeouts and deaths."""
        engine = self.engine
        deadline = Deadline(self.timeout, functools.partial(self.under_way, indices_of))
        while not done():
            self.check(done)
            engine.wait(block, self.look(deadline.part(), indices_of))

    def check(self, done: Callable[[], object]) -> None:
        """Raises an error if workers have died and no other worker takes their tasks, unless
        done() is true."""
        stay_at_exit()
        health = self.engine.health()
        stay_at_exit()  # the exit may have begun meanwhile and ended the workers
        unstarted = health["deaths"] > 0 and NOT_STARTED <= health["status"] < DAMAGED
        if health["zygote_lost"] and not unstarted:
            if not done() and not self._restart(health["zygote_hung"]):
                pid = self.pool.starter()
                unbegun = not (self.engine.segment.start or health["zygote_hung"])
                if unbegun:
                    died = never_began_message(pid)
                else:
                    died = starter_died_message(pid, health["zygote_hung"])
                self.stop()  # no process could see workers end, or replace them
                raise RuntimeError(died)
        elif health["deaths"]:
            died = describe_death(health["pid"], health["status"])
            if not self.balanced or health["live"] == 0 or health["zygote_lost"]:
                if not done():
                    self.deaths_reported = health["deaths"]
                    if health["crash_loop"] > 1:
                        died = _of_a_row(died, health["crash_loop"])
                    raise WorkerLost(died, health["pid"], None, health["status"])
            elif unstarted:
                self._warn_of_fewer(died)
            elif health["crash_loop"] >= CRASH_LOOP:
                died = _of_a_row(died, health["crash_loop"])
                self._warn_once(
                    f"{died} Workers keep dying; replacements now start after a pause of up to one "
                    "second. Check the dataset, worker_init_fn, memory limits and the cluster manager.",
                    "a loop",
                )

    def _restart(self, hung: bool) -> bool:
        """Starts another zygote, the process that forks workers. Returns whether that worked."""
        try:
            return not hung and self.pool.restart()
        except BaseException:
            self.stop()
            raise

    def warn_of_deaths(self, at_end: bool = False) -> None:
        """Warns of dead workers, once an epoch. at_end: an error that names them would have come
        before."""
        pool = self.pool
        if not self.living():
            return
        if self._replaces or at_end:
            if self.engine.deaths() + pool.unseen.deaths != self.deaths_reported:
                self._warn_of_deaths(pool.unseen.added_to(self.engine.health()))
        if at_end:
            self._warn_of_history(pool.moving())

    def _warn_of_history(self, attribute: str) -> None:
        """Warns that two runs differ, if the program has set a seed. The attribute may be harmless,
        so this does not raise."""
        if attribute and self.reproducible and self._memo.warns_of("history"):
            with contextlib.suppress(UserWarning):
                warnings.warn(
                    f"the attribute {attribute!r} of the dataset, or of an object in it, changes as "
                    "workers make samples. If samples use it (a buffer of earlier samples, a counter), "
                    "two runs with one seed differ, because workers do not make the same samples in "
                    "each run. scheduling='static' gives each worker the same samples, as torch does.",
                    stacklevel=program_level(),
                )

    def _warn_of_deaths(self, health: Any) -> None:
        pool, deaths, retries = self.pool, health["deaths"], health["retries"]
        if deaths <= self.deaths_reported or _exit.is_set():
            return
        if self.served.position.errors and not self._replaces:
            return  # the error has named it
        what = "Its samples are retried."
        if not self._replaces:
            what = "It is not replaced."
        elif retries == self._retries_reported:
            what = "It was idle."
        self.deaths_reported, self._retries_reported = deaths, retries
        progress = self.served.position.progress
        if isinstance(pool, Pool) and health["pid"] in pool.ended_by_program:
            return
        if progress is self._deaths_in or NOT_STARTED <= health["status"] < DAMAGED:
            return  # _warn_of_fewer() warns of workers that could not be started
        if health["status"] == LATE:
            return  # the sample has failed, which is reported
        self._deaths_in = progress
        died = f"{describe_death(health['pid'], health['status']).rstrip()} {what}"
        warn(
            f"{pool.unseen.latest or died} Further deaths in this epoch are only counted, in "
            "loader.stats()['deaths']."
        )

    def _warn_of_fewer(self, died: str) -> None:
        self._warn_once(f"{died}The remaining workers take over its samples.", "fewer workers")

    def _warn_once(self, text: str, subject: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            warnings.warn(text, stacklevel=program_level())

    # ---- ending ----------------------------------------------------------------------

    def stop(self) -> None:
        """Ends everything that depends on the workers, then the workers. Does nothing at the
        interpreter's exit: multiprocessing ends the zygote then."""
        if _utils is None or _utils.python_exit_status is not False:
            return
        try:
            for end in self.before_stop:
                end()
        finally:
            if not self.stopped:
                self._stop_pool()

    def _stop_pool(self) -> None:
        pool, health, moving = self.pool, None, ""
        with signals.Held():
            if self.stopped:
                return  # another thread was here first
            self.stopped = True
            try:
                if pool.mine() and pool.started:
                    health = pool.unseen.added_to(self.engine.health())
                    moving = pool.moving()
                    self._save_last()
            finally:
                pool.stop()
        if health is None:
            return
        unstarted = NOT_STARTED <= health["status"] < DAMAGED
        if health["live"] and health["deaths"] and unstarted:
            self._warn_of_fewer(describe_death(health["pid"], health["status"]))
        self._warn_of_deaths(health)
        self._warn_of_history(moving)

    def _save_last(self) -> None:
        """Saves what the program and later iterators may ask for after the workers' end."""
        totals.ends(self)
        self._memo.last_stats = engine_stats(self.pool, self.served)
        if self.balanced and (found := self.engine.scheduler()) is not None:
            self._memo.schedulers[self._bounds] = found["saved"]
        if self.trace is not None:
            self.trace.ended()
