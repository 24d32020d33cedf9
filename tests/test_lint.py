"""House rules, checked on the text of the sources.

For the C and C++ sources of ``csrc/``: which layer may include which, which layers may use Python,
words that are banned from code, labelled orders in pairs, and sizes. For comments, docstrings and
pages: phrases that need decoding. For tests: the length of their names. Each rule is a function
from sources to complaints, and the second half shows that each rule complains.
"""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

import measures
import pytest
import slow

CSRC = Path(__file__).resolve().parents[1] / "csrc"
SUFFIXES = {".c", ".h", ".cpp", ".hpp", ".cc", ".cu", ".cuh"}
FILE_LINES = 1200
FUNCTION_LINES = 80
COLUMNS = 100

#: What the files of a folder may include, besides their own folder.
MAY_INCLUDE = {
    "base": set(),
    "os": {"base"},
    "sync": {"base", "os"},
    "memory": {"base", "os", "sync"},
    "schedule": {"base"},
    "workers": {"base", "os", "sync", "memory"},
    "engine": {"base", "os", "sync", "memory", "schedule", "workers"},
    "ops": {"base", "os", "sync"},
    "cache": {"base", "os"},
    "py": {
        "base", "os", "sync", "memory", "schedule", "workers", "engine", "ops", "cache", "torch",
        "cuda",
    },
    "torch": {"base", "os"},
    "cuda": {"base", "os", "ops"},
}

#: Headers that only their own folder sees, not even by way of another header: the others ask.
PRIVATE = {"engine/mn_engine_state.h", "schedule/mn_plan_state.h"}

#: Headers of the C standard library without a system behind them: all that base and schedule
#: may use.
ISO_C = {
    "errno.h", "inttypes.h", "limits.h", "math.h", "stdatomic.h", "stdbool.h", "stddef.h", "stdint.h",
    "stdio.h", "stdlib.h", "string.h",
}  # fmt: skip

PYTHON = re.compile(r"^(Python\.h|structmember\.h|datetime\.h|numpy/.*|pybind11/.*)$")
TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/.*$")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.M)
LABEL = re.compile(r"\[([A-Z]\d{1,2})\]")
CALLER = re.compile(r"\[([A-Z]\d{1,2})\] \(caller\)")
BANNED = {
    r"\bvolatile\b": "volatile orders nothing between threads: use base/mn_atomic.h",
    r"\batomic_(thread|signal)_fence\b": "put the order on the operation, not on a fence",
    r"\b__(sync|atomic)_\w+": "use base/mn_atomic.h",
}


class Source(NamedTuple):
    """One file, taken apart; ``code``, ``plain`` and ``comments`` keep every line break.

    ``code`` has no comments, ``plain`` has neither comments nor literals, and ``comments``
    has nothing else.
    """

    name: str
    text: str
    code: str
    plain: str
    comments: str

    @property
    def folder(self) -> str:
        return self.name.split("/", 1)[0]

    @property
    def is_header(self) -> bool:
        return self.name.endswith((".h", ".hpp", ".cuh"))


TOKEN = re.compile(
    r"(?P<comment>/\*.*?\*/|//[^\n]*)|(?P<literal>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+')",
    re.S,
)


def blank(text: str) -> str:
    """Spaces for everything but line breaks."""
    return re.sub(r"[^\n]", " ", text)


def parse(name: str, text: str) -> Source:
    """Takes a file apart; ``name`` is its path below csrc."""
    code, plain, comments, at = [], [], [], 0
    for token in TOKEN.finditer(text):
        between = text[at : token.start()]
        code.append(between)
        plain.append(between)
        comments.append(blank(between))
        whole, empty = token.group(), blank(token.group())
        is_comment = token.lastgroup == "comment"
        code.append(empty if is_comment else whole)
        plain.append(empty)
        comments.append(whole if is_comment else empty)
        at = token.end()
    rest = text[at:]
    return Source(
        name,
        text,
        "".join(code) + rest,
        "".join(plain) + rest,
        "".join(comments) + blank(rest),
    )


def load(root: Path) -> list[Source]:
    """Every source below ``root``, in order of name; folders may be missing or empty."""
    paths = sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    return [parse(p.relative_to(root).as_posix(), p.read_text("utf-8")) for p in paths]


def line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def owner_folder(source: Source, included: str, names: dict[str, str]) -> str | None:
    """The folder that an included name belongs to, or None when it is not of csrc."""
    first = included.split("/", 1)[0]
    if "/" in included and first in MAY_INCLUDE:
        return first
    return names.get(included.rsplit("/", 1)[-1])


def check_layers(sources: list[Source]) -> Iterator[str]:
    """A file includes lower layers and its own folder only."""
    names = {s.name.rsplit("/", 1)[-1]: s.folder for s in sources}
    for s in sources:
        if s.folder not in MAY_INCLUDE:
            yield f"{s.name}: {s.folder} is not a layer"
            continue
        for found in INCLUDE.finditer(s.code):
            target = found.group(2)
            folder = owner_folder(s, target, names) if found.group(1) == '"' else None
            if folder is not None and folder not in MAY_INCLUDE[s.folder] | {s.folder}:
                line = line_of(s.code, found.start())
                yield f"{s.name}:{line}: {s.folder} must not include {target}"


def check_knowledge(sources: list[Source]) -> Iterator[str]:
    """stdatomic.h, Python, torch, the system: each behind its own door."""
    for s in sources:
        for found in INCLUDE.finditer(s.code):
            target = found.group(2)
            where = f"{s.name}:{line_of(s.code, found.start())}"
            if target in ("stdatomic.h", "atomic") and s.name != "base/mn_atomic.h":
                yield f"{where}: only base/mn_atomic.h includes {target}"
            if PYTHON.match(target) and s.folder not in ("py", "torch"):
                yield f"{where}: {s.folder} must not know Python"
            if TORCH.match(target) and s.folder != "torch":
                yield f"{where}: {s.folder} must not know torch"
            pure = s.folder in ("base", "schedule")
            if pure and found.group(1) == "<" and target not in ISO_C:
                yield f"{where}: {s.folder} knows no system, so not {target}"
        if s.folder == "base":
            for found in re.finditer(r"\b(malloc|calloc|realloc|free)\s*\(", s.plain):
                yield f"{s.name}:{line_of(s.plain, found.start())}: base allocates nothing"
        if s.name.endswith((".cpp", ".cc", ".hpp")) and s.folder != "torch":
            yield f"{s.name}: C++ lives in torch only"


def check_private(sources: list[Source]) -> Iterator[str]:
    """A private header is out of sight, however long the way to it is."""
    includes = {s.name: {found.group(2) for found in INCLUDE.finditer(s.code)} for s in sources}
    for s in sources:
        seen: set[str] = set()
        ahead = {s.name}
        while ahead:
            seen |= ahead
            ahead = {name for at in ahead for name in includes.get(at, ())} - seen
        for name in sorted(seen & PRIVATE):
            if not name.startswith(s.folder + "/"):
                yield f"{s.name}: {name} is out of its sight"


def check_circles(sources: list[Source]) -> Iterator[str]:
    """Files build on each other: none calls one that, by whatever way, calls it."""
    owner: dict[str, str] = {}
    files = [s for s in sources if s.name.endswith(".c")]
    for s in files:
        lines = s.plain.split("\n")
        for name, line, _ in functions(s):
            if not lines[line - 1].startswith("static"):
                owner[name] = s.name
    calls = {
        s.name: {owner[w] for w in re.findall(r"\bmn_\w+", s.plain) if w in owner} - {s.name}
        for s in files
    }
    leaves = True
    while leaves:  # files without calls, or with calls of such files only, are in no circle
        leaves = {name for name, called in calls.items() if not called & calls.keys()}
        calls = {name: called for name, called in calls.items() if name not in leaves}
    for name, called in sorted(calls.items()):
        yield f"{name}: in or above a circle, by {', '.join(sorted(called & calls.keys()))}"


def check_words(sources: list[Source]) -> Iterator[str]:
    """Words that have no place in code, and notes that have none anywhere."""
    for s in sources:
        for pattern, why in BANNED.items():
            for found in re.finditer(pattern, s.plain):
                yield f"{s.name}:{line_of(s.plain, found.start())}: {why}"
        for found in re.finditer(r"TODO|FIXME", s.text):
            yield f"{s.name}:{line_of(s.text, found.start())}: unfinished: {found.group()}"


def prose(comments: str) -> str:
    """Comments as running text: no comment signs, single spaces."""
    return re.sub(r"[\s*]+", " ", re.sub(r"/\*|\*/|//", " ", comments))


def declared_pairs(source: Source) -> set[tuple[str, str]]:
    """Neighbouring labels in a header that are joined by an arrow or the word "with"."""
    text, pairs = prose(source.comments), set()
    labels = list(LABEL.finditer(text))
    for left, right in zip(labels, labels[1:]):
        between = text[left.end() : right.start()]
        if len(between) < 300 and re.search(r"->|\bwith\b", between):
            pairs.add((left.group(1), right.group(1)))
    return pairs


def check_labels(sources: list[Source]) -> Iterator[str]:
    """Every ``[A1]`` belongs to a pair that a header declares, and both ends are at code.

    An end that is in the code of the header's users is marked ``[A1] (caller)`` in it.
    """
    headers = [s for s in sources if s.is_header]
    pairs: dict[tuple[str, str], str] = {}
    homes: dict[str, str] = {}
    for s in headers:
        for pair in sorted(declared_pairs(s)):
            pairs[pair] = s.name
            for label in pair:
                if homes.setdefault(label, s.name) != s.name:
                    yield f"{s.name}: order label [{label}] is {homes[label]}'s already"
    paired = {label for pair in pairs for label in pair}
    callers = {c for s in headers for c in CALLER.findall(prose(s.comments))}
    at_code = set()
    for s in sources:
        for line, code in zip(s.comments.splitlines(), s.plain.splitlines()):
            for label in LABEL.findall(line):
                if label not in paired:
                    yield f"{s.name}: order label [{label}] has no partner in any header"
                if code.strip():
                    at_code.add(label)
        if not s.is_header:  # in a .c file a comment of its own above the line will do
            at_code.update(LABEL.findall(s.comments))
    for pair, name in sorted(pairs.items()):
        for label in pair:
            if label not in at_code and label not in callers:
                yield f"{name}: order label [{label}] marks no code"


def check_file_sizes(sources: list[Source]) -> Iterator[str]:
    """A file over the limit tells more than one story."""
    for s in sources:
        lines = s.text.count("\n")
        if lines > FILE_LINES:
            yield f"{s.name}: {lines} lines, the limit is {FILE_LINES}"


def check_columns(sources: list[Source]) -> Iterator[str]:
    """A line fits, code or comment."""
    for s in sources:
        for number, line in enumerate(s.text.splitlines(), 1):
            if len(line) > COLUMNS:
                yield f"{s.name}:{number}: {len(line)} columns, the limit is {COLUMNS}"


def functions(source: Source) -> Iterator[tuple[str, int, int]]:
    """(name, line, lines) of each function body at file, namespace or extern "C" level."""
    text = re.sub(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", lambda m: blank(m.group()), source.plain,
                  flags=re.M)  # fmt: skip
    depth, start, opened, head, transparent = 0, 0, 0, "", []
    for at, char in enumerate(text):
        if char == "{":
            if depth == 0:
                head = text[start:at]
                if re.search(r"\b(namespace|extern)\b[^;()=]*$", head):
                    transparent.append(depth)
                    start = at + 1
                    continue
                opened = at
            depth += 1
        elif char == "}":
            if depth == 0:
                if transparent:
                    transparent.pop()
                start = at + 1
                continue
            depth -= 1
            if depth == 0:
                name = re.search(r"(\w+)\s*\([^{}]*\)[^(){};=]*$", head)
                if name and "=" not in head.split("(", 1)[0]:
                    first = line_of(text, opened - len(head.lstrip()))
                    yield name.group(1), first, line_of(text, at) - first + 1
                start = at + 1
        elif char == ";" and depth == 0:
            start = at + 1


def check_function_sizes(sources: list[Source]) -> Iterator[str]:
    """A function fits on a screen, generously."""
    for s in sources:
        for name, line, lines in functions(s):
            if lines > FUNCTION_LINES:
                yield f"{s.name}:{line}: {name} has {lines} lines, limit {FUNCTION_LINES}"


def check_opening(sources: list[Source]) -> Iterator[str]:
    """Every file opens with a comment that carries the licence."""
    for s in sources:
        if not s.text.startswith(("/*", "//")):
            yield f"{s.name}: no purpose comment at the top"
        if "SPDX-License-Identifier: Apache-2.0" not in s.text[:600]:
            yield f"{s.name}: no licence line at the top"


# ---- words in comments, docstrings and pages -----------------------------------------------

ROOT = CSRC.parent

#: Folders and files whose comments, docstrings and pages have plain words.
PLAIN = (
    "minato", "csrc", "docs", "tests", "benchmarks", "unet3d", "examples", "setup.py",
    "minato_command.py", "Makefile", "README.md", "CONTRIBUTING.md", "SECURITY.md",
)  # fmt: skip

#: Phrases that a reader has to decode, and what to write instead.
PHRASES = {
    "nobody": "name the process, thread or caller that does not",
    "who(?:m|so)?ever": "name the process, thread or caller",
    "in hand": "running, current",
    "let(?:s|ting)? go of": "releases, drops",
    "(?:is|are|was|were|be|been|being) told of": "gets, is warned about",
    "as far as": "if, where, up to",
    "so many": "this many, a number of",
    "that much": "this many, this amount",
    "beside": "next to, besides, with",
    "what sleeps": "name what sleeps",
}  # fmt: skip
BETWEEN = r"[\s#:*/]+"  # words may be on two lines of a comment
FOREIGN = re.compile(
    r"\b(?:"  # once for all: most of a file is blank
    + "|".join(f"(?P<p{n}>{p.replace(' ', BETWEEN)})" for n, p in enumerate(PHRASES)) + r")\b", re.I
)
NAME_WORDS = 10
#: In a test's name: words that hide the condition or the result.
VAGUE = re.compile(r"_(?:is|are)_no_|(?:^|_)what_|_all_the_same|_however_")


def python_prose(text: str) -> str:
    """Comments and docstrings of a Python file; everything else is blank."""
    lines = [" " * len(line) for line in text.split("\n")]
    statement = True  # a string here is a docstring
    skipped = {tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENCODING}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and statement):
            for at, line in enumerate(token.string.split("\n"), token.start[0] - 1):
                start = token.start[1] if at == token.start[0] - 1 else 0
                lines[at] = lines[at][:start] + line + lines[at][start + len(line) :]
        if token.type not in skipped:
            statement = token.type == tokenize.NEWLINE
    return "\n".join(lines)


def page_prose(text: str) -> str:
    """A page of Markdown without its code."""
    return re.sub(r"^```.*?^```|`[^`\n]*`", lambda m: blank(m.group()), text, flags=re.M | re.S)


def prose_of(name: str, text: str) -> str:
    """What people read in a file; everything else is blank, and every line break is kept."""
    suffix = Path(name).suffix
    if suffix in (".py", ".pyi"):
        return python_prose(text)
    if suffix in SUFFIXES:
        return parse(name, text).comments
    if suffix == ".md":
        return page_prose(text)
    return re.sub(r"^[^#\n]*", lambda m: blank(m.group()), text, flags=re.M)  # Makefile


def check_phrases(name: str, text: str) -> Iterator[str]:
    """The phrases of PHRASES in what people read."""
    prose_text = prose_of(name, text)
    for found in FOREIGN.finditer(prose_text):
        better = list(PHRASES.values())[int(str(found.lastgroup)[1:])]
        words = " ".join(found.group().split())
        yield f"{name}:{line_of(prose_text, found.start())}: '{words}': write {better}"


def check_test_names(name: str, text: str) -> Iterator[str]:
    """A test's name says what is tested in a few words."""
    for found in re.finditer(r"^\s*(?:async )?def test_(\w+)\(", text, re.M):
        words = len(found.group(1).split("_"))
        if words > NAME_WORDS:
            line = line_of(text, found.start(1))
            yield f"{name}:{line}: test_{found.group(1)} has {words} words, limit {NAME_WORDS}"
        if VAGUE.search(found.group(1)):
            line = line_of(text, found.start(1))
            yield f"{name}:{line}: test_{found.group(1)}: name the condition and the result"


def files_below(place: str) -> Iterator[Path]:
    """The sources and pages of a folder, or a single file."""
    root = ROOT / place
    paths = [root] if root.is_file() else sorted(root.rglob("*"))
    for path in paths:
        known = path.suffix in {".py", ".pyi", ".md", *SUFFIXES} or path.name == "Makefile"
        if known and path.is_file():
            yield path


Rule = Callable[[list[Source]], Iterator[str]]
RULES: list[Rule] = [
    check_layers,
    check_knowledge,
    check_private,
    check_circles,
    check_words,
    check_labels,
    check_file_sizes,
    check_columns,
    check_function_sizes,
    check_opening,
]


def test_lines_of_c_in_the_tests_fit() -> None:
    assert not list(check_columns(load(Path(__file__).parent)))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_sources_keep_the_rule(rule: Rule) -> None:
    complaints = sorted(set(rule(load(CSRC))))
    assert not complaints, "\n" + "\n".join(complaints)


# ---- the rules can complain ----

TOP = "/* Purpose.\n * SPDX-License-Identifier: Apache-2.0\n */\n"


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (check_layers, "base/a.h", '#include "os/mn_thread.h"'),
        (check_layers, "sync/a.c", '#include "engine/not_written_yet.h"'),
        (check_layers, "ops/a.c", '  #  include "workers/mn_tasks_and_retries.h"'),
        (check_layers, "engine/a.c", '#include "ops/a.h"'),
        (check_layers, "memory/a.c", '#include "workers/mn_tasks_and_retries.h"'),
        (check_layers, "schedule/a.c", '#include "os/mn_limits.h"'),
        (check_layers, "workers/a.c", '#include "schedule/mn_costs.h"'),
        (check_layers, "workers/a.c", '#include "engine/mn_engine.h"'),
        (check_layers, "engine/a.c", '#include "py/module/mn_state.h"'),
        (check_layers, "misc/a.c", ""),
        (check_knowledge, "sync/a.h", "#include <stdatomic.h>"),
        (check_knowledge, "engine/a.c", "#include <Python.h>"),
        (check_knowledge, "ops/a.c", "#include <numpy/arrayobject.h>"),
        (check_knowledge, "py/a.c", "#include <torch/extension.h>"),
        (check_knowledge, "base/a.h", "#include <unistd.h>"),
        (check_knowledge, "schedule/a.c", "#include <time.h>"),
        (check_knowledge, "base/a.c", "void *f(void) { return malloc(1); }"),
        (check_knowledge, "engine/a.cpp", ""),
        (check_private, "py/a.c", '#include "engine/mn_engine_state.h"'),
        (check_private, "engine/a.c", '#include "schedule/mn_plan_state.h"'),
        (check_words, "engine/a.c", "static volatile int x;"),
        (check_words, "engine/a.c", "atomic_thread_fence(memory_order_seq_cst);"),
        (check_words, "engine/a.c", "__sync_synchronize();"),
        (check_words, "engine/a.c", "/* TO" + "DO: later */"),
        (check_labels, "sync/a.h", "int x; /* [A1] */"),
        (check_labels, "sync/a.h", "/* [A1] -> [A2] */\nint x; /* [A1] */"),
        (check_file_sizes, "os/a.c", "\n" * (FILE_LINES + 1)),
        (check_columns, "os/a.h", "/* " + "a" * 95 + " */"),
        (check_function_sizes, "os/a.c", "static int\nf(int x)\n{\n" + "x++;\n" * 80 + "}\n"),
        (check_function_sizes, "torch/a.cpp",
         'extern "C" {\nnamespace n {\nint f() {\n' + "g();\n" * 80 + "}\n}\n}\n"),
        (check_opening, "os/a.c", "int x;\n"),
        (check_opening, "os/a.c", "/* Purpose. */\n"),
    ],
)  # fmt: skip
def test_rule_complains(rule: Rule, name: str, text: str) -> None:
    assert list(rule([parse(name, text)]))


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (check_layers, "engine/a.c", '#include "engine/b.h"\n#include "sync/c.h"\n#include <os/x>'),
        (check_layers, "engine/a.c", '/* #include "py/module/mn_state.h" */'),
        (check_layers, "py/a.c", '#include "engine/a.h"\n#include "ops/a.h"\n#include "b.h"'),
        (check_knowledge, "base/mn_atomic.h", "#include <stdatomic.h>"),
        (check_knowledge, "py/a.c", "#include <Python.h>\n#include <numpy/arrayobject.h>"),
        (check_words, "engine/a.c", '/* volatile is banned */ const char *s = "volatile";'),
        (check_words, "base/a.h", '__asm__ __volatile__("yield");'),
        (check_labels, "sync/a.h", "/* [A1] x -> y,\n * with [A2] */\nf(); /* [A1] */\n"
                                   "g(); /* [A2] */"),
        (check_labels, "sync/a.h", "/* [A1] -> [A2], [A2] (caller) */\nf(); /* [A1] */"),
        (check_file_sizes, "os/a.c", "\n" * FILE_LINES),
        (check_columns, "os/a.h", "/* " + "a" * 94 + " */\n"),
        (check_function_sizes, "os/a.c", "static int\nf(int x)\n{\n" + "x++;\n" * 76 + "}\n"),
        (check_function_sizes, "os/a.c", "static int table[] = {\n" + "1,\n" * 99 + "};\n"),
        (check_opening, "os/a.c", TOP),
    ],
)  # fmt: skip
def test_rule_accepts(rule: Rule, name: str, text: str) -> None:
    assert not list(rule([parse(name, text)]))


def test_a_label_has_one_header() -> None:
    text = "/* [A1] -> [A2] */\nint x; /* [A1] [A2] */\n"
    assert not list(check_labels([parse("sync/a.h", text)]))
    assert list(check_labels([parse("sync/a.h", text), parse("sync/b.h", text)]))


def test_private_header_is_found_through_another() -> None:
    between = parse("engine/b.h", '#include "engine/mn_engine_state.h"')
    user = parse("py/a.c", '#include "engine/b.h"')
    assert list(check_private([between, user]))
    assert not list(check_private([between, parse("engine/a.c", '#include "engine/b.h"')]))


def test_a_circle_of_calls_is_found() -> None:
    for layer in ("os", "py/types"):
        a = parse(f"{layer}/a.c", "int\nmn_a(void)\n{\n    return mn_b();\n}\n")
        b = parse(f"{layer}/b.c", "int\nmn_b(void)\n{\n    return mn_c();\n}\n")
        c = parse(f"{layer}/c.c", "int\nmn_c(void)\n{\n    return mn_a();\n}\n")
        assert len(list(check_circles([a, b, c]))) == 3
        assert not list(check_circles([a, b]))
        own = parse(f"{layer}/c.c", "static int\nmn_a(void)\n{\n    return 0;\n}\n" + c.text)
        assert not list(check_circles([b, own]))


def test_bare_names_are_found_by_file() -> None:
    sources = [parse("workers/mn_tasks_and_retries.h", TOP), parse("sync/a.c", '#include "mn_tasks_and_retries.h"')]
    assert list(check_layers(sources))
    assert not list(check_layers([parse("sync/a.c", '#include "elsewhere.h"')]))


def test_functions_are_measured_from_signature_to_brace() -> None:
    text = "#define M(x) \\\n  { x }\nstruct s {\n  int a;\n};\n\nint\nf(void)\n{\n  if (1) {\n  }\n}\n"
    assert list(functions(parse("os/a.c", text))) == [("f", 7, 6)]


def test_sources_are_there() -> None:
    folders = {s.folder for s in load(CSRC)}
    assert {"base", "os", "sync"} <= folders


def test_missing_folder_gives_no_complaint(tmp_path: Path) -> None:
    assert load(tmp_path / "none") == []
    for rule in RULES:
        assert not list(rule([]))


# ---- words and names -----------------------------------------------------------------------


@pytest.mark.parametrize("place", PLAIN)
def test_prose_has_plain_words(place: str) -> None:
    found = [
        complaint
        for path in files_below(place)
        for complaint in check_phrases(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)


def test_slow_list_names_tests() -> None:
    for entry in slow.SLOW:
        file, *names = entry.partition("[")[0].split("::")
        text = (ROOT / file).read_text()
        assert all(re.search(rf"^ *(def|class) {name}", text, re.M) for name in names), entry


def test_names_of_tests_are_short() -> None:
    paths = sorted((ROOT / "tests").rglob("*.py"))
    found = [c for p in paths for c in check_test_names(p.name, p.read_text("utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "name, text",
    [
        ("a.py", "x = 1  # nobody reads it"),
        ("a.py", '"""What whoever calls gets."""'),
        ("a.py", 'def f():\n    """The task in\n    hand."""'),
        ("a.pyi", "#: lets go\n#: of it\nx: int"),
        ("a.c", "/* So\n * many rows. */"),
        ("a.h", "int x; // beside it"),
        ("a.md", "# Title\n\nAs far as it goes."),
        ("Makefile", "all:  # is told of it"),
    ],
)
def test_phrase_rule_complains(name: str, text: str) -> None:
    assert list(check_phrases(name, text))


@pytest.mark.parametrize(
    "name, text",
    [
        ("a.py", 'x = "nobody"  # besides'),
        ("a.py", "beside = f(\n    '''so many'''\n)"),
        ("a.c", 'const char *s = "whoever"; /* fits */'),
        ("a.md", "`beside` and\n\n```python\nnobody = 1\n```\n"),
        ("Makefile", "nobody: beside"),
    ],
)
def test_phrase_rule_accepts(name: str, text: str) -> None:
    assert not list(check_phrases(name, text))


def test_name_rule_counts_words() -> None:
    ten, eleven = "_".join("a" * 10), "_".join("a" * 11)
    assert not list(check_test_names("a.py", f"def test_{ten}() -> None:"))
    assert list(check_test_names("a.py", f"class A:\n    def test_{eleven}(self) -> None:"))


@pytest.mark.parametrize("name", ["a_pause_is_no_end", "what_is_left", "it_gets_what_it_asks"])
def test_name_rule_refuses_vague_words(name: str) -> None:
    assert list(check_test_names("a.py", f"def test_{name}() -> None:"))


# ---- imports of Python ---------------------------------------------------------------------

#: groups of files of one package that still import each other
KNOWN_CIRCLES = ("cache.",)


def test_packages_do_not_import_each_other() -> None:
    assert not measures.knots(measures.package_edges(measures.imports(ROOT)))


def test_files_do_not_import_each_other() -> None:
    knots = measures.knots(measures.file_edges(measures.imports(ROOT)))
    assert not [k for k in knots if not any(all(m.startswith(p) for m in k) for p in KNOWN_CIRCLES)]


def test_files_of_two_packages_have_names_of_their_own() -> None:
    names = [name.rpartition(".")[2] for name in measures.modules(ROOT) if name.count(".") == 1]
    packages = {name.partition(".")[0] for name in measures.modules(ROOT) if "." in name}
    again = {name for name in names if names.count(name) > 1} - packages
    assert again <= {"operators"}


def test_import_circles_are_found(tmp_path: Path) -> None:
    for name, text in {"__init__": "", "b": "def f():\n    from .a import c", "a/__init__": "",
                       "a/c": "import minato.b", "a/d": "from . import c"}.items():  # fmt: skip
        file = tmp_path / "minato" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    found = measures.imports(tmp_path)
    assert measures.knots(measures.package_edges(found)) == [["a", "b"]]
    assert measures.knots(measures.file_edges(found)) == [["a.c", "b"]]
