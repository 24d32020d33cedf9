"""Ctrl-C while processes start and end.

A terminal sends SIGINT, and a scheduler SIGTERM, to all processes of a group at once.  Workers
and the process that starts them leave the first to the trainer, but a new process does so only
once it has said so; and the trainer must not be interrupted between having a process, a
descriptor or memory and having noted it.
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

GROUP = frozenset({signal.SIGINT, signal.SIGTERM})
#: others that a scheduler sends to a whole job before it ends, for the program to save a checkpoint
WARNINGS = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


class Held:
    """``with Held() as held:`` puts off KeyboardInterrupt to its end, and blocks both signals
    in processes that are begun inside, which ``released()`` ends there.

    Blocking alone would not do: a thread of a library's pool takes the signal then, and Python
    interrupts the main thread all the same. Only brief work belongs inside.

    C code may have installed a handler that Python does not know of. It is put off, too, and is
    in force again afterwards. Where there is no memory to note it, nothing is put off: what is
    to be ended is ended all the same.
    """

    def __enter__(self) -> Held:
        self.interrupted = False  # Ctrl-C has been put off
        self._handler: Callable[..., Any] | None = None
        self._others: bytes | None = None  # the system's word of another handler than Python's
        self.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # before
        if threading.current_thread() is threading.main_thread():  # others are not interrupted
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
            # Not the frame that was interrupted: to keep that one would keep all that it holds.
            self._handler(signal.SIGINT, sys._getframe())

    def _restore(self) -> None:
        try:
            if self._handler is not None:
                signal.signal(signal.SIGINT, self._handler)
        finally:
            if self._others is not None:
                _core.disposition(signal.SIGINT, self._others)


def _leave_to_trainer(_number: int, _frame: Any) -> None:
    """It decides what Ctrl-C means. To ignore the signal would outlast exec: programs that a
    dataset starts could not be interrupted."""


def handled() -> frozenset[int]:
    """Those of WARNINGS that the program has handlers for."""
    return frozenset(number for number in WARNINGS if callable(signal.getsignal(number)))


def released(
    blocked: Iterable[int], trainer: int, handled: Iterable[int] = (), forked: bool = False
) -> None:
    """First thing in a process that was begun in a ``Held``, with what it has found blocked.
    SIGTERM, and what the program has ``handled()``, count only if the trainer or the parent sends
    them. A worker that is forked inherits the program's handlers, and keeps them."""
    signal.signal(signal.SIGINT, _leave_to_trainer)
    signal.siginterrupt(signal.SIGINT, False)  # C code, too, goes on with a read as before
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    leave_to_trainer(trainer, {signal.SIGTERM} if forked else {signal.SIGTERM, *handled})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP.difference(blocked))


def leave_to_trainer(trainer: int, numbers: Iterable[int] = (signal.SIGTERM,)) -> None:
    """This process ignores these signals, unless the trainer, its parent or itself sends them."""
    for number in numbers:
        _core.filter_signal(number, trainer)


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """A process that is executed inside ignores SIGINT, and SIGTERM is put off there, until it says
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
    """A write inside to a pipe that nobody reads any more is an error and nothing else, also in a
    program that SIGPIPE ends: many that are piped to others set it so."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        yield
    except BrokenPipeError:
        if signal.SIGPIPE not in blocked:
            signal.sigtimedwait({signal.SIGPIPE}, 0)  # which was sent to this thread
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class Deaf(str):
    """The name of a process that ignores SIGINT from the moment it hears its name.

    A fork server unblocks what it likes in its children. Their names are the first that they
    load, before the main module and what that imports; nothing but the standard library can
    be found then.
    """

    def __reduce__(self) -> Any:
        return operator.getitem, ((str(self), _Ignored()), 0)


class _Ignored:
    """Loads by ignoring SIGINT."""

    def __reduce__(self) -> Any:
        return signal.signal, (int(signal.SIGINT), int(signal.SIG_IGN))
