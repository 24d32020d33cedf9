"""The engine's policies one by one, for tests and simulations.

The C sources of ``csrc/schedule`` are compiled into a library on first use, which needs a C
compiler. policies.c includes those whose policies are static. All arguments are 64-bit integers,
lists of them, or pointers.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1] / "csrc"
NO_TIMEOUT = 2**63 - 1
#: (position, batch, cost_ns, tag, slack_ns, why, node)
Choice = tuple[int, int, int, int, int, int, int]


@functools.cache
def library() -> ctypes.CDLL:
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("the policies are written in C, and there is no C compiler")
    own = Path(__file__).with_suffix(".c")
    included = re.findall(r"#include \"(schedule/\w+\.c)\"", own.read_text())
    sources = {own, CSRC / "base/mn_base.c", *CSRC.glob("schedule/*.c")}
    sources -= {CSRC / name for name in included}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "policies.so"
        command = [compiler, "-std=c11", "-O1", "-shared", "-fPIC", f"-I{CSRC}"]
        subprocess.run([*command, *sorted(map(str, sources)), "-lm", "-o", str(out)], check=True)
        return ctypes.CDLL(str(out))


def _numbers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def _call(name: str, *arguments: object, result: type = ctypes.c_int64) -> int:
    function = getattr(library(), name)
    function.restype = result
    return function(*(ctypes.c_int64(a) if isinstance(a, int) else a for a in arguments))


def chunk(cost_ns: int, overhead_ns: int, batch: int, idle: int) -> int:
    """Samples a task, in [1, batch]; idle: workers that have nothing to do meanwhile."""
    return _call("chunk_size", cost_ns, overhead_ns, batch, idle)


def chunk_next(costs_ns: Sequence[int], overhead_ns: int, limit: int) -> int:
    """Length of the task that begins at costs_ns[0], of at most limit samples."""
    return _call("chunk_next", _numbers(costs_ns), len(costs_ns), overhead_ns, limit)


def split(on: bool, walls_ns: Sequence[int], send_ns: int) -> bool:
    """Whether the batches of a collate_fn are split over workers."""
    return bool(_call("split_worth", on, _numbers(walls_ns), len(walls_ns), send_ns))


def period(consumer_ns: int, mean_sample_ns: int, batch_size: int, workers: int) -> int:
    """The predicted time between two batches."""
    return _call("dispatch_period", consumer_ns, mean_sample_ns, batch_size, workers)


class _Policy:
    """Memory of a policy, from its function `new`, which returns NULL for wrong arguments."""

    FREE = "policy_free"

    def __init__(self, new: str, *arguments: object) -> None:
        address = _call(new, *arguments, result=ctypes.c_void_p)
        if address is None:
            raise ValueError(f"{new}: an argument is out of range")
        self._own = ctypes.c_void_p(address)

    def __del__(self) -> None:
        if hasattr(self, "_own"):
            _call(self.FREE, self._own)


class Cost(_Policy):
    """Costs of n indices, their distribution, and the slow timeout learned from it."""

    FREE = "cost_free"

    def __init__(self, n: int = 0) -> None:
        super().__init__("cost_new", n)
        self._n = n

    def observe(self, index: int, wall_ns: int) -> None:
        _call("cost_observe", self._own, index, wall_ns)

    def wall(self, index: int) -> int:
        return _call("cost_wall", self._own, index)

    def knows(self, index: int) -> bool:
        return bool(_call("cost_knows", self._own, index))

    def quantile(self, permille: int) -> int:
        return _call("cost_quantile", self._own, permille)

    def above(self, ns: int) -> int:
        """Share of the samples that take longer, in permille."""
        return _call("cost_above", self._own, ns)

    def weight(self, ns: int) -> int:
        """Their share of all time, in permille."""
        return _call("cost_weight", self._own, ns)

    def save(self) -> tuple[list[int], list[int]]:
        index, wall = _numbers([0] * self._n), _numbers([0] * self._n)
        n = _call("cost_save", self._own, self._n, index, wall)
        return index[:n], wall[:n]

    def load(self, indices: Sequence[int], wall_ns: Sequence[int]) -> int:
        return _call("cost_load", self._own, len(indices), _numbers(indices), _numbers(wall_ns))

    def learn_timeout(self) -> int | None:
        _call("cost_learn_timeout", self._own)
        return self.timeout

    def is_slow(self, running_ns: int) -> bool:
        return running_ns > _call("cost_timeout", self._own)

    @property
    def timeout(self) -> int | None:
        ns = _call("cost_timeout", self._own)
        return None if ns == NO_TIMEOUT else ns

    @property
    def tail(self) -> bool:
        return bool(_call("cost_tail", self._own))

    @property
    def mean(self) -> float:
        mean = ctypes.c_double()
        _call("cost_mean", self._own, ctypes.byref(mean))
        return mean.value

    @property
    def known(self) -> int:
        return _call("cost_known", self._own)

    @property
    def samples(self) -> int:
        return _call("cost_samples", self._own)


class Dispatch(_Policy):
    """Least slack first within a window that costs widen. rates: period, consumer and typical cost
    in ns, window and starved_below in batches, workers."""

    def __init__(self, capacity: int, *rates: int) -> None:
        super().__init__("dispatch_new", capacity, _numbers(rates))

    def __len__(self) -> int:
        return _call("dispatch_count", self._own)

    @property
    def work(self) -> int:
        return _call("dispatch_work", self._own)

    def insert(self, position: int, batch: int, cost_ns: int, tag: int = 0) -> bool:
        """False if it is full."""
        rc = _call("dispatch_insert", self._own, position, batch, cost_ns, tag)
        if rc < 0:
            raise ValueError("position and batch must not be negative")
        return rc == 0

    def peek(self, head: int, ready: int, last: int = NO_TIMEOUT) -> Choice | None:
        """The task to start now; why: 1 window, 2 early, 3 ahead, 4 finale, 5 order."""
        out = _numbers([0] * 7)
        return tuple(out) if _call("dispatch_peek", self._own, head, ready, last, out) else None

    def first(self) -> Choice | None:
        out = _numbers([0] * 7)
        return tuple(out) if _call("dispatch_first", self._own, out) else None

    def take(self, node: int) -> None:
        _call("dispatch_take", self._own, node)

    def retime(self, *rates: int) -> bool:
        return bool(_call("dispatch_retime", self._own, _numbers(rates)))

    def close(self) -> None:
        _call("dispatch_close", self._own, True)

    def reopen(self) -> None:
        _call("dispatch_close", self._own, False)

    def drop(self, batch: int) -> None:
        _call("dispatch_drop", self._own, batch)

    def clear(self) -> None:
        _call("dispatch_clear", self._own)


class Autoscale(_Policy):
    """How many workers there should be; one update an interval."""

    def __init__(self) -> None:
        super().__init__("scaler_new")

    def update(
        self, workers: int, min_workers: int, max_workers: int, occupancy: int, cpu: int,
        cores: int, wait: int, backlog: int, rate: int, speed: int = -1, busy: int = 0,
        fitting: int = 2**31 - 1, taken: int = -1,
    ) -> tuple[int, int, str]:  # fmt: skip
        """(target, reason, text). Shares in permille; cores, rate, speed, taken in thousandths."""
        speed, taken = (rate if ns < 0 else ns for ns in (speed, taken))
        given = _numbers([workers, min_workers, max_workers, occupancy, cpu, cores, wait, backlog,
                          rate, speed, busy, fitting, taken])  # fmt: skip
        out = _numbers([0, 0])
        text = _call("scaler_update", self._own, given, out, result=ctypes.c_char_p)
        return out[0], out[1], text.decode()


class Ready(_Policy):
    """Batches of the samples that are ready first; none moves by more than bound batches."""

    def __init__(self, batch: int, bound: int) -> None:
        super().__init__("ready_new", batch, bound)
        self._batch = batch

    def end(self, total: int) -> None:
        if _call("ready_end", self._own, total) < 0:
            raise ValueError("total is smaller than the number of samples marked")

    def mark(self, position: int, slow: bool) -> None:
        if _call("ready_mark", self._own, position, slow) < 0:
            raise ValueError("position was marked before, or may not be marked")

    def form(self, mix: bool = True) -> list[int] | None:
        """Positions of the next batch, ascending; None: wait; []: the end."""
        out = _numbers([0] * self._batch)
        n = _call("ready_form", self._own, mix, out)
        return None if n < 0 else out[:n]

    def could_mix(self) -> bool:
        return bool(_call("ready_could_mix", self._own))

    @property
    def horizon(self) -> int:
        return _call("ready_horizon", self._own)

    @property
    def displaced_max(self) -> int:
        return self._displaced()[0]

    @property
    def displaced_sum(self) -> int:
        return self._displaced()[1]

    def _displaced(self) -> list[int]:
        out = _numbers([0, 0])
        _call("ready_displaced", self._own, out)
        return list(out)
