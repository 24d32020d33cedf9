"""``loader.report()``: what a loader has done, on one page for people.

Everything on it comes from ``stats()``; the page adds nothing that a program could not read there.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from ..text import seconds, sized
from ..typing import Cause, Stats
from .verdict import APART

#: columns of the page, and of the bars on it
WIDTH, BAR = 79, 24
#: causes that are listed; all others together cost little
MOST = 4


class Row(NamedTuple):
    """Where some of the time went."""

    name: str
    seconds: float
    share: float


class Report(str):
    """The page as text, which a prompt and ``print`` show. A notebook shows it as tables."""

    html: str

    def __new__(cls, title: str, stats: Stats) -> Report:
        self = super().__new__(cls, page(title, stats))
        self.html = table(title, stats)
        return self

    def __repr__(self) -> str:
        return str.__str__(self)

    def _repr_html_(self) -> str:
        return self.html


def where(stats: Stats) -> list[Row]:
    """The rows of the page: the trainer's own work, and its waits by cause."""
    wait = stats["wait"]
    if wait is None:
        return []
    elapsed = wait["total"] + wait["between"]
    if elapsed <= 0:
        return []
    parts = [("the program's own work", wait["between"])]
    named = [c for c in stats["causes"] if c["name"] != APART][:MOST]
    parts += [(f"wait: {c['name']}", c["seconds"]) for c in named]
    left = wait["total"] - sum(c["seconds"] for c in named)
    if left > 0.005 * elapsed or not named:
        parts.append(("other waits" if named else "waits", max(0.0, left)))
    return [Row(name, spent, spent / elapsed) for name, spent in parts]


def facts(stats: Stats) -> Iterator[tuple[str, str]]:
    """(name, text) of every fact that is known."""
    ready = [w for w in stats["workers"] if w["state"] == "ready"]
    wait, cost = stats["wait"], stats["cost"]
    elapsed = wait["total"] + wait["between"] if wait else 0.0
    if ready and elapsed > 0:
        whole = len(ready) * elapsed
        busy, cpu = sum(w["busy"] for w in ready), sum(w["cpu"] for w in ready)
        yield "workers", (
            f"{len(ready)} ({stats['worker_type']}), {min(1.0, busy / whole):.0%} busy, "
            f"{min(1.0, cpu / whole):.0%} on a core"
        )
    if cost["samples"]:
        text = f"{seconds(cost['p50'])} each (median), {seconds(cost['p99'])} (99th percentile)"
        if stats["slow"]:
            index, longest = stats["slow"][0]
            text += f"; slowest: {index} ({seconds(longest)})"
        yield "samples", text
    if (memory := stats["memory"]) is not None:
        yield "memory", f"{sized(memory['used'])} of {sized(memory['limit'])}"
    device = stats["device"]
    if device is not None and device["batches"]:
        yield "device", (
            f"{device['device']}, {sized(device['bytes'])} copied, "
            f"{seconds(device['stalled'])} waited there"
        )
    cache = stats["cache"]
    if cache is not None and cache["hits"] + cache["misses"]:
        share = cache["hits"] / (cache["hits"] + cache["misses"])
        yield "cache", (
            f"{share:.0%} found, {sized(cache['used'])} of {sized(cache['bytes'])}; found values "
            f"would have taken {seconds(cache['saved'])} to make"
        )
    counts = {
        "workers died": stats["deaths"], "samples skipped": stats["failed"]["left_out"],
        "samples replaced": stats["failed"]["replaced"], "batches raised": stats["errors"],
    }  # fmt: skip
    if any(counts.values()):
        yield "trouble", ", ".join(f"{what}: {count}" for what, count in counts.items() if count)


def _head(stats: Stats) -> str:
    ready = stats["displacement"] is not None
    what = f"epoch {stats['epoch']}, {stats['delivered']} {'samples' if ready else 'batches'} delivered"
    return what + (", ready mode" if ready else "")


def _others(stats: Stats) -> list[Cause]:
    """Causes whose advice the verdict does not give already."""
    helps = [c for c in stats["causes"][:MOST] if c["advice"] and c["advice"] not in stats["verdict"]]
    return helps[:2]


def page(title: str, stats: Stats) -> str:
    """The report as text, without a line break at its end."""
    lines = [*textwrap.wrap(title, WIDTH), _head(stats), ""]
    lines += textwrap.wrap(stats["verdict"], WIDTH)
    rows = where(stats)
    if rows:
        lines += ["", "where the time went"]
        wide = max(len(row.name) for row in rows)
        for row in rows:
            bar = "#" * round(row.share * BAR)
            line = f"  {row.name:{wide}}  {row.seconds:8.2f} s  {row.share:4.0%}  {bar}"
            lines.append(line.rstrip())
    helps = _others(stats)
    if helps:
        lines += ["", "what else would help"]
        for cause in helps:
            text = f"{cause['name']}: {cause['advice']}"
            lines += textwrap.wrap(text, WIDTH, initial_indent="  - ", subsequent_indent="    ")
    known = [*facts(stats)]
    lines += [""] if known else []
    for name, text in known:
        lines += textwrap.wrap(text, WIDTH, initial_indent=f"{name:9}", subsequent_indent=" " * 9)
    return "\n".join(lines)


def table(title: str, stats: Stats) -> str:
    """The report as HTML, for notebooks. Colours are the notebook's own."""
    say = html.escape
    rows = "".join(
        f"<tr><td style='text-align:left'>{say(row.name)}</td><td>{say(seconds(row.seconds))}</td>"
        f"<td>{row.share:.0%}</td><td style='text-align:left'>"
        f"<div style='height:0.8em;width:{max(1, round(160 * row.share))}px;background:currentColor;"
        "opacity:0.45'></div></td></tr>"
        for row in where(stats)
    )
    helps = "".join(
        f"<li>{say(cause['name'])}: {say(cause['advice'])}</li>" for cause in _others(stats)
    )
    known = "".join(
        f"<tr><td style='text-align:left'>{say(name)}</td>"
        f"<td style='text-align:left'>{say(text)}</td></tr>"
        for name, text in facts(stats)
    )
    return (
        f"<div><strong>{say(title)}</strong><br>{say(_head(stats))}<p>{say(stats['verdict'])}</p>"
        + (f"<table>{rows}</table>" if rows else "")
        + (f"<p>What else would help:</p><ul>{helps}</ul>" if helps else "")
        + (f"<table>{known}</table>" if known else "")
        + "</div>"
    )
