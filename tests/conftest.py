"""Common settings of every run: hypothesis, start method, and Ctrl-C.

With MINATO_FUZZ_SECONDS set, hypothesis tries new examples. Deadlines, leaks and skips are in
housekeeping.py.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Iterator

import hypothesis
import pytest

# Neither torch nor minato is imported up here: a process that only distributes tests needs none.
pytest_plugins = ["housekeeping"]

hypothesis.settings.register_profile("same", derandomize=True, database=None)
if "MINATO_FUZZ_SECONDS" not in os.environ:
    hypothesis.settings.load_profile("same")

# Random parts are the same in each run unless a seed is given, as in `make nightly`.
os.environ.setdefault("MINATO_TEST_SEED", "1")

# Idle threads of OpenBLAS, which each program with NumPy starts, sleep at once instead of spinning
# for 30 ms.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

# A shell's background jobs ignore it, and so would all processes that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A worker killed on purpose must not write a core file.
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

# The tests share locks and functions with their workers by fork, whatever this Python's default
# is; other start methods are asked for by name.
if multiprocessing.get_start_method(allow_none=True) != "fork":
    multiprocessing.set_start_method("fork", force=True)

# A server that has imported torch forks processes that need not: the import takes 2 s of CPU time.
multiprocessing.set_forkserver_preload(["torch.utils.data"])


def pytest_configure() -> None:
    import housekeeping  # only after pytest has loaded it as a plugin

    def make_engine() -> None:
        from minato import _core

        _core.Engine(1, 0, False)

    # Ranges that a forked child may still see are checked again when there is a next loader.
    housekeeping.settling.append(make_engine)


@pytest.fixture(autouse=True)
def _collate_as_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing DALI's plugin for torch, or MONAI, teaches default_collate a class."""
    from torch.utils.data._utils.collate import default_collate_fn_map

    from minato.transport import layouts

    added = default_collate_fn_map.keys() - layouts._TORCHS.keys()
    for key in added:
        monkeypatch.delitem(default_collate_fn_map, key)


@pytest.fixture(autouse=True)
def _nothing_lasts() -> Iterator[None]:
    """Files of which an earlier test has kept something do not count for cached values of others."""
    yield
    if (files := sys.modules.get("minato.cache.files")) is not None:
        files._lasting.clear()
