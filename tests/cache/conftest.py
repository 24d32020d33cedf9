"""A place for caches of the programs of one test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from minato.cache import files

from .support import Memory


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    shutil.rmtree(made.path)


@pytest.fixture(autouse=True)
def _nothing_lasts() -> Iterator[None]:
    """Files of which an earlier test has kept something do not count for others."""
    yield
    files._lasting.clear()
