"""Checks the files that a value was made of: an entry is valid as long as they are unchanged.

A file is identified by its size, times and inode. These are part of the entry's key, so an entry is
no longer found once one of them has changed. check= says how often a process checks a path: at each
"use"; "never"; or once an "epoch". A process is in its next epoch when it asks again for a key that
it has had. A worker that ends with its epoch checks each path once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from .keys import canonical

CHECKS = ("epoch", "use", "never")
#: A file whose time is as fresh as this may be written again without a change of its time.
FRESH_NS = 20_000_000

#: size, mtime, ctime, inode; None: there is no file
Stamp = tuple[int, int, int, int] | None


def paths_of(given: Any) -> tuple[str, ...]:
    """The paths that files= returned: one, or several."""
    if isinstance(given, (str, bytes, os.PathLike)):
        return (os.fsdecode(given),)
    if isinstance(given, Iterable):
        return tuple(os.fsdecode(path) for path in given)
    raise TypeError(
        f"files= of memoize() should return a path or several, but returned {type(given).__name__}"
    )


def look(path: str) -> Stamp:
    """Returns what a file is now."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def settled(stamps: Iterable[Stamp]) -> bool:
    """Whether a change of the files from now on will change their times, too."""
    now = time.time_ns()
    return all(
        stamp is None or min(abs(now - stamp[1]), abs(now - stamp[2])) > FRESH_NS
        for stamp in stamps
    )


class Files:
    """Holds what a process knows of the files of one memoized function."""

    def __init__(self, check: str) -> None:
        if check not in CHECKS:
            raise ValueError(f"check must be one of {CHECKS}, got {check!r}")
        self._check = check
        self._stamps: dict[str, Stamp] = {}
        self._seen: set[bytes] = set()

    def stamps(self, paths: tuple[str, ...], key: bytes) -> tuple[Stamp, ...]:
        """The stamps of the files, looked up as often as ``check=`` asks."""
        if self._check == "never":
            return ()
        if self._check == "use":
            return tuple(look(path) for path in paths)
        if key in self._seen:
            self._seen = set()
            self._stamps = {}
        self._seen.add(key)
        for path in paths:
            if path not in self._stamps:
                self._stamps[path] = look(path)
        return tuple(self._stamps[path] for path in paths)

    def fresh(self, paths: tuple[str, ...]) -> tuple[Stamp, ...]:
        """Returns what they are now, and does not use what was known."""
        if self._check == "never":
            return ()
        found = tuple(look(path) for path in paths)
        if self._check == "epoch":
            self._stamps.update(zip(paths, found))
        return found


def stamped(key: bytes, paths: tuple[str, ...], stamps: tuple[Stamp, ...]) -> bytes:
    """The key of a value that was made of such files."""
    return key + canonical(paths) + canonical(stamps)
