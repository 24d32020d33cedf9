"""The tables that a comparison prints, and what it says about them."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unet3d import loaders
from unet3d.bench import bounds
from unet3d.bench.usage import busy_remark

WAITS = ("wait_mean_s", "wait_p50_s", "wait_p99_s", "wait_max_s")


def work_of(loader: str) -> str:
    """Loaders with the same result have the same work to do, and so the same bounds."""
    if loader == "pytorch-expert" or loader.endswith(("-cached", "-resident", "-shared")):
        return loader  # reads less of its files
    return "reference" if loader == "synthetic" else loaders.samples_of(loader) or loader


def number(value: float | None, form: str, factor: float = 1.0) -> str:
    """The value times the factor as text, a dash if it is not known."""
    return "-" if value is None else format(value * factor, form)


def spread(values: Sequence[float], form: str) -> str:
    """The least and the greatest of the values as text, a dash if there are none."""
    return f"{min(values):{form}}-{max(values):{form}}" if values else "-"


def remarks(row: dict[str, Any]) -> str:
    """Returns what a reader must know of a row before believing its times."""
    found = ["not cold"] if row["not_cold"] else []
    if busy_remark(row["others"]):
        found.append(f"others {row['others']:.0%}")
    if bounds.remark(row["epoch_s"], row["bound_s"]):
        found.append("under its bound")
    elif bounds.remark(row["epoch_s_min"], row["bound_s"]):
        found.append("fastest epoch under its bound")
    return "; ".join(found)


def explained(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The remarks of the rows, explained in sentences."""
    notes, most = [], max((row["others"] or 0.0 for row in rows), default=0.0)
    if busy_remark(most):
        notes.append(f"others: the machine was busy, other programs had up to {most:.0%} of the "
                     "usable cores in the epochs of a row. Times are longer than on a quiet "
                     "machine, and ratios may differ. Repeat the run when it is quiet.")
    if any("under its bound" in remarks(row) for row in rows):
        notes.append("under its bound: the bound was measured at another moment, while this "
                     "machine was slower, and is no limit of these epochs.")
    return notes


def point_text(row: dict[str, Any], several: bool = True) -> str:
    """The point of a sweep that a row belongs to; empty for a comparison without a sweep."""
    if not several:
        return ""
    if row.get("heavy_share") is not None:
        return f", {row['heavy_share']:.0%} slow"
    return f", {row['processes']} process" + ("" if row["processes"] == 1 else "es")


def _swept(rows: Sequence[dict[str, Any]]) -> bool:
    return len({(row.get("processes"), row.get("heavy_share")) for row in rows}) > 1


def sweep_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of a sweep over processes or over shares of slow samples, point by point."""
    by_share = any(row["heavy_share"] is not None for row in rows)
    several = len({row["cache"] for row in rows}) > 1
    lines = [("loader", "slow samples, %" if by_share else "processes", "samples/s", "min-max",
              *(() if by_share else ("efficiency, %",)), "times torch", "min-max",
              "waits for data, %", "bound, s", "epoch, s", "")]
    for row in rows:
        lines.append((
            row["loader"] + (f" ({row['cache']})" if several else ""),
            f"{100 * row['heavy_share']:g}" if by_share else str(row["processes"]),
            f"{row['samples_s']:.1f}", spread([row["samples_s_min"], row["samples_s_max"]], ".1f"),
            *(() if by_share else (number(row["efficiency"], ".0f", 100),)),
            number(row["times_torch"], ".2f"), spread(row["ratios"], ".2f"),
            f"{row['wait_share'] * 100:.1f}", number(row["bound_s"], ".2f"),
            f"{row['epoch_s']:.2f}", remarks(row)))
    return aligned(lines)


def shared_cores(rows: Sequence[dict[str, Any]], every: dict[str, Any], cores: int) -> list[str]:
    """A note where several processes need more cores than there are, which limits scaling."""
    config = next((run["config"] for results in every.values() for runs in results.values()
                   for run in runs), {})
    most = max(row["processes"] for row in rows)
    threads = config.get("threads", 0) if (config.get("device"), config.get("step_ms")) == (
        "cpu", None) else 0
    need = most * (config.get("workers", 0) + threads)
    if most == 1 or need <= cores:
        return []
    return [f"{most} processes have {need} workers and threads of models for {cores} cores: the "
            "cores limit the scaling, whatever the loader"]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text, one loader a line, bounds below."""
    head = ("cache", "loader", "runs", "samples", "epoch s (min-max)", "x synth", "x work",
            "samples/s", "start ms", "wait % (min-max)", "wait ms mean/p50/p99/max", "CPU %",
            "GPU %", "mem MB", "slow %/batch mean, max", "others %", "remarks")
    lines, several = [head], _swept(rows)
    for row in rows:
        waits = "/".join(f"{row[name] * 1e3:.1f}" for name in WAITS)
        lines.append((
            row["cache"] + (" (not)" if row["not_cold"] else "") + point_text(row, several),
            row["loader"],
            str(row["runs"]), number(row["samples"], "d", 1),
            f"{row['epoch_s']:.2f} ({row['epoch_s_min']:.2f}-{row['epoch_s_max']:.2f})",
            number(row["relative"], ".3f"), number(row["over_work"], ".3f"),
            f"{row['samples_s']:.1f}", f"{row['startup_s'] * 1e3:.0f}",
            f"{row['wait_share'] * 100:.1f} ({row['wait_share_min'] * 100:.1f}-"
            f"{row['wait_share_max'] * 100:.1f})", waits, f"{row['cpu'] * 100:.0f}",
            number(row["gpu"], ".0f"), number(row["memory_mb"], ".0f"),
            f"{number(row.get('slow_share'), '.0f', 100)}, "
            f"{number(row.get('slow_batch_max'), '.0f', 100)}",
            number(row["others"], ".0f", 100), remarks(row)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip()
            for line in lines]
    return "\n".join([*text, *bound_lines(rows)])


def bound_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The bounds of an epoch: one line for each cache, point and kind of work."""
    several = _swept(rows)
    first = {(row["cache"] + " run" + point_text(row, several), work_of(row["loader"])): row
             for row in reversed(rows)}
    return [f"bounds of an epoch, {where}, {work} samples: " + ", ".join(
        f"{name.removesuffix('_bound_s')} {value:.3f} s" for name, value in row.items()
        if name.endswith("_bound_s") and value is not None)
        for (where, work), row in reversed(first.items())]


def short_table(rows: Sequence[dict[str, Any]]) -> str:
    """The cost of loading: epoch, waiting and bound of each loader."""
    several = len({row["cache"] for row in rows}) > 1
    lines = [("loader", "epoch, s", "min-max", "times torch", "min-max", "waits for data, %",
              "min-max", "bound, s", "epoch / bound", "")]
    for row in rows:
        bound = row["bound_s"]
        lines.append((
            row["loader"] + (f" ({row['cache']})" if several else ""), f"{row['epoch_s']:.2f}",
            f"{row['epoch_s_min']:.2f}-{row['epoch_s_max']:.2f}",
            number(row["times_torch"], ".2f"), spread(row["ratios"], ".2f"),
            f"{row['wait_share'] * 100:.1f}",
            f"{row['wait_share_min'] * 100:.1f}-{row['wait_share_max'] * 100:.1f}",
            number(bound, ".2f"), number(row["epoch_s"] / bound if bound else None, ".2f"),
            remarks(row)))
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Cells as text, those of the first column and of one without a head aligned left, the others
    right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    left = [not place or not title for place, title in enumerate(lines[0])]
    return "\n".join("  ".join(
        cell.ljust(width) if is_left else cell.rjust(width)
        for cell, width, is_left in zip(line, widths, left)).rstrip() for line in lines)
