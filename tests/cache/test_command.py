"""``minato cache``: looks at files without becoming a client, and removes them."""

from __future__ import annotations

import os
import pickle
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from minato import _cache
from minato.__main__ import main
from minato.cache.cache import Cache
from minato.cache.command import left_bytes
from minato.cache.datasets import _data_set_of

from .support import FOLDER, files, new_cache


def filled() -> tuple[Cache, str]:
    cache = new_cache()
    make = cache.memoize(key=lambda n: n)(lambda n: bytes(1000 + n))
    for n in (1, 2, 1):
        make(n)
    [name] = [name for name in files() if str(cache._name) in name]
    return cache, name


def test_a_cache_is_listed_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    cache, name = filled()
    assert main(["cache", "ls", name]) == 0
    assert "2 values, 1 process of 1 job" in capsys.readouterr().out
    assert main(["cache", "stats", name]) == 0
    told = capsys.readouterr().out
    assert "found    1 (33 %)" in told and "made     2" in told
    assert name in files() and cache.stats()["jobs"] == 1


def test_listing_names_function_and_source_of_a_cache(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cache, name = filled()
    for action in ("ls", "stats"):
        assert main(["cache", action, name]) == 0
        source = os.path.realpath(__file__)
        assert f"{name}  filled.<locals>.<lambda> in {source}" in capsys.readouterr().out
    assert pickle.loads(pickle.dumps(cache))._label == cache._label


def test_label_of_a_librarys_dataset_is_its_folder(tmp_path: Path) -> None:
    assert _data_set_of(SimpleNamespace(root=tmp_path)).label == f"files in {tmp_path.resolve()}"


def test_first_label_of_a_cache_file_stays(capsys: pytest.CaptureFixture[str]) -> None:
    cache, name = filled()
    assert cache._client is not None
    cache._client.store.detach()  # which removes the file
    stores = [
        _cache.Store(str(FOLDER), name, 1 << 20, 1, False, 0, False, label)
        for label in ("", "one\x1b[2J\u00e9", "another", "x" * 300)
    ]
    labels = []
    for store in stores:
        store.attach()
        labels.append(store.label())
    assert labels == ["", *["one\x1b[2J\u00e9"] * 3]
    assert main(["cache", "ls", name]) == 0
    assert f"{name}  one?[2J\u00e9  0 B of" in capsys.readouterr().out
    for store in stores:
        store.detach()
    stores[3].attach()
    assert stores[3].label() == "x" * 255
    stores[3].detach()


def test_a_flipped_byte_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    cache, name = filled()
    assert main(["cache", "verify", name]) == 0
    assert "2 values, 0 damaged" in capsys.readouterr().out
    path = FOLDER / name
    data = path.read_bytes()
    at = data.rindex(b'["b",1001]')
    with path.open("r+b") as file:
        file.seek(at + 3)
        file.write(b"X")
    assert main(["cache", "verify", name]) == 1
    assert "2 values, 1 damaged" in capsys.readouterr().out
    del cache


def test_dropped_file_is_removed_and_clients_continue(capsys: pytest.CaptureFixture[str]) -> None:
    cache, name = filled()
    assert main(["cache", "drop", name]) == 0
    assert name not in files()
    assert cache.stats()["entries"] == 2
    assert main(["cache", "drop", name]) == 1
    assert "there is no" in capsys.readouterr().out


def test_cache_ls_keeps_orphaned_files(capsys: pytest.CaptureFixture[str]) -> None:
    cache = new_cache(keep=True)
    assert cache.memoize()(_plain)(3) == 3
    [name] = [name for name in files() if str(cache._name) in name]
    client = cache._client
    assert client is not None
    client.store.detach()
    assert main(["cache", "ls", name]) == 0
    assert "no process: kept" in capsys.readouterr().out
    assert left_bytes() > 0
    assert main(["cache", "drop", name]) == 0


def test_unfinished_file_is_left_alone_by_commands(capsys: pytest.CaptureFixture[str]) -> None:
    cache, _ = filled()  # so that the folder is there
    name = f"cache-{_cache.LAYOUT}-{uuid.uuid4().hex}"
    path = FOLDER / name
    path.touch(0o600)
    os.truncate(path, 100_000)  # its creator was killed
    for action in ("ls", "stats", "verify"):
        assert main(["cache", action, name]) == 1
        assert "cannot be opened" in capsys.readouterr().out
    assert path.read_bytes() == bytes(100_000)
    assert main(["cache", "drop", name]) == 0 and name not in files()
    del cache


def test_commands_name_a_folder_that_they_cannot_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("minato.cache.command.os.listdir", refuse)
    assert main(["cache", "ls", str(tmp_path)]) == 1
    assert f"{tmp_path} cannot be read: Permission denied" in capsys.readouterr().out


def _plain(n: int) -> int:
    return n
