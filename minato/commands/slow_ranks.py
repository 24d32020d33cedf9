"""``minato ranks FILES``: which rank, and which of its samples, held up the others.

Reads one file a rank, as ``MINATO_TRACE`` writes them. In a step all ranks wait for the last one.
What that step would gain if only this rank were faster is its wait minus the second longest. The
files are compared batch by batch; each rank's times are compared with each other only, so the
clocks of machines need not agree. Ranks may iterate loaders in different orders, and some loaders on
one rank only, so a loader is found in other files by what it loads.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections import Counter, defaultdict, deque
from typing import Any, NamedTuple

#: steps that are listed
WORST = 10
_RANK = re.compile(r"^loader (\d+) of process \d+ \(rank (\d+)\)$")
#: kinds of spans in which a worker makes a sample, or a batch whose samples were not timed
_WORK = ("sample", "whole")
#: a sample of the batch itself is named if its part of a wait is at least this share of the longest
OWN = 0.75

#: number of the loader in its process, epoch, batch, and how often the same had come before
Key = tuple[int, int, int, int]


class Span(NamedTuple):
    """A time in a trace, in microseconds."""

    begin: float
    length: float
    index: Any = None  # of the sample
    batch: Any = None  # of the sample: loader, epoch and number

    def overlap(self, other: Span) -> float:
        """The part of both."""
        end = min(self.begin + self.length, other.begin + other.length)
        return max(0.0, end - max(self.begin, other.begin))


class Loader(NamedTuple):
    """A loader of one rank."""

    name: str
    batch_size: int | None = None
    sampler: str | None = None  # its class
    samples: int | None = None  # of the dataset
    number: int = 0  # in its process, in the order in which loaders are first iterated

    @property
    def kind(self) -> tuple[Any, ...]:
        """What equal loaders have in common."""
        return self[:4]


class Rank(NamedTuple):
    """What one rank's trace says."""

    number: int
    loaders: dict[int, Loader]
    waits: dict[Key, Span]
    work: list[Span]

    def blamed(self, batch: Key) -> Span | None:
        """The sample that was in the making for most of the wait for a batch. One of another batch can
        have kept the worker. A slow sample of the batch itself is the likelier cause, also if
        another was in the making for slightly longer."""
        overlap = self.waits[batch].overlap
        best = max(self.work, key=overlap, default=None)
        if best is None or overlap(best) <= 0:
            return None
        own = max((s for s in self.work if s.batch == batch[:3]), key=overlap, default=best)
        return own if overlap(own) >= OWN * overlap(best) else best


def read(path: str) -> Rank:
    """A rank's trace, also one that was cut short.

    Raises:
        OSError: if there is no such file.
        ValueError: if it is not a trace of a rank.
    """
    number, seen = None, Counter[Any]()
    loaders: dict[int, Loader] = {}
    groups: dict[int, int] = {}  # the number of its loader
    # batches whose wait comes later, by group
    received: defaultdict[int, deque[tuple[int, int, int]]] = defaultdict(deque)
    waits: dict[Key, Span] = {}
    work: list[Span] = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                event = json.loads(line.strip().rstrip(","))
                args = event.get("args", {})
                if event["name"] == "process_name" and (found := _RANK.match(args["name"])):
                    number, group = int(found[2]), int(found[1])
                    # without it the file is of an earlier version
                    known = args.get("loader", {"name": f"loader {group}", "number": group})
                    groups[event["pid"]] = known["number"]
                    loaders.setdefault(known["number"], Loader(*map(known.get, Loader._fields)))
                elif event.get("cat") in _WORK:
                    index = args.get("index", args.get("indices"))
                    of = groups[event["pid"]], args.get("epoch"), args.get("batch")
                    work.append(Span(event["ts"], event["dur"], index, of))
                elif event.get("cat") == "batch" and event["ph"] == "b":
                    of = groups[event["pid"]], args["epoch"], args["batch"]
                    received[event["pid"]].append(of)
                elif event.get("cat") == "wait" and received[event["pid"]]:
                    of = received[event["pid"]].popleft()  # copied to a device, it is handed over later
                    waits[(*of, seen[of])] = Span(event["ts"], event["dur"])
                    seen[of] += 1
    if number is None:
        raise ValueError(
            "it is not a trace of a rank. Set MINATO_TRACE=trace-%p.json on all ranks of a program "
            "that a launcher such as torchrun starts"
        )
    return Rank(number, loaders, waits, work)


#: the same loader on each rank
Same = tuple[Loader, ...]


def same_loaders(ranks: list[Rank]) -> list[Same]:
    """Loaders that all ranks have: with the same name, batch size, class of sampler and number of
    samples. Equal ones are matched in the order of their numbers. Of the others, the datasets may
    differ in length, as each rank's part of one does."""
    found: list[Same] = []
    for traits in (4, 3):
        kinds: list[dict[Any, list[Loader]]] = []
        for place, rank in enumerate(ranks):
            taken = {same[place] for same in found}
            by_kind: dict[Any, list[Loader]] = defaultdict(list)
            for loader in sorted({*rank.loaders.values()} - taken, key=_order):
                by_kind[loader.kind[:traits]].append(loader)
            kinds.append(by_kind)
        for kind in kinds[0]:
            equal = [by_kind.get(kind, []) for by_kind in kinds]
            if traits == 4:
                found += zip(*equal)
            elif len({*map(len, equal)}) == 1:
                found += filter(_near, zip(*equal))
    return found


def _order(loader: Loader) -> tuple[int, int]:
    return loader.samples or 0, loader.number


def _near(same: Same) -> bool:
    """Whether the datasets can be parts of one: the longest is at most twice the shortest."""
    sizes = [loader.samples or 0 for loader in same]
    return 0 < max(sizes) <= 2 * min(sizes)


class Step(NamedTuple):
    """A batch for which one rank held up the others."""

    held: float  # seconds
    longest: float  # wait, in seconds
    rank: Rank
    batch: Key  # in that rank's trace


def steps_of(ranks: list[Rank], same: Same) -> tuple[list[Step], int]:
    """The batches of a loader that all ranks have, and for each the rank that waited longest. Also
    how many others there are."""
    waits = [
        {key[1:]: (wait.length * 1e-6, rank, key) for key, wait in rank.waits.items()
         if key[0] == loader.number}
        for rank, loader in zip(ranks, same)
    ]  # fmt: skip
    common = set.intersection(*({*of} for of in waits))
    found = []
    for batch in common:
        second, last = sorted((of[batch] for of in waits), key=lambda one: one[0])[-2:]
        found.append(Step(last[0] - second[0], *last))
    return found, len({batch for of in waits for batch in of} - common)


def describe(loader: Loader) -> str:
    """A loader's name, and what may tell it apart from others of that name."""
    known = {"batch_size={}": loader.batch_size, "{}": loader.sampler, "{} samples": loader.samples}
    parts = ", ".join(text.format(value) for text, value in known.items() if value is not None)
    return f"{loader.name} ({parts})" if parts else loader.name


def left_out(ranks: list[Rank], found: list[Same]) -> list[str]:
    """The loaders that not every rank has."""
    batches: defaultdict[str, Counter[int]] = defaultdict(Counter)  # of each rank
    for place, rank in enumerate(ranks):
        count = Counter(key[0] for key in rank.waits)
        for loader in {*rank.loaders.values()} - {same[place] for same in found}:
            if count[loader.number]:
                batches[describe(loader)][rank.number] += count[loader.number]
    return [
        f"{name}, {sum(of.values())} batches of rank {' and '.join(map(str, sorted(of)))}"
        for name, of in sorted(batches.items())
    ]


def page(ranks: list[Rank], missing: list[str]) -> list[str]:
    """The lines to print. missing: what could not be read, and why."""
    found, several = same_loaders(ranks), any(len(rank.loaders) > 1 for rank in ranks)
    each = [steps_of(ranks, same) for same in found]
    steps = sorted((s for some, _ in each for s in some), key=lambda s: (-s.held, s.batch))
    lines = [f"{len(ranks)} ranks, {len(steps)} batches that all of them have"]
    if left := sum(others for _, others in each):
        lines.append(f"  {left} batches are left out: not every rank has them")
    if loaders := left_out(ranks, found):
        lines.append(f"  left out, as not every rank has the loader: {'; '.join(loaders)}")
    lines += [f"  missing: {text}" for text in missing]
    lines += ["", "held up the others: what a step would gain if this rank alone were faster"]
    held = Counter({rank.number: 0.0 for rank in ranks})
    for step in steps:
        held[step.rank.number] += step.held  # type: ignore[assignment]
    lines += [f"  rank {number:<4} {seconds:8.3f} s" for number, seconds in held.most_common()]
    lines += [
        f"  if no rank waited: {sum(step.longest for step in steps):.3f} s",
        "These are upper bounds, unless the program waits for the device in each step.",
        "",
        "worst steps",
    ]
    for step in steps[:WORST]:
        if step.held <= 0:
            break
        loader, epoch, batch, _again = step.batch
        sample = step.rank.blamed(step.batch)
        what = ""
        if sample is not None:
            what = f", sample {sample.index} ({sample.length * 1e-6:.3f} s)"
        rank = f"rank {step.rank.number}"
        if several:
            rank += f", {describe(step.rank.loaders[loader])}, loader {loader} of its trace"
        lines.append(f"  {step.held:8.3f} s  {rank}, epoch {epoch}, batch {batch}{what}")
    return lines


def run(argv: list[str]) -> int:
    """``minato ranks FILES``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="minato ranks",
        description="Finds which rank, and which sample, holds up a step, from one MINATO_TRACE file "
        "a rank.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="the trace of a rank")
    found: dict[int, Rank] = {}
    missing = []
    for path in parser.parse_args(argv).files:
        try:
            rank = read(path)
        except (OSError, ValueError) as error:
            missing.append(f"{path}: {getattr(error, 'strerror', None) or error}")
            continue
        if rank.number in found:
            missing.append(f"{path}: another file is of rank {rank.number}, too")
        found.setdefault(rank.number, rank)
    missing += [f"rank {n}" for n in range(max(found, default=0)) if n not in found]
    if len(found) < 2:
        print("minato ranks: the traces of at least two ranks are needed", *missing, sep="\n  ",
              file=sys.stderr)  # fmt: skip
        return 1
    print("\n".join(page([found[number] for number in sorted(found)], missing)))
    return 0
