"""What the loader sends once to the process that forks its workers."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any, Callable

import numpy  # noqa: F401  (its pool's threads are among those counted)
from torch.utils.data import Subset

from .. import _core
from ..errors import add_note
from .pickled import Pickled


def count_threads() -> int:
    """Threads of this process, those of C libraries included."""
    return len(os.listdir("/proc/self/task"))


def offered(dataset: Any, name: str) -> Callable[..., Any] | None:
    """A method that the dataset has, not one that its ``__getattr__`` makes up."""
    if name in getattr(dataset, "__dict__", ()) or hasattr(type(dataset), name):
        method = getattr(dataset, name)
        return method if callable(method) else None
    return None


def behind_subsets(dataset: Any) -> tuple[Any, list[Subset[Any]]]:
    """The dataset that torch's subsets of it show, and these, the outermost first."""
    subsets = []
    while type(dataset) is Subset:  # a class derived from it may give other samples
        subsets.append(dataset)
        dataset = dataset.dataset
    return dataset, subsets


def fetches_batches(dataset: Any) -> bool:
    """Whether a batch's samples are to be asked for in one call, as torch does of a dataset
    with ``__getitems__``. A Subset has that for its dataset's sake: where that one has none
    the Subset asks it for one sample after another, and so may we."""
    return bool(getattr(behind_subsets(dataset)[0], "__getitems__", None))


class _OneByOne:
    """Samples of a Subset as its ``__getitems__`` gets them from a dataset without."""

    def __init__(self, subsets: list[Subset[Any]]) -> None:
        self.subsets = subsets

    def __getitem__(self, index: Any) -> Any:
        for subset in self.subsets:
            index = subset.indices[index]
        return subset.dataset[index]


def by_sample(dataset: Any) -> Any:
    """What gives a sample of a dataset that is not to be asked for whole batches."""
    subsets = behind_subsets(dataset)[1]
    return _OneByOne(subsets) if subsets else dataset


class Memory:
    """The shared mapping on its way: inherited under fork, else by its descriptor."""

    def __init__(self, engine: Any) -> None:
        self.segment = engine.segment
        self._fd = engine.fd

    def __getstate__(self) -> Any:
        return DupFd(self._fd)

    def __setstate__(self, dup: Any) -> None:
        self._fd = dup.detach()
        self.segment = _core.Segment(self._fd)

    def descriptors(self) -> set[int]:
        return {self._fd} if self._fd >= 0 else set()

    def settle(self) -> None:
        """Frees the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass
class Job:
    """Everything a worker needs."""

    memory: Memory
    one_thread: bool  # in all libraries, see workers/library_threads.py
    blocked: frozenset[int]  # signals, in the trainer
    num_workers: int
    base_seed: int
    dataset_kind: int
    auto_collation: bool
    drop_last: bool
    seed_per_sample: bool
    user_epoch: int  # 1 + what the dataset was told before it was sent; 0: nothing
    dataset: Any = None
    collate_fn: Any = None
    worker_init_fn: Callable[[int], object] | None = None
    pickled: Pickled | None = None  # these three, where processes do not inherit them
    splits: bool = False  # batches that one worker makes may be split
    probing: bool = False  # workers find out what sending a sample takes
    places: bool = False  # default_collate's batches may go into rows
    on_error: str = "raise"  # see workers/on_error.py
    #: by worker, where an iterable dataset goes on: snapshot, and batches delivered since
    starts: list[tuple[bytes | None, int]] | None = None
    zygote: int = 0  # its process id

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "dataset": None, "collate_fn": None, "worker_init_fn": None}

    def pickle(self) -> None:
        """For processes that inherit nothing. One pickle, so identities survive."""
        parts = {"dataset": self.dataset, "collate_fn": self.collate_fn,
                 "worker_init_fn": self.worker_init_fn}  # fmt: skip
        try:
            self.pickled = Pickled(tuple(parts.values()))
        except Exception as error:
            for name, part in parts.items():
                try:
                    Pickled(part).close()
                except Exception:
                    add_note(error, f"minato: it is {name} that cannot be pickled, which the start "
                             "methods 'spawn' and 'forkserver' need. A function or class that lies "
                             "at the top of a module can be.")  # fmt: skip
            raise

    def load(self) -> None:
        """In a process that has not inherited them."""
        if self.pickled is not None:
            self.dataset, self.collate_fn, self.worker_init_fn = self.pickled.load()

    def unload(self) -> None:
        """Lets go of what loading has opened."""
        self.dataset = self.collate_fn = self.worker_init_fn = None
        gc.collect()

    def descriptors(self) -> set[int]:
        """Those that it holds."""
        pickled = self.pickled.descriptors() if self.pickled is not None else set()
        return self.memory.descriptors() | pickled

    def settle(self) -> None:
        """In zygote and workers: it will not be sent on, and its descriptors can go."""
        self.memory.settle()
        if self.pickled is not None:
            self.pickled.close()
            self.pickled = None
