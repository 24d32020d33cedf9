"""files=: a value is made again when a file of its has changed, and at no other time."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from minato.cache import files as cache_files

from .support import Calls, new_cache


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of these tests are fresh, and that is what only the last ones are about."""
    monkeypatch.setattr(cache_files, "FRESH_NS", -1)


class Reader:
    """A cache of what files hold, one line a call."""

    def __init__(self, tmp_path: Path, **options: Any) -> None:
        self.file = tmp_path / "data"
        self.calls = Calls(tmp_path / "calls")
        self.cache = new_cache()
        self.during: Any = None
        self.write("first")

        def read(path: Path, again: int = 0) -> str:
            text = path.read_text()
            self.calls.note()
            if self.during is not None:
                self.during()
            return text

        key = lambda path, again=0: (path, again)  # noqa: E731
        self.read = self.cache.memoize(key=key, files=lambda path, again=0: path, **options)(read)

    def write(self, text: str) -> None:
        fresh = self.file.with_suffix(".new")
        fresh.write_text(text)
        os.replace(fresh, self.file)

    def count(self) -> int:
        return len(self.calls.all())


def test_a_replaced_file_is_read_again(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    assert [reader.read(reader.file) for _ in range(3)] == ["first"] * 3
    reader.write("other")
    assert [reader.read(reader.file) for _ in range(3)] == ["other"] * 3
    assert reader.count() == 2


def test_a_clock_set_back_hides_no_change(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    assert reader.read(reader.file) == "first"
    before = os.stat(reader.file)
    reader.file.write_text("other")  # as long, and of the same time
    os.utime(reader.file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(reader.file).st_mtime_ns == before.st_mtime_ns
    assert reader.read(reader.file) == "other"
    os.utime(reader.file, ns=(0, 0))  # older than anything
    assert reader.read(reader.file) == "other" and reader.count() == 3


def test_file_replaced_while_read_is_not_stored(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.during = lambda: reader.write("other")
    assert reader.read(reader.file) == "first"  # what the caller would have got without a cache
    reader.during = None
    assert [reader.read(reader.file) for _ in range(2)] == ["other"] * 2
    assert reader.count() == 2 and reader.cache.stats()["stored"] == 1


def test_paths_are_looked_at_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, looked = Reader(tmp_path), []
    plain = cache_files.look
    monkeypatch.setattr(cache_files, "look", lambda path: looked.append(path) or plain(path))
    for again in range(5):  # five values of one file: windows of a volume, say
        reader.read(reader.file, again)
    looked.clear()
    for epoch in range(3):
        for again in range(5):
            reader.read(reader.file, again)
        assert len(looked) == epoch + 1
    reader.write("other")
    assert reader.read(reader.file, 0) == "other"  # the first of the next epoch


@pytest.mark.parametrize("check, seen", [("use", "other"), ("never", "first")])
def test_check_says_how_often(tmp_path: Path, check: str, seen: str) -> None:
    reader = Reader(tmp_path, check=check)
    assert [reader.read(reader.file, n) for n in range(2)] == ["first"] * 2
    reader.write("other")
    assert [reader.read(reader.file, n) for n in range(2)] == [seen] * 2


def test_several_files_and_missing_ones_count(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    cache = new_cache()

    @cache.memoize(key=lambda: 0, files=lambda: [one, str(other)])
    def make() -> list[str]:
        return [path.read_text() if path.exists() else "none" for path in (one, other)]

    one.write_text("a")
    assert make() == ["a", "none"]
    other.write_text("b")
    assert make() == ["a", "b"]
    one.unlink()
    assert make() == ["none", "b"]
    bad = cache.memoize(key=lambda: 1, files=lambda: 3)(lambda: 0)
    with pytest.raises(TypeError, match="should return a path or several, but returned int"):
        bad()


def test_file_just_written_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second write within the clock's tick would leave its times as they are."""
    reader = Reader(tmp_path)
    monkeypatch.setattr(cache_files, "FRESH_NS", 10**15)
    assert reader.read(reader.file) == "first" and reader.cache.stats()["stored"] == 0
    monkeypatch.setattr(cache_files, "FRESH_NS", 20_000_000)
    past = time.time_ns() + 10**10
    monkeypatch.setattr(time, "time_ns", lambda: past)
    assert reader.read(reader.file) == "first" and reader.cache.stats()["stored"] == 1


def test_file_read_by_an_object_that_ends_is_not_noted(tmp_path: Path) -> None:
    reader, other = Reader(tmp_path), tmp_path / "other"
    other.touch()

    class Ends:
        def __del__(self) -> None:
            other.read_text()
            other.unlink()

    def collect() -> None:
        one: Any = Ends()
        one.itself = one
        del one
        gc.collect()

    reader.during = collect
    assert [reader.read(reader.file) for _ in range(2)] == ["first"] * 2
    assert reader.count() == 1
    assert not other.exists()


def test_list_of_processes_is_not_noted(tmp_path: Path) -> None:
    """Monitors ask for it in threads of their own, which count for a value that is made meanwhile."""
    reader = Reader(tmp_path)

    def watch() -> None:
        for path in ("/proc", b"/proc", Path("/proc")):
            thread = threading.Thread(target=os.listdir, args=(path,))
            thread.start()
            thread.join()

    reader.during = watch
    assert [reader.read(reader.file) for _ in range(2)] == ["first"] * 2
    assert reader.count() == 1


def test_source_read_for_a_key_is_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[dict[str, Any]] = []
    told = cache_files.Opened.told

    def tell(opened: cache_files.Opened, known: Any) -> bytes | None:
        noted.append(dict(opened.stamps))
        return told(opened, known)

    monkeypatch.setattr(cache_files.Opened, "told", tell)
    cache = new_cache()

    @cache.memoize(key=lambda n: n)
    def inner(n: int) -> int:
        return n + len(globals()["__doc__"])  # so it depends on the source of the program

    outer = cache.memoize(key=lambda n: n)(lambda n: inner(n))
    assert outer(1) == 1 + len(__doc__ or "") and cache.stats()["unfollowed"]
    assert noted == [{}, {}] and not cache_files._lasting


def test_file_that_the_maker_updates_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, calls = tmp_path / "counter", Calls(tmp_path / "calls")
    file.write_text("0")

    @new_cache().memoize(key=lambda n: n)
    def make(n: int) -> int:
        calls.note()
        with open(file, "r+") as stream:
            stream.write(str(n))
        return n

    assert [make(7) for _ in range(3)] == [7] * 3 and len(calls.all()) == 3
    assert caplog.text.count(f"come from {file}, which it changes") == 1
