"""Put files out of the page cache, so that a run reads them from storage."""
from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

ALMOST = 0.1  # a share of cached data that still counts as cold
PROBES = 16  # places of a file that are tested for being cached
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def cached_share(path: Path) -> float | None:
    """Roughly how much of a file is cached, 0 to 1; None where that cannot be told."""
    if not hasattr(os, "preadv") or not hasattr(os, "RWF_NOWAIT"):
        return None
    size = path.stat().st_size
    places = sorted({size * i // PROBES for i in range(PROBES)})
    buffer, hits = bytearray(1), 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for place in places:
            try:
                hits += os.preadv(descriptor, [buffer], place, os.RWF_NOWAIT) == 1
            except BlockingIOError:
                continue  # would have to be read from storage
    except OSError:
        return None  # the file system does not offer it
    finally:
        os.close(descriptor)
    return hits / len(places)


def evict(paths: Iterable[Path]) -> float | None:
    """Drop `paths` from the page cache; returns the share that is still cached."""
    return evict_by(paths)[0]


def evict_by(paths: Iterable[Path]) -> tuple[float | None, str]:
    """Drop `paths` from the page cache: the share that is still cached, and how it was done.

    By advice on each file first, which needs no privilege and leaves other programs'
    files alone; if much stays, by dropping all caches where that is permitted.
    """
    paths = list(paths)
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # only clean pages can be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    how, left = "posix_fadvise(POSIX_FADV_DONTNEED) on each file", mean_share(paths)
    if left is not None and left > ALMOST and os.access(DROP_CACHES, os.W_OK):
        try:
            DROP_CACHES.write_text("1\n")
        except OSError:
            return left, how
        how, left = f"{how}, then {DROP_CACHES}", mean_share(paths)
    return left, how


def evict_or_warn(paths: Iterable[Path]) -> str:
    """Drop `paths`, with a warning on standard error if much stays; says what was done."""
    left, how = evict_by(paths)
    share = "an unknown share" if left is None else f"{left:.0%}"
    if left is None or left > ALMOST:
        print(f"warning: {share} of the data is still cached; this epoch is not cold",
              file=sys.stderr)
    return f"{how}; {share} still cached"


def mean_share(paths: list[Path]) -> float | None:
    """Roughly how much of all files is cached, 0 to 1; None where that cannot be told."""
    shares = [cached_share(path) for path in paths]
    if not shares or any(share is None for share in shares):
        return None
    return sum(shares) / len(shares)
