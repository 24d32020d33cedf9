"""Which measurements are made, in which order and for how long, and how changes are checked."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import _core
from .._version import __version__
from . import page, report
from .changes import add_base_rate, candidates, drop_small_gains, enter_check
from .facts import OTHERS, Facts, is_uneven, watch_facts
from .formats import format_seconds
from .limits import limit
from .listener import Connection
from .progress import Progress
from .watch import send
from .work import FEW

#: shares of the budget
STORAGE, WORK, LOADERS, CHECKS = 0.15, 0.25, 0.35, 0.25
#: what each request measures, for notes
MEASURED = {
    "work": "timing samples", "contend": "samples in several processes at once", "storage": "reading files",
}  # fmt: skip
#: share of the budget that each of --codecs and --orders takes from the others
OPTION = 0.2
EXTRA = ("codecs", "orders")
#: repeats of each check, by turns
REPEATS = 3
#: changes that are checked at most, and seconds of each that are better than more changes
CHECKED, CHECK_S = 3, 1.0
#: where costs are uneven, a check makes whole epochs, or takes as often the slowest sample; a quarter of
#: that at least
UNEVEN = 18.0
GENERATOR = "minato analyze"
clock = time.monotonic


class Study:
    """Asks a keeper for one measurement after the other."""

    def __init__(self, keeper: Connection, cores: int | None, progress: Progress) -> None:
        self.keeper, self.cores, self.progress = keeper, cores, progress
        self.notes: list[str] = []
        self.at: str | None = None
        self.cut = False  # the latest measurement had to be ended

    def ask(self, do: str, seconds: float, **more: Any) -> dict[str, Any] | None:
        """The last that a measurement has told; None where it has told nothing."""
        self.at, result = None, None
        what = MEASURED.get(do, do)
        if do == "rate":
            workers, whose = more["workers"], more["loader"]
            whose = "the program" if whose == "own" else whose
            what = f"{whose}'s loader with {workers} worker{'s' * (workers != 1)}"
        request = {"do": do, "seconds": seconds, "cores": self.cores, **more}
        send(self.keeper.socket, request)
        while True:
            messages = self.keeper.lines()
            if messages is None:
                raise ConnectionError("the process that kept the dataset has ended")
            for message in messages:
                kind = message["kind"]
                if kind == "at":
                    self.at = message["index"]
                elif kind == "failed":
                    self._note_failure(what, message["error"])
                elif kind == "end":
                    self.cut = message["why"] is not None
                    if self.cut:
                        where = f" (at sample {self.at})" if self.at is not None else ""
                        self.note(f"{what}: {message['why']}{where}")
                    return result
                else:
                    result = message

    def check(self, writes: bool) -> list[str]:
        send(self.keeper.socket, {"do": "check", "writes": writes})
        while (messages := self.keeper.lines()) is not None:
            for message in messages:
                if message["kind"] == "unable":
                    raise ConnectionError(
                        "minato is not installed in the program's Python, and this installation "
                        f"cannot be used there ({message['error']}): install minato there"
                    )
                found: list[str] = message["refused"]
                return found
        raise ConnectionError("the process that kept the dataset has ended")

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _note_failure(self, what: str, error: str) -> None:
        """The line of an error that says what has happened: a worker's begins with a traceback. The
        same error of other loaders says nothing new."""
        line = [line.strip() for line in error.splitlines() if line.strip()][-1]
        if not any(note.endswith(line) for note in self.notes):
            self.note(f"{what} failed: {line}")


def make_report(
    study: Study, told: dict[str, Any], machine: dict[str, Any], budget: float, writes: bool,
    anyway: bool = False, keep: Callable[[dict[str, Any]], None] = lambda _report: None,
    extra: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """The whole report. keep: is given the report while it grows, for an interrupt. extra: which of
    EXTRA are measured, too."""
    found = begin_report(told, machine)
    keep(found)
    end = clock() + budget
    each = OPTION * budget
    budget -= each * len(extra)
    refused = study.check(writes)
    if refused:
        found["notes"].append(
            f"its samples were not studied, because {refused[0]}, which the study would share with the "
            "program. Use a factory that makes a fresh dataset (minato analyze MODULE:FACTORY)"
            + (", or --allow-writes" if "open for writing" in refused[0] else "")
        )
        return finish_report(found, study, anyway)
    study.progress.show("samples", 0.1)
    found["work"] = study.ask("work", budget * WORK)
    keep(found)
    work = found["work"]
    if not work or not work["costs"]:
        if not work or not work["failures"]:
            within = format_seconds(budget * WORK)
            study.note(f"no sample was timed within {within}: where samples take long, give a longer --budget")
        return finish_report(found, study, anyway)
    if study.cut:  # loaders would hang at the same sample
        return finish_report(found, study, anyway)
    f = Facts(found)
    if len(f.costs) < FEW:
        need = 2 * FEW * f.mean / WORK / 0.75
        study.note(f"only {len(f.costs)} samples were timed: needs about --budget {max(1, round(need / 60 + 0.5))}m")
    if work.get("files"):
        study.progress.show("storage", 0.3)
        found["storage"] = study.ask("storage", budget * STORAGE, files=work["files"])
        keep(found)
    study.progress.show("several processes at once", 0.4)
    count = max(2, min(f.workers or f.cores, f.cores))
    found["contend"] = study.ask("contend", max(2.0, budget * LOADERS * 0.15), processes=count)
    keep(found)
    _measure_rates(study, found, f, budget * LOADERS * 0.85)
    keep(found)
    for name in extra:
        study.progress.show(name, 0.7)
        found[name] = study.ask(name, each)
        keep(found)
    _check_changes(study, found, max(budget * CHECKS, end - clock()))
    return finish_report(found, study, anyway)


def begin_report(told: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """The report before the study."""
    others = machine.get("others", 0.0)
    return {
        "schema": report.SCHEMA, "generator": GENERATOR, "version": __version__,
        "machine": machine, "place": told["place"], "loader": told["loader"],
        "own": "minato" if told["loader"]["minato"] else "torch", "watched": watch_facts(told, others),
        "steps": told["steps"], "work": None, "storage": None, "contend": None, "rates": [],
        "codecs": None, "orders": None, "paced": None, "free": None, "checks": [], "base": None, "helps": [],
        "dropped": [], "useless": [], "notes": [],
    }  # fmt: skip


def _fitting_batch(found: dict[str, Any], mean: float, seconds: float) -> int | None | str:
    """Samples a batch, for a loader that has that many seconds. None: the program's own; a
    sentence: not even batches of one fit."""
    batch = found["watched"]["batch"]
    fits = int(seconds / max(mean, 1e-9) / 6)
    if fits >= batch:
        return None
    if fits < 1:
        return f"{format_seconds(mean * 6 / seconds)}"
    return fits


def _epoch_batches(f: Facts, size: int | None) -> int:
    """Batches of an epoch of the program, where they have another size; 0 where that is not known."""
    return f.epoch() if size is None else math.ceil(f.epoch() * f.batch() / size)


def _measure_rates(study: Study, found: dict[str, Any], f: Facts, seconds: float) -> None:
    counts = sorted({1, f.workers, f.cores})
    is_iterable = f.loader["iterable"]
    kinds = ["torch", "minato"]
    wanted = [(kind, n) for n in counts for kind in kinds if n or kind == f.own]
    if f.cpu_share <= 0.5:  # more workers than cores may help, of which the fit must know
        wanted += [(f.own, 2 * f.cores)] * (2 * f.cores not in counts)
    wanted += [] if is_iterable else [("hand-over", f.workers)]
    slot = seconds / len(wanted)
    size = _fitting_batch(found, f.mean, slot)
    if isinstance(size, str):
        need = 6 * f.mean * len(wanted) / (LOADERS * 0.85)
        study.note(f"loaders were not measured: needs about --budget {round(need / 60 + 0.5)}m")
        return
    if size is not None:
        study.note(f"loaders were measured with batches of {size}, so that some fit the budget")
    found["studied_batch"] = size
    length = _epoch_batches(f, size)
    for number, (kind, workers) in enumerate(wanted):
        study.progress.show(f"{kind}'s loader, {workers} workers", 0.45 + 0.3 * number / len(wanted))
        same = kind == "hand-over"
        result = study.ask(
            "rate", slot * 0.8, loader="own" if same or kind == f.own else kind, workers=workers,
            batch=size, same=same, length=length,
        )  # fmt: skip
        if result and result.get("rate"):
            found["rates"].append({**result, "loader": kind})


def _check_changes(study: Study, found: dict[str, Any], seconds: float) -> None:
    """Runs the changes that are predicted to help, and the program's loader, by turns, with the
    program's step; before that, a loader of samples that cost nothing. What these two do with a step
    is a part of the predictions. What a change does is not."""
    found["helps"], found["useless"] = candidates(Facts(found))
    wanted = [change for change in found["helps"] if change["check"]]
    f = Facts(found)
    if not wanted or not f.own_rate():
        return
    uneven = is_uneven(f.costs) and not f.loader["iterable"]
    learns = uneven and any(change["check"]["loader"] == "minato" for change in wanted)
    if learns:  # what a scheduler gains takes whole epochs to see
        wanted.sort(key=lambda change: change["check"]["loader"] != "minato")
    own_rate = f.program_rate(f.own_rate() or 0.0, f.workers)
    check = CHECK_S
    if uneven:
        check = max(CHECK_S, min(f.epoch() * f.batch() / own_rate, UNEVEN * max(f.costs)) / 0.8)
    count = min(CHECKED, len(wanted), max(1, int(seconds / REPEATS / check) - 1))
    slot = seconds / (REPEATS * (count + 1) + 1 + learns)
    size = _fitting_batch(found, f.mean, slot)
    if isinstance(size, str) or slot < 0.3:
        study.note("predictions were not checked: that needs a longer --budget")
        return
    rows = f.batch()
    paced = f.step_alone * ((size or rows) / rows)
    length = _epoch_batches(f, size)
    given = {"step": paced, "step_cores": f.step_cores, "batch": size, "length": length}
    own = {"loader": "own", "workers": f.workers}

    def ask(change: dict[str, Any] | None, repeat: int, learnt: bool = True) -> dict[str, Any] | None:
        what = own if change is None else change["check"]
        # other samples in each repeat, the same for all in one
        where: dict[str, Any] = {"skip": 40 + 37 * repeat}
        if uneven:
            where = {"part": repeat / REPEATS, "most": most, "costs": costs, "learnt": learnt}
        result = study.ask("rate", slot * 0.8, **where, **given, **what)
        return result if result and result.get("rate") else None

    study.progress.show("checks", 0.75)
    if uneven:
        costs = dict(zip(found["work"]["indices"], f.costs))
        took = (size or rows) / own_rate  # by a batch
        most = min(length, len(costs) // (size or rows), int(slot * 0.8 / took))
        if most < length and (least := UNEVEN / 4 * max(f.costs)) > most * took:
            need = 2 * (REPEATS + 1) * least / 0.8 / CHECKS
            study.note(
                "predictions were not checked, because the slowest samples take too long: needs about "
                f"--budget {round(need / 60 + 0.5)}m"
            )
            return
    if not f.loader["iterable"]:
        found["free"] = study.ask("rate", slot * 0.8, same=True, **given, **own)
    chosen = wanted[:count]
    samples = [0] * (1 + count)
    bases: list[dict[str, Any]] = []
    pairs: list[list[tuple[float, float]]] = [[] for _ in [None, *chosen]]  # the first stays empty
    first: float | None = None  # times as fast in the first epoch, in which costs are learnt
    for repeat in range(REPEATS):
        study.progress.show("checks", 0.78 + 0.07 * repeat)
        base = None
        for number, change in enumerate([None, *chosen]):
            if (result := ask(change, repeat)) is None:
                continue
            rate = _program_rate(f, result)
            found["checks"].append({**result, "program": rate, "change": change["what"] if change else None})
            samples[number] += result["samples"]
            if change is None:
                base = rate
                bases.append({**result, "program": rate})
            elif base is not None:
                pairs[number].append((base, rate))
        if learns and first is None and base and (result := ask(chosen[0], repeat, learnt=False)):
            first = _program_rate(f, result) / base
    if not bases:
        return
    found["base"] = statistics.median(result["program"] for result in bases)
    ends = [result["end"] for result in bases if result["end"] is not None]
    paced = {
        "rate": statistics.median(_loader_rate(f, result) for result in bases),
        "end": statistics.median(ends) if ends else None,
    }
    chosen, now = _predict_again(found, chosen, paced)
    for change, each, count in zip(chosen, pairs[1:], samples[1:]):
        enter_check(change, now, each)
        change["samples"] = count
    if first is not None:
        chosen[0]["first_epoch"] = first
        chosen[0]["note"] = (
            f"from the second epoch on; {first:.2f} times in the first one, in which it learns what samples cost"
        )
    found["helps"].sort(key=lambda change: -(change.get("checked_gain") or change["gain"] or 0.0))


def _predict_again(
    found: dict[str, Any], chosen: list[dict[str, Any]], paced: dict[str, Any]
) -> tuple[list[dict[str, Any]], float]:
    """Enters predictions from what the program's own loader did with the step (paced). Returns the
    chosen changes in these, and what is predicted of the program as it is."""
    found["paced"] = paced
    helps, useless = candidates(Facts(found))
    same = [change for one in chosen for change in helps if change["check"] == one["check"]]
    if len(same) == len(chosen):
        found["helps"], found["useless"], chosen = helps, useless, same
    else:  # one of them is predicted to gain too little now: it was checked for what was predicted then
        found["paced"] = None
    f = Facts(found)
    return chosen, f.program_rate(f.own_rate() or 0.0, f.workers)


def _program_rate(f: Facts, result: dict[str, Any]) -> float:
    """The program's rate by a check, with the ends of epochs."""
    count = f.epoch() * f.batch()
    if result.get("epoch"):  # the check had whole epochs, which may be shorter than the program's
        samples = result["epoch"] * result["samples"] / result["batches"]
        start = f.end_seconds("hand-over", f.workers) * count
        one = max(samples / result["rate"] - start, 0.1 * samples / result["rate"])
        return float(count / (start + one * count / samples))
    seen = result["end"] is not None and count
    kind = f.own if result["loader"] == "own" else result["loader"]
    lost = (result["end"] + f.unforked) / count if seen else f.end_seconds(kind, result["workers"])
    return float(1 / (1 / result["rate"] + lost))


def _loader_rate(f: Facts, result: dict[str, Any]) -> float:
    """The rate of the program's own loader by a check, without the ends of epochs."""
    if not result.get("epoch"):
        return float(result["rate"])
    each = 1 / result["program"]
    return float(1 / max(each - f.end_seconds(f.own, f.workers), 0.2 * each))


def finish_report(found: dict[str, Any], study: Study | None, anyway: bool) -> dict[str, Any]:
    """Enters the limit, the notes, and what factors are relative to."""
    add_base_rate(found)
    drop_small_gains(found)
    f = Facts(found)
    found["limit"] = limit(f)
    if f.others() > OTHERS and not anyway and found["limit"]["kind"] not in ("step", "nothing"):
        seen = found["limit"]
        found["limit"] = {"kind": "unknown", "seen": seen["kind"], "line": (
            f"No conclusion: other programs used {f.others():.0%} of the cores. It looked like this: "
            f"{seen['line']} (--anyway concludes all the same)"
        )}  # fmt: skip
    found["notes"] = [*found["notes"], *(study.notes if study else []), *report.list_notes(f)]
    return found


def machine_facts(cores: int | None) -> dict[str, Any]:
    """Facts of the machine that the numbers depend on."""
    core = _core.machine()
    found = {
        "cores": cores or core["cpus"], "usable": core["cpus"],
        "memory_available": core["memory_available"], "model": "", "siblings": "", "throttled": None,
    }  # fmt: skip
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                found["model"] = line.partition(":")[2].strip()
                break
    with contextlib.suppress(OSError):
        found["siblings"] = Path(
            "/sys/devices/system/cpu/cpu0/topology/thread_siblings_list"
        ).read_text().strip()  # fmt: skip
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/sys/fs/cgroup/cpu.stat").read_text().splitlines()
        found["throttled"] = next(int(x.split()[1]) for x in lines if x.startswith("throttled_usec"))
    return found


def write_report(found: dict[str, Any], folder: str) -> str:
    """Writes report.json and index.html; returns where the page is."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(found, indent=1, default=str), encoding="utf-8")
    (out / "index.html").write_text(page.page(found), encoding="utf-8")
    return f"report: {out / 'index.html'}"
