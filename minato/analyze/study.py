"""Answers one request with a measurement, in a fork of the keeper.

Measurements send messages: ``at`` names the sample that begins, and the result comes again and again
while it grows. So a run that is cut off leaves what it has found.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from typing import Any

from ..workers import library_threads
from . import codecs, orders
from .contention import contend
from .loaders import rate, sampler
from .samples import Send, as_worker
from .storage import storage
from .work import work


def run(request: dict[str, Any], loader: Any, send: Send) -> None:
    """One request, in a process of its own."""
    if request.get("cores"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: request["cores"]])
    library_threads.limit(True)
    _forget_helpers()
    measure = {
        "work": work, "contend": contend, "storage": storage, "rate": rate, "sampler": sampler,
        "codecs": codecs.measure, "orders": orders.measure,
    }[request["do"]]  # fmt: skip
    makes_samples = request["do"] not in ("rate", "storage", "sampler")
    try:
        with as_worker(loader) if makes_samples else contextlib.nullcontext():
            measure(request, loader, send)
    except Exception as error:
        text = traceback.format_exc(limit=-3)
        send({"kind": "failed", "error": f"{type(error).__name__}: {error}", "trace": text})


def _forget_helpers() -> None:
    """multiprocessing's resource tracker belongs to the program; its connection is closed here."""
    from multiprocessing import resource_tracker

    tracker: Any = vars(resource_tracker)["_resource_tracker"]
    tracker._fd = tracker._pid = None
