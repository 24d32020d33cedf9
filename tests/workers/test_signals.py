"""What Ctrl-C does to a program whose loader is starting or stopping processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import minato
from minato.workers import signals


def test_the_programs_handler_is_given_the_frame() -> None:
    frames: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda _number, frame: frames.append(frame))
    try:
        with signals.Held():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(frames) == 1 and frames[0] is not None


def test_only_the_zygote_is_deaf() -> None:
    iterator = iter(minato.DataLoader(range(8), 2, num_workers=1))
    names = [child.name for child in multiprocessing.active_children()]
    del iterator
    assert "minato-zygote" in names
    assert all(type(name) is str for name in names)
