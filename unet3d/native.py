"""The training samples from minato's C operators: the same specification, no Python a voxel."""
from __future__ import annotations

from minato import ops
from unet3d.data import Case, VolumeDataset
from unet3d.transforms import TrainTransforms


class NativeVolumes(ops.VolumeDataset):
    """A VolumeDataset of unet3d as one of minato.ops, for any loader.

    Same cases, repeats, seed, and sample (image float32 [1, *patch], label uint8
    [1, *patch], index int). The random numbers are the operators' own, so the bytes differ
    from those of the NumPy transforms; the distribution is the same, and so are the bytes among
    loaders. Without a seed, each sample's key comes from the loader. With `keep_boxes` the boxes of
    a label are found once, as in DALI's object cache. `resident`: with `device=` all cases stay on
    the device.
    """

    def __init__(self, reference: VolumeDataset, keep_boxes: bool = False,
                 resident: bool = False) -> None:
        transform = reference.transform
        if not isinstance(transform, TrainTransforms):
            raise TypeError("only the specified training transforms have native twins, "
                            f"got {type(transform).__name__}")
        self.keep_boxes = keep_boxes
        pipeline = ops.unet3d_training(transform.patch, around_one=transform.around_one,
                                       include_last=not transform.reference_starts,
                                       keep_boxes=keep_boxes, foreground=transform.oversampling)
        super().__init__(reference.cases, pipeline, seed=reference.seed or 0,
                         keyed_by="sample" if reference.seed is None else "epoch",
                         repeat=reference.repeat, with_index=True, resident=resident)
        self.volumes = list(reference.cases)

    def case(self, index: int) -> Case:
        """The case of sample `index`."""
        return self.volumes[index % len(self.volumes)]
