"""Run one function over many items in worker processes, with a progress bar."""
from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from tqdm import tqdm


def available_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _one_thread() -> None:
    """Keep a worker to one core; a forked OpenMP pool would hang if it were used."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def each(function: Callable[[Any], Any], items: Sequence[Any], workers: int,
         title: str) -> Iterator[Any]:
    """Yield ``function(item)`` for each item, in order of completion.

    `workers` 0 or 1 runs in this process. The first exception is raised unchanged and
    items that have not started are dropped.
    """
    bar = tqdm(total=len(items), desc=title, unit="case", disable=not items)
    with bar:
        if workers <= 1:
            for item in items:
                yield function(item)
                bar.update()
            return
        method = "fork" if sys.platform == "linux" else "spawn"
        context = multiprocessing.get_context(method)
        with ProcessPoolExecutor(min(workers, max(1, len(items))), context,
                                 initializer=_one_thread) as pool:
            futures = [pool.submit(function, item) for item in items]
            try:
                for future in as_completed(futures):
                    yield future.result()
                    bar.update()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
