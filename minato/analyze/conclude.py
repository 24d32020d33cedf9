"""From what was watched and measured to one limit, and to what would help: functions of numbers.

Rates are samples a second, times are seconds. The facts are those of ``report.json``.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import re
import shlex
import statistics
from collections.abc import Sequence
from typing import Any

from .watch import FIRST

#: steps without which a median says little
ENOUGH = 20
#: share of its time that a program waits. Below the first the step is the limit; below the second a
#: loader that costs nothing would gain too little to matter
NO_WAIT, LITTLE_WAIT = 0.02, 0.10
#: a gain that is worth words
WORTH = 1.10
#: a step longer than these seconds, and than this multiple of the median, has something else in it
PAUSE_S, PAUSE = 1.0, 10.0
#: a rate whose range is wider than this is told with the range
UNCERTAIN = 1.3
#: share of the cores that others may use
OTHERS = 0.25
#: samples are uneven where the slowest twentieth takes this share of the time ...
SLOW_SHARE = 0.25
#: ... and one of them as often the median
SLOW_TIMES = 4.0
#: samples that several processes make at once take longer by this where they share something
SHARED = 1.35
#: seconds that are no wait yet, but what clocks and caches do
BARELY = 50e-6
#: the least bound of a prediction's error
BOUND = 0.15
#: batches that minato may be ahead of the trainer, in torch's windows
AHEAD = 8
#: bytes a second at which a cached sample is copied out
COPIES = 4e9
#: share of the available memory that a cache may take
CACHED = 0.5

#: decibels of the worst image, and quality, below which a codec is not recommended. Networks
#: trained on JPEG 75 and less were found to be less accurate
LOSS, QUALITY = 30.0, 75
#: decibels by which a codec may lose more and still count as equal
EQUAL = 0.5
#: a codec that loses less is preferred to one that is faster by less than this
CLOSE = 1.05
#: of these, one whose samples take more CPU time than this multiple of the least is left out
CHEAP = 1.3
#: storages that codecs are compared on: bytes a second
STORAGES = (
    ("network, 5 MB/s", 5e6), ("disk, 23 MB/s", 23e6), ("SSD, 280 MB/s", 280e6), ("memory", math.inf),
)  # fmt: skip

#: share of its time that a sample computes, from which threads that hold the interpreter's lock wait
#: for each other because of that lock
COMPUTES = 0.5

KINDS = {
    "step": "the step", "nothing": "none in loading", "storage": "storage", "lock": "a lock",
    "interpreter": "the interpreter's lock", "stragglers": "stragglers", "workers": "too few workers",
    "work": "the work of a sample", "cores": "the cores", "hand-over": "handing samples over",
    "start": "starting workers", "collate": "collate_fn",
    "shared": "something that workers share", "unknown": "not settled",
}  # fmt: skip

#: transforms by their class, and the operator of minato.ops that does the same in C
TWINS = {
    "RandFlip": "RandFlip", "RandFlipd": "RandFlip", "RandomFlip": "RandFlip",
    "RandBalancedCrop": "RandBalancedCrop", "RandCropByPosNegLabeld": "RandBalancedCrop",
    "RandSpatialCrop": "RandCrop", "RandSpatialCropd": "RandCrop", "Cast": "Cast",
    "CastToType": "Cast", "CastToTyped": "Cast", "RandBrightness": "RandScaleIntensity",
    "RandScaleIntensity": "RandScaleIntensity", "RandScaleIntensityd": "RandScaleIntensity",
    "GaussianNoise": "RandGaussianNoise", "RandGaussianNoise": "RandGaussianNoise",
    "RandGaussianNoised": "RandGaussianNoise", "NormalizeIntensity": "Normalize",
    "NormalizeIntensityd": "Normalize", "SpatialPad": "Pad", "SpatialPadd": "Pad",
}  # fmt: skip


# ---- what the watch saw --------------------------------------------------------------------


def watch_facts(told: dict[str, Any], others: float = 0.0) -> dict[str, Any]:
    """Rates and shares of the loader that was watched; rates are None where too little was seen.
    others: share of the cores that other programs used then. If the share is large, a time in which
    the program could have run and had no core is no waiting for data ("queued")."""
    used, start = _choose_steps(told)
    rows = [row for row, _size in told["sizes"]]
    batch = int(statistics.median(rows)) if rows else told["loader"].get("batch_size") or 1
    found: dict[str, Any] = {
        "batches": told["batches"], "steps": len(used), "batch": batch, "asked": None,
        "delivered": None, "range": None, "wait": None, "step": None, "inside": None,
        "step_cores": 0.0, "queued": 0.0, "by": "step while loading", "shapes": told["shapes"],
        "bytes": statistics.median(size for _, size in told["sizes"]) if rows else 0,
        "start": statistics.fmean(told["starts"][1:] or told["starts"]) if told["starts"] else None,
        "starts": len(told["starts"]), "whole": max(0, len(told.get("whole") or []) - 1),
        "objects": told.get("objects", 1),
    }  # fmt: skip
    if not used:
        return found
    queued = statistics.fmean(step[3] for step in used) if others > OTHERS else 0.0
    inside = statistics.fmean(step[0] for step in used) - queued + start
    step = statistics.median(step[1] for step in used)
    cpu = statistics.median(step[2] for step in used)
    # a step with a validation or a checkpoint in it counts as any other
    times = [s[0] + (step if s[1] > max(PAUSE_S, PAUSE * step) else s[1]) + start for s in used]
    found["step_cores"] = cpu / step if step > 0 else 0.0
    device = [(idle / 1e3, work / 1e3) for idle, work in told.get("device") or []][FIRST:]
    whole = statistics.fmean(times)
    if len(device) >= ENOUGH / 2:
        inside = statistics.fmean(idle for idle, _ in device)
        step = statistics.median(work for _, work in device)
        found["by"] = "events on the device"
        whole, queued = inside + step, 0.0
    whole = max(whole, 1e-9)
    found.update(
        inside=inside, step=step, wait=min(1.0, inside / max(whole - queued, 1e-9)),
        queued=queued / whole, delivered=batch / whole,
        asked=batch / max(step, 1e-9), range=_delivered_range(times, whole, batch),
    )  # fmt: skip
    return found


def _choose_steps(told: dict[str, Any]) -> tuple[list[Any], float]:
    """The steps that rates are taken from, and what waits at the starts of epochs add to each.

    Whole epochs after the first, where there are some: such waits are in them. Else the steps that
    were seen without the first batch of the run, and without the first ten if more than twice as many
    are left; the start of an epoch is shared out to its batches where each epoch has one."""
    steps, whole = told["steps"], told.get("whole") or []
    shift = told["noted"] - len(steps)  # earlier ones were not told
    epochs: dict[int, list[Any]] = {}
    begins: dict[int, int] = {}
    for number, step in enumerate(steps):
        epoch = step[4] if len(step) > 4 else 0
        epochs.setdefault(epoch, []).append(step)
        begins.setdefault(epoch, number)
    for least in (FIRST, 1):
        chosen = [epochs[n] for n in whole if n in epochs and begins[n] + shift >= least
                  and (begins[n] or not shift)]  # fmt: skip
        if sum(map(len, chosen)) >= ENOUGH / 2:
            return [step for each in chosen for step in each], 0.0
    firsts = {begin for epoch, begin in begins.items() if begin or not shift and len(steps[0]) > 4}
    used = [step for number, step in enumerate(steps) if number not in firsts]
    if not shift and len(used) >= 3 * FIRST:
        used = used[FIRST:]
    loader, starts = told["loader"], told["starts"]
    length = loader.get("length") or (len(epochs[whole[0]]) if whole and whole[0] in epochs else 0)
    again = starts[1:] if loader.get("persistent_workers") or not loader.get("num_workers") else starts
    if not used or not again or not length:
        return used, 0.0
    usual = statistics.fmean(step[0] for step in used)
    return used, max(0.0, statistics.fmean(again) - usual) / length


def _delivered_range(times: list[float], whole: float, batch: int) -> list[float] | None:
    """Samples a second between which the delivered rate lies, by how much the parts of what was seen
    differ; None where too few steps were seen to say."""
    count = min(8, len(times) // 2)
    if count < 2:
        return None
    cuts = [len(times) * n // count for n in range(count + 1)]
    means = [statistics.fmean(times[a:b]) for a, b in itertools.pairwise(cuts)]
    error = 2 * statistics.stdev(means) / math.sqrt(count) / max(statistics.fmean(times), 1e-9)
    return [batch / (whole * (1 + error)), batch / (whole * max(1 - error, 0.1))]


# ---- models --------------------------------------------------------------------------------


def simulate_rate(
    costs: Sequence[float], batch: int, workers: int, prefetch: int, step: float = 0.0,
    balanced: bool = False, batches: int = 400, epoch: int = 0,
) -> float:
    """The rate of a loader in virtual time. torch: batch i on worker i mod n. Balanced: each sample
    on the worker that is free first. Both deliver in order, ``prefetch`` batches a worker ahead;
    balanced may be further ahead behind a slow sample. epoch: batches after which the loader begins
    anew, when the last one is used; 0 where it does not, or begins the next epoch early."""  # fmt: skip
    workers = max(1, workers)
    window = prefetch * workers * (AHEAD if balanced else 1)
    if epoch >= batches:
        epoch = 0
    if epoch:
        batches = epoch * math.ceil(batches / epoch)
    source = itertools.cycle(costs)
    got: list[float] = []
    free = [0.0] * workers
    heap = [(0.0, n) for n in range(workers)]
    ready = begun = 0.0
    for number in range(batches):
        inside = number % epoch if epoch else number
        if epoch and not inside:
            begun = ready
        sent = got[number - window] if inside >= window else begun
        if balanced:
            done = 0.0
            for _ in range(batch):
                at, worker = heapq.heappop(heap)
                end = max(at, sent) + next(source)
                heapq.heappush(heap, (end, worker))
                done = max(done, end)
        else:
            worker = inside % workers
            done = max(free[worker], sent) + sum(itertools.islice(source, batch))
            free[worker] = done
        got.append(max(done, ready))
        ready = got[-1] + step
    if epoch:
        return batches * batch / max(ready, 1e-12)
    skipped = min(workers, batches // 4)
    return (batches - skipped) * batch / max(ready - got[skipped - 1], 1e-12)


def fit_scaling(points: dict[int, float]) -> tuple[float, float] | None:
    """(rate of one worker, what each further one loses) from rates by number of workers:
    rate(n) = n * one / (1 + lost * (n - 1)). None from fewer than two numbers."""
    counts = sorted(n for n in points if n > 0)
    if len(counts) < 2:
        return None
    low = counts[0]
    lost = 0.0
    most = counts[-1]  # the nearest to what is asked of the fit
    one = points[low] / low
    for _ in range(20):  # the lowest count may be more than one
        lost = max(0.0, (most * one / points[most] - 1) / (most - 1))
        one = points[low] * (1 + lost * (low - 1)) / low
    return one, lost


def scaled_rate(fit: tuple[float, float], workers: int) -> float:
    one, lost = fit
    return workers * one / (1 + lost * (workers - 1))


def rate_with_step(rate: float, asked: float | None, workers: int, lost: float = 0.0) -> float:
    """What a program gets of a loader's rate: in turns with its step without workers. lost: seconds a
    sample that the ends of epochs cost, in which the step has nothing to do."""
    asked = math.inf if asked is None else asked
    within = 1 / min(asked, rate) if workers else 1 / asked + 1 / rate
    return 1 / (within + lost)


# ---- the facts, read -----------------------------------------------------------------------


class Facts:
    """What was watched and measured, with the numbers that follow from it."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.all = facts
        self.watched: dict[str, Any] = facts["watched"]
        self.loader: dict[str, Any] = facts["loader"]
        self.cores: int = facts["machine"]["cores"]
        self.workers: int = self.loader["num_workers"] or 0
        self.own = "minato" if facts["own"] == "minato" else "torch"
        work = facts.get("work") or {}
        self.costs: list[float] = [wall for wall, _ in work.get("costs", [])]
        self.mean = statistics.fmean(self.costs) if self.costs else 0.0
        cpu = sum(cpu for _, cpu in work.get("costs", []))
        self.cpu_share = min(1.0, cpu / sum(self.costs)) if self.mean else 1.0
        self.stages: list[dict[str, Any]] = work.get("stages", [])
        self.rates: dict[tuple[str, int], float] = {
            (r["loader"], r["workers"]): r["rate"] for r in facts.get("rates", []) if r.get("rate")
        }
        self.ends: dict[tuple[str, int], float] = {
            (r["loader"], r["workers"]): r["end"] for r in facts.get("rates", []) if r.get("end") is not None
        }
        paced = facts.get("paced") or {}
        if paced.get("end") is not None:  # as it was last measured, with the program's step
            self.ends[self.own, self.workers] = paced["end"]
        #: seconds until the first batch of a later epoch
        self.again: dict[tuple[str, int], float] = {
            (r["loader"], r["workers"]): r["again"] for r in facts.get("rates", []) if r.get("again")
        }
        self.starts_again = bool(self.workers and not self.loader.get("persistent_workers"))
        start, measured = self.watched["start"], self.again.get((self.own, self.workers))
        #: seconds until the first batch of an epoch: the study forks workers, and where the program
        #: starts them otherwise, this is what was watched
        self.start = start if measured is None else measured
        #: of these, what the study's own runs have not
        self.unforked = 0.0
        if self.starts_again and start and self.loader.get("start_method") in ("spawn", "forkserver"):
            self.start, self.unforked = start, max(0.0, start - (measured or 0.0))

    @property
    def asked(self) -> float | None:
        value: float | None = self.watched["asked"]
        return value

    @property
    def hands_over(self) -> float:
        """Samples a second that the program's loader can hand over, if they cost nothing."""
        return self.rate("hand-over", self.workers) or math.inf

    @property
    def step_cores(self) -> float:
        return min(float(self.cores), float(self.watched["step_cores"]))

    def rate(self, kind: str, workers: int) -> float | None:
        return self.rates.get((kind, workers))

    def own_rate(self) -> float | None:
        return self.rate(self.own, self.workers)

    def end_seconds(self, kind: str, workers: int) -> float:
        """Seconds of each sample that the ends of epochs cost, by the nearest number of workers that
        was measured."""
        known = {n: seconds for (k, n), seconds in self.ends.items() if k == kind}
        if not self.epoch():
            return 0.0
        seconds = known[min(known, key=lambda n: abs(n - workers))] if known else 0.0
        return (seconds + self.unforked) / (self.epoch() * self.batch())

    def speed_with_step(self) -> float:
        """How many times as fast the program's own loader is with the step as without one: a step
        takes cores from it, and what other programs use of them changes."""
        paced, own, asked = (self.all.get("paced") or {}).get("rate"), self.own_rate(), self.asked
        if not paced or not own or not asked or paced > 0.95 * asked:
            return 1.0  # it waits for the step, and its own speed was not seen
        rate = paced if self.workers else 1 / (1 / paced - 1 / asked)
        return float(min(1.5, max(0.3, rate / own)))

    def program_rate(self, rate: float, workers: int, kind: str = "", cheaper: float = 1.0) -> float:
        """The rate of the program with its step and the ends of its epochs. rate: the loader's. kind:
        of the loader, where it is not the program's own. cheaper: how many times."""
        lost = self.end_seconds(kind or self.own, workers)
        if cheaper > 1:
            free = min(lost, self.end_seconds("hand-over", workers))
            lost = free + (lost - free) / cheaper  # a first batch is there earlier
        return rate_with_step(rate * self.speed_with_step(), self.asked, workers, lost)

    def cheaper_rate(self, cheaper: float) -> float:
        """The program's rate with samples that are cheaper by this factor. It is at most that of samples
        that cost nothing: as measured with the step, or else as if the program took batches and made
        steps in turns."""
        free = (self.all.get("free") or {}).get("rate")
        lost = self.end_seconds("hand-over", self.workers)
        most = 1 / (1 / free + lost) if free else rate_with_step(self.hands_over, self.asked, 0, lost)
        return min(self.program_rate((self.own_rate() or 0.0) * cheaper, self.workers, cheaper=cheaper), most)

    def scaling(self, kind: str) -> dict[int, float]:
        return {n: rate for (k, n), rate in self.rates.items() if k == kind and n > 0}

    def batch(self) -> int:
        return int(self.watched["batch"] or 1)

    def epoch(self) -> int:
        """Batches of an epoch; 0 where that is not known."""
        length = self.loader.get("length")
        return int(length or math.ceil((self.loader.get("samples") or 0) / self.batch()))

    def others(self) -> float:
        """Share of the cores that other programs used while the study measured."""
        seen = [m["usage"]["others"] for m in self.all.get("rates", []) if m.get("usage")]
        for name in ("work", "contend"):
            usage = (self.all.get(name) or {}).get("usage")
            seen += [usage["others"]] if usage else []
        return statistics.median(seen) if seen else 0.0

    @property
    def threads(self) -> bool:
        return bool(self.loader.get("worker_type") == "thread" and self.workers)

    def at_once(self) -> dict[str, float] | None:
        """How many times the samples of one are made by several processes, and by as many threads,
        at once. Either is compared with one that was measured in the same way."""
        both = self.all.get("contend") or {}
        told = both.get("threads")
        if not told or not both["one"]["samples"] or not both["several"]["samples"]:
            return None
        count = both["processes"]
        return {
            "processes": count * both["one"]["seconds"] / both["several"]["seconds"],
            "threads": count * told["alone"]["seconds"] / told["several"]["seconds"],
        }

    def share(self, stage: dict[str, Any]) -> float:
        return float(stage["seconds"]) / self.mean if self.mean else 0.0

    def other(self) -> float:
        """Share of a sample that no stage has taken."""
        return max(0.0, 1 - sum(map(self.share, self.stages)))

    def top(self) -> tuple[str, float]:
        """The stage that takes most of a sample, and its share."""
        stages = [(stage["label"], self.share(stage)) for stage in self.stages]
        rest = "__iter__ itself" if self.loader.get("iterable") else "__getitem__ itself"
        return max([*stages, (rest, self.other())], key=lambda one: one[1])


def slow_share(costs: Sequence[float]) -> tuple[float, float, float]:
    """Of samples that take SLOW_TIMES the median or more: their share of all samples and of the
    time. Third, how often the median the slowest sample takes."""
    if not costs:
        return 0.0, 0.0, 1.0
    median = statistics.median(costs)
    slow = [cost for cost in costs if cost >= SLOW_TIMES * median]
    total = sum(costs)
    return len(slow) / len(costs), sum(slow) / total if total else 0.0, max(costs) / max(median, 1e-9)


def reading_stages(stages: list[dict[str, Any]]) -> set[str]:
    """Labels of the stages that read. A stage reads by what it is, because it lies in one that
    does, or because it waits and has reads in it."""
    found = {stage["label"] for stage in stages if stage["reads"]}
    for stage in stages:
        inner = [one for one in stages if stage["label"] in one["inside"] and one["reads"]]
        if stage["kind"] == "call" and inner and stage["cpu"] < 0.5 * stage["seconds"]:
            found.add(stage["label"])
    for _ in range(3):
        for stage in stages:
            inside = set(stage["inside"])
            if inside and inside <= found and stage["cpu"] < 0.5 * max(stage["seconds"], 1e-9):
                found.add(stage["label"])
    return found


def wait_seconds(stages: list[dict[str, Any]], labels: set[str]) -> float:
    return float(sum(max(0.0, s["seconds"] - s["cpu"]) for s in stages if s["label"] in labels))


# ---- the one limit -------------------------------------------------------------------------


def limit(f: Facts) -> dict[str, Any]:
    """``kind`` of the limit, and the sentence that is the first line of the answer."""
    found = _limit(f)
    kind, why = found if found is not None else ("unknown", _explain_unknown(f.watched["wait"]))
    return {"kind": kind, "line": f"Limit: {KINDS[kind]}. {why}"}


def _explain_unknown(wait: float | None) -> str:
    if wait is None:
        return "Too little was measured to say."
    return f"The program waits for data {wait:.0%} of its time, and too little of it was measured to say why."


def _limit(f: Facts) -> tuple[str, str] | None:
    wait, asked, delivered = (f.watched[name] for name in ("wait", "asked", "delivered"))
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
        _starting(f) or _stragglers(f) or _shared(f) or _threads(f) or _storage(f) or _collate(f)
        or _hand_over(f) or _workers(f, 1.5) or _one_stage(f) or _workers(f, 1.2) or _cores(f)
    )  # fmt: skip


def is_uneven(costs: Sequence[float]) -> bool:
    """Whether a few samples take much of the time."""
    top = sorted(costs)[-max(1, len(costs) // 20) :]
    return slow_share(costs)[2] >= SLOW_TIMES and sum(top) >= SLOW_SHARE * sum(costs)


def _starting(f: Facts) -> tuple[str, str] | None:
    """Workers that start anew in each epoch, where epochs are short or starts are slow."""
    rate = f.own_rate()
    if not f.starts_again or not f.start or f.watched["starts"] < 2 or not rate:
        return None
    share = f.end_seconds(f.own, f.workers) * f.program_rate(rate, f.workers)
    if share < 0.5:
        return None
    return "start", (
        f"Workers start anew in each epoch: {format_seconds(f.start)} until its first batch, and "
        f"{share:.0%} of the program's time. persistent_workers=True starts them once."
    )


def _stragglers(f: Facts) -> tuple[str, str] | None:
    count, share, times = slow_share(f.costs)
    if not is_uneven(f.costs) or f.workers < 2 or scheduling_gain(f) < WORTH:
        return None
    return "stragglers", (
        f"{count:.1%} of the samples take {share:.0%} of the time, up to {times:.0f} times the "
        "median, and whole batches wait for them while workers idle."
    )


def scheduling_gain(f: Facts) -> float:
    """What minato's scheduling gains over the program's: measured, or in virtual time where it was
    not measured, or while other programs used the cores. 1 where the program has it already."""
    if f.own == "minato" and f.loader.get("scheduling") != "static" or f.workers < 2 or not f.costs:
        return 1.0
    measured = measured_gain(f, f.workers)
    return virtual_gain(f, f.workers) if measured is None else max(measured, 1.0)


def measured_gain(f: Facts, workers: int) -> float | None:
    """minato's measured rate over that of the program's loader; None where one of them was not
    measured, while other programs used the cores, or where costs are uneven: that loader has not
    learnt them then."""
    one, other = f.rate(f.own, workers), f.rate("minato", workers)
    if not one or not other or f.others() >= OTHERS or is_uneven(f.costs):
        return None
    return (1 / one + f.end_seconds(f.own, workers)) / (1 / other + f.end_seconds("minato", workers))


def _error_by_chance(f: Facts, *samples: int) -> float:
    """The standard error of the ratio of times, each measured on a number of samples, as a share of
    it: samples that cost more come by chance."""
    if len(f.costs) < 2:
        return 0.0
    return statistics.stdev(f.costs) / f.mean * math.sqrt(sum(1 / n for n in samples))


def virtual_gain(f: Facts, workers: int) -> float:
    prefetch = f.loader.get("prefetch_factor") or 2
    busy = max(1.0, workers * f.cpu_share / f.cores)  # more processes than cores take turns
    costs = [cost * busy for cost in f.costs]
    early = f.own == "minato" and f.loader.get("prefetch_next_epoch")
    epoch = 0 if early else f.epoch()
    given = (costs, f.batch(), workers, prefetch)
    return simulate_rate(*given, balanced=True, epoch=epoch) / simulate_rate(*given, epoch=epoch)


def _shared(f: Facts) -> tuple[str, str] | None:
    """A stage for which processes wait for each other."""
    both = f.all.get("contend") or {}
    one, several = both.get("one"), both.get("several")
    if not one or not several or not one["samples"] or not several["samples"]:
        return None
    least = SHARED + 2 * _error_by_chance(f, one["samples"], several["samples"])
    if several["seconds"] < least * one["seconds"] or both["processes"] > max(2, f.cores):
        return None
    alone = {stage["label"]: stage for stage in one["stages"]}
    grown = []
    for stage in several["stages"]:
        before = alone.get(stage["label"], {"seconds": 0.0, "cpu": 0.0})
        more = (stage["seconds"] - stage["cpu"]) - (before["seconds"] - before["cpu"])
        grown.append((more, stage))
    rest = [
        total["seconds"] - total["cpu"] - sum(s["seconds"] - s["cpu"] for s in total["stages"])
        for total in (one, several)
    ]
    grown.append((rest[1] - rest[0], {"label": "__getitem__ itself", "kind": "other", "inside": []}))
    more, stage = max(grown, key=lambda pair: pair[0])
    if more < max(0.5 * (several["seconds"] - one["seconds"]), 0.2 * one["seconds"], BARELY):
        return None
    where = stage["label"]
    if stage["kind"] == "lock" and stage["inside"] and stage["inside"] != [""]:
        where = f"{stage['inside'][0]}"
    count = both["processes"]
    rate = count / several["seconds"]
    once = f"{count} processes at once make {format_rate(rate)} samples/s, one makes {format_rate(1 / one['seconds'])}"
    names = reading_stages(several["stages"])
    if stage["label"] in names or set(stage["inside"]) & names:
        return "storage", f"Reads wait for each other in {where}: {once}, and more would not read faster."
    if (made := f.at_once()) is not None:
        once += f"; {count} threads make {made['threads']:.2g} times as many as one"
    if stage["kind"] == "lock" or both.get("locks"):
        lock = f" ({', '.join(both['locks'])})" if both.get("locks") else ""
        where = "__getitem__" if where in ("", "__getitem__ itself") else where
        return "lock", f"Workers wait for each other in {where}{lock}: {once}."
    return "shared", f"Workers wait for each other in {where}: {once}."


def _threads(f: Facts) -> tuple[str, str] | None:
    """What the threads of a program with ``worker_type="thread"`` wait for."""
    if not f.threads or (made := f.at_once()) is None:
        return None
    told, count = f.all["contend"]["threads"], f.all["contend"]["processes"]
    if made["threads"] > count / SHARED:
        return None
    rates = (
        f"{count} at once make {made['threads']:.2g} times as many samples as one, {count} processes "
        f"{made['processes']:.2g} times"
    )
    if f.cpu_share > COMPUTES and f.all["work"].get("gil") in ("holds it", "mixed"):
        return "interpreter", f"A sample holds it, so threads take turns: {rates}."
    if told["locks"]:
        return "lock", f"Threads wait for each other ({', '.join(told['locks'])}): {rates}."
    return "shared", f"Threads wait for each other: {rates}."


def _storage(f: Facts) -> tuple[str, str] | None:
    labels = reading_stages(f.stages)
    waits = wait_seconds(f.stages, labels)
    if waits < 0.5 * f.mean:
        return None
    names = sorted((s for s in f.stages if s["label"] in labels), key=lambda s: -s["seconds"])
    rate = f.own_rate()
    got = f" The loader gets {format_rate(rate)} samples/s." if rate else ""
    return "storage", (
        f"A sample waits {waits / f.mean:.0%} of its time for reads ({names[0]['label']}).{got}"
    )


def _collate(f: Facts) -> tuple[str, str] | None:
    """A collate_fn that takes longer than the samples that it joins, and is most of handing over."""
    seconds = f.all["work"].get("collate") or 0.0
    if seconds <= f.mean or f.workers and 1 / f.hands_over > 2 * seconds / min(f.workers, f.cores):
        return None
    name = f.loader.get("collate_fn") or "collate_fn"
    return "collate", (
        f"{name} takes {format_seconds(seconds)} for each sample of a batch, {seconds / f.mean:.1f} times "
        "as long as making the sample."
    )


def _hand_over(f: Facts) -> tuple[str, str] | None:
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
        f"there {'is 1 worker' if f.workers == 1 else f'are {f.workers} workers'}"
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


# ---- what would help -----------------------------------------------------------------------


def candidates(f: Facts) -> tuple[list[dict[str, Any]], list[str]]:
    """Changes with a predicted rate of the program, and what would not help and why."""
    helps: list[dict[str, Any]] = []
    useless: list[str] = []
    rate = f.own_rate()
    if f.watched["wait"] is not None and f.watched["wait"] < NO_WAIT:
        return [], [f"any change of the loader: the program waits for data {f.watched['wait']:.1%} of its time"]
    if not rate or not f.costs:
        return helps, useless
    now = f.program_rate(rate, f.workers)
    for make in (_more_workers, _minato, _worker_type, _cache, _codec):
        found = make(f, rate, now)
        if isinstance(found, str):
            useless.append(found)
        elif found is not None:
            helps.append(found)
    _together(f, helps, now)
    helps += _twins(f, now)
    helps += _orders(f, rate)
    helps += _kept_workers(f, now)
    for one in helps:
        one["paste"] = _paste_for(f.loader.get("maker"), one["paste"])
    good = [one for one in helps if one["gain"] is None or one["gain"] >= WORTH]
    useless += [f"{one['what']}: predicted {one['gain']:.2f} times" for one in helps if one not in good]
    return sorted(good, key=lambda one: -(one["gain"] or 0.0)), useless


def _paste_for(maker: str | None, paste: str) -> str:
    """The line to paste where a library makes the loader: an argument of that library's."""
    if maker != "transformers":
        return paste
    argument = r"TrainingArguments(dataloader_\1)"
    paste = re.sub(r"\b((?:num_workers|persistent_workers)=\w+)", argument, paste)
    return paste.replace(
        "from minato import DataLoader  #", "minato.patch_torch()  # before the Trainer is made;"
    ).replace("from minato import DataLoader", "minato.patch_torch()  # before the Trainer is made")


def _make_change(
    what: str, paste: str, predicted: float | None, now: float, effort: str, data: str,
    check: dict[str, Any] | None, note: str = "",
) -> dict[str, Any]:
    return {
        "what": what, "paste": paste, "predicted": predicted, "effort": effort, "data": data,
        "gain": predicted / now if predicted is not None else None, "check": check, "note": note,
        "checked": None, "settled": None,
    }  # fmt: skip


def _more_workers(f: Facts, rate: float, now: float) -> dict[str, Any] | str:
    fit = fit_scaling(f.scaling(f.own))
    # a step that waits for most of the time leaves its cores to workers
    busy = f.step_cores * min(1.0, (f.rate(f.own, f.cores) or rate) / (f.asked or math.inf))
    free = max(1, f.cores - round(busy))
    target, note = free, ""
    if _shared(f) is not None or _threads(f) is not None:
        return "more workers: they wait for each other already"
    if fit is None:
        return "another number of workers: not known, because only one number was measured"
    if f.workers >= free:
        if f.cpu_share > 0.5:
            return (
                f"more workers: there are {f.workers} for {f.cores} cores, and samples compute for "
                f"{f.cpu_share:.0%} of their time"
            )
        wanted = math.ceil(f.workers * min((f.asked or rate) / rate, 4.0))
        target = max(f.workers + 1, min(wanted, int(4 * f.cores)))
        note = f"extrapolated{_name_counts(f)}" if target > max(f.scaling(f.own)) else ""
    # without workers a process more is another thing than a thread's turn: the fit says what it makes
    predicted = f.program_rate(scaled_rate(fit, target), target)
    if predicted < WORTH * now:
        return f"{target} workers: predicted {predicted / now:.2f} times{_name_counts(f)}"
    data = "unchanged"
    if f.loader.get("iterable"):  # else each worker gives all of them
        data = "unchanged only if the dataset splits its samples between its workers"
    return _make_change(
        f"num_workers={target}", f"num_workers={target}", predicted, now, "one argument",
        data, {"loader": "own", "workers": target}, note,
    )  # fmt: skip


def _name_counts(f: Facts) -> str:
    """The numbers of workers that a rate was fitted to."""
    return f" from rates of {', '.join(map(str, sorted(f.scaling(f.own))))} workers"


def _minato(f: Facts, rate: float, now: float) -> dict[str, Any] | str | None:
    if f.own == "minato":
        return None
    if f.workers == 0:
        return None
    measured = measured_gain(f, f.workers)
    if f.workers < 2 and (measured is None or measured < WORTH):
        return "minato's scheduling: one worker has nothing to share"
    gain = virtual_gain(f, f.workers) if measured is None else measured
    if gain < WORTH:
        times = slow_share(f.costs)[2]
        return (
            f"minato's loader: measured {gain:.2f} times with {f.workers} workers" if measured
            else f"minato's scheduling: {gain:.2f} times in a simulation with the measured costs "
            f"(the slowest sample takes {times:.1f} times the median)"
        )  # fmt: skip
    predicted = _minato_rate(f, rate, gain, f.workers)
    return _make_change(
        "minato.DataLoader in place of torch's", "from minato import DataLoader", predicted, now,
        "one import", "unchanged", {"loader": "minato", "workers": f.workers},
    )  # fmt: skip


def _minato_rate(f: Facts, rate: float, gain: float, workers: int) -> float:
    """The program's rate with minato's loader: as that was measured, or else with the gain of the
    simulation. rate: of the program's own loader."""
    measured = f.rate("minato", workers) if measured_gain(f, workers) is not None else None
    return f.program_rate(measured or rate * gain, workers, "minato")


def _worker_type(f: Facts, rate: float, now: float) -> dict[str, Any] | str | None:
    """Processes in place of a program's threads, or threads in place of its processes: where one of
    the two waits for what the other does not."""
    made = f.at_once()
    if made is None or not f.workers or f.loader.get("worker_type") == "native":
        return None
    now_, other = ("threads", "processes") if f.threads else ("processes", "threads")
    gain = made[other] / made[now_]
    waits = _threads(f) if f.threads else _shared(f)
    if waits is None:
        return None
    if gain < WORTH:
        return f"{other} in place of {now_}: measured {gain:.2f} times as many samples at once"
    kind = "process" if f.threads else "thread"
    ends = "torch" if f.threads else f.own  # of processes, which start anew
    own = "" if f.own == "minato" else "from minato import DataLoader  # and "
    return _make_change(
        f"{other} in place of {now_}", f'{own}worker_type="{kind}"',
        f.program_rate(rate * gain, f.workers, ends), now, "one argument" if not own else "one import, "
        "one argument", "unchanged", {"loader": "minato", "workers": f.workers, "worker_type": kind},
    )  # fmt: skip


def _cache(f: Facts, rate: float, now: float) -> dict[str, Any] | str | None:
    cache = f.all["work"].get("cache")
    count = f.loader.get("samples")
    if not count:
        return None
    if not cache:
        return "a cache: the first stage of a sample is random, or its results cannot be compared"
    need, free = cache["bytes"] * count, f.all["machine"]["memory_available"]
    what = "whole samples" if cache["whole"] else f"the value after {cache['after']}"
    left = f.mean * (1 - cache["share"]) + cache["bytes"] / COPIES + 20e-6
    predicted = f.cheaper_rate(f.mean / left)
    if need > CACHED * free:
        return f"a cache of {what}: it needs {format_bytes(need)}, and {format_bytes(free)} are available"
    if predicted < WORTH * now:
        return f"a cache of {what}: predicted {predicted / now:.2f} times"
    return _make_change(
        f"a cache of {what}", _cache_line(need), predicted, now,
        f"{format_bytes(need)} of memory; {cache['share']:.0%} of a sample's time is saved", "unchanged",
        {"loader": "own", "workers": f.workers, "cached": -1 if cache["whole"] else cache["calls"]},
        "from the second epoch on",
    )  # fmt: skip


def _cache_line(need: int) -> str:
    """What a program says to have one."""
    size = max(1, math.ceil(1.1 * need / (1 << 30)))
    return f'cache="{size}GiB"  # of minato.DataLoader, with read, decode and augment in the dataset: docs/cache.md'


def work_rate(f: Facts, row: dict[str, Any]) -> float:
    """Samples a second that workers make with a codec, where they wait for nothing but cores."""
    return float(min(max(1, f.workers) / row["wall"], f.cores / max(row["cpu"], 1e-9)))


def codec_rate(f: Facts, row: dict[str, Any], storage: float = math.inf) -> float | None:
    """The loader's rate with a codec: its own, as the time of samples changes. Where processes wait
    for one storage, the rate changes as the waits do. storage: bytes a second at most."""
    told = f.all.get("codecs") or {}
    was, own = told["rows"][0], f.own_rate()
    if not own or row["error"]:
        return None
    if row["wall"] is None:  # samples of an iterable dataset are made once
        wall = max(f.mean - was["decode"] + row["decode"], row["decode"])
        made = own * f.mean / wall
    else:
        one, waits, before = work_rate(f, was), row["wall"] - row["cpu"], was["wall"] - was["cpu"]
        made = own * work_rate(f, row) / one
        if f.workers > 1 and before > 0.3 * was["wall"] and own < 0.7 * one:
            made = min(work_rate(f, row), own * before / max(waits, BARELY))
    return float(min(made, storage / max(1.0, row["bytes"] * told["per_sample"])))


def storage_speed(f: Facts) -> float:
    """Bytes a second of this storage; infinite where only reads from memory were measured."""
    storage = f.all.get("storage") or {}
    rates = [one["bytes_per_s"] for one in storage.get("rates", [])]
    return max(rates) if rates and storage["cold"] else math.inf


def codec_rows(f: Facts) -> list[dict[str, Any]]:
    """The codecs that were measured, each with its rate on this storage."""
    told = f.all.get("codecs")
    if not told or told["images"] < 4:
        return []
    return [{**row, "rate": codec_rate(f, row, storage_speed(f))} for row in told["rows"]]


def storage_rate(f: Facts, row: dict[str, Any], speed: float) -> float | None:
    """Samples a second with a codec and a storage of ``speed`` bytes a second. Only the CPU time
    of samples counts, and the reading of each file once."""
    if row["error"]:
        return None
    told, cpu = f.all["codecs"], row["cpu"]
    if cpu is None:
        cpu = max(f.mean * f.cpu_share - told["rows"][0]["decode"] + row["decode"], row["decode"])
    read = speed / max(1.0, row["bytes"] * told["per_sample"])
    return float(min(min(max(1, f.workers), f.cores) / cpu, read))


def winners(f: Facts) -> list[tuple[str, str, float]]:
    """Of each storage, the codec that is fastest there of those that lose as little as JPEG 85, and
    its rate."""
    rows = codec_rows(f)
    least = min((row["psnr"] or 0.0 for row in rows if row["name"] == "jpeg 85"), default=0.0)
    rows = [row for row in rows if row["psnr"] is None or row["psnr"] >= least - EQUAL]
    found = []
    for name, speed in STORAGES:
        rates = [(rate, row["name"]) for row in rows if (rate := storage_rate(f, row, speed)) is not None]
        if rates:
            rate, codec = max(rates)
            found.append((name, codec, rate))
    return found


def _codec(f: Facts, rate: float, now: float) -> dict[str, Any] | str | None:
    rows, told = codec_rows(f), f.all.get("codecs")
    if not told:
        return None
    if not told["images"]:
        where = "; images come out of containers, which minato recode does not read" if (
            told["containers"]
        ) else ""  # fmt: skip
        return f"another codec: samples read no photo from a file of its own{where}"
    if not rows:
        return f"another codec: not measured, only {told['images']} images were encoded in time"
    good = [
        row for row in rows[1:]
        if row["format"] and row["rate"] and (row["quality"] or QUALITY) >= QUALITY
        and (row["worst"] is None or row["worst"] >= LOSS)
    ]  # fmt: skip
    if not good:
        return f"another codec: each loses more than {LOSS:.0f} dB on some image, or cannot be read"
    best = max(row["rate"] for row in good)
    close = [row for row in good if row["rate"] * CLOSE >= best]
    least = min(row["cpu"] or row["decode"] for row in close)  # else cores that are busy would undo the gain
    cheap = [row for row in close if (row["cpu"] or row["decode"]) <= CHEAP * least]
    row = max(cheap, key=lambda row: row["psnr"] or math.inf)
    predicted = f.cheaper_rate(row["rate"] / rate)
    small = f", shorter side {told['size']}" if told["size"] else ""
    what = f"images as {row['name']}{small}"
    if predicted < WORTH * now:
        return f"{what}: predicted {predicted / now:.2f} times"
    name = f"{row['format']}{row['quality'] or ''}" + (f"-{told['size']}" if told["size"] else "")
    given = [told["folder"], f"{told['folder']}-{name}", "--format", row["format"]]
    given += ["--quality", str(row["quality"])] if row["quality"] else []
    given += ["--size", str(told["size"])] if told["size"] else []
    check = {"loader": "own", "workers": f.workers,
             "codec": {"format": row["format"], "quality": row["quality"], "size": told["size"]}}  # fmt: skip
    loss = "shrunk, nothing else" if row["psnr"] is None else (
        f"changed, {row['psnr']:.1f} dB, worst image {row['worst']:.1f} dB"
    )  # fmt: skip
    return _make_change(
        what, f"minato recode {shlex.join(given)}", predicted, now,
        f"a copy of the folder, {told['rows'][0]['bytes'] / row['bytes']:.1f} times smaller", loss,
        None if f.loader.get("iterable") else check,
    )  # fmt: skip


def _together(f: Facts, helps: list[dict[str, Any]], now: float) -> None:
    """Workers and scheduling at once, predicted as one change."""
    target = next((h["check"]["workers"] for h in helps if h["what"].startswith("num_workers")), None)
    fit = fit_scaling(f.scaling(f.own))
    if target is None or fit is None or f.own == "minato" or target < 2:
        return
    measured = measured_gain(f, target)
    gain = virtual_gain(f, target) if measured is None else measured
    predicted = _minato_rate(f, scaled_rate(fit, target), gain, target)
    if gain >= WORTH and predicted >= WORTH * max(h["predicted"] or 0.0 for h in helps):
        helps.append(_make_change(
            f"minato.DataLoader with num_workers={target}",
            f"from minato import DataLoader  # and num_workers={target}", predicted, now,
            "one import, one argument", "unchanged", {"loader": "minato", "workers": target},
        ))  # fmt: skip


def describe_data(move: dict[str, Any]) -> str:
    """What a move of a transform does to the data."""
    tried = f"{move['tried']} tries on {move['samples']} samples and edge cases"
    if move["exact"]:
        order = "; both draw random numbers, which come in another order" if move["draws"] else ""
        return f"exact: known to commute, and equal in {tried}{order}"
    if move["equal"]:
        return f"equal in {tried}, which proves nothing for others"
    return f"changed: verified to run, with the same types and shapes, in {tried}"


def describe_move(move: dict[str, Any]) -> str:
    return f"{move['name']} {'before' if move['earlier'] else 'after'} {', '.join(move['over'])}"


def _orders(f: Facts, rate: float) -> list[dict[str, Any]]:
    """Transforms in another order; those whose results have other shapes are left out."""
    found = []
    now = f.program_rate(rate, f.workers)
    for move in (f.all.get("orders") or {}).get("moves", []):
        if not (move["exact"] or move["equal"] or move["alike"]) or not move["before"]:
            continue
        # in the clocks of the study; other parts of a sample stay what they are
        left = max(f.mean - (move["before"] - move["after"]), 0.05 * f.mean)
        predicted = f.cheaper_rate(f.mean / left)
        found.append(_make_change(
            describe_move(move), f"order: {', '.join(move['names'])}", predicted, now,
            "the order of the transforms", describe_data(move),
            {"loader": "own", "workers": f.workers, "order": [move["chain"], move["order"]]},
        ))  # fmt: skip
    return found


def _twins(f: Facts, now: float) -> list[dict[str, Any]]:
    found = {}
    for stage in f.stages:
        name = stage["label"].partition("(")[2].rstrip(")")
        if stage["kind"] == "transform" and name in TWINS and f.share(stage) > 0.05:
            found[name] = f.share(stage)
    if not found:
        return []
    names = ", ".join(f"{name} -> minato.ops.{TWINS[name]}" for name in found)
    return [_make_change(
        f"native operators ({names})", "", None, now,
        f"rewrite {sum(found.values()):.0%} of a sample's time", "other random numbers", None,
        "not predicted: their speed depends on sizes",
    )]  # fmt: skip


def _kept_workers(f: Facts, now: float) -> list[dict[str, Any]]:
    """Workers that stay, where they start anew in each epoch of the program."""
    count = f.epoch() or f.watched["batches"] / max(1, f.watched["starts"])
    known = bool(f.unforked) or (f.own, f.workers) in f.again
    rate = now if known else f.watched["delivered"]
    if not f.starts_again or not f.start or f.watched["starts"] < 2 or not rate:
        return []
    epoch = count * f.batch() / rate
    saved = f.start - f.batch() * f.mean  # workers that stay make a first batch, too
    gain = epoch / max(epoch - max(0.0, saved), 0.1 * epoch)
    if gain < WORTH:
        return []
    once = "one loader for all epochs, " if f.watched.get("objects", 1) > 1 else ""
    return [_make_change(
        f"{once}persistent_workers=True", "persistent_workers=True", now * gain, now,
        "one argument" + (", and where the loader is made" if once else ""), "unchanged",
        {"loader": "own", "workers": f.workers, "persistent": True} if known and not f.unforked else None,
        f"workers start anew in each epoch: {f.start:.2g} s",
    )]  # fmt: skip


def relate(found: dict[str, Any]) -> None:
    """Enters what all factors are relative to, and gives predicted rates with these: the rate of the
    program as it is, from its checks if it has some, or else as its loader was measured."""
    f = Facts(found)
    rate = f.own_rate()
    base = found.get("base") or (f.program_rate(rate, f.workers) if rate else None)
    found["relative_to"] = base
    for change in found["helps"] if base else ():
        if change["predicted"] is not None:
            change["predicted"] = base * change["gain"]
        if change["checked"] is not None:
            change["checked"] = base * change["checked_gain"]


def drop(found: dict[str, Any]) -> None:
    """Moves the changes that gain too little, by their check or else as predicted, to what would not
    help. The report keeps their numbers."""
    little = [c for c in found["helps"] if (c.get("checked_gain") or c["gain"] or WORTH) < WORTH]
    found["helps"] = [change for change in found["helps"] if change not in little]
    found["dropped"] = found["dropped"] + little
    found["useless"] = [_explain_drop(change) for change in little] + found["useless"]


def _explain_drop(change: dict[str, Any]) -> str:
    if change["checked"] is None:
        return f"{change['what']}: predicted {change['gain']:.2f} times"
    return (
        f"{change['what']}: {change['checked_gain']:.2f} times when checked on {change['samples']} samples "
        f"(predicted {change['gain']:.2f} times)"
    )


def settle(change: dict[str, Any], now: float, pairs: list[tuple[float, float]]) -> None:
    """Enters what a check has found. now: the program's rate as predicted without the change. pairs:
    its rates as it is and with the change, of each repeat. Both make the same samples one after the
    other, so their ratio does not change with the samples, nor with what other programs do meanwhile."""
    if not pairs:
        return
    gains = [with_it / as_it_is for as_it_is, with_it in pairs]
    gain, base = statistics.median(gains), statistics.median(as_it_is for as_it_is, _ in pairs)
    predicted = change["predicted"] / now
    change.update(base=base, checked=base * gain, checked_gain=gain, predicted=base * predicted, gain=predicted)
    change["bound"] = max(BOUND, (max(gains) - min(gains)) / 2 / gain)
    change["settled"] = abs(predicted - gain) <= change["bound"] * gain


def format_rate(rate: float) -> str:
    """Four digits for people."""
    return f"{rate:,.0f}" if rate >= 10_000 else f"{rate:.4g}"


def format_seconds(value: float) -> str:
    """A time for people."""
    if value >= 1:
        return f"{value:.3g} s"
    if value >= 1e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} us"


def format_place(place: Sequence[Any] | None) -> str:
    """File and line, from the current folder where the file lies in it."""
    if not place:
        return "an unknown place"
    file, here = str(place[0]), os.getcwd() + os.sep
    return f"{file.removeprefix(here)}:{place[1]}"


def format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
