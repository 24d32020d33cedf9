"""Pictures of the scheduling policies, from simulated runs.

    python benchmarks/simulate_plots.py OUTDIR

Writes ``cases.png`` (every case, every policy), ``workers.png`` (1 to 512 workers),
``speech.png`` (the published speech case, 64 to 512 workers), ``slow_share.png`` (0 to 100 %
slow samples, as in the evaluation of MinatoLoader) and ``memory.png`` (look-ahead budget, in
steady windows). All values are wall time divided by the work bound, from ``simulate.py``;
nothing is timed, so a busy machine does not matter. Takes about a minute on one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import simulate
from matplotlib.figure import Figure
from simulation import Case

OVERHEAD = 20_000
LINES = tuple(simulate.SHOWN)


def ratios(case: Case, seeds: int, memory: float = 8.0) -> dict[str, float]:
    """Mean wall time over work bound of every policy."""
    runs = [simulate.simulate(case, seed, OVERHEAD, memory, LINES) for seed in range(seeds)]
    return {name: statistics.fmean(r[name].ratio for r in runs) for name in LINES}


def lines(path: Path, title: str, label: str, points: Sequence[float],
          measure: Callable[[float], dict[str, float]], log: bool) -> None:
    """One line a policy over points."""
    found = [measure(x) for x in points]
    figure = Figure(figsize=(8.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, text in simulate.SHOWN.items():
        axes.plot(points, [row[name] for row in found], marker="o", label=text)
    if log:
        axes.set_xscale("log", base=2)
        axes.set_xticks(points, [f"{x:g}" for x in points])
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_title(title)
    axes.set_xlabel(label)
    axes.set_ylabel("wall time / work bound")
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("outdir", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args(argv)
    args.outdir.mkdir(parents=True, exist_ok=True)
    table = simulate.measure([*simulate.background(), *simulate.published_cases()],
                             args.seeds, OVERHEAD, 8.0)
    simulate.plot(table, str(args.outdir / "cases.png"))
    for name, file, title in (
            ("80%", "workers.png", "80 % 5 ms, 20 % 30 ms; batch 8"),
            ("speech 3", "speech.png", "80 % 0.5 s, 20 % 3 s; batch 24")):
        scale = {c.workers: c for c in simulate.scale_cases() if c.name.startswith(name)}
        lines(args.outdir / file, title, "workers", list(scale),
              lambda n, scale=scale: ratios(scale[int(n)], 1), log=True)
    speech = Case("speech", 24, 12, 60, simulate.speech(3 * simulate.S))
    lines(args.outdir / "slow_share.png", "0.5 s, or 3.5 s for the slow; batch 24, 12 workers",
          "share of slow samples", [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0],
          lambda x: ratios(dataclasses.replace(
              speech, draw=simulate.speech(3500 * simulate.MS, x)), args.seeds), log=False)
    rare = simulate.background()[2]
    lines(args.outdir / "memory.png", simulate.label(rare), "budget, steady windows",
          [0.25, 0.5, 1, 2, 4, 8], lambda x: ratios(rare, args.seeds, x), log=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
