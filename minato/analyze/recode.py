"""``minato recode``: a copy of a folder whose images are smaller, and so faster to read and decode.

The source is only read. One rule, which ``minato analyze --codecs`` has, too: a file is encoded anew only if
it is known to be a photograph of 8-bit RGB, or of 8-bit gray from a lossy format, without alpha. Every other
file may hold labels, depth, flow or coded numbers, and is copied; REASONS has all causes. Each file is written
under a temporary name and renamed when it is whole, with the source's time of change. So a run that was
interrupted goes on where it ended.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any

import numpy as np

from .. import _core
from ..ops.jpeg import baseline
from ..text import Progress, format_bytes, format_seconds

#: why a file is copied as it is
REASONS = {
    "unreadable": "that Pillow cannot decode",
    "frames": "with several pictures in one file",
    "palette": "with a palette, or one bit a pixel",
    "depth": "whose values are not stored in 8 bits each",
    "alpha": "with an alpha channel or a transparent colour",
    "channels": "that are neither RGB nor gray",
    "tags": "with tags that would be lost, such as those of GeoTIFF, colours of their own or a turned TIFF",
    "lossless": "in a lossless format; --lossy encodes the photographs among them anew",
    "gray": "gray and in a lossless format, which may be labels or depth",
    "flat": "of few colours or flat areas, which may be labels",
    "numbers": "whose colours or neighbouring pixels are unrelated, which may be coded numbers",
}

#: of Pillow; it opens no others here
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "PPM", "GIF")
#: how Pillow names 8-bit RGB and gray as the file stores them. It opens a PNG of 16 bits as "RGB",
#: too, and only the mode of its tiles ("RGB;16B") tells
STORED = ("RGB", "BGR", "L")
#: decoders of PPM that scale values
SCALING = ("ppm", "ppm_plain")
#: the EXIF tag of an image's orientation, which TIFF has, too
ORIENTATION = 0x0112
#: tags of TIFF from PRIVATE on belong to an application, but for copyright, IPTC, Photoshop, EXIF, ICC, GPS
PRIVATE, HARMLESS = 0x8000, {0x8298, 0x83BB, 0x8649, 0x8769, 0x8773, 0x8825}
#: the gamma and the primaries of sRGB as PNG stores them
GAMMA = 0.45455
PRIMARIES = (0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06)
#: tags of TIFF below PRIVATE that describe a picture; the others there say how it is stored
DESCRIBING = {0x010D, 0x010E, 0x010F, 0x0110, 0x0131, 0x0132, 0x013B, 0x013C, 0x02BC}
#: the tag of a colour profile, which is kept
PROFILE = 0x8773
#: what Pillow's info says of an image besides: how it is stored, what is kept, and EXIF, of which the tags count
STORAGE = {
    "jfif", "jfif_version", "jfif_unit", "jfif_density", "adobe", "adobe_transform", "progressive", "progression",
    "dpi", "resolution", "compression", "interlace", "loop", "background", "timestamp", "duration",
    "gamma", "srgb", "chromaticity", "icc_profile", "exif",
}  # fmt: skip

#: photographs have more colours than this
COLORS = {"RGB": 256, "L": 32}
#: values that are looked at, of rows that are spread over the image
SAMPLED = 100_000
#: Of neighbouring pixels, at most this share is equal. Photographs had 0.00 to 0.41, those of JPEG 30 up
#: to 0.64; label maps have 0.9 and more
EQUAL = 0.75
#: of neighbours that differ, at most this share differs by more than FAR. Photographs had at most 0.19,
#: labels and packed numbers 0.5 to 1
FAR, FAR_SHARE = 48, 0.35
#: Channels of these differences correlate by at least this. Photographs had 0.40 to 0.95; normals,
#: flow, coordinates, packed depth and colour wheels have -1 to 0.31
RELATED = 0.35


class NotAPhoto(Exception):
    """The file is to be copied; its argument says why, by a key of COPIED."""


@dataclass(frozen=True)
class Photo:
    """A decoded photograph, RGB or gray."""

    image: Any
    lossless: bool
    #: CPU seconds of decoding
    seconds: float
    #: what an encoder gets to keep: the orientation and the colour profile
    metadata: dict[str, bytes]
    #: whether there is more, which is lost
    more: bool = False


def read_photo(file: IO[bytes], lossless: bool = True) -> Photo:
    """Decodes a file.

    lossless: whether photographs in a lossless format count.

    Raises:
        NotAPhoto: if the file is not known to be a photograph.
    """
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # large pictures; Pillow refuses those that are too large
        try:
            lossy = is_lossy(file)
            began = time.thread_time()
            with Image.open(file, formats=FORMATS) as image:
                reason = _judge_header(image)
                if not reason and not lossy:
                    reason = "gray" if image.mode == "L" else "" if lossless else "lossless"
                if not reason:
                    image.load()
                    took = time.thread_time() - began
                    reason = _judge_pixels(image, lossy)
                    metadata, more = _read_metadata(image), _has_more(image)
        except Exception:  # decoders raise errors of any class
            reason = "unreadable"
    if reason:
        raise NotAPhoto(reason)
    return Photo(image, not lossy, took, metadata, more)


def is_lossy(file: IO[bytes]) -> bool:
    """Whether the file is known to be a JPEG or WebP that has lost information. It is rewound."""
    head = file.read(12)
    found = False
    if head[:2] == b"\xff\xd8":
        file.seek(2)
        while len(mark := file.read(4)) == 4 and mark[0] == 0xFF:
            if 0xC0 <= mark[1] <= 0xCF and mark[1] not in (0xC4, 0xC8, 0xCC):  # the start of the frame
                found = mark[1] in (0xC0, 0xC1, 0xC2)
                break
            file.seek(int.from_bytes(mark[2:], "big") - 2, 1)
    elif head[:4] == b"RIFF" and head[8:] == b"WEBP":
        while len(chunk := file.read(8)) == 8 and not found:
            found = chunk[:4] == b"VP8 "
            size = int.from_bytes(chunk[4:], "little")
            file.seek(size + size % 2, 1)
    file.seek(0)
    return found


def _judge_header(image: Any) -> str:
    """Why an image that is not decoded yet is no photograph, or ""."""
    if getattr(image, "n_frames", 1) > 1:
        return "frames"
    if image.mode in ("P", "PA", "1") or image.format == "GIF":
        return "palette"
    if image.mode[0] in "IF":
        return "depth"
    if image.mode in ("RGBA", "LA", "RGBa", "La") or "transparency" in image.info:
        return "alpha"
    if image.mode not in COLORS:
        return "channels"
    if image.format not in ("JPEG", "WEBP"):
        decoder, _, _, given = image.tile[0]
        stored = given if isinstance(given, str) else given[0]
        if stored not in STORED or decoder in SCALING:
            return "depth"
    colors = (image.info.get("gamma", GAMMA), *image.info.get("chromaticity", PRIMARIES))
    tags = getattr(image, "tag_v2", {})
    private = any(tag >= PRIVATE and tag not in HARMLESS for tag in tags)
    if private or tags.get(ORIENTATION, 1) != 1 or not np.allclose(colors, (GAMMA, *PRIMARIES), atol=1e-3):
        return "tags"
    return ""


def _judge_pixels(image: Any, lossy: bool) -> str:
    """Why decoded pixels are no photograph, or "". A lossy format holds no numbers that must stay
    exact, so for these only areas of one colour count."""
    if image.getcolors(COLORS[image.mode]) is not None:
        return "flat"
    pixels = np.asarray(image)
    rows = pixels[:: pixels.size // SAMPLED + 1].astype(np.int16)
    steps = np.diff(rows, axis=1).reshape(-1, 1 if pixels.ndim == 2 else 3)
    changes = steps[steps.any(axis=1)]
    if len(changes) <= (1 - EQUAL) * len(steps):
        return "flat"
    if lossy:
        return ""
    near = changes[np.abs(changes).max(axis=1) <= FAR]
    if len(near) < (1 - FAR_SHARE) * len(changes):
        return "numbers"
    related = max(_relate(changes), _relate(near))  # edges of things may hide it, and so may fine noise
    return "" if related >= RELATED else "numbers"


def _relate(changes: Any) -> float:
    """The least correlation of two channels; that of a constant one is 0."""
    with np.errstate(all="ignore"):
        return float(np.nan_to_num(np.corrcoef(changes.T)).min())


def _read_metadata(image: Any) -> dict[str, bytes]:
    from PIL import Image

    found = {"exif": b"", "icc_profile": image.info.get("icc_profile") or b""}
    orientation = image.getexif().get(ORIENTATION)
    if orientation is not None:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        found["exif"] = exif.tobytes()
    return {name: value for name, value in found.items() if value}


def _has_more(image: Any) -> bool:
    """Whether the file has metadata besides those of _read_metadata(): a comment, a text, a date, a place."""
    tags = image.getexif().keys() - {PROFILE}
    return bool(image.info.keys() - STORAGE) or any(tag in DESCRIBING or tag >= PRIVATE for tag in tags)


# ---- the command's settings and results ------------------------------------------------------

IMAGES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm"}
#: format -> suffixes that say so; the first is given to files whose suffix says another format
SUFFIXES = {"jpeg": (".jpg", ".jpeg"), "webp": (".webp",), "png": (".png",)}
#: of Settings.format: progressive JPEG files become baseline ones, with the same pixels
BASELINE = "baseline"
#: in the destination: the settings, so that no second run mixes others into it
SETTINGS = ".minato-recode.json"
#: in the destination while a run lasts: the files that are being written
PARTS = ".minato-recode-parts"
#: why a file is copied
COPIED = {
    **REASONS,
    "sequential": "that are no whole progressive JPEG files",
    "unfit": "that the format cannot hold, such as gray in WebP",
    "larger": "that would not become smaller",
    "name": "whose new name is too long, or is that of another file",
    "other": "that are not images by their suffix",
    "link": "that are links which lead nowhere or back",
    "folder": "that are empty folders",
}
#: of this many images, one is decoded before and after, to compare the times
DECODED = 8
#: failures that are named
NAMED = 20

MISSING = "minato recode needs Pillow: pip install 'minato-loader[analyze]'"


@dataclass(frozen=True)
class Settings:
    """How images are encoded. size: pixels of the shorter side at most; None: as it is. lossy: whether
    images of lossless formats may lose information, too."""

    format: str = "jpeg"
    quality: int | None = 85
    size: int | None = None
    lossy: bool = False


@dataclass
class Result:
    """One file. what: made, there (from an earlier run), failed, or a key of COPIED."""

    path: str
    what: str
    before: int = 0
    after: int = 0
    #: CPU seconds of decoding, before and after, for some of the images
    times: tuple[float, float] | None = None
    why: str = ""
    #: its new name, where that is another one
    renamed: str = ""
    #: whether it was encoded anew without some of its metadata
    stripped: bool = False


# ---- one image -----------------------------------------------------------------------------


def shrink(image: Any, size: int | None) -> Any:
    """The image with a shorter side of ``size`` pixels at most, its proportions kept."""
    from PIL import Image

    if size is None or min(image.size) <= size:
        return image
    scale = size / min(image.size)
    to = tuple(max(1, round(side * scale)) for side in image.size)
    return image.resize(to, Image.Resampling.LANCZOS)


def encode(image: Any, settings: Settings, metadata: dict[str, bytes] | None = None) -> bytes:
    """The bytes of an RGB or gray image in the format of the settings."""
    options: dict[str, Any] = dict(metadata or {})
    if settings.format != "png":
        options["quality"] = settings.quality
    if settings.format == "jpeg":
        options["optimize"] = True
    to = io.BytesIO()
    image.save(to, settings.format.upper(), **options)
    return to.getvalue()


def decode(content: bytes) -> tuple[Any, float]:
    """An image with all its pixels, and the CPU seconds that this took."""
    from PIL import Image

    began = time.thread_time()
    image = Image.open(io.BytesIO(content))
    image.load()
    return image, time.thread_time() - began


def recode_image(source: Path, settings: Settings) -> tuple[bytes, Photo]:
    """The new content of an image, and the image that it was.

    Raises:
        NotAPhoto: if it is to be copied.
    """
    from PIL import Image

    if settings.format == BASELINE:
        return _rewrite(source.read_bytes())
    with open(source, "rb") as file:
        loses = settings.format != "png" or settings.size is not None
        photo = read_photo(file, settings.lossy or not loses)
    if photo.more and not (settings.lossy or loses):
        raise NotAPhoto("tags")
    made = shrink(photo.image, settings.size)
    try:
        content = encode(made, settings, photo.metadata)
        with Image.open(io.BytesIO(content)) as again:
            holds = (again.mode, again.size) == (made.mode, made.size)
    except Exception:  # encoders raise errors of any class
        holds = False
    if not holds:
        raise NotAPhoto("unfit")
    same = made is photo.image and (photo.image.format or "").lower() == settings.format
    if same and len(content) >= source.stat().st_size:
        raise NotAPhoto("larger")
    return content, photo


def _rewrite(content: bytes) -> tuple[bytes, Photo]:
    """A progressive JPEG file as a baseline one, whose pixels were compared."""
    made = baseline(content)
    if made is None:
        raise NotAPhoto("sequential")
    (before, took), (after, _) = decode(content), decode(made)
    if before.mode != after.mode or before.info.keys() - after.info.keys() - {"progressive", "progression"} or (
        not np.array_equal(np.asarray(before), np.asarray(after))
    ):
        raise NotAPhoto("unfit")
    return made, Photo(before, False, took, {})


# ---- one file ------------------------------------------------------------------------------


def recode_file(source: str, target: str, settings: Settings, path: str, name: str, timed: bool) -> Result:
    """Makes one file of the destination, unless it is there. name: what it is called if it is encoded
    anew; "" if it is to be copied, because that name is not free."""
    origin, to, times = Path(source, path), Path(target, path), None
    try:
        root = os.path.realpath(target)
        if os.path.commonpath([root, os.path.realpath(to.parent)]) != root:  # perhaps into the source
            raise ValueError(f"{to.parent} is a link that leads out of the destination")
        if origin.is_symlink() and (origin.is_dir() or not origin.exists()):  # it leads nowhere or back
            if not (to.is_symlink() and os.readlink(to) == os.readlink(origin)):
                to.parent.mkdir(parents=True, exist_ok=True)
                to.symlink_to(os.readlink(origin))
            return Result(path, "link")
        if origin.is_dir():  # an empty one
            os.listdir(origin)  # raises where the folder may not be read
            to.mkdir(parents=True, exist_ok=True)
            return Result(path, "folder")
        stat = origin.stat()
        if not S_ISREG(stat.st_mode):
            raise ValueError("it is neither a file nor a folder")
        for there in dict.fromkeys((Path(target, name or path), to)):
            if os.path.lexists(there):
                if there.stat().st_mtime_ns != stat.st_mtime_ns:
                    raise ValueError(f"{there} exists and is not of this file as it is now; remove it first")
                return Result(path, "there", stat.st_size, there.stat().st_size)
        part, what, stripped = Path(target, PARTS, str(os.getpid())), "made", False
        try:
            if origin.suffix.lower() not in IMAGES:
                raise NotAPhoto("other")
            if not name:
                raise NotAPhoto("name")
            content, photo = recode_image(origin, settings)
            times = (photo.seconds, decode(content)[1]) if timed else None
            part.write_bytes(content)
            to, stripped = Path(target, name), photo.more
        except NotAPhoto as error:
            what = str(error)
            shutil.copyfile(origin, part)
        shutil.copystat(origin, part)
        after = part.stat().st_size
        to.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, to)
        renamed = "" if to.name == origin.name else to.name
        return Result(path, what, stat.st_size, after, times, renamed=renamed, stripped=stripped)
    except Exception as error:
        text = str(error).replace(str(origin), path)
        return Result(path, "failed", why=f"{type(error).__name__}: {text}")


def _begin(parent: int) -> None:
    """A process of the pool: Ctrl-C is the command's affair, and it ends with the command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _core.die_with_parent(True)
    if os.getppid() != parent:
        os._exit(1)


# ---- a folder ------------------------------------------------------------------------------


def list_files(folder: str, below: str = "", above: tuple[str, ...] = ()) -> Iterator[str]:
    """Paths of all files, empty folders, and links that lead nowhere or to a folder that they lie in,
    relative to the folder, in order. Other links are followed."""
    at = os.path.join(folder, below)
    real = os.path.realpath(at)
    try:
        names = [] if real in above else sorted(os.listdir(at))
    except OSError:
        names = []  # it fails as a file does
    for name in names:
        path = os.path.join(below, name)
        if os.path.isdir(os.path.join(folder, path)) and path != PARTS:
            yield from list_files(folder, path, (*above, real))
        elif path not in (PARTS, SETTINGS):
            yield path
    if below and not names:
        yield below + "/"


def choose_names(folder: str, paths: list[str], settings: Settings) -> dict[str, str]:
    """What each file is called if it is encoded anew; "" if another one has that name, or if it is too
    long. Of two files that would get one name, the first gets it."""
    owners = {path.rstrip("/"): path for path in paths}
    owners.update((above, above) for path in paths for above in map(str, Path(path).parents))
    longest = os.pathconf(folder, "PC_NAME_MAX")
    found = {}
    for path in paths:
        name = target_name(path, settings)
        fits = len(os.fsencode(os.path.basename(name))) <= longest
        found[path] = name if fits and owners.setdefault(name, path) == path else ""
    return found


def target_name(path: str, settings: Settings) -> str:
    """The name in the destination; the suffix changes only where it says another format."""
    stem, suffix = os.path.splitext(path)
    if settings.format == BASELINE or suffix.lower() not in IMAGES or suffix.lower() in SUFFIXES[settings.format]:
        return path
    return stem + SUFFIXES[settings.format][0]


def printable(name: str) -> str:
    """A name of a file for a terminal: what is no text, or moves the cursor, is escaped."""
    text = os.fsencode(name).decode(errors="backslashreplace")
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class Totals:
    """Sums over files."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        #: of each outcome, the first file by name
        self.first: dict[str, str] = {}
        self.before = self.after = 0
        self.times: list[tuple[float, float]] = []
        self.failed: list[str] = []

    def add(self, done: Result) -> None:
        self._note(done.what, printable(done.path))
        self.before += done.before
        self.after += done.after
        if done.renamed:
            self._note("renamed", f"{printable(done.path)} is {printable(done.renamed)}")
        if done.stripped:
            self._note("stripped", printable(done.path))
        if done.times is not None:
            self.times.append(done.times)
        if done.what == "failed":
            self.failed.append(printable(f"{done.path}: {done.why}"))

    def _note(self, what: str, example: str) -> None:
        self.count[what] += 1
        self.first[what] = min(example, self.first.get(what, example))

    @property
    def done(self) -> int:
        return self.count.total() - self.count["renamed"] - self.count["stripped"]

    def lines(self, total: int) -> list[str]:
        """What was done, and a line for each cause of a copy."""
        copied = {what: text for what, text in COPIED.items() if self.count[what]}
        counts = [
            (self.count["made"], "encoded anew"), (sum(self.count[what] for what in copied), "copied as they are"),
            (self.count["there"], "there from an earlier run"), (self.count["failed"], "failed"),
        ]  # fmt: skip
        parts = [f"{count} {text}" for count, text in counts if count]
        lines = [f"{self.done} of {total} files: {'; '.join(parts) or 'nothing to do'}"]
        for what, text in copied.items():
            lines.append(f"  copied: {self.count[what]} {text} ({self.first[what]})")
        if count := self.count["renamed"]:
            lines.append(f"  renamed: {count} ({self.first['renamed']}); lists that name these files must change")
        if count := self.count["stripped"]:
            lines.append(f"  dropped: metadata but orientation and colour profile, of {count} ({self.first['stripped']})")
        if self.after:
            times = self.before / self.after
            lines.append(f"{format_bytes(self.before)} -> {format_bytes(self.after)}, {times:.2f} times smaller")
        if self.times:
            old, new = (format_seconds(sum(each) / len(self.times)) for each in zip(*self.times))
            lines.append(f"decoding an image: {old} -> {new} on a core (mean of {len(self.times)} images)")
        return lines


# ---- the command ---------------------------------------------------------------------------


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minato recode",
        description="Makes a copy of a folder whose photographs are encoded anew. Everything that is not "
        "known to be a photograph is copied as it is, and the source is only read. A second run goes on "
        "where the first was interrupted, and overwrites nothing.",
        epilog="Exit status: 1: some files failed, and are named; 2: wrong arguments.",
    )
    add = parser.add_argument
    add("source", metavar="SRC", help="a folder of images; it is only read")
    add("target", metavar="DST", help="the copy: a new folder, or one of the same command")
    add("--format", choices=tuple(SUFFIXES), default="jpeg", help="of the images (jpeg)")
    add("--quality", type=int, metavar="Q", help="of jpeg and webp, 1 to 100 (85)")
    add("--size", type=int, metavar="PIXELS", help="shrink the shorter side to this; never enlarges")
    add("--lossy", action="store_true", help="photographs in lossless formats may lose information, too")
    add("--baseline", action="store_true",
        help="nothing but this: rewrite progressive JPEG files as baseline ones with the same pixels, which are "
        "faster to decode")  # fmt: skip
    add("--workers", type=int, metavar="N", help="processes (one for each usable core)")
    return parser


def _check_settings(options: argparse.Namespace) -> Settings:
    """Raises ValueError for invalid values."""
    if options.baseline and (options.format, options.quality, options.size, options.lossy) != ("jpeg", None, None, False):
        raise ValueError("--baseline changes no pixels: leave out --format, --quality, --size and --lossy")
    if options.format == "png" and options.quality is not None:
        raise ValueError("--quality is for jpeg and webp; png loses nothing")
    if options.quality is None and options.format != "png":
        options.quality = 85
    if options.quality is not None and not 1 <= options.quality <= 100:
        raise ValueError(f"--quality {options.quality} is not between 1 and 100")
    if options.size is not None and options.size < 1:
        raise ValueError(f"--size must be a positive number of pixels, got {options.size}")
    if options.workers is not None and options.workers < 1:
        raise ValueError(f"--workers must be a positive number of processes, got {options.workers}")
    if options.baseline:
        return Settings(BASELINE, None)
    return Settings(options.format, options.quality, options.size, options.lossy)


def _open_settings(source: str, target: str, settings: Settings) -> IO[str]:
    """The settings file of the destination, locked; made if the destination is new.

    Raises:
        ValueError: if the destination cannot be this copy of the source.
    """
    if not os.path.isdir(source):
        raise ValueError(f"{source} is not a folder")
    real, to = os.path.realpath(source), os.path.realpath(target)
    if os.path.commonpath([real, to]) in (real, to):
        raise ValueError(f"{target} and {source} overlap; choose a folder outside the source")
    if os.path.exists(target) and not os.path.isdir(target):
        raise ValueError(f"{target} is not a folder")
    wanted = {"source": real, **asdict(settings)}
    path = Path(target, SETTINGS)
    if os.path.isdir(target) and os.listdir(target) and not path.exists():
        raise ValueError(f"{target} holds other files: give a new folder")
    os.makedirs(target, exist_ok=True)
    file = open(path, "a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.seek(0)
        text = file.read()
        found = json.loads(text) if text else wanted
        differs = [name for name in wanted if found.get(name) != wanted[name]]
        if differs:
            told = ", ".join(f"{name} {found.get(name)}, not {wanted[name]}" for name in differs)
            raise ValueError(f"{target} was made with {told}: give a new folder, or remove it")
        if not text:
            json.dump(wanted, file)
            file.flush()
    except BlockingIOError:
        file.close()
        raise ValueError(f"another minato recode writes to {target}") from None
    except ValueError:
        file.close()
        raise
    return file


def run(argv: list[str]) -> int:
    """Runs the command; returns the exit status."""
    try:
        options = _make_parser().parse_args(argv)
    except SystemExit as error:
        return int(error.code or 0)
    try:
        import PIL.Image
    except ImportError:
        print(MISSING, file=sys.stderr)
        return 1
    PIL.Image.init()
    try:
        settings = _check_settings(options)
        lock = _open_settings(options.source, options.target, settings)
    except (ValueError, OSError) as error:
        print(f"minato recode: {error}", file=sys.stderr)
        return 2
    with lock, contextlib.suppress(KeyboardInterrupt):
        return _recode_folder(options, settings, list(list_files(options.source)))
    return 128 + signal.SIGINT


def _recode_folder(options: argparse.Namespace, settings: Settings, paths: list[str]) -> int:
    """Makes all files with several processes. Those that were begun are made to their end."""
    source, target = options.source, options.target
    totals, progress = Totals(), Progress("minato recode")
    workers = min(options.workers or len(os.sched_getaffinity(0)), max(1, len(paths)))
    status, end = 0, ""
    parts = Path(target, PARTS)
    shutil.rmtree(parts, ignore_errors=True)  # of a run that was killed
    parts.mkdir()
    names = choose_names(target, paths, settings)
    pool = ProcessPoolExecutor(workers, get_context("fork"), _begin, (os.getpid(),))
    try:
        make = partial(recode_file, source, target, settings)
        timed = (number % DECODED == 0 for number in range(len(paths)))
        for done in pool.map(make, paths, names.values(), timed, chunksize=1 + len(paths) // 10_000):
            totals.add(done)
            progress.show(f"{totals.done} of {len(paths)} files", totals.done / len(paths))
    except KeyboardInterrupt:
        status, end = 128 + signal.SIGINT, "interrupted; the same command goes on from here"
    except BrokenProcessPool:
        status, end = 1, (
            "a process was killed, perhaps for want of memory: give --workers fewer. The same command "
            "goes on from here"
        )  # fmt: skip
    finally:
        pool.shutdown(cancel_futures=True)
        shutil.rmtree(parts, ignore_errors=True)
    progress.clear()
    failed = totals.failed[:NAMED]
    if more := len(totals.failed) - len(failed):
        failed.append(f"and {more} more failed")
    for text in [*failed, end] if end else failed:
        print(f"minato recode: {text}", file=sys.stderr)
    for line in totals.lines(len(paths)):
        print(line)
    return status or int(bool(totals.failed))
