"""The effect of signals on a program with a loader: Ctrl-C, and a scheduler's signal to a job."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
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
def test_held_signal_is_handled_without_memory(
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


def test_only_zygote_ignores_signals() -> None:
    iterator = iter(minato.DataLoader(range(8), 2, num_workers=1))
    names = [child.name for child in multiprocessing.active_children()]
    del iterator
    assert "minato-zygote" in names
    assert all(type(name) is str for name in names)


@pytest.fixture
def filtered() -> Iterator[list[int]]:
    """The signals that a filtered handler of this process has been given."""
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: heard.append(number))
    _core.filter_signal(signal.SIGUSR1, 0)
    yield heard
    signal.signal(signal.SIGUSR1, before)


def sent_by_child(number: int) -> None:
    subprocess.run(["kill", f"-{number}", str(os.getpid())], check=True)


def test_filtered_signal_of_another_process_is_ignored(filtered: list[int]) -> None:
    sent_by_child(signal.SIGUSR1)
    assert filtered == []
    os.kill(os.getpid(), signal.SIGUSR1)
    assert filtered == [signal.SIGUSR1]


def test_filtered_signal_of_parent_is_handled(filtered: list[int]) -> None:
    """Also of a fork, which has no filter of its own: a pool ends its processes that way."""
    for own in (True, False):
        ready, done = os.pipe()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            if own:
                _core.filter_signal(signal.SIGUSR1, 0)
            os.write(done, b"!")
            while True:
                signal.pause()
        assert os.read(ready, 1) == b"!"
        os.kill(child, signal.SIGUSR1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGUSR1
        os.close(ready), os.close(done)


def test_filter_twice_is_one_filter(filtered: list[int]) -> None:
    _core.filter_signal(signal.SIGUSR1, 0)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert filtered == [signal.SIGUSR1]


def test_filter_of_no_signal_is_an_error() -> None:
    for number in (0, -1, 65, signal.SIGKILL):
        with pytest.raises(OSError):
            _core.filter_signal(number, 0)


JOB = """
import os, signal, subprocess, minato
from minato import Dataset

class Numbers(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return index

if __name__ == "__main__":
    heard = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: heard.append(number))
    loader = minato.DataLoader(Numbers(), 2, num_workers=2, persistent_workers=True,
                               multiprocessing_context=METHOD)
    iterator = iter(loader)
    seen = next(iterator).tolist()
    pids = [worker.pid for worker in iterator._workers]
    starter = iterator._pool.zygote.pid
    for number in (signal.SIGTERM, signal.SIGUSR1):
        # the shell is of the group, too
        subprocess.run(["sh", "-c", f"trap '' TERM USR1; kill -{int(number)} 0"], check=True)
        assert heard[-1] == number
        for _ in range(5):
            seen += next(iterator).tolist()
    for batch in iterator:
        seen += batch.tolist()
    assert seen == list(range(40)), seen
    for batch in loader:
        pass
    assert pids == [worker.pid for worker in iterator._workers]
    assert loader.stats()["deaths"] == 0
    assert starter == iterator._pool.zygote.pid
    os.kill(starter, 0)  # it lives
    print("saved")
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_signals_to_job_are_left_to_trainer(method: str, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(f"METHOD = {method!r}\n{JOB}")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120,
                          start_new_session=True)  # fmt: skip
    assert (done.stdout, done.returncode) == ("saved\n", 0), done.stderr
