"""What to do when the system refuses what workers need: processes, descriptors, memory, calls."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
from collections.abc import Callable, Iterator

log = logging.getLogger("minato")

#: in place of a worker's exit code: it could not be started, for this error number
NOT_STARTED = 1000

_ADVICE = {
    errno.EMFILE: "Every iterator with workers holds six descriptors, and three more while it "
    "starts: raise the limit (`ulimit -n`), or let go of iterators that are not used any more.",
    errno.ENFILE: "The whole machine has no descriptor left (sysctl fs.file-max).",
    errno.EAGAIN: "The limit on processes and threads is reached: raise it (`ulimit -u`, "
    "pids.max of the container's control group), or lower num_workers.",
    errno.ENOMEM: "Memory or address space is used up (`ulimit -v`, the control group's "
    "limit): lower num_workers, or raise the limit.",
    errno.EFBIG: "The limit on the size of a file holds for shared memory, too: raise it "
    "(`ulimit -f`).",
}


def advice(number: int) -> str:
    """What helps against an error number of the system; empty where nothing is known."""
    return _ADVICE.get(number, "")


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Around the start of workers: an error of the system says what it means and what helps.

    The exception keeps its type and its number.
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
    """A system call of minato's workers that this system does not have, or that a sandbox
    forbids; None where both are there. Asked once, and told once.

    That the C library's locks need futex is why nobody gets here without it.
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
                    "minato.DataLoader uses torch's own workers: %s. It takes Linux 5.3, and a "
                    "sandbox or seccomp profile that allows it.", why,
                )  # fmt: skip
                return why
        except AttributeError:  # Python was built where the call was not known
            return f"this Python does not know the system call {name}"
    return None
