"""The time to deliver samples that share an opened file, in virtual time.

    python benchmarks/simulate_groups.py [--only TEXT] [--seeds 3] [--openings] [--json FILE]

The table shows wall time divided by the bound: each group opened once, all work spread over the
workers. Values below 1 are impossible. Nothing is timed, so a busy machine does not matter. Rules:

    torch     whole batches, batch i for worker i mod n, as many ahead as torch's loader sends
    sample    the next free worker takes the next sample
    affine    a worker continues its run of samples. An idle one starts the next unstarted
              batch of the window. If there is none, it takes the far half of a
              run, of the first batch's before the longest, if that is worth more than
              opening the group again
    anybody   the engine's plan, neighbours not kept together
    measured  the engine's plan, kept together if that is measured to be cheaper
    declared  the engine's plan, the dataset says where groups begin

The last three run the plan in C itself (simulate_groups.c; needs a C compiler), and have two columns:
a first epoch with nothing known, and the third, in another order. The workers keep their open
groups. "--openings" shows instead how often a group was opened, divided by the number of groups.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from minato.analyze.facts import simulate_loader
from minato.iterators.dataset_hints import Groups

ROOT = Path(__file__).resolve().parents[1]
MS = 1_000_000
OVERHEAD = 20_000
NOT_LINKED = {"py", "ops", "torch", "cuda"}
FAULTS = {-1: "nobody goes on", -2: "a sample twice, or another than asked for",
          -3: "batches out of order", -4: "a batch could not be made",
          -5: "a batch was not taken", -6: "over the memory limit", -7: "a sample is lost"}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Costs of samples, and of opening their groups."""

    cost: list[int]  # ns, by index
    group: list[int]  # by index
    opening: list[int]  # ns, by group

    def bound(self, order: Sequence[int], workers: int) -> float:
        groups = {self.group[i] for i in order}
        work = sum(self.cost[i] for i in order) + sum(self.opening[g] for g in groups)
        return work / workers


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    workers: int
    #: (generator) -> the work; drawn once
    draw: Callable[[random.Random], Work]
    held: int = 1  # open groups that a worker keeps, the last ones
    mixed: int = 1  # groups whose samples are shuffled together; 0: all
    prefetch: int = 2
    memory: int = 512  # batches
    consumer: int = 0  # ns a batch
    in_order: bool = True
    far: bool = True  # torch's own sampler: batches are drawn beyond the window

    def order(self, work: Work, rng: random.Random) -> list[int]:
        groups: dict[int, list[int]] = {}
        for index, group in enumerate(work.group):
            groups.setdefault(group, []).append(index)
        runs = list(groups.values())
        rng.shuffle(runs)
        out: list[int] = []
        step = self.mixed or len(runs)
        for at in range(0, len(runs), step):
            some = [index for run in runs[at : at + step] for index in run]
            if step > 1:
                rng.shuffle(some)
            out += some
        return out


@dataclass
class Outcome:
    ratio: float
    opened: float  # times per group
    starved: float = 0.0  # share of the time
    helped: int = 0
    ahead: int = 0


class Held:
    """A worker's open groups."""

    def __init__(self, work: Work, most: int) -> None:
        self.work, self.most, self.opened = work, most, 0
        self.groups: OrderedDict[int, None] = OrderedDict()

    def seconds(self, index: int) -> int:
        """The cost of one sample, including opening its group if necessary."""
        group, ns = self.work.group[index], self.work.cost[index]
        if group not in self.groups:
            ns += self.work.opening[group]
            self.opened += 1
            if len(self.groups) == self.most:
                self.groups.popitem(last=False)
            self.groups[group] = None
        self.groups.move_to_end(group)
        return ns


# ---- rules in a few lines --------------------------------------------------------------


def finish(case: Case, work: Work, order: Sequence[int], wall: float, held: list[Held]) -> Outcome:
    groups = len({work.group[i] for i in order})
    return Outcome(wall / work.bound(order, case.workers), sum(h.opened for h in held) / groups)


def loader(case: Case, work: Work, order: Sequence[int], held: list[Held], balanced: bool) -> Outcome:
    """Delivers in order; an overhead for each task, which is a batch, or a sample where balanced."""
    def cost(worker: int, position: int) -> int:
        is_task = balanced or position % case.batch == 0
        return held[worker].seconds(order[position]) + OVERHEAD * is_task

    window = case.prefetch * case.workers
    step = 0 if balanced else case.consumer
    times = simulate_loader(cost, len(order), case.batch, case.workers, window, balanced, step)
    return finish(case, work, order, times[-1], held)


def torch(case: Case, work: Work, order: Sequence[int], held: list[Held]) -> Outcome:
    return loader(case, work, order, held, balanced=False)


def sample(case: Case, work: Work, order: Sequence[int], held: list[Held]) -> Outcome:
    return loader(case, work, order, held, balanced=True)


class Runs:
    """"affine" as events: workers at runs [next, end) of the order."""

    def __init__(self, case: Case, work: Work, order: Sequence[int], held: list[Held]) -> None:
        self.case, self.work, self.order, self.held = case, work, order, held
        self.window = case.prefetch * case.workers
        self.left = [len(order[at : at + case.batch])
                     for at in range(0, len(order), case.batch)]  # fmt: skip
        self.head = self.begun = 0  # batches: first that is not done, first that is not started
        self.runs = [(0, 0)] * case.workers
        self.busy: dict[int, tuple[int, int]] = {}  # worker: until, position
        self.mean = statistics.fmean(work.cost)

    def position(self, worker: int) -> int | None:
        """The worker's next sample."""
        at, end = self.runs[worker]
        if at == end:
            at, end = self.next_run()
        if at == end:
            at, end = self.half()
        if at == end:
            return None
        self.runs[worker] = at + 1, end
        return at

    def next_run(self) -> tuple[int, int]:
        if self.begun == len(self.left) or self.begun >= self.head + self.window:
            return 0, 0
        at = self.begun * self.case.batch
        self.begun += 1
        return at, at + self.left[self.begun - 1]

    def half(self) -> tuple[int, int]:
        """Takes the far half of another worker's run."""
        def rank(worker: int) -> tuple[bool, int]:
            at, end = self.runs[worker]
            return at // self.case.batch == self.head, end - at

        for victim in sorted(self.busy, key=rank, reverse=True):
            at, end = self.runs[victim]
            middle = at + (end - at) // 2
            if middle == end:
                continue
            price = self.work.opening[self.work.group[self.order[middle]]]
            until = self.busy[victim][0] - self.now
            if until + (end - at) * self.mean > price + self.mean * (end - middle):
                self.runs[victim] = at, middle
                return middle, end
        return 0, 0

    def run(self) -> Outcome:
        self.now = 0
        while self.head < len(self.left):
            for worker in range(self.case.workers):
                if worker not in self.busy:
                    at = self.position(worker)
                    if at is not None:
                        ns = self.held[worker].seconds(self.order[at]) + OVERHEAD
                        self.busy[worker] = self.now + ns, at
            worker = min(self.busy, key=self.busy.__getitem__)
            self.now, at = self.busy.pop(worker)
            self.left[at // self.case.batch] -= 1
            while self.head < len(self.left) and self.left[self.head] == 0:
                self.head += 1
        return finish(self.case, self.work, self.order, self.now, self.held)


def affine(case: Case, work: Work, order: Sequence[int], held: list[Held]) -> Outcome:
    return Runs(case, work, order, held).run()


# ---- the engine's plan -----------------------------------------------------------------

LONG = ctypes.c_int64
LONGS = ctypes.POINTER(LONG)


class CCase(ctypes.Structure):
    _fields_ = [*[(name, LONG) for name in (
        "workers", "batch", "window", "in_order", "group_neighbours", "far", "held", "overhead_ns",
        "consumer_ns", "memory", "n")], ("cost_ns", LONGS), ("group", LONGS),
        ("opening_ns", LONGS)]  # fmt: skip


class CResult(ctypes.Structure):
    _fields_ = [(name, LONG) for name in (
        "wall_ns", "opened", "helped", "starved_ns", "most_bytes", "limit_bytes", "most_ahead",
        "near", "home", "first_ns")]  # fmt: skip


@functools.cache
def engine(folder: str) -> ctypes.CDLL:
    """The engine with the simulator and its clock; built once."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("the engine's plan is simulated in C, and there is no C compiler")
    sources = [path for path in sorted((ROOT / "csrc").glob("*/*.c"))
               if path.parent.name not in NOT_LINKED]  # fmt: skip
    folders = sorted({f"-I{path.parent}" for path in sources})
    out = Path(folder) / "simulate_groups.so"
    subprocess.run(
        [compiler, "-std=c11", "-O1", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden",
         f"-I{ROOT / 'csrc'}", *folders, str(ROOT / "benchmarks" / "simulate_groups.c"),
         *map(str, sources), "-Wl,--wrap=mn_now_ns", "-lm", "-o", str(out)],
        check=True,
    )  # fmt: skip
    library = ctypes.CDLL(str(out))
    library.sim_new.restype = ctypes.c_void_p
    library.sim_new.argtypes = [ctypes.POINTER(CCase)]
    library.sim_free.argtypes = [ctypes.c_void_p]
    library.sim_consumer.argtypes = [ctypes.c_void_p, LONG]
    library.sim_epoch.argtypes = [ctypes.c_void_p, LONGS, ctypes.c_char_p, LONG,
                                  ctypes.POINTER(CResult)]  # fmt: skip
    return library


class Plan:
    """The engine's plan over epochs, with persistent workers."""

    def __init__(self, library: ctypes.CDLL, case: Case, work: Work,
                 group_neighbours: bool, declared: bool) -> None:
        self.library, self.case, self.work = library, case, work
        self.groups = Groups(work.group.__getitem__) if declared else None
        arrays = [(LONG * max(len(v), 1))(*v) for v in (work.cost, work.group, work.opening)]
        self.arrays = arrays  # keeps them alive while C uses them
        c = CCase(case.workers, case.batch, case.prefetch * case.workers, case.in_order,
                  group_neighbours, case.far, case.held, OVERHEAD, case.consumer, case.memory,
                  len(work.cost), *arrays)  # fmt: skip
        self.sim = library.sim_new(ctypes.byref(c))
        if not self.sim:
            raise MemoryError

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *error: object) -> None:
        self.library.sim_free(self.sim)

    def consumer_is(self, ns: int) -> None:
        """Sets the consumer's time per batch from now on."""
        self.library.sim_consumer(self.sim, ns)

    def epoch_of(self, order: Sequence[int]) -> CResult:
        """RuntimeError if a sample is lost or repeated, or no worker can continue."""
        found = CResult()
        begins = None
        if self.groups is not None:
            batches = range(0, len(order), self.case.batch)
            begins = b"".join(self.groups.begins(order[at : at + self.case.batch]) for at in batches)
        fault = self.library.sim_epoch(self.sim, (LONG * len(order))(*order), begins, len(order),
                                       ctypes.byref(found))  # fmt: skip
        if fault != 0:
            raise RuntimeError(FAULTS.get(fault, str(fault)))
        return found

    def epoch(self, order: Sequence[int]) -> Outcome:
        found = self.epoch_of(order)
        groups = len({self.work.group[i] for i in order})
        return Outcome(found.wall_ns / self.work.bound(order, self.case.workers),
                       found.opened / groups, found.starved_ns / max(found.wall_ns, 1),
                       found.helped, found.most_ahead)  # fmt: skip


# ---- the cases -------------------------------------------------------------------------


def alone(n: int, draw: Callable[[random.Random], int]) -> Callable[[random.Random], Work]:
    """Samples that share nothing."""
    return lambda rng: Work([draw(rng) for _ in range(n)], list(range(n)), [0] * n)


def two(share: float, slow: int, fast: int) -> Callable[[random.Random], int]:
    return lambda rng: slow if rng.random() < share else fast


def grouped(sizes: Sequence[int], opening: int, each: int,
            sigma: float = 0.0) -> Callable[[random.Random], Work]:
    def draw(rng: random.Random) -> Work:
        group = [g for g, size in enumerate(sizes) for _ in range(size)]
        openings = [int(opening * rng.lognormvariate(0.0, sigma)) for _ in sizes]
        return Work([each] * len(group), group, openings)

    return draw


CASES = [
    Case("80/20", 24, 12, alone(4800, two(0.2, 30 * MS, 5 * MS)), mixed=0),
    Case("80/20", 4, 12, alone(1600, two(0.2, 30 * MS, 5 * MS)), mixed=0),
    Case("1 % of 500 ms", 8, 8, alone(2000, two(0.01, 500 * MS, 5 * MS)), mixed=0),
    Case("log-normal", 2, 4,
         alone(800, lambda rng: int(5 * MS * rng.lognormvariate(0.0, 0.4))), mixed=0),
    Case("40/60", 2, 8, alone(800, two(0.4, 40 * MS, 4 * MS)), mixed=0),
    Case("row groups of 32", 32, 4, grouped([32] * 64, 100 * MS, MS)),
    Case("videos of 8", 8, 4, grouped([8] * 256, 25 * MS, MS)),
    Case("row groups of 128", 32, 4, grouped([128] * 48, 400 * MS, MS)),
    Case("videos of 8, batch 32", 32, 4, grouped([8] * 256, 25 * MS, MS)),
    Case("long and short", 32, 4, grouped([16, 128, 32, 8, 64, 8] * 12, 100 * MS, MS)),
    Case("openings differ", 32, 4, grouped([32] * 64, 100 * MS, MS, sigma=0.8)),
    Case("two kept, two mixed", 32, 4, grouped([32] * 64, 100 * MS, MS), held=2, mixed=2),
    Case("four kept, two mixed", 32, 4, grouped([32] * 64, 100 * MS, MS), held=4, mixed=2),
    Case("four kept, four mixed", 32, 4, grouped([32] * 64, 100 * MS, MS), held=4, mixed=4),
    Case("few groups, many workers", 32, 12, grouped([256] * 8, 400 * MS, 4 * MS)),
    Case("all decoded is kept", 32, 4, grouped([1] * 1024, 10 * MS, MS), held=1024, mixed=0),
]  # fmt: skip

RULES = {"torch": torch, "sample": sample, "affine": affine}
PLANS = {"anybody": (False, False), "measured": (True, False), "declared": (True, True)}
EPOCHS = 3


def simulate(library: ctypes.CDLL, case: Case, seed: int) -> dict[str, Outcome]:
    rng = random.Random(f"{case.name}/{case.batch}/{seed}")
    work = case.draw(rng)
    orders = [case.order(work, rng) for _ in range(EPOCHS)]
    out: dict[str, Outcome] = {}
    for name, rule in RULES.items():
        held = [Held(work, case.held) for _ in range(case.workers)]
        for epoch, order in enumerate(orders):
            for h in held:
                h.opened = 0
            out[f"{name} {epoch + 1}"] = rule(case, work, order, held)
    for name, (group_neighbours, declared) in PLANS.items():
        with Plan(library, case, work, group_neighbours, declared) as plan:
            for epoch, order in enumerate(orders):
                out[f"{name} {epoch + 1}"] = plan.epoch(order)
    return out


COLUMNS = [f"{name} {EPOCHS}" for name in RULES] + [
    f"{name} {epoch}" for name in PLANS for epoch in (1, EPOCHS)]  # fmt: skip


def label(case: Case) -> str:
    return f"{case.name} ({case.batch}, {case.workers})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--openings", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    value = "opened" if args.openings else "ratio"
    title = "openings a group" if args.openings else "wall time / work"
    print(f"{title + ' (batch, workers)':34s}" + "".join(f"{c:>12s}" for c in COLUMNS))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        library = engine(folder)
        for case in CASES:
            if args.only not in label(case):
                continue
            runs = [simulate(library, case, seed) for seed in range(args.seeds)]
            found[label(case)] = {name: [dataclasses.asdict(run[name]) for run in runs]
                                  for name in runs[0]}  # fmt: skip
            cells = [statistics.fmean(getattr(run[c], value) for run in runs) for c in COLUMNS]
            print(f"{label(case):34s}" + "".join(f"{x:12.2f}" for x in cells), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
