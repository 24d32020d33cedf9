"""Lower bounds that no loader can beat on this machine, printed with every result.

* work bound: samples x mean cost of a sample / workers, all of it in parallel;
* synthetic ceiling: steps x time of a step on a resident batch;
* copy bound: the epoch's batches copied once through one core into warm memory;
* core bound, if model and workers share the CPU: all CPU work / cores.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from torch.utils.data import Dataset

from unet3d.parallel import available_cores

COPY_REPEATS = 5
STEPS_TIMED = 5


def sample_cost(dataset: Dataset, indices: Sequence[int]) -> float:
    """Mean seconds per sample, made one after the other in this process.

    Each volume is read once beforehand, so that the cost is that of a warm page cache.
    """
    for path in {p for i in indices for p in (dataset.case(i).image, dataset.case(i).label)}:
        path.read_bytes()
    began = time.perf_counter()
    for index in indices:
        dataset[index]
    return (time.perf_counter() - began) / len(indices)


def copy_rate(nbytes: int) -> float:
    """Bytes per second of copying `nbytes` between two warm buffers, the best of several."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    best = float("inf")
    for _ in range(COPY_REPEATS):
        began = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - began)
    return nbytes / best


def step_cost(step: Callable[[], object]) -> float:
    """Seconds of a training step, the best of several; the first one only warms up."""
    times = []
    for _ in range(1 + STEPS_TIMED):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def combine(samples: int, steps: int, nbytes: int, costs: dict[str, float], workers: int,
            threads: int | None, processes: int = 1) -> dict[str, float]:
    """The bounds of an epoch in seconds.

    `costs` holds sample_s, step_s and copy_bytes_s as measured; `threads` are the CPU
    threads of the model, None if it runs elsewhere. All else is of one process, and `processes`
    of them share the cores. `bound_s` is the largest.
    """
    work = samples * costs["sample_s"]
    bounds = {"work_bound_s": work / max(1, workers),
              "synthetic_bound_s": steps * costs["step_s"],
              "copy_bound_s": nbytes / costs["copy_bytes_s"]}
    if threads is not None:
        total = work + bounds["synthetic_bound_s"] * threads
        bounds["core_bound_s"] = processes * total / available_cores()
    if workers == 0:  # nothing runs in parallel to the training step
        bounds["work_bound_s"] = work + bounds["synthetic_bound_s"]
    return bounds | {"bound_s": max(bounds.values())}


def remark(epoch_s: float, bound_s: float | None) -> str:
    """A remark for an epoch that was shorter than its bound; empty for others."""
    if bound_s is None or epoch_s >= bound_s:
        return ""
    return "under its bound, which was measured while this machine was slower"
