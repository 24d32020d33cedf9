"""``minato ranks FILES``: which rank, and which of its samples, held up the others.

Reads one file a rank, as ``MINATO_TRACE`` writes them. In a step all ranks wait for the last one.
What that step would gain if only this rank were faster is its wait minus the second longest. The
files are compared batch by batch; each rank's times are compared with each other only, so the
clocks of machines need not agree.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections import Counter, deque
from typing import Any, NamedTuple

#: steps that are listed
WORST = 10
_RANK = re.compile(r"^loader (\d+) of process \d+ \(rank (\d+)\)$")
#: kinds of spans in which a worker makes a sample, or a batch whose samples were not timed
_WORK = ("sample", "whole")
#: a sample of the batch itself is named if its part of a wait is at least this share of the longest
OWN = 0.75

#: loader of the process, epoch, batch, and how often the same had come before
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


class Rank(NamedTuple):
    """What one rank's trace says."""

    number: int
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
    number, loaders, seen = None, {}, Counter[Any]()
    received: deque[tuple[int, int, int]] = deque()  # batches whose wait comes later
    waits: dict[Key, Span] = {}
    work: list[Span] = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                event = json.loads(line.strip().rstrip(","))
                args = event.get("args", {})
                if event["name"] == "process_name" and (found := _RANK.match(args["name"])):
                    loaders[event["pid"]], number = int(found[1]), int(found[2])
                elif event.get("cat") in _WORK:
                    index = args.get("index", args.get("indices"))
                    of = loaders.get(event["pid"], 0), args.get("epoch"), args.get("batch")
                    work.append(Span(event["ts"], event["dur"], index, of))
                elif event.get("cat") == "batch" and event["ph"] == "b":
                    received.append((loaders.get(event["pid"], 0), args["epoch"], args["batch"]))
                elif event.get("cat") == "wait" and received:
                    of = received.popleft()  # copied to a device, it is handed over later
                    waits[(*of, seen[of])] = Span(event["ts"], event["dur"])
                    seen[of] += 1
    if number is None:
        raise ValueError(
            "it is not a trace of a rank. Set MINATO_TRACE=trace-%p.json on all ranks of a program "
            "that a launcher such as torchrun starts"
        )
    return Rank(number, waits, work)


class Step(NamedTuple):
    """A batch for which one rank held up the others."""

    held: float  # seconds
    rank: Rank
    batch: Key


def steps_of(ranks: list[Rank]) -> list[Step]:
    """The batches that all ranks have, and for each the rank that waited longest."""
    found = []
    for batch in ranks[0].waits.keys() & set.intersection(*({*rank.waits} for rank in ranks)):
        second, last = sorted(ranks, key=lambda rank: rank.waits[batch].length)[-2:]
        held = (last.waits[batch].length - second.waits[batch].length) * 1e-6
        found.append(Step(held, last, batch))
    return sorted(found, key=lambda step: (-step.held, step.batch))


def page(ranks: list[Rank], missing: list[str]) -> list[str]:
    """The lines to print. missing: what could not be read, and why."""
    steps = steps_of(ranks)
    every = {batch for rank in ranks for batch in rank.waits}
    most = sum(max(rank.waits[step.batch].length for rank in ranks) for step in steps) * 1e-6
    lines = [f"{len(ranks)} ranks, {len(steps)} batches that all of them have"]
    if left := len(every) - len(steps):
        lines.append(f"  {left} batches are left out: not every rank has them")
    lines += [f"  missing: {text}" for text in missing]
    lines += ["", "held up the others: what a step would gain if this rank alone were faster"]
    held = Counter({rank.number: 0.0 for rank in ranks})
    for step in steps:
        held[step.rank.number] += step.held  # type: ignore[assignment]
    lines += [f"  rank {number:<4} {seconds:8.3f} s" for number, seconds in held.most_common()]
    lines += [
        f"  if no rank waited: {most:.3f} s",
        "These are upper bounds, unless the program waits for the device in each step.",
        "",
        "worst steps",
    ]
    for step in steps[:WORST]:
        if step.held <= 0:
            break
        _loader, epoch, batch, _again = step.batch
        sample = step.rank.blamed(step.batch)
        what = ""
        if sample is not None:
            what = f", sample {sample.index} ({sample.length * 1e-6:.3f} s)"
        number = step.rank.number
        lines.append(f"  {step.held:8.3f} s  rank {number}, epoch {epoch}, batch {batch}{what}")
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
