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
import logging
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

log = logging.getLogger("minato")

_FOLDER = "/proc/self/fd"
#: flags of the old open file description that the new one gets, too
_KEPT = os.O_DIRECT | os.O_NOATIME | os.O_NONBLOCK
#: in the list of a description's locks: a lock that keeps others from reading
_EXCLUSIVE = (b"FLOCK  ADVISORY  WRITE", b"OFDLCK ADVISORY  WRITE")


class OpenFile(NamedTuple):
    """A regular file that is open for reading only."""

    descriptor: int
    identity: tuple[int, int]  # device and inode
    position: int
    flags: int  # for opening it again
    inheritable: bool


def find() -> list[OpenFile]:
    """The files that workers are to open again. Called in the program just before the fork. Logs
    files of the program that may not be opened again. Empty if there is no /proc."""
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
        log.warning(
            "%r is open in this program and may not be opened again, so worker processes share one "
            "position in it: what they read there may be wrong. Open it in each worker (in "
            "worker_init_fn, or at the first sample), or use multiprocessing_context='spawn'.",
            path,
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
