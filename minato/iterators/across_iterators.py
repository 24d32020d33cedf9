"""What minato remembers about a loader between its iterators.

Kept beside the loader and not in it: libraries copy, pickle and rebuild loaders from
their attributes. The state that its next iterator goes on from is an attribute of the loader
(``pending_state``) for the same reason: the loader that they make goes on from it.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .._not_linux import CORE, NoCosts
from ..progress import Progress, length_of
from ..seeding.order_generators import Sources
from ..state import COSTS_MOST, State, pack_costs
from ..transport.rows_or_whole import Shape

if TYPE_CHECKING:
    from ..device.copies import Copies
    from ..observe.watch import Load
    from ..seeding.held import Held
    from .sampler_states import Said

if CORE:
    from .._core import CostModel

#: of datasets with more samples costs are packed for states to come, too, for so many times as
#: long as it has taken: those of millions take a good part of a second
PACKED_QUICKLY, PACKED_FOR = 1 << 16, 50

#: id of a loader -> (weak reference, memo). By identity: two loaders may be equal, or have
#: no hash, and still be two.
_memos: dict[int, tuple[weakref.ref[Any], Memo]] = {}


class Memo:
    """What is learned about a loader's samples; kept for its next iterators."""

    def __init__(self, loader: Any) -> None:
        self.shape = Shape()
        self.size = min(length_of(loader) or 0, COSTS_MOST)
        self.costs: Any = CostModel(self.size) if CORE else NoCosts()
        self._packed: list[str] = []  # costs, of a large dataset
        self._packed_until = 0.0
        #: what the latest iterator says of itself for stats(): without workers, or with; None once
        #: it is gone, or its workers are
        self.told: Callable[[], dict[str, Any] | None] = lambda: None
        self.progress: Progress | None = None  # of the latest iterator
        self.sampler_end: Said | None = None  # what its sampler said at an epoch's end, just now
        self.resume: State | None = None  # an opened state, for the next iterator
        self.user_epoch = 0  # 1 + what set_epoch was told
        self.told_dataset = False  # what it has said of itself, in this process
        self.told_uncounted = False  # that its states know no position
        self.looked_for_shared = False  # files and connections in its dataset, before a fork
        self.told_of_generators = False  # that threads share them
        self.told_of_copies = False  # that its iterable dataset gives everything in each worker
        self.told_of_epoch = False  # that persistent workers do not see its dataset's
        self.hints_refused = False  # cost_hint() has failed, and is not asked again
        self.told_unasked = False  # that its dataset's own state is not part of them
        self.last_stats: dict[str, Any] = {}  # of an iterator that has ended
        self.load: Load | None = None  # of the latest iterator, without workers
        self.copies: Copies | None = None  # to a device, of the latest iterator
        #: what its worker scheduler had come to, and between which numbers of workers
        self.scheduler: tuple[tuple[int, int, int], bytes] | None = None
        self.held: Held | None = None  # what samples build with the dataset's generators
        self.trace_group: tuple[int, Any] = (0, lambda: None)  # number, weak reference

    def packed_costs(self) -> list[str]:
        """What samples have cost, for a state. Of millions that may be what was known a little
        before: they are a help to begin with."""
        begins = time.monotonic()
        if self._packed and begins < self._packed_until:
            return list(self._packed)
        packed = pack_costs(self.costs.save())
        if self.size > PACKED_QUICKLY:
            self._packed = list(packed)
            self._packed_until = begins + PACKED_FOR * (time.monotonic() - begins)
        return packed

    def load_costs(self, index: bytes, wall: bytes) -> None:
        """Of a state."""
        self.costs.load(index, wall)
        self._packed = []

    def makes_trials(self) -> bool:
        """Whether samples are made in this process, where it is asked."""
        return True

    def found_held(self, held: Held) -> None:
        """What was found out about the dataset's generators, for the next iterators."""
        self.held = held

    def asks_for_samples(self) -> bool:
        """Whether workers are to say what their first samples are like, see transport/sendable.py."""
        return self.shape.unsure or self.costs.summary()["send_ns"] is None

    def keep_scheduler(self, bounds: tuple[int, int, int], engine: Any) -> None:
        """An iterator ends: its successor goes on with the workers it had found to suffice."""
        found = engine.scheduler()
        if found is not None:
            self.scheduler = (bounds, found["keep"])

    def kept_scheduler(self, bounds: tuple[int, int, int]) -> bytes | None:
        """For an engine that begins; None where the user has set other bounds since."""
        kept = self.scheduler
        return kept[1] if kept is not None and kept[0] == bounds else None

    @contextlib.contextmanager
    def until_begun(self, loader: Any) -> Iterator[None]:
        """Around what takes the state to go on from: that is for the next that can begin, with the
        generators that this one has found."""
        resume, pending = self.resume, pending_of(loader)
        found = Sources(loader).capture(everything=False) if resume is not None else {}
        try:
            yield
        except BaseException:
            if self.resume is None:
                self.resume = resume
                set_pending(loader, pending)
                Sources(loader).set_own(found)
            raise

    def take(self, loader: Any) -> State | None:
        """The state to go on from, once."""
        state, self.resume = self.resume, None
        if state is not None:
            set_pending(loader, None)
        return state


def pending_of(loader: Any) -> dict[str, Any] | None:
    """What ``load_state_dict()`` was given, until an iterator goes on from it."""
    pending: dict[str, Any] | None = vars(loader).get("pending_state")
    return pending


def set_pending(loader: Any, state: dict[str, Any] | None) -> None:
    """Makes that an attribute of the loader, also of one whose class refuses to be set any."""
    try:
        loader.pending_state = state
    except Exception:
        vars(loader)["pending_state"] = state


def memo_of(loader: Any) -> Memo:
    """The loader's memo; it lives as long as the loader. A copy of a loader, or one that a library
    has made from its attributes, loads the state that it has found among them."""
    key = id(loader)
    found = _memos.get(key)
    if found is not None and found[0]() is loader:
        return found[1]
    memo = Memo(loader)
    _memos[key] = (weakref.ref(loader, lambda _: _memos.pop(key, None)), memo)
    pending = pending_of(loader)
    if pending is not None:
        set_pending(loader, None)  # unless it fits
        loader.load_state_dict(pending)
    return memo
