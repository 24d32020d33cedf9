"""minato.Cache: chooses its file, identifies the job, and turns the cache off if it cannot be used."""

from __future__ import annotations

import atexit
import hashlib
import logging
import math
import multiprocessing
import os
import warnings
import weakref
from collections.abc import Callable
from multiprocessing import util
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

from .._not_linux import CORE, NEEDS_LINUX
from ..errors import program_level
from ..text import parse_bytes, sized
from .keys import Opaque

if TYPE_CHECKING:
    from .._cache import Store
    from .memoize import Memoized

log = logging.getLogger("minato")

Function = TypeVar("Function", bound=Callable[..., Any])

#: the file system in memory that the files are made in
MEMORY = "/dev/shm"
#: a cache leaves the RESERVE_SHARE-th part of all memory free
RESERVE_SHARE = 16


def folder(directory: str | None = None) -> str:
    """Where this user's files are: in memory, or in a directory."""
    return os.path.join(directory or MEMORY, f"minato-{os.getuid()}")


#: where launchers say a process's rank
RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "LOCAL_RANK")


class Job(NamedTuple):
    """Which job this process is of. Workers are of the tree of processes of their trainer. Trees that
    say the same number are one job if their ranks differ."""

    number: int
    tree: int
    rank: int


def job() -> Job:
    """Ranks of one job that were started one by one say the same port or step. Without a rank, a port
    says nothing: a shell may have set it for all its programs."""
    env = os.environ
    # inherited by whatever multiprocessing starts, by fork and by spawn
    tree = _number([bytes(multiprocessing.current_process().authkey).hex()])
    rank = next((int(env[name]) for name in RANKS if env.get(name, "").isdigit()), None)
    if rank is None:
        names: tuple[str, ...] = ()
    elif "MASTER_PORT" in env:
        names = "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"
    else:
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID") if "SLURM_STEP_ID" in env else ()
    return Job(_number([env.get(name, "") for name in names]) if names else tree, tree, rank or 0)


def _number(told: list[str]) -> int:
    digest = hashlib.blake2b("\0".join(told).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


class DataSet(NamedTuple):
    """Whose values a file has: a hash for the file's name, and a label for people."""

    name: str
    label: str


def _data_set(function: Any) -> DataSet:
    """Identifies it by the function's source file and name; at a prompt or in a notebook, by the
    working folder and the name."""
    file = os.path.realpath(function.__code__.co_filename)
    place = file if os.path.exists(file) and "ipykernel" not in file else os.getcwd()
    name = function.__qualname__
    digest = hashlib.blake2b(f"{place}\0{name}".encode(), digest_size=8).hexdigest()
    return DataSet(digest, f"{name} in {place}")


#: numbers of ``Cache.stats()``
NUMBERS = (
    "hits", "misses", "stored", "refused", "hit_bytes", "stored_bytes", "used_bytes", "bytes",
    "largest", "saved_ns", "made_ns", "entries", "recycled", "returned", "processes", "jobs", "damaged",
    "parts",
)  # fmt: skip


#: what ``Store.stats()["removed"]`` means
REMOVED = (
    None,
    "its file was removed; this job goes on with it, and other jobs make their values again",
    "its file was removed, and another has taken its place: values are made twice, once for each",
)


class Client:
    """Owns this process's only Store of a file, and closes it at exit. All Caches of the file share
    the Client. (A Store is what the C code calls a client: one process's handle on the file.)"""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.pid = 0  # of the process in which it leaves the file when multiprocessing ends
        self.leave_at_exit()

    def leave_at_exit(self) -> None:
        """Registers the exit hook; again after each fork, because multiprocessing clears inherited hooks."""
        # After everything else, when this process's own workers are gone: the last one unlinks.
        util.Finalize(None, _leave, (weakref.ref(self),), exitpriority=-1000)
        self.pid = os.getpid()


#: bytes: the largest memory_limit of any loader in this process; caches leave as much memory free
_promised = 0

_clients: weakref.WeakValueDictionary[tuple[str, str], Client] = weakref.WeakValueDictionary()


def any_open() -> bool:
    """Whether this process has a cache open."""
    return bool(_clients)


def _leave(client: weakref.ref[Client]) -> None:
    found = client()
    if found is not None:
        found.store.detach()


def promise(memory_limit: int) -> None:
    """Notes a loader's memory_limit: caches of this process leave as much memory free."""
    global _promised
    if memory_limit > _promised:
        _promised = memory_limit
        for client in list(_clients.values()):
            client.store.promise(_promised)


@atexit.register
def _leave_in_forks() -> None:
    """Closes files in children of os.fork(), where multiprocessing runs no exit hooks."""
    for client in list(_clients.values()):
        if client.pid != os.getpid():
            client.store.detach()


def _open(where: str, name: str, size: int, keep: bool, on_disk: bool, label: str) -> Client:
    from .. import _cache, _core

    found = _clients.get((where, name))
    if found is None:
        reserve = _core.machine()["memory_total"] // RESERVE_SHARE
        own = job()
        found = Client(_cache.Store(where, name, size, own.number, keep, reserve, on_disk, label,
                                    own.tree, own.rank))  # fmt: skip
        util.register_after_fork(found, Client.leave_at_exit)
        found.store.promise(_promised if multiprocessing.parent_process() is None else 0)
        _clients[where, name] = found
        found.store.attach()
        if not on_disk:
            _sweep(where, name)
    found.store.attach()
    return found


def _sweep(where: str, name: str) -> None:
    """Removes files of other data sets that killed processes have left in memory."""
    from .. import _cache

    try:
        names = os.listdir(where)
    except FileNotFoundError:  # it was removed, and the file that this process uses with it
        return
    for other in names:
        if other.startswith(f"cache-{_cache.LAYOUT}-") and other != name:
            _cache.sweep(where, other)


class Cache(Opaque):
    """Values that are made once per machine and shared by workers, ranks and jobs.

    >>> cache = minato.Cache("16GiB")
    >>> class Scans(Dataset):
    ...     @cache.memoize(key=lambda self, i: self.paths[i], files=lambda self, i: self.paths[i])
    ...     def load(self, i):                # the deterministic part: made once
    ...         return resample(read(self.paths[i]))
    ...     def __getitem__(self, i):
    ...         return augment(self.load(i))  # the random part: runs every time

    Each user's data set has one file in /dev/shm. Its name is a hash of the source file and name of
    the first memoized function. All processes of the user that run the same code share it. It is
    removed when its last process ends. With directory= the file lies on a local disk and stays
    there: the next run finds what the last one has made.

    Args:
        size: bytes, as int or text such as "16GiB". The first process to open the file decides.
        keep: leave the values in memory when the last process ends, for the next run.
        directory: a folder on a local disk, such as "/nvme/minato", to be made if need be. Each user has
            a folder in it. memoize() then needs a version=.

    Where there can be no cache (no room, no permission, not Linux), a warning says why, and the functions run each
    time.
    """

    def __init__(
        self, size: int | str, *, keep: bool = False,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        self.size = parse_bytes(size, "size")
        if self.size < 1 << 20:
            raise ValueError(f"size must be at least '1MiB', got {size!r}")
        self.keep = bool(keep)
        self.directory = None if directory is None else os.path.abspath(os.path.expanduser(os.fspath(directory)))
        self._name: str | None = None
        self._label = ""
        self._client: Client | None = None
        self._off: str | None = None
        self._memoized: list[Memoized] = []

    def __repr__(self) -> str:
        return f"minato.Cache({self.size}, keep={self.keep}, directory={self.directory!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.size, self.keep, self._name, self.directory, self._label)

    @overload
    def memoize(self, function: Function, /) -> Function: ...

    @overload
    def memoize(
        self, function: None = None, /, *, key: Callable[..., Any] | None = None,
        files: Callable[..., Any] | None = None, check: str = "epoch", version: Any = None,
    ) -> Callable[[Function], Function]: ...  # fmt: skip

    def memoize(
        self, function: Any = None, /, *, key: Callable[..., Any] | None = None,
        files: Callable[..., Any] | None = None, check: str = "epoch", version: Any = None,
    ) -> Any:  # fmt: skip
        """A decorator for functions whose value depends on their arguments alone, with or without parentheses.

        The function gets a parameter `part`, an index of the array or tensor that it returns, such
        as (slice(8, 72), ..., 0). Only that part is then copied.

        Args:
            key: called with the function's arguments; what the value depends on: numbers, strings, paths,
                arrays up to 1 MB, and tuples, lists and dicts of them. Needed for methods and closures.
            files: called with the function's arguments; the path or paths that the value is made from.
                Where one of them has changed, the value is made again.
            check: how often a process looks at these files: once an "epoch", at each "use", or "never".
            version: part of every key, to be changed by hand where minato cannot see a change. Needed
                for a cache in a directory, whose values outlive the program.

        Raises:
            TypeError: a key or a version is needed and missing, or, at a call, a key or value is of a
                type that cannot be stored.
        """
        def decorate(function: Function) -> Function:
            from .memoize import Memoized, wrap

            memoized = Memoized(self, function, key, files, check, version)
            self._of(_data_set(function))
            self._memoized.append(memoized)
            # The trainer has the file open from now on: what its workers of one epoch have made
            # is there for those of the next.
            self._attached()
            wrapped: Function = wrap(memoized)
            return wrapped

        return decorate if function is None else decorate(function)

    def _of(self, data_set: DataSet) -> None:
        """Says whose values these are, unless that is known."""
        self._name = data_set.name if self._name is None else self._name
        self._label = self._label or data_set.label

    def stats(self) -> dict[str, Any]:
        """Numbers of all processes that have used the file since it was made. All are 0 where there is no cache.

        hits, misses, stored: values found, made, and kept.
        refused: values not kept, for want of room or because they are too large.
        hit_bytes, stored_bytes: bytes of the values found and kept.
        used_bytes, bytes: bytes in use, and of the whole cache.
        largest: bytes of the largest value that fits. parts: of the file; a value lies whole in one.
        saved_ns, made_ns: nanoseconds that hits have saved and misses have cost.
        entries: values in the cache now.
        recycled, returned: parts of the file that were used again, or given back to the system.
        processes, jobs: how many use the file.
        damaged: values in a directory whose checksum was wrong; they were made again.
        off: None, or why there is no cache.
        removed: None, or what follows from the removal of the file while processes use it.
        unfollowed: why the source of the whole program counts, where it does: what code of memoized
            functions reaches in ways that cannot be followed. Known where they were called.
        """
        store = self._attached()
        numbers = dict.fromkeys(NUMBERS, 0) if store is None else store.stats()
        numbers.pop("label", None)
        removed = REMOVED[numbers.pop("removed", 0)]
        unfollowed = sorted(set().union(*(one.unfollowed() for one in self._memoized)))
        return {**numbers, "off": self._off, "removed": removed, "unfollowed": unfollowed}

    def _attached(self) -> Store | None:
        """The store, open in this process or about to be; None: there is no cache."""
        client = self._client
        if client is not None:
            return client.store
        return None if self._off is not None else self._attach()

    def _attach(self) -> Store | None:
        if not CORE:
            self._turn_off(RuntimeError(NEEDS_LINUX))
            return None
        if self._name is None:
            raise RuntimeError("this cache has no memoized function yet")
        from .. import _cache

        # In memory, versions of the layout have files of their own: another job may use an old one.
        # A directory has only one.
        name = f"cache-{_cache.LAYOUT}-{self._name}" if self.directory is None else f"cache-{self._name}"
        on_disk = self.directory is not None
        try:
            if self.directory is not None:
                os.makedirs(self.directory, exist_ok=True)
            where = folder(self.directory)
            self._client = _open(where, name, self.size, self.keep, on_disk, self._label)
        except (OSError, RuntimeError, MemoryError) as error:
            self._turn_off(error)
            return None
        has = self._client.store.stats()["bytes"]
        if has < math.prod(_cache.parts(self.size)):
            self._warn_of_size(has, where)
        return self._client.store

    def _warn_of_size(self, has: int, where: str) -> None:
        found = os.statvfs(where)
        most = found.f_blocks * found.f_frsize
        if self.directory is not None:
            why = f"an earlier run made the file with that size. `minato cache drop {where}` removes it"
        elif self.size > most // 4 * 3:
            why = (f"{MEMORY} has {sized(most)}, and a cache takes at most three quarters of it. In Docker, "
                   "start the container with a larger --shm-size")  # fmt: skip
        else:
            why = "another process made the file with that size"
        log.warning("minato.Cache has %s, not the %s that were asked for: %s", sized(has),
                    sized(self.size), why)  # fmt: skip

    def _turn_off(self, error: BaseException) -> None:
        """From now on this process makes every value itself."""
        self._client = None
        self._off = str(error) or type(error).__name__
        warnings.warn(
            f"minato.Cache is off in process {os.getpid()}: {self._off}. Values are made each time.",
            stacklevel=program_level(),
        )


def _again(size: int, keep: bool, name: str | None, directory: str | None = None, label: str = "") -> Cache:
    cache = Cache(size, keep=keep, directory=directory)
    cache._name, cache._label = name, label
    return cache
