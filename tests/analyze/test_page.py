"""The page and the comparison of two reports."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from minato.analyze import measure, report
from minato.analyze.advice import candidates, enter_check, limit
from minato.analyze.facts import Facts
from minato.analyze.records import Reads, Storage, Used
from minato.analyze.report import page
from minato.analyze.records import format_place

from .test_limits import facts, stage


def whole(**given: Any) -> Any:
    """A report as a run writes it."""
    cache = {"whole": True, "bytes": 1000.0, "share": 1.0, "calls": 0, "after": ""}
    stages = [stage("transform 1 (<Blur> & \"more\")", 0.008, kind="transform"), stage("load()", 0.002, 0.0)]
    found = facts(
        stages=stages, work={"cache": cache, "gil": "mixed"}, schema=report.SCHEMA, version="1", place=["a <b>.py", 3],
        storage=Storage(9, 900, 100, True, [Reads(4, 9.0, 1e6, 9)]), **given,
    )  # fmt: skip
    found.machine = measure.machine_facts(None)
    found.machine.command = ["python", "a <b>.py"]
    found.limit = limit(Facts(found))
    found.helps, found.useless = candidates(Facts(found))
    found.notes = report.list_notes(Facts(found))
    return found


class Tags(HTMLParser):
    """Whether tags are closed in order, and what a page would load."""

    VOID = {"meta", "!doctype", "br"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, given: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.links += [value or "" for name, value in given if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in self.VOID or self.open.pop() == tag


def test_a_page_is_whole_and_by_itself() -> None:
    text = page(whole())
    tags = Tags()
    tags.feed(text)
    assert tags.open == [] and tags.links == [] and "script" not in tags.seen
    assert text.count("<table") == 5 and "color-scheme: light dark" in text and "@media print" in text
    assert "<Blur>" not in text and "&lt;Blur&gt; &amp;" in text and "a &lt;b&gt;.py:3" in text


def test_bars_of_a_sample_are_in_the_order_of_time() -> None:
    found = whole()
    for stage_, order in zip(found.work.stages, (1, 0)):
        stage_.order = order
    table = page(found).partition("s time goes</h2>")[2].partition("</table>")[0]
    rows = [re.findall("<td[^>]*>(.*?)</td>", row) for row in table.split("</tr>")[1:-1]]
    assert [row[0] for row in rows] == ["load()", "transform 1 (&lt;Blur&gt; &amp; &quot;more&quot;)", "other"]
    widths = [[float(width) for width in re.findall(r"width:([\d.]+)%", row[-1])] for row in rows]
    assert widths == [[0, 0, 20], [20, 80, 0], [100, 0, 0]]  # what is before, computing, waiting


def test_advice_without_a_conclusion_is_not_settled() -> None:
    found = whole(rates={("torch", 1): 100.0, ("torch", 2): 200.0, ("minato", 2): 300.0})
    enter_check(found.helps[0], 80.0, [(50.0, 150.0)])
    found.helps[0].samples = 10
    settled = page(found), report.answer(found)
    assert not any("not settled: there is no conclusion" in told for told in settled)
    for rate in found.rates:
        rate.usage = Used(others=0.9)
    found = measure.finish_report(found, None, anyway=False)
    for told in (page(found), report.answer(found)):
        assert told.count("not settled: there is no conclusion") >= len(found.helps) > 0
        assert "What would help, predicted and checked, not settled" in told


def test_page_without_measurements_says_not_known() -> None:
    found = whole(costs=[], rates={})
    found.work = found.storage = found.watched.asked = found.watched.wait = None
    found.limit = limit(Facts(found))
    assert "not known" in page(found)


def test_two_reports_are_compared(tmp_path: Path) -> None:
    one, two = whole(), whole(watched={"delivered": 400.0, "asked": 400.0, "wait": 0.0})
    two.schema = "1.7"
    for name, found in (("one", one), ("two", two)):
        (tmp_path / f"{name}.json").write_text(json.dumps(asdict(found)))
    text = report.compare(str(tmp_path / "one.json"), str(tmp_path / "two.json"))
    assert text.splitlines()[1].startswith("after:  Limit: the step.")
    [row] = [line for line in text.splitlines() if "delivered" in line]
    assert row.split() == ["delivered", "200", "->", "400", "samples/s", "2.00", "times"]
    two.schema = "2.0"
    (tmp_path / "two.json").write_text(json.dumps(asdict(two)))
    with pytest.raises(ValueError, match=r"schema 2\.0, this one reads"):
        report.compare(str(tmp_path / "one.json"), str(tmp_path / "two.json"))


def test_moved_and_removed_transforms_are_compared(tmp_path: Path) -> None:
    one, two = whole(), whole()
    kind = {"kind": "transform"}
    one.work.stages = [stage("transform 1 (Blur)", 0.006, **kind), stage("transform 2 (Crop)", 0.002, **kind)]
    two.work.stages = [stage("transform 3 (Blur)", 0.003, **kind), stage("transform 1 (Pad)", 0.004, **kind)]
    for name, found in (("one", one), ("two", two)):
        (tmp_path / f"{name}.json").write_text(json.dumps(asdict(found)))
    text = report.compare(str(tmp_path / "one.json"), str(tmp_path / "two.json"))
    rows = {line.partition(")")[0].strip(): line.split() for line in text.splitlines() if "transform" in line}
    assert rows["transform (Blur"][-6:] == ["6", "->", "3", "ms", "0.50", "times"]
    assert rows["transform (Crop"][-1] == "gone" and rows["transform (Pad"][-1] == "new"


def test_places_below_the_folder_are_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert format_place([str(tmp_path / "src" / "train.py"), 7]) == "src/train.py:7"
    assert format_place(["/elsewhere/train.py", 7]) == "/elsewhere/train.py:7"
    assert format_place(None) == "an unknown place"
