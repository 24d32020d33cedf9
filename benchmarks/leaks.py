"""Leftovers: loaders made, half read and dropped, and persistent ones that live on.

    python benchmarks/leaks.py [--counts 20 50 100 200] [--torch-counts 20 50]
        [--methods fork forkserver spawn native] [--live 15] [--json FILE] [--quick]

Each row is one process. It makes loaders, reads half of each and drops it together
with its batches. After each of the counts it lists its descriptors, files in
/dev/shm and memfds that it maps or has open, living descendants, threads,
mappings, resident memory, and memory of the whole tree (proportional set sizes of
anonymous memory, and shared memory, each page once). Start-up belongs to the first count, so
growth is counted from there.

The second table keeps persistent loaders alive in the middle of an epoch, all at once, and shows
the resources that each of them holds.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import common
import numpy as np
import psutil
import torch
from torch.utils.data import Dataset

import minato
from minato import ops

CLASSES = {"torch": torch.utils.data.DataLoader, "minato": minato.DataLoader}
METHODS = ("fork", "forkserver", "spawn", "native")
FACTS = ("fds", "shm", "memfds", "processes", "threads", "mappings", "rss_mib", "tree_mib")
#: normal differences between two checks: memory and mappings of the interpreter and the allocator
#: come and go
SLACK = {"mappings": 40, "rss_mib": 16.0, "tree_mib": 32.0}


class Images(Dataset):
    """64 KiB per sample, so that batches are delivered from the arena without a copy."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return np.full((128, 128), index, np.float32), index


def volumes(folder: str) -> Any:
    """The same size of sample, made by native workers."""
    path = Path(folder) / "x.npy"
    np.save(path, np.zeros((1, 32, 32, 32), np.float32))
    pipeline = ops.Pipeline([ops.ReadNpy(), ops.RandCrop(25)])
    return ops.VolumeDataset([path], pipeline, repeat=32)


def make(request: dict[str, Any], folder: str, persistent: bool) -> Any:
    native = request["method"] == "native"
    context = None if native else request["method"]
    options = {"worker_type": "native"} if native and request["loader"] == "minato" else {}
    return CLASSES[request["loader"]](
        volumes(folder) if native else Images(),
        batch_size=4,
        num_workers=request["workers"],
        persistent_workers=persistent,
        multiprocessing_context=context,
        **options,
    )


def look() -> dict[str, float]:
    """This process's resources, once ended processes have gone."""
    me = psutil.Process()
    deadline = time.monotonic() + 5.0
    while True:
        gc.collect()
        below = [p for p in me.children(recursive=True) if not serves(p)]
        if not below or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return facts(len(below))


def serves(process: psutil.Process) -> bool:
    """A start method's own process, made once for all loaders. Processes that it forks have its
    name, too, but are not children of this one."""
    try:
        words = " ".join(process.cmdline())
        mine = process.ppid() == os.getpid()
    except psutil.Error:
        return True  # it ended
    return mine and ("resource_tracker" in words or "forkserver" in words)


def anonymous_bytes(pid: int) -> int:
    """Proportional set size without files, whose size depends on other processes."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(text.split()[1]) << 10 for text in file if text.startswith("Pss_Anon"))


def tree_bytes() -> int:
    total = common.memory_bytes(os.getpid())["shared"]
    for process in common.tree(os.getpid()):
        try:
            total += anonymous_bytes(process.pid)
        except OSError:
            pass  # it ended in the meantime
    return total


def facts(below: int) -> dict[str, float]:
    pid = os.getpid()
    with open("/proc/self/maps") as file:
        maps = file.readlines()
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass  # the descriptor of the listing itself
    mapped = {text.split(maxsplit=5)[4] for text in maps if "/memfd:" in text}
    opened = {link for link in links if link.startswith("/memfd:")}
    return {
        "fds": len(os.listdir("/proc/self/fd")) - 1,
        "shm": sum(str(pid) in name for name in os.listdir("/dev/shm")),
        "memfds": max(len(mapped), len(opened)),
        "processes": below,
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": len(maps),
        "rss_mib": psutil.Process().memory_info().rss / common.MiB,
        "tree_mib": tree_bytes() / common.MiB,
    }


def use_half(loader: Any) -> None:
    iterator = iter(loader)
    kept = [next(iterator) for _ in range(4)]
    assert kept[-1][0].shape[0] == 4


def dropped(request: dict[str, Any], folder: str) -> list[dict[str, float]]:
    found, made, begin = [], 0, time.monotonic()
    for count in request["counts"]:
        while made < count:
            use_half(make(request, folder, persistent=made % 2 == 1))
            made += 1
        found.append({"count": count, **look(), "seconds": time.monotonic() - begin})
    return found


def living(request: dict[str, Any], folder: str) -> dict[str, Any]:
    """Twice: the second time reuses the heap grown by the first."""
    found: dict[str, Any] = {}
    for _ in range(2):
        found["before"] = look()
        loaders = [make(request, folder, persistent=True) for _ in range(request["live"])]
        iterators = [iter(loader) for loader in loaders]
        for iterator in iterators:
            next(iterator)
        below = [p for p in psutil.Process().children(recursive=True) if not serves(p)]
        found["during"] = facts(len(below))
        del iterator, iterators, loaders
    found["after"] = look()
    return found


def child(request: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = living if request["live"] else dropped
        common.answer(job(request, folder))


def grown(looks: list[dict[str, float]]) -> dict[str, float]:
    """Growth from the first count to the end, beyond normal differences."""
    first, last = looks[0], looks[-1]
    more = {name: last[name] - first[name] for name in FACTS}
    return {name: n for name, n in more.items() if n > SLACK.get(name, 0)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"machine": common.machine(), "dropped": {}, "live": {}}
    for method in args.methods:
        for name in CLASSES:
            counts = args.counts if name == "minato" else args.torch_counts
            request = {"loader": name, "method": method, "workers": args.workers}
            if counts:
                looks = common.run_child(__file__, {**request, "counts": counts, "live": 0})
                result["dropped"][f"{name}, {method}"] = looks
                show_dropped(f"{name}, {method}", looks)
    for method in args.methods if args.live else ():
        for name in CLASSES:
            request = {"loader": name, "method": method, "workers": args.workers}
            found = common.run_child(__file__, {**request, "live": args.live})
            result["live"][f"{name}, {method}"] = found
    if args.live:
        show_live(result["live"], args.live)
    return result


def show_dropped(name: str, looks: list[dict[str, float]]) -> None:
    rows = [
        [f"{look['count']:.0f} loaders"]
        + [f"{look[fact]:.1f}" if "mib" in fact else f"{look[fact]:.0f}" for fact in FACTS]
        + [f"{look['seconds']:.0f}"]
        for look in looks
    ]
    print(f"\n{common.table([name, *FACTS, 's'], rows)}")
    more = grown(looks)
    print("flat" if not more else f"GROWN: {common.describe(more)}", flush=True)


def show_live(found: dict[str, Any], live: int) -> None:
    rows = []
    for name, looks in found.items():
        each = {k: (looks["during"][k] - looks["before"][k]) / live for k in FACTS}
        left = grown([looks["before"], looks["after"]])
        rows.append([
            name, *[common.number(each[fact]) for fact in FACTS],
            common.describe(left) if left else "nothing",
        ])  # fmt: skip
    head = [f"each of {live} live, persistent", *FACTS, "left when dropped"]
    print(f"\n{common.table(head, rows)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[20, 50, 100, 200])
    parser.add_argument("--torch-counts", type=int, nargs="*", default=[20, 50])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--live", type=int, default=15, help="0: leave the second table out")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    common.add_options(parser)
    args = parser.parse_args()
    if args.quick:
        args.counts, args.torch_counts, args.live, args.workers = [3, 6], [], 2, 1
        args.methods = ["fork", "native"]
    return args


def main() -> int:
    """Exit status 1 if a resource of minato has grown."""
    warnings.filterwarnings("ignore")
    request = common.child_request()
    if request is not None:
        child(request)
        return 0
    args = arguments()
    result = measure(args)
    common.save(args.json, result)
    bad = [n for n, looks in result["dropped"].items() if n.startswith("minato") and grown(looks)]
    bad += [
        n for n, looks in result["live"].items()
        if n.startswith("minato") and grown([looks["before"], looks["after"]])
    ]  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
