"""Targets that draw pipelines of native operators and their inputs: arrays of all kinds,
and damaged .npy files. tests/ops/reference.py is the oracle."""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Union

import numpy as np
import torch
from ops import reference
from ops.native import instruction_sets

from fuzz.mn_draws import Draws
from minato import ops as native

Pair = tuple[np.ndarray, Union[np.ndarray, None]]

DTYPES = ["float32", "uint8", "int16", "uint16", "int32", "float64"]
#: exceptions that minato may raise; a message is required, too
REFUSALS = (ValueError, TypeError, OverflowError, MemoryError, OSError, BufferError)
#: of a sample: more is not tried, but for what no machine has
MOST_VOXELS, NO_MEMORY = 1 << 17, 1 << 47
HUGE = 2**31 - 1


class Refused(Exception):
    """Minato must raise, too."""


class NotTried(Exception):
    """It would be valid, but take too long."""


# ---- operators -----------------------------------------------------------------------------------

SIZES: list[Any] = [
    0, -1, (HUGE, HUGE, HUGE), 2**31, 2**62, 2**70, (2**20, 2**20, 2**18), (1, 2), (1, 2, 3, 4),
    2.5, (2.5, 2, 2), math.nan, math.inf, None, "3", "345", [3, 2, 3], np.int64(3),
    np.array([2, 3, 4]), True, object(), (math.nan, 1, 1), (1, None, 1), (), torch.tensor([2, 2, 2]), (1, -(2**40), 1),
]  # fmt: skip
NUMBERS: list[Any] = [
    0.0, 1.0, 0.5, 100.0, -1.0, -0.0, 1e-60, 1e-40, 3e38, 1e300, -1e300, math.inf, -math.inf,
    math.nan, 2**70, np.float32(0.3), True, None, "1", 1j, 10**400, 255.5, 256, -3e9,
]  # fmt: skip
PROBABILITIES: list[Any] = [
    1.0, 0.5, 1 / 3, 0, 1, 0.25, 0.75, True, math.nan, -0.1, 1.5, math.inf, None, "0.5",
    np.float32(0.5), 5e-324, (1, 0.5, 0), [0.5] * 3, (1, 2, 3), (0.5,), torch.tensor(0.5),
]  # fmt: skip
FACTORS: list[Any] = [
    1.0, 0.5, 1.5, 2, 0.3, 1.1, 0.9, 1e300, 5e-324, -1, 0, math.nan, math.inf, None,
]  # fmt: skip
CASTS: list[Any] = ["float32", "uint8", None, "f4", np.uint8, "int16", ">f4", "no", 5, float]


def three(draws: Draws) -> Any:
    if draws.below(12) == 11:
        return draws.one_of(SIZES)
    each = tuple(1 + draws.below(9) for _ in range(3))
    return each[0] if draws.below(4) == 3 else each


def probability(draws: Draws) -> Any:
    return draws.one_of(PROBABILITIES if draws.below(6) == 5 else PROBABILITIES[:8])


def number(draws: Draws) -> Any:
    return draws.one_of(NUMBERS if draws.below(4) == 3 else NUMBERS[:5])


def factors(draws: Draws) -> Any:
    some = FACTORS if draws.below(10) == 9 else FACTORS[:7]
    return tuple(draws.one_of(some) for _ in range(2 if draws.below(20) == 19 else 3))


def cast(draws: Draws) -> Any:
    return draws.one_of(CASTS if draws.below(8) == 7 else CASTS[:3])


MAKE: list[Callable[[Draws], native.Operator]] = [
    lambda d: native.RandCrop(three(d), d.below(2) == 0),
    lambda d: native.RandBalancedCrop(three(d), probability(d), d.below(2) == 0, d.below(2) == 0),
    lambda d: native.RandFlip(probability(d)),
    lambda d: native.Cast(cast(d), cast(d)),
    lambda d: native.RandScaleIntensity(probability(d), number(d), number(d), d.below(2) == 0),
    lambda d: native.RandGaussianNoise(probability(d), number(d), number(d)),
    lambda d: native.Normalize(*(number(d) for _ in range(4 * d.below(2)))),
    lambda d: native.Pad(three(d), ("edge", "constant", "no")[d.below(16) % 5 // 2],
                         number(d), number(d)),
    lambda d: native.Resample(three(d)) if d.below(2) else native.Resample(factors=factors(d)),
]  # fmt: skip


def operators(draws: Draws) -> list[native.Operator]:
    made = []
    for _ in range(draws.below(6)):
        with contextlib.suppress(*REFUSALS):
            made.append(draws.one_of(MAKE)(draws))
    return made


# ---- operators -----------------------------------------------------------------------------------


def sizes_of(op: native.Operator) -> tuple[int, ...]:
    return op._describe()[4]


def fits(image: np.ndarray, label: np.ndarray | None, patch: tuple[int, ...]) -> None:
    if label is not None and label.shape[1:] != image.shape[1:]:
        raise Refused("image and label differ")
    if any(have < want for have, want in zip(image.shape[1:], patch)):
        raise Refused("fewer voxels than the patch")


def crop(op: Any, image: np.ndarray, label: Any, draws: reference.Draws) -> Pair:
    fits(image, label, sizes_of(op))
    return reference.rand_crop(image, label, draws, sizes_of(op), op.include_last)


def balanced_crop(op: Any, image: np.ndarray, label: Any, draws: reference.Draws) -> Pair:
    fits(image, label, sizes_of(op))
    looks = draws.u(0) < op.foreground
    if label is None or (looks and (label.dtype != np.uint8 or label.shape[0] != 1)):
        raise Refused("no such label")
    label_or_none = label if looks else label.astype(np.uint8) * 0  # not looked at
    start = reference.rand_balanced_crop(
        place_of(image.shape), label_or_none, draws, sizes_of(op), op.foreground, op.include_last
    )[0]
    at = np.unravel_index(int(start.flat[0]), image.shape[1:])
    return reference.cut(image, label, at, sizes_of(op))


def place_of(shape: tuple[int, ...]) -> np.ndarray:
    """A volume in which each voxel holds its position, so that a crop shows where it was taken."""
    if math.prod(shape[1:]) > MOST_VOXELS:
        raise NotTried
    return np.arange(math.prod(shape[1:])).reshape(1, *shape[1:])


def converted(volume: np.ndarray | None, dtype: Any) -> np.ndarray | None:
    if volume is None or dtype is None:
        return volume
    if np.dtype(dtype) == np.uint8 and volume.dtype != np.uint8:
        whole = np.trunc(volume.astype(np.float64))
        return np.where(np.isnan(whole), 0, np.clip(whole, 0, 255)).astype(np.uint8)
    return volume.astype(dtype, copy=False)


def scaled(op: Any, image: np.ndarray, label: Any, draws: reference.Draws) -> Pair:
    low, high = float(op.low), float(op.high)
    image = image.astype(np.float32)
    offset = 0.0 if op.around_one else 1.0
    return reference.rand_scale(image, draws, float(op.p), low, high, offset), label


def noisy(op: Any, image: np.ndarray, label: Any, draws: reference.Draws) -> Pair:
    image = image.astype(np.float32)
    return reference.rand_noise(image, draws, float(op.p), float(op.std), float(op.mean)), label


def normalized(op: Any, image: np.ndarray, label: Any, draws: reference.Draws) -> Pair:
    low, high, mean, std = (np.float32(float(v)) for v in (op.low, op.high, op.mean, op.std))
    image = image.astype(np.float32)
    image = np.where(image < low, low, image)
    image = np.where(image > high, high, image)
    return (image - mean) / std, label


def enough(shape: tuple[int, ...]) -> None:
    if math.prod(shape) >= NO_MEMORY:
        raise Refused("too large for any memory")
    if math.prod(shape) > MOST_VOXELS:
        raise NotTried


def padded(op: Any, image: np.ndarray, label: Any, draws: reference.Draws) -> Pair:
    def one(volume: np.ndarray, value: float) -> np.ndarray:
        missing = [max(0, want - have) for want, have in zip(sizes_of(op), volume.shape[1:])]
        if not any(missing):
            return volume
        enough((volume.shape[0], *(h + m for h, m in zip(volume.shape[1:], missing))))
        widths = [(0, 0), *((m // 2, m - m // 2) for m in missing)]
        if op.mode == "edge":
            return np.pad(volume, widths, mode="edge")
        if volume.dtype.name not in ("float32", "uint8"):
            raise Refused("a constant of another dtype")
        fill = converted(np.array([value], np.float64), volume.dtype)
        assert fill is not None
        return np.pad(volume, widths, constant_values=fill[0])

    return one(image, float(op.image)), None if label is None else one(label, float(op.label))


def resampled(op: Any, image: np.ndarray, label: Any, draws: reference.Draws) -> Pair:
    def shape_of(volume: np.ndarray) -> tuple[int, ...]:
        shape = sizes_of(op)
        if op.size is None:
            found = [float(f) * have for f, have in zip(op.factors, volume.shape[1:])]
            if not all(1 <= size < 2**31 for size in found):
                raise Refused("no such size")
            shape = tuple(map(int, found))
        if shape != volume.shape[1:]:
            enough((volume.shape[0], *shape))
            enough(volume.shape)
        return shape

    image = image.astype(np.float32)
    image = reference.linear(image, shape_of(image))
    return image, None if label is None else reference.nearest(label, shape_of(label))


STEPS: dict[type, Callable[..., Pair]] = {
    native.RandCrop: crop,
    native.RandBalancedCrop: balanced_crop,
    native.RandFlip: lambda op, image, label, draws: reference.rand_flip(
        image, label, draws, op._describe()[6]
    ),
    native.Cast: lambda op, image, label, draws: (
        converted(image, op.image), converted(label, op.label)),
    native.RandScaleIntensity: scaled,
    native.RandGaussianNoise: noisy,
    native.Normalize: normalized,
    native.Pad: padded,
    native.Resample: resampled,
}  # fmt: skip


def expected(some: list[native.Operator], first: int, pair: Pair, key: tuple[int, int]) -> Pair:
    """The expected result of the operators, the first of which has this number."""
    image, label = pair
    with np.errstate(all="ignore"):
        for place, op in enumerate(some, first):
            try:
                image, label = STEPS[type(op)](op, image, label, reference.Draws(key, place))
            except (TypeError, ValueError, OverflowError) as error:  # no numbers
                raise Refused(str(error)) from None
            except MemoryError:
                raise NotTried from None
    if math.prod(image.shape) > MOST_VOXELS:
        raise NotTried
    return image, label


# ---- inputs --------------------------------------------------------------------------------------

LAYOUTS: list[Callable[[np.ndarray], np.ndarray]] = [
    lambda a: a, lambda a: a, lambda a: a[..., ::-1], lambda a: a[:, ::-1, ::-1], np.asfortranarray,
    lambda a: a.transpose(0, 2, 1, 3), lambda a: np.repeat(a, 2, 3)[..., ::2],
    lambda a: np.frombuffer(b"." + a.tobytes(), np.uint8)[1:].view(a.dtype).reshape(a.shape),
    lambda a: np.broadcast_to(a[:, :1], a.shape), lambda a: np.broadcast_to(a[..., :1], a.shape),
    lambda a: a.view(np.ma.MaskedArray), lambda a: a.byteswap().view(a.dtype.newbyteorder()),
]  # fmt: skip
ODD: list[Callable[[np.ndarray], Any]] = [
    lambda a: None, lambda a: a.tolist(), lambda a: torch.tensor(a.tolist()), memoryview,
    lambda a: a[0], lambda a: a[None], lambda a: a[:, :0], lambda a: a.ravel()[0],
    lambda a: a.ravel()[:1].reshape(()),
    lambda a: a.astype(np.float16), lambda a: a > 0, lambda a: a.astype(complex),
    lambda a: a.astype(object), lambda a: a.astype("U"), lambda a: a.astype(np.int64),
    lambda a: a.astype("f4,u1"), lambda a: "a.npy", lambda a: b"a\0.npy", lambda a: Path("/"),
    lambda a: memoryview(a.tobytes()), lambda a: memoryview(a.astype(">i4")), lambda a: a.tobytes(),
    lambda a: np.ctypeslib.as_ctypes(np.ascontiguousarray(a.astype(np.float32))),
]  # fmt: skip
#: of images that no memory holds, as one voxel seen again and again
ENDLESS = [
    (1, HUGE, HUGE, 1), (1, 2**31, 2**31, 1), (2**62, 1, 1, 1), (4, 2**30, 2**30, 1),
    (1, 1, 1, 2**61), (1, 1, 2**59, 1), (1, 2**20, 2**20, 2**19),
]  # fmt: skip


def random_volume(draws: Draws, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    rng = np.random.default_rng(draws.below(256))
    if np.dtype(dtype).kind == "f":
        made = (rng.standard_normal(shape) * 10.0 ** (draws.below(5) - 1)).astype(dtype)
        odd = rng.choice([np.nan, np.inf, -np.inf, 1e-42, -0.0, 3e38], shape)
        return np.where(rng.random(shape) < 0.02 * draws.below(3), odd, made).astype(dtype)
    top = 3 if draws.below(2) else np.iinfo(dtype).max
    made = rng.integers(-top if dtype.startswith("i") else 0, top, shape)
    return (made * rng.integers(0, 2, shape)).astype(dtype)


def arrays(draws: Draws) -> tuple[np.ndarray, np.ndarray | None]:
    shape = (1 + draws.below(8) % 5 // 3, *(1 + draws.below(12) for _ in range(3)))
    image = random_volume(draws, shape, draws.one_of(DTYPES if draws.below(3) == 2 else DTYPES[:1]))
    if draws.below(4) == 3:
        return image, None
    channels = 2 if draws.below(16) == 15 else 1
    off = 1 if draws.below(16) == 15 else 0
    dtype = draws.one_of(DTYPES) if draws.below(4) == 3 else "uint8"
    return image, random_volume(draws, (channels, *shape[1:3], shape[3] + off), dtype)


def sound(volume: Any) -> np.ndarray | None:
    """A volume as NumPy sees it, or Refused."""
    if volume is None:
        return None
    if isinstance(volume, (np.ndarray, memoryview)):
        seen = np.asarray(volume)
        if seen.dtype.isnative and seen.dtype.name in DTYPES and seen.ndim == 4 and seen.size:
            return seen
    raise Refused("no volume")


def same(got: np.ndarray | None, want: np.ndarray | None) -> bool:
    """Equal in each bit, except for which NaN a NaN is."""
    if got is None or want is None:
        return got is want
    got, want = np.asarray(got), np.ascontiguousarray(want)
    if got.dtype != want.dtype or got.shape != want.shape or not got.flags.c_contiguous:
        return False
    if got.dtype.kind == "f":
        got, want = (np.where(np.isnan(v), np.full_like(v, np.nan), v) for v in (got, want))
    return got.tobytes() == want.tobytes()


def must_be(want: Pair | None, run: Callable[[], Pair], told: Any) -> None:
    """The same, or refused with a message where that is expected."""
    try:
        got = run()
    except REFUSALS as error:
        assert want is None, (told, repr(error))
        assert str(error), (told, repr(error))
        return
    assert want is not None, (told, "is not refused")
    assert same(got[0], want[0]) and same(got[1], want[1]), (told, got, want)


GUARD = 64  # bytes around an output, which stay as they are


class Outputs:
    """Arrays to write to, of the right kind or not."""

    def __init__(self, draws: Draws, want: Pair, image: Any) -> None:
        kind = draws.below(10)
        self.right = kind < 5
        wrong: list[Callable[[np.ndarray], Any]] = [
            lambda a: a[..., :-1], lambda a: a.astype(np.int64), lambda a: a[0],
            lambda a: (a.setflags(write=False), a)[1],
            lambda a: np.asfortranarray(np.stack([a] * 2)), lambda a: image, lambda a: a.tolist(), lambda a: bytearray(a.tobytes()),
            lambda a: memoryview(a), np.ctypeslib.as_ctypes,
            lambda a: a.byteswap().view(a.dtype.newbyteorder()),
        ]  # fmt: skip
        turn = draws.one_of(wrong)
        self.raw = [
            None if v is None else np.full(v.nbytes + 2 * GUARD, 0xA5, np.uint8) for v in want
        ]
        self.out: list[Any] = [
            None if v is None or raw is None
            else raw[GUARD : GUARD + v.nbytes].view(v.dtype).reshape(v.shape)
            for v, raw in zip(want, self.raw)
        ]  # fmt: skip
        if not self.right:
            self.out[0] = turn(self.out[0])
        elif kind == 4:
            self.out[0] = None

    def check(self) -> None:
        for raw in self.raw:
            if raw is not None:
                assert (raw[:GUARD] == 0xA5).all() and (raw[-GUARD:] == 0xA5).all()


def pipeline(data: bytes) -> None:
    """On arrays, and on files: the same as the reference, or an error where it has one."""
    draws = Draws(data)
    some, (image, label) = operators(draws), arrays(draws)
    keys: list[Any] = [draws.below(256), (draws.below(256), draws.below(256)), -1, (2**64, 1 << 63)]
    key = draws.one_of(keys)
    kind, level = draws.below(8), draws.below(len(instruction_sets()) + 1) - 1
    if kind >= 5:
        of_files(draws, some, image, label, native.operators._split_key(key), level)
        return
    given: list[Any] = [draws.one_of(LAYOUTS)(image), label]
    if label is not None:
        given[1] = draws.one_of(LAYOUTS)(label)
    if draws.below(12) == 11:
        at = 0 if label is None else draws.below(2)
        given[at] = draws.one_of(ODD)(given[at])
    elif draws.below(16) == 15:
        endless = np.broadcast_to(image.astype(np.uint8).flat[0], draws.one_of(ENDLESS))
        with contextlib.suppress(*REFUSALS):  # but where a crop comes first
            native.Pipeline(some, _level=level)(endless, key=key)
        return
    before = [v.tobytes() if isinstance(v, np.ndarray) else None for v in given]
    want: Pair | None = None
    try:
        seen = sound(given[0]), sound(given[1])
        if seen[0] is None:
            raise Refused("no image")
        want = expected(some, 0, (seen[0], seen[1]), native.operators._split_key(key))
    except Refused:
        pass
    except NotTried:
        return
    made = native.Pipeline(some, _level=level)
    must_be(want, lambda: made(*given, key=key), (some, given, key, level))
    if want is not None:
        outputs = Outputs(draws, want, given[0])
        try:
            got = made(*given, key=key, out=outputs.out)
        except REFUSALS as error:
            assert not outputs.right and str(error), (some, given, key, outputs.out)
        else:
            assert same(got[0], want[0]) and same(got[1], want[1]), (some, given, key, outputs.out)
        outputs.check()
    assert before == [v.tobytes() if isinstance(v, np.ndarray) else None for v in given]


# ---- files ---------------------------------------------------------------------------------------


WORDS = [b"9", b"-", b",", b"(", b"}", b"99999999999", b" "]


def damaged(draws: Draws, whole: bytes) -> bytes:
    at = draws.below(128) if draws.below(4) else draws.below(256) * len(whole) // 256
    kinds: list[Callable[[], bytes]] = [
        lambda: whole[:at], lambda: whole[:-1], lambda: b"",
        lambda: whole + b"x" * (1 + draws.below(9)),
        lambda: whole[:at] + bytes([draws.below(256)]) + whole[at + 1 :],
        lambda: whole[:at] + bytes([whole[at] ^ 1 << draws.below(8)]) + whole[at + 1 :],
        lambda: whole[:at] + whole[at + 1 + draws.below(9) :],
        lambda: whole[:at] + bytes(draws.below(256) for _ in range(draws.below(6))) + whole[at:],
        lambda: whole[:at] + draws.one_of(WORDS) + whole[at + 1 :],
    ]  # fmt: skip
    return draws.one_of(kinds)()


def write(draws: Draws, path: Path, array: np.ndarray) -> bool:
    """Whether the file is valid; its dtype is checked by the reader."""
    file = io.BytesIO()
    np.lib.format.write_array(file, array, draws.one_of([(1, 0), (2, 0), (3, 0)]))
    content, right = file.getvalue(), array.flags.c_contiguous or not array.flags.f_contiguous
    if draws.below(4) == 3:
        path.write_bytes(damaged(draws, content))
        return right and path.read_bytes() == content
    path.write_bytes(content)
    return right


def as_numpy_reads(path: Path, dtype: str) -> np.ndarray:
    array = np.load(path, allow_pickle=False)
    assert array.dtype == np.dtype(dtype) and array.ndim == 4 and array.size, (path, array)
    return array


def reader(draws: Draws, image: np.ndarray, label: np.ndarray | None) -> native.ReadNpy:
    """Of the right dtypes, mostly."""
    label_dtype = "uint8" if label is None else label.dtype.newbyteorder("=").name
    dtypes = [image.dtype.newbyteorder("=").name, label_dtype]
    if draws.below(12) == 11:
        dtypes[draws.below(2)] = draws.one_of(DTYPES)
    return native.ReadNpy(*dtypes, direct=draws.below(6) == 5)


def of_files(draws: Draws, some: list[native.Operator], image: np.ndarray, label: np.ndarray | None,
             key: tuple[int, int], level: int) -> None:  # fmt: skip
    volumes = [draws.one_of(LAYOUTS)(v) for v in (image, label) if v is not None]
    read = reader(draws, volumes[0], label)
    made = native.Pipeline([read, *some], _level=level)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("x.npy", "y.npy")][: len(volumes)]
        for run in range(2):  # the second time, files may have changed behind cached headers
            whole = [write(draws, path, v) for path, v in zip(paths, volumes)] if (
                run == 0 or draws.below(3) == 2) else whole  # fmt: skip
            must_be_read(made, read, some, paths, volumes, whole, key)


def must_be_read(made: native.Pipeline, read: native.ReadNpy, some: list[native.Operator],
                 paths: list[Path], volumes: list[np.ndarray], whole: list[bool],
                 key: tuple[int, int]) -> None:  # fmt: skip
    dtypes = (read.image, read.label)
    fits = all(v.dtype.isnative and v.dtype == np.dtype(d) for v, d in zip(volumes, dtypes))
    told = (made, paths, volumes, whole, key)
    try:
        got = made(*paths, key=key)
    except REFUSALS as error:
        assert str(error), told
        if all(whole) and fits and "bypass" not in str(error):
            wanted(some, (volumes[0], volumes[1] if len(volumes) > 1 else None), key, told, True)
        return
    there = [as_numpy_reads(path, dtype) for path, dtype in zip(paths, dtypes)]
    want = wanted(some, (there[0], there[1] if len(there) > 1 else None), key, told, False)
    assert want is None or (same(got[0], want[0]) and same(got[1], want[1])), (told, got, want)


def wanted(some: list[native.Operator], pair: Pair, key: tuple[int, int], told: Any,
           refused: bool) -> Pair | None:  # fmt: skip
    """The reference's result; it must refuse exactly the inputs that minato refused."""
    try:
        want = expected(some, 1, pair, key)
    except NotTried:
        return None
    except Refused as error:
        assert refused, (told, error)
        return None
    assert not refused, (told, want)
    return want


def dataset(data: bytes) -> None:
    """Several cases with damaged files and different shapes: each sample is the pipeline's result
    for its files, or an error; also if the last operators are left to a device."""
    draws = Draws(data)
    some = operators(draws)
    if draws.below(2):
        some.append(native.RandCrop(1 + draws.below(3)))
    with tempfile.TemporaryDirectory() as folder:
        cases, volumes = [], []
        for place in range(1 + draws.below(3)):
            pair = [v for v in arrays(draws) if v is not None]
            paths = [Path(folder, f"{place}_{which}.npy") for which in "xy"[: len(pair)]]
            for path, volume in zip(paths, pair):
                write(draws, path, volume)
            cases.append((paths[0], paths[1] if len(pair) > 1 else None))
            volumes.append(pair)
        read = reader(draws, volumes[0][0], volumes[0][1] if len(volumes[0]) > 1 else None)
        with contextlib.suppress(*REFUSALS):
            made = native.VolumeDataset(
                cases, native.Pipeline([read, *some]), seed=draws.below(256), output="numpy",
                repeat=1 + draws.below(2), with_index=draws.below(2) == 1, resident=True,
            )  # fmt: skip
            must_be_samples(made, read, some, 0)
            parts = made._windows() if draws.below(2) else made._unfinished()
            if parts is not None:
                left = 0 if parts.dataset._places else len(parts.operators)
                must_be_samples(parts.dataset, read, some, left)


def must_be_samples(
    made: Any, read: native.ReadNpy, some: list[native.Operator], left: int
) -> None:
    for index in range(len(made)):
        key = made._key(index)
        try:
            got = made[index]
        except REFUSALS as error:
            assert str(error), (made.pipeline, index)
            continue
        if made._places:
            continue
        case = made.cases[index % len(made.cases)]
        pair = [None if path is None else as_numpy_reads(Path(path), dtype)
                for path, dtype in zip(case, (read.image, read.label))]  # fmt: skip
        assert pair[0] is not None
        want = wanted(some[: len(some) - left], (pair[0], pair[1]), key, made.pipeline, False)
        if want is not None:
            for volume, wants in zip(got, want):
                assert wants is None or same(volume, wants), (made.pipeline, index, got, want)
