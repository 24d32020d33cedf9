"""Files that the program has open when it forks its workers.

A fork inherits descriptors, and shares each file's position with all other processes. Two workers
that seek and read would move each other's position. So a worker opens each read-only file again,
at the position that it had in the program. The descriptor keeps its number, so this works for
buffered and compressed readers, zip archives and libraries in C alike.

Files that are open for writing stay shared. Otherwise several workers that append to one file
would overwrite each other's data.
"""

from __future__ import annotations

import fcntl
import io
import os
import socket
import stat
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from ..seeding.generator_states import loaded
from ..seeding.find_generators import _Walk

_FOLDER = "/proc/self/fd"
#: flags of the old open file description that the new one gets, too
_KEPT = os.O_DIRECT | os.O_NOATIME | os.O_NONBLOCK
#: in the list of a description's locks: a lock that keeps others from reading
_EXCLUSIVE = (b"FLOCK  ADVISORY  WRITE", b"OFDLCK ADVISORY  WRITE")

#: limit on the objects of the dataset that are searched; some milliseconds once for each loader
HOLDERS_LIMIT = 2_000
#: number of found objects that a warning names
NAMED = 3
_FILES = frozenset({io.FileIO, io.BufferedReader, io.BufferedWriter, io.BufferedRandom,
                    io.TextIOWrapper})  # fmt: skip


class OpenFile(NamedTuple):
    """A regular file that is open for reading only."""

    descriptor: int
    identity: tuple[int, int]  # device and inode
    position: int
    flags: int  # for opening it again
    inheritable: bool


def find() -> list[OpenFile]:
    """The files that workers are to open again. Called in the program just before the fork. Warns
    of files of the program that may not be opened again. Empty if there is no /proc."""
    found, refused = [], []
    try:
        names = os.listdir(_FOLDER)
    except OSError:
        return []
    for number in map(int, names):
        with suppress(OSError):  # the descriptor that listed them
            if number > 2 and (file := _read_only(number)) is not None:
                if os.access(f"{_FOLDER}/{number}", os.R_OK, effective_ids=True):
                    found.append(file)
                elif not file.inheritable:  # else it came from another program
                    refused.append(os.readlink(f"{_FOLDER}/{number}"))
    for path in refused:
        warnings.warn(
            f"{path!r} is open in this program and may not be opened again, so worker processes "
            "share one position in it: what they read there may be wrong. Open it in each "
            "worker (in worker_init_fn, or at the first sample), or use "
            "multiprocessing_context='spawn'.",
            stacklevel=2,
        )
    return found


def _read_only(number: int) -> OpenFile | None:
    """The file of a descriptor. None if it is of another kind, or locked: the lock would exclude a
    worker that opened the file again."""
    flags = fcntl.fcntl(number, fcntl.F_GETFL)
    if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_PATH:
        return None
    about = os.fstat(number)
    if not stat.S_ISREG(about.st_mode) or _is_locked(number):
        return None
    return OpenFile(
        number,
        (about.st_dev, about.st_ino),
        os.lseek(number, 0, os.SEEK_CUR),
        os.O_RDONLY | os.O_CLOEXEC | (flags & _KEPT),
        os.get_inheritable(number),
    )


def _is_locked(number: int) -> bool:
    info = os.open(f"/proc/self/fdinfo/{number}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        told = os.read(info, 4096)
    finally:
        os.close(info)
    return any(lock in told for lock in _EXCLUSIVE)


def open_again(files: Iterable[OpenFile]) -> None:
    """Gives this worker a position of its own in each file. Called just after the fork."""
    for file in files:
        with suppress(OSError):  # then the file stays shared
            _open_again(file)


def _open_again(file: OpenFile) -> None:
    new = os.open(f"{_FOLDER}/{file.descriptor}", file.flags)
    try:
        about = os.fstat(new)
        if (about.st_dev, about.st_ino) == file.identity:  # else a fork hook has replaced it
            os.lseek(new, file.position, os.SEEK_SET)
            os.dup2(new, file.descriptor, file.inheritable)
    finally:
        os.close(new)


# ---- objects that stay shared ------------------------------------------------------------


def warn_of_shared(*roots: Any) -> None:
    """Warns of objects of the dataset (or another root) that its workers will share after a fork.
    These are files open for reading and writing, databases in such files, and connections."""
    shared = _shared()
    if not shared:
        return
    walk = _Holding(shared)
    walk.run(roots)
    if walk.held:
        more = len(walk.held) - NAMED
        warnings.warn(
            f"the dataset holds {', '.join(walk.held[:NAMED])}{f' and {more} more' * (more > 0)}, "
            "opened before its worker processes are forked. Workers share its file position, so "
            "reads may return wrong data. Open it in each worker (in worker_init_fn, or at the "
            "first sample); files that are open for reading only are safe. This warning is shown "
            "once.",
            stacklevel=2,
        )


def _shared() -> dict[int, str]:
    """Paths, by descriptor, of sockets and of files that are open for reading and writing."""
    found: dict[int, str] = {}
    try:
        names = os.listdir(_FOLDER)
    except OSError:
        return found
    for number in map(int, names):
        with suppress(OSError):
            if number > 2 and fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR:
                kind = stat.S_IFMT(os.fstat(number).st_mode)
                path = os.readlink(f"{_FOLDER}/{number}")
                if kind == stat.S_IFSOCK or (kind == stat.S_IFREG and "/memfd:" not in path):
                    found[number] = path
    return found


class _Holding(_Walk):
    """Notes the files, databases and sockets that it meets."""

    def __init__(self, shared: dict[int, str]) -> None:
        super().__init__(HOLDERS_LIMIT)
        self.shared = shared
        self.held: list[str] = []
        self.sqlite: Any = loaded("sqlite3", "Connection") or ()
        self.hdf5: Any = loaded("h5py", "HLObject") or ()

    def reach(self, obj: Any) -> None:
        with suppress(Exception):  # closed, or of another thread
            what = self._named(obj)
            if what is not None and what not in self.held:
                self.held.append(what)
        super().reach(obj)

    def _named(self, obj: Any) -> str | None:
        path: str | None = None
        if isinstance(obj, self.sqlite):
            path = obj.execute("PRAGMA database_list").fetchone()[2]
        elif isinstance(obj, self.hdf5):
            path = os.path.realpath(obj.file.filename)
        elif type(obj) in _FILES or isinstance(obj, socket.socket):
            path = self.shared.get(obj.fileno())
        if path is None or path not in self.shared.values():
            return None
        kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
        return kind if isinstance(obj, socket.socket) else f"{path!r} ({kind}), open for writing"
