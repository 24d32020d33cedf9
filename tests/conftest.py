"""Hypothesis tries the same examples in every run; with MINATO_FUZZ_SECONDS set, new ones."""

from __future__ import annotations

import os

import hypothesis

hypothesis.settings.register_profile("same", derandomize=True, database=None)
if "MINATO_FUZZ_SECONDS" not in os.environ:
    hypothesis.settings.load_profile("same")
