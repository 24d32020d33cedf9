"""The facts that ``minato doctor`` checks: about this process, its limits, the machine.

Each fact is gathered by itself. It is None if it is not available.
"""

from __future__ import annotations

import glob
import importlib
import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset

from .. import _system, loader
from .._not_linux import CORE, NEEDS_LINUX
from ..device import operators
from . import info

if CORE:
    from .cache_files import left_bytes

#: seconds that the trial load may take
TRIAL_S = 60.0


@dataclass(frozen=True)
class Facts:
    """The input of the checks. Sizes are in bytes; a limit is None if there is none or it is
    unknown."""

    #: number of workers of the loader that is checked for
    workers: int
    #: training processes that a launcher starts here
    ranks: int = 1
    #: why minato's engine cannot be used on this system
    no_engine: str | None = None
    #: a system call that is refused
    refused: str | None = None
    torch: str = "0"
    #: state of the torch extension, as ``minato info`` shows it
    torch_extension: str = "built"
    #: state of the operators of minato.ops on devices, as ``minato info`` shows it
    device_operators: str = "built"
    #: what minato.ops decodes JPEG photos with, as ``minato info`` shows it
    photos: str = "libjpeg.so.62"
    #: the CUDA or ROCm version that torch is built for
    torch_accelerator: str | None = None
    #: whether torch can use an accelerator
    accelerator: bool = False
    #: name of an accelerator's driver that the system has
    driver: str | None = None
    #: the environment variable that hides accelerators, as NAME=value
    hidden: str | None = None
    cpus_online: int | None = None
    cpus_affinity: int | None = None
    #: the least of affinity and the control group's quota
    cpus: int | None = None
    memory_total: int | None = None
    #: control groups are counted in both
    memory_available: int | None = None
    open_limit: int | None = None
    open_most: int | None = None
    open_now: int | None = None
    address_space: int | None = None
    address_space_used: int | None = None
    file_size: int | None = None
    locked: int | None = None
    #: how many more processes and threads this user, or this control group, may have
    processes_left: int | None = None
    #: /proc/sys/vm/overcommit_memory, and the memory that may still be committed
    overcommit: int | None = None
    commit_left: int | None = None
    shm_free: int | None = None
    #: bytes in files of minato.Cache that no process has open
    left_caches: int | None = None
    start_method: str = "fork"
    #: environment variables that set threads of pools, and those of minato
    threads: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    #: error of the trial of a loader
    trial: str | None = None
    #: whether a loader was tried
    tried: bool = False


def _known(fact: Callable[[], Any]) -> Any:
    """The fact, or None if it is not available."""
    try:
        return fact()
    except Exception:
        return None


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _limit(name: str, hard: bool = False) -> int | None:
    """A resource limit of this process; None: no limit, or the system has no such limit."""
    resource: Any = _known(lambda: importlib.import_module("resource"))
    if not hasattr(resource, name):
        return None
    value: int = resource.getrlimit(getattr(resource, name))[hard]
    return None if value == resource.RLIM_INFINITY else value


def _kib(path: str, name: str) -> int:
    """The value of a line such as ``VmSize:  1234 kB`` in a file of the kernel, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", _text(path), re.M)
    assert found is not None
    return int(found[1]) * 1024


def _group_processes() -> int:
    """How many more processes this process's control group, or one above it, may have."""
    left: list[int] = []
    for _version, here in _system.group_folders("pids"):
        limit = _known(lambda: int(_text(f"{here}/pids.max")))  # noqa: B023
        if limit is not None:
            left.append(limit - int(_text(f"{here}/pids.current")))
    return min(left)


def _user_processes() -> int:
    """How many more processes this user may have; root may have any number."""
    limit = _limit("RLIMIT_NPROC")
    if limit is None or os.geteuid() == 0:
        return sys.maxsize
    used = 0
    for path in glob.glob("/proc/[0-9]*"):
        if _known(lambda: os.stat(path).st_uid) == os.getuid():  # noqa: B023
            used += len(_known(lambda: os.listdir(f"{path}/task")) or ())  # noqa: B023
    return limit - used


def _processes_left() -> int | None:
    left = min(_known(f) or sys.maxsize for f in (_group_processes, _user_processes))
    return None if left == sys.maxsize else left


def _driver() -> str | None:
    version = _known(lambda: _text("/proc/driver/nvidia/version"))
    if version:
        number = re.search(r"\b\d+\.\d+[.\d]*", version)
        return f"NVIDIA {number[0]}" if number else "NVIDIA"
    if glob.glob("/dev/nvidia[0-9]*"):
        return "NVIDIA"
    return "AMD" if os.path.exists("/dev/kfd") else None


def _hidden(environ: dict[str, str]) -> str | None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if environ.get(name, "0").strip() in ("", "-1", "NoDevFiles"):
            return f"{name}={environ[name]}"
    return None


def _free_shm() -> int:
    found = os.statvfs("/dev/shm")
    return found.f_bavail * found.f_frsize


class Squares(Dataset[torch.Tensor]):
    """The dataset of the trial."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((256,), float(index * index))


def try_load() -> str | None:
    """Loads some batches with two workers. Returns the error, or None."""
    data = Squares()
    try:
        batches = list(loader.DataLoader(data, batch_size=8, num_workers=2, timeout=TRIAL_S))
        if not torch.equal(torch.cat(batches), torch.stack([data[i] for i in range(len(data))])):
            return "its batches are not those of the dataset."
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def gather(workers: int | None = None, trial: bool = True) -> Facts:
    """The facts of this process and machine; without a number, as many workers as CPUs."""
    environ = dict(os.environ)
    core = _known(lambda: info.extension("_core").machine()) or {}
    online = os.cpu_count()
    affinity = _known(lambda: len(os.sched_getaffinity(0)))
    cpus = core.get("cpus") or affinity or online
    found = getattr(torch, "accelerator", torch.cuda)
    return Facts(
        workers=workers or cpus or 1,
        ranks=_system.ranks_here(environ),
        no_engine=None if CORE else NEEDS_LINUX,
        refused=_system.refused() if CORE else None,
        torch=torch.__version__,
        torch_extension=_known(info.torch_extension) or "built",
        device_operators=_known(operators.describe) or "built",
        photos=_known(info.photos) or "libjpeg.so.62",
        torch_accelerator=torch.version.cuda or torch.version.hip,
        accelerator=bool(_known(found.is_available)),
        driver=_known(_driver),
        hidden=_hidden(environ),
        cpus_online=online,
        cpus_affinity=affinity,
        cpus=cpus,
        memory_total=core.get("memory_total"),
        memory_available=core.get("memory_available"),
        open_limit=_limit("RLIMIT_NOFILE"),
        open_most=_limit("RLIMIT_NOFILE", hard=True),
        open_now=_known(lambda: len(os.listdir("/proc/self/fd"))),
        address_space=_limit("RLIMIT_AS"),
        address_space_used=_known(lambda: _kib("/proc/self/status", "VmSize")),
        file_size=_limit("RLIMIT_FSIZE"),
        locked=_limit("RLIMIT_MEMLOCK"),
        processes_left=_known(_processes_left),
        overcommit=_known(lambda: int(_text("/proc/sys/vm/overcommit_memory"))),
        commit_left=_known(
            lambda: _kib("/proc/meminfo", "CommitLimit") - _kib("/proc/meminfo", "Committed_AS")
        ),
        shm_free=_known(_free_shm),
        left_caches=_known(left_bytes) if CORE else None,
        start_method=multiprocessing.get_start_method(allow_none=True)
        or multiprocessing.get_all_start_methods()[0],
        threads={n: v for n, v in environ.items() if n.endswith("_NUM_THREADS")},
        variables={n: v for n, v in environ.items() if n.startswith("MINATO_")},
        trial=try_load() if trial else None,
        tried=trial,
    )


# ---- every environment variable of minato's: which program reads it, and what it does ----------
#
# tests/observe/test_environment_variables.py finds the names in the sources. It fails for a name
# that is missing here.

#: read by a program that uses minato
PROGRAM: dict[str, str] = {
    "MINATO_ANALYZE": "Set by `minato analyze` for the program that it watches: where to write its "
    "observations.",
    "MINATO_DEVICE_OPERATORS": "0: with `device=`, too, all operators of minato.ops run on the "
    "host.",
    "MINATO_METRICS": "Where minato.metrics exports to: a file, with %r for the rank and %p for the "
    "process, or HOST:PORT.",
    "MINATO_SCHEDULING": '"balanced" or "static": the default of `scheduling`; read when minato is '
    "imported.",
    "MINATO_TRACE": "File to which all loaders write a timeline, for Perfetto or chrome://tracing.",
}

#: read by setup.py while minato is built
BUILD: dict[str, str] = {
    "MINATO_CUDA": "0: leave the kernels for CUDA devices out.",
    "MINATO_FAULTS": "1: compile in the fault points at which tests kill processes.",
    "MINATO_OPTIMIZE": "In place of -O3.",
    "MINATO_PURE": "1: Python alone, for systems where torch's own loader does the work.",
    "MINATO_SANITIZE": '"address,undefined" or "thread": build with these sanitizers.',
    "MINATO_TEST_BINDINGS": "1 or 0: with or without the functions that only tests and the "
    "simulator call. By default a build in a source tree has them, and a wheel has not.",
    "MINATO_TORCH": "0: leave the optional torch extension out.",
    "MINATO_WERROR": "1: compiler warnings are errors.",
}

#: read by tests and benchmarks
TESTS: dict[str, str] = {
    "MINATO_FAULT": '"LABEL N FILE HOW": die or stop at that fault point, in a build that has them '
    "(csrc/py/module/mn_module.c).",
    "MINATO_FAULT_SPARES": "The process that passes its point unharmed.",
    "MINATO_FUZZ_SECONDS": "New random examples at each run, for this many seconds a test.",
    "MINATO_KITS19": "Folder with real KiTS19 labels.",
    "MINATO_STRESS_SECONDS": "How long a stress test repeats itself.",
    "MINATO_TEST_AARCH64": "1: run the programs of tests/c for AArch64, in an emulator.",
    "MINATO_TEST_DEADLINE": "Seconds after which a program of tests/c gives up.",
    "MINATO_TEST_FAULTS": "How often each fault point is tried; without it none is.",
    "MINATO_TEST_LOADERS": "The kinds of loader that tests/contract runs with, split by commas.",
    "MINATO_TEST_MUTANTS": "1: break the sources in known ways, and expect failures.",
    "MINATO_TEST_SANITIZED": "1: run tests in a build with sanitizers.",
    "MINATO_TEST_SEED": "Seed of the random parts of tests.",
    "MINATO_TEST_TOKEN": "Set by tests, to find the processes they have started.",
}

ALL: dict[str, str] = {**PROGRAM, **BUILD, **TESTS}
