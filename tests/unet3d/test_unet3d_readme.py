"""The README of the workload: short, its commands and links are right."""
from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from unet3d import settings, train
from unet3d.bench import compare

ROOT = Path(train.__file__).resolve().parents[1]
README = ROOT / "unet3d" / "README.md"
PAGE = ROOT / "docs" / "unet3d.md"
BENCH = ROOT / "unet3d" / "bench" / "README.md"
pages = pytest.mark.parametrize("page", [README, PAGE, BENCH], ids=["readme", "docs", "bench"])


def commands(text):
    """The arguments of each command `python -m unet3d...`, or of torchrun, by module."""
    joined = text.replace("\\\n", " ")
    return [(module, shlex.split(rest)) for module, rest in re.findall(
        r"^    (?:python|torchrun .*?) -m (unet3d[.\w]+)(.*)$", joined, re.M)]


def test_readme_is_short_and_its_links_lead_somewhere():
    text = README.read_text()
    assert len(text.splitlines()) <= 100
    links = re.findall(r"\]\(([^)#]+)", text)
    assert len(links) > 5
    assert [link for link in links if not (README.parent / link).exists()] == []


@pages
def test_no_step_replaces_an_install(page):
    text = page.read_text()
    assert re.findall(r"pip install [^\n`]*(?:-e|\.\[|minato)", text) == []


@pages
def test_commands_are_understood(page, monkeypatch):
    """Each command of training or comparing passes the parser; each module exists."""
    monkeypatch.setattr(settings, "check_amp", lambda parser, args: None)  # as with a GPU
    found = commands(page.read_text())
    modules = ["preprocess", "train", "evaluate"] if page != BENCH else ["bench.compare", "bench.plot"]
    assert {f"unet3d.{name}" for name in modules} <= {name for name, _ in found}
    for module, arguments in found:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()
        if module == "unet3d.train":
            settings.parse("", arguments)
        if module == "unet3d.bench.compare":
            compare.parse(arguments)


def test_makefile_runs_the_commands_of_the_readme():
    """But for the comparison, which it runs twice."""
    makefile = (ROOT / "Makefile").read_text().replace("$(QUICK)", "--preset quick --data data/quick")
    for module, arguments in commands(README.read_text())[:4]:
        _, _, rest = makefile.partition(f"-m {module}")
        line = shlex.split(rest.splitlines()[0])
        assert set(line) == set(arguments), module
