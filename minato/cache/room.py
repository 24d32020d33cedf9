"""How many values a cache has room for. Values lie whole in parts of its file, which C code lays out."""

from __future__ import annotations

import math

#: values are taken to be larger than their mean, because some are
SPARE = 1.05

MiB = 1 << 20


def holds(parts: tuple[int, int], each: float) -> int:
    """How many values of `each` bytes fit into a cache of such parts: their number, and the bytes of each."""
    number, size = parts
    return number * int(size // each)


def parts_of(stats: dict[str, int]) -> tuple[int, int]:
    """Of a cache with these ``Store.stats()``."""
    return stats["parts"], stats["bytes"] // stats["parts"]


def has_room(stats: dict[str, int], count: float, each: float) -> bool:
    """Whether a cache keeps `count` values of `each` bytes on average."""
    return holds(parts_of(stats), SPARE * each) >= count


def size_for(count: float, each: float) -> float:
    """Bytes of a cache that keeps `count` values of `each` bytes on average: a number that ``sized()``
    prints exactly. (A cache that is slightly larger may keep fewer.)"""
    from .. import _cache

    each *= SPARE
    size = max(count * each, MiB)
    while True:
        unit: int = 1024 ** int(math.log(size, 1024))
        tenths = math.ceil(10 * size / unit)
        size = tenths * unit / 10
        parts = _cache.parts(int(size))
        if each > _cache.PART_MAX or holds(parts, each) >= count:
            return size
        size = max((tenths + 0.5) * unit / 10, size * each / parts[1])
