"""The rates that a program would have with other codecs, from what was measured of them."""

from __future__ import annotations

import math
from dataclasses import replace

from .facts import Facts
from .limits import BARELY
from .records import CodecRow

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
    return [replace(row, rate=codec_rate(f, row, storage_speed(f))) for row in told.rows]


def codec_rate(f: Facts, row: CodecRow, storage: float = math.inf) -> float:
    """The loader's rate with a codec: its own, as the time of samples changes. Where processes wait
    for one storage, the rate changes as the waits do. storage: bytes a second at most."""
    told, own = f.codecs, f.own_rate()
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


def storage_speed(f: Facts) -> float:
    """Bytes a second of this storage; infinite where only reads from memory were measured."""
    rates = [one.bytes_per_s for one in f.storage.rates if f.storage.cold]
    return max(rates, default=math.inf)


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
