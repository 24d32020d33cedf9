"""Properties of the scheduling policies, through benchmarks/policies.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))


def given(*strategies: Any, **settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """hypothesis.given without its time limit: a busy machine fails no test."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        return hypothesis.settings(deadline=None, **settings)(hypothesis.given(*strategies)(test))

    return decorate
