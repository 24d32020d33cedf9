"""Measures of the source tree: size, files, and how its parts depend on each other.

``python tests/measures.py [FOLDER]`` (`make measures`) prints them as a table, and a list of the
functions in C headers that are called in one place: most of them could be static. FOLDER is another
checkout to measure. tests/test_lint.py holds the circles at 0.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Iterator, NamedTuple

SUFFIXES = {".c", ".h", ".cpp", ".cu", ".py", ".pyi"}
MARK = re.compile(r"\benum mn_|csrc/\S+\.h\b|\bMN_[A-Z]")


class Import(NamedTuple):
    module: str
    imported: str
    line: int
    in_function: bool


def sources(root: Path, *places: str) -> list[Path]:
    """Source files below some folders of a checkout, without build outputs."""
    found = (p for place in places for p in sorted((root / place).rglob("*")))
    return [p for p in found if p.suffix in SUFFIXES and "__pycache__" not in p.parts]


def modules(root: Path) -> dict[str, ast.Module]:
    """The parsed modules of minato, by name without "minato."; the package itself is ""."""
    trees = {}
    for path in sources(root, "minato"):
        if path.suffix == ".py":
            parts = path.relative_to(root / "minato").with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            trees[name] = ast.parse(path.read_text("utf-8"))
    return trees


def imports(root: Path) -> list[Import]:
    """Each import of one module of minato by another, also for types only or in a function."""
    trees = modules(root)
    packages = {name.rpartition(".")[0] for name in trees if name} | {""}
    found = []

    def visit(module: str, node: ast.AST, inner: bool) -> Iterator[tuple[str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name, child.lineno, inner
            elif isinstance(child, ast.ImportFrom):
                base = ["minato", *filter(None, module.split("."))]
                base = base[: len(base) + (module in packages) - child.level] if child.level else []
                base += [child.module] if child.module else []
                for alias in child.names:
                    yield ".".join([*base, alias.name]), child.lineno, inner
            function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from visit(module, child, inner or function)

    for module, tree in trees.items():
        for target, line, inner in visit(module, tree, False):
            top, _, name = target.partition(".")
            while name and name not in trees:
                name = name.rpartition(".")[0]
            if top == "minato" and name and name != module:
                found.append(Import(module, name, line, inner))
    return found


def knots(edges: set[tuple[str, str]]) -> list[list[str]]:
    """Groups of nodes of which each reaches each other one."""
    reach: dict[str, set[str]] = {}
    for start in {a for a, _ in edges}:
        seen: set[str] = set()
        ahead = {start}
        while ahead:
            ahead = {b for a, b in edges if a in ahead} - seen
            seen |= ahead
        reach[start] = seen
    groups = {
        tuple(sorted(b for b in seen if a in reach.get(b, ())))
        for a, seen in reach.items()
        if a in seen
    }
    return sorted(map(list, groups))


def package_edges(found: list[Import]) -> set[tuple[str, str]]:
    """Imports between packages; a module outside them counts as one. minato itself is left out."""
    pairs = {(i.module.split(".")[0], i.imported.split(".")[0]) for i in found}
    return {(a, b) for a, b in pairs if a and a != b}


def file_edges(found: list[Import]) -> set[tuple[str, str]]:
    return {(i.module, i.imported) for i in found if i.module}


def header_functions(root: Path) -> tuple[int, list[tuple[Path, str]]]:
    """How many functions C headers declare or define; those of them that are called in one place,
    with their headers."""
    texts = {p: p.read_text("utf-8") for p in sources(root, "csrc")}
    plain = {p: re.sub(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"", " ", t, flags=re.S)
             for p, t in texts.items()}  # fmt: skip
    declared = {
        (p, name)
        for p, text in plain.items()
        if p.suffix == ".h"
        for name in re.findall(r"^(?:static inline [^(\n]*\b)?(mn_\w+)\(", text, re.M)
    }
    mentions = Counter(re.findall(r"\bmn_\w+", "\n".join(plain.values())))
    headers = "\n".join(text for p, text in plain.items() if p.suffix == ".h")
    inline = {n for _, n in declared if re.search(rf"\b{n}\([^;{{]*\{{", headers)}
    return len(declared), sorted(
        (p, name) for p, name in declared if mentions[name] == (2 if name in inline else 3)
    )


def enums_again(root: Path) -> list[str]:
    """Constants of Python modules next to a comment that names the C header they repeat."""
    found = []
    for path in sources(root, "minato"):
        if path.suffix != ".py":
            continue
        lines = path.read_text("utf-8").split("\n")
        for node in ast.parse("\n".join(lines)).body:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            names = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
            above = node.lineno - 2
            while above >= 0 and lines[above].startswith("#"):
                above -= 1
            near = "\n".join(lines[above + 1 : node.end_lineno])
            if not names - {"range"} and MARK.search(near):
                found.append(f"{path.relative_to(root)}:{node.lineno}")
    return found


def engine_methods(root: Path) -> int:
    tree = ast.parse((root / "minato/_core.pyi").read_text("utf-8"))
    (engine,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Engine")
    methods = {n.name for n in engine.body if isinstance(n, ast.FunctionDef)}
    return len(methods - {"__init__", "__new__"})


def table(root: Path) -> Iterator[tuple[str, object]]:
    lengths = [p.read_text("utf-8").count("\n") for p in sources(root, "csrc", "minato")]
    yield "product lines (csrc + minato)", sum(lengths)
    yield "product files", len(lengths)
    short = (sum(n < most for n in lengths) for most in (100, 50))
    yield "files under 100 lines; under 50", "{}; {}".format(*short)
    declared, single = header_functions(root)
    yield "functions in C headers; with one use", f"{declared}; {len(single)}"
    yield "test lines", sum(p.read_text("utf-8").count("\n") for p in sources(root, "tests"))
    found = imports(root)
    packages, files = package_edges(found), knots(file_edges(found))
    pairs = {(a, b) for a, b in packages if a < b and (b, a) in packages}
    yield "pairs of packages that import each other", len(pairs)
    yield "packages in circles of imports", sum(map(len, knots(packages)))
    yield "circles of files; files in them", f"{len(files)}; {sum(map(len, files))}"
    inner = {(i.module, i.line) for i in found if i.in_function}
    yield "imports inside functions", len(inner)
    yield "enums of C written again in Python", len(enums_again(root))
    python = [p.read_text("utf-8") for p in sources(root, "minato") if p.suffix == ".py"]
    yield "lines with dict[str, Any]", sum(
        "dict[str, Any]" in line for text in python for line in text.split("\n")
    )
    yield "methods of Engine", engine_methods(root)


if __name__ == "__main__":
    checkout = Path(sys.argv[1] if sys.argv[1:] else Path(__file__).parents[1])
    for name, value in table(checkout):
        print(f"{name:44}{value!s:>12}")
    print("functions in C headers with one use:")
    for header, group in itertools.groupby(header_functions(checkout)[1], lambda pair: pair[0]):
        print(f"  {header.relative_to(checkout)}: {', '.join(name for _, name in group)}")
