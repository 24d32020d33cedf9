"""The loaders under comparison: one function each, all with the same arguments.

`build` is the only entry. To add a loader, write a function of (dataset, Options) that
returns an iterable of batches (image, label, index), one pass per ``iter()``, and list it
in `LOADERS`; nothing else in the workload depends on the loader. `SAMPLES` lists
the loaders whose bytes differ from those of the NumPy transforms.
"""
from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from unet3d.options import LoaderUnavailable, Options

Batch = list[torch.Tensor]


def _pytorch(dataset: Dataset, options: Options) -> Iterable[Batch]:
    return DataLoader(dataset, **options.torch_arguments())


def _pytorch_out_of_order(dataset: Dataset, options: Options) -> Iterable[Batch]:
    return DataLoader(dataset, in_order=False, **options.torch_arguments())


def _not_built(error: ImportError) -> LoaderUnavailable:
    return LoaderUnavailable("minato is not built here: run `pip install -e .` in the "
                             f"repository's root ({error})")


def _minato_class() -> Any:
    try:
        from minato import DataLoader as MinatoLoader
    except ImportError as error:
        raise _not_built(error) from error
    return MinatoLoader


def _minato(dataset: Dataset, options: Options, **own: Any) -> Iterable[Batch]:
    if options.cache is not None:
        own["cache"] = options.cache
        if own.get("worker_type") == "native":  # native workers read no cache
            own["worker_type"] = "process"
    return _minato_class()(dataset, **options.torch_arguments(), **own)


def _minato_ready(dataset: Dataset, options: Options) -> Iterable[Batch]:
    return _minato(dataset, options, in_order=False, batching="ready")


def _minato_static(dataset: Dataset, options: Options) -> Iterable[Batch]:
    return _minato(dataset, options, scheduling="static")


def _minato_native(dataset: Dataset, options: Options) -> Iterable[Batch]:
    return _minato(dataset, options, worker_type="native" if options.workers else None)


def _minato_process(dataset: Dataset, options: Options) -> Iterable[Batch]:
    return _minato(dataset, options, worker_type="process")


def _minato_device(dataset: Dataset, options: Options, **own: Any) -> Iterable[Batch]:
    there = dataclasses.replace(options, pin_memory=False)  # device= makes it unnecessary
    return _minato(dataset, there, device=options.device, **own)


def _minato_native_device(dataset: Dataset, options: Options) -> Iterable[Batch]:
    return _minato_device(dataset, options, worker_type="native" if options.workers else None)


def _pytorch_expert(dataset: Dataset, options: Options) -> Iterable[Batch]:
    from unet3d.data import ExpertVolumes
    return DataLoader(ExpertVolumes(dataset), **options.torch_arguments())


def _dali(dataset: Dataset, options: Options) -> Iterable[Batch]:
    from unet3d.dali import DaliLoader
    return DaliLoader(dataset, options)


def _dali_cached(dataset: Dataset, options: Options) -> Iterable[Batch]:
    from unet3d.dali import DaliLoader
    return DaliLoader(dataset, options, cache_objects=True)


def _dali_resident(dataset: Dataset, options: Options) -> Iterable[Batch]:
    from unet3d.dali import ResidentDaliLoader
    return ResidentDaliLoader(dataset, options)


class SyntheticLoader:
    """A resident batch delivered again and again: the ceiling of the training loop.

    The first batch is made once, at construction. Indices follow the sampler, so that
    counting works as for a real loader; the volumes do not.
    """

    def __init__(self, dataset: Dataset, options: Options) -> None:
        self.options = options
        size = min(options.batch_size, len(options.sampler))
        image, label, _ = default_collate([dataset[i] for i in range(size)])
        self.image, self.label = image.to(options.device), label.to(options.device)

    def __len__(self) -> int:
        samples, size = len(self.options.sampler), self.options.batch_size
        return samples // size if self.options.drop_last else -(-samples // size)

    def __iter__(self) -> Iterator[Batch]:
        indices = list(self.options.sampler)
        size = self.options.batch_size
        for number in range(len(self)):
            chosen = indices[number * size:(number + 1) * size]
            yield [self.image[:len(chosen)], self.label[:len(chosen)],
                   torch.tensor(chosen)]


LOADERS: dict[str, Callable[[Dataset, Options], Iterable[Batch]]] = {
    "minato": _minato,
    "minato-ready": _minato_ready,
    "minato-static": _minato_static,
    "minato-native": _minato_native,
    "minato-native-cached": _minato_native,
    "minato-native-process": _minato_process,
    "minato-shared": _minato_process,
    "minato-device": _minato_device,
    "minato-native-device": _minato_native_device,
    "minato-native-device-cached": _minato_native_device,
    "minato-native-device-resident": _minato_native_device,
    "pytorch": _pytorch,
    "pytorch-ooo": _pytorch_out_of_order,
    "pytorch-expert": _pytorch_expert,
    "pytorch-native": _pytorch,
    "dali": _dali,
    "dali-cached": _dali_cached,
    "dali-resident": _dali_resident,
    "synthetic": SyntheticLoader,
}
# Loaders of the same kind deliver the same bytes for the same sample with equal seeds. Loaders of
# kind None have their own bytes. Those not listed are "reference", the NumPy transforms.
SAMPLES: dict[str, str | None] = {"minato-native": "native",
                                  "minato-native-cached": "native",
                                  "minato-native-process": "native",
                                  "minato-shared": "native",
                                  "minato-native-device": "native",
                                  "minato-native-device-cached": "native",
                                  "minato-native-device-resident": "native",
                                  "pytorch-native": "native",
                                  "dali": None, "dali-cached": None,
                                  "dali-resident": None, "synthetic": None}


#: workers that read volumes for an evaluation: each holds two, of up to 400 MB
EVALUATION_WORKERS = 2


def samples_of(name: str) -> str | None:
    """The kind of samples that loader `name` delivers."""
    return SAMPLES.get(name, "reference")


def dataset_for(name: str, dataset: Dataset) -> Dataset:
    """The dataset that loader `name` runs: `dataset`, or its native counterpart.

    The counterpart has its own epoch: make it once, and call its set_epoch(). Raises
    LoaderUnavailable.
    """
    if samples_of(name) != "native":
        return dataset
    try:
        from unet3d.native import NativeVolumes
    except ImportError as error:
        raise _not_built(error) from error
    if isinstance(dataset, NativeVolumes):
        return dataset
    resident = name.endswith("-resident")  # reads no label if its boxes are cached
    boxes = resident or name.endswith(("-cached", "-shared"))
    return NativeVolumes(dataset, boxes, resident)


def evaluation_loader(name: str, volumes: Dataset, workers: int) -> Iterable[Batch]:
    """Loader `name` over whole volumes of unequal shape, one per batch, in order; torch's if
    `name` makes only training samples (DALI, synthetic)."""
    loader = _minato_class() if name.startswith("minato") else DataLoader
    few = min(workers, EVALUATION_WORKERS)
    return loader(volumes, batch_size=1, num_workers=few, prefetch_factor=1 if few else None)


def without_device(name: str, device: torch.device) -> str | None:
    """A sentence on what loader `name` does if `device` is the CPU; None if it does what it is
    there for."""
    plain = name.replace("-resident", "-cached").replace("-device", "")
    if device.type != "cpu" or plain == name:
        return None
    if name == "dali-resident":
        return (f"{name}: the device is the CPU; volumes stay in the host's memory and are "
                "cropped there")
    return (f"{name}: the device is the CPU, to which nothing is copied ahead; this runs as "
            f"{plain} does")


def unavailable(name: str) -> str | None:
    """Why loader `name` cannot run, if a package is missing; None if it can."""
    try:
        if name.startswith("dali"):
            from unet3d import dali
            dali.require()
        elif name.startswith("minato") or samples_of(name) == "native":
            _minato_class()
    except LoaderUnavailable as error:
        return str(error)
    return None


def available(names: Iterable[str]) -> list[str]:
    """Those of `names` that can run; prints to standard error which cannot, and why."""
    found = []
    for name in names:
        if reason := unavailable(name):
            print(f"left out: {name}: {reason}", file=sys.stderr)
        else:
            found.append(name)
    return found


def build(name: str, dataset: Dataset, *, batch_size: int, sampler: Sampler[int],
          workers: int, **rest: Any) -> Iterable[Batch]:
    """Make loader `name` (a key of `LOADERS`) over `dataset_for(name, dataset)`; `rest` are
    further fields of `Options`.

    Each ``iter()`` of the result is one epoch of batches [image float32 [n, 1, *patch],
    label uint8 [n, 1, *patch], index int64 [n]]. Raises LoaderUnavailable or ValueError.
    """
    if name not in LOADERS:
        raise ValueError(f"unknown loader {name!r}; choose one of {', '.join(LOADERS)}")
    options = Options(batch_size=batch_size, sampler=sampler, workers=workers, **rest)
    return LOADERS[name](dataset_for(name, dataset), options)
