"""loader.report(): a page of text, and a table for notebooks."""

from __future__ import annotations

import html.parser
import gc
import time
from typing import Any

import pytest
import torch

import minato
from minato.observe import report
from minato.progress import title_of

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
    with pytest.warns(UserWarning, match="could not be made"):
        for _ in loader:
            time.sleep(0.001)
    return loader


@pytest.mark.parametrize("workers", [0, 2])
def test_report_shows_verdict_time_and_trouble(workers: int, capsys: Any) -> None:
    loader = loaded(workers)
    gc.collect()  # the iterator has gone
    assert loader.report() is None
    page = capsys.readouterr().out
    lines = page.splitlines()
    assert lines[0] == f"DataLoader of Slow (40 samples), batch_size=4, num_workers={workers}"
    assert loader.stats()["verdict"] == " ".join(page.split("\n\n")[1].split("\n"))
    assert len(lines) <= 25 and max(map(len, lines)) <= report.WIDTH
    assert "where the time went" in page and "the program's own work" in page
    assert "trouble  samples skipped: 1" in page
    assert ("workers  2 (process)" in page) == (workers > 0)


def test_report_times_add_up_to_the_whole() -> None:
    stats = loaded(2).stats()
    rows = report.where(stats)
    assert abs(sum(row.share for row in rows) - 1) < 0.01
    assert sum(row.seconds for row in rows) <= stats["wait"]["total"] + stats["wait"]["between"] + 1e-6


def test_report_before_any_batch_says_so(capsys: Any) -> None:
    minato.DataLoader(Slow(), 4, num_workers=2).report()
    assert "Nothing was loaded yet." in capsys.readouterr().out


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
    assert len(page.splitlines()) <= 29
