"""``minato recode``: copies of folders whose images are smaller."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image

from minato.__main__ import main
from minato.analyze import recode
from minato.analyze.recode import Settings

from .photos import folder_of, photo


def tree(folder: Path) -> dict[str, bytes]:
    """All files but the settings."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != recode.SETTINGS
    }


def run(*arguments: Any) -> int:
    return main(["recode", *map(str, arguments), "--workers", "2"])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    at = folder_of(tmp_path / "src", 4)
    (at / "labels.csv").write_text("0,1\n")
    return at


def test_a_copy_keeps_names_folders_and_other_files(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(source)
    assert run(source, tmp_path / "dst", "--quality", "75", "--size", "120") == 0
    found = tree(tmp_path / "dst")
    assert tree(source) == before and found.keys() == before.keys()
    assert found["labels.csv"] == before["labels.csv"]
    for n in range(4):
        with Image.open(tmp_path / "dst" / f"class{n % 2}" / f"{n}.jpg") as image:
            assert image.size == (160, 120) and image.format == "JPEG"
    said = capsys.readouterr().out
    assert "5 of 5 files: 4 encoded anew; 1 other files, copied" in said
    assert "times smaller" in said and "decoding an image: " in said


def test_second_recode_makes_missing_and_changed_files(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "dst"
    assert run(source, to) == 0
    found = tree(to)
    times = {name: (to / name).stat().st_ino for name in found}
    (to / "class0" / "0.jpg").unlink()
    photo(9).save(source / "class1" / "1.jpg", quality=95)  # changed since
    capsys.readouterr()
    assert run(source, to) == 0
    assert "2 encoded anew; 3 there from an earlier run" in capsys.readouterr().out
    again = tree(to)
    assert again["class0/0.jpg"] == found["class0/0.jpg"]
    assert again["class1/1.jpg"] != found["class1/1.jpg"]
    assert (to / "class0" / "2.jpg").stat().st_ino == times["class0/2.jpg"]


@pytest.mark.parametrize("options, words", [
    (["--quality", "50"], "was made with quality 85, not 50"),
    (["--size", "64"], "was made with size None, not 64"),
    (["--format", "webp"], "was made with format jpeg, not webp"),
])  # fmt: skip
def test_other_settings_for_a_copy_are_refused(
    options: list[str], words: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(source, tmp_path / "dst") == 0
    before = tree(tmp_path / "dst")
    assert run(source, tmp_path / "dst", *options) == 2
    assert words in capsys.readouterr().err and tree(tmp_path / "dst") == before


@pytest.mark.parametrize("to, words", [
    ("src", "overlap"), ("src/class0/new", "overlap"), (".", "overlap"),
    ("link", "overlap"), ("full", "holds other files"), ("file", "is not a folder"),
])  # fmt: skip
def test_a_destination_in_use_is_refused(
    to: str, words: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = tree(tmp_path)
    assert run(source, tmp_path / to) == 2
    assert words in capsys.readouterr().err and tree(tmp_path) == before


def test_two_runs_at_once_are_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with recode._open_settings(str(source), str(tmp_path / "dst"), Settings()):
        assert run(source, tmp_path / "dst") == 2
    assert "another minato recode" in capsys.readouterr().err


@pytest.mark.parametrize("options, words", [
    (["--quality", "0"], "not between 1 and 100"), (["--size", "0"], "a positive number of pixels, got 0"),
    (["--format", "png", "--quality", "85"], "png loses nothing"), (["--format", "gif"], "invalid"),
])  # fmt: skip
def test_wrong_arguments_write_nothing(
    options: list[str], words: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(source, tmp_path / "dst", *options) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "dst").exists()


def test_files_that_fail_are_named_and_counted(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (source / "class0" / "0.jpg").read_bytes()
    (source / "class0" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (source / "class1" / "text.png").write_text("no image")
    (source / "gone.jpg").symlink_to("nowhere")
    photo(1).save(source / "class0" / "0.png")
    assert run(source, tmp_path / "dst") == 1
    out, errors = capsys.readouterr()
    assert "4 failed" in out
    for words in ("class0/cut.jpg: OSError: image file is truncated", "class1/text.png: Unidentified",
                  "gone.jpg: FileNotFoundError", "0.png: ValueError: it would overwrite"):  # fmt: skip
        assert words in errors
    assert len(tree(tmp_path / "dst")) == 5


def test_images_that_may_be_labels_are_copied(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    grey = np.arange(64 * 64, dtype=np.uint8).reshape(64, 64)
    Image.fromarray(grey).save(source / "grey.png")
    Image.fromarray(grey.astype(np.uint16) * 3).save(source / "deep.png")
    Image.fromarray(grey).convert("P").save(source / "palette.png")
    Image.fromarray(grey).convert("1").save(source / "bits.png")
    photo(1).save(source / "two.gif", save_all=True, append_images=[photo(2)])
    for _ in range(2):  # the second finds them
        assert run(source, tmp_path / "dst", "--size", "16") == 0
        assert tree(tmp_path / "dst") == tree(source)
    assert recode.recode_file(str(source), str(tmp_path / "dst"), "grey.png", Settings(), False).what == "there"


@pytest.mark.parametrize("format, suffix", [("jpeg", ".jpg"), ("webp", ".webp"), ("png", ".png")])
def test_a_suffix_says_the_format(format: str, suffix: str, tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    clear = photo(0).convert("RGBA")
    clear.putalpha(40)
    clear.save(source / "clear.png")
    photo(1).save(source / "A.JPG")
    photo(2).convert("CMYK").save(source / "print.jpg")
    assert run(source, tmp_path / "dst", "--format", format, "--size", "64") == 0
    names = sorted(tree(tmp_path / "dst"))
    assert names == ["A.JPG" if format == "jpeg" else f"A{suffix}", f"clear{suffix}", f"print{suffix}"]
    for name in names:
        with Image.open(tmp_path / "dst" / name) as image:
            assert image.format == format.upper() and min(image.size) == 64
    with Image.open(tmp_path / "dst" / f"clear{suffix}") as image:
        assert image.mode == ("RGB" if format == "jpeg" else "RGBA")


def test_the_orientation_stays_a_tag(tmp_path: Path) -> None:
    """A program sees the pixels that it saw before, whether it obeys the tag or not."""
    (tmp_path / "src").mkdir()
    exif = Image.Exif()
    exif[recode.ORIENTATION], exif[0x010F] = 6, "maker"
    photo(0).save(tmp_path / "src" / "turned.jpg", exif=exif, quality=95)
    assert run(tmp_path / "src", tmp_path / "dst") == 0
    with Image.open(tmp_path / "dst" / "turned.jpg") as image:
        assert image.size == (320, 240) and dict(image.getexif()) == {recode.ORIENTATION: 6}


def test_an_image_never_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder_of(tmp_path / "src", 1, quality=30)
    assert run(source, tmp_path / "dst", "--quality", "95", "--size", "1000") == 0
    assert tree(tmp_path / "dst") == tree(source)
    assert "1 copied, because they would not become smaller" in capsys.readouterr().out


def test_links_are_followed_but_not_for_ever(source: Path, tmp_path: Path) -> None:
    (source / "class0" / "up").symlink_to(source)
    (source / "alias").symlink_to(source / "class0")
    found = list(recode.list_files(str(source)))
    assert "alias/0.jpg" in found and "class0/0.jpg" in found
    assert not any(path.count("up") > 1 for path in found)


def test_an_interrupt_leaves_whole_files(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "src", 1, width=800, height=600)
    content = (source / "class0" / "0.jpg").read_bytes()
    for n in range(1, 40):
        (source / "class0" / f"{n}.jpg").write_bytes(content)
    command = [sys.executable, "-m", "minato", "recode", source, tmp_path / "dst", "--workers", "2"]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, cwd=root, start_new_session=True, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:  # fmt: skip
        while running.poll() is None and not list((tmp_path / "dst").glob("*/*.jpg")):
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGINT)
        out, errors = running.communicate()
    assert running.returncode == 130 and "goes on from here" in errors
    found = tree(tmp_path / "dst")
    assert 0 < len(found) < 40 and not any(name.endswith(recode.PART) for name in found)
    for name in found:
        with Image.open(tmp_path / "dst" / name) as image:
            image.load()
    assert run(source, tmp_path / "dst") == 0 and len(tree(tmp_path / "dst")) == 40


def test_recode_without_pillow_names_the_extra(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert run(source, tmp_path / "dst") == 1
    assert "pip install 'minato-loader[analyze]'" in capsys.readouterr().err
