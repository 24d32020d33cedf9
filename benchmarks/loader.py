"""Samples a second of loaders with two workers (or --workers N), side by side, and their resources.

    python benchmarks/loader.py [--cases tiny image volume augment turn] [--repeats 5]
        [--modes static iterable out-of-order ready] [--peers] [--json FILE] [--quick]
        [--quiet SHARE] [--workers N]

Each repeat of a case is one fresh process in which the loaders take turns (the order
rotates), so that other load on the machine affects them equally. Ratios are to torch's loader of
the same mode and repeat. Workers persist; the first epoch warms up. The timing covers the time from
the arrival of an epoch's first batch to its end, in whole epochs until enough time has passed.
Outside of the timing, one pass compares the delivered data with that of torch's loader,
and one process per loader is watched from outside for its memory (see common.py).

``augment`` crops, flips and scales by numbers drawn from NumPy, torch and ``random``. The drawn
numbers are part of the sample: the pass makes each sample again from them. Loaders with torch's
streams (``scheduling="static"``) must have drawn exactly torch's numbers.

``--modes`` adds loaders: scheduling="static"; the same samples as an iterable dataset;
in_order=False, balanced and static; batching="ready". With ``--cases`` there are also the tiny
samples in batches of 512 and 4096. Batches must come in torch's order; out of order, each of them
once; and with ``ready`` each sample once per epoch.

``getitem`` and ``copy`` are bounds on one core: dataset[i] alone, and one copy of the
sample's bytes between warm buffers. ``inline`` is torch's loader without workers.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import common
import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    default_collate,
    get_worker_info,
)

import minato

WORKERS = int(os.environ.get("BENCHMARK_WORKERS", "2"))  # from --workers, passed on to children
#: epochs turned in the turn case
TURNS = 30


class Tiny(Dataset):
    """64 bytes of float32 and an int; next to no computation."""

    pool = 1024

    def __init__(self, size: int) -> None:
        self.size = size
        rng = torch.Generator().manual_seed(0)
        self.rows = list(torch.randn(self.pool, 16, generator=rng).unbind())

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.rows[index % self.pool], index


class Image(Dataset):
    """A 3x224x224 uint8 array, copied."""

    pool = 64

    def __init__(self, size: int) -> None:
        self.size = size
        shape = (self.pool, 3, 224, 224)
        self.rows = list(np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.rows[index % self.pool].copy()


class Volume(Dataset):
    """A float32 volume of 8 MiB and a uint8 one of 2 MiB, copied."""

    pool = 4

    def __init__(self, size: int) -> None:
        self.size = size
        rng, shape = np.random.default_rng(2), (self.pool, 1, 128, 128, 128)
        self.images = list(rng.random(shape, dtype=np.float32))
        self.labels = list(rng.integers(0, 3, shape, dtype=np.uint8))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        at = index % self.pool
        return self.images[at].copy(), self.labels[at].copy()


class Augment(Image):
    """A 3x128x128 float32 crop of an image, flipped or not, brighter or darker, with the numbers
    drawn for it, and its index."""

    side = 128

    def __getitem__(self, index: int) -> Any:
        top, left = np.random.randint(0, 224 - self.side + 1, 2)
        drawn = np.array([top, left, torch.rand(()).item() < 0.5, random.random()])
        return self.made(index, drawn), drawn, index

    def made(self, index: int, drawn: np.ndarray) -> np.ndarray:
        """The sample of this index for these numbers."""
        top, left = int(drawn[0]), int(drawn[1])
        crop = self.rows[index % self.pool][:, top : top + self.side, left : left + self.side]
        return np.multiply(crop[..., ::-1] if drawn[2] else crop, np.float32(0.5 + drawn[3]))


class Streamed(IterableDataset):
    """The samples of a dataset in its order; each worker has every n-th."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        info, size = get_worker_info(), len(self.dataset)  # type: ignore[arg-type]
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        return map(self.dataset.__getitem__, range(first, size, step))


#: case: dataset, batch size, batches per epoch, batches in the comparing pass
CASES: dict[str, tuple[Callable[[int], Dataset], int, int, int]] = {
    "tiny": (Tiny, 64, 2000, 200),
    "tiny-512": (Tiny, 512, 250, 25),
    "tiny-4096": (Tiny, 4096, 32, 6),
    "image": (Image, 64, 150, 20),
    "volume": (Volume, 2, 100, 12),
    "augment": (Augment, 64, 100, 12),
    "turn": (Tiny, 64, 16, 16),
}
#: the cases that run by default
USUAL = ["tiny", "image", "volume", "augment", "turn"]
QUICK = {"tiny": 40, "tiny-512": 6, "tiny-4096": 3, "image": 4, "volume": 3, "augment": 4,
         "turn": 4}  # fmt: skip


# ---- the loaders -----------------------------------------------------------------------


def sampler(dataset: Dataset, seed: int) -> RandomSampler:
    """A random order that is the same for every loader, epoch after epoch."""
    return RandomSampler(dataset, generator=torch.Generator().manual_seed(seed))


def torch_loader(cls: Any, workers: int, **options: Any) -> Callable[..., Iterable]:
    def make(dataset: Dataset, batch: int, seed: int) -> Iterable:
        return cls(
            dataset,
            batch_size=batch,
            sampler=sampler(dataset, seed),
            num_workers=workers,
            persistent_workers=workers > 0,
            **options,
        )

    return make


def stream_loader(cls: Any) -> Callable[..., Iterable]:
    def make(dataset: Dataset, batch: int, seed: int) -> Iterable:
        return cls(
            Streamed(dataset), batch_size=batch, num_workers=WORKERS, persistent_workers=True
        )

    return make


class _Fetch:
    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __call__(self, indices: list[int]) -> Any:
        return default_collate([self.dataset[i] for i in indices])


def nodes_loader(dataset: Dataset, batch: int, seed: int) -> Iterable:
    """torchdata.nodes: two threads make whole batches, in order."""
    from torchdata import nodes

    source = nodes.SamplerWrapper(BatchSampler(sampler(dataset, seed), batch, False))
    mapper = nodes.ParallelMapper(
        source, _Fetch(dataset), num_workers=WORKERS, method="thread", max_concurrent=None
    )
    return nodes.Loader(nodes.Prefetcher(mapper, prefetch_factor=2 * WORKERS))


class _Spdl:
    """SPDL: two threads make whole batches, in order."""

    def __init__(self, dataset: Dataset, batch: int, seed: int) -> None:
        self.fetch = _Fetch(dataset)
        self.batches = BatchSampler(sampler(dataset, seed), batch, False)

    def __iter__(self) -> Iterator[Any]:
        return common.spdl_batches(self.batches, self.fetch, WORKERS)


TORCH, MINE = torch.utils.data.DataLoader, minato.DataLoader
LOADERS: dict[str, Callable[..., Iterable]] = {
    "torch": torch_loader(TORCH, WORKERS),
    "minato": torch_loader(MINE, WORKERS),
    "minato, worker streams": torch_loader(MINE, WORKERS, seed_per_sample=False),
    "inline": torch_loader(TORCH, 0),
    "minato, static": torch_loader(MINE, WORKERS, scheduling="static"),
    "torch, iterable": stream_loader(TORCH),
    "minato, iterable": stream_loader(MINE),
    "torch, out of order": torch_loader(TORCH, WORKERS, in_order=False),
    "minato, out of order": torch_loader(MINE, WORKERS, in_order=False),
    "minato, static, out of order": torch_loader(
        MINE, WORKERS, in_order=False, scheduling="static"
    ),
    "minato, ready first": torch_loader(MINE, WORKERS, in_order=False, batching="ready"),
    "nodes threads": nodes_loader,
    "spdl threads": _Spdl,
}
PEERS = {"nodes threads": "torchdata.nodes", "spdl threads": "spdl.pipeline"}
MODES = {
    "static": ["minato, static"],
    "iterable": ["torch, iterable", "minato, iterable"],
    "out-of-order": [
        "torch, out of order", "minato, out of order", "minato, static, out of order",
    ],
    "ready": ["torch, out of order", "minato, ready first"],
}
#: torch's loader for the same mode, if that is not "torch"
AGAINST = {
    "minato, iterable": "torch, iterable",
    "minato, out of order": "torch, out of order",
    "minato, static, out of order": "torch, out of order",
    "minato, ready first": "torch, out of order",
}
#: what must equal AGAINST (for torch's own loaders: "torch"), see `Delivered`
SAME = {
    "minato, static": "exactly",
    "torch, iterable": "samples",
    "torch, out of order": "any order",
    "minato, out of order": "any order",
    "minato, static, out of order": "any order",
    "minato, ready first": "samples",
}


def against(name: str) -> str:
    return AGAINST.get(name, "torch")


def loaders_here(peers: bool, modes: Iterable[str] = ()) -> list[str]:
    """Names of the loaders to run; prints which peers are not installed."""
    asked = {name for mode in modes for name in MODES[mode]}
    others = {name for names in MODES.values() for name in names} | set(PEERS)
    names = [name for name in LOADERS if name not in others or name in asked]
    for name, module in PEERS.items() if peers else ():
        try:
            __import__(module)
            names.append(name)
        except ImportError as error:
            print(f"# {name} skipped: {error}")
    return names


# ---- measurements of a child process ---------------------------------------------------


def dataset_of(case: str, quick: bool, checking: bool = False) -> tuple[Dataset, int]:
    make, batch, batches, fewer = CASES[case]
    batches = QUICK[case] if quick else fewer if checking else batches
    return make(batch * batches), batch


def run_epoch(loader: Iterable) -> tuple[float, float, float, int]:
    """(begin, first batch, end, batches) of one epoch; a batch is dropped for the next."""
    begin = time.perf_counter()
    iterator = iter(loader)
    batch = next(iterator)
    first = time.perf_counter()
    count = 1
    for batch in iterator:  # noqa: B007  (held until the next comes, as in training)
        count += 1
    end = time.perf_counter()
    del batch
    return begin, first, end, count


def time_rate(name: str, case: str, quick: bool, seed: int) -> dict[str, float]:
    """Seconds and CPU seconds per sample, in whole epochs."""
    dataset, batch = dataset_of(case, quick)
    loader = LOADERS[name](dataset, batch, seed)
    before = common.cpu_seconds()
    run_epoch(loader)
    start = common.cpu_seconds()
    seconds, batches, samples = 0.0, 0, 0
    least = 0.0 if quick else 0.5
    while not batches or seconds < least:
        _, first, end, count = run_epoch(loader)
        seconds += end - first
        batches += count - 1
        samples += count * batch
    stop = common.cpu_seconds()
    del loader
    return {
        "sample": seconds / (batches * batch),
        "cpu": (stop - start) / samples,
        "cpu_whole": common.cpu_seconds() - before,
        "samples_whole": samples + len(dataset),  # type: ignore[arg-type]
    }


def time_turn(name: str, case: str, quick: bool, seed: int) -> dict[str, float]:
    """Seconds from an epoch's last batch to the next one's first."""
    dataset, batch = dataset_of(case, quick)
    loader = LOADERS[name](dataset, batch, seed)
    before = common.cpu_seconds()
    end = run_epoch(loader)[2]
    turns = []
    for _ in range(2 if quick else TURNS):
        _, first, now, _ = run_epoch(loader)
        turns.append(first - end)
        end = now
    cpu = common.cpu_seconds() - before
    del loader
    return {"turn": common.median(turns), "turn_most": max(turns), "cpu_whole": cpu}


def time_getitem(case: str, quick: bool) -> float:
    """Seconds of dataset[i] alone; results are dropped at once."""
    dataset, batch = dataset_of(case, quick)
    size = min(len(dataset), 20000)  # type: ignore[arg-type]
    for i in range(min(size, 100)):
        dataset[i]
    start = time.perf_counter()
    for i in range(size):
        dataset[i]
    return (time.perf_counter() - start) / size


def time_copy(case: str, quick: bool) -> float:
    """Seconds for copying the bytes of a sample between warm buffers."""
    dataset, _ = dataset_of(case, quick)
    leaves = tuple_of(dataset[0])
    sources = [np.asarray(leaf) for leaf in leaves]
    targets = [source.copy() for source in sources]
    best = []
    for _ in range(5):
        rounds = 5 if quick else 60
        start = time.perf_counter()
        for _ in range(rounds):
            for source, target in zip(sources, targets, strict=True):
                np.copyto(target, source)
        best.append((time.perf_counter() - start) / rounds)
    return common.median(best)


def tuple_of(sample: Any) -> tuple:
    return tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)


def bytes_of(case: str) -> int:
    sample = tuple_of(CASES[case][0](1)[0])
    return sum(x.nbytes if hasattr(x, "nbytes") else 8 for x in sample)


def checksum(batch: Any) -> int:
    value = 0
    for leaf in tuple_of(batch):
        array = leaf.contiguous().numpy()
        value = zlib.crc32(array.view(np.uint8).reshape(-1), value)
        value = zlib.crc32(repr((array.dtype, array.shape)).encode(), value)
    return value


def told_apart(dataset: Dataset, batch: Any) -> Any:
    """The batch without each loader's own draws, after a check that the samples were
    made from them."""
    if not isinstance(dataset, Augment):
        return batch
    images, drawn, indices = batch
    for image, numbers, index in zip(images.numpy(), drawn.numpy(), indices.tolist(), strict=True):
        if not np.array_equal(image, dataset.made(index, numbers)):
            raise AssertionError(f"sample {index} is not what its draws make of it")
    if len(indices) > 1 and len(np.unique(drawn.numpy(), axis=0)) == 1:
        raise AssertionError("all samples of a batch drew the same numbers")
    return indices


class Delivered:
    """The data of two epochs, as checksums per epoch: of complete batches, of
    batches without the draws, and optionally of samples without the draws."""

    def __init__(self, name: str, case: str, quick: bool, seed: int, singly: bool) -> None:
        dataset, size = dataset_of(case, quick, checking=True)
        torch.manual_seed(seed)
        loader = LOADERS[name](dataset, size, seed)
        self.whole: list[list[int]] = []
        self.batches: list[list[int]] = []
        self.samples: list[list[int]] = []
        for _ in range(2):
            for epochs in (self.whole, self.batches, self.samples):
                epochs.append([])
            for batch in loader:
                kept = told_apart(dataset, batch)
                self.whole[-1].append(checksum(batch))
                self.batches[-1].append(checksum(kept))
                leaves = tuple_of(kept)
                rows = range(len(leaves[0]) if singly else 0)
                self.samples[-1] += [checksum([leaf[r : r + 1] for leaf in leaves]) for r in rows]

    def same(self, other: Delivered, what: str) -> bool:
        """Whether both delivered the same: "exactly", "batches" (in order), "any order" of
        batches, or "samples" (each once per epoch)."""
        if what == "exactly":
            return self.whole == other.whole
        if what == "batches":
            return self.batches == other.batches
        name = "batches" if what == "any order" else "samples"
        mine, theirs = getattr(self, name), getattr(other, name)
        return [sorted(epoch) for epoch in mine] == [sorted(epoch) for epoch in theirs]


def child_time(request: dict[str, Any]) -> None:
    case, quick, repeat = request["case"], request["quick"], request["repeat"]
    names, rows, bounds = request["loaders"], {}, {}
    turn = repeat % len(names)
    for name in names[turn:] + names[:turn]:
        rows[name] = (time_turn if case == "turn" else time_rate)(name, case, quick, repeat)
    if case != "turn":
        bounds = {"getitem": time_getitem(case, quick), "copy": time_copy(case, quick)}
    common.answer({"loaders": rows, **bounds})


def child_check(request: dict[str, Any]) -> None:
    """By case: loaders whose batches differed from torch's, and how many were compared."""
    result = {}
    singly = any(SAME.get(name) == "samples" for name in request["loaders"])
    for case in request["cases"]:
        found = {n: Delivered(n, case, request["quick"], 7, singly) for n in request["loaders"]}
        wrong = [name for name, made in found.items()
                 if not made.same(found[against(name)], SAME.get(name, "batches"))]
        batches = sum(map(len, found["torch"].batches))
        result[case] = {"batches": batches, "differ": wrong}
    common.answer(result)


def child_memory(request: dict[str, Any]) -> None:
    name, case, quick = request["loader"], request["case"], request["quick"]
    dataset, batch = dataset_of(case, quick)
    common.ready()
    loader = LOADERS[name](dataset, batch, 0)
    for _ in range(TURNS if case == "turn" else 3):
        run_epoch(loader)
    time.sleep(3 * common.SAMPLE_SECONDS)  # so that short runs are sampled as well
    del loader
    common.answer({})


CHILDREN = {"time": child_time, "check": child_check, "memory": child_memory}


# ---- the parent ------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    names = loaders_here(args.peers, args.modes)
    child = functools.partial(common.run_child, __file__)
    quiet = common.Quiet(args.quiet, args.quiet_minutes)
    base = {"loaders": names, "quick": args.quick}
    runs: dict[str, list[Any]] = {case: [] for case in args.cases}
    for repeat in range(args.repeats):
        for case in args.cases:
            request = {"do": "time", "case": case, "repeat": repeat, **base}
            runs[case].append(quiet.run(functools.partial(child, request)))
    check = child({"do": "check", "cases": args.cases, **base})
    return {
        "machine": common.machine(),
        "quiet": quiet.report(),
        "workers": args.workers,
        "runs": runs,
        "check": check,
        "memory": measure_memory(args, names) if args.memory else {},
    }


def measure_memory(args: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """By case and loader: the process alone, and the peak of its tree, in MiB."""
    watched = [(case, name) for case in args.cases for name in names]
    if args.quick:
        watched = [(args.cases[0], "torch"), (args.cases[0], "minato")]
    memory: dict[str, Any] = {}
    for case, name in watched:
        request = {"do": "memory", "case": case, "loader": name, "quick": args.quick}
        memory.setdefault(case, {})[name] = common.run_watched(__file__, request)[1]
    return memory


def column(result: dict[str, Any], case: str, name: str, what: str) -> list[float]:
    return [run["loaders"][name][what] for run in result["runs"][case]]


def rate_row(result: dict[str, Any], case: str, name: str) -> list[str]:
    seconds, theirs = (column(result, case, n, "sample") for n in (name, against(name)))
    cpu, torch_cpu = (column(result, case, n, "cpu") for n in (name, against(name)))
    size = bytes_of(case)
    return [
        name,
        common.number(common.median(seconds) * 1e6),
        common.between(seconds, 1e6),
        common.number(size / common.median(seconds) / 1e9),
        common.number(common.ratios(seconds, theirs)),
        common.number(common.median(cpu) * 1e6),
        common.number(common.ratios(torch_cpu, cpu)),
        *memory_cells(result, case, name),
    ]


def turn_row(result: dict[str, Any], case: str, name: str) -> list[str]:
    seconds, theirs = (column(result, case, n, "turn") for n in (name, against(name)))
    most = column(result, case, name, "turn_most")
    cpu, torch_cpu = (column(result, case, n, "cpu_whole") for n in (name, against(name)))
    return [
        name,
        common.number(common.median(seconds) * 1e3),
        common.between(seconds, 1e3),
        common.number(common.median(most) * 1e3),
        common.number(common.ratios(seconds, theirs)),
        common.number(common.median(cpu)),
        common.number(common.ratios(torch_cpu, cpu)),
        *memory_cells(result, case, name),
    ]


def memory_cells(result: dict[str, Any], case: str, name: str) -> list[str]:
    facts = result["memory"].get(case, {}).get(name)
    if facts is None:
        return ["-", "-", "-"]
    sizes = (facts["peak"], facts["peak"] - facts["before"], facts["shared"])
    return [f"{size:.0f}" for size in sizes]


RATE_HEAD = "us/sample min..max GB/s x_torch cpu_us /torch peak_MiB added shared".split()
TURN_HEAD = "turn_ms min..max most_ms x_torch cpu_s /torch peak_MiB added shared".split()


def report(result: dict[str, Any], cases: list[str]) -> None:
    print(f"# {common.describe(result['machine'])}")
    print(f"# {result['workers']} workers; {common.describe(result['quiet'])}")
    print(
        "# medians over repeats; x_torch: times faster; /torch: torch's CPU over this one's;"
        "\n# peak: memory of the process tree; added: of it, what the loader brought; shared: "
        "of it, shared memory"
    )
    for case in cases:
        rows = result["runs"][case][0]["loaders"]
        names = [n for n in LOADERS if n in rows]
        print()
        if case == "turn":
            print(common.table([case, *TURN_HEAD], [turn_row(result, case, n) for n in names]))
        else:
            print(common.table([case, *RATE_HEAD], [rate_row(result, case, n) for n in names]))
            print(bound_line(result, case))
        others = ", ".join(f"{run['others']:.0%}" for run in result["runs"][case])
        print(f"  others used of the machine during the repeats: {others}")
        check = result["check"][case]
        same = "as with torch's loader" if not check["differ"] else f"DIFFER: {check['differ']}"
        print(f"  samples of {check['batches']} batches: {same}")


def bound_line(result: dict[str, Any], case: str) -> str:
    item, copy = (
        common.median([run[what] for run in result["runs"][case]]) * 1e6
        for what in ("getitem", "copy")
    )
    return (
        f"  bounds: getitem {common.number(item)} us on one core, "
        f"{common.number(item / result['workers'])} on {result['workers']}; "
        f"one warm copy {common.number(copy)} us"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=USUAL)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[], help="further loaders")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", action="store_true", help="thread-based loaders as well")
    parser.add_argument("--workers", type=int, default=WORKERS, help="of each loader")
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    common.add_options(parser)
    args = parser.parse_args()
    os.environ["BENCHMARK_WORKERS"] = str(args.workers)
    if args.quick:
        args.repeats = 1
    return args


def main() -> int:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)  # measurements are per core; workers do the same
    request = common.child_request()
    if request is not None:
        CHILDREN[request["do"]](request)
        return 0
    args = arguments()
    result = measure(args)
    report(result, args.cases)
    common.save(args.json, result)
    return 1 if any(check["differ"] for check in result["check"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
