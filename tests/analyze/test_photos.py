"""The rule that decides which image files are encoded anew."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image, ImageDraw, TiffImagePlugin

from minato.analyze.recode import REASONS, NotAPhoto, is_lossy, read_photo

from .photos import photo

SIDE = (96, 72)
PHOTO = photo(1, *SIDE)
GRAY = PHOTO.convert("L")


def saved(image: Any, format: str, **options: Any) -> bytes:
    to = io.BytesIO()
    image.save(to, format, **options)
    return to.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def deep_png(channels: int, color: int) -> bytes:
    """A PNG of 16 bits; Pillow writes only gray ones, and opens the others as 8-bit RGB."""
    values = np.asarray(PHOTO).astype(">u2")[..., :1].repeat(channels, -1) * 257
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    header = struct.pack(">IIBBBBB", *SIDE, 16, color, 0, 0, 0)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows))
            + chunk(b"IEND", b""))  # fmt: skip


def png_with(kind: bytes, content: bytes) -> bytes:
    plain = saved(PHOTO, "PNG")
    return plain[:33] + chunk(kind, content) + plain[33:]


def smooth(seed: int, power: float = 2.5) -> Any:
    """Values of 0 to 1 that change slowly, as depth and flow do."""
    rng, (width, height) = np.random.default_rng(seed), SIDE
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    frequency[0, 0] = 1
    field = np.fft.irfft2(np.exp(2j * np.pi * rng.random(frequency.shape)) / frequency**power, SIDE[::-1])
    return (field - field.min()) / (field.max() - field.min())


def packed(numbers: Any) -> Any:
    """Numbers of 24 bits as RGB."""
    numbers = np.asarray(numbers).astype(np.int64)
    return Image.fromarray(np.stack([numbers & 255, numbers >> 8 & 255, numbers >> 16], -1).astype(np.uint8))


def stacked(*channels: Any) -> Any:
    return Image.fromarray(np.stack([np.clip(c, 0, 255) for c in channels], -1).astype(np.uint8))


def region_ids(cell: int) -> Any:
    ids = np.random.default_rng(0).integers(0, 1 << 24, (SIDE[1] // cell, SIDE[0] // cell))
    return ids.repeat(cell, 0).repeat(cell, 1)


def spotted_ids() -> Any:
    """Regions with ids, and every fifth pixel another one."""
    rng, ids = np.random.default_rng(1), region_ids(8)
    return np.where(rng.random(ids.shape) < 0.2, rng.integers(0, 1 << 24, ids.shape), ids)


def normals() -> Any:
    down, right = np.gradient(smooth(1) * 60)
    vectors = np.stack([-right, -down, np.ones_like(down)], -1)
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True) + 1) * 127.5


def colored(values: Any) -> Any:
    """Values as hues."""
    full = np.full(values.shape, 255)
    return Image.fromarray(np.stack([values * 255, full, full], -1).astype(np.uint8), "HSV").convert("RGB")


def drawing() -> Any:
    image = Image.new("RGB", SIDE, "white")
    ImageDraw.Draw(image).ellipse([10, 10, 60, 50], fill="red", outline="blue")
    return image.resize((192, 144), Image.Resampling.BICUBIC)


def mask_jpeg() -> bytes:
    mask = np.zeros((144, 192), np.uint8)
    mask[30:100, 40:150] = 255
    return saved(Image.fromarray(mask), "JPEG", quality=90)


def tags(**more: Any) -> Any:
    found = TiffImagePlugin.ImageFileDirectory_v2()
    for tag, value in more.items():
        found[int(tag[1:])] = value
    return found


def sub_image(offset: int, value: bytes, content: bytes) -> bytes:
    return content[:offset] + value + content[offset + len(value) :]


FRAMES: dict[str, Any] = {"save_all": True, "append_images": [photo(2, *SIDE)]}
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (80, 90, 3), dtype=np.uint8))

#: why a file is no photograph; "lossy" and "lossless" are photographs
TABLE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "jpeg": ("lossy", lambda: saved(PHOTO, "JPEG")),
    "jpeg progressive": ("lossy", lambda: saved(PHOTO, "JPEG", progressive=True)),
    "jpeg of RGB": ("lossy", lambda: saved(PHOTO, "JPEG", keep_rgb=True)),
    "jpeg gray": ("lossy", lambda: saved(GRAY, "JPEG")),
    "jpeg of much loss": ("lossy", lambda: saved(photo(1), "JPEG", quality=10)),
    "jpeg of noise": ("lossy", lambda: saved(NOISE, "JPEG")),
    "webp": ("lossy", lambda: saved(PHOTO, "WEBP")),
    "webp with a profile": ("lossy", lambda: saved(PHOTO, "WEBP", icc_profile=b"profile")),
    "webp lossless": ("lossless", lambda: saved(PHOTO, "WEBP", lossless=True)),
    "webp lossless with a profile": (
        "lossless", lambda: saved(PHOTO, "WEBP", lossless=True, icc_profile=b"profile")),
    "png": ("lossless", lambda: saved(PHOTO, "PNG")),
    "png with text": ("lossless", lambda: png_with(b"tEXt", b"Author\0me")),
    "png of sRGB": ("lossless", lambda: png_with(b"gAMA", struct.pack(">I", 45455))),
    "tiff": ("lossless", lambda: saved(PHOTO, "TIFF")),
    "tiff packed": ("lossless", lambda: saved(PHOTO, "TIFF", compression="tiff_lzw")),
    "tiff with a profile": ("lossless", lambda: saved(PHOTO, "TIFF", icc_profile=b"profile")),
    "bmp": ("lossless", lambda: saved(PHOTO, "BMP")),
    "ppm": ("lossless", lambda: saved(PHOTO, "PPM")),
    "no image": ("unreadable", lambda: b"text"),
    "cut jpeg": ("unreadable", lambda: saved(PHOTO, "JPEG")[:-600]),
    "cut png": ("unreadable", lambda: saved(PHOTO, "PNG")[:-600]),
    "jpeg of 12 bits": ("unreadable", lambda: saved(PHOTO, "JPEG").replace(b"\xff\xc0\0\x11\x08", b"\xff\xc1\0\x11\x0c")),
    "jpeg 2000": ("unreadable", lambda: saved(PHOTO, "JPEG2000")),
    "gif of gray": ("palette", lambda: saved(GRAY.quantize(200).convert("L"), "GIF")),
    "gif": ("palette", lambda: saved(PHOTO, "GIF")),
    "png with a palette": ("palette", lambda: saved(PHOTO.convert("P"), "PNG")),
    "bmp with a palette": ("palette", lambda: saved(PHOTO.convert("P"), "BMP")),
    "png of one bit": ("palette", lambda: saved(PHOTO.convert("1"), "PNG")),
    "tiff of one bit": ("palette", lambda: saved(PHOTO.convert("1"), "TIFF", compression="group4")),
    **{f"{name} of frames": ("frames", lambda name=name: saved(PHOTO, name, **FRAMES))
       for name in ("GIF", "WEBP", "PNG", "TIFF", "MPO")},
    "png of 16 bits, RGB": ("depth", lambda: deep_png(3, 2)),
    "png of 16 bits, gray": ("depth", lambda: deep_png(1, 0)),
    "png of 16 bits, alpha": ("alpha", lambda: deep_png(4, 6)),
    "tiff of 16 bits": ("depth", lambda: saved(Image.fromarray(np.asarray(GRAY).astype(np.uint16)), "TIFF")),
    "tiff of floats": ("depth", lambda: saved(GRAY.convert("F"), "TIFF")),
    "tiff of integers": ("depth", lambda: saved(GRAY.convert("I"), "TIFF")),
    "tiff of other values": ("depth", lambda: saved(PHOTO.convert("RGBX"), "TIFF")),
    "ppm of 16 bits": ("depth", lambda: b"P6 96 72 65535\n" + np.asarray(PHOTO).astype(">u2").tobytes()),
    "ppm of 4 bits": ("depth", lambda: b"P6 96 72 15\n" + (np.asarray(PHOTO) // 16).tobytes()),
    "ppm in digits": ("depth", lambda: b"P3 96 72 255\n" + b" ".join(b"%d" % v for v in np.asarray(PHOTO).ravel())),
    "bmp of 16 bits": ("depth", lambda: bmp_of_15_bits()),
    "png with alpha": ("alpha", lambda: saved(PHOTO.convert("RGBA"), "PNG")),
    "png with a clear color": ("alpha", lambda: saved(PHOTO, "PNG", transparency=(1, 2, 3))),
    "webp with alpha": ("alpha", lambda: saved(Image.merge("RGBA", [*PHOTO.split(), GRAY]), "WEBP")),
    "tiff with alpha": ("alpha", lambda: saved(PHOTO.convert("RGBA"), "TIFF")),
    "gray with alpha": ("alpha", lambda: saved(PHOTO.convert("LA"), "PNG")),
    "jpeg of CMYK": ("channels", lambda: saved(PHOTO.convert("CMYK"), "JPEG")),
    "tiff of CMYK": ("channels", lambda: saved(PHOTO.convert("CMYK"), "TIFF")),
    "tiff of Lab": ("channels", lambda: saved(PHOTO.convert("LAB"), "TIFF")),
    "GeoTIFF": ("tags", lambda: saved(PHOTO, "TIFF", tiffinfo=tags(_33550=(1.0, 1.0, 0.0)))),
    "turned tiff": ("tags", lambda: saved(PHOTO, "TIFF", tiffinfo=tags(_274=6))),
    "png of another gamma": ("tags", lambda: png_with(b"gAMA", struct.pack(">I", 100000))),
    "png of other primaries": ("tags", lambda: png_with(
        b"cHRM", struct.pack(">8I", 31270, 32900, 68000, 32000, 26500, 69000, 15000, 6000))),
    "png of the primaries of sRGB": ("lossless", lambda: png_with(
        b"cHRM", struct.pack(">8I", 31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000))),
    "gray png": ("gray", lambda: saved(GRAY, "PNG")),
    "gray bmp": ("gray", lambda: saved(GRAY, "BMP")),
    "gray tiff": ("gray", lambda: saved(GRAY, "TIFF")),
    "depth as RGB": ("flat", lambda: saved(stacked(*[smooth(1) * 255] * 3), "PNG")),
    "label colors": ("flat", lambda: saved(PHOTO.quantize(40).convert("RGB"), "PNG")),
    "heat map": ("flat", lambda: saved(colored(smooth(1)), "PNG")),
    "drawing": ("flat", lambda: saved(drawing(), "PNG")),
    "one color": ("flat", lambda: saved(Image.new("RGB", SIDE, "red"), "JPEG")),
    "mask in jpeg": ("flat", mask_jpeg),
    "tiny image": ("flat", lambda: saved(PHOTO.resize((12, 12)), "PNG")),
    "narrow image": ("flat", lambda: saved(photo(1, 8, 400).crop((2, 0, 3, 400)), "PNG")),
    "region ids": ("flat", lambda: saved(packed(region_ids(8)), "PNG")),
    "small regions": ("numbers", lambda: saved(packed(region_ids(3)), "PNG")),
    "spotted regions": ("numbers", lambda: saved(packed(spotted_ids()), "PNG")),
    "packed depth": ("numbers", lambda: saved(packed(smooth(1) * (2**24 - 1)), "PNG")),
    "packed heights": ("numbers", lambda: saved(packed(smooth(1) * 30000 + 100000), "PNG")),
    "flow": ("numbers", lambda: saved(stacked(smooth(1) * 255, smooth(2) * 255, np.ones(SIDE[::-1])), "PNG")),
    "flow with validity": ("numbers", lambda: saved(stacked(*[smooth(n) * 255 for n in range(3)]), "PNG")),
    "normals": ("numbers", lambda: saved(stacked(*np.moveaxis(normals(), -1, 0)), "PNG")),
    "coordinates": ("numbers", lambda: saved(stacked(*np.mgrid[:72, :96] * 2.5, smooth(1) * 255), "PNG")),
    "noise": ("numbers", lambda: saved(NOISE, "WEBP", lossless=True)),
}  # fmt: skip


def bmp_of_15_bits() -> bytes:
    red, green, blue = (np.asarray(c).astype("<u2") >> 3 for c in PHOTO.split())
    content = (red << 10 | green << 5 | blue)[::-1].tobytes()
    header = struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 54 + len(content), 0, 0, 54, 40, *SIDE, 1, 16, 0,
                         len(content), 0, 0, 0, 0)  # fmt: skip
    return header + content


def judge(content: bytes) -> str:
    try:
        found = read_photo(io.BytesIO(content))
    except NotAPhoto as error:
        return str(error)
    return "lossless" if found.lossless else "lossy"


@pytest.mark.parametrize("name", TABLE)
def test_files_are_judged_as_the_table_says(name: str) -> None:
    expected, make = TABLE[name]
    assert judge(make()) == expected


def test_the_table_has_every_reason() -> None:
    assert {reason for reason, _ in TABLE.values()} - {"lossy"} == set(REASONS)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [(64, 48), (320, 240), (500, 375)])
def test_photographs_of_all_sizes_are_recognized(seed: int, size: tuple[int, int]) -> None:
    assert judge(saved(photo(seed, *size), "PNG")) == "lossless"


def test_lossless_photographs_are_refused_undecoded() -> None:
    with pytest.raises(NotAPhoto, match="lossless"):
        read_photo(io.BytesIO(saved(PHOTO, "PNG")[:-600]), lossless=False)
    assert not read_photo(io.BytesIO(saved(PHOTO, "JPEG")), lossless=False).lossless


def test_lossless_jpegs_are_not_lossy() -> None:
    content = saved(PHOTO, "JPEG")
    assert is_lossy(io.BytesIO(content))
    assert not is_lossy(io.BytesIO(content.replace(b"\xff\xc0", b"\xff\xc3")))
    for length in range(0, 400, 7):  # headers that are cut are none
        assert not is_lossy(io.BytesIO(content[:length])) or length > content.index(b"\xff\xc0")
