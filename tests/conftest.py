"""The same for every run: examples of hypothesis, and what Ctrl-C does.

With MINATO_FUZZ_SECONDS set, hypothesis tries new examples.
"""

from __future__ import annotations

import os
import signal

import hypothesis

hypothesis.settings.register_profile("same", derandomize=True, database=None)
if "MINATO_FUZZ_SECONDS" not in os.environ:
    hypothesis.settings.load_profile("same")

# A shell's background jobs ignore it, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
