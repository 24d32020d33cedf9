"""Records of the engine with many fields, read and made by position: csrc/py/module/mn_state.c."""

from __future__ import annotations

from collections.abc import Callable
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
    indices: Any  # from the sampler, spare ones at the end; of rows made in C, None without on_error
    spares: int  # how many of the indices are spare
    extras: list[Any] | None  # (row, what, object) of samples that do not fit their rows


class Epoch(NamedTuple):
    """Values that are the same for all batches of an epoch."""

    number: int  # for seeds
    base_seed: int
    #: pickles indices that are not a list of machine integers. Returns bytes, or (n, bytes), which
    #: begin with n machine integers by which costs are known
    dumps: Callable[[Any], bytes | tuple[int, bytes]]
    user_epoch: int = 0  # 1 + the argument of set_epoch; 0: it was not called
    seeded: int = 0  # as in Task
    splits: bool = False  # several workers may fetch a batch that one could make, if that pays


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
