"""``minato recode``: copies of folders whose images are smaller."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image, PngImagePlugin

from minato.__main__ import main
from minato.analyze import recode
from minato.analyze.recode import ORIENTATION, Settings

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
    assert "5 of 5 files: 4 encoded anew; 1 copied as they are" in said
    assert "copied: 1 that are not images by their suffix (labels.csv)" in said
    assert "times smaller" in said and "decoding an image: " in said


def test_second_recode_makes_missing_files_and_overwrites_none(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "dst"
    assert run(source, to) == 0
    (to / "class0" / "0.jpg").unlink()
    found = tree(to)
    photo(9).save(source / "class1" / "1.jpg", quality=95)  # changed since
    (to / "labels.csv").write_text("mine")
    capsys.readouterr()
    assert run(source, to) == 1
    out, errors = capsys.readouterr()
    assert "1 encoded anew; 2 there from an earlier run; 2 failed" in out
    for name in ("class1/1.jpg", "labels.csv"):
        assert f"dst/{name} exists and is not of this file as it is now; remove it first" in errors
    again = tree(to)
    assert again.pop("class0/0.jpg") and again == {**found, "labels.csv": b"mine"}
    (to / "class1" / "1.jpg").unlink()
    (to / "labels.csv").unlink()
    assert run(source, to) == 0 and tree(to)["labels.csv"] == b"0,1\n"


@pytest.mark.parametrize("options, words", [
    (["--quality", "50"], "was made with quality 85, not 50"),
    (["--size", "64"], "was made with size None, not 64"),
    (["--format", "webp"], "was made with format jpeg, not webp"),
    (["--lossy"], "was made with lossy False, not True"),
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
    (["--baseline", "--size", "40"], "changes no pixels"),
])  # fmt: skip
def test_wrong_arguments_write_nothing(
    options: list[str], words: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(source, tmp_path / "dst", *options) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "dst").exists()


def test_unreadable_images_are_copied(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (source / "class0" / "0.jpg").read_bytes()
    (source / "class0" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (source / "class1" / "text.png").write_text("no image")
    (source / "empty").mkdir()  # a class without images is one
    before = tree(source)
    assert run(source, tmp_path / "dst") == 0
    found = tree(tmp_path / "dst")
    assert found.keys() == before.keys() and (tmp_path / "dst" / "empty").is_dir()
    assert all(found[name] == before[name] for name in ("class0/cut.jpg", "class1/text.png"))
    said = capsys.readouterr().out
    assert "copied: 2 that Pillow cannot decode (class0/cut.jpg)" in said
    assert "copied: 1 that are empty folders (empty/)" in said


def test_links_are_copied_as_links_or_followed(source: Path, tmp_path: Path) -> None:
    (source / "gone.jpg").symlink_to("nowhere")
    (source / "self").symlink_to("self")
    (source / "class0" / "up").symlink_to("..")
    (source / "class0" / "root").symlink_to(source)
    (source / "alias").symlink_to(source / "class0")
    (source / "other.jpg").symlink_to(source / "class0" / "0.jpg")
    to = tmp_path / "dst"
    for _ in range(2):  # the second finds them
        assert run(source, to) == 0
        assert [os.readlink(to / name) for name in ("gone.jpg", "self", "class0/up", "class0/root")] == [
            "nowhere", "self", "..", str(source)]  # fmt: skip
        assert not (to / "alias").is_symlink() and not (to / "other.jpg").is_symlink()
        assert (to / "alias" / "0.jpg").read_bytes() == (to / "other.jpg").read_bytes()


def test_a_fifo_is_named_and_left_out(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(source / "pipe.jpg")
    assert run(source, tmp_path / "dst") == 1
    assert "pipe.jpg: ValueError: it is neither a file nor a folder" in capsys.readouterr().err
    assert tree(tmp_path / "dst").keys() == tree(source).keys()


def test_a_link_in_the_destination_never_leads_into_the_source(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(source, tmp_path / "dst") == 0
    shutil.rmtree(tmp_path / "dst" / "class0")
    (tmp_path / "dst" / "class0").symlink_to(source / "class0")
    before = tree(source)
    (source / "class0" / "0.jpg").rename(source / "class0" / "new.jpg")
    before["class0/new.jpg"] = before.pop("class0/0.jpg")
    assert run(source, tmp_path / "dst") == 1
    assert "is a link that leads out of the destination" in capsys.readouterr().err
    assert tree(source) == before


def test_names_that_are_not_free_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A photograph and a mask of the same stem, two that would get one name, a folder, a long name."""
    source, to = tmp_path / "src", tmp_path / "dst"
    (source / "folder.jpg").mkdir(parents=True)
    for number, name in enumerate(["a.jpg", "a.png", "b.bmp", "b.png", "folder.png", f"{'n' * 251}.png"]):
        photo(number).save(source / name, quality=95)
    before = tree(source)
    for _ in range(2):
        assert run(source, to, "--lossy", "--format", "webp") == 0
        names = {path.name for path in to.iterdir()} - {recode.SETTINGS}
        assert names == {"a.webp", "a.png", "b.webp", "b.png", "folder.jpg", "folder.webp", f"{'n' * 251}.png"}
        found = tree(to)
        assert all(found[name] == before[name] for name in found if name.endswith(".png"))
    assert "copied: 3 whose new name is too long, or is that of another file (a.png)" in capsys.readouterr().out
    assert run(source, tmp_path / "jpeg", "--lossy") == 0
    names = {path.name for path in (tmp_path / "jpeg").iterdir()} - {recode.SETTINGS}
    assert names == {"a.jpg", "a.png", "b.jpg", "b.png", "folder.jpg", "folder.png", f"{'n' * 251}.jpg"}
    assert "renamed: 2 (b.bmp is b.jpg); lists that name these files must change" in capsys.readouterr().out


def test_names_of_any_bytes_are_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "src"
    source.mkdir()
    names = [b"\xff.jpg", b"new\nline.jpg", "\u00fcmlaut 1.JPG".encode(), b"n" * 251 + b".jpg", b"\xfe.txt"]
    content = io.BytesIO()
    photo(0).save(content, "JPEG", quality=95)
    for name in names:
        (source / os.fsdecode(name)).write_bytes(content.getvalue())
    assert run(source, tmp_path / "dst") == 0
    assert {os.fsencode(path.name) for path in (tmp_path / "dst").iterdir()} == {*names, recode.SETTINGS.encode()}
    out = capsys.readouterr().out
    assert "4 encoded anew; 1 copied" in out and "(\\xfe.txt)" in out


def photos_and_others(folder: Path) -> set[str]:
    """Writes all that Pillow writes: modes, formats and options. Returns the names of those files that
    have lost information already, in RGB or gray."""
    folder.mkdir()
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    plain, frames = {"exif": exif, "icc_profile": b"profile"}, {"save_all": True, "append_images": [photo(3, 96, 72)]}
    formats: dict[str, list[dict[str, Any]]] = {
        "png": [{}, plain, frames, {"transparency": 3}],
        "jpg": [{}, plain, {"progressive": True, "quality": 95}, {"subsampling": 0}, {"keep_rgb": True}],
        "webp": [{}, plain, frames, {"lossless": True}, {"lossless": True, **plain}],
        "tif": [{}, plain, frames, *({"compression": name} for name in ("tiff_lzw", "jpeg", "packbits", "group4"))],
        "gif": [{}, frames, {"transparency": 3}], "bmp": [{}], "ppm": [{}],
    }  # fmt: skip
    modes = ("1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "PA", "RGBX", "I;16")
    labels = Image.fromarray(np.kron(np.arange(12, dtype=np.uint8).reshape(3, 4) * 20, np.ones((24, 24), np.uint8)))
    lossy = set()
    for content, image in (("photo", photo(1, 96, 72)), ("labels", labels.convert("RGB"))):
        for mode in modes:
            with contextlib.suppress(ValueError):  # Pillow converts some only by way of others
                made = image.convert("L").convert(mode) if mode in ("PA", "I;16", "I", "F") else image.convert(mode)
                for suffix, each in formats.items():
                    for number, options in enumerate(each):
                        name = f"{content}-{mode.replace(';', '')}-{suffix}{number}.{suffix}"
                        try:
                            made.save(folder / name, **options)
                        except Exception:  # a mode or an option that the format has not
                            (folder / name).unlink(missing_ok=True)
                            continue
                        with Image.open(folder / name) as written:
                            kept = getattr(written, "n_frames", 1) == 1 and written.mode in ("RGB", "L")
                        if kept and suffix in ("jpg", "webp") and "lossless" not in options:
                            lossy.add(name)
    return lossy


def seen(path: Path) -> tuple[Any, ...]:
    """What training sees of an image but its pixels."""
    with Image.open(path) as image:
        return image.mode, image.size, image.getexif().get(ORIENTATION), image.info.get("icc_profile")


@pytest.mark.parametrize("options", [[], ["--lossy"], ["--lossy", "--size", "40"], ["--format", "png"]])
def test_files_of_every_kind_lose_nothing_unasked(options: list[str], tmp_path: Path) -> None:
    source, to = tmp_path / "src", tmp_path / "dst"
    lossy = photos_and_others(source)
    before = tree(source)
    assert len(before) > 200 and len(lossy) > 20
    assert run(source, to, *options) == 0
    assert tree(source) == before
    found = tree(to)
    lossless = {f"photo-RGB-{name}" for name in ("bmp0.bmp", "ppm0.ppm", "png1.png", "tif3.tif", "webp3.webp")}
    recoded = {name for name in before if found.get(name) != before[name]}
    assert len(recoded & lossy) > 10
    if not options:
        assert recoded <= lossy
    else:  # RGB photographs, too, but labels of lossless formats never; a PNG may be as small already
        assert recoded >= lossless - ({"photo-RGB-png1.png"} if "png" in options else set()) and {name[:5] for name in recoded - lossy} == {"photo"}
    for name in recoded:
        new = to / recode.target_name(name, Settings("png" if "png" in options else "jpeg"))
        mode, size, *more = seen(source / name)
        assert mode in ("RGB", "L") and seen(new) == (mode, (53, 40) if "--size" in options else size, *more)
        if "--size" not in options:
            a, b = (np.asarray(Image.open(path), float) for path in (source / name, new))
            assert np.abs(a - b).mean() < (8 if "png" not in options else 1e-9)


@pytest.mark.parametrize(("options", "dropped"), [([], 2), (["--format", "png"], 0), (["--format", "png", "--lossy"], 3)])
def test_dropped_metadata_are_told_and_never_dropped_by_png(
    options: list[str], dropped: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, made, exif, text = tmp_path / "src", photo(1, 96, 72), Image.Exif(), PngImagePlugin.PngInfo()
    source.mkdir()
    exif[0x010F] = "the camera"
    text.add_text("scale", "0.001")
    made.save(source / "a.jpg", quality=95, exif=exif)
    made.save(source / "b.jpg", quality=95, comment=b"mine")
    made.save(source / "c.png", pnginfo=text, compress_level=0)
    made.save(source / "plain.jpg", quality=95, icc_profile=b"profile", dpi=(72, 72))
    before = tree(source)
    assert run(source, tmp_path / "dst", *options) == 0
    found, said = tree(tmp_path / "dst"), capsys.readouterr().out
    assert len([name for name in before if found.get(name) != before[name]]) == dropped + 1
    assert ("dropped: " in said) == bool(dropped) and (not dropped or f", of {dropped} (a.jpg)" in said)


def test_baseline_rewrites_progressive_photos_without_a_loss(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image, exif, wanted = photo(3), Image.Exif(), {}
    exif[ORIENTATION] = 6
    options = {"quality": 88, "exif": exif, "icc_profile": b"profile" * 40, "comment": b"mine"}
    for name, (mode, subsampling) in {
        "rgb": ("RGB", 2), "whole": ("RGB", 0), "gray": ("L", 0), "four": ("CMYK", 0),
    }.items():  # fmt: skip
        path = source / "class0" / f"{name}.jpg"
        image.convert(mode).save(path, progressive=True, subsampling=subsampling, **options)
        wanted[f"class0/{name}.jpg"] = path.read_bytes()
    for name, length in (("cut", -900), ("begun", 3)):
        (source / "class0" / f"{name}.jpg").write_bytes(wanted["class0/rgb.jpg"][:length])
    before = tree(source)
    assert run(source, tmp_path / "dst", "--baseline") == 0
    after = tree(tmp_path / "dst")
    assert tree(source) == before and after.keys() == before.keys()
    assert {name for name, content in after.items() if content != before[name]} == set(wanted)
    for name in wanted:
        one, other = (Image.open(io.BytesIO(content)) for content in (wanted[name], after[name]))
        assert np.array_equal(np.asarray(one), np.asarray(other))
        infos = [{k: v for k, v in each.info.items() if "progress" not in k} for each in (one, other)]
        assert infos[0] == infos[1] and "progressive" not in other.info
    assert "4 encoded anew" in capsys.readouterr().out


def test_an_image_never_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder_of(tmp_path / "src", 1, quality=30)
    assert run(source, tmp_path / "dst", "--quality", "95", "--size", "1000") == 0
    assert tree(tmp_path / "dst") == tree(source)
    assert "copied: 1 that would not become smaller" in capsys.readouterr().out


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
    assert 0 < len(found) < 40 and not (tmp_path / "dst" / recode.PARTS).exists()
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
