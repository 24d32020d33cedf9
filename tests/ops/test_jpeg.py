"""Transforms of JPEG files: the same bits as torchvision's on what Pillow decodes, from the same seeds.

The photograph is matplotlib's grace_hopper.jpg, a work of the U.S. Navy in the public domain.
"""
from __future__ import annotations

import io
import math
import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
from matplotlib import cbook
from PIL import Image, ImageOps

from minato import _ops, ops
from minato.ops import jpeg

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TRAIN = ops.RandomResizedCropJpeg(96, mean=MEAN, std=STD)
VALID = ops.ResizeCenterCropJpeg(64, 48, mean=MEAN, std=STD)


def photo(width: int = 250, height: int = 188) -> Image.Image:
    with cbook.get_sample_data("grace_hopper.jpg") as file:
        return Image.open(file).convert("RGB").resize((width, height), Image.Resampling.LANCZOS)


def encoded(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


USUAL = {
    f"{name}{', progressive' * progressive}": encoded(photo(), quality=90, progressive=progressive,
                                                      **options)
    for progressive in (False, True)
    for name, options in {
        "4:4:4": {"subsampling": 0}, "4:2:2": {"subsampling": 1}, "4:2:0": {"subsampling": 2},
        "restarts": {"restart_marker_blocks": 5}, "RGB": {"keep_rgb": True},
    }.items()
}  # fmt: skip
USUAL["gray"] = encoded(photo().convert("L"))
USUAL["exif"] = encoded(photo(), exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0"
                                      b"\0\0\0\0")  # fmt: skip
GOOD = USUAL["4:2:0"]
OTHERS = {
    "CMYK": encoded(photo().convert("CMYK")), "PNG": encoded(photo(), "PNG"),
    "GIF": encoded(photo(), "GIF"), "WebP": encoded(photo(), "WebP"),
    "16 bits": encoded(photo().convert("I").convert("I;16"), "PNG"),
    "more after a marker": GOOD + b"\xff\xd8\xff", "fill bytes": GOOD[:2] + b"\xff\xff" + GOOD[2:],
}  # fmt: skip
BAD = {
    "empty": b"", "text": b"no image", "header": GOOD[:300], "half": GOOD[: len(GOOD) // 2],
    "without its end": GOOD[:-40], "broken PNG": OTHERS["PNG"][:2000],
    "of no height": GOOD.replace(b"\x08\x00\xbc\x00\xfa", b"\x08\x00\x00\x00\xfa"),
}  # fmt: skip


def normalized(image: Image.Image) -> torch.Tensor:
    """torchvision's ToTensor and Normalize."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
    return pixels.sub_(torch.tensor(MEAN).view(3, 1, 1)).div_(torch.tensor(STD).view(3, 1, 1))


def drawn(width: int, height: int, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3)) -> tuple[int, ...]:
    """torchvision's RandomResizedCrop.get_params: (left, top, width, height)."""
    logs = torch.log(torch.tensor(ratio))
    for _ in range(10):
        target = height * width * torch.empty(1).uniform_(scale[0], scale[1]).item()
        aspect = torch.exp(torch.empty(1).uniform_(logs[0].item(), logs[1].item())).item()
        w, h = int(round(math.sqrt(target * aspect))), int(round(math.sqrt(target / aspect)))
        if 0 < w <= width and 0 < h <= height:
            top = torch.randint(0, height - h + 1, size=(1,)).item()
            return torch.randint(0, width - w + 1, size=(1,)).item(), top, w, h
    if width / height < min(ratio):
        w, h = width, int(round(width / min(ratio)))
    elif width / height > max(ratio):
        w, h = int(round(height * max(ratio))), height
    else:
        w, h = width, height
    return (width - w) // 2, (height - h) // 2, w, h


def trained(image: Image.Image, size: int = 96, **options) -> torch.Tensor:
    left, top, width, height = drawn(*image.size, **options)
    image = image.crop((left, top, left + width, top + height)).resize(
        (size, size), Image.Resampling.BILINEAR)
    if torch.rand(1) < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return normalized(image)


def validated(image: Image.Image, size: int = 64, crop: int = 48) -> torch.Tensor:
    width, height = image.size
    long = int(size * max(width, height) / min(width, height))
    to = (size, long) if width <= height else (long, size)
    left, top = int(round((to[0] - crop) / 2.0)), int(round((to[1] - crop) / 2.0))
    return normalized(image.resize(to, Image.Resampling.BILINEAR).crop(
        (left, top, left + crop, top + crop)))


def opened(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file)).convert("RGB")


@pytest.fixture
def native(monkeypatch):
    """The answers of the native decoder."""
    found: list[bool] = []
    real = _ops.jpeg_crop
    monkeypatch.setattr(_ops, "jpeg_crop", lambda *args: found.append(real(*args)) or found[-1])
    if jpeg.find_library() is None:
        pytest.skip("there is no libjpeg-turbo")
    return found


@pytest.mark.parametrize("name", USUAL)
def test_usual_files_give_the_bits_of_torchvision(name, native):
    image, file = opened(USUAL[name]), USUAL[name]
    for seed in range(25):
        torch.manual_seed(seed)
        wanted, after = trained(image), torch.rand(1)
        torch.manual_seed(seed)
        assert torch.equal(TRAIN(file), wanted), seed
        assert torch.equal(torch.rand(1), after)
    assert torch.equal(VALID(file), validated(image))
    assert native == [True] * 26


@pytest.mark.parametrize("size", [(1, 1), (3, 200), (200, 2), (17, 33), (640, 480), (90, 1000)])
def test_sizes_and_shapes_give_the_bits_of_torchvision(size, native):
    file = encoded(photo(*size), quality=95)
    image = opened(file)
    for seed in range(10):
        torch.manual_seed(seed)
        wanted = trained(image)
        torch.manual_seed(seed)
        assert torch.equal(TRAIN(file), wanted), seed
    assert torch.equal(VALID(file), validated(image))
    assert all(native)


def test_windows_equal_the_whole_decoding(level, native):
    """Each place of a small region in the grid of blocks, with each instruction set."""
    library = jpeg.find_library().handle
    table = np.arange(256, dtype=np.uint8).reshape(1, 256).repeat(3, 0)
    rng = np.random.default_rng(0)
    for file in USUAL.values():
        whole = np.asarray(opened(file))
        for _ in range(60):
            left, top = int(rng.integers(0, 240)), int(rng.integers(0, 180))
            width, height = (int(rng.integers(1, 1 + n)) for n in (250 - left, 188 - top))
            out = np.empty((3, height, width), np.uint8)
            assert _ops.jpeg_crop(library, file, (left, top, width, height), (width, height),
                                  (0, 0, width, height), False, False, False, table, out, level)
            assert (out == whole[top:top + height, left:left + width].transpose(2, 0, 1)).all()


LARGE = photo(1003, 750)


@pytest.mark.parametrize("region", [(0, 0, 1003, 750), (100, 40, 811, 645), (303, 121, 400, 300)])
@pytest.mark.parametrize(("size", "scale"), [((90, 66), 4), ((201, 150), 2), ((40, 30), 8)])
def test_scaled_parts_equal_those_of_pillows_draft(region, size, scale, level):
    """But for the edges: Pillow also uses what lies outside of the region."""
    scale = max(s for s in (1, 2, 4, 8) if all(r >= s * to for r, to in zip(region[2:], size)))
    library, out = jpeg.find_library().handle, np.empty((3, size[1], size[0]), np.uint8)
    table = np.arange(256, dtype=np.uint8).reshape(1, 256).repeat(3, 0)
    file = encoded(LARGE, quality=92)
    assert _ops.jpeg_crop(library, file, region, size, (0, 0, *size), False, False, True, table,
                          out, level)
    with Image.open(io.BytesIO(file)) as image:
        image.draft("RGB", (1003 // scale, 750 // scale))
        assert image.size == tuple(-(-side // scale) for side in (1003, 750))
        left, top, width, height = (number / scale for number in region)
        box = (left, top, min(left + width, image.size[0]), min(top + height, image.size[1]))
        wanted = np.asarray(image.resize(size, Image.Resampling.BILINEAR, box=box))
    inside = (slice(2, -2),) * 2
    assert np.abs(out.transpose(1, 2, 0)[inside].astype(int) - wanted[inside]).max() <= 1


def test_scaled_samples_are_close_to_exact_ones(tmp_path):
    file, errors = encoded(LARGE, quality=92), []
    exact, scaled = (ops.RandomResizedCropJpeg(96, decode=how) for how in ("exact", "scaled"))
    for seed in range(20):
        made = []
        for transform in (exact, scaled):
            torch.manual_seed(seed)
            made.append(transform(file))
        errors.append(float((made[0] - made[1]).square().mean()))
    assert 0 < np.mean(errors) < 1e-4  # 40 dB


def test_instruction_sets_resize_alike(level, native):
    library = jpeg.find_library().handle
    table = np.arange(256, dtype=np.uint8).reshape(1, 256).repeat(3, 0)
    for size in [(31, 47), (250, 188), (500, 300), (9, 3), (1, 1), (239, 100), (400, 9)]:
        for tall_down_first in (False, True):
            out = [np.empty((3, size[1], size[0]), np.uint8) for _ in range(2)]
            for n, to in zip((0, level), out):
                _ops.jpeg_crop(library, GOOD, (3, 5, 240, 180), size, (0, 0, *size), True,
                               tall_down_first, False, table, to, n)
            assert (out[0] == out[1]).all()


@pytest.mark.parametrize("size, tall", [((239, 100), True), ((200, 99), True), ((200, 100), False),
                                        ((100, 60), False), ((250, 188), False)])  # fmt: skip
def test_tall_region_is_resized_vertically_first(size, tall, native):
    library = jpeg.find_library().handle
    table = np.arange(256, dtype=np.uint8).reshape(1, 256).repeat(3, 0)
    out = [np.empty((3, size[1], size[0]), np.uint8) for _ in range(2)]
    for tall_down_first, to in zip((False, True), out):
        _ops.jpeg_crop(library, GOOD, (3, 5, 240, 180), size, (0, 0, *size), False,
                       tall_down_first, False, table, to)
    assert (out[0] != out[1]).any() == tall  # the order of the passes shows in the rounding


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds_give_the_pixels_of_pillow(name):
    image = opened(OTHERS[name])
    torch.manual_seed(3)
    wanted = trained(image)
    torch.manual_seed(3)
    assert torch.equal(TRAIN(OTHERS[name]), wanted)
    assert torch.equal(VALID(OTHERS[name]), validated(image))


@pytest.mark.parametrize("name", BAD)
def test_bad_files_raise_the_error_of_pillow(name, tmp_path):
    path = tmp_path / "photo.jpg"
    path.write_bytes(BAD[name])
    with pytest.raises(Exception) as wanted, open(path, "rb") as file:
        Image.open(file).convert("RGB")
    small = ops.RandomResizedCropJpeg(8, scale=(0.01, 0.02))  # its rows end before the damage
    for transform in (TRAIN, VALID, small):
        with pytest.raises(type(wanted.value)) as error:
            transform(path)
        assert str(wanted.value) in str(error.value) and str(path) in str(error.value)


def test_missing_file_raises_its_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"photo\.jpg"):
        TRAIN(tmp_path / "photo.jpg")


def test_damaged_codes_give_the_pixels_of_pillow(native):
    rng = np.random.default_rng(int(torch.initial_seed()) % 1000)
    start = GOOD.index(b"\xff\xda") + 20
    for seed in range(60):
        file = bytearray(GOOD)
        for _ in range(3):
            file[int(rng.integers(start, len(file) - 2))] = int(rng.integers(0, 256))
        torch.manual_seed(seed)
        wanted, failed = None, None
        try:
            wanted = trained(opened(file))
        except OSError as error:
            failed = error
        torch.manual_seed(seed)
        if failed is None:
            assert torch.equal(TRAIN(file), wanted), seed
        else:
            with pytest.raises(type(failed)):
                TRAIN(file)


def test_large_photos_follow_limits_of_pillow(monkeypatch, native):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 250 * 188 - 1)
    with pytest.warns(Image.DecompressionBombWarning):
        TRAIN(GOOD)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(Image.DecompressionBombError):
        TRAIN(GOOD)
    assert native == []


def test_orient_turns_photos_as_exif_says(native):
    image = opened(USUAL["exif"])
    turned = ops.ResizeCenterCropJpeg(64, 48, mean=MEAN, std=STD, orient=True)
    assert torch.equal(VALID(USUAL["exif"]), validated(image))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(USUAL["exif"]))).convert("RGB")
    assert upright.size == (188, 250)
    assert torch.equal(turned(USUAL["exif"]), validated(upright))
    assert torch.equal(turned(GOOD), validated(opened(GOOD)))
    assert native == [True, True]


def test_every_form_of_bytes_gives_the_same(tmp_path):
    path = tmp_path / "photo.jpg"
    path.write_bytes(GOOD)
    array = np.frombuffer(GOOD, np.uint8)
    wanted = VALID(GOOD)
    for file in (path, str(path), bytearray(GOOD), memoryview(GOOD), array,
                 np.repeat(array, 2)[::2], torch.tensor(array)):  # fmt: skip
        assert torch.equal(VALID(file), wanted)
    for file in (photo(), array.reshape(1, -1), array.astype(np.int32), 7):
        with pytest.raises(TypeError, match="bytes"):
            VALID(file)


def test_dtypes_are_those_of_torch(native):
    numbers = VALID(GOOD)
    for dtype in ("float16", "bfloat16"):
        made = ops.ResizeCenterCropJpeg(64, 48, MEAN, STD, dtype)(GOOD)
        assert torch.equal(made, numbers.to(getattr(torch, dtype)))
    values = ops.ResizeCenterCropJpeg(64, 48, dtype="uint8")(GOOD)
    plain = ops.ResizeCenterCropJpeg(64, 48)(GOOD)
    assert values.dtype == torch.uint8 and torch.equal(values.float().div(255), plain)
    assert ops.RandomResizedCropJpeg((40, 70))(GOOD).shape == (3, 40, 70)


def test_no_flip_draws_no_number():
    torch.manual_seed(1)
    drawn(250, 188)
    wanted = torch.rand(1)
    torch.manual_seed(1)
    ops.RandomResizedCropJpeg(32, flip=0)(GOOD)
    assert torch.equal(torch.rand(1), wanted)


def test_without_library_pillow_decodes_after_one_warning(monkeypatch):
    monkeypatch.setattr(jpeg, "_libraries", lambda: ["libjpeg.so.0"])
    wanted = VALID(GOOD)
    jpeg.find_library.cache_clear()
    jpeg._library.cache_clear()
    try:
        with pytest.warns(UserWarning, match="libjpeg-turbo"):
            slow = ops.ResizeCenterCropJpeg(64, 48, MEAN, STD)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(slow(GOOD), wanted)
    finally:
        jpeg.find_library.cache_clear()
        jpeg._library.cache_clear()


def test_wrong_libraries_are_refused():
    with pytest.raises(OSError, match="does not open"):
        _ops.jpeg_library("libjpeg.so.0")
    with pytest.raises(ValueError, match=r"libc\.so\.6 is no libjpeg-turbo"):
        _ops.jpeg_library("libc.so.6")


def test_pickled_transforms_make_the_same():
    again = pickle.loads(pickle.dumps(VALID))
    assert again == VALID and torch.equal(again(GOOD), VALID(GOOD))


def test_threads_make_the_same(native):
    files = [*USUAL.values(), *OTHERS.values()]
    wanted, found = [VALID(file) for file in files], []

    def run() -> None:
        found.append([torch.equal(VALID(file), made) for file, made in zip(files, wanted)])

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(map(all, found))


@pytest.mark.parametrize("options, message", [
    ({"size": 0}, "size must be"), ({"size": (1, 2, 3)}, "size must be"),
    ({"scale": (1, 0.5)}, "scale must be"), ({"ratio": (0, 1)}, "ratio must be"),
    ({"flip": 2}, "flip must be"), ({"mean": (1, 2)}, "mean must be"), ({"std": (1, 0, 1)}, "std must"),
    ({"dtype": "int8"}, "dtype must be"), ({"dtype": "uint8", "mean": MEAN}, "floating-point"),
    ({"reference": "torch"}, "reference must be"),
])  # fmt: skip
def test_wrong_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        ops.RandomResizedCropJpeg(**{"size": 8, **options})
    with pytest.raises(ValueError, match="crop at most"):
        ops.ResizeCenterCropJpeg(32, 33)
