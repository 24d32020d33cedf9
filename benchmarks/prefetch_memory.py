"""Memory of all processes behind stragglers, by prefetch_factor, size of a sample, and step.

    python benchmarks/prefetch_memory.py [--only torch minato] [--json FILE] [--quick]

Two workers, batches of one sample. A sample sleeps 10 ms, and two of them sleep STRAGGLER_S. The
step sleeps longer ("slow") or shorter ("fast") than workers need for a batch. Each cell is the most
memory in use at the end of a step of the second epoch, in MiB, and the time of that epoch: memory of
the processes' own (PSS), and the machine's shared memory beyond what there was at the start, so that
batches in a queue count, which no process maps. Nothing else on the machine may use shared memory.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import common
import psutil
import torch
from torch.utils.data import Dataset

import minato

LOADERS: dict[str, Any] = {"torch": torch.utils.data.DataLoader, "minato": minato.DataLoader}
FACTORS, STRAGGLER_S = (1, 2, 4), 2.0
SIZES = {"150 KB": 150_000, "10 MB": 10_000_000, "40 MB": 40_000_000}
STEPS = {"slow": 0.05, "fast": 0.002}


class Volumes(Dataset):
    """Samples of a number of bytes; some are slow."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.count, self.nbytes = count, nbytes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(STRAGGLER_S if index in (self.count // 3, 2 * self.count // 3) else 0.01)
        return torch.full((self.nbytes // 4,), float(index))


def numbers(path: str) -> dict[str, int]:
    """A file of /proc with a number, often of KiB, after each name."""
    lines = (line.replace(":", " ").split() for line in Path(path).read_text().splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}


def memory() -> float:
    """MiB of this process and its children, with all shared memory of the machine."""
    total = numbers("/proc/meminfo")["Shmem"]
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            pss = numbers(f"/proc/{process.pid}/smaps_rollup")
        except OSError:  # it has ended
            continue
        total += pss["Pss"] - pss["Pss_Shmem"]
    return total / 1024


def most(cls: Any, factor: int, nbytes: int, step: float, count: int) -> list[float]:
    """The most MiB in use in the second epoch, and its seconds."""
    loader = cls(Volumes(count, nbytes), batch_size=1, num_workers=2, prefetch_factor=factor,
                 persistent_workers=True)  # fmt: skip
    before = numbers("/proc/meminfo")["Shmem"] / 1024
    for _epoch in range(2):
        begin, found = time.perf_counter(), 0.0
        for number, batch in enumerate(loader):
            time.sleep(step)
            found = max(found, memory()) if number % 4 == 0 else found
            del batch
    return [found - before, time.perf_counter() - begin]


def main() -> int:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=LOADERS, default=list(LOADERS))
    common.add_options(parser)
    args = parser.parse_args()
    count = 30 if args.quick else 90
    runs: dict[str, Any] = {}
    rows = []
    for size, step, factor in itertools.product(SIZES, STEPS, FACTORS):
        if args.quick and (size, factor) != ("10 MB", 1):
            continue
        cells = {name: most(LOADERS[name], factor, SIZES[size], STEPS[step], count)
                 for name in args.only}  # fmt: skip
        runs[f"{size}, {step}, {factor}"] = cells
        ratio = cells[args.only[-1]][0] / cells[args.only[0]][0]
        rows.append([size, step, str(factor), *(f"{mib:.0f}, {s:.1f} s" for mib, s in cells.values()),
                     f"{ratio:.2f}"])  # fmt: skip
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    print(f"# {common.describe(common.machine())}")
    print(common.table(["sample", "step", "prefetch_factor", *args.only, "ratio"], rows))
    common.save(args.json, {"machine": common.machine(), "runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(main())
