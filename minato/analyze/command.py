"""``minato analyze``: runs a program, watches it, studies its dataset, and prints the answer."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import re
import secrets
import selectors
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import _core
from .._version import __version__
from . import page, report
from .conclude import (
    OTHERS,
    Facts,
    candidates,
    drop,
    format_bytes,
    format_place,
    format_seconds,
    is_uneven,
    limit,
    relate,
    settle,
    watch_facts,
)
from .keeper import MEMORY, tree
from .progress import Progress
from .study import FEW, Usage
from .watch import VARIABLE, Watch, send

HERE = Path(__file__).resolve().parent
ARGUMENTS, NOT_WATCHED = 2, 3
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
#: seconds that a program has to end after each signal
SIGNALS_S = 10.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GENERATOR = "minato analyze"

clock = time.monotonic


def _parse_duration(text: str) -> float:
    """A duration: 90, 90s, 2m, 1h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h|)", text.strip())
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration: write 30s, 2m or 1h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minato analyze",
        usage="minato analyze [options] -- python train.py ARGS\n"
        "       minato analyze [options] MODULE:FACTORY [--step MODULE:FUNCTION]\n"
        "       minato analyze [options] FOLDER\n"
        "       minato analyze --compare BEFORE.json AFTER.json",
        description="Finds what limits a training program, and what would change it. The program "
        "runs to its end as ever; its loader is watched for some steps, and its dataset is studied "
        "after that.",
        epilog="Exit status: the program's own; 2: wrong arguments; 3: the program could not be watched.",
    )
    add = parser.add_argument
    add("target", nargs="?", help="MODULE:FACTORY that returns a loader, a dataset, or (dataset, "
        "arguments); or a folder of images, volumes or audio")  # fmt: skip
    add("--step", metavar="MODULE:FUNCTION", help="what trains on a batch, for a factory")
    add("--step-ms", type=float, metavar="MS", help="what a step takes, for a factory or a folder")
    add("--budget", type=_parse_duration, default=120.0, metavar="TIME", help="time of the study (2m)")
    add("--start-timeout", type=_parse_duration, default=600.0, metavar="TIME",
        help="time until the first batch, after which the causes are named (10m)")  # fmt: skip
    add("--cores", type=int, metavar="N", help="study as if the machine had N cores")
    add("--codecs", action="store_true", help="try other codecs, and sizes, for the images that samples "
        "read: bytes, time to decode, loss, rate")  # fmt: skip
    add("--orders", action="store_true", help="try other orders of the transforms: time, and what becomes "
        "of the data")  # fmt: skip
    add("--out", default="report", metavar="FOLDER", help="for report.json and index.html (report)")
    add("--stop", action="store_true", help="end the program after the watch, by SIGINT, and by "
        "SIGTERM and SIGKILL if it stays; its handlers may write files")  # fmt: skip
    add("--pause", action="store_true", help="stop the program after the watch, continue it after "
        "the study; for data that the program removes at its end")  # fmt: skip
    add("--allow-writes", action="store_true",
        help="study a dataset that holds a file open for writing")  # fmt: skip
    add("--anyway", action="store_true", help="conclude although other programs use the cores")
    add("--compare", nargs=2, metavar=("BEFORE", "AFTER"), help="the differences of two reports")
    return parser


def run(argv: list[str]) -> int:
    """Runs the command; returns the exit status."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = _make_parser()
    try:
        options, rest = parser.parse_known_args(argv[:cut])
        if (forgotten := _find_missing_dashes(argv, options.target, rest)) is not None:
            raise ValueError(forgotten)
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        program = argv[cut + 1 :]
        if options.compare:
            print(report.compare(*options.compare))
            return 0
        wrong = _find_mistake(options, program, cut < len(argv))
    except ValueError as error:
        wrong = str(error)
    except SystemExit as error:  # of argparse
        return int(error.code or 0)
    if wrong:
        print(f"minato analyze: {wrong}", file=sys.stderr)
        return ARGUMENTS
    options.argv = argv
    return Analysis(options, program or _stand_in_command(options)).run()


def _find_missing_dashes(argv: list[str], target: str | None, rest: list[str]) -> str | None:
    """What to write where a command has no -- before it."""
    if "--" in argv or not target or ":" in target or os.path.isdir(target):
        return None
    if not (rest or os.path.isfile(target) or shutil.which(target)):
        return None
    at = argv.index(target)
    start = [*argv[:at], "--", *(["python"] if target.endswith(".py") else []), *argv[at:]]
    return f"put -- before the command: minato analyze {shlex.join(start)}"


def _find_mistake(options: argparse.Namespace, program: list[str], dashes: bool) -> str | None:
    """What is wrong with the arguments, beyond what argparse finds."""
    if dashes and not program:
        return "there is no program after --"
    if bool(program) == bool(options.target):
        return "give a program after --, or a factory, or a folder (minato analyze --help)"
    if options.stop and options.pause:
        return "--stop ends the program and --pause continues it: give one of them"
    if program and (options.step or options.step_ms is not None):
        return "--step and --step-ms are for factories and folders; a program has its own step"
    if options.step and options.step_ms is not None:
        return "give --step or --step-ms, not both"
    target = options.target
    if target and not os.path.isdir(target) and not re.fullmatch(r"[\w.]+:\w+", target):
        return f"{target} is neither a folder nor MODULE:FACTORY"
    if options.step and not re.fullmatch(r"[\w.]+:\w+", options.step):
        return f"--step {options.step} is not MODULE:FUNCTION"
    usable = _core.machine()["cpus"]
    if options.cores is not None and not 1 <= options.cores <= usable:
        return f"--cores {options.cores}: there are {usable} that this process may use"
    out = Path(options.out)
    if out.exists() and not (out / "report.json").exists() and (not out.is_dir() or any(out.iterdir())):
        return f"{out} holds other files: give --out another folder"
    return None


def _stand_in_command(options: argparse.Namespace) -> list[str]:
    """The program for a factory or a folder."""
    command = [sys.executable, "-m", "minato.analyze.stand_in", options.target]
    command += ["--step", options.step] if options.step else []
    command += ["--step-ms", str(options.step_ms)] if options.step_ms is not None else []
    return command


# ---- what the processes of a program say ---------------------------------------------------


class Connection:
    """One process of the program, or a keeper."""

    def __init__(self, to: socket.socket) -> None:
        self.socket = to
        self.rest = b""
        self.facts: dict[str, Any] = {}

    def lines(self) -> Iterator[dict[str, Any]] | None:
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


class Listener:
    """The socket that processes of the program connect to, and what they have told."""

    def __init__(self) -> None:
        self.name = f"minato-analyze-{secrets.token_hex(16)}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind("\0" + self.name)
        self.socket.listen(64)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.socket, selectors.EVENT_READ)
        #: of each process that Python has started in: what it is
        self.processes: dict[int, dict[str, Any]] = {}
        #: (pid, key of the loader) -> the last report on it
        self.loaders: dict[tuple[int, str], dict[str, Any]] = {}
        self.keepers: dict[tuple[int, str], Connection] = {}
        self.watched = False
        self.trouble: list[str] = []

    def pump(self, seconds: float) -> None:
        """Takes what comes within that time."""
        for key, _ in self.selector.select(seconds):
            if key.fileobj is self.socket:
                new, _address = self.socket.accept()
                credentials = new.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                if int.from_bytes(credentials[4:8], sys.byteorder) != os.getuid():
                    new.close()
                    continue
                new.setblocking(False)
                self.selector.register(new, selectors.EVENT_READ, Connection(new))
                continue
            connection: Connection = key.data
            messages = connection.lines()
            if messages is None:
                self.selector.unregister(connection.socket)
                connection.socket.close()
                continue
            for message in messages:
                self._take(connection, message)

    def _take(self, connection: Connection, message: dict[str, Any]) -> None:
        kind, pid = message["kind"], message.get("pid", 0)
        if kind == "keeper":
            self.keepers[message["parent"], message["key"]] = connection
            self.selector.unregister(connection.socket)
            connection.socket.setblocking(True)
        elif kind == "process":
            self.processes[pid] = {**message, "torch": False}
        elif kind == "torch":
            self.processes.setdefault(pid, message)["torch"] = True
        elif kind in ("loader", "watch"):
            self.loaders[pid, message["key"]] = message
        elif kind == "watched":
            self.watched = True
        elif kind == "trouble":
            self.trouble.append(message["text"])

    def batches(self) -> int:
        return max((told["batches"] for told in self.loaders.values()), default=0)

    def slowest_loader(self) -> tuple[int, str] | None:
        """The loader that its program has waited for most."""

        def wait_seconds(which: tuple[int, str]) -> float:
            told = self.loaders[which]
            return float(sum(step[0] for step in told["steps"]) + sum(told["starts"]))

        known = [which for which, told in self.loaders.items() if told["batches"]]
        return max(known, key=wait_seconds, default=None)

    def end_keepers(self) -> None:
        """They are told that this is the regular end."""
        for connection in self.keepers.values():
            with contextlib.suppress(OSError):
                send(connection.socket, {"do": "bye"})
            connection.socket.close()
        self.keepers.clear()

    def close(self) -> None:
        """Ends the keepers."""
        self.end_keepers()
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.selector.close()


# ---- the study -----------------------------------------------------------------------------


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
    if f.workers >= f.cores and f.cpu_share < 0.5:  # more workers may help, of which the fit must know
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
    paced = (f.watched["step"] or 0.0) * ((size or rows) / rows)
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
        settle(change, now, each)
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
    relate(found)
    drop(found)
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


def study_this_process(watch: Watch, budget: str, out: str | None) -> str:
    """For notebooks: the answer, from the keepers that this process has forked itself."""
    kept = dict(watch.keepers)
    told = {key: record.summary(2000) for key, record in watch.loaders.items() if key in kept}
    if not told:
        raise RuntimeError("no copy of this process could be made before the loop began")
    key = max(told, key=lambda k: sum(s[0] for s in told[k]["steps"]) + sum(told[k]["starts"]))
    keeper = Connection(kept[key])
    for line in (keeper.lines() or ()):
        assert line["kind"] == "keeper"
    study = Study(keeper, None, Progress("minato analyze"))
    found = make_report(study, told[key], machine_facts(None), _parse_duration(budget), writes=False)
    study.progress.clear()
    return report.answer(found, write_report(found, out) if out is not None else "")


# ---- one run -------------------------------------------------------------------------------


class Memory:
    """Whether memory runs low while a program and its copies share their pages. Each page that the
    program writes to, if only to count references, is there twice from then on."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.said = ""

    def low(self) -> bool:
        free = _core.machine()["memory_available"]
        if self.first is None:
            self.first = free
        if free > MEMORY * self.first:
            return False
        self.said = (
            f"its dataset was not studied: {format_bytes(free)} of memory were left while the program ran, so "
            "its copy was ended. Use --pause, or give the factory form (minato analyze "
            "MODULE:FACTORY) a smaller dataset"
        )
        return True


class Analysis:
    """The program, its watch, and the study after it."""

    def __init__(self, options: argparse.Namespace, command: list[str]) -> None:
        self.options, self.command = options, command
        self.listener = Listener()
        self.progress = Progress("minato analyze")
        self.program: subprocess.Popen[bytes] | None = None
        self.found: dict[str, Any] | None = None
        self.interrupted = False
        self.status = 0
        #: share of the cores that others used while the program was watched
        self.others = 0.0
        self.memory = Memory()

    def run(self) -> int:
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # so that keepers are ours to wait for
        if self.options.stop:
            self._say("the program will be ended after the watch; its handlers may write files")
        try:
            try:
                self.program = self._start(libc)
            except OSError as error:
                self._say(f"{self.command[0]} cannot be started: {error.strerror}")
                return ARGUMENTS
            return self._watch_and_study()
        finally:
            self.progress.clear()
            if self.program is not None and self.program.poll() is None:
                self._end()
            self.listener.close()
            _reap()

    def _start(self, libc: ctypes.CDLL) -> subprocess.Popen[bytes]:
        path = [str(HERE / "inject"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, VARIABLE: self.listener.name, "PYTHONPATH": os.pathsep.join(path)}
        mine = os.getpid()

        def before() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != mine:
                os._exit(1)

        return subprocess.Popen(self.command, env=environment, preexec_fn=before)

    def _say(self, text: str) -> None:
        self.progress.clear()
        print(f"minato analyze: {text}", file=sys.stderr, flush=True)

    def _watch_and_study(self) -> int:
        try:
            paused = self._watch()
        except KeyboardInterrupt:
            self.interrupted, paused = True, False
            self._end(first=3.0)
        if paused is None:
            return ARGUMENTS
        for _ in range(20):  # what is still on its way
            self.listener.pump(0.01)
        which = self.listener.slowest_loader()
        if which is None:
            self._end()
            return self._say_not_watched()
        told = self.listener.loaders[which]
        keeper = self.listener.keepers.get(which)
        try:
            report_ = self._study(told, keeper)
        except KeyboardInterrupt:
            self.interrupted = True
            if self.found is None:
                raise
            self.found["notes"].append("the study was interrupted")
            report_ = finish_report(self.found, None, self.options.anyway)
        self._print_answer(report_, which, paused)
        if paused:
            self.listener.end_keepers()  # the program would copy each page that they share
            self._signal(signal.SIGCONT)
            assert self.program is not None
            with contextlib.suppress(KeyboardInterrupt):
                self.status = self.program.wait()
        if self.interrupted:
            return 128 + signal.SIGINT
        if self.options.stop or self.options.target:
            return 0
        return self.status if self.status >= 0 else 128 - self.status

    def _watch(self) -> bool | None:
        """Until the program has ended, or is stopped: then True. None where it may not be."""
        assert self.program is not None
        options, listener = self.options, self.listener
        begun_, warned = clock(), False
        usage: Usage | None = None
        while self.program.poll() is None:
            listener.pump(0.05)
            if listener.keepers and self.memory.low():
                listener.end_keepers()
            batches = listener.batches()
            if batches and not listener.watched:
                usage = usage or Usage()
                self.others = usage.summary()["others"]
            self.progress.show(f"watching, {batches} batches" if batches else "waiting for the first batch")
            if options.pause and any((p.get("ranks") or "1") != "1" for p in listener.processes.values()):
                self._say("--pause: the program has several ranks, and the others would wait for one")
                self._end()
                return None
            if not batches and not warned and clock() - begun_ > options.start_timeout:
                warned = True
                self._say(f"no batch in {options.start_timeout:.0f} s: {self._find_cause().rstrip()}")
                if options.stop:
                    self._end()
                    break
            if listener.watched and options.pause:
                self._signal(signal.SIGSTOP)
                return True
            if listener.watched and options.stop:
                self._end()
                break
        self.status = self.program.wait()
        return False

    def _signal(self, number: int) -> None:
        assert self.program is not None
        for pid in tree(self.program.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _end(self, first: float = 0.0) -> None:
        """Ends the program: it may have had a terminal's SIGINT already, for which ``first``
        seconds are waited."""
        assert self.program is not None
        for number, seconds in ((None, first), (signal.SIGINT, SIGNALS_S),
                                (signal.SIGTERM, SIGNALS_S), (signal.SIGKILL, SIGNALS_S)):  # fmt: skip
            if self.program.poll() is not None:
                break
            if number is not None:
                self._signal(number)
            end = clock() + seconds
            while self.program.poll() is None and clock() < end:
                self.listener.pump(0.05)
        self.status = self.program.wait()

    def _study(self, told: dict[str, Any], keeper: Connection | None) -> dict[str, Any]:
        machine = machine_facts(self.options.cores)
        argv = ["minato", "analyze", *self.options.argv]
        machine.update(command=self.command, argv=argv, others=self.others)
        if keeper is None or self.interrupted:
            self.found = begin_report(told, machine)
            why = (
                "the study was interrupted" if self.interrupted else self.memory.said
                or "its dataset could not be kept"
            )  # fmt: skip
            self.found["notes"].append(why)
            return finish_report(self.found, None, self.options.anyway)
        study = Study(keeper, self.options.cores, self.progress)

        def keep(found: dict[str, Any]) -> None:
            self.found = found

        try:
            return make_report(
                study, told, machine, self.options.budget, self.options.allow_writes,
                self.options.anyway, keep, [name for name in EXTRA if vars(self.options)[name]],
            )  # fmt: skip
        except ConnectionError as error:
            assert self.found is not None
            study.note(f"{error}; its dataset was not studied")
            return finish_report(self.found, study, self.options.anyway)

    def _print_answer(self, found: dict[str, Any], which: tuple[int, str], paused: bool) -> None:
        others = [w for w, told in self.listener.loaders.items() if w != which and told["batches"]]
        if others:
            places = [self.listener.loaders[w]["place"] for w in others]
            names = ", ".join(map(format_place, places))
            found["notes"].append(f"other loaders, which the program waited for less: {names}")
        ranks = {p.get("ranks") for p in self.listener.processes.values()} - {None, "1"}
        if ranks:
            found["notes"].append(f"{ranks.pop()} ranks share these cores; local rank 0 was studied")
        if self.options.pause and not paused:
            found["notes"].append(
                "the program ended before --pause could stop it: the watch takes 30 steps and three seconds"
            )
        if self.status and not self.options.stop:
            found["notes"].append(
                f"the program ended with status {self.status}" if self.status > 0
                else f"the program was ended by {_name_signal(-self.status)}"
            )
        self.progress.clear()
        print(report.answer(found, write_report(found, self.options.out)), flush=True)

    def _find_cause(self) -> str:
        """Why no loader was seen: every Python process that was, and what it did."""
        listener = self.listener
        ended = self.program is None or self.program.poll() is not None
        line = " ".join(self.command)
        if not listener.processes:
            flags = next((w for w in self.command if re.fullmatch(r"-[a-zA-Z]*[IE][a-zA-Z]*", w)), None)
            cause = (
                f"{flags} makes Python ignore PYTHONPATH, by which it would be watched"
                if flags else "no Python process of it was seen: it may run in a container, by ssh, "
                "or replace PYTHONPATH"
            )  # fmt: skip
            return f"{line}: {cause}. Write import minato.analyze.watch as the program's first line."
        seen = []
        for pid, process in listener.processes.items():
            argv = " ".join(process.get("argv", [])[:6])
            torch = "imported torch" if process["torch"] else (
                "did not import torch" if ended else "has not imported torch so far"
            )  # fmt: skip
            seen.append(f"process {pid} ({argv}) {torch}")
        loaders = [
            f"the loader of {told['loader'].get('dataset')} ({format_place(told['place'])}, "
            f"num_workers={told['loader']['num_workers']})" for told in listener.loaders.values()
        ]
        made = (
            f"{loaders[0]} delivered no batch" if loaders
            else "it iterated no torch DataLoader in a process that was watched" if ended
            else "it has iterated no torch DataLoader so far"
        )  # fmt: skip
        return f"{made}. Seen: {'; '.join(seen[:8])}. {' '.join(listener.trouble[:1])}"

    def _say_not_watched(self) -> int:
        status = self.status
        if self.options.target and status > 0:  # it has said why
            self._say(f"{self.options.target} could not be studied: see above")
            return NOT_WATCHED
        ended = f" It ended with status {status}." if status > 0 else ""
        if status < 0:
            ended = f" It was ended by {_name_signal(-status)}."
        start = "no batch was seen" if self.listener.processes else "the program could not be watched"
        self._say(f"{start}: {self._find_cause().rstrip()}{ended}")
        return NOT_WATCHED


def _name_signal(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _reap() -> None:
    """Waits for the keepers, which end by themselves, and for what the program has left to us."""
    end = clock() + 5.0
    with contextlib.suppress(ChildProcessError):
        while clock() < end:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if not pid:
                if not _child_pids():
                    return
                time.sleep(0.01)


def _child_pids() -> list[int]:
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        return list(map(int, file.read().split()))
    return []
