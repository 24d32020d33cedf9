"""``minato cache``: the files of this user's caches, in memory and in directories."""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import sys
from typing import Any, NamedTuple

from .. import _cache
from ..cache.cache import folder
from ..text import counted, sized

#: the first bytes of each file of a cache
MAGIC = _cache.MAGIC.to_bytes(8, sys.byteorder)


class File(NamedTuple):
    folder: str
    name: str

    @property
    def on_disk(self) -> bool:
        return os.path.realpath(self.folder) != os.path.realpath(folder())

    @property
    def is_cache(self) -> bool:
        """Whether minato has made it: by its name, and by its first bytes."""
        path = os.path.join(self.folder, self.name)
        try:
            if not (self.name.startswith("cache-") and stat.S_ISREG(os.lstat(path).st_mode)):
                return False
            with open(path, "rb") as file:
                return file.read(len(MAGIC)) == MAGIC
        except OSError:
            return False

    @property
    def shown(self) -> str:
        return os.path.join(self.folder, self.name) if self.on_disk else self.name


def _files(where: str) -> list[File]:
    """The caches in a folder."""
    try:
        names = sorted(os.listdir(where))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [file for name in names if (file := File(where, name)).is_cache]


def _given(argument: str) -> list[File]:
    """Returns what an argument names: a file in memory, a file by its path, or all of a
    directory."""
    if os.path.isdir(argument):
        return _files(folder(argument)) or _files(argument)
    where, name = os.path.split(argument)
    return [file for file in _files(where or folder()) if file.name == name]


def guest(file: File) -> _cache.Store:
    """The file, opened without becoming one of those that share it."""
    store = _cache.Store(file.folder, file.name, _cache.BYTES_MIN, 0, False, 0, file.on_disk)
    store.attach()
    return store


def left_bytes() -> int:
    """Bytes of values in files in memory that no process has open."""
    left = 0
    for file in _files(folder()):
        with contextlib.suppress(OSError, RuntimeError):  # it has gone, or is another version's
            stats = guest(file).stats()
            left += stats["used_bytes"] if stats["processes"] == 0 else 0
    return left


def _head(file: File, stats: dict[str, Any]) -> str:
    """The file, and whose values it has where a client has said so."""
    label = "".join(c if c.isprintable() else "?" for c in stats["label"])
    return f"{file.shown}  {label}" if label else file.shown


def _users(stats: dict[str, int]) -> str:
    processes = stats["processes"]
    return f"{processes} process{'es' * (processes != 1)} of {counted(stats['jobs'], 'job')}"


def _ls(head: str, file: File, stats: dict[str, int]) -> str:
    users = _users(stats)
    if not stats["processes"]:
        users = "no process" if file.on_disk else "no process: kept, or left by killed ones"
    used, size = sized(stats["used_bytes"]), sized(stats["bytes"])
    return f"{head}  {used} of {size}, {stats['entries']} values, {users}"


def _stats(head: str, file: File, stats: dict[str, int]) -> str:
    asked = stats["hits"] + stats["misses"]
    share = 100 * stats["hits"] / asked if asked else 0.0
    lines = [
        head,
        f"  values   {stats['entries']} in {sized(stats['used_bytes'])} of {sized(stats['bytes'])}",
        f"  found    {stats['hits']} ({share:.0f} %), {sized(stats['hit_bytes'])}; making them would "
        f"have taken {stats['saved_ns'] / 1e9:.1f} s",
        f"  made     {stats['misses']}, in {stats['made_ns'] / 1e9:.1f} s",
        f"  refused  {stats['refused']} (no space left, or values too large to keep)",
        f"  damaged  {stats['damaged']}, which were made again",
        f"  recycled {stats['recycled']} segments; {stats['returned']} were given back to the system",
        f"  used by  {_users(stats)}",
    ]
    if not file.on_disk:
        del lines[5]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minato cache",
        description=f"The caches of this user, in memory ({folder()}) and in directories.",
    )
    parser.add_argument("action", choices=("ls", "stats", "verify", "drop"), help="list; counts of "
                        "each; compare checksums of everything; remove")  # fmt: skip
    parser.add_argument("names", nargs="*", help="files in memory, as ls shows them; files by their "
                        "paths; directories (default, but not of drop: all that are in memory)")  # fmt: skip
    parser.add_argument("--all", action="store_true", help="with drop: all that are in memory")
    parser.add_argument("--force", action="store_true", help="with drop: also what processes use")
    return parser


def _drop(file: File, force: bool) -> int:
    """Removes a file, after saying what it is."""
    processes = 0
    try:
        store = guest(file)
        stats = store.stats()
        processes = stats["processes"]
        print(_ls(_head(file, stats), file, stats))
        store.detach()
        del store
    except (OSError, RuntimeError) as error:  # another version's, or damaged
        print(f"{file.shown}  cannot be opened: {error}")
    if processes and not force:
        print(f"{file.shown} is left, because {_users(stats)} use it; --force removes it")
        return 1
    print(f"removing {file.shown} ...")
    _cache.drop(file.folder, file.name, file.on_disk, force)
    print(f"{file.shown} is removed" + "; processes that have it open go on with it" * bool(processes))
    if os.path.basename(file.folder) == os.path.basename(folder()):
        with contextlib.suppress(OSError):  # there is more in it
            os.rmdir(file.folder)
    return 0


def _act(action: str, file: File, force: bool) -> int:
    if action == "drop":
        return _drop(file, force)
    store = guest(file)
    if action == "verify":
        checked, damaged = store.verify()
        print(f"{file.shown}  {checked} values, {damaged} damaged")
        return int(damaged > 0)
    show, stats = (_ls if action == "ls" else _stats), store.stats()
    print(show(_head(file, stats), file, stats))
    return 0


def run(argv: list[str]) -> int:
    """Runs ``minato cache``; returns the exit status: 1 where anything is damaged or cannot be opened."""
    options = _parser().parse_intermixed_args(argv)
    found: dict[str, list[File]] = {}
    for argument in options.names:
        try:
            found[argument] = _given(argument)
        except OSError as error:
            print(f"minato cache: {argument} cannot be read: {error.strerror}")
            return 1
    unknown = [argument for argument, files in found.items() if not files]
    if unknown:
        print(f"minato cache: there is no cache of this user in {', '.join(unknown)} (in memory: {folder()})")
        return 1
    if options.action == "drop" and not options.names and not options.all:
        there = "".join(f"\n  {file.shown}" for file in _files(folder()))
        print(f"minato cache drop: name the caches to remove, or a directory of them, or say --all. "
              f"In memory ({folder()}) {'are:' + there if there else 'is none'}")  # fmt: skip
        return 2
    files = [file for each in found.values() for file in each]
    if not options.names:
        files = _files(folder())
        if not files:
            print(f"no cache of this user is in memory ({folder()})")
    status = 0
    for file in files:
        try:
            status |= _act(options.action, file, options.force)
        except (OSError, RuntimeError) as error:
            print(f"{file.shown}  cannot be opened: {error}")
            status = 1
    return status
