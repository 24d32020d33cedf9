"""A sampler's own state, if it has ``state_dict()`` and ``load_state_dict(state)``.

The sampler is ahead of delivery, so it is asked after each index that it yields. That answer
becomes part of the loader's state once everything up to the index is delivered. To resume, the
sampler loads that state and yields what comes after it; earlier indices are not drawn again.

Samplers without a state are run again from the generators that they draw from:
minato/seeding/order_generators.py.
"""

from __future__ import annotations

import pickle
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any, NamedTuple, Protocol

from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _DatasetKind

from ..epoch_progress import Progress
from ..option_values import option
from ..seeding.order_generators import batch_size_of, sampler_of
from ..stateful import is_stateful, load_state
from ..time_share import TimeShare

#: nanoseconds: if an answer takes less, the sampler is asked after each index
CHEAP_NS = 50_000
#: largest share of the time for slower answers
SHARE = 0.1
#: size limit of the stored answers; past it, the next is asked for after some were delivered
MOST_BYTES = 32 << 20


class Said(NamedTuple):
    """The sampler's state after a number of indices, and how many samples they contained."""

    drawn: int
    position: int
    pickled: bytes | Exception  # (state of the sampler, of its iterator)
    begins: bool = False  # it was taken at the end of the previous epoch

    def size(self) -> int:
        """Returns the size in bytes."""
        return len(self.pickled) if isinstance(self.pickled, bytes) else 0

    def state(self) -> dict[str, Any] | None:
        """Returns it in the form of a loader's state; None if there is none: the sampler then
        starts as the program has left it."""
        if isinstance(self.pickled, Exception):
            raise RuntimeError(
                f"state_dict() of the sampler raised {type(self.pickled).__name__}: "
                f"{self.pickled}. Fix it, or set state_dict to None on the sampler"
            ) from self.pickled
        if not self.pickled:
            return None
        sampler, iterator = pickle.loads(self.pickled)
        return {"drawn": self.drawn, "position": self.position, "begins": self.begins,
                "sampler": sampler, "iterator": iterator}  # fmt: skip


class Keeps(Protocol):
    """The part of ``across_iterators.Memo`` that is used here; it outlives an iterator."""

    sampler_end: Said | None


class SamplerStates:
    """One loader's samplers: which of them is asked, and what the current epoch resumes from."""

    def __init__(self, loader: Any, memo: Keeps, unit: str) -> None:
        self._memo = memo
        self._index_sampler = loader._index_sampler
        parts = (self._index_sampler, sampler_of(loader))
        self._sampler = next((part for part in parts if is_stateful(part)), None)
        #: a custom batch sampler may have drawn more from the sampler than it has yielded
        inner = self._sampler is not None and self._sampler is not parts[0]
        ahead = inner and type(parts[0]) is not BatchSampler
        #: samples of a full batch; a smaller batch is the last, so its sampler has ended
        self._full = (batch_size_of(loader) or 0) if loader._auto_collation else None
        self._used = loader._dataset_kind == _DatasetKind.Map
        #: ask after each index. If batches are made again or samples are replaced, all indices are
        #: needed, and what counts is the state at the start of the epoch
        self._each = (
            self._used
            and unit == "batch"
            and not ahead
            and option(loader, "on_error") != "replace"
            and (loader.num_workers == 0 or option(loader, "scheduling") != "static")
        )
        self.start: dict[str, Any] | None = None  # from a state, until its epoch has started

    def watched(
        self, indices: Iterator[Any], progress: Progress, rewind: Callable[[], None]
    ) -> Iterator[Any]:
        """Wraps the indices of an epoch and asks the sampler as they are drawn. rewind: sets the
        generators to their states before the epoch."""
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
        """The sampler's state before the epoch that starts now. None if the last epoch was left in
        the middle."""
        if not self._used:
            return None
        if start is None:
            return self._memo.sampler_end
        if start["drawn"] and not self._each:
            warnings.warn(
                f"the state holds the sampler's state after {start['drawn']} of its "
                "indices, but this loader (scheduling='static', batching='ready', "
                "on_error='replace', or a custom batch sampler) needs all indices of the epoch. "
                "The sampler does not get its state and starts as the program has left it. Restore "
                "it, or resume with the options that the state was taken with",
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
        rewind()  # before loading: the sampler's state may include generators
        sampler, iterator = pickle.loads(pickled)
        load_state(self._sampler, sampler, "sampler")
        if begins:
            # The sampler was at its end. Most samplers end at once now and then start anew. If one
            # has already started anew, it yields an index here and loads the state a second time.
            if next(iter(self._index_sampler), self) is not self:
                rewind()
                sampler, _ = pickle.loads(pickled)  # it may modify the state that it loaded
                load_state(self._sampler, sampler, "sampler")
        indices: Iterator[Any] = iter(self._index_sampler)
        if not begins:
            load_state(indices, iterator, "iterator of the sampler")
        return indices


def _pickled(start: dict[str, Any]) -> bytes:
    return pickle.dumps([start["sampler"], start["iterator"]])


class _Watch:
    """The states of a sampler in one epoch."""

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
        self._time = TimeShare(SHARE, cheap_ns=CHEAP_NS)

    def gave(self, indices: Any, index: Any) -> None:
        """Records that an index was drawn. After an interrupt this is called again."""
        full, samples = self._full, 1
        if full is not None and hasattr(index, "__len__"):
            samples = len(index)
        drawn, position = self._drawn + 1, self._position + samples
        whole = full is None or samples >= full  # a smaller batch: it may have started anew
        if self._each and whole:
            self._ask_behind(indices, drawn, position)
        self._drawn, self._position = drawn, position

    def met_end(self, indices: Any) -> Said | None:
        """Asks for the state at the end; None if it is known."""
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
        """Stores the sampler's state after an index, unless that takes much memory or time.
        Resuming then draws again from the last stored state."""
        while len(self._said) > 1 and self._said[1].drawn <= self._progress.head:
            self._bytes -= self._said.popleft().size()
        if self._bytes > MOST_BYTES and len(self._said) > 1:
            return
        if self._time.allows():
            with self._time:
                self._said.append(Said(drawn, position, self._asked(indices)))
                self._bytes += self._said[-1].size()

    def state(self) -> dict[str, Any] | None:
        """The state after the last index up to which everything is delivered."""
        head = self._progress.head
        last = [one for one in self._said if one.drawn <= head][-1]
        if self._progress.finished and self._end is not None:
            last = self._end
        return last.state()


class _Watched(Iterator[Any]):
    """An epoch's indices; placeholders stand for those delivered before the state was taken.
    Unlike a generator, it continues after an error if the sampler's iterator does."""

    def __init__(
        self, watch: _Watch, begin: Said, indices: Iterator[Any], ended: Callable[[Said], None]
    ) -> None:
        self._watch, self._indices, self._ended = watch, indices, ended
        self._drawn: list[Any] = []  # drawn and not yet returned
        self._before: Iterator[Any] = iter(())
        if begin.drawn:  # the first placeholder has all the samples
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
