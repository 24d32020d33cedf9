"""Advice for when the system refuses processes, descriptors, memory or calls that workers need."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
from collections.abc import Callable, Iterator

log = logging.getLogger("minato")

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
