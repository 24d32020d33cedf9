"""The next epoch, whose first batches are planned while the present one ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..dataset_calls import attribute
from ..progress import Progress
from ..seeding.order_generators import PLAIN, Sources, attributes, sampler_of
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


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in PLAIN and one == other)


class EpochsTold:
    """What the program has told the samplers of epochs, by what they hold: there is no seeing it
    otherwise where it calls their own ``set_epoch``, as it has to with torch's loader. Compared are
    plain attributes, states of generators, and which objects the others are; what is changed in
    them is not seen. Samplers without ``set_epoch`` may be given other generators."""

    def __init__(self, position: Position) -> None:
        self._position = position
        self.states: dict[str, bytes] = {}  # of the samplers' generators
        self._held: list[Any] = []

    def note(self, begins: bool = False) -> None:
        """What there is now is known to the epoch that is drawn."""
        sources = self._position.sources
        if begins:  # its sampler may have made itself another generator
            sources = self._position.sources = sources.again()
        self.states, self._held = sources.capture(everything=False), self._held_by(sources)

    def changed(self) -> bool:
        """Whether they were told anything since."""
        known, now = self._position.sources, self._position.sources.again()
        if known.own != now.own:
            return True
        parts = now.samplers.values()
        if not any(callable(attribute(part, "set_epoch")) for part in parts):
            return False  # and what else was drawn from its generators is the program's business
        held, states = self._held_by(now), now.capture(everything=False)
        if len(held) != len(self._held) or not all(map(_same, held, self._held)):
            return True
        return any(states[role] != self.states[role] for role in states if role != "loader")

    def forget(self) -> None:
        """Nothing is held for what may be replaced now."""
        self.states, self._held = {}, []

    @staticmethod
    def _held_by(sources: Sources) -> list[Any]:
        parts = sources.samplers.values()
        return [value for part in parts for _name, value in attributes(part)]


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
