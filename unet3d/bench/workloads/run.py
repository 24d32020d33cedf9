"""Run one of the workloads with one loader, as train.py runs the 3D U-Net.

    python -m unet3d.bench.workloads.run --workload speech --loader minato --data data/speech \\
        --out runs/speech

The consumer is a small network, or with ``--step-ms`` a pause of that length for each batch, as
if an accelerator were busy: then the workers have the CPU to themselves. Exit status: 0 done,
1 an input or the delivery of samples was wrong. The files written are those of train.py.
"""
from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from unet3d import loaders, records, sampling
from unet3d.bench import bounds, pagecache
from unet3d.bench.meters import DeliveryHash, EpochClock, wait_summary
from unet3d.bench.usage import UsageSampler, busy_remark, others_share, usage_of_all
from unet3d.bench.workloads import base
from unet3d.nifti import DataError
from unet3d.options import Options
from unet3d.parallel import available_cores
from unet3d.ranks import add_device

LOADERS = ("minato", "minato-ready", "pytorch", "pytorch-ooo", "synthetic")
BOUND_SAMPLES = 32  # samples timed for the work bound


class Resident:
    """One batch, made at construction, repeated with the sampler's indices."""

    def __init__(self, job: base.Job, options: Options) -> None:
        self.options = options
        first = list(options.sampler)[:options.batch_size]
        self.batch = job.collate([job.dataset[index] for index in first])

    def __iter__(self) -> Iterator[base.Batch]:
        indices, size = list(self.options.sampler), self.options.batch_size
        for start in range(0, len(indices), size):
            yield {**self.batch, "index": torch.tensor(indices[start:start + size])}


def batch_bytes(batch: base.Batch) -> int:
    """Bytes of all tensors of a batch, padding included."""
    tensors = [t for value in batch.values() for t in (value if isinstance(value, list) else
                                                       [value])]
    return sum(t.nbytes for t in tensors)


def timed_step(seconds: float) -> Callable[[base.Batch], float]:
    """A step that only takes time; its loss is 0."""
    def step(_batch: base.Batch) -> float:
        time.sleep(seconds)
        return 0.0

    return step


class Run:
    """One run, from arguments to result."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.timed = args.step_ms is not None
        self.threads = args.threads or max(1, available_cores() - args.workers)
        torch.set_num_threads(self.threads)
        self.job: base.Job = base.module(args.workload).open_job(args)
        self.batch_size = args.batch_size or self.job.batch_size
        self.sampler = sampling.epoch_sampler(self.job.dataset, args.seed)
        self.config = {name: getattr(args, name) for name in (
            "workload", "loader", "seed", "device", "page_cache", "workers", "step_ms")}
        self.config |= {"seeding": "sample", "batch_size": self.batch_size,
                        "threads": self.threads, "data": str(args.data),
                        "samples": len(self.job.dataset)}
        self.rows: list[dict[str, Any]] = []
        self.costs: dict[str, float] | None = None
        self.sampler.set_epoch(1)
        self.loader = self._loader()

    def _loader(self) -> Iterable[base.Batch]:
        args = self.args
        rest = {"batch_size": self.batch_size, "sampler": self.sampler, "workers": args.workers,
                "collate_fn": self.job.collate, "timeout_s": args.timeout,
                "pin_memory": self.device.type == "cuda", "device": self.device}
        if args.loader == "synthetic":
            return Resident(self.job, Options(**rest))
        return loaders.build(args.loader, self.job.dataset, **rest)

    def _make_step(self) -> Callable[[base.Batch], float]:
        return timed_step(self.args.step_ms / 1e3) if self.timed else self.job.step(self.device)

    def measure_costs(self) -> dict[str, float]:
        """The inputs of the bounds, measured with a consumer that is then discarded."""
        dataset, order = self.job.dataset, list(self.sampler)
        for index in order[:BOUND_SAMPLES]:
            dataset.file(index).read_bytes()
        began = time.perf_counter()
        made = [dataset[index] for index in order[:BOUND_SAMPLES]]
        sample_s = (time.perf_counter() - began) / len(made)
        batch, step = self.job.collate(made[:self.batch_size]), self._make_step()
        return {"sample_s": sample_s, "step_s": bounds.step_cost(lambda: step(batch)),
                "copy_bytes_s": bounds.copy_rate(batch_bytes(batch))}

    def run_epoch(self, epoch: int, step: Callable[[base.Batch], float],
                  log: records.Records) -> dict[str, Any]:
        """Load and consume an epoch; its row. Raises DeliveryError."""
        dataset = self.job.dataset
        dataset.set_epoch(epoch)
        self.sampler.set_epoch(epoch)
        planned = list(self.sampler)
        still_cached = None
        if self.args.page_cache == "cold":
            still_cached = pagecache.evict_or_warn(dataset.file(index) for index in planned)[0]
        counted, delivered, losses = DeliveryHash(self.args.hash_content), [], []
        usage, nbytes = UsageSampler(), 0
        with usage:
            clock = EpochClock()
            iterator = iter(self.loader)
            while (batch := clock.fetch(iterator)) is not None:
                losses.append(step(batch))
                numbers = batch["index"].tolist()
                nbytes += batch_bytes(batch)
                for row, number in enumerate(numbers):
                    counted.add_sample(number, *self.job.parts(batch, row))
                delivered += numbers
                log.line("step", epoch=epoch, step=len(losses), loss=losses[-1],
                         wait_s=clock.waits[-1], samples=numbers)
                clock.step_done()
            del iterator
            used = usage.stop()
        log.usage(epoch, usage_of_all([usage.samples]))
        sampling.check_delivery(planned, delivered, self.batch_size, False, epoch)
        waits, hashes = wait_summary([clock.waits]), counted.state()
        read = sum(dataset.file(index).stat().st_size for index in delivered)
        row = {"epoch": epoch, "loader": self.args.loader, "samples": len(delivered),
               "steps": len(losses), "epoch_s": clock.elapsed, **waits,
               "wait_share": waits["wait_s"] / clock.elapsed,
               "samples_s": len(delivered) / clock.elapsed,
               "mb_s": nbytes / clock.elapsed / 1e6, "read_mb_s": read / clock.elapsed / 1e6,
               **used, "others": others_share(used["busy"], used["cpu"]),
               "loss": sum(losses) / len(losses), "still_cached": still_cached,
               "index_hash": hashes["indices"], "content_hash": hashes["content"]}
        if self.costs is not None:
            threads = None if self.timed or self.device.type != "cpu" else self.threads
            row |= bounds.combine(len(delivered), len(losses), nbytes, self.costs,
                                  self.args.workers, threads)
        return row

    def run(self, log: records.Records) -> None:
        """All epochs, then the file of the result."""
        if self.args.bounds:
            self.costs = self.measure_costs()
        log.line("start", config=self.config, costs=self.costs, cores=available_cores(),
                 torch=torch.__version__)
        step = self._make_step()
        for epoch in range(1, self.args.epochs + 1):
            self.rows.append(self.run_epoch(epoch, step, log))
            log.epoch(self.rows[-1])
            print(describe(self.rows[-1]), flush=True)
        log.result({"config": self.config, "costs": self.costs, "epochs": self.rows})


def describe(row: dict[str, Any]) -> str:
    """An epoch in two lines."""
    waits = ", ".join(f"{name} {row[f'wait_{name}_s'] * 1e3:.1f}"
                      for name in ("mean", "p50", "p99", "max"))
    text = (f"epoch {row['epoch']} [{row['loader']}]: {row['samples']} samples in "
            f"{row['epoch_s']:.2f} s, {row['samples_s']:.1f} samples/s, loss {row['loss']:.4f}; "
            f"waiting {row['wait_share']:.1%}: start-up {row['startup_s'] * 1e3:.0f}, then "
            f"{waits} ms a step; CPU {row['cpu']:.0%} of {available_cores()} cores"
            f"{busy_remark(row['others'])}")
    if "bound_s" in row:
        text += "\n  bounds: " + ", ".join(
            f"{name.removesuffix('_bound_s')} {value:.3f} s" for name, value in row.items()
            if name.endswith("_bound_s"))
        if remark := bounds.remark(row["epoch_s"], row["bound_s"]):
            text += f"; this epoch was {remark}"
    return text


def make_parser(workload: str) -> argparse.ArgumentParser:
    """The parser of a run of this workload. Raises DataError where a package is missing."""
    parser = argparse.ArgumentParser(prog="unet3d.bench.workloads.run", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workload", choices=base.NAMES, default=workload)
    add("--loader", choices=LOADERS, default="minato")
    add("--data", type=Path, required=True, help="folder that the workload's program made, or "
        "one of COCO (detection) or LibriSpeech (speech)")
    add("--samples", type=base.positive, metavar="N",
        help="take only this many of the data's samples, drawn with --seed")
    add("--out", type=Path, required=True, help="folder for logs")
    add("--epochs", type=base.positive, default=2)
    add("--workers", type=int, default=2)
    add("--batch-size", type=base.positive, help="default: the workload's")
    add("--seed", type=int, default=0)
    add_device(parser)
    add("--threads", type=base.positive, help="CPU threads of the network (default: the cores "
        "that the workers leave, at least 1)")
    add("--step-ms", type=base.seconds, metavar="MS",
        help="pause so long for each batch instead of training a network")
    add("--page-cache", choices=["warm", "cold"], default="warm",
        help="cold: drop the data from the page cache before each epoch")
    add("--hash-content", action="store_true", help="hash the bytes of all samples too")
    add("--bounds", action=argparse.BooleanOptionalAction, default=True,
        help="measure the bounds before the run")
    add("--timeout", type=base.seconds, default=600.0, metavar="SECONDS",
        help="longest wait for a batch from workers (default 600; 0 waits for ever)")
    base.module(workload).add_arguments(parser.add_argument_group(f"the {workload} workload"))
    return parser


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse a command line; the workload determines the options."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--workload", choices=base.NAMES, default=base.NAMES[0])
    return make_parser(first.parse_known_args(argv)[0].workload).parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    try:
        args = parse(argv)
        run = Run(args)
        with contextlib.closing(records.Records(args.out, active=True, append=False)) as log:
            run.run(log)
    except (DataError, loaders.LoaderUnavailable, sampling.DeliveryError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
