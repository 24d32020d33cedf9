"""The one limit of a program, from what was watched and measured."""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import replace

from .facts import (
    OTHERS,
    WORTH,
    Facts,
    is_uneven,
    reading_stages,
    scheduling_gain,
    slow_share,
    wait_seconds,
)
from .records import Limit, StageTimes
from .text import format_count, format_place, format_rate, format_seconds

#: share of its time that a program waits. Below the first the step is the limit; below the second a
#: loader that costs nothing would gain too little to matter
NO_WAIT, LITTLE_WAIT = 0.02, 0.10
#: samples that several processes make at once take longer by this where they share something
SHARED = 1.35
#: seconds that are no wait yet, but what clocks and caches do
BARELY = 50e-6
#: share of a sample from which opening files is the limit: it can be saved whole
OPENED = 0.4
#: share of its time that a sample computes, from which threads that hold the interpreter's lock wait
#: for each other because of that lock
COMPUTES = 0.5
#: The workers slow a step down if it waits for a core for more than the first share of its time, samples
#: take more than that share of the CPU time, and the cores are busy for more than the second share.
CROWDED, BUSY = 0.15, 0.8
KINDS = {
    "step": "the step", "nothing": "none in loading", "storage": "storage", "lock": "a lock",
    "interpreter": "the interpreter's lock", "stragglers": "stragglers", "workers": "too few workers",
    "work": "the work of a sample", "cores": "the cores", "hand-over": "handing samples over",
    "start": "starting workers", "collate": "collate_fn", "sampler": "the sampler",
    "open": "opening a file for each sample",
    "shared": "something that workers share", "unknown": "not known",
}  # fmt: skip


def limit(f: Facts) -> Limit:
    """The kind of the limit, and the sentence that is the first line of the answer."""
    kind, why = _limit(f) or ("unknown", _explain_unknown(f))
    return Limit(kind, f"Limit: {KINDS[kind]}. {why}")


def _explain_unknown(f: Facts) -> str:
    wait = f.watched.wait
    if wait is None:
        return "Too little was measured to say."
    waits = f"The program waits for data {wait:.0%} of its time"
    if why := f.report.unstudied:
        return f"{waits}, and its samples were not studied, because {why}."
    if f.work.failed and not f.costs:
        why = "no sample could be made in the study"
        if files_went(f):
            why = "its files were gone when it had ended. Run it again with --pause, which studies it before that"
        return f"{waits}, and what it waits for is not known: {why}."
    return f"{waits}, and too little of it was measured to say why."


def files_went(f: Facts) -> bool:
    """Whether samples failed because the program had removed their files at its end. A socket to a
    server that has gone is another matter: its error has no path."""
    failed = (f.work.failed or [""])[0]
    return bool(re.search("FileNotFoundError.*: '", failed)) and "--pause" not in f.report.machine.argv


def _limit(f: Facts) -> tuple[str, str] | None:
    wait = f.watched.wait
    if step_lacks_cores(f):
        return "cores", _crowded_step(f)
    if wait is not None and wait < NO_WAIT:
        return "step", f"The program waits for data {wait:.1%} of its time, so no loader would make it faster."
    if wait is not None and wait < LITTLE_WAIT:
        return "nothing", (
            f"Nothing to gain there: the program waits for data {wait:.0%} of its time, so with a loader "
            f"that costs nothing it would be {1 / (1 - wait):.2f} times as fast."
        )
    if not f.costs:
        return None
    return (
        starting(f) or slow_sampler(f) or _stragglers(f) or shared_wait(f) or thread_wait(f) or _opens(f) or _storage(f) or _collate(f)
        or hand_over(f) or _workers(f, 1.5) or _one_stage(f) or _workers(f, 1.2) or _cores(f)
    )  # fmt: skip


def step_lacks_cores(f: Facts) -> bool:
    """Whether the program waits little for data only because its workers slow its step down: they keep
    all cores busy together. Cheaper samples would help then."""
    wait = f.watched.wait
    if wait is None or wait >= LITTLE_WAIT or not f.workers or not f.costs or f.watched_others() > OTHERS:
        return False
    together = f.sample_cpu(f.own, f.workers) + f.step_cpu()
    busy = f.watched.delivered * together / f.cores
    share = f.sample_cpu(f.own, f.workers) / max(together, 1e-9)
    return f.queued_step() > CROWDED and busy > BUSY and share > CROWDED


def _crowded_step(f: Facts) -> str:
    cpu = f.sample_cpu(f.own, f.workers)
    label, share = f.top()
    return (
        f"The step and {format_count(f.workers, 'worker')} share them: the step waits for a core {f.queued_step():.0%} of its "
        f"time, and samples take {cpu / (cpu + f.step_cpu()):.0%} of the CPU time. {share:.0%} of a sample is "
        f"{label}."
    )


def starting(f: Facts) -> tuple[str, str] | None:
    """Workers that start anew in each epoch, where epochs are short or starts are slow."""
    rate = f.own_rate()
    if not f.starts_again or not f.start or f.watched.starts < 2 or not rate:
        return None
    seconds = f.start_alone() / max(1, f.epoch_samples())
    share = min(1.0, max(seconds, f.end_seconds(f.own, f.workers)) * f.program_rate(rate, f.workers))
    if share < 0.5:
        return None
    return "start", (
        f"Workers start anew in each epoch: {format_seconds(f.start)} until its first batch, and "
        f"{share:.0%} of the program's time. persistent_workers=True starts them once."
    )


def slow_sampler(f: Facts) -> tuple[str, str] | None:
    """A sampler that takes most of the time in which the program waits. It runs in the program's own
    process, in turns with the step, however many workers there are."""
    told, inside, rate = f.report.sampler, f.watched.inside, f.own_rate()
    if not told or not inside or not rate or f.sampler < 0.5 * inside / f.batch():
        return None
    if f.without_sampler().program_rate(rate, f.workers) < WORTH * f.program_rate(rate, f.workers):
        return None
    return "sampler", (
        f"{told.name} ({format_place(told.place)}) takes {format_seconds(f.sampler)} to draw the index of "
        f"a sample, in the program's own process; making the sample takes {format_seconds(f.mean)}."
    )


def _stragglers(f: Facts) -> tuple[str, str] | None:
    count, share, times = slow_share(f.costs)
    if not is_uneven(f.costs) or f.workers < 2 or scheduling_gain(f) < WORTH:
        return None
    return "stragglers", (
        f"{count:.1%} of the samples take {share:.0%} of the time, up to {times:.0f} times the "
        "median, and whole batches wait for them while workers idle."
    )


def shared_wait(f: Facts) -> tuple[str, str] | None:
    """A stage for which processes wait for each other."""
    both = f.report.contend
    if not both or not both.one.samples or not both.several.samples:
        return None
    one, several = both.one, both.several
    least = SHARED + 2 * _error_by_chance(f, one.samples, several.samples)
    if several.seconds < least * one.seconds or both.processes > max(2, f.cores):
        return None
    alone = {stage.label: stage for stage in one.stages}
    grown = []
    for stage in several.stages:
        before = alone.get(stage.label, StageTimes())
        more = (stage.seconds - stage.cpu) - (before.seconds - before.cpu)
        grown.append((more, stage))
    rest = [
        total.seconds - total.cpu - sum(s.seconds - s.cpu for s in total.stages)
        for total in (one, several)
    ]
    grown.append((rest[1] - rest[0], StageTimes("__getitem__ itself", "other")))
    more, stage = max(grown, key=lambda pair: pair[0])
    if more < max(0.5 * (several.seconds - one.seconds), 0.2 * one.seconds, BARELY):
        return None
    where = stage.label
    if stage.kind == "lock" and stage.inside and stage.inside != [""]:
        where = stage.inside[0]
    count = both.processes
    rate = count / several.seconds
    once = f"{count} processes at once make {format_rate(rate)} samples/s, one makes {format_rate(1 / one.seconds)}"
    names = reading_stages(several.stages)
    if stage.label in names or set(stage.inside) & names:
        return "storage", f"Reads wait for each other in {where}: {once}, and more would not read faster."
    if (made := f.at_once()) is not None:
        once += f"; {count} threads make {made['threads']:.2g} times as many as one"
    if stage.kind == "lock" or both.locks:
        lock = f" ({', '.join(both.locks)})" if both.locks else ""
        where = "__getitem__" if where in ("", "__getitem__ itself", stage.label) else where
        return "lock", f"Workers wait for each other in {where}{lock}: {once}."
    return "shared", f"Workers wait for each other in {where}: {once}."


def _error_by_chance(f: Facts, *samples: int) -> float:
    """The standard error of the ratio of times, each measured on a number of samples, as a share of
    it: samples that cost more come by chance."""
    if len(f.costs) < 2:
        return 0.0
    return statistics.stdev(f.costs) / f.mean * math.sqrt(sum(1 / n for n in samples))


def thread_wait(f: Facts) -> tuple[str, str] | None:
    """What the threads of a program with ``worker_type="thread"`` wait for."""
    both = f.report.contend
    if not f.threads or (made := f.at_once()) is None or both is None or both.threads is None:
        return None
    told, count = both.threads, both.processes
    if made["threads"] > count / SHARED:
        return None
    rates = (
        f"{count} at once make {made['threads']:.2g} times as many samples as one, {count} processes "
        f"{made['processes']:.2g} times"
    )
    if f.cpu_share > COMPUTES and f.work.gil in ("holds it", "mixed"):
        return "interpreter", f"A sample holds it, so threads take turns: {rates}."
    if told.locks:
        return "lock", f"Threads wait for each other ({', '.join(told.locks)}): {rates}."
    return "shared", f"Threads wait for each other: {rates}."


def opening(f: Facts) -> StageTimes | None:
    """The stage that takes most of the time of those that open what an earlier sample has opened, with the
    time of closing it, and what else a sample takes less where files stay open."""
    opens = {s.label: s for s in f.stages if s.kind == "open" and s.again > 0.5}
    stages = [
        replace(stage, whole=stage.whole + opens.get(f"{label}.close", StageTimes()).whole)
        for label, stage in opens.items() if not label.endswith(".close")
    ]  # fmt: skip
    found = max(stages, key=lambda s: s.whole, default=None)
    if found and f.work.kept_open is not None:
        found.whole = max(found.whole, f.mean - f.work.kept_open)
    return found


def _opens(f: Facts) -> tuple[str, str] | None:
    stage = opening(f)
    if stage is None or stage.whole < OPENED * f.mean:
        return None
    return "open", (
        f"{stage.label} ({format_place(stage.place)}) takes {min(1.0, stage.whole / f.mean):.0%} of a sample, "
        "and opens what earlier samples have opened and closed."
    )


def _storage(f: Facts) -> tuple[str, str] | None:
    labels = reading_stages(f.stages)
    waits = wait_seconds(f.stages, labels)
    if waits < 0.5 * f.mean:
        return None
    names = sorted((s for s in f.stages if s.label in labels), key=lambda s: -s.seconds)
    rate = f.own_rate()
    got = f" The loader gets {format_rate(rate)} samples/s." if rate else ""
    return "storage", (
        f"A sample waits {waits / f.mean:.0%} of its time for reads ({names[0].label}).{got}"
    )


def _collate(f: Facts) -> tuple[str, str] | None:
    """A collate_fn that takes longer than the samples that it joins, and is most of handing over."""
    seconds = f.collate
    if seconds <= f.mean or f.workers and 1 / f.hands_over > 2 * seconds / min(f.workers, f.cores):
        return None
    name = f.loader.get("collate_fn") or "collate_fn"
    return "collate", (
        f"{name} takes {format_seconds(seconds)} for each sample of a batch, {seconds / f.mean:.1f} times "
        "as long as making the sample."
    )


def hand_over(f: Facts) -> tuple[str, str] | None:
    """Samples that workers make in less time than it takes to hand them over."""
    at_once = min(f.workers, f.cores / max(f.cpu_share, 1e-9))
    if not f.workers or f.hands_over > 0.5 * at_once / f.mean:
        return None
    return "hand-over", (
        f"Workers make a sample in {format_seconds(f.mean / at_once)}, and the loader hands one over in "
        f"{format_seconds(1 / f.hands_over)}. Larger batches, or num_workers=0, may be faster."
    )


def _workers(f: Facts, gain: float) -> tuple[str, str] | None:
    rate, more = f.own_rate(), f.rate(f.own, f.cores)
    if not rate or not more or f.workers >= f.cores or more < gain * rate:
        return None
    label, share = f.top()
    have = "the program makes samples itself (num_workers=0)" if not f.workers else (
        f"there {'is' if f.workers == 1 else 'are'} {format_count(f.workers, 'worker')}"
    )  # fmt: skip
    return "workers", (
        f"{have[0].upper()}{have[1:]}, and {f.cores} workers make {more / rate:.2g} times as many samples. "
        f"{share:.0%} of a sample is {label}."
    )


def _one_stage(f: Facts) -> tuple[str, str] | None:
    label, share = f.top()
    if share < 0.6 or label in ("__getitem__ itself", "__iter__ itself"):
        return None
    return _most_in(f, label, share)


def _most_in(f: Facts, label: str, share: float) -> tuple[str, str]:
    makers = f"{f.workers} worker{'s make' if f.workers > 1 else ' makes'} them"
    if not f.workers:
        makers = "the program makes its samples itself (num_workers=0)"
    return "work", f"{share:.0%} of it is {label}; {makers}, on {f.cores} cores."


def _cores(f: Facts) -> tuple[str, str]:
    label, share = f.top()
    if f.cpu_share > 0.6 and f.workers >= f.cores:
        every = {1: "it", 2: "both of them"}.get(f.cores, f"all {f.cores} of them")
        return "cores", f"Workers keep {every} busy; {share:.0%} of a sample is {label}."
    return _most_in(f, label, share)
