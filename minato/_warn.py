"""Warnings that also reach the log: for events that a program must hear about once."""

from __future__ import annotations

import logging
import os
import sys
import warnings

import torch

log = logging.getLogger("minato")

#: folders of code that only passes a call of the program on
_PASSED = tuple(os.path.dirname(file) + os.sep for file in (__file__, torch.__file__ or ""))


def warn(text: str) -> None:
    """Warns at the program's own line, and logs the text as a warning of the logger ``minato``.

    Log first: a program may turn warnings into errors.
    """
    if log.hasHandlers():  # else Python would print the text once more, after the warning
        log.warning("%s", text)
    warnings.warn(text, stacklevel=_level())


def _level() -> int:
    """The ``stacklevel`` of the program's frame, seen from warn()."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED):
        frame, level = frame.f_back, level + 1
    return level
