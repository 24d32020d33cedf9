"""What was watched and measured, and the numbers that follow from it.

Rates are samples a second, times are seconds. The facts are those of ``report.json``.
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from .records import Codecs, Orders, Report, StageTimes, Storage, Told, Watched, Work
from .watch import Step

#: the first steps of a run, which rates leave out where enough others were seen
FIRST = 10
#: steps without which a median says little
ENOUGH = 20
#: a gain that is worth words
WORTH = 1.10
#: a step longer than these seconds, and than this multiple of the median, has something else in it
PAUSE_S, PAUSE = 1.0, 10.0
#: how a step was timed on a device
BY_EVENTS = "events on the device"
#: share of the cores that others may use
OTHERS = 0.25
#: seconds that are no wait yet, but what clocks and caches do
BARELY = 50e-6
#: batches of a simulation, and those that minato may be ahead of the trainer, in torch's windows
SIMULATED, AHEAD = 400, 8
#: samples are uneven where the slowest twentieth takes this share of the time ...
SLOW_SHARE = 0.25
#: ... and one of them as often the median
SLOW_TIMES = 4.0


def watch_facts(told: Told, others: float = 0.0) -> Watched:
    """Rates and shares of the loader that was watched; rates are None where too little was seen.
    others: share of the cores that other programs used then. If the share is large, a time in which
    the program could have run and had no core is no waiting for data ("queued")."""
    used, start = _choose_steps(told)
    rows = [row for row, _size in told.sizes]
    batch = told.loader.get("batch_size") or (int(statistics.median(rows)) if rows else 1)
    if not told.loader.get("batched", True):
        batch = 1  # what the dataset gives is one sample, whatever it holds
    found = Watched(
        told.batches, len(used), batch, shapes=told.shapes,
        bytes=statistics.median(size for _, size in told.sizes) if rows else 0,
        start=statistics.fmean(told.starts[1:] or told.starts) if told.starts else None,
        starts=max(told.started, len(told.starts)),
    )  # fmt: skip
    if not used:
        return found
    queued = statistics.fmean(s.queued for s in used) if others > OTHERS else 0.0
    inside = statistics.fmean(s.inside for s in used) - queued + start
    usual = statistics.median(s.step for s in used)
    steps = [s for s in used if s.step <= max(PAUSE_S, PAUSE * usual)]
    step = statistics.fmean(s.step for s in steps)  # else waits and steps would not add up to the whole
    cpu = statistics.fmean(s.cpu for s in steps)
    # a step with a validation or a checkpoint in it counts as any other
    times = [s.inside + (step if s.step > max(PAUSE_S, PAUSE * usual) else s.step) + start for s in used]
    # what the step would take if no worker, and no other program, used its cores
    alone = max(step - statistics.fmean(s.step_queued for s in steps), 0.1 * step)
    found.step_cores = cpu / alone if alone > 0 else 0.0
    device = [(idle / 1e3, work / 1e3) for idle, work in told.device or []][FIRST:]
    whole = statistics.fmean(times)
    if len(device) >= ENOUGH / 2:
        inside = statistics.fmean(idle for idle, _ in device)
        step = alone = statistics.median(work for _, work in device)
        found.by = BY_EVENTS
        whole, queued = inside + step, 0.0
    whole = max(whole, 1e-9)
    found.inside, found.step, found.step_alone, found.queued = inside, step, alone, queued / whole
    found.wait = min(1.0, inside / max(whole - queued, 1e-9))
    found.asked, found.delivered = batch / max(step, 1e-9), batch / whole
    count = min(8, len(times) // 2)
    if count > 1:  # by how much the parts of what was seen differ
        cuts = [len(times) * n // count for n in range(count + 1)]
        means = [statistics.fmean(times[a:b]) for a, b in itertools.pairwise(cuts)]
        error = 2 * statistics.stdev(means) / math.sqrt(count) / max(statistics.fmean(times), 1e-9)
        found.range = [batch / (whole * (1 + error)), batch / (whole * max(1 - error, 0.1))]
    return found


def _choose_steps(told: Told) -> tuple[list[Step], float]:
    """The steps that rates are taken from, and what waits at the starts of epochs add to each.

    Whole epochs after the first, where there are some: such waits are in them. Else the steps that
    were seen without the first batch of the run, and without the first ten if at least twice as many
    are left; the start of an epoch is shared out to its batches where each epoch has one."""
    steps, whole = [Step(*row) for row in told.steps], told.whole
    shift = told.noted - len(steps)  # earlier ones were not told
    epochs: dict[int, list[Step]] = {}
    begins: dict[int, int] = {}
    for number, step in enumerate(steps):
        epochs.setdefault(step.epoch, []).append(step)
        begins.setdefault(step.epoch, number)
    for least in (FIRST, 1):
        chosen = [epochs[n] for n in whole if n in epochs and begins[n] + shift >= least
                  and (begins[n] or not shift)]  # fmt: skip
        if sum(map(len, chosen)) >= ENOUGH / 2:
            return [step for each in chosen for step in each], 0.0
    firsts = {begin for epoch, begin in begins.items() if begin or not shift}
    used = [step for number, step in enumerate(steps) if number not in firsts]
    if not shift and len(used) >= 3 * FIRST:
        used = used[FIRST:]
    loader, starts = told.loader, told.starts
    length = loader.get("length") or (len(epochs[whole[0]]) if whole and whole[0] in epochs else 0)
    again = starts[1:] if loader.get("persistent_workers") or not loader.get("num_workers") else starts
    if not used or not again or not length:
        return used, 0.0
    usual = statistics.fmean(step.inside for step in used)
    return used, max(0.0, statistics.fmean(again) - usual) / length


class Facts:
    """What was watched and measured, with the numbers that follow from it."""

    def __init__(self, report: Report) -> None:
        self.report, self.watched, self.loader = report, report.watched, report.loader
        self.cores, self.own = report.machine.cores, report.own
        self.batch, self.workers = self.watched.batch, int(self.loader["num_workers"] or 0)
        self.threads = bool(self.loader.get("worker_type") == "thread" and self.workers)
        #: whether the program's loader has minato's scheduling
        self.balanced = self.own == "minato" and self.loader.get("scheduling") != "static"
        self.work, self.storage = report.work or Work(), report.storage or Storage()
        self.codecs, self.orders = report.codecs or Codecs(), report.orders or Orders()
        self.costs = [wall for wall, _ in self.work.costs]
        self.mean = statistics.fmean(self.costs) if self.costs else 0.0
        cpu = sum(cpu for _, cpu in self.work.costs)
        self.cpu_share = min(1.0, cpu / sum(self.costs)) if self.mean else 1.0
        self.stages = self.work.stages
        #: share of a sample that no stage has taken
        self.other = max(0.0, 1 - sum(map(self.share, self.stages)))
        rest = "__iter__ itself" if self.loader.get("iterable") else "__getitem__ itself", self.other
        #: the stage that takes most of a sample, and its share
        self.top = max([*((s.label, self.share(s)) for s in self.stages), rest], key=lambda one: one[1])
        usage = [*(rate.usage for rate in report.rates), self.work.usage, report.contend and report.contend.usage]
        #: share of the cores that other programs used while the study measured
        self.others = statistics.median([used.others for used in usage if used] or [0.0])
        #: batches of an epoch; 0 where that is not known
        self.epoch = int(self.loader.get("length") or math.ceil((self.loader.get("samples") or 0) / self.batch))
        #: samples of an epoch, by what was watched where its length is not known
        self.epoch_samples = (self.epoch or self.watched.batches / max(1, self.watched.starts)) * self.batch
        #: seconds of collate_fn for each sample; 0 where that was not measured
        self.collate = self.work.collate or 0.0
        self.rates = {(r.loader, r.workers): r.rate for r in report.rates if r.rate}
        self.own_rate = self.rate(self.own, self.workers)
        #: samples a second that the program's loader can hand over, if they cost nothing
        self.hands_over = self.rates.get(("hand-over", self.workers)) or math.inf
        self.ends = {(r.loader, r.workers): r.end for r in report.rates if r.end is not None}
        if report.paced and report.paced.end is not None:  # as it was last measured, with the program's step
            self.ends[self.own, self.workers] = report.paced.end
        #: seconds from the last batch of an epoch until the first one of the next is there
        self.again = {(r.loader, r.workers): r.again for r in report.rates if r.again}
        #: seconds of each sample that the sampler takes, in the program's own process
        self.sampler = report.sampler.seconds if report.sampler else 0.0
        drawn = self.sampler * self.batch
        #: seconds of a step that has the cores it can use, and of the sampler, which runs in turns with it
        self.step = float(self.watched.step_alone or self.watched.step or 0.0)
        self.step_alone, self.step_cores = self.step + drawn, min(float(self.cores), self.watched.step_cores)
        if drawn:
            self.step_cores = (self.step_cores * self.step + drawn) / self.step_alone
        #: CPU seconds of a step, for each sample of its batch
        self.step_cpu = self.step_cores * self.step_alone / self.batch
        asked, whole = self.watched.asked, self.watched.step if self.watched.by != BY_EVENTS else 0.0
        #: share of the step's time in which its thread could have run, and had no core
        self.queued_step = 1 - self.step / whole if whole else 0.0
        #: samples a second that the step and the sampler could use if they had their cores for themselves.
        #: Models use this; the answer tells ``watched.asked``, which was seen
        self.asked_alone = 1 / (max(1 - self.queued_step, 0.1) / asked + self.sampler) if asked else asked
        self.starts_again = bool(self.workers and not self.loader.get("persistent_workers"))
        start, measured = self.watched.start, self.again.get((self.own, self.workers))
        #: seconds until the first batch of an epoch: the study forks workers, and where the program
        #: starts them otherwise, this is what was watched
        self.start = start if measured is None else measured
        #: of these, what the study's own runs have not
        self.unforked = 0.0
        if self.starts_again and start and self.loader.get("start_method") in ("spawn", "forkserver"):
            self.start, self.unforked = start, max(0.0, start - (measured or 0.0))
        #: seconds until the first batch of an epoch, beyond those that making it takes
        self.start_alone = max(0.0, (self.start or 0.0) - self.batch * self.mean)

    def without_sampler(self) -> Facts:
        """As if the sampler took no time."""
        return Facts(replace(self.report, sampler=None, paced=None))

    def sample_cpu(self, kind: str, workers: int, cheaper: float = 1.0) -> float:
        """CPU seconds of a sample and of handing it over, by the nearest number of workers that was
        measured. cheaper: how many times the sample itself is."""
        work, uneven = self.mean * self.cpu_share, is_uneven(self.costs)
        # of uneven samples, those that a loader was measured with may have been the cheap ones
        kind = "hand-over" if uneven else kind
        seen = {
            r.workers: r.usage.cpu_per_sample for r in self.report.rates
            if r.loader == kind and r.workers and r.usage and r.usage.cpu_per_sample
        }  # fmt: skip
        whole = seen[min(seen, key=lambda n: abs(n - workers))] if seen else 0.0
        whole += work if uneven or not seen else 0.0
        if uneven:  # nor were those that were timed dearer than these rates allow
            whole = min(whole, self.cores / max([1e-9, *(rate for (_, n), rate in self.rates.items() if n)]))
            work = min(work, whole)
        return max(whole - work * (1 - 1 / cheaper), 0.0)

    def rate(self, kind: str, workers: int) -> float | None:
        return self.rates.get((kind, workers))

    def end_seconds(self, kind: str, workers: int) -> float:
        """Seconds of each sample that the ends of epochs cost, by the nearest number of workers that
        was measured."""
        known = {n: seconds for (k, n), seconds in self.ends.items() if k == kind}
        if not self.epoch:
            return 0.0
        seconds = known[min(known, key=lambda n: abs(n - workers))] if known else 0.0
        return (seconds + self.unforked) / (self.epoch * self.batch)

    def speed_with_step(self) -> float:
        """How many times as fast the program's own loader is with the step as without one: a step
        takes cores from it, and what other programs use of them changes."""
        paced, own, asked = self.report.paced and self.report.paced.rate, self.own_rate, self.asked_alone
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
        rate *= self.speed_with_step()
        if workers:  # at most the rate at which they and the step keep all cores busy
            cpu = self.sample_cpu(kind or self.own, workers, cheaper) + self.step_cpu
            rate = min(rate, self.cores / max(cpu, 1e-9))
        return rate_with_step(rate, self.asked_alone, workers, lost)

    def cheaper_rate(self, cheaper: float) -> float:
        """The program's rate with samples that are cheaper by this factor. It is at most that of samples
        that cost nothing: as measured with the step, or else as if the program took batches and made
        steps in turns."""
        free = self.report.free and self.report.free.rate
        lost = self.end_seconds("hand-over", self.workers)
        most = 1 / (1 / free + lost) if free else rate_with_step(self.hands_over, self.asked_alone, 0, lost)
        return min(self.program_rate((self.own_rate or 0.0) * cheaper, self.workers, cheaper=cheaper), most)

    def scaling(self) -> dict[int, float]:
        """Rates of the program's loader by number of workers."""
        return {n: rate for (kind, n), rate in self.rates.items() if kind == self.own and n > 0}

    def at_once(self) -> dict[str, float] | None:
        """How many times the samples of one are made by several processes, and by as many threads,
        at once. Either is compared with one that was measured in the same way."""
        both = self.report.contend
        if not both or not both.threads or not both.one.samples or not both.several.samples:
            return None
        pairs = {"processes": (both.one, both.several), "threads": (both.threads.alone, both.threads.several)}
        return {name: both.processes * one.seconds / several.seconds for name, (one, several) in pairs.items()}

    def share(self, stage: StageTimes) -> float:
        return stage.seconds / self.mean if self.mean else 0.0


def slow_share(costs: Sequence[float]) -> tuple[float, float, float]:
    """Of samples that take SLOW_TIMES the median or more: their share of all samples and of the
    time. Third, how often the median the slowest sample takes."""
    if not costs:
        return 0.0, 0.0, 1.0
    median = statistics.median(costs)
    slow = [cost for cost in costs if cost >= SLOW_TIMES * median]
    total = sum(costs)
    return len(slow) / len(costs), sum(slow) / total if total else 0.0, max(costs) / max(median, 1e-9)


def is_uneven(costs: Sequence[float]) -> bool:
    """Whether a few samples take much of the time."""
    top = sorted(costs)[-max(1, len(costs) // 20) :]
    return slow_share(costs)[2] >= SLOW_TIMES and sum(top) >= SLOW_SHARE * sum(costs)


def reading_stages(stages: list[StageTimes]) -> set[str]:
    """Labels of the stages that read. A stage reads by what it is, because it lies in one that
    does, or because it waits and has reads in it."""
    found = {stage.label for stage in stages if stage.reads}
    for stage in stages:
        inner = [one for one in stages if stage.label in one.inside and one.reads]
        if stage.kind == "call" and inner and stage.cpu < 0.5 * stage.seconds:
            found.add(stage.label)
    for _ in range(3):
        for stage in stages:
            inside = set(stage.inside)
            if inside and inside <= found and stage.cpu < 0.5 * max(stage.seconds, 1e-9):
                found.add(stage.label)
    return found


def scheduling_gain(f: Facts, workers: int) -> float:
    """What minato's scheduling gains over torch's: measured, or in virtual time where it was not
    measured, or while other programs used the cores."""
    measured = measured_gain(f, workers)
    return virtual_gain(f, workers) if measured is None else measured


def measured_gain(f: Facts, workers: int) -> float | None:
    """minato's measured rate over that of the program's loader; None where one of them was not
    measured, while other programs used the cores, or where costs are uneven: that loader has not
    learnt them then."""
    one, other = f.rate(f.own, workers), f.rate("minato", workers)
    if not one or not other or f.others >= OTHERS or is_uneven(f.costs):
        return None
    return (1 / one + f.end_seconds(f.own, workers)) / (1 / other + f.end_seconds("minato", workers))


def virtual_gain(f: Facts, workers: int) -> float:
    """What minato's scheduling gains over torch's, in virtual time."""
    return virtual_rate(f, workers, balanced=True) / virtual_rate(f, workers, balanced=False)


def virtual_rate(f: Facts, workers: int, balanced: bool) -> float:
    """The rate of a loader in virtual time, with the measured costs and the program's epochs."""
    prefetch = f.loader.get("prefetch_factor") or 2
    busy = max(1.0, workers * f.cpu_share / f.cores)  # more processes than cores take turns
    costs = [cost * busy for cost in f.costs]
    early = f.own == "minato" and f.loader.get("prefetch_next_epoch")
    epoch = 0 if early else f.epoch
    return simulate_rate(costs, f.batch, workers, prefetch, balanced=balanced, epoch=epoch)


def simulate_rate(
    costs: Sequence[float], batch: int, workers: int, prefetch: int, balanced: bool = False, epoch: int = 0
) -> float:
    """The rate of a loader in virtual time, of samples with these costs again and again. Balanced may be
    further ahead behind a slow sample. epoch: batches of one; 0 where the next one begins early."""
    workers, batches = max(1, workers), SIMULATED
    epoch = epoch if epoch < batches else 0
    if epoch:
        batches = epoch * math.ceil(batches / epoch)
    got = simulate_loader(
        lambda _worker, n: costs[n % len(costs)], batches * batch, batch, workers,
        prefetch * workers * (AHEAD if balanced else 1), balanced, epoch=epoch,
    )  # fmt: skip
    skipped = 0 if epoch else min(workers, batches // 4)
    seconds = got[-1] - (got[skipped - 1] if skipped else 0.0)
    return (batches - skipped) * batch / max(seconds, 1e-12)


def simulate_loader(
    cost: Callable[[int, int], float], samples: int, batch: int, workers: int, window: int,
    balanced: bool = False, step: float = 0.0, epoch: int = 0,
) -> list[float]:
    """When a loader delivers its batches, in virtual time. torch: batch i on worker i mod n. Balanced: each
    sample on the worker that is free first. Both deliver in order, and begin a batch when the one ``window``
    before it is delivered. cost: of a sample, by the worker and its position. epoch: batches after which the
    loader begins anew, when the last one is used; 0 for never."""
    got: list[float] = []
    free = [(0.0, n) for n in range(workers)]  # a heap where balanced
    ready = begun = 0.0
    for number in range(math.ceil(samples / batch)):
        inside = number % epoch if epoch else number
        if epoch and not inside:
            begun = ready
        sent = got[number - window] if inside >= window else begun
        done, which = 0.0, inside % workers
        for position in range(number * batch, min((number + 1) * batch, samples)):
            at, worker = free[0 if balanced else which]
            end = max(at, sent) + cost(worker, position)
            if balanced:
                heapq.heapreplace(free, (end, worker))
            else:
                free[which] = end, worker
            done = max(done, end)
        got.append(max(done, ready))
        ready = got[-1] + step
    return got


def fit_scaling(points: dict[int, float]) -> Callable[[int], float] | None:
    """The rate of n workers, from rates by number of workers: n * one / (1 + lost * (n - 1)), of the rate
    of one worker and of what each further one loses. None from fewer than two numbers."""
    if len(points) < 2:
        return None
    low, high = min(points), max(points)  # the latter is the nearest to what is asked of the fit
    few, many = points[low] / low, points[high] / high  # of one worker of these
    lost = max(0.0, (few - many) / max(many * (high - 1) - few * (low - 1), 1e-9))
    one = few * (1 + lost * (low - 1))
    return lambda n: n * one / (1 + lost * (n - 1))


def rate_with_step(rate: float, asked: float | None, workers: int, lost: float = 0.0) -> float:
    """What a program gets of a loader's rate: in turns with its step without workers. lost: seconds a
    sample that the ends of epochs cost, in which the step has nothing to do."""
    asked = math.inf if asked is None else asked
    within = 1 / min(asked, rate) if workers else 1 / asked + 1 / rate
    return 1 / (within + lost)
