"""Drop files from the page cache, so that a run reads them from storage."""
from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ALMOST = 0.1  # a share of cached data that still counts as cold
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def cached_share(path: Path) -> float | None:
    """How much of a file's pages is cached, 0 to 1, by mincore(2); None if the system does
    not say (it tells a file's owner, and users with write permission)."""
    size = path.stat().st_size
    if size == 0:
        return None
    pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        return None
    with open(path, "rb") as stream:
        # A private mapping, whose address ctypes can take; no page of it is touched.
        with mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
            address = ctypes.c_char.from_buffer(mapped)
            rc = libc.mincore(ctypes.c_void_p(ctypes.addressof(address)), ctypes.c_size_t(size),
                              found)
            del address  # otherwise the mapping could not be closed
    return None if rc else sum(byte & 1 for byte in bytes(found)) / pages


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


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def evict_or_warn(paths: Iterable[Path], warn: Callable[[str], object] = _to_stderr
                  ) -> tuple[float | None, str]:
    """Drop `paths`, with a warning if much stays: the share that is still cached, and how it was
    done."""
    left, how = evict_by(paths)
    share = "an unknown share" if left is None else f"{left:.0%}"
    if left is None or left > ALMOST:
        warn(f"warning: {share} of the data is still cached; this epoch is not cold")
    return left, f"{how}; {share} still cached"


def mean_share(paths: list[Path]) -> float | None:
    """How much of all files is cached, 0 to 1, each with equal weight; None if unknown."""
    shares = [cached_share(path) for path in paths]
    if not shares or any(share is None for share in shares):
        return None
    return sum(shares) / len(shares)
