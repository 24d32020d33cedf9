"""Native operators on 3D volumes: single, fused in a pipeline, or as a dataset.

A volume is an array of shape [channel, depth, height, width]; images are float32 (or
uint8, int16, uint16, int32, float64 on the way in), labels uint8 with one channel. Every
operator takes an image and, where there is one, its label, and treats both alike. All
work is done in C without the GIL; arrays may be strided, results are C contiguous.

    pipeline = ops.Pipeline([ops.ReadNpy(), ops.RandBalancedCrop((128, 128, 128)),
                             ops.RandFlip(), ops.Cast(), ops.RandScaleIntensity(),
                             ops.RandGaussianNoise()])
    dataset = ops.VolumeDataset([("case_00000_x.npy", "case_00000_y.npy"), ...], pipeline)
    image, label = dataset[0]                  # under any loader
    image, label = ops.RandFlip()(image, label, key=7)

Fusion: windows and flips only move a start and strides, casts and arithmetic are noted;
then one pass reads the rows that are wanted, plane by plane, and writes them, finished,
to the output. Magnitudes, probabilities and draws follow the MLPerf Training 3D U-Net
reference (KiTS19); where they differ, the operator says so.

With `device=` a loader has the end of a dataset's pipeline done on the device: flips, casts,
scaling, noise and normalizing behind the last other operator, from where samples have the
fewest bytes on. Where it can, and where not, `stats()["device"]` says (operators,
operators_why). The bytes are the same; only which of the many patterns of NaN an operation on a
NaN gives is not promised.

Random numbers are counter-based (Philox4x32-10): draw n of the operator at place i of its
pipeline is a function of (key, i, n) alone, key being 128 bits. There is no state, so the
result does not depend on threads, processes, order or instruction set. `csrc/ops/
mn_pipeline.h` lists the draws of each operator; minato/ops.h gives them to operators
written in C by users.
"""
from .dataset import VolumeDataset
from .operators import (
    Cast,
    Normalize,
    Operator,
    Pad,
    Pipeline,
    RandBalancedCrop,
    RandCrop,
    RandFlip,
    RandGaussianNoise,
    RandScaleIntensity,
    ReadNpy,
    Resample,
    UserOperator,
    label_boxes,
    unet3d_training,
)

__all__ = [
    "Cast", "Normalize", "Operator", "Pad", "Pipeline", "RandBalancedCrop", "RandCrop",
    "RandFlip", "RandGaussianNoise", "RandScaleIntensity", "ReadNpy", "Resample",
    "UserOperator", "VolumeDataset", "label_boxes", "unet3d_training",
]
