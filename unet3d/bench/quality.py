"""Time to quality: how long each loader trains until an evaluation reaches a mean Dice.

Two clocks. `seconds` is the trainer's own: from its first epoch to the end of the evaluation that
reached the target, evaluations included. `process_s` is the whole program: from the start of its
process to its end, with imports, the start of workers and their exit.
"""
from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from unet3d.bench.tables import aligned, number, spread

#: options of train.py that a run without evaluations must not have
EVALUATION = ("--target-dice", "--eval-every", "--eval-start")


def without_target(arguments: Sequence[str]) -> list[str]:
    """The arguments without the options of evaluations, each of which has one value.

    An option may be shortened, as argparse permits, and its value may follow an equals sign.
    """
    kept, skip = [], False
    for word in arguments:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif len(name) > 3 and any(option.startswith(name) for option in EVALUATION):
            skip = not equals
        else:
            kept.append(word)
    return kept


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one run ended. `seconds` and `epochs` are to the target, or to the end without it."""

    reached: bool
    diverged: bool
    seconds: float
    epochs: int
    evaluating_s: float
    process_s: float
    best: float | None  # the best mean Dice; None: never evaluated

    @classmethod
    def of(cls, result: dict[str, Any]) -> Outcome:
        """From a run's result file, with the clock of its process."""
        rows = result["epochs"]
        return cls(result["reached_target"], result["diverged"], result["seconds"], len(rows),
                   sum(row.get("eval_s", 0.0) for row in rows), result["process_s"],
                   max((row["mean_dice"] for row in rows if "mean_dice" in row), default=None))


def times_torch(torch_runs: Sequence[Outcome], runs: Sequence[Outcome]) -> list[float]:
    """For each repeat in which both runs reached the target: how many times faster it was than
    torch's loader."""
    return [theirs.seconds / own.seconds for theirs, own in zip(torch_runs, runs)
            if theirs.reached and own.reached]


def quality_table(target: float, results: dict[str, list[dict[str, Any]]]) -> str:
    """Seconds and epochs to the target, one loader a line; `results` maps a loader to its runs."""
    outcomes = {name: [Outcome.of(one) for one in runs] for name, runs in results.items()}
    lines = [("loader", "reached", "epochs", "seconds", "min-max", "of it evaluating",
              "from process start", "times torch", "min-max")]
    notes = []
    for name, runs in outcomes.items():
        there = [run for run in runs if run.reached]
        ratios = times_torch(outcomes.get("pytorch", []), runs)
        cells = ["not reached", "-", "-", "-", "-"]
        if there:
            seconds = [run.seconds for run in there]
            cells = [f"{statistics.median(run.epochs for run in there):g}",
                     f"{statistics.median(seconds):.1f}", spread(seconds, ".1f"),
                     f"{statistics.median(run.evaluating_s for run in there):.1f}",
                     f"{statistics.median(run.process_s for run in there):.1f}"]
        lines.append((name, f"{len(there)} of {len(runs)}", *cells,
                      number(statistics.median(ratios) if ratios else None, ".2f"),
                      spread(ratios, ".2f")))
        if missed := [run for run in runs if not run.reached]:
            best = max((run.best for run in missed if run.best is not None), default=None)
            diverged = sum(run.diverged for run in missed)
            notes.append(
                f"{name}: {len(missed)} of {len(runs)} runs did not reach the target in "
                f"{max(run.epochs for run in missed)} epochs and "
                f"{max(run.seconds for run in missed):.1f} s; best mean Dice "
                f"{number(best, '.4f')}" + (f"; {diverged} diverged" if diverged else ""))
    if len(outcomes) > 1:
        notes.append("epochs to the target also differ by chance, where loaders draw or order "
                     "samples differently: unet3d.bench.accuracy compares several seeds")
    head = f"time to a mean Dice of {target:g}, medians of the runs that reached it:"
    return "\n".join([head, aligned(lines), *notes])
