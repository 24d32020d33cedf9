"""Run each loader in turn on the same work; print a table and draw plots.

    python -m unet3d.bench.compare --preset quick --data data/npy --out runs/compare
    python -m unet3d.bench.compare --data data/npy --out runs/quality -- --target-dice 0.3
    python -m unet3d.bench.compare --data data/npy --out runs/scaling --processes 1 2 4
    python -m unet3d.bench.compare --workload detection --data COCO --out runs/coco -- \\
        --samples 4800 --step-ms 100
    python -m unet3d.bench.compare --workload speech --data data/speech --out runs/speech -- \\
        --light 0.5 --heavy 3 --time-scale 0.02 --step-ms 40 --workers 4

Every run is a separate process (`unet3d.train`, or `unet3d.bench.workloads.run` for the detection
and speech workloads) with the same arguments except ``--loader``. Repeats are interleaved
(all loaders once, then all again, each time starting with another), so that a drift of the
machine does not favour one. All loaders must deliver the same samples with the same bytes, each
once, or the comparison fails: bytes are compared in a run before the timed ones, sample numbers
in every run. A warm cache is checked before and after the warm runs. Arguments after ``--`` are
passed to the runs unchanged, those that start with ``--dali-`` to DALI's loaders only.

Prints a short table. Written to --out: compare.txt (all columns), compare.csv, compare.json
(every epoch of every run), compare.png, and a folder for each run, which holds usage.csv: CPU,
memory and GPU use over time. With ``-- --target-dice DICE`` every run trains until an evaluation
reaches that mean Dice, and a first table has the time that this took. With --processes N each run
is N processes by torchrun, and the figures are sums over them; several numbers make a table of the
scaling. --slow-share 0 0.05 0.2 0.5 1 does the same over the share of slow samples.
"""
from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unet3d import data, loaders, records, settings
from unet3d.bench import machine, pagecache, plot, quality, slow, tables
from unet3d.bench.tables import WAITS, work_of
from unet3d.bench.usage import Others, busy_remark, process_tree
from unet3d.bench.workloads import base, run
from unet3d.nifti import DataError
from unet3d.parallel import available_cores
from unet3d.spec import PRESETS
from unet3d.transforms import train_transforms

MEDIANS = ("epoch_s", "samples_s", "mb_s", "startup_s", "wait_share", *WAITS, "cpu",
           "cpu_seconds", "gpu", "memory_mb")
CSV_COLUMNS = ("cache", "loader", "runs", "epochs", "samples", *MEDIANS, "epoch_s_min",
               "epoch_s_max", "times_torch", "wait_share_min", "wait_share_max", "relative",
               "over_work", "processes", "heavy_share", "efficiency", "slow_share",
               "slow_batch_max", "others", "not_cold",
               "work_bound_s", "bound_s")
#: loaders of the 3D U-Net by default; DALI if it is installed
UNET3D_LOADERS = ("minato", "minato-native", "minato-native-cached", "pytorch", "pytorch-ooo",
                  "pytorch-expert", "dali", "dali-cached", "synthetic")
#: epochs in which the bytes of samples are compared
CHECKED_EPOCHS = 2
#: options of some loaders only that have a value
OF_SOME = ("--cache", "--dali-batches", "--dali-depth")


class Point(NamedTuple):
    """One point of a sweep: the processes of a run, and the share of its samples that are slow."""

    processes: int = 1
    heavy_share: float | None = None  # None: as the workload has it
    suffix: str = ""  # of the names of its folders

    @property
    def arguments(self) -> list[str]:
        """Returns what the runs of this point are told, besides the common arguments."""
        return [] if self.heavy_share is None else ["--heavy-share", f"{self.heavy_share:g}"]


class ComparisonError(RuntimeError):
    """A run failed, or the loaders did not do the same work."""


def joined(words: Sequence[str]) -> list[str]:
    """The arguments, with each option of some loaders and its value as one word: --cache=4GiB."""
    found: list[str] = []
    for word in words:
        if found and found[-1] in OF_SOME:
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def arguments_for(loader: str, common: Sequence[str]) -> list[str]:
    """The arguments of a run, of those that `joined` has made: options for DALI's loaders go to
    those only, and --cache to minato-shared."""
    return [a for a in common if (loader.startswith("dali") or not a.startswith("--dali-"))
            and (loader == "minato-shared" or not a.startswith("--cache"))]


def environment() -> dict[str, str]:
    """Our environment, extended so that programs of this repository find its packages."""
    root, path = str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{root}" if path else root}


def run_program(command: Sequence[str], timeout_s: float | None = None) -> tuple[int, str, str]:
    """Run a program to its end: exit status, output, and errors. On a timeout it is killed with all
    its descendants. Raises subprocess.TimeoutExpired."""
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True) as child:
        try:
            said, errors = child.communicate(timeout=timeout_s)
        except BaseException:
            for pid in {child.pid, *process_tree(child.pid)}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise
    return child.returncode, said, errors


def run_once(module: str, loader: str, cache: str, folder: Path, common: Sequence[str],
             processes: int = 1, prefix: Sequence[str] = (),
             timeout_s: float | None = None) -> dict[str, Any]:
    """One run with a number of processes by torchrun; returns its result, with the seconds from
    start to end of the program (`process_s`) and the share of the usable cores that `others` had
    meanwhile. `prefix` goes before its command. Raises
    ComparisonError, and subprocess.TimeoutExpired."""
    # Not by the machine's name, which may not resolve without a network. Without a folder for
    # logs, torchrun leaves one in /tmp.
    launch = [] if processes == 1 else ["torch.distributed.run", "--standalone", "--local-addr",
                                        "localhost", "--log-dir", str(folder / "torchrun"),
                                        "--nproc-per-node", str(processes), "-m"]
    command = [*prefix, sys.executable, "-m", *launch, module, "--loader", loader,
               "--page-cache", cache, "--out", str(folder), *arguments_for(loader, common)]
    watch, began = Others(), time.monotonic()
    status, said, errors = run_program(command, timeout_s)
    span, others = time.monotonic() - began, watch.share()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "output.txt").write_text(said + errors)
    for line in errors.splitlines():
        if line.startswith("warning:"):
            print(line, file=sys.stderr)
    written = folder / records.RESULT_NAME
    result = json.loads(written.read_text()) if written.exists() else {}
    if status and not result.get("diverged"):  # which has an exit status of its own
        tail = "\n".join(errors.strip().splitlines()[-5:])
        raise ComparisonError(f"{loader}: exit status {status}\n{tail}")
    result |= {"process_s": span, "others": others}
    return result


def check_same_work(results: dict[str, list[dict[str, Any]]]) -> None:
    """Raise ComparisonError unless all runs delivered the same samples and bytes.

    `results` maps a loader to its runs. Sample numbers are compared between all loaders. Bytes (of
    runs that hashed them) are compared between loaders of the same kind of samples, and not at all
    if the loaders seed samples themselves.
    """
    seen: dict[tuple[int, str], dict[str, list[str]]] = {}
    for loader, runs in results.items():
        for one in runs:
            by_sample = one["config"]["seeding"] == "sample"
            kinds = {"index_hash": "index_hash"}
            if loaders.samples_of(loader) is not None and by_sample:
                kinds[f"{loaders.samples_of(loader)} content_hash"] = "content_hash"
            for row in one["epochs"]:
                for kind, name in kinds.items():
                    if row[name] is None:
                        continue
                    values = seen.setdefault((row["epoch"], kind), {})
                    values.setdefault(row[name], []).append(loader)
    for (epoch, kind), values in seen.items():
        if len(values) > 1:
            found = "; ".join(f"{value} by {', '.join(sorted(set(names)))}"
                              for value, names in values.items())
            raise ComparisonError(f"epoch {epoch}: the {kind}es differ: {found}")


def counted_epochs(cache: str, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The epochs that count. With more than one per run, the first is left out of a warm
    comparison, because it includes imports, page faults and worker starts."""
    epochs = [row for one in runs for row in one["epochs"]]
    if cache == "warm" and all(len(one["epochs"]) > 1 for one in runs):
        epochs = [row for row in epochs if row["epoch"] > 1]
    return epochs


def bounds_of(result: dict[str, Any], profile: slow.Profile | None,
              processes: int = 1) -> dict[str, float]:
    """The bounds that a run measured, with the work of all samples if it is known: the
    workers of all processes share it."""
    row, config = result["epochs"][-1], result["config"]
    found = {name: row[name] for name in row if name.endswith("_bound_s")}
    if profile is None or "work_bound_s" not in found:
        return found
    workers, whole = config["workers"], profile.work_s(range(len(profile.costs)))
    if workers > 0:
        whole /= processes
        if "core_bound_s" in found:
            more = whole - found["work_bound_s"] * workers
            found["core_bound_s"] += processes * more / available_cores()
        found["work_bound_s"] = whole / workers
    return found


def lower_ceiling(bounds: dict[str, float], runs: Sequence[dict[str, Any]],
                  processes: int = 1) -> dict[str, float]:
    """The bounds, with the synthetic loader's best epoch if that was faster than the steps
    they were computed from: on a machine whose speed varies, those may have been slow ones."""
    best = min(row["epoch_s"] for one in runs for row in one["epochs"])
    excess = bounds.get("synthetic_bound_s", 0.0) - best
    if excess <= 0:
        return bounds
    lower = {**bounds, "synthetic_bound_s": best}
    if "core_bound_s" in bounds:
        threads = processes * runs[0]["config"]["threads"]
        lower["core_bound_s"] -= excess * threads / available_cores()
    return lower


def read_batches(folder: Path, epoch: int) -> list[list[int]]:
    """The sample numbers of each batch of an epoch, from a run's log."""
    with open(folder / records.LINES_NAME) as stream:
        rows = [json.loads(line) for line in stream]
    return [row["samples"] for row in rows if row["event"] == "step" and row["epoch"] == epoch]


def own_bounds(loader: str, bounds: dict[str, dict[str, float]]) -> dict[str, float]:
    """The bounds of a loader by name, with the largest that applies to it as `bound_s`."""
    found = dict(bounds[work_of(loader)])
    if found:
        found["bound_s"] = (found["synthetic_bound_s"] if loader == "synthetic" else
                            max(found.values()))
    return found


def is_not_cold(cache: str, epoch: dict[str, Any]) -> bool:
    """Whether an epoch that should read storage may have found its data in the page cache."""
    left = epoch.get("still_cached")
    return cache == "cold" and (left is None or left > pagecache.ALMOST)


def torch_ratios(cache: str, torch_runs: Sequence[dict[str, Any]],
                 runs: Sequence[dict[str, Any]]) -> list[float]:
    """For each repeat: how many times shorter the median epoch was than with torch's loader."""
    def epoch_s(one: dict[str, Any]) -> float:
        return statistics.median(row["epoch_s"] for row in counted_epochs(cache, [one]))

    return [epoch_s(theirs) / epoch_s(own) for theirs, own in zip(torch_runs, runs)]


def others_in(epochs: Sequence[dict[str, Any]]) -> float | None:
    """The share of the usable cores that other programs had in these epochs; None if unknown."""
    known = [row for row in epochs if row.get("others") is not None]
    seconds = sum(row["epoch_s"] for row in known)
    return sum(row["others"] * row["epoch_s"] for row in known) / seconds if seconds else None


def summarise(cache: str, results: dict[str, list[dict[str, Any]]],
              bounds: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """One row per loader: medians over all counted epochs of all its runs, and their spread.

    `bounds` are by `work_of` the loader. `relative` is epoch time divided by synthetic's,
    `over_work` divided by the work bound. `ratios` has for each repeat how many times shorter
    the epoch was than with torch's loader, `times_torch` is their median.
    """
    rows = []
    for loader, runs in results.items():
        epochs = counted_epochs(cache, runs)
        row: dict[str, Any] = {"cache": cache, "loader": loader, "runs": len(runs),
                               "epochs": len(epochs), "samples": epochs[0].get("samples")}
        for name in MEDIANS:
            values = [epoch[name] for epoch in epochs if epoch[name] is not None]
            row[name] = statistics.median(values) if values else None
        for name in ("epoch_s", "wait_share", "samples_s"):
            values = [epoch[name] for epoch in epochs]
            row |= {f"{name}_min": min(values), f"{name}_max": max(values)}
        row["not_cold"] = any(is_not_cold(cache, epoch) for epoch in epochs)
        row["others"] = others_in(epochs)
        row |= {"bound_s": None} | own_bounds(loader, bounds)
        work = row.get("work_bound_s")
        row["over_work"] = row["epoch_s"] / work if work else None
        rows.append(row)
    ceiling = next((r["epoch_s"] for r in rows if r["loader"] == "synthetic"), None)
    for row in rows:
        row["ratios"] = torch_ratios(cache, results.get("pytorch", []), results[row["loader"]])
        row["times_torch"] = statistics.median(row["ratios"]) if row["ratios"] else None
        row["relative"] = row["epoch_s"] / ceiling if ceiling else None
    return rows


def add_efficiency(rows: Sequence[dict[str, Any]]) -> None:
    """What is left of perfect scaling from the loader's row with the fewest processes: 1 if N times
    the processes deliver N times the samples a second."""
    for row in rows:
        first = min((other for other in rows if (other["cache"], other["loader"]) == (
            row["cache"], row["loader"])), key=lambda other: other["processes"])
        row["efficiency"] = (row["samples_s"] / row["processes"]
                             / (first["samples_s"] / first["processes"]))


def add_slow_shares(rows: Sequence[dict[str, Any]], out: Path, repeats: int,
                    profile: slow.Profile) -> None:
    """How the slow samples are spread over the batches of the profiled epoch, over all runs."""
    for row in rows:
        row["slow_shares"] = None
        if row["loader"] == "synthetic" or work_of(row["loader"]) != "reference":
            continue  # other draws or other work, so other slow samples
        found = [profile.shares(read_batches(out / f"{row['folder'][:-1]}{n + 1}",
                                             profile.epoch)) for n in range(repeats)]
        row["slow_shares"] = found[0]
        row["slow_share"] = len(profile.slow) / len(profile.costs)
        row["slow_batch_max"] = statistics.median(max(shares) for shares in found)


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """The rows as CSV."""
    with open(path, "w", newline="") as stream:
        writer = csv.DictWriter(stream, CSV_COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


# -- the compared work -----------------------------------------------------------------


def _settings(common: Sequence[str]) -> settings.Settings:
    """The settings of a run of the 3D U-Net by torch's loader."""
    return settings.parse("", ["--loader", "pytorch", "--out", "unused",
                               *arguments_for("pytorch", common)])


def _open_unet3d(common: Sequence[str]) -> tuple[Any, list[Path], bool]:
    chosen = _settings(common)
    args, preset = chosen.args, chosen.preset
    train, _ = data.split(data.list_cases(args.data), args.split_seed, args.split)
    transform = train_transforms(preset.patch, args.brightness_around_one, args.reference_starts,
                                 preset.oversampling)
    dataset = data.VolumeDataset(train, transform, args.seed, preset.repeat)
    return dataset, [p for c in train for p in (c.image, c.label)], args.seeding == "sample"


def _open_workload(common: Sequence[str]) -> tuple[Any, list[Path], bool]:
    args = run.parse([*common, "--out", "unused"])
    dataset = base.module(args.workload).open_job(args).dataset
    return dataset, [dataset.file(index) for index in range(len(dataset))], True


def program(workload: str) -> tuple[str, tuple[str, ...], Callable]:
    """(module to run, its loaders, function of arguments that opens dataset and files)."""
    if workload == "unet3d":
        return "unet3d.train", tuple(loaders.LOADERS), _open_unet3d
    return "unet3d.bench.workloads.run", run.LOADERS, _open_workload


def warm_up(files: Sequence[Path]) -> None:
    """Read all files once, so that the first run finds what the later ones find."""
    for path in files:
        with open(path, "rb") as stream:
            while stream.read(1 << 24):
                continue


def cached(files: Sequence[Path], when: str) -> str:
    """How much of the files is in the page cache, as a sentence; warns if it is not all."""
    share = pagecache.mean_share(list(files))
    told = "an unknown share" if share is None else f"{share:.0%}"
    if share is not None and share < 1 - pagecache.ALMOST:
        print(f"warning: {told} of the data is cached {when} the warm runs: they read storage",
              file=sys.stderr)
    return f"{told} {when}"


def measure_work(args: argparse.Namespace) -> tuple[dict[Point, slow.Profile | None], list[Path]]:
    """Warm the page cache, report how cold runs are made cold, and find the slow samples of each
    point's last epoch (with a target, of the first: all runs have it), and the files. Raises
    DataError."""
    opened = program(args.workload)[2]
    _, files, same_draws = opened(args.common)
    if "cold" in args.caches:
        print("cold cache by", pagecache.evict_or_warn(files)[1], file=sys.stderr)
    warm_up(files)
    if not same_draws:
        return dict.fromkeys(args.points), files
    threads, watch = torch.get_num_threads(), Others()
    torch.set_num_threads(1)
    found: dict[Point, slow.Profile | None] = {}
    known: dict[float | None, slow.Profile] = {}
    try:
        for point in args.points:
            if point.heavy_share not in known:
                dataset = opened([*args.common, *point.arguments])[0]
                known[point.heavy_share] = slow.profile(
                    dataset, args.epochs if args.target is None else 1)
            found[point] = known[point.heavy_share]
    finally:
        torch.set_num_threads(threads)
    if remark := busy_remark(watch.share()):
        print(f"warning: work bounds are too high, samples were made on a busy machine{remark}",
              file=sys.stderr)
    return found, files


def check_bytes(workload: str, names: Sequence[str], out: Path, common: Sequence[str],
                epochs: int) -> None:
    """An untimed run of each loader, two at a time, that compares the bytes of all samples
    without training. Raises ComparisonError."""
    checking = [*quality.without_target(common), "--step-ms", "0", "--epochs",
                str(min(epochs, CHECKED_EPOCHS)), "--hash-content", "--no-bounds"]

    def check(loader: str) -> list[dict[str, Any]]:
        print(f"comparing bytes: {loader}", file=sys.stderr, flush=True)
        folder = out / f"check-{loader}"
        return [run_once(program(workload)[0], loader, "warm", folder, checking)]

    with futures.ThreadPoolExecutor(2) as pool:
        results = dict(zip(names, pool.map(check, names)))
    check_same_work(results)


def compare(args: argparse.Namespace, profiles: dict[Point, slow.Profile | None],
            files: Sequence[Path]) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """Run everything below args.out; returns the table's rows, every run's epochs by cache with
    the point's suffix and by loader, and how much of the files was cached around the warm runs.
    With a target the runs evaluate, and end when they reach it. Raises ComparisonError."""
    rows, every, found = [], {}, []
    for cache in args.caches:
        if cache == "warm":
            if "cold" in args.caches:  # cold runs have emptied the cache
                warm_up(files)
            found.append(cached(files, "before"))
        measured = {point: _measured(args, cache, point) for point in args.points}
        results = _timed(args, cache)
        for point in args.points:
            made = _rows_of(args, cache, point, results[point], measured[point], profiles[point])
            rows += made
            every[f"{cache}{point.suffix}"] = results[point]
        if cache == "warm":
            found.append(cached(files, "after"))
    add_efficiency(rows)
    return rows, every, found


def _measures(names: Sequence[str]) -> dict[str, str]:
    """The loader in whose run the bounds of each kind of work are measured. They depend on the
    machine and the work; the run is not counted, because it starts with warm libraries."""
    found = {work_of(name): name for name in reversed(names) if name != "synthetic"}
    found.setdefault("reference", "synthetic")
    return found


def _untrained(args: argparse.Namespace) -> list[str]:
    return ["--no-eval"] if args.workload == "unet3d" else []


def _measured(args: argparse.Namespace, cache: str, point: Point) -> dict[str, dict[str, Any]]:
    """A run with bounds for each kind of work."""
    arguments = [*quality.without_target(args.common), *point.arguments, *_untrained(args),
                 "--epochs", "1", "--bounds"]
    return {work: run_once(program(args.workload)[0], loader, cache,
                           args.out / f"{cache}-{loader}{point.suffix}-bounds", arguments,
                           point.processes)
            for work, loader in _measures(args.loaders).items() if loader in args.loaders}


def _timed(args: argparse.Namespace, cache: str) -> dict[Point, dict[str, list[dict[str, Any]]]]:
    """All timed runs, by point and loader: in each repeat every loader at every point."""
    names = args.loaders
    results = {point: {name: [] for name in names} for point in args.points}
    for repeat in range(args.repeats):
        turn = repeat % len(names)
        for point in args.points:
            for loader in [*names[turn:], *names[:turn]]:
                what = f"{loader}{tables.point_text(point._asdict(), len(args.points) > 1)}"
                print(f"{cache} cache, run {repeat + 1} of {args.repeats}: {what}",
                      file=sys.stderr, flush=True)
                arguments = [*args.common, *point.arguments, "--no-bounds",
                             *(_untrained(args) if args.target is None else [])]
                one = run_once(program(args.workload)[0], loader, cache,
                               args.out / f"{cache}-{loader}{point.suffix}-{repeat + 1}",
                               arguments, point.processes)
                if remark := busy_remark(others_in(counted_epochs(cache, [one]))):
                    print(f"warning: {what}, run {repeat + 1}{remark}", file=sys.stderr)
                results[point][loader].append(one)
    return results


def _rows_of(args: argparse.Namespace, cache: str, point: Point,
             results: dict[str, list[dict[str, Any]]], measured: dict[str, dict[str, Any]],
             profile: slow.Profile | None) -> list[dict[str, Any]]:
    """The rows of one point. Raises ComparisonError if its runs did different work."""
    check_same_work(results)
    bounds: dict[str, dict[str, float]] = {}
    for work in _measures(args.loaders):
        known = profile if work == "reference" else None
        bounds[work] = (bounds_of(measured[work], known, point.processes) if work in measured
                        else {})
        if "synthetic" in results and bounds[work]:
            bounds[work] = lower_ceiling(bounds[work], results["synthetic"], point.processes)
    rows = summarise(cache, results, bounds)
    for row in rows:
        row |= {"processes": point.processes, "heavy_share": point.heavy_share,
                "folder": f"{cache}-{row['loader']}{point.suffix}-1"}
    if profile is not None:
        add_slow_shares(rows, args.out, args.repeats, profile)
    return rows


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line; exits with a message if it makes no sense."""
    parser = argparse.ArgumentParser(prog="unet3d.bench.compare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=["unet3d", *base.NAMES], default="unet3d")
    parser.add_argument("--preset", choices=PRESETS, help="of unet3d (default quick)")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--loaders", help="comma-separated (default for unet3d: "
                        f"{','.join(UNET3D_LOADERS)} as far as installed; else all)")
    parser.add_argument("--page-cache", choices=["warm", "cold", "both"], default="warm")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--epochs", type=int,
                        help="per run (default 2; with --target-dice at most the preset's); of "
                        "several, a warm comparison leaves out the first")
    parser.add_argument("--processes", type=base.positive, nargs="+", default=[1], metavar="N",
                        help="of unet3d: each timed run is N processes by torchrun, as for N "
                        "GPUs; arguments such as --workers are for each. Several numbers: a "
                        "table and a picture of the scaling")
    parser.add_argument("--slow-share", type=float, nargs="+", metavar="F",
                        help="of speech with -- --heavy S: repeat the comparison with each of "
                        "these shares of slow samples, 0 to 1; a table and a picture of all")
    parser.add_argument("rest", nargs="*", help="after --: further arguments of the runs")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)} (arguments of the runs come last, "
                     "after --: `-- --target-dice 0.3 --workers 2`)")
    known = program(args.workload)[1]
    if args.loaders is not None:
        args.loaders = list(dict.fromkeys(args.loaders.split(",")))
    else:
        args.loaders = loaders.available(UNET3D_LOADERS if args.workload == "unet3d" else known)
    unknown = [name for name in args.loaders if name not in known]
    if unknown:
        parser.error(f"unknown loaders {', '.join(unknown)}; choose from {', '.join(known)}")
    args.rest = joined(args.rest)
    if "minato-shared" not in args.loaders and any(a.startswith("--cache") for a in args.rest):
        parser.error("--cache is the size of minato-shared's cache: name that loader in --loaders")
    of_dali = [a for a in args.rest if a.startswith("--dali-")]
    if of_dali and not any(name.startswith("dali") for name in args.loaders):
        parser.error(f"{' '.join(of_dali)}: no loader of DALI is compared")
    if any("--dali-cache-objects".startswith(a) for a in of_dali):
        parser.error("--dali-cache-objects is the loader dali-cached: name it in --loaders")
    if min(args.repeats, 1 if args.epochs is None else args.epochs) < 1:
        parser.error("--repeats and --epochs must be at least 1")
    if args.processes != [1] and args.workload != "unet3d":
        parser.error(f"--processes is of unet3d, not of {args.workload}")
    if args.preset and args.workload != "unet3d":
        parser.error(f"--preset is of unet3d, not of {args.workload}")
    args.common = ["--workload", args.workload, "--data", str(args.data), *args.rest]
    args.target = None
    if args.workload == "unet3d":
        args.common[:2] = ["--preset", args.preset or "quick"]
        args.target = _settings(args.common).args.target_dice
    if args.target is not None:
        if "synthetic" in args.loaders:
            print("left out: synthetic: it trains on one batch, and reaches no quality",
                  file=sys.stderr)
            args.loaders.remove("synthetic")
        if not args.loaders:
            parser.error("--target-dice needs a loader that reads data")
        args.epochs = args.epochs or _settings(args.common).preset.epochs
    args.epochs = args.epochs or 2
    args.caches = ["cold", "warm"] if args.page_cache == "both" else [args.page_cache]
    args.points = _points(parser, args)
    args.common[4:4] = ["--epochs", str(args.epochs)]
    return args


def _points(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Point]:
    """The points of the sweep that the command line asks for; exits if they make no sense."""
    if args.slow_share is None:
        counts = sorted(set(args.processes))
        return [Point(n, None, f"-p{n}" if len(counts) > 1 else "") for n in counts]
    if args.workload != "speech":
        parser.error(f"--slow-share is of speech, whose slow samples are simulated, not of "
                     f"{args.workload}")
    if not all(0 <= share <= 1 for share in args.slow_share):
        parser.error("--slow-share lies between 0 and 1: 0.2 makes every fifth sample slow")
    given = run.parse([*args.common, "--out", "unused"])
    if not given.heavy * given.time_scale:
        parser.error("--slow-share needs slow samples that take time: add `-- --light 0.5 "
                     "--heavy 3 --time-scale 0.02`")
    shares = sorted(set(args.slow_share))
    return [Point(1, share, f"-slow{share:g}" if len(shares) > 1 else "") for share in shares]


def consumer(facts: dict[str, Any]) -> str:
    """Returns what consumes the batches, as a sentence."""
    pause = plot.step_ms(facts)
    if pause is None:
        return "steps train the model"
    return (f"steps are pauses of {pause:g} ms, a stand-in for an accelerator: nothing was "
            "trained, and what the steps wait for is what loading costs")


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    args = parse(argv)
    common, target = args.common, args.target
    try:
        profiles, files = measure_work(args)
        args.out.mkdir(parents=True, exist_ok=True)
        check_bytes(args.workload, args.loaders, args.out, common, args.epochs)
        rows, every, found = compare(args, profiles, files)
    except (ComparisonError, DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    profile = profiles[args.points[0]]
    if any(other is not profile for other in profiles.values()):
        profile = None  # each share of slow samples has its own
    write_csv(args.out / plot.CSV_NAME, rows)
    facts = {"workload": args.workload, "arguments": common, "repeats": args.repeats,
             "processes": [point.processes for point in args.points], "target_dice": target,
             "machine": machine.facts() | {"load": os.getloadavg()[0]},
             "profile": profile.as_json() if profile else None, "rows": rows, "runs": every}
    (args.out / plot.JSON_NAME).write_text(json.dumps(facts, indent=1) + "\n")
    head = f"{args.workload}: {' '.join(common)}"
    notes = [f"of the data in the page cache: {', '.join(found)} the warm runs"] if found else []
    notes += tables.explained(rows) + tables.shared_cores(rows, every, machine.available_cores())
    if profile is not None:
        alone = profile.as_json()
        notes.append(
            f"samples made alone: {alone['work_s']:.2f} s for {alone['samples']}, median "
            f"{alone['median_s'] * 1e3:.1f} ms, most {alone['max_s'] * 1e3:.1f} ms; slow "
            f"(over {slow.TIMES:g} medians): {len(alone['slow'])}")
    reached = [] if target is None else [
        f"{cache} cache{tables.point_text(point._asdict(), len(args.points) > 1)}, "
        f"{quality.quality_table(target, every[f'{cache}{point.suffix}'])}\n"
        for cache in args.caches for point in args.points]
    short = tables.short_table(rows) if len(args.points) == 1 else tables.sweep_table(rows)
    (args.out / "compare.txt").write_text(
        "\n".join([head, *reached, *([short, ""] if len(args.points) > 1 else []),
                   tables.table(rows), consumer(facts), *notes]) + "\n")
    picture = plot.draw(args.out, args.out / "compare.png")
    print("\n".join(["", head, consumer(facts), "", *reached, short, ""]))
    print("bound: the longest of what the samples cost all workers, the steps, one copy and (on a"
          " CPU that also trains) all of that work over all cores")
    print("\n".join([*tables.bound_lines(rows), *notes]))
    print(f"all loaders delivered the same samples, each once; all columns: "
          f"{args.out / 'compare.txt'}; plot: {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
