"""What Ctrl-C does to a program whose loader is starting or stopping processes."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import minato
from minato import _core
from minato.workers import signals


def test_the_programs_handler_is_given_the_frame() -> None:
    frames: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda _number, frame: frames.append(frame))
    try:
        with signals.Held():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(frames) == 1 and frames[0] is not None


Handler = ctypes.CDLL(None).signal
Handler.restype, Handler.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]


@pytest.fixture
def installed_by_c() -> Iterator[int]:
    """The address of a handler that C code has installed, which passes the signal on to Python."""
    passes_on = ctypes.pythonapi.PyErr_SetInterruptEx
    address = ctypes.cast(passes_on, ctypes.c_void_p).value
    assert address is not None
    before = Handler(signal.SIGINT, address)
    try:
        yield address
    finally:
        Handler(signal.SIGINT, before)


def test_a_handler_installed_by_c_stays(installed_by_c: int) -> None:
    loader = minato.DataLoader(range(8), 4, num_workers=1)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert Handler(signal.SIGINT, installed_by_c) == installed_by_c


def test_a_handler_installed_by_c_is_put_off(installed_by_c: int) -> None:
    whole = False
    with pytest.raises(KeyboardInterrupt):
        with signals.Held():
            os.kill(os.getpid(), signal.SIGINT)
            whole = True
    assert whole
    assert Handler(signal.SIGINT, installed_by_c) == installed_by_c


class Forgetful:
    """The core, but for the call of disposition() that has no room for its result."""

    def __init__(self, fails: int) -> None:
        self.left = fails

    def disposition(self, *args: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise MemoryError
        return _core.disposition(*args)


@pytest.mark.parametrize("fails", [1, 2])
def test_what_is_held_is_done_without_memory_for_the_handler(
    fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, before = signal.getsignal(signal.SIGINT), _core.disposition(signal.SIGINT)
    monkeypatch.setattr(signals, "_core", Forgetful(fails))
    done = False
    with pytest.raises(KeyboardInterrupt) if fails == 2 else contextlib.nullcontext():
        with signals.Held():
            if fails == 2:  # put off all the same
                os.kill(os.getpid(), signal.SIGINT)
            done = True
    assert done
    assert signal.getsignal(signal.SIGINT) is handler
    assert _core.disposition(signal.SIGINT) == before


def test_system_calls_go_on_to_be_restarted() -> None:
    """What signal.siginterrupt() has set is as much the program's as the handler."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        signal.siginterrupt(signal.SIGINT, False)
        restarts = _core.disposition(signal.SIGINT)
        with signals.Held():
            assert _core.disposition(signal.SIGINT) != restarts
        assert _core.disposition(signal.SIGINT) == restarts
    finally:
        signal.signal(signal.SIGINT, before)


def test_only_the_zygote_is_deaf() -> None:
    iterator = iter(minato.DataLoader(range(8), 2, num_workers=1))
    names = [child.name for child in multiprocessing.active_children()]
    del iterator
    assert "minato-zygote" in names
    assert all(type(name) is str for name in names)
