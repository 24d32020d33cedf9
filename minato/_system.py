"""What the system gives and refuses: files of /proc, control groups, memory, calls that workers
need. Imports nothing of the package."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

log = logging.getLogger("minato")


def stat_fields(pid: int | str = "self") -> list[str]:
    """The fields of /proc/PID/stat, from the third one on. Raises OSError if it has ended."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """(version, folder) of this process's control group, then of those above it, up to the mount
    point. Folders need not exist: in a container, the path may be relative to the host."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _number, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / (controller if controllers else "")
            parts = [part for part in path.split("/") if part]
            for depth in range(len(parts), -1, -1):
                yield 1 if controllers else 2, mount.joinpath(*parts[:depth])


# ---- what the system refuses ---------------------------------------------------------------------

#: added to an errno, in place of an exit code: the worker could not be started
NOT_STARTED = 1000

_ADVICE = {
    errno.EMFILE: "Every iterator with workers holds six or seven descriptors, and three more while it "
    "starts: raise the limit (`ulimit -n`), or delete iterators that are no longer used.",
    errno.ENFILE: "The whole machine has no descriptor left: raise the limit (sysctl fs.file-max).",
    errno.EAGAIN: "The limit on processes and threads is reached: raise it (`ulimit -u`, "
    "pids.max of the container's control group), or lower num_workers.",
    errno.ENOMEM: "Memory or address space is used up (`ulimit -v`, the control group's "
    "limit): lower num_workers, or raise the limit.",
    errno.EFBIG: "The limit on file size also applies to shared memory: raise it "
    "(`ulimit -f`).",
}


def advice(number: int) -> str:
    """Returns what helps against a system error number, or an empty text if that is unknown."""
    return _ADVICE.get(number, "")


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Wraps the start of workers: adds an explanation and advice to errors of the system.

    The exception keeps its type and its errno.
    """
    try:
        yield
    except MemoryError as error:
        text = f"DataLoader workers cannot be started: {error}. {_ADVICE[errno.ENOMEM]}"
        raise MemoryError(text) from error
    except OSError as error:
        number = error.errno or 0
        helps = advice(number)
        if not helps:
            raise
        text = f"DataLoader workers cannot be started: {error.strerror}. {helps}"
        raise OSError(number, text) from error


@functools.cache
def refused() -> str | None:
    """A system call that minato's workers need and that this system lacks or a sandbox
    forbids, with the reason; None if all work. Checked once, warned about once.

    There is no check for futex: without it, the C library's own locks would not work.
    """
    calls: dict[str, Callable[[], int]] = {
        "memfd_create": lambda: os.memfd_create("minato-probe"),
        "pidfd_open": lambda: os.pidfd_open(os.getpid()),
    }
    for name, call in calls.items():
        try:
            os.close(call())
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.EPERM, errno.EACCES):
                why = f"the system call {name} is refused here ({error.strerror})"
                log.warning(
                    "minato.DataLoader uses torch's own workers: %s. minato needs Linux 5.3, and a "
                    "sandbox or seccomp profile that allows this call.", why,
                )  # fmt: skip
                return why
        except AttributeError:  # this Python was built on a system without the call
            return f"this Python does not know the system call {name}"
    return None


# ---- how often the system has killed a process because memory ran out --------------------------

#: by version of control groups: the file that counts kills
_COUNTERS = {1: "memory.oom_control", 2: "memory.events"}
_KEY = "oom_kill"

GROUP_SAYS = (
    "Its control group has reached its memory limit, and the system has killed a process for it "
    "({file} counts it): lower num_workers, let samples take less memory, or raise the limit."
)
MACHINE_SAYS = (
    "The machine has run out of memory, and the system has killed a process for it (/proc/vmstat "
    "counts it): lower num_workers, or let samples take less memory."
)
MAYBE = "If you did not do this, the system may have run out of memory."


def _counted(file: Path) -> int | None:
    try:
        for line in file.read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == _KEY:
                return int(number)
    except (OSError, ValueError):
        pass
    return None


def _kills(root: Path) -> dict[str, int]:
    """Counts of this process's group and of the machine, by the sentence to say if one rises."""
    found = {}
    with contextlib.suppress(OSError):
        for version, folder in group_folders("memory", root):
            file = folder / _COUNTERS[version]
            if (count := _counted(file)) is not None:
                found[GROUP_SAYS.format(file=file)] = count
                break
    if (count := _counted(root / "proc/vmstat")) is not None:
        found[MACHINE_SAYS] = count
    return found


class OomKills:
    """Finds out whether a killed process was killed because memory ran out: whether the system
    counts more such kills than at the last check."""

    def __init__(self, root: str = "/") -> None:
        self._root = Path(root)
        self._before = _kills(self._root)
        self._latest = -1, ""  # the last process asked about, and the answer

    def oom_note(self, pid: int) -> str:
        """The sentence to add to the message that the process was killed."""
        if self._latest[0] != pid:
            now, before = _kills(self._root), self._before
            text = next((text for text, count in now.items() if count > before.get(text, count)), MAYBE)
            self._before, self._latest = now, (pid, text)
        return self._latest[1]


# ---- the default memory_limit: a share of the machine's available memory -------------------------

#: number of processes that a launcher started on this machine: torchrun and compatible launchers,
#: Open MPI, MPIs with Hydra, Slurm
_RANKS = (
    "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)  # fmt: skip
_MOST_RANKS = 1024
#: bytes of mapped memory per byte of page tables, in each process that maps it
_MAPPED = 512


def ranks_here(environ: Mapping[str, str] = os.environ) -> int:
    """How many processes, including this one, share this machine's memory; 1 if no launcher
    sets a plausible number."""
    for name in _RANKS:
        text = environ.get(name, "").strip()
        if text.isdecimal() and 1 <= int(text) <= _MOST_RANKS:
            return int(text)
    return 1


def fair_memory(workers: int) -> int:
    """Bytes for a loader without memory_limit; 0 if the available memory is unknown. It is this
    rank's share of half of the available memory, less the page tables of its processes."""
    from . import _core  # not at import: the engine does not exist on other systems

    share: int = _core.machine()["memory_available"] // 2 // ranks_here()
    return share * _MAPPED // (_MAPPED + workers + 1)
