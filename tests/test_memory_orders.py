"""The order pairs of csrc/, on machines that reorder more than this one.

Where two processes meet without a lock, the sources label the accesses: ``[T1]`` in the code is
``[T1]`` in the argument at the head of the file. Here each argument is a small program of these
accesses, with the memory orders that the sources have now. Every execution that C11 allows is
tried (axiomatic, as in "Repairing Sequential Consistency in C/C++11", Lahav et al., PLDI 2017, but
with load buffering, so that it includes ARM64). No execution may lose a wake-up or show
memory that was not written yet. Each program also fails as soon as one of its orders is weaker.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[1] / "csrc"
ACQUIRES = {"acquire", "acqrel", "seqcst"}
RELEASES = {"release", "acqrel", "seqcst"}


# ---- executions that C11 allows -----------------------------------------------------------


@dataclass(frozen=True)
class Access:
    """kind: "load", "store" or "both", a read-modify-write; writes: the value."""

    name: str
    kind: str
    place: str
    order: str
    writes: int = 1

    @property
    def reads(self) -> bool:
        return self.kind != "store"

    @property
    def stores(self) -> bool:
        return self.kind != "load"


Relation = set[tuple[int, int]]


def closed(relation: Relation) -> Relation:
    """Transitively."""
    out = set(relation)
    while more := {(a, d) for a, b in out for c, d in out if b == c} - out:
        out |= more
    return out


def then(*relations: Relation) -> Relation:
    first, *rest = relations
    for relation in rest:
        first = {(a, d) for a, b in first for c, d in relation if b == c}
    return first


def acyclic(relation: Relation) -> bool:
    return all(a != b for a, b in closed(relation))


def executions(threads: Sequence[Sequence[Access]]) -> Iterator[dict[str, int]]:
    """The values that each access reads, by name, in each allowed execution."""
    places = sorted({a.place for thread in threads for a in thread})
    all_: list[Access] = [Access("", "store", place, "relaxed", 0) for place in places]
    init = range(len(all_))
    sb: Relation = set()
    for thread in threads:
        numbers = range(len(all_), len(all_) + len(thread))
        sb |= {(a, b) for a in (*init, *numbers) for b in numbers if a < b}
        all_ += thread
    some = range(len(all_))
    same = {(a, b) for a in some for b in some if all_[a].place == all_[b].place}
    strong = [a for a in some if all_[a].order == "seqcst"]
    readers = [a for a in some if all_[a].reads]
    writers = {p: [a for a in some if all_[a].stores and all_[a].place == p] for p in places}
    sources = [[w for w in writers[all_[r].place] if w != r] for r in readers]
    orders = [[(ws[0], *rest) for rest in itertools.permutations(ws[1:])]
              for ws in writers.values()]  # fmt: skip
    for chosen, lines in itertools.product(
        itertools.product(*sources), itertools.product(*orders)
    ):
        source = dict(zip(readers, chosen))
        rf: Relation = {(w, r) for r, w in source.items()}
        mo: Relation = {(a, b) for line in lines for a, b in itertools.combinations(line, 2)}
        fr: Relation = {(r, b) for r, w in source.items() for a, b in mo if a == w and b != r}
        if any((r, b) in fr and (b, r) in mo for r in readers for b in some):
            continue  # something came between the two halves of a read-modify-write
        chain = closed({(w, r) for w, r in rf if all_[r].stores}) | {(a, a) for a in some}
        sw = {(a, r) for a, b in chain for w, r in rf
              if b == w and all_[a].order in RELEASES and all_[r].order in ACQUIRES}  # fmt: skip
        hb = closed(sb | sw)
        eco = closed(rf | mo | fr)
        if any(a == b or (b, a) in eco for a, b in hb):
            continue
        apart = sb - same
        total = sb | then(apart, hb, apart) | (hb & same) | mo | fr
        if not acyclic({(a, b) for a, b in total if a in strong and b in strong}):
            continue
        yield {all_[r].name: all_[w].writes for r, w in source.items()}


# ---- the sources --------------------------------------------------------------------------

CALL = re.compile(
    r"mn_a(?:32|64)_(load|store|xchg|cas|add)_(relaxed|acquire|release|acqrel|seqcst)\("
)


@cache
def labelled(file: str) -> dict[str, set[tuple[str, str]]]:
    """By label: the kinds and orders of the accesses that it stands at."""
    out: dict[str, set[tuple[str, str]]] = {}
    for line in (CSRC / file).read_text().splitlines():
        call = CALL.search(line)
        for label in re.findall(r"(?<!by )\[([A-Z]\d)\]", line) if call else ():
            assert call is not None
            kind = call[1] if call[1] in ("load", "store") else "both"
            out.setdefault(label, set()).add((kind, call[2]))
    return out


def at(place: str, label: str, file: str, writes: int = 1) -> Access:
    """The access of that label, as the source has it now."""
    [(kind, order)] = labelled(file)[label]
    return Access(label, kind, place, order, writes)


def plain(name: str, kind: str, place: str) -> Access:
    """Memory that is not atomic and has no required order."""
    return Access(name, kind, place, "relaxed")


EVENT, TASKS, CREW = "sync/mn_event.h", "workers/mn_tasks_and_retries.c", "workers/mn_crew.c"
ENGINE = "engine/mn_engine_next.c"
SLEEPS, LOOKS = at("event", "B1", EVENT), at("event", "B4", EVENT)
DONE = at("word", "T3", TASKS)
LOOK = at("word", "T4", "workers/mn_tasks_and_retries.h")


@dataclass(frozen=True)
class Program:
    """bad: what no execution may read. needs: of these accesses each order is needed."""

    threads: tuple[tuple[Access, ...], ...]
    bad: tuple[dict[str, int], ...]
    needs: tuple[str, ...]

    def fails(self) -> bool:
        return any(
            all(found[name] == value for name, value in bad.items())
            for found in executions(self.threads)
            for bad in self.bad
        )

    def weaker(self, name: str) -> Iterator[Program]:
        """With the order of that access, and of no other, one step weaker."""
        below = {
            "load": {"seqcst": "acquire", "acquire": "relaxed"},
            "store": {"seqcst": "release", "release": "relaxed"},
            "both": {"seqcst": "acqrel", "acqrel": "relaxed"},
        }
        for i, thread in enumerate(self.threads):
            for k, access in enumerate(thread):
                if access.name == name:
                    less = replace(access, order=below[access.kind][access.order])
                    threads = list(self.threads)
                    threads[i] = (*thread[:k], less, *thread[k + 1 :])
                    yield replace(self, threads=tuple(threads))


def told(publish: Access, look: Access, *between: Access, **more: int) -> Program:
    """Published and notified, against announced and looked at: no wake-up may be lost."""
    lost = {LOOKS.name: 0, look.name: 0}
    bad = ({**lost}, *({look.name: 0, name: value} for name, value in more.items()))
    needs = (publish.name, look.name, LOOKS.name, SLEEPS.name)
    return Program(((publish, *between, LOOKS), (SLEEPS, look)), bad, needs)


PROGRAMS = {
    "a batch is done while its trainer goes to sleep": told(DONE, LOOK),
    "and says first what it waits for": Program(
        ((DONE, at("wanted", "W2", TASKS), LOOKS), (at("wanted", "W1", ENGINE), SLEEPS, LOOK)),
        ({"W2": 0, "T4": 0}, {"B4": 0, "T4": 0}), ("T3", "T4", "W1", "W2", "B1", "B4"),
    ),
    "two workers end the last tasks of a batch": Program(
        ((DONE, at("other", "C1", TASKS)),
         (replace(at("other", "T3", TASKS), name="its T3"),
          replace(at("word", "C1", TASKS), name="its C1"))),
        ({"C1": 0, "its C1": 0},), ("T3", "C1", "its T3", "its C1"),
    ),
    "a task is queued while a worker goes to sleep": told(
        at("tail", "P1", TASKS), at("tail", "P2", TASKS)),
    "a worker becomes ready while a task is queued": Program(
        ((at("tail", "P1", TASKS), at("state", "R2", CREW), LOOKS),
         (at("state", "R1", "py/types/mn_worker_type.c"), SLEEPS, at("tail", "P2", TASKS))),
        ({"R2": 0, "P2": 0}, {"B4": 0, "P2": 0}), ("P1", "P2", "R1", "R2", "B1", "B4"),
    ),
    "a thread becomes ready while a task is queued": Program(
        ((at("tail", "P1", TASKS), at("state", "R2", CREW), LOOKS),
         (at("state", "R1", TASKS), SLEEPS, at("tail", "P2", TASKS))),
        ({"R2": 0, "P2": 0}, {"B4": 0, "P2": 0}), ("R1",),
    ),
    "a worker empties a queue while the engine goes to sleep": told(
        at("hint", "P3", TASKS), at("hint", "P4", "engine/mn_start_due.c")),
    "a worker asks for a lease while the engine goes to sleep": told(
        at("lease", "L1", TASKS), at("lease", "L2", TASKS)),
    "a lease is granted while the worker goes to sleep": told(
        at("lease", "L3", TASKS), at("lease", "L4", TASKS)),
    "a death is seen while the engine goes to sleep": told(
        at("state", "S1", "py/types/mn_segment_type.c"), at("state", "S2", CREW)),
    "a notification that carries its release": Program(
        ((Access("publish", "store", "it", "release"), at("event", "B5", EVENT, 0)),
         (at("event", "B6", EVENT), Access("look", "load", "it", "acquire"))),
        ({"B5": 0, "look": 0},), ("B5",),
    ),
    "what a task is of": Program(
        ((plain("block", "store", "block"), at("word", "T1", TASKS),
          plain("entry", "store", "entry"), at("tail", "P1", TASKS)),
         (at("tail", "P2", TASKS), plain("its entry", "load", "entry"),
          at("word", "T2", TASKS, 2), plain("its block", "load", "block"))),
        ({"P2": 1, "its entry": 0}, {"P2": 1, "T2": 0}, {"T2": 1, "its block": 0}),
        (),
    ),
    "what a worker claims": Program(
        ((at("entry", "A1", TASKS), at("word", "T2", TASKS)),
         (LOOK, at("entry", "A2", TASKS))),
        ({"T4": 1, "A2": 0},), ("T2",),
    ),
    "what a worker has made": Program(
        ((plain("rows", "store", "rows"), DONE), (LOOK, plain("its rows", "load", "rows"))),
        ({"T4": 1, "its rows": 0},), (),
    ),
    "what a worker asks for": Program(
        ((plain("bytes", "store", "bytes"), at("lease", "L1", TASKS)),
         (at("lease", "L2", TASKS), plain("its bytes", "load", "bytes"))),
        ({"L2": 1, "its bytes": 0},), (),
    ),
    "what a worker is given": Program(
        ((plain("range", "store", "range"), at("lease", "L3", TASKS)),
         (at("lease", "L4", TASKS), plain("its range", "load", "range"))),
        ({"L4": 1, "its range": 0},), (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_execution_goes_wrong(name: str) -> None:
    assert not PROGRAMS[name].fails()


@pytest.mark.parametrize("name", [name for name in PROGRAMS if PROGRAMS[name].needs])
def test_each_order_is_needed(name: str) -> None:
    """Otherwise the model would allow too little to find a fault."""
    for access in PROGRAMS[name].needs:
        assert all(weaker.fails() for weaker in PROGRAMS[name].weaker(access)), access


def test_memory_model_knows_litmus_tests() -> None:
    """Store buffering, message passing and load buffering, as described in the literature."""

    def read(order_of_stores: str, order_of_loads: str, shape: str) -> bool:
        def both(name: str, x: str, y: str) -> tuple[Access, ...]:
            store = Access(f"w{name}", "store", x, order_of_stores)
            load = Access(f"r{name}", "load", y, order_of_loads)
            return (load, store) if shape == "LB" else (store, load)

        seen = {"SB": {"ra": 0, "rb": 0}, "MP": {"ra": 1, "rb": 0}, "LB": {"ra": 1, "rb": 1}}
        threads = both("a", "x", "y"), both("b", "y", "x")
        if shape == "MP":
            threads = (
                (plain("wx", "store", "x"), Access("wy", "store", "y", order_of_stores)),
                (Access("ra", "load", "y", order_of_loads), plain("rb", "load", "x")),
            )
        return Program(threads, (seen[shape],), ()).fails()

    assert read("release", "acquire", "SB") and not read("seqcst", "seqcst", "SB")
    assert read("relaxed", "acquire", "MP") and not read("release", "acquire", "MP")
    assert read("relaxed", "relaxed", "LB") and not read("release", "acquire", "LB")
