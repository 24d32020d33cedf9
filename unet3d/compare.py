"""Run each loader in turn on the same work; print a table and draw plots.

    python -m unet3d.compare --preset quick --data data/npy --out runs/compare

Every run is a `train.py` process with the same arguments but for ``--loader``; repeats
are interleaved (all loaders once, then all again) so that a drift of the machine does not
favour one. All loaders must have delivered the same samples with the same bytes, or the
comparison fails. Arguments after ``--`` go to train.py as they are.
"""
from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unet3d import plot, records
from unet3d.loaders import LOADERS
from unet3d.spec import PRESETS

CSV_COLUMNS = (
    "cache", "loader", "runs", "epoch_s", "epoch_s_min", "epoch_s_max", "relative",
    "samples_s", "mb_s", "startup_s", "wait_share", "wait_mean_s", "wait_p50_s",
    "wait_p99_s", "wait_max_s", "cpu", "cpu_seconds", "gpu", "memory_mb", "bound_s",
)
MEDIANS = tuple(name for name in CSV_COLUMNS if name not in
                ("cache", "loader", "runs", "epoch_s_min", "epoch_s_max", "relative",
                 "bound_s"))


class ComparisonError(RuntimeError):
    """A run failed, or the loaders did not do the same work."""


def run_once(loader: str, cache: str, folder: Path, common: Sequence[str]) -> dict[str, Any]:
    """One train.py process; returns its result. Raises ComparisonError."""
    command = [sys.executable, "-m", "unet3d.train", "--loader", loader, "--cache", cache,
               "--out", str(folder), "--hash-content", "--no-eval", *common]
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parent.parent)
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{path}{os.pathsep}{root}" if path else root
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, check=False)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "output.txt").write_text(done.stdout + done.stderr)
    for line in done.stderr.splitlines():
        if line.startswith("warning:"):
            print(line, file=sys.stderr)
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise ComparisonError(f"{loader}: exit status {done.returncode}\n{tail}")
    return json.loads((folder / records.RESULT_NAME).read_text())


def check_same_work(results: dict[str, list[dict[str, Any]]]) -> None:
    """Raise ComparisonError unless all runs delivered the same samples and bytes.

    `results` maps a loader to its runs. The synthetic loader's bytes are its own, only
    its sample numbers are compared; so are all bytes if the loaders seed by themselves.
    """
    seen: dict[tuple[int, str], dict[str, list[str]]] = {}
    for loader, runs in results.items():
        for run in runs:
            by_sample = run["config"]["seeding"] == "sample"
            for row in run["epochs"]:
                kinds = ["index_hash"]
                if loader != "synthetic" and by_sample:
                    kinds.append("content_hash")
                for kind in kinds:
                    values = seen.setdefault((row["epoch"], kind), {})
                    values.setdefault(row[kind], []).append(loader)
    for (epoch, kind), values in seen.items():
        if len(values) > 1:
            found = "; ".join(f"{value} by {', '.join(sorted(set(names)))}"
                              for value, names in values.items())
            raise ComparisonError(f"epoch {epoch}: the {kind}es differ: {found}")


def summarise(cache: str, results: dict[str, list[dict[str, Any]]],
              costs: dict[str, float]) -> list[dict[str, Any]]:
    """One row a loader: medians over all epochs of all its runs, and their spread.

    With more than one epoch the first is left out of a warm comparison: imports, page
    faults and worker starts are its own. `relative` is epoch time over synthetic's.
    """
    rows = []
    for loader, runs in results.items():
        epochs = [row for run in runs for row in run["epochs"]]
        if cache == "warm" and all(len(run["epochs"]) > 1 for run in runs):
            epochs = [row for row in epochs if row["epoch"] > 1]
        row: dict[str, Any] = {"cache": cache, "loader": loader, "runs": len(runs)}
        for name in MEDIANS:
            values = [epoch[name] for epoch in epochs if epoch[name] is not None]
            row[name] = statistics.median(values) if values else None
        times = [epoch["epoch_s"] for epoch in epochs]
        row |= {"epoch_s_min": min(times), "epoch_s_max": max(times)}
        row |= {name: value for name, value in costs.items() if name.endswith("bound_s")}
        rows.append(row)
    ceiling = next((r["epoch_s"] for r in rows if r["loader"] == "synthetic"), None)
    for row in rows:
        row["relative"] = row["epoch_s"] / ceiling if ceiling else None
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text, one loader a line, bounds below."""
    head = ("cache", "loader", "runs", "epoch s (min-max)", "x synth", "samples/s", "MB/s",
            "start ms", "wait %", "wait ms mean/p50/p99/max", "CPU %", "mem MB")
    lines = [head]
    for row in rows:
        waits = "/".join(f"{row[f'wait_{k}_s'] * 1e3:.1f}" for k in ("mean", "p50", "p99", "max"))
        lines.append((
            row["cache"], row["loader"], str(row["runs"]),
            f"{row['epoch_s']:.2f} ({row['epoch_s_min']:.2f}-{row['epoch_s_max']:.2f})",
            f"{row['relative']:.3f}" if row["relative"] else "-",
            f"{row['samples_s']:.1f}", f"{row['mb_s']:.1f}", f"{row['startup_s'] * 1e3:.0f}",
            f"{row['wait_share'] * 100:.1f}", waits, f"{row['cpu'] * 100:.0f}",
            f"{row['memory_mb']:.0f}" if row["memory_mb"] else "-"))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip()
            for line in lines]
    for cache in dict.fromkeys(row["cache"] for row in rows):
        first = next(row for row in rows if row["cache"] == cache)
        text.append(f"bounds of an epoch, {cache} run: " + ", ".join(
            f"{name.removesuffix('_s').removesuffix('_bound')} {value:.3f} s"
            for name, value in first.items() if name.endswith("bound_s")))
    return "\n".join(text)


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """The rows as CSV."""
    with open(path, "w", newline="") as stream:
        writer = csv.DictWriter(stream, CSV_COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def warm_up(data: Path) -> None:
    """Read all volumes once, so that the first run finds what the later ones find."""
    for path in sorted(data.glob("*.npy")):
        with open(path, "rb") as stream:
            while stream.read(1 << 24):
                continue


def compare(loaders: Sequence[str], caches: Sequence[str], repeats: int, data: Path,
            out: Path, common: Sequence[str]) -> list[dict[str, Any]]:
    """Run everything below `out`; returns the table's rows. Raises ComparisonError."""
    rows = []
    for cache in caches:
        if cache == "warm":
            warm_up(data)
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in loaders}
        for repeat in range(repeats):
            for loader in loaders:
                print(f"{cache} cache, run {repeat + 1} of {repeats}: {loader}",
                      file=sys.stderr, flush=True)
                # The bounds are the machine's: measured in the first run only.
                first = repeat == 0 and loader == loaders[0]
                folder = out / f"{cache}-{loader}-{repeat + 1}"
                results[loader].append(run_once(
                    loader, cache, folder, [*common, *([] if first else ["--no-bounds"])]))
        check_same_work(results)
        rows += summarise(cache, results, results[loaders[0]][0]["epochs"][-1])
    return rows


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(prog="unet3d.compare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="quick")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--loaders", default=",".join(LOADERS),
                        help=f"comma-separated (default {','.join(LOADERS)})")
    parser.add_argument("--cache", choices=["warm", "cold", "both"], default="warm")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2,
                        help="per run; of several, a warm comparison leaves out the first")
    parser.add_argument("rest", nargs="*", help="after --: further arguments of train.py")
    args = parser.parse_args(argv)
    loaders = list(dict.fromkeys(args.loaders.split(",")))
    unknown = [name for name in loaders if name not in LOADERS]
    if unknown:
        parser.error(f"unknown loaders {', '.join(unknown)}; choose from {', '.join(LOADERS)}")
    if args.repeats < 1 or args.epochs < 1:
        parser.error("--repeats and --epochs must be at least 1")
    caches = ["cold", "warm"] if args.cache == "both" else [args.cache]
    common = ["--preset", args.preset, "--data", str(args.data), "--epochs",
              str(args.epochs), *args.rest]
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        rows = compare(loaders, caches, args.repeats, args.data, args.out, common)
    except ComparisonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write_csv(args.out / "compare.csv", rows)
    text = table(rows)
    (args.out / "compare.txt").write_text(text + "\n")
    picture = plot.draw(args.out, args.out / "compare.png")
    print(text)
    print("all loaders delivered the same samples; plot:", picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
