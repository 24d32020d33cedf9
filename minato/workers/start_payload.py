"""What travels to workers that inherit nothing: pickled once, and loaded by each of them.

multiprocessing pickles a process's arguments for that one child, with descriptors of queues
and shared tensors that only it can take over.  Here the pickle lies in a memory file, and the
descriptors that it speaks of beside it, so the zygote can pass both on: each worker loads the
trainer's pickle by itself, as torch's workers do, and owns what that makes.

What is large and plain does not become another copy in each worker.  It follows the pickle in
the same file: containers of text and numbers, which the zygote loads once and its forks have,
and the memory of arrays and tensors, which each worker maps.
"""

from __future__ import annotations

import marshal
import mmap
import os
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from multiprocessing import context, process, reduction, spawn
from typing import Any

import numpy as np
import torch
from torch.multiprocessing import reductions

#: a list, tuple or dict of more plain values than this is loaded once for all workers
PLAIN_MOST = 1_000
#: and so are a text, bytes and the memory of an array of more bytes than this
BYTES_MOST = 1 << 16
#: memory of arrays and tensors begins at multiples of this
ALIGNED = 64

_SCALARS = frozenset({str, int, float, bytes, bool, complex, type(None)})
_CONTAINERS = frozenset({list, tuple, dict})
_BYTES = frozenset({str, bytes, bytearray})

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
        shared: storages that processes share and count: on an accelerator, or by name. What
            loads them counts itself, so they must live, here, for as long as any that loads them.
    """

    _beside: list[int]

    def __init__(self, obj: Any) -> None:
        noting: Any = _Noting()
        outer = context.get_spawning_popen()
        self._apart: Any = None  # once it is loaded
        self._mine = True  # whose descriptors these are; else the object's
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
        """Where in the file it begins what the pickle leaves out."""
        pickler: Any = reduction.ForkingPickler(file)
        share = pickler.dispatch_table[torch.UntypedStorage]

        def reduce_storage(storage: Any) -> Any:
            rebuild, arguments = share(storage)
            if rebuild is not reductions.rebuild_storage_filename:
                return rebuild, arguments
            storage._shared_decref()  # it was counted for one process that would load it
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
        """Loads what the pickle leaves out, for this process and its forks. No code of the
        program's runs."""
        with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as data:
            data.seek(self._begins)
            mutable, arrays, storages = pickle.load(data)
            with memoryview(data) as whole, whole[data.tell() :] as rest:
                plain = marshal.loads(rest)
        for place in mutable:
            plain[place] = bytearray(plain[place])
        self._apart = plain, arrays, storages

    def load(self) -> Any:
        """The object anew."""
        if self._apart is None:
            self.load_apart()
        apart, self._apart = self._apart, None  # a container is nobody's but this object's
        _beside[:] = self._beside
        try:
            with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as data, inheriting():
                return _Loader(self._file, data, apart).load()
        finally:
            _beside.clear()

    def close(self) -> None:
        """Frees what it holds: it will be loaded and sent no more."""
        mine = [self._file, *self._beside] if self._mine else [self._file]
        self._file, self._beside, self._apart = -1, [], None
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


def _rebuild_by_name(*args: Any) -> Any:
    """A storage that is shared by its name, and counts who uses it: torch's function takes away
    one, who was added when it was pickled, and here nobody was."""
    storage = reductions.rebuild_storage_filename(*args)
    storage._shared_incref()
    return storage


# ---- what is large and plain --------------------------------------------------------------


def _kinds(container: Any) -> set[type]:
    """Of what a list, tuple or dict holds."""
    kinds = set(map(type, container))
    return kinds.union(map(type, container.values())) if type(container) is dict else kinds


def _is_plain(container: Any) -> bool:
    """Whether it holds nothing but plain values, or tuples of them: whose identity does not
    matter, and which run no code when they are loaded."""
    kinds = _kinds(container)
    if tuple in kinds:
        parts = [container, container.values()] if type(container) is dict else [container]
        tuples = (value for value in chain(*parts) if type(value) is tuple)
        kinds = (kinds - {tuple}).union(map(type, chain.from_iterable(tuples)))
    return kinds <= _SCALARS


class _Apart:
    """What a pickle leaves out, each object once. arrays: whether those of NumPy are to be."""

    def __init__(self, arrays: bool) -> None:
        self._with_arrays = arrays
        self._plain: list[Any] = []
        self._arrays: list[Any] = []
        self._storages: list[Any] = []
        self._ids: dict[int, Any] = {}
        self._seen: list[Any] = []  # so that no other object gets its id

    def id_of(self, obj: Any) -> Any:
        """For Pickler.persistent_id, which asks for every object: the place of one that is left
        out, else None."""
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
            # One that is shared stays so. Torch would move the others to shared memory, from
            # under what else refers to them: arrays of NumPy, say.
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
        """Writes it behind what the file holds: memory, what tells of it, plain values. Where the
        second of these begins."""
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
        # Pickle would take four times as long for text. But this makes bytes of a bytearray.
        marshal.dump(self._plain, file)
        return begins


def _write(file: Any, memory: Any) -> int:
    """Where in the file it is."""
    file.write(bytes(-file.tell() % ALIGNED))
    place: int = file.tell()
    file.write(memory)
    return place


class _Loader(pickle.Unpickler):
    """Of a pickle that left something out."""

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
        """Of pages that become this process's own when it writes to them."""
        shape, dtype, order, place = self._arrays[number]
        return np.ndarray(shape, dtype, self._map(mmap.ACCESS_COPY), place, order=order)

    def _storage(self, number: int) -> Any:
        """Of pages that workers share, as torch's workers do: each sees what others write."""
        size, place = self._storages[number]
        data = self._map(mmap.ACCESS_WRITE)
        return torch.frombuffer(data, dtype=torch.uint8, count=size, offset=place).untyped_storage()


# ---- the main module ----------------------------------------------------------------------

_lock = threading.Lock()


def _forked() -> None:
    """The thread that holds it does not exist here."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


def main_module() -> dict[str, Any]:
    """What multiprocessing's preparation of a new process would import as its main module."""
    data = spawn.get_preparation_data("")
    return {name: value for name, value in data.items() if name.startswith("init_main_from_")}


@contextmanager
def without_main(kind: type[str]) -> Iterator[None]:
    """A process with a name of this kind that is started inside does not import the main module;
    those that other threads start meanwhile do."""
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
    """As while multiprocessing prepares a process, and loads it: a main module that starts others
    is told that it must not."""
    here: Any = process.current_process()
    outer = vars(here).get("_inheriting")
    here._inheriting = True
    try:
        yield
    finally:
        if outer is None:
            del here._inheriting
