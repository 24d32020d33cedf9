"""``DataLoader.stats()``: what the latest iterator has done, and what it waits for.

docs/api.md says what each field holds. Every field is always there.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .._not_linux import CORE
from ..observe.measurements import Watch, cores
from ..observe.totals import Source
from ..observe.verdict import (
    FEW, SMALL_CACHE, Alone, Facts, alone, causes, larger, told, trouble, verdict,
)  # fmt: skip
from ..option_values import option
from .loader_memo import memo_of

if CORE:
    from .. import _core

if TYPE_CHECKING:
    from .._core import _Costs, _Progress, _Scheduler, _WorkerEntry
    from ..workers.process_pool import Executor
    from .loader_memo import Memo
    from .position import Position

#: fields of stats(), by name
Fields = dict[str, Any]

_NS = 1e-9
_BY_ITSELF = "each by itself: a package that Python or torch imports at its start has started threads"

NOTHING = "Nothing was loaded yet."
#: the fields that an iterator with workers fills
_NONE: Fields = {
    "errors": 0,
    "failed": {"left_out": 0, "replaced": 0, "latest": []},
    "wait": None,
    "batch_queue": None,
    "started": None,
    "locality": None,
    "displacement": None,
    "worker_type": None,
    "worker_start": None,
    "workers": [],
    "retries": 0,
    "deaths": 0,
    "device": None,
    "cache": None,
    "scheduler": None,
    "memory": None,
    "verdict": NOTHING,
    "causes": [],
}


def collect(loader: Any) -> Fields:
    """The statistics of a loader."""
    memo = memo_of(loader)
    progress = memo.progress
    stats = {
        "epoch": max(progress.epoch, memo.epochs - 1) if progress is not None else 0,
        "delivered": progress.count if progress is not None else 0,
        **_NONE,
        "cost": _costs(memo.costs.summary()),
        "slow": _slowest(memo.costs),
    }
    if loader.num_workers == 0:
        stats.update(memo.as_stats() or memo.last_stats())
        if memo.load is not None:
            stats.update(_load(memo, stats))
        stats["device"] = memo.copies.summary() if memo.copies is not None else None
    elif (found := memo.as_stats()) is not None:
        stats.update(found)
    elif (reason := loader._why_torch()) is not None:
        stats["verdict"] = f"Nothing is measured: torch's own workers are used ({reason})."
    else:
        stats.update(memo.last_stats())
        if stats["memory"] is not None:  # it went with the workers; batches that are left are the program's
            stats["memory"] = {**dict.fromkeys(stats["memory"], 0), "limit": stats["memory"]["limit"]}
    stats["cache"] = memo.cached.stats() if memo.cached is not None else None
    stats["verdict"] = f"{stats['verdict']} {cache_words(loader, stats)}".strip()
    return stats


def _load(memo: Memo, stats: Fields) -> Fields:
    """The fields of a loader without workers."""
    load: Any = memo.load
    case: Alone = load.facts(_core.machine()["cpus"] if CORE else cores())
    text, found = alone(replace(case, missed=memo.missed()))
    text = " ".join(filter(None, (text, trouble(stats))))
    return {"wait": load.waits(), "verdict": text, "causes": told(found)}


@dataclass
class Served:
    """Holds what the statistics of an iterator need besides its workers."""

    position: Position
    facts: Facts  # those that do not change
    window: int  # batches, for the number of workers that loading starts with
    batch_size: int
    watch: Watch
    displacement: Callable[[], dict[str, float]] | None  # how far samples move; None: they do not


def export(iterator: Any, source: Source) -> None:
    """Lets ``minato.metrics`` measure an iterator's waits, if the program or MINATO_METRICS asks."""
    if os.environ.get("MINATO_METRICS"):
        from .. import metrics  # not at import: most programs do without

        metrics.start()
    if "minato.metrics" in sys.modules:
        sys.modules["minato.metrics"].watch(iterator, source)


def engine_stats(pool: Executor, served: Served) -> Callable[[], Fields]:
    """Reads the fields that need living workers. Returns a function that adds the verdict, because
    most programs never ask for it at the end of an epoch. The function holds plain values only:
    the memo of a loader keeps it, and must not keep the loader alive."""
    engine, costs = pool.engine, served.position.memo.costs
    copies = served.position.memo.copies
    health, memory, waits = pool.unseen.added_to(engine.health()), engine.memory(), engine.progress()
    out: Fields = {
        **_NONE,
        **served.position.as_stats(),
        "wait": _waits(waits),
        "worker_type": pool.kind,
        "worker_start": {_core.START_FORKED: "forked", _core.START_THREADS: _BY_ITSELF}.get(
            engine.segment.start
        ),
        "workers": [_worker(w) for w in engine.workers()],
        "retries": health["retries"],
        "deaths": health["deaths"],
        "memory": {k: memory[k] for k in ("used", "kept", "limit", "in_flight")},
        "device": copies.summary() if copies is not None else None,
    }
    if served.facts.balanced:
        out["batch_queue"] = {
            "window": served.window,
            "ready": waits["ready"],
            "planned": waits["planned"],
        }
        out["scheduler"] = _scheduler(engine.scheduler())
        out["started"] = dict(zip(_core.start_reasons[1:], waits["starts"]))
        out["locality"] = _locality(costs.summary(), waits)
        if served.displacement is not None:
            out["displacement"] = served.displacement()
    return partial(_judged, out, waits["waits"], _facts(pool, served, waits, out))


def _judged(out: Fields, batches: int, facts: Facts) -> Fields:
    """The fields with a verdict. batches: how many the caller has waited for."""
    facts = replace(facts, cores=_core.machine()["cpus"])
    found = causes(out, facts) if batches >= FEW else []
    return {**out, "verdict": verdict(out, batches, facts, found), "causes": told(found)}


def _facts(pool: Executor, served: Served, waits: _Progress, out: Fields) -> Facts:
    """Returns what the verdict needs besides the statistics, except for the cores."""
    costs = served.position.memo.costs
    cost, progress = costs.summary(), served.position.progress
    balanced = served.facts.balanced
    mean = cost["mean_ns"] * _NS
    scheduler = pool.engine.scheduler() if balanced else None
    decisions = scheduler["decisions"] if scheduler else []
    reasons = [one.reason for one in decisions if one.reason >= 0]
    slowest, first = _slowest(costs, 1), served.watch.first_slowest
    if slowest and first and served.watch.first_use and slowest[0][1] < 1.5 * first[1]:
        slowest = []  # its worker's first one: that it is slow says nothing of the sample
    workers = out["workers"] if pool.kind == "process" else []
    return replace(
        served.facts,
        queued=sum(_queued(w["pid"]) for w in workers if w["state"] == "ready"),
        first=waits["wait_first_ns"] * _NS,
        starting=served.watch.starting,
        first_slowest=served.watch.first_slowest,
        first_use=served.watch.first_use,
        starts=waits["epochs_ns"] * _NS,
        epochs=waits["epochs"],
        longest=waits["steady_max_ns"] * _NS,
        held=waits["held"] / max(1, waits["waits"]),
        collate=cost["collate_ns"] * _NS,
        fetch=mean * served.batch_size if balanced else 0.0,
        mean=mean,
        slowest=slowest[0] if slowest else None,
        looks=dict(served.watch.looks),
        reason=reasons[-1] if reasons else None,
        sets_epoch=bool(progress.user_epoch or progress.sampler_epoch),
        missed=served.position.memo.missed(),
        forks=getattr(pool, "forks", True),
        remote=getattr(pool, "seconds", None),
    )


def _queued(pid: int) -> float:
    """Seconds that a process was ready to run but had no core; 0 if that is unknown."""
    try:
        # In bytes: a collection of garbage may run this while a codec is being imported.
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            return int(file.read().split()[1]) * _NS
    except (OSError, ValueError, IndexError):
        return 0.0


def _waits(w: _Progress) -> dict[str, float]:
    return {
        "total": w["wait_ns"] * _NS,
        "mean": w["wait_ns"] / max(1, w["waits"]) * _NS,
        "max": w["wait_max_ns"] * _NS,
        "between": w["used_ns"] * _NS,
        "share": w["wait_ns"] / max(1, w["wait_ns"] + w["used_ns"]),
    }


def _predictors(s: _Costs) -> Fields:
    """Which predictor of costs serves, and how well each does."""
    if s["hinted"]:
        names, best, alike = _core.hint_predictors, s["by"], s["correlations"]
        off = s["errors"]
    else:
        names = _core.bytes_predictors if CORE else ("history",)
        best, alike = s["bytes_by"], s["bytes_correlations"]
        off = None if math.isnan(s["bytes_errors"][0]) else s["bytes_errors"]
    known = {name: None if math.isnan(r) else r for name, r in zip(names, alike)}
    return {
        "hinted": s["hinted"],
        "sized": s["sized"],
        "predicted_by": names[best],
        "off_by": dict(zip(names, map(math.exp, off))) if off else None,
        "correlation": known if any(r is not None for r in known.values()) else None,
    }


def _costs(s: _Costs) -> Fields:
    times: Any = s
    return {
        **{name: times[f"{name}_ns"] * _NS for name in ("mean", "p50", "p75", "p90", "p99", "collate")},
        "slow": None if s["slow_ns"] is None else s["slow_ns"] * _NS,
        **{name: times[name] for name in ("split", "samples", "known")},
        **_predictors(s),
    }


def _locality(s: _Costs, timing: _Progress) -> Fields:
    times: Any = s
    return {
        "together": timing["together"],
        "group": s["group"],
        "helped": timing["helped"],
        **{name: times[f"{name}_ns"] * _NS for name in ("opening", "each", "away")},
    }


def _slowest(costs: Any, most: int = 10) -> list[tuple[int, float]]:
    return [(index, wall * _NS) for index, wall in costs.slowest(most)]


def _scheduler(s: _Scheduler | None) -> Fields | None:
    if s is None:
        return None
    return {
        "active": s["active"],
        "low": s["low"],
        "high": s["high"],
        "stragglers": s["stragglers"],
        "decisions": [
            {
                "at": one.at_ns * _NS,
                "from": one.before,
                "to": one.after,
                "why": one.text,
                "occupancy": one.occupancy / 1000,
                "cpu": one.cpu / 1000,
                "wait": one.wait / 1000,
                "rate": one.rate,
            }
            for one in s["decisions"]
        ],
    }


def worker_state(number: int) -> str:
    """The name of a worker's state, by the engine's number."""
    return _core.worker_states[number] if number < len(_core.worker_states) else "damaged"


def _worker(w: _WorkerEntry) -> Fields:
    return {
        # A worker writes this record itself and may damage it; then it is killed.
        "state": worker_state(w["state"]),
        "pid": w["pid"],
        "running": w["running"],
        "tasks": w["tasks"],
        "rows": w["rows"],
        "busy": w["busy_ns"] * _NS,
        "cpu": w["cpu_ns"] * _NS,
    }


# ---- words on a cache: that it is too small, is off, or would help -----------------------------

#: causes that a cache does away with, from the second epoch on
HELPED = ("too few workers", "computing workers", "slow storage", "no workers")


def cache_words(loader: Any, stats: Fields) -> str:
    """A sentence for the verdict, or ""; of caches that the dataset uses by itself, too."""
    cache, memo = stats["cache"], memo_of(loader)
    if cache is None and not memo.misses:
        return _would_help(loader, stats)
    if cache is not None and cache["off"] is not None:
        return f"There is no cache, so samples are made each time: {cache['off']}."
    missed = memo.missed()
    named = any(cause["name"] == SMALL_CACHE for cause in stats["causes"])
    if named or missed is None or not missed.too_small:
        return ""
    return (
        f"The cache has no room for {missed.refused} of {missed.values} values that were made, so each "
        f"epoch makes them again. {larger(missed)}"
    )


def _would_help(loader: Any, stats: Fields) -> str:
    """Advises a loader without a cache whose dataset could be read through one."""
    if not CORE:
        return ""  # there is no cache on this system, and its modules are not imported
    names = [cause["name"] for cause in stats["causes"][:1]]
    if not names or names[0] not in HELPED or option(loader, "cache") is not None:
        return ""
    if stats["worker_type"] == "native" and names[0] != "slow storage":
        return ""  # they read files that the page cache has
    from ..cache.datasets import readable

    if not readable(loader.dataset):
        return ""
    return (
        'A cache (cache="16GiB", or the size of your data) would keep the deterministic part of each '
        "sample, so that later epochs do not make it again."
    )
