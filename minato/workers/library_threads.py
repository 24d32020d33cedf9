"""Limits the thread pools of libraries to one thread in each worker process.

torch sets its own pool to one thread in a worker, and so does minato. NumPy's BLAS would
still use every core, in all workers at once. Balanced scheduling sets the loaded BLAS and OpenMP
libraries to one thread, and libraries that are loaded later by environment variables. This
happens before worker_init_fn, which can set another number. A number that the environment gives a
library also stays. Programs that a dataset starts do not inherit the variables. ``os.environ`` has
none of them, and the worker removes them before it starts the first program.

A sum that is split over threads is rounded differently (``numpy.dot`` of long vectors). So
``scheduling="static"``, which is torch bit for bit, leaves these pools as torch does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import torch

from .._system import stat_fields

_OPENMP = r"gomp|iomp|libomp"
#: pattern of a library's file name: (functions that set its threads, variables that set them)
_POOLS = {
    r"openblas|libblas": (
        (
            "openblas_set_num_threads",
            "openblas_set_num_threads64_",
            "scipy_openblas_set_num_threads",
            "scipy_openblas_set_num_threads64_",
        ),
        ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"),
    ),
    r"mkl_rt": (("MKL_Set_Num_Threads",), ("MKL_NUM_THREADS", "OMP_NUM_THREADS")),
    r"blis": (("bli_thread_set_num_threads",), ("BLIS_NUM_THREADS", "OMP_NUM_THREADS")),
    _OPENMP: (("omp_set_num_threads",), ("OMP_NUM_THREADS",)),
}
_ONE = ctypes.c_int64(1)
#: omp_pause_hard
_HARD = 2
_LATER = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")

_limited = False  # limit() ran here, or in the process that this one is a fork of


def limit(every_library: bool, known: bool = False) -> None:
    """Sets one thread. Called in the zygote, whose forks inherit it, and at the start of any other
    worker, before it loads a dataset. After a fork, a pool that had started hangs in its first
    parallel region. known: end_openmp_threads() ran just before this process was forked."""
    global _limited
    torch.set_num_threads(1)
    if _limited or not every_library:
        return
    _limited = True
    given = {name for _, names in _POOLS.values() for name in names if name in os.environ}
    for function, pattern in _libraries.setters(known):
        if given.isdisjoint(_POOLS[pattern][1]):
            function(_ONE)
    if "OMP_NUM_THREADS" not in given:
        _limit_later_libraries()


#: events of sys.addaudithook that come before a program is started
_STARTS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn"})


def _limit_later_libraries() -> None:
    """Sets one thread in the environment that C sees, until the process starts a program."""
    names = [name for name in _LATER if name not in os.environ]
    for name in names:
        os.putenv(name, "1")

    def before(event: str, _arguments: Any) -> None:
        while names and event in _STARTS:
            os.unsetenv(names.pop())

    sys.addaudithook(before)


class _Forks:
    """Whether OpenMP's pools here are copies of a parent's, whose threads this process lacks."""

    def __init__(self) -> None:
        self.copied = _is_fork()  # from before this module was loaded
        self.ended = False  # end_openmp_threads() ran since the last fork
        self._alone = False
        os.register_at_fork(
            before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child
        )

    def _before(self) -> None:
        try:
            self._alone = len(os.listdir("/proc/self/task")) == 1
        except OSError:
            self._alone = False

    def _in_parent(self) -> None:
        self.ended = False

    def _in_child(self) -> None:
        self.copied = self.copied or not (self._alone or self.ended)
        self.ended = False


#: in the flags of /proc/PID/stat: the process was forked, and has started no program since
_PF_FORKNOEXEC = 0x40


def _is_fork() -> bool:
    """Whether this process is a copy of another one, and not a program that was started."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return bool(int(stat_fields()[6]) & _PF_FORKNOEXEC)
    return False


_forks = _Forks()


def end_openmp_threads() -> None:
    """Ends the threads of GNU OpenMP that the calling thread has started, just before it forks.
    They do not exist in the fork, where a parallel region (of numba, torch or scikit-learn) would
    wait for them forever. In both processes the next region starts them again, within about a tenth
    of a millisecond. Other OpenMP libraries handle forks themselves.

    Ends none in a process that was itself forked from one with threads: ending threads that do not
    exist would wait for them forever, too. The fork inherits which libraries there are. This saves
    limit() a millisecond there."""
    libraries = _libraries.gnu_openmp()
    if _forks.copied:
        return
    _forks.ended = True
    for library in libraries:
        with contextlib.suppress(AttributeError):  # one older than GCC 9 cannot
            library.omp_pause_resource_all(_HARD)


class _Loaded(ctypes.Structure):
    """struct dl_phdr_info: a library of this process."""

    _fields_ = [
        ("address", ctypes.c_void_p), ("name", ctypes.c_char_p), ("headers", ctypes.c_void_p),
        ("count", ctypes.c_uint16), ("added", ctypes.c_ulonglong),
    ]  # fmt: skip


#: makes a callback for each library; a class, which takes longer to make than to use
_LOOK = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(_Loaded), ctypes.c_size_t, ctypes.c_void_p
)


class _Libraries:
    """The libraries that are loaded here, and what this module calls of them. Both are found again
    only if a library has been loaded since. A fork inherits what its parent has found."""

    def __init__(self) -> None:
        self._added = -1  # libraries loaded so far, when these were found
        self._gnu_openmp: list[ctypes.CDLL] = []  # a process may have several
        #: functions that set a number of threads, each with its pattern in _POOLS
        self._setters: list[tuple[Callable[..., Any], str]] = []

    def gnu_openmp(self) -> list[ctypes.CDLL]:
        self._find()
        return self._gnu_openmp

    def setters(self, known: bool = False) -> list[tuple[Callable[..., Any], str]]:
        """known: no library has been loaded since the last call."""
        if not known:
            self._find()
        return self._setters

    def _find(self) -> None:
        paths = sorted({os.fsdecode(name) for name in self._walk() if b".so" in name})
        if not paths:
            return
        self._gnu_openmp, self._setters = [], []
        for path in paths:
            file = os.path.basename(path)
            patterns = [pattern for pattern in _POOLS if re.search(pattern, file)]
            library = _library(path) if patterns else None
            if library is None:
                continue
            if "gomp" in file:
                self._gnu_openmp.append(library)
            for pattern in patterns:
                self._setters += [(f, pattern) for f in _functions(library, _POOLS[pattern][0])]

    def _walk(self) -> list[bytes]:
        """The names of all loaded libraries, from the dynamic loader's list; empty if no library
        has been loaded since the last walk."""
        names: list[bytes] = []

        def look(info: Any, _size: int, _data: Any) -> int:
            if not names and info.contents.added == self._added:
                return 1  # as before: ends the walk
            self._added = info.contents.added
            names.append(info.contents.name or b"")
            return 0

        # PyDLL keeps the GIL. Without it a thread that has the GIL and loads a library would wait
        # for the lock that is held during the walk.
        ctypes.PyDLL(None).dl_iterate_phdr(_LOOK(look), None)
        return names


_libraries = _Libraries()


def limit_of_threads() -> Callable[[], None]:
    """Returns a function that sets one thread in a thread of the program. It covers OpenMP's pools
    and so torch's, which have a number of threads for each thread that uses them."""
    given = not set(_POOLS[_OPENMP][1]).isdisjoint(os.environ)
    setters = [] if given else [f for f, pattern in _libraries.setters() if pattern == _OPENMP]

    def limit_this() -> None:
        torch.get_num_threads()  # or torch would set its own number before its first region
        for function in setters:
            function(_ONE)

    return limit_this


def _library(path: str) -> ctypes.CDLL | None:
    """A library that is loaded already."""
    try:
        return ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # its file was replaced meanwhile
        return None


def _functions(library: ctypes.CDLL, names: tuple[str, ...]) -> list[Callable[..., Any]]:
    """Those of the functions that the library has. They return nothing."""
    found = [function for name in names if (function := getattr(library, name, None)) is not None]
    for function in found:
        function.restype = None
    return found
