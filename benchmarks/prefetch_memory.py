"""Memory of all processes behind stragglers, by prefetch_factor, size of a sample, and step.

    python benchmarks/prefetch_memory.py [--only torch minato] [--json FILE] [--quick]

Two workers, batches of one sample. A sample sleeps 10 ms, and two of them sleep STRAGGLER_S. The
step sleeps longer ("slow") or shorter ("fast") than workers need for a batch. Each cell is the most
memory at the end of a step of the second epoch, in MiB: shared memory of the loader's processes,
which is where batches lie, and all of their memory (PSS); then the time of that epoch. Samples are
checked.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
import warnings
from typing import Any

import common
import torch
from torch.utils.data import Dataset

import minato

LOADERS: dict[str, Any] = {"torch": torch.utils.data.DataLoader, "minato": minato.DataLoader}
FACTORS, STRAGGLER_S = (1, 2, 4), 1.0
SIZES = {"150 KB": 150_000, "10 MB": 10_000_000, "40 MB": 40_000_000}
STEPS = {"slow": 0.1, "fast": 0.002}


class Volumes(Dataset):
    """Samples of a number of bytes; some are slow."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.count, self.nbytes = count, nbytes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(STRAGGLER_S if index in (self.count // 3, 2 * self.count // 3) else 0.01)
        return torch.full((self.nbytes // 4,), float(index))


def most(cls: Any, factor: int, nbytes: int, step: float, count: int) -> list[float]:
    """The most shared and the most of all MiB in use in the second epoch, and its seconds."""
    loader = cls(Volumes(count, nbytes), batch_size=1, num_workers=2, prefetch_factor=factor,
                 persistent_workers=True)  # fmt: skip
    for _epoch in range(2):
        begin, found = time.perf_counter(), {"shared": 0, "total": 0}
        for number, batch in enumerate(loader):
            assert batch[0, 0] == batch[0, -1] == number
            time.sleep(step)
            now = common.memory_bytes(os.getpid())
            found = {kind: max(most, now[kind]) for kind, most in found.items()}
            del batch
    mib = [most / common.MiB for most in found.values()]
    return [*mib, time.perf_counter() - begin]


def main() -> int:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=LOADERS, default=list(LOADERS))
    common.add_options(parser)
    args = parser.parse_args()
    count = 30 if args.quick else 60
    runs: dict[str, Any] = {}
    rows = []
    for size, step, factor in itertools.product(SIZES, STEPS, FACTORS):
        if args.quick and (size, factor) != ("10 MB", 1):
            continue
        cells = {name: most(LOADERS[name], factor, SIZES[size], STEPS[step], count)
                 for name in args.only}  # fmt: skip
        runs[f"{size}, {step}, {factor}"] = cells
        ratio = cells[args.only[-1]][0] / cells[args.only[0]][0]
        texts = (f"{shared:.1f} of {total:.0f}, {s:.1f} s" for shared, total, s in cells.values())
        rows.append([size, step, str(factor), *texts, f"{ratio:.2f}"])
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    print(f"# {common.describe(common.machine())}")
    print(common.table(["sample", "step", "prefetch_factor", *args.only, "ratio"], rows))
    common.save(args.json, {"machine": common.machine(), "runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(main())
