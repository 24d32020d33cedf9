"""Draw a comparison: epoch time, waiting, CPU and GPU use over time, slow samples per batch.

    python -m unet3d.bench.plot runs/compare --out compare.png
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unet3d import records

CSV_NAME, JSON_NAME = "compare.csv", "compare.json"
COLOURS = ("#2b6cb0", "#4fb3bf", "#c05621", "#b7791f", "#718096", "#2f855a", "#6b46c1",
           "#97266d", "#1a202c", "#d69e2e", "#f687b3")
SMOOTH = 12  # the share of slow samples is averaged over this part of an epoch's batches


def read_usage(run: Path, name: str) -> list[tuple[float, float]]:
    """(seconds since the start of the run's first epoch, value) of "cpu" (0 to 1) or "gpu"
    (percent) of one run; empty if it was not measured."""
    points, offset, epoch, last = [], 0.0, None, 0.0
    with open(run / records.LINES_NAME) as stream:
        for line in stream:
            row: dict[str, Any] = json.loads(line)
            if row["event"] != "usage":
                continue
            if row["epoch"] != epoch:
                epoch, offset = row["epoch"], offset + last
            last = row["t"]
            if row[name] is not None:
                points.append((offset + row["t"], row[name]))
    return points


def smooth(shares: Sequence[float]) -> np.ndarray:
    """Moving average over a part of the batches; at the ends over fewer."""
    width = max(1, len(shares) // SMOOTH)
    kernel = np.ones(width)
    return np.convolve(shares, kernel, "same") / np.convolve(np.ones(len(shares)), kernel, "same")


def step_ms(facts: dict[str, Any]) -> float | None:
    """The pause that replaced the steps of a comparison; None if they trained."""
    return next((run["config"].get("step_ms") for loaders in facts["runs"].values()
                 for runs in loaders.values() for run in runs), None)


def draw(folder: Path, target: Path) -> Path:
    """Draw the comparison in `folder` (as written by compare.py) to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    facts = json.loads((folder / JSON_NAME).read_text())
    rows = facts["rows"]
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    names = list(dict.fromkeys(row["loader"] for row in rows))
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    has_gpu = any(row["gpu"] is not None for row in rows)
    panels = [_times, _waits, _cpu, *([_gpu] if has_gpu else []), _slow]
    figure, axes = pyplot.subplots(len(caches), len(panels), squeeze=False,
                                   figsize=(4.6 * len(panels), 0.6 + 3.9 * len(caches)),
                                   constrained_layout=True)
    for line, cache in zip(axes, caches):
        chosen = [row for row in rows if row["cache"] == cache]
        for axis, panel in zip(line, panels):
            panel(axis, chosen, colour, folder)
    machine = facts["machine"]
    handles = [pyplot.Line2D([], [], color=colour[name], linewidth=4, label=name)
               for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncol=min(len(names), 6),
                  fontsize=8)
    runs = (f"medians of {facts['repeats']} interleaved runs" if facts["repeats"] > 1 else
            "one run each")
    pause = step_ms(facts)
    steps = "" if pause is None else f", steps are pauses of {pause:g} ms (nothing trained)"
    figure.suptitle(f"{facts['workload']}: {runs}, {machine['cores']} cores{steps}", fontsize=11)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
    return target


def _bars(axis: Any, rows: list[dict[str, Any]], colour: dict[str, str], name: str,
          factor: float) -> None:
    """Medians with their range and value, one loader a line."""
    values = np.array([factor * row[name] for row in rows])
    spread = np.abs([[factor * row[f"{name}_{end}"] for row in rows] for end in ("min", "max")]
                    - values)
    names = [row["loader"] for row in rows]
    axis.barh(names, values, xerr=spread, capsize=3, color=[colour[n] for n in names])
    ends = values + spread[1]
    for place, (value, end) in enumerate(zip(values, ends)):
        axis.text(end + 0.015 * ends.max(), place, f"{value:.3g}", va="center", fontsize=8)
    axis.set_xlim(0, 1.17 * max(ends.max(), 1e-9))
    axis.invert_yaxis()


def _times(axis: Any, rows: list[dict[str, Any]], colour: dict[str, str], _: Path) -> None:
    _bars(axis, rows, colour, "epoch_s", 1.0)
    told = "s (median, min-max)"
    known = [(place, row["bound_s"]) for place, row in enumerate(rows) if row["bound_s"]]
    for place, bound in known:
        axis.vlines(bound, place - 0.4, place + 0.4, color="black", linestyle="--", linewidth=1)
        axis.set_xlim(0, max(axis.get_xlim()[1], 1.05 * bound))
    if known:
        told += "\ndashed: its bound"
    axis.set(title=f"epoch time, {rows[0]['cache']} cache", xlabel=told)


def _waits(axis: Any, rows: list[dict[str, Any]], colour: dict[str, str], _: Path) -> None:
    _bars(axis, rows, colour, "wait_share", 100.0)
    axis.set(title="waiting for data", xlabel="% of the epoch (median, min-max)")


def _over_time(axis: Any, rows: list[dict[str, Any]], colour: dict[str, str], folder: Path,
               name: str, factor: float) -> None:
    for row in rows:
        points = read_usage(folder / f"{row['cache']}-{row['loader']}-1", name)
        axis.plot([t for t, _ in points], [factor * value for _, value in points],
                  color=colour[row["loader"]], linewidth=1.2)
    axis.set(xlabel="s in epochs, first run", ylim=(0, 105), xlim=(0, None))


def _cpu(axis: Any, rows: list[dict[str, Any]], colour: dict[str, str], folder: Path) -> None:
    _over_time(axis, rows, colour, folder, "cpu", 100.0)
    axis.set(title="CPU use", ylabel="% of all cores")


def _gpu(axis: Any, rows: list[dict[str, Any]], colour: dict[str, str], folder: Path) -> None:
    _over_time(axis, rows, colour, folder, "gpu", 1.0)
    axis.set(title="GPU use", ylabel="%")


def _slow(axis: Any, rows: list[dict[str, Any]], colour: dict[str, str], _: Path) -> None:
    """Where in an epoch the slow samples occur: their share of a batch, smoothed."""
    shown = [row for row in rows if row.get("slow_shares")]
    for place, row in enumerate(shown):  # in-order loaders coincide: thin lines over thick
        shares = row["slow_shares"]
        axis.plot((np.arange(len(shares)) + 0.5) / len(shares) * 100, 100 * smooth(shares),
                  color=colour[row["loader"]],
                  linewidth=1.2 + 1.5 * (len(shown) - 1 - place))
    if shown:
        axis.axhline(100 * shown[0]["slow_share"], color="black", linestyle="--", linewidth=1)
        axis.set(ylim=(0, None), xlim=(0, 100))
    else:
        axis.text(0.5, 0.5, "not known", ha="center", transform=axis.transAxes)
    axis.set(title="slow samples in a batch", xlabel="% of the epoch's batches, first run"
             + ("\ndashed: their share in the epoch" if shown else ""),
             ylabel=f"% (mean over 1/{SMOOTH} of the batches)")


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(prog="unet3d.bench.plot", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder of unet3d.bench.compare")
    parser.add_argument("--out", type=Path, help="PNG (default: FOLDER/compare.png)")
    args = parser.parse_args(argv)
    if not (args.folder / JSON_NAME).is_file():
        print(f"error: {args.folder / JSON_NAME}: missing", file=sys.stderr)
        return 1
    print(draw(args.folder, args.out or args.folder / "compare.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
