"""The workers of one iterator: started, watched, ended."""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import _utils
from torch.utils.data.dataloader import _DatasetKind

from .._core import WORKER_READY, Block, Engine
from .._system import NOT_STARTED
from ..epoch_progress import Progress, title_of
from ..errors import (
    DAMAGED, LATE, WorkerLost, describe_death, never_began_message, starter_died_message, warn,
)  # fmt: skip
from ..observe import totals
from ..observe.measurements import Watch
from ..options import Options
from ..seeding.order_generators import SYSTEMS_SEEDS, seed_of
from ..time_share import Deadline
from ..workers import signals
from ..workers.process_pool import Executor, Pool
from .batch_errors import placed
from .foreign_threads import FirstSamples
from .late_samples import LateSamples
from .position import Position
from .stats import Served, engine_stats
from .trace import Trace, tracer
from .trace import writer as trace_writer
from .window import per_worker

#: number of workers that the error of a timeout names
WORKERS_NAMED = 8
#: A warning comes when one worker and its replacements die this often in a row without a sample.
CRASH_LOOP = 3


def _of_a_row(died: str, deaths: int) -> str:
    return (f"{died.rstrip()} It is one of {deaths} deaths in a row without a finished "
            "sample.")  # fmt: skip


def _may_prefetch(balanced: bool, options: Options) -> bool:
    return balanced and options.batching == "sampler"


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

    engine: Engine

    def __init__(
        self, loader: Any, options: Options, position: Position, *, balanced: bool
    ) -> None:
        workers: int = loader.num_workers
        self.bounds = options.bounds(workers)
        self.timeout: float = loader.timeout
        self._max_retries = options.max_retries
        self._title = title_of(loader)
        self.reproducible = seed_of(loader) < SYSTEMS_SEEDS
        self.name = totals.name_of(loader)
        self.counted = self.watched = False
        self.pool: Executor | None = None
        self.trace: Trace | None = None
        self.stopped = False
        seconds = options.sample_timeout
        self.late = LateSamples(seconds) if seconds is not None else None
        self.first = FirstSamples(False)
        self.watch = Watch()
        #: functions that end what must end before the workers, in this order
        self.before_stop: list[Callable[[], object]] = []
        self.served = Served(
            balanced=balanced,
            position=position,
            window=per_worker(loader) * workers,
            batch_size=loader.batch_size or 1,
            persistent=bool(loader.persistent_workers),
            iterable=loader._dataset_kind == _DatasetKind.Iterable,
            prefetch=per_worker(loader),
            ready=balanced and options.batching == "ready",
            prefetches=options.prefetch_next_epoch if _may_prefetch(balanced, options) else None,
        )
        self._memo = position.memo
        me = weakref.ref(self)
        self._memo.as_stats = lambda: own.as_stats() if (own := me()) is not None else None
        self._warned_of_fewer = False  # warned of fewer workers than asked for
        self._warned_of_loop = False  # warned of CRASH_LOOP deaths in a row
        self.deaths_reported = 0  # deaths reported to the program, by a warning or a coming error
        self._retries_reported = 0
        #: whether a death raises no error: the process is replaced and makes its samples again
        self._replaces = False
        self._deaths_in: Progress | None = None  # the epoch of the latest warning

    def start(self, make_pool: Callable[[], Executor]) -> None:
        """Makes and starts workers. Leaves none if that fails."""
        trace_writer()  # before the workers: if its file cannot be made, no worker is left behind
        self.stopped = False
        self.deaths_reported = self._retries_reported = 0
        self.pool = pool = make_pool()
        self.watch = self.served.watch = Watch(pool.kind == "process")
        self._replaces = self.served.balanced and self._max_retries > 0 and pool.kind == "process"
        self.first = FirstSamples(getattr(pool, "forks", False))
        self.engine = pool.engine
        self.engine.set_title(self._title)
        try:
            pool.start()
        except BaseException:
            pool.stop()
            raise
        self.trace = tracer(self._memo, self, pool.engine, self.served.balanced)
        self._cached = self._cache_counts()
        totals.begins(self)

    def as_stats(self) -> dict[str, Any] | None:
        """Data for stats() while the workers run; else None."""
        pool = self.pool
        if pool is None or not self.living():
            return None
        try:
            return engine_stats(pool, self.served)()
        except RuntimeError:
            if self.living():
                raise
            return None  # garbage was collected meanwhile, and it was the iterator

    def counts(self) -> dict[str, float]:
        """Totals since the workers were started, see ``minato.metrics``."""
        engine, memo = self.engine, self._memo
        waits, health, layout = engine.waits(), engine.health(), memo.shape.layout
        samples = sum(entry["rows"] for entry in engine.workers())
        failed = self.served.position.as_stats().get("failed", {})
        hits, misses = self._cache_counts()
        return {
            "minato.batches": waits["waits"],
            "minato.samples": samples,
            "minato.bytes": samples * layout.core.row_bytes if layout is not None else 0,
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
            "minato.batches.ready": engine.timing()["ready"] if self.served.balanced else 0,
            "minato.workers": sum(entry["state"] == WORKER_READY for entry in engine.workers()),
            "minato.memory.used": memory["used"],
            "minato.memory.limit": memory["limit"],
        }

    def living(self) -> bool:
        """Whether there is an engine that can be asked."""
        return self.pool is not None and not self.pool.stopped

    def under_way(self, indices_of: Callable[[int], Any]) -> str:
        """Returns what workers are doing, the oldest task first, with the stack of that worker.
        indices_of: returns the sampler's indices of a batch by its number, or None."""
        try:
            return self._under_way(indices_of)
        except Exception:  # the error of the timeout must be raised in any case
            return ""

    def _under_way(self, indices_of: Callable[[int], Any]) -> str:
        if self.pool is None or not self.living():
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
            what = placed(batch, indices_of(batch), row if self.served.balanced else None)
            seconds = (now - since) * 1e-9
            lines.append(f"  {what}, for {seconds:.1f} s in worker {number} (pid {entry['pid']})")
        if len(busy) > WORKERS_NAMED:
            lines.append(f"  and {len(busy) - WORKERS_NAMED} more")
        stack = self.pool.stack_of(busy[0][1])
        if stack:
            lines.append(f"The first of these is here, latest call first:\n{stack}")
        return "\n".join(lines)

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
            engine.wait(block, self.first.part(deadline.part()))
            self.first.look(engine)

    def check(self, done: Callable[[], object]) -> None:
        """Raises an error if workers have died and no other worker takes their tasks, unless
        done() is true."""
        stay_at_exit()
        health = self.engine.health()
        stay_at_exit()  # the exit may have begun meanwhile and ended the workers
        unstarted = health["deaths"] > 0 and NOT_STARTED <= health["status"] < DAMAGED
        if health["zygote_lost"] and not unstarted:
            if not done() and not self._restart(health["zygote_hung"]):
                pid = self.pool.starter() if self.pool is not None else None
                unbegun = not (self.engine.segment.start or health["zygote_hung"])
                if unbegun:
                    died = never_began_message(pid)
                else:
                    died = starter_died_message(pid, health["zygote_hung"])
                self.stop()  # no process could see workers end, or replace them
                raise RuntimeError(died)
        elif health["deaths"]:
            died = describe_death(health["pid"], health["status"])
            if not self.served.balanced or health["live"] == 0 or health["zygote_lost"]:
                if not done():
                    self.deaths_reported = health["deaths"]
                    if health["crash_loop"] > 1:
                        died = _of_a_row(died, health["crash_loop"])
                    raise WorkerLost(died, health["pid"], None, health["status"])
            elif unstarted:
                self._warn_of_fewer(died)
            elif health["crash_loop"] >= CRASH_LOOP:
                self._warn_of_loop(_of_a_row(died, health["crash_loop"]))

    def _restart(self, hung: bool) -> bool:
        """Starts another zygote, the process that forks workers. Returns whether that worked."""
        try:
            return self.pool is not None and not hung and self.pool.restart()
        except BaseException:
            self.stop()
            raise

    def warn_of_deaths(self, at_end: bool = False) -> None:
        """Warns of dead workers, once an epoch. at_end: an error that names them would have come
        before."""
        if (self._replaces or at_end) and self.living():
            if self.engine.deaths() != self.deaths_reported:
                self._warn_of_deaths(self.engine.health())
        if at_end and self.pool is not None and self.living():
            self._warn_of_history(self.pool.moving())

    def _warn_of_history(self, attribute: str) -> None:
        """Warns that two runs differ, if the program has set a seed. The attribute may be harmless,
        so this does not raise."""
        if attribute and self.reproducible and not self._memo.warned_of_history:
            self._memo.warned_of_history = True
            with contextlib.suppress(UserWarning):
                warnings.warn(
                    f"the attribute {attribute!r} of the dataset, or of an object in it, changes as "
                    "workers make samples. If samples use it (a buffer of earlier samples, a counter), "
                    "two runs with one seed differ, because workers do not make the same samples in "
                    "each run. scheduling='static' gives each worker the same samples, as torch does.",
                    stacklevel=4,
                )

    def _warn_of_deaths(self, health: Any) -> None:
        deaths, retries = health["deaths"], health["retries"]
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
        if isinstance(self.pool, Pool) and health["pid"] in self.pool.ended_by_program:
            return
        if progress is self._deaths_in or NOT_STARTED <= health["status"] < DAMAGED:
            return  # _warn_of_fewer() warns of workers that could not be started
        if health["status"] == LATE:
            return  # the sample has failed, which is reported
        self._deaths_in = progress
        died = describe_death(health["pid"], health["status"]).rstrip()
        warn(
            f"{died} {what} Further deaths in this epoch are only counted, in "
            "loader.stats()['deaths']."
        )

    def _warn_of_fewer(self, died: str) -> None:
        if not self._warned_of_fewer:
            self._warned_of_fewer = True
            warnings.warn(
                f"{died}The remaining workers take over its samples.", stacklevel=4
            )

    def _warn_of_loop(self, died: str) -> None:
        if not self._warned_of_loop:
            self._warned_of_loop = True
            warnings.warn(
                f"{died} Workers keep dying; replacements now start after a pause of up to one "
                "second. Check the dataset, worker_init_fn, memory limits and the cluster manager.",
                stacklevel=4,
            )

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
            pool = self.pool
            if pool is not None and not self.stopped:
                self._stop_pool(pool)

    def _stop_pool(self, pool: Executor) -> None:
        health, moving = None, ""
        with signals.Held():
            if self.stopped:
                return  # another thread was here first
            self.stopped = True
            try:
                if pool.mine() and pool.started:
                    health, moving = self.engine.health(), pool.moving()
                    self._save_last(pool)
            finally:
                pool.stop()
        if health is None:
            return
        unstarted = NOT_STARTED <= health["status"] < DAMAGED
        if health["live"] and health["deaths"] and unstarted:
            self._warn_of_fewer(describe_death(health["pid"], health["status"]))
        self._warn_of_deaths(health)
        self._warn_of_history(moving)

    def _save_last(self, pool: Executor) -> None:
        """Saves what the program and later iterators may ask for after the workers' end."""
        totals.ends(self)
        self._memo.last_stats = engine_stats(pool, self.served)
        if self.served.balanced:
            self._memo.save_scheduler(self.bounds, self.engine)
        if self.trace is not None:
            self.trace.ended()
