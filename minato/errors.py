"""Errors a user sees: a worker's exception, raised in torch's order, and lost workers; warnings."""

from __future__ import annotations

import bdb
import builtins
import contextlib
import logging
import os
import pickle
import signal
import sys
import warnings
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch._utils import ExceptionWrapper

from ._not_linux import CORE
from ._system import NOT_STARTED, OomKills, advice

if CORE:
    from .worker_exits import exit_cause

#: from Python 3.11 on
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())

#: counts from import on: earlier kills concern other processes
_oom_kills = OomKills()


class WorkerLost(RuntimeError):
    """A worker process died and no other worker could finish its task.

    Attributes:
        pid: process id of the last worker that died on the task.
        index: the sampler's index (or list of indices) of the sample it was making, or None.
        exit_status: its exit code, or minus the number of the signal that killed it.
            1000 plus an errno: no process could be started. 2000 and more: the loader
            killed it because it had damaged shared memory. 3000: because its sample took longer
            than ``sample_timeout``.
    """

    def __init__(self, message: str, pid: int = 0, index: Any = None, exit_status: int = 0) -> None:
        super().__init__(message)
        self.pid = pid
        self.index = index
        self.exit_status = exit_status

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.pid, self.index, self.exit_status)


#: added to the number of the damage, in place of an exit code, when the loader ended the worker
DAMAGED = 2000
#: in place of an exit code, when the loader ended the worker because a sample took too long
LATE = 3000
_DAMAGES = {
    1: "a task has an unknown state",
    2: "a task has times that lie in the future",
    3: "the report on its samples is invalid",
    4: "its result lies outside the worker's own memory",
    5: "its result extends past its own end",
    6: "its memory request, or the memory it says it has used, is invalid",
}


def add_note(error: BaseException, text: str) -> None:
    """Adds a note, as Python shows them from 3.11 on; before that, appends it to the text."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif not error.args:
        error.args = (text,)
    elif isinstance(error.args[0], str):
        first = error.args[0]  # torch's class for the text of KeyErrors has its own repr
        error.args = (type(first)(f"{first.rstrip()}\n{text}"), *error.args[1:])


def text_of(index: Any) -> str:
    """The repr of an index for a message; the repr of a program's class may fail."""
    try:
        return repr(index)
    except Exception as error:
        return f"<{type(index).__name__}, whose repr raises {type(error).__name__}>"


#: stands for an exit code that no process has read: no exit code is that large
UNKNOWN = 256


def describe_death(pid: int, status: int) -> str:
    """torch's sentence about a dead worker. status: its exit code, or minus a signal."""
    if status == LATE:
        return f"A sample of DataLoader worker (pid {pid}) took longer than sample_timeout. "
    if status >= DAMAGED:
        what = _DAMAGES.get(status - DAMAGED, "its value is invalid")
        # the record may be too damaged to say which worker it belongs to
        who = f"DataLoader worker (pid {pid})" if pid else "A DataLoader worker"
        return (
            f"{who} was killed because a record that it shares with the loader is damaged: {what}. "
            "Code in the worker wrote to memory that is not its own, most likely a C extension "
            "that the dataset uses. Rerun with num_workers=0 and a memory checker to find it. "
        )
    if status >= NOT_STARTED:
        number = status - NOT_STARTED
        text, fix = f"A DataLoader worker could not be started: {os.strerror(number)}. ", advice(number)
        return f"{text}{fix} " if fix else text
    if status == UNKNOWN:
        return (
            f"DataLoader worker (pid {pid}) ended together with the process that had started it, so "
            "its exit code is unknown. If it was killed, see dmesg: the system may have run out of "
            "memory. "
        )
    if status >= 0:
        why = (
            f"Cause: {cause}. " if (cause := exit_cause(pid)) else "Details are lost due to "
            "multiprocessing. Rerunning with num_workers=0 may give better error trace."
        )
        return f"DataLoader worker (pid {pid}) exited unexpectedly with exit code {status}. {why}"
    name = signal.strsignal(-status) or f"signal {-status}"
    text = f"DataLoader worker (pid {pid}) is killed by signal: {name}. "
    if -status == signal.SIGBUS:
        text += (
            "It is possible that dataloader's workers are out of shared memory. "
            "Please try to raise your shared memory limit."
        )
    elif -status == signal.SIGKILL:
        text += _oom_kills.oom_note(pid)
    return text


def never_began_message(pid: int | None) -> str:
    """The message when the process that starts spawned workers died before it started one."""
    cause = exit_cause(pid or 0)
    why = f"Cause: {cause}." if cause else "See its output above."
    return (
        f"The process that starts DataLoader workers (pid {pid}) died unexpectedly before it had "
        f"started one. {why}"
    )


def starter_died_message(pid: int | None, hung: bool) -> str:
    """The message when the process that starts workers has died and no other is started. hung: it
    was killed because it did not respond."""
    cause = exit_cause(pid or 0)
    why = f" Cause: {cause}." if cause else ""
    how = "died unexpectedly"
    if hung:
        how, why = "was killed because it stopped responding", (
            " It may have been stopped by a signal, or a function registered with "
            "os.register_at_fork() may never return."
        )
    return (
        f"The process that starts DataLoader workers (pid {pid}) {how}, so workers can no longer be "
        f"watched or replaced.{why} Make a new iterator."
    )


def not_loaded(pid: int, error: BaseException) -> RuntimeError:
    """The error of a spawned worker that could not load the dataset or a function."""
    made = RuntimeError(
        f"DataLoader worker (pid {pid}) could not load the dataset: {type(error).__name__}: "
        f"{' '.join(str(error).split())}. With the start methods 'spawn' and 'forkserver' each "
        "worker imports the program anew. Put the program's actions under "
        "if __name__ == '__main__':, and define its dataset and functions at the top level of a "
        "module (workers cannot find a class defined in a notebook cell or at a prompt)."
    )
    made.__cause__ = error
    return made


def native_impossible_message(reason: str) -> str:
    """Why worker_type="native" is refused, and what to do."""
    return (
        f"worker_type='native' cannot serve this loader: {reason}. Change that, or use "
        "worker_type=None, which falls back to worker processes"
    )


def as_ordinary_error(error: BaseException) -> Exception:
    """An error that next() may raise. Replaces StopIteration, which a for loop would take for the
    end of the epoch, and SystemExit, which would end the program."""
    if isinstance(error, SystemExit):
        text = (
            f"the program's own code called sys.exit({error.code!r}) in a worker (see the "
            "traceback for the place). Raise an error there instead"
        )
    elif isinstance(error, StopIteration):
        text = (
            "the program's own code raised StopIteration (see the traceback for the place), which "
            "cannot end an epoch. Raise another error there, or return"
        )
    else:
        assert isinstance(error, Exception)
        return error
    made = RuntimeError(text)
    made.__cause__, made.__traceback__ = error, error.__traceback__
    return made


@dataclass
class Failure:
    """An exception on its way to the caller: torch's wrapper and, if it pickles, the original."""

    wrapper: ExceptionWrapper
    original: bytes | None
    note: str = ""
    stand_in: str = ""  # name of an exception class that cannot be pickled
    at_start: bool = False  # the worker failed before its first sample
    unsent: bool = False  # samples that cannot be pickled; their worker could still collate them

    @classmethod
    def of(cls, caught: BaseException, where: str) -> Failure:
        """Wraps an exception that was caught; where: torch's "in DataLoader worker process 0"."""
        error = as_ordinary_error(caught)
        if error.__traceback__ is None:  # raised in C; torch's text starts with a traceback
            with contextlib.suppress(type(error)):
                raise error
        wrapper = ExceptionWrapper((type(error), error, error.__traceback__), where)
        stand_in = ""
        try:
            pickle.dumps(type(error))
        except Exception:  # a class defined in a function, or in __main__ under spawn
            stand_in = type(error).__name__
            wrapper.exc_type = RuntimeError
        try:
            original = pickle.dumps(error)
            pickle.loads(original)  # an exception with its own __init__ may not unpickle
        except Exception:
            original = None
        return cls(wrapper, original, stand_in=stand_in)

    def note_first(self, text: str) -> None:
        """Puts text that names the sample or batch before the rest of the note."""
        self.note = f"{text}\n{self.note}".rstrip()

    def reraise(self) -> NoReturn:
        """Raises torch's exception; ``__cause__`` is the worker's, a note names the sample."""
        cause = None
        with contextlib.suppress(Exception):
            cause = None if self.original is None else pickle.loads(self.original)
        if self.stand_in:
            self.wrapper.exc_type = type(self.stand_in, (RuntimeError,), {})
        try:
            self._raise_as_torch(cause)
        except Exception as error:
            if self.note:
                add_note(error, self.note)
            if isinstance(error, WorkerLost) and isinstance(cause, WorkerLost):
                vars(error).update(vars(cause))  # pid, index, exit_status
            if self.wrapper.exc_type is bdb.BdbQuit:
                add_note(error, "minato: a debugger has no terminal in a worker process. Set "
                         "num_workers=0 to step through a dataset.")  # fmt: skip
            raise error from cause
        raise AssertionError("unreachable")

    def _raise_as_torch(self, cause: Any) -> None:
        """Raises the exception with torch's text. If torch would fail to build it (TypeError),
        raises a RuntimeError class of that name. Exception groups stay groups for ``except*``."""
        kind, where, text = self.wrapper.exc_type, self.wrapper.where, self.wrapper.exc_msg
        if getattr(kind, "message", None):  # torch passes its text by this name
            words = f"Caught {kind.__name__} {where}.\nOriginal {text}"
            made: Any = None
            with contextlib.suppress(Exception):
                group = isinstance(cause, _GROUP)
                made = kind(words, cause.exceptions) if group else kind(message=words)
            if made is None:
                self.wrapper.exc_type = type(kind.__name__, (RuntimeError,), {})
            elif isinstance(cause, _GROUP):
                raise made
        self.wrapper.reraise()


class LoaderFailure(Failure):
    """An error of the loader itself, raised unchanged."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.note = self.stand_in = ""

    def reraise(self) -> NoReturn:
        """Raises the error."""
        raise self.error


# ---- warnings that also reach the log: for events that a program must hear about once ----------

log = logging.getLogger("minato")

#: code that only passes a call of the program on: two folders, and the file of decorators
_PASSED = (
    *(os.path.dirname(file) + os.sep for file in (__file__, torch.__file__ or "")), contextlib.__file__
)  # fmt: skip


def warn(text: str) -> None:
    """Warns at the program's own line, and logs the text as a warning of the logger ``minato``.

    Log first: a program may turn warnings into errors.
    """
    if log.hasHandlers():  # else Python would print the text once more, after the warning
        log.warning("%s", text)
    warnings.warn(text, stacklevel=program_level())


def program_level() -> int:
    """The ``stacklevel`` with which a warning of the calling function names the program's own line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED):
        frame, level = frame.f_back, level + 1
    return level
