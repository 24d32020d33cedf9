"""The command line of the experiment: runs the missing rows."""
from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from unet3d import loaders
from unet3d.bench import compare, gpu, machine, pagecache
from unet3d.bench.gpu import cgroup, data, plan, report, store
from unet3d.nifti import DataError
from unet3d.parallel import available_cores
from unet3d.ranks import add_device

CUT = 3  # exit status: there is more to do
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
BENCHMARK = machine.ROOT / "benchmarks" / "loader.py"


class LeftOut(RuntimeError):
    """A row that cannot run on this machine; the message says why."""


class NoTime(RuntimeError):
    """The call's time ran out during a row, which must be run again."""


@contextlib.contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Processes started inside get this many of the available cores, the first ones."""
    if not hasattr(os, "sched_setaffinity"):
        raise LeftOut("cores cannot be set apart on this system")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def benchmark_facts(found: dict[str, Any]) -> dict[str, Any]:
    """From the JSON of benchmarks/loader.py: microseconds per sample by case and loader."""
    return {case: {name: sorted(run["loaders"][name]["sample"] * 1e6 for run in runs)
                   for name in runs[0]["loaders"]} for case, runs in found["runs"].items()}


class Experiment:
    """Runs rows into a store."""

    def __init__(self, args: argparse.Namespace, size: plan.Size, kept: store.Store,
                 deadline: float) -> None:
        self.args, self.size, self.store, self.deadline = args, size, kept, deadline
        self.work = work_of(args)
        self.began = 0.0  # start of the current row, after its data was made

    # -- the parts of a row ----------------------------------------------------------

    def volumes(self) -> Path:
        return self.args.data or data.volumes(self.work, self.size)

    def scratch(self) -> tempfile.TemporaryDirectory[str]:
        self.work.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="run-", dir=self.work)

    def timeout(self) -> float:
        return max(1.0, min(self.size.limit_s, self.deadline - time.monotonic()))

    def train_arguments(self, row: plan.Row, folder: Path) -> list[str]:
        """The arguments common to all rows of the 3D U-Net."""
        device = self.args.device
        if row.group == "two" and device == "cuda":
            device = "cuda:0"  # both processes on this one
        workers = max(1, row.cores // 2) if row.group == "two" else row.cores
        return ["--data", str(folder), *self.size.train, "--amp", row.amp, "--batch-size",
                str(row.batch), "--workers", str(workers), "--device", device,
                "--channels-last", "--cudnn-benchmark", "--no-eval", "--no-bounds",
                "--no-checkpoint", "--timeout", str(self.size.limit_s),
                *row.contender.arguments]

    def python_ms(self, row: plan.Row) -> float:
        """Seconds of a step of the synthetic loader, so that loading is half of the time."""
        known = [one["facts"]["python_ms"] for one in store.chosen(
            self.store.rows, group="python", amp=row.amp, batch=row.batch)]
        if known:
            return known[0]
        found = [self.store.median("sweep", plan.SYNTHETIC.label, row.cores, row.amp,
                                   row.batch, name) for name in ("epoch_s", "steps")]
        if None in found:
            raise LeftOut("how long a step takes is not known: the synthetic loader has no row")
        return found[0] / found[1] * 1e3

    def run_training(self, row: plan.Row) -> dict[str, Any]:
        """A row of unet3d.train; fields for the store."""
        if reason := loaders.unavailable(row.contender.loader):
            raise LeftOut(reason)
        facts: dict[str, Any] = {}
        more = ["--epochs", str(self.size.epochs), "--repeat", str(self.size.repeat)]
        folder, processes = self.volumes(), 1
        with contextlib.ExitStack() as stack:
            prefix: Sequence[str] = ()
            if row.group == "check":
                more = ["--epochs", "1", "--repeat", "1", "--step-ms", "0", "--hash-content"]
            elif row.group == "python":
                facts["python_ms"] = self.python_ms(row)
                more += ["--python-ms", str(facts["python_ms"])]
            elif row.group == "two":
                processes = 2
            elif row.group == "memory":
                limit = int(self.size.memory_gib * 2 ** 30)
                prefix = stack.enter_context(cgroup.limited(limit))
                if data.nbytes(folder) < 1.2 * limit:
                    folder = data.copies(folder, self.work, self.size.copies)
                more = ["--epochs", str(self.size.epochs), "--repeat", "1"]
                pagecache.evict_or_warn(data.files(folder))
                facts["data_gib"] = data.nbytes(folder) / 2 ** 30
            if row.contender.environment:
                prefix = (*prefix, "env", *row.contender.environment)
            cached = pagecache.mean_share(data.files(folder))
            if row.group != "memory" and (cached or 0.0) < 1 - pagecache.ALMOST:
                compare.warm_up(data.files(folder))
                cached = pagecache.mean_share(data.files(folder))
            self.began = time.monotonic()
            stack.enter_context(on_cores(row.cores))
            with self.scratch() as scratch:
                result = compare.run_once(
                    "unet3d.train", row.contender.loader, "warm", Path(scratch),
                    [*self.train_arguments(row, folder), *more], processes, prefix,
                    self.timeout())
        return {"result": result, "cached": cached, "facts": facts}

    def run_workload(self, row: plan.Row) -> dict[str, Any]:
        """A row of another workload; fields for the store."""
        name = plan.workload(row.group)
        assert name is not None
        if reason := loaders.unavailable(row.contender.loader):
            raise LeftOut(reason)
        try:
            folder = data.samples(name, self.work, self.size)
        except DataError as error:
            raise LeftOut(str(error)) from error
        self.began = time.monotonic()
        steps = list(getattr(self.size, name))
        if row.group in plan.STEPS:
            light, heavy = plan.STEPS[row.group]
            steps += ["--light", light, "--heavy", heavy]
        arguments = ["--workload", name, "--data", str(folder), "--epochs", "2", "--workers",
                     str(self.size.workers), "--device", self.args.device, "--no-bounds",
                     "--timeout", str(self.size.limit_s), *steps]
        with on_cores(row.cores), self.scratch() as scratch:
            return {"result": compare.run_once(
                "unet3d.bench.workloads.run", row.contender.loader, "warm", Path(scratch),
                arguments, timeout_s=self.timeout())}

    def run_benchmark(self, row: plan.Row) -> dict[str, Any]:
        """benchmarks/loader.py with as many workers as the row has cores."""
        if not BENCHMARK.exists():
            raise LeftOut(f"{BENCHMARK} is not here: this needs the source tree")
        with self.scratch() as scratch:
            target = Path(scratch) / "loader.json"
            status, _, errors = compare.run_program(
                [sys.executable, str(BENCHMARK), *self.size.benchmark, "--workers",
                 str(row.cores), "--json", str(target)], self.timeout())
            if status:
                raise compare.ComparisonError(f"exit status {status}\n{errors[-500:]}")
            return {"facts": benchmark_facts(json.loads(target.read_text()))}

    # -- all rows --------------------------------------------------------------------

    def run(self, row: plan.Row) -> None:
        """Run a row and store its result. Raises NoTime."""
        self.began = time.monotonic()
        runner = (self.run_benchmark if row.group == "benchmark" else
                  self.run_workload if plan.workload(row.group) else self.run_training)
        status, why, found = store.FAILED, "", {}
        try:
            found = runner(row)
            status = store.DONE
        except (LeftOut, cgroup.Unavailable) as error:
            status, why = store.SKIPPED, str(error)
        except subprocess.TimeoutExpired as error:
            if time.monotonic() >= self.deadline:
                raise NoTime from error
            why = f"no end after {error.timeout:.0f} s"
        except Exception as error:  # whatever fails, the other rows are run
            where = traceback.extract_tb(error.__traceback__)[-1]
            why = (f"{Path(where.filename).name}, line {where.lineno}: "
                   f"{type(error).__name__}: {error}")
        self.store.add(row, status, why or None, time.monotonic() - self.began, **found)
        if why:
            print(f"  {status}: {why.splitlines()[-1]}", file=sys.stderr, flush=True)

    def run_all(self, rows: Sequence[plan.Row]) -> list[plan.Row]:
        """Run the missing rows, and none that is expected to end after the deadline. Returns the
        rows left."""
        left = [row for row in rows if not self.store.has(row)]
        while left:
            row = left[0]
            if time.monotonic() + self.store.estimate(row, self.size.row_s) > self.deadline:
                break
            print(f"{len(rows) - len(left) + 1} of {len(rows)}: {row.key}", file=sys.stderr,
                  flush=True)
            try:
                self.run(row)
            except NoTime:
                break
            del left[0]
        return left


def duration(text: str) -> float:
    """Seconds, from 90, 90s, 40m or 1.5h."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r}: a duration such as 90s, 40m or 1.5h")
    return float(match[1]) * UNITS[match[2]]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line; exits with a message if it makes no sense."""
    parser = argparse.ArgumentParser(prog="unet3d.bench.gpu", description=gpu.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/gpu"),
        help="folder of the results: gpu.json, gpu.png, gpu-dark.png (default runs/gpu)")
    add("--work", type=Path, help="folder of the data made and of runs under way (default "
        "OUT/data)")
    add("--budget", type=duration, default=duration("40m"), metavar="TIME",
        help="of all calls together (default 40m)")
    add("--for", type=duration, dest="call", metavar="TIME", help="this call ends before")
    add("--preset", choices=plan.SIZES, default="full")
    add("--dry-run", action="store_true", help="all of it without a GPU, tiny, below OUT/dry-run: "
        "whether each row runs to its end, in minutes; exit status 1 if one does not")
    add("--data", type=Path, help="preprocessed volumes, instead of phantoms made here")
    add("--only", nargs="+", metavar="PATTERN", help="rows whose names match, such as "
        "'sweep: minato*, 4 cores*'; --list shows them")
    add("--retry", action="store_true", help="run rows again that have failed or were left out")
    add("--list", action="store_true", help="print the names of all rows, in order")
    add("--commit", help="what is measured, where git does not say")
    add("--report", type=Path, metavar="FILE", help="print the tables of a JSON file, draw FILE"
        ".png beside it, and do nothing else")
    add_device(parser)
    parser.set_defaults(device=None)
    args = parser.parse_args(argv)
    if args.dry_run:
        args.device, args.preset, args.out = args.device or "cpu", "tiny", args.out / "dry-run"
    return args


def no_gpu() -> str | None:
    """Why there is no GPU to measure; None: there is one."""
    if torch.cuda.is_available():
        return None
    from minato.device.provider import CUDA

    driver = ""
    try:
        ctypes.CDLL(CUDA)
    except OSError:
        driver = f": there is no {CUDA}, the driver's library"
    reason = ("is built without CUDA" if torch.version.cuda is None else
              f"(CUDA {torch.version.cuda}) finds none{driver}")
    return (f"no GPU: torch {torch.__version__} {reason}. --dry-run tries all rows without one, "
            "--device cpu measures the CPU")


def work_of(args: argparse.Namespace) -> Path:
    """The folder of temporary files."""
    return args.work or args.out / "data"


def check(args: argparse.Namespace) -> None:
    """Checks that the data to measure is there. Raises DataError."""
    args.device = args.device or "cuda"
    if args.device == "cuda" and (reason := no_gpu()):
        raise DataError(reason)
    if reason := loaders.unavailable("minato"):
        raise DataError(reason)
    if args.data:
        data.files(args.data)  # checks that they exist


def probe(device: str) -> dict[str, Any]:
    """The machine, as a separate process sees it. Raises ComparisonError."""
    status, said, errors = compare.run_program(
        [sys.executable, "-m", "unet3d.bench.gpu.probe", "--device", device])
    if status:
        raise compare.ComparisonError(f"{device}: cannot be measured\n{errors[-500:]}")
    return json.loads(said.splitlines()[-1])


def experiment(args: argparse.Namespace, rows: Sequence[plan.Row], size: plan.Size) -> int:
    """Everything that there is time for; returns the exit status. Raises DataError, OSError and
    ComparisonError."""
    began = time.monotonic()
    check(args)
    args.out.mkdir(parents=True, exist_ok=True)
    found = probe(args.device)
    found["machine"]["commit"] = args.commit or found["machine"]["commit"]
    settings = {"preset": args.preset, "device": args.device, "data": str(args.data or ""),
                **json.loads(json.dumps(dataclasses.asdict(size)))}
    kept = store.Store(args.out / store.NAME, settings, found["machine"],
                       len(plan.rows(size, available_cores())))
    kept.began = began
    for leftover in work_of(args).glob("run-*"):  # of a killed call
        shutil.rmtree(leftover)
    for unfinished in args.out.glob(".tmp-*"):
        unfinished.unlink()
    if args.retry:
        kept.document["rows"] = store.chosen(kept.rows)
    kept.begin(found["measured"], found["missing"])
    for line in found["missing"]:
        print(line, file=sys.stderr, flush=True)
    left_s = args.budget - kept.spent()
    deadline = min(time.monotonic() + left_s, began + (args.call or args.budget))
    left = Experiment(args, size, kept, deadline).run_all(rows)
    kept.spent()
    kept.leave(left)
    tell(kept.document, kept.path)
    if args.dry_run:
        return int(any(row["status"] == store.FAILED for row in kept.rows))
    if left and (args.call or left_s) < left_s:
        print(f"{len(left)} rows of {len(rows)} are left: the same call goes on")
        return CUT
    if left:
        print(f"the budget is used up: {len(left)} rows of {len(rows)} are left out (above); "
              "a call with a larger --budget goes on")
    return 0


def tell(document: dict[str, Any], path: Path) -> None:
    """Print the tables of a file, and draw its plot next to it."""
    print(report.text(document))
    picture = report.draw(document, path.with_suffix(".png"))
    print(f"\nall figures: {path}; plot: "
          + str(picture or "none, for want of matplotlib or of rows of the sweep"))


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    args = parse(argv)
    size = plan.SIZES[args.preset]
    rows = plan.rows(size, available_cores())
    if args.only:
        rows = [row for row in rows if any(fnmatch.fnmatch(row.key, f"{p}*") for p in args.only)]
    try:
        if args.report:
            tell(store.read(args.report), args.report)
            return 0
        if args.list:
            print("\n".join(row.key for row in rows))
            return 0
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        return experiment(args, rows, size)
    except (compare.ComparisonError, DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped: the same call goes on", file=sys.stderr)
        return CUT
