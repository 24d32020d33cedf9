"""A device that is none: threads are its streams, and its copies come late.

A copy is made when its stream comes to it, of what stands then at the address that it was
given: memory that was let go of too early has other bytes by that time, because what is
freed here is overwritten. The same holds for the memory of the device itself. A test reads
what a batch holds through the caller's stream, which may be held up, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from minato.device import provider as providers
from minato.device.interface import Job
from minato.device.pagelocked_rows import SMALLEST, Driver

SECONDS = 20.0
#: what stands in memory that was freed, or not yet written
POISON = 0xA5


class NoMemory(RuntimeError):
    """The device is full."""


class Event:
    """Passed when its stream has come to it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.done = threading.Event()
        self.at = 0.0
        self.asked = 0


class Stream:
    """Does what it is given in that order, in a thread, as long as its gate is open."""

    def __init__(self, name: str) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"fake {name}", daemon=True)
        self.thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """From now on work is what it will do after all the rest."""
        self._work.put(work)

    def close(self) -> None:
        self.gate.set()
        self._work.put(None)
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self.gate.wait()
            work()


class Read:
    """What the caller's stream finds in a tensor, when it comes to that."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address, self.dtype, self.shape = tensor.data_ptr(), tensor.dtype, tensor.shape
        self.bytes = bytearray(tensor.nbytes)
        self.done = threading.Event()

    def __call__(self) -> None:
        if self.bytes:
            array = (ctypes.c_char * len(self.bytes)).from_buffer(self.bytes)
            ctypes.memmove(array, self.address, len(self.bytes))
        self.done.set()

    def value(self) -> torch.Tensor:
        assert self.done.wait(SECONDS)
        if not self.bytes:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(self.bytes, dtype=self.dtype).reshape(self.shape)


class Locker:
    """A driver that locks pages, and remembers which are."""

    def __init__(self, fake: Fake) -> None:
        self.locked: dict[int, int] = {}
        self.locks = self.unlocks = self.inside = 0
        self.refuses: Callable[[int], int] = lambda address: 0  # what it says to a lock
        self.host = fake._addresses
        plain, place = ctypes.c_int, ctypes.c_void_p
        # they must live as long as somebody may call them, and that is longer than a test
        self.functions = (
            ctypes.CFUNCTYPE(plain, place)(self._enter),
            ctypes.CFUNCTYPE(plain, place)(self._leave),
            ctypes.CFUNCTYPE(plain, place, ctypes.c_size_t, ctypes.c_uint)(self._lock),
            ctypes.CFUNCTYPE(plain, place)(self._unlock),
        )
        _lockers.append(self)

    def driver(self) -> Driver:
        found = [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in self.functions]
        return Driver(found[0], found[1], found[2], found[3], 77, 1)

    def whole(self, address: int, nbytes: int) -> bool:
        """Whether one lock holds a range. Memory of the tests' own needs none."""
        inside = any(a <= address and address + nbytes <= a + n for a, n in self.locked.items())
        return inside or nbytes < SMALLEST or address in self.host

    def _enter(self, context: int) -> int:
        self.inside += 1
        return 0 if context == 77 else 201

    def _leave(self, context: int) -> int:
        self.inside -= 1
        return 0

    def _lock(self, address: int, nbytes: int, flags: int) -> int:
        said = self.refuses(address)
        if said == 0:
            self.locked[address] = nbytes
            self.locks += 1
        return said

    def _unlock(self, address: int) -> int:
        del self.locked[address]
        self.unlocks += 1
        return 0


_lockers: list[Locker] = []


class Fake:
    """The provider. What it should do wrong is set on it."""

    no_room = (NoMemory,)

    def __init__(self, device: str = "cuda:1") -> None:
        self.device = torch.device(device)
        self.copying: Stream | None = None  # the stream that was asked for
        self.calling = Stream("caller")
        #: how host() has it: "pinned" (a copy), "direct" (where it is), "pageable" (refused)
        self.way = "pinned"
        self.room: int | None = None  # bytes of the device; None: no end of them
        self.used = 0
        #: by number of an event: so many questions are answered with no although it has passed
        self.slow_to_say: dict[int, int] = {}
        self.plant: Callable[[str], bool] = lambda verb: False  # verbs that are forgotten
        self.threads: set[threading.Thread] = set()  # that begin copies
        self.entered: list[threading.Thread] = []
        self.copied: list[int] = []  # bytes of each
        self.moved: list[Any] = []
        self.before: Callable[[torch.Tensor], None] = lambda tensor: None  # each copy
        self.events = 0
        self.waiting = threading.Event()  # the caller's stream has come to a wait
        self.locker: Locker | None = None
        #: runs operators of minato.ops, or why nothing does
        self.finisher: Any = "it is a fake"
        self.jobs: list[Job] = []
        self._on: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._addresses: set[int] = set()
        self._memory: list[Any] = []  # all there ever was: addresses stay readable
        self._users: dict[int, Stream] = {}

    # ---- memory ------------------------------------------------------------------------------

    def _tensor(self, like: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        buffer = np.full(max(1, like.nbytes), POISON, np.uint8)
        self._memory.append(buffer)
        self._addresses.add(buffer.ctypes.data)
        flat = torch.frombuffer(buffer, dtype=like.dtype, count=like.numel()) if (
            like.numel()) else torch.empty(0, dtype=like.dtype)  # fmt: skip
        return flat.reshape(like.shape), buffer

    def host(self, tensor: torch.Tensor, copies: bool) -> tuple[torch.Tensor, str]:
        if self.way != "pinned":
            return tensor, self.way
        made, buffer = self._tensor(tensor)
        made.copy_(tensor)
        weakref.finalize(made, buffer.fill, POISON).atexit = False
        return made, "pinned"

    def _on_device(self, like: torch.Tensor, stream: Any) -> tuple[torch.Tensor, np.ndarray]:
        nbytes = like.nbytes
        if self.room is not None and self.used + nbytes > self.room:
            raise NoMemory(f"{nbytes} bytes, {self.room - self.used} are free")
        self.used += nbytes
        made, buffer = self._tensor(like)
        self._on[made.data_ptr()] = made
        weakref.finalize(made, self._freed, id(buffer), buffer, nbytes, stream).atexit = False
        return made, buffer

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, stream: Any) -> torch.Tensor:
        return self._on_device(torch.empty(shape, dtype=dtype), stream)[0]

    def operators(self) -> str | None:
        return self.finisher if isinstance(self.finisher, str) else None

    def finish(self, stream: Any, job: Job) -> None:
        self.jobs.append(job)
        stream.put(lambda: self.finisher.run(0, *job))

    def copy(self, tensor: torch.Tensor, stream: Any, cuts: list[int]) -> torch.Tensor:
        self.threads.add(threading.current_thread())
        self.before(tensor)
        nbytes = tensor.nbytes
        made, buffer = self._on_device(tensor, stream)
        source, target = tensor.contiguous().data_ptr(), buffer.ctypes.data

        ends = [0, *cuts, nbytes]

        def late() -> None:
            for begin, end in zip(ends, ends[1:]):
                if self.locker is not None and not self.locker.whole(source + begin, end - begin):
                    continue  # as drivers do: nothing is copied
                ctypes.memmove(target + begin, source + begin, end - begin)

        if self.way == "pageable":  # the driver reads it before it goes on
            late()
        else:
            stream.put(late)
        self.copied.append(nbytes)
        return made

    def _freed(self, key: int, buffer: np.ndarray, nbytes: int, stream: Stream) -> None:
        """Whoever gets the memory next writes to it when all that uses it by now is done."""
        self.used -= nbytes
        user = self._users.pop(key, None) or stream
        user.put(lambda: buffer.fill(POISON))

    def uses(self, tensor: torch.Tensor, stream: Any) -> None:
        if self.plant("uses"):
            return
        address = tensor.data_ptr()
        for buffer in self._memory:
            if buffer.ctypes.data == address:
                self._users[id(buffer)] = stream

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.layout == torch.strided and tensor.data_ptr() in self._on

    def driver(self) -> Driver | None:
        return self.locker.driver() if self.locker is not None else None

    def free(self) -> int | None:
        return None if self.room is None else self.room - self.used

    # ---- streams -----------------------------------------------------------------------------

    def enter(self) -> None:
        self.entered.append(threading.current_thread())

    def stream(self) -> Any:
        self.copying = Stream("copies") if self.copying is None else self.copying
        return self.copying

    def current(self) -> Any:
        return self.calling

    def record(self, stream: Any) -> Any:
        event = Event(self.events)
        self.events += 1

        def reached() -> None:
            event.at = time.monotonic()
            event.done.set()

        stream.put(reached)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        if not self.plant("wait"):
            stream.put(self.waiting.set)
            stream.put(lambda: event.done.wait(SECONDS) and None)

    def passed(self, event: Any) -> bool:
        if self.plant("passed"):
            return True
        if not event.done.is_set():
            return False
        event.asked += 1
        return bool(event.asked > self.slow_to_say.get(event.number, 0))

    def seconds(self, begin: Any, end: Any) -> float | None:
        return float(end.at - begin.at)

    def move(self, data: Any, waits: bool) -> Any:
        self.moved.append((data, waits))
        return data.to(self.device) if not isinstance(data, torch.Tensor) else data

    # ---- for the tests -----------------------------------------------------------------------

    def read(self, tensor: torch.Tensor) -> Read:
        """Has the caller's stream read a tensor."""
        read = Read(tensor)
        self.calling.put(read)
        return read

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the caller's stream finds in it."""
        assert self.holds(tensor), "it did not arrive on the device"
        return self.read(tensor).value()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Copies do not get done meanwhile."""
        copying = self.stream()
        copying.gate.clear()
        try:
            yield
        finally:
            copying.gate.set()

    def close(self) -> None:
        if self.copying is not None:
            self.copying.close()
        self.calling.close()


def install(fake: Fake, monkeypatch: Any) -> None:
    """Loaders with device="cuda..." get it."""
    monkeypatch.setitem(providers._makers, "cuda", lambda named: fake)
