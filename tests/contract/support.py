"""Helpers of this folder: loaders by name, comparison, waiting, scripts."""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import functools
import gc
import inspect
import math
import os
import signal
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import psutil
import torch
import torch.utils.data as tud
from forked import TOKEN, Programs

import minato

from . import expect

TESTS = Path(__file__).resolve().parents[1]
#: Where the package under test lies: in this tree, or in an environment that it is installed in.
HOME = Path(minato.__file__).resolve().parents[1]
ALL_LOADERS = ("torch", "minato-static", "minato")
#: Versions of torch whose own class was seen to behave as these tests and column
#: `torch` of expect.py say. Its behaviour depends on the version only.
SEEN = ("2.13",)
#: torch 2.6 asks only CUDA whether to pin, and does not warn if there is no device.
ASKS_ACCELERATOR = "torch.accelerator" in inspect.getsource(
    tud.dataloader._BaseDataLoaderIter.__init__)


def selected() -> list[str]:
    """The loaders named by MINATO_TEST_LOADERS. By default minato's, and torch's if its version is
    not in SEEN."""
    seen = torch.__version__.startswith(tuple(f"{version}." for version in SEEN))
    usual = ALL_LOADERS[1:] if seen else ALL_LOADERS
    names = os.environ.get("MINATO_TEST_LOADERS", ",".join(usual))
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    unknown = set(chosen) - set(ALL_LOADERS)
    if unknown:
        raise ValueError(f"MINATO_TEST_LOADERS names unknown loaders: {unknown}")
    return chosen


@dataclasses.dataclass(frozen=True)
class Kind:
    """One loader under test; calling it makes a loader of that kind."""

    name: str

    @property
    def cls(self) -> type:
        if self.is_torch:
            return tud.DataLoader
        return minato.DataLoader

    @property
    def options(self) -> dict[str, Any]:
        return {"scheduling": "static"} if self.name == "minato-static" else {}

    @property
    def is_torch(self) -> bool:
        return self.name == "torch"

    @property
    def balanced(self) -> bool:
        return self.name == "minato"

    def expects(self, row: str) -> Any:
        return expect.expected(self.name, row)

    def __call__(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return self.cls(dataset, *args, **{**self.options, **kwargs})

    @property
    def script_head(self) -> str:
        """Lines that give a script ``DataLoader`` and ``make(dataset, **kwargs)``."""
        module = "torch.utils.data" if self.is_torch else "minato"
        return (
            f"from {module} import DataLoader\n"
            f"OPTIONS = {self.options!r}\n"
            "def make(dataset, **kwargs):\n"
            "    return DataLoader(dataset, **{**OPTIONS, **kwargs})\n"
        )


# ---------------------------------------------------------------- comparison


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements in row-major order."""
    plain = tensor.detach().as_subclass(torch.Tensor)
    if plain.numel() == 0:  # an empty array's tensor may have strides that no view takes
        return b""
    plain = plain.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


def assert_same(got: Any, want: Any, path: str = "value") -> None:
    """Assert that two batches agree in every type, dtype, shape and bit."""
    assert type(got) is type(want), f"{path}: {type(got)} is not {type(want)}"
    if isinstance(want, torch.Tensor):
        for name in ("dtype", "shape", "requires_grad", "layout", "device"):
            assert getattr(got, name) == getattr(want, name), f"{path}.{name}"
        assert bits(got) == bits(want), f"{path}: {got} != {want}"
    elif isinstance(want, np.ndarray):
        assert (got.dtype, got.shape) == (want.dtype, want.shape), path
        assert got.tolist() == want.tolist(), path
    elif isinstance(want, collections.abc.Mapping):
        assert list(got) == list(want), path
        for key in want:
            assert_same(got[key], want[key], f"{path}[{key!r}]")
    elif isinstance(want, (str, bytes)):
        assert got == want, path
    elif isinstance(want, collections.abc.Sequence):
        assert len(got) == len(want), path
        for number, pair in enumerate(zip(got, want)):
            assert_same(*pair, f"{path}[{number}]")
    elif isinstance(want, float) and math.isnan(want):
        assert math.isnan(got), path
    else:
        assert got == want, f"{path}: {got!r} != {want!r}"


def error_text(error: BaseException) -> str:
    """An exception's own text with the notes attached to it."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


@dataclasses.dataclass(frozen=True)
class Failure:
    """An exception without its traceback, which would keep an iterator alive."""

    kind: type
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        return cls(type(error), error_text(error))

    @property
    def last_line(self) -> str:
        """The line that holds the original exception's type and text."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return lines[-1] if lines else ""


def drain(iterator: Any) -> list[Any]:
    """Everything an iterator still has, errors included, in order.

    An error is given as ``("error", type)``; at most 1000 steps are made.
    """
    found: list[Any] = []
    for _ in range(1000):
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except Exception as error:
            found.append(("error", type(error)))
    raise AssertionError("the iterator does not end")


def flat(batches: Any) -> list[Any]:
    """The elements of one-dimensional batches, in order."""
    return [element for batch in batches for element in batch.tolist()]


_answers: dict[str, Any] = {}


def remembered(question: str, answer: Callable[[], Any]) -> Any:
    """The result of torch's loader for this question; asked once for all loaders."""
    if question not in _answers:
        _answers[question] = answer()
    return _answers[question]


# ------------------------------------------------------------------- waiting


def wait_for(condition: Callable[[], Any], seconds: float = 90.0) -> bool:
    """Wait until ``condition()`` holds; False if it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def interrupt_in_minato() -> None:
    """Ctrl-C as soon as the main thread runs code of minato."""
    main = threading.main_thread().ident
    package = os.path.join(os.path.dirname(minato.__file__), "")

    def act() -> None:
        while not sys._current_frames()[main].f_code.co_filename.startswith(package):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=act).start()


def patiently(iterator: Iterator[Any]) -> Iterator[Any]:
    """The rest of the batches. A busy machine may exceed a short timeout= again."""
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except RuntimeError as error:
            if "timed out" not in str(error):
                raise
        else:
            yield batch


def await_batches(iterator: Any, batches: int) -> None:
    """Waits until this many batches are done and not delivered."""
    assert wait_for(lambda: iterator._data_queue.qsize() >= batches)


def gone(pid: int) -> bool:
    """Whether a process has ended (an unreaped orphan counts as ended)."""
    try:
        process = psutil.Process(pid)
        zombie = process.status() == psutil.STATUS_ZOMBIE
        return zombie and process.ppid() != os.getpid()
    except psutil.NoSuchProcess:
        return True


def worker_pids(iterator: Any) -> list[int]:
    return [worker.pid for worker in iterator._workers]


def all_gone(pids: list[int], seconds: float = 90.0) -> bool:
    """Whether all of ``pids`` end within ``seconds``, garbage being collected."""
    gc.collect()
    return wait_for(lambda: all(gone(pid) for pid in pids), seconds)


def _has_children() -> bool:
    """Whether this process has children: a quick look before a walk of all processes."""
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "children").read_text():
                return True
        except FileNotFoundError:  # the thread has ended, or the kernel hides it
            if not (task / "stat").exists():
                continue
            return True
    return False


def descendants() -> dict[int, str]:
    """pid and command line of every process below this one."""
    found: dict[int, str] = {}
    if not _has_children():
        return found
    for process in psutil.Process().children(recursive=True):
        try:
            found[process.pid] = " ".join(process.cmdline())
        except psutil.Error:
            continue
    return found


# ------------------------------------------------------------------- scripts


def search_path() -> str:
    """PYTHONPATH for scripts, so that they import the tested minato, too."""
    return os.pathsep.join(filter(None, [str(HOME), str(TESTS), os.environ.get("PYTHONPATH", "")]))


def _carries(process: psutil.Process, token: str) -> bool:
    try:
        return process.environ().get(TOKEN) == token
    except psutil.Error:
        return False


def processes_with(token: str) -> list[int]:
    """Living processes with a script's token in their environment."""
    return [process.pid for process in psutil.process_iter() if _carries(process, token)]


@dataclasses.dataclass
class Outcome:
    """How a script ended: status, output, and the processes it left behind."""

    returncode: int
    stdout: str
    stderr: str
    left: list[int]


@functools.cache
def programs() -> Programs:
    """The process that forks programs, of this process."""
    return Programs(search_path())


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


def _killed(token: str) -> bool:
    """Whether the script has ended. One that has just been forked has no token yet."""
    _kill(processes_with(token))
    try:
        programs().wait(0.1)
    except TimeoutError:
        return False
    return True


def run_script(
    kind: Kind, body: str, folder: Path, timeout: float = 100.0, grace: float = 60.0
) -> Outcome:
    """Run ``body`` after the loader's head, as a separate program.

    ``grace`` is how long processes may outlive the script before they count as left behind.
    """
    token = uuid.uuid4().hex
    path = folder / f"script_{token[:8]}.py"
    path.write_text(kind.script_head + body)
    # Files, not pipes: a process left behind would keep a pipe open and hide itself.
    out, err = folder / f"{token}.out", folder / f"{token}.err"
    programs().start(path, token, out, err)
    try:
        code = programs().wait(timeout)
    except TimeoutError:
        while not _killed(token):
            continue
        raise AssertionError(f"script hangs: {err.read_text()}") from None
    wait_for(lambda: not processes_with(token), grace)
    left = processes_with(token)
    _kill(left)
    return Outcome(code, out.read_text(), err.read_text(), left)
