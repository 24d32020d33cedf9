"""``minato recode``: a copy of a folder whose images are smaller, and so faster to read and decode.

The source is only read. Each file is written under a temporary name and renamed when it is whole,
with the source's time of change. So a run that was interrupted goes on where it ended.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import io
import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any

from .progress import Progress

IMAGES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm"}
#: format -> suffixes that say so; the first is given to files whose suffix says another format
SUFFIXES = {"jpeg": (".jpg", ".jpeg"), "webp": (".webp",), "png": (".png",)}
#: in the destination: the settings, so that no second run mixes others into it
SETTINGS = ".minato-recode.json"
#: of a file that is being written
PART = ".minato-part"
#: the EXIF tag of an image's orientation
ORIENTATION = 0x0112
#: of this many images, one is decoded before and after, to compare the times
DECODED = 8
#: failures that are named
NAMED = 20
#: files that wait for each process
AHEAD = 8
PR_SET_PDEATHSIG = 1

MISSING = "minato recode needs Pillow: pip install 'minato-loader[analyze]'"


@dataclass(frozen=True)
class Settings:
    """How images are encoded. size: pixels of the shorter side at most; None: as it is."""

    format: str = "jpeg"
    quality: int | None = 85
    size: int | None = None


@dataclass
class Result:
    """One file. what: made, copied, kept (as small already), there (from an earlier run), failed."""

    path: str
    what: str
    before: int = 0
    after: int = 0
    #: CPU seconds of decoding, for some of the images
    decoded: tuple[float, float] | None = None
    why: str = ""


# ---- one image -----------------------------------------------------------------------------


def shrink(image: Any, size: int | None) -> Any:
    """The image with a shorter side of ``size`` pixels at most, its proportions kept."""
    from PIL import Image

    if size is None or min(image.size) <= size:
        return image
    scale = size / min(image.size)
    to = tuple(max(1, round(side * scale)) for side in image.size)
    return image.resize(to, Image.Resampling.LANCZOS)


def encode(image: Any, settings: Settings, exif: bytes = b"") -> bytes:
    """The bytes of an RGB, RGBA or grey image in the format of the settings."""
    if settings.format == "jpeg" and image.mode not in ("RGB", "L"):
        image = image.convert("RGB")
    options: dict[str, Any] = {"exif": exif} if exif else {}
    if settings.format != "png":
        options["quality"] = settings.quality
    if settings.format == "jpeg":
        options["optimize"] = True
    to = io.BytesIO()
    image.save(to, settings.format.upper(), **options)
    return to.getvalue()


def decode(content: bytes | str) -> tuple[Any, float]:
    """An image with all its pixels, and the CPU seconds that this took."""
    from PIL import Image

    began = time.thread_time()
    image = Image.open(io.BytesIO(content) if isinstance(content, bytes) else content)
    image.load()
    return image, time.thread_time() - began


def why_no_photo(image: Any, settings: Settings) -> str:
    """Why an image is copied as it is: its values may be labels, or it would lose some. Else ""."""
    if getattr(image, "n_frames", 1) > 1:
        return "several pictures in one file"
    if image.mode in ("P", "PA", "1") or image.mode[0] in "IF":
        return "a palette, one bit, or more than 8 bits a value"
    if image.mode in ("L", "LA") and image.format != "JPEG":
        return "grey and without loss"
    return ""


def target_name(path: str, settings: Settings) -> str:
    """The name in the destination; the suffix changes only where it says another format."""
    stem, suffix = os.path.splitext(path)
    if suffix.lower() not in IMAGES or suffix.lower() in SUFFIXES[settings.format]:
        return path
    return stem + SUFFIXES[settings.format][0]


def _recode_image(source: Path, settings: Settings, timed: bool) -> tuple[bytes | None, Any]:
    """The new content of an image, or None where it is to be copied; and the times of decoding."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # large pictures; too large ones raise an error
        began = time.thread_time()
        with Image.open(source) as image:
            image.load()
            before = time.thread_time() - began
            if why_no_photo(image, settings):
                return None, None
            found = image.getexif().get(ORIENTATION)
            exif = Image.Exif()
            if found is not None:
                exif[ORIENTATION] = found
            made = shrink(image if image.mode in ("RGB", "RGBA", "L", "LA") else image.convert("RGB"),
                           settings.size)  # fmt: skip
            content = encode(made, settings, exif.tobytes() if found is not None else b"")
        if len(content) >= source.stat().st_size and (image.format or "").lower() == settings.format:
            return b"", None
        return content, (before, decode(content)[1]) if timed else None


# ---- one file ------------------------------------------------------------------------------


def recode_file(source: str, target: str, path: str, settings: Settings, timed: bool, taken: str = "") -> Result:
    """Makes one file of the destination, unless it is there. taken: the file whose name this one
    would get if it were encoded."""
    origin = Path(source, path)
    try:
        stat = origin.stat()
        for name in dict.fromkeys((target_name(path, settings), path)):
            with contextlib.suppress(FileNotFoundError):
                there = Path(target, name).stat()
                if there.st_mtime_ns == stat.st_mtime_ns and not (taken and name != path):
                    return Result(path, "there", stat.st_size, there.st_size)
        content, times = None, None
        what, to = "copied", Path(target, path)
        if origin.suffix.lower() in IMAGES:
            content, times = _recode_image(origin, settings, timed)
            what = "made" if content else "kept" if content is not None else "as it is"
            if content and taken:
                raise ValueError(f"it would overwrite {taken}; rename one of them")
            if content:
                to = Path(target, target_name(path, settings))
        to.parent.mkdir(parents=True, exist_ok=True)
        part = to.with_name(to.name + PART)
        if content:
            part.write_bytes(content)
        else:
            shutil.copyfile(origin, part)
        os.utime(part, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        after = part.stat().st_size
        os.replace(part, to)
        return Result(path, what, stat.st_size, after, times)
    except Exception as error:  # decoders raise errors of any class
        text = str(error).replace(str(origin), path)
        return Result(path, "failed", why=f"{type(error).__name__}: {text}")


_given: tuple[str, str, Settings]


def _begin(source: str, target: str, settings: Settings, parent: int) -> None:
    """A process of the pool: Ctrl-C is the command's affair, and it ends with the command."""
    global _given
    _given = source, target, settings
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _recode_task(path: str, timed: bool, taken: str) -> Result:
    source, target, settings = _given
    return recode_file(source, target, path, settings, timed, taken)


# ---- a folder ------------------------------------------------------------------------------


def list_files(folder: str, below: str = "", above: tuple[str, ...] = ()) -> Iterator[str]:
    """Paths of all files, relative to the folder, in order. Links are followed, but for those to a
    folder that they lie in."""
    at = os.path.join(folder, below)
    real = os.path.realpath(at)
    if real in above:
        return
    for name in sorted(os.listdir(at)):
        path = os.path.join(below, name)
        full = os.path.join(folder, path)
        if os.path.isdir(full):
            yield from list_files(folder, path, (*above, real))
        elif path != SETTINGS and (os.path.isfile(full) or os.path.islink(full)):
            yield path


def find_name_clashes(paths: list[str], settings: Settings) -> dict[str, str]:
    """Files that would get the name of another one when they are encoded: which one."""
    owners = {path: path for path in paths}
    found = {}
    for path in paths:
        name = target_name(path, settings)
        owner = owners.setdefault(name, path)
        if owner != path:
            found[path] = owner
    return found


class Totals:
    """Sums over files."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}
        self.before = self.after = 0
        self.times: list[tuple[float, float]] = []
        self.failed: list[str] = []

    def add(self, done: Result) -> None:
        self.count[done.what] = self.count.get(done.what, 0) + 1
        self.before += done.before
        self.after += done.after
        if done.decoded is not None:
            self.times.append(done.decoded)
        if done.what == "failed":
            self.failed.append(f"{done.path}: {done.why}")

    @property
    def done(self) -> int:
        return sum(self.count.values())

    def lines(self, total: int) -> list[str]:
        from .formats import format_bytes, format_seconds

        words = {
            "made": "encoded anew", "kept": "copied, because they would not become smaller",
            "as it is": "copied as they are: a palette, one bit, over 8 bits, several pictures, or grey "
            "without loss. They may be labels",
            "copied": "other files, copied", "there": "there from an earlier run",
            "failed": "failed, and are not in the destination",
        }  # fmt: skip
        parts = [f"{self.count[what]} {text}" for what, text in words.items() if what in self.count]
        lines = [f"{self.done} of {total} files: {'; '.join(parts) or 'nothing to do'}"]
        if self.after:
            times = self.before / self.after
            lines.append(f"{format_bytes(self.before)} -> {format_bytes(self.after)}, {times:.2f} times smaller")
        if self.times:
            old, new = (sum(each) / len(self.times) for each in zip(*self.times))
            lines.append(
                f"decoding an image: {format_seconds(old)} -> {format_seconds(new)} on a core "
                f"(mean of {len(self.times)} images)"
            )
        return lines


def recode_files(source: str, target: str, paths: list[str], settings: Settings, workers: int,
         progress: Progress, totals: Totals) -> None:  # fmt: skip
    """Makes all files with several processes.

    Raises:
        KeyboardInterrupt: after the files that were begun are whole.
        BrokenProcessPool: when a process was killed.
    """
    pool = ProcessPoolExecutor(
        workers, get_context("fork"), _begin, (source, target, settings, os.getpid())
    )
    ahead: set[Future[Result]] = set()

    def take(done: set[Future[Result]]) -> None:
        for future in done:
            ahead.discard(future)
            totals.add(future.result())
        progress.show(f"{totals.done} of {len(paths)} files", totals.done / max(1, len(paths)))

    taken = find_name_clashes(paths, settings)
    try:
        for number, path in enumerate(paths):
            ahead.add(pool.submit(_recode_task, path, number % DECODED == 0, taken.get(path, "")))
            if len(ahead) >= AHEAD * workers:
                take(wait(ahead, return_when=FIRST_COMPLETED).done)
        while ahead:
            take(wait(ahead, return_when=FIRST_COMPLETED).done)
    finally:
        for future in ahead:
            future.cancel()
        pool.shutdown()
        if ahead:
            with contextlib.suppress(BrokenProcessPool):
                take({future for future in ahead if future.done() and not future.cancelled()})


# ---- the command ---------------------------------------------------------------------------


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minato recode",
        description="Makes a copy of a folder whose images are encoded anew. Names, folders and all "
        "other files stay as they are, and so does the source. A second run goes on where the first "
        "was interrupted.",
        epilog="Exit status: 1: some files failed, and are named; 2: wrong arguments.",
    )
    add = parser.add_argument
    add("source", metavar="SRC", help="a folder of images; it is only read")
    add("target", metavar="DST", help="the copy: a new folder, or one of the same command")
    add("--format", choices=tuple(SUFFIXES), default="jpeg", help="of the images (jpeg)")
    add("--quality", type=int, metavar="Q", help="of jpeg and webp, 1 to 100 (85)")
    add("--size", type=int, metavar="PIXELS", help="shrink the shorter side to this; never enlarges")
    add("--workers", type=int, metavar="N", help="processes (one for each usable core)")
    return parser


def _check_settings(options: argparse.Namespace) -> Settings:
    """Raises ValueError for invalid values."""
    if options.format == "png" and options.quality is not None:
        raise ValueError("--quality is for jpeg and webp; png loses nothing")
    quality = 85 if options.quality is None else options.quality
    if not 1 <= quality <= 100:
        raise ValueError(f"--quality {quality} is not between 1 and 100")
    if options.size is not None and options.size < 1:
        raise ValueError(f"--size must be a positive number of pixels, got {options.size}")
    if options.workers is not None and options.workers < 1:
        raise ValueError(f"--workers must be a positive number of processes, got {options.workers}")
    settings = Settings(options.format, quality, options.size)
    return replace(settings, quality=None) if options.format == "png" else settings


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
    totals, progress = Totals(), Progress("minato recode")
    workers = min(options.workers or len(os.sched_getaffinity(0)), max(1, len(paths)))
    status, end = 0, ""
    try:
        recode_files(options.source, options.target, paths, settings, workers, progress, totals)
    except KeyboardInterrupt:
        status, end = 128 + signal.SIGINT, "interrupted; the same command goes on from here"
    except BrokenProcessPool:
        status, end = 1, (
            "a process was killed, perhaps for want of memory: give --workers fewer. The same command "
            "goes on from here"
        )  # fmt: skip
    progress.clear()
    for text in totals.failed[:NAMED]:
        print(f"minato recode: {text}", file=sys.stderr)
    if len(totals.failed) > NAMED:
        print(f"minato recode: and {len(totals.failed) - NAMED} more failed", file=sys.stderr)
    for line in totals.lines(len(paths)):
        print(line)
    if end:
        print(f"minato recode: {end}", file=sys.stderr)
    return status or int(bool(totals.failed))
