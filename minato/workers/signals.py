"""Ctrl-C while processes start and end.

A terminal sends SIGINT, and a scheduler SIGTERM, to all processes of a group at once. Workers
and the process that starts them ignore SIGINT, which is the trainer's to handle. But a new process
ignores it only after its first instructions. And the trainer must not be interrupted between
getting a process, a descriptor or memory and recording it.
"""

from __future__ import annotations

import contextlib
import operator
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .. import _core
from .job import Job

GROUP = frozenset({signal.SIGINT, signal.SIGTERM})
#: signals by which a scheduler warns a whole job of its end: programs then save a checkpoint
WARNINGS = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


class Held:
    """``with Held() as held:`` delays KeyboardInterrupt until the end of the block. Processes that
    start inside begin with both signals blocked, until they call ``released()``.

    Blocking alone is not enough: a thread of a library's pool would take the signal, and Python
    would still interrupt the main thread. Only brief work belongs inside.

    C code may have installed a handler that Python does not know. It is delayed, too, and restored
    afterwards. Without memory to save it nothing is delayed, so that cleaning up can still go on.
    """

    def __enter__(self) -> Held:
        self.interrupted = False  # Ctrl-C came inside the block
        self._handler: Callable[..., Any] | None = None
        self._others: bytes | None = None  # a handler that is not Python's, as the system has it
        self.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # blocked before the block
        if threading.current_thread() is threading.main_thread():  # only it is interrupted
            handler = signal.getsignal(signal.SIGINT)
            with contextlib.suppress(MemoryError):
                if callable(handler):
                    before = _core.disposition(signal.SIGINT)
                    self._handler, self._others = handler, before
                    signal.signal(signal.SIGINT, self._note)
                    # Python's own is the same for all its handlers.
                    if before == _core.disposition(signal.SIGINT):
                        self._others = None
        signal.pthread_sigmask(signal.SIG_BLOCK, GROUP)
        return self

    def _note(self, _number: int, _frame: Any) -> None:
        self.interrupted = True

    def __exit__(self, *_: Any) -> None:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        finally:
            self._restore()
        if self.interrupted and self._others is not None:
            signal.raise_signal(signal.SIGINT)
        elif self.interrupted and self._handler is not None:
            # Not the interrupted frame: a reference to it would keep all of its objects alive.
            self._handler(signal.SIGINT, sys._getframe())

    def _restore(self) -> None:
        try:
            if self._handler is not None:
                signal.signal(signal.SIGINT, self._handler)
        finally:
            if self._others is not None:
                _core.disposition(signal.SIGINT, self._others)


def _leave_to_trainer(_number: int, _frame: Any) -> None:
    """Does nothing: the trainer handles Ctrl-C. SIG_IGN would outlast exec, so programs that a
    dataset starts could not be interrupted."""


def handled() -> frozenset[int]:
    """The signals of WARNINGS for which the program has handlers."""
    return frozenset(number for number in WARNINGS if callable(signal.getsignal(number)))


def released(job: Job, is_worker: bool = False) -> None:
    """Called at the start of a process that was started inside ``Held``, or forked by such a process.

    SIGTERM, and signals for which the program has handlers, have an effect only if the trainer or the
    parent sends them. A forked worker inherits the program's handlers and keeps them.
    """
    signal.signal(signal.SIGINT, _leave_to_trainer)
    signal.siginterrupt(signal.SIGINT, False)  # so that reads of C code are restarted
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    others = () if is_worker and job.forked else job.handled
    leave_to_trainer(job.memory.segment.trainer_pid, {signal.SIGTERM, *others})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP.difference(job.blocked))


def leave_to_trainer(trainer: int, numbers: Iterable[int] = (signal.SIGTERM,)) -> None:
    """Makes this process ignore these signals, unless the trainer, its parent or itself sends
    them."""
    for number in numbers:
        _core.filter_signal(number, trainer)


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """A process that is executed inside the block ignores SIGINT and blocks SIGTERM until it calls
    ``released()``."""
    before = _core.disposition(signal.SIGINT)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGINT, handler)
        _core.disposition(signal.SIGINT, before)


@contextlib.contextmanager
def no_broken_pipe() -> Iterator[None]:
    """Inside the block, a write to a pipe without a reader only raises BrokenPipeError. SIGPIPE
    would end programs that set it to its default, as many do whose output is piped."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        yield
    except BrokenPipeError:
        if signal.SIGPIPE not in blocked:
            signal.sigtimedwait({signal.SIGPIPE}, 0)  # takes the signal sent to this thread
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class Deaf(str):
    """The name of a process that ignores SIGINT from the moment it loads its name.

    A fork server unblocks signals in its children. A child's name is the first object that it
    loads, before the main module and its imports. Only the standard library can be found then.
    """

    def __reduce__(self) -> Any:
        return operator.getitem, ((str(self), _Ignored()), 0)


class _Ignored:
    """Loads by ignoring SIGINT."""

    def __reduce__(self) -> Any:
        return signal.signal, (int(signal.SIGINT), int(signal.SIG_IGN))
