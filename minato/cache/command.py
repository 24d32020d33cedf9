"""``minato cache``: the files of this user's caches in memory."""

from __future__ import annotations

import argparse
import os
from typing import Any

from .. import _cache
from .cache import folder

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def _bytes(number: float) -> str:
    for unit in UNITS[:-1]:
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} {UNITS[-1]}"


def _names() -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder()) if name.startswith("cache-"))
    except FileNotFoundError:
        return []


def _guest(name: str) -> _cache.Store:
    """The file, opened without becoming one of those that share it."""
    store = _cache.Store(folder(), name, _cache.BYTES_MIN, 0, False, 0)
    store.attach()
    return store


def left_bytes() -> int:
    """Bytes of values in files that no process has open."""
    stats = [_guest(name).stats() for name in _names()]
    return sum(one["used_bytes"] for one in stats if one["processes"] == 0)


def _ls(name: str, stats: dict[str, int]) -> str:
    users = f"{stats['processes']} processes of {stats['jobs']} jobs"
    if not stats["processes"]:
        users = "no process: kept, or left by killed ones"
    used, size = _bytes(stats["used_bytes"]), _bytes(stats["bytes"])
    return f"{name}  {used} of {size}, {stats['entries']} values, {users}"


def _stats(name: str, stats: dict[str, int]) -> str:
    asked = stats["hits"] + stats["misses"]
    share = 100 * stats["hits"] / asked if asked else 0.0
    lines = [
        name,
        f"  values   {stats['entries']} in {_bytes(stats['used_bytes'])} of {_bytes(stats['bytes'])}",
        f"  found    {stats['hits']} ({share:.0f} %), {_bytes(stats['hit_bytes'])}; making them would "
        f"have taken {stats['saved_ns'] / 1e9:.1f} s",
        f"  made     {stats['misses']}, in {stats['made_ns'] / 1e9:.1f} s",
        f"  refused  {stats['refused']}, for want of room or because they are too large",
        f"  recycled {stats['recycled']} segments; {stats['returned']} were given back to the system",
        f"  used by  {stats['processes']} processes of {stats['jobs']} jobs",
    ]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minato cache", description=f"The caches of this user, in {folder()}."
    )
    parser.add_argument("action", choices=("ls", "stats", "verify", "drop"), help="list; counts of "
                        "each; compare checksums of everything; remove")  # fmt: skip
    parser.add_argument("names", nargs="*", help="files, as ls shows them (default: all)")
    return parser


def _act(action: str, name: str) -> int:
    if action == "drop":
        os.unlink(os.path.join(folder(), name))
        print(f"{name} is removed; processes that have it open go on with it")
        return 0
    store = _guest(name)
    if action == "verify":
        checked, damaged = store.verify()
        print(f"{name}  {checked} values, {damaged} damaged")
        return int(damaged > 0)
    show: Any = _ls if action == "ls" else _stats
    print(show(name, store.stats()))
    return 0


def run(argv: list[str]) -> int:
    """Runs ``minato cache``; returns the exit status: 1 where anything is damaged or cannot be opened."""
    options = _parser().parse_args(argv)
    there = _names()
    unknown = [name for name in options.names if name not in there]
    if unknown:
        print(f"minato cache: there is no {', '.join(unknown)} in {folder()}")
        return 1
    if not there:
        print(f"no cache of this user is in memory ({folder()})")
    status = 0
    for name in options.names or there:
        try:
            status |= _act(options.action, name)
        except (OSError, RuntimeError) as error:
            print(f"{name}  cannot be opened: {error}")
            status = 1
    if options.action == "drop" and there and not os.listdir(folder()):
        os.rmdir(folder())
    return status
