"""Time to the first batch: a list of a million paths, eight workers, each start method. And the
time of whole epochs that are short.

    python benchmarks/startup.py [--paths 1000000] [--workers 8] [--repeats 3]
        [--methods spawn forkserver fork] [--epochs 15] [--json FILE] [--quick] [--quiet SHARE]

Each measurement is a fresh process; the loaders take turns. The timing covers iter(loader) and
one next(), with the dataset made before. Its class is defined in this program, so under spawn and
forkserver each worker imports this program. The time of that import, beyond torch and minato, is
shown separately ("own imports"). The first epoch continues for some thousand samples, which must
be the same with each loader. CPU time is that of the whole process tree up to that
moment, less that of importing and making the dataset. A further run of each is watched
from outside for its memory, and not timed.

"torch, preloaded": the forkserver has imported this program's modules before it forks, by
multiprocessing.set_forkserver_preload, as its documentation advises; that import is timed too.
The bound of spawn and forkserver is one fresh interpreter that imports them and one pickling
and unpickling of the dataset. The bound of fork is one fork. Both are measured in the same run.

A short epoch is 16 small samples under fork, in batches of four, without persistent workers: it
starts its workers and ends them. Its samples take no time, or 0.2 s in each worker. The loaders
take turns in one process, as in a program with many such epochs, with one epoch before that is not
counted. --methods without any measures nothing else.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import multiprocessing
import os
import pickle
import resource
import subprocess
import sys
import time
import warnings
import zlib
from typing import Any

import common
import torch
from torch.utils.data import Dataset

import minato

CLASSES = {"torch": torch.utils.data.DataLoader, "minato": minato.DataLoader,
           "torch, preloaded": torch.utils.data.DataLoader}  # fmt: skip
METHODS = ("spawn", "forkserver", "fork")
#: batches after the first that are also compared
COMPARED = 1000
#: the imports of this program
MODULES = ["numpy", "psutil", "torch", "torch.utils.data", "minato"]


class Paths(Dataset):
    """Holds the names of its files, like datasets of images; opens none."""

    def __init__(self, count: int) -> None:
        self.paths = [f"/data/train/part-{i % 997:03d}/sample-{i:08d}.npy" for i in range(count)]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return zlib.crc32(self.paths[index].encode()), index


def own_imports() -> float:
    """A worker's time for importing this program's modules, which no loader can save."""
    program = (
        f"import runpy, sys, time, numpy, torch.utils.data, minato; sys.path[:0] = {sys.path!r}; "
        "begin = time.perf_counter(); "
        f"runpy.run_path({__file__!r}, run_name='__mp_main__'); "
        "print(time.perf_counter() - begin)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True,
                          capture_output=True, text=True)  # fmt: skip
    return float(done.stdout)


def names_for(method: str) -> list[str]:
    return [name for name in CLASSES if method == "forkserver" or "preloaded" not in name]


def bound(dataset: Paths, method: str) -> float:
    """Seconds that no loader can save with this start method."""
    if method == "fork":
        begin = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        return time.perf_counter() - begin
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {', '.join(MODULES)}"], check=True)
    pickle.loads(pickle.dumps(dataset))
    return time.perf_counter() - begin


def child(request: dict[str, Any]) -> None:
    dataset = Paths(request["paths"])
    if "preloaded" in request["loader"]:
        multiprocessing.set_forkserver_preload(MODULES)
    if request["watched"]:
        common.ready()
    cpu, begin = common.cpu_seconds(), time.perf_counter()
    loader = CLASSES[request["loader"]](
        dataset,
        batch_size=4,
        num_workers=request["workers"],
        multiprocessing_context=request["method"],
    )
    iterator = iter(loader)
    batch = next(iterator)
    first = time.perf_counter()
    cpu = common.cpu_seconds() - cpu
    assert batch[1].tolist() == [0, 1, 2, 3]
    rest = hashlib.sha256()
    for batch in itertools.chain([batch], itertools.islice(iterator, COMPARED)):
        rest.update(torch.stack(batch).numpy().tobytes())
    begin_end = time.perf_counter()
    del iterator, loader, batch
    end = time.perf_counter()
    common.answer(
        {
            "first": first - begin,
            "cpu": cpu,
            "shutdown": end - begin_end,
            "samples": rest.hexdigest(),
        }
    )


class Short(Dataset):
    """Sixteen numbers, which take this many seconds in all."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        if self.seconds:
            time.sleep(self.seconds / 16)
        return index


def ended_cpu() -> float:
    """CPU seconds of this process and of its children that have ended, to the microsecond."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def short_epoch(name: str, workers: int, seconds: float) -> dict[str, float]:
    loader = CLASSES[name](Short(workers * seconds), batch_size=4, num_workers=workers,
                           multiprocessing_context="fork")  # fmt: skip
    cpu, begin = ended_cpu(), time.perf_counter()
    iterator = iter(loader)
    got = [next(iterator)]
    first = time.perf_counter()
    got += iterator
    del iterator
    end = time.perf_counter()
    assert torch.cat(got).tolist() == list(range(16))
    cpu = ended_cpu() - cpu
    return {"epoch": end - begin, "first": first - begin, "cpu": cpu}


def short_epochs(repeats: int, quiet: common.Quiet) -> list[dict[str, Any]]:
    names, cells = names_for("fork"), []
    for seconds, workers in itertools.product((0.0, 0.2), (1, 2, 4)):
        runs: dict[str, list[Any]] = {name: [] for name in names}
        for repeat in range(repeats + 1):
            turn = repeat % len(names)
            for name in names[turn:] + names[:turn]:
                run = quiet.run(functools.partial(short_epoch, name, workers, seconds))
                if repeat > 0:
                    runs[name].append(run)
        cells.append({"workers": workers, "seconds": seconds, "runs": runs})
    return cells


def measure(args: argparse.Namespace) -> dict[str, Any]:
    cells: dict[str, Any] = {m: {n: [] for n in names_for(m)} for m in args.methods}
    bounds: dict[str, list[float]] = {method: [] for method in args.methods}
    imports = [own_imports() for _ in range(args.repeats if args.methods else 0)]
    quiet = common.Quiet(args.quiet, args.quiet_minutes)
    base = {"paths": args.paths, "workers": args.workers, "watched": False}
    for repeat in range(args.repeats):
        for method in args.methods:
            bounds[method].append(bound(Paths(args.paths), method))
            names = names_for(method)
            turn = repeat % len(names)
            for name in names[turn:] + names[:turn]:
                request = {**base, "loader": name, "method": method}
                run = functools.partial(common.run_child, __file__, request)
                cells[method][name].append(quiet.run(run))
    samples = {run.pop("samples") for cell in cells.values() for runs in cell.values() for run in runs}
    assert len(samples) == bool(args.methods), "the loaders deliver other samples"
    memory: dict[str, Any] = {m: {} for m in args.methods}
    for method in args.methods if args.memory else ():
        for name in names_for(method):
            request = {**base, "loader": name, "method": method, "watched": True}
            memory[method][name] = common.run_watched(__file__, request)[1]
    short = short_epochs(args.epochs, quiet) if args.epochs > 0 else []
    return {
        "machine": common.machine(),
        "quiet": quiet.report(),
        "paths": args.paths,
        "workers": args.workers,
        "runs": cells,
        "bounds": bounds,
        "own_imports": imports,
        "memory": memory,
        "short": short,
    }


HEAD = "loader first_s min..max x_torch cpu_s /torch shutdown_s peak_MiB added".split()


def row(result: dict[str, Any], method: str, name: str) -> list[str]:
    def values(loader: str, what: str) -> list[float]:
        return [run[what] for run in result["runs"][method][loader]]

    first, cpu = values(name, "first"), values(name, "cpu")
    facts = result["memory"][method].get(name)
    return [
        method,
        name,
        common.number(common.median(first)),
        common.between(first),
        common.number(common.ratios(first, values("torch", "first"))),
        common.number(common.median(cpu)),
        common.number(common.ratios(values("torch", "cpu"), cpu)),
        common.number(common.median(values(name, "shutdown"))),
        "-" if facts is None else f"{facts['peak']:.0f}",
        "-" if facts is None else f"{facts['peak'] - facts['before']:.0f}",
    ]


def short_row(cell: dict[str, Any], name: str) -> list[str]:
    def ms(loader: str, what: str) -> list[float]:
        return [1000 * run[what] for run in cell["runs"][loader]]

    epoch = ms(name, "epoch")
    return [
        str(cell["workers"]),
        str(cell["seconds"]),
        name,
        common.number(common.median(epoch)),
        common.between(epoch),
        common.number(common.ratios(ms("torch", "epoch"), epoch)),
        common.number(common.median(ms(name, "first"))),
        common.number(common.median(ms(name, "cpu"))),
        common.number(common.ratios(ms("torch", "cpu"), ms(name, "cpu"))),
    ]


def report(result: dict[str, Any]) -> None:
    print(f"# {common.describe(result['machine'])}")
    if result["runs"]:
        report_first(result)
    if result["short"]:
        print("# epochs of 16 samples under fork; /torch: less is better")
        head = "workers work_s loader epoch_ms min..max /torch first_ms cpu_ms /torch".split()
        rows = [short_row(cell, name) for cell in result["short"] for name in cell["runs"]]
        print(common.table(head, rows))


def report_first(result: dict[str, Any]) -> None:
    print(
        f"# first batch with a list of {result['paths']} paths, {result['workers']} workers; "
        f"{common.describe(result['quiet'])}"
    )
    rows = [row(result, method, name) for method in result["runs"] for name in names_for(method)]
    print(common.table(["method", *HEAD], rows))
    imports = common.number(common.median(result["own_imports"]))
    print(f"own imports, in each worker that inherits none: {imports} s")
    for method, seconds in result["bounds"].items():
        print(f"bound, {method}: {common.number(common.median(seconds))} s")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paths", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--epochs", type=int, default=15, help="short epochs of each loader")
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    common.add_options(parser)
    args = parser.parse_args()
    if args.quick:
        args.paths, args.workers, args.repeats, args.memory, args.epochs = 1000, 1, 1, False, 1
        args.methods = [m for m in args.methods if m != "forkserver"]
    return args


def main() -> int:
    warnings.filterwarnings("ignore")
    request = common.child_request()
    if request is not None:
        child(request)
        return 0
    args = arguments()
    result = measure(args)
    report(result)
    common.save(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
