"""Results of the engine with many fields: csrc/py/module/mn_state.c makes them, by position."""

from __future__ import annotations

from typing import Any, NamedTuple


class Task(NamedTuple):
    """A task that Python must handle."""

    kind: int  # enum mn_task_kind
    number: int  # of the batch in its epoch
    epoch: int
    position: int  # of the batch's first sample in the order of the epoch
    base_seed: int
    seeded: int  # whether each sample is: 1 by its position, 2 by its index
    row0: int  # first row of the batch that the task makes
    nrows: int
    indices: Any  # from the sampler, spare ones at the end; None where rows are made in C
    spares: int  # how many of the indices are spare
    extras: list[Any] | None  # (row, what, object) of samples that do not fit their rows


class Envelope(NamedTuple):
    """A message of a done task."""

    worker: int  # number of its sender
    row0: int  # first row of its task
    nrows: int
    pickle: bytes | None  # None if the memory limit left no memory for it
    buffers: list[Any] | None  # of the pickle, out of band


class Loss(NamedTuple):
    """A task that is not retried any more."""

    worker: int  # number of the worker that died with it last
    pid: int
    status: int  # its exit code, as in multiprocessing
    row0: int  # first row of the task
    nrows: int
    row: int  # that the worker ran, by its own entry; 2**64 - 1: unknown


class Span(NamedTuple):
    """Where and when a done task ran."""

    worker: int
    attempt: int  # 0: the first
    kind: int  # enum mn_task_kind
    why: int  # it was started: 0 static scheduling, else enum mn_dispatch_why
    row0: int
    nrows: int
    done_ns: int  # its end, by the monotonic clock
    wall_ns: int  # how long it took
    cpu_ns: int
    rows: list[int]  # how long each of its rows took, one after another; 0: not known


class Decision(NamedTuple):
    """A change of the number of workers."""

    at_ns: int  # by the monotonic clock
    before: int  # workers
    after: int  # workers
    reason: int  # enum mn_scaler_reason; below 0: for one straggler
    text: str  # the reason for people
    occupancy: int  # of the batch queue, in permille
    cpu: int  # share in use, in permille
    wait: int  # share of task time that was waiting, in permille
    rate: float  # samples a second
