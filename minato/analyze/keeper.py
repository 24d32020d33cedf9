"""The copy of a program that keeps its dataset, and forks a process for each measurement.

It waits on a socket for lines of JSON, each of which asks for one measurement. The fork that measures
answers over the same socket: ``at`` names the sample that begins, and the result comes at the end. The keeper
ends it when its time is over, when memory runs low, or when the reader at the other end has gone.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from multiprocessing import connection, managers, resource_tracker, util
from typing import Any

from .. import _core
from ..workers import library_threads
from . import codecs, orders, own_files
from .loaders import rate, sampler
from .records import Failed, Request, parse
from .stages import walk_objects
from .watch import BYE, VARIABLE, fork, send
from .work import Send, as_worker, contend, storage, tree, work

#: share of the available memory that a study may take
MEMORY = 0.25
#: seconds that a measurement may take past twice the time it was given: workers start, samples end
GRACE_S = 5.0

#: how an object of multiprocessing.Manager() is called
MANAGED = "an object of a multiprocessing.Manager"
_SHARED: tuple[tuple[Any, str], ...] = (
    (socket.socket, "a socket"), (connection.Connection, "a pipe"), (subprocess.Popen, "a running program"),
    ((sqlite3.Connection, sqlite3.Cursor), "a database"),
)  # fmt: skip
#: packages whose objects are connections to a database or a server
_DATABASES = {
    "asyncpg", "boto3", "botocore", "duckdb", "kafka", "lmdb", "MySQLdb", "mysql", "psycopg",
    "psycopg2", "pymongo", "pymysql", "redis", "sqlalchemy", "urllib3",
}  # fmt: skip


def serve(
    to: socket.socket, lines: io.BufferedReader, line: bytes, loader: Any, held: dict[int, str],
    program: int,
) -> None:  # fmt: skip
    """Answers requests, of which ``line`` is the first, until the reader has gone. held: what the
    program had open. program: its process, which ends with a reader that was killed."""
    while BYE not in line:
        if not line:
            end_program(program)
            return
        request = parse(Request, json.loads(line))
        if request.do == "check":
            refused = find_refusals(loader, held, request.writes)
            send(to, {"kind": "check", "refused": refused, "files": own_files.find_way()})
        else:
            _measure(to, request, loader, program)
        line = lines.readline()


def end_program(program: int) -> None:
    """The command has been killed: what it has started, and may have stopped, ends with it."""
    environ = b""
    with contextlib.suppress(OSError), open(f"/proc/{program}/environ", "rb") as file:
        environ = file.read()
    if VARIABLE.encode() in environ:  # else the number is another process's by now
        for number, pids in ((signal.SIGTERM, [program]), (signal.SIGCONT, tree(program))):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def _measure(to: socket.socket, request: Request, loader: Any, program: int) -> None:
    keeper, way = os.getpid(), request.way
    folder = tempfile.mkdtemp(prefix="minato-") if way != own_files.OVERLAY else ""
    mine, theirs = socket.socketpair()

    def measure() -> None:
        os.setpgid(0, 0)
        _core.die_with_parent(True)
        if os.getppid() == keeper:
            own_files.protect(way, folder, theirs)
            run(request, loader, lambda found: send(to, {"kind": type(found).__name__.lower(), **asdict(found)}))

    pid = fork(measure)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    theirs.close()
    guard = own_files.WriteGuard(mine, folder)
    why = _wait(to, pid, 2 * request.seconds + GRACE_S, guard)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    guard.close()
    shutil.rmtree(folder, ignore_errors=True)
    if why == "gone":
        if BYE not in to.recv(1 << 16):
            end_program(program)
        os._exit(0)
    if why is None and status != 0:
        what = f"signal {-code}" if (code := os.waitstatus_to_exitcode(status)) < 0 else "an error"
        why = f"the process that measured was ended by {what}"
    send(to, {"kind": "end", "why": why, "wrote": guard.refused})


def _wait(to: socket.socket, pid: int, seconds: float, guard: own_files.WriteGuard) -> str | None:
    """Until the measuring process ends: None. Otherwise why it is to be ended."""
    end, left = time.monotonic() + seconds, _core.machine()["memory_available"] * (1 - MEMORY)
    process: Any = os.pidfd_open(pid)
    try:
        while True:
            waits = guard.waits()
            ready, _, _ = select.select([process, to, *waits], [], [], 0.2)
            if process in ready:
                return None
            if set(waits) & set(ready) and not guard.allows():
                return f"ended at its first attempt to write ({guard.refused})"
            if to in ready:
                return "gone"  # nothing is asked for while a measurement runs
            if time.monotonic() > end:
                return "ended because it took too long"
            if _core.machine()["memory_available"] < left:
                return f"ended because it had taken {MEMORY:.0%} of the available memory"
    finally:
        os.close(process)


def run(request: Request, loader: Any, send: Send) -> None:
    """One request, in a process of its own."""
    if request.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: request.cores])
    library_threads.limit(True)
    # multiprocessing's resource tracker belongs to the program; its connection is closed here
    tracker: Any = vars(resource_tracker)["_resource_tracker"]
    tracker._fd = tracker._pid = None
    vars(util)["_run_after_forkers"]()  # the thread that shares descriptors is the program's, too
    measure: dict[str, Callable[[Request, Any], Any]] = {
        "work": partial(work, send), "contend": contend, "storage": storage, "rate": rate, "sampler": sampler,
        "codecs": codecs.measure, "orders": orders.measure,
    }  # fmt: skip
    makes_samples = request.do not in ("rate", "storage", "sampler")
    try:
        with as_worker(loader) if makes_samples else contextlib.nullcontext():
            if (found := measure[request.do](request, loader)) is not None:
                send(found)
    except Exception as error:
        send(Failed(f"{type(error).__name__}: {error}"))


# ---- what may not be studied ---------------------------------------------------------------


def find_refusals(loader: Any, held: dict[int, str], writes: bool) -> list[str]:
    """What a dataset reaches that a study would share with the program or with others: paths of
    attributes, and what they are. writes: files that are open for writing are accepted."""
    found = []
    for path, part in walk_objects(loader):
        with contextlib.suppress(Exception):
            what = _name_shared(part, held)
            if what is not None and not (writes and what.startswith("a file open for writing")):
                found.append(f"{path} is {what}")
    return list(dict.fromkeys(found))


def _name_shared(part: Any, held: dict[int, str]) -> str | None:
    if isinstance(part, (managers.BaseProxy, managers.BaseManager)):
        return f"{MANAGED} ({type(part).__name__})"
    for kinds, what in _SHARED:
        if isinstance(part, kinds):
            return what
    if type(part).__module__.partition(".")[0] in _DATABASES:
        return f"a connection or database ({type(part).__module__}.{type(part).__qualname__})"
    device = getattr(part, "device", None)
    if hasattr(part, "numel") and getattr(device, "type", "cpu") not in ("cpu", "meta"):
        return f"a tensor on {device}"
    if not isinstance(part, io.IOBase) or isinstance(part, (io.BytesIO, io.StringIO)):
        return None
    try:
        number = part.fileno()
    except (OSError, ValueError):
        return None  # it was closed before
    path = held.get(number, "")
    if number in (1, 2):
        return None  # what the keeper prints goes nowhere
    if path.startswith(("socket:", "pipe:")):
        return f"a {path.partition(':')[0]}"
    try:  # what is not a regular file that is open for reading only leads nowhere now
        readable = stat.S_ISREG(os.fstat(number).st_mode) and not part.writable()
    except OSError:
        readable = False
    return None if readable else f"a file open for writing ({path or number})"
