"""A place for caches of the programs of one test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from .support import Memory


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    shutil.rmtree(made.path)
