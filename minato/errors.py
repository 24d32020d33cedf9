"""Errors a user sees: a worker's exception at its place in the order, and lost workers."""

from __future__ import annotations

import bdb
import builtins
import contextlib
import os
import pickle
import signal
from dataclasses import dataclass
from typing import Any, NoReturn

from torch._utils import ExceptionWrapper

from ._oom_kills import OomKills
from ._system_refusals import NOT_STARTED, advice

#: from Python 3.11 on
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())

#: from now on; what the system counted before is of others
_oom_kills = OomKills()


class WorkerLost(RuntimeError):
    """A worker process died and its task could not be finished by another.

    Attributes:
        pid: process id of the worker that died last on the task.
        index: the sampler's index (or list of indices) of the sample it was at, or None.
        exit_status: its exit code, or minus the number of the signal that killed it, or 1000
            plus the error number for which no process could be made, or 2000 and more when it was
            ended because it had damaged memory that it shares with the loader.
    """

    def __init__(
        self, message: str, pid: int = 0, index: Any = None, exit_status: int = 0
    ) -> None:
        super().__init__(message)
        self.pid = pid
        self.index = index
        self.exit_status = exit_status

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.pid, self.index, self.exit_status)


#: in place of an exit code: the worker was told to leave, because of one of these
DAMAGED = 2000
_DAMAGES = {
    1: "the state of a task is not one that there is",
    2: "the times of a task lie in the future",
    3: "what it says of its samples is none of what it may say",
    4: "its result lies in memory that is not its own",
    5: "its result reaches beyond its own end",
    6: "the memory it asks for, or says it has used, makes no sense",
    7: "it says that its process has ended, or never began, and it runs",
}


def add_note(error: BaseException, text: str) -> None:
    """A note, as Python shows them from 3.11 on; before that it goes into the error's text."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif not error.args:
        error.args = (text,)
    elif isinstance(error.args[0], str):
        first = error.args[0]  # torch's class of texts of KeyErrors has a repr of its own
        error.args = (type(first)(f"{first.rstrip()}\n{text}"), *error.args[1:])


def text_of(index: Any) -> str:
    """An index for a message: a sampler's own class may have a repr that fails."""
    try:
        return repr(index)
    except Exception as error:
        return f"<{type(index).__name__}, whose repr raises {type(error).__name__}>"


def timed_out(seconds: float, under_way: str = "") -> RuntimeError:
    """What torch raises when no batch came in the time that ``timeout=`` allows. under_way: what
    workers were doing."""
    return RuntimeError(f"DataLoader timed out after {seconds} seconds\n{under_way}".rstrip())


def _said_by(pid: int) -> str:
    from . import _notes  # not at import: other systems lack what it needs, and have no workers

    return _notes.said_by(pid)


def describe_death(pid: int, status: int) -> str:
    """The sentence with which torch reports a dead worker (exit code, or minus a signal)."""
    if status >= DAMAGED:
        what = _DAMAGES.get(status - DAMAGED, "it makes no sense")
        # a record may be so damaged that it does not say whose it is
        who = f"DataLoader worker (pid {pid})" if pid else "A DataLoader worker"
        return (
            f"{who} was ended, because a record that it shares with the loader is damaged: {what}. "
            "Code in the worker writes to memory where it must not, most likely an extension in C "
            "that the dataset uses. "
        )
    if status >= NOT_STARTED:
        number = status - NOT_STARTED
        text = f"A DataLoader worker could not be started: {os.strerror(number)}. "
        return text + advice(number) + (" " if advice(number) else "")
    if status >= 0 and (said := _said_by(pid)):
        return (
            f"DataLoader worker (pid {pid}) exited unexpectedly with exit code {status}. It was "
            f"ended by {said}. "
        )
    if status >= 0:
        return (
            f"DataLoader worker (pid {pid}) exited unexpectedly with exit code {status}. "
            "Details are lost due to multiprocessing. Rerunning with num_workers=0 may give "
            "better error trace."
        )
    name = signal.strsignal(-status) or f"signal {-status}"
    text = f"DataLoader worker (pid {pid}) is killed by signal: {name}. "
    if -status == signal.SIGBUS:
        text += (
            "It is possible that dataloader's workers are out of shared memory. "
            "Please try to raise your shared memory limit."
        )
    elif -status == signal.SIGKILL:
        text += _oom_kills.said_of(pid)
    return text


def never_began(pid: int | None) -> str:
    """Of the process that starts workers and inherits nothing, which ended before it had one."""
    said = _said_by(pid or 0)
    why = f"it was ended by {said}" if said else "what it has printed says why"
    return (
        f"The process that starts DataLoader workers (pid {pid}) died unexpectedly, before it had "
        f"started one; {why}."
    )


def starter_died(pid: int | None, hung: bool) -> str:
    """Of the process that starts workers, and of its parent, which would start another."""
    said = _said_by(pid or 0)
    how = f"died unexpectedly, because it was ended by {said}" if said else "died unexpectedly"
    if hung:
        how = (
            "was ended, because it had hung when a worker was to be started or had died. Somebody "
            "may have stopped it, or a function that was given to os.register_at_fork() does not "
            "return there"
        )
    return (
        f"The process that starts DataLoader workers (pid {pid}) {how}; workers cannot be watched or "
        "replaced any more. Make a new iterator."
    )


def not_loaded(pid: int, error: BaseException) -> RuntimeError:
    """Of a worker that inherits nothing, and could not get what it works with."""
    told = RuntimeError(
        f"DataLoader worker (pid {pid}) could not load the dataset: {type(error).__name__}: "
        f"{' '.join(str(error).split())}. With the start methods 'spawn' and 'forkserver' each "
        "worker imports the program anew: what the program does belongs under "
        "if __name__ == '__main__':, and its dataset and functions at the top of a module (a "
        "class of a notebook's cell or of a prompt cannot be found there)."
    )
    told.__cause__ = error
    return told


def native_impossible(reason: str) -> str:
    """Why worker_type="native" is refused, and what to do."""
    return (
        f"worker_type='native' cannot serve this loader: {reason}. Change that, or leave "
        "worker_type=None, which then takes worker processes"
    )


def thread_impossible(reason: str) -> str:
    """Why worker_type="thread" is refused; reason: with what to do about it."""
    return f"worker_type='thread' cannot serve this loader: {reason}."


def stopped(call: str) -> RuntimeError:
    """In place of the StopIteration of a call of the dataset's: a for loop would take that for the
    end of the epoch."""
    return RuntimeError(f"{call} of the dataset raised StopIteration")


def no_end(error: BaseException) -> Exception:
    """An error to raise out of next(), where a for loop would take StopIteration for the end, and
    SystemExit would end the program."""
    if isinstance(error, SystemExit):
        exits = RuntimeError(
            f"the program's own code called sys.exit({error.code!r}) in a worker (the traceback says "
            "where). Raise an error there instead"
        )
        exits.__cause__, exits.__traceback__ = error, error.__traceback__
        return exits
    if not isinstance(error, StopIteration):
        assert isinstance(error, Exception)
        return error
    stop = RuntimeError(
        "StopIteration was raised by the program's own code (the traceback says where), and no "
        "epoch ends there"
    )
    stop.__cause__, stop.__traceback__ = error, error.__traceback__
    return stop


@dataclass
class Failure:
    """An exception on its way to the caller: torch's wrapper and, where it pickles, itself."""

    wrapper: ExceptionWrapper
    original: bytes | None
    note: str = ""
    stand_in: str = ""  # name of an exception class that does not pickle
    at_start: bool = False  # a worker could not begin: nothing was made
    unsent: bool = False  # it is of samples that do not pickle: their worker could collate them

    @classmethod
    def of(cls, caught: BaseException, where: str) -> Failure:
        """Wraps an exception that was caught."""
        error = no_end(caught)
        if error.__traceback__ is None:  # raised in C: torch's text begins with a traceback
            with contextlib.suppress(type(error)):
                raise error
        wrapper = ExceptionWrapper((type(error), error, error.__traceback__), where)
        stand_in = ""
        try:
            pickle.dumps(type(error))
        except Exception:  # a class of a function or of __main__ under spawn
            stand_in = type(error).__name__
            wrapper.exc_type = RuntimeError
        try:
            original = pickle.dumps(error)
            pickle.loads(original)  # an exception with its own __init__ may not come back
        except Exception:
            original = None
        return cls(wrapper, original, stand_in=stand_in)

    def note_first(self, text: str) -> None:
        """Adds text, which says of what sample or batch it is, before the rest of the note."""
        self.note = f"{text}\n{self.note}".rstrip()

    def reraise(self) -> NoReturn:
        """Raises torch's exception; ``__cause__`` is the worker's, notes name the sample."""
        cause = None
        if self.original is not None:
            try:
                cause = pickle.loads(self.original)
            except Exception:
                cause = None
        if self.stand_in:
            self.wrapper.exc_type = type(self.stand_in, (RuntimeError,), {})
        try:
            self._raise_as_torch(cause)
        except Exception as error:
            if self.note:
                add_note(error, self.note)
            if self.wrapper.exc_type is bdb.BdbQuit:
                add_note(error, "minato: a debugger has no terminal in a worker process. Set "
                         "num_workers=0 to go through a dataset with one.")  # fmt: skip
            raise error from cause
        raise AssertionError("unreachable")

    def _raise_as_torch(self, cause: Any) -> None:
        """Raises the exception in torch's words; of a class that torch would raise a TypeError for, a
        RuntimeError of that name. An exception group keeps its exceptions, for ``except*``."""
        kind, where, text = self.wrapper.exc_type, self.wrapper.where, self.wrapper.exc_msg
        if getattr(kind, "message", None):  # torch gives its text by that name
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
