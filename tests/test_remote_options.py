"""``minato.remote.Ray`` as an option; workers/test_remote.py has the cluster."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import minato


@pytest.mark.parametrize(
    "options, text",
    [
        ({"actors": 0}, "actors .* from 1 on, got 0"),
        ({"actors": True}, "actors .* got True"),
        ({"actors": 2, "chunk": 1.5}, "chunk .* got 1.5"),
        ({"actors": 2, "cpus": -1}, "cpus .* got -1"),
        ({"actors": 2, "options": [1]}, "options .* dict"),
        ({"actors": 2, "options": {"num_cpus": 2}}, "must not contain 'num_cpus'.*cpus="),
        ({"actors": 2, "options": {"max_restarts": 2}}, "max_retries="),
    ],
)
def test_values_out_of_range_raise_value_error(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        minato.remote.Ray(**options)


def test_remote_of_another_type_raises_value_error() -> None:
    with pytest.raises(ValueError, match="remote must be None or a minato.remote.Ray, got 3"):
        minato.DataLoader([1, 2], remote=3)  # type: ignore


def _ray(version: str) -> Any:
    return SimpleNamespace(__version__=version, is_initialized=lambda: False)


@pytest.mark.parametrize(
    "module, error, text",
    [
        (None, ImportError, "pip install"),
        (_ray("2.51.3"), ImportError, r"Ray 2\.52 or later, found 2\.51\.3"),
        (_ray("2.52.0"), ValueError, r"not initialised.*ray\.init"),
    ],
)
def test_ray_that_cannot_serve_raises(
    module: Any, error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", module)
    with pytest.raises(error, match=text):
        minato.DataLoader([1, 2], remote=minato.remote.Ray(actors=2))
