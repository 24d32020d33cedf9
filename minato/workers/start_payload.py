"""What travels to workers: pickled once, and loaded by each process that needs its own.

multiprocessing pickles a process's arguments for that one child, with descriptors of queues
and shared tensors that only it can take over.  Here the pickle lies in a memory file, and the
descriptors that it speaks of beside it.  Both can be passed on, so the process that starts
workers can start each as torch does, from the trainer's pickle: its own copy may have opened
what cannot be pickled any more.
"""

from __future__ import annotations

import fcntl
import mmap
import multiprocessing
import os
import pickle
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import context, process, reduction
from typing import Any

import torch
from torch.multiprocessing import reductions

#: of the pickle that is being loaded
_beside: list[int] = []


class _Place:
    """In a pickle: the descriptor with this place among those beside it."""

    def __init__(self, place: int) -> None:
        self.place = place

    def detach(self) -> int:
        return os.dup(_beside[self.place])


class _Noting:
    """Notes descriptors in place of the process that multiprocessing pickles for."""

    DupFd = _Place

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, descriptor: int) -> int:
        self.descriptors.append(descriptor)
        return len(self.descriptors) - 1


class Pickled:
    """An object's pickle in a memory file. It may be sent to a new process, and from there
    to others; the object must live until the first has it.

    Raises what pickling it raises.

    Attributes:
        shared: storages on an accelerator that its pickle has handles of. Torch counts one user
            of such memory for each pickling, and here each process that loads it takes one away:
            they must live, here, for as long as any of these.
        on_accelerator: whether there are any.
    """

    _beside: list[int]

    def __init__(self, obj: Any) -> None:
        noting: Any = _Noting()
        outer = context.get_spawning_popen()
        self._loaded = False  # somewhere
        self._mine = True  # whose descriptors these are; else the object's
        self._file, self._beside = -1, []
        self._file = os.memfd_create("minato-dataset")
        self.shared: list[Any] = []
        context.set_spawning_popen(noting)
        try:
            with open(self._file, "wb", closefd=False) as file, _noting_shared(self.shared):
                reduction.dump(obj, file)
        finally:
            context.set_spawning_popen(outer)
        self.on_accelerator = bool(self.shared)
        self._beside, self._mine = noting.descriptors, False

    def __getstate__(self) -> Any:
        descriptors = [reduction.DupFd(fd) for fd in (self._file, *self._beside)]
        return self._loaded, self.on_accelerator, descriptors

    def __setstate__(self, state: Any) -> None:
        self._loaded, self.on_accelerator, descriptors = state
        self._mine, self.shared = True, []
        self._file, *self._beside = [d.detach() for d in descriptors]

    def load(self) -> Any:
        """The object anew."""
        here: Any = process.current_process()
        again, self._loaded = self._loaded, True
        _beside[:] = self._beside
        here._inheriting = True  # as while multiprocessing loads it
        try:
            with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as data, _counting(again):
                return pickle.loads(data)
        finally:
            del here._inheriting
            _beside.clear()

    def descriptors(self) -> set[int]:
        """Those that this holds."""
        return {fd for fd in (self._file, *self._beside) if fd >= 0}

    def close(self) -> None:
        """Frees what it holds: it will be loaded and sent no more."""
        mine = [self._file, *self._beside] if self._mine else [self._file]
        self._file, self._beside = -1, []
        for fd in mine:
            if fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        self.close()


@contextmanager
def _noting_shared(storages: list[Any]) -> Iterator[None]:
    """Notes each storage on an accelerator that a handle is made of."""
    kind: Any = torch.UntypedStorage
    own = vars(kind).get("_share_cuda_")
    share = kind._share_cuda_

    def noted(storage: Any, *args: Any, **kwargs: Any) -> Any:
        storages.append(storage)
        return share(storage, *args, **kwargs)

    kind._share_cuda_ = noted
    try:
        yield
    finally:
        if own is None:  # it is the base's
            del kind._share_cuda_
        else:
            kind._share_cuda_ = own


@contextmanager
def _counting(again: bool) -> Iterator[None]:
    """Tensors that share memory by name count its users: pickling added one, which loading
    takes away. What is loaded again takes away nobody's."""
    rebuild: Callable[..., Any] = reductions.rebuild_storage_filename

    def counted(*args: Any) -> Any:
        storage = rebuild(*args)
        storage._shared_incref()
        return storage

    if again:
        reductions.rebuild_storage_filename = counted
    try:
        yield
    finally:
        reductions.rebuild_storage_filename = rebuild


# ---- what loading it has opened -----------------------------------------------------------


def opened_here(passed: set[int]) -> bool:
    """Whether this process, which a start method has begun afresh, has opened a file, a socket
    or the like itself: its forks would share one offset, one stream, one state. passed: the
    descriptors that it was given, besides those of multiprocessing; copies of them are shared
    by all processes anyway."""
    given = {_identity(fd) for fd in passed}
    known = passed | _of_multiprocessing()
    others = {fd for fd in map(int, os.listdir("/proc/self/fd")) if fd not in known}
    return any(
        (identity := _identity(fd)) is not None
        and identity not in given
        and not _is_stateless(fd)
        and not _is_sentinel(fd)
        for fd in others
    )


def _of_multiprocessing() -> set[int]:
    from multiprocessing import forkserver, resource_tracker

    known: set[Any] = {0, 1, 2}
    parent = multiprocessing.parent_process()
    if parent is not None:
        known.add(parent.sentinel)
    known.add(vars(resource_tracker)["_resource_tracker"].__dict__.get("_fd"))
    server = vars(forkserver)["_forkserver"].__dict__
    known.add(server.get("_forkserver_alive_fd"))
    known.update(server.get("_inherited_fds") or ())
    return known


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        about = os.fstat(fd)
    except OSError:  # what listed them
        return None
    return about.st_dev, about.st_ino


def _is_stateless(fd: int) -> bool:
    """Devices of memory (null, zero, random and their like), and logs: what is only appended to
    a file goes to its end, whoever else writes there."""
    about, flags = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
    log = flags & os.O_APPEND and flags & os.O_ACCMODE == os.O_WRONLY
    memory = stat.S_ISCHR(about.st_mode) and os.major(about.st_rdev) == 1
    return memory or bool(stat.S_ISREG(about.st_mode) and log)


def _is_sentinel(fd: int) -> bool:
    """What tells the parent of this process's end: it came by the exec that began this
    process, and has no name here. Of pipes that libraries make and leave inheritable, the
    other end is here, too."""
    return (
        stat.S_ISFIFO(os.fstat(fd).st_mode)
        and os.get_inheritable(fd)
        and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
    )
