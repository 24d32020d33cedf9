"""A sampler's own state, where it has one: ``state_dict()`` and ``load_state_dict(state)``.

The sampler is ahead of what is delivered, so it is asked behind each index that it gives, and what
it said then is the loader's state once all up to there is delivered. To go on it is told that, and
gives what comes after; what it gave before, nobody asks it for again.

Samplers without a state are run again from the generators that they draw from:
minato/seeding/order_generators.py.
"""

from __future__ import annotations

import pickle
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any, NamedTuple, Protocol

from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _DatasetKind

from ..option_values import option
from ..progress import Progress
from ..seeding.order_generators import batch_size_of, sampler_of
from ..stateful import Pace, is_stateful, tell

#: nanoseconds: an answer that takes no longer is asked for behind each index, in the program's time
CHEAP_NS = 50_000
#: of the answers that are kept: of more, the next is asked for when some have been delivered
MOST_BYTES = 32 << 20


class Said(NamedTuple):
    """What was said behind so many indices, of batches with so many samples."""

    drawn: int
    position: int
    pickled: bytes | Exception  # (of the sampler, of its iterator)
    begins: bool = False  # it was the end of the epoch before

    def size(self) -> int:
        """In bytes."""
        return len(self.pickled) if isinstance(self.pickled, bytes) else 0

    def state(self) -> dict[str, Any] | None:
        """As a state holds it; None where nothing was said: the sampler begins as the program has
        left it."""
        if isinstance(self.pickled, Exception):
            raise RuntimeError(
                f"state_dict() of the sampler has raised {type(self.pickled).__name__}: "
                f"{self.pickled}"
            ) from self.pickled
        if not self.pickled:
            return None
        sampler, iterator = pickle.loads(self.pickled)
        return {"drawn": self.drawn, "position": self.position, "begins": self.begins,
                "sampler": sampler, "iterator": iterator}  # fmt: skip


class Keeps(Protocol):
    """What outlives an iterator: ``across_iterators.py``."""

    sampler_end: Said | None


class SamplerStates:
    """Of one loader: who is asked, and what the present epoch goes on from."""

    def __init__(self, loader: Any, memo: Keeps, unit: str) -> None:
        self._memo = memo
        self._index_sampler = loader._index_sampler
        parts = (self._index_sampler, sampler_of(loader))
        self._sampler = next((part for part in parts if is_stateful(part)), None)
        #: a batch sampler of the program's may have taken more from that one than it has given
        inner = self._sampler is not None and self._sampler is not parts[0]
        ahead = inner and type(parts[0]) is not BatchSampler
        #: samples of a batch; of a smaller one, which is the last, its sampler has met its end
        self._full = (batch_size_of(loader) or 0) if loader._auto_collation else None
        self._used = loader._dataset_kind == _DatasetKind.Map
        #: behind each index; where batches are made again, or others take a sample's place, all
        #: indices are needed, and what counts is how the epoch began
        self._each = (
            self._used
            and unit == "batch"
            and not ahead
            and option(loader, "on_error") != "replace"
            and (loader.num_workers == 0 or option(loader, "scheduling") != "static")
        )
        self.start: dict[str, Any] | None = None  # of a state, until its epoch has begun

    def watched(
        self, indices: Iterator[Any], progress: Progress, rewind: Callable[[], None]
    ) -> Iterator[Any]:
        """The indices of an epoch, of which the sampler is asked where it has a state. rewind: puts
        the generators where the epoch found them."""
        start, self.start = self.start, None
        if not self._used:
            return indices
        begin = self.begin(start) or Said(0, 0, b"")
        self._memo.sampler_end = None
        if start is not None and isinstance(begin.pickled, bytes) and begin.pickled:
            indices = self._told(begin.pickled, start["begins"], rewind)
        if self._sampler is None and not is_stateful(indices):
            return indices
        progress.sampler = watch = _Watch(self._ask, begin, progress, self._full, self._each)
        return _Watched(watch, begin, indices, self._ended)

    def begin(self, start: dict[str, Any] | None) -> Said | None:
        """What the sampler has said before the epoch that is to begin. Where the last one was left
        in the middle nobody has said anything of it."""
        if not self._used:
            return None
        if start is None:
            return self._memo.sampler_end
        if start["drawn"] and not self._each:
            warnings.warn(
                f"the state holds what the sampler has said behind {start['drawn']} of its "
                "indices, and this loader (scheduling='static', batching='ready', "
                "on_error='replace', or a batch sampler of its own) needs all of the epoch's: the "
                "sampler is not told that, and begins as the program has left it. Put it there, or "
                "resume with the options that the state was taken with",
                stacklevel=2,
            )
            return None
        return Said(start["drawn"], start["position"], _pickled(start), start["begins"])

    def _ended(self, said: Said) -> None:
        self._memo.sampler_end = said

    def _ask(self, indices: Any) -> bytes:
        iterator = None if indices is self._sampler else indices
        parts: tuple[Any, ...] = (self._sampler, iterator)
        return pickle.dumps([part.state_dict() if is_stateful(part) else None for part in parts])

    def _told(self, pickled: bytes, begins: bool, rewind: Callable[[], None]) -> Iterator[Any]:
        rewind()  # and then it is told, as its state may hold generators of its own
        sampler, iterator = pickle.loads(pickled)
        tell(self._sampler, sampler, "sampler")
        if begins:
            # It was at its end. Most say so again, and then begin anew; one that has begun anew
            # already is told once more, because it has given an index now.
            if next(iter(self._index_sampler), self) is not self:
                rewind()
                sampler, _ = pickle.loads(pickled)  # it may count in what it was told
                tell(self._sampler, sampler, "sampler")
        indices: Iterator[Any] = iter(self._index_sampler)
        if not begins:
            tell(indices, iterator, "iterator of the sampler")
        return indices


def _pickled(start: dict[str, Any]) -> bytes:
    return pickle.dumps([start["sampler"], start["iterator"]])


class _Watch:
    """What a sampler says in one epoch."""

    def __init__(
        self,
        ask: Callable[[Any], bytes],
        begin: Said,
        progress: Progress,
        full: int | None,
        each: bool,
    ) -> None:
        self._ask, self._progress, self._full, self._each = ask, progress, full, each
        self._said = deque([begin])
        self._drawn, self._position = begin.drawn, begin.position
        self._bytes = begin.size()
        self._end: Said | None = None
        self._pace = Pace(CHEAP_NS)

    def gave(self, indices: Any, index: Any) -> None:
        """One more is drawn. After an interrupt this is told again."""
        full, samples = self._full, 1
        if full is not None and hasattr(index, "__len__"):
            samples = len(index)
        drawn, position = self._drawn + 1, self._position + samples
        whole = full is None or samples >= full  # else it may have begun anew
        if self._each and whole:
            self._ask_behind(indices, drawn, position)
        self._drawn, self._position = drawn, position

    def met_end(self, indices: Any) -> Said | None:
        """What is said there; None where that is known."""
        if self._end is not None:
            return None
        self._end = Said(0, 0, self._asked(indices), True)
        return self._end

    def _asked(self, indices: Any) -> bytes | Exception:
        try:
            return self._ask(indices)
        except Exception as error:
            return error

    def _ask_behind(self, indices: Any, drawn: int, position: int) -> None:
        """Notes what the sampler says behind an index. Not where that takes much memory or time:
        whoever goes on then draws again from where it was asked last."""
        while len(self._said) > 1 and self._said[1].drawn <= self._progress.head:
            self._bytes -= self._said.popleft().size()
        if self._bytes > MOST_BYTES and len(self._said) > 1:
            return
        if not self._pace.allows():
            return
        begins = time.perf_counter_ns()
        self._said.append(Said(drawn, position, self._asked(indices)))
        self._bytes += self._said[-1].size()
        self._pace.took(begins)

    def state(self) -> dict[str, Any] | None:
        """What was said behind the last index of those that are all delivered."""
        head = self._progress.head
        last = [one for one in self._said if one.drawn <= head][-1]
        if self._progress.finished and self._end is not None:
            last = self._end
        return last.state()


class _Watched(Iterator[Any]):
    """An epoch's indices; those that were delivered before the state was taken are stood in for.
    It goes on after an error as its sampler's iterator does, which a generator would not."""

    def __init__(
        self, watch: _Watch, begin: Said, indices: Iterator[Any], ended: Callable[[Said], None]
    ) -> None:
        self._watch, self._indices, self._ended = watch, indices, ended
        self._drawn: list[Any] = []  # what is not given yet
        self._before: Iterator[Any] = iter(())
        if begin.drawn:  # as many samples
            self._before = chain([range(begin.position)], repeat(range(0), begin.drawn - 1))

    def __next__(self) -> Any:
        for index in self._before:
            return index
        if not self._drawn:
            try:
                self._drawn.append(next(self._indices))
            except StopIteration:
                said = self._watch.met_end(self._indices)
                if said is not None:
                    self._ended(said)
                raise
        self._watch.gave(self._indices, self._drawn[0])
        return self._drawn.pop()
