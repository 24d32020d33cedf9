"""A dataset's own state, by torchdata's ``Stateful`` convention: an object with
``state_dict()`` and ``load_state_dict(state)``.

The worker that iterates over an iterable dataset asks the dataset and its iterator for their states
after each batch it has made. The states travel with that batch. They become the worker's state when
the batch is delivered, so it does not matter how far ahead the workers are. The states of the
worker's global generators travel along, so that resumed workers draw the same numbers.

An epoch starts with the dataset as the program has made it. The state from the end or the middle of
an epoch is not applied, because most iterables would then start the next epoch there. Only the
generators of persistent workers carry over.

To resume, a worker loads the dataset's state, has it make its iterator, and loads the iterator's
state. Then it makes and discards the batches delivered since the snapshot. If snapshots are cheap,
one follows every batch, so nothing is repeated.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from .dataset_calls import is_stateful, own_attributes
from .errors import Failure
from .seeding.order_generators import all_global
from .time_limits import TimeShare

#: nanoseconds: a snapshot that takes less travels with every batch
CHEAP_NS = 500_000
#: largest share of a worker's time for slower snapshots. The latest snapshot is then behind by the
#: batches that the worker makes in ten times the time of a snapshot
SHARE = 0.1
#: size limit of a snapshot, which travels in the memory for batches
MOST_BYTES = 32 << 20


class Snapshot(NamedTuple):
    """The states at one moment; None for an object that is not Stateful."""

    dataset: Any = None
    iterator: Any = None
    ended: bool = False  # the fetcher has ended: its last batch was not full
    begins: bool = False  # an epoch starts and has no iterator yet
    #: states of the global generators that the worker has drawn from
    generators: dict[str, bytes] | None = None


def ask(dataset: Any, fetcher: Any) -> Snapshot:
    """Asks dataset and iterator. An iterator that is the dataset itself is asked once."""
    iterator = getattr(fetcher, "dataset_iter", None)
    return Snapshot(
        None if iterator is dataset else _asked(dataset, "dataset"),
        _asked(iterator, "iterator of the dataset"),
        getattr(fetcher, "ended", False),
    )


def _asked(part: Any, what: str) -> Any:
    try:
        return part.state_dict() if is_stateful(part) else None
    except Exception as error:
        raise RuntimeError(
            f"state_dict() of the {what}, a {type(part).__name__}, raised "
            f"{type(error).__name__}: {error}. The loader's own state_dict() needs it; batches do "
            "not. Fix it, or set state_dict to None on the object: resuming then makes the "
            "delivered batches again"
        ) from error


def check_loads_state(part: Any, what: str) -> None:
    """Raises ValueError if the loader's state has a state for a part that is not Stateful."""
    if not is_stateful(part):
        raise ValueError(
            f"the state holds a state_dict() of the {what}, but that is now a "
            f"{type(part).__name__} without load_state_dict(). Resume with the original class"
        )


def load_state(part: Any, state: Any, what: str) -> None:
    """Gives a part its own state back, if there is one."""
    if state is None:
        return
    check_loads_state(part, what)
    part.load_state_dict(state)


class Loaded:
    """Whether a dataset has loaded a state in this process, so that its next epoch can begin anew. Not
    a state that the program itself has loaded."""

    def __init__(self) -> None:
        self._loaded = False
        self._initial: bytes | None = None  # of an iterable dataset before that, pickled

    def load(self, dataset: Any, state: Any) -> None:
        """Gives the dataset its own state back, if there is one."""
        self._loaded, self._initial = state is not None, None
        if self._loaded and isinstance(dataset, IterableDataset) and is_stateful(dataset):
            with contextlib.suppress(Exception):  # without one it goes on as it will
                self._initial = pickle.dumps(dataset.state_dict())  # type: ignore[attr-defined]
        load_state(dataset, state, "dataset")

    def begin_anew(self, dataset: Any) -> None:
        """Lets the dataset start its next epoch at the beginning. A stream of Hugging Face's datasets
        would start at the loaded state whenever its epoch is that of the state. This is always so if
        the program counts no epochs. Another iterable dataset loads its state of before, but for
        counts of epochs, which go on."""
        initial, self._initial = self._initial, None
        if self._loaded and "_starting_state_dict" in own_attributes(dataset):
            dataset._starting_state_dict = None
        elif initial is not None:
            state, now = pickle.loads(initial), _asked(dataset, "dataset")
            if isinstance(state, dict) and isinstance(now, dict):
                state |= {key: value for key, value in now.items() if "epoch" in str(key).lower()}
            load_state(dataset, state, "dataset")


def load_iterator_state(fetcher: Any, snapshot: Snapshot) -> None:
    """Loads the iterator's state, after its dataset has loaded its own."""
    load_state(getattr(fetcher, "dataset_iter", None), snapshot.iterator, "iterator of the dataset")
    if snapshot.ended:
        fetcher.ended = True


def make_again(fetcher: Any, index: Any) -> None:
    """Makes a batch again that was delivered since the snapshot, to advance the iterator. Ignores
    errors, which the program has already seen. Raises StopIteration."""
    try:
        fetcher.fetch(index)
    except StopIteration:
        raise
    except Exception:
        pass


def may_be_asked(dataset: Any, fetcher: Any) -> bool:
    """Whether dataset or iterator is Stateful and its state is complete."""
    iterator = getattr(fetcher, "dataset_iter", None)
    return (is_stateful(dataset) or is_stateful(iterator)) and not _forgets(dataset)


def _forgets(dataset: Any) -> bool:
    """Whether the dataset is a shuffled stream of Hugging Face's datasets. Its state leaves out the
    samples in its buffer, which would be lost."""
    parts = [own_attributes(dataset).get("_ex_iterable")]
    while parts:
        part = parts.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        held = own_attributes(part)
        parts += [held.get("ex_iterable"), *(held.get("ex_iterables") or ())]
        parts = [part for part in parts if part is not None]
    return False


# ---- snapshots -------------------------------------------------------------------------


class Snapshots:
    """Takes a worker's snapshots, as often as they are cheap."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._initial = all_global()  # the generators' states before the dataset drew from them
        self._loaded = Loaded()
        self._asked: tuple[Any, Any] | None = None  # dataset and fetcher, if Stateful
        self._time = TimeShare(SHARE, cheap_ns=CHEAP_NS)

    def go_on(
        self,
        pickled: bytes | None,
        dataset: Any,
        create: Callable[[], Any],
        set_all: Callable[[dict[str, bytes]], None],
    ) -> Any:
        """Returns the fetcher, resumed from a snapshot of another process. At the start of an
        epoch, the generators are set before the fetcher is made, because making it draws from them.
        Later in an epoch they are set afterwards. set_all: sets global generators to their
        states."""
        snapshot = Snapshot() if pickled is None else read(pickled)
        self._loaded.load(dataset, snapshot.dataset)
        drawn = snapshot.generators
        states = {} if drawn is None else {**self._initial, **drawn}
        if snapshot.begins:
            set_all(states)
        fetcher = create()
        load_iterator_state(fetcher, snapshot)
        if not snapshot.begins:
            set_all(states)
        return fetcher

    def watch(self, dataset: Any, fetcher: Any) -> None:
        """Sets what is asked from now on."""
        self._asked = (dataset, fetcher) if may_be_asked(dataset, fetcher) else None

    def forget(self) -> None:
        """Stops asking, and holds neither dataset nor fetcher any more."""
        self._asked = None

    def epoch(self, dataset: Any, create: Callable[[], Any]) -> tuple[Any, bytes | None]:
        """Starts an epoch: its fetcher, and the snapshot of its start, pickled."""
        begin = Snapshot(begins=True, generators=self._drawn())
        self._loaded.begin_anew(dataset)
        fetcher = create()
        return fetcher, pickle.dumps(begin) if may_be_asked(dataset, fetcher) else None

    def taken(self, at_any_cost: bool = False) -> bytes | None:
        """A snapshot, pickled, if dataset or iterator is Stateful and the time allows it."""
        if self._asked is None or not (at_any_cost or self._time.allows()):
            return None
        with self._time:
            try:
                said = ask(*self._asked)  # which may draw
                said = said._replace(generators=self._drawn())
                return _copy_of(said, self._asked[0], pickled=True)  # type: ignore[no-any-return]
            except Exception as error:
                return pickle.dumps(Failure.of(error, self._where))

    def _drawn(self) -> dict[str, bytes]:
        """The states of the global generators that have changed."""
        return {role: state for role, state in all_global().items() if state != self._initial.get(role)}


def _copy_of(snapshot: Snapshot, dataset: Any, pickled: bool = False) -> Any:
    """A copy of a dataset's states, or a pickle of them."""
    what = f"the state_dict() of the dataset, a {type(dataset).__name__}, or of its iterator"
    try:
        made: Any = pickle.dumps(snapshot) if pickled else copy.deepcopy(snapshot)
    except Exception as error:
        raise RuntimeError(
            f"{what} cannot be {'pickled' if pickled else 'copied'}: {error}. Return plain data, or "
            "set state_dict to None on the object to leave it out"
        ) from error
    if pickled and len(made) > MOST_BYTES:
        raise RuntimeError(
            f"{what} has {len(made)} bytes, but at most {MOST_BYTES} may travel with a batch. "
            "Leave out what can be made again"
        )
    return made


def read(pickled: bytes) -> Snapshot:
    """Unpickles a worker's snapshot. Raises the error that occurred there."""
    found = pickle.loads(pickled)
    if isinstance(found, Failure):
        found.reraise()
    if not isinstance(found, Snapshot):
        raise TypeError(f"{type(found).__name__} is not a snapshot")
    return found


def _weak(part: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(part)
    except TypeError:  # of a class with __slots__
        return lambda: part


class Kept:
    """A loader's knowledge of a dataset's own state: that of one worker's copy, or the only one."""

    def __init__(self) -> None:
        self._read: Callable[[], Snapshot] | None = None
        self._live: Callable[[], Snapshot] | None = None  # asks a dataset in this process
        self._before: Callable[[], Snapshot] | None = None  # state before the current batch
        self._since = 0  # batches made since _before
        self._time = TimeShare(SHARE, cheap_ns=CHEAP_NS)
        self.pickled: bytes | None = None
        self.again = 0  # batches delivered since

    def delivered(self, pickled: bytes | None) -> None:
        """Records a delivered batch and the snapshot that came with it."""
        if pickled is None:
            self.again += 1
        else:
            self.came(pickled)

    def came(self, pickled: bytes, again: int = 0) -> None:
        """Records a worker's snapshot."""
        self.pickled, self.again = pickled, again
        self._read = partial(read, pickled)

    def lives(self, dataset: Any, fetcher: Any) -> None:
        """The dataset is in this process, and can be asked while the loader and its iterator hold
        it. Weak references, because they may hold this object."""
        whose, its = _weak(dataset), weakref.ref(fetcher)
        self._read = self._live = lambda: _copy_of(ask(whose(), its()), whose())

    def goes_on(self) -> None:
        """A batch is about to be made; until it is done, the dataset is ahead of what was
        delivered. Stores its state now, or keeps an earlier one if asking is expensive."""
        if self._time.allows():
            with self._time:
                self.settle()
                self._before, self._since = self._read, 0
        self._read, self.again = self._before, self._since

    def stands(self, made: int) -> None:
        """A batch has been made, or (0) there was none."""
        self._since += made
        self._read, self.again = self._live, 0

    def settle(self) -> None:
        """Stores the state, because the dataset or iterator will be gone."""
        said: Snapshot | Exception
        try:
            said = self.snapshot()
        except Exception as error:
            said = error

        def read_it() -> Snapshot:
            if isinstance(said, Exception):
                raise said
            return copy.deepcopy(said)

        self._read = read_it

    def known(self) -> bool:
        """Whether there is a state."""
        return self._read is not None

    def snapshot(self) -> Snapshot:
        """The state; that of the start if there is none."""
        return Snapshot() if self._read is None else self._read()
