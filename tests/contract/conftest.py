"""Loaders as fixtures."""

from __future__ import annotations

from typing import Iterator

import pytest
from torch.utils.data import _utils

from .support import Kind, selected

_kinds = [Kind(name) for name in selected()]
_own_kinds = [kind for kind in _kinds if not kind.is_torch]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "unraisable: errors in __del__ are allowed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name != "contract":
            continue
        rules = ["ignore:This DataLoader will create"]
        if not item.get_closest_marker("unraisable"):
            rules.append("error::pytest.PytestUnraisableExceptionWarning")
            rules.append("error::pytest.PytestUnhandledThreadExceptionWarning")
        for rule in rules:
            item.add_marker(pytest.mark.filterwarnings(rule), append=False)


@pytest.fixture(autouse=True, scope="session")
def quick_joins() -> Iterator[None]:
    """Let torch wait 1 s instead of 5 s for each worker of a collected iterator."""
    before = _utils.MP_STATUS_CHECK_INTERVAL
    _utils.MP_STATUS_CHECK_INTERVAL = 1.0
    yield
    _utils.MP_STATUS_CHECK_INTERVAL = before


@pytest.fixture(params=_kinds, ids=lambda kind: kind.name)
def loader(request: pytest.FixtureRequest) -> Kind:
    """Each selected loader in turn."""
    return request.param


@pytest.fixture(params=_own_kinds, ids=lambda kind: kind.name)
def own(request: pytest.FixtureRequest) -> Kind:
    """Each selected loader of minato's own."""
    return request.param
