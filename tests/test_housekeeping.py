"""The promises of tests/housekeeping.py, shown on tests that break them, in a separate run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import housekeeping
import pytest
import skips

TESTS = Path(__file__).resolve().parent


def run(folder: Path, text: str, *options: str, **environment: str) -> str:
    """The output of a run of these tests."""
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "housekeeping", *options,
               f"--basetemp={folder / 'base'}", "test_it.py"]
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TMPDIR": str(folder),
           "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]), **environment}
    kept = {k: v for k, v in os.environ.items() if k not in ("CI", "MINATO_STRESS_SECONDS")
            and not k.startswith("PYTEST_")}
    done = subprocess.run(command, env={**kept, **env}, cwd=folder, capture_output=True,
                          text=True, timeout=100, check=False)  # fmt: skip
    return f"{done.stdout}\n{done.stderr}\nexit status {done.returncode}\n"


def anonymous_mib() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"^Anonymous:\s+(\d+) kB", rollup, re.M)[1]) >> 10  # type: ignore[index]


FREES = """
from test_housekeeping import anonymous_mib

kept = []

def test_memory_below_something_is_freed():
    memory = [bytes(4000) for _ in range(25_000)]
    kept.append(bytes(4000))
    assert anonymous_mib() > 90

def test_that_is_gone():
    assert anonymous_mib() < 60
"""


def test_free_memory_goes_back_between_tests(tmp_path: Path) -> None:
    text = run(tmp_path, FREES)
    assert "2 passed" in text, text


def test_collapsed_memory_keeps_its_content() -> None:
    memory = bytearray(range(256)) * (64 << 10)
    housekeeping.collapse()
    assert memory == bytearray(range(256)) * (64 << 10)


def test_folders_of_runs_that_were_killed_are_removed(tmp_path: Path) -> None:
    living, killed, begins, others = (tmp_path / name for name in (
        "minato-tests-1", "minato-tests-2", "minato-tests-3", "minato-4"))  # fmt: skip
    for folder in (living, killed, begins, others):
        folder.mkdir()
        (folder / "file").touch()
        if folder is not begins:
            os.utime(folder, (0, 0))
    with housekeeping._locked(living):
        housekeeping.remove_abandoned(tmp_path)
    assert {folder.name for folder in tmp_path.iterdir()} == {living.name, begins.name, others.name}


LEAVES = """
import ctypes, mmap, os, subprocess, tempfile, threading
import housekeeping

housekeeping.PATIENCE_S = 0.1
kept = []

def test_process():
    kept.append(subprocess.Popen(["sleep", "1000"]))

def test_process_that_ends_soon():
    housekeeping.PATIENCE_S = 10.0
    kept.append(subprocess.Popen(["sleep", "0.1"]))
    threading.Timer(0.2, kept[-1].wait).start()

def test_open_memfd():
    housekeeping.PATIENCE_S = 0.1
    kept.append(os.memfd_create("left"))

def test_mapped_memfd():
    fd = os.memfd_create("mapped")
    os.ftruncate(fd, 4096)
    c = ctypes.CDLL(None)
    c.mmap.restype = ctypes.c_void_p
    assert c.mmap(None, ctypes.c_size_t(4096), 3, mmap.MAP_SHARED, fd, ctypes.c_long(0))
    os.close(fd)

def test_shared_memory():
    open(f"/dev/shm/left_{os.getpid()}", "w").close()

def test_removes_shared_memory():
    os.unlink(f"/dev/shm/left_{os.getpid()}")

def test_temporary_file():
    kept.append(tempfile.mkstemp()[1])

def test_temporary_folder():
    tempfile.mkdtemp()

def test_nothing(tmp_path):
    assert not os.path.exists(kept[-1])
    (tmp_path / "file").touch()
    ring = []
    ring += [ring, tempfile.TemporaryFile()]
"""


def test_leftovers_fail_the_test(tmp_path: Path) -> None:
    text = run(tmp_path, LEAVES)
    failed = set(re.findall(r"^ERROR .*::test_(\w+)", text, re.M))
    assert failed == {"process", "open_memfd", "mapped_memfd", "shared_memory",
                      "temporary_file", "temporary_folder"}, text  # fmt: skip
    for words in (r"process \d+: sleep 1000", "open /memfd:left", "mapped /memfd:mapped",
                  "/dev/shm/left_"):
        assert re.search(f"left behind: .*{words}", text), text


HANGS = """
import multiprocessing, time
import pytest

def wait_here():
    time.sleep(1000)

@pytest.fixture
def slow():
    yield
    time.sleep(1000)

@pytest.mark.limit(1)
def test_hang():
    child = multiprocessing.get_context("fork").Process(target=wait_here, daemon=True)
    child.start()
    try:
        while True:
            try:
                time.sleep(1000)
            except Exception:
                pass
    finally:
        child.kill()
        child.join()

@pytest.mark.limit(1)
def test_hang_in_teardown(slow):
    pass

def test_after_it():
    pass
"""


def test_a_hang_fails_its_test_with_all_stacks(tmp_path: Path) -> None:
    text = run(tmp_path, HANGS)
    assert "1 failed, 2 passed, 1 error" in text, text
    assert text.count("DeadlineExceeded: no end after 1 s") >= 2
    assert re.search(r"process \d+: .*\n(?:.*\n){1,5}.* in wait_here", text), text
    assert re.search(r"Current thread(?:.*\n){1,9}.* in test_hang\n", text), text


IN_C = """
import ctypes, pytest, housekeeping
housekeeping.GRACE_S = 1.0

@pytest.mark.limit(0.5)
def test_hang():
    mutex, c = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    c.pthread_mutex_lock(mutex)
    c.pthread_mutex_lock(mutex)  # no signal ends this

def test_after_it():
    pass
"""


def test_hang_in_c_aborts_with_location(tmp_path: Path) -> None:
    text = run(tmp_path, IN_C)
    assert "exit status 1\n" in text and "Timeout (0:00:01.5" in text and "in test_hang" in text


def test_xdist_runs_other_tests_after_hang(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    text = run(tmp_path, IN_C, "-p", "xdist", "-n", "1")
    assert "1 failed, 1 passed" in text and "crashed while running 'test_it.py::test_hang'" in text


CRASHES = """
import os

def test_it():
    os._exit(1)

def test_after_it():
    pass
"""


#: a file is distributed when its process has ended, before that is noticed
SLOW = """
import os, psutil
from xdist.workermanage import WorkerController

WorkerController.shutting_down = property(lambda node: node._shutdown_sent)

def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" not in os.environ and report.nodeid.startswith("test_a"):
        psutil.wait_procs(psutil.Process().children(), timeout=60)
"""


@pytest.mark.parametrize("plugin", ["", SLOW], ids=["fast", "slow"])
def test_xdist_runs_all_files_after_crash(tmp_path: Path, plugin: str) -> None:
    """A file that had finished before it must not be waited for."""
    pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(plugin)
    for name in ("a", "c", "d"):
        (tmp_path / f"test_{name}.py").write_text("def test_it(): pass\ndef test_two(): pass\n")
    (tmp_path / "test_b.py").write_text(CRASHES)
    text = run(tmp_path, "", "-p", "xdist", "-n", "1", "--dist", "loadfile", ".")
    assert "1 failed, 7 passed" in text and "crashed while running 'test_b.py::test_it'" in text


BETWEEN = """
import os, signal
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" in os.environ and report.when == "call":
        os.kill(os.getpid(), signal.SIGCHLD)
        if "bad_report" in report.nodeid:
            raise ValueError("no report is sent")
"""
ODD = """
import signal
import pytest

def raises(*_):
    raise RuntimeError("a worker died")

def test_handler():
    signal.signal(signal.SIGCHLD, raises)

def test_handler_is_set_again():
    assert signal.getsignal(signal.SIGCHLD) is raises

def test_text():
    pytest.fail("no \\udcff UTF-8")

def test_bad_report():
    pass

def test_last():
    pass
"""


def test_errors_between_tests_cost_one_test(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(BETWEEN)
    text = run(tmp_path, ODD, "-p", "xdist", "-n", "1", "--dist", "loadfile")
    assert "2 failed, 3 passed" in text and "Failed: no ? UTF-8" in text, text
    assert "ValueError: no report is sent" in text, text
    assert "crashed while running 'test_it.py::test_bad_report'" in text, text


WAITS = """
import time, housekeeping

def pytest_configure(config):
    if hasattr(config, "workerinput"):
        time.sleep(1000)
"""


def test_run_without_progress_is_ended(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(WAITS)
    (tmp_path / "quiet.py").write_text("import housekeeping\nhousekeeping.QUIET_S = 3.0\n")
    text = run(tmp_path, "", "-p", "quiet", "-p", "xdist", "-n", "1")
    assert "exit status 1\n" in text and "Timeout (0:00:03" in text, text


SKIPS = """
import pytest

def test_one():
    pytest.skip({!r})
"""


@pytest.mark.parametrize("reason, ci, status", [
    ("for no reason", "true", 1), ("for no reason", "", 0), ("no accelerator", "true", 0),
])
def test_unlisted_skip_fails_in_ci(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, ci: str, status: int
) -> None:
    monkeypatch.delenv("CI", raising=False)
    text = run(tmp_path, SKIPS.format(reason), **({"CI": ci} if ci else {}))
    assert f"exit status {status}\n" in text, text
    assert ("skips.py does not list: for no reason" in text) is bool(status)


def test_grounds_are_sentences() -> None:
    assert all(ground.endswith(".") and len(ground) > 20 for ground in skips.LISTED.values())
    assert not skips.is_listed("for no reason")
