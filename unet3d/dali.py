"""NVIDIA DALI as a loader of the same specification, on the CPU alone or with a GPU.

Two .npy readers walk one list of files. The label's reader determines the crop, and the image's
reads only that region. The list is the sampler's order, epoch after epoch, so a pipeline (its
threads, its prefetched batches, its cached boxes) lives across epochs, as DALI intends. DALI
draws its own random numbers: the distributions match the specification, the bytes differ from
those of the other loaders. The names of the files read come from DALI's own record of each tensor.

On a GPU (`device` cuda) labels, boxes and crops stay on the CPU, where DALI has them; crops
are moved there, and flips, brightness and noise run on it. ResidentDaliLoader keeps all volumes
on the GPU and crops them there. Only the search for boxes stays on the CPU: DALI has no other.
"""
from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from unet3d import spec
from unet3d.data import Case, VolumeDataset
from unet3d.nifti import DataError
from unet3d.options import LoaderUnavailable, Options
from unet3d.transforms import TrainTransforms

INSTALL = "pip install nvidia-dali-cuda120"
# Samples in one list of files. A list's end costs a new pipeline (a fifth of a second, and
# boxes are forgotten), its length memory: 20000 are 119 epochs of KiTS19 and a few MB.
HORIZON = 20000
#: the largest share of a GPU's free memory for volumes that stay there; training needs the rest
SHARE = 1 / 2


def _augmented(image: Any, label: Any, around_one: bool) -> tuple[Any, Any]:
    """Flips, brightness, noise; runs under DALI's conditionals, which do a branch's work
    for the samples in it only."""
    from nvidia.dali import fn, types

    flips = {name: fn.random.coin_flip(probability=spec.FLIP_PROBABILITY)
             for name in ("depthwise", "vertical", "horizontal")}
    image, label = fn.flip(image, **flips), fn.flip(label, **flips)
    brighter = fn.random.coin_flip(probability=spec.BRIGHTNESS_PROBABILITY,
                                   dtype=types.BOOL)
    if brighter:
        factor = fn.random.uniform(range=spec.BRIGHTNESS_RANGE)
        image = image * (factor + (0.0 if around_one else 1.0))
    noisy = fn.random.coin_flip(probability=spec.NOISE_PROBABILITY, dtype=types.BOOL)
    if noisy:
        image = fn.noise.gaussian(
            image, stddev=fn.random.uniform(range=(0.0, spec.NOISE_STD_MAX)))
    return image, label


def _crop_start(label: Any, window: Sequence[int], oversampling: float,
                cache_objects: bool) -> Any:
    """Where the balanced crop begins: int32 [4] for a label [1, z, y, x].

    The window may first leave the volume and is then moved back, as specified. If DALI knew the
    volume's shape, it would draw from positions inside, which is another distribution.
    """
    from nvidia.dali import fn, math, types

    anchor, shape = fn.segmentation.random_object_bbox(
        label, format="anchor_shape", background=0, k_largest=2,
        foreground_prob=oversampling, cache_objects=cache_objects)
    start = fn.roi_random_crop(roi_start=anchor, roi_shape=shape, crop_shape=window)
    last = label.shape(dtype=types.INT32) - types.Constant(np.array(window, np.int32))
    return fn.cast(math.clamp(start, 0, last), dtype=types.INT32)


def _training_pipeline(crops: Callable[[], tuple[Any, ...]], transform: TrainTransforms, *,
                       batch_size: int, threads: int, seed: int, device: torch.device,
                       depth: int) -> Any:
    """A pipeline of what `crops` gives in it, its first two outputs (image, label) augmented."""
    from nvidia.dali import pipeline_def

    @pipeline_def(enable_conditionals=True)
    def unet3d_training():
        image, label, *others = crops()
        image, label = _augmented(image, label, transform.around_one)
        return image, label, *others

    return unet3d_training(batch_size=batch_size, num_threads=threads, seed=seed,
                           device_id=_device_id(device), prefetch_queue_depth=depth)


def make_pipeline(images: Sequence[str], labels: Sequence[str], transform: TrainTransforms,
                  *, device: torch.device, cache_objects: bool = False, mmap: bool = True,
                  depth: int = 2, **options: Any) -> Any:
    """A pipeline over pairs of files, in order, repeatedly.

    Outputs: image float32 and label uint8 [batch, 1, *patch] on `device`, and as uint8 text
    [batch, length] the names of their files, padded with zeros.
    """
    window = [1, *transform.patch]

    def crops() -> tuple[Any, ...]:
        from nvidia.dali import fn

        label = fn.readers.numpy(files=list(labels), dont_use_mmap=not mmap, name="labels")
        label_file = fn.pad(fn.get_property(label, key="source_info"), fill_value=0)
        label = fn.reshape(label, layout="CDHW")
        start = _crop_start(label, window, transform.oversampling, cache_objects)
        image = fn.readers.numpy(files=list(images), dont_use_mmap=not mmap, name="images",
                                 roi_start=start, roi_shape=window)
        image_file = fn.pad(fn.get_property(image, key="source_info"), fill_value=0)
        image = fn.reshape(image, layout="CDHW")
        label = fn.slice(label, start, window, axes=[0, 1, 2, 3])
        if device.type == "cuda":
            image, label = image.gpu(), label.gpu()
        return image, label, image_file, label_file

    return _training_pipeline(crops, transform, device=device, depth=depth, **options)


class Volumes:
    """All cases: images and labels on a device, and the labels also in the host's memory, in
    which DALI looks for boxes. Raises DataError if a GPU has no room for them."""

    def __init__(self, cases: Sequence[Case], device: torch.device) -> None:
        nbytes = sum(case.nbytes for case in cases)
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if nbytes > SHARE * free:
                raise DataError(
                    f"dali-resident: {nbytes / 1e9:.1f} GB of volumes are more than half of the "
                    f"{free / 1e9:.1f} GB that are free on {device}; choose dali-cached")
        self.device = device
        self.images: list[Any] = []  # float32 [1, z, y, x] on the device
        self.labels: list[Any] = []  # uint8, likewise
        self.host_labels: list[np.ndarray] = []
        self.numbers = [np.array([number], np.int64) for number in range(len(cases))]
        for case in cases:
            image, label = (np.ascontiguousarray(part) for part in case.load())
            self.host_labels.append(label)
            self.images.append(self._placed(image))
            self.labels.append(self._placed(label))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # DALI reads them on streams of its own

    def _placed(self, volume: np.ndarray) -> Any:
        return torch.from_numpy(volume).to(self.device) if self.device.type == "cuda" else volume


def _batches(parts: Sequence[Sequence[Any]], order: Sequence[int],
             size: int) -> Iterator[tuple[list[Any], ...]]:
    """Batches of `size` of each part, in this order, repeatedly."""
    numbers = itertools.cycle(order)
    while True:
        chosen = list(itertools.islice(numbers, size))
        yield tuple([part[number] for number in chosen] for part in parts)


def make_resident_pipeline(volumes: Volumes, order: Sequence[int], transform: TrainTransforms, *,
                           batch_size: int, device: torch.device, depth: int = 2,
                           **options: Any) -> Any:
    """A pipeline over volumes, in this order of their numbers, repeatedly.

    Outputs: image float32 and label uint8 [batch, 1, *patch] on `device`, and the volumes' numbers,
    int64 [batch, 1]. In the host's memory DALI reads volumes where they are. On a GPU its
    external_source first copies the volumes of a batch together, within the GPU's memory.
    """
    window = [1, *transform.patch]
    on_gpu = device.type == "cuda"
    # By default those copies would wait in the training's stream.
    stream = torch.cuda.Stream(device) if on_gpu else None

    def crops() -> tuple[Any, ...]:
        from nvidia.dali import fn

        # Two sources with one order: all outputs of a source are in the same memory.
        known, number = fn.external_source(
            _batches([volumes.host_labels, volumes.numbers], order, batch_size), num_outputs=2,
            layout=["CDHW", ""], no_copy=True)
        image, label = fn.external_source(
            _batches([volumes.images, volumes.labels], order, batch_size), num_outputs=2,
            layout="CDHW", no_copy=True, device="gpu" if on_gpu else "cpu", cuda_stream=stream)
        start = _crop_start(known, window, transform.oversampling, cache_objects=True)
        image = fn.slice(image, start=start, shape=window, axes=[0, 1, 2, 3])
        label = fn.slice(label, start=start, shape=window, axes=[0, 1, 2, 3])
        return image, label, number

    return _training_pipeline(crops, transform, batch_size=batch_size, device=device, depth=depth,
                              **options)


def _device_id(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def _name(row: torch.Tensor) -> str:
    """The text of one row of an output of file names."""
    return os.fsdecode(bytes(row.tolist()).rstrip(b"\0"))


class DaliLoader:
    """Epochs of batches [image, label, index] made by DALI, in the sampler's order.

    `workers` (at least 1) is DALI's number of threads. An epoch's last batch is filled by
    repeating its last sample, and cut again. With `dali_batches` the pipeline makes that
    many batches at once, across the ends of epochs, so that slow samples of a batch are balanced
    by the next ones. Raises LoaderUnavailable without the
    package; DataError if DALI fails, or reads another file than asked for.
    """

    outputs: tuple[str, ...] = ("image", "label", "image_file", "label_file")

    def __init__(self, dataset: VolumeDataset, options: Options,
                 cache_objects: bool = False) -> None:
        require()
        if not isinstance(dataset.transform, TrainTransforms):
            raise TypeError("only the specified training transforms have DALI twins")
        if dataset.transform.reference_starts:
            raise ValueError("DALI's crop takes the last position of an axis, too: it has "
                             "no --reference-starts")
        self.dataset, self.options, self.cache_objects = dataset, options, cache_objects
        self._batches: Iterator[Any] | None = None
        self._planned: list[list[int]] = []  # orders of the epochs that the pipeline will give

    def __len__(self) -> int:
        samples, size = len(self.options.sampler), self.options.batch_size
        return samples // size if self.options.drop_last else -(-samples // size)

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        order = list(self.options.sampler)
        if self._batches is None or not self._planned or self._planned[0] != order:
            self._start(order)
        batches, self._planned = self._batches, self._planned[1:]
        assert batches is not None
        self._batches = None  # an epoch left early leaves the pipeline in its middle
        yield from self._epoch(batches, order)
        self._batches = batches

    def _padded(self, order: list[int]) -> list[int]:
        """A whole number of batches: cut, or with the last sample repeated."""
        whole = len(self) * self.options.batch_size
        return order[:whole] + order[-1:] * (whole - len(order))

    def _start(self, order: list[int]) -> None:
        """A pipeline for this epoch and following ones, if the sampler can give their orders."""
        self._planned = [order, *self._foretold(len(order))]
        files = [self.dataset.case(i) for epoch in self._planned
                 for i in self._padded(epoch)]
        self._batches = self._run(files, self.options.batch_size, self.options.workers,
                                  self.options.dali_batches)

    def _foretold(self, samples: int) -> list[list[int]]:
        """Orders of the following epochs, from a sampler with set_epoch()."""
        sampler = copy.copy(self.options.sampler)
        epoch = getattr(sampler, "epoch", None)
        if epoch is None or not hasattr(sampler, "set_epoch"):
            return []
        orders = []
        for ahead in range(1, HORIZON // max(1, samples)):
            sampler.set_epoch(epoch + ahead)
            orders.append(list(sampler))
        return orders

    def _run(self, cases: Sequence[Case], size: int, threads: int,
             at_once: int = 1) -> Iterator[dict[str, torch.Tensor]]:
        """Batches of `size`, made several at once."""
        from nvidia.dali.plugin.pytorch import DALIGenericIterator

        generator = self.options.generator
        seed = generator.initial_seed() if generator is not None else torch.initial_seed()
        pipeline = self._pipeline(
            cases, batch_size=size * at_once, threads=max(1, threads), seed=seed & 0x7FFFFFFF,
            device=self.options.device, depth=self.options.dali_depth)
        for made, in DALIGenericIterator(pipeline, list(self.outputs), prepare_first_batch=False):
            for first in range(0, size * at_once, size):
                yield {name: part[first:first + size] for name, part in made.items()}

    def _pipeline(self, cases: Sequence[Case], **options: Any) -> Any:
        """A pipeline of `outputs` over these cases."""
        return make_pipeline(
            [os.fspath(case.image) for case in cases],
            [os.fspath(case.label) for case in cases], self.dataset.transform,
            cache_objects=self.cache_objects, mmap=self.options.dali_mmap, **options)

    def _epoch(self, batches: Iterator[Any], order: list[int]) -> Iterator[list[torch.Tensor]]:
        size = self.options.batch_size
        for number in range(len(self)):
            chosen = order[number * size:(number + 1) * size]
            try:
                made = next(batches)
            except RuntimeError as error:
                raise DataError(f"DALI failed at the samples {chosen}: {error}") from error
            self._check(chosen, made)
            rows = len(chosen)
            yield [made["image"][:rows], made["label"][:rows], torch.tensor(chosen)]

    def _check(self, chosen: list[int], made: dict[str, torch.Tensor]) -> None:
        """Compares the files that DALI read with those of the samples asked for."""
        for row, index in enumerate(chosen):
            case = self.dataset.case(index)
            for output, path in (("image_file", case.image), ("label_file", case.label)):
                found = _name(made[output][row])
                if found != os.fspath(path):
                    raise DataError(f"sample {index}: DALI read {found}, not {path}")

    def sample_cost(self, indices: Sequence[int]) -> float:
        """Mean seconds per sample of these on one thread; the first pass warms up."""
        import time

        cases = [self.dataset.case(index) for index in indices]
        batches = self._run(cases, 1, 1)
        for _ in cases:
            next(batches)
        began = time.perf_counter()
        for _ in cases:
            next(batches)
        return (time.perf_counter() - began) / len(cases)


class ResidentDaliLoader(DaliLoader):
    """The same with all volumes on the device, boxes kept: no file is read after the first batch.

    It crops on the device, as NVIDIA's loader for MLPerf does; that copies each sample's whole
    label there, while this one has the labels there, too. On the CPU volumes stay in the host's
    memory. Raises DataError if the volumes need more than half of the GPU's free memory.
    """

    outputs = ("image", "label", "number")

    def __init__(self, dataset: VolumeDataset, options: Options) -> None:
        super().__init__(dataset, options, cache_objects=True)
        self._volumes: Volumes | None = None

    def _pipeline(self, cases: Sequence[Case], **options: Any) -> Any:
        if self._volumes is None:
            self._volumes = Volumes(self.dataset.cases, self.options.device)
        numbers = {case: number for number, case in enumerate(self.dataset.cases)}
        return make_resident_pipeline(self._volumes, [numbers[case] for case in cases],
                                      self.dataset.transform, **options)

    def _check(self, chosen: list[int], made: dict[str, torch.Tensor]) -> None:
        """Compares the volumes that DALI cropped with those of the samples asked for."""
        for index, number in zip(chosen, made["number"][:, 0].tolist()):
            found, case = self.dataset.cases[number], self.dataset.case(index)
            if found != case:
                raise DataError(f"sample {index}: DALI cropped {found.image}, not {case.image}")


def require() -> None:
    """Raise LoaderUnavailable, saying how to install it, unless DALI can be imported."""
    try:
        import nvidia.dali.plugin.pytorch  # noqa: F401
    except ImportError as error:
        raise LoaderUnavailable(f"NVIDIA DALI is not installed: {INSTALL} (Linux; works "
                                f"without a GPU) ({error})") from error
