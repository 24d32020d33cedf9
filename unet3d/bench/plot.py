"""Draw a comparison or a single run, for a light page and for a dark one.

    python -m unet3d.bench.plot runs/compare     # compare.png and compare-dark.png in that folder
    python -m unet3d.bench.plot runs/quick       # run.png and run-dark.png there

A comparison shows epoch time with its bound, how many times faster than torch's loader, waiting,
memory, CPU and GPU use over time, and where in an epoch the slow samples come; with a target,
Dice over time; with several numbers of processes or several shares of slow samples, lines over
those. A run shows its course over time. Every loader has one colour in all pictures.
"""
from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unet3d import records

CSV_NAME, JSON_NAME = "compare.csv", "compare.json"
#: the colour of each loader, readable on white and on black
COLOURS = {
    "minato": "#2b7de9", "minato-ready": "#17a2c4", "minato-static": "#7a9cf0",
    "minato-native": "#0fa968", "minato-native-cached": "#7cb518",
    "minato-native-process": "#4f9277", "minato-device": "#6573d0",
    "minato-native-device": "#1fa79b", "minato-native-device-cached": "#93a83a",
    "minato-native-device-resident": "#b8a02a", "minato-shared": "#c2559a",
    "pytorch": "#e8590c", "pytorch-ooo": "#f2a516", "pytorch-expert": "#d9417c",
    "pytorch-native": "#b5704a", "dali": "#9d4fd0", "dali-cached": "#c97fe0",
    "dali-resident": "#7b5fe0", "synthetic": "#868e96",
}
#: colours of loaders without one of their own, chosen by name
OTHERS = ("#3d8fa8", "#a86f3d", "#6f8a2f", "#a8567f")
#: of lines that share a colour
LINE_STYLES = ("-", "--", ":")
THEMES = {"": {}, "-dark": {
    "figure.facecolor": "#16191d", "axes.facecolor": "#16191d", "savefig.facecolor": "#16191d",
    "legend.facecolor": "#16191d", "legend.edgecolor": "#5a626b",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color",
                     "ytick.color"), "#e3e6e8"),
    "axes.edgecolor": "#8a939c", "grid.color": "#39414a"}}
COLUMNS = 3  # panels in a row
STRIPS = 48  # parts of an epoch in which the share of slow samples is shown
RUN_POINTS = 200  # the most points of a run's samples/s
MEANS = 50  # about as many means of the loss are drawn over that of single steps

Rows = list[dict[str, Any]]
Panel = Callable[[Any, Rows], None]


def colour(name: str) -> str:
    """The colour of a loader, or of one with a variation: "dali-cached, 4 at once"."""
    loader = name.partition(",")[0]
    return COLOURS.get(loader) or OTHERS[zlib.crc32(loader.encode()) % len(OTHERS)]


def line_style(name: str) -> str:
    """Solid; dashed or dotted for a loader's variations, which share its colour."""
    return LINE_STYLES[min(2, name.count(","))]


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def _ink() -> str:
    """The colour of text in the current theme."""
    return str(_pyplot().rcParams["text.color"])


def themed(target: Path, paint: Callable[[], Any]) -> Path:
    """Save the figure that `paint` makes to `target`, and to NAME-dark for dark pages."""
    pyplot = _pyplot()
    for suffix, theme in THEMES.items():
        with pyplot.rc_context(theme):
            figure = paint()
            figure.savefig(target.with_stem(target.stem + suffix), dpi=110)
            pyplot.close(figure)
    return target


def step_ms(facts: dict[str, Any]) -> float | None:
    """The pause that replaced the steps of a comparison; None if they trained."""
    return _config(facts).get("step_ms")


def _config(facts: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the first run."""
    return next((run["config"] for loaders in facts["runs"].values()
                 for runs in loaders.values() for run in runs), {})


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 process, 2 processes."""
    plural = noun + ("es" if noun.endswith(("s", "ch")) else "s")
    return f"{number} {noun if number == 1 else plural}"


def title(facts: dict[str, Any]) -> str:
    """Workload, processes, workers, batch, data; then how it was measured."""
    config, machine = _config(facts), facts["machine"]
    processes = list(dict.fromkeys(row.get("processes", 1) for row in facts["rows"]))
    run = counted(processes[0], "process") if len(processes) == 1 else \
        f"{', '.join(map(str, processes))} processes"
    per = "" if processes == [1] else " each"
    what = [facts["workload"], run, f"{counted(config.get('workers', 0), 'worker')}{per}",
            f"batch {config.get('batch_size')}{per}", f"data {config.get('data')}"]
    how = [f"medians of {facts['repeats']} interleaved runs" if facts["repeats"] > 1 else
           "one run each", counted(machine["cores"], "core")]
    pause = config.get("step_ms")
    how.append("steps train" if pause is None else
               f"steps are pauses of {pause:g} ms (nothing trained)")
    busy = max((row.get("others") or 0.0 for row in facts["rows"]), default=0.0)
    if busy > 0.1:
        how.append(f"BUSY machine: other programs had up to {busy:.0%} of it")
    return ", ".join(what) + "\n" + ", ".join(how)


def draw(folder: Path, target: Path) -> Path:
    """Draw the comparison in `folder` (as written by compare.py), as `themed` saves it."""
    facts = json.loads((folder / JSON_NAME).read_text())
    return themed(target, lambda: _comparison(facts, folder))


def _comparison(facts: dict[str, Any], folder: Path) -> Any:
    pyplot, rows = _pyplot(), facts["rows"]
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    panels = _panels(facts, folder)
    height = -(-len(panels) // COLUMNS)
    figure, axes = pyplot.subplots(
        height * len(caches), COLUMNS, squeeze=False, constrained_layout=True,
        figsize=(5.6 * COLUMNS, 1.2 + height * len(caches) * (2.6 + 0.16 * min(
            12, len({row["loader"] for row in rows})))))
    for place, cache in enumerate(caches):
        chosen = [row for row in rows if row["cache"] == cache]
        block = axes[place * height:(place + 1) * height].ravel()
        for axis, panel in zip(block, panels):
            panel(axis, chosen)
        for axis in block[len(panels):]:
            axis.set_axis_off()
    names = list(dict.fromkeys(row["loader"] for row in rows))
    figure.legend(handles=[pyplot.Line2D([], [], color=colour(name), linewidth=4, label=name)
                           for name in names],
                  loc="outside lower center", ncol=min(len(names), 6), fontsize=9)
    figure.suptitle(title(facts), fontsize=12)
    return figure


def sweep_of(rows: Rows) -> str | None:
    """The column that a comparison sweeps: processes, heavy_share, or None."""
    return next((name for name in ("processes", "heavy_share")
                 if len({row.get(name) for row in rows}) > 1), None)


def _panels(facts: dict[str, Any], folder: Path) -> list[Panel]:
    """The panels of a comparison."""
    rows = facts["rows"]
    against_torch = any(row.get("times_torch") is not None for row in rows)
    swept = sweep_of(rows)
    if swept is not None:
        found = [_lines(swept, "samples_s", 1, "samples/s")]
        if swept == "processes":
            found.append(_lines(swept, "efficiency", 100, "efficiency, %"))
        if against_torch:
            found.append(_lines(swept, "times_torch", 1, "times torch"))
        return [*found, _lines(swept, "wait_share", 100, "waiting for data, % of the epoch"),
                _lines(swept, "memory_mb", 1e-3, "peak memory, GB")]
    found = [_times]
    if against_torch:
        found.append(_times_torch)
    found.append(_waits)
    if any(row["memory_mb"] is not None for row in rows):
        found.append(_memory)
    if facts.get("target_dice") is not None:
        found[:0] = [_dice(facts)]
    found.append(_over_time(folder, "cpu", 100.0, "CPU use, % of all cores"))
    if any(row["gpu"] is not None for row in rows):
        found.append(_over_time(folder, "gpu", 1.0, "GPU use, %"))
    if any(row.get("slow_shares") for row in rows):
        found.append(_slow)
    return found


# -- the panels of a comparison --------------------------------------------------------


def _bars(axis: Any, rows: Rows, name: str, factor: float,
          spread: Callable[[dict[str, Any]], tuple[float, float]] | None = None) -> None:
    """Values with their range, one loader a line; loaders without a value have an empty line."""
    values = np.array([factor * (row[name] or 0.0) for row in rows])
    ends = values.copy()
    for place, row in enumerate(rows):
        axis.barh(place, values[place], color=colour(row["loader"]), height=0.7)
        if row[name] is None:
            axis.text(0, place, " not known", va="center", fontsize=9)
            continue
        if spread is not None:
            low, high = (factor * end for end in spread(row))
            ends[place] = max(high, values[place])
            axis.errorbar(values[place], place, xerr=[[max(0.0, values[place] - low)],
                                                      [max(0.0, high - values[place])]],
                          color=_ink(), capsize=3, linewidth=1)
    for place, row in enumerate(rows):
        if row[name] is not None:
            axis.text(ends[place] + 0.015 * ends.max(), place, f"{values[place]:.3g}",
                      va="center", fontsize=9, bbox={
                          "facecolor": axis.get_facecolor(), "edgecolor": "none", "pad": 0.6})
    axis.set_yticks(range(len(rows)), [row["loader"] for row in rows])
    axis.set_xlim(0, 1.17 * max(ends.max(), 1e-9))
    axis.set_ylim(len(rows) - 0.5, -0.5)


def _that_load(rows: Rows) -> Rows:
    """Without the synthetic loader. Where loading is the limit, its ratio to torch's time would make
    those of the others unreadable."""
    return [row for row in rows if row["loader"] != "synthetic"]


def _times(axis: Any, rows: Rows) -> None:
    _bars(axis, rows, "epoch_s", 1.0, lambda row: (row["epoch_s_min"], row["epoch_s_max"]))
    told, ink = "s (median, min-max)", _ink()
    known = [(place, row) for place, row in enumerate(rows) if row["bound_s"]]
    for place, row in known:
        bound = row["bound_s"]
        # A wide line in the background's colour keeps the dashes visible on the bar.
        axis.vlines(bound, place - 0.42, place + 0.42, color=axis.get_facecolor(), linewidth=3.5)
        axis.vlines(bound, place - 0.42, place + 0.42, color=ink, linestyle=(0, (3, 1.5)),
                    linewidth=1.5)
        axis.set_xlim(0, max(axis.get_xlim()[1], 1.08 * bound))
    if known:
        told += "; dashed: its bound"
    if under := [row["loader"] for _, row in known if row["epoch_s"] < row["bound_s"]]:
        told += ("\nbound measured while the machine was slower: "
                 + (", ".join(under) if len(under) < 3 else f"{len(under)} loaders"))
    axis.set(title=f"epoch time, {rows[0]['cache']} cache", xlabel=told)


def _times_torch(axis: Any, rows: Rows) -> None:
    _bars(axis, _that_load(rows), "times_torch", 1.0, lambda row: (min(row["ratios"]), max(row["ratios"])))
    axis.axvline(1.0, color=_ink(), linestyle=":", linewidth=1)
    told = "torch's epoch time / its own (median, min-max of runs)"
    for row in rows:
        if row["loader"] == "synthetic" and row["times_torch"] is not None:
            told += f"\nsynthetic, which loads nothing: {row['times_torch']:.3g}"
    axis.set(title="times torch", xlabel=told)


def _waits(axis: Any, rows: Rows) -> None:
    _bars(axis, rows, "wait_share", 100.0,
          lambda row: (row["wait_share_min"], row["wait_share_max"]))
    axis.set(title="waiting for data", xlabel="% of the epoch (median, min-max)")


def _memory(axis: Any, rows: Rows) -> None:
    _bars(axis, rows, "memory_mb", 1e-3)
    axis.set(title="peak memory", xlabel="GB of all processes, shared pages once")


def _dice(facts: dict[str, Any]) -> Panel:
    """Mean Dice over the trainer's seconds, a line for each run."""
    def panel(axis: Any, rows: Rows) -> None:
        last = 0.0
        for row in rows:
            for run in facts["runs"][rows[0]["cache"]][row["loader"]]:
                points = [(one["seconds"], one["mean_dice"]) for one in run["epochs"]
                          if "mean_dice" in one]
                axis.plot([t for t, _ in points], [dice for _, dice in points], marker="o",
                          markersize=3.5, linewidth=1.3, color=colour(row["loader"]),
                          alpha=1.0 if run["reached_target"] else 0.45)
                last = max([last, *(t for t, _ in points)])
        axis.axhline(facts["target_dice"], color=_ink(), linestyle="--", linewidth=1)
        axis.set(title="quality over time", ylabel="mean Dice", ylim=(0, None),
                 xlim=(0, 1.04 * max(last, 1e-9)),
                 xlabel="s of training and evaluating; dashed: the target, pale: missed it")

    return panel


def read_usage(run: Path, name: str) -> list[tuple[float, float]]:
    """(seconds since the start of the run's first epoch, value) of "cpu" (0 to 1) or "gpu"
    (percent) of one run; empty if it was not measured."""
    points, offset, epoch, last = [], 0.0, None, 0.0
    for row in read_lines(run):
        if row["event"] != "usage":
            continue
        if row["epoch"] != epoch:
            epoch, offset = row["epoch"], offset + last
        last = row["t"]
        if row[name] is not None:
            points.append((offset + row["t"], row[name]))
    return points


def read_lines(run: Path) -> Iterator[dict[str, Any]]:
    """The events of a run."""
    with open(run / records.LINES_NAME) as stream:
        for line in stream:
            yield json.loads(line)


def _over_time(folder: Path, name: str, factor: float, text: str) -> Panel:
    def panel(axis: Any, rows: Rows) -> None:
        for row in rows:
            run = row.get("folder") or f"{row['cache']}-{row['loader']}-1"
            points = read_usage(folder / run, name)
            axis.plot([t for t, _ in points], [factor * value for _, value in points],
                      color=colour(row["loader"]), linewidth=1.4)
        axis.set(title=text, xlabel="s in epochs, first run", ylim=(0, 105), xlim=(0, None))

    return panel


def strip(shares: Sequence[float]) -> np.ndarray:
    """The mean share of slow samples in each of at most STRIPS equal parts of the batches."""
    count = min(STRIPS, len(shares))
    return np.array([np.mean(part) for part in np.array_split(np.asarray(shares), count)])


def _slow(axis: Any, rows: Rows) -> None:
    """Where in an epoch the slow samples come: a strip for each loader, darker where more do."""
    shown = [row for row in rows if row.get("slow_shares")]
    if not shown:
        axis.text(0.5, 0.5, "not known", ha="center", transform=axis.transAxes)
        axis.set_title("slow samples in an epoch")
        return
    strips = [strip(row["slow_shares"]) for row in shown]
    most = max(float(part.max()) for part in strips)
    for place, (row, part) in enumerate(zip(shown, strips)):
        image = axis.imshow(100 * part[None], aspect="auto", cmap="YlOrRd", vmin=0,
                            vmax=100 * max(most, 1e-9), interpolation="nearest",
                            extent=(0, 100, place + 0.38, place - 0.38))
        axis.text(102, place, f"{100 * max(row['slow_shares']):.0f} %", va="center", fontsize=9)
    axis.set_yticks(range(len(shown)), [row["loader"] for row in shown])
    axis.set(title=f"where the slow samples come ({100 * shown[0]['slow_share']:.0f} % of all)",
             xlabel="% of the epoch's batches, first run; at the right: the most in one batch",
             xlim=(0, 114), ylim=(len(shown) - 0.5, -0.5), xticks=range(0, 101, 20))
    axis.figure.colorbar(image, ax=axis, label="slow samples, %", shrink=0.8)


def _lines(swept: str, name: str, factor: float, text: str) -> Panel:
    """A column over the swept one, a line for each loader."""
    def panel(axis: Any, rows: Rows) -> None:
        places = sorted({row[swept] for row in rows})
        if name == "times_torch":
            rows = _that_load(rows)
        for loader in dict.fromkeys(row["loader"] for row in rows):
            points = sorted((row[swept], factor * row[name]) for row in rows
                            if row["loader"] == loader and row.get(name) is not None)
            axis.plot([places.index(x) for x, _ in points], [y for _, y in points], marker="o",
                      markersize=4, color=colour(loader), linewidth=1.6)
        if name == "times_torch":
            axis.axhline(1.0, color=_ink(), linestyle=":", linewidth=1)
        axis.set_xticks(range(len(places)), [
            f"{x:g}" if swept == "processes" else f"{100 * x:g} %" for x in places])
        axis.grid(axis="y", linewidth=0.5)
        most = max((factor * (row.get(name) or 0.0) for row in rows), default=0.0)
        axis.set(title=f"{text}, {rows[0]['cache']} cache", ylim=(0, 1.08 * max(most, 1e-9)),
                 xlabel="processes" if swept == "processes" else "slow samples")

    return panel


# -- a single run ----------------------------------------------------------------------


def course(run: Path) -> dict[str, list[tuple[float, float]]]:
    """Returns what a run logged over its seconds, by name; NaN between epochs, during which it
    evaluates.

    The time between a stop and the run that resumes it is left out.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    shift, last = 0.0, 0.0
    steps: dict[int, list[tuple[float, int]]] = {}  # end of each step, and its samples, by epoch
    used: list[dict[str, Any]] = []  # of an epoch: its times are from the epoch's start

    def add(name: str, at: float, value: float | None) -> None:
        if value is not None:
            found.setdefault(name, []).append((at, value))

    def separate(*names: str) -> None:
        for name in names:
            if name in found:
                add(name, found[name][-1][0], float("nan"))

    def place_usage() -> None:
        """The last one was measured at the end of the last step."""
        for row in used:
            for name in ("cpu", "others", "gpu", "memory_mb"):
                add(name, last - used[-1]["t"] + row["t"], row.get(name))
        used.clear()

    for row in read_lines(run):
        if row["event"] == "usage":
            used.append(row)
            continue
        place_usage()
        if row["event"] == "start":
            shift = row["time"] - last
        at = row["time"] - shift
        if row["event"] == "step":
            if row["epoch"] not in steps:
                separate("loss", "wait_ms")
            steps.setdefault(row["epoch"], []).append((at, len(row["samples"])))
            add("loss", at, row["loss"])
            add("wait_ms", at, 1e3 * row["wait_s"])
        elif row["event"] == "epoch":
            separate("cpu", "others", "gpu", "memory_mb")
            for name in ("kidney", "tumour", "mean_dice"):
                add(name, at, row.get(name))
        last = max(last, at)
    place_usage()
    parts = max(1, RUN_POINTS // max(1, len(steps)))
    for ends in steps.values():
        separate("samples_s")
        before = ends[0][0]  # of the first step only its end is known
        for part in np.array_split(np.arange(1, len(ends)), min(parts, max(1, len(ends) - 1))):
            if len(part):
                at = ends[part[-1]][0]
                add("samples_s", at, sum(ends[place][1] for place in part)
                    / max(at - before, 1e-9))
                before = at
    return found


def means(points: Sequence[tuple[float, float]], count: int = MEANS) -> list[tuple[float, float]]:
    """Means of equal parts of each epoch, about `count` of all together; NaN separates epochs."""
    epochs: list[list[tuple[float, float]]] = [[]]
    for at, value in points:
        if np.isnan(value):
            epochs.append([])
        else:
            epochs[-1].append((at, value))
    epochs = [epoch for epoch in epochs if epoch]
    parts = max(1, count // max(1, len(epochs)))
    return [tuple(part.mean(0).tolist()) for epoch in epochs
            for part in np.array_split(np.array(epoch), min(parts, len(epoch)))]


def draw_run(run: Path, target: Path) -> Path:
    """Draw the course of one run, as `themed` saves it."""
    found = course(run)
    config = next((row["config"] for row in read_lines(run) if row["event"] == "start"), {})
    return themed(target, lambda: _run(found, config, run))


def _run(found: dict[str, list[tuple[float, float]]], config: dict[str, Any], run: Path) -> Any:
    pyplot, main = _pyplot(), colour(str(config.get("loader")))
    figure, axes = pyplot.subplots(2, 3, figsize=(16, 7.5), constrained_layout=True)
    pause = config.get("step_ms")
    panels = [
        ("loss", "", {"loss": ("of a step", 1.0)}),
        ("Dice", "not evaluated", {"mean_dice": ("mean", 1.0), "kidney": ("kidney", 1.0),
                                   "tumour": ("tumour", 1.0)}),
        ("samples/s", "", {"samples_s": ("delivered", 1.0)}),
        ("waiting for data, ms a step", "", {"wait_ms": ("wait", 1.0)}),
        ("memory, GB", "not known", {"memory_mb": ("all processes", 1e-3)}),
        ("CPU and GPU, %", "not known", {"cpu": ("CPU, own", 100.0),
                                         "others": ("CPU, other programs", 100.0),
                                         "gpu": ("GPU", 1.0)})]
    last = max((at for points in found.values() for at, _ in points), default=1.0)
    for axis, (name, missing, lines) in zip(axes.ravel(), panels):
        shown = {key: points for key in lines if (points := found.get(key))}
        if name == "loss" and pause is not None:
            shown, missing = {}, f"steps are pauses of {pause:g} ms: nothing is trained"
        for style, (key, points) in zip(LINE_STYLES, shown.items()):
            text, factor = lines[key]
            width = 1.3
            if key == "loss" and len(points) > 2 * MEANS:  # else its noise hides its course
                axis.plot([t for t, _ in points], [factor * value for _, value in points],
                          color=main, label=text, linewidth=0.7, alpha=0.5)
                points, text, width = means(points), "means", 2.0
            axis.plot([t for t, _ in points], [factor * value for _, value in points],
                      color=main, linestyle=style, label=text, linewidth=width,
                      marker="o" if len(points) < 30 else None, markersize=3.5)
        if not shown:
            axis.text(0.5, 0.5, missing, ha="center", transform=axis.transAxes)
        if len(axis.lines) > 1:
            axis.legend(fontsize=9, handlelength=3.5)
        axis.grid(axis="y", linewidth=0.5)
        # Where nothing is found yet, Dice is its smoothing, about 1e-7: not a curve to look at.
        top = max(0.1, axis.get_ylim()[1]) if name == "Dice" else None
        axis.set(title=name, xlabel="s since the start of the run", ylim=(0, top),
                 xlim=(0, 1.03 * last))
    figure.suptitle(", ".join([
        str(config.get("workload", "unet3d")), str(config.get("loader")),
        counted(config.get("workers", 0), "worker"), f"batch {config.get('batch_size')}",
        f"data {config.get('data')}", f"run {run}"]), fontsize=12)
    return figure


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(prog="unet3d.bench.plot", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder of unet3d.bench.compare, of "
                        "unet3d.train or of unet3d.bench.workloads.run")
    parser.add_argument("--out", type=Path, help="PNG (default: compare.png or run.png in the "
                        "folder); the dark one is NAME-dark.png")
    args = parser.parse_args(argv)
    if (args.folder / JSON_NAME).is_file():
        print(draw(args.folder, args.out or args.folder / "compare.png"))
    elif (args.folder / records.LINES_NAME).is_file():
        print(draw_run(args.folder, args.out or args.folder / "run.png"))
    else:
        print(f"error: {args.folder}: holds neither {JSON_NAME} of a comparison nor "
              f"{records.LINES_NAME} of a run", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
