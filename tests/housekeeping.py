"""A pytest plugin for every test here: it ends in time, and it leaves nothing behind.

*Deadline.* Set-up, test and tear-down may each take ``mark.limit(seconds)``, or LIMIT_S. After
that, all stacks of this process and of its descendants go to the test's captured output, and the
test fails. If Python cannot run (a hang in C), the process ends GRACE_S later and
says where it hangs; pytest-xdist then reports that test as failed, and another process continues
with the others. A run in which no test ends for QUIET_S ends, too.

*One failure, one test.* Between set-up, test and tear-down, pytest makes and sends reports. An
exception there ends the process, and with pytest-xdist the whole run. So a handler of SIGCHLD, such
as torch's, acts only within them, and text that cannot be sent is replaced. What else fails there is
written to stderr, and pytest-xdist continues as after a hang in C.

*Nothing left.* After each test there are no more descendant processes than before it, no more
memfds open or mapped, and nothing new in /dev/shm or in the folder for temporary files, which
belongs to this run; and orphans of its children do not become this process's children. If something is left, the plugin collects garbage and waits for it. The check
costs less than a millisecond.

*Cheap forks.* Most of a fork's cost depends on the number of pages of the process, and nearly
every test forks. Between tests, free memory goes back to the system, and now and then the rest is
moved to huge pages.

*Slow tests.* With ``--without-slow``, as in `make test`, the run leaves out the tests that slow.py
lists; with ``--only-slow`` it runs only them. Without either option it runs all.

*No unlisted skips.* With CI set in the environment, the run fails on a skip whose reason is not
in skips.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from multiprocessing import util
from pathlib import Path
from typing import Any, Callable, Iterator

import psutil
import pytest
import skips
import slow

#: With several processes, each of which takes files one by one, the longest must not be last.
LONGEST = (
    "test_resume", "test_processes", "test_kills", "test_start_methods", "test_c_primitives",
    "test_programs", "test_sanitized", "test_unet3d_train", "test_locality",
    "test_native", "test_trace", "test_balance", "test_top", "test_errors", "test_prefetching",
    "test_collate", "test_on_error", "test_types", "test_docs", "test_examples",
    "test_sampler_indices", "test_seeding", "test_same_data", "test_directory", "test_packaging",
    "test_worker_numbers", "test_ranks", "test_unet3d_resume", "test_python_threads",
    "test_benchmarks", "test_contexts", "test_differential", "test_leaks", "test_limits",
)  # fmt: skip
LIMIT_S = 240 + 4 * float(os.environ.get("MINATO_STRESS_SECONDS") or 0)
GRACE_S = 30.0
#: how long a run of several processes may go without the result of any test
QUIET_S = 3 * LIMIT_S + 1200
#: how long leftovers of a test may take to disappear
PATIENCE_S = 60.0
#: asks a process for its stacks; processes forked by a test inherit that
STACKS = signal.SIGUSR2
#: Under it no thread may start or end while a process forks: tests/test_sanitized.py explains it.
#: So Python has no thread that watches for a hang in C, and forks wait for other threads, such as
#: those by which torch's loader sends indices.
ADDRESS_SANITIZER = "libasan" in os.environ.get("LD_PRELOAD", "")
SET_CHILD_SUBREAPER, GET_CHILD_SUBREAPER = 36, 37  # of prctl(2)
ADOPTION = "this process as the parent of orphans"

_libc = ctypes.CDLL(None)


class DeadlineExceeded(BaseException):
    """A test exceeded its limit; not an Exception, so that no handler swallows it."""


# ---- deadline ----------------------------------------------------------------------------

_stderr = 2  # later a copy that no test captures


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def write_stacks() -> None:
    """To stderr: the stacks of this process and of descendants that have inherited the handler;
    for others, the kernel's information."""
    faulthandler.dump_traceback(file=2)
    for process in psutil.Process().children(recursive=True):
        status = _status(process.pid)
        caught = int(status.get("SigCgt", "0"), 16) >> (STACKS - 1) & 1
        with contextlib.suppress(psutil.Error, OSError):
            waits = Path(f"/proc/{process.pid}/wchan").read_text()
            line = " ".join(process.cmdline())
            told = f"\nprocess {process.pid}: {line!r}, {status.get('State')}, {waits}\n"
            os.write(2, told.encode())
            if caught:
                process.send_signal(STACKS)
                time.sleep(0.2)


_on_child: Any = signal.SIG_DFL  # what a test has SIGCHLD do, which may raise


@contextlib.contextmanager
def _deadline(item: pytest.Item) -> Iterator[None]:
    global _on_child
    marker = item.get_closest_marker("limit")
    seconds = marker.args[0] if marker else LIMIT_S

    def expire(*_: Any) -> None:
        write_stacks()
        raise DeadlineExceeded(f"no end after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.signal(signal.SIGCHLD, _on_child)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    if not ADDRESS_SANITIZER:
        faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True, file=_stderr)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        _on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL) or signal.SIG_DFL
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Any:
    with _deadline(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    with _deadline(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Any:
    with _deadline(item):
        return (yield)


def _plain(value: Any) -> Any:
    """What pytest-xdist can send: UTF-8, and plain types."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_plain(key): _plain(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Any:
    return _plain((yield))


@pytest.hookimpl(tryfirst=True)
def pytest_internalerror(excrepr: Any) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.write(_stderr, f"{excrepr}\n".encode(errors="replace"))
        os._exit(1)


def _watch_run(config: pytest.Config) -> None:
    """In the process that distributes tests: the longest time until the next result starts."""
    distributes = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if distributes:
        faulthandler.dump_traceback_later(QUIET_S, exit=True, file=_stderr)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if hasattr(report, "node"):  # it comes from another process
        _watch_run(report.node.config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Like ``--dist loadfile``, except after the end of a process. pytest-xdist then also
    distributes the running test and finished files again. No test of theirs ends, which would
    trigger the next file, so the run would wait forever. A file given to a process that just
    ended is an error of pytest-xdist's."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):  # type: ignore[misc]  # it is not installed everywhere
        def _assign_work_unit(self, node: Any) -> None:
            with contextlib.suppress(OSError):  # it has ended: its files come back with remove_node
                super()._assign_work_unit(node)

        def remove_node(self, node: Any) -> str | None:
            files = self.assigned_work.pop(node)
            left = [(tests, test) for tests in files.values() for test in tests if not tests[test]]
            if not left:
                return None
            tests, running = left[0]
            tests[running] = True
            self.workqueue.update((file, t) for file, t in files.items() if not all(t.values()))
            for other in self.assigned_work:
                self._reschedule(other)
            return str(running)

    return ByFile(config, log)


# ---- forks under AddressSanitizer ---------------------------------------------------------


def _others_sleep() -> bool:
    """Whether no other thread of this process runs, and so none starts or ends."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            if int(task.name) != threading.get_native_id() and state != "S":
                return False
    return True


def _before_fork() -> None:
    end = time.monotonic() + PATIENCE_S
    while not _others_sleep() and time.monotonic() < end:
        time.sleep(0.001)


if ADDRESS_SANITIZER:
    os.register_at_fork(before=_before_fork)

# These hold locks around a fork. They are imported first, so that they take them after what follows.
for _name in ("logging", "concurrent.futures.thread"):
    importlib.import_module(_name)
#: before and after of a thread are called next to its forks: minato's hooks come earlier before a
#: fork and later after it, because it is imported later
next_to_fork = threading.local()
os.register_at_fork(
    before=lambda: getattr(next_to_fork, "before", int)(),
    after_in_parent=lambda: getattr(next_to_fork, "after", int)(),
)


# ---- nothing left ------------------------------------------------------------------------


def _children(pid: int) -> list[int] | None:
    """Those of all threads of a process, or None if the kernel does not tell."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError):
        for task in os.listdir(f"/proc/{pid}/task"):
            path = f"/proc/{pid}/task/{task}"
            try:
                found += map(int, Path(f"{path}/children").read_text().split())
            except OSError:  # the thread has ended, or there is no such file
                if os.path.exists(f"{path}/stat"):
                    return None
    return found


def _descendants() -> Iterator[psutil.Process]:
    """As psutil finds them, which looks at all processes of the machine for it."""
    parents = [os.getpid()]
    for parent in parents:
        children = _children(parent)
        if children is None:
            yield from psutil.Process().children(recursive=True)
            return
        parents += children
    for pid in parents[1:]:
        with contextlib.suppress(psutil.Error):
            yield psutil.Process(pid)


def _processes() -> dict[str, int]:
    """Those below this one but servers that fork, which stay as long as it does."""
    found = {}
    for process in _descendants():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline()) or process.status()
            # processes that a server has forked have its command line, too
            server = (("multiprocessing.forkserver" in line or line.endswith("forked.py serve"))
                      and process.ppid() == os.getpid())
            if not server and "multiprocessing.resource_tracker" not in line:
                found[f"process {process.pid}: {line}"] = 1
    return found


def _memfds() -> Counter[str]:
    """How many there are, by name, among open files and mappings."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("/memfd:"):
                found[f"open {target}"] += 1
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        mapped = {line[line.index("/memfd:"):].strip() + " of inode " + line.split()[4]
                  for line in maps if "/memfd:" in line}
    found.update(f"mapped {name}" for name in mapped)
    return found


def _is_others(name: str) -> bool:
    """Whether a living process that this one has not started uses a name in /dev/shm."""
    if name.startswith("sem.mp-"):  # those of the dead are removed by their resource trackers
        return name not in Path("/proc/self/maps").read_text(errors="replace")
    me = psutil.Process()
    family = {me.pid, *(process.pid for process in me.children(recursive=True))}
    made_by = re.match(r"(?:torch_|minato-test-)(\d+)", name)
    if made_by is not None and psutil.pid_exists(int(made_by[1])):
        return int(made_by[1]) not in family
    for pid in set(psutil.pids()) - family:
        with contextlib.suppress(OSError):
            if f"/dev/shm/{name}" in Path(f"/proc/{pid}/maps").read_text(errors="replace"):
                return True
    return False


def _is_a_probe(path: Path) -> bool:
    """Whether this is the file with which Python's tempfile tests a folder at first use: a process
    that is killed in that moment leaves it."""
    try:
        return re.fullmatch("[a-z0-9_]{8}", path.name) is not None and path.stat().st_size <= 4
    except OSError:
        return True  # removed just now


def _adopts_orphans() -> int:
    """Whether orphans become children of this process."""
    adopts = ctypes.c_int()
    _libc.prctl(GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0)
    return adopts.value


def _held(folder: Path) -> Counter[str]:
    """Everything that a test may not leave more of."""
    found = _memfds()
    found.update(_processes())
    found.update({f"/dev/shm/{name}": 1 for name in os.listdir("/dev/shm")})
    found[ADOPTION] = _adopts_orphans()
    # multiprocessing has one folder for the whole life of the process, torch leaves some, and
    # torch_geometric leaves the code that it generated
    kept = ("pymp-", "torchelastic_", "torchinductor_", "torch_geometric.")
    found.update({f"{folder}/{n}": 1 for n in os.listdir(folder)
                  if not n.startswith(kept) and not _is_a_probe(folder / n)})
    return found


def _end(left: Counter[str]) -> None:
    """Ends and removes what was left."""
    _libc.prctl(SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    # torch's SIGCHLD handler would report the killed workers in the midst of pytest;
    # once they are reaped it finds nothing to report.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    processes = []
    for name in left:
        if name.startswith("process "):
            with contextlib.suppress(psutil.Error):
                processes.append(psutil.Process(int(name.split()[1].rstrip(":"))))
                processes[-1].kill()
        elif name.startswith(tempfile.gettempdir()):
            shutil.rmtree(name, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(name)
    psutil.wait_procs(processes, timeout=5)
    signal.signal(signal.SIGCHLD, handler)


#: start of the names of the sessions' folders
FOLDER = "minato-tests-"


def remove_abandoned(parent: Path) -> None:
    """Removes the folders of sessions that were killed: no process holds a lock on those."""
    for folder in parent.glob(FOLDER + "*"):
        with contextlib.suppress(OSError), _locked(folder):
            if folder.stat().st_mtime < time.time() - PATIENCE_S:  # else it may be locked next
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises BlockingIOError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@pytest.fixture(scope="session")
def _temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """This process's own folder for everything that makes temporary files by the usual ways."""
    tmp_path_factory.getbasetemp()  # which is not in it
    remove_abandoned(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=FOLDER))
    patch = pytest.MonkeyPatch()
    patch.setenv("TMPDIR", str(folder))
    patch.setattr(tempfile, "tempdir", str(folder))
    with _locked(folder):
        yield folder
    patch.undo()
    # after multiprocessing has removed its own, which is in it, at a priority of -100
    util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)


def _collect() -> None:
    """Twice: where a finalizer makes garbage reachable, all of it stays until the next collection."""
    gc.collect()
    gc.collect()


#: actions that release things that wait for an occasion; the first once, others repeatedly
settling: list[Callable[[], object]] = [_collect]

_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    item.stash[_failed] = report.failed or item.stash.get(_failed, False)
    return report


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest, _temporary: Path) -> Iterator[None]:
    before = _held(_temporary)
    yield

    def left() -> Counter[str]:
        return Counter({n: c for n, c in (_held(_temporary) - before).items()
                        if not (n.startswith("/dev/shm/") and _is_others(n[9:]))})

    if not left():
        return
    # A failure's traceback holds iterators, hence their workers: nothing to wait for.
    failed = request.node.stash.get(_failed, False)
    end = time.monotonic() + (0 if failed else PATIENCE_S)
    for act in settling:
        act()
    while left() and time.monotonic() < end:
        time.sleep(0.02)
        for act in settling[1:]:
            act()
    still = left()
    _end(still)
    if still and not failed:
        pytest.fail(f"left behind: {sorted(still)}", pytrace=False)


# ---- cheap forks -------------------------------------------------------------------------

_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
MADV_COLLAPSE, HUGE = 25, 2 << 20
#: huge pages that are written to while a child lives fall apart, some in each test
TESTS_A_COLLAPSE = 10

_tests_run = 0


def collapse() -> None:
    """Moves private memory to huge pages if the kernel can do that (Linux 6.1): a fork
    of a process of 600 MiB then takes 6 ms of CPU time, and 30 or more without."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            where, kind, _, _, _, *name = line.split()
            if kind == "rw-p" and name in ([], ["[heap]"]):
                begin, end = (int(address, 16) for address in where.split("-"))
                begin = -(-begin // HUGE) * HUGE
                if begin + HUGE <= end:
                    _libc.madvise(begin, (end - begin) // HUGE * HUGE, MADV_COLLAPSE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Any:
    global _tests_run
    if not ADDRESS_SANITIZER:  # it has its own maps and allocator
        if _tests_run % TESTS_A_COLLAPSE == 0:
            collapse()
        _tests_run += 1
    result = yield
    if not ADDRESS_SANITIZER:
        _libc.malloc_trim(0)
    return result


# ---- the run -----------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-slow", action="store_true", help="leave out what tests/slow.py lists")
    parser.addoption("--only-slow", action="store_true", help="run only what tests/slow.py lists")


def pytest_configure(config: pytest.Config) -> None:
    global _stderr
    config.addinivalue_line("markers", "limit(seconds): how long a test may take")
    _stderr = os.dup(2)
    faulthandler.register(STACKS, file=2, all_threads=True)
    _watch_run(config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    without, only = config.getoption("without_slow"), config.getoption("only_slow")
    if without or only:
        left_out = [item for item in items if slow.is_slow(item.nodeid) != only]
        items[:] = [item for item in items if slow.is_slow(item.nodeid) == only]
        config.hook.pytest_deselected(items=left_out)
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """Freezes imported objects: a garbage collection then takes microseconds instead of
    a tenth of a second each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    faulthandler.cancel_dump_traceback_later()
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not os.environ.get("CI"):
        return
    reasons = {report.longrepr[2].removeprefix("Skipped: ")
               for report in reporter.stats.get("skipped", [])}
    unknown = sorted(reason for reason in reasons if not skips.is_listed(reason))
    session.config.stash[_unlisted] = unknown
    if unknown and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


_unlisted = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for reason in config.stash.get(_unlisted, []):
        terminalreporter.write_line(f"FAILED: a skip that tests/skips.py does not list: {reason}",
                                    red=True)
