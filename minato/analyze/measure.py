"""Which measurements are made, in which order and for how long, and how changes are checked."""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from .. import _core
from .._version import __version__
from ..text import Progress, counted, format_seconds
from . import own_files, report
from .advice import add_base_rate, candidates, drop_small_gains, enter_check, limit
from .facts import OTHERS, Facts, is_uneven, watch_facts
from .keeper import MANAGED
from .records import (
    Codecs, Contention, Limit, Machine, Orders, Rate, RateRequest, Report, Request, Sampler,
    Storage, Told, Work, format_place, parse,
)  # fmt: skip
from .watch import Message, send
from .work import FEW, TIMING

#: shares of the budget
STORAGE, WORK, LOADERS = 0.15, 0.25, 0.35
#: seconds in which the sampler runs, and no more than this share of the budget
SAMPLER_S, SAMPLER = 2.0, 0.05
#: a study in which the loader and its step are faster than in the program by this factor concludes nothing
FASTER = 2.0
#: share of the files which samples read that may be as new as that
NEW = 0.1
#: what each request measures, for notes
MEASURED = {
    "work": "timing samples", "contend": "samples in several processes at once", "storage": "reading files",
    "sampler": "the sampler",
}  # fmt: skip
#: share of the budget that each of --codecs and --orders takes from the others
OPTION = 0.2
EXTRA = ("codecs", "orders")
clock = time.monotonic
T = TypeVar("T")


#: what a study could write to -> the note that says so
WAYS = {
    own_files.OVERLAY: "what the study wrote went to an overlay of its own in memory, which is gone",
    own_files.FILTER: "the study wrote no file: it could have no overlay of its own here, and would have "
    "ended at the first attempt",
    own_files.NEITHER: "the study may have written the program's files (--allow-writes)",
}


class Connection:
    """One process of the program, or a keeper."""

    def __init__(self, to: socket.socket) -> None:
        self.socket = to
        self.rest = b""

    def lines(self) -> Iterator[Message] | None:
        """The messages that have come; None at the end."""
        try:
            part = self.socket.recv(1 << 16)
        except BlockingIOError:
            return iter(())
        except OSError:
            return None
        if not part:
            return None
        *whole, self.rest = (self.rest + part).split(b"\n")
        return (json.loads(line) for line in whole)


class Stopped(Exception):
    """A sample was about to write a file."""


class Study:
    """Asks a keeper for one measurement after the other."""

    def __init__(self, keeper: Connection, cores: int | None, progress: Progress) -> None:
        self.keeper, self.cores, self.progress = keeper, cores, progress
        self.notes: list[str] = []
        self.at: str | None = None
        self.cut = False  # the latest measurement had to be ended
        self.error = ""  # with which the latest measurement failed
        self.way = own_files.NEITHER  # where what it writes goes
        self.share = 1.0  # of the budget, which --codecs and --orders leave to the rest

    def ask_rate(self, request: RateRequest) -> Rate | None:
        """What a loader delivers."""
        whose = "the program" if request.loader == "own" else request.loader
        what = f"{whose}'s loader with {counted(request.workers, 'worker')}"
        found = self.ask(Rate, Request("rate", request.seconds, rate=request), what)
        return found if found and found.rate else None

    def ask(self, answer: type[T], request: Request, what: str = "") -> T | None:
        """What a measurement has found; None where it has not come to its end."""
        self.at, self.error, result = None, "", None
        what = what or MEASURED.get(request.do, request.do)
        # reads alone write nothing, and are of the files themselves, not of an overlay
        request.way = own_files.NEITHER if request.do == "storage" else self.way
        for message in self._messages(request):
            kind = message["kind"]
            if kind == "at":
                self.at = message["index"]
            elif kind == "failed":
                self.error = message["error"]
                self._note_failure(what, message["error"])
            elif kind == "end":
                break
            else:
                result = message
        self.cut = message["why"] is not None
        if self.cut:
            where = f" (at sample {self.at})" if self.at is not None else ""
            self.note(f"{what}: not measured, {message['why']}{where}")
        if message.get("wrote"):
            raise Stopped(message["wrote"])
        return None if self.cut or self.error or result is None else parse(answer, result)

    def _messages(self, request: Request) -> Iterator[Message]:
        """Sends a request; what the keeper says after that."""
        request.cores = self.cores
        send(self.keeper.socket, asdict(request))
        while (messages := self.keeper.lines()) is not None:
            yield from messages
        raise ConnectionError("the process that kept the dataset has ended")

    def check(self, writes: bool) -> list[str]:
        """What the keeper refuses to share with the study."""
        message = next(self._messages(Request("check", writes=writes)))
        if message["kind"] == "unable":
            raise ConnectionError(
                "minato is not installed in the program's Python, and this installation "
                f"cannot be used there ({message['error']}): install minato there"
            )
        self.way = message["files"]
        if self.way != own_files.OVERLAY and writes:
            self.way = own_files.NEITHER
        found: list[str] = message["refused"]
        return found

    def budget_for(self, seconds: float, share: float) -> str:
        """What to give for a measurement of that many seconds, which has a share of the budget."""
        return f"--budget {math.ceil(seconds / share / self.share / 60)}m"

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _note_failure(self, what: str, error: str) -> None:
        """The line of an error that says what has happened: a worker's begins with a traceback. The
        same error of other loaders says nothing new."""
        line = [line.strip() for line in error.splitlines() if line.strip()][-1]
        if not any(note.endswith(line) or note.startswith(f"{what} failed: ") for note in self.notes):
            self.note(f"{what} failed: {line}")


def make_report(
    study: Study, found: Report, budget: float, writes: bool, anyway: bool = False, extra: Sequence[str] = ()
) -> Report:
    """The whole report, of one that was begun. extra: which of EXTRA are measured, too."""
    begun = replace(found)
    try:
        _study(study, found, budget, writes, extra)
    except Stopped as stopped:
        found = replace(begun, rates=[], checks=[], notes=found.notes)
        found.unstudied = f"one was about to write {stopped}"
        found.notes.append(
            "this system allows the study no mount namespace, in which samples could write to an overlay: with "
            "--allow-writes they write the program's files"
        )
    return finish_report(found, study, anyway)


def _study(study: Study, found: Report, budget: float, writes: bool, extra: Sequence[str]) -> None:
    """Enters all measurements."""
    end = clock() + budget
    each = OPTION * budget
    budget -= each * len(extra)
    study.share = 1 - OPTION * len(extra)
    refused = study.check(writes)
    if refused:
        found.unstudied = f"{refused[0]}, which the study would share with the program"
        found.notes.append(
            "each access to an object of a Manager is a message to its process, for which all workers wait: if "
            "workers need not see what others write, a dict or list of the dataset's own costs less"
            if MANAGED in refused[0] else
            "a dataset without it can be studied: give a factory that makes one (minato analyze MODULE:FACTORY)"
            + (", or --allow-writes" if "open for writing" in refused[0] else "")
        )
        return
    if study.way == own_files.NEITHER and not writes:
        found.unstudied = (
            "they may write files, and this system allows the study neither a mount namespace nor a filter of "
            "system calls"
        )
        found.notes.append("with --allow-writes samples are studied, and write the program's files")
        return
    found.files = study.way
    study.progress.show("samples", 0.1)
    found.work = study.ask(Work, Request("work", budget * WORK))
    if not found.work and study.error:  # what makes samples could not be set up
        found.work = Work(failed=[study.error])
    work = found.work
    if not work or not work.costs:
        if not study.error and not study.cut and not (work and work.failures):
            within = format_seconds(budget * WORK)
            study.note(f"no sample was timed within {within}: where samples take long, give a longer --budget")
        return
    f = Facts(found)
    if len(f.costs) < FEW:
        need = study.budget_for(2 * FEW * f.mean, WORK * TIMING)
        study.note(f"only {len(f.costs)} samples were timed: needs about {need}")
    if work.files:
        study.progress.show("storage", 0.3)
        found.storage = study.ask(Storage, Request("storage", budget * STORAGE, files=work.files))
    study.progress.show("several processes at once", 0.4)
    if not f.loader["iterable"]:
        found.sampler = study.ask(Sampler, Request("sampler", min(SAMPLER_S, budget * SAMPLER)))
    count = max(2, min(f.workers or f.cores, f.cores))
    found.contend = study.ask(Contention, Request("contend", max(2.0, budget * LOADERS * 0.15), processes=count))
    _measure_rates(study, found, f, budget * LOADERS * 0.85)
    for name in extra:
        study.progress.show(name, 0.7)
        setattr(found, name, study.ask({"codecs": Codecs, "orders": Orders}[name], Request(name, each)))
    check_changes(study, found, max(budget * CHECKS, end - clock()))


def begin_report(told: Told, machine: Machine) -> Report:
    """The report before the study."""
    return Report(
        machine, told.loader, watch_facts(told, machine.others), "minato" if told.loader["minato"] else "torch",
        report.SCHEMA, version=__version__, place=told.place, validates=told.validates, steps=told.steps,
    )  # fmt: skip


def _measure_rates(study: Study, found: Report, f: Facts, seconds: float) -> None:
    counts = sorted({1, f.workers, f.cores})
    is_iterable = f.loader["iterable"]
    wanted = [(kind, n) for n in counts for kind in ("torch", "minato") if n or kind == f.own]
    if f.cpu_share <= 0.5:  # more workers than cores may help, of which the fit must know
        wanted += [(f.own, 2 * f.cores)] * (2 * f.cores not in counts)
    wanted += [] if is_iterable else [("hand-over", f.workers)]
    slot = seconds / len(wanted)
    size = fitting_batch(f, slot)
    if size == 0:
        need = study.budget_for(6 * f.mean * len(wanted), LOADERS * 0.85)
        study.note(f"loaders were not measured: needs about {need}")
        return
    if size is not None:
        study.note(f"loaders were measured with batches of {size}, so that some fit the budget")
    length = epoch_batches(f, size)
    for number, (kind, workers) in enumerate(wanted):
        study.progress.show(f"{kind}'s loader, {workers} workers", 0.45 + 0.3 * number / len(wanted))
        same = kind == "hand-over"
        result = study.ask_rate(RateRequest(
            "own" if same or kind == f.own else kind, workers, slot * 0.8, batch=size, same=same, length=length
        ))  # fmt: skip
        if result:
            found.rates.append(replace(result, loader=kind))


def finish_report(found: Report, study: Study | None, anyway: bool) -> Report:
    """Enters the limit, the notes, and what factors are relative to. anyway: some doubts are only noted."""
    add_base_rate(found)
    drop_small_gains(found)
    f = Facts(found)
    found.limit = seen = limit(f)
    doubt, may_go_on = _find_doubt(f) if seen.kind not in ("step", "nothing") else ("", False)
    if doubt and anyway and may_go_on:
        found.notes.insert(0, doubt)
    elif doubt:
        doubt += " (--anyway concludes all the same)" if may_go_on else ""
        found.limit = Limit("unknown", f"No conclusion: {doubt}. It looked like this: {seen.line}", seen.kind)
        for change in found.helps:
            change.settled = False
    if found.unstudied and found.unstudied not in found.limit.line:
        found.notes.insert(0, f"its samples were not studied, because {found.unstudied}")
    found.notes += study.notes if study else []
    found.notes += report.list_notes(f)
    found.notes += [WAYS[found.files]] if found.files else []
    return found


def name_loaders(found: Report, loaders: list[Told], which: str) -> None:
    """Enters what of the watched time went into the loop over this loader, and a note of the others."""
    loaders = [told for told in loaders if told.batches]
    others = [told for told in loaders if told.key != which]
    if not others:
        return
    whole = max(max(told.left for told in loaders) - min(told.begun or 0.0 for told in loaders), 1e-9)
    found.share = min(1.0, next(told.spent for told in loaders if told.key == which) / whole)
    names = ", ".join(
        f"{report.kind_of_loader(told)} at {format_place(told.place)} ({told.spent / whole:.0%} of the time)"
        for told in others
    )
    found.notes.append(f"the program waited less for other loaders: {names}")


def _find_doubt(f: Facts) -> tuple[str, bool]:
    """Why the numbers of a study allow no conclusion, or "", and whether --anyway concludes all the same."""
    work, others = f.work, f.report.machine.others
    if len(work.new) > NEW * len(work.files):
        return (
            f"samples read files that the program wrote while it was watched, such as {work.new[0]}, and in the "
            "study these were there, as they are in a second run"
        ), True
    if f.others > OTHERS:
        return f"other programs used {f.others:.0%} of the cores", True
    base, delivered = f.report.relative_to, (f.watched.range or [f.watched.delivered])[-1]
    if not base or not delivered or base <= FASTER * delivered:
        return "", False
    why = (
        f"where other programs used {others:.0%} of the cores" if others > OTHERS else
        "so the study has not seen what slows it, such as files that were not in memory then, or a cache of the "
        "dataset's own that was not full"
    )
    times = f"{base / f.watched.delivered:.1f} times as fast in the study as in the program"
    return f"the program's loader and step were {times}, {why}", others > OTHERS


def machine_facts(cores: int | None) -> Machine:
    """Facts of the machine that the numbers depend on."""
    core = _core.machine()
    found = Machine(cores or core["cpus"], core["cpus"], core["memory_available"])
    with contextlib.suppress(OSError):
        models = re.findall(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.M)
        found.model = models[0].strip() if models else ""
        topology = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
        found.siblings = topology.read_text().strip()
    return found


def write_report(found: Report, folder: str) -> str:
    """Writes report.json and index.html; returns where the page is."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(asdict(found), indent=1, default=str), encoding="utf-8")
    (out / "index.html").write_text(report.page(found), encoding="utf-8")
    return f"report: {out / 'index.html'}"


#: share of the budget that checks take
CHECKS = 0.25
#: repeats of each check, by turns
REPEATS = 3
#: changes that are checked at most, and seconds of a run that are better than more changes
CHECKED, CHECK_S = 3, 1.0
#: Share of a run's time in which batches are measured. The rest is for starting workers.
RUN_SHARE = 0.8
#: With uneven costs a run lasts one epoch, or this multiple of the slowest sample if that is shorter: then
#: samples of all costs are in it several times. Under a quarter of that nothing is checked.
UNEVEN = 18.0
#: seconds below which a run says nothing
LEAST_S = 0.3


def check_changes(study: Study, found: Report, seconds: float) -> None:
    """Predicts changes, and checks those that are predicted to help, in repeats of all of them, by turns.
    Before that, a loader of samples that cost nothing is run. What it and the program's own loader do
    with a step is a part of the predictions. What a change does is not."""
    found.helps, found.useless = candidates(Facts(found))
    study.progress.show("checks", 0.75)
    f, checks = Facts(found), [(change, change.check) for change in found.helps if change.check]
    if not checks or not f.own_rate:
        return
    #: a few samples take much of the time: each run has whole epochs, of at most ``most`` batches
    uneven, most = is_uneven(f.costs) and not f.loader["iterable"] and f.epoch > 0, 0
    # first what takes whole epochs to see; then the best of the options that were asked for
    options = [[one for one in checks if getattr(one[1], option)][:1] for option in ("order", "codec")]
    checks.sort(key=lambda one: (not (uneven and one[1].loader == "minato"), [one] not in options))
    learns = uneven and checks[0][1].loader == "minato"  # it is also run in an epoch in which it learns costs
    now = f.program_rate(f.own_rate or 0.0, f.workers)
    least = CHECK_S
    if uneven:
        least = max(CHECK_S, min(f.epoch * f.batch / now, UNEVEN * max(f.costs)) / RUN_SHARE)
    checks = checks[: min(CHECKED, max(1, int(seconds / REPEATS / least) - 1))]
    slot = seconds / (REPEATS * (len(checks) + 1) + 1 + learns)
    size = fitting_batch(f, slot)
    if size == 0 or slot < LEAST_S:
        return study.note("predictions were not checked: that needs a longer --budget")
    rows, length = size or f.batch, epoch_batches(f, size)
    if uneven:
        most = max(1, min(length, len(f.costs) // rows, int(slot * RUN_SHARE * now / rows)))
        slowest = UNEVEN / 4 * max(f.costs)
        if most < length and slowest > most * rows / now:
            need = study.budget_for(2 * (REPEATS + 1) * slowest / RUN_SHARE, CHECKS)
            why = "because the slowest samples take too long"
            return study.note(f"predictions were not checked, {why}: needs about {need}")
    costs = dict(zip(f.work.indices, f.costs))

    def run(what: RateRequest, repeat: int | None, learnt: bool = True) -> Rate | None:
        what = replace(
            what, seconds=slot * RUN_SHARE, step=f.step_alone * rows / f.batch, step_cores=f.step_cores,
            batch=size, length=length,
        )  # fmt: skip
        if repeat is None:
            return study.ask_rate(replace(what, same=True))
        # other samples in each repeat, the same for all in one
        if uneven:
            what = replace(what, part=repeat / REPEATS, most=most, costs=costs, learnt=learnt)
        result = study.ask_rate(replace(what, skip=0 if uneven else 40 + 37 * repeat))
        return result and replace(result, program=_program_rate_of(f, result))

    plans = [RateRequest("own", f.workers), *(check for _change, check in checks)]
    if not f.loader["iterable"]:
        found.free = run(plans[0], None)
    runs: list[list[Rate | None]] = [[] for _ in plans]
    first: float | None = None  # times as fast, in the epoch in which it learns costs
    for repeat in range(REPEATS):
        study.progress.show("checks", 0.78 + 0.07 * repeat)
        for plan, results in zip(plans, runs):
            results.append(run(plan, repeat))
        if learns and first is None and (base := runs[0][-1]) and (result := run(plans[1], repeat, learnt=False)):
            first = result.program / base.program
    for what, results in zip([None, *(change.what for change, _check in checks)], runs):
        found.checks += [replace(result, change=what) for result in results if result]
    own = [result for result in runs[0] if result]
    if not own:
        return
    # the predictions that follow from what the program's own loader did with the step
    found.base = statistics.median(result.program for result in own)
    ends = [result.end for result in own if result.end is not None]
    rates = [result.rate for result in own]
    if uneven:  # whole epochs: without their ends
        lost, each = f.end_seconds(f.own, f.workers), [1 / result.program for result in own]
        rates = [1 / max(seconds - lost, 0.2 * seconds) for seconds in each]
    found.paced = Rate(rate=statistics.median(rates), end=statistics.median(ends) if ends else None)
    helps, useless = candidates(Facts(found))
    changes = [change for change, _check in checks]
    again = [change for _change, check in checks for change in helps if change.check == check]
    if len(again) == len(changes):
        found.helps, found.useless, changes = helps, useless, again
    else:  # one of them is predicted to gain too little now: it was checked for what was predicted then
        found.paced = None
    f = Facts(found)
    now = f.program_rate(f.own_rate or 0.0, f.workers)
    for change, results in zip(changes, runs[1:]):
        enter_check(change, now, [(a.program, b.program) for a, b in zip(runs[0], results) if a and b])
        change.samples = sum(result.samples for result in results if result)
    if first is not None:
        changes[0].note = (
            f"from the second epoch on; {first:.2f} times in the first one, in which it learns what "
            "samples cost"
        )
    found.helps.sort(key=lambda change: -(change.checked_gain or change.gain or 0.0))


def _program_rate_of(f: Facts, result: Rate) -> float:
    """The program's rate by one run, with the ends of its epochs."""
    count = f.epoch * f.batch
    if result.epoch:  # the run had whole epochs, which may be shorter than the program's
        samples = result.epoch * result.samples / result.batches
        start = f.end_seconds("hand-over", f.workers) * count
        one = max(samples / result.rate - start, 0.1 * samples / result.rate)
        return count / (start + one * count / samples)
    lost = f.end_seconds(f.own if result.loader == "own" else result.loader, result.workers)
    if result.end is not None and count:
        lost = (result.end + f.unforked) / count
    return 1 / (1 / result.rate + lost)


def fitting_batch(f: Facts, seconds: float) -> int | None:
    """Samples of a batch, for a loader that has that many seconds. None: as many as the program's; 0: not
    even batches of one fit."""
    fits = int(seconds / max(f.mean, 1e-9) / 6)
    return None if fits >= f.batch else fits


def epoch_batches(f: Facts, size: int | None) -> int:
    """Batches of an epoch of the program, where they have another size; 0 where that is not known."""
    return f.epoch if size is None else math.ceil(f.epoch * f.batch / size)
