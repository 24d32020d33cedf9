"""The numbers of the workload in one place: preprocessing, split, presets.

Source: the MLPerf Training 3D U-Net reference on KiTS19 (Kidney Tumor Segmentation
Challenge 2019). Lengths are millimetres, intensities Hounsfield units (HU), axes are
(z, y, x) = (slice, row, column).
"""
from __future__ import annotations

import dataclasses

TARGET_SPACING = (1.6, 1.2, 1.2)
CLIP_HU = (-79.0, 304.0)
MEAN_HU = 101.0
STD_HU = 76.9
MIN_SHAPE = (128, 128, 128)
CLASSES = 3  # 0 background, 1 kidney, 2 tumour
PAD_VALUE = -2.2  # about the normalised value of air clipped to CLIP_HU[0]

KITS19_CASES = 210
KITS19_EVALUATION = (
    0, 3, 5, 6, 12, 24, 34, 41, 44, 49, 52, 56, 61, 65, 66, 70, 76, 78, 80, 84, 86,
    87, 92, 111, 112, 125, 128, 138, 157, 160, 161, 162, 169, 171, 176, 185, 187, 189,
    198, 203, 206, 207,
)

FOREGROUND_PROBABILITY = 0.4
FLIP_PROBABILITY = 1.0 / 3.0
BRIGHTNESS_PROBABILITY = 0.1
BRIGHTNESS_RANGE = (0.7, 1.3)
NOISE_PROBABILITY = 0.1
NOISE_STD_MAX = 0.1

WEIGHT_DECAY = 0.0
MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class Preset:
    """All settings of a run that are not paths. ``train.py`` options override them."""

    patch: tuple[int, int, int]
    filters: tuple[int, ...]
    batch_size: int
    epochs: int
    repeat: int  # times each case is listed in one epoch
    learning_rate: float
    initial_rate: float
    warmup_epochs: int
    accumulate: int
    workers: int
    eval_every: int  # epochs between evaluations; 0: after the last epoch only
    eval_start: int  # the first epoch to evaluate; 0: no limit
    eval_samples: int  # in an epoch of the two above; 0: the run's own epoch
    overlap: float  # of the evaluation's sliding windows
    target_dice: float  # training stops once the mean Dice reaches it
    diverged_dice: float  # training has diverged if an evaluation's mean Dice is below it
    bounds: bool  # measure the bounds of loading before the run
    drop_last: bool
    momentum: float = MOMENTUM
    oversampling: float = FOREGROUND_PROBABILITY


PRESETS = {
    # The reference's settings for one process; the batch size is per process.
    "mlperf": Preset(
        patch=(128, 128, 128), filters=(32, 64, 128, 256, 320), batch_size=2,
        epochs=4000, repeat=1, learning_rate=0.8, initial_rate=1e-4,
        warmup_epochs=200, accumulate=1, workers=8, eval_every=20, eval_start=1000,
        eval_samples=KITS19_CASES - len(KITS19_EVALUATION), overlap=0.5, target_dice=0.908,
        diverged_dice=1e-6, bounds=False, drop_last=True,
    ),
    # Minutes on two CPU cores, on 20 phantoms made with `--scale 0.4`. Their 16 training
    # cases would be an epoch of eight steps, mostly start-up: hence the repeats.
    "quick": Preset(
        patch=(32, 32, 32), filters=(8, 16, 32), batch_size=2,
        epochs=24, repeat=5, learning_rate=0.2, initial_rate=1e-3,
        warmup_epochs=0, accumulate=1, workers=2, eval_every=0, eval_start=0,
        eval_samples=0, overlap=0.25, target_dice=1.01, diverged_dice=0.0, bounds=True,
        drop_last=False,
    ),
}
