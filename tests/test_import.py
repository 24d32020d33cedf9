"""What ``import minato`` gives, and what it leaves for later."""

from __future__ import annotations

import subprocess
import sys

import pytest

import minato

LATE = """
import sys, minato
late = ("minato.ops", "minato.integrations", "minato.integrations.accelerate", "minato.integrations.ray")
assert not set(late) & set(sys.modules)
assert {"ops", "integrations", "DataLoader"} <= set(dir(minato))
assert minato.ops.Pipeline and minato.integrations.accelerate.install
assert minato.integrations.ray.install and set(late) <= set(sys.modules)
"""


def test_submodules_are_imported_when_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", [minato, minato.integrations], ids=["minato", "integrations"])
def test_unknown_names_raise_attribute_error(module: object) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018
