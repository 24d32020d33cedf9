"""The lines of MLPerf Training logging that start a run, with the reference's keys.

`records.Records.mlperf` writes a line; train.py writes those of blocks, epochs and
evaluations as they happen. A run of the mlperf preset on KiTS19 that reaches its target has
the keys of the closed division's 3D U-Net; the submitter's fields are placeholders.
"""
from __future__ import annotations

from unet3d import spec
from unet3d.records import Records
from unet3d.settings import Settings

BENCHMARK = "unet3d"
SUBMISSION = {"submission_benchmark": BENCHMARK, "submission_org": "none",
              "submission_division": "open", "submission_status": "research",
              "submission_platform": "none"}


def log_start(log: Records, settings: Settings, world: int, train_samples: int,
              samples_per_epoch: int, eval_samples: int, began_ms: int) -> None:
    """Everything up to and including run_start; `began_ms` is the start of the set-up."""
    preset, args = settings.preset, settings.args
    log.mlperf("start", "init_start", at_ms=began_ms)
    log.mlperf("event", "cache_clear", args.page_cache == "cold")
    for key, value in SUBMISSION.items():
        log.mlperf("event", key, value)
    for key, value in {
            "seed": args.seed,
            "global_batch_size": preset.batch_size * world * preset.accumulate,
            "gradient_accumulation_steps": preset.accumulate,
            "train_samples": train_samples, "eval_samples": eval_samples,
            "samples_per_epoch": samples_per_epoch,
            "opt_name": "sgd", "opt_base_learning_rate": preset.learning_rate,
            "opt_learning_rate_warmup_epochs": preset.warmup_epochs,
            "opt_learning_rate_decay_boundary_epochs": [],
            "opt_learning_rate_decay_factor": 1.0,
            "opt_weight_decay": spec.WEIGHT_DECAY, "opt_momentum": preset.momentum,
            "oversampling": preset.oversampling,
            "training_input_shape": list(preset.patch),
            "validation_input_shape": list(preset.patch),
            "validation_overlap": preset.overlap}.items():
        log.mlperf("event", key, value)
    log.mlperf("end", "init_stop")
    log.mlperf("start", "run_start")
