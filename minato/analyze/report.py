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
from typing import Any

from ..text import counted, format_bytes, format_rate, format_seconds
from .advice import describe_data, describe_move, files_went
from .codecs import STORAGES, codec_rows, storage_rate, winners
from .facts import OTHERS, Facts, fit_scaling, slow_share
from .records import Change, CodecRow, Report, Told, format_place, parse

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
LINES, COLUMNS, SHOWN = 25, 110, 4
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
    return "\n".join(line[: 4 * COLUMNS] for line in lines + notes[:room] + end)


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
        waits = f"the program waits for data {w.wait:.0%} of its time"
        if w.queued > ENDS:
            waits = (
                f"inside its loader the program had no core for {w.queued:.0%} of its time, because other programs "
                f"used the cores; of the rest {waits.removesuffix('its time')}it"
            )
        lines.append(
            f"the step asks for {format_rate(w.asked)} samples/s ({w.by}: {format_seconds(w.step)} "
            f"for a batch of {w.batch}) and gets {gets}: {waits}"
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
        lines.append(
            f"the sampler {told.name} at {format_place(told.place)} takes {format_seconds(f.sampler)} for each "
            f"sample in the program's own process, {f.sampler * w.delivered:.0%} of the program's time"
        )
    if f.rates:
        by: dict[str, list[str]] = {}
        for (kind, workers), rate in sorted(f.rates.items()):
            by.setdefault(kind, []).append(f"{format_rate(rate)} ({workers})")
        free = by.pop("hand-over", None)
        alone = [f"{kind} {', '.join(each)}" for kind, each in sorted(by.items())]
        alone += [f"samples that cost nothing {free[0]}"] if free else []
        lines.append(f"loaders alone, in samples/s (number of workers): {'; '.join(alone)}")
    return lines + _list_codecs(f)


def kind_of_loader(told: Told | Report) -> str:
    return "validation loader" if told.validates else "loader"


def format_gain(report: Report, gain: float) -> str:
    """How many times as fast a change makes the loop over the loader, and the program if that has others."""
    share = report.share
    whole = "" if share is None else f", the program {1 / (1 - share + share / gain):.2f}"
    return f"{gain:.2f} times{whole}"


def format_loss(row: CodecRow) -> str:
    """What an image loses, in decibels: mean and worst."""
    return "no loss" if row.psnr is None else f"{row.psnr:.1f} dB, worst {row.worst:.1f}"


def _list_codecs(f: Facts) -> list[str]:
    rows = codec_rows(f)
    if not rows:
        return []
    told = f.codecs
    small = f", shorter side {told.size}" if told.size else ""
    parts = [f"as they are {format_bytes(rows[0].bytes)} {format_seconds(rows[0].decode)}"]
    parts += [
        f"{r.name} {format_bytes(r.bytes)} {format_seconds(r.decode)} ({format_loss(r)})"
        for r in rows[1:]
    ]
    lines = [f"codecs, {told.images} images{small}: {'; '.join(parts)}"]
    fastest = ", ".join(f"{name}: {codec} {format_rate(rate)}/s" for name, codec, rate in winners(f))
    return lines + ([f"fastest of those that lose as little as jpeg 85: {fastest}"] if fastest else [])


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
            elsewhere = report.loader.get("maker") == "transformers" and not change.place
            elsewhere = elsewhere or change.paste.startswith(ELSEWHERE)
            at = f"{format_place(place)}  " if place and not elsewhere else ""
            lines.append(f"   {at}{change.paste}")
    return lines


def list_notes(f: Facts) -> list[str]:
    """What a reader must know to believe the numbers."""
    notes = []
    w, work, storage, codecs = f.watched, f.work, f.storage, f.codecs
    if w.asked is not None and w.steps < 20:
        notes.append(f"only {w.steps} steps were seen, so the program's own rates are uncertain")
    if work.failures:
        all_ = "" if work.costs else ", and none could be made"
        notes.append(f"{work.failures} sample(s) failed{all_}; {work.failed[0]}")
        if f.costs and files_went(f):
            notes.append("the files may have gone when the program ended: --pause studies it before that")
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
        what = "" if codec_rows(f) else " and were not compared"
        notes.append(f"codecs: only {codecs.images} images were encoded in time{what}; a longer --budget tells more")
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
        if not orders.chains and not orders.failed:
            notes.append("orders: the dataset has no chain of two transforms or more (a list `transforms`)")
        elif not orders.moves:
            notes.append("orders: no transform makes its data smaller late, or larger early")
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


# ---- index.html: a page by itself, of HTML, CSS and SVG alone -------------------------------

#: width of the pictures in their own units, which are a phone's pixels; a wide page scales them
WIDTH = 335

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c2330; --soft: #5b6575; --line: #d8dde5;
  --card: #f6f7f9; --one: #2f6fde; --two: #d9822b; --three: #2a9d78; --bad: #c0392b; }
@media (prefers-color-scheme: dark) { :root { --back: #14181f; --text: #e6e9ef; --soft: #98a2b3;
  --line: #323a47; --card: #1c222c; --one: #6ea2ff; --two: #f0a75c; --three: #57c7a2; --bad: #ff8577; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.25rem; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; line-height: 1.3; margin: .5rem 0 1rem; text-wrap: balance; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p, h1, figcaption, td code { overflow-wrap: anywhere; } td { overflow-wrap: break-word; }
td:first-child { min-width: 9rem; } td:last-child { min-width: 8rem; }
.wide td { min-width: 0; } .wide td:first-child { white-space: nowrap; }
.soft, figcaption { color: var(--soft); font-size: .875rem; }
figure { margin: 0; max-width: 32rem; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--text); font: 9.5px system-ui, sans-serif; } svg .s { fill: var(--soft); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .35rem .6rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } td.n { white-space: nowrap; }
.n + td:not(.n), .n + th:not(.n) { padding-left: .9rem; }
.plain { width: auto; min-width: 50%; }
code, pre { font: .85rem/1.45 ui-monospace, monospace; } code { background: var(--card); padding: .1rem .3rem; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .35rem .75rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 40rem) { svg text { font-size: 12.5px; } .plain { width: 100%; } .cards tr, .cards td { display: block; min-width: 0; } .cards th { display: none; }
  .cards td, .cards .n + td:not(.n) { border: 0; padding: .15rem 0; text-align: left; white-space: normal; }
  .cards tr { border-bottom: 1px solid var(--line); padding: .4rem 0; }
  .cards td + td::before { content: attr(data-name) ": "; color: var(--soft); } }
@media print { body { max-width: none; padding: 0; } h2, tr, figure { break-inside: avoid; break-after: auto; }
  h2, tr:first-child { break-after: avoid; } }
"""


def page(found: Report) -> str:
    """The whole page of a report."""
    f = Facts(found)
    parts = [f"<h1>{text(found.limit.line)}</h1>", *(f"<p>{text(line)}</p>" for line in _list_facts(f))]
    sections = [(title.rstrip(":"), items) for title, items, _shown in _list_sections(found)]
    for title, items in [*sections, ("Notes on these numbers", found.notes)]:
        lines = (f"<p>{text(line)}</p>" if line[0] != " " else f"<pre>{text(line.strip())}</pre>" for line in items)
        parts += [f"<h2>{text(title)}</h2>", *lines] if items else []
    parts += [make(f) for make in (_waterfall, _histogram, _rates, _storage, _codecs, _orders, _stages, _machine)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="generator" content="{text(found.generator)}">'
        f"<title>minato analyze: {text(found.limit.kind)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def text(value: Any) -> str:
    return html.escape(str(value))


def _table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = (), kind: str = "",
    caption: str = "",
) -> str:
    """Nothing without rows. numbers: columns of these. kind: "cards" where each row is a block of lines on a
    phone, "wide" where columns are as narrow as their text, "plain" for a few short columns."""
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag} data-name='{head[n]}'{' class=n' if n in numbers else ''}>{cell}</{tag}>"
            for n, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    top = f"<tr>{cells('th', head)}</tr>" if any(head) else ""
    table = f'<h2>{title}</h2><div class="scroll"><table class="{kind}">{top}{body}</table></div>'
    return table + f"<p class='soft'>{caption}</p>" * bool(caption) if rows else ""


#: a bar: its label and its value in words, and its parts: begin, end, color
Bar = tuple[str, str, list[tuple[float, float, str]]]


def _draw_bars(
    title: str, caption: str, bars: list[Bar], most: float, ticks: dict[float, str], mark: float | None = None
) -> str:
    """Bars one below the other. most: what is at the right end. mark: where a line crosses them."""
    left, right, bottom, shapes = 108, WIDTH - 52, 8 + 26 * len(bars), ""

    def x(value: float) -> float:
        return left + (right - left) * min(1.0, value / most)

    def line(at: float, color: str) -> str:
        return f"<line x1='{at:.1f}' y1='4' x2='{at:.1f}' y2='{bottom}' stroke='var(--{color})'/>"

    def label(at: float, y: int, words: str, anchor: str, kind: str = " class='s'") -> str:
        return f"<text{kind} x='{at:.1f}' y='{y}' text-anchor='{anchor}'>{text(words)}</text>"

    for value, words in ticks.items():
        shapes += line(x(value), "line") + label(x(value), bottom + 14, words, "middle")
    for row, (name, words, parts) in enumerate(bars):
        y, short = 8 + 26 * row, re.sub(r"^transform (\d+) \((.*)\)$", r"\1 \2", name)
        shapes += label(left - 6, y + 13, short if len(short) <= 16 else f"{short[:14]}…", "end", "")
        for begin, end, color in parts:
            width = x(end) - x(begin)
            shapes += f"<rect x='{x(begin):.1f}' y='{y}' width='{width:.1f}' height='18' fill='var(--{color})' rx='2'/>"
        shapes += label(min(x(parts[0][1]), right) + 4, y + 13, words, "start")
    shapes += line(x(mark), "bad") if mark is not None else ""
    return (
        f"<h2>{text(title)}</h2><figure><svg viewBox='0 0 {WIDTH} {bottom + 20}' role='img' "
        f"aria-label='{text(title)}'>{shapes}</svg><figcaption>{text(caption)}</figcaption></figure>"
    )


def _waterfall(f: Facts) -> str:
    """The stages of a sample in the order in which they begin."""
    if not f.costs:
        return ""
    shown = sorted([s for s in f.stages if f.share(s) > 0.005][:12], key=lambda s: s.order)
    stages = [(s.label, s.seconds, s.cpu) for s in shown]
    other = max(0.0, f.mean - sum(wall for _, wall, _ in stages))
    at, bars = 0.0, list[Bar]()
    for label, wall, cpu in [*stages, ("other", other, other * f.cpu_share)]:
        bars.append((label, format_seconds(wall), [(at, at + wall, "two"), (at, at + min(cpu, wall), "one")]))
        at += wall
    caption = (
        f"The time of a sample in one process, {format_seconds(f.mean)}, by stages in the order in which they begin. "
        "Blue: it computes. Orange: it waits. \"other\" is the time between and around these stages."
    )
    ticks = {share * f.mean: format_seconds(share * f.mean) for share in (0.0, 0.5, 1.0)}
    return _draw_bars("Where a sample's time goes", caption, bars, f.mean, ticks)


def _histogram(f: Facts) -> str:
    if len(f.costs) < 8:
        return ""
    low, bins = math.log(max(min(f.costs), 1e-7)), 12
    width = max((math.log(max(f.costs) * 1.001) - low) / bins, 1e-9)
    counts = Counter(min(bins - 1, int((math.log(max(cost, 1e-7)) - low) / width)) for cost in f.costs)
    bars: list[Bar] = [
        (format_seconds(math.exp(low + n * width)), str(counts[n]), [(0.0, math.log1p(counts[n]), "one")])
        for n in range(bins)
    ]
    count, share, times = slow_share(f.costs)
    slow = (
        f"{count:.1%} take four times the median or more, which is {share:.0%} of all time"
        if count else "None takes four times the median"
    )
    caption = (
        f"{len(f.costs)} samples: median {format_seconds(statistics.median(f.costs))}, p99 "
        f"{format_seconds(quantile(f.costs, 0.99))}, slowest {times:.1f} times the median. {slow}. "
        "The time from which a bar counts, and the number of its samples, are logarithmic."
    )
    most = max(counts.values())
    ticks = {math.log1p(held): f"{held} samples" if held > 1 else str(held) for held in sorted({0, 1, most})}
    return _draw_bars("What samples cost", caption, bars, math.log1p(most), ticks)


def _rates(f: Facts) -> str:
    """Samples a second by loader and number of workers, with what the step asks for."""
    rates = {key: rate for key, rate in sorted(f.rates.items()) if key[0] != "hand-over"}
    if not rates:
        return ""
    top, asked = max(rates.values()), f.watched.asked
    bars: list[Bar] = [
        (f"{kind} ({n})", format_rate(rate), [(0.0, rate, "three" if kind == "minato" else "two")])
        for (kind, n), rate in rates.items()
    ]
    step = f" Red: the step asks for {format_rate(asked)}." if asked and asked <= top else ""
    step = step or (f" The step asks for {format_rate(asked)}, above the picture." if asked else "")
    hands = f" A loader of samples that cost nothing hands over {format_rate(f.hands_over)}." if (
        math.isfinite(f.hands_over)
    ) else ""  # fmt: skip
    caption = f"Samples a second by loader (number of workers), without a step.{step}{hands}"
    ticks = {0.0: "0", top: f"{format_rate(top)}/s"}
    return _draw_bars("Loaders", caption, bars, top, ticks, asked if asked and asked <= top else None)


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
    caption = (
        f"{storage.files} files that samples opened, {format_bytes(storage.bytes)}, median "
        f"{format_bytes(storage.median)}. {state}"
    )
    return _table("Storage alone", ["reads in flight", "files/s", "speed"], rows, (0, 1, 2), "plain", caption)


def _codecs(f: Facts) -> str:
    """What each codec would do, here and on other storages."""
    rows = codec_rows(f)
    if not rows:
        return ""
    told, count = f.codecs, f.loader.get("samples")
    best = {(storage, codec) for storage, codec, _rate in winners(f)}

    def epoch(row: CodecRow) -> str:
        return format_seconds(count / row.rate) if count and row.rate else "-"

    def on(row: CodecRow, name: str, speed: float) -> str:
        rate = storage_rate(f, row, speed)
        if rate is None:
            return "-"
        return f"<b>{format_rate(rate)}</b>" if (name, row.name) in best else format_rate(rate)

    shown = [
        [text(row.name), format_bytes(row.bytes), f"{rows[0].bytes / row.bytes:.2f}",
         format_seconds(row.decode), "-" if row is rows[0] else text(format_loss(row)), epoch(row)]
        for row in rows
    ]  # fmt: skip
    elsewhere = [
        [text(row.name), *(on(row, name, speed) for name, speed in STORAGES)] for row in rows
    ]
    small = f" All but the first row are shrunk to a shorter side of {told.size} pixels, which is all " \
        "that samples use." if told.size else ""
    return _table(
        "Codecs", ["codec", "an image", "times smaller", "decode", "loss", "epoch here"], shown, (1, 2, 3, 4, 5), "cards",
        f"{told.images} images that samples read, encoded anew; decoding is CPU time of one core. An "
        f"epoch here: loading alone, on this storage.{small}",
    ) + _table(
        "Codecs on other storages", ["codec", *(name for name, _ in STORAGES)], elsewhere, (1, 2, 3, 4), "wide",
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
    return _table("Orders of transforms", ["move", "a sample now", "then", "data"], rows, (1, 2), "cards")


def _stages(f: Facts) -> str:
    rows = [
        [text(s.label), text(s.kind), f"{f.share(s):.1%}", format_seconds(s.seconds),
         format_seconds(s.cpu), f"{s.calls:.3g}",
         text(", ".join(name for name in s.inside if name) or "the sample")]
        for s in f.stages
    ]  # fmt: skip
    head = ["stage", "kind", "share", "seconds a sample", "of these computing", "calls a sample", "called in"]
    return _table("Stages", head, rows, (2, 3, 4, 5), "cards")


def _machine(f: Facts) -> str:
    machine = f.report.machine
    rows = [["cores", f"{machine.cores} of {machine.usable} usable"],
            ["processor", text(machine.model or "not known")],
            ["CPUs of the first core", text(machine.siblings or "not known")],
            ["memory available", format_bytes(machine.memory_available)]]  # fmt: skip
    if machine.throttled:
        rows.append(["stopped by a CPU quota meanwhile", format_seconds(machine.throttled)])
    for name, line in (("program", machine.command), ("command that measured all numbers", machine.argv)):
        if line:
            rows.append([name, f"<code>{text(shlex.join(line))}</code>"])
    rows.append(["minato", text(f.report.version)])
    return _table("The machine", ["", ""], rows)
