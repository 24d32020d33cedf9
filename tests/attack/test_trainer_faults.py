"""The trainer ends at each of its labelled fault points; run by tests/test_sanitized.py.

As in test_faults.py, the extension is built with MINATO_FAULTS=1. The trainer is a fork of this
process in its own session, so that processes that it leaves behind can be found.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.forkserver
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import minato

from .datasets import Wordy
from .support import kill, wait_for

#: points of the trainer: in the thread that calls next(), or in the engine's
POINTS = (
    "engine.start", "engine.wait", "engine.taken", "engine.sweep.buried", "engine.sweep.tasks",
    "engine.sweep.done", "engine.stop", "engine.close", "runqueue.publish.word",
    "runqueue.cancelled", "crew.wake", "lease.answer", "watch.looks",
)  # fmt: skip
#: moments of the program around the loader
MOMENTS = ("between epochs", "with a lock", "while workers start")
WAYS = [signal.SIGKILL, signal.SIGSEGV, 0]  # 0: os._exit
METHODS = ["fork", "spawn", "forkserver"]
#: points that a trainer need not pass a second time
ONCE = ("engine.start", "engine.sweep.buried", "engine.sweep.tasks", "engine.sweep.done",
        "engine.stop", "engine.close", "runqueue.cancelled")  # fmt: skip
TIMES = int(os.environ["MINATO_TEST_FAULTS"])


def session_of(pid: int) -> int | None:
    try:
        return None if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE else os.getsid(pid)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None


def family(session: int) -> list[int]:
    """The living processes of a session, including a fork server and a resource tracker."""
    return [pid for pid in psutil.pids() if session_of(pid) == session]


class Locked(Wordy):
    """Samples that need a lock; from the fifth batch on they also wait for a gate that opens once.
    After that, one sample ends the first process that makes it."""

    def __init__(self, context: Any) -> None:
        super().__init__(48, 3000)
        self.lock, self.deaths = context.Lock(), context.Value("i", 0)
        self.gate = context.Event()

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self.lock:
            pass
        if index >= 16:
            self.gate.wait()
        if index == 7 and self.gate.is_set():
            with self.deaths.get_lock():
                self.deaths.value += 1
                first = self.deaths.value == 1
            if first:
                os._exit(3)
        return super().__getitem__(index)


def train(method: str, end: Callable[[str], None]) -> None:
    """Passes all fault points and reports each moment; a worker dies, an epoch is left halfway."""
    context = multiprocessing.get_context(method)
    dataset = Locked(context)
    loader = minato.DataLoader(
        dataset, 4, num_workers=2, persistent_workers=True, memory_limit="3MiB", max_retries=5,
        multiprocessing_context=context,
    )  # fmt: skip
    iterator = iter(loader)
    end("while workers start")
    for _ in range(4):
        next(iterator)
    progress = iterator._engine.progress
    with contextlib.suppress(AssertionError):  # as a rule one sample is queued behind the gate,
        wait_for(lambda: sum(progress()["starts"]) > 16 + 2, seconds=5)
    iterator = iter(loader)  # and is cancelled
    dataset.gate.set()
    with dataset.lock:
        time.sleep(0.02)
        end("with a lock")
    indices = [int(i) for batch in iterator for i in batch["index"]]
    assert indices == list(range(48))
    end("between epochs")
    del iterator, loader


def forked_trainer(method: str, moment: str, how: int) -> int:
    """Its process id. It ends at that moment, usually before its normal end."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # those of the test's own process are in another session
        vars(multiprocessing.forkserver)["_forkserver"].__init__()

        def end(now: str) -> None:
            if now == moment:
                if how == signal.SIGSEGV:  # it ends by the signal, and not in a sanitizer's handler
                    signal.signal(how, signal.SIG_DFL)
                kill(os.getpid(), how) if how else os._exit(7)

        train(method, end)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def ended(pid: int, how: int) -> None:
    """Waits until the process has ended in that way and all processes that it started are gone."""
    try:
        [status] = wait_for(
            lambda: [status for found, status in [os.waitpid(pid, os.WNOHANG)] if found], "its end"
        )
        assert os.waitstatus_to_exitcode(status) == (-how if how else 7)
        wait_for(lambda: not family(pid), "workers and zygote to end")
    finally:
        for left in family(pid):
            kill(left)


def cases(at: int) -> list[tuple[int, int, str]]:
    """(n, how, start method): the way varies from point to point; so does the method in long runs,
    which use several."""
    turns = range(at, at + TIMES)
    methods = METHODS if TIMES > 1 else METHODS[:1]
    return [(n, WAYS[turn % 3], methods[turn % len(methods)]) for n, turn in enumerate(turns, 1)]


@pytest.mark.parametrize("at, label", [*enumerate(POINTS)])
def test_trainer_death_at_fault_point_leaves_nothing(
    at: int, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MINATO_FAULT_SPARES", raising=False)
    for n, how, method in cases(at):
        file = tmp_path / f"dead.{n}"
        n = 1 if label in ONCE else n
        monkeypatch.setenv("MINATO_FAULT", f"{label} {n} {file} {int(how)}")
        pid = forked_trainer(method, "", how)
        ended(pid, how)
        assert file.read_text() == str(pid)


@pytest.mark.parametrize("at, moment", [*enumerate(MOMENTS)])
def test_trainer_death_at_any_moment_leaves_nothing(at: int, moment: str) -> None:
    for _, how, method in cases(at):
        ended(forked_trainer(method, moment, how), how)
