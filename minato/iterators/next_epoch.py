"""The next epoch, whose first batches are planned while the present one ends."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..dataset_calls import attribute
from ..progress import Progress
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
    """The next epoch, of which some batches are planned while the present one ends."""

    progress: Progress
    ends: int  # batches of the present epoch
    failed: bool = False  # it is not gone on with, and begins anew in its turn


class SamplerEnd:
    """Where a RandomSampler draws from its generator once more, when it ends: that end must
    not be met ahead, because torch's loader would not be there yet."""

    def __init__(self, loader: Any, far: bool) -> None:
        """far: the sampler is read beyond torch's window."""
        self._sampler = sampler_of(loader)
        random = type(self._sampler) is torch.utils.data.RandomSampler
        self.draws = far and random and self._sampler.generator is not None
        #: 1 where it is met with the last batch, because that is not full; 0 where only
        #: asking for one more meets it
        self.short = 0
        self._batches = loader.batch_sampler
        plain = type(self._batches) is torch.utils.data.BatchSampler
        self._fills = self.draws and plain and not self._batches.drop_last

    def epoch_begins(self) -> None:
        """A dataset that grows or shrinks in the epoch changes nothing of this."""
        if self._fills:
            self.short = int(len(self._sampler) % self._batches.batch_size != 0)


#: of a sampler that is not torch's own, which may change what it holds while it is drawn from, larger
#: contents are not looked at behind each index: bytes of an array, elements of a list
MOST_BYTES, MOST_ELEMENTS = 1 << 18, 1 << 12


class Seen:
    """An attribute as it was: which object, and what it held if it is a tensor, an array or a
    container. What lies deeper is not looked at."""

    def __init__(self, value: Any, whole: bool) -> None:
        """whole: however large it is."""
        self._value, self._held, self._whole = value, _contents(value, whole), whole

    def is_now(self, value: Any) -> bool:
        """Whether this is what it is now."""
        was = self._value
        if was is not value:
            return type(was) is type(value) and type(was) in PLAIN and bool(was == value)
        now, then = _contents(value, self._whole), self._held
        try:
            return bool(now == then)
        except Exception:  # elements that do not compare, such as arrays
            return len(now) == len(then) and all(map(operator.is_, now, then))


def _contents(value: Any, whole: bool) -> Any:
    """What shows that a mutable object was changed, without a copy of large memory."""
    if isinstance(value, (list, set, dict)):
        if not whole and len(value) > MOST_ELEMENTS:
            return len(value)
        return [*value.items()] if isinstance(value, dict) else [*value]
    if not isinstance(value, (torch.Tensor, np.ndarray)):
        return None
    try:
        version = value._version if isinstance(value, torch.Tensor) else 0
    except RuntimeError:  # of an inference tensor
        version = 0
    try:
        if not whole and value.nbytes > MOST_BYTES:
            return version
        return version, zlib.crc32(np.ascontiguousarray(value).view(np.uint8).data)
    except Exception:  # on a device, sparse, or of objects
        return version


class EpochsTold:
    """Whether the program has changed what the samplers draw from since the next epoch was begun:
    by their own ``set_epoch``, as it has to with torch's loader, or in their attributes. Compared
    are which objects these are, plain values, what tensors, arrays and lists hold, how many samples
    torch's samplers give and, where one has ``set_epoch``, states of generators. Samplers without
    ``set_epoch`` may be given other generators."""

    def __init__(self, position: Position) -> None:
        self._position = position
        self.states: dict[str, bytes] = {}  # of the samplers' generators
        self._held: list[Seen] = []
        self._changed = False  # between two indices that were drawn
        self._still = False  # these samplers change nothing while they are drawn from

    def note(self, begins: bool = False) -> None:
        """What there is now is known to the epoch that is drawn."""
        sources = self._position.sources
        if begins:  # its sampler may have made itself another generator
            sources = self._position.sources = sources.again()
        self.states = sources.capture(everything=False)
        if begins or not self._still:
            self._still = sampler_of_torch(sources)
            self._held = [Seen(value, self._still) for value in self._values(sources)]

    def look(self) -> None:
        """Before an index is drawn: what has changed since the last was."""
        if not self._still and not self._is_held(self._position.sources):
            self._changed = True

    def changed(self) -> bool:
        """Whether anything has since the epoch was begun."""
        known, now = self._position.sources, self._position.sources.again()
        if self._changed or known.own != now.own or not self._is_held(now):
            return True
        parts = now.samplers.values()
        if not any(callable(attribute(part, "set_epoch")) for part in parts):
            return False  # and what else was drawn from its generators is the program's business
        states = now.capture(everything=False)
        return any(states[role] != self.states[role] for role in states if role != "loader")

    def forget(self) -> None:
        """Nothing is held for what may be replaced now."""
        self.states, self._held, self._changed, self._still = {}, [], False, False

    def _is_held(self, sources: Sources) -> bool:
        values = self._values(sources)
        return len(values) == len(self._held) and all(map(Seen.is_now, self._held, values))

    @staticmethod
    def _values(sources: Sources) -> list[Any]:
        parts = sources.samplers.values()
        sizes = [len(part) for part in parts if type(part) in TORCH_SAMPLERS]
        return [*sizes, *parts, *(value for part in parts for _name, value in attributes(part))]


class _Early(Iterator[Any]):
    """The indices of an epoch that is begun early: its sampler is asked with the first of them. A
    sampler may count while it is drawn from."""

    def __init__(
        self, told: EpochsTold, progress: Progress, begin: Callable[[], Iterator[Any]]
    ) -> None:
        self._told, self._progress, self._begin = told, progress, begin
        self._indices: Iterator[Any] | None = None
        told.note()

    def __next__(self) -> Any:
        begins = self._indices is None
        if not begins and self._progress.early:
            self._told.look()
        try:
            if self._indices is None:
                self._indices = self._begin()
            return next(self._indices)
        finally:
            if self._progress.early:
                self._told.note(begins)


class NextEpoch:
    """Whether the next epoch begins early, and what takes it back."""

    early: EpochAhead | None = None
    wanted = False  # prefetch_next_epoch
    # of the sampler's generators, before its end was met ahead of torch's window
    _before_end: dict[str, bytes] | None = None

    def __init__(self, loader: Any, position: Position, window: Window) -> None:
        self.end = SamplerEnd(loader, window.far)
        self.told = EpochsTold(position)
        self._position = position
        self._window = window

    def epoch_begins(self, wanted: bool) -> None:
        """An epoch begins. wanted: the next is to begin while it ends."""
        self.wanted, self._before_end = wanted, None

    def indices(self, progress: Progress, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Of an epoch that is to begin early, by this."""
        return _Early(self.told, progress, begin)

    @property
    def due(self) -> bool:
        """Whether it begins as soon as the sampler has ended."""
        return self.wanted and self.early is None

    def note_end(self) -> None:
        """The sampler's end is about to be met, which may be earlier than torch's loader would."""
        if self._before_end is None:
            self._before_end = self._position.sources.capture(everything=False)

    def give_up(self, early: EpochAhead) -> None:
        """Something went wrong with it, of which the present epoch is to know nothing."""
        early.failed = True
        self._position.sources.set_own(early.progress.generators or {})
        self.told.note()

    def left(self, early: EpochAhead) -> int:
        """Batches of the present epoch not handed out yet."""
        return early.ends - self._position.progress.count

    def adopt(self) -> bool:
        """Makes the epoch that was begun early the present one; False when there is none, it has
        failed, or it is stale: the last was left in the middle, or set_epoch or load_state_dict
        was called since, the samplers' own included."""
        early, self.early = self.early, None
        if early is None:
            return False
        memo = self._position.memo
        told = early.progress.user_epoch != memo.user_epoch or self.told.changed()
        if early.failed or self.left(early) > 0 or told or memo.resume is not None:
            self._undo(early)
            self.told.forget()
            return False
        self._before_end = None
        self.told.forget()
        self._position.adopt(early.progress)
        return True

    def _undo(self, early: EpochAhead) -> None:
        """Puts the sampler's generators where torch's loader would have them now; but for those
        that the program has set or drawn from since."""
        states, far = early.progress.generators, self._window.size() + self.end.short
        if self._before_end is not None and self.left(early) >= far:
            states = self._before_end  # that would not have met the sampler's end yet
        sources, noted = self._position.sources, self.told.states
        now = sources.capture(everything=False)
        drawn = {role for role in now if now[role] == noted.get(role)}
        resume = self._position.memo.resume
        if resume is not None and not resume["begun"]:
            drawn -= set(resume["generators"])  # load_state_dict() has set them
        sources.set_own({r: state for r, state in (states or {}).items() if r in drawn})
