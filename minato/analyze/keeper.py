"""The copy of a program that keeps its dataset, and forks a process for each measurement.

It waits on a socket for lines of JSON, each of which asks for one measurement of ``study``. The
fork that measures answers over the same socket. The keeper ends it when its time is over, when
memory runs low, or when the reader at the other end has gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import itertools
import json
import logging
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
import types
from collections.abc import Iterator
from multiprocessing import connection, managers
from typing import Any

from .. import _core
from . import own_files
from .watch import BYE, VARIABLE, send, write_nothing

#: objects that are looked into for what a dataset holds
OBJECTS = 20_000
#: elements of one container that are looked into
ELEMENTS = 64
#: share of the available memory that a study may take
MEMORY = 0.25
#: seconds that a measurement may take past twice the time it was given: workers start, samples end
GRACE_S = 5.0

#: how an object of multiprocessing.Manager() is called
MANAGED = "an object of a multiprocessing.Manager"
#: packages whose objects are connections to a database or a server
_DATABASES = {
    "asyncpg", "boto3", "botocore", "duckdb", "kafka", "lmdb", "MySQLdb", "mysql", "psycopg",
    "psycopg2", "pymongo", "pymysql", "redis", "sqlalchemy", "urllib3",
}  # fmt: skip
_ELSEWHERE = (types.FunctionType, types.BuiltinFunctionType, logging.Logger, io.TextIOWrapper)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type, types.ModuleType)

PR_SET_PDEATHSIG = 1


def serve(
    to: socket.socket, lines: io.BufferedReader, line: bytes, loader: Any, held: dict[int, str],
    program: int,
) -> None:  # fmt: skip
    """Answers requests, of which ``line`` is the first, until the reader has gone. held: what the
    program had open. program: its process, which ends with a reader that was killed."""
    from . import study

    while BYE not in line:
        if not line:
            end_program(program)
            return
        request = json.loads(line)
        if request["do"] == "check":
            refused = find_refusals(loader, held, request["writes"])
            send(to, {"kind": "check", "refused": refused, "files": own_files.find_way()})
        else:
            _measure(to, request, study, loader, program)
        line = lines.readline()


def tree(pid: int) -> list[int]:
    """A process and those below it. Keepers are none of them."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{each}/task"):
                with open(f"/proc/{each}/task/{task}/children") as file:
                    found += map(int, file.read().split())
    return found


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


def _measure(
    to: socket.socket, request: dict[str, Any], study: Any, loader: Any, program: int
) -> None:
    keeper, way = os.getpid(), request["way"]
    folder = tempfile.mkdtemp(prefix="minato-") if way != own_files.OVERLAY else ""
    mine, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == keeper:
                own_files.protect(way, folder, theirs)
                study.run(request, loader, lambda message: send(to, message))
                status = 0
        finally:
            os._exit(status)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    theirs.close()
    guard = own_files.WriteGuard(mine, folder)
    why = _wait(to, pid, 2 * request["seconds"] + GRACE_S, guard)
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


def _wait(
    to: socket.socket, pid: int, seconds: float, guard: own_files.WriteGuard | None = None
) -> str | None:
    """Until the measuring process ends: None. Otherwise why it is to be ended."""
    end, left = time.monotonic() + seconds, _available_memory() * (1 - MEMORY)
    process: Any = os.pidfd_open(pid)
    try:
        while True:
            waits = guard.waits() if guard is not None else []
            ready, _, _ = select.select([process, to, *waits], [], [], 0.2)
            if process in ready:
                return None
            if guard is not None and set(waits) & set(ready) and not guard.allows():
                return f"ended at its first attempt to write ({guard.refused})"
            if to in ready:
                return "gone"  # nothing is asked for while a measurement runs
            if time.monotonic() > end:
                return "ended because it took too long"
            if _available_memory() < left:
                return f"ended because it had taken {MEMORY:.0%} of the available memory"
    finally:
        os.close(process)


def _available_memory() -> int:
    """Bytes, by the machine and by control groups."""
    found: int = _core.machine()["memory_available"]
    return found


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
    if isinstance(part, socket.socket):
        return "a socket"
    if isinstance(part, (connection.Connection, subprocess.Popen)):
        return "a pipe" if isinstance(part, connection.Connection) else "a running program"
    if isinstance(part, (sqlite3.Connection, sqlite3.Cursor)):
        return "a database"
    if type(part).__module__.partition(".")[0] in _DATABASES:
        return f"a connection or database ({type(part).__module__}.{type(part).__qualname__})"
    device = getattr(part, "device", None)
    if hasattr(part, "numel") and getattr(device, "type", "cpu") not in ("cpu", "meta"):
        return f"a tensor on {device}"
    if isinstance(part, io.IOBase) and not isinstance(part, (io.BytesIO, io.StringIO)):
        return _name_file(part, held)
    return None


def _name_file(part: Any, held: dict[int, str]) -> str | None:
    """The keeper has closed what is not a regular file that is open for reading only."""
    try:
        number = part.fileno()
    except (OSError, ValueError):
        return None  # it was closed before
    if number in (1, 2):
        return None  # what the keeper prints goes nowhere
    path = held.get(number, "")
    if path.startswith("socket:"):
        return "a socket"
    if path.startswith("pipe:"):
        return "a pipe"
    try:
        readable = stat.S_ISREG(os.fstat(number).st_mode) and not part.writable()
    except OSError:
        readable = False
    return None if readable else f"a file open for writing ({path or number})"


def walk_objects(loader: Any) -> Iterator[tuple[str, Any]]:
    """What a loader's dataset and collate_fn hold, breadth first, each with its path."""
    ahead = [("dataset", loader.dataset), ("collate_fn", loader.collate_fn)]
    seen: set[int] = set()
    for path, part in ahead:
        if id(part) in seen or isinstance(part, (*_PLAIN, logging.Logger)) or len(seen) > OBJECTS:
            continue
        if getattr(getattr(type(part), "write", None), "__name__", "") == write_nothing.__name__:
            continue  # in place of standard output: it leads nowhere now
        seen.add(id(part))
        yield path, part
        with contextlib.suppress(Exception):
            ahead += _list_parts(path, part)


def _list_parts(path: str, part: Any) -> list[tuple[str, Any]]:
    # A copy of a whole container would write to each page of what it holds: references are counted.
    if isinstance(part, dict):
        return [(f"{path}[{key!r}]", part[key]) for key in itertools.islice(part, ELEMENTS)]
    if isinstance(part, (list, tuple, set, frozenset)):
        return [(f"{path}[{n}]", each) for n, each in enumerate(itertools.islice(part, ELEMENTS))]
    found = []
    if isinstance(part, types.MethodType):
        found += [(f"{path}.__self__", part.__self__), (path, part.__func__)]
    if isinstance(part, types.FunctionType):
        cells = zip(part.__code__.co_freevars, part.__closure__ or ())
        found += [(f"{path}.{name}", cell.cell_contents) for name, cell in cells]
        found += _list_globals(part)
    own = getattr(part, "__dict__", None)
    if isinstance(own, dict):
        found += [(f"{path}.{name}", value) for name, value in own.items()]
    for kind in type(part).__mro__[:-1]:
        for name in getattr(kind, "__slots__", ()) or ():
            if hasattr(part, name):
                found.append((f"{path}.{name}", getattr(part, name)))
        if kind.__module__.partition(".")[0] not in ("torch", "minato", "builtins"):
            for value in vars(kind).values():
                if isinstance(value, types.FunctionType):
                    found += _list_globals(value)
    if hasattr(part, "func") and hasattr(part, "args"):  # functools.partial
        found += [(f"{path}.func", part.func), (f"{path}.args", part.args)]
    return found


def _list_globals(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The variables of a module that a function names, but for functions and classes."""
    names, of = function.__code__.co_names, function.__globals__
    found = [(f"{of.get('__name__', '?')}.{name}", of[name]) for name in names if name in of]
    return [(path, part) for path, part in found if not isinstance(part, _ELSEWHERE)]
