"""The answer for the terminal and as a page, ``report.json``, and the comparison of two of these."""

from __future__ import annotations

import html
import json
import math
import os
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ..text import counted, format_bytes, format_rate, format_seconds
from .advice import describe_data, describe_move
from .codecs import STORAGES, codec_rows, storage_rate, winners
from .facts import OTHERS, SLOW_TIMES, Facts, fit_scaling, slow_share
from .records import Change, CodecRow, Report, StageTimes, Told, format_place, parse

#: a rate whose range is wider than this is told with the range
UNCERTAIN = 1.3
#: fewer images than this make a mean unreliable
FEW = 16
#: share of the time above which the ends of epochs are worth a note
ENDS = 0.05
#: share of a sample from which a stage is shown
LEAST_SHARE = 0.03
#: of report.json; the first number rises when a field goes, or changes its meaning
SCHEMA = "1.0"
#: of the answer: lines, letters of a line, and changes of each kind
LINES, COLUMNS, SHOWN = 25, 440, 4
#: what samples do with the interpreter's lock
LOCK = {
    "holds it": "samples hold the GIL", "lets go": "samples release the GIL",
    "mixed": "samples hold the GIL for a part of their time",
}  # fmt: skip
#: changes that are not arguments of the loader, but commands or orders of transforms
ELSEWHERE = ("minato recode ", "order: ")


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def answer(report: Report, where: str = "") -> str:
    """About LINES lines; the first names the limit. Notes that do not fit are only in the page."""
    lines = [report.limit.line, *(f"  {line}" for line in _list_facts(Facts(report)))]
    for title, items, shown in _list_sections(report):
        lines += [title, *(f"  {item}" for item in shown)]
    notes = [f"note: {text}" for text in report.notes]
    end = [where] if where else []
    room = max(0, LINES - len(lines) - len(end))
    if where and (left := notes[room:]):
        end = [f"{where} ({counted(len(left), 'more note')} there)"]
    return "\n".join(line[:COLUMNS] for line in lines + notes[:room] + end)


def _list_sections(report: Report) -> Iterator[tuple[str, list[str], list[str]]]:
    """What would help, and what not: a title, all of it, and the lines that a short answer has."""
    doubt = ", not settled" if report.limit.seen else ""
    checked = [change for change in report.helps if change.checked is not None]
    others = [change for change in report.helps if change.checked is None]
    for title, changes in (
        ("What would help, predicted and checked", checked), ("What might help, not checked", others)
    ):  # fmt: skip
        if changes:
            yield f"{title}{doubt}:", _list_changes(report, changes), _list_changes(report, changes[:SHOWN])
    if report.useless:
        yield f"What would not help{doubt}:", report.useless, report.useless[:SHOWN]


def _list_facts(f: Facts) -> list[str]:
    w, loader, report = f.watched, f.loader, f.report
    lines = []
    if w.asked is not None:
        gets, (low, high) = format_rate(w.delivered), w.range or (1.0, 1.0)
        if high > UNCERTAIN * low:
            gets += f" (uncertain, by {w.steps} steps: {format_rate(low)} to {format_rate(high)})"
        waits = f"waits for data {w.wait:.0%} of its time"
        if w.queued > ENDS:
            waits = f"had no core for {w.queued:.0%} of its time inside its loader, and waits for data {w.wait:.0%} of the rest"
        lines.append(
            f"the step asks for {format_rate(w.asked)} samples/s ({w.by}: {format_seconds(w.step)} for a batch of "
            f"{w.batch}) and gets {gets}: the program {waits}"
        )
    base = report.relative_to
    if base and report.helps:
        line = (
            f'"times" below compare with {format_rate(base)} samples/s, which the study measured for the '
            "program's own loader and step"
        )
        if w.delivered and not 0.8 < base / w.delivered < 1.25:
            line += f" (the program itself got {format_rate(w.delivered)})"
        if report.share is not None:
            took = f"{report.share:.0%} of the program's time"
            line += f"; they are of the loop over this {kind_of_loader(report)}, which took {took}"
        lines.append(line)
    lines.append(
        f"{kind_of_loader(report)}: {loader['class']} at {format_place(report.place)}, "
        f"num_workers={loader['num_workers']}, batch_size={loader['batch_size']}, "
        f"{loader.get('samples', 'an unknown number of')} samples"
    )
    if f.costs:
        stages = [(s.label, f.share(s)) for s in f.stages if f.share(s) >= LEAST_SHARE][:5]
        parts = ", ".join(f"{label} {share:.0%}" for label, share in stages)
        count, share, _times = slow_share(f.costs)
        uneven = f"; {count:.1%} of them are slow, and take {share:.0%} of the time" if count else ""
        lines.append(
            f"a sample takes {format_seconds(f.mean)} (median {format_seconds(statistics.median(f.costs))}, p99 "
            f"{format_seconds(quantile(f.costs, 0.99))}, computing for {f.cpu_share:.0%} of it{uneven}): "
            f"{parts + ', ' if parts else ''}other {f.other:.0%}"
        )
    told = f.report.sampler
    if told and f.sampler * w.delivered > ENDS:
        lines.append(f"the sampler {told.name} takes {f.sampler * w.delivered:.0%} of the program's time")
    if f.rates:
        by: dict[str, list[str]] = {}
        for (kind, workers), rate in sorted(f.rates.items()):
            by.setdefault(kind, []).append(f"{format_rate(rate)} ({workers})")
        free = by.pop("hand-over", None)
        alone = [f"{kind} {', '.join(each)}" for kind, each in sorted(by.items())]
        alone += [f"samples that cost nothing {free[0]}"] if free else []
        lines.append(f"loaders alone, in samples/s (number of workers): {'; '.join(alone)}")
    if fastest := ", ".join(f"{name}: {codec} {format_rate(rate)}/s" for name, codec, rate in winners(f)):
        lines.append(f"fastest codecs of those that lose as little as jpeg 85: {fastest}")
    return lines


def kind_of_loader(told: Told | Report) -> str:
    return "validation loader" if told.validates else "loader"


def format_gain(report: Report, gain: float) -> str:
    """How many times as fast a change makes the loop over the loader, and the program if that has others."""
    share = report.share
    whole = "" if share is None else f", the program {1 / (1 - share + share / gain):.2f}"
    return f"{gain:.2f} times{whole}"


def _list_changes(report: Report, changes: list[Change]) -> list[str]:
    """A line for each, and a second one for what to paste."""
    lines = []
    for number, change in enumerate(changes, 1):
        rate = ""
        if change.predicted is not None:
            rate = f": predicted {format_rate(change.predicted)} samples/s ({format_gain(report, change.gain or 0.0)})"
        if change.checked is not None:
            rate += f", checked {format_rate(change.checked)} ({format_gain(report, change.checked_gain)})"
            rate += f" on {change.samples} samples"
        if report.limit.seen:
            rate += ", not settled: there is no conclusion"
        elif change.settled is False:
            rate += f", not settled: the check is over {change.bound:.0%} away from the prediction"
        note = f"; {change.note}" if change.note else ""
        lines.append(f"{number}. {change.what}{rate}; {change.effort}; data {change.data}{note}")
        if change.paste:
            place = change.place or report.place
            at = f"{format_place(place)}  " if place and not change.paste.startswith(ELSEWHERE) else ""
            lines.append(f"   {at}{change.paste}")
    return lines


def list_notes(f: Facts) -> list[str]:
    """What a reader must know to believe the numbers."""
    notes = []
    w, work, storage, codecs = f.watched, f.work, f.storage, f.codecs
    if w.asked is not None and w.steps < 20:
        notes.append(f"only {w.steps} steps were seen, so the program's own rates are uncertain")
    if work.failures:
        none = "" if work.costs else ", and none could be made"
        gone = ". If the program removes its files at its end, run it again with --pause" * ("FileNotFound" in work.failed[0])
        notes.append(f"{work.failures} sample(s) failed{none}; {work.failed[0]}{gone}")
    if f.own_rate and fit_scaling(f.scaling()) is None:
        notes.append("another number of workers was not predicted, because only one number was measured")
    if work.merged:
        notes.append("measuring inside samples slowed them by over 10 %, so some stages are shown as one")
    rate, lost = f.own_rate, f.end_seconds(f.own, f.workers)
    if rate and (share := lost * f.program_rate(rate, f.workers)) > ENDS:
        notes.append(
            f"the end of each epoch costs {format_seconds(lost * f.epoch * f.batch)}, {share:.0%} of the "
            'time; the rates of loaders alone leave that out'
        )
    if f.others > OTHERS:
        notes.append(f"other programs used {f.others:.0%} of the cores while this was measured")
    if storage.rates:
        best = max(storage.rates, key=lambda one: one.files_per_s)
        state = "from the disk" if storage.cold else "from memory; less if the data do not fit there"
        notes.append(
            f"storage alone ({state}): {format_rate(best.files_per_s)} files/s, "
            f"{format_bytes(best.bytes_per_s)}/s with {best.in_flight} reads in flight"
        )
    if 0 < codecs.images < FEW:
        notes.append(f"codecs: only {codecs.images} images were encoded in time; a longer --budget tells more")
    if codecs.skipped:
        notes.append(f"{codecs.skipped} files that samples read are not photos, and were left as they are")
    notes += [f"{r.name}: the program cannot read it: {r.error}" for r in codecs.rows if r.error]
    orders = f.report.orders
    if orders:
        notes += [f"orders: a chain was not tried: {why}" for why in orders.failed]
        notes += [
            f"orders: {describe_move(m)} was left out: it {'fails: ' + m.error if m.error else 'gives other shapes'}"
            for m in orders.moves if not m.alike
        ]
        if not orders.moves:
            notes.append("orders: no chain of transforms (a list `transforms`) makes data smaller late, or larger early")
    if work.gil:
        notes.append(LOCK[work.gil])
    return notes


# ---- two reports ---------------------------------------------------------------------------


def compare(before: str, after: str) -> str:
    """The differences of two report.json.

    Raises:
        ValueError: for a file that is not a report of this version.
    """
    one, two = _load(before), _load(after)
    f, g = Facts(one), Facts(two)
    lines = [f"before: {one.limit.line}", f"after:  {two.limit.line}"]

    def row(name: str, a: float | None, b: float | None, unit: str) -> None:
        if a is None or b is None:
            return
        change = f"{b / a:6.2f} times" if a > 0 and b > 0 else "   new" if b > 0 else "   gone"
        lines.append(f"  {name:34} {a:10.4g} -> {b:10.4g} {unit:10} {change}")

    row("delivered", f.watched.delivered or None, g.watched.delivered or None, "samples/s")
    row("asked for", f.watched.asked, g.watched.asked, "samples/s")
    if f.costs and g.costs:
        row("a sample", f.mean * 1e3, g.mean * 1e3, "ms")
    for kind, workers in sorted(f.rates.keys() & g.rates.keys()):
        name = "samples that cost nothing" if kind == "hand-over" else f"{kind}'s loader"
        row(f"{name}, {counted(workers, 'worker')}", f.rates[kind, workers], g.rates[kind, workers], "samples/s")
    earlier, later = _seconds_by_name(f), _seconds_by_name(g)
    for name in sorted({**later, **earlier}, key=lambda name: -earlier.get(name, 0.0)):
        a, b = earlier.get(name, 0.0), later.get(name, 0.0)
        if max(a / max(f.mean, 1e-9), b / max(g.mean, 1e-9)) > LEAST_SHARE:
            row(name, a * 1e3, b * 1e3, "ms")
    return "\n".join(lines)


def _seconds_by_name(f: Facts) -> dict[str, float]:
    """Seconds of each stage of a sample; transforms by their names, since their positions may change."""
    found: dict[str, float] = {}
    for stage in f.stages:
        name = re.sub(r"^transform \d+ ", "transform ", stage.label)
        found[name] = found.get(name, 0.0) + stage.seconds
    return found


def _load(path: str) -> Report:
    if os.path.isdir(path):
        path = os.path.join(path, "report.json")
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        schema = found["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a report of minato analyze: {error}") from None
    if str(schema).partition(".")[0] != SCHEMA.partition(".")[0]:
        raise ValueError(f"{path} was written by another version of minato (schema {schema}, this one reads {SCHEMA})")
    return parse(Report, found)


# ---- index.html: a page by itself, of HTML and CSS alone ----------------------------------------

#: Text and background are the browser's, light or dark; bars and lines are seen on both.
STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { margin: 0 auto; max-width: 60rem; padding: 1.25rem; }
h1 { font-size: 1.35rem; text-wrap: balance; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p, h1, pre, td { overflow-wrap: anywhere; } .soft { opacity: .7; font-size: .875rem; }
div { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #8885; }
td:first-child { min-width: 8rem; } .n { text-align: right; white-space: nowrap; }
.bar { min-width: 8rem; width: 40%; white-space: nowrap; }
i { display: inline-block; height: 1em; border-radius: 2px; print-color-adjust: exact; }
code, pre { font: .85rem/1.45 ui-monospace, monospace; }
pre { background: #8882; border-radius: .5rem; padding: .35rem .75rem; white-space: pre-wrap; }
@media print { body { max-width: none; padding: 0; } h2, tr { break-inside: avoid; } h2 { break-after: avoid; } }
"""
BLUE, ORANGE, GREEN, RED = "#2f6fde", "#d9822b", "#2a9d78", "#c0392b"


def page(found: Report) -> str:
    """The whole page of a report."""
    f = Facts(found)
    parts = [f"<h1>{text(found.limit.line)}</h1>", *(f"<p>{text(line)}</p>" for line in _list_facts(f))]
    sections = [(title.rstrip(":"), items) for title, items, _shown in _list_sections(found)]
    for title, items in [*sections, ("Notes on these numbers", found.notes)]:
        lines = (f"<p>{text(line)}</p>" if line[0] != " " else f"<pre>{text(line.strip())}</pre>" for line in items)
        parts += [f"<h2>{text(title)}</h2>", *lines] if items else []
    parts += [make(f) for make in (_stages, _histogram, _rates, _storage, _codecs, _orders, _machine)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="generator" content="{text(found.generator)}">'
        f"<title>minato analyze: {text(found.limit.kind)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def text(value: Any) -> str:
    return html.escape(str(value))


#: the parts of a bar, from left to right: a share of the width, and a color
Bar = list[tuple[float, str]]


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str | Bar]], caption: str = "") -> str:
    """Nothing without rows. Columns whose heads begin with a "#" are of numbers."""
    def cell(tag: str, name: str, value: str | Bar) -> str:
        if isinstance(value, str):
            return f"<{tag}{' class=n' if name[:1] == '#' else ''}>{value}</{tag}>"
        parts = (f"<i style='width:{100 * share:.1f}%;background:{color}'></i>" for share, color in value)
        return f"<td class=bar>{''.join(parts)}</td>"

    body = "".join(f"<tr>{''.join(map(partial(cell, 'td'), head, row))}</tr>" for row in rows)
    top = "".join(cell("th", name, name.lstrip("#")) for name in head)
    table = f"<h2>{title}</h2><div><table><tr>{top}</tr>{body}</table></div><p class=soft>{caption}</p>"
    return table if rows else ""


def _stages(f: Facts) -> str:
    """The stages of a sample in the order in which they begin."""
    other = max(0.0, f.mean - sum(stage.seconds for stage in f.stages))
    stages = sorted(f.stages, key=lambda stage: stage.order)
    rest = StageTimes("other", "", seconds=other, cpu=other * f.cpu_share, calls=1)
    rows: list[list[str | Bar]] = []
    at = 0.0
    for s in [*stages, rest] if f.costs else ():
        parts = (at, "#0000"), (min(s.cpu, s.seconds), BLUE), (max(0.0, s.seconds - s.cpu), ORANGE)
        within = ", ".join(name for name in s.inside if name) or "the sample"
        rows.append([
            text(s.label), text(s.kind), f"{f.share(s):.1%}", format_seconds(s.seconds), f"{s.calls:.3g}", text(within),
            [(seconds / f.mean, color) for seconds, color in parts],
        ])  # fmt: skip
        at += s.seconds
    return _table(
        "Where a sample's time goes", ["stage", "kind", "#share", "#time", "#calls", "called in", ""], rows,
        f"The time of a sample in one process, {format_seconds(f.mean)}, by stages in the order in which they begin. "
        'Blue: it computes. Orange: it waits. "other" is the time between and around these stages.',
    )  # fmt: skip


def _histogram(f: Facts) -> str:
    if len(f.costs) < 8:
        return ""
    low, bins = math.log(max(min(f.costs), 1e-7)), 12
    width = max((math.log(max(f.costs) * 1.001) - low) / bins, 1e-9)
    counts = Counter(min(bins - 1, int((math.log(max(cost, 1e-7)) - low) / width)) for cost in f.costs)
    most = math.log1p(max(counts.values()))
    count, share, times = slow_share(f.costs)
    return _table(
        "What samples cost", ["#from", "#samples", ""],
        [[format_seconds(math.exp(low + n * width)), str(counts[n]), [(math.log1p(counts[n]) / most, BLUE)]]
         for n in range(bins)],
        f"{len(f.costs)} samples: median {format_seconds(statistics.median(f.costs))}, p99 "
        f"{format_seconds(quantile(f.costs, 0.99))}, slowest {times:.1f} times the median. {count:.1%} take "
        f"{SLOW_TIMES:.0f} times the median or more, which is {share:.0%} of all time. Costs and bars are logarithmic.",
    )  # fmt: skip


def _rates(f: Facts) -> str:
    """Samples a second by loader and number of workers, with what the step asks for."""
    rates = {key: rate for key, rate in sorted(f.rates.items()) if key[0] != "hand-over"}
    top, asked = max(rates.values(), default=1.0), f.watched.asked
    rows: list[list[str | Bar]] = [
        [kind, str(workers), format_rate(rate), [(rate / top, GREEN if kind == "minato" else ORANGE)]]
        for (kind, workers), rate in rates.items()
    ]
    if asked and rows:
        rows.append(["the step asks for", "", format_rate(asked), [(min(1.0, asked / top), RED)]])
    if math.isfinite(f.hands_over) and rows:
        rows.append(["samples that cost nothing", str(f.workers), format_rate(f.hands_over), ""])
    caption = "Samples a second, without a step."
    return _table("Loaders", ["loader", "#workers", "#samples/s", ""], rows, caption)


def _storage(f: Facts) -> str:
    storage = f.storage
    rows = [
        [str(one.in_flight), format_rate(one.files_per_s), f"{format_bytes(one.bytes_per_s)}/s"]
        for one in storage.rates
    ]
    state = (
        "Pages were dropped before, so the reads came from the disk."
        if storage.cold else "The files were in memory: these are not the disk's numbers."
    )  # fmt: skip
    return _table(
        "Storage alone", ["#reads in flight", "#files/s", "#speed"], rows,
        f"{storage.files} files that samples opened, {format_bytes(storage.bytes)}, median "
        f"{format_bytes(storage.median)}. {state}",
    )  # fmt: skip


def _codecs(f: Facts) -> str:
    """What each codec would do, here and on other storages."""
    rows = codec_rows(f)
    if not rows:
        return ""
    told, count = f.codecs, f.loader.get("samples")
    best = {(storage, codec) for storage, codec, _rate in winners(f)}

    def on(row: CodecRow, name: str, speed: float) -> str:
        rate = storage_rate(f, row, speed)
        shown = "-" if rate is None else format_rate(rate)
        return f"<b>{shown}</b>" if (name, row.name) in best else shown

    small = f" All but the first row are shrunk to a shorter side of {told.size} pixels, which is all " \
        "that samples use." if told.size else ""
    return _table(
        "Codecs", ["codec", "#an image", "#times smaller", "#decode", "#loss", "#epoch here"],
        [[text(row.name), format_bytes(row.bytes), f"{rows[0].bytes / row.bytes:.2f}", format_seconds(row.decode),
          "no loss" if row.psnr is None else f"{row.psnr:.1f} dB, worst {row.worst:.1f}",
          format_seconds(count / row.rate) if count and row.rate else "-"] for row in rows],
        f"{told.images} images that samples read, encoded anew; decoding is CPU time of one core. An "
        f"epoch here: loading alone, on this storage.{small}",
    ) + _table(
        "Codecs on other storages", ["codec", *(f"#{name}" for name, _ in STORAGES)],
        [[text(row.name), *(on(row, name, speed) for name, speed in STORAGES)] for row in rows],
        "Samples a second, were there nothing but the CPU time of samples, on these cores, "
        "and such a storage, from which each file is read once. Bold is the fastest of those "
        "that lose as little as JPEG 85.",
    )  # fmt: skip


def _orders(f: Facts) -> str:
    """Moves of transforms: what they save, and what becomes of the data."""
    rows = [
        [f"{text(describe_move(m))}<br><code>{text(', '.join(m.names))}</code>",
         format_seconds(m.before) if m.before else "-", format_seconds(m.after) if m.after else "-",
         text(describe_data(m) if m.alike else m.error or "other shapes")]
        for m in f.orders.moves
    ]  # fmt: skip
    return _table("Orders of transforms", ["move", "#a sample now", "#then", "data"], rows)


def _machine(f: Facts) -> str:
    machine = f.report.machine
    rows = [["cores", f"{machine.cores} of {machine.usable} usable"],
            ["processor", text(machine.model or "not known")],
            ["CPUs of the first core", text(machine.siblings or "not known")],
            ["memory available", format_bytes(machine.memory_available)],
            ["stopped by a CPU quota meanwhile", format_seconds(machine.throttled) if machine.throttled else "no"],
            ["program", f"<code>{text(shlex.join(machine.command))}</code>"],
            ["command that measured all numbers", f"<code>{text(shlex.join(machine.argv))}</code>"],
            ["minato", text(f.report.version)]]  # fmt: skip
    return _table("The machine", ["", ""], rows)
