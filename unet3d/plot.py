"""Draw a comparison: epoch time, share of waiting, CPU use over time.

    python -m unet3d.plot runs/compare --out compare.png
"""
from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

from unet3d import records

COLOURS = ("#2b6cb0", "#c05621", "#b7791f", "#718096", "#2f855a", "#6b46c1")


def read_usage(run: Path) -> list[tuple[float, float]]:
    """(seconds since the run's first epoch began, CPU share 0 to 1) of one run."""
    points, offset, epoch, last = [], 0.0, None, 0.0
    with open(run / records.LINES_NAME) as stream:
        for line in stream:
            row: dict[str, Any] = json.loads(line)
            if row["event"] != "usage":
                continue
            if row["epoch"] != epoch:
                epoch, offset = row["epoch"], offset + last
            last = row["t"]
            points.append((offset + row["t"], row["cpu"]))
    return points


def draw(folder: Path, target: Path) -> Path:
    """Draw the comparison in `folder` (as written by compare.py) to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with open(folder / "compare.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    loaders = list(dict.fromkeys(row["loader"] for row in rows))
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(loaders)}
    figure, axes = pyplot.subplots(len(caches), 3, figsize=(13, 3.6 * len(caches)),
                                   squeeze=False, constrained_layout=True)
    for line, cache in zip(axes, caches):
        chosen = [row for row in rows if row["cache"] == cache]
        _bars(line[0], chosen, colour)
        names = [row["loader"] for row in chosen]
        line[1].bar(names, [100 * float(row["wait_share"]) for row in chosen],
                    color=[colour[name] for name in names])
        line[1].set(title=f"waiting for data, {cache} cache", ylabel="% of the epoch")
        for name in names:
            points = read_usage(folder / f"{cache}-{name}-1")
            line[2].plot([t for t, _ in points], [100 * cpu for _, cpu in points],
                         color=colour[name], label=name, linewidth=1.2)
        line[2].set(title=f"CPU use, first run, {cache} cache", xlabel="s in epochs",
                    ylabel="% of all cores", ylim=(0, 105))
        line[2].legend(fontsize=8)
        for axis in line[:2]:
            axis.tick_params(axis="x", rotation=20)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
    return target


def _bars(axis: Any, rows: list[dict[str, str]], colour: dict[str, str]) -> None:
    """Median epoch times with their range, and the largest bound as a line."""
    times = [float(row["epoch_s"]) for row in rows]
    spread = [[t - float(row["epoch_s_min"]) for t, row in zip(times, rows)],
              [float(row["epoch_s_max"]) - t for t, row in zip(times, rows)]]
    axis.bar([row["loader"] for row in rows], times, yerr=spread, capsize=4,
             color=[colour[row["loader"]] for row in rows])
    if rows[0]["bound_s"]:
        axis.axhline(float(rows[0]["bound_s"]), color="black", linestyle="--", linewidth=1,
                     label="largest bound")
        axis.legend(fontsize=8)
    axis.set(title=f"epoch time, {rows[0]['cache']} cache", ylabel="s (median, min-max)")


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(prog="unet3d.plot", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder of unet3d.compare")
    parser.add_argument("--out", type=Path, help="PNG (default: FOLDER/compare.png)")
    args = parser.parse_args(argv)
    if not (args.folder / "compare.csv").is_file():
        print(f"error: {args.folder / 'compare.csv'}: missing", file=sys.stderr)
        return 1
    print(draw(args.folder, args.out or args.folder / "compare.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
