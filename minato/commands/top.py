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
from collections.abc import Iterator
from typing import Any

from .._system import stat_fields
from ..iterators.stats import worker_state
from ..text import sized
from .info import has_colours

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


def mappings(pid: int) -> list[tuple[int, int]]:
    """(address, bytes) of each loader's memory in a process, in order of address."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            lines = file.readlines()
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


def snapshots(pid: int) -> list[dict[str, Any]]:
    """A snapshot of each living loader in the process, by the core's peek().

    Raises:
        TopError: no such process, no permission, no loader, or another version of minato.
    """
    from .._core import peek

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
    found: list[dict[str, Any]] = []
    wrong = ""
    try:
        for base, size in places:

            def read(offset: int, count: int, base: int = base, size: int = size) -> bytes:
                if offset + count > size:
                    raise ValueError("the loader's memory ends too early")
                return os.pread(fd, count, base + offset)

            try:
                seen: dict[str, Any] = dict(peek(read))
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


def _waited(seen: dict[str, Any]) -> int:
    """Nanoseconds in next() so far, the present wait included."""
    since = seen["waiting_since_ns"]
    waited: int = seen["wait_ns"]
    return waited + (max(0, seen["now_ns"] - since) if since else 0)


def _shares(seen: dict[str, Any], before: dict[str, Any] | None) -> tuple[float, float]:
    """(share of waiting, batches a second) since the last snapshot, or since the start."""
    then = before or {**seen, "now_ns": seen["opened_ns"], "given": 0, "wait_ns": 0,
                      "waiting_since_ns": 0}  # fmt: skip
    elapsed = max(1, seen["now_ns"] - then["now_ns"])
    share = (_waited(seen) - _waited(then)) / elapsed
    return min(1.0, max(0.0, share)), (seen["given"] - then["given"]) / (elapsed * _NS)


def _running(entry: dict[str, Any], now_ns: int) -> tuple[str, str, str, str]:
    """(state, batch, sample, for how long) of a worker."""
    task, state = entry["running"], worker_state(entry["state"])
    if task is None or state != "ready":
        return state, "", "", ""
    batch, row, _row0, _nrows, index = task
    sample = f"position {row}" if index is None else f"{index} (position {row})"
    if index == COLLATES:
        sample = "(collates it)"
    return "working", str(batch), sample, _seconds((now_ns - entry["since_ns"]) * _NS)


def _heading(seen: dict[str, Any]) -> str:
    return seen["title"] or "a loader"


def render(
    seen: dict[str, Any], before: dict[str, Any] | None = None, width: int = WIDE
) -> list[str]:
    """The lines of one loader, from its snapshot and the one before, within a width."""
    now, queue = seen["now_ns"], seen["queue"]
    share, rate = _shares(seen, before)
    state = "waits in next()" if seen["waiting_since_ns"] else "does not wait for this loader"
    period = "since the last look" if before else "since the start"
    lines = [
        _heading(seen),
        f"  process  {seen['trainer_pid']}, open for {_seconds((now - seen['opened_ns']) * _NS)}",
        f"  trainer  {state}; waited {share:.0%} of its time {period}",
        f"  batches  {rate:.1f} a second, {seen['given']} so far; {queue['ready']} ready, "
        f"{queue['batches'] - queue['ready']} being made",
        f"  tasks    {queue['running']} running, {queue['queued']} queued, "
        f"{queue['waiting']} not begun",
        f"  memory   {sized(seen['used_bytes'])} of {sized(seen['limit_bytes'])}",
        *_failed(seen),
        *_together(seen),
        *_slow(seen),
    ]
    lines = [part for line in lines for part in _wrapped(line, width)]
    wide = width >= WIDE
    names = "worker", "pid", "state", "cpu", "busy", "samples", "batch", "for", "sample"
    lines.append(_row(names, wide))
    last = before["workers"] if before else []
    for number, entry in enumerate(seen["workers"]):
        if worker_state(entry["state"]) == "none":
            continue  # no process wanted here: room for the worker scheduler
        busy, cpu = _busy(entry, last[number] if number < len(last) else None, seen, before)
        what, batch, sample, long = _running(entry, now)
        sample += f"  {entry['starts']} starts" if entry["starts"] > 1 else ""
        shown = number, entry["pid"], what, f"{cpu:.0%}", f"{busy:.0%}", entry["rows"], batch, long
        lines.append(_row((*shown, sample), wide))
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


def _row(of: tuple[Any, ...], wide: bool) -> str:
    """A line of the table of workers."""
    number, pid, state, cpu, busy, samples, batch, long, sample = of
    if wide:
        line = (
            f"  {number:>6} {pid:>8} {state:8} {cpu:>5} {busy:>5} {samples:>8} {batch:>6} {long:>7}"
            f"  {sample}"
        )
    else:
        line = f"  {number:>6} {pid:>8} {state:8} {busy:>5} {long:>7}  {sample}"
    return line.rstrip()


def _busy(
    entry: dict[str, Any],
    last: dict[str, Any] | None,
    seen: dict[str, Any],
    before: dict[str, Any] | None,
) -> tuple[float, float]:
    """The shares of time in which a worker had a task, the present one included, and computed."""

    def total(e: dict[str, Any], now: int) -> int:
        busy: int = e["busy_ns"]
        return busy + (max(0, now - e["since_ns"]) if e["running"] else 0)

    then = before["now_ns"] if before else seen["opened_ns"]
    elapsed = max(1, seen["now_ns"] - then)
    # the counters belong to the entry and go on when another process takes it
    was = (total(last, then), last["cpu_ns"]) if last is not None else (0, 0)
    busy = (total(entry, seen["now_ns"]) - was[0]) / elapsed
    cpu = (entry["cpu_ns"] - was[1]) / elapsed
    return min(1.0, max(0.0, busy)), min(1.0, max(0.0, cpu))


def _failed(seen: Any) -> list[str]:
    """The line about samples that could not be made, if there are any."""
    if not seen.get("failed"):
        return []
    return [f"  errors   {seen['failed']} samples could not be made, and were left out or replaced"]


def _together(seen: Any) -> list[str]:
    """The line about groups, if neighbours are kept in one worker."""
    if not seen["group_milli"]:
        return []
    return [
        f"  groups   of about {seen['group_milli'] / 1000:.0f} samples stay together: "
        f"the first takes {_seconds(seen['opening_ns'] * _NS)} longer"
    ]


def _slow(seen: dict[str, Any]) -> list[str]:
    """The line about the samples that have been running longest."""
    flying = [
        (seen["now_ns"] - w["since_ns"], w["running"])
        for w in seen["workers"]
        if w["running"] is not None and worker_state(w["state"]) == "ready"
    ]
    flying.sort(key=lambda f: -f[0])
    if not flying:
        return []
    items = []
    for ns, (batch, row, _row0, _nrows, index) in flying[:MOST_SLOW]:
        name = f"position {row} of batch {batch}" if index is None else str(index)
        if index == COLLATES:
            name = f"collating batch {batch}"
        items.append(f"{name} ({_seconds(ns * _NS)})")
    return [f"  longest  in flight, by index: {', '.join(items)}"]


def cached(pid: int) -> list[str]:
    """A line for each cache that the process has open, of those of this user."""
    from .cache_files import File, _guest

    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            files = {
                File(*found.groups()) for line in file if (found := _CACHE.search(line)) is not None
            }
    except OSError:
        return []
    lines = []
    for one in sorted(files):
        try:
            seen = _guest(one).stats()
        except (OSError, RuntimeError):  # another user's, or removed meanwhile
            continue
        asked = max(1, seen["hits"] + seen["misses"])
        jobs = f"{seen['jobs']} job{'s' * (seen['jobs'] != 1)}"
        lines.append(
            f"  cache    {seen['hits'] / asked:.0%} of {seen['hits'] + seen['misses']} values found; "
            f"{sized(seen['used_bytes'])} of {sized(seen['bytes'])} used, by {jobs}"
        )
    return lines


# ---- all processes -----------------------------------------------------------------------


def found() -> list[tuple[int, list[dict[str, Any]]]]:
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
            text = f"{_heading(seen)}: {rate:.1f} batches a second, waited {share:.0%} of its time"
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


def stack_of_oldest(found: dict[int, dict[str, Any]]) -> list[str]:
    """The lines about where the sample is that has been running longest."""
    running = [
        (worker["since_ns"], worker) for seen in found.values() for worker in seen["workers"]
        if worker["running"] is not None and worker_state(worker["state"]) == "ready"
    ]  # fmt: skip
    if not running:
        return ["no worker is making a sample"]
    worker = min(running, key=lambda one: one[0])[1]
    batch, row, _row0, _nrows, index = worker["running"]
    name = f"position {row} of batch {batch}" if index is None else index
    stack = _stack(worker["pid"])
    if not stack:
        return [f"sample {name}: the stack of worker {worker['pid']} cannot be read (it is a thread, "
                "or another user's)"]  # fmt: skip
    return [f"sample {name} is here, latest call first:", *stack.splitlines()]


def _stack(pid: int) -> str:
    """The stack of a worker process, which writes it to its loader's notes."""
    from .._notes import Notes

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
    pid: int, before: dict[int, dict[str, Any]], width: int = WIDE
) -> tuple[list[str], dict[int, dict[str, Any]]]:
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
        more = f"  and {cut} more lines: a taller window shows them, or --once"
        lines = [*lines[: room - 1], more]
    return [line[:width] for line in lines] or [""]


def watch(pid: int, interval: float) -> int:
    """Shows the table until q, Ctrl-C, or the end of the process."""
    before: dict[int, dict[str, Any]] = {}
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
