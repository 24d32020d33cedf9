"""Files read through kept mappings: files that shrink, change, are too many or too large."""
from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from attack.support import expect_returned, held

from minato import ops

from .conftest import ROOT, make_pair

SHAPE = (1, 8, 40, 44)  # of several pages


def save(path, seed: int = 0, shape=SHAPE) -> np.ndarray:
    image = make_pair(seed, shape[1:])[0]
    np.save(path, image)
    return image


def maps(folder) -> int:
    """Mappings of files below the folder that this process has."""
    with open("/proc/self/maps") as lines:
        return sum(str(folder) in line for line in lines)


@pytest.fixture
def path(tmp_path):
    """A volume's file, where such files are mapped."""
    save(tmp_path / "a.npy")
    pipeline = ops.Pipeline([ops.ReadNpy()])
    pipeline(tmp_path / "a.npy")
    if pipeline.stats()["files_mapped"] == 0:
        pytest.skip("this file system's files are not mapped")
    return tmp_path / "a.npy"


def read_and(path, act, pipeline=None, key: int = 0) -> np.ndarray:
    """Reads a file; `act` runs when it is open and its voxels are not read yet."""
    made = []

    def allocate(which: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        act()
        made.append(np.zeros(shape, dtype))
        return made[-1]

    pipeline = pipeline or ops.Pipeline([ops.ReadNpy()])
    return pipeline._get().apply(str(path), None, key, 0, allocate)[0]


def check_shorter(path, pipeline=None) -> None:
    """A file that loses its end during a read is an error. Restored, it is read again, and
    its zeros are not cached, although its time and size are the same."""
    content, times = path.read_bytes(), (10**18, 10**18)
    pipeline = pipeline or ops.Pipeline([ops.ReadNpy()])
    for left in (0, 100, 4096, len(content) // 2, len(content) - 1):
        with pytest.raises(OSError, match="a.npy: became shorter while it was read") as caught:
            read_and(path, lambda n=left: os.truncate(path, n), pipeline)
        assert caught.value.errno == errno.EIO
        path.write_bytes(content)
        os.utime(path, ns=times)
        np.testing.assert_array_equal(pipeline(path)[0], np.load(path))


def test_file_truncated_during_read_raises(path):
    check_shorter(path)
    check_shorter(path, ops.Pipeline([ops.ReadNpy(), ops.Cast(), ops.RandFlip(0)]))


def test_file_truncated_with_blocked_signals_raises(path):
    """As in native workers; the signals stay blocked afterwards."""
    seen = []

    def work() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        check_shorter(path)
        seen.append(signal.SIGBUS in signal.pthread_sigmask(signal.SIG_BLOCK, []))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]


def test_a_label_that_becomes_shorter_before_its_scan(tmp_path, path):
    label = np.ones(SHAPE, np.uint8)
    np.save(tmp_path / "y.npy", label)
    crop = ops.Pipeline([ops.ReadNpy(), ops.RandBalancedCrop(4, 1.0, keep_boxes=False)])
    crop(path, tmp_path / "y.npy", key=0)
    os.truncate(tmp_path / "y.npy", 4096)  # seen when it is opened
    with pytest.raises(ValueError, match="y.npy: truncated"):
        crop(path, tmp_path / "y.npy", key=0)


@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_file_deleted_during_read_is_read_completely(tmp_path, path, how):
    want = np.load(path)
    new = save(tmp_path / "new.npy", 1)

    def act() -> None:
        os.replace(tmp_path / "new.npy", path) if how == "replaced" else path.unlink()

    pipeline = ops.Pipeline([ops.ReadNpy()])
    pipeline(path)
    np.testing.assert_array_equal(read_and(path, act, pipeline), want)
    if how == "replaced":
        np.testing.assert_array_equal(pipeline(path)[0], new)
        assert pipeline.stats()["files_mapped"] == 2 and maps(path) == 1
    else:
        with pytest.raises(FileNotFoundError, match="a.npy"):
            pipeline(path)
        assert maps(path) == 0


def test_mapped_once_and_unmapped_at_the_end(path):
    pipeline = ops.Pipeline([ops.ReadNpy(), ops.RandCrop(4)])
    before = held()
    for key in range(20):
        pipeline(path, key=key)
    stats = pipeline.stats()
    assert stats["files_mapped"] == 1 and maps(path) == 1
    assert stats["bytes_read"] == 20 * 4**3 * 4
    # of a page each four rows are read, and no page is counted twice within a plane
    assert stats["bytes_read"] < stats["bytes_touched"] <= 20 * 4 * 2 * 4096
    expect_returned(before)
    del pipeline
    gc.collect()
    assert maps(path) == 0


def test_many_files(tmp_path, path):
    """More than stay mapped: the others are read; and no descriptor stays open."""
    pipeline = ops.Pipeline([ops.ReadNpy()])
    image = np.zeros((1, 2, 2, 2), np.float32)
    before = held()
    for number in range(1100):
        image[...] = number
        np.save(tmp_path / f"{number}.npy", image)
        assert (pipeline(tmp_path / f"{number}.npy")[0] == number).all()
    assert 900 < maps(tmp_path) <= 1024
    expect_returned(before)
    mapped = pipeline.stats()["files_mapped"]
    assert mapped < 1050
    for number in range(1100):
        assert (pipeline(tmp_path / f"{number}.npy")[0] == number).all()
    # most are still there; a few of the others take a place
    assert pipeline.stats()["files_mapped"] - mapped < 40


def run(script: str, *args) -> subprocess.CompletedProcess[str]:
    head = "import faulthandler, mmap, os, resource, signal, sys\nimport numpy as np\n" \
           "from minato import ops\nfrom ops.test_mapped import *\n"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.run([sys.executable, "-c", head + script, *map(str, args)], text=True,
                          capture_output=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": path})


UNMAPPED = """
from pathlib import Path
path = Path(sys.argv[1])
big = path.with_name("big.npy")
header = np.lib.format.header_data_from_array_1_0(np.zeros(1, np.float32))
with open(big, "wb") as file:
    np.lib.format.write_array_header_1_0(file, {**header, "shape": (1, 2048, 1024, 1024)})
    os.truncate(big, file.tell() + (8 << 30))
pipeline = ops.Pipeline([ops.ReadNpy(), ops.RandCrop(5), ops.RandFlip(0.5)])
want = [pipeline(path, key=key)[0] for key in range(30)]
assert not pipeline(big, key=1)[0].any() and pipeline.stats()["files_mapped"] == 2
del pipeline
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
pipeline = ops.Pipeline([ops.ReadNpy(), ops.RandCrop(5), ops.RandFlip(0.5)])
assert not pipeline(big, key=1)[0].any() and pipeline.stats()["files_mapped"] == 0
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 6 << 30))
import threading
for key in range(30):
    assert (pipeline(path, key=key)[0] == want[key]).all()
print(pipeline.stats()["files_mapped"])
"""


def test_unmappable_file_is_read(path):
    """Where the address space is limited: a file that does not fit, then none at all."""
    done = run(UNMAPPED, path)
    assert done.returncode == 0, done.stderr
    assert maps(path.parent) == 0


FOREIGN = """
def foreign():
    with open(sys.argv[2], "wb+") as file:
        file.truncate(8192)
        memory = mmap.mmap(file.fileno(), 8192)
        file.truncate(0)
        memory[5000]

def children():
    for act in (foreign, lambda: os.kill(os.getpid(), signal.SIGBUS)):
        pid = os.fork()
        if pid == 0:
            act()
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
HANDLERS = {
    "none": ("", ""),
    "faulthandler before": ("faulthandler.enable()", ""),
    "faulthandler after": ("", "faulthandler.enable()"),
    "faulthandler after, and read again": ("", "faulthandler.enable(); check_shorter(path)"),
    "default after": ("", "signal.signal(signal.SIGBUS, signal.SIG_DFL)"),
    "ignored before": ("signal.signal(signal.SIGBUS, signal.SIG_IGN)", ""),
}


@pytest.mark.parametrize("handlers", HANDLERS)
def test_faults_of_others_end_the_program_as_before(path, tmp_path, handlers):
    before, after = HANDLERS[handlers]
    script = f"{FOREIGN}\nfrom pathlib import Path\npath = Path(sys.argv[1])\n{before}\n" \
             f"check_shorter(path)\n{after}\n"
    if not after:
        script += "check_shorter(path)\n"
    done = run(f"{script}\nchildren()", path, tmp_path / "foreign")
    fault, sent = map(int, done.stdout.split())
    assert fault == -signal.SIGBUS, done.stderr
    assert sent == (7 if handlers == "ignored before" else -signal.SIGBUS), done.stderr
    dumps = done.stderr.count("Fatal Python error: Bus error")
    assert dumps == 2 * handlers.startswith("faulthandler")


def test_handlers_of_others_are_called(path):
    done = run("from pathlib import Path\npath = Path(sys.argv[1])\nseen = []\n"
               "signal.signal(signal.SIGBUS, lambda *_: seen.append(1))\n"
               "for n in (1, 2, 3):\n"
               "    check_shorter(path)\n"
               "    signal.raise_signal(signal.SIGBUS)\n"
               "    assert len(seen) == n, seen\n", path)
    assert done.returncode == 0, done.stderr


def test_a_fork_inherits_all_of_it(path):
    pipeline = ops.Pipeline([ops.ReadNpy()])
    want = pipeline(path)[0]
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert (pipeline(path)[0] == want).all()
            assert pipeline.stats()["files_mapped"] == 1  # the parent's
            check_shorter(path, pipeline)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    np.testing.assert_array_equal(pipeline(path)[0], want)


def test_threads_that_read_one_file_while_it_shrinks(path):
    """Each has its own mapping: none sees another's zeros without an error."""
    want = np.load(path)
    content = path.read_bytes()
    pipeline = ops.Pipeline([ops.ReadNpy()])
    wrong: list[object] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                got = pipeline(path)[0]
            except (OSError, ValueError) as error:
                if "a.npy: " not in str(error):
                    wrong.append(error)
                continue
            if not np.array_equal(got, want):
                wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(100):
        # from the end, so that a file of full size never has other bytes in it
        os.truncate(path, len(content) * (turn % 4) // 4)
        os.replace(_copy(path, content), path)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def _copy(path, content: bytes):
    new = path.with_name("copy")
    new.write_bytes(content)
    return new


def forget(path) -> None:
    """Drops a file from the page cache, if that is possible."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_file_outside_page_cache_is_read(tmp_path, path):
    """Scans and crops go other ways there."""
    image, label = make_pair(5, (80, 90, 100))
    paths = tmp_path / "x.npy", tmp_path / "y.npy"
    np.save(paths[0], image)
    np.save(paths[1], label)
    pipeline = ops.Pipeline([ops.ReadNpy(), ops.RandBalancedCrop(60, 1.0), ops.RandFlip(0.5)])
    want = [pipeline(*paths, key=key) for key in range(4)]
    for key in range(4):  # mappings of a living pipeline may stay in memory
        pipeline = ops.Pipeline(pipeline.operators)
        gc.collect()
        for each in paths:
            forget(each)
        for got, expected in zip(pipeline(*paths, key=key), want[key]):
            np.testing.assert_array_equal(got, expected)
    forget(paths[1])
    assert ops.label_boxes(paths[1]) == ops.label_boxes(label)
    np.testing.assert_array_equal(ops.ReadNpy()(paths[0])[0], image)
