"""A fake device: threads are its streams, and its copies are late.

A copy reads its source address when its stream reaches the copy. Memory that was released too
early has other bytes by that time, because freed memory is overwritten here. The same holds for
the memory of the device itself. A test reads a batch through the caller's stream, which can be
delayed, too.
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
from minato.device.copies import SMALLEST
from minato.device.provider import Driver, Job

SECONDS = 90.0
#: content of memory that was freed, or not yet written
POISON = 0xA5


class NoMemory(RuntimeError):
    """The device is full."""


class Event:
    """Passes when its stream has reached it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.done = threading.Event()
        self.at = 0.0
        self.asked = 0


class Stream:
    """Runs its work in order, in a thread, as long as its gate is open."""

    def __init__(self, name: str) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"fake {name}", daemon=True)
        self.thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Appends work."""
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
    """The content of a tensor when the caller's stream reaches the read."""

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
    """A driver that locks pages, and records which are locked."""

    def __init__(self, fake: Fake) -> None:
        self.locked: dict[int, int] = {}
        self.locks = self.unlocks = self.inside = 0
        self.refuses: Callable[[int], int] = lambda address: 0  # result of a lock
        self.host = fake._addresses
        plain, place = ctypes.c_int, ctypes.c_void_p
        # they must outlive all callers, which exist longer than a test
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
    """The provider. Tests set the errors that it should make."""

    no_room = (NoMemory,)

    def __init__(self, device: str = "cuda:1") -> None:
        self.device = torch.device(device)
        self.copying: Stream | None = None  # the stream that was asked for
        self.calling = Stream("caller")
        #: how host() works: "pinned" (a copy), "direct" (in place), "pageable" (refused)
        self.way = "pinned"
        self.room: int | None = None  # bytes of the device; None: no end of them
        self.used = 0
        #: by number of an event: how many queries return False although it has passed
        self.slow_to_say: dict[int, int] = {}
        self.plant: Callable[[str], bool] = lambda verb: False  # calls to leave out
        self.threads: set[threading.Thread] = set()  # that start copies
        self.entered: list[threading.Thread] = []
        self.copied: list[int] = []  # bytes of each
        self.moved: list[Any] = []
        self.before: Callable[[torch.Tensor], None] = lambda tensor: None  # each copy
        self.events = 0
        self.waiting = threading.Event()  # the caller's stream has come to a wait
        self.locker: Locker | None = None
        #: runs operators of minato.ops, or the reason why none run
        self.finisher: Any = "it is a fake"
        self.jobs: list[Job] = []
        self._on: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._addresses: set[int] = set()
        self._memory: list[Any] = []  # all memory so far: addresses stay readable
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

    def operators(self, _check: Any) -> str | None:
        return self.finisher if isinstance(self.finisher, str) else None

    def finish(self, stream: Any, job: Job) -> None:
        self.jobs.append(job)
        stream.put(lambda: self.finisher.run(0, job))

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

        if self.way == "pageable":  # the driver reads it before returning
            late()
        else:
            stream.put(late)
        self.copied.append(nbytes)
        return made

    def _freed(self, key: int, buffer: np.ndarray, nbytes: int, stream: Stream) -> None:
        """The next user of the memory overwrites it after all current uses are done."""
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
        """Lets the caller's stream read a tensor."""
        read = Read(tensor)
        self.calling.put(read)
        return read

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's content as the caller's stream sees it."""
        assert self.holds(tensor), "it did not arrive on the device"
        return self.read(tensor).value()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Blocks copies meanwhile."""
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
    """Used by loaders with device="cuda..."."""
    monkeypatch.setitem(providers._makers, "cuda", lambda named: fake)
