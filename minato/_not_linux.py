"""Whether minato's engine exists on this system, and what replaces it where it does not.

The engine is written for Linux. On other systems the package has no extension modules. The
loader still checks its options, and torch's iterators serve it, so a program for a Linux machine
also runs on a laptop. Modules that import an extension are not imported there.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import warnings
from collections import defaultdict
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from typing import Any, NoReturn

from .option_values import default, option

#: whether the extension modules are present
CORE = find_spec("minato._core") is not None

NEEDS_LINUX = f"minato's engine needs Linux, and this is {sys.platform}"

_told = False


def not_built(here: str) -> str:
    """Why the package in this folder cannot be imported, and what to do. A copy that pip has
    installed may be hidden by the folder that Python was started in."""
    root = os.path.dirname(here)
    for folder in sys.path:
        other = os.path.join(folder or os.getcwd(), "minato")
        if any(os.path.exists(os.path.join(other, f"_core{suffix}")) for suffix in EXTENSION_SUFFIXES):
            return (
                f"Python imported the unbuilt sources in {here} instead of the installed minato in "
                f"{other}. Run Python from a directory other than {root}, use `python -P` (Python "
                "3.11 or later), or build the sources in place: `pip install -e .`"
            )
    return (
        f"minato in {here} is not built for this Python. If these are its sources, build them: "
        f"`pip install -e .` in {root}. If pip installed it, it chose the wheel without the "
        "engine: build it by `pip install --force-reinstall --no-deps .` in a copy of the repository"
    )


def warn_of_torch(loader: Any) -> None:
    """Warns once that torch's loader is used, and which options have no effect."""
    global _told
    options = [
        name
        for name in ("autoscale", "straggler_threshold", "memory_limit", "batching",
                     "prefetch_next_epoch", "sample_timeout")
        if option(loader, name) != default(type(loader), name)
    ]  # fmt: skip
    if option(loader, "seed_per_sample"):
        options.append("seed_per_sample")
    if not _told and (options or loader.num_workers > 0):
        _told = True
        without = f" (without effect: {', '.join(options)})" if options else ""
        warnings.warn(f"{NEEDS_LINUX}: torch's own loader is used instead{without}.", stacklevel=4)


def unavailable(name: str, *_args: Any, **_options: Any) -> NoReturn:
    raise RuntimeError(f"{name} cannot be used: {NEEDS_LINUX}")


draws: Any = functools.partial(unavailable, "minato.draws")
check_determinism: Any = functools.partial(unavailable, "minato.check_determinism")


class Absent:
    """Replaces ``minato._ops``: any use raises an error."""

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # tools that inspect modules ask for these
            raise AttributeError(attribute)
        unavailable("minato.ops")


class NoCosts:
    """Replaces the core's CostModel: measures nothing, and passes costs from a loaded state on to
    the next saved state."""

    def __init__(self, _length: int = 0) -> None:
        self._parts: tuple[bytes, bytes, bytes] = (b"", b"", b"")
        self._errors: tuple[float, float, float] | None = None

    def load(self, indices: bytes, wall_ns: bytes, ratios: bytes = b"", errors: Any = None) -> None:
        self._parts, self._errors = (indices, wall_ns, ratios), errors

    def save(self) -> tuple[bytes, bytes, bytes]:
        return self._parts

    def slowest(self, _most: int) -> list[tuple[int, int]]:
        return []

    def summary(self) -> dict[str, Any]:
        none = dict.fromkeys(("correlations", "bytes_errors", "bytes_correlations"), (math.nan,) * 3)
        flags = {"errors": self._errors, "slow_ns": None, "split": False, "near": None, "home": None}
        return defaultdict(int, {**none, **flags, "group": 1.0})  # times and counts are 0
