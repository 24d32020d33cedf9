"""The command line of train.py: a preset, and options that override it."""
from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from unet3d.evaluate import AMP, check_amp
from unet3d.loaders import LOADERS, samples_of
from unet3d.parallel import available_cores
from unet3d.ranks import add_device
from unet3d.spec import PRESETS, Preset


def make_parser(description: str) -> argparse.ArgumentParser:
    """The parser of train.py."""
    parser = argparse.ArgumentParser(prog="unet3d.train", description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--loader", choices=LOADERS, required=True)
    add("--preset", choices=PRESETS, default="quick")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--data", type=Path, help="folder made by unet3d.preprocess")
    data.add_argument("--source", type=Path, metavar="FOLDER",
                      help="folder of case_*/imaging.nii.gz: the workers prepare a case each time "
                      "they load it")
    add("--out", type=Path, required=True, help="folder for logs and checkpoint")
    add("--resume", nargs="?", const=True, type=Path, metavar="CHECKPOINT",
        help="go on from OUT/checkpoint.pt, or from the file named")
    add("--seed", type=int, default=0)
    add_device(parser)
    add("--amp", choices=list(AMP), default="none",
        help="mixed precision; fp16 with loss scaling, as the reference")
    add("--threads", type=int, help="CPU threads of the model while training "
        "(default: the cores that the workers leave, at least 1)")
    work = parser.add_argument_group("work (default: the preset's)")
    work.add_argument("--epochs", type=int)
    work.add_argument("--workers", type=int)
    work.add_argument("--batch-size", type=int, help="per process")
    work.add_argument("--patch", type=int, nargs=3, metavar="N")
    work.add_argument("--filters", type=int, nargs="+", metavar="N")
    work.add_argument("--repeat", type=int, help="times each case is listed in an epoch")
    work.add_argument("--accumulate", type=int, help="batches per optimiser step")
    work.add_argument("--learning-rate", type=float)
    work.add_argument("--initial-rate", type=float, metavar="RATE",
                      help="where the warm-up starts (mlperf: 0.0001)")
    work.add_argument("--warmup-epochs", type=int, metavar="EPOCHS",
                      help="the rate rises linearly for so many epochs (mlperf: 200)")
    work.add_argument("--momentum", type=float, help="of Nesterov's kind; 0: none (default 0.9)")
    work.add_argument("--oversampling", type=float, metavar="SHARE",
                      help="of crops that are around foreground (default 0.4)")
    work.add_argument("--overlap", type=float, metavar="SHARE",
                      help="of the windows of an evaluation (mlperf: 0.5)")
    work.add_argument("--channels-last", action="store_true",
                      help="the model's and the images' memory layout")
    work.add_argument("--cudnn-benchmark", action="store_true",
                      help="cuDNN tries its algorithms and takes the fastest")
    work.add_argument("--drop-last", action=argparse.BooleanOptionalAction, default=None)
    work.add_argument("--split", choices=["auto", "kits19", "seeded"], default="auto")
    work.add_argument("--split-seed", type=int, metavar="SEED",
                      help="draws the evaluation cases of a seeded split (default: --seed)")
    work.add_argument("--seeding", choices=["sample", "loader"], default="sample",
                      help="sample: the dataset seeds itself by (seed, epoch, index), the "
                      "same bytes under every loader; loader: as the loader seeds its "
                      "workers")
    work.add_argument("--brightness-around-one", action="store_true",
                      help="brightness x f, not the reference's x (1 + f)")
    work.add_argument("--reference-starts", action="store_true",
                      help="never crop at an axis's last position, as the reference")
    dali = parser.add_argument_group("the dali loader")
    dali.add_argument("--dali-cache-objects", action="store_true",
                      help="remember the boxes of labels seen: the loader dali-cached "
                      "(dali-resident always does)")
    dali.add_argument("--dali-no-mmap", action="store_true",
                      help="read files instead of mapping them")
    dali.add_argument("--dali-batches", type=int, default=1, metavar="N",
                      help="batches that a pipeline makes in one go, handed out one by one")
    dali.add_argument("--dali-depth", type=int, default=2, metavar="N",
                      help="of such, that it prepares ahead (default 2)")
    watch = parser.add_argument_group("checkpoints, evaluation, measurement")
    watch.add_argument("--checkpoint-every", type=int, default=0, metavar="BATCHES",
                       help="also within epochs (default: at epoch ends only)")
    watch.add_argument("--no-checkpoint", action="store_true",
                       help="write none at the ends of epochs, unless the run stops there")
    watch.add_argument("--stop-after", type=int, metavar="BATCHES",
                       help="write a checkpoint and stop after so many batches")
    watch.add_argument("--eval-every", type=int, metavar="EPOCHS",
                       help="0: after the last epoch only (mlperf: every 20 x 168 samples, from "
                       "1000 x 168 on)")
    watch.add_argument("--eval-start", type=int, metavar="EPOCH", help="the first evaluated")
    watch.add_argument("--target-dice", type=float, metavar="DICE",
                       help="training stops once an evaluation's mean Dice reaches it; every "
                       "epoch is evaluated unless the preset or --eval-every says otherwise")
    watch.add_argument("--no-eval", action="store_true")
    watch.add_argument("--step-ms", type=float, metavar="MS",
                       help="a stand-in for a fast accelerator: a step only takes this time, "
                       "counting the batch's hash, and leaves the CPU to the workers; nothing "
                       "is trained or evaluated")
    watch.add_argument("--python-ms", type=float, default=0.0, metavar="MS",
                       help="every step also computes in Python for so long (of CPU time, in the "
                       "training thread), as a trainer that keeps the GIL")
    watch.add_argument("--bounds", action=argparse.BooleanOptionalAction, default=None,
                       help="measure the bounds before the run (default: quick does)")
    watch.add_argument("--hash-content", action="store_true",
                       help="hash the bytes of all samples too")
    watch.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS",
                       help="longest wait for a batch from workers before the run fails "
                       "(default 600; 0 waits for ever)")
    watch.add_argument("--page-cache", choices=["warm", "cold"], default="warm",
                       help="cold: drop the data from the page cache before each epoch")
    watch.add_argument("--cache", metavar="SIZE",
                       help="keep volumes in minato's cache of this size, such as 4GiB, which jobs "
                       "on this machine share (loaders of minato; minato-shared: default 1GiB)")
    return parser


@dataclasses.dataclass(frozen=True)
class Settings:
    """A run with all its settings."""

    args: argparse.Namespace
    preset: Preset
    threads: int

    def evaluations(self, samples_per_epoch: int) -> tuple[int, int]:
        """(the first epoch that may be evaluated, epochs between evaluations). The preset's values
        are for epochs of `eval_samples`; they are converted to this run's epochs and rounded up as
        in the reference's rules. Values from the command line are used unchanged."""
        def epochs(given: int | None, value: int) -> int:
            if given is not None or not self.preset.eval_samples:
                return value
            return -(-value * self.preset.eval_samples // max(1, samples_per_epoch))

        return (epochs(self.args.eval_start, self.preset.eval_start),
                epochs(self.args.eval_every, self.preset.eval_every))

    def as_config(self, train_cases: list[str]) -> dict[str, Any]:
        """Plain data: what the run does, for the logs and the checkpoint."""
        args = self.args
        config = {name: getattr(args, name) for name in (
            "loader", "seed", "device", "amp", "split", "split_seed", "seeding",
            "brightness_around_one", "reference_starts", "hash_content", "page_cache",
            "step_ms", "python_ms", "channels_last")}
        config |= dataclasses.asdict(self.preset)
        config |= {"preset": args.preset, "data": str(args.source or args.data),
                   "threads": self.threads, "train_cases": train_cases}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in config.items()}


def parse(description: str, argv: list[str] | None) -> Settings:
    """Parse and check the command line; exits with a message if it makes no sense."""
    parser = make_parser(description)
    args = parser.parse_args(argv)
    check_amp(parser, args)
    is_dali = args.loader.startswith("dali")
    own = ("dali_cache_objects", "dali_no_mmap", "dali_batches", "dali_depth")
    asked = [name for name in own if getattr(args, name) != parser.get_default(name)]
    if asked and not is_dali:
        parser.error(f"--{asked[0].replace('_', '-')} is of the loader dali")
    if min(args.dali_batches, args.dali_depth) < 1:
        parser.error("--dali-batches and --dali-depth must be at least 1")
    if is_dali and args.reference_starts:
        parser.error("DALI's crop takes an axis's last position, too: no --reference-starts")
    if args.loader == "minato-shared" and args.cache is None:
        args.cache = "1GiB"
    if args.cache is not None and not args.loader.startswith("minato"):
        parser.error("--cache is of minato's loaders: others have no cache of samples")
    if args.split_seed is None:
        args.split_seed = args.seed
    if args.dali_cache_objects and args.loader == "dali":
        args.loader = "dali-cached"
    if args.source is not None and (is_dali or samples_of(args.loader) == "native"):
        parser.error(f"--source: {args.loader} reads prepared files; make them with "
                     f"`python -m unet3d.preprocess --source {args.source} --out FOLDER`, and "
                     "give --data FOLDER")
    names = {field.name for field in dataclasses.fields(Preset)}
    changes = {name: tuple(value) if isinstance(value, list) else value
               for name, value in vars(args).items() if name in names and value is not None}
    preset = dataclasses.replace(PRESETS[args.preset], **changes)
    if args.target_dice is not None and args.eval_every is None and not preset.eval_every:
        preset = dataclasses.replace(preset, eval_every=1)
    for name in ("epochs", "batch_size", "repeat", "accumulate"):
        if getattr(preset, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if min(preset.workers, args.checkpoint_every, preset.eval_every, preset.eval_start,
           preset.warmup_epochs) < 0:
        parser.error("--workers, --checkpoint-every, --eval-every, --eval-start and "
                     "--warmup-epochs cannot be negative")
    for name in ("learning_rate", "initial_rate"):
        if not 0 <= getattr(preset, name) < float("inf"):
            parser.error(f"--{name.replace('_', '-')} must be a number and not negative")
    for name in ("momentum", "overlap"):
        if not 0 <= getattr(preset, name) < 1:
            parser.error(f"--{name} must be at least 0 and less than 1")
    if not 0 <= preset.oversampling <= 1:
        parser.error("--oversampling must lie between 0 and 1")
    if args.stop_after is not None and args.stop_after < 1:
        parser.error("--stop-after must be at least 1")
    if args.timeout < 0:
        parser.error("--timeout cannot be negative")
    if args.threads is not None and args.threads < 1:
        parser.error("--threads must be at least 1")
    divisor = 2 ** len(preset.filters)
    if any(p < 1 or p % divisor for p in preset.patch):
        parser.error(f"--patch must be multiples of {divisor} for {len(preset.filters)} filters")
    asked = [name for name in ("eval_every", "eval_start", "target_dice")
             if getattr(args, name) is not None]
    if args.eval_start is not None and preset.eval_every == 0:
        parser.error("--eval-start says where evaluations begin: say --eval-every, too")
    if args.no_eval and asked:
        parser.error(f"--no-eval and --{asked[0].replace('_', '-')} exclude each other")
    if args.target_dice is not None and not 0 <= args.target_dice <= 1:
        parser.error("--target-dice is a mean Dice and lies between 0 and 1")
    if not 0 <= args.python_ms < float("inf"):
        parser.error("--python-ms must be a number and not negative")
    if args.step_ms is not None:
        if not 0 <= args.step_ms < float("inf"):
            parser.error("--step-ms must be a number and not negative")
        if asked:
            parser.error(f"--step-ms trains nothing that --{asked[0].replace('_', '-')} could "
                         "evaluate")
        args.no_eval = True
    threads = args.threads or max(1, available_cores() - preset.workers)
    return Settings(args, preset, threads)
