"""A control group with a limit on memory, page cache included, for one run."""
from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
#: joins the group named first, then runs the command after it
JOIN = ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"')
LEAVE_S = 10.0  # a group stays busy for a moment after its last process has ended


class Unavailable(RuntimeError):
    """No such group can be made on this machine; the message says why."""


def _places() -> Iterator[tuple[Path, str]]:
    """Where a group with a limit could be made, and its file for the limit: next to this process's
    group or at the root, version 2 before 1."""
    try:
        lines = [line.split(":", 2) for line in OWN.read_text().splitlines()]
    except OSError as error:
        raise Unavailable(f"{OWN}: {error.strerror}") from error
    for number, controllers, path in lines:
        for place in (path.strip("/"), ""):
            if number == "0":
                yield ROOT / place, "memory.max"
            elif "memory" in controllers.split(","):
                yield ROOT / "memory" / place, "memory.limit_in_bytes"


@contextlib.contextmanager
def limited(limit_bytes: int) -> Iterator[tuple[str, ...]]:
    """The prefix of a command that gives it, with its page cache, this much memory. Raises
    Unavailable."""
    group, reasons = None, []
    for place, name in _places():
        made = place / f"minato-bench-{os.getpid()}"
        try:
            made.mkdir()
        except OSError as error:
            reasons.append(f"{made}: {error.strerror}")
            continue
        try:
            if not (made / name).exists():
                raise OSError(0, f"has no {name}")
            (made / name).write_text(str(limit_bytes))
            group = made
            break
        except OSError as error:
            reasons.append(f"{made}: {error.strerror}")
            made.rmdir()
    if group is None:
        raise Unavailable("no control group with a limit on memory can be made here: "
                          + ("; ".join(reasons) or f"{OWN} names no place for one"))
    try:
        yield (*JOIN, str(group))
    finally:
        deadline = time.monotonic() + LEAVE_S
        while True:
            try:
                group.rmdir()
                break
            except OSError:
                if time.monotonic() > deadline:
                    break  # one of its processes does not end
                time.sleep(0.1)
