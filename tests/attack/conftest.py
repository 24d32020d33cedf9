"""Deadlines for every attack, and no process, thread or shared memory left behind."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import resource
import signal
from typing import Any, Iterator

import pytest

from .support import SECONDS, SEED, descendants, kill, wait_for


class DeadlineExceeded(BaseException):
    """Not an Exception, so that nothing swallows it."""


def pytest_configure(config: pytest.Config) -> None:
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    if multiprocessing.get_start_method(allow_none=True) != "fork":
        multiprocessing.set_start_method("fork", force=True)


def pytest_report_header() -> str:
    return f"attack: MINATO_TEST_SEED={SEED} MINATO_STRESS_SECONDS={SECONDS:g}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "attack":
            item.add_marker(pytest.mark.filterwarnings("ignore:This DataLoader will create"))
            item.add_marker(
                pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
            )


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of random parts; printed when a test fails."""
    print(f"MINATO_TEST_SEED={SEED}")
    return SEED


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    limit = int(120 + 4 * SECONDS)

    def late(*_: Any) -> None:
        raise DeadlineExceeded(f"the test ran for more than {limit} s")

    before = {p.pid for p in descendants()}
    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit)
    faulthandler.dump_traceback_later(limit + 30, exit=True)
    try:
        yield
        gc.collect()
        wait_for(lambda: not left(before), f"processes left: {left(before)}", 10)
        assert not [n for n in os.listdir("/dev/shm") if n.startswith(f"torch_{os.getpid()}_")]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
        faulthandler.cancel_dump_traceback_later()
        for process in left(before):
            kill(process.pid)


def left(before: set[int]) -> list[Any]:
    """Processes that were not there before; a start method's servers may stay."""
    servers = ("resource_tracker", "forkserver")
    found = []
    for process in descendants():
        if process.pid not in before:
            try:
                line = " ".join(process.cmdline())
            except Exception:
                continue
            if not any(name in line for name in servers):
                found.append(process)
    return found
