"""Loaders as fixtures, a deadline for every test, and no process left behind."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import resource
import signal
import sys
from typing import Any, Iterator

import psutil
import pytest
from torch.utils.data import _utils

from .support import Kind, descendants, selected, wait_for

SOFT_LIMIT_S = 60
HARD_LIMIT_S = 90

_kinds = [Kind(name) for name in selected()]
_own_kinds = [kind for kind in _kinds if not kind.is_torch]


class DeadlineExceeded(BaseException):
    """A test took longer than it may; not an Exception, so nothing swallows it."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "limit(seconds): soft deadline of a test")
    config.addinivalue_line("markers", "unraisable: errors in __del__ are allowed")
    config.addinivalue_line("markers", "servers: a start method's server may stay")
    # A worker killed on purpose must not write a core file.
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    # The tests share locks and functions with their workers by fork, whatever this
    # Python's default is; other start methods are asked for by name.
    if multiprocessing.get_start_method(allow_none=True) != "fork":
        multiprocessing.set_start_method("fork", force=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name != "contract":
            continue
        rules = ["ignore:This DataLoader will create"]
        if not item.get_closest_marker("unraisable"):
            rules.append("error::pytest.PytestUnraisableExceptionWarning")
            rules.append("error::pytest.PytestUnhandledThreadExceptionWarning")
        for rule in rules:
            item.add_marker(pytest.mark.filterwarnings(rule), append=False)


@pytest.fixture(autouse=True, scope="session")
def quick_joins() -> Iterator[None]:
    """Let torch wait 1 s instead of 5 s for each worker of a collected iterator."""
    before = _utils.MP_STATUS_CHECK_INTERVAL
    _utils.MP_STATUS_CHECK_INTERVAL = 1.0
    yield
    _utils.MP_STATUS_CHECK_INTERVAL = before


_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.when == "call":
        item.stash[_failed] = report.failed
    return report


@pytest.fixture(params=_kinds, ids=lambda kind: kind.name)
def loader(request: pytest.FixtureRequest) -> Kind:
    """Each selected loader in turn."""
    return request.param


@pytest.fixture(params=_own_kinds, ids=lambda kind: kind.name)
def own(request: pytest.FixtureRequest) -> Kind:
    """Each selected loader of minato's own."""
    return request.param


def _end(pids: set[int]) -> None:
    # torch's SIGCHLD handler would report the killed workers in the midst of pytest;
    # once they are reaped it finds nothing to report.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    processes = []
    for pid in pids:
        try:
            processes.append(psutil.Process(pid))
            processes[-1].kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=5)
    signal.signal(signal.SIGCHLD, handler)


@pytest.fixture(autouse=True)
def deadline(request: pytest.FixtureRequest) -> Iterator[None]:
    """Raise in a test that hangs; end the whole run if even that does not help."""
    marker = request.node.get_closest_marker("limit")
    seconds = marker.args[0] if marker else SOFT_LIMIT_S

    def expire(*_: Any) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__)
        raise DeadlineExceeded(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    hard = seconds + HARD_LIMIT_S - SOFT_LIMIT_S
    faulthandler.dump_traceback_later(hard, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def no_process_left(
    request: pytest.FixtureRequest, deadline: None
) -> Iterator[None]:
    """Every process started by a test ends with it (start method servers excepted)."""
    before = set(descendants())
    yield
    if request.node.get_closest_marker("servers"):
        return

    def left() -> set[int]:
        return {
            pid
            for pid, command in descendants().items()
            if pid not in before and "resource_tracker" not in command
        }

    if not left():
        return
    gc.collect()
    if request.node.stash.get(_failed, False):
        # The failure's traceback holds the iterator, hence its workers.
        _end(left())
    elif not wait_for(lambda: not left(), 8.0):
        names = {pid: descendants().get(pid) for pid in left()}
        _end(left())
        pytest.fail(f"processes left behind: {names}")
