"""``check_determinism()``: does a sample depend on more than seed, epoch and position?

Seeding per sample controls the global generators and those found inside the dataset, so their
values do not depend on which worker runs when. It cannot reach a generator in a module or class, a
counter, or the system's entropy. With these, samples differ when they are made in another order;
this check finds that before a training run does.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import pickle
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from .dataset_calls import fetches_batches
from .errors import add_note
from .iterators.dataset_hints import hint_method, takes
from .loader import DataLoader
from .remote import Ray, each_node
from .seeding.find_generators import Growing, find_all, global_keys
from .seeding.generator_states import Draws, SampleSeed, sample_seed, state_of
from .seeding.order_generators import GENERATORS
from .workers.fetch_or_skip import fetched

#: number of samples whose hint is compared with their draws
HINTED = 8
#: samples per call if the dataset offers __getitems__, which is seeded by batch
CHUNK = 8
_BASE_SEED = 0x6D696E61746F


@dataclasses.dataclass(frozen=True)
class DeterminismReport:
    """Result of ``check_determinism``; true if no sample differed, and printable.

    Attributes:
        samples: how many samples were made, in each order.
        fields: the parts of a sample that differed (``"['image']"``, ``"[0]"``), each with
            the number of samples in which it differed.
        indices: dataset indices of the samples that differed, ascending.
        repeatable: whether a second fresh worker made the same samples in the same order.
        suspects: names of generators that seeding does not reach and that moved meanwhile.
        found: types of the dataset's private generators, which are seeded.
        kept: generators from which a part draws that a cache keeps (``memoize``, or ``read`` and
            ``decode`` with ``cache=``). Later epochs get the same numbers.
        hints: libraries ("random", "numpy", "torch") from which ``cost_hint`` draws something else
            than the sample draws first.
        nodes: with ``remote=``: nodes that make other samples than the trainer's.
    """

    samples: int
    fields: Mapping[str, int]
    indices: tuple[int, ...]
    repeatable: bool
    suspects: tuple[str, ...]
    found: tuple[str, ...]
    hints: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not (self.fields or self.hints or self.kept or self.nodes)

    def __str__(self) -> str:
        said = f"{self.samples} samples are the same in either order."
        if self.fields:
            names = ", ".join(f"{name} ({count})" for name, count in self.fields.items())
            said = (
                f"{len(self.indices)} of {self.samples} samples depend on more than seed, epoch "
                f"and position. Fields that differ (in how many samples): {names}. "
                f"{self._cause()}"
            )
        if self.hints:
            said += (
                f" cost_hint() draws from {' and '.join(self.hints)} what its sample does not draw "
                "first, so it predicts another sample's cost. Draw in cost_hint() what "
                "__getitem__ draws first, with the same calls in the same order."
            )
        if self.nodes:
            said += (
                f" Other samples than the trainer's are made on {', '.join(self.nodes)}: another "
                "processor, library or data set there."
            )
        if self.kept:
            said += (
                f" Random numbers are drawn from {', '.join(self.kept)}: with the cache, each epoch "
                "gets the numbers of the first one. Draw them outside of that part."
            )
        return said

    def _cause(self) -> str:
        if self.suspects:
            return (
                "Likely cause: a generator that seeding does not reach: "
                f"{', '.join(self.suspects)}. Keep it in an attribute of the dataset, or give "
                "the dataset a method seed_sample(seed)."
            )
        if not self.repeatable:
            return (
                "They differ even between two fresh workers in the same order. Likely causes: the "
                "system's entropy (a generator without a seed that the dataset makes in its first "
                "sample, or in each; secrets; uuid4), the time, the order of a set, or threads."
            )
        return (
            "No known generator moved. Likely causes: what the dataset makes in its first sample, "
            "which is another one in each worker (a generator, a table of random numbers; make "
            "them in __init__), a counter or a cache that it carries from sample to sample, or a "
            "generator inside a C library, which its method seed_sample(seed) can reset."
        )


def check_determinism(
    dataset: Dataset[Any],
    samples: int = 64,
    *,
    worker_init_fn: Callable[[int], None] | None = None,
    multiprocessing_context: Any = None,
    remote: Ray | None = None,
) -> DeterminismReport:
    """Makes samples in two orders in fresh workers and reports which fields differ.

    Three workers, one after the other, each make the same samples with the same seeds:
    forwards, forwards again, backwards.

    Args:
        dataset: map-style, with a length.
        samples: how many indices to try, spread evenly over the dataset; at least 2.
        worker_init_fn: as for the loader.
        multiprocessing_context: as for the loader.
        remote: as for the loader: compares the samples of each node of the cluster, too.

    Raises:
        TypeError: for an iterable dataset, whose samples depend on each other.
        ValueError: for fewer than two samples.
        Exception: any error of the dataset, as the loader would raise it.
    """
    if isinstance(dataset, IterableDataset):
        raise TypeError("check_determinism needs a map-style dataset: an iterable has one order")
    length = len(dataset)  # type: ignore[arg-type]
    count = min(samples, length)
    if count < 2:
        raise ValueError(
            f"check_determinism compares two orders and needs two samples or more, but "
            f"{'the dataset has' if length < samples else 'samples is'} {count}"
        )
    indices = [k * length // count for k in range(count)]
    chunk = CHUNK if fetches_batches(dataset) else 1
    units = [indices[k : k + chunk] for k in range(0, count, chunk)]

    def run(order: range, on: Ray | None = None) -> _Made:
        loader: DataLoader[Any] = DataLoader(
            _Probe(dataset, units, order),
            batch_size=None,
            num_workers=1,
            collate_fn=tuple,  # it is one
            worker_init_fn=None if worker_init_fn is None else partial(_init, worker_init_fn),
            multiprocessing_context=None if on is not None else multiprocessing_context,
            remote=on,
            seed_per_sample=False,  # the probe does it
        )
        made: _Made
        (made,) = list(loader)
        return made

    forwards, moved, found, hints, kept = run(range(len(units)))
    again = run(range(len(units)))[0]
    backwards, moved_too, _, _, _ = run(range(len(units) - 1, -1, -1))
    report = _compare(indices, forwards, again, backwards, [*moved, *moved_too], found)
    nodes = each_node(remote) if remote is not None else {}
    other = [name for name, node in nodes.items() if run(range(len(units)), node)[0] != forwards]
    return dataclasses.replace(report, hints=tuple(hints), kept=tuple(kept), nodes=tuple(other))


_Sample = dict[str, bytes]
#: the samples, generators that moved, those that are seeded, and DeterminismReport's hints and kept
_Made = tuple[list[_Sample], list[str], list[str], list[str], list[str]]


def _compare(
    indices: list[int],
    forwards: list[_Sample],
    again: list[_Sample],
    backwards: list[_Sample],
    moved: list[str],
    found: list[str],
) -> DeterminismReport:
    fields: Counter[str] = Counter()
    wrong = []
    for index, *made in zip(indices, forwards, again, backwards, strict=True):
        names = {name for sample in made for name in sample}
        differ = {name for name in names if len({s.get(name) for s in made}) > 1}
        fields.update(sorted(differ))
        if differ:
            wrong.append(index)
    return DeterminismReport(
        samples=len(indices),
        fields=dict(fields.most_common()),
        indices=tuple(sorted(wrong)),
        repeatable=forwards == again,
        suspects=tuple(dict.fromkeys(moved)),
        found=tuple(found),
    )


# ---- in the worker ---------------------------------------------------------------------


def _show(dataset: Any) -> None:
    """Sets the dataset in get_worker_info(), so that the program's code can change it there."""
    info = get_worker_info()
    if info is not None:
        object.__setattr__(info, "dataset", dataset)  # it refuses ordinary assignment


def _init(worker_init_fn: Callable[[int], None], number: int) -> None:
    info: Any = get_worker_info()
    _show(info.dataset.dataset)
    worker_init_fn(number)


class _Probe(Dataset[Any]):
    """A dataset of one item: digests of the fields of all samples, made in the given order."""

    auto_collation = True

    def __init__(self, dataset: Any, units: list[list[int]], order: range) -> None:
        self.dataset = dataset
        self.units = units
        self.order = order

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _zero: int) -> _Made:
        from .cache.datasets import draws_of  # not at import: few programs have a cache
        from .cache.memoize import made_each_time

        _show(self.dataset)
        with made_each_time() as drawn:  # a value that was found would be the same in any order
            made = self._make()
        drawn |= draws_of(self.dataset, [index for unit in self.units[:HINTED] for index in unit])
        return (*made, sorted(drawn))

    def _make(self) -> tuple[list[_Sample], list[str], list[str], list[str]]:
        seeder = Growing(self.dataset).seeder
        hidden = _hidden_generators(self.dataset)
        before = {name: _fingerprint(g) for name, g in hidden.items()}
        made: list[list[_Sample]] = [[] for _ in self.units]
        position = [0, *accumulate(map(len, self.units))]
        for number in self.order:
            unit = self.units[number]
            try:
                samples = fetched(seeder, self, unit, (_BASE_SEED, 0, number, position[number]))
            except Exception as error:
                add_note(error, f"It was raised for sample index {str(unit).strip('[]')}.")
                raise
            if not isinstance(samples, list) or len(samples) != len(unit):
                samples = [samples] * len(unit)  # a whole batch: a difference may be in any sample
            made[number] = [_digests(sample) for sample in samples]
        moved = [name for name, g in hidden.items() if _fingerprint(g) != before[name]]
        found = [type(g).__name__ for g in find_all((self.dataset,)).generators]
        hints = self._hints_differ(seeder, position)
        return [sample for unit in made for sample in unit], moved, found, hints

    def _hints_differ(self, seeder: Any, position: list[int]) -> list[str]:
        """Libraries from which hints draw something else than their samples."""
        hint = hint_method(self.dataset)
        if hint is None or not takes(hint)[0] or fetches_batches(self.dataset):
            return []
        differ: dict[str, None] = {}
        for number, (index,) in enumerate(self.units[:HINTED]):
            place = _BASE_SEED, 0, position[number]
            targets = drawn_by(hint, index, sample_seed(*seeder.sample(*place, 0)))
            make = partial(fetched, seeder, self, [index], (*place[:2], number, place[2]))
            differ.update(dict.fromkeys(differing(targets, make)))
        return list(differ)


def _fingerprint(generator: Any) -> bytes:
    return hashlib.sha1(pickle.dumps(state_of(generator))).digest()


def _key(generator: Any) -> int:
    """Identity of a generator; two Generators with one bit generator count as one."""
    inner = getattr(generator, "bit_generator", None)
    return id(generator if inner is None else inner)


def _places() -> Iterator[tuple[str, Any]]:
    """Values held by modules and classes, with their names; then all objects, without a name."""
    for module_name, module in list(sys.modules.items()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            yield f"{module_name}.{name}", value
            # type(), not isinstance: isinstance asks the object, and some objects then warn
            if issubclass(type(value), type) and value.__module__ == module_name:
                for member, held in list(vars(value).items()):
                    yield f"{module_name}.{name}.{member}", held
    for value in gc.get_objects():
        yield "", value


def _hidden_generators(dataset: Any) -> dict[str, Any]:
    """Generators of this process that seeding per sample does not reach, by name."""
    seeded = {_key(g) for g in find_all((dataset,)).generators} | global_keys()
    hidden: dict[str, Any] = {}
    for name, value in _places():
        kind = type(value)
        is_generator = issubclass(kind, GENERATORS) and not issubclass(kind, random.SystemRandom)
        if not is_generator or _key(value) in seeded:
            continue
        try:
            _fingerprint(value)
        except Exception:  # a generator with an unreadable state cannot be compared
            continue
        seeded.add(_key(value))
        what = f"{kind.__module__.split('.')[0]} {kind.__qualname__}"
        hidden[f"{name} ({what})" if name else f"a {what} without a name"] = value
    return hidden


def _digests(sample: Any, path: str = "") -> _Sample:
    """A digest of every leaf of a sample, by its path."""
    if isinstance(sample, Mapping):
        parts = [(f"[{key!r}]", value) for key, value in sample.items()]
    elif isinstance(sample, tuple) and hasattr(sample, "_fields"):
        parts = [(f".{name}", value) for name, value in zip(sample._fields, sample)]
    elif isinstance(sample, list | tuple):
        parts = [(f"[{number}]", value) for number, value in enumerate(sample)]
    elif dataclasses.is_dataclass(sample) and not isinstance(sample, type):
        fields = dataclasses.fields(sample)
        parts = [(f".{f.name}", getattr(sample, f.name)) for f in fields]
    else:
        return {path or "the sample": _leaf(sample)}
    found = {f"{path} (length)" if path else "the length": str(len(parts)).encode()}
    for name, value in parts:
        found.update(_digests(value, path + name))
    return found


def _leaf(value: Any) -> bytes:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        data = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        text = f"{data.dtype} {tuple(data.shape)}".encode()
        raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        text, raw = f"{value.dtype} {value.shape}".encode(), value.tobytes()
    else:
        text = f"{type(value).__module__}.{type(value).__qualname__}".encode()
        try:
            raw = pickle.dumps(value)
        except Exception:  # then only its type can be compared
            raw = b""
    return hashlib.sha1(text + b"\0" + raw).digest()


# ---- does cost_hint() draw the numbers that its sample draws first? ---------------------------
#
# The states in which a hint leaves the generators are noted, and looked for while the sample is
# made.

_State = tuple[Any, ...]


def _of_numpy(generator: Any) -> _State:
    _, key, pos, *_rest = generator.get_state()
    return (*key.tolist(), pos)


#: by attribute of Draws: how to read a state (torch's without the seed), and the generator that the
#: sample draws from
_LIBRARIES: dict[str, tuple[Callable[[Any], _State], Callable[[], Any]]] = {
    "random": (lambda one: tuple(one.getstate()[1]), lambda: random._inst),  # type: ignore[attr-defined]
    "numpy": (_of_numpy, lambda: np.random.mtrand._rand),  # type: ignore[attr-defined]
    "torch": (lambda one: (one.get_state().numpy().tobytes()[8:],), lambda: torch.default_generator),
}


def drawn_by(hint: Callable[..., Any], index: int, seed: SampleSeed) -> dict[str, _State]:
    """Asks for a hint. Returns the states of the generators that the hint has drawn from."""
    used: list[Draws] = []
    original = Draws.__init__

    def noted(self: Draws, key: tuple[int, int]) -> None:
        original(self, key)
        used[:] = [self]

    Draws.__init__ = noted  # type: ignore[method-assign]
    try:
        hint(index, seed=seed)
    finally:
        Draws.__init__ = original  # type: ignore[method-assign]
    made = vars(used[0]) if used else {}
    unused, found = Draws(seed.key), {}
    for name, (read, _find) in _LIBRARIES.items():
        if name in made and (state := read(made[name])) != read(getattr(unused, name)):
            found[name] = state
    return found


def differing(targets: dict[str, _State], make: Callable[[], Any]) -> list[str]:
    """Makes a sample. Returns the generators of ``drawn_by`` that do not reach their state."""
    missing = dict(targets)

    def look() -> None:
        for name, target in list(missing.items()):
            read, find = _LIBRARIES[name]
            state = read(find())
            # a profiler does not see each call of NumPy's
            passed = name == "numpy" and state[:-1] == target[:-1] and state[-1] > target[-1]
            if state == target or passed:
                del missing[name]

    def event(_frame: Any, what: str, _arg: Any) -> None:
        if what in ("c_return", "return"):
            look()

    before = sys.getprofile()
    sys.setprofile(event)
    try:
        make()
    finally:
        sys.setprofile(before)
    look()
    return list(missing)
