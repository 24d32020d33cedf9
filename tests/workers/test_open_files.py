"""Files that the program opens and forked workers read: each worker has its own position."""

from __future__ import annotations

import fcntl
import gzip
import multiprocessing
import os
import socket
import sqlite3
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import minato
from minato.workers.job import find_open_files, open_again

SIZE = 4096
CTX = multiprocessing.get_context("fork")


def content(number: int) -> bytes:
    return bytes([number]) * SIZE


class Reader:
    """Two workers, which both go to their place before either reads there."""

    def __init__(self, go: Callable[[int], Callable[[], bytes]], samples: int = 2) -> None:
        self.go, self.samples = go, samples
        self.both = CTX.Barrier(2, timeout=60)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> bool:
        read = self.go(index)
        self.both.wait()
        return read() == content(index)


def by_descriptor(path: Path) -> Any:
    path.write_bytes(content(0) + content(1))
    descriptor = os.open(path, os.O_RDONLY)

    def go(index: int) -> Callable[[], bytes]:
        os.lseek(descriptor, index * SIZE, os.SEEK_SET)
        return lambda: os.read(descriptor, SIZE)

    return go, lambda: os.close(descriptor)


def by_file(path: Path) -> Any:
    path.write_bytes(content(0) + content(1))
    file = path.open("rb")

    def go(index: int) -> Callable[[], bytes]:
        file.seek(index * SIZE)
        return lambda: file.read(SIZE)

    return go, file.close


def by_file_that_is_deleted(path: Path) -> Any:
    go, close = by_file(path)
    path.unlink()
    return go, close


def by_zip(path: Path) -> Any:
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(2):
            archive.writestr(str(number), content(number))
    archive = zipfile.ZipFile(path)

    def go(index: int) -> Callable[[], bytes]:
        entry = archive.open(str(index))
        return lambda: entry.read()

    return go, archive.close


def by_gzip(path: Path) -> Any:
    with gzip.open(path, "wb", compresslevel=0) as file:
        for number in range(2):
            file.write(content(number) * 64)  # more than is buffered
    file: Any = gzip.open(path)
    file.read(SIZE)

    def go(index: int) -> Callable[[], bytes]:
        file.seek(index * 64 * SIZE)
        return lambda: file.read(64 * SIZE)[-SIZE:]

    return go, file.close


@pytest.fixture(params=[by_descriptor, by_file, by_file_that_is_deleted, by_zip, by_gzip])
def go(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    go, close = request.param(tmp_path / "file")
    yield go
    close()


@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_workers_read_one_open_file_independently(go: Any, scheduling: str) -> None:
    loader = minato.DataLoader(Reader(go), num_workers=2, multiprocessing_context="fork",
                               scheduling=scheduling)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [bool(batch) for batch in loader] == [True, True]


class Lines:
    """Each worker continues where the program has stopped reading."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.both = CTX.Barrier(2, timeout=60)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        self.both.wait()
        return os.read(self.descriptor, 1)[0]


def test_worker_position_is_the_programs_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(8)))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert os.read(descriptor, 3) == b"\0\1\2"
        loader = minato.DataLoader(Lines(descriptor), num_workers=2,
                                   multiprocessing_context="fork")  # fmt: skip
        assert [int(batch) for batch in loader] == [3, 3]
        assert os.read(descriptor, 1) == b"\3"  # workers have not moved the program's
    finally:
        os.close(descriptor)


class Appending:
    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return os.write(self.descriptor, bytes([index]))


def test_file_open_for_writing_stays_shared(tmp_path: Path) -> None:
    path = tmp_path / "file"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        loader = minato.DataLoader(Appending(descriptor), num_workers=2,
                                   multiprocessing_context="fork")  # fmt: skip
        assert len(list(loader)) == 20
    finally:
        os.close(descriptor)
    assert sorted(path.read_bytes()) == list(range(20))


@pytest.mark.parametrize(("lock", "found"), [(fcntl.LOCK_EX, False), (fcntl.LOCK_SH, True)])
def test_file_locked_for_others_stays_shared(tmp_path: Path, lock: int, found: bool) -> None:
    path = tmp_path / "file"
    path.touch()
    with path.open() as file:
        fcntl.flock(file, lock)
        number = file.fileno()
        assert (number in [one.descriptor for one in find_open_files()]) == found


def test_other_descriptors_are_left_alone(tmp_path: Path) -> None:
    ends = os.pipe()
    folder = os.open(tmp_path, os.O_RDONLY)
    path = os.open(tmp_path, os.O_PATH)
    try:
        found = [one.descriptor for one in find_open_files()]
        assert not {*ends, folder, path, 0, 1, 2}.intersection(found)
    finally:
        for descriptor in (*ends, folder, path):
            os.close(descriptor)


def test_unreopenable_file_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.touch()
    with path.open() as file:
        monkeypatch.setattr(os, "access", lambda *_, **__: False)
        assert file.fileno() not in [one.descriptor for one in find_open_files()]
    assert f"'{path}' is open in this program" in caplog.text


def test_file_replaced_since_opening_is_left_alone(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).write_text(name)
    with (tmp_path / "one").open("rb") as file:
        [found] = [one for one in find_open_files() if one.descriptor == file.fileno()]
        other = os.open(tmp_path / "other", os.O_RDONLY)
        os.read(other, 1)
        os.dup2(other, file.fileno())
        os.close(other)
        open_again([found])
        assert file.read() == b"ther"


class Holding:
    def __init__(self, *held: Any) -> None:
        self.held = {"within": [held]}

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.filterwarnings("error")
def test_dataset_holding_files_and_connections_does_not_warn(tmp_path: Path) -> None:
    """Workers need not use them: a log, for example."""
    database, ends = sqlite3.connect(tmp_path / "database"), socket.socketpair()
    with (tmp_path / "log").open("w") as log, (tmp_path / "scratch").open("w+b") as scratch:
        data = Holding(log, scratch, database, *ends)
        loader = minato.DataLoader(data, num_workers=1, multiprocessing_context="fork")
        assert len(list(loader)) == len(list(loader)) == 2
    for one in (database, *ends):
        one.close()
