"""Types of the extension module, written by hand from the method tables in csrc/py."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias, TypedDict, final, overload

import torch
from typing_extensions import Buffer, disjoint_base

from ._records import Decision, Envelope, Epoch, Loss, Span, Task

compiler: Final[str]
# names of the numbers of enums in csrc, by number
worker_states: Final[tuple[str, ...]]
start_reasons: Final[tuple[str, ...]]
hint_predictors: Final[tuple[str, ...]]
bytes_predictors: Final[tuple[str, ...]]
# numbers of enums in csrc: NAME is MN_NAME there
KIND_ROWS: Final[int]
KIND_SAMPLES: Final[int]
KIND_BATCH: Final[int]
KIND_RESUME: Final[int]
KIND_PART: Final[int]
KIND_COLLATE: Final[int]
TASK_QUEUED: Final[int]
TASK_RUNNING: Final[int]
TASK_PLANNED: Final[int]
TASK_WAITING: Final[int]
EXTRA_SAMPLE: Final[int]
EXTRA_ERROR: Final[int]
EXTRA_OBJECTS: Final[int]
EXTRA_REFUSED: Final[int]
EXTRA_LEFT_OUT: Final[int]
EXTRA_REPLACED: Final[int]
EXTRA_FATAL: Final[int]
NODE_DICT: Final[int]
NODE_LIST: Final[int]
NODE_TUPLE: Final[int]
NODE_NAMED: Final[int]
NODE_TENSOR: Final[int]
NODE_ARRAY: Final[int]
NODE_INT: Final[int]
NODE_BOOL: Final[int]
NODE_FLOAT: Final[int]
NODE_SCALAR: Final[int]
NODE_OBJECT: Final[int]
WORKER_WANTED: Final[int]
WORKER_STARTING: Final[int]
WORKER_READY: Final[int]
WORKER_EXITED: Final[int]
WORKER_SWEPT: Final[int]
WORKER_LEAVING: Final[int]
START_UNKNOWN: Final[int]
START_FORKED: Final[int]
START_THREADS: Final[int]
NEXT_TIMEOUT: Final[int]
NEXT_HEALTH: Final[int]
NEXT_PLAN: Final[int]
LATE_SIGNAL: Final[int]
REFUSED_TASKS: Final[int]
REFUSED_RECORDS: Final[int]
REFUSED_ROWS: Final[int]
REFUSED_PRIVATE: Final[int]
SEED_SAMPLE: Final[int]
SEED_GETITEMS: Final[int]
SEED_COLLATE: Final[int]
SEED_SET_EPOCH: Final[int]
SEED_BY_INDEX: Final[int]
SEEDED_BY_INDEX: Final[int]
SCALER_GROW_IDLE_CORES: Final[int]
SCALER_GROW_WAITING: Final[int]
SCALER_SHRINK_FULL: Final[int]
SCALER_UNDO_GROWTH: Final[int]
SCALER_STARVED_CPU_BUSY: Final[int]
SCALER_STARVED_AT_MAX: Final[int]
SCALER_STARVED_AT_CEILING: Final[int]
SCALER_FULL_AT_MIN: Final[int]
SCALER_FULL_AT_FLOOR: Final[int]
SCALER_STARVED_NO_MEMORY: Final[int]
SCALER_FULL_BUSY: Final[int]

class _Machine(TypedDict):
    cpus: int
    memory_total: int
    memory_available: int
    throttled: float | None

def fork_begins() -> None: ...
def fork_ends() -> None: ...
def forked() -> None: ...
@overload
def disposition(signal: int, /) -> bytes: ...
@overload
def disposition(signal: int, new: bytes, /) -> None: ...
def filter_signal(signal: int, trainer: int, /) -> None: ...
def die_with_parent(on: bool, /) -> bool: ...
def machine() -> _Machine: ...

class _Entry(TypedDict):
    state: int
    pid: int
    starts: int
    status: int
    since_ns: int
    tasks: int
    rows: int
    busy_ns: int
    cpu_ns: int
    init_states: tuple[int, int, int]

class _Seen(_Entry):
    running: tuple[int, int, int, int, int | str | None] | None

class _Peek(TypedDict):
    title: str
    trainer_pid: int
    stopped: bool
    now_ns: int
    opened_ns: int
    waiting_since_ns: int
    wait_ns: int
    given: int
    failed: int
    used_bytes: int
    limit_bytes: int
    opening_ns: int
    group_milli: int
    tasks: list[tuple[int, int]]  # status, block
    workers: list[_Seen]

def peek(read: Callable[[int, int], bytes], /) -> _Peek: ...
def bind_torch(
    tensor_type: type[torch.Tensor], exchange_api: object | None, plain_tensor: object | None,
    from_view: Callable[[Buffer, int, int, tuple[int, ...]], torch.Tensor],
    weak_ref: Callable[[torch.Tensor], object], expired: Callable[[int], object],
    free_weak: Callable[[int], object], iterator: type[object], /
) -> bool: ...  # fmt: skip

# ---- the trainer's side ----------------------------------------------------------------

class _Counts(Protocol):
    head: int

@disjoint_base
class HandsOut:
    @property
    def _num_yielded(self) -> int: ...
    @_num_yielded.setter
    def _num_yielded(self, count: int) -> None: ...
    def __next__(self) -> Any: ...  # a batch
    def _grant(
        self, count: int, prefetched: deque[list[Any]] = ..., engine: Engine = ...,
        progress: _Counts = ..., /
    ) -> None: ...  # fmt: skip

class _WorkerEntry(_Entry):
    running: tuple[int, int] | None

class _Health(TypedDict):
    zygote_lost: bool
    zygote_hung: bool
    deaths: int
    crash_loop: int
    live: int
    retries: int
    worker: int
    pid: int
    status: int

class _Memory(TypedDict):
    used: int
    kept: int
    limit: int
    in_flight: int
    envelope_bytes: int

class _Scheduler(TypedDict):
    active: int
    low: int
    high: int
    stragglers: int
    decisions: list[Decision]
    saved: bytes

class _Progress(TypedDict):
    waits: int
    wait_ns: int
    wait_max_ns: int
    wait_first_ns: int
    epochs: int
    epochs_ns: int
    steady_max_ns: int
    held: int
    used_ns: int
    asked_ns: int
    given_ns: int
    planned: int
    ready: int
    starts: tuple[int, int, int, int, int]
    helped: int
    together: bool
    displaced: tuple[int, int]

@final
class Block:
    @property
    def sequence(self) -> int: ...
    @property
    def refusal(self) -> tuple[int, int, int] | None: ...  # None: it can be made
    @property
    def kind(self) -> int: ...
    @property
    def has_rows(self) -> bool: ...
    @property
    def runs(self) -> list[tuple[Block, int, int]]: ...  # None unless in ready mode

@final
class Engine:
    def __new__(
        cls, workers: int, max_retries: int, respawn: bool, memory_limit: int = 0,
        arena_bytes: int = 0, window: int = 0, in_order: bool = True,
        costs: CostModel | None = None, min_workers: int = 0, max_workers: int = 0,
        straggler_seconds: float = 0.0, saved_scheduler: bytes | None = None, blocks: int = 0,
        group_neighbours: bool = False, ready_batch: int = 0, ready_bound: int = 0,
        ready_mixes: bool = False, processes: bool = False, title: str = "",
    ) -> Engine: ...  # fmt: skip
    @property
    def fd(self) -> int: ...
    @property
    def segment(self) -> Segment: ...
    def start(self, pidfd: int, command_fd: int, /) -> None: ...
    def stop(self, dismiss: bool = False, /) -> None: ...
    def close(self) -> None: ...
    def submit(
        self, epoch: Epoch, worker: int, number: int | None, indices: object, layout: Layout | None,
        spares: int, /
    ) -> Block | None: ...  # fmt: skip
    def plan(
        self, epoch: Epoch, indices: object, number: int, position: int, whole: bool,
        begins: bytes | None, spares: int, hints: bytes | None, /
    ) -> int | None: ...  # fmt: skip
    def set_form(self, layout: Layout | None, /) -> None: ...
    def plan_end(self) -> None: ...
    def plan_clear(self) -> None: ...
    def next(self, timeout: float, /) -> Block | int: ...
    def place(
        self, samples: list[Any], layout: Layout, objects: list[list[Any]], /
    ) -> Block | None: ...
    def gather(self, layout: Layout, /) -> Any | None: ...
    def scheduler(self) -> _Scheduler | None: ...
    def poll(self, block: Block, /) -> int: ...
    def wait(self, block: Block | None, timeout: float, /) -> bool: ...
    def decode(
        self, block: Block, layout: Layout, objects: list[Any] | None, nrows: int = ..., /
    ) -> Any | None: ...
    def take(self, block: Block, layout: Layout, /) -> Any | None: ...
    def row(
        self, block: Block, layout: Layout, row: int, objects: list[Any] | None, /
    ) -> Any: ...
    def retire(self, block: Block, /) -> None: ...
    def envelopes(self, block: Block, row: int = -1, /) -> list[Envelope]: ...
    def written(self, block: Block, row: int, /) -> bool: ...
    def lost(self, block: Block, /) -> list[Loss]: ...
    def workers(self) -> list[_WorkerEntry]: ...
    def kill_worker(self, number: int, signal: int, retire: bool = False, /) -> bool: ...
    def end_worker(self, number: int, finished: bool, /) -> None: ...
    def end_late(self, number: int, batch: int, row: int, end: bool, /) -> bool: ...
    def note_failed(self, samples: int, /) -> None: ...
    def move_to(self, workers: int, /) -> None: ...
    def health(self) -> _Health: ...
    def deaths(self) -> int: ...
    def memory(self) -> _Memory: ...
    def progress(self) -> _Progress: ...
    def wait_begins(self) -> int: ...
    def wait_ends(self, got: bool, held: bool, /) -> None: ...
    @overload
    def set_page_driver(self) -> None: ...
    @overload
    def set_page_driver(
        self, enter: int, leave: int, lock: int, unlock: int, context: int, flags: int, /
    ) -> None: ...
    def lock_pages(self, address: int, bytes: int, /) -> PageLock | None: ...
    def page_locks(self) -> tuple[int, int]: ...
    def spans(self, block: Block, /) -> tuple[int, int, list[Span]]: ...

class _Costs(TypedDict):
    samples: int
    known: int
    mean_ns: float
    p50_ns: int
    p75_ns: int
    p90_ns: int
    p99_ns: int
    p995_ns: int
    slow_ns: int | None
    collate_ns: int
    send_ns: int | None
    split: bool
    near: bool | None
    home: bool | None
    opening_ns: int
    away_ns: int
    each_ns: float
    group: float
    hinted: int
    by: int
    errors: tuple[float, float, float] | None
    correlations: tuple[float, float, float]
    hint_scale_ns: float
    sized: int
    bytes_by: int
    bytes_errors: tuple[float, float, float]
    bytes_correlations: tuple[float, float, float]

@final
class CostModel:
    def __new__(cls, n: int = 0) -> CostModel: ...
    def observe(self, index: int, wall_ns: int, hint: float = ..., /) -> None: ...
    def predict(self, index: int, hint: float = ..., /) -> int: ...
    def sends(self, send_ns: int, /) -> None: ...
    def save(self) -> tuple[bytes, bytes, bytes]: ...
    def slowest(self, most: int, /) -> list[tuple[int, int]]: ...
    def load(
        self, indices: Buffer, wall_ns: Buffer, ratios: Buffer = ...,
        errors: tuple[float, float, float] = ..., /
    ) -> int: ...  # fmt: skip
    def tell_bytes(self, indices: Buffer, bytes: Buffer, /) -> None: ...
    def summary(self) -> _Costs: ...

@final
class Layout:
    def __new__(cls, spec: tuple[object, ...], description: bytes | None = None) -> Layout: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def objects(self) -> int: ...

@final
class PageLock:
    @property
    def cuts(self) -> list[int]: ...

@final
class ArenaView(Buffer):
    def guard(self, tensor: torch.Tensor, /) -> None: ...

# ---- the workers' side -----------------------------------------------------------------

@final
class Segment:
    def __new__(cls, fd: int, lifeline: int) -> Segment: ...
    @property
    def workers(self) -> int: ...
    @property
    def lifeline(self) -> int: ...
    @property
    def trainer_pid(self) -> int: ...
    @property
    def start(self) -> int: ...
    def state(self, number: int, /) -> int: ...
    def starts(self, number: int, /) -> int: ...
    def starting(self, number: int, /) -> None: ...
    def not_started(self, number: int, /) -> None: ...
    def claim(self, number: int, starts: int, pid: int, /) -> bool: ...
    def adopt(self, number: int, /) -> int | None: ...
    def leaving(self, number: int, /) -> None: ...
    def exited(self, number: int, status: int, /) -> None: ...
    def reap(self, number: int, /) -> int | None: ...
    def stopped(self) -> bool: ...
    def trainer_lives(self) -> bool: ...
    def await_wanted(self, number: int, /) -> bool: ...
    def over(self) -> bool: ...
    def set_start(self, how: int, /) -> None: ...
    def dontfork(self) -> None: ...

@final
class Worker:
    def __new__(
        cls,
        segment: Segment,
        number: int,
        dataset: object,
        seeder: Seeder | None,
        open_layout: Callable[[bytes], Layout] | None,
        load_index: Callable[[bytes], object] | None,
        set_epoch: Callable[[int], object] | None = None,  # gives what makes its samples
        user_epoch: int = 0,
        goes_on: bool = False,
        thread: bool = False,
        native: tuple[object, int, tuple[int, int, int], object] = ...,
    ) -> Worker: ...
    def ready(self, random: int = 0, numpy: int = 0, torch: int = 0, /) -> None: ...
    def next(self) -> Task | Literal[False] | None: ...
    def at(self, row: int, /) -> None: ...
    def mark(self, row: int, /) -> None: ...
    def place(self, samples: Any, objects: list[list[Any]], /) -> bool: ...
    def parts(self) -> list[tuple[bytes, list[bytearray]] | None]: ...
    def finish(self, pickle: bytes | None, buffers: list[Buffer], /) -> bool: ...

def native_info(
    capsule: object, /
) -> tuple[int, list[tuple[str, int, tuple[int, ...]]]]: ...

# ---- seeding ---------------------------------------------------------------------------

_News: TypeAlias = tuple[
    Sequence[object], Sequence[dict[Any, Any]], Sequence[dict[Any, Any]], Iterable[type],
]  # fmt: skip

@final
class Seeder:
    def __new__(cls, plans: Sequence[tuple[Any, ...]]) -> Seeder: ...
    def seed(self, base_seed: int, epoch: int, position: int, domain: int = 0, /) -> None: ...
    def sample(
        self, base_seed: int, epoch: int, position: int, hook: int, /
    ) -> tuple[int, int, int]: ...
    def put(self, lo: int, hi: int, /) -> None: ...
    def share(self, ranks: tuple[int, int, int], /) -> None: ...
    def watch(
        self, dicts: Sequence[dict[Any, Any]], counted: Sequence[dict[Any, Any]],
        find: Callable[[bool], _News | None], globals: int, types: Iterable[type], /
    ) -> None: ...  # fmt: skip
    def renew(self) -> bool: ...
    @staticmethod
    def _peek(obj: object, /) -> bytes: ...
    @staticmethod
    def _words(
        base_seed: int, epoch: int, position: int, domain: int, stream: int, n: int,
        vector: bool = True, wide: bool = False, /
    ) -> tuple[bytes, int]: ...  # fmt: skip
