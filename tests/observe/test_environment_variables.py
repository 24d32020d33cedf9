"""The table of environment variables has those of the sources, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from minato.commands import doctor_facts

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("minato", "csrc", "tests", "benchmarks", "unet3d")
SUFFIXES = {".py", ".pyi", ".c", ".h", ".cpp", ".md", ".toml", ".sh"}
#: a name that ends in _H guards a header
NAME = re.compile(r"\bMINATO_(?!\w*_H\b)[A-Z][A-Z0-9_]+\b")
NOT_READ = {Path(doctor_facts.__file__), Path(__file__)}


def named() -> dict[str, str]:
    """The names in the sources, each with a file that has it."""
    files = [ROOT / "setup.py", ROOT / "Makefile", ROOT / "README.md", ROOT / ".ci/run"]
    for folder in FOLDERS:
        files += (p for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES)
    found = {}
    for file in files:
        if file.exists() and file not in NOT_READ:
            text = file.read_text(encoding="utf-8", errors="replace")
            found.update(dict.fromkeys(NAME.findall(text), str(file.relative_to(ROOT))))
    return found


def test_variables_in_sources_are_listed() -> None:
    found = named()
    assert {"MINATO_TRACE", "MINATO_WERROR", "MINATO_STRESS_SECONDS"} <= found.keys()
    assert {n: where for n, where in found.items() if n not in doctor_facts.ALL} == {}


def test_listed_variables_are_in_sources() -> None:
    assert doctor_facts.ALL.keys() - named().keys() == set()


def test_variables_are_listed_once_with_a_sentence() -> None:
    parts = (doctor_facts.PROGRAM, doctor_facts.BUILD, doctor_facts.TESTS)
    assert sum(map(len, parts)) == len(doctor_facts.ALL)
    assert all(text.endswith((".", ").")) and list(part) == sorted(part)
               for part in parts for text in part.values())
