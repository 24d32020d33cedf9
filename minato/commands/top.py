"""``minato top PID``: a live table of the loaders in a process. Without a PID it lists the
processes that have loaders.

Reads the loaders' shared memory through /proc/PID/mem. That needs a debugger's permissions: the
same user without a ptrace restriction, or root. It writes nothing, so the process does not notice.
The core decodes the records, so their layout is defined in one place.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import shutil
import sys
import termios
import textwrap
import time
import tty
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from .._core import TASK_PLANNED, TASK_QUEUED, TASK_RUNNING, TASK_WAITING, peek
from .._system import stat_fields
from ..iterators.stats import worker_state
from ..text import counted, sized
from ..worker_exits import Notes
from .cache_files import File, guest
from .info import has_colours

if TYPE_CHECKING:
    from .._core import _Peek, _Seen

    class Snapshot(_Peek):
        address: int

_UNFINISHED = {TASK_QUEUED, TASK_RUNNING, TASK_PLANNED, TASK_WAITING}
COLLATES = "collate"  # stands for an index: the worker collates samples that others have fetched
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ (\d+)\s+/memfd:minato ")
_CACHE = re.compile(r" (/.*)/(cache-\S+)$")
_NS = 1e-9

#: number of running samples that are listed by name
MOST_SLOW = 5
#: on a terminal with fewer columns, the table of workers leaves some out
WIDE = 84
#: limit on --interval, because select() has a limit
LONGEST_S = 24 * 60 * 60


class TopError(Exception):
    """The reason why there is nothing to show, for the user."""


# ---- reading ---------------------------------------------------------------------------


def _maps(pid: int) -> list[str]:
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        return file.readlines()


def mappings(pid: int) -> list[tuple[int, int]]:
    """(address, bytes) of each loader's memory in a process, in order of address."""
    try:
        lines = _maps(pid)
    except (FileNotFoundError, ProcessLookupError):
        raise TopError(f"there is no process {pid}") from None
    except PermissionError:
        raise TopError(_no_permission(pid)) from None
    parts: dict[str, list[tuple[int, int, int]]] = {}
    for line in lines:
        found = _MAPPING.match(line)
        if found is not None:
            begin, end, offset = (int(found[n], 16) for n in (1, 2, 3))
            parts.setdefault(found[4], []).append((offset, begin, end))
    loaders = []
    for places in parts.values():
        first = min(places)
        if first[0] == 0:
            # madvise() on a range may have split the mapping; its pieces stay adjacent
            loaders.append((first[1], max(end for _, _, end in places) - first[1]))
    return sorted(loaders)


def _no_permission(pid: int) -> str:
    return (
        f"no permission to look into process {pid}: be its user or root; if you are, the "
        "system restricts tracing (sysctl kernel.yama.ptrace_scope=0 lifts that until the "
        "next start; in a container, the capability SYS_PTRACE)"
    )


def snapshots(pid: int) -> list[Snapshot]:
    """A snapshot of each living loader in the process, by the core's peek().

    Raises:
        TopError: no such process, no permission, no loader, or another version of minato.
    """
    places = mappings(pid)
    if not places and not _alive(pid):
        raise TopError(f"process {pid} is gone")
    if not places:
        raise TopError(
            f"process {pid} has no minato loader with workers now"
            + (" (its iterator may not have begun, or has ended)" if _is_python(pid) else "")
        )
    try:
        fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        raise TopError(f"process {pid} is gone") from None
    except PermissionError:
        raise TopError(_no_permission(pid)) from None
    found: list[Snapshot] = []
    wrong = ""
    try:
        for base, size in places:

            def read(offset: int, count: int, base: int = base, size: int = size) -> bytes:
                if offset + count > size:
                    raise ValueError("the loader's memory ends too early")
                return os.pread(fd, count, base + offset)

            try:
                seen = peek(read)
            except (ValueError, OSError) as error:
                wrong = str(error)  # it was just mapped or unmapped, or is of another version
                continue
            if not seen["stopped"]:
                found.append({**seen, "address": base})
    finally:
        os.close(fd)
    own = [f for f in found if f["trainer_pid"] == pid]
    if not found:
        raise TopError(
            f"process {pid}: {wrong}" if wrong else f"the loader of process {pid} has stopped"
        )
    return own or found


def _alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not."""
    try:
        return stat_fields(pid)[0] not in "ZX"
    except OSError:
        return False


def _is_python(pid: int) -> bool:
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False


# ---- showing ---------------------------------------------------------------------------


def _seconds(value: float) -> str:
    if value < 0.0995:
        return f"{value * 1000:.0f} ms" if value >= 0.001 else f"{value * 1e6:.0f} us"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min"


def _waited(seen: Snapshot) -> int:
    """Nanoseconds in next() so far, the present wait included."""
    since = seen["waiting_since_ns"]
    return seen["wait_ns"] + (max(0, seen["now_ns"] - since) if since else 0)


def _shares(seen: Snapshot, before: Snapshot | None) -> tuple[float, float]:
    """(share of waiting, batches a second) since the last snapshot, or since the start."""
    start = seen["opened_ns"]
    then: Snapshot = before or {**seen, "now_ns": start, "given": 0, "wait_ns": 0, "waiting_since_ns": 0}
    elapsed = max(1, seen["now_ns"] - then["now_ns"])
    share = (_waited(seen) - _waited(then)) / elapsed
    return min(1.0, max(0.0, share)), (seen["given"] - then["given"]) / (elapsed * _NS)


def _flying(loaders: Iterable[Snapshot]) -> list[tuple[float, _Seen]]:
    """The workers that make a sample, with the seconds for which they have done so, the longest first."""
    flying = [
        ((seen["now_ns"] - worker["since_ns"]) * _NS, worker) for seen in loaders for worker in seen["workers"]
        if worker["running"] is not None and worker_state(worker["state"]) == "ready"
    ]  # fmt: skip
    return sorted(flying, key=lambda one: -one[0])


def _name(worker: _Seen) -> str:
    """What the worker makes."""
    assert worker["running"] is not None
    batch, row, _row0, _nrows, index = worker["running"]
    if index == COLLATES:
        return f"collating batch {batch}"
    return f"position {row} of batch {batch}" if index is None else str(index)


def render(
    seen: Snapshot, before: Snapshot | None = None, width: int = WIDE
) -> list[str]:
    """The lines of one loader, from its snapshot and the one before, within a width."""
    now, tasks = seen["now_ns"], Counter(status for status, _block in seen["tasks"])
    batches = {block for _status, block in seen["tasks"]}
    made = batches - {block for status, block in seen["tasks"] if status in _UNFINISHED}
    share, rate = _shares(seen, before)
    state = "waits in next()" if seen["waiting_since_ns"] else "does not wait for this loader"
    period = "since the last look" if before else "since the start"
    lines = [
        seen["title"] or "a loader",
        f"  process  {seen['trainer_pid']}, open for {_seconds((now - seen['opened_ns']) * _NS)}",
        f"  trainer  {state}; waited {share:.0%} of its time {period}",
        f"  batches  {rate:.1f} a second, {seen['given']} so far; {len(made)} ready, "
        f"{len(batches) - len(made)} being made",
        f"  tasks    {tasks[TASK_RUNNING]} running, {tasks[TASK_QUEUED]} queued, "
        f"{tasks[TASK_PLANNED] + tasks[TASK_WAITING]} not begun",
        f"  memory   {sized(seen['used_bytes'])} of {sized(seen['limit_bytes'])}",
    ]
    if failed := seen.get("failed"):
        lines.append(f"  errors   {failed} samples could not be made, and were left out or replaced")
    if seen["group_milli"]:
        lines.append(
            f"  groups   of about {seen['group_milli'] / 1000:.0f} samples stay together: "
            f"the first takes {_seconds(seen['opening_ns'] * _NS)} longer"
        )
    lines += _slow(seen)
    lines = [part for line in lines for part in _wrapped(line, width)]
    wide = width >= WIDE
    lines.append(_row(("worker", "pid", "state", "cpu", "busy", "samples", "batch", "for", "sample"), wide))
    last = before["workers"] if before else []
    since = before["now_ns"] if before else seen["opened_ns"]
    for number, entry in enumerate(seen["workers"]):
        what = worker_state(entry["state"])
        if what == "none":
            continue  # no process wanted here: room for the worker scheduler
        cpu, busy = entry["cpu_ns"], _busy(entry, now)
        if number < len(last):  # the counters belong to the entry and go on when another process takes it
            cpu, busy = cpu - last[number]["cpu_ns"], busy - _busy(last[number], since)
        shares = (f"{min(1.0, max(0.0, spent / max(1, now - since))):.0%}" for spent in (cpu, busy))
        batch = sample = long = ""
        if entry["running"] is not None and what == "ready":
            of, row, _row0, _nrows, index = entry["running"]
            what, batch, long = "working", str(of), _seconds((now - entry["since_ns"]) * _NS)
            sample = f"position {row}" if index is None else f"{index} (position {row})"
            sample = "(collates it)" if index == COLLATES else sample
        sample += f"  {entry['starts']} starts" if entry["starts"] > 1 else ""
        lines.append(_row((number, entry["pid"], what, *shares, entry["rows"], batch, long, sample), wide))
    return lines


def _wrapped(line: str, width: int) -> list[str]:
    """A line, wrapped if it is too long."""
    if len(line) <= width:
        return [line]
    rest = " " * 11 if line.startswith("  ") else "  "
    first = "  " if line.startswith("  ") else ""
    words = line.strip()
    if first:  # the first word is a label, followed by blanks
        label, _, words = words.partition(" ")
        first = f"  {label:9}"
    return textwrap.wrap(words.strip(), max(width, 20), initial_indent=first, subsequent_indent=rest)


def _row(of: tuple[object, ...], wide: bool) -> str:
    """A line of the table of workers."""
    number, pid, state, cpu, busy, samples, batch, long, sample = of
    counts = f"{cpu:>5} {busy:>5} {samples:>8} {batch:>6}" if wide else f"{busy:>5}"
    return f"  {number:>6} {pid:>8} {state:8} {counts} {long:>7}  {sample}".rstrip()


def _busy(entry: _Seen, now_ns: int) -> int:
    """Nanoseconds in which a worker had a task, the present one included."""
    return entry["busy_ns"] + (max(0, now_ns - entry["since_ns"]) if entry["running"] else 0)


def _slow(seen: Snapshot) -> list[str]:
    """The line about the samples that have been running longest."""
    items = [f"{_name(worker)} ({_seconds(seconds)})" for seconds, worker in _flying([seen])[:MOST_SLOW]]
    return [f"  longest  in flight, by index: {', '.join(items)}"] if items else []


def cached(pid: int) -> list[str]:
    """A line for each cache that the process has open, of those of this user."""
    try:
        files = {File(*found.groups()) for line in _maps(pid) if (found := _CACHE.search(line)) is not None}
    except OSError:
        return []
    lines = []
    for one in sorted(files):
        try:
            seen = guest(one).stats()
        except (OSError, RuntimeError):  # another user's, or removed meanwhile
            continue
        asked = seen["hits"] + seen["misses"]
        lines.append(
            f"  cache    {seen['hits'] / max(1, asked):.0%} of {asked} values found; "
            f"{sized(seen['used_bytes'])} of {sized(seen['bytes'])} used, by {counted(seen['jobs'], 'job')}"
        )
    return lines


# ---- all processes -----------------------------------------------------------------------


def found() -> list[tuple[int, list[Snapshot]]]:
    """(process id, snapshots of its loaders) of all processes that this user may read."""
    own = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(TopError, OSError):
                seen = [s for s in snapshots(int(name)) if s["trainer_pid"] == int(name)]
                own += [(int(name), seen)] if seen else []
    return sorted(own, key=lambda one: one[0])


def _program(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "?"


def listed(width: int) -> list[str]:
    """Lines with the processes that have loaders, and the names of these loaders."""
    lines: list[str] = []
    for pid, loaders in found():
        lines.append(f"{pid:>8}  {' '.join(_program(pid).split())}"[:width])
        for seen in loaders:
            share, rate = _shares(seen, None)
            text = f"{seen['title'] or 'a loader'}: {rate:.1f} batches a second, waited {share:.0%} of its time"
            indent = " " * 10
            lines += textwrap.wrap(
                text, max(width, 30), initial_indent=indent, subsequent_indent=indent + "  "
            )
    return lines


# ---- colours -----------------------------------------------------------------------------

_BOLD, _RED, _GREEN, _YELLOW, _FAINT = "1", "31", "32", "33", "2"


def _coloured(line: str) -> str:
    """A line, coloured by its meaning."""
    words = line.split()
    colour = ""
    if not line.startswith(" ") and line:
        colour = _BOLD
    elif words[:1] == ["errors"] or {"exited", "swept"} & set(words[2:3]):
        colour = _RED
    elif words[:1] == ["trainer"]:
        share = re.search(r"waited (\d+)%", line)
        colour = _YELLOW if share is not None and int(share[1]) >= 20 else _GREEN
    elif words[:1] == ["worker"] or words[2:3] == ["ready"]:
        colour = _FAINT
    return f"\x1b[{colour}m{line}\x1b[0m" if colour else line


# ---- the terminal ----------------------------------------------------------------------


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """The descriptor from which single keys are read, without echo; None without a terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _pressed(keys: int | None, seconds: float) -> str:
    """Sleeps for this time. Returns "q" or "s" as soon as that is pressed, else an empty text."""
    if keys is None:
        time.sleep(seconds)
        return ""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if select.select([keys], [], [], left)[0]:
            key = os.read(keys, 1)
            if key in (b"q", b"Q", b""):
                return "q"
            if key in (b"s", b"S"):
                return "s"
    return ""


def stack_of_oldest(found: dict[int, Snapshot]) -> list[str]:
    """The lines about where the sample is that has been running longest."""
    flying = _flying(found.values())
    if not flying:
        return ["no worker is making a sample"]
    worker = flying[0][1]
    stack = _stack(worker["pid"])
    if not stack:
        return [f"sample {_name(worker)}: the stack of worker {worker['pid']} cannot be read (it is a thread, "
                "or another user's)"]  # fmt: skip
    return [f"sample {_name(worker)} is here, latest call first:", *stack.splitlines()]


def _stack(pid: int) -> str:
    """The stack of a worker process, which writes it to its loader's notes."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder := f"/proc/{pid}/fd"):
            if os.readlink(f"{folder}/{name}").startswith("/memfd:minato-notes"):
                notes = Notes.__new__(Notes)
                notes.fd = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    return notes.stack_of(pid, lambda number: os.kill(pid, number))
                finally:
                    notes.close()
    return ""


def _page(
    pid: int, before: dict[int, Snapshot], width: int = WIDE
) -> tuple[list[str], dict[int, Snapshot]]:
    """The lines to show; and the snapshots by address, with which the next ones are compared."""
    found = {seen["address"]: seen for seen in snapshots(pid)}
    lines: list[str] = []
    caches = [part for line in cached(pid) for part in _wrapped(line, width)]
    for address, seen in found.items():
        last = before.get(address)
        if last is not None and last["opened_ns"] != seen["opened_ns"]:
            last = None  # another loader at the same address
        lines += [*render(seen, last, width), ""]
    return [*lines[:-1], *caches], found


def _fitted(lines: list[str], width: int, height: int) -> list[str]:
    """The lines that fit above the last two lines of a terminal; the last one counts the rest."""
    room = max(1, height - 3)
    if len(lines) > room:
        cut = len(lines) - room + 1
        more = f"  and {cut} more lines: a taller window, or --once"
        lines = [*lines[: room - 1], more]
    return [line[:width] for line in lines] or [""]


def watch(pid: int, interval: float) -> int:
    """Shows the table until q, Ctrl-C, or the end of the process."""
    before: dict[int, Snapshot] = {}
    stack: list[str] = []
    screen, colours = sys.stdout.isatty(), has_colours()
    try:
        with _keys() as keys:
            while True:
                size = shutil.get_terminal_size()
                try:
                    lines, before = _page(pid, before, size[0] if screen else WIDE)
                    lines = [*stack, "", *lines] if stack else lines
                except TopError as error:
                    if not before or not _alive(pid):
                        raise
                    lines = _wrapped(f"{error}; waiting for the next one", size[0] if screen else WIDE)
                shown = lines
                if screen:
                    shown = _fitted(lines, *size)
                    shown = [_coloured(line) for line in shown] if colours else shown
                    last = "q ends, s shows where the oldest sample is"
                    shown = ["\x1b[H\x1b[2J" + shown[0], *shown[1:], "", last]
                print("\n".join(shown), flush=True)
                key = _pressed(keys, interval)
                if key == "q":
                    return 0
                if key == "s":
                    stack = [] if stack else stack_of_oldest(before)
    except KeyboardInterrupt:
        return 0


def run(argv: list[str]) -> int:
    """``minato top [PID] [--once] [--interval SECONDS]``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="minato top", description="Shows the loaders of a process, live."
    )
    parser.add_argument(
        "pid", type=int, nargs="?", help="the training process (default: list those with loaders)"
    )
    parser.add_argument("--once", action="store_true", help="print one table and exit")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS",
        help="time between two updates (default: 1)",
    )  # fmt: skip
    options = parser.parse_args(argv)
    if not 0 < options.interval <= LONGEST_S:  # nan is not
        parser.error(f"--interval must be positive, and at most a day ({LONGEST_S} seconds)")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE
    try:
        if options.pid is None:
            return _list(width)
        if options.once:
            lines = _page(options.pid, {}, width)[0]
            print("\n".join(map(_coloured, lines) if has_colours() else lines))
            return 0
        return watch(options.pid, options.interval)
    except TopError as error:
        print(f"minato top: {error}", file=sys.stderr)
        return 1


def _list(width: int) -> int:
    lines = listed(width)
    if not lines:
        raise TopError(
            "no process that this user may read has a minato loader with workers now (root sees the "
            "processes of all users)"
        )
    print("\n".join([*lines, "", "minato top PID shows one of them, live."]))
    return 0
