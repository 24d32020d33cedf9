"""The program that ``minato analyze`` runs for a factory or a folder. It iterates the loader for
as long as it is watched, with the step that is given, or as fast as batches come.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from .recode import IMAGES

VOLUMES = {".npy", ".nii", ".nii.gz"}
AUDIO = {".wav", ".flac", ".ogg", ".mp3"}
#: batches of a folder's loader
BATCH = 16
#: seconds after which the loop ends, watched or not
MOST_S = 90.0


class Folder(Dataset[torch.Tensor]):
    """The files of a folder that are of one kind, each decoded. Samples are of one size, so that they
    can be batched: whole images shrunk, and the first values of other files."""

    def __init__(self, files: list[Path], decode: Callable[[Path], torch.Tensor]) -> None:
        self.files, self.decode = files, decode

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.decode(self.files[index])


def decode_image(path: Path) -> torch.Tensor:
    """Decoded, and resized to 224 x 224, as most pipelines begin."""
    from PIL import Image

    with Image.open(path) as file:
        pixels = np.array(file.convert("RGB").resize((224, 224)))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def decode_volume(path: Path) -> torch.Tensor:
    """All of it, read; its first 4,096 values."""
    if path.name.endswith(".npy"):
        return first_values(np.load(path), 4096)
    import nibabel

    return first_values(np.asarray(vars(nibabel.load(path))["_dataobj"], np.float32), 4096)


def decode_audio(path: Path) -> torch.Tensor:
    """All of it, decoded; its first second at most."""
    if path.suffix.lower() != ".wav":
        import soundfile

        return first_values(soundfile.read(path, dtype="float32")[0], 16_000)
    with wave.open(str(path)) as file:
        wide, content = file.getsampwidth(), np.frombuffer(file.readframes(file.getnframes()), np.uint8)
    values = np.zeros((len(content) // wide, 4), np.uint8)
    values[:, 4 - wide:] = content.reshape(-1, wide) ^ 128 * (wide == 1)  # the highest bytes of four; unsigned if one
    return first_values(values.view("<i4") / 2.0**31, 16_000)


def first_values(values: Any, count: int) -> torch.Tensor:
    """With zeros where there are fewer."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)[:count]
    return torch.from_numpy(np.pad(flat, (0, count - len(flat))))


#: (suffixes, the package that decodes them, how pip calls that)
NEEDED = (
    (IMAGES, "PIL", "pillow"), ({".nii", ".nii.gz"}, "nibabel", "nibabel"), (AUDIO - {".wav"}, "soundfile", "soundfile")
)  # fmt: skip


def suffix_of(path: Path) -> str:
    return ".nii.gz" if path.name.endswith(".nii.gz") else path.suffix.lower()


def folder_loader(folder: str) -> DataLoader[Any]:
    """A loader of what the folder holds most of."""
    paths = sorted(Path(folder).rglob("*"))
    kinds = ("image", IMAGES, decode_image), ("volume", VOLUMES, decode_volume), ("audio", AUDIO, decode_audio)
    found = [(kind, [path for path in paths if suffix_of(path) in names], decode) for kind, names, decode in kinds]
    kind, files, decode = max(found, key=lambda one: len(one[1]))
    if not files:
        raise SystemExit(f"minato analyze: {folder} holds no images, volumes or audio files")
    for suffixes, package, name in NEEDED:
        if (missing := {*map(suffix_of, files)} & suffixes) and importlib.util.find_spec(package) is None:
            raise SystemExit(
                f"minato analyze: {', '.join(sorted(missing))} files need a package that is not "
                f"installed: pip install {name}"
            )
    print(f"minato analyze: {len(files)} {kind} files in {folder}", file=sys.stderr)
    return make_loader(Folder(files, decode), min(BATCH, len(files)), shuffle=True)


def make_loader(dataset: Any, batch: int = BATCH, shuffle: bool = False) -> DataLoader[Any]:
    workers = len(os.sched_getaffinity(0))
    return DataLoader(dataset, batch, shuffle, num_workers=workers, persistent_workers=True)


def import_object(spec: str) -> Any:
    """An object by MODULE:NAME; modules of the current folder are found."""
    module, _, name = spec.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"minato analyze: {spec} was not found: {error}") from None


def factory_loader(spec: str) -> Any:
    """The loader that a factory gives: itself, or made of a dataset and arguments."""
    found = import_object(spec)()
    if hasattr(found, "dataset") and hasattr(found, "num_workers"):
        return found
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict):
        return DataLoader(found[0], **found[1])
    if hasattr(found, "__getitem__") or hasattr(found, "__iter__"):
        return make_loader(found)
    raise SystemExit(
        f"minato analyze: {spec}() gave a {type(found).__name__}; it must give a loader, a dataset, "
        "or (dataset, arguments of a loader)."
    )


def main(argv: list[str]) -> None:
    """Runs the loop."""
    parser = argparse.ArgumentParser(prog="minato analyze")
    parser.add_argument("target")
    parser.add_argument("--step")
    parser.add_argument("--step-ms", type=float)
    options = parser.parse_args(argv)
    loader = folder_loader(options.target) if os.path.isdir(options.target) else factory_loader(options.target)
    step = import_object(options.step) if options.step else None
    watch = sys.modules.get("_minato_analyze_watch")
    current = getattr(watch, "current", None)
    end = time.monotonic() + MOST_S
    while (current is None or current.active) and time.monotonic() < end:
        for batch in loader:
            if step is not None:
                step(batch)
            elif options.step_ms:
                time.sleep(options.step_ms / 1e3)
            if current is None or not current.active or time.monotonic() > end:
                break


if __name__ == "__main__":
    main(sys.argv[1:])
