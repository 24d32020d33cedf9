"""The answer for the terminal, ``report.json``, and the comparison of two of these."""

from __future__ import annotations

import json
import os
import re
import statistics

from .changes import describe_move
from .codecs import codec_rows, winners
from .facts import OTHERS, Facts, fit_scaling, slow_share
from .limits import files_went
from .records import Change, CodecRow, Report, Told, Watched, parse
from .text import format_bytes, format_count, format_place, format_rate, format_seconds

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
LINES, COLUMNS = 25, 110
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
    f = Facts(report)
    lines = [report.limit.line, *_list_facts(f)]
    doubt = ", not settled" if report.limit.seen else ""
    first = [c for c in report.helps if c.checked is not None]
    second = [c for c in report.helps if c.checked is None]
    if first:
        lines.append(f"What would help, predicted and checked{doubt}:")
        lines += _list_changes(report, first[:3] + _worth_a_line(report, first[3:]))
    if second:
        lines.append(f"What might help, not checked{doubt}:")
        lines += _list_changes(report, second[:2] + _worth_a_line(report, second[2:]))
    if report.useless:
        lines.append(f"What would not help{doubt}:")
        lines += [f"  {text}" for text in report.useless[:4]]
    notes = [f"note: {text}" for text in report.notes]
    end = [where] if where else []
    room = LINES - len(lines) - len(end)
    left = notes[max(0, room):]
    if left and where:
        end = [f"{where} ({format_count(len(left), 'more note')} there)"]
    lines += notes[: max(0, room)] + end
    return "\n".join(line if len(line) < 4 * COLUMNS else line[: 4 * COLUMNS] for line in lines)


def _outside_loader(changes: list[Change]) -> list[Change]:
    """The best of the changes that are made outside of the loader, if any."""
    return [change for change in changes if change.paste.startswith(ELSEWHERE)][:1]


#: kinds of limits -> what the change that removes it begins with
REMEDIES = {"workers": "num_workers=", "stragglers": "minato.DataLoader", "start": "persistent_workers",
            "hand-over": "num_workers=0", "sampler": "indices drawn"}  # fmt: skip


def _worth_a_line(report: Report, changes: list[Change]) -> list[Change]:
    """Of the changes that gain less than those that are listed: the one that removes the limit, and the
    best one outside of the loader."""
    remedy = REMEDIES.get(report.limit.kind)
    found = [change for change in changes if remedy and change.what.startswith(remedy)][:1]
    return found + [change for change in _outside_loader(changes) if change not in found]


def _list_facts(f: Facts) -> list[str]:
    w, loader = f.watched, f.loader
    lines = []
    if w.asked is not None:
        lines.append(
            f"  the step asks for {format_rate(w.asked)} samples/s ({w.by}: {format_seconds(w.step)} "
            f"for a batch of {w.batch}) and gets {_format_delivered(w)}: {_format_wait(w)}"
        )
    lines += _name_base(f)
    lines.append(
        f"  {kind_of_loader(f.report)}: {loader['class']} at {format_place(f.report.place)}, num_workers={loader['num_workers']}, "
        f"batch_size={loader['batch_size']}, {loader.get('samples', 'an unknown number of')} samples"
    )
    if f.costs:
        stages = [(s.label, f.share(s)) for s in f.stages if f.share(s) >= LEAST_SHARE][:5]
        parts = ", ".join(f"{label} {share:.0%}" for label, share in stages)
        count, share, _times = slow_share(f.costs)
        uneven = f"; {count:.1%} of them are slow, and take {share:.0%} of the time" if count else ""
        lines.append(
            f"  a sample takes {format_seconds(f.mean)} (median {format_seconds(statistics.median(f.costs))}, p99 "
            f"{format_seconds(quantile(f.costs, 0.99))}, computing for {f.cpu_share:.0%} of it{uneven}): "
            f"{parts + ', ' if parts else ''}other {f.other():.0%}"
        )
    told = f.report.sampler
    if told and f.sampler * w.delivered > ENDS:
        lines.append(
            f"  the sampler {told.name} at {format_place(told.place)} takes {format_seconds(f.sampler)} for each "
            f"sample in the program's own process, {f.sampler * w.delivered:.0%} of the program's time"
        )
    if f.rates:
        by: dict[str, list[str]] = {}
        for (kind, workers), rate in sorted(f.rates.items()):
            by.setdefault(kind, []).append(f"{format_rate(rate)} ({workers})")
        free = by.pop("hand-over", None)
        alone = [f"{kind} {', '.join(each)}" for kind, each in sorted(by.items())]
        alone += [f"samples that cost nothing {free[0]}"] if free else []
        lines.append(f"  loaders alone, in samples/s (number of workers): {'; '.join(alone)}")
    return lines + _list_codecs(f)


def explain_doubt(report: Report, change: Change) -> str:
    """Why a change's numbers are not settled; nothing where they are, or where nothing was checked."""
    if report.limit.seen:
        return ", not settled: there is no conclusion"
    if change.settled is not False:
        return ""
    return f", not settled: the check is over {change.bound:.0%} away from the prediction"


def _format_wait(w: Watched) -> str:
    """What the program does in the time between the rate that it asks for and the one that it gets."""
    waits = f"the program waits for data {w.wait:.0%} of its time"
    if (queued := w.queued) <= ENDS:
        return waits
    return (
        f"inside its loader the program had no core for {queued:.0%} of its time, because other programs used the "
        f"cores; of the rest {waits.removesuffix('its time')}it"
    )


def _format_delivered(w: Watched) -> str:
    """The rate, with its range where that is wide."""
    told = format_rate(w.delivered)
    low, high = w.range or (1.0, 1.0)
    if high <= UNCERTAIN * low:
        return told
    return f"{told} (uncertain, by {w.steps} steps: {format_rate(low)} to {format_rate(high)})"


def _name_base(f: Facts) -> list[str]:
    """What factors are relative to, and whether the study's program is as fast as the watched one."""
    base, delivered = f.report.relative_to, f.watched.delivered
    if not base or not f.report.helps:
        return []
    differs = (
        f" (the program itself got {format_rate(delivered)})"
        if delivered and not 0.8 < base / delivered < 1.25 else ""
    )  # fmt: skip
    share = f.report.share
    loop = "" if share is None else (
        f"; they are of the loop over this {kind_of_loader(f.report)}, which took {share:.0%} of the program's time"
    )  # fmt: skip
    return [
        f'  "times" below compare with {format_rate(base)} samples/s, which the study measured for the '
        f"program's own loader and step{differs}{loop}"
    ]


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
    lines = [f"  codecs, {told.images} images{small}: {'; '.join(parts)}"]
    fastest = ", ".join(f"{name}: {codec} {format_rate(rate)}/s" for name, codec, rate in winners(f))
    return lines + ([f"  fastest of those that lose as little as jpeg 85: {fastest}"] if fastest else [])


def _list_changes(report: Report, changes: list[Change]) -> list[str]:
    lines = []
    for number, change in enumerate(changes, 1):
        rate = ""
        if change.predicted is not None:
            rate = f": predicted {format_rate(change.predicted)} samples/s ({format_gain(report, change.gain or 0.0)})"
        if change.checked is not None:
            rate += f", checked {format_rate(change.checked)} ({format_gain(report, change.checked_gain)})"
            rate += f" on {change.samples} samples"
        note = f"; {change.note}" if change.note else ""
        rate += explain_doubt(report, change)
        lines.append(
            f"  {number}. {change.what}{rate}; {change.effort}; data {change.data}{note}"
        )
        if change.paste:
            place = change.place or report.place
            elsewhere = report.loader.get("maker") == "transformers" and not change.place
            elsewhere = elsewhere or _outside_loader([change])
            at = f"{format_place(place)}  " if place and not elsewhere else ""
            lines.append(f"     {at}{change.paste}")
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
    if f.own_rate() and fit_scaling(f.scaling(f.own)) is None:
        notes.append("another number of workers was not predicted, because only one number was measured")
    if f.codecs.images and not codec_rows(f):
        notes.append(f"other codecs were not compared: only {f.codecs.images} images were encoded in time")
    if work.merged:
        notes.append("measuring inside samples slowed them by over 10 %, so some stages are shown as one")
    rate, lost = f.own_rate(), f.end_seconds(f.own, f.workers)
    if rate and (share := lost * f.program_rate(rate, f.workers)) > ENDS:
        notes.append(
            f"the end of each epoch costs {format_seconds(lost * f.epoch() * f.batch())}, {share:.0%} of the "
            'time; the rates of loaders alone leave that out'
        )
    if f.others() > OTHERS:
        notes.append(f"other programs used {f.others():.0%} of the cores while this was measured")
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
        row(f"{name}, {format_count(workers, 'worker')}", f.rates[kind, workers], g.rates[kind, workers], "samples/s")
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
