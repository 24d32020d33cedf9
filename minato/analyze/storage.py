"""Reads alone, of the files that samples open."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from .records import Reads, Storage
from .samples import Send, clock

CHUNK = 1 << 18


def storage(request: dict[str, Any], loader: Any, send: Send) -> None:
    """Reads alone, of the files that samples opened: 1 to 32 at a time."""
    paths = [path for path in request["files"] if os.access(path, os.R_OK)]
    sizes = [os.path.getsize(path) for path in paths]
    counts = [1, 4, 16, 32]
    cold = _drop_pages(paths[: max(8, len(paths) // 8)])
    result = Storage(len(paths), sum(sizes), statistics.median(sizes) if sizes else 0.0, cold)
    for number, flight in enumerate(counts):
        end = clock() + request["seconds"] / len(counts)
        mine = paths[number :: len(counts)] or paths
        if cold:
            _drop_pages(mine)

        def read(path: str, end: float = end) -> int | None:
            with contextlib.suppress(OSError):  # a file may go, or fail, at any time
                if clock() < end:
                    return _read(path)
            return None

        began = clock()
        with ThreadPoolExecutor(flight) as pool:
            source = mine if cold else itertools.islice(itertools.cycle(mine), 20_000)
            done = [size for size in pool.map(read, source) if size is not None]
        took = max(clock() - began, 1e-6)
        result.rates.append(Reads(flight, len(done) / took, sum(done) / took, len(done)))
        send(asdict(result))


def _read(path: str) -> int:
    """Bytes of a file: all of it, or some of one that is too large."""
    with open(path, "rb", buffering=0) as file:
        size = 0
        while size < 64 * CHUNK and (part := file.read(CHUNK)):
            size += len(part)
        return size


def _drop_pages(paths: list[str]) -> bool:
    """Drops the files' pages; whether the system has done so for most."""
    gone = 0
    for path in paths:
        with contextlib.suppress(OSError):
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
                try:
                    os.preadv(number, [bytearray(1)], 0, os.RWF_NOWAIT)
                except BlockingIOError:
                    gone += 1
            finally:
                os.close(number)
    return gone > len(paths) / 2
