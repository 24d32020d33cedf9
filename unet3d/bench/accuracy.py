"""Trains with several seeds and each loader, and tests whether the loaders' Dice scores agree.

    python -m unet3d.bench.accuracy --data data/quick --out runs/accuracy --seeds 0 1 2 3 4

Every run is a `train.py` process, seeds in turn for all loaders; the evaluation cases are
the same in all. With equal seeds, all loaders start with the same weights and see the
same samples in the same order (except for loaders that do not keep it), with their own
augmentations where `loaders.SAMPLES` says so. A loader's Dice is compared with the first one's
by Welch's t-test over the seeds; a probability under 1 % fails. Finished runs are
kept and interrupted ones resume, so the command can be repeated. Arguments after ``--`` are passed
to train.py unchanged.
"""
from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy import stats

from unet3d import loaders, records
from unet3d.spec import PRESETS

DEFAULT = ("pytorch", "minato", "minato-native", "dali")
LEVEL = 0.01  # of the test: one honest comparison in a hundred fails
COLUMNS = ("loader", "seeds", "mean_dice", "deviation", "lowest", "highest", "kidney",
           "tumour", "loss", "difference", "probability")


class RunFailed(RuntimeError):
    """A training run ended with an error."""


def _command(loader: str, seed: int, folder: Path, common: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "unet3d.train", "--loader", loader, "--seed", str(seed),
               "--split-seed", "0", "--no-bounds", "--out", str(folder), *common]
    return [*command, "--resume"] if (folder / records.CHECKPOINT_NAME).exists() else command


def run_once(loader: str, seed: int, folder: Path, common: Sequence[str]) -> dict[str, Any]:
    """The result of one run, made now or earlier with the same arguments. Raises RunFailed."""
    result, stamp = folder / records.RESULT_NAME, folder / "arguments.json"
    arguments = json.dumps([loader, seed, *common])
    if folder.exists() and (not stamp.exists() or stamp.read_text() != arguments):
        raise RunFailed(f"{folder}: holds a run with other arguments; use another --out")
    if not result.exists():
        folder.mkdir(parents=True, exist_ok=True)
        stamp.write_text(arguments)
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), root) if p)
        done = subprocess.run(_command(loader, seed, folder, common), text=True, check=False,
                              env={**os.environ, "PYTHONPATH": path},
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if done.returncode:
            tail = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise RunFailed(f"{loader}, seed {seed}: exit status {done.returncode}\n{tail}")
    last = json.loads(result.read_text())["epochs"][-1]
    if "mean_dice" not in last:
        raise RunFailed(f"{folder}: was not evaluated after its last epoch")
    return last


def probability(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Welch's two-sided p-value for equal means; None if a sample has fewer than two values."""
    if min(len(first), len(second)) < 2:
        return None
    if len({*first, *second}) == 1:
        return 1.0
    return float(stats.ttest_ind(first, second, equal_var=False).pvalue)


def summarise(ends: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row per loader from the last epochs of its runs; the others are compared with the
    first."""
    rows, base = [], None
    for loader, epochs in ends.items():
        dice = [epoch["mean_dice"] for epoch in epochs]
        row = {"loader": loader, "seeds": len(dice), "mean_dice": statistics.mean(dice),
               "deviation": statistics.stdev(dice) if len(dice) > 1 else 0.0,
               "lowest": min(dice), "highest": max(dice), "difference": None,
               "probability": None}
        row |= {name: statistics.mean(epoch[name] for epoch in epochs)
                for name in ("kidney", "tumour", "loss")}
        if base is None:
            base = dice
        else:
            row["difference"] = row["mean_dice"] - statistics.mean(base)
            row["probability"] = probability(base, dice)
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [("loader", "seeds", "mean Dice +- deviation (lowest-highest)", "kidney", "tumour",
              "loss", f"against {rows[0]['loader']}", "p")]
    for row in rows:
        difference, p = row["difference"], row["probability"]
        lines.append((
            row["loader"], str(row["seeds"]),
            f"{row['mean_dice']:.4f} +- {row['deviation']:.4f} "
            f"({row['lowest']:.4f}-{row['highest']:.4f})",
            f"{row['kidney']:.4f}", f"{row['tumour']:.4f}", f"{row['loss']:.4f}",
            "-" if difference is None else f"{difference:+.4f}",
            "-" if p is None else f"{p:.3f}"))
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip()
                     for line in lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line; exits with a message if it makes no sense."""
    parser = argparse.ArgumentParser(prog="unet3d.bench.accuracy", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", choices=PRESETS, default="quick")
    parser.add_argument("--loaders", help="comma-separated, the first is what others are "
                        f"compared with (default {','.join(DEFAULT)}, those that run here)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("rest", nargs="*", help="after --: further arguments of train.py")
    args = parser.parse_args(argv)
    if args.loaders is None:
        args.loaders = loaders.available(DEFAULT)
    else:
        args.loaders = list(dict.fromkeys(args.loaders.split(",")))
    unknown = [name for name in args.loaders if name not in loaders.LOADERS]
    if unknown:
        parser.error(f"unknown loaders {', '.join(unknown)}; choose from "
                     f"{', '.join(loaders.LOADERS)}")
    args.seeds = list(dict.fromkeys(args.seeds))
    return args


def main(argv: list[str] | None = None) -> int:
    """Command line entry: 0 if the loaders agree, 1 if one differs or a run failed."""
    args = parse(argv)
    common = ["--preset", args.preset, "--data", str(args.data), *args.rest]
    ends: dict[str, list[dict[str, Any]]] = {name: [] for name in args.loaders}
    try:
        for seed in args.seeds:
            for loader in args.loaders:
                end = run_once(loader, seed, args.out / f"{loader}-{seed}", common)
                ends[loader].append(end)
                print(f"seed {seed}, {loader}: mean Dice {end['mean_dice']:.4f}",
                      file=sys.stderr, flush=True)
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    rows = summarise(ends)
    with open(args.out / "accuracy.csv", "w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    text = table(rows)
    (args.out / "accuracy.txt").write_text(text + "\n")
    print(text)
    other = [row["loader"] for row in rows if (row["probability"] or 1.0) < LEVEL]
    if other:
        print(f"error: another mean Dice than {args.loaders[0]}: {', '.join(other)}",
              file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
