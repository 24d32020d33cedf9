"""Which image files may be encoded anew.

One rule, for ``minato recode`` and ``minato analyze --codecs``: a file is encoded anew only if it is
known to be a photograph of 8-bit RGB, or of 8-bit gray from a lossy format, without alpha. Every other
file may hold labels, depth, flow or coded numbers, and is copied. REASONS has all causes.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

#: why a file is copied as it is
REASONS = {
    "unreadable": "that Pillow cannot decode",
    "frames": "with several pictures in one file",
    "palette": "with a palette, or one bit a pixel",
    "depth": "whose values are not stored in 8 bits each",
    "alpha": "with an alpha channel or a transparent colour",
    "channels": "that are neither RGB nor gray",
    "tags": "with tags that would be lost, such as those of GeoTIFF, gamma or a turned TIFF",
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
#: the gamma of sRGB as PNG stores it
GAMMA = 0.45455

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
    """The file is to be copied; ``reason`` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Photo:
    """A decoded photograph, RGB or gray."""

    image: Any
    lossless: bool
    #: CPU seconds of decoding
    seconds: float
    #: what an encoder gets to keep: the orientation and the colour profile
    metadata: dict[str, bytes]


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
                    metadata = _read_metadata(image)
        except Exception:  # decoders raise errors of any class
            reason = "unreadable"
    if reason:
        raise NotAPhoto(reason)
    return Photo(image, not lossy, took, metadata)


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
    gamma = image.info.get("gamma", GAMMA)
    tags = getattr(image, "tag_v2", {})
    private = any(tag >= PRIVATE and tag not in HARMLESS for tag in tags)
    if private or tags.get(ORIENTATION, 1) != 1 or abs(gamma - GAMMA) > 1e-3:
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
