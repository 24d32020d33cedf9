"""Tables and a plot of an experiment, from its JSON alone."""
from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from unet3d import loaders
from unet3d.bench import compare, plot
from unet3d.bench.tables import aligned, number
from unet3d.bench.gpu import plan
from unet3d.bench.gpu.store import DONE, chosen, median_of

ENOUGH = 0.98  # share of the synthetic loader's rate
#: of points: a loader, and its variations, which share its colour
MARKERS = "os^"
Rows = list[dict[str, Any]]


def ceiling(rows: Rows) -> float | None:
    """Samples a second of the synthetic loader, with its best number of cores."""
    resident = chosen(rows, label=plan.SYNTHETIC.label)
    rates = [median_of([row for row in resident if row["cores"] == cores], "samples_s")
             for cores in {row["cores"] for row in resident}]
    return max((rate for rate in rates if rate is not None), default=None)


def shares(rows: Rows, label: str) -> dict[int, float]:
    """Samples a second of a contender by cores, as a share of the ceiling of these rows."""
    most, found = ceiling(rows), {}
    for cores in sorted({row["cores"] for row in rows}):
        rate = median_of(chosen(rows, label=label, cores=cores), "samples_s")
        if most and rate is not None:
            found[cores] = rate / most
    return found


def cores_needed(by_cores: dict[int, float], enough: float = ENOUGH) -> str:
    """The number of cores that reaches the share, interpolated between two rows."""
    points = sorted(by_cores.items())
    for place, (cores, share) in enumerate(points):
        if share < enough:
            continue
        if place == 0:
            return f"<= {cores}"
        before, less = points[place - 1]
        return f"{before + (cores - before) * (enough - less) / (share - less):.1f}"
    return "not reached" if points else "-"


def _labels(rows: Rows) -> list[str]:
    """The contenders, in the plan's order."""
    known = [one.label for one in (*plan.KEY, *plan.OTHERS, *plan.WORKLOADS)]
    there = {row["label"] for row in rows}
    return [*dict.fromkeys(name for name in known if name in there), *sorted(there - {*known})]


def _sweeps(document: dict[str, Any]) -> Iterable[tuple[str, Rows]]:
    """(precision and batch size, rows) of the sweep, in the order of the plan."""
    rows = chosen(document["rows"], group="sweep")
    for amp, batch in dict.fromkeys((row["amp"], row["batch"]) for row in rows):
        yield f"{amp}, batch {batch}", chosen(rows, amp=amp, batch=batch)


def sweep_table(name: str, rows: Rows) -> str:
    """Shares of the synthetic rate by cores."""
    counts = sorted({row["cores"] for row in rows})
    lines = [[f"% of synthetic, {name}", "boxes kept", *(f"{n} cores" for n in counts),
              f"cores for {ENOUGH:.0%}", "rows"]]
    for label in _labels(rows):
        own, found = chosen(rows, label=label), shares(rows, label)
        needed = cores_needed(found) if len(found) > 1 else "-"
        lines.append([label, "yes" if own[0]["boxes"] else "",
                      *(number(found.get(n), ".1f", 100) for n in counts), needed,
                      str(len(own))])
    return f"{aligned(lines)}\n100 %: {number(ceiling(rows), '.2f')} samples/s"


def detail_table(name: str, rows: Rows, measured: dict[str, Any]) -> str:
    """All figures of the contenders, at the number of cores where most of them are compared."""
    cores = max(dict.fromkeys(row["cores"] for row in rows),  # of equals, the first that was run
                key=lambda n: len({row["label"] for row in chosen(rows, cores=n)}))
    rows, pinned = chosen(rows, cores=cores), measured.get("pinned_mb_s")
    most = ceiling(rows)
    lines = [[f"{cores} cores, {name}", "samples/s", "min-max", "% of synth.", "waits %",
              "GPU busy %", "to device GB/s", "% of pinned", "overlap %", "cores used",
              "memory MB", "cached %", "others %"]]
    for label in _labels(rows):
        own = chosen(rows, label=label)
        of = {column: median_of(own, column) for column in (
            "samples_s", "wait_share", "gpu", "copy_mb_s", "copy_overlap", "cpu", "memory_mb")}
        rates = [epoch["samples_s"] for epoch in compare.counted_epochs("warm", own)]
        copied = of["copy_mb_s"]
        cached = min((row["cached"] for row in own if row["cached"] is not None), default=None)
        others = max((row["others"] for row in own if row["others"] is not None), default=None)
        lines.append([
            label, number(of["samples_s"], ".2f"), f"{min(rates):.2f}-{max(rates):.2f}",
            number(of["samples_s"] / most if most and of["samples_s"] else None, ".1f", 100),
            number(of["wait_share"], ".1f", 100), number(of["gpu"], ".0f"),
            number(copied, ".1f", 1e-3),
            number(copied / pinned if copied and pinned else None, ".0f", 100),
            number(of["copy_overlap"], ".0f", 100), number(of["cpu"], ".1f", cores),
            number(of["memory_mb"], ".0f"), number(cached, ".0f", 100),
            number(others, ".0f", 100)])
    notes = [f"{label}: {told}" for label in _labels(rows) for told in dict.fromkeys(
        row["epochs"][-1]["copy_notes"] for row in chosen(rows, label=label)) if told]
    return "\n".join([aligned(lines), *notes])


def group_table(group: str, rows: Rows) -> str:
    """A question that is asked at one number of cores only."""
    most = ceiling(rows)
    loss = median_of(chosen(rows, label=plan.SYNTHETIC.label), "gil_denied")
    lines = [[f"{group}, {rows[0]['cores']} cores", "samples/s", "% of synth.", "waits %",
              "GPU busy %", "p99 ms", "start s", "GIL lost %", "to loading %"]]
    for label in _labels(rows):
        own = chosen(rows, label=label)
        rate, denied = median_of(own, "samples_s"), median_of(own, "gil_denied")
        lines.append([
            label, number(rate, ".2f"), number(rate / most if most and rate else None, ".1f", 100),
            number(median_of(own, "wait_share"), ".1f", 100),
            number(median_of(own, "gpu"), ".0f"), number(median_of(own, "wait_p99_s"), ".1f", 1e3),
            number(median_of(own, "startup_s"), ".2f"), number(denied, ".1f", 100),
            number(None if denied is None or loss is None else max(0.0, denied - loss), ".1f",
                   100)])
    facts = rows[0]["facts"]
    notes = [plan.GROUPS[group]]
    if group == "python":
        notes.append(f"{facts['python_ms']:.1f} ms of Python a step; lost: the share of its time "
                     "in which the training thread waited for the GIL; to loading: more than "
                     "with the synthetic loader, and so held by the loader's threads")
    if group == "memory":
        least = max((row["cached"] for row in rows if row["cached"] is not None), default=None)
        notes.append(f"{facts['data_gib']:.1f} GiB of data, of which {number(least, '.0f', 100)} % "
                     "at most were cached at first")
    return "\n".join([aligned(lines), *notes])


def benchmark_table(rows: Rows) -> str:
    """Microseconds per sample by workers."""
    rows = sorted(rows, key=lambda row: row["cores"])
    lines = [["loader.py, us a sample (median)", *(f"{row['cores']} workers" for row in rows)]]
    cells = dict.fromkeys((case, name) for row in rows for case, found in row["facts"].items()
                          for name in found)
    for case, name in cells:
        times = [row["facts"].get(case, {}).get(name) for row in rows]
        lines.append([f"{case}: {name}", *(
            number(found[len(found) // 2] if found else None, ".1f") for found in times)])
    return aligned(lines)


def check_line(rows: Rows) -> str:
    """Whether the contenders delivered the same bytes, as a sentence."""
    results: dict[str, list[dict[str, Any]]] = {}
    for row in rows:  # some loaders occur with different options
        one = {"config": {"seeding": "sample"}, "epochs": row["epochs"]}
        results.setdefault(row["loader"], []).append(one)
    try:
        compare.check_same_work(results)
    except compare.ComparisonError as error:
        return f"NOT THE SAME WORK: {error}"
    own = sorted(name for name in results if loaders.samples_of(name) is None)
    return (f"the same samples, and where they are of one kind the same bytes, by "
            f"{', '.join(sorted(set(results) - set(own))) or 'none'}"
            + (f"; bytes of their own: {', '.join(own)}" if own else ""))


def head(document: dict[str, Any]) -> str:
    """Machine, versions, and the progress of the experiment."""
    machine, sessions = document["machine"], document["sessions"]
    gpu = machine["gpu"]
    device = (f"{gpu['name']} ({gpu['memory_gib']} GiB, CUDA {gpu['cuda']}, cuDNN "
              f"{gpu['cudnn']})" if gpu else "no GPU")
    packages = ", ".join(f"{name} {is_}" for name, is_ in machine["packages"].items())
    measured = sessions[-1]["measured"] if sessions else {}
    rates = ", ".join(f"{name.removesuffix('_mb_s').replace('_', ' ')} {value / 1e3:.1f} GB/s"
                      for name, value in measured.items()
                      if name.endswith("_mb_s") and value is not None)
    done = len(chosen(document["rows"]))
    return "\n".join([
        f"{device}; {machine['cpu']}, {machine['cores']} cores (threads of the first: "
        f"{machine['first_core'] or 'unknown'}), {number(measured.get('memory_gib'), '.0f')} GiB; "
        f"Linux {machine['kernel']}",
        f"Python {machine['python']}, torch {machine['torch']}, {packages}; commit "
        f"{machine['commit'] or 'unknown'}",
        f"{done} rows of {document['planned']} done, {len(document['rows']) - done} failed or "
        f"left out, in {sum(one['seconds'] for one in sessions) / 60:.1f} minutes of "
        f"{len(sessions)} calls; copies: {rates}"])


def _ended_otherwise(rows: Rows) -> list[str]:
    """Rows that failed or were left out, once for each reason."""
    found: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if row["status"] != DONE:
            reason = (row["status"], row["label"], row["why"].strip().splitlines()[-1])
            found[reason] = found.get(reason, 0) + 1
    return [f"{status}: {label} ({count} rows): {why}"
            for (status, label, why), count in found.items()]


def left_out(left: Rows, rows: Rows) -> list[str]:
    """The rows for which there was no time, a line for each question. A row of which another repeat
    has ended or is named is only counted."""
    def what(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["group"], row["amp"], row["batch"], row["cores"], row["label"]

    contenders: dict[str, set[str]] = {}
    for row in (*rows, *left):
        contenders.setdefault(row["group"], set()).add(row["label"])
    ended, named = {what(row) for row in rows}, dict.fromkeys(what(row) for row in left)
    found: dict[tuple[str, str, int], dict[int, list[str]]] = {}
    for group, amp, batch, cores, label in (key for key in named if key not in ended):
        found.setdefault((group, amp, batch), {}).setdefault(cores, []).append(label)
    lines = []
    for (group, amp, batch), by_cores in found.items():
        parts = [f"{cores} cores: " + ("all" if {*labels} == contenders[group] else
                                       "; ".join(labels))
                 for cores, labels in by_cores.items()]
        lines.append(f"left out, no time: {group}, {amp}, batch {batch}, {' | '.join(parts)}")
    repeats = len(left) - sum(key not in ended for key in named)
    return [*lines, f"left out, no time: {repeats} further repeats"] if repeats else lines


def text(document: dict[str, Any]) -> str:
    """All tables."""
    parts, rows = [head(document)], document["rows"]
    sessions = document["sessions"]
    measured = sessions[-1]["measured"] if sessions else {}
    sweeps = list(_sweeps(document))
    parts += [sweep_table(name, found) for name, found in sweeps]
    parts += [detail_table(name, found, measured) for name, found in sweeps]
    for group in plan.GROUPS:
        if not (found := chosen(rows, group=group)) or group == "sweep":
            continue
        parts.append(f"check: {check_line(found)}" if group == "check" else
                     benchmark_table(found) if group == "benchmark" else
                     group_table(group, found))
    missing = dict.fromkeys(line for one in sessions for line in one["missing"])
    parts.append("\n".join([*_ended_otherwise(rows), *left_out(document.get("left", []), rows),
                            *missing,
                            "overlap 0: copied on the training's own stream, which then waits"]))
    return "\n\n".join(parts)


def draw(document: dict[str, Any], target: Path) -> Path | None:
    """Share, waiting and GPU use by cores, to a PNG and to one for dark pages; None without
    matplotlib or rows."""
    sweeps = list(_sweeps(document))
    if not sweeps or importlib.util.find_spec("matplotlib") is None:
        return None
    return plot.themed(target, lambda: _figure(document, sweeps))


def _figure(document: dict[str, Any], sweeps: Sequence[tuple[str, Rows]]) -> Any:
    from matplotlib import pyplot, rcParams

    panels = [("samples_s", "% of synthetic"), ("wait_share", "waiting, %"),
              ("gpu", "GPU busy, %")]
    labels = _labels([row for _, rows in sweeps for row in rows])
    figure, axes = pyplot.subplots(len(sweeps), len(panels), squeeze=False,
                                   figsize=(14, 0.8 + 3.8 * len(sweeps)),
                                   constrained_layout=True)
    for line, (name, rows) in zip(axes, sweeps):
        for axis, (column, title) in zip(line, panels):
            _panel(axis, rows, column, labels)
            axis.set(title=f"{title}: {name}", xlabel="cores", ylim=(0, None))
        line[0].axhline(100 * ENOUGH, color=rcParams["text.color"], linestyle="--", linewidth=1)
    figure.legend(handles=[pyplot.Line2D([], [], color=plot.colour(label), marker=_marker(label),
                                         linestyle=plot.line_style(label), label=label)
                             for label in labels],
                  loc="outside lower center", ncol=4, fontsize=8)
    gpu = document["machine"]["gpu"]
    figure.suptitle(f"{gpu['name'] if gpu else 'no GPU'}, {document['machine']['cpu']}")
    return figure


def _marker(label: str) -> str:
    return MARKERS[min(2, label.count(","))]


def _panel(axis: Any, rows: Rows, column: str, labels: Sequence[str]) -> None:
    counts = sorted({row["cores"] for row in rows})
    for label in labels:
        if column == "samples_s":
            points = shares(rows, label)
        else:
            points = {cores: value for cores in counts
                      if (value := median_of(chosen(rows, label=label, cores=cores),
                                             column)) is not None}
        factor = 1 if column == "gpu" else 100
        axis.plot(list(points), [factor * value for value in points.values()],
                  marker=_marker(label), color=plot.colour(label),
                  linestyle=plot.line_style(label), linewidth=1.4)
    axis.set_xticks(counts)
    axis.set_xlim(min(counts) - 0.5, max(counts) + 0.5)
    if not any(len(line.get_xdata()) for line in axis.lines):
        axis.set_yticks([])
        axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes)
