"""Properties of the scheduling policies, through their Python binding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis


def given(*strategies: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """hypothesis.given without its time limit: a busy machine fails no test."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        return hypothesis.settings(deadline=None)(hypothesis.given(*strategies)(test))

    return decorate
