"""A cache in a directory: the next run is warm, and no fault of the disk costs a byte or a job."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import time
import uuid
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minato
from minato.__main__ import main
from minato.cache.cache import NUMBERS

from .support import OWN_MOUNTS, Calls, Memory, ran, start
from .test_processes import PROGRAM, SAMPLES, begin, ended, made, ready, told

pytestmark = pytest.mark.limit(300)


class Place:
    """A directory and one cache file in it, opened anew as often as a test likes."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "kept"
        self.calls = Calls(tmp_path / "calls")
        self.name = uuid.uuid4().hex

    @property
    def file(self) -> Path:
        return self.path / f"minato-{os.getuid()}" / f"cache-{self.name}"

    def values(self, count: int, version: Any = 1, size: str = "4MiB") -> list[Any]:
        """What a run gets, which ends at once."""
        cache = minato.Cache(size, directory=self.path)
        cache._name, calls = self.name, self.calls

        @cache.memoize(key=lambda n: n, version=version)
        def make(n: int) -> Any:
            calls.note(str(n))
            return content(n)

        found = [make(n) for n in range(count)]
        self.stats = cache.stats()
        del make, cache
        gc.collect()
        return found

    def count(self) -> int:
        return len(self.calls.all())


def content(n: int) -> Any:
    return np.random.default_rng(n).integers(0, 256, 20_000 + n, np.uint8)


def right(found: list[Any]) -> bool:
    return all(np.array_equal(value, content(n)) for n, value in enumerate(found))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# ---- runs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["torch", "minato"])
def test_the_next_run_makes_nothing(kind: str, tmp_path: Path, memory: Memory) -> None:
    more = {"TEST_DIRECTORY": str(tmp_path / "kept"), **memory.environment}
    for run in range(2):
        job = start(PROGRAM, str(tmp_path), kind, "fork", "1", **more)
        ready(job)
        begin(job)
        stats = told(job)
        assert stats["off"] is None and stats["damaged"] == 0
        assert stats.keys() - {"seen"} == {*NUMBERS, "off", "removed", "unfollowed"}
        assert (stats["hits"], stats["misses"]) == (run * SAMPLES, SAMPLES)
        ended(job)
        assert made(tmp_path) == list(range(SAMPLES))
    assert memory.files() == []


def test_values_stay_until_the_version_changes(place: Place) -> None:
    for _ in range(2):
        assert right(place.values(10))
    assert place.count() == 10
    assert right(place.values(10, version=2)) and place.count() == 20
    assert right(place.values(10)) and place.count() == 20  # the old ones are still there


EDITED = """
import sys
import minato
cache = minato.Cache("1MiB", directory=sys.argv[1])
def helper(n):
    return n * {factor}
@cache.memoize(version=1)
def make(n):
    return helper(n)
print([make(n) for n in range(5)], cache.stats()["stored"])
"""


def test_an_edited_helper_function_is_a_miss(tmp_path: Path) -> None:
    for factor, stored in ((2, 5), (2, 5), (3, 10), (2, 10)):
        done = ran(tmp_path, EDITED.format(factor=factor), str(tmp_path / "kept"))
        assert done.stdout == f"{[n * factor for n in range(5)]} {stored}\n", done.stderr


KILLED = """
import sys
import numpy as np
import minato
cache = minato.Cache("64MiB", directory=sys.argv[1])
@cache.memoize(version=1)
def make(n):
    return np.full(50_000 + n, n % 251, np.uint8)
print("ready", flush=True)
for n in range(10**6 if len(sys.argv) > 2 else 1000):
    value = make(n)
    assert len(value) == 50_000 + n and (value == n % 251).all(), n
print(cache.stats()["damaged"], cache.stats()["hits"] > 0, cache.stats()["off"])
"""


def test_killed_writer_leaves_no_wrong_byte(tmp_path: Path) -> None:
    script, kept = tmp_path / "program.py", str(tmp_path / "kept")
    script.write_text(KILLED)
    for round_ in range(3):
        job = start(script, kept, "for ever")
        ready(job)
        time.sleep(0.02 + 0.05 * round_)  # any time will do
        job.send_signal(signal.SIGKILL)
        job.communicate()
    done = ran(tmp_path, KILLED, kept)
    assert done.stdout == "ready\n0 True None\n", done.stderr


def test_replaced_file_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minato.cache.files.FRESH_NS", -1)
    data, calls, name = tmp_path / "data", Calls(tmp_path / "calls"), uuid.uuid4().hex
    for text in ("first", "first", "other"):
        if not data.exists() or data.read_text() != text:
            fresh = tmp_path / "new"
            fresh.write_text(text)
            os.replace(fresh, data)
        cache = minato.Cache("1MiB", directory=tmp_path / "kept")
        cache._name = name

        @cache.memoize(key=lambda: 0, files=lambda: data, version=1)
        def read() -> str:
            calls.note()
            return data.read_text()

        assert read() == text
        del read, cache
        gc.collect()
    assert len(calls.all()) == 2


# ---- damage ------------------------------------------------------------------------------------


def test_bytes_flipped_between_runs_are_made_again(place: Place) -> None:
    assert right(place.values(10))
    data = place.file.read_bytes()
    with place.file.open("r+b") as file:
        for n in (2, 7):
            at = data.index(content(n).tobytes())
            file.seek(at + 1000)
            file.write(bytes([data[at + 1000] ^ 1]))
    assert right(place.values(10)) and place.count() == 12
    assert place.stats["damaged"] == 2
    assert right(place.values(10)) and place.count() == 12


def off_of(place: Place) -> str:
    """Why there is no cache, in a run whose values are right nevertheless."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert right(place.values(3))
    [warning] = caught
    assert "minato.Cache is off" in str(warning.message)
    assert not any(place.stats[name] for name in NUMBERS)
    return str(place.stats["off"])


def test_a_file_of_another_format_is_refused(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.values(3)
    with place.file.open("r+b") as file:
        file.seek(8)
        file.write(bytes([1]))
    why = off_of(place)
    assert "made by another version of minato" in why and "`minato cache drop" in why
    assert main(["cache", "ls", str(place.path)]) == 1
    assert "another version" in capsys.readouterr().out
    assert main(["cache", "drop", str(place.path)]) == 0
    assert right(place.values(3)) and place.stats["off"] is None


def test_a_folder_that_others_may_write_to_is_refused(place: Place) -> None:
    place.file.parent.mkdir(parents=True)
    place.file.parent.chmod(0o777)
    assert "belongs to another user" in off_of(place) and "chmod 700" in str(place.stats["off"])


def test_cache_path_of_a_file_is_refused(place: Place) -> None:
    place.path.touch()
    assert "File exists" in off_of(place) or "Not a directory" in str(place.stats["off"])


USERS = """
import os, sys, warnings
import numpy as np
import minato, minato._cache
from minato.cache import depends, files, memoize, values
files.installed()
cache = minato.Cache("1MiB", directory=sys.argv[1])
os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[2]))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    @cache.memoize(version=1)
    def make(n):
        return n * 2
    print([make(n) for n in range(3)], cache.stats()["off"])
"""


@pytest.mark.skipif(os.getuid() != 0, reason="this process may not become another user")
def test_users_of_one_directory_share_nothing(tmp_path: Path) -> None:
    kept = Path("/var/tmp") / f"minato-test-{uuid.uuid4().hex}"
    kept.mkdir()

    def run(user: int) -> str:
        done = ran(tmp_path, USERS, str(kept), str(user))
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        told_ = run(65534)  # may not write there
        assert "[0, 2, 4] [Errno 13] Permission denied" in told_
        kept.chmod(0o1777)
        assert [run(user) for user in (65534, 65533)] == ["[0, 2, 4] None\n"] * 2
        assert sorted(os.listdir(kept)) == ["minato-65533", "minato-65534"]
        os.chown(kept / "minato-65533", 65534, 65534)
        assert "belongs to another user" in run(65533) or "Permission denied" in run(65533)
    finally:
        subprocess.run(["rm", "-rf", str(kept)], check=True)


LIMITED = """
import resource, sys
import numpy as np
import minato
cache = minato.Cache("4MiB", directory=sys.argv[1])
count = [0]
@cache.memoize(key=lambda n: n, version=1)
def make(n):
    count[0] += 1
    return np.full(20_000, n % 251, np.uint8)
make(0)
resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, resource.RLIM_INFINITY))
for again in range(2):
    for n in range(200):
        assert (make(n) == n % 251).all()
stats = cache.stats()
print(stats["off"], 20 < stats["stored"] < 100, count[0] + stats["stored"] == 401 - 1)
"""


def test_a_limit_of_file_size_ends_no_job(tmp_path: Path) -> None:
    done = ran(tmp_path, LIMITED, str(tmp_path / "kept"))
    assert done.stdout == "None True True\n", done.stdout + done.stderr
    assert done.stderr.count("has no room in") == 1


WORKERS = """
import sys
import torch
import minato
cache = minato.Cache("1MiB", directory=sys.argv[1])
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 60
    @cache.memoize(key=lambda self, i: i, version=1)
    def load(self, i):
        return bytes(50_000)
    def __getitem__(self, i):
        return len(self.load(i))
for kind in (torch.utils.data.DataLoader, minato.DataLoader):
    for epoch in range(2):
        assert len(list(kind(Data(), num_workers=2))) == 60
"""


def test_workers_log_once_that_a_cache_is_full(tmp_path: Path) -> None:
    done = ran(tmp_path, WORKERS, str(tmp_path / "kept"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("has no room in") == 1


#: mounts a small file system and keeps a cache there
SMALL = f"""{OWN_MOUNTS}
import gc
kept = sys.argv[1].encode()
call(libc.mount(b"tmpfs", kept, b"tmpfs", 0, b"size=8M"))
import warnings
import numpy as np
import minato
def run():
    cache = minato.Cache("64MiB", directory=sys.argv[1])
    count = [0]
    @cache.memoize(key=lambda n: n, version=1)
    def make(n):
        count[0] += 1
        return np.full(100_000, n % 251, np.uint8)
    for again in range(2):
        for n in range(200):
            assert (make(n) == n % 251).all()
    stats = cache.stats()
    print(stats["off"], stats.get("stored"), count[0])
run()
gc.collect()
assert libc.mount(b"tmpfs", kept, b"tmpfs", 0x20 | 1, b"") == 0  # read-only from now on
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    run()
"""


def test_full_or_read_only_disk_keeps_job_running(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    done = ran(tmp_path, SMALL, str(kept))
    assert done.returncode == 0, done.stderr
    full, read_only = done.stdout.splitlines()
    off, stored, count = full.split()
    assert off == "None" and 20 < int(stored) < 80 and int(count) == 400 - int(stored)
    assert "Read-only file system" in read_only and read_only.endswith(" 400")


# ---- what is said ------------------------------------------------------------------------------


def test_a_directory_needs_a_version(tmp_path: Path) -> None:
    cache = minato.Cache("1MiB", directory=tmp_path)
    with pytest.raises(TypeError, match=r"needs a version= for .*content.* Write version=1"):
        cache.memoize()(content)
    again = pickle.loads(pickle.dumps(cache))
    assert again.directory == str(tmp_path) and repr(again) == repr(cache)


def test_commands_take_paths(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.values(4)
    assert main(["cache", "ls", str(place.path)]) == 0
    assert f"{place.file}  " in (out := capsys.readouterr().out)
    assert "4 values, no process" in out and "kept, or left" not in out
    assert main(["cache", "stats", str(place.file)]) == 0
    assert "damaged  0, which were made again" in capsys.readouterr().out
    assert main(["cache", "verify", str(place.file.parent)]) == 0
    assert "4 values, 0 damaged" in capsys.readouterr().out
    assert right(place.values(4)) and place.count() == 4  # looking is not a run
    assert main(["cache", "ls", str(place.path / "elsewhere")]) == 1
    assert main(["cache", "drop", str(place.path)]) == 0
    assert list(place.path.iterdir()) == []
