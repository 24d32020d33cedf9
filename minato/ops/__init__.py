"""Transforms of JPEG photos, and native operators on 3D volumes: single, fused in a pipeline, or as a
dataset.

RandomResizedCropJpeg and ResizeCenterCropJpeg are transforms for any dataset: from the file of a
photo to a tensor, with the bits of torchvision on what Pillow decodes. All else here is about
volumes.

A volume is an array of shape [channel, depth, height, width]. Images are float32 (inputs
also uint8, int16, uint16, int32, float64), labels uint8 with one channel. Every
operator takes an image and optionally its label, and treats both alike. All
work is done in C without the GIL. Input arrays may be strided; results are C contiguous.
docs/operators.md has examples, of photos and of volumes.

Fusion: windows and flips only change a start and strides; casts and arithmetic are recorded.
One pass then reads the needed rows, plane by plane, and writes them, finished,
to the output. Magnitudes, probabilities and draws follow the MLPerf Training 3D U-Net
reference (KiTS19); operators that differ from it say so.

With `device=`, a loader runs the end of a dataset's pipeline on the device, from where samples have
the fewest bytes: flips, casts, scaling, noise and normalizing after the last other operator. The
bytes are the same, except that an operation on a NaN may give another of the many NaN patterns.

Random numbers are counter-based (Philox4x32-10). Draw n of the operator at position i of its
pipeline is a function of (key, i, n) alone, with a key of 128 bits. There is no state, so the
result does not depend on threads, processes, order or instruction set. `csrc/ops/mn_pipeline.h`
lists the draws of each operator; minato/ops.h offers them to user-defined operators in C.
"""
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .dataset import VolumeDataset
from .jpeg import RandomResizedCropJpeg, ResizeCenterCropJpeg
from .operators import (
    Cast, Normalize, Operator, Pad, Pipeline, RandBalancedCrop, RandCrop, RandFlip,
    RandGaussianNoise, RandScaleIntensity, ReadNpy, Resample, UserOperator, label_boxes,
    unet3d_training,
)  # fmt: skip

if TYPE_CHECKING:
    from .images import ImageFolder, native_images


def __getattr__(name: str) -> Any:
    if name not in ("ImageFolder", "native_images"):  # they need torchvision, so are not in __all__
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.images"), name)


__all__ = [
    "Cast", "Normalize", "Operator", "Pad", "Pipeline", "RandBalancedCrop", "RandCrop",
    "RandFlip", "RandGaussianNoise", "RandScaleIntensity", "RandomResizedCropJpeg", "ReadNpy",
    "Resample", "ResizeCenterCropJpeg", "UserOperator", "VolumeDataset", "label_boxes", "unet3d_training",
]
