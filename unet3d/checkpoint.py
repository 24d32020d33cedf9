"""Checkpoints: the model, the optimiser, and the position in the current epoch."""
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from unet3d import spec

FORMAT = 1
# Settings that must be equal for a resumed run to be the same run. The loader, the number of
# workers, the paths and the number of epochs may change.
FIXED = ("seed", "patch", "filters", "batch_size", "repeat", "learning_rate",
         "initial_rate", "warmup_epochs", "accumulate", "drop_last", "seeding", "amp",
         "hash_content", "brightness_around_one", "reference_starts", "step_ms",
         "train_cases", "momentum", "oversampling")
# What runs did before these settings existed: older checkpoints do not have them.
BEFORE = {"momentum": spec.MOMENTUM, "oversampling": spec.FOREGROUND_PROBABILITY}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and says why."""


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state` atomically and durably."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        with open(temporary, "wb") as stream:
            torch.save({"format": FORMAT, **state}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint of any run. Raises CheckpointError."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such checkpoint") from error
    except Exception as error:  # torch raises many types for a damaged file
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a checkpoint of this program")
    return state


def load(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Read a checkpoint of a run configured like `config`. Raises CheckpointError."""
    state = read(path)
    before = BEFORE | state["config"]
    different = [f"{name} was {before.get(name)!r}, is {config[name]!r}"
                 for name in FIXED if before.get(name) != config[name]]
    if different:
        raise CheckpointError(f"{path}: made by another run: {'; '.join(different)}")
    return state
