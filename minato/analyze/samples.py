"""Which samples a measurement makes, and what makes them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset

from ..dataset_calls import fetches_batches

clock = time.monotonic
#: batches that are planned at most
PLANNED = 4096


def is_iterable(loader: Any) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def sampler_batches(loader: Any) -> list[Any]:
    """Batches of indices (single ones where the loader makes no batches) of one epoch, as its
    sampler gives them. The program's own generators are not those of this process."""
    source = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    end, found = clock() + 2.0, []
    for batch in source:
        found.append(batch)
        if len(found) >= PLANNED or clock() > end:
            break
    return found


def indices(loader: Any) -> list[Any]:
    """Single samples, each once, in the order of the sampler."""
    found: dict[Any, None] = {}
    for batch in sampler_batches(loader):
        found.update(dict.fromkeys(batch if isinstance(batch, (list, tuple)) else [batch]))
    return list(found)


def sample_makers(loader: Any, skip: int = 0) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """Without end: an index and what makes that sample; the same sample comes again when all
    have been made. An iterable dataset gives the next sample at each call."""
    dataset = loader.dataset
    if is_iterable(loader):
        source = iter(dataset)
        for number in itertools.count():
            def next_sample() -> Any:
                nonlocal source
                try:
                    return next(source)
                except StopIteration:
                    source = iter(dataset)
                    return next(source)

            yield number, next_sample
    make = sample_maker(dataset)
    for index in itertools.islice(itertools.cycle(indices(loader)), skip, None):
        yield index, partial(make, index)


def sample_maker(dataset: Any) -> Callable[[Any], Any]:
    """What makes one sample by its index."""
    if fetches_batches(dataset):
        return lambda index: dataset.__getitems__([index])[0]
    made: Callable[[Any], Any] = dataset.__getitem__
    return made
