"""The fake device, in place of torch's accelerators."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
from contract.support import wait_for

from minato.device import copies

from .emulated import Emulated, build
from .fake import SECONDS, Fake, install


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    before = set(threading.enumerate())
    made = Fake()
    install(made, monkeypatch)
    yield made
    gc.collect()
    # Another thread may collect the iterator: its thread starts no copies on a closed stream.
    left = [t for t in threading.enumerate() if t not in before]
    left = [t for t in left if not any(word in t.name for word in ("native", "fake"))]
    for thread in left:
        thread.join(SECONDS)
    try:
        assert not [t for t in left if t.is_alive()]
        assert wait_for(lambda: copies.sweep() == 0, SECONDS)
    finally:
        copies._left.clear()
        made.close()


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """A driver whose device is the CPU."""
    return Emulated(build(tmp_path_factory.mktemp("emulated")))
