"""What other codecs would do to the images that a dataset reads: measured in a fork of the keeper.

The files that samples open are watched, and their images are encoded anew in memory. The dataset is
run with these in their place: ``open`` and what else opens files by name gets another name.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from .facts import BARELY, Facts
from .recode import (
    MISSING, NotAPhoto, Photo, Settings, decode, encode, read_photo, shrink,
)  # fmt: skip
from .records import CodecRow, Codecs, Request
from .stages import seed_generators
from .work import clock, is_iterable, sample_maker, sample_makers, time_in_turns

#: what is tried, in this order, before raw, which has no header to speak of and is only compared
TRIED = (
    *(Settings("jpeg", quality) for quality in (95, 85, 75, 50)),
    Settings("webp", 85), Settings("webp", 75), Settings("png", None),
)  # fmt: skip
#: images that are encoded at most, and seconds that a check may encode
IMAGES_MOST, ENCODE_S = 64, 4.0
#: images are shrunk where the pipeline needs less than this share of their shorter side
SHRINK = 0.9
#: functions that open a file by its name, beyond open(): (module, name)
_OPENERS = (
    ("os", "open"), ("cv2", "imread"), ("torchvision.io", "read_image"), ("torchvision.io", "read_file"),
    ("torchvision.io.image", "read_image"), ("torchvision.io.image", "read_file"),
)  # fmt: skip


class Openers:
    """Notes the files that samples open, and opens others in their place."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.to: dict[str, str] = {}
        self.containers = 0  # images that came out of no file of their own
        #: of each image that was resized: the share of its pixels' width or height that was kept; 1 where
        #: the image was no longer as it was decoded
        self.kept: list[float] = []
        #: images of the sample that are as they were decoded, or a part of that
        self.decoded: list[Any] = []
        self._resizing = False
        opens = io.open

        def open_noted(file: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
            reads = not set(mode) & set("wax+")
            return opens(self._name(file) if reads else file, mode, *given, **named)

        builtins.open = io.open = open_noted  # type: ignore[assignment]
        for module, name in _OPENERS:
            function = getattr(sys.modules.get(module), name, None)
            if function is not None:
                setattr(sys.modules[module], name, partial(self._open, function))

    def _open(self, function: Any, file: Any, *given: Any, **named: Any) -> Any:
        return function(self._name(file), *given, **named)

    def _name(self, file: Any) -> Any:
        if not isinstance(file, (str, bytes, os.PathLike)):
            return file
        path = os.path.abspath(os.fsdecode(file))
        self.seen.append(path)
        return self.to.get(path, file)

    def watch_sizes(self) -> None:
        """From now on, notes what images are resized to, and those that come out of containers."""
        from PIL import Image

        thumbnail = Image.Image.thumbnail

        def note_resize(made: Any, this: Any, size: Any, _how: Any = None, box: Any = None, *_: Any, **_named: Any) -> None:
            whole = box or (0, 0, *this.size)
            self._note_resize(this, (whole[2] - whole[0], whole[3] - whole[1]), size)

        def shrink_noted(this: Any, size: Any, *given: Any, **named: Any) -> Any:
            before, self._resizing = this.size, True  # it decodes fewer pixels first, and resizes inside
            try:
                thumbnail(this, size, *given, **named)
            finally:
                self._resizing = False
            self._note_resize(this, before, this.size)

        for name in ("convert", "copy", "crop", "transpose"):
            _note_results(Image.Image, name, self._note_part)
        _note_results(Image, "open", self._note_decoded)
        _note_results(Image.Image, "resize", note_resize)
        setattr(Image.Image, "thumbnail", shrink_noted)
        if (cv2 := sys.modules.get("cv2")) is not None:
            for name in ("imread", "imdecode"):
                _note_results(cv2, name, lambda made, *_, **_named: self.decoded.append(made))
            _note_results(cv2, "cvtColor", self._note_part)
            _note_results(cv2, "resize", lambda made, image, *_, **_named: self._note_resize(
                image, image.shape[1::-1], made.shape[1::-1]))  # fmt: skip

    def _note_decoded(self, image: Any, file: Any, *_: Any, **_named: Any) -> None:
        self.containers += not isinstance(file, (str, bytes, os.PathLike))
        self.decoded.append(image)

    def _note_part(self, made: Any, image: Any, *_: Any, **_named: Any) -> None:
        """Of a function whose result is as decoded as what it gets."""
        if any(each is image for each in self.decoded):
            self.decoded.append(made)

    def _note_resize(self, image: Any, before: Any, after: Any) -> None:
        if not self._resizing:
            share = max(a / max(1, b) for a, b in zip(after, before))
            self.kept.append(share if any(each is image for each in self.decoded) else 1.0)


def _note_results(owner: Any, name: str, note: Callable[..., None]) -> None:
    """From now on, tells of each result of a function, and of what it was given."""
    function = getattr(owner, name)

    def noted(*given: Any, **named: Any) -> Any:
        made = function(*given, **named)
        note(made, *given, **named)
        return made

    setattr(owner, name, noted)


def file_in_memory(content: bytes) -> str:
    """The name of a file that stands for another. It goes with the processes that hold it."""
    number = os.memfd_create("minato-analyze")
    view = memoryview(content)
    while view:
        view = view[os.write(number, view) :]
    return f"/proc/self/fd/{number}"


def psnr(one: Any, other: Any) -> float:
    """Decibels between two images of a size; infinite for equal ones."""
    a, b = (np.asarray(image.convert("RGB"), np.float32) for image in (one, other))
    error = float(np.mean((a - b) ** 2))
    return 10 * math.log10(255**2 / error) if error else math.inf


def load_photo(path: str) -> tuple[Photo, int] | None:
    """The photograph in a file, and the file's bytes; None if it is not known to hold one."""
    with contextlib.suppress(NotAPhoto, OSError), io.open(path, "rb") as file:
        content = file.read()
        return read_photo(io.BytesIO(content)), len(content)
    return None


# ---- the measurement -----------------------------------------------------------------------


class _Row:
    """What is known of one codec."""

    def __init__(self, name: str, settings: Settings | None) -> None:
        self.name, self.settings = name, settings
        self.bytes: list[int] = []
        self.decode: list[float] = []
        self.psnr: list[float] = []
        self.costs: list[tuple[float, float]] = []
        self.files: dict[str, str] = {}
        self.error = ""

    def summary(self) -> CodecRow:
        finite = [each for each in self.psnr if math.isfinite(each)]
        wall, cpu = map(_mean, zip(*self.costs)) if self.costs else (None, None)
        return CodecRow(
            self.name, _mean(self.bytes) or 0.0, _mean(self.decode) or 0.0,
            self.settings.format if self.settings else "", self.settings.quality if self.settings else None,
            _mean(finite), min(finite, default=None), self.error, wall, cpu or 0.0,
        )  # fmt: skip


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def measure(request: Request, loader: Any) -> Codecs:
    """Bytes, time to decode, and loss of each codec, and what samples take with it."""
    try:
        import PIL.Image
    except ImportError:
        raise RuntimeError(MISSING.replace("minato recode", "--codecs")) from None
    PIL.Image.init()
    openers, end = Openers(), clock() + request.seconds
    openers.watch_sizes()
    sampled, sizes = _sample_files(openers, sample_makers(loader), clock() + 0.2 * request.seconds)
    paths = dict.fromkeys(path for _, paths in sampled for path in paths)
    result = Codecs(files=len(paths), containers=openers.containers)
    openers.seen.clear()
    tried = [_Row(f"{settings.format} {settings.quality or ''}".rstrip(), settings) for settings in TRIED]
    rows = [_Row("as it is", None), *tried, _Row("raw", None)]
    images = {path: found for path in paths if (found := load_photo(path)) is not None}
    if not images:
        return result
    result.skipped = result.files - len(images)
    result.per_sample = sum(p in images for _, ps in sampled for p in ps) / len(sampled)
    # pixels of the shorter side that the first resize of a sample leaves, if clearly less than there are
    shorter = {path: min(photo.image.size) for path, (photo, _) in images.items()}
    most = max(min(1.0, max(sizes[path])) * side for path, side in shorter.items())
    if 0 < most < SHRINK * statistics.median(shorter.values()):
        result.size = math.ceil(most - 1e-6)
    result.lossless = any(photo.lossless for photo, _ in images.values())
    result.folder = os.path.commonpath([os.path.dirname(path) for path in images])
    within = clock() + 0.6 * (end - clock())
    for number, (path, (photo, size)) in enumerate(images.items()):
        if clock() > within and number >= 4:
            break
        image = shrink(photo.image, result.size)
        rows[0].bytes.append(size)
        rows[0].decode.append(photo.seconds)
        for row in rows[1:]:
            content = encode(image, row.settings) if row.settings else encode(image.convert("RGB"), Settings("ppm"))
            again, once = decode(content)
            row.bytes.append(len(content))
            row.decode.append(min(once, decode(content)[1]))
            row.psnr.append(psnr(image, again))
            row.files[path] = file_in_memory(content)
        result.images = number + 1
    if not is_iterable(loader):
        whole = [index for index, paths in sampled if all(p in rows[1].files for p in paths if p in images)]
        make = sample_maker(loader.dataset)
        source = [(index, partial(make, index)) for index in whole] * 3
        setups = [partial(setattr, openers, "to", row.files) for row in rows]
        for row, costs, error in zip(rows, *time_in_turns(source, setups, end)):
            row.costs, row.error = costs, error
        openers.to = {}
    result.rows = [row.summary() for row in rows]
    return result


def _sample_files(
    openers: Openers, source: Iterator[tuple[Any, Callable[[], Any]]], end: float
) -> tuple[list[tuple[Any, list[str]]], dict[str, list[float]]]:
    """The files of some samples, and what their images were resized to: for samples of one file."""
    found: dict[Any, list[str]] = {}
    sizes: dict[str, list[float]] = {}
    for number, (index, make) in enumerate(source):
        if (clock() > end and number >= 4) or len(found) >= IMAGES_MOST or index in found:
            break
        openers.seen.clear()
        openers.kept.clear()
        openers.decoded.clear()
        with contextlib.suppress(Exception):
            seed_generators(number)
            make()
            paths = found[index] = [p for p in dict.fromkeys(openers.seen) if os.path.isfile(p)]
            for path in paths:
                sizes.setdefault(path, []).extend(openers.kept[:1] or [1.0])
    return list(found.items()), sizes


# ---- a check -------------------------------------------------------------------------------


def replace_files(dataset: Any, batches: list[list[Any]], settings: Settings) -> list[list[Any]]:
    """Puts encoded images in the place of the files that the first batches read. This holds for
    this process and the workers that it forks. Returns these batches."""
    openers, make = Openers(), sample_maker(dataset)
    end, whole = clock() + ENCODE_S, []
    for batch in batches:
        for index in batch:
            openers.seen.clear()
            make(index)
            for path in dict.fromkeys(openers.seen):
                if path not in openers.to and (found := load_photo(path)) is not None:
                    openers.to[path] = file_in_memory(encode(shrink(found[0].image, settings.size), settings))
        whole.append(batch)
        if clock() > end or len(openers.to) >= 4 * IMAGES_MOST:
            break
    return whole


#: decibels of the worst image, and quality, below which a codec is not recommended. Networks
#: trained on JPEG 75 and less were found to be less accurate
LOSS, QUALITY = 30.0, 75
#: decibels by which a codec may lose more and still count as equal
EQUAL = 0.5
#: a codec that loses less is preferred to one that is faster by less than this
CLOSE = 1.05
#: of these, one whose samples take more CPU time than this multiple of the least is left out
CHEAP = 1.3
#: storages that codecs are compared on: bytes a second
STORAGES = (
    ("network, 5 MB/s", 5e6), ("disk, 23 MB/s", 23e6), ("SSD, 280 MB/s", 280e6), ("memory", math.inf),
)  # fmt: skip


def codec_rows(f: Facts) -> list[CodecRow]:
    """The codecs that were measured, each with its rate on this storage."""
    told = f.codecs
    if told.images < 4:
        return []
    cold = [one.bytes_per_s for one in f.storage.rates if f.storage.cold]  # else its speed is not known
    return [replace(row, rate=codec_rate(f, row, max(cold, default=math.inf))) for row in told.rows]


def codec_rate(f: Facts, row: CodecRow, storage: float = math.inf) -> float:
    """The loader's rate with a codec: its own, as the time of samples changes. Where processes wait
    for one storage, the rate changes as the waits do. storage: bytes a second at most."""
    told, own = f.codecs, f.own_rate
    if not own or row.error:
        return 0.0
    was = told.rows[0]
    if row.wall is None or was.wall is None:  # samples of an iterable dataset are made once
        wall = max(f.mean - was.decode + row.decode, row.decode)
        made = own * f.mean / wall
    else:
        one, waits, before = work_rate(f, was), row.wall - row.cpu, was.wall - was.cpu
        made = own * work_rate(f, row) / one
        if f.workers > 1 and before > 0.3 * was.wall and own < 0.7 * one:
            made = min(work_rate(f, row), own * before / max(waits, BARELY))
    return float(min(made, storage / max(1.0, row.bytes * told.per_sample)))


def work_rate(f: Facts, row: CodecRow) -> float:
    """Samples a second that workers make with a codec, where they wait for nothing but cores."""
    return float(min(max(1, f.workers) / max(row.wall or 0.0, 1e-9), f.cores / max(row.cpu, 1e-9)))


def storage_rate(f: Facts, row: CodecRow, speed: float) -> float | None:
    """Samples a second with a codec and a storage of ``speed`` bytes a second. Only the CPU time
    of samples counts, and the reading of each file once."""
    told, cpu = f.codecs, row.cpu
    if row.error:
        return None
    if row.wall is None:
        cpu = max(f.mean * f.cpu_share - told.rows[0].decode + row.decode, row.decode)
    read = speed / max(1.0, row.bytes * told.per_sample)
    return float(min(min(max(1, f.workers), f.cores) / cpu, read))


def winners(f: Facts) -> list[tuple[str, str, float]]:
    """Of each storage, the codec that is fastest there of those that lose as little as JPEG 85, and
    its rate."""
    rows = codec_rows(f)
    least = min((row.psnr or 0.0 for row in rows if row.name == "jpeg 85"), default=0.0)
    rows = [row for row in rows if row.psnr is None or row.psnr >= least - EQUAL]
    found = []
    for name, speed in STORAGES:
        rates = [(rate, row.name) for row in rows if (rate := storage_rate(f, row, speed)) is not None]
        if rates:
            rate, codec = max(rates)
            found.append((name, codec, rate))
    return found
