"""What a dataset says of itself, by torchdata's ``Stateful`` convention: an object with
``state_dict()`` and ``load_state_dict(state)``.

An iterable dataset and the iterator that its ``__iter__`` returns are asked in the worker that
goes through them, behind the batch that is just made. The answer travels with that batch, and is
the worker's state once the batch is delivered, so it does not matter how far workers are ahead.
With it go the worker's global generators: what follows draws the same numbers.

An epoch begins with the dataset as the program has made it: what iterables say at the end of one,
or where it was left in the middle, would have most begin the next at their end, or there. Only
the generators of persistent workers go on.

To go on, a worker tells the dataset, has it make its iterator, tells that, and makes again and
throws away what was delivered since the snapshot: nothing, where a snapshot is cheap.
"""

from __future__ import annotations

import copy
import ctypes
import inspect
import json
import pickle
import random
import time
import types
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from .dataset_calls import offered, own_attributes
from .errors import Failure

#: nanoseconds: a snapshot that takes no longer goes with every batch
CHEAP_NS = 500_000
#: of a worker's time, at most, for those that take longer: one is as far behind as the batches
#: of ten times the time that it takes
SHARE = 0.1
#: of a snapshot: it travels in the memory that is there for batches
MOST_BYTES = 32 << 20


#: of functions
_signatures: weakref.WeakKeyDictionary[Any, inspect.Signature] = weakref.WeakKeyDictionary()


def is_stateful(part: Any) -> bool:
    """Whether an object offers both methods itself: a ``__getattr__`` would make up anything. One
    that says ``state_dict = None`` is not asked, nor is one whose methods want to be told more (as
    MosaicML's streams do), or a module of a network, whose methods are for its weights."""

    def offers(name: str, *arguments: Any) -> bool:
        method = offered(part, name)
        return method is not None and _takes(method, *arguments)

    if type(part) is types.GeneratorType or isinstance(part, torch.nn.Module):
        return False
    return offers("state_dict") and offers("load_state_dict", None)


def _takes(method: Any, *arguments: Any) -> bool:
    """Whether it can be called so. What was found of functions is kept: this is asked often."""
    function = method
    if isinstance(method, types.MethodType):
        function, arguments = method.__func__, (method.__self__, *arguments)
    kept = _signatures if isinstance(function, types.FunctionType) else {}
    try:
        signature = kept.get(function) or inspect.signature(function)
        kept[function] = signature
        signature.bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # it is written in C and does not say
        pass
    return True


class Snapshot(NamedTuple):
    """What is said at one moment; None by what is not Stateful."""

    dataset: Any = None
    iterator: Any = None
    ended: bool = False  # the fetcher, because the batch made last was not full
    begins: bool = False  # an epoch, for which no iterator is made yet
    #: states of the global generators that a worker has drawn from: see Generators
    generators: dict[str, Any] | None = None


def ask(dataset: Any, fetcher: Any) -> Snapshot:
    """Asks those that are Stateful. An iterator that is the dataset itself is asked once."""
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
            f"state_dict() of the {what}, a {type(part).__name__}, has raised "
            f"{type(error).__name__}: {error}. Batches do not need it, the loader's own "
            "state_dict() does: mend it, or set it to None on the object, and what was delivered "
            "is made again when it is resumed"
        ) from error


def check_can_be_told(part: Any, what: str) -> None:
    """Raises ValueError for a part that has no state of its own, where a loader's state has one."""
    if not is_stateful(part):
        raise ValueError(
            f"the state holds what the {what} has said in state_dict(), but that is a "
            f"{type(part).__name__} now, without load_state_dict()"
        )


def tell(part: Any, state: Any, what: str) -> None:
    """Hands back what a part said of itself, if it has said anything."""
    if state is None:
        return
    check_can_be_told(part, what)
    part.load_state_dict(state)


def begin_anew(dataset: Any) -> None:
    """A dataset that tell() has given a state begins its next epoch at the beginning. A stream of
    Hugging Face's datasets would begin where that state says each time that its epoch is the one of
    the state, and where the program counts no epochs, each is. Not to be called for what the
    program itself has told it."""
    if own_attributes(dataset).get("_starting_state_dict") is not None:
        dataset._starting_state_dict = None


def tell_iterator(fetcher: Any, snapshot: Snapshot) -> None:
    """Once there is one, of a dataset that has been told."""
    tell(getattr(fetcher, "dataset_iter", None), snapshot.iterator, "iterator of the dataset")
    if snapshot.ended:
        fetcher.ended = True


def make_again(fetcher: Any, index: Any) -> None:
    """A batch that was delivered since the state, whose iterator has to be as far. An error in it
    the program has seen then. Raises StopIteration."""
    try:
        fetcher.fetch(index)
    except StopIteration:
        raise
    except Exception:
        pass


def may_be_asked(dataset: Any, fetcher: Any) -> bool:
    """Whether there is anybody to ask."""
    iterator = getattr(fetcher, "dataset_iter", None)
    return (is_stateful(dataset) or is_stateful(iterator)) and not _forgets(dataset)


def _forgets(dataset: Any) -> bool:
    """A stream of Hugging Face's datasets that shuffles has taken samples into its buffer, and its
    state leaves them out: they would be lost."""
    parts = [own_attributes(dataset).get("_ex_iterable")]
    while parts:
        part = parts.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        held = own_attributes(part)
        parts += [held.get("ex_iterable"), *(held.get("ex_iterables") or ())]
        parts = [part for part in parts if part is not None]
    return False


# ---- generators ------------------------------------------------------------------------


#: bytes of a Mersenne Twister's words and place, as NumPy has them in memory
_MT19937 = 4 * 625


def _is_mt(bits: Any) -> bool:
    return type(bits) is np.random.MT19937


def numpy_words() -> bytes:
    """The words of NumPy's global generator as they lie in memory; empty for one of another kind."""
    bits: Any = np.random.mtrand._rand._bit_generator  # type: ignore[attr-defined]
    return ctypes.string_at(bits.ctypes.state_address, _MT19937) if _is_mt(bits) else b""


class Generators:
    """The global generators of a worker, compared with what they were before its dataset drew.

    Captured in the form that is had in microseconds; ``plain`` makes it what states hold."""

    def __init__(self) -> None:
        self.initial = {**self._torch_and_python(), **self._numpy()}
        # Asking NumPy takes longer than all else, and where nothing is drawn its words stay.
        untouched = self.initial.get("numpy", (b"", 0, 1))[2] == 0  # and no second Gaussian waits
        self._words = numpy_words() if untouched else None

    @staticmethod
    def _torch_and_python() -> dict[str, Any]:
        words = torch.default_generator.get_state().numpy().tobytes()
        return {"torch": words, "python": random.getstate()}

    @staticmethod
    def _numpy() -> dict[str, Any]:
        state: Any = np.random.get_state(legacy=True)
        name, words, *rest = state
        return {"numpy": (words.tobytes(), *rest)} if name == "MT19937" else {}

    def drawn(self) -> dict[str, Any]:
        """Those that are not what they were."""
        now = self._torch_and_python()
        if numpy_words() != self._words:
            now.update(self._numpy())
        return {role: state for role, state in now.items() if state != self.initial.get(role)}

    def put(self, states: dict[str, Any], set_all: Callable[[dict[str, bytes]], None]) -> None:
        """Sets these, and the others as they were at first."""
        set_all(plain({**self.initial, **states}))


def plain(generators: dict[str, Any]) -> dict[str, bytes]:
    """States of global generators as seeding/order_generators.py has them."""
    return {role: _plain(state) for role, state in generators.items()}


def _plain(state: Any) -> bytes:
    if isinstance(state, bytes):
        return state
    if isinstance(state[0], bytes):
        words, *rest = state
        state = [np.frombuffer(words, np.uint32).tolist(), *rest]
    return json.dumps(state).encode()


# ---- on the way ------------------------------------------------------------------------


class Pace:
    """How often somebody is asked whose answer takes time: always while it is cheap, and else as
    long as all answers together took no more of the time than their share."""

    def __init__(self, cheap_ns: int, share: float | None = None) -> None:
        self._cheap_ns = cheap_ns
        self._share = SHARE if share is None else share
        self._cost = self._spent = 0  # nanoseconds: of the last answer, and of all
        self._began = time.perf_counter_ns()

    def allows(self) -> bool:
        """One more."""
        if self._cost <= self._cheap_ns:
            return True
        return self._spent <= self._share * (time.perf_counter_ns() - self._began)

    def took(self, begins: int) -> None:
        """One, since this perf_counter_ns()."""
        self._cost = time.perf_counter_ns() - begins
        self._spent += self._cost


class Snapshots:
    """Taken in a worker, as often as they are cheap."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._generators = Generators()
        self._told = False  # the dataset, where it was
        self._asked: tuple[Any, Any] | None = None  # dataset and fetcher, where they are Stateful
        self._pace = Pace(CHEAP_NS)

    def go_on(
        self,
        pickled: bytes | None,
        dataset: Any,
        create: Callable[[], Any],
        set_all: Callable[[dict[str, bytes]], None],
    ) -> Any:
        """The fetcher, where it stood in another process. At an epoch's begin the generators are
        set before it is made, because making it draws from them; later on after it, because it
        has drawn already. set_all: sets global generators by their states."""
        snapshot = Snapshot() if pickled is None else read(pickled)
        self._told = snapshot.dataset is not None
        tell(dataset, snapshot.dataset, "dataset")
        if snapshot.begins and snapshot.generators is not None:
            self._generators.put(snapshot.generators, set_all)
        fetcher = create()
        tell_iterator(fetcher, snapshot)
        if not snapshot.begins and snapshot.generators is not None:
            self._generators.put(snapshot.generators, set_all)
        return fetcher

    def watch(self, dataset: Any, fetcher: Any) -> None:
        """What is asked from now on."""
        self._asked = (dataset, fetcher) if may_be_asked(dataset, fetcher) else None

    def epoch(self, dataset: Any, create: Callable[[], Any]) -> tuple[Any, bytes | None]:
        """The fetcher of one that begins, and what is to be known of it."""
        begin = Snapshot(begins=True, generators=self._generators.drawn())
        if self._told:
            begin_anew(dataset)
        fetcher = create()
        return fetcher, pickle.dumps(begin) if may_be_asked(dataset, fetcher) else None

    def rest(self) -> None:
        """Nothing is asked for now."""
        self._asked = None

    def taken(self, at_any_cost: bool = False) -> bytes | None:
        """A snapshot, if there is anybody to ask and it is time for one."""
        if self._asked is None or not (at_any_cost or self._pace.allows()):
            return None
        begins = time.perf_counter_ns()
        try:
            said = ask(*self._asked)  # which may draw
            said = said._replace(generators=self._generators.drawn())
            pickled = _pickled(said, self._asked[0])
        except Exception as error:
            pickled = pickle.dumps(Failure.of(error, self._where))
        self._pace.took(begins)
        return pickled


def _said_by(dataset: Any) -> str:
    return f"what the dataset, a {type(dataset).__name__}, or its iterator says in state_dict()"


def _copied(snapshot: Snapshot, dataset: Any) -> Snapshot:
    try:
        return copy.deepcopy(snapshot)
    except Exception as error:
        raise RuntimeError(
            f"{_said_by(dataset)} cannot be copied: {error}. Return plain data there, or set "
            "state_dict to None on the object, and it is not asked"
        ) from error


def _pickled(snapshot: Snapshot, dataset: Any) -> bytes:
    what = _said_by(dataset)
    try:
        pickled = pickle.dumps(snapshot)
    except Exception as error:
        raise RuntimeError(f"{what} cannot be pickled: {error}") from error
    if len(pickled) > MOST_BYTES:
        raise RuntimeError(
            f"{what} has {len(pickled)} bytes, and {MOST_BYTES} may go with a batch. Leave out what "
            "can be made again"
        )
    return pickled


def read(pickled: bytes) -> Snapshot:
    """What a worker has sent. Raises what went wrong there."""
    found = pickle.loads(pickled)
    if isinstance(found, Failure):
        found.reraise()
    if not isinstance(found, Snapshot):
        raise TypeError(f"{type(found).__name__} is no snapshot")
    return found


def _weak(part: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(part)
    except TypeError:  # of a class with __slots__
        return lambda: part


class Kept:
    """What a loader knows of a dataset's own place: of one worker's, or of its only one."""

    def __init__(self) -> None:
        self._read: Callable[[], Snapshot] | None = None
        self._live: Callable[[], Snapshot] | None = None  # asks one in this process
        self._before: Callable[[], Snapshot] | None = None  # as a batch began to be made
        self._since = 0  # batches made since _before
        self._pace = Pace(CHEAP_NS)
        self.pickled: bytes | None = None
        self.again = 0  # batches delivered since

    def delivered(self, pickled: bytes | None) -> None:
        """A batch, and what came with it."""
        if pickled is None:
            self.again += 1
        else:
            self.came(pickled)

    def came(self, pickled: bytes, again: int = 0) -> None:
        """What a worker has said."""
        self.pickled, self.again = pickled, again
        self._read = partial(read, pickled)

    def lives(self, dataset: Any, fetcher: Any) -> None:
        """It is in this process, and can be asked as long as the loader and its iterator hold it:
        what they hold may hold them."""
        whose, its = _weak(dataset), weakref.ref(fetcher)
        self._read = self._live = lambda: _copied(ask(whose(), its()), whose())

    def goes_on(self) -> None:
        """A batch begins to be made, and until that is done the dataset is ahead of what was
        delivered: what it says now is kept, or what it said before, if that is dear."""
        if self._pace.allows():
            begins = time.perf_counter_ns()
            self.settle()
            self._before, self._since = self._read, 0
            self._pace.took(begins)
        self._read, self.again = self._before, self._since

    def stands(self, made: int) -> None:
        """The batch is made, or (0) there was none."""
        self._since += made
        self._read, self.again = self._live, 0

    def settle(self) -> None:
        """It will be gone: what it would say is to be known."""
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
        """Whether anything was said."""
        return self._read is not None

    def snapshot(self) -> Snapshot:
        """What was said; as at the beginning where nothing was."""
        return Snapshot() if self._read is None else self._read()
