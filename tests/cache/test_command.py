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
from minato.cache.datasets import _data_set_of
from minato.commands.cache_files import left_bytes

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
        labels.append(store.stats()["label"])
    assert labels == ["", *["one\x1b[2J\u00e9"] * 3]
    assert main(["cache", "ls", name]) == 0
    assert f"{name}  one?[2J\u00e9  0 B of" in capsys.readouterr().out
    for store in stores:
        store.detach()
    stores[3].attach()
    assert stores[3].stats()["label"] == "x" * 255
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
    assert main(["cache", "drop", name]) == 1
    assert "2 values" in (told := capsys.readouterr().out) and "1 process of 1 job use it" in told
    with pytest.raises(_cache.Refused, match="processes use the file"):
        _cache.drop(str(FOLDER), name, False, False)
    assert name in files() and cache.stats()["removed"] is None
    assert main(["cache", "drop", name, "--force"]) == 0
    told = capsys.readouterr().out
    assert told.index("2 values") < told.index(f"removing {name}") < told.index("is removed; processes")
    assert name not in files()
    assert cache.stats()["entries"] == 2 and "this job goes on" in cache.stats()["removed"]
    other = new_cache()
    other._name = cache._name
    second = _cache.Store(str(FOLDER), name, 1 << 20, 7, False, 0)
    second.attach()
    assert "values are made twice" in cache.stats()["removed"]
    second.detach()
    assert main(["cache", "drop", name]) == 1
    assert "there is no" in capsys.readouterr().out


def test_drop_without_a_name_lists_caches(capsys: pytest.CaptureFixture[str]) -> None:
    cache, name = filled()
    assert main(["cache", "drop"]) == 2
    told = capsys.readouterr().out
    assert "--all" in told and f"\n  {name}" in told and name in files()
    del cache


def test_drop_keeps_files_of_users(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minato.cache.cache.MEMORY", str(tmp_path))
    tmp_path.chmod(0o700)
    own = tmp_path / FOLDER.name
    own.mkdir(0o700)
    target = tmp_path / "target"
    target.write_bytes(_cache.MAGIC.to_bytes(8, "little") * 9)
    for place in (own, tmp_path):
        (place / "cache-notes.txt").write_text("mine")
        (place / "cache-folder").mkdir()
        (place / "cache-folder" / "file").write_text("mine")
        (place / "cache-zeros").write_bytes(bytes(5000))
        (place / "cache-empty").touch()
        (place / "cache-link").symlink_to(target)
        os.mkfifo(place / "cache-pipe")
    before = sorted(tmp_path.rglob("*"))
    given = [["--all"], [str(tmp_path)], [str(own)], *([str(p)] for p in before)]
    for arguments in given:
        main(["cache", "drop", "--force", *arguments])
        _cache_of_that_name = [_refused(str(p.parent), p.name) for p in before if p.parent in (own, tmp_path)]
        assert all(_cache_of_that_name)
    assert sorted(tmp_path.rglob("*")) == before
    assert (own / "cache-notes.txt").read_text() == "mine"
    capsys.readouterr()


def _refused(where: str, name: str) -> bool:
    """Whether nothing of the module removes or overwrites the file."""
    for on_disk in (False, True):
        try:
            _cache.drop(where, name, on_disk, True)
            return False
        except (OSError, _cache.Refused):
            pass
        _cache.sweep(where, name)
        store = _cache.Store(where, name, _cache.BYTES_MIN, 1, False, 0, on_disk)
        if name != "cache-empty" and os.path.lexists(os.path.join(where, name)) and name != FOLDER.name:
            with pytest.raises((OSError, _cache.Refused)):
                store.attach()
    return True


def test_drop_removes_an_empty_folder_only_if_it_is_minatos(tmp_path: Path) -> None:
    own = tmp_path / FOLDER.name
    for place in (own, tmp_path / "mine"):
        place.mkdir(0o700)
        store = _cache.Store(str(place), "cache-1", _cache.BYTES_MIN, 1, False, 0, True)
        store.attach()
        store.detach()
        assert main(["cache", "drop", str(place)]) == 0
    assert not own.exists() and list((tmp_path / "mine").iterdir()) == []


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
    path.write_bytes(_cache.MAGIC.to_bytes(8, "little"))
    os.truncate(path, 100_000)  # its creator was killed
    for action in ("ls", "stats", "verify"):
        assert main(["cache", action, name]) == 1
        assert "cannot be opened" in capsys.readouterr().out
    assert path.stat().st_size == 100_000
    assert main(["cache", "drop", name]) == 0 and name not in files()
    del cache


def test_commands_name_a_folder_that_they_cannot_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("minato.commands.cache_files.os.listdir", refuse)
    assert main(["cache", "ls", str(tmp_path)]) == 1
    assert f"{tmp_path} cannot be read: Permission denied" in capsys.readouterr().out


def _plain(n: int) -> int:
    return n
