"""``minato analyze``: runs a program, watches it, studies its dataset, and prints the answer."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import os
import re
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from .. import _core
from ..text import Progress, format_bytes
from . import report
from .measure import (
    EXTRA, Connection, Study, begin_report, finish_report, machine_facts, make_report, name_loaders,
    write_report,
)  # fmt: skip
from .records import Report, Told, format_place, parse
from .watch import PAUSES, VARIABLE, Message, Step, Watch, send
from .work import Usage, tree

HERE = Path(__file__).resolve().parent
ARGUMENTS, NOT_WATCHED = 2, 3
#: seconds that a program has to end after each signal
SIGNALS_S = 10.0
#: share of the memory available at the first batch that must be left while the program runs with its copy
MEMORY_LEFT = 0.25
#: seconds between two looks at who uses the cores
LOOK_S = 0.5
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
clock = time.monotonic
Key = TypeVar("Key")


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
        help="study a dataset that holds a file open for writing, and let samples write the program's "
        "files where the study can have no overlay of its own")  # fmt: skip
    add("--anyway", action="store_true", help="conclude although other programs use the cores, or samples find what the program has written")
    add("--compare", nargs=2, metavar=("BEFORE", "AFTER"), help="the differences of two reports")
    return parser


def run(argv: list[str]) -> int:
    """Runs the command; returns the exit status."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = _make_parser()
    try:
        options = parser.parse_args(argv[:cut])
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
    if options.target:
        program = [sys.executable, "-m", "minato.analyze.stand_in", options.target]
        program += ["--step", options.step] if options.step else []
        program += ["--step-ms", str(options.step_ms)] if options.step_ms is not None else []
    return Analysis(options, program).run()


def _find_mistake(options: argparse.Namespace, program: list[str], dashes: bool) -> str | None:
    """What is wrong with the arguments, beyond what argparse finds."""
    target, step, takes, cores, out = options.target, options.step, options.step_ms, options.cores, Path(options.out)
    name, usable = r"[\w.]+:\w+", _core.machine()["cpus"]
    holds_others = out.exists() and not (out / "report.json").exists() and (not out.is_dir() or any(out.iterdir()))
    mistakes = {
        "there is no program after --": dashes and not program,
        "give a program after --, or a factory, or a folder (minato analyze --help)": bool(program) == bool(target),
        "--stop ends the program and --pause continues it: give one of them": options.stop and options.pause,
        "--step and --step-ms are for factories and folders; a program has its own step":
            program and (step or takes is not None),
        f"--step-ms {takes}: a step takes 0 ms or more": takes is not None and not 0 <= takes < math.inf,
        "give --step or --step-ms, not both": step and takes is not None,
        f"{target} is neither a folder nor MODULE:FACTORY; put -- before a command":
            target and not os.path.isdir(target) and not re.fullmatch(name, target),
        f"--step {step} is not MODULE:FUNCTION": step and not re.fullmatch(name, step),
        f"--cores {cores}: there are {usable} that this process may use": cores is not None and not 1 <= cores <= usable,
        f"{out} holds other files: give --out another folder": holds_others,
    }  # fmt: skip
    return next((text for text, wrong in mistakes.items() if wrong), None)


def study_this_process(watch: Watch, budget: str, out: str | None) -> str:
    """For notebooks: the answer, from the keepers that this process has forked itself."""
    kept = dict(watch.keepers)
    told = {key: parse(Told, record.summary(2000)) for key, record in watch.loaders.items() if key in kept}
    if not told:
        raise RuntimeError("no copy of this process could be made before the loop began")
    key = find_slowest(told)
    study = Study(Connection(kept[key]), None, Progress("minato analyze"))
    try:
        found = begin_report(told[key], machine_facts(None))
        found = make_report(study, found, _parse_duration(budget), writes=False)
    except ConnectionError:
        raise RuntimeError(
            "the copy of this process that holds the dataset has ended. Restart the notebook, and import "
            "minato.analyze.watch first"
        ) from None
    finally:
        study.progress.clear()
    name_loaders(found, list(told.values()), key)
    return report.answer(found, write_report(found, out) if out is not None else "")


def find_slowest(loaders: dict[Key, Told]) -> Key:
    """The loader that its program has waited for most."""

    def waited(key: Key) -> float:
        told = loaders[key]  # the first batch's step may not have ended
        return sum(Step(*row).inside for row in told.steps) if told.steps else sum(told.starts)

    return max(loaders, key=waited)


@dataclass
class Process:
    """Of the program: its command line, how many ranks there are by the launcher, whether it has imported torch."""

    argv: list[str] = field(default_factory=list)
    ranks: str | None = None
    torch: bool = False


class Listener:
    """The socket that processes of the program connect to, and what they have told."""

    def __init__(self, pauses: bool = False) -> None:
        self.name = f"minato-analyze{PAUSES if pauses else '-'}{secrets.token_hex(16)}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind("\0" + self.name)
        self.socket.listen(64)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.socket, selectors.EVENT_READ)
        #: those that Python has started in
        self.processes: dict[int, Process] = {}
        #: (pid, key of the loader) -> the last report on it
        self.loaders: dict[tuple[int, str], Told] = {}
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

    def _take(self, connection: Connection, message: Message) -> None:
        kind, pid = message["kind"], message.get("pid", 0)
        if kind == "keeper":
            self.keepers[message["parent"], message["key"]] = connection
            self.selector.unregister(connection.socket)
            connection.socket.setblocking(True)
        elif kind == "process":
            self.processes[pid] = Process(message["argv"], message["ranks"])
        elif kind == "torch":
            self.processes.setdefault(pid, Process()).torch = True
        elif kind in ("loader", "watch"):
            self.loaders[pid, message["key"]] = parse(Told, message)
        elif kind == "watched":
            self.watched = True
        elif kind == "trouble":
            self.trouble.append(message["text"])

    def batches(self) -> int:
        return max((told.batches for told in self.loaders.values()), default=0)

    def end_keepers(self) -> None:
        """They are told that this is the regular end."""
        for connection in self.keepers.values():
            with contextlib.suppress(OSError):
                send(connection.socket, {"do": "bye"})
            connection.socket.close()
        self.keepers.clear()

    def close(self) -> None:
        """Ends the keepers, and hears no more."""
        self.end_keepers()
        for key in list((self.selector.get_map() or {}).values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.selector.close()


class Analysis:
    """The program, its watch, and the study after it."""

    def __init__(self, options: argparse.Namespace, command: list[str]) -> None:
        self.options, self.command = options, command
        self.listener = Listener(options.pause)
        self.progress = Progress("minato analyze")
        self.program: subprocess.Popen[bytes] | None = None
        self.found: Report | None = None
        self.interrupted = self.paused = False
        self.status = 0
        #: share of the cores that others used while the program was watched
        self.others = 0.0
        self.memory = 0  # bytes that were available at the first batch
        self.unstudied = ""  # why a copy of the program was ended
        self.study: Study | None = None
        self.throttled = _core.machine()["throttled"]

    def run(self) -> int:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # so that keepers are ours to wait for
        if self.options.stop:
            self._say("the program will be ended after the watch; its handlers may write files")
        try:
            try:
                self.program = self._start()
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

    def _start(self) -> subprocess.Popen[bytes]:
        path = [str(HERE / "inject"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, VARIABLE: self.listener.name, "PYTHONPATH": os.pathsep.join(path)}
        mine, libc = os.getpid(), ctypes.CDLL(None)

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
            if not self._watch():
                return ARGUMENTS
        except KeyboardInterrupt:
            self.interrupted = True
            self._end(first=3.0)
        for _ in range(20):  # what is still on its way
            self.listener.pump(0.01)
        loaders = {which: told for which, told in self.listener.loaders.items() if told.batches}
        if not loaders:
            self._end()
            if self.options.target and self.status > 0:  # it has said why
                self._say(f"{self.options.target} could not be studied: see above")
                return NOT_WATCHED
            ended = f" It {_name_end(self.status)}." if self.status else ""
            start = "no batch was seen" if self.listener.processes else "the program could not be watched"
            self._say(f"{start}: {self._find_cause()}{ended}")
            return NOT_WATCHED
        which = find_slowest(loaders)
        try:
            found = self._study(self.listener.loaders[which], self.listener.keepers.get(which))
        except KeyboardInterrupt:
            self.interrupted = True
            if self.found is None:
                raise
            self.found.notes.append("the study was interrupted")
            found = finish_report(self.found, self.study, self.options.anyway)
        self._print_answer(found, which)
        if self.paused:
            # The program would copy each page that it shares with keepers, and wait for a listener.
            self.listener.close()
            self._signal(signal.SIGCONT)
            assert self.program is not None
            with contextlib.suppress(KeyboardInterrupt):
                self.status = self.program.wait()
        if self.interrupted:
            return 128 + signal.SIGINT
        if self.options.stop or self.options.target:
            return 0
        return self.status if self.status >= 0 else 128 - self.status

    def _watch(self) -> bool:
        """Until the program has ended, or is paused; False where it must not be paused."""
        assert self.program is not None
        options, listener = self.options, self.listener
        begun_, warned, looked = clock(), False, 0.0
        usage: Usage | None = None
        while self.program.poll() is None:
            listener.pump(0.05)
            batches = listener.batches()
            if listener.keepers:
                self._look_at_memory()
            if batches and not listener.watched and clock() - looked > LOOK_S:
                looked = clock()
                usage = usage or Usage()
                self.others = usage.summary().others
            self.progress.show(f"watching, {batches} batches" if batches else "waiting for the first batch")
            if options.pause and any((p.ranks or "1") != "1" for p in listener.processes.values()):
                self._say("--pause: the program has several ranks, and the others would wait for one")
                self._end()
                return False
            if not batches and not warned and clock() - begun_ > options.start_timeout:
                warned = True
                self._say(f"no batch in {options.start_timeout:.0f} s: {self._find_cause()}")
                if options.stop:
                    self._end()
                    break
            if listener.watched and options.pause:
                self._signal(signal.SIGSTOP)
                self.paused = True
                return True
            if listener.watched and options.stop:
                self._end()
                self._say("the program was ended after the watch, as asked")
                break
        self.status = self.program.wait()
        return True

    def _look_at_memory(self) -> None:
        """Ends the copies of the program where memory runs low. Each page that the program writes to, if
        only to count references, is there twice from then on."""
        free = _core.machine()["memory_available"]
        self.memory = self.memory or free
        if free <= MEMORY_LEFT * self.memory:
            self.listener.end_keepers()
            self.unstudied = (
                f"its dataset was not studied: {format_bytes(free)} of memory were left while the program ran, so "
                "its copy was ended. Use --pause, or give the factory form (minato analyze "
                "MODULE:FACTORY) a smaller dataset"
            )

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

    def _study(self, told: Told, keeper: Connection | None) -> Report:
        machine = machine_facts(self.options.cores)
        machine.command, machine.others = self.command, self.others
        machine.argv = ["minato", "analyze", *self.options.argv]
        self.found = begin_report(told, machine)
        if keeper is None or self.interrupted:
            why = (
                "the study was interrupted" if self.interrupted else self.unstudied
                or f"its dataset was not studied: {' '.join(self.listener.trouble[:1])}".rstrip(": ")
            )  # fmt: skip
            self.found.notes.append(why)
            return finish_report(self.found, None, self.options.anyway)
        study = self.study = Study(keeper, self.options.cores, self.progress)

        try:
            return make_report(
                study, self.found, self.options.budget, self.options.allow_writes, self.options.anyway,
                [name for name in EXTRA if vars(self.options)[name]],
            )  # fmt: skip
        except ConnectionError as error:
            study.note(f"{error}; its dataset was not studied")
            return finish_report(self.found, study, self.options.anyway)

    def _print_answer(self, found: Report, which: tuple[int, str]) -> None:
        name_loaders(found, [t for (pid, _), t in self.listener.loaders.items() if pid == which[0]], which[1])
        ranks = {p.ranks for p in self.listener.processes.values()} - {None, "1"}
        if ranks:
            found.notes.append(f"{ranks.pop()} ranks share these cores; local rank 0 was studied")
        if self.options.pause and not self.paused:
            found.notes.append(
                "the program ended before --pause could stop it: the watch takes 30 steps and three seconds"
            )
        if self.status and not self.options.stop:
            found.notes.append(f"the program {_name_end(self.status)}")
        if self.throttled is not None and (now := _core.machine()["throttled"]) is not None:
            found.machine.throttled = now - self.throttled
        self.progress.clear()
        print(report.answer(found, write_report(found, self.options.out)), flush=True)

    def _find_cause(self) -> str:
        """Why no loader was seen: every Python process that was, and what it did."""
        listener = self.listener
        ended = self.program is None or self.program.poll() is not None
        if not listener.processes:
            flags = next((w for w in self.command if re.fullmatch(r"-[a-zA-Z]*[IE][a-zA-Z]*", w)), None)
            cause = (
                f"{flags} makes Python ignore PYTHONPATH, by which it would be watched"
                if flags else "no Python process of it was seen: it may run in a container, by ssh, "
                "or replace PYTHONPATH"
            )  # fmt: skip
            return f"{' '.join(self.command)}: {cause}. Write import minato.analyze.watch as the program's first line."
        seen = [
            f"process {pid} ({' '.join(process.argv[:6])}) " + (
                "imported torch" if process.torch else "did not import torch" if ended
                else "has not imported torch so far"
            ) for pid, process in listener.processes.items()
        ]  # fmt: skip
        made = "the program iterated no torch DataLoader in a process that was watched"
        for told in listener.loaders.values():
            made = (
                f"the loader of {told.loader.get('dataset')} ({format_place(told.place)}, "
                f"num_workers={told.loader['num_workers']}) delivered no batch"
            )
        return f"{made}. Seen: {'; '.join(seen[:8])}. {' '.join(listener.trouble[:1])}".rstrip()


def _name_end(status: int) -> str:
    if status > 0:
        return f"ended with status {status}"
    return f"was ended by {signal.Signals(-status).name if -status in set(signal.Signals) else f'signal {-status}'}"


def _reap() -> None:
    """Waits for the keepers, which end by themselves, and for what the program has left to us."""
    end = clock() + 5.0
    with contextlib.suppress(ChildProcessError):
        while clock() < end:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if not pid:
                if len(tree(os.getpid())) == 1:
                    return
                time.sleep(0.01)
