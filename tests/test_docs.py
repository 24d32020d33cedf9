"""The pages of docs/: their programs run and print the shown output, and names on them exist.

A block of Python is run after those before it on its page, in one process. One that needs a
library, which ``<!-- needs: NAME -->`` above it says, is a program of its own. A block of text
is what the block before it prints, and the line above it says how closely: ``<!-- prints -->`` to the
letter, ``<!-- prints about -->`` with other numbers, ``<!-- prints for example -->`` with other words.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
from forked import LIMIT_S, ROOT, Done, Job, run

pytestmark = pytest.mark.limit(LIMIT_S + 20)

DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
FENCE = re.compile(r"((?:^<!--[^\n]*-->\n)?)^```(\w+)\n(.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    line: int
    code: str
    needs: str | None
    #: that it prints, where the page says so, and how closely
    prints: str | None
    closely: str | None


def blocks(text: str) -> Iterator[Block]:
    """The blocks of Python of a page."""
    found = list(FENCE.finditer(text))
    for block, then in zip(found, [*found[1:], None]):
        if block[2] != "python":
            continue
        needs = re.search(r"needs: (\w+)", block[1])
        told = re.search(r"<!-- (prints.*?) -->", then[1]) if then is not None else None
        yield Block(
            text.count("\n", 0, block.start(3)) + 1, block[3], needs[1] if needs else None,
            then[3] if told and then is not None else None, told[1] if told else None,
        )  # fmt: skip


def agrees(shown: str, printed: str, closely: str | None) -> bool:
    if closely == "prints for example":
        return bool(printed.strip())
    pattern = " ".join(re.escape(word) for word in shown.split())
    if closely == "prints about":
        pattern = re.sub(r"\d+(\\\.\d+)?", r"\\d+(\\.\\d+)?", pattern)
    else:
        assert closely == "prints", closely
    return re.fullmatch(pattern, " ".join(printed.split())) is not None


ALL = {page: list(blocks((DOCS / page).read_text())) for page in PAGES}
#: those that are run in a row, and those that need a library
ROWS = {page: [b for b in found if not b.needs] for page, found in ALL.items()}
ALONE = {f"{page}:{b.line}": (page, b) for page, found in ALL.items() for b in found if b.needs}


@pytest.fixture(scope="module")
def done(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Done]:
    """The pages whose tests are run."""
    of_run = {item.name for item in request.session.items}
    jobs = {page: Job(str(DOCS / page), [(b.line, b.code) for b in row])
            for page, row in ROWS.items() if f"test_programs_of_a_page[{page}]" in of_run}  # fmt: skip
    return dict(zip(jobs, run(list(jobs.values()), tmp_path_factory.mktemp("docs"))))


def check(ended: Done, run_blocks: list[Block]) -> None:
    assert ended.status == 0, ended.errors
    assert len(ended.outputs) == len(run_blocks)
    for block, printed in zip(run_blocks, ended.outputs):
        if block.prints is not None:
            close = agrees(block.prints, printed, block.closely)
            assert close, f"line {block.line} prints\n{printed}"


@pytest.mark.parametrize("page", [page for page in PAGES if ROWS[page]])
def test_programs_of_a_page(page: str, done: dict[str, Done]) -> None:
    check(done[page], ROWS[page])


@pytest.mark.parametrize("name", ALONE)
def test_programs_with_a_library(name: str, tmp_path: Path) -> None:
    page, block = ALONE[name]
    if importlib.util.find_spec(str(block.needs)) is None:  # imports nothing here
        pytest.importorskip(str(block.needs), exc_type=ImportError)
    check(*run([Job(str(DOCS / page), [(block.line, block.code)])], tmp_path), [block])


def test_blocks_are_found() -> None:
    text = ("```python\na = 1\n```\n\n<!-- prints -->\n```text\n1\n```\n\n```sh\nls\n```\n"
            "<!-- needs: torch -->\n```python\nb\n```\n")  # fmt: skip
    assert list(blocks(text)) == [
        Block(2, "a = 1\n", None, "1\n", "prints"), Block(15, "b\n", "torch", None, None)]
    for page in PAGES:  # none that is spelled otherwise
        text = (DOCS / page).read_text()
        assert len(re.findall(r"```(?:py\b|python)", text)) == len(ALL[page]), page
        assert text.count("<!-- prints") == sum(b.prints is not None for b in ALL[page]), page


def test_outputs_are_compared_as_closely_as_said() -> None:
    assert agrees("a\n  b", "a b\n", "prints") and not agrees("a 1", "a 2", "prints")
    assert agrees("0.5 s of 12", "31 s\nof 7", "prints about")
    assert not agrees("0.5 s", "0.5 ms", "prints about")
    assert agrees("a", "b", "prints for example") and not agrees("a", "", "prints for example")


# ---- what pages name ---------------------------------------------------------------------------


@functools.cache
def functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def missing(text: str) -> list[str]:
    """Tests, files and targets that a text names and that do not exist."""
    named = re.findall(r"(tests/[\w/]+\.py)::(test_\w+)", text)
    wrong = [f"{file}::{test}" for file, test in named
             if not (ROOT / file).exists() or test not in functions(ROOT / file)]  # fmt: skip
    folders = "benchmarks|csrc|docs|examples|minato|tests|unet3d"
    paths = re.findall(rf"\b((?:{folders})/[\w./-]+\w)", text)
    wrong += [path for path in paths if not any(
        (folder / path).exists() for folder in (ROOT, ROOT / "minato" / "include"))]  # fmt: skip
    targets = re.findall(r"\bmake (?=[a-z])([\w-]+)`", text)
    makefile = (ROOT / "Makefile").read_text()
    return wrong + [t for t in targets if not re.search(rf"^{t}:", makefile, re.M)]


def test_names_on_pages_exist() -> None:
    texts = {page: (DOCS / page).read_text() for page in PAGES}
    assert {page: missing(text) for page, text in texts.items()} == dict.fromkeys(PAGES, [])
    assert texts["reliability.md"].count(".py::test_") > 25
    assert missing("`tests/test_docs.py::test_nothing` docs/none.md `make nothing`") == [
        "tests/test_docs.py::test_nothing", "docs/none.md", "nothing"]


def anchors(text: str) -> set[str]:
    """The anchors of headings, as Python-Markdown makes them."""
    lines = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", line).strip().lower()) for line in lines}


def test_links_lead_somewhere() -> None:
    """`make docs` checks this, too; this test needs no MkDocs."""
    found = 0
    for page in PAGES:
        text = (DOCS / page).read_text()
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
            file, _, anchor = target.partition("#")
            to = DOCS / (file or page)
            assert to.exists(), f"{page}: {target}"
            assert not anchor or anchor in anchors(to.read_text()), f"{page}: {target}"
            found += 1
    assert found > 10


def test_every_page_is_in_the_contents() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    assert sorted(re.findall(r"^ +- .*?: (\S+\.md)$", text, re.M)) == PAGES


def test_every_variable_and_option_has_its_place() -> None:
    from minato.commands.doctor_facts import PROGRAM
    from minato.integrations import own_options

    text = "".join((DOCS / page).read_text() for page in PAGES)
    wanted = [*PROGRAM, *own_options()]
    assert [name for name in wanted if name not in text] == []


def test_every_field_of_stats_is_documented() -> None:
    import minato

    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "api.md").read_text(), re.M)
    told = set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert set(minato.DataLoader(range(3)).stats()) <= told


def test_docs_requirements_agree() -> None:
    """`make docs` installs the extra `docs` without building the package."""
    project, makefile = ((ROOT / name).read_text() for name in ("pyproject.toml", "Makefile"))
    [extra] = re.findall(r"^docs = \[(.*)\]$", project, re.M)
    [given] = re.findall(r"^DOCS_NEED := (.*)$", makefile, re.M)
    assert re.findall(r'"([^"]+)"', extra) == re.findall(r'"([^"]+)"', given)


def test_pictures_are_drawn(tmp_path: Path) -> None:
    made: Any = subprocess.run(
        [sys.executable, str(DOCS / "pictures" / "make.py"), str(tmp_path)], cwd=ROOT,
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    for folder in (tmp_path, DOCS / "pictures"):
        for name, of in (("top", "trainer"), ("trace", "trainer"), ("timelines", "minato")):
            words = " ".join(ElementTree.parse(folder / f"{name}.svg").getroot().itertext())
            assert "worker" in words and of in words
        shown = " ".join(ElementTree.parse(folder / "top.svg").getroot().itertext())
        assert re.search(r"minato top (\d+)\s.*\sprocess +\1,", shown, re.S)
