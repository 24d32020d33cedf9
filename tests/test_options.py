"""minato's own options as one record; contract/test_own_options.py tests what a loader refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import minato
from minato.integrations import own_options
from minato.options import Options
from minato.text import parse_bytes

DEFAULTS = Options(
    scheduling="balanced", seed_per_sample=None, seed_rank=None, memory_limit=None, max_retries=1,
    batching="sampler", worker_type=None, autoscale=None, straggler_threshold="auto",
    prefetch_next_epoch=False, cache=None, cache_format=None, cache_reorder=False, device=None, on_error="raise",
    max_errors=0.01, sample_timeout=None, remote=None, pending_state=None,
)  # fmt: skip


def changed(**options: Any) -> Options:
    return dataclasses.replace(DEFAULTS, **options)


def test_options_are_the_loaders_own_parameters() -> None:
    assert own_options().keys() == {field.name for field in dataclasses.fields(Options)}


def test_options_follow_the_loaders_attributes() -> None:
    loader = minato.DataLoader([1, 2, 3], num_workers=2, autoscale=(1, 4))  # type: ignore
    assert Options.of(loader) == changed(autoscale=(1, 4))
    loader.max_retries = 5
    assert Options.of(loader).max_retries == 5


@pytest.mark.parametrize("threshold, seconds", [("auto", 0.0), (None, -1.0), (3, 3.0)])
def test_thresholds_as_the_engine_takes_them(threshold: Any, seconds: float) -> None:
    assert changed(straggler_threshold=threshold).straggler_seconds() == seconds


def test_numpy_numbers_count_as_pythons() -> None:
    ints, floats = np.int64, np.float32
    given = changed(max_retries=ints(2), seed_rank=ints(1), memory_limit=ints(1 << 28),
                    autoscale=(ints(1), ints(3)),
                    straggler_threshold=floats(0.5), max_errors=floats(0.25))  # fmt: skip
    plain = changed(max_retries=2, seed_rank=1, memory_limit=1 << 28, autoscale=(1, 3),
                    straggler_threshold=0.5,
                    max_errors=0.25)  # fmt: skip
    given.check(2, False)
    assert repr(given) == repr(plain)


def test_bounds_of_the_number_of_workers() -> None:
    assert DEFAULTS.bounds(3) == (3, 3, 3)
    assert changed(autoscale=(1, 8)).bounds(3) == (1, 3, 8)


def test_memory_bytes_is_given_or_fair_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("minato.options.fair_memory", lambda workers: 1000 - workers)
    assert changed(memory_limit="2 KiB").memory_bytes(2) == 2048
    assert DEFAULTS.memory_bytes(2) == 998
    assert changed(autoscale=(1, 64)).memory_bytes(2) == 936


@pytest.mark.parametrize(
    "text, size", [(5, 5), ("5", 5), ("1k", 1000), ("1 KiB", 1024), ("1.5GB", 1_500_000_000)]
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_bytes(text) == size
