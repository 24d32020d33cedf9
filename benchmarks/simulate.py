"""Runs the scheduling policies in virtual time, together with torch's and the published rules.

    python benchmarks/simulate.py                 # the table of wall time / work bound
    python benchmarks/simulate.py --detail        # and first batch, memory, displacement
    python benchmarks/simulate.py --scale         # 1 to 512 workers
    python benchmarks/simulate.py --plot FILE     # the table as a picture (needs matplotlib)

Decisions come from the policy code that the engine runs (``policies.py``).
The rest is simulated: workers that take exactly a sample's cost plus a fixed
overhead per task, and a consumer that takes a fixed time per batch, all ranks in lock-step.
The work bound is ``max(work / workers, batches * consumer time)`` of the busiest rank: no
order can be faster. Columns ending in 1 are a first epoch (costs unknown),
those ending in 2 a second one (costs known, another order).

Rivals: torch in order (batch i on worker i mod n, two batches per worker), torch with
``in_order=False`` ("torch ooo"), and the rules of the MinatoLoader paper (EuroSys 2026):
a timeout at the 75th percentile, here known from the start, slow-task workers, the fast
queue before the slow one. "published" repeats an interrupted step, as the paper's
text says. "no redo" checks the time only between steps and repeats none, the reading
that favours it most (with samples of a single step it never moves any). The paper does
not say how workers are divided among its roles; here the division follows the work.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence

import policies
from simulation import (
    Case,
    Epoch,
    Loader,
    Minato,
    MinatoReady,
    Outcome,
    Published,
    Steps,
    Torch,
    run,
)

MS = 1_000_000
S = 1000 * MS


def make_epochs(case: Case, seed: int, count: int) -> list[list[Epoch]]:
    """[epoch][rank]: the same costs per index (except for noise), in a new order per epoch."""
    rng = random.Random(f"{case.name}/{seed}")
    base = [[case.draw(rng) for _ in range(case.samples)] for _ in range(case.ranks)]
    epochs = []
    for _ in range(count):
        ranks = []
        for steps in base:
            indices = list(range(case.samples))
            rng.shuffle(indices)
            noisy = []
            for i in indices:
                factor = max(0.5, rng.gauss(1.0, case.noise))
                noisy.append(tuple(max(1, int(s * factor)) for s in steps[i]))
            ranks.append(Epoch(indices, noisy))
        epochs.append(ranks)
    return epochs


#: Columns of the table: (policy, whether costs are known).
COLUMNS = ("torch", "torch ooo", "published", "no redo", "in order 1", "in order 2",
           "ooo 1", "ooo 2", "ready 1", "ready 2")


#: The columns in pictures, and their names there.
SHOWN = {"torch": "torch, in order", "torch ooo": "torch, out of order",
         "published": "published rules", "no redo": "published, no redo",
         "in order 1": "minato in order, epoch 1", "in order 2": "minato in order, epoch 2"}


def simulate(case: Case, seed: int, overhead: int = 0, memory: float = 8.0,
             columns: Sequence[str] = COLUMNS) -> dict[str, Outcome]:
    """All policies on one case; 1 and 2 name the epoch (costs unknown, then known)."""
    first, second = make_epochs(case, seed, 2)
    mean = statistics.fmean(c for rank in first for c in rank.cost)
    consumer = int(case.consumer * mean * case.batch / case.workers)
    makers: dict[str, Callable[[Epoch], Loader]] = {
        "torch": lambda e: Torch(case, e, overhead, True),
        "torch ooo": lambda e: Torch(case, e, overhead, False),
        "published": lambda e: Published(case, e, overhead, True),
        "no redo": lambda e: Published(case, e, overhead, False),
    }
    out = {name: run([make(e) for e in second], consumer)
           for name, make in makers.items() if name in columns}
    for name in ("in order", "ooo", "ready"):
        if f"{name} 2" not in columns:
            continue
        models = [policies.Cost(case.samples) for _ in range(case.ranks)]
        for number, ranks in enumerate((first, second), 1):
            loaders: list[Loader] = [
                MinatoReady(case, e, overhead, m, memory) if name == "ready"
                else Minato(case, e, overhead, m, name == "in order", memory)
                for e, m in zip(ranks, models, strict=True)]
            out[f"{name} {number}"] = run(loaders, consumer)
    return out


# -- the cases ------------------------------------------------------------------------


def two(slow_share: float, slow: int, fast: int) -> Callable[[random.Random], Steps]:
    """One of two costs."""
    return lambda rng: (slow if rng.random() < slow_share else fast,)


def lognormal(median: int, sigma: float, most: int) -> Callable[[random.Random], Steps]:
    """A log-normal cost, optionally cut off."""
    return lambda rng: (min(most, int(median * rng.lognormvariate(0.0, sigma))),)


def speech(heavy: int, share: float = 0.2) -> Callable[[random.Random], Steps]:
    """The published speech case: a light step for all, then a heavy one for a share of
    them, together ``heavy`` ns."""
    slow = (500 * MS, heavy - 500 * MS)
    return lambda rng: slow if rng.random() < share else (500 * MS,)


def segmentation(rng: random.Random) -> Steps:
    """The published segmentation trace: mean 0.51 s, p90 0.75 s, at most 1.83 s; the
    first step is three quarters of it."""
    total = min(1830 * MS, int(478 * MS * rng.lognormvariate(0.0, 0.355)))
    return (total * 3 // 4, total - total * 3 // 4)


def background() -> list[Case]:
    """Six sleeping workloads, loader-bound (the consumer takes no time)."""
    g = "sleeping samples"
    return [
        Case("80% 5 ms, 20% 30 ms", 24, 12, 200, two(0.2, 30 * MS, 5 * MS), group=g),
        Case("80% 5 ms, 20% 30 ms", 4, 12, 400, two(0.2, 30 * MS, 5 * MS), group=g),
        Case("1% of 500 ms in 5 ms", 8, 8, 250, two(0.01, 500 * MS, 5 * MS), group=g),
        Case("log-normal, sigma 0.4", 2, 4, 400, lognormal(5 * MS, 0.4, S), group=g),
        Case("constant 5 ms", 8, 8, 200, lambda rng: (5 * MS,), group=g),
        Case("40% 40 ms, 60% 4 ms", 2, 8, 400, two(0.4, 40 * MS, 4 * MS), group=g),
    ]


def published_cases() -> list[Case]:
    """Speech and segmentation with a consumer as fast as the workers, in lock-step."""
    cases = []
    for heavy in (3, 10):
        for ranks in (1, 4, 8):
            cases.append(Case(f"speech {heavy} s", 24, 12, 200, speech(heavy * S), ranks,
                              consumer=1.0, group="speech"))
    for heavy in (3, 10):
        name = f"speech {heavy} s, fast consumer"
        cases.append(Case(name, 24, 12, 100, speech(heavy * S), group="speech"))
    for workers, ranks in ((12, 1), (12, 4), (12, 8)):
        cases.append(Case("segmentation", 3, workers, 300, segmentation, ranks, 1.0, 0.14,
                          group="segmentation"))
    return cases


def scale_cases() -> list[Case]:
    """From 1 to 512 workers, loader-bound: sleeping samples, 160 per worker, and the published
    speech case, 144 per worker."""
    cases = [Case("80% 5 ms, 20% 30 ms", 8, n, 20 * n, two(0.2, 30 * MS, 5 * MS),
                  group="scale")
             for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)]
    return cases + [Case(f"speech {heavy} s", 24, n, 6 * n, speech(heavy * S), group="scale")
                    for heavy in (3, 10) for n in (64, 128, 256, 512)]


def measure(cases: Sequence[Case], seeds: int, overhead: int,
            memory: float) -> list[tuple[Case, dict[str, list[Outcome]]]]:
    """Every case with several seeds."""
    table = []
    for case in cases:
        rows: dict[str, list[Outcome]] = {}
        for seed in range(seeds):
            for name, outcome in simulate(case, seed, overhead, memory).items():
                rows.setdefault(name, []).append(outcome)
        table.append((case, rows))
    return table


def label(case: Case) -> str:
    """Name of a row."""
    gpus = f" x{case.ranks}" if case.ranks > 1 else ""
    return f"{case.name} ({case.batch}, {case.workers}){gpus}"


def show(table: Sequence[tuple[Case, dict[str, list[Outcome]]]], detail: bool) -> None:
    """Prints the mean ratio of every policy and case."""
    width = max(len(label(case)) for case, _ in table)
    title = "wall time / work bound"
    print(f"{title:{width}s} " + " ".join(f"{c:>10s}" for c in COLUMNS))
    for case, rows in table:
        cells = [statistics.fmean(o.ratio for o in rows[c]) for c in COLUMNS]
        line = " ".join(f"{x:10.3f}" for x in cells)
        print(f"{label(case):{width}s} {line}", flush=True)
        if detail:
            for title, value in (("first batch, ms", lambda o: o.first / MS),
                                 ("most batches held", lambda o: o.peak_batches),
                                 ("displaced, batches", lambda o: o.displaced)):
                cells = [statistics.fmean(map(value, rows[c])) for c in COLUMNS]
                print(f"{'  ' + title:{width}s} " + " ".join(f"{x:10.1f}" for x in cells))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="simulate.py", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs averaged a case")
    parser.add_argument("--overhead-us", type=float, default=20.0, help="a task")
    parser.add_argument("--memory", type=float, default=8.0,
                        help="look-ahead budget, in steady windows")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--detail", action="store_true")
    parser.add_argument("--scale", action="store_true", help="1 to 512 workers instead")
    parser.add_argument("--plot", metavar="FILE", help="also draw the table")
    args = parser.parse_args(argv)
    cases = scale_cases() if args.scale else background() + published_cases()
    cases = [c for c in cases if args.only in label(c)]
    if not cases:
        parser.error("no case has that name")
    table = measure(cases, args.seeds, int(args.overhead_us * 1000), args.memory)
    show(table, args.detail)
    if args.plot:
        plot(table, args.plot)
    return 0


def plot(table: Sequence[tuple[Case, dict[str, list[Outcome]]]], path: str) -> None:
    """One group of bars a case."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots()
    for k, (name, text) in enumerate(SHOWN.items()):
        over = [statistics.fmean(o.ratio for o in rows[name]) - 1 for _, rows in table]
        axes.bar([i + k * 0.14 for i in range(len(table))], over, 0.13, bottom=1.0, label=text)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([i + 0.35 for i in range(len(table))], [label(c) for c, _ in table],
                    rotation=30, ha="right", fontsize=8)
    axes.set_title("(batch, workers) x GPUs; 1 is the work bound: no order can be faster",
                   fontsize=10)
    axes.set_ylabel("wall time / work bound")
    axes.legend(fontsize=8)
    axes.margins(x=0.01)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    raise SystemExit(main())
