"""Runs small programs again and again; each run makes one more of their calls fail.

    python failing.py failing.so FOLDER OF-EACH-SITE EVERY SEED [PROGRAM[:SITES]...]

failing.c counts the extensions' calls of the C library and of Python. Functions in this file count
the system calls of minato's and multiprocessing's Python code. Each program runs once
to count. Then, for OF-EACH-SITE calls of each site and one site in EVERY, a fork of this process
runs it with that call failing. Either the batches are right or a readable exception is raised;
the next loader works, and nothing is left behind. The last line printed is JSON: the number of
runs, and the faults found.

With VERBOSE set in the environment, each run is printed. SITES is a part of a printed name: then
only calls of matching sites fail.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import faulthandler
import gc
import json
import mmap
import multiprocessing.connection
import multiprocessing.popen_fork  # noqa: E401
import multiprocessing.reduction
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from multiprocessing import util
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset

import minato

# modules that each fork would otherwise import
import minato.iterators.iterator  # noqa: E401, I001
import minato.iterators.inline
import minato.iterators.ready
import minato.iterators.static_and_iterable  # noqa: E401
import minato.seeding.find_generators  # noqa: E401
import minato.workers.native
import minato.workers.threads
from attack.support import descendants, kill, wait_for, workers_of
from minato import _core, _ops, ops
from minato.commands import top
from minato.iterators.loader_memo import memo_of

#: folders of the Python code whose calls of the system fail
CALLERS = tuple(
    os.path.join(*module.__path__, "") for module in (minato, multiprocessing, torch.multiprocessing)
)

#: time limit of a run, and of the clean-up after it
DEADLINE_S = 100.0
PATIENCE_S = 60.0

# ---- programs ----------------------------------------------------------------------------


class Rows(Dataset):
    """A large field, a small one, a number."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((20000,), float(index)), "y": np.arange(index, index + 3), "i": index}


class Words(Rows):
    """Values that travel in envelopes."""

    def __getitem__(self, index: int) -> Any:
        return f"sample {index}", torch.full((9000 + index,), index), {index: index / 2}


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        for i in range(info.id, 14, info.num_workers):
            yield torch.full((30,), i), str(i)


def plain(batch: Any) -> Any:
    """Values that can be compared, of a copy."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return zlib.crc32(np.ascontiguousarray(batch).tobytes()), str(batch.dtype), batch.shape
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return [plain(part) for part in batch] if isinstance(batch, (list, tuple)) else batch


def load(dataset: Any, **options: Any) -> minato.DataLoader:
    torch.manual_seed(5)
    options = {"batch_size": 3, "num_workers": 2, "timeout": DEADLINE_S / 2, **options}
    return minato.DataLoader(dataset, **options)


def balanced() -> Iterator[Any]:
    """Two epochs with a worker killed in the first, a break, and the rest in another loader."""
    loader = load(Rows(), shuffle=True, persistent_workers=True, max_retries=5)
    iterator = iter(loader)
    yield next(iterator)
    kill(workers_of(iterator)[0])
    yield from iterator
    for number, batch in enumerate(loader):
        yield batch
        if number == 2:
            state = loader.state_dict()
            break
    del iterator, loader
    other = load(Rows(), shuffle=True)
    other.load_state_dict(state)
    yield from other
    yield sorted(other.stats())


def envelopes() -> Iterator[Any]:
    loader = load(Words(), collate_fn=list, persistent_workers=True, memory_limit="3MiB")
    held = []
    for batch in loader:
        held.append(batch)
        yield batch
    yield from loader
    yield held


def default() -> Iterator[Any]:
    """Batches that do not fit rows, and a sample that fails."""

    class Odd(Rows):
        def __getitem__(self, index: int) -> Any:
            if index == 13:
                raise KeyError("no sample 13")
            return {**super().__getitem__(index), "y": [1] if index % 6 < 3 else [1, 2]}

    yield from load(Odd(), on_error="skip")


def ready() -> Iterator[Any]:
    """Ready-first batches, as a set."""
    found = []
    for batch in load(Rows(), batching="ready", in_order=False, batch_size=4):
        found += batch["i"].tolist()
        assert [float(i) for i in batch["i"]] == batch["x"][:, 9].tolist()
    yield sorted(found)


def static() -> Iterator[Any]:
    loader = load(Rows(), scheduling="static", persistent_workers=True)
    yield from loader
    yield from loader


def iterable() -> Iterator[Any]:
    yield from load(Stream())


def threads() -> Iterator[Any]:
    yield from load(Rows(), worker_type="thread", shuffle=True)
    yield from load(Words(), worker_type="thread", collate_fn=list)


def native() -> Iterator[Any]:
    steps = [ops.ReadNpy(), ops.RandBalancedCrop(8), ops.RandFlip(), ops.Cast(),
             ops.RandScaleIntensity(p=0.5), ops.RandGaussianNoise(p=0.5)]  # fmt: skip
    files = [tuple(FOLDER / f"{n}_{part}.npy" for part in "xy") for n in range(2)]
    dataset = ops.VolumeDataset(files, ops.Pipeline(steps), seed=7, repeat=4)
    yield from load(dataset, worker_type="native")
    yield dataset[3]


def parts() -> Iterator[Any]:
    """Batches of a collate_fn that are made in parts from the first one on."""
    loader = load(Words(), collate_fn=list, batch_size=8)
    for cost in [10**6, 10**6, 10**6, 10**9] * 16:
        memo_of(loader).costs.observe(-1, cost)
        memo_of(loader).costs.sends(0)
    yield from loader


def observed() -> Iterator[Any]:
    """Output about a loader: in its own program, for others, and in files."""
    os.environ["MINATO_TRACE"] = str(FOLDER / "trace-%p.json")
    loader = load(Rows(), shuffle=True)
    iterator = iter(loader)
    yield next(iterator)
    yield sorted(loader.stats())
    for seen in top.snapshots(os.getpid()):
        yield bool(top.render(seen))
    yield from iterator


def interrupted() -> Iterator[Any]:
    """An iterable's state, taken up by another loader."""
    loader = load(Stream())
    for number, batch in enumerate(loader):
        yield batch
        if number == 1:
            state = loader.state_dict()
            break
    other = load(Stream())
    other.load_state_dict(state)
    yield from other


def together() -> Iterator[Any]:
    """Samples that are made several at a time, or in the program itself."""

    class Several(Rows):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[index] for index in indices]

    yield from load(Several())
    yield from load(Rows(), num_workers=0, batch_size=7, timeout=0)


def modules() -> Iterator[Any]:
    """Instances of the extensions other than those that are in use."""
    from importlib.machinery import ExtensionFileLoader
    from importlib.util import module_from_spec, spec_from_file_location

    for module in (_core, _ops):
        path = str(module.__file__)
        loader = ExtensionFileLoader(module.__name__, path)
        spec = spec_from_file_location(module.__name__, path, loader=loader)
        assert spec is not None
        again = module_from_spec(spec)
        loader.exec_module(again)
        yield sorted(n for n in vars(again) if not n.startswith("__"))


PROGRAMS: dict[str, Callable[[], Iterator[Any]]] = {
    f.__name__: f
    for f in (balanced, envelopes, default, ready, static, iterable, threads, native,
              parts, observed, interrupted, together, modules)
}


def save_files(folder: Path) -> None:
    for n in range(2):
        rng = np.random.default_rng(n)
        label = np.zeros((1, 12, 12, 12), np.uint8)
        label[0, 2:6, 1:7, 3:8] = 1
        np.save(folder / f"{n}_x.npy", rng.standard_normal((1, 12, 12, 12)).astype(np.float32))
        np.save(folder / f"{n}_y.npy", label)


# ---- calls that fail ---------------------------------------------------------------------

FOLDER = Path()


class Table(ctypes.Structure):
    """The first members of struct table of failing.c; its sites follow."""

    _fields_ = [("armed", ctypes.c_uint32), ("failed", ctypes.c_uint32),
                ("place", ctypes.c_uint64), ("call", ctypes.c_uint32),
                ("way", ctypes.c_uint32), ("trainer", ctypes.c_int32),
                ("live", ctypes.c_int32)]  # fmt: skip


class Site(ctypes.Structure):
    _fields_ = [("place", ctypes.c_uint64), ("calls", ctypes.c_uint32), ("name", ctypes.c_char * 84)]


SITES = 8192


class Failing:
    """The library that failing.c becomes."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.PyDLL(path)
        self.library.failing_table.restype = ctypes.c_void_p
        self.library.failing_site.argtypes = [ctypes.c_uint64, ctypes.c_char_p]
        address = self.library.failing_table()
        self.table = Table.from_address(address)
        self.sites = (Site * SITES).from_address(address + ctypes.sizeof(Table))
        self.bytes = ctypes.sizeof(Table) + ctypes.sizeof(self.sites)
        self.libraries: list[str] = []

    def reset(self, place: int = 0, call: int = 0, way: int = 0) -> None:
        ctypes.memset(ctypes.addressof(self.table), 0, self.bytes)
        self.table.place, self.table.call, self.table.way = place, call, way
        self.table.trainer = os.getpid()

    def found(self) -> list[tuple[int, int, str]]:
        """Place, number of calls and name of each site."""
        return [(s.place, s.calls, s.name.decode()) for s in self.sites if s.place]

    def install(self) -> None:
        for module in (_core, _ops):
            path = str(module.__file__)
            slots = self.library.failing_install(path.encode())
            assert slots > 20, (path, slots)
            self.libraries.append(path)
            for value in vars(module).values():
                if isinstance(value, type):
                    self.library.failing_type(ctypes.py_object(value))
        for owner, names in SYSTEM:
            for name, number in names.items():
                setattr(owner, name, self.wrapped(getattr(owner, name), name, number))
        connection = vars(multiprocessing.connection.Connection)
        connection["_send"].__defaults__ = (os.write,)
        connection["_recv"].__defaults__ = (os.read,)

    def wrapped(self, function: Any, name: str, number: int) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if self.table.armed and self.fails(name):
                if number == 0:
                    raise RuntimeError("can't start new thread")
                raise OSError(number, os.strerror(number))
            return function(*args, **options)

        return call

    def fails(self, name: str) -> bool:
        """Whether this call matches a function of that name, two frames up."""
        frame = sys._getframe(2)
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        # where multiprocessing calls, what of minato has called that
        last = "/".join(where.split("/")[-3:])
        if not where.startswith(CALLERS) and name != "thread":
            return False
        text = f"{name} at {last}".encode()
        return bool(self.library.failing_site(1 << 61 | zlib.crc32(text), text))

    def describe(self, place: int, name: str) -> str:
        who = "another process" if place >> 63 else "the trainer"
        number, offset = (place >> 40 & 0xFF) - 1, place & (1 << 40) - 1
        if place >> 60 & 7 or not 0 <= number < len(self.libraries):
            return f"{name}, in {who}"
        done = subprocess.run(
            ["addr2line", "-fie", self.libraries[number], hex(offset - 1)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        lines = done.stdout.split("\n")
        at = " < ".join(f"{f} {p.rpartition('/')[2]}" for f, p in zip(lines[::2], lines[1::2]))
        return f"{name} in {at or hex(offset)}, in {who}"


SYSTEM: list[tuple[Any, dict[str, int]]] = [
    (os, {"fork": errno.EAGAIN, "pipe": errno.EMFILE, "read": errno.EIO, "write": errno.EIO,
          "pidfd_open": errno.EMFILE, "memfd_create": errno.EMFILE, "dup": errno.EMFILE,
          "open": errno.EMFILE, "set_blocking": errno.EBADF, "waitid": errno.ECHILD,
          "waitpid": errno.ECHILD, "kill": errno.EPERM, "listdir": errno.EMFILE,
          "fstat": errno.EIO, "readlink": errno.EACCES}),
    (select, {"poll": errno.ENOMEM}),
    (signal, {"pidfd_send_signal": errno.EPERM}),
    (mmap, {"mmap": errno.ENOMEM}),
    (builtins, {"open": errno.EMFILE}),
    (threading, {"_start_new_thread": 0}),
]  # fmt: skip

# ---- tries -------------------------------------------------------------------------------

#: sites that leave something behind by themselves: multiprocessing forgets pipes, and memory that a
#: child sees is never reused if the child's end cannot be observed
FORGETFUL = ("multiprocessing/popen_fork.py", "multiprocessing/connection.py",
             "mn_forks.c", "mn_memfd_create_empty",
             "python3.11/subprocess.py")  # fmt: skip
#: exception types that a user may get
KINDS = (MemoryError, OSError, RuntimeError, ImportError)
NATIVE = "worker_type='native' cannot serve this loader: the dataset's native_pipeline() failed: "


def fds() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
            # multiprocessing's heap and the file of a trace stay open
            if "/pym-" in found[-1] or "/trace-" in found[-1]:
                found.pop()
        except OSError:
            pass
    return sorted(found)


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:minato")


def threads_here() -> int:
    return len(os.listdir("/proc/self/task"))


def held() -> tuple[Any, ...]:
    return fds(), mapped(), threads_here()


def attempt(
    failing: Failing, run: Callable[[], Iterator[Any]], expected: list[str] | None, usual: int
) -> tuple[list[str], int, list[str]]:
    """The result of one run, its remaining allocations, and the faults found. usual: normal
    remaining allocations. Without an expected result, this run is the reference for the others."""
    amiss = []
    live = failing.table.live
    before = held()
    got: list[str] = []
    value = None
    failing.table.armed = 1
    try:
        for value in run():
            got.append(repr(plain(value)))
        if expected is not None and got != expected:
            amiss.append("wrong batches")
    except KINDS as error:
        # An assertion of minato's, or Python's error for a missing exception, helps no user.
        if expected is None or got != expected[: len(got)]:
            amiss.append(f"wrong batches before the error: {error!r}")
        if not str(error) and not isinstance(error, MemoryError):
            amiss.append(f"an error without a text: {error!r}")
        error.__traceback__ = None
        del error
    except ValueError as error:
        if not str(error).startswith(NATIVE + "[Errno"):
            amiss.append("another kind of error: " + traceback.format_exc(limit=-4))
        error.__traceback__ = None
        del error
    except BaseException:
        amiss.append("another kind of error: " + traceback.format_exc(limit=-4))
    value = None
    gc.collect()
    failing.table.armed = 0
    try:
        wait_for(lambda: not descendants() and threads_here() <= before[2], "all to end", PATIENCE_S)
        if not torch.equal(torch.cat([*load(torch.arange(4))]), torch.arange(4)):
            amiss.append("the next loader is wrong")
        gc.collect()
        wait_for(lambda: not descendants() and threads_here() <= before[2], "all to end", PATIENCE_S)
    except BaseException:
        amiss.append("afterwards: " + traceback.format_exc(limit=-3))
    end = time.monotonic() + PATIENCE_S / 4
    while held() != before and time.monotonic() < end:
        _core.Engine(1, 0, False)  # what forks may still have seen is looked at again
        time.sleep(0.01)
    if held() != before:
        amiss.append(f"left open: {held()}, and before {before}")
    live = failing.table.live - live
    if live > usual:
        amiss.append(f"left allocated: {live} times, where {usual} is usual")
    return got, live, amiss


def forked(
    failing: Failing, run: Callable[[], Iterator[Any]], expected: list[str] | None, usual: int
) -> tuple[list[str], int, list[str], str]:
    """Like attempt(), in a fork, whose exit and output on stderr are checked, too."""
    log, reader, writer = FOLDER / "stderr", *os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 2)
        os.close(out)
        failing.table.trainer = os.getpid()
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        told = json.dumps(attempt(failing, run, expected, usual)).encode()
        with open(writer, "wb") as file:
            file.write(told)
        util._exit_function()
        os._exit(0)
    os.close(writer)
    amiss: list[str] = []
    told = b""
    if not select.select([reader], [], [], DEADLINE_S)[0]:
        for process in [pid, *(p.pid for p in descendants(pid))]:
            kill(process, signal.SIGUSR2)
            time.sleep(0.3)
        amiss.append("it hangs")
    else:
        with open(reader, "rb", closefd=False) as file:
            told = file.read(1 << 16)
    os.close(reader)
    if amiss:
        kill(pid)
    end = time.monotonic() + PATIENCE_S
    ended, status = 0, 0
    while ended == 0 and time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)
    if ended == 0:
        amiss.append("it does not end")
        kill(pid)
        os.waitpid(pid, 0)
    elif status != 0 and not amiss:
        amiss.append(f"it ended with {os.waitstatus_to_exitcode(status)}")
    got, live, more = json.loads(told or b"[[], 0, []]")
    amiss += more
    for process in descendants():  # this process is their reaper
        amiss.append(f"left: process {process.pid}")
        kill(process.pid)
    words = log.read_text(errors="replace")
    if any(word in words for word in ("SystemError", "Fatal", "Assertion", "Unexpected")):
        amiss.append("on stderr")
    return got, live, amiss, words[-3000:]


def main() -> None:
    global FOLDER
    library, folder, of_each, every, seed, *names = sys.argv[1:]
    FOLDER = Path(folder)
    save_files(FOLDER)
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    failing = Failing(library)
    rng = random.Random(int(seed))
    findings, tries, fired, seen = [], 0, 0, set()
    failing.install()
    gc.collect()
    gc.freeze()
    for name in names or PROGRAMS:
        name, _, only = name.partition(":")
        failing.reset()
        expected, usual, amiss, words = forked(failing, PROGRAMS[name], None, 1 << 30)
        assert expected and not amiss, (name, amiss, words)
        if os.environ.get("VERBOSE"):
            print(f"{name}: {len(failing.found())} sites, {usual} allocations stay", flush=True)
        found = [site for site in failing.found() if site[0] not in seen]
        seen.update(site[0] for site in found)
        if only:
            found = [site for site in found if only in failing.describe(site[0], site[2])]
        for place, calls, what in found[int(seed) % int(every) :: int(every)]:
            if os.environ.get("ONLY", "") not in failing.describe(place, what):
                continue
            chosen = {0, *rng.sample(range(calls), min(calls, int(of_each) - 1))}
            for call in sorted(chosen):
                way = rng.randrange(2)
                failing.reset(place, call, way)
                _, _, amiss, words = forked(failing, PROGRAMS[name], expected, usual)
                tries += 1
                fired += failing.table.failed
                if any(file in failing.describe(place, what) for file in FORGETFUL):
                    amiss = [text for text in amiss if not text.startswith("left ")]
                if amiss or os.environ.get("VERBOSE"):
                    where = f"{name}: call {call} of {calls} of {failing.describe(place, what)} ({way})"
                    print(where, *amiss, words if amiss else "", sep="\n", flush=True)
                if amiss:
                    findings.append([where, *amiss, words])
    print(json.dumps({"sites": len(seen), "tries": tries, "fired": fired, "findings": findings}))


if __name__ == "__main__":
    main()
