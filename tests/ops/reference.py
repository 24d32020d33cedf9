"""A slow second implementation of the operators in NumPy and SciPy, with the same draws.

Written from the specification of the draws (csrc/ops/mn_pipeline.h, minato/ops.h) and not
from the C code, so agreement confirms the specification.
"""
from __future__ import annotations

import numpy as np
from scipy import ndimage

U32, U64 = np.uint32, np.uint64
MASK = (1 << 64) - 1


def philox(key_hi: int, key_lo: int, number: int, stream: int, block) -> np.ndarray:
    """Philox4x32-10, uint32 [4, *block.shape]; vectorised over block."""
    block = np.asarray(block, U32)
    c = [block.astype(U64), np.full(block.shape, number & 0xFFFF | stream << 16, U64),
         np.full(block.shape, key_hi & 0xFFFFFFFF, U64), np.full(block.shape, key_hi >> 32, U64)]
    k = [key_lo & 0xFFFFFFFF, key_lo >> 32]
    low, shift = U64(0xFFFFFFFF), U64(32)
    for _ in range(10):
        p0, p1 = c[0] * U64(0xD2511F53), c[2] * U64(0xCD9E8D57)
        c = [(p1 >> shift) ^ c[1] ^ U64(k[0]), p1 & low,
             (p0 >> shift) ^ c[3] ^ U64(k[1]), p0 & low]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack([word.astype(U32) for word in c])


class Draws:
    """The draws of operator `number` of a sample."""

    def __init__(self, key: tuple[int, int], number: int) -> None:
        self.key, self.number = key, number

    def bits(self, draw: int) -> int:
        words = philox(*self.key, self.number, 0, draw)
        return int(words[0]) << 32 | int(words[1])

    def u(self, draw: int) -> float:
        return (self.bits(draw) >> 11) * 2.0**-53

    def below(self, draw: int, bound: int) -> int:
        return self.bits(draw) * bound >> 64

    def normals(self, count: int) -> np.ndarray:
        """float32 [count], every operation one of float32 as in C."""
        groups = -(-count // 64)
        words = philox(*self.key, self.number, 1, np.arange(groups * 16, dtype=U32))
        first = box_muller(words[0], words[1])
        second = box_muller(words[2], words[3])
        each = np.stack([x.reshape(groups, 16) for x in (*first, *second)], axis=1)
        return each.reshape(-1)[:count]


def box_muller(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two uint32 arrays to two float32 arrays."""
    f = np.float32
    x = ((a >> U32(1)) | U32(1)).astype(np.int32).astype(f)
    bits = x.view(np.int32)
    exponent = (bits - np.int32(0x3F3504F3)) >> np.int32(23)
    m = (bits - (exponent << np.int32(23))).view(f)
    s = (m - f(1)) / (m + f(1))
    q = s * s
    total = q * f(1 / f(9)) + f(1 / f(7))
    for divisor in (5, 3):
        total = q * total + f(f(1) / f(divisor))
    total = q * total + f(1)
    log = f(2) * s * total + (exponent - np.int32(31)).astype(f) * f(0.69314718)
    radius = np.sqrt(f(-2) * log)
    t = ((b << U32(2)) ^ U32(0x80000000)).view(np.int32).astype(f)
    t = t * f(3.14159265358979 / 4 / 2.0**31)
    q = t * t
    sine = q * f(f(1) / f(362880)) + f(f(-1) / f(5040))
    sine = q * sine + f(f(1) / f(120))
    sine = q * sine + f(f(-1) / f(6))
    sine = (q * sine + f(1)) * t
    cosine = q * f(f(-1) / f(3628800)) + f(f(1) / f(40320))
    for value in (f(-1) / f(720), f(1) / f(24), f(-1) / f(2), f(1)):
        cosine = q * cosine + f(value)
    x, y = radius * cosine, radius * sine
    quarter = b >> U32(30)
    first = np.choose(quarter, [x, -y, -x, y])
    second = np.choose(quarter, [y, x, -y, -x])
    return first, second


def boxes(label: np.ndarray, value: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The up to two largest boxes of a class as (low, high), the largest last."""
    components, _ = ndimage.label(label == value)  # 4 axes, as in the MLPerf reference
    found = ndimage.find_objects(components)
    volumes = [int(np.prod([s.stop - s.start for s in box])) for box in found]
    return [(tuple(s.start for s in found[i][1:]), tuple(s.stop for s in found[i][1:]))
            for i in np.argsort(volumes, kind="stable")[-2:]]


def step(draws: Draws, axis: int, last: int, include_last: bool) -> int:
    return draws.below(3 + axis, max(1, last + (1 if include_last else 0)))


def cut(image, label, start, patch):
    window = (slice(None), *(slice(s, s + p) for s, p in zip(start, patch)))
    return image[window], None if label is None else label[window]


def rand_crop(image, label, draws, patch, include_last=True):
    start = [step(draws, a, image.shape[a + 1] - patch[a], include_last) for a in range(3)]
    return cut(image, label, start, patch)


def rand_balanced_crop(image, label, draws, patch, foreground=0.4, include_last=True):
    present = np.unique(label[label > 0])
    if draws.u(0) >= foreground or present.size == 0:
        return rand_crop(image, label, draws, patch, include_last)
    value = present[draws.below(1, present.size)]
    candidates = boxes(label, value)
    low, high = candidates[draws.below(2, len(candidates))]
    start = []
    for axis in range(3):
        # The reference's own arithmetic, including the ends of windows.
        diff = patch[axis] - (high[axis] - low[axis])
        sign = -1 if diff < 0 else 1
        before = step(draws, axis, abs(diff), include_last)
        after = abs(diff) - before
        begin = max(0, low[axis] - sign * before)
        end = min(image.shape[axis + 1], high[axis] + sign * after)
        short = patch[axis] - (end - begin)
        if short > 0 and begin != 0:
            begin -= short
        start.append(begin)
    return cut(image, label, start, patch)


def rand_flip(image, label, draws, p=(1 / 3,) * 3):
    axes = [axis + 1 for axis in range(3) if draws.u(axis) < p[axis]]
    return np.flip(image, axes), None if label is None else np.flip(label, axes)


def rand_scale(image, draws, p=0.1, low=0.7, high=1.3, offset=1.0):
    if draws.u(0) >= p:
        return image
    factor = offset + (low + (high - low) * draws.u(1))
    return (image.astype(np.float64) * factor).astype(np.float32)


def rand_noise(image, draws, p=0.1, std=0.1, mean=0.0):
    if draws.u(0) >= p:
        return image
    scale = np.float32(std * draws.u(1))
    noise = np.float32(mean) + scale * draws.normals(image.size).reshape(image.shape)
    return image + noise


def place(n: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each of `size` voxels over `n`, with aligned ends: the two around it, and its position
    between them."""
    at = np.arange(size) * (n - 1) / (size - 1) if size > 1 else np.zeros(1)
    low = np.minimum(at.astype(np.int64), n - 1)
    return low, np.minimum(low + 1, n - 1), (at - low).astype(np.float32)


def mix(a: np.ndarray, b: np.ndarray, t: np.ndarray) -> np.ndarray:
    return a + (b - a) * t


def linear(image, shape):
    """Trilinear: by height, then depth, then width."""
    if tuple(shape) == image.shape[1:]:
        return image
    (z, z1, tz), (y, y1, ty), (x, x1, tx) = map(place, image.shape[1:], shape)
    rows = mix(image[:, :, y], image[:, :, y1], ty[:, None])
    planes = mix(rows[:, z], rows[:, z1], tz[:, None, None])
    return mix(planes[..., x], planes[..., x1], tx)


def nearest(label, shape):
    """Like torch's interpolate(mode="nearest")."""
    f = np.float32
    for axis, (n, size) in enumerate(zip(label.shape[1:], shape), 1):
        at = np.floor(np.arange(size, dtype=f) * (f(n) / f(size))).astype(np.int64)
        label = np.take(label, np.minimum(at, n - 1), axis)
    return label


def training(image, label, key, patch, foreground=0.4, p=0.1):
    """The whole chain of ops.unet3d_training, whose first operator is ReadNpy."""
    image, label = rand_balanced_crop(image, label, Draws(key, 1), patch, foreground)
    image, label = rand_flip(image, label, Draws(key, 2))
    image = rand_scale(image, Draws(key, 4), p)
    image = rand_noise(image, Draws(key, 5), p)
    return np.ascontiguousarray(image), np.ascontiguousarray(label)
