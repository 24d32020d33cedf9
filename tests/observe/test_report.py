"""loader.report(): a page of text, and a table for notebooks."""

from __future__ import annotations

import ast
import html.parser
import gc
import inspect
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import minato
from minato.epoch_progress import title_of
from minato.observe import verdict
from minato.observe import loader_report as report

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Slow(torch.utils.data.Dataset[int]):
    """<b> is what a page must not take for HTML."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01)
        if index == 7:
            raise ValueError("<7.jpg> & others")
        return index


def loaded(workers: int) -> Any:
    loader = minato.DataLoader(Slow(), 4, num_workers=workers, on_error="skip")
    with pytest.warns(UserWarning, match="of this epoch failed"):
        for _ in loader:
            time.sleep(0.001)
    return loader


@pytest.mark.parametrize("workers", [0, 2])
def test_report_shows_verdict_time_and_trouble(workers: int, capsys: Any) -> None:
    loader = loaded(workers)
    gc.collect()  # the iterator has gone
    page = loader.report()
    assert capsys.readouterr().out == "" and repr(page) == str(page)  # a prompt shows the text
    lines = page.splitlines()
    assert lines[0] == f"DataLoader of Slow (40 samples), batch_size=4, num_workers={workers}"
    assert loader.stats()["verdict"] == " ".join(page.split("\n\n")[1].split("\n"))
    assert len(lines) <= 30 and max(map(len, lines)) <= report.WIDTH
    assert "where the time went" in page and "the program's own work" in page
    assert "trouble  samples skipped: 1" in page
    assert ("workers  2 (process)" in page) == (workers > 0)


def test_report_times_add_up_to_the_whole() -> None:
    stats = loaded(2).stats()
    rows = report.where(stats)
    assert abs(sum(row.share for row in rows) - 1) < 0.01
    assert sum(row.seconds for row in rows) <= stats["wait"]["total"] + stats["wait"]["between"] + 1e-6


def test_report_before_any_batch_says_so() -> None:
    assert "Nothing was loaded yet." in minato.DataLoader(Slow(), 4, num_workers=2).report()


class Balanced(html.parser.HTMLParser):
    """Whether each tag is closed, and the text between them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.said: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)


@pytest.mark.parametrize("workers", [0, 2])
def test_notebook_table_is_well_formed(workers: int) -> None:
    loader = loaded(workers)
    parser = Balanced()
    parser.feed(loader._repr_html_())
    text = " ".join(parser.said)
    assert parser.open == [] and "<7.jpg> & others" in text
    assert loader.stats()["verdict"] in text and "the program's own work" in text


def test_largest_report_fits_a_page() -> None:
    """All parts that there are, at once."""
    loader = loaded(2)
    stats = loader.stats()
    advice = "An option that helps, with an explanation that takes more than one line of the page. " * 2
    stats["causes"] = [
        {"name": f"cause {n}", "seconds": 0.01, "why": "", "advice": advice + str(n)} for n in range(9)
    ]
    stats["deaths"] = stats["errors"] = 3
    page = report.page(title_of(loader), stats)
    assert len(page.splitlines()) <= 31
    assert " ".join(page.split()).count(" ".join(advice.split())) == 2  # advice is never cut


# ---- the tables of labels in docs/monitoring.md ------------------------------------------------

PAGE = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"


def explained() -> set[str]:
    """Labels in the first columns of the two tables: of waits, and of everything else."""
    text = PAGE.read_text()
    waits = text.partition("| wait | the verdict says | what to do |\n|---|---|---|\n")[2].partition("\n\n")[0]
    others = text.partition("| label | what it says |")[2].partition("\n\n")[0]
    named = set(re.findall(r"^\| ([^|]+) \|", waits, re.M))
    labels = {name if name == verdict.APART else f"wait: {name}" for name in named}
    return labels | set(re.findall(r"^\| `([^`]+)` \|", others, re.M)) - {"wait: ..."}


def labels(page: str) -> set[str]:
    """The labels of a printed report. Its paragraphs are: title and epoch; the verdict; times; advice;
    facts. Only the verdict is a text without labels."""
    head, _verdict, *rest = page.split("\n\n")
    title, epoch = head.split("\n")
    found = {title.partition(" of ")[0] + " of", *re.sub(r" \d+, \d+ (batches|samples) delivered", "", epoch).split(", ")}
    for line in "\n".join(rest).split("\n"):
        time_of = re.match(r"  (\S.*?) +\d+\.\d\d s ", line)
        advice = re.match(r"  - ([^:]+): ", line)
        fact = re.match(r"(\w+) {2,}\S", line)
        found |= {match[1] for match in (time_of, advice, fact) if match is not None}
        found |= {line} if re.match(r"\w[\w ]+$", line) else set()
    return found


def unexplained(found: set[str]) -> set[str]:
    """Labels that the table lacks. Advice has the label of its wait."""
    return {label for label in found if not {label, f"wait: {label}"} & explained()}


def causes() -> set[str]:
    """Names of all causes that the verdict can name."""
    found: set[str] = {verdict.APART}
    for node in ast.walk(ast.parse(inspect.getsource(verdict))):
        named: Any = None
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Cause":
            named = node.args[0]
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            named = node.value.elts[0] if len(node.value.elts) == 3 else None
        if isinstance(named, ast.Name):
            found |= {vars(verdict).get(named.id)} - {None}
        elif named is not None:
            constants = (one for one in ast.walk(named) if isinstance(one, ast.Constant))
            found |= {one.value for one in constants if one.value != "storage"}
    return found


def everything() -> dict[str, Any]:
    """The statistics of a run in which each part of the page has something to say."""
    stats: dict[str, Any] = dict(loaded(2).stats())
    stats["causes"] = [
        {"name": name, "seconds": 0.01, "why": "", "advice": f"Advice for {name}."} for name in "ab"
    ]
    stats["displacement"] = {"max": 1, "mean": 0.5}
    stats["device"] = {"device": "cuda:0", "batches": 1, "bytes": 1 << 20, "stalled": 1.0}
    stats["cache"] = {"hits": 3, "misses": 1, "used": 1, "bytes": 2, "saved": 1.0}
    stats["deaths"] = stats["errors"] = 1
    return stats


@pytest.mark.parametrize("workers", [0, 2])
def test_every_label_of_a_report_is_explained(workers: int) -> None:
    found = labels(loaded(workers).report())
    assert {"DataLoader of", "epoch", "where the time went", "the program's own work"} <= found
    assert "trouble" in found and ("samples" in found) == (workers > 0)
    assert unexplained(found) == set()


def test_every_part_of_the_page_is_explained() -> None:
    found = labels(report.page("DataLoader of Slow (40 samples)", everything()))
    named = {"a", "b", "wait: a", "wait: b"}
    assert named | {"ready mode", "what else would help", "device", "cache"} <= found
    assert {"other waits", "workers", "memory"} <= found and unexplained(found) == named
    without = everything() | {"causes": []}
    assert "waits" in labels(report.page("DataLoader of Slow", without))


def test_every_cause_is_explained_and_each_label_exists() -> None:
    named = causes()
    assert len(named) > 20 and {"slow storage", "too few workers", "GIL", "filling the cache"} <= named
    waits = {f"wait: {name}" for name in named - {verdict.APART}}
    assert waits <= explained()
    parts = labels(report.page("DataLoader of Slow", everything())) | {"waits", verdict.APART}
    assert explained() <= waits | parts
