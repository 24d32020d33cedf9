"""The same for every run: examples of hypothesis, and what Ctrl-C does.

With MINATO_FUZZ_SECONDS set, hypothesis tries new examples.
"""

from __future__ import annotations

import os
import signal

import hypothesis
import pytest
from torch.utils.data._utils.collate import default_collate_fn_map

from minato.transport import layouts as _layout

hypothesis.settings.register_profile("same", derandomize=True, database=None)
if "MINATO_FUZZ_SECONDS" not in os.environ:
    hypothesis.settings.load_profile("same")

# A shell's background jobs ignore it, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _collate_as_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing DALI's plugin for torch, or MONAI, teaches default_collate a class."""
    added = default_collate_fn_map.keys() - _layout._TORCHS.keys()
    for key in added:
        monkeypatch.delitem(default_collate_fn_map, key)
