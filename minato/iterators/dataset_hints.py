"""What a dataset tells of its samples before they are made: costs, bytes, neighbours.

``cost_hint(index, *, seed, epoch)`` predicts a cost. A dataset without it often holds its files as a
list, one entry for each sample: paths, or tuples or dicts with paths in them (torchvision's folders,
MONAI's data lists). Their sizes are known before any sample was made. csrc/schedule/mn_costs.c
learns whether they say anything.

A dataset may offer ``locality_key(index)``: any hashable, equal for samples that are cheaper
in succession because they share an opened file or another costly resource (a row group, a shard, a
video). Without it, workers' reports show the groups (``csrc/schedule/policy_locality.h``).
"""

from __future__ import annotations

import inspect
import itertools
import math
import os
import stat
import threading
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from .._core import Seeder
from ..dataset_calls import attribute, by_part, offered, own_attributes, parts_of
from ..errors import add_note, program_level
from ..sampler_indices import each_index, whole_number
from ..seeding.find_generators import find_all
from ..seeding.generator_states import sample_seed
from ..time_limits import TimeShare
from ..workers.fetch_or_skip import seed_place
from .loader_memo import Memo

#: Hints take at most this share of the trainer's time, beyond what the first ones may take.
SHARE, FIRST_NS = 0.01, 50_000_000

#: (index, position of the sample, the epoch that set_epoch() named) -> hint
Ask = Callable[[int, int, "int | None"], Any]


def hint_method(dataset: Any) -> Callable[..., Any] | None:
    """The ``cost_hint`` of a dataset, or of the one to which its ``__getattr__`` delegates."""
    own = offered(dataset, "cost_hint")
    if own is not None:
        return own
    method = attribute(dataset, "cost_hint")
    inner = getattr(method, "__self__", None)
    return None if inner is None else offered(inner, "cost_hint")


def takes(method: Callable[..., Any]) -> tuple[bool, bool]:
    """Whether it takes ``seed=`` and ``epoch=``."""
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return False, False
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return True, True
    by_name = {n for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return "seed" in by_name, "epoch" in by_name


class CostHints:
    """Asks the dataset for hints, a batch at a time, while that takes little time.

    A hint that fails, or is not a finite number of at least 0, is reported once. The loader's
    iterators do not ask again then, and costs are predicted from history. So they are for a dataset
    that gives no hints, and from the bytes of its files, if it lists any.
    """

    def __init__(
        self, dataset: Any, collate_fn: Any, memo: Memo, *, ranks: Any, seeds: bool
    ) -> None:
        self._memo = memo
        self._seeder: Seeder | None = None
        self._dataset, self._collate_fn, self._ranks, self._seeds = dataset, collate_fn, ranks, seeds
        self._hooks: dict[int, int] | None = None
        self._place = 0, 0  # base seed and epoch of the batch that is asked for
        self._ask = None if memo.hints_refused else by_part(dataset, self._of, None)
        self._sizes = None if self.given else FileSizes(dataset, memo)
        self._time = TimeShare(SHARE, first_ns=FIRST_NS)

    @property
    def given(self) -> bool:
        """Whether the dataset gives hints."""
        return self._ask is not None

    @property
    def predicts(self) -> bool:
        """Whether there is anything to ask for a batch: hints, or bytes of files."""
        return self.given or (self._sizes is not None and self._sizes.known)

    def _of(self, dataset: Any) -> Ask | None:
        """How to ask a dataset."""
        method = hint_method(dataset)
        if method is None:
            return None
        seeded, knows_epoch = takes(method)
        seeded = seeded and self._seeds
        hook = self._hook_of(getattr(method, "__self__", dataset)) if seeded else 0

        def ask(index: int, place: int, epoch: int | None) -> Any:
            more: dict[str, Any] = {}
            if seeded:
                more["seed"] = self._seed(place, hook)
            if knows_epoch:
                more["epoch"] = epoch
            return method(index, **more)

        return ask

    def _hook_of(self, dataset: Any) -> int:
        """Which of the ``seed_sample`` methods that workers call is this dataset's."""
        if self._hooks is None:
            hooks = find_all([self._dataset, self._collate_fn]).hooks
            self._hooks = {id(getattr(h, "__self__", None)): k for k, h in enumerate(hooks)}
        return self._hooks.get(id(dataset), 0)

    def _seed(self, place: int, hook: int) -> int:
        if self._seeder is None:
            self._seeder = Seeder([])
            self._seeder.share(self._ranks)
        return sample_seed(*self._seeder.sample(*self._place, place, hook))

    # ---- a batch -------------------------------------------------------------------------

    def of(
        self, index: Any, base_seed: int, epoch: int, first: int, user_epoch: int | None
    ) -> bytes | None:
        """The hints of a batch, or of one sample, as float32; None where none are to be had now. For a
        dataset that gives none, looks up the bytes of its samples.

        epoch: as samples are seeded by. first: position of the batch's first sample in the epoch.
        user_epoch: what set_epoch() has told the dataset; None: nothing.
        """
        if self._ask is None:
            if self._sizes is not None:
                self._sizes.look_up(index)
            return None
        if not self._time.allows():
            return None
        self._place = base_seed, epoch
        with self._time:
            return self._asked(self._ask, index, first, user_epoch)

    def _asked(self, ask: Ask, index: Any, first: int, user_epoch: int | None) -> bytes | None:
        hints = array("f")
        for k, one in enumerate(each_index(index)):
            number = whole_number(one)
            if not 0 <= number < self._memo.size:
                return None
            try:
                hint = ask(number, seed_place(first, k, one), user_epoch)
                if hint is None:  # of this sample, or part of the dataset, nothing is known
                    return None
                hints.append(self._checked(float(hint)))
            except Exception as error:
                self._refuse(one, error)
                return None
        return hints.tobytes()

    @staticmethod
    def _checked(hint: float) -> float:
        if not (math.isfinite(hint) and hint >= 0):
            raise ValueError(f"it returned {hint!r}, which is not a finite number of at least 0")
        return min(hint, 3e38)

    def _refuse(self, index: Any, error: Exception) -> None:
        self._ask, self._memo.hints_refused = None, True
        warnings.warn(
            f"cost_hint({index!r}) of {type(self._dataset).__name__} failed: "
            f"{type(error).__name__}: {error}. The loader stops calling cost_hint() and "
            "predicts from measured costs.",
            stacklevel=program_level(),
        )


#: Looking up sizes takes at most the same share, beyond this time for the first ones. The dataset has
#: not asked for it, so it must not delay the first batch.
FILES_FIRST_NS = 5_000_000

#: batches that may wait for the thread
BATCHES_MOST = 1024

#: parts of an entry that may be paths; an entry may also be a long text, cut into words
PARTS = 8

#: index -> bytes. Raises an OSError, or another exception, if it cannot tell.
SizeOf = Callable[[int], int]


def _is_file(path: Any) -> bool:
    try:
        return isinstance(path, (str, os.PathLike)) and stat.S_ISREG(os.stat(path).st_mode)
    except Exception:  # no such file, no path, or code of the program
        return False


def _size(path: Any) -> int:
    return os.stat(path).st_size


def _entries(listed: Any) -> SizeOf | None:
    """How to find the bytes of an entry of a list, by what its first entry is like."""
    first = listed[0]
    if isinstance(first, (tuple, list, dict)):
        parts = first.items() if isinstance(first, dict) else enumerate(first)
        places = [key for key, part in itertools.islice(parts, PARTS) if _is_file(part)]
    else:
        return (lambda index: _size(listed[index])) if _is_file(first) else None
    return (lambda index: sum(_size(listed[index][k]) for k in places)) if places else None


def _is_list(value: Any) -> bool:
    return type(value) in (list, tuple) or (
        type(value) is np.ndarray and value.ndim == 1 and value.dtype.kind in "UO"
    )


def size_of(dataset: Any) -> SizeOf | None:
    """How to find the bytes of the files that a sample is read from; None if the dataset lists
    none. Looks into torch's Subset and ConcatDataset, and into a dataset that another one wraps."""
    return by_part(dataset, _of_part, 0)


def _of_part(dataset: Any) -> SizeOf | None:
    try:
        length = len(dataset)
    except Exception:  # of the program's code
        return None
    values = {id(value): value for value in own_attributes(dataset).values()}.values()
    lists = [value for value in values if _is_list(value) and len(value) == length > 0]
    found = [size for size in map(_entries, lists) if size is not None]
    if not found:
        return _of_wrapped(values, length)
    return found[0] if len(found) == 1 else lambda index: sum(size(index) for size in found)


def _of_wrapped(values: Any, length: int) -> SizeOf | None:
    """Of the only dataset among an object's attributes that has as many samples."""
    inner: Sequence[Any] = [v for v in values if isinstance(v, Dataset) and hasattr(v, "__len__")]
    try:
        inner = [value for value in inner if len(value) == length]
        return size_of(inner[0]) if len(inner) == 1 else None
    except Exception:  # of the program's code; or datasets that hold each other
        return None


class FileSizes:
    """Looks up sizes in the look-ahead, once for each index, while that takes little time.

    A thread of its own does it, which ends when it has nothing to do: a mount that does not answer
    holds up the thread, and not the program."""

    def __init__(self, dataset: Any, memo: Memo) -> None:
        self._memo = memo
        self._dataset = dataset
        self._size_of: SizeOf | None = None  # found out by the thread
        #: whether there are, or may be, sizes to look up
        self.known = memo.size > 0 and (not memo.sized or 0 in memo.sized)
        self._batches: deque[Any] = deque()
        self._thread: threading.Thread | None = None
        self._time = TimeShare(SHARE, first_ns=FILES_FIRST_NS)

    def look_up(self, batch: Any) -> None:
        """Has the bytes of a batch's samples, or of one sample, told to the cost model."""
        if not self.known or not self._time.allows() or len(self._batches) >= BATCHES_MOST:
            return
        self._batches.append(batch)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="minato-file-sizes", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the system gives no thread: no sizes are known
                self.known = False

    def _run(self) -> None:
        with self._time:
            if self._size_of is None:
                self._size_of = size_of(self._dataset)
                self.known = self._size_of is not None
            if self._size_of is not None and not self._memo.sized:
                self._memo.sized = bytearray(self._memo.size)
        while self._size_of is not None and self._batches and self._time.allows():
            with self._time:
                self._tell(self._size_of, self._batches.popleft())

    def _tell(self, size: SizeOf, batch: Any) -> None:
        indices, sizes = self._found(size, batch)
        if indices:
            self._memo.costs.tell_bytes(indices, sizes)
            for index in indices:
                self._memo.sized[index] = 1
        elif 0 not in self._memo.sized:
            self.known, self._size_of = False, None  # all were looked up

    def _found(self, size: SizeOf, batch: Any) -> tuple[array[int], array[int]]:
        """Indices that are looked up now, and their bytes."""
        indices, sizes = array("q"), array("q")
        sized = self._memo.sized
        for one in each_index(batch):
            index = whole_number(one)
            if not 0 <= index < len(sized) or sized[index]:
                continue
            try:
                found = size(index)
            except Exception:  # no such file, or an entry unlike the first
                found = 0
            indices.append(index)
            sizes.append(found)
            if not self._time.allows():
                break
        return indices, sizes


Key = Callable[[Any], Hashable]


def key_of(dataset: Any) -> Key | None:
    """The dataset's ``locality_key``, through torch's ``Subset`` and ``ConcatDataset``. A part of a
    ConcatDataset without a key is one group."""
    parts, find = parts_of(dataset)
    keys = [offered(part, "locality_key") for part in parts]
    if all(key is None for key in keys):
        return None

    def key_in(index: Any) -> Hashable:
        try:
            part, inner = find(index)
        except IndexError:
            return None  # there is no such sample: the worker raises the error
        key = keys[part]
        return part, key(inner) if key is not None else None

    return key_in


#: limit on groups that are merged because the order mixes their samples. A dataset keeps only a
#: few groups open, and one worker's share must not grow without bound.
MIXED = 8


class Groups:
    """Finds where groups begin in the sampler's order.

    Groups that the order mixes, as a shuffle buffer does, are merged. A worker that keeps both open
    opens each once, and a worker that keeps only the last one open loses nothing. Two groups are
    mixed if one begins before the last sample of the other, within one batch.
    """

    def __init__(self, key: Key) -> None:
        self._key = key
        self._together: set[Any] = set()  # the keys of the current merged group

    def begins(self, indices: Any) -> bytes:
        """A byte for each index: 1 if a new group begins there, also compared with the previous
        batch."""
        keys = [self._key_of(index) for index in indices]
        last = {key: at for at, key in enumerate(keys)}
        out, end = bytearray(), -1
        for at, key in enumerate(keys):
            goes_on = key in self._together or (at <= end and len(self._together) < MIXED)
            if not goes_on:
                self._together, end = set(), -1
            self._together.add(key)
            end = max(end, last[key])
            out.append(not goes_on)
        return bytes(out)

    def _key_of(self, index: Any) -> Hashable:
        try:
            key = self._key(index)
            hash(key)
            return key
        except StopIteration as error:
            # a for loop would take it for the end of the epoch
            text = f"locality_key({index!r}) of the dataset raised StopIteration"
            raise RuntimeError(text) from error
        except Exception as error:
            add_note(error, f"It was raised for locality_key({index!r}) of the dataset.")
            raise


def groups_of(loader: Any) -> Groups | None:
    """The groups in a loader's order, if its dataset defines them."""
    key = key_of(loader.dataset) if loader._auto_collation else None
    return Groups(key) if key is not None else None
