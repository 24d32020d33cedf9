"""Words of the verdict on a cache: that it is too small, is off, or would help."""

from __future__ import annotations

from typing import Any

from .._not_linux import CORE
from ..observe.verdict import SMALL_CACHE, larger
from ..option_values import option
from .across_iterators import memo_of

#: causes that a cache does away with, from the second epoch on
HELPED = ("too few workers", "computing workers", "slow storage", "no workers")


def cache_words(loader: Any, stats: dict[str, Any]) -> str:
    """A sentence for the verdict, or ""; of caches that the dataset uses by itself, too."""
    cache, memo = stats["cache"], memo_of(loader)
    if cache is None and not memo.misses:
        return _would_help(loader, stats)
    if cache is not None and cache["off"] is not None:
        return f"There is no cache, so samples are made each time: {cache['off']}."
    missed = memo.missed()
    named = any(cause["name"] == SMALL_CACHE for cause in stats["causes"])
    if named or missed is None or not missed.too_small:
        return ""
    return (
        f"The cache has no room for {missed.refused} of {missed.values} values that were made, so each "
        f"epoch makes them again. {larger(missed)}"
    )


def _would_help(loader: Any, stats: dict[str, Any]) -> str:
    """Advises a loader without a cache whose dataset could be read through one."""
    if not CORE:
        return ""  # there is no cache on this system, and its modules are not imported
    names = [cause["name"] for cause in stats["causes"][:1]]
    if not names or names[0] not in HELPED or option(loader, "cache") is not None:
        return ""
    if stats["worker_type"] == "native" and names[0] != "slow storage":
        return ""  # they read files that the page cache has
    from ..cache.datasets import readable

    if not readable(loader.dataset):
        return ""
    return (
        'A cache (cache="16GiB", or the size of your data) would keep the deterministic part of each '
        "sample, so that later epochs do not make it again."
    )
