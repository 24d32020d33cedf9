"""Checks the files that a value was made of: an entry is valid as long as they are unchanged.

A file is identified by its device, inode, size and times; a folder by those of all that is in it.
What ``files=`` names is part of the entry's key. What Python opens or lists while a value is made is
noted with the value, and compared when the value is found; so is whether a path is there that it asks for.
Files that C code opens, or another process, have to be named.

check= says how often a process checks a path: at each "use"; "never"; or once an "epoch". A process is in its next
epoch when it asks again for a key that it has had. A worker that ends with its epoch checks each path once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib.util
import os
import stat
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

from .keys import canonical

_stat, _lstat = os.stat, os.lstat  # these note nothing
CHECKS = ("epoch", "use", "never")
#: A file whose time is as fresh as this may be written again without a change of its time.
FRESH_NS = 20_000_000
#: paths whose stamps, and keys, a process remembers within an epoch
REMEMBERED = 4096
#: files that this process keeps open, or what it has read of them, up to which values are stored
LASTING_MOST = 256
#: bytes of the filter that remembers which keys an epoch has had, of one function
FILTER = 1 << 20

#: what the system makes up
SYSTEM = ("/proc/", "/sys/", "/dev/")

#: before a path of which only counts what is there: no file, or which file or folder
IS_THERE = "is there:"
#: size, mtime, ctime, inode, device; of a folder: a digest, and the newest times in it. None: there is none
Stamp = tuple[int, int, int, int, int] | None


def paths_of(given: Any) -> tuple[str, ...]:
    """The paths that files= returned: one, or several."""
    if isinstance(given, (str, bytes, os.PathLike)):
        return (os.fsdecode(given),)
    if isinstance(given, Iterable):
        return tuple(os.fsdecode(path) for path in given)
    raise TypeError(f"files= of memoize() should return a path or several, but returned {type(given).__name__}")


def look(path: str) -> Stamp:
    """Returns what a file or folder is now."""
    if path.startswith(IS_THERE):
        try:
            link = _lstat(path[len(IS_THERE) :])
            time_of_link = link.st_mtime_ns if stat.S_ISLNK(link.st_mode) else 0
            with contextlib.suppress(OSError):  # it leads nowhere
                link = _stat(path[len(IS_THERE) :])
        except (OSError, ValueError):
            return None
        return stat.S_IFMT(link.st_mode), time_of_link, 0, link.st_ino, link.st_dev
    try:
        found = _stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    stamp = found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev
    return _look_into(path, stamp) if os.path.isdir(path) else stamp


def _look_into(folder: str, own: tuple[int, int, int, int, int]) -> Stamp:
    digest = hashlib.blake2b(repr(own[1:]).encode(), digest_size=8)
    newest = own[1:3]
    for place, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            try:
                found = _lstat(os.path.join(place, name))
            except FileNotFoundError:
                continue
            stamp = found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev
            digest.update(os.fsencode(os.path.join(place, name)) + repr(stamp).encode())
            newest = max(newest[0], stamp[1]), max(newest[1], stamp[2])
    return int.from_bytes(digest.digest(), "little"), *newest, own[3], own[4]


def settled(stamps: Iterable[Stamp]) -> bool:
    """Whether a change of the files from now on will change their times, too."""
    now = time.time_ns()
    return all(stamp is None or min(abs(now - stamp[1]), abs(now - stamp[2])) > FRESH_NS for stamp in stamps)


# ---- what Python opens -----------------------------------------------------------------------


class TooMany(Exception):
    """Values may come of more files than are noted with each."""


class Changes(Exception):
    """The maker of a value changes a file that it may read, by opening it for both."""


class Opened:
    """The files and folders that were read while a value was made.

    Attributes:
        stamps: by path, from before the file was opened
        written: paths that were written at first, so they are the maker's own
        updated: paths that were opened for reading and writing
        lasts: something that was read outlives the making: a module, or what an lru_cache keeps
    """

    def __init__(self) -> None:
        self.stamps: dict[str, Stamp] = {}
        self.written: set[str] = set()
        self.updated: set[str] = set()
        self.lasts = False

    def note(self, path: str, flags: int) -> None:
        plain = path.removeprefix(IS_THERE)
        if path in self.stamps or plain in self.stamps or plain in self.written or f"{plain}/".startswith(SYSTEM):
            return
        if plain.startswith(installed()) or "/site-packages/" in plain:
            return
        if flags & os.O_ACCMODE == os.O_WRONLY or flags & (os.O_TRUNC | os.O_EXCL):
            self.written.add(path)
        else:
            self.stamps[path] = None  # look() opens folders, which is not to be noted again
            self.stamps[path] = look(path)
            if flags & os.O_ACCMODE == os.O_RDWR:
                self.updated.add(path)

    def told(self, known: Iterable[str]) -> bytes | None:
        """What is kept of them, but for known paths; None: one has changed since.

        Where something that was read outlives the making, later values may come of it, too: the
        files then count for all values that this process makes from now on."""
        for path in known:
            self.stamps.pop(path, None)
        if self.lasts:
            _lasting.update(self.stamps)
        if len(_lasting) > LASTING_MOST:
            raise TooMany
        self.stamps = {**_lasting, **self.stamps}
        changed = {path for path, stamp in self.stamps.items() if look(path) != stamp}
        if changed & self.updated:
            raise Changes(min(changed & self.updated))
        if changed or not settled(self.stamps.values()):
            return None
        return b"\0".join(os.fsencode(path) + b"\0" + canonical(stamp) for path, stamp in self.stamps.items())


@functools.cache
def installed() -> tuple[str, ...]:
    """The folders of packages, and minato's own, each with a slash at its end."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths.append(os.path.dirname(os.path.dirname(__file__)))
    return tuple({os.path.join(form(path), "") for path in paths if path for form in (str, os.path.realpath)})


_by_thread = threading.local()
#: those of all threads
_all: list[Opened] = []
#: files of which this process keeps what it has read
_lasting: dict[str, Stamp] = {}
_hooked = False
EVENTS = frozenset({
    "open", "os.listdir", "os.scandir", "sqlite3.connect", "pickle.find_class", "ctypes.dlopen", "stat",
})  # fmt: skip
_HERE = os.path.join(os.path.dirname(__file__), "")


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    """Python's audit hook; it runs for many events of a process, so it returns early."""
    if not _all or event not in EVENTS:
        return
    path: Any = arguments[0] if arguments else None
    if event == "pickle.find_class":  # the value depends on that class's code
        path = getattr(sys.modules.get(path), "__file__", None) or 0
    if isinstance(path, int) or getattr(_by_thread, "notes", False) or getattr(_by_thread, "collects", False):
        return
    frame: Any = sys._getframe(1 + (event == "stat"))
    if event != "open" and frame.f_code.co_filename.startswith("<frozen importlib"):
        return  # looks for a module
    own = getattr(_by_thread, "opened", None)
    with not_noted():
        flags = (arguments[2] or 0) if event == "open" else os.O_RDONLY
        name = "." if path is None else os.fsdecode(path)
        if event == "sqlite3.connect" and name.startswith("file:"):
            name = unquote(urlsplit(name).path)
        if name.endswith(".pyc"):
            with contextlib.suppress(ValueError):  # it is not where Python puts them
                name = importlib.util.source_from_cache(name)
        names = [name]
        if event == "stat":
            code = frame.f_code
            sees_all = code.co_name in ("stat", "getsize", "getmtime") or not code.co_filename.startswith(installed())
            names = [IS_THERE + os.path.abspath(name)] + [name] * (sees_all and not os.path.isdir(name))
        for opened in [own] if own is not None else list(_all):  # a thread of the maker's
            for name in names:
                opened.note(name, flags)
            if event == "sqlite3.connect":
                opened.note(f"{name}-wal", flags)  # what is not yet in the database's own file
            stays = event == "ctypes.dlopen" or (event == "open" and name.endswith(".py"))
            opened.lasts = opened.lasts or stays or _is_remembered(frame)


def _noting(function: Any) -> Any:
    """A function of `os` that says what a path is, for which Python has no event. Threads that make no value ask
    for much that has nothing to do with values, so only the maker's own is heard."""

    @functools.wraps(function)
    def call(path: Any, *args: Any, **options: Any) -> Any:
        if getattr(_by_thread, "opened", None) is not None and options.get("dir_fd") is None:
            _on_event("stat", (path,))
        return function(path, *args, **options)

    call.__module__ = "os"  # where pickle finds it
    for able in (os.supports_dir_fd, os.supports_effective_ids, os.supports_fd, os.supports_follow_symlinks):
        if function in able:
            able.add(call)
    return call


def _on_collection(phase: str, _info: dict[str, int]) -> None:
    """Of Python's garbage collection: objects that end in it belong to no maker, as it may begin anywhere."""
    _by_thread.collects = phase == "start"


def _is_remembered(frame: Any) -> bool:
    """Whether a function with an lru_cache, of a module or a class, is running for the maker. (The
    variables of frames are not looked at: that would keep them alive.)"""
    while frame is not None and not frame.f_code.co_filename.startswith(_HERE):
        name = frame.f_code.co_name
        classes = [one for one in frame.f_globals.values() if isinstance(one, type)]
        for names in (frame.f_globals, *map(vars, classes)):
            if isinstance(names.get(name), functools._lru_cache_wrapper):
                return True
        frame = frame.f_back
    return False


def pass_on(paths: Iterable[str], told: bytes) -> None:
    """A value was found while this thread makes another one, which then depends on its files, too."""
    outer = getattr(_by_thread, "opened", None)
    if outer is not None:
        for path in (*paths, *map(os.fsdecode, told.split(b"\0")[::2] if told else ())):
            outer.note(path, os.O_RDONLY)


@contextlib.contextmanager
def not_noted() -> Iterator[None]:
    """Within, this thread reads for minato, such as the source of the program: no value comes of it."""
    before, _by_thread.notes = getattr(_by_thread, "notes", False), True
    try:
        yield
    finally:
        _by_thread.notes = before


@contextlib.contextmanager
def noted() -> Iterator[Opened]:
    """Within, what this thread opens is noted, and what threads open that make no value."""
    global _hooked
    if not _hooked:
        _hooked = True
        sys.addaudithook(_on_event)
        for name in ("stat", "lstat", "access", "readlink"):
            setattr(os, name, _noting(getattr(os, name)))
        gc.callbacks.append(_on_collection)
    outer, opened = getattr(_by_thread, "opened", None), Opened()
    _by_thread.opened = opened
    _all.append(opened)
    try:
        yield opened
    finally:
        _all.remove(opened)
        _by_thread.opened = outer
        if outer is not None:  # a value within another one's
            outer.stamps.update(opened.stamps)
            outer.lasts = outer.lasts or opened.lasts


class Files:
    """Holds what a process knows of the files of one memoized function."""

    def __init__(self, check: str) -> None:
        if check not in CHECKS:
            raise ValueError(f"check must be one of {CHECKS}, got {check!r}")
        self.check = check
        self._stamps: dict[str, Stamp] = {}
        self._asked: set[int] = set()  # hashes of the first keys of the epoch
        self._filter: bytearray | None = None  # of all, where there are many

    def is_new_epoch(self, key: bytes) -> bool:
        """Whether the key was asked for in this epoch: then the next one begins. The filter may take
        a key for another one, so an epoch may begin early."""
        word = hash(key)
        had = word in self._asked if self._filter is None else self._filtered(word)
        if had:
            self._asked, self._filter, self._stamps = {word}, None, {}
        elif self._filter is None:
            self._asked.add(word)
            if len(self._asked) == REMEMBERED:
                self._filter = bytearray(FILTER)
                for one in self._asked:
                    self._filtered(one)
        return had

    def _filtered(self, word: int) -> bool:
        """Whether the filter may have had the word; from now on it has."""
        assert self._filter is not None
        had = True
        for place in (word % (8 * FILTER), (word >> 28) % (8 * FILTER)):
            had = had and bool(self._filter[place >> 3] >> (place & 7) & 1)
            self._filter[place >> 3] |= 1 << (place & 7)
        return had

    def _stamp(self, path: str) -> Stamp:
        if self.check == "use":
            return look(path)
        if path not in self._stamps:
            if len(self._stamps) >= REMEMBERED:
                self._stamps = {}
            self._stamps[path] = look(path)
        return self._stamps[path]

    def stamps(self, paths: tuple[str, ...]) -> tuple[Stamp, ...]:
        """The stamps of the files, looked up as often as ``check=`` asks."""
        return () if self.check == "never" else tuple(self._stamp(path) for path in paths)

    def fresh(self, paths: tuple[str, ...]) -> tuple[Stamp, ...]:
        """Returns what they are now, and does not use what was known."""
        for path in paths:
            self._stamps.pop(path, None)
        return self.stamps(paths)

    def still(self, told: bytes) -> bool:
        """Whether files that were noted with a value are what they were."""
        if self.check == "never":
            return True
        parts = told.split(b"\0")
        return all(
            canonical(self._stamp(os.fsdecode(path))) == stamp for path, stamp in zip(parts[::2], parts[1::2])
        )
