"""The data that the loader sends once to the process that forks its workers.

Workers that inherit nothing get the dataset and functions as a pickle that is made once, and that
each of them loads. multiprocessing pickles a process's arguments for one child, with descriptors (of
queues and shared
tensors) that only that child can take over. Here the pickle is in a memory file, together with the
descriptors that it refers to, and the zygote can pass both on. Each worker loads the trainer's
pickle by itself, as torch's workers do, and owns the objects.

Large and plain objects are not copied into each worker. They follow the pickle in the same file.
The zygote loads containers of text and numbers once, and its forks inherit them. Each worker maps
the memory of arrays and tensors.
"""

from __future__ import annotations

import fcntl
import logging
import marshal
import mmap
import os
import pickle
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import context, process, reduction, spawn
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import numpy as np
import torch
from torch.multiprocessing import reductions

from .. import _core
from ..errors import add_note
from ..worker_exits import Notes

if TYPE_CHECKING:
    from ..cache.datasets import Through

log = logging.getLogger("minato")

#: a list, tuple or dict with more plain values than this is loaded once for all workers
PLAIN_MOST = 1_000
#: so are text, bytes and the memory of arrays with more bytes than this
BYTES_MOST = 1 << 16
#: the memory of arrays and tensors begins at multiples of this
ALIGNED = 64

_SCALARS = frozenset({str, int, float, bytes, bool, complex, type(None)})
_CONTAINERS = frozenset({list, tuple, dict})
_BYTES = frozenset({str, bytes, bytearray})

#: descriptors of the pickle that is being loaded
_beside: list[int] = []


class _Place:
    """Stands for a descriptor in a pickle: its place in the list of descriptors."""

    def __init__(self, place: int) -> None:
        self.place = place

    def detach(self) -> int:
        return os.dup(_beside[self.place])


class _Noting:
    """Collects descriptors. multiprocessing takes it for the process that it pickles for."""

    DupFd = _Place

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, descriptor: int) -> int:
        self.descriptors.append(descriptor)
        return len(self.descriptors) - 1


class Pickled:
    """An object's pickle in a memory file. It may be sent to a new process, and from there to
    others. The object must live until the first process has the pickle.

    Raises the errors of pickling the object.

    Attributes:
        shared: storages that processes share and count: on an accelerator, or by name. Each process
            that loads them counts itself. So they must live here as long as any such process.
    """

    _beside: list[int]

    def __init__(self, obj: Any) -> None:
        noting: Any = _Noting()
        outer = context.get_spawning_popen()
        self._apart: Any = None  # the loaded objects that the pickle leaves out
        self._mine = True  # this owns the descriptors; else the object owns them
        self._file, self._beside = -1, []
        self._file = os.memfd_create("minato-dataset")
        self.shared: list[Any] = []
        context.set_spawning_popen(noting)
        try:
            with open(self._file, "wb", closefd=False) as file, _noting_shared(self.shared):
                self._begins = self._dump(obj, file)
        finally:
            context.set_spawning_popen(outer)
        self._beside, self._mine = noting.descriptors, False

    def _dump(self, obj: Any, file: Any) -> int:
        """Writes the pickle. Returns the offset of the table of objects that it leaves out."""
        pickler: Any = reduction.ForkingPickler(file)
        share = pickler.dispatch_table[torch.UntypedStorage]

        def reduce_storage(storage: Any) -> Any:
            rebuild, arguments = share(storage)
            if rebuild is not reductions.rebuild_storage_filename:
                return rebuild, arguments
            storage._shared_decref()  # torch counted it for one process that loads it
            self.shared.append(storage)
            return _rebuild_by_name, arguments

        pickler.dispatch_table[torch.UntypedStorage] = reduce_storage
        apart = _Apart(arrays=np.ndarray not in pickler.dispatch_table)
        pickler.persistent_id = apart.id_of
        pickler.dump(obj)
        return apart.write(file)

    def __getstate__(self) -> Any:
        return self._begins, [reduction.DupFd(fd) for fd in (self._file, *self._beside)]

    def __setstate__(self, state: Any) -> None:
        self._begins, descriptors = state
        self._apart, self._mine, self.shared = None, True, []
        self._file, *self._beside = [d.detach() for d in descriptors]

    def load_apart(self) -> None:
        """Loads the objects that the pickle leaves out, for this process and its forks. Runs no
        code of the program."""
        with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as data:
            data.seek(self._begins)
            mutable, arrays, storages = pickle.load(data)
            with memoryview(data) as whole, whole[data.tell() :] as rest:
                plain = marshal.loads(rest)
        for place in mutable:
            plain[place] = bytearray(plain[place])
        self._apart = plain, arrays, storages

    def load(self) -> Any:
        """Loads a new copy of the object."""
        if self._apart is None:
            self.load_apart()
        apart, self._apart = self._apart, None  # only this copy may use the containers
        _beside[:] = self._beside
        try:
            with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as data:
                return _Loader(self._file, data, apart).load()
        finally:
            _beside.clear()

    def close(self) -> None:
        """Closes file and descriptors. The pickle can no longer be loaded or sent."""
        mine = [self._file, *self._beside] if self._mine else [self._file]
        self._file, self._beside, self._apart = -1, [], None
        for fd in mine:
            if fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        self.close()


@contextmanager
def _noting_shared(storages: list[Any]) -> Iterator[None]:
    """Collects each storage on an accelerator for which a handle is made."""
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
        if own is None:  # the method is inherited
            del kind._share_cuda_
        else:
            kind._share_cuda_ = own


def _rebuild_by_name(*args: Any) -> Any:
    """A storage that is shared by name and counts its users. torch's function subtracts the user
    that pickling adds; here pickling has added none, so one is added first."""
    storage = reductions.rebuild_storage_filename(*args)
    storage._shared_incref()
    return storage


# ---- large and plain objects --------------------------------------------------------------


def _kinds(container: Any) -> set[type]:
    """The types of the items of a list, tuple or dict."""
    kinds = set(map(type, container))
    return kinds.union(map(type, container.values())) if type(container) is dict else kinds


def _is_plain(container: Any) -> bool:
    """Whether a container holds only plain values, or tuples of them. Their identity does not
    matter, and they run no code when they are loaded."""
    kinds = _kinds(container)
    if tuple in kinds:
        parts = [container, container.values()] if type(container) is dict else [container]
        tuples = (value for value in chain(*parts) if type(value) is tuple)
        kinds = (kinds - {tuple}).union(map(type, chain.from_iterable(tuples)))
    return kinds <= _SCALARS


class _Apart:
    """The objects that a pickle leaves out, each once. arrays: also leave out NumPy's arrays."""

    def __init__(self, arrays: bool) -> None:
        self._with_arrays = arrays
        self._plain: list[Any] = []
        self._arrays: list[Any] = []
        self._storages: list[Any] = []
        self._ids: dict[int, Any] = {}
        self._seen: list[Any] = []  # keeps them alive, so that no other object gets their id

    def id_of(self, obj: Any) -> Any:
        """For Pickler.persistent_id, which asks for every object. Returns the place of an object
        that is left out, else None."""
        kind = type(obj)
        if kind in _CONTAINERS:
            large = len(obj) > PLAIN_MOST
        elif kind in _BYTES:
            large = len(obj) > BYTES_MOST
        elif kind is np.ndarray:
            large = self._with_arrays and obj.nbytes > BYTES_MOST
        else:
            large = kind is torch.UntypedStorage
        if not large:
            return None
        key = obj._cdata if kind is torch.UntypedStorage else id(obj)
        if key not in self._ids:
            self._seen.append(obj)
            self._ids[key] = self._place(kind, obj)
        return self._ids[key]

    def _place(self, kind: type, obj: Any) -> tuple[str, int] | None:
        if kind is np.ndarray:
            name, objects, leaves_out = "array", self._arrays, obj.dtype.kind in "biufcSUVmM"
            leaves_out = leaves_out and not obj.dtype.hasobject
        elif kind is torch.UntypedStorage:
            # A shared storage stays shared. torch would move the others to shared memory, although
            # other objects refer to them: arrays of NumPy, say.
            name, objects = "storage", self._storages
            leaves_out = obj.device.type == "cpu" and obj.nbytes() > 0 and not obj.is_shared()
        else:
            name, objects = "plain", self._plain
            leaves_out = kind in _BYTES or _is_plain(obj)
        if not leaves_out:
            return None
        objects.append(obj)
        return name, len(objects) - 1

    def write(self, file: Any) -> int:
        """Appends to the file: memory, the table that describes it, plain values. Returns the
        offset of the table."""
        arrays, storages = [], []
        for array in self._arrays:
            fortran = array.flags.f_contiguous and not array.flags.c_contiguous
            order: Any = "F" if fortran else "C"
            flat = np.asarray(array, order=order).reshape(-1, order=order).view(np.uint8)
            arrays.append((array.shape, array.dtype, order, _write(file, flat)))
        for storage in self._storages:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            storages.append((storage.nbytes(), _write(file, flat)))
        begins: int = file.tell()
        mutable = [place for place, one in enumerate(self._plain) if type(one) is bytearray]
        pickle.dump((mutable, arrays, storages), file)
        # Pickle would take four times as long for text. But marshal turns a bytearray into bytes.
        marshal.dump(self._plain, file)
        return begins


def _write(file: Any, memory: Any) -> int:
    """Writes memory at an aligned offset, which it returns."""
    file.write(bytes(-file.tell() % ALIGNED))
    place: int = file.tell()
    file.write(memory)
    return place


class _Loader(pickle.Unpickler):
    """Loads a pickle together with the objects that it leaves out."""

    def __init__(self, file: int, data: Any, apart: Any) -> None:
        super().__init__(data)
        self._file = file
        self._plain, self._arrays, self._storages = apart
        self._made: dict[Any, Any] = {}
        self._maps: dict[int, mmap.mmap] = {}

    def persistent_load(self, place: Any) -> Any:
        name, number = place
        if name == "plain":
            return self._plain[number]
        if place not in self._made:
            make = self._array if name == "array" else self._storage
            self._made[place] = make(number)
        return self._made[place]

    def _map(self, access: int) -> mmap.mmap:
        if access not in self._maps:
            self._maps[access] = mmap.mmap(self._file, 0, access=access)
        return self._maps[access]

    def _array(self, number: int) -> Any:
        """An array over pages that this process copies when it writes to them."""
        shape, dtype, order, place = self._arrays[number]
        return np.ndarray(shape, dtype, self._map(mmap.ACCESS_COPY), place, order=order)

    def _storage(self, number: int) -> Any:
        """A storage over pages that workers share, as with torch: each sees what others write."""
        size, place = self._storages[number]
        data = self._map(mmap.ACCESS_WRITE)
        return torch.frombuffer(data, dtype=torch.uint8, count=size, offset=place).untyped_storage()


# ---- the main module ----------------------------------------------------------------------

_lock = threading.Lock()


def _forked() -> None:
    """Replaces the lock: in a fork, the thread that holds it does not exist."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


def main_module() -> dict[str, Any]:
    """The module that multiprocessing would import as main module of a new process."""
    data = spawn.get_preparation_data("")
    return {name: value for name, value in data.items() if name.startswith("init_main_from_")}


@contextmanager
def without_main(kind: type[str]) -> Iterator[None]:
    """Processes that are started inside with a name of this type do not import the main module.
    Processes that other threads start meanwhile do."""
    with _lock:
        prepare: Any = spawn.get_preparation_data

        def prepare_without(name: str) -> Any:
            data = prepare(name)
            if type(name) is kind:
                data.pop("init_main_from_name", None)
                data.pop("init_main_from_path", None)
            return data

        spawn.get_preparation_data = prepare_without
        try:
            yield
        finally:
            spawn.get_preparation_data = prepare


@contextmanager
def inheriting() -> Iterator[None]:
    """Marks this process as one that multiprocessing prepares: a main module that starts processes
    then gets multiprocessing's error."""
    here: Any = process.current_process()
    here._inheriting = True
    try:
        yield
    finally:
        del here._inheriting


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


# ---- files that the program has open when it forks its workers ------------------------------
#
# A fork inherits descriptors, and shares each file's position with all other processes. Two workers
# that seek and read would move each other's position. So a worker opens each read-only file again,
# at the position that it had in the program. The descriptor keeps its number, so this works for
# buffered and compressed readers, zip archives and libraries in C alike.
#
# Files that are open for writing stay shared. Otherwise several workers that append to one file
# would overwrite each other's data.

_FOLDER = "/proc/self/fd"
#: flags of the old open file description that the new one gets, too
_KEPT = os.O_DIRECT | os.O_NOATIME | os.O_NONBLOCK
#: in the list of a description's locks: a lock that keeps others from reading
_EXCLUSIVE = (b"FLOCK  ADVISORY  WRITE", b"OFDLCK ADVISORY  WRITE")


class OpenFile(NamedTuple):
    """A regular file that is open for reading only."""

    descriptor: int
    identity: tuple[int, int]  # device and inode
    position: int
    flags: int  # for opening it again
    inheritable: bool


def find_open_files() -> list[OpenFile]:
    """The files that workers are to open again. Called in the program just before the fork. Logs
    files of the program that may not be opened again. Empty if there is no /proc."""
    found, refused = [], []
    try:
        names = os.listdir(_FOLDER)
    except OSError:
        return []
    for number in map(int, names):
        with suppress(OSError):  # the descriptor that listed them
            if number > 2 and (file := _read_only(number)) is not None:
                if os.access(f"{_FOLDER}/{number}", os.R_OK, effective_ids=True):
                    found.append(file)
                elif not file.inheritable:  # else it came from another program
                    refused.append(os.readlink(f"{_FOLDER}/{number}"))
    for path in refused:
        log.warning(
            "%r is open in this program and may not be opened again, so worker processes share one "
            "position in it: what they read there may be wrong. Open it in each worker (in "
            "worker_init_fn, or at the first sample), or use multiprocessing_context='spawn'.",
            path,
        )
    return found


def _read_only(number: int) -> OpenFile | None:
    """The file of a descriptor. None if it is of another kind, or locked: the lock would exclude a
    worker that opened the file again."""
    flags = fcntl.fcntl(number, fcntl.F_GETFL)
    if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_PATH:
        return None
    about = os.fstat(number)
    if not stat.S_ISREG(about.st_mode) or _is_locked(number):
        return None
    return OpenFile(
        number,
        (about.st_dev, about.st_ino),
        os.lseek(number, 0, os.SEEK_CUR),
        os.O_RDONLY | os.O_CLOEXEC | (flags & _KEPT),
        os.get_inheritable(number),
    )


def _is_locked(number: int) -> bool:
    info = os.open(f"/proc/self/fdinfo/{number}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        told = os.read(info, 4096)
    finally:
        os.close(info)
    return any(lock in told for lock in _EXCLUSIVE)


def open_again(files: Iterable[OpenFile]) -> None:
    """Gives this worker a position of its own in each file. Called just after the fork."""
    for file in files:
        with suppress(OSError):  # then the file stays shared
            _open_again(file)


def _open_again(file: OpenFile) -> None:
    new = os.open(f"{_FOLDER}/{file.descriptor}", file.flags)
    try:
        about = os.fstat(new)
        if (about.st_dev, about.st_ino) == file.identity:  # else a fork hook has replaced it
            os.lseek(new, file.position, os.SEEK_SET)
            os.dup2(new, file.descriptor, file.inheritable)
    finally:
        os.close(new)


# ---- all of it ----------------------------------------------------------------------------


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
    on_error: str = "raise"  # see workers/fetch_or_skip.py
    #: by worker, if an iterable dataset resumes: its snapshot, and batches delivered since
    starts: list[tuple[bytes | None, int]] | None = None
    through: Through | None = None  # the cache that samples are read through
    notes: Notes | None = None  # the file that processes write notes to
    blocked: frozenset[int] = frozenset()  # signals, in the trainer
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
