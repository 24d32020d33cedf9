"""Which samples a measurement makes, and what makes them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker

from ..dataset_calls import fetches_batches

#: what a measurement calls with each message
Send = Callable[[dict[str, Any]], None]
clock = time.monotonic
#: batches that are planned at most
PLANNED = 4096


@contextlib.contextmanager
def as_worker(loader: Any) -> Iterator[None]:
    """Inside the block this process is the only worker of a loader that has workers: samples may need
    what its worker_init_fn sets up. Forks inherit that."""
    if not loader.num_workers:
        yield
        return
    vars(worker)["_worker_info"] = worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=loader.dataset)
    try:
        if loader.worker_init_fn is not None:
            loader.worker_init_fn(0)
        yield
    finally:
        vars(worker)["_worker_info"] = None


def is_iterable(loader: Any) -> bool:
    return isinstance(loader.dataset, IterableDataset)


@functools.lru_cache(1)
def sampler_batches(loader: Any) -> list[list[Any]]:
    """Batches of indices of one epoch, as its sampler gives them; of one index each where the loader
    makes no batches. The program's own generators are not those of this process. A sampler may be
    slow, so it runs once in a process."""
    batched = loader.batch_sampler is not None
    end, found = clock() + 1.0, []
    for given in loader.batch_sampler if batched else loader.sampler:
        found.append(list(given) if batched else [given])
        if len(found) >= PLANNED or clock() > end:
            break
    return found


def indices(loader: Any) -> list[Any]:
    """Single samples, each once, in the order of the sampler."""
    found: dict[str, Any] = {}
    for batch in sampler_batches(loader):
        for index in batch:
            found.setdefault(str(index), index)
    return list(found.values())


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
