"""Whether a resumed epoch equals the epoch that was interrupted, at every position.

    python benchmarks/resume.py [--every 20] [--workers 1 2 4 8] [--modes NAME ...]
        [--json FILE] [--quick]

An epoch of 200 batches is left after each of the tested positions (--every 1: all of them), the
state goes through JSON, and another loader resumes from it: under balanced scheduling with another
number of workers. Samples draw from the global generators of random, NumPy and torch and from one
of the dataset's own. Some samples fail, and are skipped or replaced. Replaceable workers are
killed, in the epoch that is left and in its rest. "union": the parts before and after make up the
epoch, each sample once. "bit for bit": the batches after it are equal or, out of order, the samples
are, including their draws. "again": samples that the rest has made although they were already
delivered. torchdata's StatefulDataLoader is in the table if it is installed. Its states
go through pickle, and it gets no failing samples, because it can only raise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import random
import signal
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import common
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import minato

BATCHES, SIZE = 200, 4
#: samples that cannot be made
BAD = (3, 57, 58, 320, 500, 641, 642, 643)


def sample(index: int, own: Any, made: int) -> torch.Tensor:
    draws = [random.random(), random.gauss(0, 1), np.random.randn(), float(torch.randn(()))]
    return torch.tensor([index, *draws, own.random(), made], dtype=torch.float64)


class Samples(Dataset):
    """A map-style dataset; fails: the samples that fail."""

    def __init__(self, fails: tuple[int, ...]) -> None:
        self.fails, self.rng = fails, np.random.default_rng(7)

    def __len__(self) -> int:
        return BATCHES * SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.fails:
            raise LookupError(f"sample {index}")
        return sample(index, self.rng, 0)


class Rows:
    """A worker's iterator, with a state, and a count of the samples made."""

    def __init__(self) -> None:
        info = get_worker_info()
        self.index, self.step = (info.id, info.num_workers) if info else (0, 1)
        self.rng, self.made = np.random.default_rng(self.index), 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        if self.index >= BATCHES * SIZE:
            raise StopIteration
        index, self.index, self.made = self.index, self.index + self.step, self.made + 1
        return sample(index, self.rng, self.made)

    def state_dict(self) -> dict[str, Any]:
        return {"index": self.index, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.index, self.rng.bit_generator.state = state["index"], state["rng"]


class Stateful(IterableDataset):
    """An iterable dataset whose iterator has a state."""

    def __iter__(self) -> Any:
        return Rows()


class Stateless(IterableDataset):
    """The same without a state."""

    def __iter__(self) -> Any:
        yield from Rows()


class Mode(NamedTuple):
    """How a loader is made, and what it should give."""

    data: Any
    options: dict[str, Any]
    fails: bool = False
    kills: bool = False
    any_workers: bool = False  # resumes with any number of them
    ordered: bool = True  # batches after the state are those of the interrupted epoch
    draws: bool = True  # a sample draws the same numbers wherever it is made
    ours: bool = True


BALANCED = dict(shuffle=True, max_retries=1000, max_errors=len(BAD))
MODES = {
    "balanced, skip": Mode(Samples, {**BALANCED, "on_error": "skip"}, True, True, True),
    "balanced, replace": Mode(Samples, {**BALANCED, "on_error": "replace"}, True, True, True),
    "out of order": Mode(
        Samples, {**BALANCED, "on_error": "skip", "in_order": False}, True, True, True, False
    ),
    "ready": Mode(
        Samples, {**BALANCED, "on_error": "skip", "in_order": False, "batching": "ready"},
        True, True, True, False,
    ),
    "static": Mode(
        Samples,
        dict(shuffle=True, scheduling="static", on_error="skip", max_errors=len(BAD)), True,
    ),
    "static, out of order": Mode(
        Samples, dict(shuffle=True, scheduling="static", in_order=False), False, False, False,
        False, False,
    ),
    "iterable": Mode(Stateless, {}),
    "iterable, out of order": Mode(Stateless, {"in_order": False}, ordered=False),
    "stateful": Mode(Stateful, {}),
    "stateful, out of order": Mode(Stateful, {"in_order": False}, ordered=False),
    "torchdata, map": Mode(Samples, {"shuffle": True}, ours=False),
    "torchdata, iterable": Mode(Stateless, {}, ours=False),
    "torchdata, stateful": Mode(Stateful, {}, ours=False),
}  # fmt: skip


def make(mode: Mode, workers: int) -> Any:
    """A loader of that mode, with new objects."""
    data = mode.data(BAD if mode.fails else ()) if mode.data is Samples else mode.data()
    if mode.ours:
        return minato.DataLoader(data, SIZE, num_workers=workers, **mode.options)
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data, SIZE, num_workers=workers, **mode.options)


def through(state: Any, ours: bool) -> Any:
    """The state as a checkpoint stores it."""
    return json.dumps(state).encode() if ours else pickle.dumps(state)


def kill_one(it: Any, dice: random.Random) -> int:
    """Kills one of the living workers; returns how many were killed."""
    pids = [worker.pid for worker in it._workers if worker.is_alive()]
    try:
        if pids:
            os.kill(dice.choice(pids), signal.SIGKILL)
    except ProcessLookupError:  # it has exited in the meantime
        return 0
    return min(1, len(pids))


def epoch(mode: Mode, loader: Any, dice: random.Random, states: list[Any] | None) -> Any:
    """(rows of each batch, workers killed); states: gets (state, seconds) after each batch."""
    batches, kills, it = [], 0, iter(loader)
    after = dice.randrange(4, 60)
    for number in itertools.count(1):
        batch = next(it, None)
        if batch is None:
            return batches, kills
        batches.append([tuple(row) for row in batch.tolist()])
        if mode.kills and number == after:
            kills, after = kills + kill_one(it, dice), after + dice.randrange(20, 60)
        if states is not None:
            begins = time.perf_counter()
            state = loader.state_dict()
            seconds = time.perf_counter() - begins
            states.append((through(state, mode.ours), seconds))


def drawn(batches: Any) -> Any:
    """Rows without the counts of samples made."""
    return [[row[:-1] for row in batch] for batch in batches]


def row_counts(batches: Any, columns: int) -> Counter[Any]:
    return Counter(row[:columns] for batch in batches for row in batch)


def made_again(rest: Any, workers: int) -> int:
    """Samples of iterable datasets that were made, and are not in the rest."""
    made: Counter[int] = Counter()
    for row in itertools.chain(*rest):
        made[int(row[0]) % workers] = max(made[int(row[0]) % workers], int(row[-1]))
    return made.total() - sum(map(len, rest))


def seeded(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def measure(mode: Mode, workers: int, every: int, seed: int) -> dict[str, Any]:
    """One row of the table."""
    dice = random.Random(seed)
    seeded(seed)
    quiet = mode._replace(kills=False)
    options = dict(mode.options)
    if mode.ours and mode.any_workers:  # in order, and without kills
        options.update(in_order=True, batching="sampler")
    whole, _ = epoch(quiet, make(mode._replace(options=options), workers), dice, None)
    states: list[Any] = []
    seeded(seed)
    left, kills = epoch(mode, make(mode, workers), dice, states)
    found = dict(positions=0, union=0, exact=0, kills=kills, again=0, failed="")
    columns = 6 if mode.draws else 1
    loads = []
    for done in range(1, len(left), every):
        seeded(seed + 1 + done)
        loader = make(mode, dice.randrange(1, 9) if mode.any_workers else workers)
        state = (json if mode.ours else pickle).loads(states[done - 1][0])
        found["positions"] += 1
        try:
            loader.load_state_dict(state)
            begins = time.perf_counter()
            rest, killed = epoch(mode, loader, dice, None)
        except Exception as error:
            found["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:80]
            continue
        loads.append(time.perf_counter() - begins)
        found["kills"] += killed
        both = left[:done] + rest
        found["union"] += row_counts(both, 1) == row_counts(whole, 1)
        tail = drawn(rest) == drawn(left[done:])
        if not mode.ordered:
            tail = row_counts(both, columns) == row_counts(whole, columns)
        found["exact"] += tail
        found["again"] = max(found["again"], made_again(rest, workers))
    found["state_ms"] = 1e3 * statistics.median(seconds for _state, seconds in states)
    found["state_kib"] = max(len(state) for state, _seconds in states) / 1024
    found["rest_s"] = statistics.median(loads) if loads else None
    return found


def has_torchdata() -> bool:
    """Whether torchdata is installed."""
    try:
        import torchdata.stateful_dataloader  # noqa: F401
    except ImportError:
        return False
    return True


def main() -> int:
    """Prints the table; returns 1 if a mode of minato's is not exact at every position."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.every, args.workers = 150, [2]
    warnings.filterwarnings("ignore")
    rows: list[dict[str, Any]] = []
    for name in args.modes:
        if not MODES[name].ours and not has_torchdata():
            continue
        for workers in args.workers:
            found = measure(MODES[name], workers, args.every, args.seed)
            rows.append({"mode": name, "workers": workers, **found})
            print(f"{name}, {workers} workers: {found}", file=sys.stderr)
    head = ["mode", "workers", "positions", "union", "bit for bit", "kills", "again", "state ms",
            "state KiB", "note"]  # fmt: skip
    print(common.table(head, (
        [r["mode"], str(r["workers"]), str(r["positions"]), str(r["union"]), str(r["exact"]),
         str(r["kills"]), str(r["again"]) if MODES[r["mode"]].data is not Samples else "",
         f"{r['state_ms']:.2f}", f"{r['state_kib']:.1f}", r["failed"]]
        for r in rows
    )))  # fmt: skip
    common.save(args.json, {"machine": common.machine(), "rows": rows})
    ours = [r for r in rows if MODES[r["mode"]].ours]
    return int(any(r["union"] != r["positions"] or r["exact"] != r["positions"] for r in ours))


if __name__ == "__main__":
    sys.exit(main())
