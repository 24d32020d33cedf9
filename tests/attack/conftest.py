"""Seeds and warnings of every attack."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from .support import SECONDS, SEED

# It needs an extension with fault points, and is run with one by tests/test_sanitized.py.
collect_ignore = [] if "MINATO_TEST_FAULTS" in os.environ else [
    "test_faults.py", "test_trainer_faults.py",
]  # fmt: skip


def pytest_report_header() -> str:
    return f"attack: MINATO_TEST_SEED={SEED} MINATO_STRESS_SECONDS={SECONDS:g}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "attack":
            item.add_marker(pytest.mark.filterwarnings("ignore:This DataLoader will create"))
            item.add_marker(
                pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
            )


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of random parts; printed when a test fails."""
    print(f"MINATO_TEST_SEED={SEED}")
    return SEED


@pytest.fixture
def started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has each interpreter that starts from now on run a text first, as packages may that bring a
    ``.pth`` file along."""

    def set_up(text: str) -> None:
        folder = tmp_path / "site"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(text)
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    return set_up
