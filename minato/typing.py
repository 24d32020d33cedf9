"""Types for programs that are checked: what options take, and what ``stats()`` returns.

docs/api.md says what each field holds.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

Scheduling = Literal["balanced", "static"]
Batching = Literal["sampler", "ready"]
WorkerType = Literal["process", "thread", "native"]
OnError = Literal["raise", "skip", "replace"]
CacheForm = Literal["decoded", "encoded"]
#: a loader's state: as returned by state_dict(), or as opened() prepares it for iterators
State = dict[str, Any]
#: fields of stats(), before all of them are there
Fields = dict[str, Any]


class Failed(TypedDict):
    """Samples that could not be made; latest: (index, error, index in its place or None)."""

    left_out: int
    replaced: int
    latest: list[tuple[Any, str, Any]]


class Wait(TypedDict):
    """Waits of the caller in ``next()``, in seconds."""

    total: float
    mean: float
    max: float
    between: float
    share: float


class BatchQueue(TypedDict):
    """In batches."""

    window: int
    ready: int
    planned: int


class Started(TypedDict):
    """Tasks by the reason why they were started."""

    window: int
    early: int
    ahead: int
    finale: int
    order: int


class Cost(TypedDict):
    """The cost of a sample, in seconds."""

    mean: float
    p50: float
    p75: float
    p90: float
    p99: float
    slow: float | None
    collate: float
    split: bool
    samples: int
    known: int
    hinted: int
    sized: int
    predicted_by: Literal["history", "hint", "hint_by_index", "bytes", "bytes_and_history"]
    off_by: dict[str, float] | None
    correlation: dict[str, float | None] | None


class Locality(TypedDict):
    """Whether and why neighbours are kept in one worker."""

    together: bool
    group: float
    helped: int
    opening: float
    each: float
    away: float


class Displacement(TypedDict):
    """In batches."""

    max: float
    mean: float


class Worker(TypedDict):
    """One worker."""

    state: str
    pid: int
    running: tuple[int, int] | None
    tasks: int
    rows: int
    busy: float
    cpu: float


class Device(TypedDict):
    """Copies to a device."""

    device: str
    batches: int
    copies: int
    bytes: int
    through: dict[str, int]
    locked: int
    lock_error: int
    staging: float
    copy: float
    bandwidth: float | None
    stalled: float
    overlap: float | None
    waited: float
    depth: int
    refused: int
    operators: list[str]
    operators_why: str | None
    resident: int


Decision = TypedDict(
    "Decision",
    {
        "at": float, "from": int, "to": int, "why": str, "occupancy": float, "cpu": float,
        "wait": float, "rate": float,
    },
)  # fmt: skip


class Scheduler(TypedDict):
    """The scheduler of the number of workers."""

    active: int
    low: int
    high: int
    stragglers: int
    decisions: list[Decision]


class CacheStats(TypedDict):
    """Counts of the cache that the loader reads through."""

    hits: int
    misses: int
    stored: int
    refused: int
    hit_bytes: int
    stored_bytes: int
    saved: float
    made: float
    used: int
    bytes: int
    processes: int
    jobs: int
    form: CacheForm | None
    decoded: int | None
    encoded: int | None
    lacking: int | None
    would_save: float | None
    off: str | None
    removed: str | None
    counted: str | None


class Memory(TypedDict):
    """Use of the arena, in bytes; in_flight in batches."""

    used: int
    kept: int
    limit: int
    in_flight: int


class Cause(TypedDict):
    """Holds what the caller waits for, and what would help."""

    name: str
    seconds: float
    why: str
    advice: str


class Stats(TypedDict):
    """Holds what ``DataLoader.stats()`` returns."""

    epoch: int
    delivered: int
    errors: int
    failed: Failed
    wait: Wait | None
    batch_queue: BatchQueue | None
    started: Started | None
    locality: Locality | None
    displacement: Displacement | None
    cost: Cost
    slow: list[tuple[int, float]]
    worker_type: WorkerType | None
    worker_start: str | None
    workers: list[Worker]
    retries: int
    deaths: int
    device: Device | None
    cache: CacheStats | None
    scheduler: Scheduler | None
    memory: Memory | None
    verdict: str
    causes: list[Cause]
