"""Sliding-window inference and evaluation.

    python -m unet3d.evaluate --data data/npy --checkpoint runs/x/checkpoint.pt

Prints Dice for each case and their mean, and writes evaluation.csv and evaluation.png (slices with
label and prediction, if matplotlib is installed) next to the checkpoint, or into --out. The last
line of the output is the mean as JSON.
"""
from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from unet3d import checkpoint, scores, spec
from unet3d.data import Case, WholeVolumes, split
from unet3d.losses import dice_score
from unet3d.model import UNet3D
from unet3d.nifti import DataError
from unet3d.ranks import add_device
from unet3d.source import cases_of

# Windows predicted together. One at a time, a single CPU thread would take torch's slow
# path for 3-D convolutions: measured 95 ms against 20 ms for a window of the quick preset.
WINDOW_BATCH = 4
Loader = Callable[[Dataset], Iterable]
# The meaning of --amp for autocast; unused if it is "none".
AMP = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def gaussian_weights(patch: Sequence[int]) -> torch.Tensor:
    """float32 [*patch]: cube root of the outer product of three Gaussians, maximum 1.

    Standard deviation one eighth of the patch: 16 voxels for 128.
    """
    axes = []
    for size in patch:
        distance = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
        axes.append(torch.exp(-0.5 * (distance / (size / 8)) ** 2))
    product = torch.einsum("i,j,k->ijk", *axes)
    weights = product ** (1.0 / 3.0)
    return (weights / weights.max()).float()


def fit_axis(size: int, patch: int, stride: int) -> tuple[int, int, int, int]:
    """How one axis is made a patch plus a whole number of strides, so that windows cover all
    of it: (trim before, trim after, pad before, pad after). A rest under half a stride is trimmed,
    a longer one is padded; an axis shorter than the patch is padded to it."""
    over = max(0, size - patch) % stride
    trim = over if over < stride // 2 else 0
    kept = size - trim
    padding = -(kept - patch) % stride if kept > patch else patch - kept
    return trim // 2, trim - trim // 2, padding // 2, padding - padding // 2


def sliding_window(model: Callable[[torch.Tensor], torch.Tensor], image: torch.Tensor,
                   patch: Sequence[int], overlap: float = 0.5, classes: int = spec.CLASSES,
                   ) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """Predict a volume [1, 1, z, y, x] window by window.

    Returns (float32 logits [1, classes, z', y', x'], the slices of z, y, x they cover:
    the trimmed axes). Labels must be cut by these slices before scoring.
    """
    strides = [max(1, int(p * (1 - overlap))) for p in patch]
    fits = [fit_axis(n, p, s) for n, p, s in zip(image.shape[2:], patch, strides)]
    kept = tuple(slice(f[0], n - f[1]) for f, n in zip(fits, image.shape[2:]))
    image = image[(..., *kept)]
    inner = tuple(slice(f[2], f[2] + n) for f, n in zip(fits, image.shape[2:]))
    padding = [p for f in reversed(fits) for p in f[2:]]
    image = torch.nn.functional.pad(image, padding, value=spec.PAD_VALUE)
    weights = gaussian_weights(patch).to(image.device)
    result = torch.zeros((classes, *image.shape[2:]), device=image.device)
    norm = torch.zeros(image.shape[2:], device=image.device)
    starts = [range(0, n - p + 1, s) for n, p, s in zip(image.shape[2:], patch, strides)]
    windows = [tuple(slice(c, c + p) for c, p in zip(corner, patch))
               for corner in itertools.product(*starts)]
    for first in range(0, len(windows), WINDOW_BATCH):
        some = windows[first:first + WINDOW_BATCH]
        logits = model(torch.cat([image[(..., *window)] for window in some])).float()
        for window, values in zip(some, logits * weights):
            result[(..., *window)] += values
            norm[window] += weights
    result /= norm
    return result[(..., *inner)][None], kept


@torch.no_grad()
def evaluate(model: torch.nn.Module, cases: Sequence[Case], patch: Sequence[int],
             device: torch.device, overlap: float = 0.5, amp: str = "none",
             progress: bool = True, loader: Loader = DataLoader,
             keep: Callable[[scores.CaseScore], None] | None = None) -> dict:
    """Mean Dice over `cases`, each volume with equal weight however ranks share them.

    Under torch.distributed each rank evaluates every world-size-th case and the sums are
    added up. `loader` makes an iterable of batches of one volume from a dataset. `keep` is called
    with the score of each of this rank's cases. Returns
    {"kidney", "tumour", "mean_dice", "volumes"}.
    """
    rank, world = 0, 1
    if distributed.is_initialized():
        rank, world = distributed.get_rank(), distributed.get_world_size()
    training = model.training
    model.eval()
    total = torch.zeros(spec.CLASSES, dtype=torch.float64, device=device)
    volumes = WholeVolumes(cases[rank::world])
    bar = tqdm(loader(volumes), desc="evaluate", unit="volume", leave=False,
               total=len(volumes), disable=not progress or rank != 0)
    for case, batch in zip(volumes.cases, bar, strict=True):
        image, label = (part.to(device) for part in batch)
        with torch.autocast(device.type, AMP[amp], enabled=amp != "none"):
            logits, kept = sliding_window(model, image, patch, overlap)
        label = label[(..., *kept)]
        dice = dice_score(logits, label).double()
        total[:-1] += dice
        total[-1] += 1
        if keep is not None:
            keep(scores.score_of(case.name, dice.tolist(), *(part.cpu().numpy() for part in (
                image[(0, 0, *kept)], label[0, 0], logits[0].argmax(0)))))
    if distributed.is_initialized():
        distributed.all_reduce(total)
    model.train(training)
    kidney, tumour = (total[:-1] / total[-1]).tolist()
    return {"kidney": kidney, "tumour": tumour, "mean_dice": (kidney + tumour) / 2,
            "volumes": int(total[-1])}


def check_amp(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse fp16 on a CPU, with the parser's usage error."""
    if args.amp == "fp16" and torch.device(args.device).type == "cpu":
        parser.error("--amp fp16 is for GPUs: a CPU computes many times slower in float16 than in "
                     "float32; leave --amp out, or use --amp bf16 on a CPU that has it")


def _chosen_cases(folder: Path, cases: Sequence[Case], kind: str | None, config: dict[str, Any],
                  checkpoint_path: Path) -> Sequence[Case]:
    """The `cases` of `folder` to evaluate: those of a requested split, with a warning
    if the run that `config` describes was trained on some, else those of the run's own split.
    Raises DataError if it was trained on some of these, because then the folder is another one."""
    if kind != "all":
        _, cases = split(cases, config["split_seed"], kind or config["split"])
    trained = sorted({case.name for case in cases} & set(config["train_cases"]))
    if trained:
        text = (f"{checkpoint_path}: was trained on {', '.join(trained[:10])}"
                f"{' and others' if len(trained) > 10 else ''}")
        if kind is None:
            raise DataError(f"{text}, which its split of {folder} evaluates; --split chooses "
                            "cases all the same")
        print(f"warning: {text}", file=sys.stderr)
    return cases


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(prog="unet3d.evaluate", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--data", type=Path, help="preprocessed folder")
    data.add_argument("--source", type=Path, metavar="FOLDER", help="folder of NIfTI cases")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--split", choices=["auto", "kits19", "seeded", "all"],
                        help="which cases: the evaluation part of this split, or all (default: "
                        "the split of the training, and none that it was trained on)")
    parser.add_argument("--out", type=Path, metavar="FOLDER",
                        help="for the table and the picture (default: the checkpoint's folder)")
    parser.add_argument("--overlap", type=float, metavar="SHARE",
                        help="of the windows (default: as in the training)")
    parser.add_argument("--amp", choices=list(AMP), default="none")
    add_device(parser)
    args = parser.parse_args(argv)
    check_amp(parser, args)
    if args.overlap is not None and not 0 <= args.overlap < 1:
        parser.error("--overlap must be at least 0 and less than 1")
    out: Path = args.checkpoint.parent if args.out is None else args.out
    found: list[scores.CaseScore] = []
    try:
        state = checkpoint.read(args.checkpoint)
        config = state["config"]
        cases = _chosen_cases(args.source or args.data,
                              cases_of(args.data, args.source, config["patch"]), args.split,
                              config, args.checkpoint)
        device = torch.device(args.device)
        model = UNet3D(config["filters"]).to(device)
        model.load_state_dict(state["model"])
        overlap = config["overlap"] if args.overlap is None else args.overlap
        result = evaluate(model, cases, config["patch"], device, overlap, args.amp,
                          progress=sys.stderr.isatty(), keep=found.append)
        print(scores.table(found))
        out.mkdir(parents=True, exist_ok=True)
        scores.write_csv(out / scores.CSV_NAME, found)
        written = scores.CSV_NAME
        try:
            scores.draw(out / scores.PICTURE_NAME, found,
                        f"{args.checkpoint.parent.name}: mean Dice {result['mean_dice']:.3f} "
                        f"over {result['volumes']} cases")
            written += f" and {scores.PICTURE_NAME}"
        except ImportError:
            print(scores.NO_MATPLOTLIB, file=sys.stderr)
        print(f"in {out}: {written}")
    except (DataError, checkpoint.CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
