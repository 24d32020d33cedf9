"""Checks: the changes that are predicted to help are run, by turns with the program's own loader."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .changes import candidates, enter_check
from .facts import Facts, is_uneven
from .records import Change, Rate, RateRequest, Report

if TYPE_CHECKING:
    from .measure import Study

#: share of the budget that checks take
CHECKS = 0.25
#: repeats of each check, by turns
REPEATS = 3
#: changes that are checked at most, and seconds of a run that are better than more changes
CHECKED, CHECK_S = 3, 1.0
#: Share of a run's time in which batches are measured. The rest is for starting workers.
MEASURED = 0.8
#: With uneven costs a run lasts one epoch, or this multiple of the slowest sample if that is shorter: then
#: samples of all costs are in it several times. Under a quarter of that nothing is checked.
UNEVEN = 18.0
#: seconds below which a run says nothing
LEAST_S = 0.3


@dataclass
class Plan:
    """What is run."""

    #: changes, and seconds of one run of one of them
    changes: list[Change]
    seconds: float
    #: samples of a batch (None: as many as the program's), and batches of an epoch
    batch: int | None
    length: int
    #: a few samples take much of the time: each run has whole epochs, of at most that number of batches
    uneven: bool
    most: int = 0
    #: minato's loader is also run in an epoch in which it learns what samples cost
    learns: bool = False


@dataclass
class Runs:
    """What was found."""

    #: of the program's own loader: what was measured, with the rate of the program ("program")
    own: list[Rate] = field(default_factory=list)
    #: of each change: the program's rates without and with it, of each repeat
    pairs: list[list[tuple[float, float]]] = field(default_factory=list)
    #: of each change: samples that were made with it
    samples: list[int] = field(default_factory=list)
    #: how many times as fast the first change is in the epoch in which it learns costs
    first: float | None = None


def check_changes(study: Study, found: Report, seconds: float) -> None:
    """Predicts changes, and checks those that are predicted to help. Before that, a loader of samples
    that cost nothing is run. What it and the program's own loader do with a step is a part of the
    predictions. What a change does is not."""
    found.helps, found.useless = candidates(Facts(found))
    study.progress.show("checks", 0.75)
    plan = _plan_runs(study, found, seconds)
    if plan is None:
        return
    runs = _run_plan(study, found, plan)
    if runs.own:
        _enter_runs(found, plan, runs)


def _plan_runs(study: Study, found: Report, seconds: float) -> Plan | None:
    """None where nothing is to be checked, or nothing can be: a note says why."""
    f = Facts(found)
    wanted = [change for change in found.helps if change.check]
    if not wanted or not f.own_rate():
        return None
    uneven = is_uneven(f.costs) and not f.loader["iterable"] and f.epoch() > 0
    for option in ("order", "codec"):  # of those that were asked for, the best is checked first
        best = next((change for change in wanted if getattr(change.check, option)), None)
        wanted.sort(key=lambda change: change is not best)
    with_minato = [change for change in wanted if change.check and change.check.loader == "minato"]
    learns = uneven and bool(with_minato)
    if learns:  # what a scheduler gains takes whole epochs to see
        wanted.sort(key=lambda change: change not in with_minato)
    rate = f.program_rate(f.own_rate() or 0.0, f.workers)
    least = CHECK_S
    if uneven:
        least = max(CHECK_S, min(f.epoch() * f.batch() / rate, UNEVEN * max(f.costs)) / MEASURED)
    count = min(CHECKED, len(wanted), max(1, int(seconds / REPEATS / least) - 1))
    slot = seconds / (REPEATS * (count + 1) + 1 + learns)
    size = fitting_batch(f, slot)
    if size == 0 or slot < LEAST_S:
        study.note("predictions were not checked: that needs a longer --budget")
        return None
    plan = Plan(wanted[:count], slot, size, epoch_batches(f, size), uneven, learns=learns)
    if not uneven:
        return plan
    rows = size or f.batch()
    plan.most = max(1, min(plan.length, len(f.costs) // rows, int(slot * MEASURED * rate / rows)))
    slowest = UNEVEN / 4 * max(f.costs)
    if plan.most < plan.length and slowest > plan.most * rows / rate:
        need = study.budget_for(2 * (REPEATS + 1) * slowest / MEASURED, CHECKS)
        study.note(f"predictions were not checked, because the slowest samples take too long: needs about {need}")
        return None
    return plan


def _run_plan(study: Study, found: Report, plan: Plan) -> Runs:
    """Repeats of all changes, by turns, and what they have found."""
    f, changes = Facts(found), plan.changes
    costs, own = dict(zip(f.work.indices, f.costs)), RateRequest("own", f.workers)

    def run(what: RateRequest | None, repeat: int | None, learnt: bool = True) -> Rate | None:
        assert what is not None
        g = f.without_sampler() if what.drawn else f
        what = replace(
            what, seconds=plan.seconds * MEASURED, step=g.step_alone * (plan.batch or f.batch()) / f.batch(),
            step_cores=g.step_cores, batch=plan.batch, length=plan.length,
        )  # fmt: skip
        if repeat is None:
            return study.ask_rate(replace(what, same=True))
        # other samples in each repeat, the same for all in one
        if plan.uneven:
            what = replace(what, part=repeat / REPEATS, most=plan.most, costs=costs, learnt=learnt)
        return study.ask_rate(replace(what, skip=0 if plan.uneven else 40 + 37 * repeat))

    if not f.loader["iterable"]:
        found.free = run(own, None)
    runs = Runs(pairs=[[] for _ in changes], samples=[0] * len(changes))
    for repeat in range(REPEATS):
        study.progress.show("checks", 0.78 + 0.07 * repeat)
        base = None
        if (result := run(own, repeat)) is not None:
            base = _program_rate_of(f, result)
            runs.own.append(replace(result, program=base))
            found.checks.append(runs.own[-1])
        for number, change in enumerate(changes):
            if (result := run(change.check, repeat)) is None:
                continue
            rate = _program_rate_of(f, result)
            found.checks.append(replace(result, program=rate, change=change.what))
            runs.samples[number] += result.samples
            if base is not None:
                runs.pairs[number].append((base, rate))
        if plan.learns and runs.first is None and base:
            if (result := run(changes[0].check, repeat, learnt=False)) is not None:
                runs.first = _program_rate_of(f, result) / base
    return runs


def _enter_runs(found: Report, plan: Plan, runs: Runs) -> None:
    """Enters what was found, and the predictions that follow from what the program's own loader did
    with the step."""
    f = Facts(found)
    found.base = statistics.median(result.program or 0.0 for result in runs.own)
    ends = [result.end for result in runs.own if result.end is not None]
    found.paced = Rate(
        rate=statistics.median(_loader_rate_of(f, result) for result in runs.own),
        end=statistics.median(ends) if ends else None,
    )
    changes = plan.changes
    helps, useless = candidates(Facts(found))
    again = [change for one in changes for change in helps if change.check == one.check]
    if len(again) == len(changes):
        found.helps, found.useless, changes = helps, useless, again
    else:  # one of them is predicted to gain too little now: it was checked for what was predicted then
        found.paced = None
    f = Facts(found)
    now = f.program_rate(f.own_rate() or 0.0, f.workers)
    for change, pairs, samples in zip(changes, runs.pairs, runs.samples):
        enter_check(change, now, pairs)
        change.samples = samples
    if runs.first is not None:
        changes[0].first_epoch = runs.first
        changes[0].note = (
            f"from the second epoch on; {runs.first:.2f} times in the first one, in which it learns what "
            "samples cost"
        )
    found.helps.sort(key=lambda change: -(change.checked_gain or change.gain or 0.0))


def _program_rate_of(f: Facts, result: Rate) -> float:
    """The program's rate by one run, with the ends of its epochs."""
    count = f.epoch() * f.batch()
    if result.epoch:  # the run had whole epochs, which may be shorter than the program's
        samples = result.epoch * result.samples / result.batches
        start = f.end_seconds("hand-over", f.workers) * count
        one = max(samples / result.rate - start, 0.1 * samples / result.rate)
        return count / (start + one * count / samples)
    lost = f.end_seconds(f.own if result.loader == "own" else result.loader, result.workers)
    if result.end is not None and count:
        lost = (result.end + f.unforked) / count
    return 1 / (1 / result.rate + lost)


def _loader_rate_of(f: Facts, result: Rate) -> float:
    """The rate of the program's own loader by one run, without the ends of epochs."""
    if not result.epoch:
        return result.rate
    each = 1 / result.program
    return 1 / max(each - f.end_seconds(f.own, f.workers), 0.2 * each)


def fitting_batch(f: Facts, seconds: float) -> int | None:
    """Samples of a batch, for a loader that has that many seconds. None: as many as the program's; 0: not
    even batches of one fit."""
    fits = int(seconds / max(f.mean, 1e-9) / 6)
    return None if fits >= f.batch() else fits


def epoch_batches(f: Facts, size: int | None) -> int:
    """Batches of an epoch of the program, where they have another size; 0 where that is not known."""
    return f.epoch() if size is None else math.ceil(f.epoch() * f.batch() / size)
