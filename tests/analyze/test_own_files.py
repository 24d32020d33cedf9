"""What a study writes does not reach the program's files, with a mount namespace and without."""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import mmap
import multiprocessing
import multiprocessing.util
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import heap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minato import Cache
from minato.analyze import keeper, own_files

from .support import (
    SLEEPS,
    TOKEN,
    command,
    deny_namespaces,
    environment,
    gone,
    in_a_fork,
    program,
    study,
)

pytestmark = pytest.mark.limit(240)


@pytest.fixture(params=[own_files.OVERLAY, own_files.FILTER])
def way(request: pytest.FixtureRequest) -> str:
    """Each of the ways that this system allows."""
    allowed = in_a_fork(own_files.find_way)
    if request.param == own_files.FILTER:
        allowed = in_a_fork(lambda: deny_namespaces() or own_files.find_way())
    if allowed != request.param:
        pytest.skip("this system allows no mount namespace, or no filter of system calls")
    return str(request.param)


def protected(way: str, act: Callable[[], Any], folder: str = "/nowhere") -> tuple[int, str | None]:
    """The exit status of a process that a study forks for an act, and the file for which it was ended."""
    mine, theirs = socket.socketpair()
    to, other = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            own_files.protect(way, folder, theirs)
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    theirs.close()
    guard = own_files.WriteGuard(mine, folder)
    with to, other:
        keeper._wait(to, pid, 60.0, guard)
    if guard.refused is not None:
        os.kill(pid, 9)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    guard.close()
    return status, guard.refused


def contents(folder: Path) -> dict[str, Any]:
    """Of all files: what they hold, and when it was changed."""
    found = {}
    for path in sorted(folder.rglob("*")):
        facts = path.lstat()
        held = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else os.path.islink(path)
        found[str(path)] = (held, facts.st_mode, facts.st_mtime_ns, facts.st_uid)
    return found


def create_table(path: Path) -> None:
    with sqlite3.connect(path) as base:
        base.execute("create table t (x)")


def copy_by_program(path: Path) -> None:
    done = subprocess.run(["cp", path, path.with_name("copied")], check=False)
    assert done.returncode == 0


def write_by_map(path: Path) -> None:
    np.memmap(path, np.uint8, "r+")[:] = 7


def write_through_folder(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    os.close(os.open(path.name, os.O_WRONLY | os.O_APPEND, dir_fd=folder))
    os.unlink(path.name, dir_fd=folder)


def write_through_link(path: Path) -> None:
    (path.parent / "link").write_bytes(b"new")


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path.with_name("server")))


WRITES: dict[str, Callable[[Path], Any]] = {
    "new file": lambda p: p.with_name("new").write_bytes(b"new"),
    "append": lambda p: p.open("ab").write(b"more"),
    "read and write": lambda p: p.open("r+b").write(b"more"),
    "rename": lambda p: p.rename(p.with_name("other")),
    "remove": lambda p: p.unlink(),
    "mkdir": lambda p: p.with_name("folder").mkdir(),
    "rmdir": lambda p: p.with_name("empty").rmdir(),
    "link": lambda p: os.link(p, p.with_name("linked")),
    "symlink": lambda p: p.with_name("symbolic").symlink_to(p),
    "truncate": lambda p: os.truncate(p, 1),
    "chmod": lambda p: p.chmod(0o600),
    "times": lambda p: os.utime(p, (1, 1)),
    "chmod by number": lambda p: os.fchmod(os.open(p, os.O_RDONLY), 0o600),
    "copy": lambda p: shutil.copy2(p, p.with_name("copied")),
    "remove tree": lambda p: shutil.rmtree(p.parent),
    "sqlite": lambda p: create_table(p.with_name("base")),
    "C++": lambda p: torch.save(torch.zeros(9), str(p.with_name("tensor"))),
    "another program": copy_by_program,
    "memory map": write_by_map,
    "folder": write_through_folder,
    "link to a file": write_through_link,
    "socket": bind_socket,
}


@pytest.mark.parametrize("kind", WRITES)
def test_writes_of_a_study_change_no_file(kind: str, way: str, tmp_path: Path) -> None:
    """With an overlay they are made there. Else the first one ends the study, which names the file."""
    data = tmp_path / "data"
    (data / "empty").mkdir(parents=True)
    (data / "file").write_bytes(b"data")
    (data / "link").symlink_to("file")
    before = contents(data)
    status, refused = protected(way, lambda: WRITES[kind](data / "file"))
    assert contents(data) == before
    if way == own_files.OVERLAY:
        assert (status, refused) == (0, None)
    else:
        assert status == -9 and refused is not None and refused.startswith(str(data))


def write_for_oneself() -> None:
    """What a study writes itself, and what samples may: temporary files, shared memory, devices."""
    multiprocessing.util._run_after_forkers()  # an earlier test may have sent tensors: its thread is gone
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "file").write_bytes(b"data")
    context = multiprocessing.get_context("fork")
    lock, value, queue = context.Lock(), context.Value("i", 3), context.Queue()
    tensor = torch.zeros(9).share_memory_()

    def work() -> None:
        with lock:
            value.value += 1
            tensor[0] = 5
        assert queue.get().sum() == 3

    child = context.Process(target=work)
    child.start()
    queue.put(torch.ones(3))
    child.join()
    assert child.exitcode == 0
    assert value.value == 4 and tensor[0] == 5
    with open(os.devnull, "w") as null:
        null.write("lost")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))


def test_temporary_files_and_shared_memory_work(way: str, tmp_path: Path) -> None:
    assert protected(way, write_for_oneself, str(tmp_path)) == (0, None)


def test_caches_of_the_program_in_memory_can_be_used(way: str) -> None:
    """By what a study forks, and by its workers, which leave them when they end."""
    cache = Cache("4MiB")
    double = cache.memoize(key=lambda index: index)(lambda index: torch.full((9,), 2 * index))
    assert double(1)[0] == 2

    def work() -> None:
        assert double(1)[0] == 2 and double(2)[0] == 4

    def act() -> None:
        work()
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        child.join()
        assert child.exitcode == 0

    assert protected(way, act) == (0, None)
    assert double(1)[0] == 2 and double(2)[0] == 4
    stats = cache.stats()
    assert stats["off"] is None and stats["removed"] is None, stats


def test_shared_memory_of_the_program_is_not_written(way: str) -> None:
    """A file there that has a name is the program's, too."""
    path = Path(f"/dev/shm/minato-test-{os.getpid()}")
    path.write_bytes(b"data")
    try:
        protected(way, lambda: path.write_bytes(b"other"))
        assert path.read_bytes() == b"data"
    finally:
        path.unlink()


@pytest.mark.parametrize("copied", [own_files._COPIED, 0])
def test_mapped_memory_of_the_program_is_not_written(
    copied: int, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of files and of shared memory. Forks of a study share the small ones."""
    monkeypatch.setattr(own_files, "_COPIED", copied)
    # that of this process grows with each test that takes from it, up to 4 MiB at a time
    monkeypatch.setattr(heap.BufferWrapper, "_heap", heap.Heap())
    (tmp_path / "file").write_bytes(bytes(8192))
    mapped = np.memmap(tmp_path / "file", np.uint8, "r+")
    tensor, value = torch.zeros(4).share_memory_(), multiprocessing.Value("i", 3)

    def write() -> None:
        pid = os.fork()
        if pid == 0:
            mapped[4097] = 7
            if copied:  # else only a privileged process can map again what has no name
                tensor[1] = value.get_obj().value = 7
            os._exit(int(mapped[4097] != 7))
        assert os.waitpid(pid, 0)[1] == 0
        assert (int(mapped[4097]), int(tensor[1]), value.get_obj().value) == ((7, 7, 7) if copied else (0, 0, 3))

    assert protected(way, write, str(tmp_path / "none")) == (0, None)
    assert mapped[4097] == tensor[1] == 0 and value.value == 3
    assert (tmp_path / "file").read_bytes() == bytes(8192)


def test_large_memory_without_a_file_is_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its pages cannot be mapped again, a write ends the process that measures."""
    shared = mmap.mmap(-1, 4096)
    shared[0] = 3
    begin = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        own_files._map_privately(begin, 4096, 0, -1, "/dev/zero (deleted)")
        if shared[0] == 3:
            shared[0] = 4
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -11
    assert shared[0] == 3


# ---- programs ------------------------------------------------------------------------------

@pytest.mark.parametrize("namespaces", [True, False])
def test_a_killed_study_leaves_no_temporary_folder(namespaces: bool, tmp_path: Path) -> None:
    """torch's workers share tensors by sockets in a folder there, and the study alone has workers."""
    temporary = Path(tempfile.mkdtemp(prefix="m-"))  # the path of a socket must be short
    env = {**environment(), "TMPDIR": str(temporary)}
    text = SLEEPS.replace("torch.tensor(index)", "torch.zeros(999)") + "main(epochs=9)"
    running = subprocess.Popen(
        command("--anyway", "--budget", "12s", "--", sys.executable, program(tmp_path, text)), cwd=tmp_path, env=env,
        preexec_fn=None if namespaces else deny_namespaces,
    )  # fmt: skip
    try:
        while f"{temporary}/" not in Path("/proc/net/unix").read_text():
            assert running.poll() is None
            time.sleep(0.01)
        running.kill()
        running.wait()
        assert gone(env[TOKEN]) == [] and list(temporary.iterdir()) == []
    finally:
        shutil.rmtree(temporary)


#: what samples write, into the folder of the program
PREPARES = {
    "a cache": """
        path = f"cache/{index}.npy"
        if not os.path.exists(path):
            numpy.save(path, numpy.random.rand(8))
        numpy.load(path)
""",
    "a list": """
        with open("list.txt", "a") as file:
            file.write(f"{index}\\n")
""",
    "a database": """
        with sqlite3.connect("base.db") as base:
            base.execute("create table if not exists t (x)")
            base.execute("insert into t values (?)", (index,))
        base.close()
""",
    "a memory map": """
        self.map[index] += 1
""",
}


@pytest.mark.parametrize("kind, namespaces", [
    *((kind, True) for kind in PREPARES), ("a list", False), ("a memory map", False),
])  # fmt: skip
def test_a_program_that_writes_files_keeps_them(kind: str, namespaces: bool, tmp_path: Path) -> None:
    sample = PREPARES[kind] + "        time.sleep(0.002)\n"
    text = "import numpy, os, sqlite3\n" + SLEEPS.replace("        time.sleep(0.002)\n", sample)
    made = """    def __init__(self):
        os.makedirs("cache", exist_ok=True)
        self.map = numpy.memmap("map", "u1", "w+", shape=24)
"""
    text = text.replace("    def __len__", made + "    def __len__") + """
main(epochs=3)
import hashlib
from pathlib import Path
held = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path.cwd().rglob("*")) if path.is_file()]
print("held", held)
"""
    done, found = study(tmp_path, text, before=None if namespaces else deny_namespaces)
    assert done.returncode == 0, done.stderr
    paths = [path for path in sorted(tmp_path.rglob("*")) if path.is_file() and path.parent.name != "report"]
    assert f"held {[hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]}" in done.stdout
    if namespaces:
        assert found["files"] == "overlay" and found["work"]["costs"] and found["rates"]
        assert "overlay of its own" in found["notes"][-1]
        doubt = f"samples read files that the program wrote while it was watched, such as {tmp_path}/cache/"
        assert any(note.startswith(doubt) for note in found["notes"]) == (kind == "a cache"), done.stdout
    elif kind == "a memory map":
        assert found["files"] == "filter" and found["work"]["costs"] and "wrote no file" in found["notes"][-1]
    else:
        assert found["unstudied"] == f"one was about to write {tmp_path / 'list.txt'}"
        assert found["limit"]["kind"] == "unknown" and found["unstudied"] in done.stdout and not found["rates"]
