"""Train the 3D U-Net: one loop, any loader.

    python -m unet3d.train --loader pytorch --preset quick --data data/npy --out runs/a
    torchrun --nproc-per-node 2 -m unet3d.train --loader pytorch ...

Exit status: 0 done, 1 an input or the delivery of samples was wrong, 3 stopped early with
a checkpoint (--stop-after, SIGTERM, SIGINT): continue with --resume, 4 training has diverged.
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import math
import pickle
import random
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from unet3d import checkpoint, mlperf, records, resume, sampling, spec
from unet3d.bench import bounds, pagecache
from unet3d.bench.meters import DeliveryHash, DeviceCopies, EpochClock, PythonWork, wait_summary
from unet3d.bench.usage import UsageSampler, busy_remark, others_share, usage_of_all
from unet3d.data import ExpertVolumes, VolumeDataset, mix, split
from unet3d.evaluate import AMP, evaluate
from unet3d.loaders import (
    LoaderUnavailable,
    build,
    dataset_for,
    evaluation_loader,
    without_device,
)
from unet3d.losses import dice_ce_loss
from unet3d.model import UNet3D
from unet3d.nifti import DataError
from unet3d.parallel import available_cores
from unet3d.ranks import Ranks, leave
from unet3d.settings import Settings, parse
from unet3d.source import cases_of
from unet3d.transforms import train_transforms

STOPPED, DIVERGED = 3, 4
NO_TUMOUR = 0.005  # a Dice below it is none
BOUND_SAMPLES = 32  # samples timed for the work bound


class Progress:
    """The state of the current epoch; stored in the checkpoint."""

    def __init__(self, with_content: bool, state: dict[str, Any] | None = None) -> None:
        self.epoch: int = state["epoch"] if state else 1
        self.delivered: list[int] = list(state["delivered"]) if state else []
        self.losses: list[float] = list(state["losses"]) if state else []
        self.hash = DeliveryHash(with_content, state["hash"] if state else None)

    def state(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "delivered": self.delivered, "losses": self.losses,
                "hash": self.hash.state()}


class Trainer:
    """One run, from settings to result."""

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        self.began_ms = int(time.time() * 1000)
        self.settings, self.ranks = settings, ranks
        self.args, self.preset, self.device = settings.args, settings.preset, ranks.device
        args, preset = self.args, self.preset
        torch.set_num_threads(settings.threads)
        torch.backends.cudnn.benchmark = args.cudnn_benchmark
        self.layout = (torch.channels_last_3d if args.channels_last else
                       torch.contiguous_format)
        folder = args.source or args.data
        cache = args.cache if args.source else None
        if cache is not None:
            args.cache = None  # prepared cases are cached here, not by the loader again
        cases = cases_of(args.data, args.source, preset.patch, cache)
        train, self.evaluation = split(cases, args.split_seed, args.split)
        transform = train_transforms(preset.patch, args.brightness_around_one,
                                     args.reference_starts, preset.oversampling)
        seed = args.seed if args.seeding == "sample" else None
        self.cases = train
        self.reference = VolumeDataset(train, transform, seed, preset.repeat)
        self.dataset = dataset_for(args.loader, self.reference)
        self.config = settings.as_config([case.name for case in train])
        if len(self.dataset) < ranks.world:
            raise DataError(f"{folder}: fewer samples than ranks")
        self.sampler = sampling.epoch_sampler(self.dataset, args.seed, ranks.rank, ranks.world)
        if len(self.sampler) < preset.batch_size and preset.drop_last:
            raise DataError(f"{folder}: {len(self.dataset)} samples an epoch make no "
                            f"full batch of {preset.batch_size} on {ranks.world} ranks")
        self.generator = torch.Generator()
        self.model, self.optimizer, self.scaler = self._make_model()
        self.wrapped = self.model if ranks.world == 1 else DistributedDataParallel(self.model)
        self.progress = Progress(args.hash_content)
        self.resumed: resume.Resumed | None = None  # until its epoch starts
        self.loader: Iterable | None = None
        self.loader_runs = False  # whether the loader is one of whole epochs
        self.stop_asked = False
        self.batches_run = 0
        self.costs: dict[str, float] | None = None
        # Seconds of a step that only waits; None: steps train.
        self.step_s = None if args.step_ms is None else args.step_ms / 1e3
        self.rows: list[dict[str, Any]] = []
        self.seconds_before = 0.0  # training time of the runs that this one resumes
        self.run_began: float | None = None
        steps = sampling.expected_count(len(self.sampler), preset.batch_size, preset.drop_last)
        self.samples_per_epoch = steps * ranks.world
        self.eval_start, self.eval_every = settings.evaluations(self.samples_per_epoch)

    def seconds(self) -> float:
        """How long this run has been training, including the runs that it resumes."""
        now = 0.0 if self.run_began is None else time.perf_counter() - self.run_began
        return self.seconds_before + now

    def _make_model(self) -> tuple[UNet3D, torch.optim.Optimizer, torch.amp.GradScaler]:
        torch.manual_seed(self.args.seed)
        momentum = self.preset.momentum
        model = UNet3D(self.preset.filters).to(self.device, memory_format=self.layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.preset.learning_rate,
                                    momentum=momentum, nesterov=momentum > 0,
                                    weight_decay=spec.WEIGHT_DECAY)
        scaler = torch.amp.GradScaler(self.device.type, enabled=self.args.amp == "fp16")
        return model, optimizer, scaler

    # -- checkpoints ---------------------------------------------------------------

    def save(self) -> None:
        """Write the checkpoint; every rank must call it."""
        own = self.loader if self.loader_runs and self.progress.delivered else None
        states = self.ranks.gather(self.progress.state() | {
            "whole": self.loader_runs, "loader": resume.state_of(own)})
        if self.ranks.rank == 0:
            checkpoint.save(self.args.out / records.CHECKPOINT_NAME, {
                "config": self.config, "seconds": self.seconds(), "rows": self.rows,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(), "ranks": states})

    def restore(self, path: Path) -> None:
        """Resume from a checkpoint, possibly of another number of ranks."""
        state = checkpoint.load(path, self.config)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.seconds_before = state.get("seconds", 0.0)
        self.rows = state.get("rows", [])  # of earlier epochs: older checkpoints have none
        ranks = state["ranks"]
        self.resumed = resume.plan(path, state, self.config, self.ranks)
        if len(ranks) == self.ranks.world:
            self.progress = Progress(self.args.hash_content, ranks[self.ranks.rank])
        else:  # rank 0 takes over all sums; the totals stay the same
            self.progress = Progress(self.args.hash_content, ranks[0])
            if self.ranks.rank == 0:
                self.progress.delivered = [i for rank in ranks for i in rank["delivered"]]
                for other in ranks[1:]:
                    self.progress.hash.merge(other["hash"])
            else:
                self.progress.delivered = []
                self.progress.hash = DeliveryHash(self.args.hash_content)

    # -- one epoch -----------------------------------------------------------------

    def _loader(self, sampler: torch.utils.data.Sampler) -> Iterable:
        args = self.args
        # Persistent workers carry their random streams from epoch to epoch, which no
        # checkpoint could restore; samples that seed themselves need no streams.
        return build(args.loader, self.dataset, batch_size=self.preset.batch_size,
                     sampler=sampler, workers=self.preset.workers,
                     drop_last=self.preset.drop_last, generator=self.generator,
                     timeout_s=args.timeout, persistent=args.seeding == "sample",
                     cache=args.cache,
                     dali_mmap=not args.dali_no_mmap, dali_batches=args.dali_batches,
                     dali_depth=args.dali_depth,
                     pin_memory=self.device.type == "cuda", device=self.device)

    def _plan(self, epoch: int) -> tuple[Iterable, list[int]]:
        """The loader of this epoch or of its rest, and the samples it must deliver."""
        self.dataset.set_epoch(epoch)
        self.sampler.set_epoch(epoch)
        seed = mix(self.args.seed, epoch, self.ranks.rank)
        self.generator.manual_seed(seed >> 1)
        # Samples made in this process (no workers) draw from its own generators; native ones
        # get their keys from torch's.
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.manual_seed(seed >> 1)
        resumed, self.resumed = self.resumed, None
        if resumed is not None and resumed.way == "rest":
            order = sampling.epoch_order(self.dataset, self.args.seed, epoch)
            rest = sampling.remaining(order, resumed.delivered, self.ranks.rank,
                                      self.ranks.world)
            self.loader_runs = False
            return self._loader(sampling.RestSampler(rest)), rest
        if self.loader is None:
            self.loader = self._loader(self.sampler)
        self.loader_runs = True
        if resumed is None:
            return self.loader, list(self.sampler)
        done = set(self.progress.delivered)
        rest = [index for index in self.sampler if index not in done]
        return resumed.applied(self.loader, len(self.progress.losses)), rest

    def _set_rate(self, epoch: int) -> float:
        """Linear warm-up by whole epochs, as in the reference; returns the rate."""
        preset = self.preset
        share = min(1.0, epoch / preset.warmup_epochs) if preset.warmup_epochs else 1.0
        rate = preset.initial_rate + (preset.learning_rate - preset.initial_rate) * share
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _step(self, image: torch.Tensor, label: torch.Tensor, number: int, total: int) -> float:
        """Forward, backward and, at the end of its group, the optimiser. Returns the loss.

        Batches are grouped by `accumulate`; the last group of an epoch may be smaller
        and is weighted by its size.
        """
        group = self.preset.accumulate
        first = number // group * group
        size = min(group, total - first)
        ends_group = number + 1 == first + size
        hold = contextlib.nullcontext()
        if not ends_group and self.ranks.world > 1:
            hold = self.wrapped.no_sync()
        with hold:
            with torch.autocast(self.device.type, AMP[self.args.amp],
                                enabled=self.args.amp != "none"):
                image = image.contiguous(memory_format=self.layout)
                loss = dice_ce_loss(self.wrapped(image), label)
            self.scaler.scale(loss / size).backward()
        if ends_group:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def run_epoch(self, log: records.Records) -> bool:
        """Train until the epoch ends (True) or the run must stop (False)."""
        progress, preset = self.progress, self.preset
        epoch, resumed_at = progress.epoch, len(progress.delivered)
        self.still_cached = self._evict() if self.args.page_cache == "cold" else None
        loader, rest = self._plan(epoch)
        rate = self._set_rate(epoch)
        steps_before = len(progress.losses)
        samples = sampling.expected_count(len(rest), preset.batch_size, preset.drop_last)
        total = steps_before + -(-samples // preset.batch_size)
        self.wrapped.train()
        usage, copies = UsageSampler(), DeviceCopies(self.device)
        python = PythonWork(self.args.python_ms / 1e3)
        nbytes, finished = 0, True
        bar = tqdm(total=total, initial=steps_before, desc=f"epoch {epoch}", unit="batch",
                   disable=None if self.ranks.rank == 0 else True)
        with usage:
            clock = EpochClock()
            iterator = iter(loader)
            while (batch := clock.fetch(iterator)) is not None:
                image, label, index = batch
                arrived = time.perf_counter()
                numbers = index.tolist()
                nbytes += image.nbytes + label.nbytes
                there = copies.move(image, label)
                loss = 0.0
                if self.step_s is None:
                    loss = self._step(*there, len(progress.losses), total)
                progress.hash.add(image, label, numbers)
                python.step()
                if self.step_s is not None:
                    time.sleep(max(0.0, arrived + self.step_s - time.perf_counter()))
                progress.delivered += numbers
                progress.losses.append(loss)
                log.line("step", epoch=epoch, step=len(progress.losses), loss=loss,
                         wait_s=clock.waits[-1], samples=numbers)
                clock.step_done()
                bar.update()
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                self.batches_run += 1
                if self._checkpoint_due(total):
                    finished = False
                    break
            bar.close()
            used = usage.stop()
            del iterator
        log.usage(epoch, usage_of_all(self.ranks.gather(usage.samples)))
        if finished:
            used |= {"gil_denied": python.denied, **copies.summary(loader)}
            self._finish_epoch(log, clock, used, rest, resumed_at, nbytes, rate)
        return finished

    def _checkpoint_due(self, total: int) -> bool:
        """Save if it is time; returns whether to stop within the epoch."""
        steps = len(self.progress.losses)
        if steps == total or steps % self.preset.accumulate:
            return False  # saved at the epoch's end; otherwise gradients would be lost
        stop, every = self._must_stop(), self.args.checkpoint_every
        if stop or (every and steps % every < self.preset.accumulate):
            self.save()
        return stop

    def _must_stop(self) -> bool:
        """Whether any rank was asked to stop, by a signal or by --stop-after."""
        limit = self.args.stop_after
        return self.ranks.any(self.stop_asked or
                              (limit is not None and self.batches_run >= limit))

    def _evict(self) -> float | None:
        """Drop the data from the page cache; the share that is still in it, None if unknown.

        Mapped files cannot be dropped, so the loader is destroyed with its workers, and the dataset
        is made again.
        """
        self.loader = None
        self.dataset = dataset_for(self.args.loader, self.reference)
        gc.collect()
        paths = (path for case in self.cases for path in (case.image, case.label))
        if self.ranks.rank != 0:  # the first rank reports it
            return pagecache.evict(paths)
        return pagecache.evict_or_warn(
            paths, lambda text: tqdm.write(text, file=sys.stderr))[0]

    def _finish_epoch(self, log: records.Records, clock: EpochClock, used: dict,
                      rest: list[int], resumed_at: int, nbytes: int, rate: float) -> None:
        """Check the delivered samples, then write the epoch's row."""
        progress, preset = self.progress, self.preset
        new = progress.delivered[resumed_at:]
        wrong = None
        try:
            sampling.check_delivery(rest, new, preset.batch_size, preset.drop_last,
                                    progress.epoch)
        except sampling.DeliveryError as error:
            wrong = str(error)
        read = sum(self.dataset.case(index).nbytes for index in new)
        parts = self.ranks.gather({
            "hash": progress.hash.state(), "waits": clock.waits, "s": clock.elapsed,
            "samples": len(new), "steps": len(clock.waits), "nbytes": nbytes, "read": read,
            "wrong": wrong, "loss": float(np.mean(progress.losses)), "used": used})
        problems = [part["wrong"] for part in parts if part["wrong"]]
        if problems:
            raise sampling.DeliveryError("; ".join(problems))
        total_hash = DeliveryHash(self.args.hash_content)
        for part in parts:
            total_hash.merge(part["hash"])
        memory = [p["used"]["memory_mb"] for p in parts if p["used"]["memory_mb"]]
        samples = sum(p["samples"] for p in parts)
        seconds = max(1e-9, *(p["s"] for p in parts))  # 0 if a resume left no full batch
        waits = wait_summary([part["waits"] for part in parts])
        row = {"epoch": progress.epoch, "loader": self.args.loader, "samples": samples,
               "steps": parts[0]["steps"], "epoch_s": seconds, **waits,
               "wait_share": waits["wait_s"] / seconds, "samples_s": samples / seconds,
               "mb_s": sum(p["nbytes"] for p in parts) / seconds / 1e6,
               "read_mb_s": sum(p["read"] for p in parts) / seconds / 1e6,
               "cpu": sum(p["used"]["cpu"] for p in parts),
               "cpu_seconds": sum(p["used"]["cpu_seconds"] for p in parts),
               "memory_mb": sum(memory) if memory else None, "gpu": used["gpu"],
               "others": others_share(used["busy"], sum(p["used"]["cpu"] for p in parts)),
               **{name: used[name] for name in ("gil_denied", "copy_mb_s", "copy_overlap",
                                              "copy_notes")},
               "loss": float(np.mean([p["loss"] for p in parts])), "learning_rate": rate,
               "step_ms": self.args.step_ms, "still_cached": self.still_cached,
               "index_hash": total_hash.state()["indices"],
               "content_hash": total_hash.state()["content"], "resumed_at": resumed_at}
        if self.costs is not None:
            on_cpu = self.device.type == "cpu" and self.step_s is None
            threads = self.settings.threads if on_cpu else None
            row |= bounds.combine(len(new), len(clock.waits), nbytes, self.costs,
                                  preset.workers, threads, self.ranks.world)
        self.rows.append(row)

    # -- the whole run -------------------------------------------------------------

    def measure_costs(self) -> dict[str, float]:
        """The inputs of the bounds, measured once on a temporary model."""
        order = sampling.epoch_order(self.dataset, self.args.seed, self.progress.epoch)
        self.dataset.set_epoch(self.progress.epoch)
        dataset = self.dataset
        if getattr(dataset, "keep_boxes", False):  # a copy: the run must find its boxes itself
            dataset = pickle.loads(pickle.dumps(dataset))
            dataset.warm()
        elif self.args.loader == "pytorch-expert":
            dataset = ExpertVolumes(dataset)
            for index in order[:BOUND_SAMPLES]:
                dataset[index]  # its boxes are cached from then on
        synthetic = build("synthetic", dataset, batch_size=self.preset.batch_size,
                          sampler=self.sampler, workers=0, device=self.device)
        image, label, _ = next(iter(synthetic))
        step_s = self._step_cost(image, label) if self.step_s is None else self.step_s
        if self.args.loader.startswith("dali"):
            sample_s = self._loader(self.sampler).sample_cost(order[:BOUND_SAMPLES])
        else:
            sample_s = bounds.sample_cost(dataset, order[:BOUND_SAMPLES])
        return {"sample_s": sample_s, "step_s": step_s,
                "copy_bytes_s": bounds.copy_rate(image.nbytes + label.nbytes)}

    def _step_cost(self, image: torch.Tensor, label: torch.Tensor) -> float:
        """Seconds of a training step on this batch."""
        kept = self.model, self.optimizer, self.scaler, self.wrapped
        self.model, self.optimizer, self.scaler = self._make_model()
        self.wrapped = self.model.train()
        # A group of one process, independent of other ranks: a copy that is never synchronised.
        world, self.ranks.world = self.ranks.world, 1
        try:
            return bounds.step_cost(lambda: self._step(image, label, 0, 1))
        finally:
            self.ranks.world = world
            self.model, self.optimizer, self.scaler, self.wrapped = kept

    def _evaluate(self, log: records.Records, epoch: int) -> dict[str, Any]:
        """Evaluate with all cores: the workers are idle now."""
        began = time.perf_counter()
        log.mlperf("start", "eval_start", epoch, epoch_num=epoch)
        if self.device.type == "cpu":
            torch.set_num_threads(max(1, available_cores() // self.ranks.world))
        loader = functools.partial(evaluation_loader, self.args.loader,
                                   workers=self.preset.workers)
        scores = evaluate(self.model, self.evaluation, self.preset.patch, self.device,
                          self.preset.overlap, self.args.amp,
                          progress=sys.stderr.isatty(), loader=loader)
        torch.set_num_threads(self.settings.threads)
        log.mlperf("event", "eval_accuracy", scores["mean_dice"], epoch_num=epoch)
        log.mlperf("end", "eval_stop", epoch, epoch_num=epoch)
        return scores | {"eval_s": time.perf_counter() - began}

    def _eval_due(self, epoch: int) -> bool:
        preset = self.preset
        if self.args.no_eval:
            return False
        if epoch == preset.epochs:
            return True
        return bool(self.eval_every) and epoch >= self.eval_start \
            and (epoch - self.eval_start) % self.eval_every == 0

    def _reached(self) -> bool:
        """Whether the last finished epoch reached the target."""
        return any(row.get("mean_dice", -math.inf) >= self.preset.target_dice
                   for row in self.rows[-1:])

    def _diverged(self) -> bool:
        """Whether the last finished epoch shows that training has diverged."""
        return any(not math.isfinite(row["loss"])
                   or row.get("mean_dice", math.inf) < self.preset.diverged_dice
                   for row in self.rows[-1:])

    def _log_start(self, log: records.Records) -> None:
        log.line("start", config=self.config, costs=self.costs, world=self.ranks.world,
                 cores=available_cores(), torch=torch.__version__)
        if log.fresh:  # a resumed run continues in the same log
            mlperf.log_start(log, self.settings, self.ranks.world, len(self.dataset),
                             self.samples_per_epoch, len(self.evaluation), self.began_ms)

    def run(self, log: records.Records) -> int:
        """Train to the last epoch or the target; returns the exit status."""
        if self.preset.bounds:
            self.costs = self.measure_costs()
        self._log_start(log)
        self.run_began = time.perf_counter()
        ended = self._reached() or self._diverged()  # maybe before this run started
        while self.progress.epoch <= self.preset.epochs and not ended:
            epoch = self.progress.epoch
            log.mlperf("start", "block_start", first_epoch_num=epoch, epoch_count=1)
            log.mlperf("start", "epoch_start", epoch, epoch_num=epoch)
            if not self.run_epoch(log):
                log.line("stopped", epoch=epoch, batches=len(self.progress.losses))
                return STOPPED
            row = self.rows[-1]
            log.mlperf("end", "epoch_stop", epoch, epoch_num=epoch,
                       current_lr=row["learning_rate"])
            if self._eval_due(epoch):
                row |= self._evaluate(log, epoch)
            row["seconds"] = self.seconds()
            ended = self._reached() or self._diverged()
            log.mlperf("end", "block_stop", first_epoch_num=epoch, epoch_count=1)
            self.progress = Progress(self.args.hash_content)
            self.progress.epoch = epoch + 1
            stop = not ended and epoch < self.preset.epochs and self._must_stop()
            if stop or not self.args.no_checkpoint:
                self.save()
            log.epoch(row)
            if self.ranks.rank == 0:
                tqdm.write(describe(row))
            if stop:
                return STOPPED
        reached, diverged, seconds = self._reached(), self._diverged(), self.seconds()
        log.mlperf("end", "run_stop", status="success" if reached else "aborted")
        log.result({"config": self.config, "costs": self.costs, "epochs": self.rows,
                    "reached_target": reached, "diverged": diverged, "seconds": seconds})
        if self.ranks.rank == 0 and reached:
            tqdm.write(f"mean Dice {self.preset.target_dice:g} reached after {seconds:.1f} s")
        if self.ranks.rank == 0 and diverged:
            row = self.rows[-1]
            print(f"error: training has diverged in epoch {row['epoch']}: loss "
                  f"{row['loss']:g}, mean Dice {row.get('mean_dice', 'not evaluated')}",
                  file=sys.stderr)
        if self.ranks.rank == 0 and not diverged and self.step_s is None:
            tqdm.write(next_commands(self.args, self.preset.epochs, self.rows[-1]))
        return DIVERGED if diverged else 0


def next_commands(args: argparse.Namespace, epochs: int, row: dict[str, Any]) -> str:
    """Returns what to run after a training that ended with `row`, in lines."""
    text = f"in {args.out}: {records.CSV_NAME}, {records.RESULT_NAME}"
    if not args.no_checkpoint:
        data = f"--source {args.source}" if args.source else f"--data {args.data}"
        path = args.out / records.CHECKPOINT_NAME
        text += f", {path.name}\nDice and pictures of cases: python -m unet3d.evaluate {data} " \
                f"--checkpoint {path}"
        if row.get("tumour", 1.0) < NO_TUMOUR:
            text += (f"\nno tumour is found yet: {epochs} epochs are few for so small a structure. "
                     f"Go on: the same command with --resume --epochs {2 * epochs}")
    return text


def describe(row: dict[str, Any]) -> str:
    """An epoch in a few lines: results and their bounds."""
    learned = (f"loss {row['loss']:.4f}" if row["step_ms"] is None else
               f"pauses of {row['step_ms']:g} ms as steps, nothing trained")
    text = (f"epoch {row['epoch']} [{row['loader']}]: {row['samples']} samples in "
            f"{row['epoch_s']:.2f} s, {row['samples_s']:.1f} samples/s, "
            f"{row['mb_s']:.1f} MB/s delivered, {row['read_mb_s']:.0f} MB/s read, "
            f"{learned}\n"
            f"  waiting {row['wait_share']:.1%}: start-up {row['startup_s'] * 1e3:.0f} ms, then "
            f"mean {row['wait_mean_s'] * 1e3:.1f}, p50 {row['wait_p50_s'] * 1e3:.1f}, "
            f"p99 {row['wait_p99_s'] * 1e3:.1f}, max {row['wait_max_s'] * 1e3:.1f} ms a step; "
            f"CPU {row['cpu']:.0%} of {available_cores()} cores")
    if row["memory_mb"]:
        text += f"; memory {row['memory_mb']:.0f} MB"
    if row["gpu"] is not None:
        text += f"; GPU {row['gpu']:.0f}%"
    text += busy_remark(row["others"])
    if "bound_s" in row:
        text += (f"\n  bounds: work {row['work_bound_s']:.2f} s, synthetic "
                 f"{row['synthetic_bound_s']:.2f} s, copy {row['copy_bound_s']:.3f} s")
        if "core_bound_s" in row:
            text += f", shared cores {row['core_bound_s']:.2f} s"
        text += f"; this epoch took {row['epoch_s'] / row['bound_s']:.2f} x the largest"
        if remark := bounds.remark(row["epoch_s"], row["bound_s"]):
            text += f" ({remark})"
    if "mean_dice" in row:
        text += (f"\n  Dice: kidney {row['kidney']:.4f}, tumour {row['tumour']:.4f}, mean "
                 f"{row['mean_dice']:.4f} over {row['volumes']} volumes")
    return text


@contextlib.contextmanager
def stop_on_signals(trainer: Trainer):
    """SIGTERM and SIGINT ask for a checkpoint and an end; a second one ends at once."""
    def ask(number: int, _frame: object) -> None:
        trainer.stop_asked = True
        signal.signal(number, before[number])

    before = {number: signal.signal(number, ask)
              for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    settings = parse(__doc__, argv)
    args = settings.args
    ranks = Ranks(args.device)
    if ranks.rank == 0 and (note := without_device(args.loader, ranks.device)):
        print(f"warning: {note}", file=sys.stderr)
    try:
        trainer = Trainer(settings, ranks)
        if args.resume:
            own = args.out / records.CHECKPOINT_NAME
            trainer.restore(own if args.resume is True else args.resume)
        log = records.Records(args.out, ranks.rank == 0, append=args.resume is not None)
        with contextlib.closing(log), stop_on_signals(trainer):
            return trainer.run(log)
    except (DataError, checkpoint.CheckpointError, LoaderUnavailable, sampling.DeliveryError,
            OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        ranks.close()


if __name__ == "__main__":
    leave(main())
