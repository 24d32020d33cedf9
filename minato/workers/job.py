"""The data that the loader sends once to the process that forks its workers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import spawn
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any, Callable

from .. import _core
from .._notes import Notes
from ..errors import add_note
from .open_files import OpenFile
from .start_payload import Pickled, inheriting, main_module

if TYPE_CHECKING:
    from ..cache.datasets import Through


class Memory:
    """The shared mapping and the lifeline, on their way to a new process: inherited under fork,
    else sent as descriptors. The lifeline shows the end of the trainer."""

    def __init__(self, segment: Any, fd: int) -> None:
        """fd: the mapping's descriptor; -1: processes inherit the mapping."""
        self.segment = segment
        self._fd = fd

    def __getstate__(self) -> Any:
        return DupFd(self._fd), DupFd(self.segment.lifeline)

    def __setstate__(self, dups: Any) -> None:
        self._fd, lifeline = (dup.detach() for dup in dups)
        self.segment = _core.Segment(self._fd, lifeline)

    def settle(self) -> None:
        """Frees the mapping's descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _unpicklable(values: Mapping[str, Any]) -> list[str]:
    """The names of those that cannot be pickled."""
    names = []
    for name, value in values.items():
        try:
            Pickled(value).close()
        except Exception:
            names.append(name)
    return names


#: the fields that go into one pickle, because they may share objects
SENT_TOGETHER = ("dataset", "collate_fn", "worker_init_fn", "generator")


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
    ranks: tuple[int, int, int]  # that share the epoch, as Seeder.share() takes them
    by_position: bool  # a batch's own seeds are made from its first sample's position
    user_epoch: int  # 1 + the epoch that the dataset got before it was sent; 0: none
    dataset: Any = None
    collate_fn: Any = None
    worker_init_fn: Callable[[int], object] | None = None
    generator: Any = None  # the loader's own, which the dataset may use as well
    pickled: Pickled | None = None  # the four fields above, if processes do not inherit them
    main: dict[str, Any] = field(default_factory=dict)  # the main module then; see main_module()
    splits: bool = False  # batches that one worker makes may be split
    collates_by_default: bool = False  # split batches are collated by the trainer's default_collate
    probing: bool = False  # workers measure the time for sending a sample
    places: bool = False  # default_collate's batches may go into rows
    on_error: str = "raise"  # see workers/on_error.py
    #: by worker, if an iterable dataset resumes: its snapshot, and batches delivered since
    starts: list[tuple[bytes | None, int]] | None = None
    through: Through | None = None  # the cache that samples are read through
    notes: Notes | None = None  # the file that processes write notes to
    identity: tuple[int, ...] = ()  # of worker 0, as multiprocessing counts the trainer's children
    forked: bool = False  # the zygote is a fork of the program
    handled: frozenset[int] = frozenset()  # signals with handlers; see workers/signals.py
    #: files that the program has open, if workers are forks of it; each worker opens them again
    files: Sequence[OpenFile] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **dict.fromkeys(SENT_TOGETHER)}

    def pickle(self) -> None:
        """Pickles the dataset and functions for processes that inherit nothing. It is one pickle,
        so identities survive."""
        parts = {name: getattr(self, name) for name in SENT_TOGETHER}
        self.main = main_module()
        try:
            self.pickled = Pickled(tuple(parts.values()))
        except Exception as error:
            for name in _unpicklable(parts):
                attributes = _unpicklable(getattr(parts[name], "__dict__", {}))
                if attributes:
                    advice = (f"its attribute {attributes[0]!r} cannot be. Make that in the worker, at "
                              "its first use.")  # fmt: skip
                else:
                    advice = "a function or class that lies at the top of a module can be."
                add_note(error, f"minato: it is {name} that cannot be pickled, which the start methods "
                         f"'spawn' and 'forkserver' need: {advice}")  # fmt: skip
            raise

    def load(self) -> None:
        """Loads the pickle, in a worker that has not inherited its objects."""
        if self.pickled is not None:
            with inheriting():
                spawn.prepare(self.main)
                vars(self).update(zip(SENT_TOGETHER, self.pickled.load(), strict=True))

    def source(self, changed: bool = False) -> Any:
        """Returns what samples come from: the dataset, or what reads it through the cache. changed: the
        dataset is not what it was when the worker started."""
        if self.through is None:
            return self.dataset
        # A process that has imported the program may have other values under its names.
        looks = changed or self.worker_init_fn is not None or self.pickled is not None
        return self.through.over(self.dataset, looks)

    def settle(self) -> None:
        """Closes the descriptors, in a worker: the job will not be sent on."""
        self.memory.settle()
        if self.pickled is not None:
            self.pickled.close()
            self.pickled = None
