"""``DataLoader.stats()``: what the latest iterator has done and what it waits for.

Fields (times in seconds, sizes in bytes):

epoch, delivered            epoch of the iterator, batches handed over in it so far
wait                        of the caller in ``next()``: total, mean, max, share of its time
batch_queue                 window (batches), ready (complete), planned (not started)
started                     tasks by reason: window (steady), early (known to be slow), ahead
                            (workers would have idled), finale (costliest first), order
cost                        of a sample: mean, p50, p75, p90, p99, slow (threshold or None),
                            samples seen, indices known
slow                        the costliest known indices: [(index, seconds)]
workers                     one dict each: state, pid, running (batch, row), tasks, rows, busy,
                            cpu
retries, deaths             tasks given to another worker, workers that died
scheduler                   with max_workers: active, max, slow (samples flagged so far),
                            decisions [{at, from, to, why, occupancy, cpu, wait, rate}]; None
memory                      used (arena), kept (by the caller), limit, in_flight (batches)
verdict                     one sentence: is the caller waiting, for what, what would help
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._memo import memo_of

_STATES = ("none", "wanted", "starting", "ready", "exited", "swept")
_REASONS = ("window", "early", "ahead", "finale", "order")
_NS = 1e-9


def collect(loader: Any) -> dict[str, Any]:
    """The statistics of a loader; only ``epoch`` and ``verdict`` before its first use."""
    memo = memo_of(loader)
    iterator = memo.iterator() if memo.iterator is not None else None
    stats: dict[str, Any] = {"epoch": memo.progress.epoch if memo.progress else 0}
    if memo.progress is not None:
        stats["delivered"] = memo.progress.count
    stats["cost"] = _costs(memo.costs.summary())
    stats["slow"] = _slowest(memo.costs)
    if iterator is None or iterator._pool is None or iterator._pool.stopped:
        stats["verdict"] = memo.last_verdict
        return stats
    stats.update(engine_stats(iterator))
    memo.last_verdict = stats["verdict"]
    return stats


def engine_stats(iterator: Any) -> dict[str, Any]:
    """The part that needs a living iterator."""
    engine = iterator._engine
    health, memory = engine.health(), engine.memory()
    out: dict[str, Any] = {
        "workers": [_worker(w) for w in engine.workers()],
        "retries": health["retries"],
        "deaths": health["deaths"],
        "memory": {k: memory[k] for k in ("used", "kept", "limit", "in_flight")},
    }
    if iterator._balanced:
        t = engine.timing()
        waits = max(1, t["waits"])
        busy = t["consumer_ns"] * t["waits"]
        out["wait"] = {
            "total": t["wait_ns"] * _NS,
            "mean": t["wait_ns"] / waits * _NS,
            "max": t["wait_max_ns"] * _NS,
            "share": t["wait_ns"] / max(1, t["wait_ns"] + busy),
        }
        out["batch_queue"] = {
            "window": iterator._prefetch_factor * iterator._num_workers,
            "ready": t["ready"],
            "planned": t["planned"],
        }
        out["scheduler"] = _scheduler(engine.scheduler())
        out["started"] = dict(zip(_REASONS, t["starts"]))
    out["verdict"] = verdict(out)
    return out


def _costs(s: dict[str, Any]) -> dict[str, Any]:
    out = {k[:-3]: s[k] * _NS for k in ("mean_ns", "p50_ns", "p75_ns", "p90_ns", "p99_ns")}
    out["slow"] = None if s["slow_ns"] is None else s["slow_ns"] * _NS
    return {**out, "samples": s["samples"], "known": s["known"]}


def _slowest(costs: Any, most: int = 10) -> list[tuple[int, float]]:
    index, wall, _cpu = (np.frombuffer(part, np.int64) for part in costs.save())
    if index.size == 0:
        return []
    first = np.argsort(-wall, kind="stable")[:most]
    return [(int(index[i]), float(wall[i]) * _NS) for i in first]


def _scheduler(s: dict[str, Any] | None) -> dict[str, Any] | None:
    if s is None:
        return None
    return {
        **s,
        "decisions": [
            {
                "at": at * _NS,
                "from": before,
                "to": after,
                "why": why,
                "occupancy": occupancy / 1000,
                "cpu": cpu / 1000,
                "wait": wait / 1000,
                "rate": rate,
            }
            for at, before, after, _reason, why, occupancy, cpu, wait, rate in s["decisions"]
        ],
    }


def _worker(w: dict[str, Any]) -> dict[str, Any]:
    return {
        "state": _STATES[w["state"]],
        "pid": w["pid"],
        "running": w["running"],
        "tasks": w["tasks"],
        "rows": w["rows"],
        "busy": w["busy_ns"] * _NS,
        "cpu": w["cpu_ns"] * _NS,
    }


def verdict(stats: dict[str, Any]) -> str:
    """One sentence for people, from the other fields."""
    if stats["deaths"]:
        return f"{stats['deaths']} worker(s) died; their samples were tried again."
    wait = stats.get("wait")
    if wait is None:
        return "Static scheduling: the trainer's waiting is not measured."
    share = wait["share"]
    if share < 0.02:
        return f"The trainer hardly waits for data ({share:.0%} of its time)."
    busy = [w for w in stats["workers"] if w["state"] == "ready" and w["running"]]
    computing = sum(w["cpu"] for w in stats["workers"]) > 0.7 * sum(
        w["busy"] for w in stats["workers"]
    )
    ready = [w for w in stats["workers"] if w["state"] == "ready"]
    if len(busy) < len(ready):
        held = stats["memory"]["used"] > 0.9 * stats["memory"]["limit"]
        cause = "memory_limit holds them back" if held else "too little is asked of them ahead"
        help_ = "raise memory_limit" if held else "raise prefetch_factor"
        return f"The trainer waits {share:.0%} of its time while workers idle: {cause}; {help_}."
    if computing:
        return (
            f"The trainer waits {share:.0%} of its time; all workers compute. Cheaper "
            "transforms or more cores would help, more workers only with idle cores."
        )
    return (
        f"The trainer waits {share:.0%} of its time; all workers wait themselves (storage, "
        "network). More workers would help."
    )
