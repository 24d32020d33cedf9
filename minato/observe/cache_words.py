"""What the verdict says of a cache: that it is too small, that there is none, or that one would help."""

from __future__ import annotations

from typing import Any

from .._not_linux import CORE
from ..option_values import option
from .info import sized
from .verdict import seconds

#: causes that a cache does away with, from the second epoch on
HELPED = ("too few workers", "computing workers", "slow storage", "no workers")
#: share of the values that were made for which there was no room, from which on it is worth words
WORTH = 0.02
#: what is said to be enough, in sizes of what was estimated
SPARE = 1.05


def cache_words(loader: Any, stats: dict[str, Any]) -> str:
    """A sentence for the verdict, or ""."""
    cache = stats["cache"]
    if cache is None:
        return _would_help(loader, stats)
    if cache["off"] is not None:
        return f"There is no cache, so samples are made each time: {cache['off']}."
    if cache["refused"] <= WORTH * max(1, cache["misses"]):
        return ""
    text = (
        f"The cache has no room for {cache['refused']} of {cache['misses']} values that were made, so "
        "each epoch makes them again."
    )
    if not cache["lacking"]:
        return f"{text} A larger cache would keep them."
    saves = cache["would_save"]
    about = f", and save about {seconds(saves)} of the workers' time an epoch" if saves else ""
    whole = sized(SPARE * (cache["bytes"] + cache["lacking"]))
    return f'{text} cache="{whole}" would keep all{about}.'


def _would_help(loader: Any, stats: dict[str, Any]) -> str:
    """Of a loader without a cache whose dataset could be read through one."""
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
        'cache="16GiB", or what samples need, would keep their deterministic part, so that later '
        "epochs do not make it again."
    )
