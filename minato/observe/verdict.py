"""``stats()["verdict"]``: one sentence for people. Is the trainer waiting, for what, and what
would help?
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

#: batches before anything is said about waiting: the first ones are always waited for
FEW = 3
#: share of the time from which on waiting is worth words
WORTH = 0.02
#: share of its time that a worker works from which on it counts as busy; the rest is start,
#: the end of epochs, and what a shared machine takes
BUSY = 0.6
#: seconds; cheaper samples cost less to make than to hand over
CHEAP = 20e-6

#: reasons of the worker scheduler, enum mn_scaler_reason
GROWS, UNDONE, CPU_BUSY, AT_MAX, AT_CEILING, NO_MEMORY = (2, 3), 5, 7, 8, 9, 13
FULL = (4, 10, 11, 14)


@dataclass(frozen=True)
class Facts:
    """What the sentence needs beside the statistics; times in seconds."""

    cores: int = 1
    #: that workers could have computed and had no core
    queued: float = 0.0
    #: wait for the first batch, workers' start included
    first: float = 0.0
    #: share of the waits while memory_limit held tasks back
    held: float = 0.0
    #: of a batch: in collate_fn where workers run it, and in its samples
    collate: float = 0.0
    fetch: float = 0.0
    #: mean of a sample; 0: not known
    mean: float = 0.0
    slowest: tuple[int, float] | None = None
    #: of the worker scheduler's last decision; None: it has made none, or there is none
    reason: int | None = None
    balanced: bool = True
    persistent: bool = False


def verdict(stats: dict[str, Any], batches: int, facts: Facts) -> str:
    """The sentence, from the fields of ``stats()`` and the number of batches waited for."""
    if stats["deaths"] and _threads(stats):
        return (
            f"{stats['deaths']} worker thread(s) ended by SystemExit or the like; the samples they "
            "were at are lost. Let samples raise an Exception."
        )
    if stats["deaths"]:
        again = "their samples were tried again" if stats["retries"] else "none was retried"
        return (
            f"{stats['deaths']} worker(s) died; {again}. Memory (is there an out-of-memory "
            "killer in the system's log?) and native code in the dataset are the usual causes."
        )
    if batches < FEW:
        return f"Too early to say: {batches} batch(es) were asked for."
    wait = stats["wait"]
    share, elapsed = wait["share"], wait["total"] + wait["between"]
    if copying := _copying(stats, elapsed):
        return copying
    if share < WORTH:
        return f"The trainer hardly waits for data ({share:.0%} of its time)."
    if wait["total"] - facts.first < WORTH * elapsed:
        return (
            f"The trainer hardly waits for data but for the first batch ({facts.first:.2f} s): "
            "workers start and make it." + _keep(facts)
        )
    return f"The trainer waits {share:.0%} of its time" + (
        _held(stats, facts)
        or _once(wait, facts)
        or _scheduler(stats, facts)
        or _cause(stats, facts)
    )


def _threads(stats: dict[str, Any]) -> bool:
    return stats.get("worker_type") == "thread"


def _keep(facts: Facts) -> str:
    return "" if facts.persistent else " persistent_workers=True keeps them for later epochs."


def _copying(stats: dict[str, Any], elapsed: float) -> str:
    """Where it is the copies to the device that are waited for."""
    device: dict[str, Any] | None = stats.get("device")
    if device is None or not device["batches"]:
        return ""
    size = device["bytes"] / device["batches"] / 1e6
    what = f"batches of {size:.3g} MB are copied there"
    smaller = (
        "Fewer bytes would help: a smaller type in the dataset, cast on the device, or a crop "
        "before the copy."
    )
    if device["stalled"] > WORTH * elapsed:
        speed = device["bandwidth"]
        at = f" at {speed / 1e9:.3g} GB/s" if speed else ""
        return (
            f"{device['device']} waits {device['stalled'] / elapsed:.0%} of the time for copies: "
            f"{what}{at}. {smaller}"
        )
    waited = device["waited"]
    if waited > WORTH * elapsed and waited > 0.5 * stats["wait"]["total"]:
        return (
            f"The trainer waits {waited / elapsed:.0%} of its time for the thread that hands "
            f"batches to {device['device']}: {what}, by way of page-locked memory. {smaller}"
        )
    return ""


def _busy(stats: dict[str, Any]) -> tuple[int, float, float]:
    """Workers, their seconds in tasks, and of those on a core."""
    ready = [w for w in stats["workers"] if w["state"] == "ready"]
    return len(ready), sum(w["busy"] for w in ready), sum(w["cpu"] for w in ready)


def _idle(stats: dict[str, Any]) -> bool:
    """Whether workers had nothing to do for much of the time."""
    count, busy, _cpu = _busy(stats)
    wall: float = stats["wait"]["total"] + stats["wait"]["between"]
    return busy < BUSY * count * wall


def _held(stats: dict[str, Any], facts: Facts) -> str:
    full = stats["memory"]["used"] > 0.9 * stats["memory"]["limit"]
    if _idle(stats) and (facts.held > 0.5 or full):
        return " while workers idle: memory_limit holds them back; raise it, or keep fewer batches."
    return ""


def _once(wait: dict[str, float], facts: Facts) -> str:
    """Few long waits."""
    if facts.first > 0.5 * wait["total"]:
        return (
            f", most of it for the first batch ({facts.first:.2f} s): workers start and make it."
            + _keep(facts)
        )
    slow, most = facts.slowest, wait["max"]
    if slow is not None and most > 0.3 * wait["total"] and slow[1] > 0.5 * most:
        return (
            f", up to {most:.2f} s at once: sample {slow[0]} alone takes {slow[1]:.2f} s. From "
            "the second epoch on it begins earlier, as early as the epoch's begin and "
            "memory_limit allow; making it cheaper helps at once."
        )
    if most > 0.5 * wait["total"]:
        return f", most of it once ({most:.2f} s): one slow batch, or a pause of the machine."
    return ""


def _scheduler(stats: dict[str, Any], facts: Facts) -> str:
    """What the worker scheduler has found out."""
    if facts.reason in (UNDONE, AT_CEILING):
        return (
            "; more workers were tried and did not help: what they share (a disk, a lock, the "
            "network) is at its limit."
        )
    if facts.reason in GROWS:
        now, most = (stats["scheduler"][name] for name in ("active", "high"))
        return f"; the worker scheduler is adding workers ({now} now, {most} at most)."
    if facts.reason in FULL:
        now, most = (stats["scheduler"][name] for name in ("active", "high"))
        return f" in all; batches are ready in time now, with {now} workers of {most} at most."
    if facts.reason == NO_MEMORY:
        return "; more workers might help, but memory has no room for them."
    return ""


def _cause(stats: dict[str, Any], facts: Facts) -> str:
    """What it waits for all along, and what would help."""
    count, busy, cpu = _busy(stats)
    if facts.mean and facts.mean < CHEAP and facts.collate < facts.fetch:
        return (
            f"; samples are cheaper to make ({facts.mean * 1e6:.1f} us) than to hand over. "
            "Larger batches, or num_workers=0, may be faster."
        )
    # with these reasons the workers have work, even if some have begun only now
    if _idle(stats) and facts.reason not in (CPU_BUSY, AT_MAX):
        return (
            " while workers idle: too little is asked of them ahead. Raise prefetch_factor; "
            "samples known to be slow begin earlier from the second epoch on."
        )
    if facts.collate > facts.fetch:
        return (
            f"; most of the work is collate_fn ({facts.collate * 1e3:.3g} ms a batch, its samples "
            f"{facts.fetch * 1e3:.3g} ms). A cheaper one would help."
        )
    if facts.queued > 0.5 * (busy - cpu) and facts.queued > 0.25 * busy:
        return (
            f"; the workers get {cpu / (cpu + facts.queued):.0%} of the core time they could "
            f"use: {count} of them, the trainer and other programs share {facts.cores} "
            "core(s). More workers would not help."
        )
    if opens := _opens(stats):
        return opens
    with_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    if _threads(stats) and with_gil and _take_turns(stats, facts):
        return (
            "; the worker threads run Python code, one at a time, because that needs the GIL. "
            "worker_type='process' would help."
        )
    if cpu > 0.5 * busy:
        if count < facts.cores:
            return (
                f"; all workers compute, and there are {count} for {facts.cores} cores. "
                f"More would help: {_more(stats, facts)}."
            )
        return "; all workers compute. Cheaper transforms or more cores would help."
    return (
        "; all workers wait themselves (storage, network, locks). Unless it is for each other, "
        f"more workers would help: {_more(stats, facts)}."
    )


def _take_turns(stats: dict[str, Any], facts: Facts) -> bool:
    """Whether workers keep one core busy, all of them together, and wait for it."""
    count, busy, cpu = _busy(stats)
    wall: float = stats["wait"]["total"] + stats["wait"]["between"]
    one = 0.6 * wall < cpu < 1.2 * wall
    return count > 1 and facts.cores > 1 and one and busy > 1.5 * cpu


def _opens(stats: dict[str, Any]) -> str:
    """Where most of the work is opening what samples share."""
    place = stats["locality"]
    if place is None or not place["opening"]:
        return ""
    share = place["opening"] / (place["opening"] + place["group"] * place["each"])
    if share < 0.5:
        return ""
    return (
        f"; {share:.0%} of the work is opening what samples share: {place['opening'] * 1e3:.3g} ms "
        f"for about {place['group']:.0f} of them, which take {place['each'] * 1e3:.3g} ms each. A "
        "sampler that keeps more of a group together, larger groups, or a locality_key() that "
        "tells them would help."
    )


def _more(stats: dict[str, Any], facts: Facts) -> str:
    if stats["scheduler"] is not None:
        return "raise autoscale's upper bound"
    return "raise num_workers" + (", or set autoscale" if facts.balanced else "")
