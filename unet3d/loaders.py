"""The loaders under comparison: one function each, all given the same arguments.

`build` is the only entry. To add a loader, write a function of (dataset, Options) that
returns an iterable of batches (image, label, index), one pass per ``iter()``, and list it
in `LOADERS`; nothing else in the workload depends on which loader it is.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

Batch = list[torch.Tensor]


class LoaderUnavailable(RuntimeError):
    """The loader's package is not installed; the message says how to get it."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What a loader may know. `sampler` yields the indices of one epoch on this rank."""

    batch_size: int
    sampler: Sampler[int]
    workers: int
    drop_last: bool = False
    pin_memory: bool = False
    generator: torch.Generator | None = None
    device: torch.device = torch.device("cpu")
    timeout_s: float = 0.0  # the longest wait for a batch; 0 waits for ever
    collate_fn: Callable[[list], Any] | None = None  # None: torch's default

    def torch_arguments(self) -> dict[str, Any]:
        """The same, as arguments of torch.utils.data.DataLoader."""
        return {"batch_size": self.batch_size, "sampler": self.sampler,
                "num_workers": self.workers, "drop_last": self.drop_last,
                "pin_memory": self.pin_memory, "generator": self.generator,
                "collate_fn": self.collate_fn,
                "persistent_workers": self.workers > 0,
                "timeout": self.timeout_s if self.workers else 0.0}


def _pytorch(dataset: Dataset, options: Options) -> Iterable[Batch]:
    return DataLoader(dataset, **options.torch_arguments())


def _pytorch_out_of_order(dataset: Dataset, options: Options) -> Iterable[Batch]:
    return DataLoader(dataset, in_order=False, **options.torch_arguments())


def _minato(dataset: Dataset, options: Options, **own: Any) -> Iterable[Batch]:
    try:
        from minato import DataLoader as MinatoLoader
    except ImportError as error:
        raise LoaderUnavailable("minato is not built here: run `pip install .` in the "
                                f"repository's root ({error})") from error
    return MinatoLoader(dataset, **options.torch_arguments(), **own)


def _minato_ready(dataset: Dataset, options: Options) -> Iterable[Batch]:
    return _minato(dataset, options, in_order=False, batching="ready")


class SyntheticLoader:
    """A resident batch handed out again and again: the ceiling of the training loop.

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
    "pytorch": _pytorch,
    "pytorch-ooo": _pytorch_out_of_order,
    "synthetic": SyntheticLoader,
}


def build(name: str, dataset: Dataset, *, batch_size: int, sampler: Sampler[int],
          workers: int, **rest: Any) -> Iterable[Batch]:
    """Make loader `name` (a key of `LOADERS`); `rest` are further fields of `Options`.

    Each ``iter()`` of the result is one epoch of batches [image float32 [n, 1, *patch],
    label uint8 [n, 1, *patch], index int64 [n]]. Raises LoaderUnavailable or ValueError.
    """
    if name not in LOADERS:
        raise ValueError(f"unknown loader {name!r}; choose one of {', '.join(LOADERS)}")
    options = Options(batch_size=batch_size, sampler=sampler, workers=workers, **rest)
    return LOADERS[name](dataset, options)
