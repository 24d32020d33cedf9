"""Batches on their way to a device: copied ahead on a stream of minato's own.

Life of a batch here:

1. ``begin`` (the stage's thread, or the caller's where there is none) gives each tensor a
   place that copies can read, begins its copy, and records an event after the last.
   Samples of a pipeline that ends on the device are finished there, behind their copies and
   before the event (``operators.py``).
2. What the copies read stays with the copier until that event has passed.  It is then
   dropped, and its memory is free for the next batch: not earlier, whatever the program does.
3. ``hand_over`` (the caller's thread) makes the caller's current stream wait for the event,
   and says that this stream uses the tensors.  The host does not wait.

What is no plain tensor in ordinary memory (other layouts, classes with a ``to()`` of their
own, tensors of another device) is moved in step 3 by the caller's own stream, as the program
would do it: what is inside of it could not be told to the stream.
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
from typing import Any

import numpy as np
import torch

from ..workers import grace
from .interface import Provider
from .operators import Split, Tail
from .pagelocked_rows import Lock, Slots

#: batches on the device at most: the one that is handed out, and those after it
FEWEST, MOST = 2, 4
#: share of the free device memory that batches ahead may take beyond the first
SHARE = 1 / 8
#: batches between two questions for the device's free memory
FREE_EVERY = 64
#: tensors from so many bytes on are timed one by one; smaller ones cost less than the clock
TIMED_BYTES = 64 << 10
#: how much one measurement moves a mean
PACE = 0.2
#: longest that copies are waited for before what they read is unlocked for the program
LAND_SECONDS = 5.0


def depth(copy_s: float, step_s: float, nbytes: float, free: float | None) -> int:
    """How many batches should be on the device, the one handed out among them.

    One ahead hides a copy behind a step as long as every step is longer than a copy. Where
    copies are not much shorter, one short step would be waited in; one or two more are then
    a reserve. Each costs its bytes of device memory for all of the time.
    """
    if step_s <= 0 or copy_s <= 0:
        return FEWEST
    wanted = FEWEST + min(MOST - FEWEST, int(2 * copy_s / step_s))
    while wanted > FEWEST and free is not None and (wanted - 1) * nbytes > SHARE * free:
        wanted -= 1
    return wanted


def mapped(data: Any, leaf: Callable[[Any], Any]) -> Any:
    """data with what leaf says in the place of its parts; None: it has nothing to say.

    The containers are those that torch's pin_memory goes into, made anew as it does, and
    dataclasses.
    """
    said = leaf(data)
    if said is not None:
        return said
    if isinstance(data, (str, bytes)):
        return data
    if isinstance(data, collections.abc.Mapping):
        parts = {key: mapped(part, leaf) for key, part in data.items()}
        return _rebuilt(data, parts, collections.abc.MutableMapping, _updated)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(mapped(part, leaf) for part in data))
    if isinstance(data, collections.abc.Sequence):
        items = [mapped(part, leaf) for part in data]
        return _rebuilt(data, items, collections.abc.MutableSequence, _replaced)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        made = copy.copy(data)
        for field in dataclasses.fields(data):
            object.__setattr__(made, field.name, mapped(getattr(data, field.name), leaf))
        return made
    return data


def _updated(made: Any, parts: Any) -> None:
    made.update(parts)


def _replaced(made: Any, parts: Any) -> None:
    for number, part in enumerate(parts):
        made[number] = part


def _rebuilt(data: Any, parts: Any, mutable: type, put: Callable[[Any, Any], None]) -> Any:
    """A container of the same type; what cannot be made so is a plain one."""
    try:
        if not isinstance(data, mutable):
            return type(data)(parts)  # type: ignore[call-arg]
        made = copy.copy(data)  # a type of its own may have more than its parts
        put(made, parts)
        return made
    except TypeError:
        return parts


def _plain(tensor: torch.Tensor) -> bool:
    """Whether its values are bytes in ordinary memory, and nothing depends on them."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj())
        and not tensor.is_neg()
    )


class Copies:
    """What was copied, for stats(). Written by the stage's thread and by the caller's, each
    its own fields."""

    def __init__(self, device: str, split: Split | None = None) -> None:
        self.device = device
        self.operators = split.tail.operators if split is not None and split.tail else []
        self.operators_why = split.why if split is not None else None
        kept = split.tail.resident if split is not None and split.tail else None
        self.resident = kept.nbytes if kept is not None else 0
        # of the thread that begins copies
        self.copies = self.bytes = self.timed_bytes = 0
        self.copy_s = 0.0
        self.batch_s = self.batch_bytes = 0.0  # of a batch, running means
        self.staging_s = 0.0
        self.through = {"locked": 0, "direct": 0, "pinned": 0, "pageable": 0}
        self.locked = self.lock_error = 0
        self.refused = 0  # batches that found no room ahead of their turn
        self.stalled_s = 0.0
        self.depth = FEWEST
        # of the caller
        self.batches = 0
        self.waited_s = self.step_s = 0.0

    def summary(self) -> dict[str, Any]:
        """``stats()["device"]``."""
        copy_s = self.copy_s
        return {
            "device": self.device,
            "batches": self.batches,
            "copies": self.copies,
            "bytes": self.bytes,
            "through": dict(self.through),
            "locked": self.locked,
            "lock_error": self.lock_error,
            "staging": self.staging_s,
            "copy": copy_s,
            "bandwidth": self.timed_bytes / copy_s if copy_s > 0 else None,
            "stalled": self.stalled_s,
            "overlap": max(0.0, 1 - self.stalled_s / copy_s) if copy_s > 0 else None,
            "waited": self.waited_s,
            "depth": self.depth,
            "refused": self.refused,
            "operators": list(self.operators),
            "operators_why": self.operators_why,
            "resident": self.resident,
        }


class _Late:
    """In a batch: what the caller's own stream moves."""

    def __init__(self, data: Any, pinned: bool) -> None:
        self.data = data
        #: torch keeps its memory until it was read; else the move has to be waited for
        self.pinned = pinned


#: what has no memory of its own that a program could copy from
_PLAIN = (str, bytes, int, float, complex, type(None), np.generic, type)
#: what has none beside its parts
_CONTAINERS = (dict, list, tuple, collections.OrderedDict, collections.defaultdict)


def opaque(data: Any) -> bool:
    """Whether there is anything in a batch that is neither a tensor nor plain: it stays in the
    program's hands as it is, and may lie in rows. A copy to the device that the program begins of
    it could still read page-locked rows when they are the next batch's (``pagelocked_rows.py``)."""
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
    """The copies of one batch, until nothing is to be known of them any more."""

    #: what they read, and what lets the device read it
    sources: list[torch.Tensor] = dataclasses.field(default_factory=list)
    locks: list[Lock] = dataclasses.field(default_factory=list)
    nbytes: int = 0  # of the device
    done: Any = None  # the event after the last; None: nothing was copied
    #: (bytes, begin, end) of those that are timed
    times: list[tuple[int, Any, Any]] = dataclasses.field(default_factory=list)
    #: recorded on the caller's stream where that began to wait; None: it never did
    asked: Any = None


@dataclasses.dataclass(eq=False)
class Sent:
    """A batch whose copies have begun."""

    flight: Flight = dataclasses.field(default_factory=Flight)
    data: Any = None
    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    late: bool = False  # there is something in it for the caller's own stream


class Copier:
    """The copies of one iterator. begin(), look() and finish() are one thread's, hand_over()
    is the caller's."""

    def __init__(
        self,
        provider: Provider,
        engine: Any = None,
        split: Split | None = None,
    ) -> None:
        self.provider = provider
        self._tail = split.tail if split is not None else None
        self._engine = engine  # whose arena batches may lie in
        self._slots: Slots | None = None
        self.counts = Copies(str(provider.device), split)
        self._stream: Any = None
        self._flying: list[Flight] = []  # what they read may not be freed yet
        self._landed: list[Flight] = []  # their times are still to be read
        self._until_asked = 0  # batches, until the free memory is looked at
        self._free: int | None = None
        self._handed: float | None = None  # when the caller was given the last
        _all.add(self)

    # ---- the thread that begins copies -------------------------------------------------------

    def begin(self, data: Any) -> Sent:
        """Begins the copies of a batch. Raises what the device raises; what was begun until
        then is read to its end."""
        self.look()
        if self._stream is None:
            self._stream = self.provider.stream()
            if self._engine is not None:
                self._slots = Slots(self._engine, self.provider.driver())
        if self._slots is not None and self._slots.locks and opaque(data):
            self._slots.stop()
            if not self._land():
                raise RuntimeError("copies to the device do not come to an end")
        sent = Sent()
        try:
            sent.data = mapped(data, lambda part: self._leaf(part, sent))
            if self._tail is not None:
                self._finished(self._tail, sent)
        finally:
            if sent.flight.sources:
                self._takes_off(sent.flight)
        self.counts.depth = self._depth()
        if self._slots is not None:
            self.counts.locked, self.counts.lock_error = self._slots.told()
        return sent

    def _finished(self, tail: Tail, sent: Sent) -> None:
        """The same stream goes on with what it has copied; that is gone when it has."""
        sent.data, made = tail.finish(self.provider, self._stream, sent.data)
        kept = [t for t in sent.tensors if any(t is part for part in sent.data)]
        sent.tensors = [*kept, *made]
        sent.flight.nbytes += sum(tensor.nbytes for tensor in made)

    def _takes_off(self, flight: Flight) -> None:
        self._flying.append(flight)
        try:
            flight.done = self.provider.record(self._stream)
        except Exception:  # the device has failed, and reads nothing
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

    def _copied(self, tensor: torch.Tensor, sent: Sent) -> torch.Tensor:
        provider, counts, flight = self.provider, self.counts, sent.flight
        nbytes = tensor.nbytes
        since = time.monotonic()
        lock = self._slots.lock(tensor) if self._slots is not None else None
        if lock is None:
            source, through = provider.host(tensor, self._slots is not None)
        else:
            source, through = tensor, "locked"
            flight.locks.append(lock)
        counts.staging_s += time.monotonic() - since
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
        """Frees what was read by copies that are done. Whether others are still on their way."""
        for flight in list(self._flying):  # one that never ends does not keep those after it
            if flight.done is not None and self._passed(flight.done):
                with contextlib.suppress(ValueError):  # another thread was here first
                    self._flying.remove(flight)
                    flight.locks.clear()  # before what they are for is free
                    flight.sources.clear()
                    self._landed.append(flight)
        # Of batches that were dropped no time is ever known.
        self._landed = [f for f in self._landed if not self._measured(f)][-2 * MOST :]
        return bool(self._flying)

    def _land(self) -> bool:
        """Waits until nothing is read any more; whether it came to that."""
        deadline = time.monotonic() + LAND_SECONDS
        while self.look() and time.monotonic() < deadline:
            time.sleep(0.001)
        return not self._flying

    def _passed(self, event: Any) -> bool:
        try:
            return self.provider.passed(event)
        except RuntimeError:  # the device has failed, and reads nothing any more
            return True

    def _measured(self, flight: Flight) -> bool:
        """Reads the times of a batch, once the caller's stream has come to it."""
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
        counts.copy_s += total
        counts.stalled_s += min(max(0.0, stalled), total)
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
        """Nothing more is begun: waits until nothing is read any more. What takes longer is
        kept, rather than freed too early."""
        deadline = time.monotonic() + seconds
        while self.look() and time.monotonic() < deadline:
            time.sleep(0.001)
        sweep()

    def __del__(self) -> None:
        if self._flying:  # it lives on
            _left.append(self)

    # ---- the caller --------------------------------------------------------------------------

    def hand_over(self, sent: Sent) -> Any:
        """The batch, for what the caller does on its current stream."""
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
#: gone, but for what their copies still read. Lists alone, and no lock: a finalizer that runs
#: anywhere may come here. They outlive the interpreter, too: a device may go on reading.
_left: list[Copier] = []
_inherited: list[Copier] = []
for _list in (_left, _inherited):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_list))


def sweep() -> int:
    """Frees what copies have read that were left and are done. How many have more."""
    for copier in list(_left):
        if not copier.look():
            with contextlib.suppress(ValueError):
                _left.remove(copier)
    return len(_left)


def _after_in_child() -> None:
    """What the parent's copies read is the parent's to free, and its events are, too."""
    _inherited.extend([*_all, *_left])
    _left.clear()


@atexit.register
def _finish_all() -> None:
    for copier in list(_all):
        copier.finish(grace.COPIES)


if hasattr(os, "register_at_fork"):  # a system that forks
    os.register_at_fork(after_in_child=_after_in_child)
