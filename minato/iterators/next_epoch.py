"""The next epoch, whose first batches are planned while the current one ends."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..dataset_calls import attribute
from ..epoch_progress import Progress
from ..seeding.order_generators import (
    PLAIN,
    TORCH_SAMPLERS,
    Sources,
    attributes,
    sampler_of,
    sampler_of_torch,
)
from .position import Position
from .window import Window


@dataclass
class EpochAhead:
    """Describes the next epoch while the current one ends; some of its batches are planned."""

    progress: Progress
    ends: int  # number of batches in the current epoch
    failed: bool = False  # abandoned; it starts anew in its turn


class SamplerEnd:
    """The end of a RandomSampler that draws from its generator once more when it ends. That end
    must not be reached ahead, because torch's loader would not have reached it."""

    def __init__(self, loader: Any, far: bool) -> None:
        """far: the sampler is read beyond torch's prefetch window."""
        self._sampler = sampler_of(loader)
        random = type(self._sampler) is torch.utils.data.RandomSampler
        self.draws = far and random and self._sampler.generator is not None
        #: 1 if the last batch reaches the end, because it is not full; 0 if only asking for one
        #: more batch reaches it
        self.short = 0
        self._batches = loader.batch_sampler
        plain = type(self._batches) is torch.utils.data.BatchSampler
        self._fills = self.draws and plain and not self._batches.drop_last

    def epoch_begins(self) -> None:
        """Updates the batch count. A dataset that grows or shrinks later changes nothing."""
        if self._fills:
            self.short = int(len(self._sampler) % self._batches.batch_size != 0)


#: for custom samplers, which may change their contents while they are drawn from. Larger contents
#: are not compared after each index (bytes of an array, elements of a list)
MOST_BYTES, MOST_ELEMENTS = 1 << 18, 1 << 12


class Recorded:
    """A recorded attribute: the object, and the content of a tensor, array or container. Nested
    content is not recorded."""

    def __init__(self, value: Any, whole: bool) -> None:
        """whole: record the content whatever its size."""
        self._value, self._held, self._whole = value, _contents(value, whole), whole

    def is_now(self, value: Any) -> bool:
        """Whether the attribute still has this value."""
        was = self._value
        if was is not value:
            return type(was) is type(value) and type(was) in PLAIN and bool(was == value)
        now, then = _contents(value, self._whole), self._held
        try:
            return bool(now == then)
        except Exception:  # elements that cannot be compared, such as arrays
            return len(now) == len(then) and all(map(operator.is_, now, then))


def _contents(value: Any, whole: bool) -> Any:
    """A fingerprint that shows changes of a mutable object, without copying large memory."""
    if isinstance(value, (list, set, dict)):
        if not whole and len(value) > MOST_ELEMENTS:
            return len(value)
        return [*value.items()] if isinstance(value, dict) else [*value]
    if not isinstance(value, (torch.Tensor, np.ndarray)):
        return None
    try:
        version = value._version if isinstance(value, torch.Tensor) else 0
    except RuntimeError:  # an inference tensor
        version = 0
    try:
        if not whole and value.nbytes > MOST_BYTES:
            return version
        return version, zlib.crc32(np.ascontiguousarray(value).view(np.uint8).data)
    except Exception:  # on a device, sparse, or an array of objects
        return version


class SamplerChanges:
    """Detects whether the program has changed the samplers since the next epoch was started early.

    The program changes a sampler by the sampler's own ``set_epoch``, or by its attributes. This
    class compares object identities, plain values, the content of tensors, arrays and lists, and
    the lengths of torch's samplers. For samplers with ``set_epoch`` it also compares states of
    generators. From the generators of other samplers the program may draw at any time.
    """

    def __init__(self, position: Position) -> None:
        self._position = position
        self.states: dict[str, bytes] = {}  # of the samplers' generators
        self._held: list[Recorded] = []
        self._changed = False  # a change was seen between two drawn indices
        self._still = False  # these samplers change nothing while they are drawn from

    def note(self, begins: bool = False) -> None:
        """Records the current values. The early epoch is drawn from samplers in this state."""
        sources = self._position.sources
        if begins:  # the sampler may have replaced its generator
            sources = self._position.sources = sources.again()
        self.states = sources.capture(everything=False)
        if begins or not self._still:
            self._still = sampler_of_torch(sources)
            self._held = [Recorded(value, self._still) for value in self._values(sources)]

    def check(self) -> None:
        """Called before an index is drawn: compares with the values after the last index."""
        if not self._still and not self._is_held(self._position.sources):
            self._changed = True

    def seen(self) -> bool:
        """Whether anything has changed since the epoch was started."""
        known, now = self._position.sources, self._position.sources.again()
        if self._changed or known.own != now.own or not self._is_held(now):
            return True
        parts = now.samplers.values()
        if not any(callable(attribute(part, "set_epoch")) for part in parts):
            return False  # other draws from its generators are up to the program
        states = now.capture(everything=False)
        return any(states[role] != self.states[role] for role in states if role != "loader")

    def forget(self) -> None:
        """Drops the recorded values, so that replaced objects can be freed."""
        self.states, self._held, self._changed, self._still = {}, [], False, False

    def _is_held(self, sources: Sources) -> bool:
        values = self._values(sources)
        return len(values) == len(self._held) and all(map(Recorded.is_now, self._held, values))

    @staticmethod
    def _values(sources: Sources) -> list[Any]:
        parts = sources.samplers.values()
        sizes = [len(part) for part in parts if type(part) in TORCH_SAMPLERS]
        return [*sizes, *parts, *(value for part in parts for _name, value in attributes(part))]


class _Early(Iterator[Any]):
    """The indices of an epoch that starts early. Its sampler is asked only when the first index is
    needed. Its attributes may change while it is drawn from."""

    def __init__(
        self, changes: SamplerChanges, progress: Progress, begin: Callable[[], Iterator[Any]]
    ) -> None:
        self._changes, self._progress, self._begin = changes, progress, begin
        self._indices: Iterator[Any] | None = None
        changes.note()

    def __next__(self) -> Any:
        begins = self._indices is None
        if not begins and self._progress.early:
            self._changes.check()
        try:
            if self._indices is None:
                self._indices = self._begin()
            return next(self._indices)
        finally:
            if self._progress.early:
                self._changes.note(begins)


class NextEpoch:
    """Whether the next epoch starts early, and how that is undone."""

    early: EpochAhead | None = None
    wanted = False  # prefetch_next_epoch
    # states of the sampler's generators, before its end was reached ahead of torch's window
    _before_end: dict[str, bytes] | None = None

    def __init__(self, loader: Any, position: Position, window: Window) -> None:
        self.end = SamplerEnd(loader, window.far)
        self.changes = SamplerChanges(position)
        self._position = position
        self._window = window

    def epoch_begins(self, wanted: bool) -> None:
        """An epoch starts. wanted: the next one is to start while it ends."""
        self.wanted, self._before_end = wanted, None

    def indices(self, progress: Progress, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The indices of an epoch that starts early; begin makes its iterator."""
        return _Early(self.changes, progress, begin)

    @property
    def due(self) -> bool:
        """Whether the next epoch starts when the sampler ends."""
        return self.wanted and self.early is None

    def note_end(self) -> None:
        """The sampler is about to end, perhaps earlier than in torch's loader."""
        if self._before_end is None:
            self._before_end = self._position.sources.capture(everything=False)

    def give_up(self, early: EpochAhead) -> None:
        """Abandons the early epoch after an error, without affecting the current epoch."""
        early.failed = True
        self._position.sources.set_own(early.progress.generators or {})
        self.changes.note()

    def left(self, early: EpochAhead) -> int:
        """Batches of the current epoch that are not delivered yet."""
        return early.ends - self._position.progress.count

    def adopt(self) -> bool:
        """Makes the early epoch the current one. False if there is none, it has failed, or it is
        stale: the last epoch was left in the middle, or the program called load_state_dict, or
        set_epoch of the loader or a sampler, since."""
        early, self.early = self.early, None
        if early is None:
            return False
        memo = self._position.memo
        set_since = early.progress.user_epoch != memo.user_epoch or self.changes.seen()
        if early.failed or self.left(early) > 0 or set_since or memo.resume is not None:
            self._undo(early)
            self.changes.forget()
            return False
        self._before_end = None
        self.changes.forget()
        self._position.adopt(early.progress)
        return True

    def _undo(self, early: EpochAhead) -> None:
        """Sets the sampler's generators to their states in torch's loader at this point, except
        those that the program has set or drawn from since."""
        states, far = early.progress.generators, self._window.size() + self.end.short
        if self._before_end is not None and self.left(early) >= far:
            states = self._before_end  # torch's loader would not have reached the end yet
        sources, noted = self._position.sources, self.changes.states
        now = sources.capture(everything=False)
        drawn = {role for role in now if now[role] == noted.get(role)}
        resume = self._position.memo.resume
        if resume is not None and not resume["begun"]:
            drawn -= set(resume["generators"])  # load_state_dict() has set them
        sources.set_own({r: state for r, state in (states or {}).items() if r in drawn})
