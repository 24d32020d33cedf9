"""Watches the loaders of the program that it is loaded in; draws no random number.

Loaded by path before torch (``inject/sitecustomize.py``), so the standard library alone is
imported here. ``import minato.analyze.watch`` as a program's first line does the same where that
file cannot be reached: under ``python -I`` and ``-E``, in containers, in notebooks.

For each loader: its arguments, the time inside ``next()`` and between two calls (the step), the
shapes and bytes of batches. On a CUDA device two events mark the entry to and the exit from
``next()``; they are read later and never waited for. Just before the first iteration, when no
worker is there yet, a copy of the process is forked that keeps the dataset for the study.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import importlib.abc
import importlib.util
import json
import os
import signal
import socket
import stat
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from os import pread  # os.pread may get a clock
from typing import Any, NamedTuple, TypedDict, cast

#: set by ``minato analyze``: the abstract name of the socket that it listens at
VARIABLE = "MINATO_ANALYZE"
#: the name of this module where it is loaded by path
BY_PATH = "_minato_analyze_watch"
LOADERS = "torch.utils.data.dataloader"

#: steps after which the watch ends
STEPS = 30
#: seconds from the first batch: the watch ends no earlier, and no later
LEAST_S, MOST_S = 3.0, 60.0
#: the watch goes on until this number of steps of later epochs than the first were seen, if they come within
#: these seconds and these steps of the run
LATER, EPOCHS_S, EPOCHS_STEPS = 20, 20.0, 2000
#: seconds that a message may take; then the connection is given up
BLOCKED_S = 2.0
#: seconds between two messages with what is known so far
TELL_S = 1.0
#: loaders that are watched, each with a copy of the process
LOADERS_MOST = 4
#: parts of a path that are no code of the program's: of installed packages, and others
_INSTALLED = ("/site-packages/", "/dist-packages/")
_LIBRARIES = (*_INSTALLED, "/torch/utils/data/", os.path.dirname(os.__file__) + os.sep, "<")
#: a part of the variable where the command is to pause the program
PAUSES = "-pause-"
#: in the line that ends a keeper; without it, the command that asks has been killed
BYE = b'"bye"'

clock = time.monotonic
#: a line of JSON: what is told or asked
Message = dict[str, Any]


class Link:
    """The connection to ``minato analyze``; messages are lines of JSON. Whatever goes wrong here
    ends the connection and never the program."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.socket: socket.socket | None = None

    def connect(self) -> socket.socket | None:
        """A connection of its own, for this process or for one that was forked from it."""
        if not self.name:
            return None
        new = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        new.settimeout(BLOCKED_S)
        try:
            new.connect("\0" + self.name)
        except OSError:
            new.close()
            return None
        return new

    def tell(self, kind: str, **facts: Any) -> None:
        if self.socket is None:
            self.socket = self.connect()
        try:
            if self.socket is not None:
                return send(self.socket, {"kind": kind, "pid": os.getpid(), **facts})
        except OSError:
            self.close()
        self.name = None

    def close(self) -> None:
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.close()
        self.socket = None


def fork(function: Callable[[], object]) -> int:
    """The id of a process that calls a function, and ends."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    return pid


def send(to: socket.socket, message: Message) -> None:
    to.sendall(json.dumps(message, default=str).encode() + b"\n")


class Step(NamedTuple):
    """One batch of the program, and its step. The first batch of an epoch includes iter(), and the last
    one the end of the epoch."""

    inside: float  # seconds inside next()
    step: float  # seconds until the next call
    cpu: float  # CPU seconds of the process in these
    queued: float = 0.0  # seconds inside next() in which this thread could have run, and had no core
    epoch: int = 0
    step_queued: float = 0.0  # such seconds of the step


#: the arguments of a loader, as plain data; samples and length: of an epoch, where that is known
LoaderFacts = TypedDict("LoaderFacts", {
    "class": str, "maker": "str | None", "minato": bool, "iterable": bool, "batched": bool, "samples": int, "length": int,
    "num_workers": int, "batch_size": "int | None", "prefetch_factor": "int | None", "persistent_workers": bool,
    "prefetch_next_epoch": bool, "scheduling": "str | None", "worker_type": "str | None", "start_method": str,
    "cache": "str | None", "dataset": str, "collate_fn": "str | None", "worker_init_fn": "str | None",
}, total=False)  # fmt: skip


@dataclass
class Told:
    """A loader of the program, as the command is told."""

    loader: LoaderFacts
    steps: list[Any]  # the latest ones: each is a Step
    #: seconds inside iter() and next() for the first batch of an epoch, of the latest epochs
    starts: list[float]
    batches: int = 0
    noted: int = 0  # all steps
    sizes: list[tuple[int, int]] = field(default_factory=list)  # samples and bytes of some batches
    shapes: str = ""
    #: milliseconds that the device idled because of loading, and that it worked for a step
    device: list[tuple[float, float]] | None = None
    key: str = ""
    place: Sequence[Any] | None = None
    started: int = 0  # epochs that began with a first batch
    whole: list[int] = field(default_factory=list)  # epochs that the program has iterated to their end
    spent: float = 0.0  # seconds inside next() and of steps
    begun: float | None = None
    left: float = 0.0  # the end of the latest next()
    validates: bool = False


class LoaderRecord(Told):
    """What is known of one loader of the program. Loaders that are made again at the same place,
    of the same dataset, count as one."""

    def __init__(self, key: str, loader: Any, place: tuple[str, int, str] | None) -> None:
        super().__init__(describe_loader(loader), [], [], key=key, place=place)
        self.epoch = -1
        self.before = 0  # steps before this epoch
        self.later = 0  # steps of whole epochs after the first of these
        self.opening = 0.0  # seconds inside the latest iter()
        self.events: list[tuple[Any, Any]] = []
        self.opening_event: Any = None  # before the latest iter()
        self.queued = QueueClock()
        self.inside: tuple[float, float] | None = None  # of the batch whose step is under way
        self.at = 0.0, 0.0, 0.0, 0.0  # _now() at the end of the latest next()
        self.ended = False
        self.evaluated = 0  # batches that the program asked for without gradients

    #: seconds inside next() of all loaders: those of another one are no part of a step
    waited = 0.0

    def next(self, original: Callable[[Any], Any], iterator: Any, first: bool) -> Any:
        """One ``next()`` of the program's."""
        now = self._now()
        entered, queued = now[0], now[2]
        entry = _record_event() if not first or self.opening_event is None else self.opening_event
        if first:
            self.epoch += 1
            self.before = len(self.steps)
            entered -= self.opening
            self.opening_event = None
        elif self.inside is not None:
            step, cpu, without, others = (a - b for a, b in zip(now, self.at))
            step -= min(step, others)
            self.spent += self.inside[0] + step
            self.steps.append(Step(self.inside[0], step, cpu, self.inside[1], self.epoch, without))
        self.inside = None
        try:
            batch = original(iterator)
        except StopIteration:
            if self.steps and (last := self.steps[-1]).epoch == self.epoch:
                self.steps[-1] = last._replace(inside=last.inside + clock() - entered)
                self.later += len(self.steps) - self.before if self.whole else 0
                self.whole.append(self.epoch)
            raise
        exited = _record_event()
        self.inside = inside, _ = clock() - entered, self.queued.now() - queued
        if self.begun is None:
            self.begun = clock()
        if first and (self.loader["num_workers"] or not self.batches):
            self.starts.append(inside)
            self.started += 1
            del self.starts[:-50]
        LoaderRecord.waited += inside
        self.batches += 1
        if self.batches <= 3 or self.batches % 16 == 0:
            with contextlib.suppress(Exception):
                shapes: list[str] = []
                size, rows = measure_batch(batch, shapes)
                self.sizes.append((rows or 1, size))
                self.shapes = self.shapes or ", ".join(shapes[:8])
        if entry is not None and exited is not None:
            self.events.append((entry, exited))
        return batch

    def _now(self) -> tuple[float, float, float, float]:
        return clock(), time.process_time(), self.queued.now(), LoaderRecord.waited

    def leave(self) -> None:
        """The step begins now."""
        self.at = self._now()
        self.left = self.at[0]

    def has_seen_enough(self, now: float) -> bool:
        if self.begun is None:
            return False
        seconds = now - self.begun
        if len(self.steps) < STEPS or seconds <= LEAST_S:
            return seconds > MOST_S
        if self.whole and PAUSES in os.environ.get(VARIABLE, ""):
            return True  # a program that is to be paused may have only one epoch
        length = self.loader.get("length")
        if self.later >= LATER or not length or seconds > EPOCHS_S or len(self.steps) > EPOCHS_STEPS:
            return True
        # Waits at the start of an epoch are a part of it, and the first epoch has what happens only once: a
        # second or further one is watched that ends soon enough.
        epochs = max(2, len(self.whole) + 1)
        return bool(epochs * length > min(EPOCHS_STEPS, self.batches * EPOCHS_S / seconds))

    def summary(self, most: int = 200) -> Message:
        """The message: plain numbers, of the latest steps."""
        self.noted, self.device = len(self.steps), self._device()
        self.validates = self.evaluated > 0.9 * self.batches
        told = {each.name: getattr(self, each.name) for each in fields(Told)}
        steps = [[round(number, 7) for number in step] for step in self.steps[-most:]]
        return {**told, "steps": steps, "whole": self.whole[-2000:], "sizes": self.sizes[-50:]}

    def _device(self) -> list[tuple[float, float]] | None:
        """From the events that have passed."""
        if not self.events:
            return None
        found = []
        with contextlib.suppress(Exception):
            for (entry, exited), (then, _exited) in zip(self.events, self.events[1:]):
                if not then.query():
                    break
                found.append((entry.elapsed_time(exited), exited.elapsed_time(then)))
        return found


class QueueClock:
    """Seconds in which the calling thread could have run, and had no core: 0 where the kernel does
    not count them."""

    def __init__(self) -> None:
        self.thread, self.file = 0, -1

    def now(self) -> float:
        if self.thread != threading.get_native_id():
            self.close()
            self.thread = threading.get_native_id()
            with contextlib.suppress(OSError):
                path = f"/proc/self/task/{self.thread}/schedstat"
                self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if self.file < 0:
            return 0.0
        try:
            return int(pread(self.file, 64, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # the program has closed what it did not open
            self.file = -1
            return 0.0

    def close(self) -> None:
        if self.file >= 0:
            with contextlib.suppress(OSError):
                os.close(self.file)
        self.file = -1


def describe_loader(loader: Any) -> LoaderFacts:
    def list_kinds(part: Any) -> list[str]:
        return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(part).__mro__]

    facts: Message = {"class": list_kinds(loader)[0]}
    facts["iterable"] = "torch.utils.data.dataset.IterableDataset" in list_kinds(loader.dataset)
    patch = sys.modules.get("minato.patch")  # minato.patch_torch() keeps torch's class
    facts["minato"] = "minato.loader.DataLoader" in list_kinds(loader) or bool(patch and vars(patch)["_torch"].active)
    for option in ("num_workers", "batch_size", "pin_memory", "prefetch_factor", "drop_last",
                   "persistent_workers", "in_order", "timeout", "scheduling", "batching",
                   "worker_type", "prefetch_next_epoch", "cache"):  # fmt: skip
        value = getattr(loader, option, None)
        facts[option] = value if isinstance(value, (int, float, str, type(None))) else str(value)
    batches = getattr(loader, "batch_sampler", None)
    facts["batched"] = facts["batch_size"] is not None or batches is not None
    if facts["batch_size"] is None and isinstance(size := getattr(batches, "batch_size", None), int):
        facts["batch_size"] = size
    for name in ("dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn"):
        with contextlib.suppress(Exception):
            part = getattr(loader, name, None)
            facts[name] = None if part is None else getattr(part, "__qualname__", type(part).__name__)
    with contextlib.suppress(Exception):
        facts["samples"] = len(loader.dataset)
        if not facts["iterable"]:
            facts["length"] = len(loader)  # batches of an epoch
    with contextlib.suppress(Exception):
        import multiprocessing  # the program has imported it, as torch does

        context = loader.multiprocessing_context or multiprocessing
        facts["start_method"] = (
            context.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        )
    return cast("LoaderFacts", facts)


def measure_batch(batch: Any, shapes: list[str]) -> tuple[int, int]:
    """Bytes of a batch, and its samples by the first dimension of what it holds first."""
    if hasattr(batch, "shape") and hasattr(batch, "dtype"):
        shapes.append(f"{tuple(batch.shape)} {str(batch.dtype).removeprefix('torch.')}")
        size = batch.nbytes if hasattr(batch, "nbytes") else batch.numel() * batch.element_size()
        return int(size), int(batch.shape[0]) if len(batch.shape) else 0
    if isinstance(batch, (bytes, str)):
        return len(batch), 0
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        parts = [measure_batch(part, shapes) for part in batch[:1000]]
        rows = next((found for _, found in parts if found), len(batch))
        return sum(size for size, _ in parts), rows
    return 0, 0


def _record_event() -> Any:
    """An event on the device's current stream, where the program uses CUDA."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    try:
        if cuda is None or not cuda.is_initialized():
            return None
        event = cuda.Event(enable_timing=True)
        event.record()
        return event
    except Exception:
        return None


# ---- the hooks -----------------------------------------------------------------------------


class Watch:
    """The state of this process. A process that is forked begins with an empty one."""

    def __init__(self) -> None:
        self.active = os.environ.get("LOCAL_RANK", "0") == "0"
        #: loader -> file and line of the program that made it, and the library that did so for it
        self.places: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.undo: list[tuple[type, str, Any, Any]] = []
        self.told = 0.0
        self.begin()

    def begin(self) -> None:
        """Connections and records, which a forked child has of its own. Hooks stay."""
        self.lock = threading.RLock()
        self.link = Link(os.environ.get(VARIABLE))
        self.loaders: dict[str, LoaderRecord] = {}
        self.iterators: dict[int, LoaderRecord] = {}
        self.begun: set[int] = set()  # iterators that have delivered
        self.inside = threading.local()  # loader: whether a thread is in a call of a loader that is watched
        self.keepers: list[Any] = []  # in a notebook: (key, socket)

    def reset(self) -> None:
        """In a child: its loaders are its own."""
        self.link.close()
        for _key, kept in self.keepers:
            kept.close()
        self.begin()

    def hook(self, module: Any) -> None:
        """torch's loader module has been imported."""
        self.link.tell("torch")
        self._patch(module.DataLoader)

    def _patch(self, top: type) -> None:
        below = [top]
        for kind in below:
            below += kind.__subclasses__()
            self._hook_class(kind)
        watch, parent = self, super

        def __init_subclass__(cls: Any, /, **given: Any) -> None:
            parent(top, cls).__init_subclass__(**given)
            if watch.active:
                watch._hook_class(cls)

        self._replace(top, "__init_subclass__", classmethod(__init_subclass__))

    def _hook_class(self, kind: type) -> None:
        """Methods of a loader class. Its ``__init__`` need not call torch's: that of torchdata's
        StatefulDataLoader does not."""
        for name, hooked in (("__init__", self._init), ("__iter__", self._iter)):
            if name in vars(kind):
                self._replace(kind, name, hooked(vars(kind)[name]))

    def _replace(self, owner: type, name: str, new: Any) -> None:
        """Sets a hook; torch.compile leaves a loader alone, and this with it."""
        new._torchdynamo_disable, new._minato_watch = True, self
        old = vars(owner).get(name)
        setattr(owner, name, new)
        self.undo.append((owner, name, new, old))

    def _init(self, original: Any) -> Any:
        @functools.wraps(original)
        def __init__(loader: Any, *given: Any, **named: Any) -> None:
            if self.active:
                with contextlib.suppress(Exception):
                    if loader not in self.places:  # the outermost class knows the caller
                        place, maker = find_place()
                        earlier = self._find_earlier(given[0] if given else named.get("dataset"))
                        self.places[loader] = (earlier[0], earlier[1] or maker) if earlier else (place, maker)
            original(loader, *given, **named)

        return __init__

    def _find_earlier(self, dataset: Any) -> Any:
        """The place of the program's own loader, where a library makes another one of the same dataset."""
        caller = sys._getframe(2).f_code.co_filename  # of the constructor that is running
        if not any(part in caller for part in _INSTALLED):
            return None
        earlier = (place for loader, place in self.places.items() if getattr(loader, "dataset", None) is dataset)
        return next(earlier, None)

    def _iter(self, original: Any) -> Any:
        @functools.wraps(original)
        def __iter__(loader: Any) -> Any:
            in_worker = sys.modules["torch.utils.data"].get_worker_info() is not None
            if not self.active or getattr(self.inside, "loader", False) or in_worker:
                return original(loader)
            record = None
            try:
                record = self._record(loader)
            except Exception as error:  # the program goes on
                self.link.tell("trouble", text=repr(error))
            if record is None or record.ended:
                return original(loader)
            self.inside.loader = True
            began, record.opening_event = clock(), _record_event()
            try:
                iterator = original(loader)
            finally:
                self.inside.loader = False
            record.opening = clock() - began
            return self._watched(iterator, record)

        return __iter__

    def _record(self, loader: Any) -> LoaderRecord | None:
        with self.lock:
            place, maker = self.places.get(loader) or (None, None)
            dataset = type(loader.dataset).__qualname__
            length = None
            with contextlib.suppress(Exception):
                length = len(loader.dataset)
            key = f"{place}/{dataset}/{length}"
            if key not in self.loaders:
                if len(self.loaders) >= LOADERS_MOST:
                    return None
                self.loaders[key] = LoaderRecord(key, loader, place)
                self.loaders[key].loader["maker"] = maker
                self.link.tell("loader", **self.loaders[key].summary())
                self._fork_keeper(self.loaders[key], loader)
            return self.loaders[key]

    def _watched(self, iterator: Any, record: LoaderRecord) -> Any:
        """The iterator, whose ``__next__`` now tells the record; in a proxy where its class cannot
        be changed, as that of a generator."""
        with self.lock:
            self.iterators[id(iterator)] = record
            self.begun.discard(id(iterator))
            owner = next(kind for kind in type(iterator).__mro__ if "__next__" in vars(kind))
            original = vars(owner)["__next__"]
            if getattr(original, "_minato_watch", None) is self:
                return iterator
            if hasattr(original, "__code__"):

                @functools.wraps(original)
                def __next__(iterator: Any) -> Any:
                    return self.advance(original, iterator)

                self._replace(owner, "__next__", __next__)
                return iterator
        return _Proxy(self, iterator)

    def advance(self, original: Any, iterator: Any) -> Any:
        """``next()`` of an iterator, noted where it is a watched one."""
        number = id(iterator)
        record = self.iterators.get(number)
        if record is None or getattr(self.inside, "loader", False):
            return original(iterator)
        first = number not in self.begun
        self.begun.add(number)
        record.evaluated += not sys.modules["torch"].is_grad_enabled()
        self.inside.loader = True
        try:
            batch = record.next(original, iterator, first)
        except BaseException:
            self.iterators.pop(number, None)
            self.begun.discard(number)
            self._end_or_tell(record)
            raise
        finally:
            self.inside.loader = False
        self._end_or_tell(record)
        record.leave()
        return batch

    def _end_or_tell(self, record: LoaderRecord) -> None:
        """Ends the watch, or tells what is known, where it is time for that."""
        now = clock()
        if record.has_seen_enough(now):
            self.end()
        elif now - self.told > TELL_S:
            self.tell()

    def tell(self, most: int = 200) -> None:
        self.told = clock()
        for record in self.loaders.values():
            self.link.tell("watch", **record.summary(most))

    def end(self) -> None:
        """The watch has seen enough: what it has replaced is put back."""
        with self.lock:
            self.active = False
            self.iterators.clear()
            for record in self.loaders.values():
                record.ended = True
                record.queued.close()
            self.tell(2000)
            self.link.tell("watched")
            for owner, name, new, old in reversed(self.undo):
                if vars(owner).get(name) is not new:
                    continue  # another has replaced it since
                if old is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, old)
            self.undo.clear()

    def _fork_keeper(self, record: LoaderRecord, loader: Any) -> None:
        """Forks the keeper of a loader. It is no child of the program's: the process between them
        ends at once."""
        if not hasattr(os, "fork") or not self.link.name and not _interactive:
            return
        program = os.getpid()
        ours, theirs = socket.socketpair()

        def keep() -> None:
            ours.close()
            _run_keeper(self, (program, record.key), loader, theirs)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of forks where threads run
            pid = fork(lambda: fork(keep))
        theirs.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        ours.recv(1)  # its files have positions of their own
        if self.link.name:
            ours.close()
        else:
            ours.makefile("rb", buffering=0).readline()  # its greeting, which the command takes elsewhere
            self.keepers.append((record.key, ours))


class _Proxy:
    """An iterator of a class that cannot be changed: like it, it has its own methods, and goes on after an error."""

    def __init__(self, watch: Watch, iterator: Any) -> None:
        self._minato = watch, iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        watch, iterator = self._minato
        return watch.advance(next, iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._minato[1], name)


def find_place() -> tuple[tuple[str, int, str] | None, str | None]:
    """File, line and function of the program that calls what a hook has replaced, and the library that does so for
    it, or that has called this function of the program's."""
    frame: Any = sys._getframe(2)
    maker = None
    while frame is not None:
        file = frame.f_code.co_filename
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package != "minato" and not any(part in file for part in _LIBRARIES):
            return (file, frame.f_lineno, frame.f_code.co_name), maker
        if maker is None and (installed := next((part for part in _INSTALLED if part in file), None)):
            name = file.rpartition(installed)[2].partition("/")[0].removesuffix(".py")
            maker = None if name in ("torch", "minato") else name
        frame = frame.f_back
    return None, maker


# ---- the keeper ----------------------------------------------------------------------------


def _run_keeper(watch: Watch, of: tuple[int, str], loader: Any, pair: socket.socket) -> None:
    """In the copy of the process: takes no part in what the program does. Never returns."""
    watch.active = False
    sys.dont_write_bytecode = True  # files stay as they are
    os.setsid()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    held = list_open_files()
    gc.freeze()  # collections would write to pages that are shared with the program
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, the system kills this process and not the program
    watch.link.close()
    own_descriptors(pair.fileno())
    pair.send(b"+")
    to = watch.link.connect() or pair
    if to is not pair:
        pair.close()
    to.settimeout(None)
    _silence()
    send(to, {"kind": "keeper", "pid": os.getpid(), "parent": of[0], "key": of[1]})
    lines = to.makefile("rb")
    line = lines.readline()  # what the study asks for first, or its end
    if BYE not in line:
        watch.end()
        try:
            _find_package()
            keeper = importlib.import_module("minato.analyze.keeper")
        except Exception as error:
            send(to, {"kind": "unable", "error": f"{type(error).__name__}: {error}"})
        else:
            keeper.serve(to, lines, line, loader, held, of[0])
    os._exit(0)


def _find_package() -> None:
    """The package of this file, where the program's Python has none, as in another environment."""
    spec = importlib.util.find_spec("minato")
    if spec is None or spec.origin is None:
        folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        spec = importlib.util.spec_from_file_location(
            "minato", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["minato"] = module
        spec.loader.exec_module(module)


def list_open_files() -> dict[int, str]:
    """What the process has open: path and kind, before any is closed."""
    found = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {number: path for number, path in found.items() if number > 2}


def own_descriptors(mine: int) -> None:
    """Each regular file that is open for reading only gets a position of this process's own, for which the
    program waits. Sockets, pipes and files that are open for writing belong to the program: a reader at the
    other end would wait for this process, too. Their numbers lead nowhere from now on: objects of
    the program hold them, and must not write to a file that gets the same number. Shared memory stays."""
    import fcntl

    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in (0, 1, 2):
        os.dup2(null, number)
    for number, path in list_open_files().items():
        with contextlib.suppress(OSError):
            kind, flags = os.fstat(number).st_mode, fcntl.fcntl(number, fcntl.F_GETFL)
            if stat.S_ISREG(kind) and flags & os.O_ACCMODE == os.O_RDONLY and not flags & os.O_PATH:
                new = os.open(f"/proc/self/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
                os.lseek(new, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(new, number, os.get_inheritable(number))
                os.close(new)
            elif number != mine and not path.startswith(("/memfd:", "/dev/shm/")) and not stat.S_ISCHR(kind):
                os.dup2(null, number, False)


def _silence() -> None:
    """What this process prints goes nowhere. An object in place of a file may need what a copy of
    the process has not: those of a notebook's kernel wait for a thread."""
    for name in ("stdin", "stdout", "stderr"):
        for old in (getattr(sys, name), getattr(sys, f"__{name}__")):
            with contextlib.suppress(TypeError):  # of Python's own classes, whose files lead nowhere
                kind: Any = type(old)  # loggers and progress bars hold the object
                kind.write, kind.flush = write_nothing, lambda _stream: None
        new = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    kernel: Any = sys.modules.get("ipykernel.iostream")
    if kernel is not None:  # display()
        kernel.IOPubThread.send_multipart = lambda *_given, **_named: None


def write_nothing(_stream: Any, text: Any) -> int:
    return len(text)


# ---- the start -----------------------------------------------------------------------------


class _Finder(importlib.abc.MetaPathFinder):
    """Hooks torch's loader module when the program imports it."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != LOADERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            self.watch.hook(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _takes_no_part() -> bool:
    """Whether this process belongs to a pool: multiprocessing's helpers, and what they start."""
    line = " ".join(getattr(sys, "orig_argv", sys.argv))
    return "--multiprocessing-fork" in line or "from multiprocessing." in line


def _start() -> Watch:
    watch = Watch()
    watch.link.tell(
        "process", argv=getattr(sys, "orig_argv", sys.argv)[:20], ranks=os.environ.get("LOCAL_WORLD_SIZE")
    )
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=watch.reset)
    if LOADERS in sys.modules:
        watch.hook(sys.modules[LOADERS])
    else:
        sys.meta_path.insert(0, _Finder(watch))
    pid = os.getpid()
    atexit.register(lambda: watch.tell(2000) if watch.active and os.getpid() == pid else None)
    return watch


#: whether a notebook or a program has imported this, and no command has asked for it
_interactive = __name__ != BY_PATH and not os.environ.get(VARIABLE)
current: Watch | None = None
if __name__ != BY_PATH and BY_PATH in sys.modules:
    current = sys.modules[BY_PATH].current
elif not _takes_no_part() and (os.environ.get(VARIABLE) or _interactive):
    current = _start()


def report(budget: str = "2m", out: str | None = None) -> str:
    """For notebooks: studies the loader that the program has waited for most, and returns the
    answer.

    Args:
        budget: time of the study, such as ``"30s"`` or ``"2m"``.
        out: folder for ``report.json`` and ``index.html``; None writes no file.

    Raises:
        RuntimeError: no loader has been iterated since this module was imported.
    """
    if current is None or not current.loaders:
        raise RuntimeError(
            "no loader has been iterated since minato.analyze.watch was imported. Import it "
            "first, run the training loop for some steps, and call report() then."
        )
    command = importlib.import_module("minato.analyze.command")
    answer: str = command.study_this_process(current, budget, out)
    return answer
