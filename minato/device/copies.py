"""Batches on their way to a device: copied ahead on minato's own stream.

Life of a batch here:

1. ``begin`` puts each tensor where copies can read it, starts its copy, and records an event
   after the last copy. It runs in the stage's thread, or in the caller's if there is none.
   If a pipeline ends on the device, its samples are finished there, after their copies and
   before the event (``operators.py``).
2. The sources of the copies stay with the copier until that event has passed. They are then
   dropped, and their memory is free for the next batch; never earlier, whatever the program does.
3. ``hand_over`` (in the caller's thread) makes the caller's current stream wait for the event,
   and records that this stream uses the tensors. The host does not wait.

Only plain tensors in ordinary memory are copied like this. All else (other layouts, classes with
their own ``to()``, tensors of another device) is moved in step 3. This runs on the caller's own
stream, as the program would do it. The stream of step 1 could not know the memory inside such an
object.
"""

from __future__ import annotations

import atexit
import collections
import collections.abc
import contextlib
import copy
import ctypes
import dataclasses
import os
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..typing import Device
from .operators import Split, Tail
from .provider import Provider

if TYPE_CHECKING:
    from .._core import PageLock

#: fewest and most batches on the device: the delivered one and those after it
FEWEST, MOST = 2, 4
#: largest share of the free device memory for batches ahead, beyond the first
SHARE = 1 / 8
#: batches between two queries of the device's free memory
FREE_EVERY = 64
#: tensors of at least this size are timed; smaller ones cost less than the clock
TIMED_BYTES = 64 << 10
#: weight of one measurement in a running mean
PACE = 0.2
#: longest wait for copies: at the interpreter's exit, and before their sources are unlocked for the
#: program
COPIES_SECONDS = 5.0


def depth(copy_s: float, step_s: float, nbytes: float, free: float | None) -> int:
    """How many batches should be on the device, including the delivered one.

    One batch ahead hides a copy behind a step as long as every step is longer than a copy. If
    copies are not much shorter than steps, a short step would wait, so one or two more batches
    are kept in reserve. Each costs its bytes of device memory all the time.
    """
    if step_s <= 0 or copy_s <= 0:
        return FEWEST
    wanted = FEWEST + min(MOST - FEWEST, int(2 * copy_s / step_s))
    while wanted > FEWEST and free is not None and (wanted - 1) * nbytes > SHARE * free:
        wanted -= 1
    return wanted


def mapped(data: Any, leaf: Callable[[Any], Any]) -> Any:
    """data with its parts replaced by leaf(part); if leaf returns None, its own parts are searched.

    The containers are those of torch's pin_memory, rebuilt in the same way, and
    dataclasses.
    """
    said = leaf(data)
    if said is not None:
        return said
    if isinstance(data, (str, bytes)):
        return data
    if isinstance(data, collections.abc.Mapping):
        return _rebuilt(data, {key: mapped(part, leaf) for key, part in data.items()})
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(mapped(part, leaf) for part in data))
    if isinstance(data, collections.abc.Sequence):
        return _rebuilt(data, [mapped(part, leaf) for part in data])
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        made = copy.copy(data)
        for field in dataclasses.fields(data):
            object.__setattr__(made, field.name, mapped(getattr(data, field.name), leaf))
        return made
    return data


def _rebuilt(data: Any, parts: Any) -> Any:
    """A container of the same type, or a plain one if that cannot be made."""
    try:
        if not isinstance(data, (collections.abc.MutableMapping, collections.abc.MutableSequence)):
            return type(data)(parts)
        made: Any = copy.copy(data)  # a custom type may have more attributes than its parts
        if isinstance(parts, dict):
            made.update(parts)
        else:
            for number, part in enumerate(parts):
                made[number] = part
        return made
    except TypeError:
        return parts


def _plain(tensor: torch.Tensor) -> bool:
    """Whether the values are bytes in ordinary memory without dependencies."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj())
        and not tensor.is_neg()
    )


class Copies:
    """Counters of copies, for stats(). The stage's thread and the caller's thread each write
    their own fields."""

    def __init__(self, device: str, split: Split | None = None) -> None:
        self.device = device
        self.operators = split.tail.operators if split is not None and split.tail else []
        self.operators_why = split.why if split is not None else None
        kept = split.tail.resident if split is not None and split.tail else None
        self.resident = kept.nbytes if kept is not None else 0
        # written by the thread that starts copies
        self.copies = self.bytes = self.timed_bytes = 0
        self.copy = self.staging = self.stalled = 0.0  # seconds
        self.batch_s = self.batch_bytes = 0.0  # per batch, running means
        self.through = {"locked": 0, "direct": 0, "pinned": 0, "pageable": 0}
        self.locked = self.lock_error = 0
        self.refused = 0  # batches for which the device had no memory ahead of their turn
        self.depth = FEWEST
        # written by the caller's thread
        self.batches = 0
        self.waited = self.step_s = 0.0  # seconds

    def summary(self) -> Device:
        """``stats()["device"]``."""
        measured = self.copy > 0
        own: Any = copy.deepcopy({name: vars(self).get(name) for name in Device.__annotations__})
        own["bandwidth"] = self.timed_bytes / self.copy if measured else None
        own["overlap"] = max(0.0, 1 - self.stalled / self.copy) if measured else None
        return own  # type: ignore[no-any-return]


# ---- rows in the arena as the source of copies ----------------------------------------------
#
# They are locked for the device if its driver allows it. The device then reads the memory that
# workers have written, without a copy on the host. If the driver refuses (a limit on locked memory, a
# container without the permission), rows are copied through torch's page-locked memory instead.
#
# A copy from locked memory continues after the call that started it, and minato cannot see the
# program's own copies. So rows are not locked if the program receives any object that may lie in the
# arena. Tensors arrive on the device, and plain values never lie in the arena. Other objects may.

#: smaller tensors do not lie in the arena: they were copied when the batch was made
SMALLEST = 64 << 10

# ---- copies --------------------------------------------------------------------------------


class _Late(NamedTuple):
    """A part of a batch that the caller's own stream moves."""

    data: Any
    pinned: bool  # torch keeps the memory until it was read; if False, the move must be waited for


#: types without memory that a program could copy to a device
_PLAIN = (str, bytes, int, float, complex, type(None), np.generic, type)
#: types without memory besides their parts
_CONTAINERS = (dict, list, tuple, collections.OrderedDict, collections.defaultdict)


def opaque(data: Any) -> bool:
    """Whether a batch contains anything that is neither a tensor nor plain. The program receives
    such an object as it is, and it may lie in rows. If the program copies it to the device, that
    copy could still read page-locked rows when they hold the next batch."""
    found = False

    def leaf(part: Any) -> Any:
        nonlocal found
        if isinstance(part, (torch.Tensor, *_PLAIN)):
            return part
        known = type(part) in _CONTAINERS or (isinstance(part, tuple) and hasattr(part, "_fields"))
        known = known or dataclasses.is_dataclass(part)
        found = found or not known or hasattr(part, "to")
        return None

    mapped(data, leaf)
    return found


@dataclasses.dataclass(eq=False)
class Flight:
    """The copies of one batch, until their times have been measured."""

    #: their sources, and the locks that let the device read them
    sources: list[torch.Tensor] = dataclasses.field(default_factory=list)
    locks: list[PageLock] = dataclasses.field(default_factory=list)
    nbytes: int = 0  # on the device
    done: Any = None  # the event after the last copy; None: nothing was copied
    #: (bytes, begin, end) of the timed copies
    times: list[tuple[int, Any, Any]] = dataclasses.field(default_factory=list)
    #: event on the caller's stream before it waited; None: it never did
    asked: Any = None


@dataclasses.dataclass(eq=False)
class Sent:
    """A batch whose copies have started."""

    flight: Flight = dataclasses.field(default_factory=Flight)
    data: Any = None
    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    late: bool = False  # it has parts that the caller's own stream moves


class Copier:
    """The copies of one iterator. One thread calls begin(), look() and finish(); the caller's
    thread calls hand_over()."""

    def __init__(self, provider: Provider, engine: Any = None, split: Split | None = None) -> None:
        self.provider = provider
        self._tail = split.tail if split is not None else None
        self._engine = engine  # batches may lie in its arena
        self._locks = False  # the device reads them there
        self.counts = Copies(str(provider.device), split)
        self._stream: Any = None
        self._flying: list[Flight] = []  # their sources may not be freed yet
        self._landed: list[Flight] = []  # their times are not measured yet
        self._until_asked = 0  # batches until the free memory is queried again
        self._free: int | None = None
        self._handed: float | None = None  # time of the last delivery
        _all.add(self)

    # ---- the thread that starts copies -------------------------------------------------------

    def begin(self, data: Any) -> Sent:
        """Starts the copies of a batch. Raises the device's errors; copies that were started before
        the error run to their end."""
        self.look()
        if self._stream is None:
            self._stream = self.provider.stream()
            driver = None if self._engine is None else self.provider.driver()
            if driver is not None:
                self._engine.set_page_driver(*driver)
                self._locks = True
        if self._locks and opaque(data):
            self._locks = False
            with contextlib.suppress(RuntimeError):  # the engine was closed in the meantime
                self._engine.set_page_driver()  # unlocks what is not being read
            if not self._land(COPIES_SECONDS):
                raise RuntimeError("copies to the device do not finish: the device may hang")
        sent = Sent()
        try:
            sent.data = mapped(data, lambda part: self._leaf(part, sent))
            if self._tail is not None:
                self._finished(self._tail, sent)
        finally:
            if sent.flight.sources:
                self._takes_off(sent.flight)
        self.counts.depth = self._depth()
        if self._engine is not None:
            with contextlib.suppress(RuntimeError):  # likewise
                self.counts.locked, self.counts.lock_error = self._engine.page_locks()
        return sent

    def _finished(self, tail: Tail, sent: Sent) -> None:
        """Runs the operators on the copies' stream. Their inputs are freed afterwards."""
        sent.data, made = tail.finish(self.provider, self._stream, sent.data)
        kept = [t for t in sent.tensors if any(t is part for part in sent.data)]
        sent.tensors = [*kept, *made]
        sent.flight.nbytes += sum(tensor.nbytes for tensor in made)

    def _takes_off(self, flight: Flight) -> None:
        self._flying.append(flight)
        try:
            flight.done = self.provider.record(self._stream)
        except Exception:  # the device has failed and reads nothing
            self._flying.remove(flight)
            raise

    def _leaf(self, part: Any, sent: Sent) -> Any:
        if isinstance(part, torch.Tensor):
            if self.provider.holds(part):
                return part
            if _plain(part):
                return self._copied(part, sent)
        elif not callable(getattr(part, "to", None)) or isinstance(part, type):
            return None
        pins = callable(getattr(part, "pin_memory", None)) and not isinstance(part, torch.Tensor)
        sent.late = True
        return _Late(part.pin_memory() if pins else part, pins)

    def _lock(self, tensor: torch.Tensor) -> PageLock | None:
        """Lets the device read a tensor as long as the lock lives; None if it is not in the arena,
        or may not be locked."""
        if not self._locks or tensor.nbytes < SMALLEST or not tensor.is_contiguous():
            return None
        try:
            lock: PageLock | None = self._engine.lock_pages(tensor.data_ptr(), tensor.nbytes)
        except RuntimeError:  # the engine was closed in the meantime
            return None
        return lock

    def _copied(self, tensor: torch.Tensor, sent: Sent) -> torch.Tensor:
        provider, counts, flight = self.provider, self.counts, sent.flight
        nbytes, since = tensor.nbytes, time.monotonic()
        lock = self._lock(tensor)
        if lock is None:
            source, through = provider.host(tensor, self._engine is not None)
        else:
            source, through = tensor, "locked"
            flight.locks.append(lock)
        counts.staging += time.monotonic() - since
        began = provider.record(self._stream) if nbytes >= TIMED_BYTES else None
        flight.sources.append(source)
        made = provider.copy(source, self._stream, lock.cuts if lock is not None else [])
        if began is not None:
            flight.times.append((nbytes, began, provider.record(self._stream)))
        flight.nbytes += nbytes
        sent.tensors.append(made)
        counts.copies += 1
        counts.bytes += nbytes
        counts.through[through] += nbytes
        return made

    def look(self) -> bool:
        """Frees the sources of finished copies. Returns whether others are still running."""
        for flight in list(self._flying):  # a copy that never ends does not block later ones
            if flight.done is not None and self._passed(flight.done):
                with contextlib.suppress(ValueError):  # another thread has removed it
                    self._flying.remove(flight)
                    flight.locks.clear()  # before the memory that they lock
                    flight.sources.clear()
                    self._landed.append(flight)
        # Times of batches that the program dropped are never measured.
        self._landed = [f for f in self._landed if not self._measured(f)][-2 * MOST :]
        return bool(self._flying)

    def _land(self, seconds: float) -> bool:
        """Waits until no copy is running. Returns whether that happened in time."""
        deadline = time.monotonic() + seconds
        while self.look() and time.monotonic() < deadline:
            time.sleep(0.001)
        return not self._flying

    def _passed(self, event: Any) -> bool:
        try:
            return self.provider.passed(event)
        except RuntimeError:  # the device has failed and reads nothing any more
            return True

    def _measured(self, flight: Flight) -> bool:
        """Measures the times of a batch, once the caller's stream has reached it."""
        if flight.asked is None or not self._passed(flight.asked):
            return False
        counts, seconds, total = self.counts, self.provider.seconds, 0.0
        try:
            for nbytes, began, ended in flight.times:
                took = seconds(began, ended)
                if took is not None:
                    counts.timed_bytes += nbytes
                    total += took
            stalled = seconds(flight.asked, flight.done) or 0.0
        except RuntimeError:
            return True
        counts.copy += total
        counts.stalled += min(max(0.0, stalled), total)
        pace = PACE if counts.batch_s > 0 else 1.0
        counts.batch_s += pace * (total - counts.batch_s)
        counts.batch_bytes += pace * (flight.nbytes - counts.batch_bytes)
        return True

    def _depth(self) -> int:
        counts = self.counts
        if counts.refused:
            return 1
        if self._until_asked == 0:
            self._free = self.provider.free()
            self._until_asked = FREE_EVERY
        self._until_asked -= 1
        return depth(counts.batch_s, counts.step_s, counts.batch_bytes, self._free)

    def finish(self, seconds: float) -> None:
        """Waits until no copy is running; none is started after this. Sources of slower copies are
        kept, because freeing them too early would be an error."""
        self._land(seconds)
        sweep()

    def __del__(self) -> None:
        if self._flying:  # keep it alive until they finish
            _left.append(self)

    # ---- the caller --------------------------------------------------------------------------

    def hand_over(self, sent: Sent) -> Any:
        """The batch, for use on the caller's current stream."""
        counts, now = self.counts, time.monotonic()
        if self._handed is not None:
            pace = PACE if counts.step_s > 0 else 1.0
            counts.step_s += pace * (now - self._handed - counts.step_s)
        if sent.flight.done is not None:
            stream = self.provider.current()
            asked = self.provider.record(stream)
            self.provider.wait(stream, sent.flight.done)
            for tensor in sent.tensors:
                self.provider.uses(tensor, stream)
            sent.flight.asked = asked
        data = mapped(sent.data, self._moved) if sent.late else sent.data
        counts.batches += 1
        self._handed = time.monotonic()
        return data

    def _moved(self, part: Any) -> Any:
        if isinstance(part, _Late):
            return self.provider.move(part.data, not part.pinned)
        return part if isinstance(part, torch.Tensor) else None


# ---- copies that outlive their iterator ------------------------------------------------------

_all: weakref.WeakSet[Copier] = weakref.WeakSet()
#: copiers whose iterators are gone but whose copies are running. Lists without a lock, because a
#: finalizer may run anywhere. They outlive the interpreter: a device may go on reading.
_left: list[Copier] = []
_inherited: list[Copier] = []
for _list in (_left, _inherited):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_list))


def sweep() -> int:
    """Frees the sources of finished copies in _left. Returns how many copiers remain."""
    for copier in list(_left):
        if not copier.look():
            with contextlib.suppress(ValueError):
                _left.remove(copier)
    return len(_left)


def _after_in_child() -> None:
    """In a forked child, keeps the parent's sources and events of copies unused."""
    _inherited.extend([*_all, *_left])
    _left.clear()


@atexit.register
def _finish_all() -> None:
    for copier in list(_all):
        copier.finish(COPIES_SECONDS)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_in_child)
